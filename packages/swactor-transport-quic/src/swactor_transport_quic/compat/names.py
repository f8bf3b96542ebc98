"""Every name below aioquic's public surface that `compat` uses, and the check that this aioquic has them.

A name that went away would otherwise show as a connection that hangs. Knows the names, not their use.
"""

from __future__ import annotations

from typing import Any

import aioquic
from aioquic import tls
from aioquic._crypto import AEAD, HeaderProtection
from aioquic.quic import connection as _connection
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketSpace
from aioquic.quic.stream import QuicStream
from swactor_core.errors import PluginError

CONNECTION_NAMES = (
    "_abandon_path_validation",
    "_ack_eliciting_sent_since_receipt",
    "_close_at",
    "_close_pending",
    "_configuration",
    "_crypto_streams",
    "_cryptos",
    "_datagrams_pending",
    "_events",
    "_handshake_done_pending",
    "_host_cids",
    "_idle_timeout",
    "_local_ack_delay_exponent",
    "_local_max_data",
    "_loss_at",
    "_max_datagram_size",
    "_network_paths",
    "_on_ack_delivery",
    "_pacing_at",
    "_packet_number",
    "_payload_received",
    "_peer_cid",
    "_ping_pending",
    "_probe_pending",
    "_remote_ack_delay_exponent",
    "_remote_max_data",
    "_remote_max_data_used",
    "_remote_preferred_address",
    "_retire_connection_ids",
    "_retire_peer_cid",
    "_stream_can_send",
    "_use_reserved_peer_cid",
    "_streams_blocked_pending",
    "_write_stream_frame",
    "_initialize",
    "_alpn_handler",
    "_serialize_transport_parameters",
    "_write_stream_limits",
    "_on_max_stream_data_delivery",
    "_is_client",
    "_streams",
    "_local_max_streams_uni",
    "_local_max_streams_bidi",
    "_local_max_stream_data_uni",
    "_local_max_stream_data_bidi_local",
    "_local_max_stream_data_bidi_remote",
    "_remote_max_streams_uni",
    "_remote_max_streams_bidi",
    "_handshake_confirmed",
    "_close_event",
    "_state",
    "_spaces",
    "_loss",
)
TLS_NAMES = (
    "_request_client_certificate",
    "_peer_certificate",
    "_peer_certificate_chain",
    "_set_peer_certificate",
    "handshake_extensions",
)
STREAM_NAMES = (
    "is_blocked",
    "max_stream_data_local",
    "max_stream_data_local_sent",
    "max_stream_data_remote",
    "is_finished",
)
SENDER_NAMES = (
    "_buffer_start",
    "_buffer_stop",
    "_pending_eof",
    "_reset_error_code",
    "buffer_is_empty",
    "get_frame",
    "highest_offset",
    "is_finished",
    "next_offset",
    "on_data_delivery",
)
RECEIVER_NAMES = ("is_finished", "handle_frame", "highest_offset")
SPACE_NAMES = (
    "ack_at",
    "ack_eliciting_in_flight",
    "ack_queue",
    "expected_packet_number",
    "largest_acked_packet",
    "largest_received_packet",
    "largest_received_time",
    "loss_time",
    "received_packets",
    "sent_packets",
)
LOSS_NAMES = (
    "_cc",
    "_on_packets_lost",
    "_pacer",
    "_pto_count",
    "_rtt_initialized",
    "_rtt_latest",
    "_rtt_min",
    "_rtt_smoothed",
    "_rtt_variance",
    "_time_of_last_sent_ack_eliciting_packet",
    "get_probe_timeout",
    "max_ack_delay",
    "on_ack_received",
    "on_packet_sent",
    "peer_completed_address_validation",
)
MODULE_NAMES = (
    "MAX_STREAM_DATA_FRAME_CAPACITY",
    "QuicConnectionError",
    "QuicConnectionState",
    "QuicNetworkPath",
    "QuicReceiveContext",
)


CRYPTO_NAMES = ("aead", "hp", "key_phase")
PAIR_NAMES = ("recv", "send", "_update_key_requested")
AEAD_NAMES = ("_aead", "_iv")
PROTECTION_NAMES = ("_encryptor", "_is_chacha20")
PACER_NAMES = ("_max_datagram_size", "next_send_time", "update_after_send", "update_rate")
PATH_NAMES = (
    "addr",
    "bytes_received",
    "bytes_sent",
    "is_validated",
    "local_challenge_sent",
    "peer_cid",
    "remote_challenges",
    "validation_deadline",
)
BUILDER_NAMES = ("_packet",)


def missing_names(owners: dict[str, tuple[Any, tuple[str, ...]]]) -> list[str]:
    """The `owner.name` of every private name that its owner lacks."""
    return [
        f"{label}.{name}"
        for label, (owner, names) in owners.items()
        for name in names
        if not hasattr(owner, name)
    ]


def private_names() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Every owner of private names, as this aioquic makes it, with the names that this module uses."""
    connection = QuicConnection(configuration=QuicConfiguration(is_client=True))
    stream = QuicStream(stream_id=0)
    pair = CryptoPair()
    builder = QuicPacketBuilder(host_cid=b"", peer_cid=b"", version=1, is_client=True, max_datagram_size=1200)
    return {
        "QuicConnection": (connection, CONNECTION_NAMES),
        "tls.Context": (tls.Context(is_client=True), TLS_NAMES),
        "QuicStream": (stream, STREAM_NAMES),
        "QuicStreamSender": (stream.sender, SENDER_NAMES),
        "QuicStreamReceiver": (stream.receiver, RECEIVER_NAMES),
        "QuicPacketSpace": (QuicPacketSpace(), SPACE_NAMES),
        "QuicPacketRecovery": (getattr(connection, "_loss", None), LOSS_NAMES),
        "aioquic.quic.connection": (_connection, MODULE_NAMES),
        "CryptoPair": (pair, PAIR_NAMES),
        "CryptoContext": (pair.send, CRYPTO_NAMES),
        "AEAD": (AEAD(b"aes-128-gcm", bytes(16), bytes(12)), AEAD_NAMES),
        "HeaderProtection": (HeaderProtection(b"aes-128-ecb", bytes(16)), PROTECTION_NAMES),
        "QuicPacketPacer": (QuicPacketPacer(max_datagram_size=1200), PACER_NAMES),
        "QuicNetworkPath": (_connection.QuicNetworkPath(("", 0)), PATH_NAMES),
        "QuicPacketBuilder": (builder, BUILDER_NAMES),
    }


def check_names(owners: dict[str, tuple[Any, tuple[str, ...]]]) -> None:
    """Raises PluginError that names this aioquic and what it lacks."""
    missing = missing_names(owners)
    if missing:
        raise PluginError(
            f"aioquic {aioquic.__version__} lacks {', '.join(missing)}, which transport quic relies on",
            hint="install aioquic>=1.7.2,<1.8",
        )
