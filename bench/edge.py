"""What one edge moves on this machine: ring to QUIC to ring, beside stock aioquic and plain TCP, in one run.

    python bench/edge.py [--sizes 1200,16200] [--megabytes M] [--objects N] [--repeats R] [--edges 1,16,64]

Two processes on loopback. Throughput: megabytes from the first to the last byte at the reader, who takes
every byte out of its ring. Latency: an object of 2 KiB goes over and one comes back, in turns; a figure is
one way, from just before the commit to the egress ring until the ingress ring has the whole object committed
(for the other two: from the write call until the last byte was handed over). The clock is the system's
monotonic one, which all processes share. Kinds take turns, `--repeats` times; medians are printed.

`aioquic` is its own asyncio client and server with uni-streams, SO_RCVBUF as the system gives it, its writer
held to 1 MiB unacknowledged (without that it only measures a buffer). The last table has the same object
passed over the first of many open edges: what an edge costs that is only open.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

OBJECT = 2048
RING = 4 << 20
SMALL_RING = 64 << 10
BACK = 1000  # id of the edge on which objects come back
STAMP = struct.Struct("<Q")
DIALLER, ACCEPTOR = b"dialler".ljust(32, b"."), b"acceptor".ljust(32, b".")


class Meter:
    """What a reader has got: bytes, when the first and the last came, and the way of each object."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.received = 0
        self.first = self.last = 0
        self.done = asyncio.Event()
        self.ways: list[int] = []

    def took(self, count: int) -> None:
        self.last = time.monotonic_ns()
        self.first = self.first or self.last
        self.received += count
        if self.received >= self.expected:
            self.done.set()

    @property
    def megabytes_per_second(self) -> float:
        return self.received / (self.last - self.first) * 1e3


# --- ring to QUIC to ring ---


class Side:
    """A transport with rings and pumps, as a node has them; the worker's place is taken by callbacks."""

    def __init__(self, seed: bytes, other: bytes, size: int) -> None:
        from swactor_core.config import PluginChoice
        from swactor_core.ids import node_id_of
        from swactor_core.plugins import load_plugins
        from swactor_core.spi.provider import Kind
        from swactor_core.spi.transport import TransportContext

        plugins, choice = load_plugins(), PluginChoice()
        self.arena = plugins.select(Kind.ARENA, choice.arena).factory().create(1 << 30)
        self.plugin = plugins.select(Kind.TRANSPORT, "quic").factory()
        self.other_key = self.plugin.public_key(other)
        self.other = node_id_of(self.other_key)
        context = TransportContext(
            seed=seed,
            node_id=node_id_of(self.plugin.public_key(seed)),
            epoch=1,
            bind_host="127.0.0.1",
            bind_port=0,
            authorise=lambda key: True,
            on_peer_lost=lambda node, why: None,
            settings={"datagram_size": size},
        )
        self.transport = self.plugin.create(context)
        self.offset = 0
        self.tasks: list[asyncio.Task[None]] = []

    def layout(self, number: int, capacity: int) -> Any:
        from swactor_core.ids import RingId
        from swactor_core.specs import RING_HEADER_BYTES, RingLayout, align_up

        total = align_up(RING_HEADER_BYTES + capacity, 4096)
        made = RingLayout(
            RingId(number), self.offset, total, self.offset, self.offset + RING_HEADER_BYTES, capacity, 64
        )
        self.offset += total
        return made

    def _hooks(self, hint: Callable[[Any], None]) -> dict[str, Any]:
        return {"now": asyncio.get_running_loop().time, "tell": lambda action: None, "hint": hint}

    def egress(self, edge_id: int, capacity: int) -> Egress:
        from swactor_core.faults import Component
        from swactor_core.messages import Address, EstablishSend
        from swactor_core.node.pumps import SendPumpTask

        layout = self.layout(2 * edge_id, capacity)
        ring = self.arena.create_ring(layout)
        end = Egress(self.arena.open_ring(layout))
        spec = EstablishSend(edge_id, self.other, layout.ring_id, layout, Address(Component.DRIVER))
        pump = SendPumpTask(spec, ring, self.transport, **self._hooks(end.hinted))
        end.wake_pump = pump.wake
        self.tasks.append(asyncio.ensure_future(pump.run()))
        return end

    async def ingress(self, capacity: int, took: dict[int, Callable[[Any], None]]) -> Ingress:
        """Accepts one edge; what it takes goes to `took` of its edge id, else nowhere."""
        from swactor_core.faults import Component
        from swactor_core.messages import Address, EstablishRecv
        from swactor_core.node.pumps import RecvPumpTask

        peer, edge_id, edge = await self.transport.accept_edge()
        layout = self.layout(2 * edge_id + 1, capacity)
        ring = self.arena.create_ring(layout)
        end = Ingress(self.arena.open_ring(layout), took.get(edge_id, lambda span: None))
        spec = EstablishRecv(edge_id, peer, layout.ring_id, layout, Address(Component.DRIVER))
        pump = RecvPumpTask(spec, ring, edge, **self._hooks(end.hinted))
        end.wake_pump = pump.wake
        self.tasks.append(asyncio.ensure_future(pump.run()))
        return end

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.transport.close()


