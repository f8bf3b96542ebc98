"""`python -m swactor_cli`."""

from swactor_cli.app import main

main()
