"""Token ids to text as they come (spec section 13: the token stream), never half a character.

Knows the bytes of each token and UTF-8, nothing of vocabularies. A token may hold part of a character, so
bytes wait until they are one.
"""

from __future__ import annotations

import codecs
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def byte_alphabet() -> dict[str, int]:
    """GPT-2's bijection between bytes and printable characters: the byte of each character. Bytes that are
    printable in Latin-1 stand for themselves, the others for U+0100 onwards, in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Pieces(Protocol):
    """The bytes of each token id."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> bytes: ...


class Utf8Stream:
    """Implements `swactor_core.spi.loader.TextStream`; `pieces` are the bytes of each token id. An id
    without piece prints U+FFFD."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < len(self._pieces):
            return self._decoder.decode(b"", final=True) + REPLACEMENT
        return self._decoder.decode(self._pieces[token_id])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
