"""Ring ends (spec section 34): the ingress and egress machines' effects, on a `Ring` and a `DeviceBridge`.

Knows spans, cursors, copies and the wake rule (spi/arena.py). Must not know commands, steps or the node: an
end reports messages to its harness, and hints through `hint`. Nothing here waits for the other side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from swactor_core.errors import RingError
from swactor_core.faults import RingFaultReason
from swactor_core.fsm import Action, Send
from swactor_core.ids import DeviceObjectHandle, WorkerGeneration
from swactor_core.machines import egress, ingress
from swactor_core.machines.egress import (
    BytesWritable,
    Commit,
    CopyToHost,
    EgressMachine,
    EgressState,
    OutputBound,
    WriteBytes,
)
from swactor_core.machines.ingress import (
    AllocateObject,
    AllocationFailed,
    BytesReadable,
    CloseRing,
    Consume,
    CopyComplete,
    CopyFailed,
    CopyToDevice,
    DeviceAllocated,
    FreeObject,
    HeaderRead,
    IngressMachine,
    IngressState,
    ReadHeader,
    RingBroken,
    RingClosed,
)
from swactor_core.messages import InstallRing, RingReadable, RingWritable, UninstallRing
from swactor_core.specs import ObjectSpec
from swactor_core.spi.arena import Ring, RingState
from swactor_core.spi.worker import DeviceBridge
from swactor_core.wire import ObjectHeader

_COPY_ERRORS = (OSError, MemoryError)
_READING = frozenset({IngressState.NEED_HEADER, IngressState.NEED_PAYLOAD})
_WRITING = frozenset({EgressState.NEED_WRITABLE_FOR_HEADER, EgressState.NEED_WRITABLE_FOR_PAYLOAD})


class DeviceObjects:
    """The device allocations of one worker generation, by handle; ids are never used twice."""

    def __init__(self, bridge: DeviceBridge, generation: WorkerGeneration) -> None:
        self.bridge = bridge
        self._generation = generation
        self._allocations: dict[DeviceObjectHandle, Any] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._allocations)

    def allocate(self, spec: ObjectSpec, extent: int) -> DeviceObjectHandle:
        """Raises MemoryError."""
        allocation = self.bridge.alloc_device(spec, extent)
        self._made += 1
        handle = DeviceObjectHandle(self._generation, self._made)
        self._allocations[handle] = allocation
        return handle

    def allocation(self, handle: DeviceObjectHandle) -> Any:
        return self._allocations[handle]

    def free(self, handle: DeviceObjectHandle) -> None:
        self.bridge.free_device(self._allocations.pop(handle))


class _RingEnd:
    """What both directions share: driving a machine, the one copy in flight, and broken rings."""

    machine: IngressMachine | EgressMachine

    def __init__(
        self,
        ring: Ring,
        bridge: DeviceBridge,
        *,
        report: Callable[[object], None],
        hint: Callable[[RingReadable | RingWritable], None],
    ) -> None:
        self.ring = ring
        self._bridge = bridge
        self._report = report
        self._hint = hint
        self._span = memoryview(b"")
        self._copy: Any = None
        self.copying = False
        """A copy is in flight; `pump` must be called again without waiting for a hint."""

    def uninstall(self, command: UninstallRing) -> None:
        self._feed(command)

    def pump(self) -> None:
        """Moves every byte that can be moved now."""
        while self._copy_over():
            try:
                if not self._move():
                    return
            except RingError as error:
                self._feed(RingBroken(error.reason, error.message))

    def _checked(self, call: Callable[[], None]) -> None:
        try:
            call()
        except RingError as error:
            self._feed(RingBroken(error.reason, error.message))

    def _move(self) -> bool:
        """Offers the machine the next span; False when it wants none or there is none."""
        raise NotImplementedError

    def _perform(self, action: Action) -> object | None:
        """Performs one effect; the event that answers it, if it is known at once."""
        raise NotImplementedError

    def _copy_over(self) -> bool:
        if not self.copying:
            return True
        try:
            if not self._bridge.copy_event_complete(self._copy):
                return False
            ended: CopyComplete | CopyFailed = CopyComplete()
        except _COPY_ERRORS as error:
            ended = CopyFailed(_text(error))
        self._copy, self.copying = None, False
        self._feed(ended)
        return True

    def _feed(self, event: object) -> None:
        following: object | None = event
        while following is not None:
            event, following = following, None
            try:
                for action in self.machine.step(event, time.monotonic()):
                    answer = self._perform(action)
                    if answer is not None:
                        assert following is None, f"two answers to the step of {event}"
                        following = answer
            except RingError as error:
                # The rest of the step is dropped on purpose: what was not committed is not reported.
                following = RingBroken(error.reason, error.message)

    def _start_copy(self, start: Callable[[], Any]) -> CopyComplete | CopyFailed | None:
        try:
            copy = start()
            if self._bridge.copy_event_complete(copy):
                return CopyComplete()
        except _COPY_ERRORS as error:
            return CopyFailed(_text(error))
        self._copy, self.copying = copy, True
        return None

    def _refuse_faulted(self, state: RingState, who: str) -> None:
        if state is RingState.FAULTED:
            message = f"the {who} marked the ring as faulted"
            raise RingError(message, reason=RingFaultReason.RING_STATE_INVALID)


class IngressEnd(_RingEnd):
    """Consumer of one ingress ring."""

    machine: IngressMachine

    def __init__(
        self,
        command: InstallRing,
        ring: Ring,
        objects: DeviceObjects,
        *,
        report: Callable[[object], None],
        hint: Callable[[RingReadable | RingWritable], None],
    ) -> None:
        super().__init__(ring, objects.bridge, report=report, hint=hint)
        self.machine = IngressMachine()
        self._objects = objects
        self._spec = command.object_spec
        self.ring_id = command.ring_id
        self._feed(command)

    def wake(self) -> None:
        """A RingReadable arrived, or the ring was just installed."""
        self._checked(self.ring.acknowledge_readable)
        self.pump()

    def _move(self) -> bool:
        if self.machine.state not in _READING:
            return False
        self._span = self.ring.readable_span()
        if not len(self._span):
            state = self.ring.state
            self._refuse_faulted(state, "producer")
            if state is RingState.OPEN:
                return False
            # The cursors once more: what was committed before the close is seen only after it.
            self._span = self.ring.readable_span()
            if not len(self._span):
                self._feed(RingClosed())
                return False
        self._feed(BytesReadable(len(self._span)))
        return True

    def _perform(self, action: Action) -> object | None:
        match action:
            case Consume():
                if self.ring.advance_consume(action.count):
                    self._hint(RingWritable(self.ring_id))
            case ReadHeader():
                return HeaderRead(bytes(self._span[: action.count]))
            case CopyToDevice():
                source, offset = self._span[: action.count], action.device_offset
                target = self._objects.allocation(action.handle)
                return self._start_copy(lambda: self._bridge.host_to_device(source, target, offset))
            case AllocateObject():
                try:
                    return DeviceAllocated(self._objects.allocate(self._spec, action.extent))
                except MemoryError as error:
                    return AllocationFailed(_text(error))
            case Send():
                self._report(action.message)
            case FreeObject(handle):
                self._objects.free(handle)
            case CloseRing():
                self._span = memoryview(b"")
                self.ring.close()
            case _:
                raise AssertionError(f"{ingress.__name__} has no effect {action}")
        return None


class EgressEnd(_RingEnd):
    """Producer of one egress ring."""

    machine: EgressMachine

    def __init__(
        self,
        command: InstallRing,
        ring: Ring,
        bridge: DeviceBridge,
        *,
        report: Callable[[object], None],
        hint: Callable[[RingReadable | RingWritable], None],
    ) -> None:
        super().__init__(ring, bridge, report=report, hint=hint)
        self.machine = EgressMachine()
        self.ring_id = command.ring_id
        self._output: Any = None
        self._feed(command)

    @property
    def blocked(self) -> bool:
        """An output is not out yet and only the consumer can change that. Meaningful after `pump`."""
        return self.machine.state in _WRITING and not self.copying

    def begin(self, header: ObjectHeader, allocation: Any) -> None:
        """Starts the output; `allocation` must stay valid until ObjectProduced, RingFault or RingQuiesced."""
        self._output = allocation
        self._feed(OutputBound(header))
        self._checked(lambda: self._refuse_faulted(self.ring.state, "consumer"))
        self.pump()

    def wake(self) -> None:
        """A RingWritable arrived, or the ring was just installed."""
        self._checked(self.ring.acknowledge_writable)
        self.pump()

    def _move(self) -> bool:
        if self.machine.state not in _WRITING:
            return False
        self._span = self.ring.writable_span()
        if not len(self._span):
            self._refuse_faulted(self.ring.state, "consumer")
            return False
        self._feed(BytesWritable(len(self._span)))
        return True

    def _perform(self, action: Action) -> object | None:
        match action:
            case Commit():
                if self.ring.advance_commit(action.count):
                    self._hint(RingReadable(self.ring_id))
            case WriteBytes():
                self._span[: len(action.data)] = action.data
            case CopyToHost():
                target, source, offset = self._span[: action.count], self._output, action.device_offset
                return self._start_copy(lambda: self._bridge.device_to_host(source, offset, target))
            case Send():
                self._report(action.message)
            case CloseRing():
                self._span, self._output = memoryview(b""), None
                self.ring.close()
            case _:
                raise AssertionError(f"{egress.__name__} has no effect {action}")
        return None


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
