"""Transport mock `memory`: endpoints of one process, with exact credit and faults by script."""
