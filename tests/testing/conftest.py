"""Started endpoints of the memory transport, closed at the end of a test."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest_asyncio
from swactor_core.ids import EdgeId
from swactor_testing.memory.hub import HUB

sys.path.insert(0, str(Path(__file__).parent))

from memory_places import Place, know, make


@pytest_asyncio.fixture
async def place() -> AsyncIterator[Callable[..., Any]]:
    """`await place(name, …)`: started; closed at the end, and the hub is empty then."""
    places: list[Place] = []

    async def start(name: str, **options: Any) -> Place:
        made = make(name, **options)
        await made.transport.start()
        places.append(made)
        return made

    yield start
    await asyncio.gather(*(one.transport.close() for one in places))
    assert not HUB.endpoints
    assert HUB.break_after(EdgeId(1)) is None


@pytest_asyncio.fixture
async def pair(place: Any) -> tuple[Place, Place]:
    left, right = await place("left"), await place("right")
    know(left, right)
    return left, right
