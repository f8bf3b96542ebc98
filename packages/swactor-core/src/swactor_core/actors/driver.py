"""Hosts one machine as an actor: steps it with the clock, performs all its actions before the next step.

Must not know any particular machine: effects are its owner's to perform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swactor_core.actors.system import ActorSystem
from swactor_core.fsm import CancelTimer, Effect, Emit, Machine, Send, SetTimer
from swactor_core.messages import Address
from swactor_core.observe.bus import EventBus


class MachineActor:
    """`perform(effect)` is the owner's adapter; it must not step this machine itself, only tell its address.
    `route` may take a Send for an address where no actor lives; it returns True when it has."""

    def __init__(
        self,
        system: ActorSystem,
        address: Address,
        *,
        machine: Machine[Any],
        bus: EventBus,
        perform: Callable[[Effect], None] | None = None,
        route: Callable[[Send], bool] | None = None,
        defaults: dict[str, Any] | None = None,
    ) -> None:
        self.system = system
        self.address = address
        self.machine = machine
        self._bus = bus
        self._perform = perform
        self._route = route
        self._defaults = defaults or {}

    def receive(self, message: object) -> None:
        system = self.system
        for action in self.machine.step(message, system.now()):
            # In the order of how often they come on a token's way; `match` takes twice as long.
            if isinstance(action, Send):
                if self._route is None or system.lives(action.to) or not self._route(action):
                    system.tell(action.to, action.message)
            elif isinstance(action, Emit):
                if self._bus.wants(action.name):
                    self._bus.emit(action.name, {**self._defaults, **action.fields})
            elif isinstance(action, Effect):
                assert self._perform is not None, f"{self.machine.NAME} has no adapter for {action}"
                self._perform(action)
            elif isinstance(action, SetTimer):
                system.set_timer(self.address, action.name, action.generation, at=action.at)
            elif isinstance(action, CancelTimer):
                system.cancel_timer(self.address, action.name)
