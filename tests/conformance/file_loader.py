"""A loader of small files: a head of JSON, then the tensors. Wrong ones override its parts.

The synthetic mock has no file, so what is wrong with files could not be shown on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
from swactor_core.errors import ModelError, UsageError
from swactor_core.faults import ModelFailure
from swactor_core.spi.loader import ModelFacts, StageManifest, TensorRef
from swactor_testing.conformance import LoaderCapabilities, LoaderContract
from swactor_testing.conformance.fetching import Distant
from swactor_testing.synthetic import BEGIN, VOCABULARY, SyntheticTokenizer
from wrong_kit import Around

HEAD = 1024
LAYERS = 4
HIDDEN = 16
PRE = "shuffled"
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    pass


def content(name: str) -> bytes:
    """The bytes of a model file: a head of JSON, then its tensors."""
    sizes = {"token_embd.weight": VOCABULARY * HIDDEN * 4}
    sizes |= {f"blk.{layer}.attn.weight": 256 + 64 * layer for layer in range(LAYERS)}
    sizes |= {"output_norm.weight": HIDDEN * 4, "output.weight": VOCABULARY * HIDDEN * 4}
    text = json.dumps({"name": name, "layers": LAYERS, "sizes": sizes}).encode()
    digest = blake2b(text, digest_size=16).hexdigest().encode()
    noise = Random(name).randbytes(sum(sizes.values()))
    return (digest + text).ljust(HEAD, b"\n") + noise


class FileTokenizer(Around):
    """The synthetic one; its control tokens have names here, in trusted text only."""

    suppressed = frozenset({BEGIN})


class FileModel:
    tokenizer_class: Callable[[Any], Any] = FileTokenizer

    def __init__(self, path: str) -> None:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}", hint="check the path") from None
        text = data[32:HEAD].rstrip(b"\n")
        if blake2b(text, digest_size=16).hexdigest().encode() != data[:32]:
            raise ModelError(f"{path}: the head is damaged", hint="fetch it again")
        self.path, self.head = path, json.loads(text)
        self.sizes: dict[str, int] = self.head["sizes"]
        if len(data) != HEAD + sum(self.sizes.values()):
            raise ModelError(f"{path}: {len(data)} bytes are too few", hint="fetch it again")

    @property
    def facts(self) -> ModelFacts:
        sizes = self.sizes
        return ModelFacts(
            model_id=self.head["name"],
            architecture="file",
            num_layers=LAYERS,
            hidden_dim=HIDDEN,
            vocab_size=VOCABULARY,
            context_length=128,
            layer_bytes=tuple(sizes[f"blk.{layer}.attn.weight"] for layer in range(LAYERS)),
            embedding_bytes=sizes["token_embd.weight"],
            head_bytes=sizes["output_norm.weight"] + sizes["output.weight"],
            tied_head=False,
            kv_bytes_per_token=(HIDDEN * 8,) * LAYERS,
            type_names=("F32",),
            has_vocabulary=True,
            file_bytes=HEAD + sum(sizes.values()),
            header_bytes=HEAD,
        )

    def digest(self) -> str:
        return blake2b(json.dumps(self.head).encode(), digest_size=32).hexdigest()

    def outline(self) -> str:
        return ""

    def tensors(self) -> list[TensorRef]:
        refs, offset = [], HEAD
        for name, size in self.sizes.items():
            refs.append(TensorRef(name, 0, "F32", (size // 4,), self.path, offset, size))
            offset += size
        return refs

    def wanted(self, start: int, end: int) -> set[str]:
        names = {f"blk.{layer}.attn.weight" for layer in range(start, end)}
        if start == 0:
            names.add("token_embd.weight")
        if end == LAYERS:
            names |= {"output_norm.weight", "output.weight"}
        return names

    def manifest(self, start: int, end: int) -> StageManifest:
        if not 0 <= start < end <= LAYERS:
            raise ModelError(f"layers [{start}, {end}) of {LAYERS}", hint="plan again")
        wanted = self.wanted(start, end)
        return StageManifest(
            architecture="file",
            metadata={},
            num_layers=LAYERS,
            layer_start=start,
            layer_end_exclusive=end,
            hidden_dim=HIDDEN,
            vocab_size=VOCABULARY,
            token_count=VOCABULARY,
            tied_head=False,
            tensors=tuple(tensor for tensor in self.tensors() if tensor.name in wanted),
        )

    def to_fetch(self, start: int, end: int) -> int:
        self.manifest(start, end)
        return 0

    def fetch(self, start: int, end: int, *, progress: Progress = silent) -> None:
        self.manifest(start, end)

    def tokenizer(self, *, pre: str | None = None) -> Any:
        if pre not in (None, PRE):
            raise UsageError(f"there is no pre-tokenizer {pre!r}", hint=f"take {PRE}")
        return self.tokenizer_class(SyntheticTokenizer(f"{self.head['name']}{pre or ''}".encode()))

    def close(self) -> None:
        """Nothing is open."""


class FarModel(FileModel):
    """A model in the folder `far`; its tensors come one by one into a file of the folder `cache`, and their
    names into another one beside it."""

    def __init__(self, folder: Path, name: str, progress: Progress) -> None:
        self.source = folder / "far" / name
        progress(0, 0)
        super().__init__(str(self.source))
        (folder / "cache").mkdir(exist_ok=True)
        self.path = str(folder / "cache" / name)
        self.journal = folder / "cache" / f"{name}.journal"

    def here(self) -> set[str]:
        return set(self.journal.read_text().split()) if self.journal.exists() else set()

    def missing(self, start: int, end: int) -> list[TensorRef]:
        return [tensor for tensor in self.manifest(start, end).tensors if tensor.name not in self.here()]

    def to_fetch(self, start: int, end: int) -> int:
        return sum(tensor.nbytes for tensor in self.missing(start, end))

    def fetch(self, start: int, end: int, *, progress: Progress | None = None) -> None:
        say = progress or silent
        missing = self.missing(start, end)
        done, total = 0, sum(tensor.nbytes for tensor in missing)
        for tensor in missing:
            say(done, total)
            self.bring(tensor)
            self.note(tensor)
            done += tensor.nbytes
        if missing:
            say(total, total)

    def bring(self, tensor: TensorRef) -> None:
        try:
            data = self.source.read_bytes()
        except FileNotFoundError:
            raise ModelError(
                f"{self.source} is gone", hint="ask for it", cause=ModelFailure.NOT_FOUND
            ) from None
        with open(self.path, "r+b" if Path(self.path).exists() else "w+b") as file:
            file.seek(tensor.offset)
            file.write(data[tensor.offset : tensor.offset + tensor.nbytes])

    def note(self, tensor: TensorRef) -> None:
        with self.journal.open("a") as file:
            file.write(f"{tensor.name}\n")


class WrongLoader(LoaderContract):
    capabilities = LoaderCapabilities(
        provider="synthetic",
        models=("first", "second"),
        fetches=True,
        pre_tokenizers=(PRE,),
        suppressed={"first": frozenset({BEGIN})},
    )
    model: ClassVar[type] = FileModel
    far: ClassVar[type] = FarModel
    tokenizer: ClassVar[type] = FileTokenizer
    missing_is_fine: ClassVar[bool] = False
    relative: ClassVar[bool] = False

    @pytest.fixture
    def plugin(self, tmp_path: Path) -> Any:
        parts = type(self)
        folder = tmp_path / "models"
        folder.mkdir()
        for name in self.capabilities.models:
            (folder / name).write_bytes(content(name))

        class Model(parts.model):
            tokenizer_class = parts.tokenizer

        class Loader:
            def resolve(self, name: str, progress: Any = None) -> str:
                if name.startswith("far:"):
                    return name
                path = folder / name
                if not path.exists() and not parts.missing_is_fine:
                    raise ModelError(f"no model {name!r}", hint="give a path")
                return os.path.relpath(path) if parts.relative else str(path)

            def open(self, path: str, progress: Any = None, *, outline: str = "") -> Any:
                if path.startswith("far:"):
                    return parts.far(tmp_path, path.removeprefix("far:"), progress or silent)
                return Model(path)

        return Loader()

    @pytest.fixture
    def distant(self, tmp_path: Path) -> Distant:
        (tmp_path / "far").mkdir()
        for folder in ("far", "twin"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "third").write_bytes(content("third"))
        twin = str(tmp_path / "twin" / "third")
        return Distant("far:third", twin, (tmp_path / "far" / "third").unlink)
