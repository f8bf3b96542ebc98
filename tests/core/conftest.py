"""Settings of the property tests: no wall-clock deadline, and a failing example that can be replayed."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("swactor", deadline=None, print_blob=True)
settings.load_profile("swactor")