class Egress:
    """The producer of an egress ring."""

    def __init__(self, ring: Any) -> None:
        self.ring = ring
        self.wake_pump: Callable[[], None]
        self.writable = asyncio.Event()

    def hinted(self, message: Any) -> None:
        self.writable.set()

    def put(self, data: bytes) -> int:
        """Commits as much as fits; how much that was."""
        done = 0
        while done < len(data):
            span = self.ring.writable_span()
            count = min(len(span), len(data) - done)
            if not count:
                break
            span[:count] = data[done : done + count]
            if self.ring.advance_commit(count):
                self.wake_pump()
            done += count
        return done

    async def put_all(self, data: bytes, total: int) -> None:
        left = total
        while left:
            self.writable.clear()
            self.ring.acknowledge_writable()
            count = self.put(data[: min(left, len(data))])
            left -= count
            if not count:
                await self.writable.wait()
            else:
                await asyncio.sleep(0)


class Ingress:
    """The consumer of an ingress ring."""

    def __init__(self, ring: Any, took: Callable[[Any], None]) -> None:
        self.ring = ring
        self.wake_pump: Callable[[], None]
        self._took = took

    def hinted(self, message: Any) -> None:
        self.ring.acknowledge_readable()
        while len(span := self.ring.readable_span()):
            count = len(span)
            self._took(span)
            if self.ring.advance_consume(count):
                self.wake_pump()


class Assembler:
    """Puts objects of OBJECT bytes together from spans; `whole(stamp, arrived)` hears of each."""

    def __init__(self, whole: Callable[[int, int], None]) -> None:
        self._held = b""
        self._whole = whole

    def __call__(self, span: Any) -> None:
        now = time.monotonic_ns()
        self._held += bytes(span)
        while len(self._held) >= OBJECT:
            made, self._held = self._held[:OBJECT], self._held[OBJECT:]
            self._whole(STAMP.unpack_from(made)[0], now)


def stamped(put: Callable[[bytes], Any]) -> None:
    put(STAMP.pack(time.monotonic_ns()) + bytes(OBJECT - STAMP.size))


async def ring_acceptor(options: argparse.Namespace) -> dict[str, Any]:
    side = Side(ACCEPTOR, DIALLER, options.size)
    await side.transport.start()
    say({"port": side.transport.port})
    meter = Meter(options.bytes)
    if options.what == "bulk":
        await side.ingress(RING, {1: lambda span: meter.took(len(span))})
        await meter.done.wait()
    else:
        back: list[Egress] = []
        forward = Assembler(lambda stamp, now: (meter.ways.append(now - stamp), stamped(back[0].put)))
        for _ in range(options.edges):
            await side.ingress(SMALL_RING, {1: forward})
            if not back:  # the peer is known once it has dialled
                back.append(side.egress(BACK, SMALL_RING))
        await lifeline()
    result = {"rate": meter.megabytes_per_second} if meter.received else {"ways": meter.ways}
    await side.close()
    return result


async def ring_dialler(options: argparse.Namespace) -> dict[str, Any]:
    from swactor_core.spi.transport import Peer

    side = Side(DIALLER, ACCEPTOR, options.size)
    await side.transport.start()
    side.transport.set_peer(Peer(side.other, side.other_key, "127.0.0.1", options.port))
    ways: list[int] = []
    if options.what == "bulk":
        end = side.egress(1, RING)
        await end.put_all(os.urandom(1 << 20), options.bytes)
        await lifeline()
    else:
        done = asyncio.Event()
        ends = [side.egress(1, SMALL_RING)]

        def returned(stamp: int, now: int) -> None:
            ways.append(now - stamp)
            if len(ways) < options.objects:
                stamped(ends[0].put)
            else:
                done.set()

        for number in range(2, options.edges + 1):
            ends.append(side.egress(number, SMALL_RING))
            ends[-1].put(b"x")
        stamped(ends[0].put)
        await side.ingress(SMALL_RING, {BACK: Assembler(returned)})
        await done.wait()
    await side.close()
    return {"ways": ways}


