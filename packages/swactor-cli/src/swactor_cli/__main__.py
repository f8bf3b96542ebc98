"""`python -m swactor_cli`."""

try:
    from swactor_cli.entry import main
except KeyboardInterrupt:
    raise SystemExit(130) from None

main()
