"""The arena contract (spec sections 18 to 22): memory under real leases, and the rings in it.

With `rings.py` below it; the guarantees are those of `swactor_core.spi.arena`. Leases are minted by the
core's own ArenaManager, as in a node: what is tested is that the plug-in keeps them apart.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from swactor_core.errors import ResourceError, RingError, SwactorError
from swactor_core.faults import Component
from swactor_core.ids import EdgeId, LeaseRequestId, RingId
from swactor_core.machines.arena import ArenaManager, DiscardRange, PrepareRing, RingPrepared
from swactor_core.messages import (
    Address,
    ArenaConstructed,
    ConstructArena,
    LeaseRing,
    PumpProof,
    QuiescenceProof,
    ReleaseRing,
    RingProof,
)
from swactor_core.specs import RingDirection, RingSpec
from swactor_core.spi.arena import Arena, ArenaPlugin, Ring, RingState
from swactor_core.spi.provider import Kind

from swactor_testing.conformance.bounds import same_bytes, seeded
from swactor_testing.conformance.rings import CEILING, RingContract, layout_of, take_all

_PROOF = QuiescenceProof(PumpProof.STOPPED, RingProof.QUIESCED)
_OWNER = Address(Component.NODE)
_OTHER_PROCESS = """
import hashlib, os, sys, time
from swactor_core.ids import RingId
from swactor_core.plugins import load_plugins
from swactor_core.specs import RingLayout
from swactor_core.spi.provider import Kind

name, fd, ceiling, expected, *numbers = sys.argv[1:]
plugin = load_plugins().select(Kind.ARENA, name).factory()
view = plugin.attach(int(fd), int(ceiling))
ring = view.open_ring(RingLayout(RingId(int(numbers[0])), *map(int, numbers[1:])))
digest, count, until = hashlib.sha256(), 0, time.monotonic() + 20
while count < int(expected) and time.monotonic() < until:
    span = ring.readable_span()
    if not len(span):
        time.sleep(0)  # how this arena's hints travel is not known here
        continue
    digest.update(span)
    count += len(span)
    ring.advance_consume(len(span))
sys.stdout.write(f"{plugin.abi} {count} {digest.hexdigest()}")
ring.close()
view.close()
os.close(int(fd))
"""


class Leases:
    """An ArenaManager over an arena under test, as a node's adapter drives it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.rings: dict[RingId, Ring] = {}
        self._manager = ArenaManager(_OWNER)
        self._requests = 0
        self._feed(ConstructArena(arena.ceiling))
        self._feed(ArenaConstructed())

    def lease(self, capacity: int, alignment: int) -> bool:
        """Whether there was room; a request without it stays queued, as in a node."""
        self._requests += 1
        spec = RingSpec(capacity, RingDirection.INGRESS, alignment)
        before = len(self.rings)
        request = LeaseRequestId(self._requests)
        self._feed(LeaseRing(request, _OWNER, EdgeId(self._requests), RingDirection.INGRESS, spec))
        return len(self.rings) > before

    def release(self, ring_id: RingId) -> None:
        self.rings.pop(ring_id).close()
        self._feed(ReleaseRing(ring_id, _PROOF))

    def _feed(self, event: object) -> None:
        for action in self._manager.step(event, 0.0):
            if isinstance(action, PrepareRing):
                layout = action.layout
                self.rings[layout.ring_id] = self.arena.create_ring(layout)
                self._feed(RingPrepared(layout.ring_id))
            elif isinstance(action, DiscardRange):
                self.arena.discard(action.layout.arena_offset, action.layout.total_len)