# --- stock aioquic ---


def _stock_configuration(size: int, *, client: bool) -> Any:
    import ssl

    from aioquic.quic.configuration import QuicConfiguration

    made = QuicConfiguration(
        is_client=client, alpn_protocols=["bench"], max_datagram_size=size, verify_mode=ssl.CERT_NONE
    )
    if not client:
        from swactor_transport_quic.identity import make_certificate, private_key

        made.private_key = private_key(ACCEPTOR)
        made.certificate = make_certificate(made.private_key, 1)
    return made


def _stock_protocol(options: argparse.Namespace, meter: Meter, *, echo: bool) -> Any:
    from aioquic.asyncio.protocol import QuicConnectionProtocol
    from aioquic.quic.events import StreamDataReceived

    class Protocol(QuicConnectionProtocol):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.turned = asyncio.Event()
            self.out: int | None = None
            self.assembler = Assembler(self.whole)

        def datagram_received(self, data: Any, address: Any) -> None:
            super().datagram_received(data, address)
            self.turned.set()

        def put(self, data: bytes) -> None:
            if self.out is None:
                self.out = self._quic.get_next_available_stream_id(is_unidirectional=True)
            self._quic.send_stream_data(self.out, data)
            self.transmit()

        def whole(self, stamp: int, now: int) -> None:
            meter.ways.append(now - stamp)
            if echo or len(meter.ways) < options.objects:
                stamped(self.put)
            else:
                meter.done.set()

        def quic_event_received(self, event: Any) -> None:
            if isinstance(event, StreamDataReceived):
                if options.what == "bulk":
                    meter.took(len(event.data))
                else:
                    self.assembler(event.data)

    return Protocol


async def stock_acceptor(options: argparse.Namespace) -> dict[str, Any]:
    from aioquic.asyncio import serve

    meter = Meter(options.bytes)
    server = await serve(
        "127.0.0.1",
        0,
        configuration=_stock_configuration(options.size, client=False),
        create_protocol=_stock_protocol(options, meter, echo=True),
    )
    say({"port": server._transport.get_extra_info("sockname")[1]})
    if options.what == "bulk":
        await meter.done.wait()
    else:
        await lifeline()
    server.close()
    return {"rate": meter.megabytes_per_second} if meter.received else {"ways": meter.ways}


async def stock_dialler(options: argparse.Namespace) -> dict[str, Any]:
    from aioquic.asyncio import connect

    meter = Meter(0)
    async with connect(
        "127.0.0.1",
        options.port,
        configuration=_stock_configuration(options.size, client=True),
        create_protocol=_stock_protocol(options, meter, echo=False),
    ) as client:
        if options.what == "bulk":
            data, left = os.urandom(65536), options.bytes
            while left:
                client.turned.clear()
                sender = None if client.out is None else client._quic._streams[client.out].sender
                if sender is not None and sender._buffer_stop - sender._buffer_start > 1 << 20:
                    await client.turned.wait()
                    continue
                count = min(left, len(data))
                client.put(data[:count])
                left -= count
            await lifeline()
        else:
            stamped(client.put)
            await meter.done.wait()
        client.close()
    return {"ways": meter.ways}


# --- plain TCP ---


async def tcp_acceptor(options: argparse.Namespace) -> dict[str, Any]:
    meter = Meter(options.bytes)
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assembler = Assembler(lambda stamp, now: (meter.ways.append(now - stamp), stamped(writer.write)))
        while data := await reader.read(1 << 18):
            if options.what == "bulk":
                meter.took(len(data))
            else:
                assembler(data)
        writer.close()
        over.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
    say({"port": server.sockets[0].getsockname()[1]})
    await over.wait()
    server.close()
    return {"rate": meter.megabytes_per_second} if meter.received else {"ways": meter.ways}


