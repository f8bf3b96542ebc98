"""The event stream (spec section 40): stamped once, in order, for every sink, and never a way to fail."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from swactor_core.errors import UsageError
from swactor_core.events import OBJECT_EVENTS, EventName
from swactor_core.faults import FaultReason
from swactor_core.ids import NodeId
from swactor_core.observe.bus import EventBus, JsonLinesSink

SPECIFIED = """
node_started node_available node_faulted pool_ready run_planned stage_provision_started
weights_download_started weights_downloaded weights_loaded edge_provision_started edge_ready stage_ready
readiness_barrier_passed prompt_injected object_loaded execute_step_started object_produced step_completed
token_received run_completed run_faulted stop_run_sent stage_stopped run_torn_down
"""
REQUIRED = SPECIFIED.split()


def bus_with_log(**options: Any) -> tuple[EventBus, list[dict[str, Any]]]:
    bus, log = EventBus(NodeId(0xAB), **options), []
    bus.add_sink(log.append)
    return bus, log


def test_every_required_event_has_its_name() -> None:
    assert set(REQUIRED) <= {str(name) for name in EventName}
    assert {str(name) for name in OBJECT_EVENTS} < set(REQUIRED)


def test_an_event_is_stamped_with_node_time_and_number() -> None:
    bus, log = bus_with_log()
    before = time.time_ns()
    bus.emit(EventName.EDGE_READY, {"edge_id": 6, "reason": FaultReason.INTERNAL})
    bus.emit(EventName.STAGE_READY, {})
    first, second = log
    assert before <= first.pop("time") <= second.pop("time") <= time.time_ns()
    assert first == {
        "event": "edge_ready",
        "number": 1,
        "node_id": "00000000000000ab",
        "edge_id": 6,
        "reason": "Internal",
    }
    assert second == {"event": "stage_ready", "number": 2, "node_id": "00000000000000ab"}
    assert json.loads(json.dumps(first)) == first


@pytest.mark.parametrize("name", sorted(OBJECT_EVENTS))
def test_events_of_objects_are_stamped_only_when_asked_for(name: EventName) -> None:
    quiet, silence = bus_with_log()
    quiet.emit(name, {})
    quiet.emit(EventName.STAGE_READY, {})
    assert [event["number"] for event in silence] == [1]
    assert not quiet.wants(name)
    assert quiet.wants(EventName.STAGE_READY)
    loud, log = bus_with_log(objects=True)
    loud.emit(name, {})
    assert loud.wants(name)
    assert [event["event"] for event in log] == [str(name)]


def test_events_that_nobody_hears_are_numbered_all_the_same() -> None:
    bus, log = EventBus(NodeId(1)), []
    bus.emit(EventName.STAGE_READY, {})
    bus.add_sink(log.append)
    bus.emit(EventName.STAGE_READY, {})
    bus.drop_sinks()
    bus.emit(EventName.STAGE_READY, {})
    bus.add_sink(log.append)
    bus.emit(EventName.STAGE_READY, {})
    assert [event["number"] for event in log] == [2, 4]


def test_a_sink_that_fails_is_counted_and_the_others_hear_on(caplog: pytest.LogCaptureFixture) -> None:
    bus, log = EventBus(NodeId(1)), []

    def broken(event: dict[str, Any]) -> None:
        raise OSError("disk full")

    bus.add_sink(broken)
    bus.add_sink(log.append)
    for _ in range(3):
        bus.emit(EventName.STAGE_READY, {})
    assert len(log) == 3
    assert bus.sink_failures == 3
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "an event sink fails, its events are lost"
    ]


def test_an_event_of_another_process_passes_as_it_is() -> None:
    bus, log = bus_with_log()
    other = {"event": "edge_ready", "node_id": "cd", "time": 1, "number": 40}
    bus.forward(other)
    bus.emit(EventName.STAGE_READY, {})
    assert log[0] == other
    assert log[1]["number"] == 1


def test_a_file_gets_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    bus, log = bus_with_log()
    sink = JsonLinesSink(str(path))
    bus.add_sink(sink)
    bus.emit(EventName.STAGE_FAULTED, {"detail": "two\nlines \u2028 and ü"})
    bus.emit(EventName.STAGE_READY, {})
    sink.close()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == log


def test_a_file_that_cannot_be_written_is_the_user_s_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory") as error:
        JsonLinesSink(str(tmp_path / "nowhere" / "events.jsonl"))
    assert error.value.hint == "name a file that can be written"
