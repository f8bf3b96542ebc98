"""Performs the worker machine's effects (spec section 31): where rings, device and role code meet.

Knows no pipe: commands come in through `take`, events leave through `emit`, so that the same harness runs in
the worker process and inside a test. Everything happens on the caller's thread, which is the device thread.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from swactor_core.errors import PluginError, RingError, SwactorError
from swactor_core.faults import WorkerFatalReason
from swactor_core.fsm import Action, InvalidTransition, Send
from swactor_core.ids import RingId
from swactor_core.machines.worker import WorkerMachine, WorkerState
from swactor_core.machines.worker_effects import (
    ArenaAttached,
    ArenaSelected,
    AttachArena,
    BackendCreated,
    BeginOutput,
    BuildRole,
    CloseBackend,
    CloseRole,
    Crashed,
    CreateBackend,
    Exit,
    ExitCode,
    FinishOutput,
    FreeDeviceObject,
    InitializeFailed,
    MalformedCommand,
    OpenRing,
    OutputBlocked,
    QuiesceRing,
    RingOpened,
    RingRefused,
    RunStep,
    SelectArena,
    WakeRing,
)
from swactor_core.messages import WORKER_COMMANDS, InstallRing, RingQuiesced
from swactor_core.specs import RingDirection
from swactor_core.spi.arena import ArenaPlugin, ArenaView
from swactor_core.spi.worker import StepInput, WorkerBackend
from swactor_core.values import frozen
from swactor_core.worker.rings import DeviceObjects, EgressEnd, IngressEnd
from swactor_core.worker.steps import StageHost, describe


@frozen
class Surroundings:
    """What a harness needs from its process. `arena` and `backend` may raise anything: it is reported with
    WorkerFatal. `attach(plugin, ceiling)` maps the inherited arena."""

    pid: int
    arena: Callable[[], ArenaPlugin]
    attach: Callable[[ArenaPlugin, int], ArenaView]
    backend: Callable[[dict[str, Any]], WorkerBackend]
    emit: Callable[[object], None]
    flush: Callable[[], None]
    should_abort: Callable[[], bool]


class Harness:
    """One worker from InitializeWorker to its exit code."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.exit_code: ExitCode | None = None
        self._outside = surroundings
        self._machine = WorkerMachine(surroundings.pid)
        self._events: deque[object] = deque()
        self._ends: dict[RingId, IngressEnd | EgressEnd] = {}
        self._finishing: EgressEnd | None = None
        self._plugin: ArenaPlugin
        self._arena: ArenaView
        self._objects: DeviceObjects
        self._stage: StageHost

    @property
    def state(self) -> WorkerState:
        return self._machine.state

    @property
    def copying(self) -> bool:
        """Some copy is in flight: call `progress` again soon, with or without commands."""
        return any(end.copying for end in self._ends.values())

    def take(self, event: object) -> None:
        """Handles a worker command, MalformedCommand or ControlClosed with everything that follows from it.

        Never raises: a forbidden command and an unexpected exception end the worker with WorkerFatal.
        """
        if not self._machine.accepts(type(event)) and isinstance(event, WORKER_COMMANDS):
            event = MalformedCommand(f"{type(event).__name__} is not allowed while {self._machine.state}")
        self._events.append(event)
        self._guarded(self._drain)

    def progress(self) -> None:
        """Observes copy completions and moves what they make movable."""
        self._guarded(self._pump_copying)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._events.clear()
            if self.exit_code is None:
                self._crash(describe(error))

    def _crash(self, detail: str) -> None:
        try:
            for action in self._machine.step(Crashed(detail), time.monotonic()):
                self._perform(action)
        except InvalidTransition:  # Fatal already, without an exit code: an effect of that very step raised
            self.exit_code = ExitCode.FATAL

    def _pump_copying(self) -> None:
        for end in [end for end in self._ends.values() if end.copying]:
            end.pump()
        self._drain()

    def _drain(self) -> None:
        while self.exit_code is None:
            if not self._events:
                if not self._output_blocked():
                    return
                continue
            for action in self._machine.step(self._events.popleft(), time.monotonic()):
                answer = self._perform(action)
                if answer is not None:
                    self._events.append(answer)

    def _output_blocked(self) -> bool:
        end = self._finishing
        if end is None or not end.blocked:
            return False
        self._finishing = None
        self._events.append(OutputBlocked(end.ring_id))
        return True

    def _report(self, message: object) -> None:
        if isinstance(message, RingQuiesced):
            del self._ends[message.ring_id]
        self._events.append(message)

    def _perform(self, action: Action) -> object | None:
        outside = self._outside
        match action:
            case Send():
                outside.emit(action.message)
            case WakeRing():
                self._ends[action.ring_id].wake()
            case RunStep():
                outside.flush()
                allocation = self._objects.allocation(action.handle)
                step = StepInput(allocation, action.extent, action.sequence, action.position)
                return self._stage.run(step, outside.should_abort)
            case BeginOutput():
                self._egress(action.ring_id).begin(action.header, self._stage.output)
            case FreeDeviceObject():
                self._objects.free(action.handle)
            case OpenRing(command):
                return self._open_ring(command)
            case QuiesceRing(command):
                self._ends[command.ring_id].uninstall(command)
            case FinishOutput(ring_id):
                self._finishing = self._egress(ring_id)
                self._finishing.pump()
            case BuildRole(role_id, config):
                outside.flush()
                return self._stage.build(
                    role_id, config, progress=self._emit_now, should_abort=outside.should_abort
                )
            case CloseRole():
                self._stage.close_role()
            case SelectArena() | AttachArena() | CreateBackend():
                return self._initialize(action)
            case CloseBackend():
                self._stage.close()
                self._arena.close()
            case Exit(code):
                self.exit_code = code
            case _:
                raise AssertionError(f"no such effect: {action}")
        return None

    def _emit_now(self, message: object) -> None:
        self._outside.emit(message)
        self._outside.flush()

    def _initialize(self, action: SelectArena | AttachArena | CreateBackend) -> object:
        reason = WorkerFatalReason.ARENA_MAP_FAILED
        try:
            match action:
                case SelectArena():
                    self._plugin = self._outside.arena()
                    return ArenaSelected(self._plugin.abi)
                case AttachArena(ceiling):
                    self._arena = self._outside.attach(self._plugin, ceiling)
                    return ArenaAttached()
                case CreateBackend(generation, settings):
                    reason = WorkerFatalReason.BACKEND_INIT_FAILED
                    backend = self._outside.backend(settings)
                    self._objects = DeviceObjects(backend.bridge, generation)
                    self._stage = StageHost(backend)
                    return BackendCreated(backend.facts())
        except Exception as error:  # a plug-in may raise anything while it starts; the node is told what
            broken = isinstance(error, PluginError) and error.__cause__ is not None
            if broken or not isinstance(error, SwactorError):
                traceback.print_exc(file=sys.stderr)
            return InitializeFailed(reason, describe(error))

    def _open_ring(self, command: InstallRing) -> RingOpened | RingRefused:
        try:
            ring = self._arena.open_ring(command.layout)
        except RingError as error:
            return RingRefused(command.ring_id, error.reason, describe(error))
        end: IngressEnd | EgressEnd
        if command.direction is RingDirection.INGRESS:
            end = IngressEnd(command, ring, self._objects, report=self._report, hint=self._outside.emit)
        else:
            # At once: the node sends the bytes while the rest of the step is still being told.
            end = EgressEnd(command, ring, self._objects.bridge, report=self._report, hint=self._emit_now)
        self._ends[command.ring_id] = end
        return RingOpened(command.ring_id)

    def _egress(self, ring_id: RingId) -> EgressEnd:
        end = self._ends[ring_id]
        assert isinstance(end, EgressEnd)
        return end
