"""Command line of swactor: `entry.main` is the script, `app.py` says which commands there are."""
