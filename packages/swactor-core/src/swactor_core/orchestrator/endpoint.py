"""Token endpoint adapter (spec section 10): the orchestrator's own ends of both token edges, on host memory.

The same ring ends and machines as a worker's (`worker/rings.py`), with a bridge whose device is a bytearray.
Writes prompt and token ids as u32 little-endian records, reads ids or logit rows. Knows no policy but the
sampler it is given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from swactor_core.actors import ActorSystem, MachineActor
from swactor_core.errors import RingError, UndecidableLogits
from swactor_core.faults import Component, RingFaultReason
from swactor_core.fsm import Effect
from swactor_core.ids import ObjectId, RingId, WorkerGeneration
from swactor_core.machines.endpoint import (
    ReadToken,
    TokenDecoded,
    TokenEndpoint,
    TokenUndecodable,
    WriteTokens,
)
from swactor_core.messages import (
    Address,
    InstallRing,
    ObjectFailed,
    ObjectLoaded,
    ObjectProduced,
    RingFault,
    RingInstalled,
    RingQuiesced,
    RingReadable,
    RingWritable,
    UninstallRing,
)
from swactor_core.node.data_plane import DRIVER, ESTABLISHER, DataPlane
from swactor_core.observe.bus import EventBus
from swactor_core.specs import ObjectSpec, RingDirection
from swactor_core.wire import ObjectHeader
from swactor_core.worker.rings import DeviceObjects, EgressEnd, IngressEnd

if TYPE_CHECKING:
    from swactor_core.sampling import Sampler

ENDPOINT = Address(Component.TOKEN_ENDPOINT)
RING_HOST = Address(Component.TOKEN_ENDPOINT, 1)
TEARDOWN_BOUND = 10.0

LogitsSink = Callable[[int, bytes], None]


class HostBridge:
    """A device bridge whose device is this process: allocations are bytearrays, copies are synchronous."""

    def alloc_device(self, spec: ObjectSpec, extent: int) -> bytearray:
        return bytearray(extent)

    def free_device(self, allocation: bytearray) -> None:
        allocation.clear()

    def host_to_device(self, source: memoryview, allocation: bytearray, device_offset: int) -> None:
        allocation[device_offset : device_offset + len(source)] = source

    def device_to_host(self, allocation: bytearray, device_offset: int, target: memoryview) -> None:
        target[:] = memoryview(allocation)[device_offset : device_offset + len(target)]

    def copy_event_complete(self, event: Any) -> bool:
        return True


class RingHost:
    """Takes InstallRing and its kin in the worker's stead."""

    def __init__(self, system: ActorSystem, data_plane: DataPlane) -> None:
        self._system = system
        self.data_plane = data_plane
        self.objects = DeviceObjects(HostBridge(), WorkerGeneration(1))
        self.ends: dict[RingId, IngressEnd | EgressEnd] = {}
        system.spawn(RING_HOST, self)

    def receive(self, message: object) -> None:
        match message:
            case RingReadable() | RingWritable():
                woken = self.ends.get(message.ring_id)
                if woken is not None:
                    woken.wake()
            case InstallRing():
                self._install(message)
            case UninstallRing(ring_id):
                end = self.ends.pop(ring_id, None)
                if end is None:
                    self._system.tell(ESTABLISHER, RingQuiesced(ring_id))
                else:
                    end.uninstall(message)
            case _:
                raise AssertionError(f"the token endpoint's rings take no {type(message).__name__}")

    def _install(self, command: InstallRing) -> None:
        arena = self.data_plane.arena.arena
        assert arena is not None
        try:
            ring = arena.open_ring(command.layout)
        except RingError as error:
            reason = RingFaultReason.RING_LAYOUT_INVALID
            fault = RingFault(command.ring_id, command.edge_id, command.port_id, reason, error.message)
            self._system.tell(ESTABLISHER, fault)
            return
        end: IngressEnd | EgressEnd
        if command.direction is RingDirection.INGRESS:
            end = IngressEnd(command, ring, self.objects, report=self._report, hint=self._hint)
        else:
            end = EgressEnd(command, ring, self.objects.bridge, report=self._report, hint=self._hint)
        self.ends[command.ring_id] = end
        self._report(RingInstalled(command.ring_id, command.edge_id, command.port_id))
        end.wake()

    def _hint(self, message: RingReadable | RingWritable) -> None:
        self._system.tell(DRIVER, message)

    def _report(self, message: object) -> None:
        match message:
            case RingInstalled() | RingFault() | RingQuiesced():
                self._system.tell(ESTABLISHER, message)
            case ObjectLoaded() | ObjectFailed():
                self._system.tell(Address(Component.RX_EDGE, message.edge_id), message)
            case ObjectProduced():
                self._system.tell(Address(Component.TX_EDGE, message.edge_id), message)


class EndpointAdapter:
    """Hosts one run's TokenEndpoint. With `sampler`, logits travel; `on_logits(sequence, row)` sees them.
    `enough(token_id)` says whether the reader wants no token after it."""

    def __init__(
        self,
        system: ActorSystem,
        bus: EventBus,
        rings: RingHost,
        *,
        sampler: Sampler | None,
        on_logits: LogitsSink | None,
        enough: Callable[[int], bool],
    ) -> None:
        self._system = system
        self._rings = rings
        self._sampler = sampler
        self._on_logits = on_logits
        self._enough = enough
        actor = MachineActor(
            system,
            ENDPOINT,
            machine=TokenEndpoint(teardown_bound=TEARDOWN_BOUND),
            bus=bus,
            perform=self._perform,
            route=rings.data_plane.establisher.to_gate,
        )
        system.spawn(ENDPOINT, actor)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case WriteTokens(ring_id, sequence, token_ids):
                end = self._rings.ends[ring_id]
                assert isinstance(end, EgressEnd)
                payload = struct.pack(f"<{len(token_ids)}I", *token_ids)
                end.begin(ObjectHeader(ObjectId(sequence), sequence, len(payload)), bytearray(payload))
            case ReadToken(loaded):
                row = bytes(self._rings.objects.allocation(loaded.device_handle))
                self._rings.objects.free(loaded.device_handle)
                self._system.tell(ENDPOINT, self._decoded(loaded, row))

    def _decoded(self, loaded: ObjectLoaded, row: bytes) -> TokenDecoded | TokenUndecodable:
        if self._sampler is None:
            token_id = int.from_bytes(row[:4], "little")
        else:
            if self._on_logits is not None:
                self._on_logits(loaded.sequence, row)
            try:
                token_id = self._sampler.pick(row)
            except UndecidableLogits as error:
                return TokenUndecodable(loaded.sequence, error.message)
        return TokenDecoded(loaded.sequence, token_id, self._enough(token_id))