async def tcp_dialler(options: argparse.Namespace) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", options.port)
    ways: list[int] = []
    if options.what == "bulk":
        data, left = os.urandom(1 << 20), options.bytes
        while left:
            count = min(left, len(data))
            writer.write(data[:count])
            await writer.drain()
            left -= count
    else:
        while len(ways) < options.objects:
            stamped(writer.write)
            back = await reader.readexactly(OBJECT)
            ways.append(time.monotonic_ns() - STAMP.unpack_from(back)[0])
    writer.close()
    await writer.wait_closed()
    return {"ways": ways}


# --- both processes and the table ---


def say(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


async def lifeline() -> None:
    """Until the parent closes this process's standard input."""
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    loop.add_reader(sys.stdin, closed.set)
    await closed.wait()
    loop.remove_reader(sys.stdin)


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ring": (ring_acceptor, ring_dialler),
    "aioquic": (stock_acceptor, stock_dialler),
    "tcp": (tcp_acceptor, tcp_dialler),
}


def child(options: argparse.Namespace) -> None:
    gc.freeze()
    role = KINDS[options.kind][options.port != 0]
    if options.profile:
        import cProfile

        profile = cProfile.Profile()
        result = profile.runcall(asyncio.run, role(options))
        profile.dump_stats(f"{options.profile}.{'dialler' if options.port else 'acceptor'}")
    else:
        result = asyncio.run(role(options))
    say(result)


def _start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--child", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(kind: str, what: str, size: int, options: argparse.Namespace, *, edges: int = 1) -> list[Any]:
    """The result of the acceptor and the dialler of one run."""
    total = options.megabytes * 1_000_000
    if kind == "tcp":
        total *= 8
    arguments = ["--kind", kind, "--what", what, "--size", str(size), "--edges", str(edges)]
    arguments += ["--objects", str(options.objects), "--bytes", str(total if what == "bulk" else 0)]
    if options.profile:
        arguments += ["--profile", f"{options.profile}.{kind}.{what}.{size}"]
    started = [_start(arguments)]
    try:
        acceptor = started[0]
        assert acceptor.stdout is not None
        port = json.loads(acceptor.stdout.readline())["port"]
        started.append(_start([*arguments, "--port", str(port)]))
        # The end that measures ends first; the other one waits for its standard input to close.
        order = started if what == "bulk" else started[::-1]
        said = [process.communicate(timeout=40)[0] for process in order]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(text.splitlines()[-1]) for text in said]


def microseconds(ways: list[int], *, warm: int = 50) -> tuple[float, float]:
    """p50 and p99 after the first objects."""
    ordered = sorted(ways[warm:])
    return ordered[len(ordered) // 2] / 1e3, ordered[len(ordered) * 99 // 100] / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1200,16200", help="UDP payloads")
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--objects", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--edges", default="1,16,64")
    parser.add_argument("--kinds", default="ring,aioquic,tcp")
    parser.add_argument("--profile", default="", help="write cProfile files with this prefix")
    for name in ("--kind", "--what"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--size", "--port", "--bytes"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.edges = int(options.edges)
        child(options)
        return
    kinds = options.kinds.split(",")
    print(f"{'datagram':>8} {'kind':8} {'MB/s':>8} {'ratio':>6} {'p50 us':>8} {'p99 us':>8}")
    for size in map(int, options.sizes.split(",")):
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        ways: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(options.repeats):
            for kind in kinds:
                rates[kind].append(measure(kind, "bulk", size, options)[0]["rate"])
                there, back = measure(kind, "objects", size, options)
                ways[kind].append(microseconds(there["ways"] + back["ways"]))
        base = statistics.median(rates.get("aioquic", rates[kinds[0]]))
        for kind in kinds:
            rate = statistics.median(rates[kind])
            half, tail = (statistics.median(values) for values in zip(*ways[kind], strict=True))
            print(f"{size:8} {kind:8} {rate:8.1f} {rate / base:6.2f} {half:8.0f} {tail:8.0f}", flush=True)
    if "ring" in kinds and options.edges:
        print(f"{'edges':>8} {'kind':8} {'p50 us':>8} {'p99 us':>8}   at the last size")
        for edges in map(int, options.edges.split(",")):
            many = [measure("ring", "objects", size, options, edges=edges) for _ in range(options.repeats)]
            figures = [microseconds(there["ways"] + back["ways"]) for there, back in many]
            half, tail = (statistics.median(values) for values in zip(*figures, strict=True))
            print(f"{edges:8} {'ring':8} {half:8.0f} {tail:8.0f}", flush=True)


if __name__ == "__main__":
    main()
