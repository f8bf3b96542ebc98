"""Loader interface (spec sections 11 and 15): what a model file says, without loading its weights.

Provider factory of kind `loader`: `factory() -> Loader`. Runs in the node and orchestrator processes; the
worker receives only a `StageManifest` (positions and hyper-parameters) and reads the bytes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Protocol

from swactor_core.values import frozen

Scalar = int | float | str | bool


@frozen
class TensorRef:
    """One tensor's bytes: `dims` as in the file (fastest first), `offset` absolute in `path`, bytes."""

    name: str
    ggml_type: int
    type_name: str
    dims: tuple[int, ...]
    path: str
    offset: int
    nbytes: int


@frozen
class ModelFacts:
    """What planning needs. Byte counts are of stored tensors; `kv_bytes_per_token` is of f32 keys and values,
    a layer each; `header_bytes` is the most that a stage reads besides its tensors. `metadata` holds every
    scalar key (texts up to 64 KiB) and every numeric array of at most 4096 entries of the file, tokenizer
    arrays never."""

    model_id: str
    architecture: str
    num_layers: int
    hidden_dim: int
    vocab_size: int
    context_length: int
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    tied_head: bool
    kv_bytes_per_token: tuple[int, ...]
    type_names: tuple[str, ...]
    has_vocabulary: bool
    file_bytes: int
    header_bytes: int = 0
    metadata: dict[str, Scalar | tuple[Scalar, ...]] = field(default_factory=dict)


@frozen
class StageManifest:
    """All a worker needs to bind one stage's weights: never a payload byte.

    `tensors` are exactly those of blocks [layer_start, layer_end_exclusive) under their global names, plus
    `token_embd.weight` for the first stage, `output_norm.weight` and the head (`output.weight`, or
    `token_embd.weight` when tied) for the last, and shared rope tensors for all.
    """

    architecture: str
    metadata: dict[str, Scalar | tuple[Scalar, ...]]
    num_layers: int
    layer_start: int
    layer_end_exclusive: int
    hidden_dim: int
    vocab_size: int
    token_count: int
    tied_head: bool
    tensors: tuple[TensorRef, ...]

    @property
    def first(self) -> bool:
        return self.layer_start == 0

    @property
    def last(self) -> bool:
        return self.layer_end_exclusive == self.num_layers


class TextStream(Protocol):
    """Turns token ids into text as they come, never splitting a UTF-8 character."""

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; control tokens give nothing."""

    def finish(self) -> str:
        """What is left; bytes that never became a character appear as U+FFFD."""


class Tokenizer(Protocol):
    @property
    def end_of_generation(self) -> frozenset[int]: ...
    @property
    def suppressed(self) -> frozenset[int]:
        """Ids of the vocabulary that the model's author says are never to be sampled; never all of them."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`. Control tokens in the text are recognised only with `special`. No BOS is added."""

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a raw prompt: BOS in front where the file asks for it and the text has none; user text
        never becomes a control token."""

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The chat template applied, generation prompt added; template text with control tokens, message
        contents without. Raises ModelError when the file has no template or it cannot be rendered."""

    @property
    def has_chat_template(self) -> bool: ...
    def stream(self) -> TextStream: ...


class Model(Protocol):
    @property
    def facts(self) -> ModelFacts: ...
    def digest(self) -> str:
        """Hexadecimal digest of header, tensor table and file size: equal on nodes with the same model."""

    def outline(self) -> str:
        """What another node must be told for its `Loader.open`: of files that it need not open, and which
        content an address has. Text of the loader's own, at most 1 MiB; empty where there is nothing to tell,
        as of one local file. A model that was opened with it has the same digest and outline."""

    def manifest(self, layer_start: int, layer_end_exclusive: int) -> StageManifest:
        """Raises ModelError for a range outside the file."""

    def to_fetch(self, layer_start: int, layer_end_exclusive: int) -> int:
        """Bytes of those layers' manifest that are not on this machine now: 0 for a file that is here. Raises
        ModelError as `manifest` does."""

    def fetch(
        self,
        layer_start: int,
        layer_end_exclusive: int,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Makes the bytes of those layers' manifest readable at its paths, and no others; what is here needs
        no source. `progress(done, total)` in bytes of that manifest, those that were here counted or not:
        never back, never beyond `total`, at last all of it; called at least every few seconds while bytes are
        missing. What `progress` raises ends the fetch and comes out of it; what came until then is kept or
        comes again. Raises ModelError as `manifest` does and, with a `cause` that says why (not the
        general REFUSED), when they cannot be had."""

    def tokenizer(self, *, pre: str | None = None) -> Tokenizer:
        """`pre` names a pre-tokenizer that overrules the file's, in this tokenizer and no other. Raises
        ModelError when the file has no vocabulary or its kind is not supported, else UsageError when there is
        no such pre-tokenizer or the vocabulary's kind has none."""

    def close(self) -> None: ...


class Loader(Protocol):
    def resolve(self, name: str, progress: Callable[[int, int], None] | None = None) -> str:
        """A model's name for people to the name that `open` takes: an absolute local path for what is or must
        be a whole local file (fetched now if needed; `progress(done, total)` in bytes, first with none done;
        what it raises ends that), else an address that means the same on every machine. Raises ModelError
        naming the remedy."""

    def open(
        self, name: str, progress: Callable[[int, int], None] | None = None, *, outline: str = ""
    ) -> Model:
        """Reads the header only, wherever it is; what `progress` raises ends that, as in `Model.fetch`; it is
        called by one thread at a time, not always the caller's. With the `outline` of the same model opened
        elsewhere, given only where it is not empty, files are opened when a manifest needs them, and one that
        is not what the outline says is refused by name. Raises ModelError with field and offset for a
        malformed file."""


@frozen
class ModelSource:
    """An address for people, and when its server last said what it has, in seconds since 1970."""

    address: str
    asked: float


@frozen
class CachedModel:
    """One file that a loader keeps. `key` tells it from others of the same `name`; `nbytes` is what it takes
    on the disk, `file_bytes` what the whole of it would; `used` is when it was last read, in seconds since
    1970; `in_use` whether a process has it open, or is fetching it, now; `sources` are the addresses that
    mean it, as far as is known, the one asked last first."""

    key: str
    name: str
    path: str
    nbytes: int
    file_bytes: int
    used: float
    in_use: bool
    sources: tuple[ModelSource, ...] = ()


class ModelCache(Protocol):
    """What a loader keeps on this machine's disk (a provider's `cache()`)."""

    @property
    def folder(self) -> str: ...
    def models(self) -> list[CachedModel]:
        """Whole and partial ones, the one used last first. Writes nothing. Raises ModelError."""

    def remove(self, model: CachedModel) -> bool:
        """Deletes it, False when it is in use now. What runs with it open goes on. Raises ModelError."""
