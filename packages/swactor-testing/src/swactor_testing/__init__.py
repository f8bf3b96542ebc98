"""Mock plug-ins, contract kit and simulator for swactor."""
