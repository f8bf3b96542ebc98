"""Address translators that forget: a connection goes on from another port, whichever side that happens to.

RFC 9000 section 9 for the side that dialled, and beyond it for the side that accepted: behind a translator an
acceptor's address changes as little by its own will as a dialler's does.
"""

from __future__ import annotations

import asyncio
import socket

import pytest
import pytest_asyncio
from swactor_transport_quic.link import LinkState

MIB = 1024 * 1024


class Translator:
    """Stands between one dialler and one acceptor. `dialled` is where the dialler sends; what comes there
    leaves from `out`, and what comes to `out` leaves from `back`: from `dialled` until that is forgotten."""

    def __init__(self, acceptor: tuple[str, int]) -> None:
        self._acceptor = acceptor
        self.largest = 65535
        """Bytes of a datagram beyond which it is lost."""
        self._dialler: tuple[str, int] | None = None
        self._sockets: list[socket.socket] = []
        self.dialled = self.back = self._opened(self._from_dialler)
        self.out = self._opened(self._from_acceptor)
        self.tapped = lambda data, to: None
        """Sees each datagram first, and where it goes."""

    def _opened(self, reader) -> socket.socket:
        over_6 = ":" in self._acceptor[0]
        made = socket.socket(socket.AF_INET6 if over_6 else socket.AF_INET, socket.SOCK_DGRAM)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB)
        made.bind(("::1" if over_6 else "127.0.0.1", 0))
        asyncio.get_running_loop().add_reader(made, reader, made)
        self._sockets.append(made)
        return made

    def forget_dialler(self) -> None:
        """The dialler's datagrams leave from another port; what comes to the former is lost."""
        asyncio.get_running_loop().remove_reader(self.out)
        self.out = self._opened(self._from_acceptor)

    def forget_acceptor(self, *, deaf: bool) -> None:
        """The acceptor's datagrams come from another port; the former is `deaf` or still takes what comes."""
        if deaf:
            asyncio.get_running_loop().remove_reader(self.back)
        self.back = self._opened(self._from_dialler)

    @property
    def port(self) -> int:
        return self.dialled.getsockname()[1]

    def _from_dialler(self, at: socket.socket) -> None:
        for data, source in self._arrived(at):
            self._dialler = source
            self.tapped(data, self._acceptor)
            self.out.sendto(data, self._acceptor)

    def _from_acceptor(self, at: socket.socket) -> None:
        for data, _ in self._arrived(at):
            assert self._dialler is not None
            self.tapped(data, self._dialler)
            self.back.sendto(data, self._dialler)

    def _arrived(self, at: socket.socket):
        while True:
            try:
                data, source = at.recvfrom(65535)
                if len(data) <= self.largest:
                    yield data, source
            except (BlockingIOError, ConnectionRefusedError):
                return

    def close(self) -> None:
        for made in self._sockets:
            asyncio.get_running_loop().remove_reader(made)
            made.close()


@pytest_asyncio.fixture
async def translated(make_node):
    """Two nodes of which the left one dials the right one through a translator, and the translator."""
    left, right = await make_node("left"), await make_node("right")
    translator = Translator((right.transport.host, right.transport.port))
    left.transport.set_peer(right.peer(port=translator.port))
    yield left, right, translator
    translator.close()


FORGETS = {
    "dialler": lambda translator: translator.forget_dialler(),
    "acceptor": lambda translator: translator.forget_acceptor(deaf=True),
    "acceptor's answers": lambda translator: translator.forget_acceptor(deaf=False),
    "both": lambda translator: (translator.forget_dialler(), translator.forget_acceptor(deaf=False)),
}


async def both_follow(left, right, translator) -> None:
    """Until each side sends where the other is now, and that is proved: who moves while the other still looks
    for it is found by nobody."""

    async def look() -> None:
        (dialled,), (accepted,) = left.transport._endpoint.links, right.transport._endpoint.links
        while True:
            paths = dialled.quic._network_paths[0], accepted.quic._network_paths[0]
            ports = translator.back.getsockname()[1], translator.out.getsockname()[1]
            if tuple(path.addr[1] for path in paths) == ports and all(path.is_validated for path in paths):
                return
            await dialled.activity.wait()

    await asyncio.wait_for(look(), 20)


def check_nothing_was_lost(left, right, *links) -> None:
    assert left.lost.empty()
    assert right.lost.empty()
    assert set(links) == {*left.transport._endpoint.links, *right.transport._endpoint.links}


