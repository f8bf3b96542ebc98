"""Node keys and the throw-away certificate around them.

The certificate is only an envelope: TLS proves possession of the key in it, and the transport compares the
key itself. It also carries the epoch, so that a peer of a former life is recognised in the handshake. Knows
no socket and no connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID
from swactor_core.errors import ConfigError
from swactor_core.values import frozen

SEED_BYTES = 32
_VALID_FROM = datetime(2020, 1, 1, tzinfo=UTC)
_VALID_TO = datetime(9999, 12, 31, tzinfo=UTC)
_LARGEST_EPOCH = 2**64 - 1


class IdentityRejected(Exception):
    """The peer's certificate is not what this transport accepts; the text says why."""


@frozen
class Claim:
    """What a certificate says: the raw 32-byte Ed25519 key and the epoch of that life."""

    public_key: bytes
    epoch: int


def private_key(seed: bytes) -> Ed25519PrivateKey:
    """Raises ConfigError unless `seed` has 32 bytes."""
    if len(seed) != SEED_BYTES:
        raise ConfigError(
            f"the node's seed has {len(seed)} bytes, expected {SEED_BYTES}", hint="make a new node key"
        )
    return Ed25519PrivateKey.from_private_bytes(seed)


def public_key(seed: bytes) -> bytes:
    """The raw 32-byte public key of a seed."""
    return private_key(seed).public_key().public_bytes_raw()


def make_certificate(key: Ed25519PrivateKey, epoch: int) -> x509.Certificate:
    """A self-signed certificate of `key` whose subject holds the epoch. Raises ConfigError for one that is
    not of 64 bits."""
    if not 0 <= epoch <= _LARGEST_EPOCH:
        raise ConfigError(f"epoch {epoch} is outside 0..2**64-1")
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "swactor"),
            x509.NameAttribute(NameOID.SERIAL_NUMBER, str(epoch)),
        ]
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_TO)
        .sign(key, None)
    )


def read_certificate(certificate: x509.Certificate, chain: Sequence[x509.Certificate]) -> Claim:
    """Raises IdentityRejected: a chain, another key type, or no readable epoch."""
    if chain:
        raise IdentityRejected(f"certificate chain of {len(chain) + 1}, expected one certificate")
    try:
        key = certificate.public_key()
        names = certificate.subject.get_attributes_for_oid(NameOID.SERIAL_NUMBER)
    except Exception as error:  # the parser meets a stranger's bytes and raises several kinds
        raise IdentityRejected(f"certificate cannot be read: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityRejected(f"key of type {type(key).__name__}, expected Ed25519")
    text = str(names[0].value) if len(names) == 1 else ""
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= _LARGEST_EPOCH):
        raise IdentityRejected("certificate without an epoch")
    return Claim(key.public_bytes_raw(), int(text))
