"""What a datagram from nobody costs a node: microseconds of its one thread, and what is left of it.

    python bench/strangers.py [--packets N]

A transport of this process is handed packets of each kind as if its socket had them; figures are medians of
single packets. "admitted" are those that begin a handshake, which a rate and the caps on half-open
connections bound; all others leave nothing behind. The last line is a packet of an established peer, to
compare with.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from swactor_core.ids import node_id_of
from swactor_core.spi.transport import Peer, TransportContext
from swactor_transport_quic.link import Alpn
from swactor_transport_quic.transport import QuicPlugin

AWAY = ("192.0.2.1", 4433)


def make(name: str, **settings: Any) -> tuple[Any, bytes]:
    plugin, seed = QuicPlugin(), name.encode().ljust(32, b".")
    key = plugin.public_key(seed)
    context = TransportContext(
        seed=seed,
        node_id=node_id_of(key),
        epoch=1,
        bind_host="127.0.0.1",
        bind_port=0,
        authorise=lambda candidate: True,
        on_peer_lost=lambda node, why: None,
        settings=settings,
    )
    return plugin.create(context), key


def initial(transport: Any) -> bytes:
    quic = transport._maker.dialling(Alpn.EDGE, lambda claim: "", local=False)
    quic.connect((transport.host, transport.port), 0.0)
    first: bytes = quic.datagrams_to_send(0.0)[0][0]
    return first


async def measure(packets: int) -> None:
    logging.disable(logging.WARNING)
    right, key = make("right")
    left, _ = make("left")
    await right.start()
    await left.start()
    draw = random.Random(1)
    hello = initial(right)
    loop = asyncio.get_running_loop()

    def another() -> bytes:
        return hello[:6] + draw.randbytes(8) + hello[14:]

    def unknown_version() -> bytes:
        return hello[:1] + b"\x0a\x1a\x2a\x3a" + hello[5:]

    kinds: dict[str, Callable[[], bytes]] = {
        "random bytes": lambda: b"\x40" + draw.randbytes(1199),
        "HTTP": lambda: b"GET / HTTP/1.1\r\n\r\n" * 70,
        "another version: told ours": unknown_version,
        "first packet: retry": another,
    }
    print(f"{'packet of 1200 bytes':34} {'us':>8}")
    for name, build in kinds.items():
        print(f"{name:34} {cost(right, [build() for _ in range(packets)], AWAY):8.1f}")
    few = [initial(right) for _ in range(12)]
    here = ("127.0.0.1", 9)
    print(f"{'first packet: admitted':34} {cost(right, few, here):8.1f}")
    print(f"{'links after all of it':34} {len(right._endpoint.links):8d}")
    for link in right._endpoint.links:
        link.lose("measured")
    left.set_peer(Peer(node_id_of(key), key, "127.0.0.1", right.port))
    await left.connect(node_id_of(key), deadline=5)
    (ours,), (link,) = right._endpoint.links, left._endpoint.links
    await asyncio.sleep(0.2)  # the handshake's last packets are not what is measured
    took = []
    for number in range(packets):
        data = link.quic._seal(b"\x01\0\0\0", link.quic._packet_number + number)
        began = time.perf_counter_ns()
        ours.receive(data, ours.address, loop.time())
        took.append((time.perf_counter_ns() - began) / 1e3)
    print(f"{'ping of an established peer':34} {statistics.median(took):8.1f}")
    await asyncio.gather(left.close(), right.close())


def cost(transport: Any, datagrams: list[bytes], address: tuple[str, int]) -> float:
    """The median microseconds of routing one of them, reply and all."""
    endpoint, loop = transport._endpoint, asyncio.get_running_loop()
    took = []
    for data in datagrams:
        began = time.perf_counter_ns()
        link = endpoint._route(data, address, loop.time())
        if link is not None:
            link.receive(data, address, loop.time())
        took.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packets", type=int, default=2000)
    asyncio.run(measure(parser.parse_args().packets))


if __name__ == "__main__":
    main()
