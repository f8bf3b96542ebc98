"""The loader contract (spec sections 11, 15): facts that add up, stages of their own tensors, refusals.

With `fetching.py` and `tokenizer.py` below it; the guarantees are those of `swactor_core.spi.loader`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from swactor_core.errors import ModelError
from swactor_core.spi.loader import Loader, Model, StageManifest
from swactor_core.spi.provider import Kind

from swactor_testing.conformance.bounds import seeded
from swactor_testing.conformance.fetching import FetchContract

_BLOCK = re.compile(r"blk\.(\d+)\.")
_OUTSIDE = {"token_embd.weight", "output_norm.weight", "output.weight"}


def _noted(progress: list[tuple[int, int]], done: int, total: int) -> None:
    progress.append((done, total))


def names(manifest: StageManifest) -> set[str]:
    return {tensor.name for tensor in manifest.tensors}


def layers_of(manifest: StageManifest) -> set[int]:
    """The blocks that its tensors belong to."""
    return {int(match[1]) for name in names(manifest) if (match := _BLOCK.match(name))}


class LoaderContract(FetchContract):
    """Everything a loader keeps. Heirs give the fixture `plugin` and `capabilities`."""

    kind = Kind.LOADER

    @pytest.fixture
    def models(self, plugin: Loader) -> Iterator[list[Model]]:
        """Every model of the capabilities, open."""
        opened = [plugin.open(plugin.resolve(name)) for name in self.capabilities.models]
        yield opened
        for model in opened:
            model.close()

    def test_it_is_registered_under_its_name(self) -> None:
        """Configuration chooses a provider by kind and name."""
        assert self.provider().kind is Kind.LOADER

    def test_a_name_resolves_to_the_same_place_twice(self, plugin: Loader) -> None:
        """`resolve`: a model's name for people to an absolute local path for a local file; what is there
        already is not fetched again, and progress, where there is any, keeps to its total."""
        for name in self.capabilities.models:
            progress: list[tuple[int, int]] = []
            path = plugin.resolve(name, partial(_noted, progress))
            if self.capabilities.reads_files:
                assert Path(path).is_absolute(), f"{path} depends on where a process runs"
            assert plugin.resolve(path) == path == plugin.resolve(name)
            assert all(0 <= done <= total for done, total in progress)

    # --- facts ---

    def test_facts_are_whole_and_agree_with_each_other(self, models: list[Model]) -> None:
        """`ModelFacts`: what planning needs; one entry a layer, none negative, and together no more than the
        file holds."""
        for model in models:
            facts = model.facts
            assert facts.model_id
            assert facts.architecture
            assert facts.num_layers >= 1
            assert min(facts.hidden_dim, facts.vocab_size, facts.context_length) >= 1
            assert len(facts.layer_bytes) == len(facts.kv_bytes_per_token) == facts.num_layers
            assert min(facts.layer_bytes) > 0, f"{facts.model_id}: a layer without a byte"
            assert min(facts.kv_bytes_per_token) > 0
            assert facts.embedding_bytes > 0
            assert facts.head_bytes > 0
            assert facts.type_names == tuple(sorted(set(facts.type_names))) != ()
            if self.capabilities.reads_files:
                ends = facts.embedding_bytes + facts.head_bytes
                shared = facts.embedding_bytes if facts.tied_head else 0
                total = sum(facts.layer_bytes) + ends - shared
                assert total <= facts.file_bytes, (
                    f"{facts.model_id}: {total} bytes of tensors in a file of less"
                )
                assert 0 < facts.header_bytes <= facts.file_bytes - total, (
                    f"{facts.model_id}: a header of {facts.header_bytes} bytes beside {total} of tensors, "
                    f"in a file of {facts.file_bytes}"
                )
            assert facts == model.facts

    def test_layer_bytes_are_those_of_the_layers_tensors(self, models: list[Model]) -> None:
        """Byte counts are of stored tensors: planning divides memory by them, so they are exactly what a
        stage of that layer binds."""
        for model in models:
            facts = model.facts
            for layer in range(facts.num_layers):
                manifest = model.manifest(layer, layer + 1)
                own = sum(t.nbytes for t in manifest.tensors if t.name.startswith(f"blk.{layer}."))
                if self.capabilities.reads_files:
                    said = facts.layer_bytes[layer]
                    assert said == own, (
                        f"{facts.model_id}: layer {layer} has {own} bytes, the facts say {said}"
                    )
                else:
                    assert manifest.tensors == (), "tensors of a file that does not exist"

    def test_metadata_is_small_and_of_scalars(self, models: list[Model]) -> None:
        """`metadata` holds every scalar key (texts up to 64 KiB) and every numeric array of at most 4096
        entries, tokenizer arrays never: it travels to workers in a command line of JSON."""
        for model in models:
            layers = model.facts.num_layers
            for held in (model.facts.metadata, model.manifest(0, layers).metadata):
                assert len(json.dumps(held)) < 4 << 20
                for key, value in held.items():
                    if isinstance(value, tuple):
                        assert len(value) <= 4096, f"{key} has {len(value)} entries"
                        assert not key.startswith("tokenizer."), f"{key} is the tokenizer's"
                        assert not any(isinstance(one, str) for one in value), f"{key} is an array of texts"
                    else:
                        assert isinstance(value, int | float | str | bool), f"{key} is a {type(value)}"
                        assert not isinstance(value, str) or len(value.encode()) <= 1 << 16, f"{key} is long"

    def test_a_digest_is_of_the_content(self, plugin: Loader, models: list[Model]) -> None:
        """`digest`: hexadecimal; equal on nodes with the same model, so that stages cannot load different
        files; different models differ."""
        digests = [model.digest() for model in models]
        assert all(re.fullmatch(r"[0-9a-f]{32,}", digest) for digest in digests)
        assert len(set(digests)) == len(models), "different models have the same digest"
        again = plugin.open(plugin.resolve(self.capabilities.models[0]))
        assert again.digest() == digests[0]
        again.close()

    # --- stages ---

    @pytest.mark.parametrize("seed", range(4))
    def test_stages_cover_the_model_each_with_its_own_tensors(self, models: list[Model], seed: int) -> None:
        """`StageManifest`: exactly the tensors of its blocks under their global names, the embedding for the
        first, norm and head for the last (section 11: ranges are contiguous, do not overlap, and cover)."""
        random = seeded(seed)
        for model in models:
            layers = model.facts.num_layers
            whole = model.manifest(0, layers)
            assert (whole.first, whole.last) == (True, True)
            cuts = sorted(random.sample(range(1, layers), random.randint(0, layers - 1)))
            seen: set[str] = set()
            for start, end in pairwise((0, *cuts, layers)):
                manifest = model.manifest(start, end)
                where = f"seed {seed}, {model.facts.model_id}, layers [{start}, {end})"
                assert (manifest.layer_start, manifest.layer_end_exclusive) == (start, end), where
                assert (manifest.num_layers, manifest.hidden_dim) == (layers, model.facts.hidden_dim), where
                assert manifest.vocab_size == model.facts.vocab_size, where
                assert manifest.tied_head == model.facts.tied_head, where
                assert len(names(manifest)) == len(manifest.tensors), f"{where}: a tensor twice"
                if self.capabilities.reads_files:
                    assert layers_of(manifest) == set(range(start, end)), (
                        f"{where}: blocks of others, or too few"
                    )
                    self._ends_are_right(manifest, where)
                seen |= names(manifest)
            assert seen == names(whole), (
                f"seed {seed}: {names(whole) ^ seen} is in the model or the stages only"
            )

    @staticmethod
    def _ends_are_right(manifest: StageManifest, where: str) -> None:
        wanted = {"token_embd.weight"} if manifest.first else set()
        if manifest.last:
            wanted |= {"output_norm.weight", "token_embd.weight" if manifest.tied_head else "output.weight"}
        assert names(manifest) & _OUTSIDE == wanted, f"{where}: the tensors outside its blocks"

    def test_tensors_lie_in_their_file_and_apart(self, models: list[Model]) -> None:
        """`TensorRef`: absolute offset and bytes in `path`; the worker reads exactly these. Two never share
        a byte, and the same tensor is at the same place in every manifest."""
        for model in models:
            layers = model.facts.num_layers
            whole = {tensor.name: tensor for tensor in model.manifest(0, layers).tensors}
            spans = sorted((t.path, t.offset, t.offset + t.nbytes) for t in whole.values())
            for (path, _, end), (next_path, start, _) in pairwise(spans):
                assert path != next_path or end <= start, f"two tensors share bytes at {start} of {path}"
            for tensor in whole.values():
                assert tensor.nbytes > 0
                assert tensor.dims
                assert tensor.offset + tensor.nbytes <= Path(tensor.path).stat().st_size, (
                    f"{tensor} ends behind"
                )
            for layer in range(layers):
                for tensor in model.manifest(layer, layer + 1).tensors:
                    assert whole[tensor.name] == tensor

    @pytest.mark.parametrize("layers", [(0, 0), (-1, 1), (1, 0), (0, 10_000)])
    def test_layers_outside_the_model_are_refused(self, models: list[Model], layers: tuple[int, int]) -> None:
        """`manifest` raises ModelError for a range outside the file; it names the range."""
        for model in models:
            with pytest.raises(ModelError, match=r"\d"):
                model.manifest(*layers)

    def test_a_model_closes_twice(self, plugin: Loader) -> None:
        """A node opens a model for its plan and closes it when the run is over, whoever was first."""
        model = plugin.open(plugin.resolve(self.capabilities.models[0]))
        model.close()
        model.close()

    # --- what is no model ---

    def test_a_missing_model_names_itself_and_the_remedy(self, plugin: Loader, tmp_path: Path) -> None:
        """`resolve` and `open` raise ModelError naming the remedy. To a loader without files every name is a
        model but the empty one."""
        if not self.capabilities.reads_files:
            with pytest.raises(ModelError):
                plugin.resolve("")
            return
        missing = str(tmp_path / "no-such-model.gguf")
        for call in (plugin.resolve, plugin.open):
            with pytest.raises(ModelError, match="no-such-model"):
                call(missing)
        with pytest.raises(ModelError) as caught:
            plugin.resolve(missing)
        assert caught.value.hint, "an error without a remedy"

    @pytest.mark.parametrize("seed", range(3))
    def test_a_damaged_file_is_a_model_error(self, plugin: Loader, tmp_path: Path, seed: int) -> None:
        """`open` raises ModelError for a malformed file, and so does what follows it: never another
        exception, never a hang, never facts that were invented. Cut anywhere, or with bytes of its head
        changed."""
        if not self.capabilities.reads_files:
            return
        random = seeded(seed)
        good = Path(plugin.resolve(self.capabilities.models[0])).read_bytes()
        head = min(len(good), 4096)
        damaged = [b"", good[:1], good[: len(good) // 2], b"\0" * 100, bytes(reversed(good[:head]))]
        damaged += [good[: random.randrange(head)] for _ in range(10)]
        for data in damaged:
            self._refused(plugin, tmp_path, data, f"seed {seed}: {len(data)} of {len(good)} bytes")
        for _ in range(30):
            at, value = random.randrange(head), random.randrange(256)
            changed = good[:at] + bytes([value]) + good[at + 1 :]
            # Not every byte makes a file malformed: what is accepted must at least be consistent.
            self._refused(plugin, tmp_path, changed, f"seed {seed}: byte {at} is {value}", must=False)

    @staticmethod
    def _refused(plugin: Loader, folder: Path, data: bytes, where: str, *, must: bool = True) -> None:
        path = folder / "damaged"
        path.write_bytes(data)
        model: Model | None = None
        refused = False
        try:
            model = plugin.open(str(path))
            facts = model.facts
            model.manifest(0, facts.num_layers)
            assert len(facts.layer_bytes) == facts.num_layers, where
        except ModelError as error:
            refused = True
            text = str(error)
            named = "damaged" in text
        finally:
            if model is not None:
                model.close()
        assert refused or not must, f"{where} was taken for a model"
        assert not refused or named, f"{where}: the error does not name the file: {text}"
