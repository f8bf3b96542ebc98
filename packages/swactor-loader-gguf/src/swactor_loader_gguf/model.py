"""One GGUF model: planning facts and stage manifests over its index (spec sections 11 and 15).

Knows metadata keys and tensor names as llama.cpp writes them, and which stage needs which tensor. Must not
know how weights are computed with: an architecture that no worker runs still has facts. Reads no weight byte.
"""

from __future__ import annotations

import os
import re
from functools import cached_property

from swactor_core.errors import ModelError
from swactor_core.spi.loader import ModelFacts, Scalar, StageManifest, TensorRef, Tokenizer

from swactor_loader_gguf.cache import Progress, silent
from swactor_loader_gguf.ggml_types import type_name
from swactor_loader_gguf.index import TensorEntry, ValueType
from swactor_loader_gguf.parts import ModelFiles

EMBEDDING = "token_embd.weight"
OUTPUT_NORM = "output_norm.weight"
OUTPUT = "output.weight"
KV_ELEMENT_BYTES = 4  # the KV cache is planned as f32, the widest that a worker keeps
MAX_METADATA_ARRAY = 4096
MAX_METADATA_TEXT = 1 << 16
MAX_MODEL_NAME = 200
NO_MODELS = {  # by general.type
    "adapter": "an adapter to a model, such as a LoRA",
    "imatrix": "what was measured for a quantisation",
    "mmproj": "the eyes or ears of a model",
}

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.")
_FIRST_STAGE = ("token_embd", "token_types", "position_embd", "per_layer_")
_LAST_STAGE = ("output",)
_MAX_LAYERS = 1024
_MAX_DIM = 1 << 20
_MAX_HEADS = 1 << 16
_MAX_CONTEXT = 1 << 31


def _for_people(name: str) -> str:
    """A name out of a file as a terminal may have it: one line, without control characters, not too long."""
    printable = "".join(character if character.isprintable() else " " for character in name)
    return " ".join(printable.split())[:MAX_MODEL_NAME]