class ArenaContract(RingContract):
    """Everything an arena keeps. Heirs give the fixture `plugin` and `capabilities`."""

    kind = Kind.ARENA

    def test_it_is_registered_under_its_name(self) -> None:
        """Configuration chooses a provider by kind and name, in the node and in its worker."""
        provider = self.provider()
        assert provider.crosses_processes == self.capabilities.crosses_processes

    def test_an_arena_has_its_ceiling_and_ends_twice(self, plugin: ArenaPlugin) -> None:
        """`create`: a new sparse arena of `ceiling` bytes; `close` is idempotent."""
        arena = plugin.create(CEILING)
        assert arena.ceiling == CEILING
        arena.close()
        arena.close()

    def test_a_large_ceiling_is_address_space_only(self, plugin: ArenaPlugin) -> None:
        """Section 19: the arena is address space, sparse; its last page is as good as its first."""
        ceiling = 1 << 36
        arena = plugin.create(ceiling)
        layout = layout_of(1, 4096, offset=ceiling - 8192)
        ring = arena.create_ring(layout)
        ring.writable_span()[:4] = b"last"
        ring.advance_commit(4)
        assert bytes(arena.open_ring(layout).readable_span()) == b"last"
        arena.close()

    @pytest.mark.parametrize("ceiling", [0, -1, 1 << 63])
    def test_an_impossible_ceiling_is_a_resource_error(self, plugin: ArenaPlugin, ceiling: int) -> None:
        """`create` raises ResourceError; nothing else, and no signal later."""
        with pytest.raises(ResourceError):
            plugin.create(ceiling)

    def test_the_helpers_number_is_one(self, plugin: ArenaPlugin) -> None:
        """`abi`: the number that node and worker compare; a 16-bit number in the worker's command."""
        assert 0 <= plugin.abi < 1 << 16
        assert plugin.abi == plugin.abi

    # --- layouts ---

    @pytest.mark.parametrize(
        "wrong",
        [
            {"arena_offset": -4096},
            {"total_len": CEILING + 4096},
            {"arena_offset": CEILING},
            {"data_offset": CEILING - 1},
            {"header_offset": CEILING},
            {"data_offset": 0},
            {"data_capacity": 0},
            {"data_capacity": 1 << 62},
            {"alignment": 3},
            {"header_offset": 8},
        ],
        ids=lambda wrong: "-".join(f"{key}={value}" for key, value in wrong.items()),
    )
    def test_a_layout_outside_the_arena_or_itself_is_refused(
        self, arena: Arena, wrong: dict[str, int]
    ) -> None:
        """Section 18: offsets are arena relative and aligned. A layout that does not fit its arena, or whose
        parts overlap or leave it, is a RingError for both ends, before any byte is touched."""
        layout = replace(layout_of(1, 4096), **wrong)  # type: ignore[arg-type]  # no ring id among them
        for call in (arena.create_ring, arena.open_ring):
            with pytest.raises(RingError):
                call(layout)

    def test_a_ring_that_was_never_created_is_not_opened(self, arena: Arena) -> None:
        """`open_ring` raises RingError when magic, version, id or capacity differ."""
        with pytest.raises(RingError):
            arena.open_ring(layout_of(1, 4096))
        arena.create_ring(layout_of(1, 4096))
        for other in (layout_of(2, 4096), layout_of(1, 2048)):
            with pytest.raises(RingError):
                arena.open_ring(other)

    # --- leases ---

    @pytest.mark.parametrize("seed", range(4))
    def test_rings_of_live_leases_never_touch_each_other(self, arena: Arena, seed: int) -> None:
        """Section 19: two live leases cannot overlap, and a range is used again only after its release. What
        is in one ring survives every write, creation and discard of the others, at every alignment."""
        random = seeded(seed)
        leases = Leases(arena)
        held: dict[RingId, bytearray] = {}
        for _ in range(150):
            what = random.choice(("lease", "lease", "write", "write", "read", "release"))
            if what == "lease":
                leases.lease(random.choice((64, 1000, 4096, 30_000)), random.choice((1, 64, 4096)))
                for ring_id in leases.rings.keys() - held.keys():
                    fresh = leases.rings[ring_id]
                    where = f"seed {seed}: a range that is leased anew"
                    assert (fresh.commit, fresh.consume, fresh.state) == (0, 0, RingState.OPEN), where
                    assert len(fresh.writable_span()) == fresh.layout.data_capacity, where
                    held[ring_id] = bytearray()
                continue
            if not held:
                continue
            ring_id = random.choice(sorted(held))
            ring, inside = leases.rings[ring_id], held[ring_id]
            if what == "write":
                span = ring.writable_span()
                data = random.randbytes(random.randint(0, len(span)))
                span[: len(data)] = data
                ring.advance_commit(len(data))
                inside += data
            elif what == "read":
                same_bytes(take_all(ring), inside, f"seed {seed}: ring {ring_id}")
                inside.clear()
            else:
                same_bytes(take_all(ring), inside, f"seed {seed}: ring {ring_id} before its release")
                leases.release(ring_id)
                del held[ring_id]
                # Its release may have let queued requests in.
                held |= {new: bytearray() for new in leases.rings.keys() - held.keys()}
        for ring_id, inside in held.items():
            same_bytes(take_all(leases.rings[ring_id]), inside, f"seed {seed}: ring {ring_id} at the end")

    def test_a_discard_ends_a_ring_and_touches_no_neighbour(self, arena: Arena) -> None:
        """`discard` gives the pages of a released range back, and of that range only; the ring in it cannot
        be opened by its former layout unless it is created again."""
        layouts = [layout_of(number, 4096 - 64, offset=4096 * number) for number in range(1, 4)]
        rings = [arena.create_ring(layout) for layout in layouts]
        for number, ring in enumerate(rings):
            span = ring.writable_span()
            span[:] = bytes([number + 1]) * len(span)
            ring.advance_commit(len(span))
        rings[1].close()
        arena.discard(layouts[1].arena_offset, layouts[1].total_len)
        for number in (0, 2):
            data = take_all(rings[number])
            same_bytes(data, bytes([number + 1]) * (4096 - 64), f"the neighbour at {4096 * (number + 1)}")
        with pytest.raises(RingError):
            arena.open_ring(layouts[1])
        arena.create_ring(layouts[1])

    @pytest.mark.parametrize(("offset", "length"), [(-4096, 4096), (0, CEILING + 1), (CEILING, 1)])
    def test_a_discard_outside_the_arena_is_refused(self, arena: Arena, offset: int, length: int) -> None:
        """A range of the arena, or an error: never somebody else's memory."""
        with pytest.raises(SwactorError):
            arena.discard(offset, length)

    # --- mappings ---

    def test_an_attached_view_sees_the_same_bytes(self, plugin: ArenaPlugin) -> None:
        """`attach` maps an inherited arena: what one end commits the other reads. An arena that stays in its
        process has -1 for a descriptor and is attached by that."""
        arena = plugin.create(CEILING)
        assert (arena.fd >= 0) == self.capabilities.crosses_processes
        view = plugin.attach(arena.fd, CEILING)
        producer = arena.create_ring(layout_of(1, 4096))
        consumer = view.open_ring(layout_of(1, 4096))
        producer.writable_span()[:5] = b"bytes"
        producer.advance_commit(5)
        assert take_all(consumer) == b"bytes"
        assert producer.consume == 5
        view.close()
        arena.close()

    def test_what_is_no_arena_is_not_attached(self, plugin: ArenaPlugin) -> None:
        """`attach` raises ResourceError, for a descriptor that is no arena and for another size."""
        arena = plugin.create(CEILING)
        with open(os.devnull, "rb") as nothing, pytest.raises(ResourceError):
            plugin.attach(nothing.fileno(), CEILING)
        with pytest.raises(ResourceError):
            plugin.attach(arena.fd, CEILING * 2)
        arena.close()

    def test_another_process_reads_what_this_one_committed(self, plugin: ArenaPlugin) -> None:
        """Section 19: the worker maps the same memory by the inherited descriptor. An arena that does not
        cross processes must say so by its descriptor, so that nobody hands it to one."""
        arena = plugin.create(CEILING)
        layout = layout_of(7, 4096)
        ring = arena.create_ring(layout)
        data = seeded(7).randbytes(3000)
        ring.writable_span()[: len(data)] = data
        ring.advance_commit(len(data))
        if not self.capabilities.crosses_processes:
            assert arena.fd == -1
            arena.close()
            return
        child = self._reader(arena, ring, len(data))
        self._has_read(child, plugin, data)
        assert ring.consume == len(data), "what the other process released is not seen here"
        arena.close()

    def test_two_processes_at_once_lose_no_byte(self, plugin: ArenaPlugin) -> None:
        """Section 22: cursors use acquire and release across the process boundary. One process writes while
        another reads, around a small ring a thousand times; every byte is there before its commit is seen."""
        if not self.capabilities.crosses_processes:
            return
        arena = plugin.create(CEILING)
        ring = arena.create_ring(layout_of(7, 1021))
        data = seeded(8).randbytes(1 << 20)
        child = self._reader(arena, ring, len(data))
        written, until = 0, time.monotonic() + 20
        while written < len(data) and time.monotonic() < until:
            span = ring.writable_span()
            count = min(len(span), len(data) - written)
            if not count:
                time.sleep(0)
                continue
            span[:count] = data[written : written + count]
            ring.advance_commit(count)
            written += count
        self._has_read(child, plugin, data)
        arena.close()

    def _reader(self, arena: Arena, ring: Ring, count: int) -> subprocess.Popen[str]:
        """A process that reads `count` bytes of the ring, by the arena's descriptor."""
        layout = ring.layout
        numbers = [arena.fd, arena.ceiling, count, layout.ring_id, layout.arena_offset, layout.total_len]
        numbers += [layout.header_offset, layout.data_offset, layout.data_capacity, layout.alignment]
        return subprocess.Popen(
            [sys.executable, "-c", _OTHER_PROCESS, self.capabilities.provider, *map(str, numbers)],
            pass_fds=(arena.fd,),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def _has_read(child: subprocess.Popen[str], plugin: ArenaPlugin, data: bytes) -> None:
        try:
            out, errors = child.communicate(timeout=30)
        finally:
            child.kill()
        assert child.returncode == 0, errors
        abi, count, digest = out.split(" ")
        assert int(abi) == plugin.abi
        assert int(count) == len(data), f"the other process has read {count} of {len(data)} bytes"
        assert digest == hashlib.sha256(data).hexdigest(), "the other process has read other bytes"

    def test_after_close_no_ring_and_no_descriptor_is_left(self, plugin: ArenaPlugin) -> None:
        """`close` drops the mapping; a ring of it is an error and no stray access."""
        before = set(os.listdir("/proc/self/fd"))
        arena = plugin.create(CEILING)
        ring = arena.create_ring(layout_of(1, 4096))
        ring.close()
        arena.close()
        assert set(os.listdir("/proc/self/fd")) <= before, "a descriptor is left open"
        with pytest.raises(RingError):
            ring.readable_span()
