"""Started transports over real loopback sockets, and a UDP relay that loses, repeats, reorders and holds.

What each trap of aioquic and of QUIC is held by (`test_quic_traps.py` looks whether the tests are there):

Credit follows receipt and doubles: test_credit_is_the_preamble_and_then_what_is_granted,
    test_a_stalled_reader_stops_its_sender_at_the_granted_byte
Credit never flushed, lost, lowered: test_a_grant_on_an_idle_connection_is_told_at_once,
    test_a_lost_credit_frame_is_sent_again, test_a_grant_is_never_lowered
Data before acceptance: test_nothing_but_the_preamble_arrives_before_the_first_grant
The send buffer has no bound: test_accepted_and_unacknowledged_bytes_stay_within_the_send_bound,
    test_an_offer_without_credit_takes_nothing_and_its_watcher_hears_of_credit
One stalled edge starves the others: test_in_flight_is_what_both_rings_hold_and_nothing_else_waits
A stream id is not reserved: test_streams_opened_in_one_turn_have_ids_of_their_own
The 129th stream blocks silently: test_three_hundred_edges_on_one_connection,
    test_streams_beyond_the_peers_limit_wait_and_then_fail_by_name
A stream opens all below it: test_streams_opened_by_a_higher_one_have_the_same_deadline
Ended streams return only with a flush: test_streams_stop_at_the_peers_limit_and_return_as_they_end,
    test_closed_channels_make_room_for_new_ones
Resets and stops are events that the stock protocol ignores: test_abort_is_seen_as_broken,
    test_a_stopped_reader_wakes_the_writer
An exception of a handler skips the other events: test_an_internal_error_ends_its_own_connection_only
Datagrams above 16 384 bytes are mis-encoded: test_settings_have_their_documented_bounds,
    test_datagrams_of_every_size_carry_bytes_whole
No path MTU discovery, black holes: test_a_connection_finds_its_path_and_bytes_are_whole,
    test_a_black_hole_is_left_within_seconds_and_the_path_is_found_anew
Slow start ends with jitter, windows restart when idle:
    test_the_window_doubles_to_its_ceiling_and_ignores_jitter, test_an_unused_window_does_not_grow
Acknowledgements wait for a timer: test_an_acknowledgement_can_leave_before_its_timer
The pacer's 16 datagrams a wake-up: test_bursts_are_bounded_on_loopback_and_paced_elsewhere,
    test_a_fast_path_gets_as_much_as_a_timer_can_release, test_a_flush_builds_at_most_one_burst
Packet numbers of two bytes: test_numbers_are_coded_as_rfc_9000_says
Keys are never updated: test_keys_are_updated_in_mid_transfer
Idle timeout kills what is stalled: test_hours_of_stall_end_neither_the_edge_nor_the_connection,
    test_an_idle_connection_outlives_its_idle_timeout
A restarted peer is invisible: test_a_process_restarted_in_place_is_reached_again,
    test_a_new_life_that_dials_replaces_the_old_one, test_a_peer_that_dials_again_replaces_its_dead_connection
A connection is over and looks usable: test_an_edge_opened_after_an_unheard_end_arrives_once,
    test_a_channel_opened_after_an_unheard_end_arrives_once, test_what_was_acknowledged_is_not_sent_again
Addresses change, or differ in form: test_a_dialler_whose_address_changes_keeps_its_edges,
    test_an_edge_under_load_outlives_it, test_an_idle_control_connection_outlives_it,
    test_an_ipv6_wildcard_serves_ipv4_diallers_and_dials_them, test_bulk_survives_loss_over_ipv6
Whoever repeats a datagram from elsewhere takes the traffic:
    test_who_repeats_a_diallers_datagrams_first_gets_little_and_not_for_long,
    test_who_repeats_an_acceptors_datagrams_first_gets_nothing,
    test_who_only_copies_cannot_keep_an_unproved_address,
    test_what_comes_from_elsewhere_with_an_acknowledgement_is_no_reason_to_follow
What anybody can send is taken for a sign of life:
    test_a_peer_that_is_gone_is_known_though_its_datagrams_are_repeated
A challenge that fills a datagram is lost on a narrower way:
    test_a_far_address_is_proved_though_its_way_carries_less
Tickets skip certificates: test_no_ticket_is_issued
Names and secrets in the clear or in a log: test_no_name_is_sent_and_nothing_is_logged
The certificate is asked for too early or too late, an empty one passes:
    test_a_client_without_certificate_is_refused, test_a_copied_certificate_without_its_key_is_refused
A dialler is through before it was judged: test_an_unknown_key_is_refused_by_the_acceptor,
    test_a_refusal_ends_the_handshake_with_a_certificate_alert
The protocol is known only after the connection: test_each_protocol_has_its_stream_limits_on_both_sides
Half-open connections live for the idle timeout: test_half_open_connections_are_few_and_end_in_time,
    test_loopback_is_admitted_and_far_addresses_prove_themselves
Nobody waits for a full socket: test_a_full_socket_pauses_sending_and_loses_nothing,
    test_nothing_is_built_while_the_socket_is_full
Default UDP buffers: test_the_doctor_check_reads_the_buffer
Runs that kernel or way refuse: test_a_kernel_that_refuses_to_split_gets_datagrams_one_by_one,
    test_a_refusal_for_another_reason_does_not_end_segmentation,
    test_a_datagram_too_big_for_any_socket_is_reported_by_its_size
Private names drift: test_each_private_name_is_there_and_its_loss_is_named
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from swactor_core.ids import NodeId, node_id_of
from swactor_core.spi.transport import Peer, TransportContext
from swactor_transport_quic.transport import QuicPlugin, QuicTransport

PATIENCE = 20.0


@dataclass
class Node:
    """A transport with what its host would keep beside it."""

    transport: QuicTransport
    node_id: NodeId
    key: bytes
    epoch: int
    allowed: set[bytes] | None
    lost: asyncio.Queue[tuple[NodeId, str]] = field(default_factory=asyncio.Queue)

    def peer(self, *, port: int | None = None, epoch: int = 0, key: bytes | None = None) -> Peer:
        """This node as others know it."""
        return Peer(self.node_id, key or self.key, self.transport.host, port or self.transport.port, epoch)

    async def edge_to(self, other: Node, edge_id: int = 1) -> tuple[Any, Any]:
        """A fresh edge: its sender here and its reader at `other`."""
        sender = await self.transport.open_edge(other.node_id, edge_id, deadline=5)
        node_id, seen, reader = await asyncio.wait_for(other.transport.accept_edge(), PATIENCE)
        assert (node_id, seen) == (self.node_id, edge_id)
        return sender, reader

    async def control_to(self, other: Node) -> tuple[Any, Any]:
        mine = await self.transport.open_control(other.node_id, deadline=5)
        theirs = await asyncio.wait_for(other.transport.accept_control(), PATIENCE)
        return mine, theirs


NodeMaker = Callable[..., Any]


@pytest_asyncio.fixture
async def make_node() -> AsyncIterator[NodeMaker]:
    """`await make_node(name, ...)`: started, and closed at the end of the test."""
    nodes: list[Node] = []

    async def make(
        name: str,
        *,
        epoch: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed: set[bytes] | None = None,
        **settings: Any,
    ) -> Node:
        seed = name.encode().ljust(32, b".")
        plugin = QuicPlugin()
        key = plugin.public_key(seed)
        lost: asyncio.Queue[tuple[NodeId, str]] = asyncio.Queue()
        context = TransportContext(
            seed=seed,
            node_id=node_id_of(key),
            epoch=epoch,
            bind_host=host,
            bind_port=port,
            authorise=lambda candidate: allowed is None or candidate in allowed,
            on_peer_lost=lambda node_id, why: lost.put_nowait((node_id, why)),
            settings=settings,
        )
        node = Node(plugin.create(context), node_id_of(key), key, epoch, allowed, lost)
        await node.transport.start()
        nodes.append(node)
        return node

    yield make
    await asyncio.gather(*(node.transport.close() for node in nodes))


@pytest_asyncio.fixture
async def pair(make_node: NodeMaker) -> tuple[Node, Node]:
    """Two nodes that know each other."""
    left, right = await make_node("left"), await make_node("right")
    left.transport.set_peer(right.peer())
    right.transport.set_peer(left.peer())
    return left, right


class Relay:
    """Stands between a dialler and `target`; what happens to each datagram is drawn from a seed."""

    def __init__(
        self, target: tuple[str, int], *, seed: int, loss: float, repeat: float, reorder: float
    ) -> None:
        self._random = random.Random(seed)
        self._target = target
        self._loss, self._repeat, self._reorder = loss, repeat, reorder
        self._family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        self._held: list[tuple[socket.socket, bytes, tuple[str, int]]] = []
        self._back: dict[tuple[str, int], socket.socket] = {}
        self._front = self._socket()
        self.holding = False
        self.dropped = 0
        self.passed = 0
        asyncio.get_running_loop().add_reader(self._front, self._from_dialler)

    def _socket(self) -> socket.socket:
        made = socket.socket(self._family, socket.SOCK_DGRAM)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 1024 * 1024)
        made.bind(("127.0.0.1" if self._family == socket.AF_INET else "::1", 0))
        return made

    @property
    def port(self) -> int:
        return self._front.getsockname()[1]

    def _from_dialler(self) -> None:
        while True:
            try:
                data, source = self._front.recvfrom(65535)
            except BlockingIOError:
                return
            back = self._back.get(source)
            if back is None:
                back = self._back[source] = self._socket()
                asyncio.get_running_loop().add_reader(back, self._from_target, back, source)
            self._pass(back, data, self._target)

    def _from_target(self, back: socket.socket, dialler: tuple[str, int]) -> None:
        while True:
            try:
                data, _ = back.recvfrom(65535)
            except BlockingIOError:
                return
            self._pass(self._front, data, dialler)

    def _pass(self, via: socket.socket, data: bytes, to: tuple[str, int]) -> None:
        if self.holding or self._random.random() < self._loss:
            self.dropped += 1
            return
        self.passed += 1
        if self._random.random() < self._reorder:
            self._held.append((via, data, to))
            return
        via.sendto(data, to)
        if self._random.random() < self._repeat:
            via.sendto(data, to)
        held, self._held = self._held, []
        for entry in held:
            entry[0].sendto(entry[1], entry[2])

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for made in (self._front, *self._back.values()):
            loop.remove_reader(made)
            made.close()


@pytest_asyncio.fixture
async def make_relay() -> AsyncIterator[Callable[..., Relay]]:
    relays: list[Relay] = []

    def make(
        target: Node, *, seed: int = 1, loss: float = 0.0, repeat: float = 0.0, reorder: float = 0.0
    ) -> Relay:
        where = (target.transport.host, target.transport.port)
        relay = Relay(where, seed=seed, loss=loss, repeat=repeat, reorder=reorder)
        relays.append(relay)
        return relay

    yield make
    for relay in relays:
        relay.close()


@pytest.fixture
def pattern() -> Callable[[int, int], bytes]:
    """`pattern(seed, count)`: bytes that differ at every place, the same for the same seed."""
    return lambda seed, count: random.Random(seed).randbytes(count)


async def send_all(edge: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[await edge.write(view) :]


async def read_exactly(reader: Any, count: int, *, granted: int | None = None) -> bytes:
    """Reads `count` bytes; with `granted`, grants that much ahead of what was read."""
    received = bytearray()
    if granted is not None:
        reader.grant(granted)
    while len(received) < count:
        chunk = memoryview(bytearray(min(65536, count - len(received))))
        taken = await reader.read_into(chunk)
        assert taken, f"end of stream after {len(received)} of {count} bytes"
        received += chunk[:taken]
        if granted is not None:
            reader.grant(len(received) + granted)
    return bytes(received)


@dataclass(frozen=True)
class Flow:
    """What both ends of an edge do in most tests."""

    send_all: Callable[[Any, bytes], Any]
    read_exactly: Callable[..., Any]


@pytest.fixture
def flow() -> Flow:
    return Flow(send_all, read_exactly)
