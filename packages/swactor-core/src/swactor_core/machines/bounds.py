"""Bounds of teardown (spec sections 36 and 38): what is said when one passes.

A teardown that could not be proved in time ends all the same; this is the one shape in which whoever waited
says so, but for the run, which has its last event for it. It changes no outcome.
"""

from __future__ import annotations

from typing import Any

from swactor_core.events import EventName
from swactor_core.faults import Component, FaultReason
from swactor_core.fsm import Emit


def teardown_timed_out(component: Component, missing: tuple[str, ...], **identities: Any) -> Emit:
    """`missing` names what did not end in time, a line each."""
    reason = {"reason": str(FaultReason.TEARDOWN_TIMEOUT), "component": str(component)}
    return Emit(EventName.TEARDOWN_TIMED_OUT, {**identities, **reason, "detail": "; ".join(missing)})
