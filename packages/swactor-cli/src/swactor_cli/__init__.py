"""Command line of swactor: run, node, plan, plugins, doctor."""
