"""What a ring between two processes costs, beside memcpy of the same sizes and multiprocessing.Pipe.

Two tables of one run. Streams: one process writes spans into a ring, the other takes them, in place without
reading them, or copied into memory of its own; hints go through pipes and both ends sleep when they have
nothing to do. memcpy is one process that copies the same bytes into a buffer as large as the ring. Round
trips: a 64-byte record there and back through two rings, both ends asleep in between. Every figure is the
median of the repeats, and each repeat measures all columns before the next: a busy machine slows them alike.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from swactor_arena.arena import MemfdArenas
from swactor_core.ids import RingId
from swactor_core.specs import RingLayout
from swactor_core.spi.arena import Ring

SIZES = (64, 4 << 10, 64 << 10, 1 << 20)
RECORD = 64
DATA_AT = mmap.PAGESIZE
CEILING = 64 << 20
WAIT_SECONDS = 30.0


def capacity_of(size: int) -> int:
    """Room for eight spans, and never less than a MiB: enough to be busy while the other end wakes up."""
    return max(8 * size, 1 << 20)


def layout_of(number: int, capacity: int) -> RingLayout:
    begin = (number - 1) * (CEILING // 2)
    return RingLayout(RingId(number), begin, DATA_AT + capacity, begin, begin + DATA_AT, capacity, 64)


class Wake:
    """A hint as a byte in a pipe: `wait` sleeps in read(2)."""

    def __init__(self, hear: int, tell: int) -> None:
        self.hear, self.tell = hear, tell

    def send(self) -> None:
        os.write(self.tell, b"!")

    def wait(self) -> None:
        if not os.read(self.hear, 1):
            raise SystemExit("the other process is gone")


def produce(ring: Ring, wake: Wake, source: memoryview, count: int) -> None:
    """`count` spans of `len(source)` bytes."""
    size = len(source)
    for _ in range(count):
        done = 0
        while done < size:
            span = ring.writable_span()
            room = len(span)
            if not room:
                wake.wait()
                ring.acknowledge_writable()
                continue
            if room >= size - done:
                room = size - done
            span[:room] = source[done : done + room]
            done += room
            if ring.advance_commit(room):
                wake.send()


def consume(ring: Ring, wake: Wake, target: memoryview | None, total: int) -> None:
    """Takes `total` bytes as they come: copied to `target`, or in place if that is None."""
    while total:
        span = ring.readable_span()
        room = len(span)
        if not room:
            wake.wait()
            ring.acknowledge_readable()
            continue
        if target is not None:
            room = min(room, len(target))
            target[:room] = span[:room]
        if ring.advance_consume(room):
            wake.send()
        total -= room


def echo(inward: Ring, outward: Ring, wake: Wake, count: int) -> None:
    """Sends `count` records back; one hint a direction, so both rings share a pipe pair."""
    record = memoryview(bytearray(RECORD))
    for _ in range(count):
        consume(inward, wake, record, RECORD)
        produce(outward, wake, record, 1)


def peer(arguments: list[str]) -> None:
    """The second process: one command a line on stdin, "done" on stdout when it is carried out."""
    fd, hear, tell, pipe_fd = map(int, arguments)
    wake, pipe = Wake(hear, tell), Connection(pipe_fd)
    view = MemfdArenas().attach(fd, CEILING)
    target = memoryview(bytearray(max(SIZES)))
    for line in sys.stdin:
        what, size, count = line.split()[0], *map(int, line.split()[1:])
        rings = []
        if what.startswith("ring"):
            numbers = (1, 2) if what == "ring-echo" else (1,)
            rings = [view.open_ring(layout_of(n, capacity_of(size))) for n in numbers]
        print("ready", flush=True)
        if what == "ring-place":
            consume(rings[0], wake, None, size * count)
        elif what == "ring-copy":
            consume(rings[0], wake, target[:size], size * count)
        elif what == "ring-echo":
            echo(rings[0], rings[1], wake, count)
        elif what == "pipe":
            for _ in range(count):
                pipe.recv_bytes_into(target)
        elif what == "pipe-echo":
            for _ in range(count):
                pipe.recv_bytes_into(target)
                pipe.send_bytes(target[:RECORD])
        for ring in rings:
            ring.close()
        print("done", flush=True)
    view.close()


class Bench:
    """The first process: starts the peer, gives it commands, and does its own half of each."""

    def __init__(self) -> None:
        self.arena = MemfdArenas().create(CEILING)
        hear, peer_tell = os.pipe()
        peer_hear, tell = os.pipe()
        self.pipe, theirs = multiprocessing.Pipe(duplex=True)
        fds = (self.arena.fd, peer_hear, peer_tell, theirs.fileno())
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--peer", *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for fd in fds[1:3]:
            os.close(fd)
        theirs.close()
        self.wake = Wake(hear, tell)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(WAIT_SECONDS)
        self.arena.close()

    def timed(self, what: str, size: int, count: int, own_half: Callable[[], None]) -> float:
        """Seconds from the first byte until the peer says that it has the last."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what} {size} {count}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ready\n"
        begin = time.perf_counter()
        own_half()
        assert self.process.stdout.readline() == "done\n"
        return time.perf_counter() - begin

    def ring_stream(self, what: str, size: int, count: int) -> float:
        ring = self.arena.create_ring(layout_of(1, capacity_of(size)))
        source = memoryview(os.urandom(size))
        seconds = self.timed(what, size, count, lambda: produce(ring, self.wake, source, count))
        self._reset(ring)
        return seconds

    def _reset(self, *rings: Ring) -> None:
        """Takes the hints that nobody waited for out of the pipe."""
        os.set_blocking(self.wake.hear, False)
        try:
            while os.read(self.wake.hear, 4096):
                pass
        except BlockingIOError:
            pass
        os.set_blocking(self.wake.hear, True)
        for ring in rings:
            ring.close()

    def pipe_stream(self, size: int, count: int) -> float:
        source = os.urandom(size)

        def send() -> None:
            for _ in range(count):
                self.pipe.send_bytes(source)

        return self.timed("pipe", size, count, send)

    def ring_round_trips(self, count: int) -> list[float]:
        rings = [self.arena.create_ring(layout_of(n, capacity_of(RECORD))) for n in (1, 2)]
        record, times = memoryview(bytearray(RECORD)), []

        def ask() -> None:
            for _ in range(count):
                begin = time.perf_counter()
                produce(rings[0], self.wake, record, 1)
                consume(rings[1], self.wake, record, RECORD)
                times.append(time.perf_counter() - begin)

        self.timed("ring-echo", RECORD, count, ask)
        self._reset(*rings)
        return times

    def pipe_round_trips(self, count: int) -> list[float]:
        record, times = bytearray(RECORD), []

        def ask() -> None:
            for _ in range(count):
                begin = time.perf_counter()
                self.pipe.send_bytes(record)
                self.pipe.recv_bytes_into(record)
                times.append(time.perf_counter() - begin)

        self.timed("pipe-echo", RECORD, count, ask)
        return times


