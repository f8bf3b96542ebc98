"""One backend of each kind for all tests of this folder: opening and compiling take most of the time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def backend() -> Iterator[Any]:
    from swactor_worker_tinygrad import create

    made = create({"device": "CPU"})
    yield made
    made.close()


@pytest.fixture(scope="session")
def graph_backend() -> Iterator[Any]:
    from swactor_worker_tinygrad import create

    made = create({"device": "CPU", "kernels": "graph"})
    yield made
    made.close()


@pytest.fixture(params=["backend", "graph_backend"])
def either(request: pytest.FixtureRequest) -> Any:
    """Both ways of computing a stage."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def packed_backend() -> Iterator[Any]:
    from swactor_worker_tinygrad import create

    made = create({"device": "CPU", "weights": "packed"})
    yield made
    made.close()


@pytest.fixture(scope="session")
def fast_backend() -> Iterator[Any]:
    from swactor_worker_tinygrad import create

    made = create({"device": "CPU", "numerics": "fast"})
    yield made
    made.close()


@pytest.fixture(scope="module")
def kernels(backend: Any) -> Any:
    from swactor_worker_tinygrad.native import Kernels

    return Kernels()


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest, kernels: Any) -> Iterator[Any]:
    from swactor_worker_tinygrad.native import Team

    made = Team(kernels, request.param)
    yield made
    made.close()
