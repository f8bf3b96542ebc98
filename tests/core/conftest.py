"""Settings of the property tests: no wall-clock deadline, and a failing example that can be replayed; and the
contract modules of the machines, for tests that ask all of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # words and scenarios of the machines

settings.register_profile("swactor", deadline=None, print_blob=True)
settings.load_profile("swactor")


@pytest.fixture(scope="session")
def scenario_modules() -> list[ModuleType]:
    """The modules of this folder that tell a machine's scenarios, each loaded for this use alone."""
    modules = []
    for path in sorted(Path(__file__).parent.glob("test_*machine*.py")):
        spec = importlib.util.spec_from_file_location(f"scenarios_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        modules.append(module)
    return modules
