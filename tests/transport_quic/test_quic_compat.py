"""aioquic's private names: one test per name, and what each override does, without any socket."""

from __future__ import annotations

import ast
import types
from pathlib import Path

import pytest
from aioquic import tls
from aioquic.quic import events
from aioquic.quic.connection import QuicConnection
from swactor_core.errors import PluginError
from swactor_transport_quic import compat
from swactor_transport_quic.admission import Admitted
from swactor_transport_quic.compat import BurstLimit, check_names, private_names
from swactor_transport_quic.compat.connection import PacedBursts
from swactor_transport_quic.compat.packets import ShortPackets
from swactor_transport_quic.connections import ConnectionMaker
from swactor_transport_quic.link import Alpn
from swactor_transport_quic.settings import QuicSettings

NAMES = [(owner, name) for owner, (_, names) in private_names().items() for name in names]
SERVER = ("192.0.2.1", 1)
CLIENT = ("192.0.2.2", 2)


class Wire:
    """A dialling and an accepting connection that hand each other datagrams in virtual time."""

    def __init__(self, alpn: str = Alpn.EDGE, *, refuse: str = "", **settings) -> None:
        parsed = QuicSettings(**settings)
        dialler = ConnectionMaker(seed=b"d" * 32, epoch=3, settings=parsed)
        acceptor = ConnectionMaker(seed=b"a" * 32, epoch=4, settings=parsed)
        self.now = 0.0
        self.left = dialler.dialling(alpn, lambda claim: "", local=True)
        self.left.connect(SERVER, self.now)
        first = self.left.original_destination_connection_id
        self.right = acceptor.accepting(Admitted(first, first, None), lambda claim: refuse, local=True)
        self.seen: dict[object, list[events.QuicEvent]] = {self.left: [], self.right: []}
        self.datagrams: list[bytes] = []

    def run(self, rounds: int = 10) -> Wire:
        for _ in range(rounds):
            self.now += 0.002
            for source, target, address in ((self.left, self.right, CLIENT), (self.right, self.left, SERVER)):
                timer = source.get_timer() if source.datagrams_known else None
                if timer is not None and timer <= self.now:
                    source.handle_timer(self.now)
                source.renew_burst()
                for data, _ in source.datagrams_to_send(self.now):
                    self.datagrams.append(data)
                    target.receive_datagram(data, address, self.now)
                    target.datagrams_known = True
                target.settle()
                while (event := target.next_event()) is not None:
                    self.seen[target].append(event)
                source.datagrams_known = True
        return self

    def data(self, side, stream_id: int) -> bytes:
        return b"".join(
            e.data
            for e in self.seen[side]
            if isinstance(e, events.StreamDataReceived) and e.stream_id == stream_id
        )


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    # A server has no network path, and so cannot be asked for datagrams, before its first datagram.
    monkeypatch.setattr(compat.Connection, "datagrams_known", False, raising=False)


def ready(alpn: str = Alpn.EDGE, **settings) -> Wire:
    wire = Wire(alpn, **settings)
    for data, _ in wire.left.datagrams_to_send(0.0):
        wire.right.receive_datagram(data, CLIENT, 0.0)
    wire.left.datagrams_known = wire.right.datagrams_known = True
    return wire.run()


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=[f"{o}.{n}" for o, n in NAMES])
def test_each_private_name_is_there_and_its_loss_is_named(owner, name):
    owners = private_names()
    real, names = owners[owner]
    assert hasattr(real, name)
    stand_in = types.SimpleNamespace(**{n: getattr(real, n) for n in names if n != name})
    with pytest.raises(PluginError, match=rf"aioquic \d+\.\d+\.\d+.* lacks {owner}.{name}") as caught:
        check_names({**owners, owner: (stand_in, names)})
    assert "aioquic>=1.7.2" in caught.value.hint


