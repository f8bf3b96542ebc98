"""Two processes, one arena, hints over pipes: nobody polls, nothing is lost (spec sections 19 to 21)."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys

import pytest
from swactor_core.spi.arena import RingState

CHILD = """
import hashlib, os, select, sys, time
from swactor_arena.arena import MemfdArenas
from swactor_core.specs import RingLayout
from swactor_core.spi.arena import RingState

fd, ceiling, capacity, hear, tell, step = map(int, sys.argv[1:])
view = MemfdArenas().attach(fd, ceiling)
os.close(fd)
ring = view.open_ring(RingLayout(1, 0, 64 + capacity, 0, 64, capacity, 64))
digest, total, waits = hashlib.sha256(), 0, 0
while True:
    state = ring.state  # before the cursor: CLOSED then means that what is seen is all
    span = ring.readable_span()
    if len(span) == 0:
        if state is RingState.CLOSED:
            break
        if not waits:
            print("empty", flush=True)
        if not select.select([hear], [], [], 30)[0]:
            sys.exit("lost RingReadable")
        os.read(hear, 1)
        waits += 1
        ring.acknowledge_readable()
        bound = time.monotonic() + 30
        while waits == 1 and len(ring.readable_span()) < capacity:  # the producer waits once too
            assert time.monotonic() < bound, "the ring was never full"
        continue
    part = span[:step]
    digest.update(part)
    total += len(part)
    if ring.advance_consume(len(part)):
        os.write(tell, b"w")
print(digest.hexdigest(), total, waits)
view.close()
"""


@pytest.mark.parametrize(
    ("capacity", "write_step", "read_step", "total"),
    [
        (65521, 9973, 4001, 12_000_000),
        (256 << 10, 256 << 10, 256 << 10, 24_000_000),
        (64, 48, 24, 400_000),
        (1, 1, 1, 4_000),
    ],
    ids=["prime", "large", "cache-line", "one-byte"],
)
def test_bytes_cross_between_processes_with_hints_alone(
    arena, layout_of, capacity, write_step, read_step, total
):
    layout = layout_of(capacity)
    ring = arena.create_ring(layout)
    hear, child_tell = os.pipe()
    child_hear, tell = os.pipe()
    numbers = (arena.fd, arena.ceiling, capacity, child_hear, child_tell, read_step)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, numbers)],
        pass_fds=(arena.fd, child_hear, child_tell),
        stdout=subprocess.PIPE,
        text=True,
    )
    source = hashlib.shake_128(b"arena").digest(1 << 16)
    digest, sent, waits = hashlib.sha256(), 0, 0
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "empty\n"  # nothing is written before it waits
        while sent < total:
            span = ring.writable_span()
            if len(span) == 0:
                assert select.select([hear], [], [], 30)[0], "lost RingWritable"
                os.read(hear, 1)
                waits += 1
                ring.acknowledge_writable()
                continue
            count = min(len(span), write_step, total - sent, (1 << 16) - sent % (1 << 16))
            part = source[sent % (1 << 16) : sent % (1 << 16) + count]
            span[:count] = part
            digest.update(part)
            sent += count
            if ring.advance_commit(count):
                os.write(tell, b"r")
        ring.set_state(RingState.CLOSED)
        os.write(tell, b"r")
        output, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
        for fd in (hear, tell, child_hear, child_tell):
            os.close(fd)
    received, count, child_waits = output.split()
    assert (received, int(count)) == (digest.hexdigest(), total)
    assert int(child_waits) > 0
    assert waits > 0


def test_a_killed_producer_leaves_whole_commits_and_the_memory_in_order(arena, layout_of) -> None:
    """The consumer sees a prefix that was committed, and the owner can reuse the range."""
    script = """
import os, sys
from swactor_arena.arena import MemfdArenas
from swactor_core.specs import RingLayout
view = MemfdArenas().attach(int(sys.argv[1]), int(sys.argv[2]))
ring = view.open_ring(RingLayout(1, 0, 64 + 4096, 0, 64, 4096, 64))
span = ring.writable_span()
span[:1000] = b"a" * 1000
ring.advance_commit(1000)
span[1000:2000] = b"b" * 1000
os.kill(os.getpid(), 9)
"""
    layout = layout_of(4096)
    ring = arena.create_ring(layout)
    command = [sys.executable, "-c", script, str(arena.fd), str(arena.ceiling)]
    assert subprocess.run(command, pass_fds=(arena.fd,), timeout=60).returncode == -9
    assert bytes(ring.readable_span()) == b"a" * 1000
    assert ring.state is RingState.OPEN
    ring.close()
    arena.discard(0, 64 + 4096)
    assert len(arena.create_ring(layout_of(4096, ring_id=2)).writable_span()) == 4096
