"""Who is let in: pinned keys both ways, and what a stranger with a plain QUIC client can do."""

from __future__ import annotations

import asyncio
import socket
import ssl
from datetime import UTC, datetime

import pytest
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from swactor_core.errors import TransportError
from swactor_core.wire import encode_preamble
from swactor_transport_quic.identity import make_certificate

BAD_CERTIFICATE = 0x100 + 42
DECRYPT_ERROR = 0x100 + 51


async def plain_client(
    address: tuple[str, int], *, certificate=None, key=None, chain=(), alpn: str = "swactor/edge/1"
) -> list[events.QuicEvent]:
    """A stock aioquic client that tries to open an edge; returns its events up to the end."""
    configuration = QuicConfiguration(is_client=True, alpn_protocols=[alpn], verify_mode=ssl.CERT_NONE)
    configuration.certificate, configuration.private_key = certificate, key
    configuration.certificate_chain = list(chain)
    quic = QuicConnection(configuration=configuration)
    loop = asyncio.get_running_loop()
    seen: list[events.QuicEvent] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.setblocking(False)
        udp.bind(("127.0.0.1", 0))
        quic.connect(address, loop.time())
        while True:
            for data, to in quic.datagrams_to_send(loop.time()):
                await loop.sock_sendto(udp, data, to)
            while (event := quic.next_event()) is not None:
                seen.append(event)
                if isinstance(event, events.HandshakeCompleted):
                    quic.send_stream_data(quic.get_next_available_stream_id(True), encode_preamble(1))
                if isinstance(event, events.ConnectionTerminated):
                    return seen
            timer = quic.get_timer()
            try:
                async with asyncio.timeout_at(timer):
                    data, source = await loop.sock_recvfrom(udp, 65535)
                quic.receive_datagram(data, source, loop.time())
            except TimeoutError:
                quic.handle_timer(loop.time())


async def refused(node, **client) -> events.ConnectionTerminated:
    """The end that a plain client meets; nothing of it may reach the node's host."""
    address = (node.transport.host, node.transport.port)
    seen = await asyncio.wait_for(plain_client(address, **client), 10)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(node.transport.accept_edge(), 0.01)
    assert node.transport._endpoint.links == ()
    assert node.lost.empty()
    return seen[-1]


def self_signed(key, digest, subject: str = "1") -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.SERIAL_NUMBER, subject)])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(5)
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2040, 1, 1, tzinfo=UTC))
        .sign(key, digest)
    )


async def test_a_client_without_certificate_is_refused(make_node):
    node = await make_node("node")
    end = await refused(node)
    assert end.reason_phrase == "no certificate"


async def test_a_client_with_an_rsa_key_is_refused(make_node):
    node = await make_node("node")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    end = await refused(node, certificate=self_signed(key, hashes.SHA256()), key=key)
    assert (end.error_code, "RSA" in end.reason_phrase) == (BAD_CERTIFICATE, True)


async def test_a_client_with_an_elliptic_curve_key_is_refused(make_node):
    node = await make_node("node")
    key = ec.generate_private_key(ec.SECP256R1())
    end = await refused(node, certificate=self_signed(key, hashes.SHA256()), key=key)
    assert end.error_code == BAD_CERTIFICATE


async def test_a_copied_certificate_without_its_key_is_refused(make_node):
    friend = Ed25519PrivateKey.generate()
    node = await make_node("node", allowed={friend.public_key().public_bytes_raw()})
    end = await refused(node, certificate=make_certificate(friend, 1), key=Ed25519PrivateKey.generate())
    assert end.error_code == DECRYPT_ERROR


async def test_a_chain_is_refused(make_node):
    key = Ed25519PrivateKey.generate()
    node = await make_node("node", allowed={key.public_key().public_bytes_raw()})
    certificate = make_certificate(key, 1)
    end = await refused(node, certificate=certificate, key=key, chain=[certificate])
    assert "chain" in end.reason_phrase


@pytest.mark.parametrize("epoch", ["", "-1", "one", str(2**64), "9" * 40])
async def test_a_certificate_without_a_readable_epoch_is_refused(make_node, epoch):
    key = Ed25519PrivateKey.generate()
    node = await make_node("node", allowed={key.public_key().public_bytes_raw()})
    certificate = self_signed(key, None, subject=epoch or "x")
    end = await refused(node, certificate=certificate, key=key)
    assert "epoch" in end.reason_phrase