def memcpy(size: int, count: int) -> float:
    """Seconds for the same copies within one process, into a buffer as large as the ring."""
    capacity = capacity_of(size)
    source = memoryview(os.urandom(size))
    target = memoryview(mmap.mmap(-1, capacity))
    target[:] = bytes(capacity)
    places = range(0, capacity, size)
    begin = time.perf_counter()
    done = 0
    while done < count:
        for place in places:
            target[place : place + size] = source
        done += len(places)
    return (time.perf_counter() - begin) * count / done


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        peer(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=2048, help="per stream; at most 100,000 spans")
    parser.add_argument("--round-trips", type=int, default=3000, help="per repeat")
    options = parser.parse_args()
    bench = Bench()
    columns = ("memcpy", "ring-place", "ring-copy", "pipe")
    seconds: dict[tuple[int, str], list[float]] = {(s, c): [] for s in SIZES for c in columns}
    trips: dict[str, list[float]] = {"ring": [], "pipe": []}
    counts = {size: min(100_000, max(1, (options.megabytes << 20) // size)) for size in SIZES}
    for repeat in range(options.repeats + 1):
        for size, count in counts.items():
            taken = {"memcpy": memcpy(size, count), "pipe": bench.pipe_stream(size, count)}
            for column in ("ring-place", "ring-copy"):
                taken[column] = bench.ring_stream(column, size, count)
            for column, value in taken.items():
                if repeat:  # the first touches every page for the first time
                    seconds[size, column].append(value / count)
        ring, pipe = bench.ring_round_trips(options.round_trips), bench.pipe_round_trips(options.round_trips)
        if repeat:
            trips["ring"] += ring
            trips["pipe"] += pipe
    bench.close()
    print(f"{'span':>8}  {'what':<22}{'spans/s':>10}{'GB/s':>8}{'/ memcpy':>10}{'/ Pipe':>8}")
    names = {
        "memcpy": "memcpy, one process",
        "ring-place": "ring, read in place",
        "ring-copy": "ring, copied out",
    }
    for size in SIZES:
        median = {column: statistics.median(seconds[size, column]) for column in columns}
        for column in columns:
            each = median[column]
            name = names.get(column, "multiprocessing.Pipe")
            rates = f"{1 / each:>10,.0f}{size / each / 1e9:>8.2f}"
            print(
                f"{size:>8}  {name:<22}{rates}{median['memcpy'] / each:>10.2f}{median['pipe'] / each:>8.2f}"
            )
    print(f"\n{'round trip of 64 bytes':<24}{'p50 us':>8}{'p99 us':>8}")
    for name, times in trips.items():
        ordered = sorted(times)
        half, tail = ordered[len(ordered) // 2] * 1e6, ordered[len(ordered) * 99 // 100] * 1e6
        print(f"{'two rings' if name == 'ring' else 'multiprocessing.Pipe':<24}{half:>8.1f}{tail:>8.1f}")


if __name__ == "__main__":
    main()