class GgufModel:
    """Implements `swactor_core.spi.loader.Model`. `facts` and `manifest` raise ModelError, see the SPI."""

    def __init__(self, path: str, files: ModelFiles | None = None) -> None:
        self.files = files or ModelFiles(path)
        self.index = self.files.first
        self._tokenizers: dict[str | None, Tokenizer] = {}

    def close(self) -> None:
        self.files.close()

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return self.files.digest()

    def outline(self) -> str:
        return self.files.outline()

    def to_fetch(self, layer_start: int, layer_end_exclusive: int) -> int:
        return self.files.to_fetch(self.manifest(layer_start, layer_end_exclusive).tensors)

    def fetch(self, layer_start: int, layer_end_exclusive: int, *, progress: Progress | None = None) -> None:
        self.files.fetch(self.manifest(layer_start, layer_end_exclusive).tensors, progress or silent)

    @cached_property
    def _architecture(self) -> str:
        index = self.index
        kind = index.text("general.type", default="model")
        if kind in NO_MODELS:
            index.fail(
                f"general.type is {kind!r}, not 'model'",
                index.entries["general.type"].offset,
                hint=f"the file is {NO_MODELS[kind]}; give the model itself",
            )
        name = index.text("general.architecture")
        if not re.fullmatch(r"[a-z0-9_.-]{1,64}", name):
            offset = index.entries["general.architecture"].offset
            if not re.fullmatch(r"[a-z0-9_.-]{1,64}", name.lower()):
                index.fail_value(f"general.architecture is {name!r}, which no architecture is called", offset)
            index.fail(
                f"general.architecture is {name!r}, and architectures are written in small letters",
                offset,
                hint=f"whatever wrote the file should have written {name.lower()!r}, and its keys so too: "
                "take another conversion of the model",
            )
        return name

    @cached_property
    def _num_layers(self) -> int:
        name = self._architecture
        stored = self.index.integer(f"{name}.block_count", 1, _MAX_LAYERS)
        # Blocks of multi-token prediction lie behind the stack and are not part of it.
        extra = self.index.integer(f"{name}.nextn_predict_layers", 0, stored - 1, default=0)
        return stored - extra

    @cached_property
    def _by_layer(self) -> dict[int | None, list[TensorEntry]]:
        """Tensors by global layer index, in file order; None holds those outside the blocks."""
        groups: dict[int | None, list[TensorEntry]] = {None: []}
        for tensor in self.files.tensors.values():
            match = _BLOCK.match(tensor.name)
            groups.setdefault(int(match[1]) if match else None, []).append(tensor)
        for layer in range(self._num_layers):
            if layer not in groups:
                self.index.fail(
                    f"block {layer} of {self._num_layers} has no tensor",
                    self.index.header_bytes,
                    hint="fetch it again",
                )
        counted = self.index.integer(f"{self._architecture}.block_count", 1, _MAX_LAYERS)
        for number, tensors in groups.items():
            if number is not None and number >= counted:
                self.index.fail(
                    f"{tensors[0].name!r} belongs to a block behind the last of {counted}",
                    self.index.entries[f"{self._architecture}.block_count"].offset,
                    hint="the file's block_count is wrong: a model without that block would answer nonsense",
                )
        return groups

    @cached_property
    def _metadata(self) -> dict[str, Scalar | tuple[Scalar, ...]]:
        """What is too large, or an array of texts, is left out; but the model's own keys stand there with
        what they hold in its place, so that a worker can refuse them rather than take their defaults."""
        index, result = self.index, dict[str, Scalar | tuple[Scalar, ...]]()
        own = self._architecture + "."
        for key, entry in index.entries.items():
            if entry.is_array:
                if key.startswith("tokenizer."):
                    continue
                if entry.count <= MAX_METADATA_ARRAY and entry.kind is not ValueType.STRING:
                    result[key] = index.numbers(entry)
                elif key.startswith(own):
                    result[key] = f"an array of {entry.count} {entry.kind.name}"
            elif entry.kind is not ValueType.STRING or entry.nbytes <= MAX_METADATA_TEXT:
                result[key] = index.scalar(entry)
            elif key.startswith(own):
                result[key] = f"a text of {entry.nbytes} bytes"
        return result

    def _required(self, name: str) -> TensorEntry:
        tensor = self.files.tensors.get(name)
        if tensor is None:
            self.index.fail(
                f"tensor {name!r} is missing",
                self.index.header_bytes,
                hint="the file is not a complete language model",
            )
        return tensor

    @property
    def _head(self) -> TensorEntry:
        return self.files.tensors.get(OUTPUT) or self._required(EMBEDDING)

    @cached_property
    def _hidden_dim(self) -> int:
        dim = self.index.integer(f"{self._architecture}.embedding_length", 1, _MAX_DIM)
        for tensor in (self._required(EMBEDDING), self._head):
            if len(tensor.dims) != 2 or tensor.dims[0] != dim:
                self.index.fail_value(
                    f"{tensor.name!r} has dimensions {tensor.dims}, but the embedding length is {dim}",
                    self.index.header_bytes,
                )
        return dim

    def _kv_bytes_per_token(self) -> tuple[int, ...]:
        """Bytes of one position's keys and values in each layer. [num_layers]"""
        index, name, layers, dim = self.index, self._architecture, self._num_layers, self._hidden_dim

        def per_layer(key: str) -> list[int]:
            held = index.integers(f"{name}.attention.{key}", 0, _MAX_HEADS)
            if isinstance(held, int):
                return [held] * layers
            if len(held) < layers:
                index.fail_value(f"{name}.attention.{key} has {len(held)} elements for {layers} layers", 0)
            return list(held[:layers])

        recurrent = any(key.startswith((f"{name}.ssm.", f"{name}.wkv.")) for key in index.entries)
        if recurrent and f"{name}.attention.head_count" not in index.entries:
            return (0,) * layers
        heads = per_layer("head_count")
        width = dim // max(heads) if max(heads) else 1
        key = index.integer(f"{name}.attention.key_length", 1, _MAX_DIM, default=max(width, 1))
        value = index.integer(f"{name}.attention.value_length", 1, _MAX_DIM, default=max(width, 1))
        grouped = f"{name}.attention.head_count_kv" in index.entries
        kv_heads = per_layer("head_count_kv") if grouped else heads
        return tuple(count * (key + value) * KV_ELEMENT_BYTES for count in kv_heads)

    @cached_property
    def facts(self) -> ModelFacts:
        index, layers = self.index, self._num_layers
        groups, head = self._by_layer, self._head
        name = _for_people(index.text("general.name", default=""))
        norm = sum(t.stored_bytes for t in groups[None] if t.name.startswith(_LAST_STAGE) and t is not head)
        return ModelFacts(
            model_id=name or _for_people(os.path.basename(index.path).removesuffix(".gguf")),
            architecture=self._architecture,
            num_layers=layers,
            hidden_dim=self._hidden_dim,
            vocab_size=head.dims[1],
            context_length=index.integer(f"{self._architecture}.context_length", 1, _MAX_CONTEXT),
            layer_bytes=tuple(sum(t.stored_bytes for t in groups[i]) for i in range(layers)),
            embedding_bytes=sum(t.stored_bytes for t in groups[None] if t.name.startswith(_FIRST_STAGE)),
            head_bytes=norm + head.stored_bytes,
            tied_head=OUTPUT not in self.files.tensors,
            kv_bytes_per_token=self._kv_bytes_per_token(),
            type_names=tuple(sorted({type_name(t.ggml_type) for t in self.files.tensors.values()})),
            has_vocabulary=self._token_count > 0,
            file_bytes=self.files.file_bytes,
            header_bytes=self.files.header_bytes,
            metadata=self._metadata,
        )

    @property
    def _token_count(self) -> int:
        entry = self.index.array("tokenizer.ggml.tokens", (ValueType.STRING,))
        return entry.count if entry else 0

    def manifest(self, layer_start: int, layer_end_exclusive: int) -> StageManifest:
        layers = self._num_layers
        if not 0 <= layer_start < layer_end_exclusive <= layers:
            raise ModelError(
                f"{self.index.name}: no layers [{layer_start}, {layer_end_exclusive}) in {layers} blocks",
                hint="plan again with this file",
            )
        first, last = layer_start == 0, layer_end_exclusive == layers
        groups = self._by_layer
        tensors = [t for t in groups[None] if self._belongs(t, first=first, last=last)]
        if first or last:
            self._required(EMBEDDING)
        if last:
            self._required(OUTPUT_NORM)
        for layer in range(layer_start, layer_end_exclusive):
            tensors.extend(groups[layer])
        return StageManifest(
            architecture=self._architecture,
            metadata=self._metadata,
            num_layers=layers,
            layer_start=layer_start,
            layer_end_exclusive=layer_end_exclusive,
            hidden_dim=self._hidden_dim,
            vocab_size=self._head.dims[1],
            token_count=self._token_count,
            tied_head=OUTPUT not in self.files.tensors,
            tensors=tuple(self._ref(t) for t in tensors),
        )

    def _belongs(self, tensor: TensorEntry, *, first: bool, last: bool) -> bool:
        """Whether a tensor outside the blocks is part of a stage. One that no role is known for goes to every
        stage, so that a worker can refuse it by name rather than compute without it."""
        if tensor.name.startswith(_FIRST_STAGE):
            return first or (last and tensor is self._head)
        if tensor.name.startswith(_LAST_STAGE):
            return last
        return True

    def _ref(self, tensor: TensorEntry) -> TensorRef:
        kind = type_name(tensor.ggml_type)
        if tensor.nbytes is None:
            raise ModelError(
                f"{self.index.name}: tensor {tensor.name!r} has type {kind}, whose layout is not known",
                hint="use the model in another quantisation, such as Q4_K_M or Q8_0",
            )
        place = self.files.placed(tensor)
        return TensorRef(
            tensor.name, tensor.ggml_type, kind, tensor.dims, place.path, place.offset, tensor.nbytes
        )

    def tokenizer(self, *, pre: str | None = None) -> Tokenizer:
        from swactor_loader_gguf.tokenizer import GgufTokenizer

        if pre not in self._tokenizers:
            self._tokenizers[pre] = GgufTokenizer(self.index, pre=pre)
        return self._tokenizers[pre]