async def test_a_client_with_another_protocol_is_refused(make_node):
    node = await make_node("node")
    key = Ed25519PrivateKey.generate()
    end = await refused(node, certificate=make_certificate(key, 1), key=key, alpn="h3")
    assert end.error_code == 0x178


async def test_an_unknown_key_is_refused_by_the_acceptor(make_node):
    stranger, node = await make_node("stranger"), await make_node("node", allowed=set())
    stranger.transport.set_peer(node.peer())
    with pytest.raises(TransportError, match="is not authorised") as caught:
        await stranger.transport.open_edge(node.node_id, 1, deadline=0.5)
    assert stranger.key.hex() in str(caught.value)
    assert f"{node.node_id:016x}" in str(caught.value)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(node.transport.accept_edge(), 0.01)
    assert node.lost.empty()
    assert stranger.lost.empty()


async def test_an_authorise_that_fails_refuses(make_node, caplog):
    stranger, node = await make_node("stranger"), await make_node("node")
    node.transport._peers._authorise = lambda key: 1 / 0
    stranger.transport.set_peer(node.peer())
    with pytest.raises(TransportError, match="is not authorised"):
        await stranger.transport.connect(node.node_id, deadline=0.3)
    assert "ZeroDivisionError" in caplog.text


async def test_a_known_peer_needs_no_authorisation(make_node, flow):
    left, right = await make_node("left"), await make_node("right", allowed=set())
    left.transport.set_peer(right.peer())
    right.transport.set_peer(left.peer())
    sender, reader = await left.edge_to(right)
    reader.grant(10)
    await flow.send_all(sender, b"let in")
    assert await flow.read_exactly(reader, 6) == b"let in"


async def test_a_peer_with_another_key_than_the_pinned_one_is_refused_by_the_dialler(make_node):
    left, right, other = [await make_node(name) for name in ("left", "right", "other")]
    left.transport.set_peer(other.peer(port=right.transport.port))
    with pytest.raises(TransportError, match="answers with key") as caught:
        await asyncio.wait_for(left.transport.open_edge(other.node_id, 1, deadline=60), 5)
    assert right.key.hex() in str(caught.value)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(right.transport.accept_edge(), 0.01)
    assert right.lost.empty()


async def test_an_answer_from_a_former_life_is_refused(make_node):
    left, right = await make_node("left"), await make_node("right", epoch=4)
    left.transport.set_peer(right.peer(epoch=5))
    with pytest.raises(TransportError, match="answers as epoch 4, expected 5"):
        await left.transport.connect(right.node_id, deadline=5)


async def test_a_dialler_of_a_former_life_is_refused(make_node):
    left, right = await make_node("left", epoch=4), await make_node("right")
    left.transport.set_peer(right.peer())
    right.transport.set_peer(left.peer(epoch=5))
    with pytest.raises(TransportError, match="former life"):
        await left.transport.connect(right.node_id, deadline=0.5)


async def test_a_peer_that_was_removed_is_a_stranger_again(make_node):
    left, right = await make_node("left"), await make_node("right", allowed=set())
    left.transport.set_peer(right.peer())
    right.transport.set_peer(left.peer())
    await left.transport.connect(right.node_id, deadline=5)
    right.transport.remove_peer(left.node_id)
    with pytest.raises(TransportError, match="not authorised"):
        await left.transport.open_control(right.node_id, deadline=0.5)
    right.transport.remove_peer(left.node_id)


async def test_an_unknown_peer_cannot_be_dialled(make_node):
    left, right = await make_node("left"), await make_node("right")
    with pytest.raises(TransportError, match=f"{right.node_id:016x} is not known"):
        await left.transport.open_edge(right.node_id, 1, deadline=5)


async def test_the_answer_may_use_the_diallers_connection(make_node, flow):
    """A node that was only dialled needs no address to open an edge back."""
    left, right = await make_node("left"), await make_node("right")
    left.transport.set_peer(right.peer())
    await left.transport.connect(right.node_id, deadline=5)
    sender, reader = await right.edge_to(left)
    reader.grant(4)
    await flow.send_all(sender, b"back")
    assert await flow.read_exactly(reader, 4) == b"back"
