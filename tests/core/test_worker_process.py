"""The real worker process over pipes (spec sections 28 and 31): start, a run, and each way it can end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest
from swactor_core.codec import MessageCodec
from swactor_core.faults import (
    RoleFailure,
    StepFailure,
    UninstallReason,
    WorkerFatalReason,
    WorkerStoppedReason,
)
from swactor_core.machines.worker_effects import ExitCode
from swactor_core.messages import (
    InitializeWorker,
    LoadPhase,
    ObjectLoaded,
    ResetRole,
    RingQuiesced,
    RingWritable,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    RoleReset,
    ShutdownMode,
    ShutdownWorker,
    StepCompleted,
    StepFailed,
    UninstallRing,
    WorkerFatal,
    WorkerReady,
    WorkerStopped,
)
from swactor_core.specs import OBJECT_HEADER_BYTES, RingDirection
from swactor_testing.echo import reference_tokens
from swactor_testing.worker_kit import (
    CEILING,
    GENERATION,
    IN_RING,
    OUT_RING,
    ROLE,
    WAIT,
    NodeConsumer,
    NodeProducer,
    WorkerProcess,
    activation_spec,
    configure,
    execute,
    record,
    stage_config,
    token_spec,
)

PROMPT = [5, 17, 99, 3]
GRACEFUL = ShutdownWorker(ShutdownMode.GRACEFUL)
ABORT = ShutdownWorker(ShutdownMode.ABORT_IN_FLIGHT)


def tokens(*ids: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in ids)


def running(worker: WorkerProcess, settings: dict[str, object] | None = None) -> None:
    worker.initialize(settings)
    ready = worker.expect(WorkerReady)
    assert ready == WorkerReady(worker.process.pid, GENERATION, worker.plugin.abi, ready.backend)


def test_one_run_of_a_whole_model_and_its_orderly_end() -> None:
    with WorkerProcess() as worker:
        running(worker)
        worker.send(configure(stage_config(0, 4)))
        worker.expect(RoleConfigured)
        producer = NodeProducer(worker.install(RingDirection.INGRESS, token_spec(64), capacity=33), worker)
        consumer = NodeConsumer(worker.install(RingDirection.EGRESS, token_spec(1), capacity=29), worker)
        generated: list[int] = []
        position, batch = 0, PROMPT
        for sequence in range(6):
            producer.write(record(sequence, sequence, tokens(*batch)))
            while not worker.said(ObjectLoaded, sequence + 1):
                event = worker.next_event()
                if isinstance(event, RingWritable):
                    producer.on_writable(event)
            loaded = worker.said(ObjectLoaded, sequence + 1)[-1]
            worker.send(execute(loaded, 4, position=position, step=sequence))
            while not worker.said(StepCompleted, sequence + 1):
                worker.next_event()
                consumer.read(chunk=7)
            data = consumer.read()
            assert len(data) == (sequence + 1) * (OBJECT_HEADER_BYTES + 4)
            position += len(batch)
            generated.append(int.from_bytes(data[-4:], "little"))
            batch = generated[-1:]
        assert generated == reference_tokens(PROMPT, 6, num_layers=4, vocab_size=101)
        for ring_id in (IN_RING, OUT_RING):
            worker.send(UninstallRing(ring_id, UninstallReason.EDGE_STOPPED))
            assert worker.expect(RingQuiesced).ring_id == ring_id
        worker.send(ResetRole(ROLE))
        worker.expect(RoleReset)
        worker.send(GRACEFUL)
        assert worker.expect(WorkerStopped).reason is WorkerStoppedReason.GRACEFUL
        with pytest.raises(EOFError):
            worker.next_event()
        assert worker.exit_code() == ExitCode.STOPPED
        assert worker.log() == ""


def test_progress_is_reported_first_and_last_and_before_role_configured() -> None:
    with WorkerProcess() as worker:
        running(worker)
        worker.send(configure(stage_config(1, 3)))
        worker.expect(RoleConfigured)
        progress = [event for event in worker.events if isinstance(event, RoleProgress)]
        assert progress[0] == RoleProgress(ROLE, LoadPhase.WEIGHTS, 0, 2)
        assert progress[-2:] == [
            RoleProgress(ROLE, LoadPhase.WEIGHTS, 2, 2),
            RoleProgress(ROLE, LoadPhase.READY, 1, 1),
        ]
        assert isinstance(worker.events[-1], RoleConfigured)


def test_end_of_stdin_ends_the_process_at_once() -> None:
    with WorkerProcess() as worker:
        running(worker)
        worker.stdin.close()
        assert worker.exit_code() == ExitCode.CONTROL_LOST


def test_end_of_stdin_before_initialize_ends_the_process() -> None:
    with WorkerProcess() as worker:
        worker.stdin.close()
        assert worker.exit_code() == ExitCode.CONTROL_LOST


@pytest.mark.parametrize("hold", ["configure", "execute"])
def test_end_of_stdin_is_noticed_during_a_long_call(hold: str) -> None:
    with WorkerProcess() as worker:
        held(worker, hold)
        worker.stdin.close()
        assert worker.exit_code() == ExitCode.CONTROL_LOST


def held(worker: WorkerProcess, hold: str) -> None:
    """Leaves the worker inside a configure or execute that only an abort ends."""
    running(worker, {"hold": hold})
    worker.send(configure(stage_config(0, 4)))
    if hold == "configure":
        worker.expect(RoleProgress)
        return
    worker.expect(RoleConfigured)
    producer = NodeProducer(worker.install(RingDirection.INGRESS, token_spec(64), capacity=256), worker)
    worker.install(RingDirection.EGRESS, token_spec(1), capacity=256)
    producer.write(record(0, 0, tokens(*PROMPT)))
    worker.send(execute(worker.expect(ObjectLoaded), 4, position=0))


def test_abort_in_flight_ends_a_long_configure() -> None:
    with WorkerProcess() as worker:
        held(worker, "configure")
        worker.send(ABORT)
        assert worker.expect(RoleFailed).reason is RoleFailure.BACKEND_ERROR
        assert worker.expect(WorkerStopped).reason is WorkerStoppedReason.ABORT_IN_FLIGHT
        assert worker.exit_code() == ExitCode.STOPPED


def test_abort_in_flight_ends_a_long_step_and_quiesces_every_ring() -> None:
    with WorkerProcess() as worker:
        held(worker, "execute")
        worker.send(ABORT)
        assert worker.expect(StepFailed).reason is StepFailure.WORKER_SHUTTING_DOWN
        assert {worker.expect(RingQuiesced).ring_id for _ in range(2)} == {IN_RING, OUT_RING}
        assert worker.expect(WorkerStopped).reason is WorkerStoppedReason.ABORT_IN_FLIGHT
        assert worker.exit_code() == ExitCode.STOPPED


def test_graceful_shutdown_aborts_a_step_that_is_blocked_on_egress_space() -> None:
    with WorkerProcess() as worker:
        running(worker)
        worker.send(configure(stage_config(0, 2)))
        worker.expect(RoleConfigured)
        producer = NodeProducer(worker.install(RingDirection.INGRESS, token_spec(64), capacity=256), worker)
        worker.install(RingDirection.EGRESS, activation_spec(64, 8), capacity=100)
        producer.write(record(0, 0, tokens(*PROMPT)))
        worker.send(execute(worker.expect(ObjectLoaded), 4 * 8 * 4, position=0))
        worker.send(GRACEFUL)
        assert worker.expect(StepFailed).reason is StepFailure.WORKER_SHUTTING_DOWN
        assert worker.expect(WorkerStopped).reason is WorkerStoppedReason.GRACEFUL
        assert worker.exit_code() == ExitCode.STOPPED


@pytest.mark.parametrize(
    ("line", "detail"),
    [(b"{", "not JSON"), (b'{"type":"RingReadable","ring_id":"x"}', "RingReadable.ring_id")],
)
def test_a_malformed_line_is_fatal(line: bytes, detail: str) -> None:
    with WorkerProcess() as worker:
        running(worker)
        worker.write(line + b"\n")
        fatal = worker.expect(WorkerFatal)
        assert fatal.reason is WorkerFatalReason.MALFORMED_CONTROL_MESSAGE
        assert detail in fatal.detail
        assert worker.exit_code() == ExitCode.FATAL


def test_a_line_without_end_is_fatal_before_it_fills_the_memory() -> None:
    with WorkerProcess() as worker:
        running(worker)
        with pytest.raises(BrokenPipeError):
            worker.write(b"x" * (6 << 20))
        assert worker.expect(WorkerFatal).reason is WorkerFatalReason.MALFORMED_CONTROL_MESSAGE
        assert worker.exit_code() == ExitCode.FATAL


def test_a_command_before_initialize_is_fatal() -> None:
    with WorkerProcess() as worker:
        worker.send(ResetRole(ROLE))
        fatal = worker.expect(WorkerFatal)
        assert fatal.reason is WorkerFatalReason.MALFORMED_CONTROL_MESSAGE
        assert fatal.detail == "ResetRole is not allowed while Booting"
        assert worker.exit_code() == ExitCode.FATAL


def test_another_ring_helper_abi_is_refused_before_the_arena_is_touched() -> None:
    with WorkerProcess(environment={"SWACTOR_ARENA_FD": "999"}) as worker:
        worker.send(InitializeWorker(GENERATION, CEILING, worker.plugin.abi + 1, {}))
        fatal = worker.expect(WorkerFatal)
        assert fatal.reason is WorkerFatalReason.RING_HELPER_ABI_MISMATCH
        assert worker.exit_code() == ExitCode.FATAL


@pytest.mark.parametrize(
    ("environment", "detail"),
    [
        ({"SWACTOR_ARENA_FD": "999"}, "999"),
        ({"SWACTOR_ARENA_FD": "1e3"}, "SWACTOR_ARENA_FD is '1e3'"),
        ({"SWACTOR_ARENA_BYTES": "12"}, "SWACTOR_ARENA_BYTES is 12, InitializeWorker says 1048576"),
    ],
)
def test_an_arena_that_cannot_be_mapped_is_fatal(environment: dict[str, str], detail: str) -> None:
    with WorkerProcess(environment=environment) as worker:
        worker.initialize()
        fatal = worker.expect(WorkerFatal)
        assert fatal.reason is WorkerFatalReason.ARENA_MAP_FAILED
        assert detail in fatal.detail
        assert worker.exit_code() == ExitCode.FATAL
        assert "Traceback" not in worker.log()


def test_a_missing_worker_plugin_is_fatal_and_names_the_remedy() -> None:
    with WorkerProcess("no-such-backend") as worker:
        worker.initialize()
        fatal = worker.expect(WorkerFatal)
        assert fatal.reason is WorkerFatalReason.BACKEND_INIT_FAILED
        assert "no worker plug-in named 'no-such-backend'" in fatal.detail
        assert "hint: " in fatal.detail
        assert worker.exit_code() == ExitCode.FATAL


def test_a_blocked_plugin_is_not_loaded() -> None:
    with WorkerProcess(arguments=["--block-plugin", "swactor-testing"]) as worker:
        worker.initialize()
        fatal = worker.expect(WorkerFatal)
        assert fatal.reason is WorkerFatalReason.BACKEND_INIT_FAILED
        assert "blocked by configuration" in fatal.detail


def test_only_the_modules_that_are_told_are_loaded() -> None:
    told = ["--plugin-module=swactor_arena.plugin", "--plugin-module=swactor_testing.plugin"]
    with WorkerProcess(arguments=told) as worker:
        worker.initialize()
        worker.expect(WorkerReady)
    with WorkerProcess(arguments=told[:1]) as worker:
        worker.initialize()
        assert "no worker plug-in named 'echo'" in worker.expect(WorkerFatal).detail


def test_wrong_backend_settings_are_fatal_with_message_and_hint() -> None:
    with WorkerProcess() as worker:
        worker.initialize({"speed": 11})
        fatal = worker.expect(WorkerFatal)
        assert fatal.reason is WorkerFatalReason.BACKEND_INIT_FAILED
        assert fatal.detail.startswith("echo has no setting 'speed' (hint: it has memory_bytes, copy_polls,")
        assert fatal.detail.endswith(" and hold)")
        assert "Traceback" not in worker.log()


def test_sigint_is_left_to_the_node_and_sigterm_ends_the_process() -> None:
    with WorkerProcess() as worker:
        running(worker)
        worker.process.send_signal(signal.SIGINT)
        worker.send(configure(stage_config(0, 4)))
        worker.expect(RoleConfigured)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.exit_code() == -signal.SIGTERM


def test_an_unread_and_then_closed_stdout_ends_the_process() -> None:
    with WorkerProcess() as worker:
        running(worker)
        worker.stdout.close()
        worker.send(ResetRole(ROLE))
        assert worker.exit_code() == ExitCode.CONTROL_LOST


def test_a_wrong_command_line_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "swactor_core.worker", "--arena", "memfd"]
    done = subprocess.run(command, capture_output=True, timeout=WAIT, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "--worker" in done.stderr
    assert done.stdout == ""


def test_a_worker_whose_parent_is_another_process_does_not_start() -> None:
    with WorkerProcess(arguments=["--parent-pid", "1"]) as worker:
        assert worker.exit_code() == ExitCode.CONTROL_LOST
        assert "is not its parent any more" in worker.log()


def test_the_worker_dies_with_its_node_even_when_the_pipes_stay_open() -> None:
    """The test holds the pipes of a stand-in's worker; after the stand-in only the kernel can end it."""
    commands_read, commands_write = os.pipe()
    events_read, events_write = os.pipe()
    stand_in = textwrap.dedent(
        """
        import subprocess, sys
        commands, events, arena = map(int, sys.argv[1:])
        subprocess.Popen(
            [sys.executable, "-m", "swactor_core.worker", "--worker", "echo", "--arena", "memfd"],
            stdin=commands, stdout=events, pass_fds=(arena,),
        )
        sys.stdin.read()
        """
    )
    with WorkerProcess() as lender:
        descriptors = (commands_read, events_write, lender.arena.fd)
        with subprocess.Popen(
            [sys.executable, "-c", stand_in, *map(str, descriptors)],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
            env={
                **os.environ,
                "SWACTOR_ARENA_FD": str(lender.arena.fd),
                "SWACTOR_ARENA_BYTES": str(CEILING),
            },
        ) as node:
            os.close(commands_read)
            os.close(events_write)
            initialize = InitializeWorker(GENERATION, CEILING, lender.plugin.abi, {})
            os.write(commands_write, MessageCodec([InitializeWorker]).encode(initialize) + b"\n")
            assert readable(events_read)
            assert b"WorkerReady" in os.read(events_read, 1 << 16)
            node.kill()
            node.wait(WAIT)
        assert readable(events_read)
        assert os.read(events_read, 1 << 16) == b""
    os.close(commands_write)
    os.close(events_read)


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], WAIT)[0])