@pytest.mark.parametrize("what", FORGETS)
async def test_an_edge_under_load_outlives_it(translated, flow, pattern, what):
    left, right, translator = translated
    sender, reader = await left.edge_to(right)
    links = left.transport._endpoint.links + right.transport._endpoint.links
    data = pattern(4, 3 * MIB)
    sending = asyncio.ensure_future(flow.send_all(sender, data))
    reader.grant(2 * MIB)  # from the start of the edge
    received = await flow.read_exactly(reader, MIB)
    FORGETS[what](translator)
    received += await asyncio.wait_for(flow.read_exactly(reader, MIB // 2), 20)
    reader.grant(len(data))
    received += await asyncio.wait_for(flow.read_exactly(reader, len(data) - len(received)), 20)
    await sending
    assert received == data
    check_nothing_was_lost(left, right, *links)


@pytest.mark.parametrize("what", FORGETS)
async def test_an_idle_control_connection_outlives_it(translated, what):
    left, right, translator = translated
    mine, theirs = await left.control_to(right)
    await mine.send(b"before")
    assert await theirs.receive() == b"before"
    links = left.transport._endpoint.links + right.transport._endpoint.links
    FORGETS[what](translator)
    # The acceptor speaks first, to an address that is no more; more than an unproved one may be sent.
    answer = bytes(200_000)
    sending = asyncio.ensure_future(theirs.send(answer))
    assert await asyncio.wait_for(mine.receive(), 20) == answer
    await sending
    await mine.send(b"after")
    assert await asyncio.wait_for(theirs.receive(), 20) == b"after"
    check_nothing_was_lost(left, right, *links)


@pytest.mark.parametrize(
    ("moves", "packets"), [(("dialler", "acceptor"), 2**20), (("dialler", "acceptor's answers"), 256)]
)
async def test_peers_that_move_again_and_again_keep_their_edge(make_node, flow, pattern, moves, packets):
    """By turns either side; where nothing is sent to a dead address, with new keys every 256 packets.
    (Keys that change on one side only, because the address is dead at that moment, are not seen to.)"""
    left = await make_node("left", key_update_packets=packets, datagram_size=1200)
    right = await make_node("right")
    translator = Translator((right.transport.host, right.transport.port))
    left.transport.set_peer(right.peer(port=translator.port))
    try:
        sender, reader = await left.edge_to(right)
        links = left.transport._endpoint.links + right.transport._endpoint.links
        data = pattern(5, 6 * MIB)
        reader.grant(MIB // 2)
        sending = asyncio.ensure_future(flow.send_all(sender, data))
        received = b""
        for number in range(6):
            received += await asyncio.wait_for(flow.read_exactly(reader, MIB // 4), 20)
            FORGETS[moves[number % 2]](translator)
            reader.grant(len(received) + MIB)
            received += await asyncio.wait_for(flow.read_exactly(reader, MIB // 2), 20)
            if "acceptor" in moves:
                await both_follow(left, right, translator)
        reader.grant(len(data))
        received += await asyncio.wait_for(flow.read_exactly(reader, len(data) - len(received)), 20)
        await sending
        assert received == data
        (dialled,) = left.transport._endpoint.links
        assert dialled.key_updates >= 2 or packets > 256
        check_nothing_was_lost(left, right, *links)
    finally:
        translator.close()


@pytest.mark.parametrize("what", ["dialler", "acceptor"])
async def test_the_way_to_another_address_may_carry_less(translated, flow, pattern, what):
    """Datagrams of 16 KiB went before; of the new way none above 1300 bytes comes out."""
    left, right, translator = translated
    sender, reader = await left.edge_to(right)
    links = left.transport._endpoint.links + right.transport._endpoint.links
    data = pattern(6, 3 * MIB)
    reader.grant(len(data))
    sending = asyncio.ensure_future(flow.send_all(sender, data))
    received = await flow.read_exactly(reader, MIB)
    (dialled,) = left.transport._endpoint.links
    assert dialled.quic._max_datagram_size > 1300
    FORGETS[what](translator)
    translator.largest = 1300
    received += await asyncio.wait_for(flow.read_exactly(reader, len(data) - len(received)), 20)
    await sending
    assert received == data
    check_nothing_was_lost(left, right, *links)


async def test_an_address_is_followed_over_ipv6(make_node, flow, pattern):
    left, right = await make_node("left", host="::1"), await make_node("right", host="::1")
    translator = Translator((right.transport.host, right.transport.port))
    left.transport.set_peer(right.peer(port=translator.port))
    try:
        sender, reader = await left.edge_to(right)
        links = left.transport._endpoint.links + right.transport._endpoint.links
        data = pattern(7, 2 * MIB)
        sending = asyncio.ensure_future(flow.send_all(sender, data))
        reader.grant(MIB)
        received = await flow.read_exactly(reader, MIB // 2)
        for what in ("dialler", "acceptor"):
            FORGETS[what](translator)
            reader.grant(len(received) + MIB)
            received += await asyncio.wait_for(flow.read_exactly(reader, MIB // 2), 20)
            await both_follow(left, right, translator)
        reader.grant(len(data))
        received += await asyncio.wait_for(flow.read_exactly(reader, len(data) - len(received)), 20)
        await sending
        assert received == data
        check_nothing_was_lost(left, right, *links)
    finally:
        translator.close()


class Repeater:
    """An attacker on its own address, off the path, who sees every datagram and whose copies arrive first."""

    def __init__(self, translator: Translator) -> None:
        self.udp = translator._opened(self._taken)
        self.sent: dict[tuple[str, int], int] = {}
        self.got: dict[tuple[str, int], int] = {}
        self._translator = translator

    def begin(self, victim: tuple[str, int]) -> None:
        """Copies what goes to `victim`."""

        def tapped(data: bytes, to: tuple[str, int]) -> None:
            if to == victim:
                self.repeat(data, to)

        self._translator.tapped = tapped

    def repeat(self, data: bytes, to: tuple[str, int]) -> None:
        self.sent[to] = self.sent.get(to, 0) + len(data)
        self.udp.sendto(data, to)

    def end(self) -> None:
        self._translator.tapped = lambda data, to: None

    def _taken(self, at: socket.socket) -> None:
        for data, source in self._translator._arrived(at):
            self.got[source] = self.got.get(source, 0) + len(data)


def where(node) -> tuple[str, int]:
    return node.transport.host, node.transport.port


async def test_who_repeats_a_diallers_datagrams_first_gets_little_and_not_for_long(translated, flow, pattern):
    left, right, translator = translated
    sender, reader = await left.edge_to(right)
    mine, theirs = await left.control_to(right)
    links = left.transport._endpoint.links + right.transport._endpoint.links
    genuine = {link.quic.get_peer_address() for link in right.transport._endpoint.links}
    attacker = Repeater(translator)
    data = pattern(4, 2 * MIB)
    reader.grant(len(data))
    sending = asyncio.ensure_future(flow.send_all(sender, data))
    received = await flow.read_exactly(reader, MIB // 4)
    attacker.begin(where(right))
    answers = asyncio.ensure_future(theirs.send(bytes(300_000)))
    received += await asyncio.wait_for(flow.read_exactly(reader, MIB), 20)
    assert await asyncio.wait_for(mine.receive(), 20) == bytes(300_000)
    await answers
    assert attacker.sent[where(right)] > 0
    assert attacker.got.get(where(right), 0) <= 3 * attacker.sent[where(right)], (
        "an unproved address got more"
    )
    attacker.end()
    received += await asyncio.wait_for(flow.read_exactly(reader, len(data) - len(received)), 20)
    await sending
    await mine.send(b"here")
    assert await theirs.receive() == b"here"
    assert received == data
    assert {link.quic.get_peer_address() for link in right.transport._endpoint.links} == genuine
    assert all(link.quic._network_paths[0].is_validated for link in right.transport._endpoint.links)
    check_nothing_was_lost(left, right, *links)


async def test_who_repeats_an_acceptors_datagrams_first_gets_nothing(translated, flow, pattern):
    left, right, translator = translated
    sender, reader = await left.edge_to(right)
    mine, theirs = await left.control_to(right)
    links = left.transport._endpoint.links + right.transport._endpoint.links
    attacker = Repeater(translator)
    attacker.begin(where(left))
    data = pattern(4, 2 * MIB)
    reader.grant(len(data))
    sending = asyncio.ensure_future(flow.send_all(sender, data))
    assert await asyncio.wait_for(flow.read_exactly(reader, len(data)), 20) == data
    await sending
    await theirs.send(b"there")
    assert await mine.receive() == b"there"
    assert attacker.sent[where(left)] > 0
    assert not attacker.got
    assert all(
        link.quic.get_peer_address() == ("127.0.0.1", translator.port)
        for link in left.transport._endpoint.links
    )
    check_nothing_was_lost(left, right, *links)


async def test_an_old_datagram_from_another_address_changes_nothing(translated):
    left, right, translator = translated
    mine, theirs = await left.control_to(right)
    seen: list[bytes] = []
    translator.tapped = lambda data, to: seen.append(data) if to == where(right) else None
    for number in range(20):
        await mine.send(bytes([number]) * 100)
        assert await theirs.receive() == bytes([number]) * 100
    (accepted,) = right.transport._endpoint.links
    genuine = accepted.quic.get_peer_address()
    attacker = Repeater(translator)
    for data in seen:
        attacker.repeat(data, where(right))
    await mine.send(b"and now")
    assert await theirs.receive() == b"and now"
    assert accepted.quic.get_peer_address() == genuine
    assert not attacker.got


async def test_that_nobody_listens_any_more_where_a_peer_was_is_no_news_of_it(translated):
    left, right, translator = translated
    mine, theirs = await left.control_to(right)
    (accepted,) = right.transport._endpoint.links
    former = accepted.quic.get_peer_address()
    translator.forget_dialler()
    await mine.send(b"from another port")
    assert await theirs.receive() == b"from another port"
    for _ in range(50):
        await theirs.send(b"proof")
        assert await mine.receive() == b"proof"
    assert accepted.quic._network_paths[0].is_validated
    now = accepted.quic.get_peer_address()
    assert now != former
    right.transport._endpoint._refused = {former}
    right.transport._endpoint._report_refused()
    assert accepted.state is LinkState.READY
    right.transport._endpoint._refused = {now}
    right.transport._endpoint._report_refused()
    assert accepted.state is LinkState.CLOSED


async def test_an_unproved_address_where_nobody_listens_is_left_at_once(translated):
    """Who repeats a datagram and closes its socket ends no connection."""
    left, right, translator = translated
    mine, theirs = await left.control_to(right)
    (accepted,) = right.transport._endpoint.links
    genuine = accepted.quic.get_peer_address()
    attacker = Repeater(translator)
    translator.tapped = lambda data, to: (attacker.repeat(data, to), attacker.end())
    gone = attacker.udp.getsockname()
    asyncio.get_running_loop().remove_reader(attacker.udp)
    await mine.send(b"repeated")
    assert await theirs.receive() == b"repeated"
    translator._sockets.remove(attacker.udp)
    attacker.udp.close()
    right.transport._endpoint._refused = {gone}
    right.transport._endpoint._report_refused()
    assert accepted.state is LinkState.READY
    assert accepted.quic.get_peer_address() == genuine
    for _ in range(3):
        await theirs.send(b"still here")
        assert await asyncio.wait_for(mine.receive(), 10) == b"still here"


async def test_what_was_due_at_an_address_where_nobody_listens_leaves_for_the_last_proved_one_at_once(
    translated,
):
    left, right, translator = translated
    mine, theirs = await left.control_to(right)
    (accepted,) = right.transport._endpoint.links
    attacker = Repeater(translator)
    translator.tapped = lambda data, to: (attacker.repeat(data, to), attacker.end())
    asyncio.get_running_loop().remove_reader(attacker.udp)
    gone = attacker.udp.getsockname()
    await mine.send(b"repeated")
    assert await theirs.receive() == b"repeated"
    if accepted.quic.get_peer_address() != gone:
        pytest.fail("the copy did not arrive first")
    accepted._flush_handle = None if accepted._flush_handle is None else accepted._flush_handle.cancel()
    accepted.refused(gone)
    assert accepted.quic.get_peer_address() != gone
    assert accepted._flush_handle is not None


@pytest.mark.parametrize("what", ["copies", "garbage"])
async def test_a_peer_that_is_gone_is_known_though_its_datagrams_are_repeated(make_node, what):
    """What anybody can send, with a connection id that was seen, is no sign of life."""
    left = await make_node("left", probe_interval=0.1, loss_after=0.3)
    right = await make_node("right")
    translator = Translator((right.transport.host, right.transport.port))
    left.transport.set_peer(right.peer(port=translator.port))
    try:
        mine, theirs = await left.control_to(right)
        seen: list[bytes] = []
        translator.tapped = lambda data, to: seen.append(data) if to == where(left) else None
        for _ in range(20):
            await theirs.send(b"alive")
            assert await mine.receive() == b"alive"
        translator.tapped = lambda data, to: None
        if what == "garbage":
            seen = [data[:9] + bytes(40) for data in seen]
        translator.largest = 0
        loop = asyncio.get_running_loop()
        gone_at = loop.time()

        def repeat() -> None:
            nonlocal timer
            for data in seen:
                translator.back.sendto(data, where(left))
            timer = loop.call_later(0.02, repeat)

        timer = loop.call_later(0, repeat)
        try:
            node_id, _ = await asyncio.wait_for(left.lost.get(), 10)
        finally:
            timer.cancel()
        assert node_id == right.node_id
        assert loop.time() - gone_at < 5  # 0.4 s, on a machine that is not busy
    finally:
        translator.close()
