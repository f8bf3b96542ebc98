"""What every contract is: tests that a plug-in's author inherits, and gives one fixture and one record.

Knows no kind. Asynchronous tests are marked for pytest-asyncio here, so that a contract runs in its strict
mode as in its automatic one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar

import pytest
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind, Provider

from swactor_testing.conformance.overtime import ends_within

P = TypeVar("P")
C = TypeVar("C")


class Contract(Generic[P, C]):
    """`capabilities` and the fixture `plugin` are the heir's. `plugin` is what the provider's factory
    returns; for a worker it is the factory itself."""

    kind: ClassVar[Kind]
    capabilities: C
    longest: ClassVar[float] = 120.0
    """Seconds after which a test is ended that a plug-in does not let end."""
    blocked: ClassVar[int] = 10
    """Seconds without a turn of the event loop after which what is called in it counts as blocking."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, function in vars(cls).items():
            if name.startswith("test_") and inspect.iscoroutinefunction(function):
                pytest.mark.asyncio(loop_scope="function")(function)

    @pytest.fixture(autouse=True)
    def _overtime(self) -> Iterator[None]:
        with ends_within(self.longest, blocked=self.blocked):
            yield

    @pytest.fixture
    def plugin(self) -> P:
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `plugin` with the part under test")

    def provider(self) -> Provider:
        """What is registered under the capabilities' name. Raises PluginError when it is not chosen so."""
        name: str = self.capabilities.provider  # type: ignore[attr-defined]  # every record has it
        return load_plugins().select(self.kind, name)