def test_a_library_that_prints_does_not_reach_the_event_stream() -> None:
    program = textwrap.dedent(
        """
        import os, subprocess, sys
        from swactor_core.worker import __main__ as entry
        from swactor_testing import echo

        class Noisy(echo.EchoBackend):
            def facts(self):
                print("from python")
                os.write(1, b"from C\\n")
                subprocess.run(["echo", "from a child"], check=True)
                print("read:", repr(sys.stdin.read()))
                return super().facts()

        echo.EchoBackend = Noisy
        sys.exit(entry.main(sys.argv[1:]))
        """
    )
    with WorkerProcess() as reference:
        environment = {
            **os.environ,
            "SWACTOR_ARENA_FD": str(reference.arena.fd),
            "SWACTOR_ARENA_BYTES": str(CEILING),
        }
        initialize = {
            "type": "InitializeWorker",
            "worker_generation": 1,
            "arena_ceiling": CEILING,
            "required_ring_helper_abi": reference.plugin.abi,
            "backend": {},
        }
        done = subprocess.run(
            [sys.executable, "-c", program, "--worker", "echo", "--arena", "memfd"],
            input=json.dumps(initialize) + "\n" + '{"type":"ShutdownWorker","mode":"Graceful"}\n',
            capture_output=True,
            timeout=WAIT,
            text=True,
            env=environment,
            pass_fds=(reference.arena.fd,),
        )
    assert [json.loads(line)["type"] for line in done.stdout.splitlines()] == ["WorkerReady", "WorkerStopped"]
    for text in ("from python", "from C", "from a child", "read: ''"):
        assert text in done.stderr
    assert done.returncode == ExitCode.STOPPED