def test_names_in_use_are_all_in_the_table():
    """Every attribute with a leading underscore that compat reads from aioquic is checked at import."""
    own = {
        "_limits",
        "_judge",
        "_burst_limit",
        "_burst",
        "_left",
        "_stream",
        "_sender",
        "_apply_limits",
        "_judge_peer",
    }
    own |= {
        "_connection",
        "_one_rtt",
        "_aborted",
        "_asked_at",
        "_asked_from",
        "_follow",
        "_idle_renewed",
        "_unacknowledged",
        "_late_acks",
        "_probed_at",
        "_oldest_lost",
        "_path_size",
        "_rate",
        "_credit",
        "_credit_at",
    }
    used = {
        node.attr
        for file in Path(compat.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    own |= {name for name in dir(ShortPackets) if not hasattr(QuicConnection, name)}
    assert used - own <= {name for _, name in NAMES}


def test_the_handshake_ends_with_both_claims_known():
    wire = ready()
    assert wire.left.confirmed
    assert wire.right.confirmed
    assert (wire.left.claim.epoch, wire.right.claim.epoch) == (4, 3)
    assert len(wire.left.claim.public_key) == 32
    assert wire.left.claim.public_key != wire.right.claim.public_key


def test_a_refusal_ends_the_handshake_with_a_certificate_alert():
    wire = ready(refuse="not today")
    assert not wire.left.confirmed
    assert not wire.right.confirmed
    assert wire.right.refusal == "not today"
    assert wire.left.ending is not None
    assert (wire.left.ending.code, wire.left.ending.reason, wire.left.ending.by_peer) == (
        0x12A,
        "not today",
        True,
    )
    assert not wire.left.ending.application
    assert wire.right.ending is not None
    assert not wire.right.ending.by_peer


def test_streams_opened_in_one_turn_have_ids_of_their_own():
    wire = ready()
    halves = [wire.left.open_stream(bytes([n]) * 8, is_unidirectional=True) for n in range(20)]
    assert len({half.stream_id for half in halves}) == 20
    wire.run()
    assert [wire.data(wire.right, half.stream_id) for half in halves] == [bytes([n]) * 8 for n in range(20)]


def test_no_name_is_sent_and_nothing_is_logged():
    wire = ready()
    for side in (wire.left, wire.right):
        assert side.configuration.server_name is None
        assert side.configuration.quic_logger is None
        assert side.configuration.secrets_log_file is None
    assert wire.right.tls._server_name is None


def test_no_ticket_is_issued():
    wire = ready()
    assert wire.left._session_ticket_handler is None
    assert wire.right.tls.new_session_ticket_cb is None


@pytest.mark.parametrize(
    ("alpn", "uni", "bidi"), [(Alpn.EDGE, (1024, 8), (0, 0)), (Alpn.CONTROL, (0, 0), (8, 256 * 1024))]
)
def test_each_protocol_has_its_stream_limits_on_both_sides(alpn, uni, bidi):
    wire = ready(alpn)
    for side in (wire.left, wire.right):
        assert (side._remote_max_streams_uni, side._remote_max_stream_data_uni) == uni
        assert (side._remote_max_streams_bidi, side._remote_max_stream_data_bidi_remote) == bidi
        assert side._remote_max_data == 2**61
    assert wire.left.open_stream(b"x" * 8, is_unidirectional=alpn == Alpn.CONTROL) is None


def test_credit_is_the_preamble_and_then_what_is_granted():
    wire = ready()
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    assert half is not None
    wire.left.send_stream_data(half.stream_id, bytes(100_000))
    wire.run()
    assert wire.data(wire.right, half.stream_id) == b"preamble"
    received = wire.right.receive_half(half.stream_id)
    for total in (1, 50, 51, 4096, 4097, 90_000):
        received.advertise(8 + total)
        received.advertise(8)  # lower: nothing
        wire.run(20)
        assert wire.data(wire.right, half.stream_id) == b"preamble" + bytes(total)
        assert half.credit == 8 + total - 100_008


def test_a_lost_credit_frame_is_sent_again():
    wire = ready()
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    wire.left.send_stream_data(half.stream_id, b"payload")
    wire.run()
    wire.right.receive_half(half.stream_id).advertise(15)
    lost = wire.right.datagrams_to_send(wire.now)
    assert lost
    wire.run(200)
    assert wire.data(wire.right, half.stream_id) == b"preamblepayload"


def test_send_counters_follow_acceptance_and_acknowledgement():
    wire = ready()
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    assert (half.unacknowledged, half.credit, half.delivered) == (8, 0, False)
    wire.run()
    assert half.unacknowledged == 0
    wire.right.receive_half(half.stream_id).advertise(108)
    wire.run()
    assert half.credit == 100
    wire.left.send_stream_data(half.stream_id, bytes(60))
    assert (half.unacknowledged, half.credit) == (60, 40)
    wire.left.send_stream_data(half.stream_id, b"", end_stream=True)
    wire.run()
    assert (half.unacknowledged, half.delivered, half.reset) == (0, True, False)
    assert wire.left.send_half(half.stream_id) is None


def test_streams_stop_at_the_peers_limit_and_return_as_they_end():
    wire = ready(max_edges=2)
    halves = [wire.left.open_stream(b"preamble", is_unidirectional=True) for _ in range(3)]
    assert halves[2] is None
    wire.left.send_stream_data(halves[0].stream_id, b"", end_stream=True)
    wire.run()
    assert wire.left.open_stream(b"preamble", is_unidirectional=True) is not None
    assert wire.left.open_stream(b"preamble", is_unidirectional=True) is None


def test_aborting_and_stopping_forgotten_streams_is_harmless():
    wire = ready()
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    wire.left.send_stream_data(half.stream_id, b"", end_stream=True)
    wire.run()
    wire.left.abort_sending(half.stream_id, 1)
    wire.right.stop_receiving(half.stream_id, 1)
    assert wire.right.receive_half(half.stream_id) is None
    assert wire.run().left.ending is None


def test_bursts_are_bounded_on_loopback_and_paced_elsewhere():
    wire = Wire()
    assert isinstance(wire.left._loss._pacer, BurstLimit)
    far = ConnectionMaker(seed=b"d" * 32, epoch=3, settings=QuicSettings())
    connection = far.dialling(Alpn.EDGE, lambda claim: "", local=False)
    assert isinstance(connection._loss._pacer, PacedBursts)
    assert connection._max_datagram_size == 1200
    assert not connection.burst_exhausted
    connection.renew_burst()


def test_a_flush_builds_at_most_one_burst():
    wire = ready(burst=5, datagram_size=1200)
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    wire.run()
    wire.right.receive_half(half.stream_id).advertise(2**20)
    wire.run()
    wire.left.send_stream_data(half.stream_id, bytes(2**18))
    wire.left.renew_burst()
    assert len(wire.left.datagrams_to_send(wire.now)) == 5
    assert wire.left.burst_exhausted
    wire.left.renew_burst()
    assert not wire.left.burst_exhausted
    assert len(wire.left.datagrams_to_send(wire.now)) == 5


def test_a_key_update_changes_the_phase_and_loses_nothing():
    wire = ready()
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    wire.run()
    wire.right.receive_half(half.stream_id).advertise(2**20)
    wire.run()
    phases = [wire.left._cryptos[tls.Epoch.ONE_RTT].key_phase]
    for number in range(3):
        wire.left.request_key_update()
        wire.left.send_stream_data(half.stream_id, bytes([number]) * 1000)
        wire.run()
        phases.append(wire.right._cryptos[tls.Epoch.ONE_RTT].key_phase)
    assert phases == [0, 1, 0, 1]
    assert wire.data(wire.right, half.stream_id)[8:] == b"".join(bytes([n]) * 1000 for n in range(3))


@pytest.mark.parametrize("size", [1200, 8900, 16_200])
def test_datagrams_of_every_size_carry_bytes_whole(size, pattern):
    wire = ready(datagram_size=size)
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    wire.run()
    data = pattern(size, 20 * size)
    wire.right.receive_half(half.stream_id).advertise(8 + len(data))
    wire.run()
    wire.left.send_stream_data(half.stream_id, data)
    wire.run(100)
    assert wire.data(wire.right, half.stream_id)[8:] == data
    assert size - 30 <= max(map(len, wire.datagrams)) <= size


def test_an_acknowledgement_can_leave_before_its_timer():
    wire = ready(datagram_size=1200)
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    (datagram,) = [data for data, _ in wire.left.datagrams_to_send(wire.now)]
    wire.right.acknowledge_now(wire.now)  # nothing to acknowledge: nothing happens
    assert wire.right.datagrams_to_send(wire.now) == []
    wire.right.receive_datagram(datagram, CLIENT, wire.now)
    assert wire.right.datagrams_to_send(wire.now) == []
    wire.right.acknowledge_now(wire.now)
    ((answer, _),) = wire.right.datagrams_to_send(wire.now)
    wire.left.receive_datagram(answer, SERVER, wire.now)
    wire.left.settle()
    assert half.unacknowledged == 0
