"""Loader mock `synthetic`: a tiny model and a byte-level tokenizer from a seed; no file, no network.

Every name is a model: the last part of it, as of a path, is the seed, so that all processes make the same of
`demo`. The manifest has no tensors: it is for workers that need none, such as `echo`. Knows no format.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import PurePosixPath

from swactor_core.errors import ModelError, UsageError
from swactor_core.spi.loader import ModelFacts, StageManifest

ARCHITECTURE = "synthetic"
LAYERS = 12
HIDDEN = 16
BYTES = 256
BEGIN, END = BYTES, BYTES + 1
VOCABULARY = BYTES + 2
CONTEXT = 2048


class SyntheticTokenizer:
    """`swactor_core.spi.loader.Tokenizer`: a token a byte, in an order that the seed shuffles, BEGIN before a
    prompt. END ends generation; neither stands for text."""

    has_chat_template = False
    suppressed: frozenset[int] = frozenset()

    def __init__(self, seed: bytes) -> None:
        order = list(range(BYTES))
        random.Random(seed).shuffle(order)  # noqa: S311 - makes a permutation, keeps no secret
        self._ids = order
        self._bytes = {token: byte for byte, token in enumerate(order)}

    @property
    def end_of_generation(self) -> frozenset[int]:
        return frozenset({END})

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text` in UTF-8. There is no text that names a control token, `special` or not."""
        return [self._ids[byte] for byte in text.encode()]

    def prompt_ids(self, text: str) -> list[int]:
        """No id for no text: an empty prompt stays one."""
        return [BEGIN, *self.encode(text)] if text else []

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        raise ModelError("a synthetic model has no chat template", hint="give the prompt with --raw")

    def stream(self) -> SyntheticStream:
        return SyntheticStream(self._bytes)


class SyntheticStream:
    """`swactor_core.spi.loader.TextStream`."""

    def __init__(self, byte_of: dict[int, int]) -> None:
        self._byte_of = byte_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        byte = self._byte_of.get(token_id)
        return "" if byte is None else self._decoder.decode(bytes((byte,)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class SyntheticModel:
    """`swactor_core.spi.loader.Model` of the name `seed`."""

    def __init__(self, seed: str) -> None:
        self._seed = seed.encode()
        self.facts = ModelFacts(
            model_id=f"synthetic-{seed}",
            architecture=ARCHITECTURE,
            num_layers=LAYERS,
            hidden_dim=HIDDEN,
            vocab_size=VOCABULARY,
            context_length=CONTEXT,
            layer_bytes=(HIDDEN * HIDDEN * 4,) * LAYERS,
            embedding_bytes=VOCABULARY * HIDDEN * 4,
            head_bytes=VOCABULARY * HIDDEN * 4,
            tied_head=True,
            kv_bytes_per_token=(2 * HIDDEN * 4,) * LAYERS,
            type_names=("F32",),
            has_vocabulary=True,
            file_bytes=0,
        )

    def digest(self) -> str:
        return blake2b(self._seed, digest_size=32, person=b"synthetic").hexdigest()

    def outline(self) -> str:
        """There are no files."""
        return ""

    def manifest(self, layer_start: int, layer_end_exclusive: int) -> StageManifest:
        _check_layers(layer_start, layer_end_exclusive)
        return StageManifest(
            architecture=ARCHITECTURE,
            metadata={},
            num_layers=LAYERS,
            layer_start=layer_start,
            layer_end_exclusive=layer_end_exclusive,
            hidden_dim=HIDDEN,
            vocab_size=VOCABULARY,
            token_count=VOCABULARY,
            tied_head=True,
            tensors=(),
        )

    def to_fetch(self, layer_start: int, layer_end_exclusive: int) -> int:
        _check_layers(layer_start, layer_end_exclusive)
        return 0

    def fetch(
        self,
        layer_start: int,
        layer_end_exclusive: int,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """There is nothing to fetch."""
        _check_layers(layer_start, layer_end_exclusive)

    def tokenizer(self, *, pre: str | None = None) -> SyntheticTokenizer:
        if pre is not None:
            raise UsageError("a synthetic vocabulary has no pre-tokenizer", hint="leave --pre out")
        return SyntheticTokenizer(self._seed)

    def close(self) -> None:
        """There is nothing open. Idempotent."""


def _check_layers(start: int, end: int) -> None:
    """Raises ModelError for a range outside."""
    if not 0 <= start < end <= LAYERS:
        raise ModelError(f"layers [{start}, {end}) of a model of {LAYERS}")


class SyntheticLoader:
    """`swactor_core.spi.loader.Loader`."""

    def resolve(self, name: str, progress: Callable[[int, int], None] | None = None) -> str:
        """Any name, as it is. Raises ModelError for one without a last part."""
        self._seed(name)
        return name

    def open(
        self, name: str, progress: Callable[[int, int], None] | None = None, *, outline: str = ""
    ) -> SyntheticModel:
        return SyntheticModel(self._seed(name))

    @staticmethod
    def _seed(name: str) -> str:
        seed = PurePosixPath(name).name
        if not seed:
            raise ModelError(f"{name!r} names no model", hint="give any name, such as demo")
        return seed
