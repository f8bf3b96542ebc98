"""Lifecycle events (spec section 40): names, identities, and their JSON form.

Everything an operator or a test learns of a run is here; log text is never scraped. `time` is wall-clock
nanoseconds for people, `number` orders the events of one process.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any

from swactor_core.ids import NodeId, node_hex
from swactor_core.values import frozen


class EventName(StrEnum):
    NODE_STARTED = "node_started"
    NODE_AVAILABLE = "node_available"
    NODE_FAULTED = "node_faulted"
    POOL_READY = "pool_ready"
    POOL_LOST = "pool_lost"
    RUN_PLANNED = "run_planned"
    STAGE_PROVISION_STARTED = "stage_provision_started"
    WEIGHTS_DOWNLOAD_STARTED = "weights_download_started"
    WEIGHTS_DOWNLOADED = "weights_downloaded"
    WEIGHTS_LOADED = "weights_loaded"
    EDGE_PROVISION_STARTED = "edge_provision_started"
    EDGE_READY = "edge_ready"
    STAGE_READY = "stage_ready"
    READINESS_BARRIER_PASSED = "readiness_barrier_passed"
    PROMPT_INJECTED = "prompt_injected"
    OBJECT_LOADED = "object_loaded"
    EXECUTE_STEP_STARTED = "execute_step_started"
    OBJECT_PRODUCED = "object_produced"
    STEP_COMPLETED = "step_completed"
    TOKEN_RECEIVED = "token_received"
    RUN_COMPLETED = "run_completed"
    RUN_FAULTED = "run_faulted"
    RUN_STOPPED = "run_stopped"
    STOP_RUN_SENT = "stop_run_sent"
    STAGE_FAULTED = "stage_faulted"
    STAGE_STOPPED = "stage_stopped"
    TEARDOWN_TIMED_OUT = "teardown_timed_out"
    RUN_TORN_DOWN = "run_torn_down"
    RING_LEASED = "ring_leased"
    RING_RELEASED = "ring_released"
    EDGE_REFUSED = "edge_refused"
    PROVISIONING_REFUSED = "provisioning_refused"
    WORKER_STARTED = "worker_started"
    WORKER_ENDED = "worker_ended"


OBJECT_EVENTS = frozenset(
    {
        EventName.OBJECT_LOADED,
        EventName.EXECUTE_STEP_STARTED,
        EventName.OBJECT_PRODUCED,
        EventName.STEP_COMPLETED,
    }
)


@frozen
class Event:
    """One lifecycle event. `fields` holds the identities it has (spec section 40) and its own facts."""

    name: EventName
    node_id: NodeId
    time: int
    number: int
    fields: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Flat and small: node ids as hexadecimal text, enums as their values."""
        return {
            "event": str(self.name),
            "time": self.time,
            "number": self.number,
            "node_id": node_hex(self.node_id),
            **self.fields,
        }
