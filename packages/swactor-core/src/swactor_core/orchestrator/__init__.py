"""Assembly of the orchestrator: pool gate, run, token endpoints, and local pools of managed nodes."""
