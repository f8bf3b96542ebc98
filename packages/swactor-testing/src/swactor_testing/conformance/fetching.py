"""Models whose bytes are elsewhere (spec section 15): what is asked for comes, whole, and nothing is made up.

The guarantees are those of `Model.to_fetch` and `Model.fetch`, and of `progress`, in
`swactor_core.spi.loader`. Knows a distant model by its local twin only, and no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_core.spi.loader import Loader, Model
from swactor_core.values import frozen

from swactor_testing.conformance.bounds import same_bytes
from swactor_testing.conformance.tokenizer import TokenizerContract

Heard = list[tuple[int, int]]


@frozen
class Distant:
    """A model of three layers or more of which no tensor is on this machine: its `name` as `resolve` takes
    it, and the same model as a local file at `path`. After `remove()` its source has it no more."""

    name: str
    path: str
    remove: Callable[[], None]


class Enough(Exception):
    """What a host raises to end a fetch."""


def hearing(heard: Heard) -> Callable[[int, int], None]:
    return lambda done, total: heard.append((done, total))


def assert_progress(heard: Heard, where: str) -> None:
    """Raises AssertionError for progress that goes back or leaves its bounds."""
    done = [one for one, _ in heard]
    assert done == sorted(done), f"{where}: progress went back: {done}"
    assert all(0 <= one <= total for one, total in heard), f"{where}: progress beyond its total: {heard}"


@contextmanager
def opened(loader: Loader, name: str, outline: str = "") -> Iterator[Model]:
    told = {"outline": outline} if outline else {}
    model = loader.open(loader.resolve(name), None, **told)
    try:
        yield model
    finally:
        model.close()


def assert_the_same_tensors(model: Model, local: Model, start: int, end: int) -> None:
    """The bytes that `model`'s manifest points at are those of its local twin."""
    tensors = model.manifest(start, end).tensors
    twins = local.manifest(start, end).tensors
    assert [replace(t, path="") for t in tensors] == [replace(t, path="") for t in twins]
    assert tensors, "a stage without a tensor"
    for tensor, twin in zip(tensors, twins, strict=True):
        with open(tensor.path, "rb") as came, open(twin.path, "rb") as truth:
            came.seek(tensor.offset)
            truth.seek(twin.offset)
            same_bytes(came.read(tensor.nbytes), truth.read(twin.nbytes), f"{tensor.name}, fetched")


class FetchContract(TokenizerContract):
    """What a loader keeps of models here and elsewhere."""

    @pytest.fixture
    def distant(self) -> Distant | None:
        """Heirs whose capabilities say that the loader `fetches` give one, new for every test."""
        if self.capabilities.fetches:
            raise NotImplementedError(f"{type(self).__name__} fetches: it needs a fixture `distant`")
        return None

    # --- models that are here ---

    def test_a_model_that_is_here_is_not_fetched(self, models: list[Model]) -> None:
        """`to_fetch`: 0 for a file that is here; `fetch` has nothing to do then, its manifest's tensors can
        be read."""
        for model in models:
            layers, heard = model.facts.num_layers, Heard()
            for start, end in ((0, layers), (0, 1), (layers - 1, layers)):
                assert model.to_fetch(start, end) == 0, f"layers [{start}, {end}) are missing"
                model.fetch(start, end, progress=hearing(heard))
                model.fetch(start, end)
                for tensor in model.manifest(start, end).tensors:
                    assert Path(tensor.path).stat().st_size >= tensor.offset + tensor.nbytes
            assert all(0 <= done <= total for done, total in heard)

    @pytest.mark.parametrize("layers", [(0, 0), (-1, 1), (1, 0), (0, 10_000)])
    def test_layers_outside_the_model_are_not_fetched(
        self, models: list[Model], layers: tuple[int, int]
    ) -> None:
        """`fetch` and `to_fetch` are of a manifest's layers: ModelError for a range outside, as there."""
        for model in models:
            for call in (model.to_fetch, model.fetch):
                with pytest.raises(ModelError, match=r"\d"):
                    call(*layers)

    # --- models that are elsewhere ---

    def test_a_distant_model_says_the_same_as_a_local_one(
        self, plugin: Loader, distant: Distant | None
    ) -> None:
        """`open` reads the header only, wherever it is: facts, digest and manifests do not depend on where.
        `resolve` gives an address that means the same on every machine, and is its own address."""
        if distant is None:
            return
        address = plugin.resolve(distant.name)
        assert plugin.resolve(address) == address
        with opened(plugin, distant.name) as model, opened(plugin, distant.path) as local:
            assert model.digest() == local.digest()
            assert replace(model.facts, model_id="") == replace(local.facts, model_id="")
            layers = model.facts.num_layers
            assert model.to_fetch(0, layers) > 0, "a distant model is here before it was fetched"

    def test_what_another_node_is_told_is_the_same_model(
        self, plugin: Loader, distant: Distant | None
    ) -> None:
        """`outline` goes with the plan to every stage, which opens the model with it and says the same of it:
        digest, outline, manifests."""
        for name in (*self.capabilities.models, *([distant.name] if distant else [])):
            with opened(plugin, name) as model:
                outline, layers = model.outline(), model.facts.num_layers
                assert isinstance(outline, str)
                assert len(outline) <= 1 << 20, f"{name}: {len(outline)} characters in a message"
                with opened(plugin, name, outline) as stage:
                    assert stage.outline() == outline
                    assert stage.digest() == model.digest()
                    for start, end in ((0, layers), (0, 1), (layers - 1, layers)):
                        assert stage.manifest(start, end) == model.manifest(start, end)

    def test_a_fetch_brings_its_layers_and_no_others(self, plugin: Loader, distant: Distant | None) -> None:
        """`fetch` makes the bytes of those layers' manifest readable at its paths, and no others; `to_fetch`
        says how many are missing, before and after, also to who opens the model anew."""
        if distant is None:
            return
        with opened(plugin, distant.name) as model, opened(plugin, distant.path) as local:
            layers = model.facts.num_layers
            own = sum(tensor.nbytes for tensor in model.manifest(1, 2).tensors)
            missing, others = model.to_fetch(1, 2), model.to_fetch(2, layers)
            assert missing == own, f"layer 1 has {own} bytes, none of them here, to_fetch says {missing}"
            model.fetch(1, 2)
            assert_the_same_tensors(model, local, 1, 2)
            assert model.to_fetch(1, 2) == 0, "to_fetch counts bytes that were fetched"
            assert model.to_fetch(2, layers) == others, "other layers are said to be here, too"
            with opened(plugin, distant.name) as again:
                assert again.to_fetch(1, 2) == 0, "what was fetched is unknown to the next one"
                again.fetch(0, layers)
                assert_the_same_tensors(again, local, 0, layers)
            assert model.to_fetch(0, layers) == 0, "what another one fetched is unknown here"

    def test_progress_goes_to_its_total(self, plugin: Loader, distant: Distant | None) -> None:
        """`progress(done, total)`: bytes, never back, never beyond the total, and at last all of it."""
        if distant is None:
            return
        with opened(plugin, distant.name) as model:
            layers = model.facts.num_layers
            for start, end in ((1, 2), (0, layers)):
                heard = Heard()
                missing = model.to_fetch(start, end)
                all_of_it = sum(tensor.nbytes for tensor in model.manifest(start, end).tensors)
                model.fetch(start, end, progress=hearing(heard))
                assert_progress(heard, f"layers [{start}, {end})")
                assert heard, "a fetch without progress"
                done, total = heard[-1]
                assert done == total, f"a fetch is over at {done} of {total} bytes"
                assert missing <= total <= all_of_it, (
                    f"total is {total}, {missing} of {all_of_it} bytes were missing"
                )

    def test_what_progress_raises_ends_the_fetch(self, plugin: Loader, distant: Distant | None) -> None:
        """`fetch`: what `progress` raises ends the fetch and comes out of it; no byte is wrong by it, and
        another fetch completes."""
        if distant is None:
            return

        def stop(done: int, total: int) -> None:
            raise Enough

        with opened(plugin, distant.name) as model, opened(plugin, distant.path) as local:
            layers = model.facts.num_layers
            with pytest.raises(Enough):
                model.fetch(1, layers, progress=stop)
            assert model.to_fetch(1, layers) > 0, "a fetch that was ended at once brought all"
            model.fetch(1, layers)
            assert_the_same_tensors(model, local, 1, layers)

    def test_what_progress_raises_ends_an_open(self, plugin: Loader, distant: Distant | None) -> None:
        """`open`: what `progress` raises ends that, as in `fetch`; the model opens after all."""
        if distant is None:
            return
        heard = Heard()

        def stop(done: int, total: int) -> None:
            heard.append((done, total))
            raise Enough

        address = plugin.resolve(distant.name)
        try:
            plugin.open(address, stop).close()
        except Enough:
            assert heard
        else:
            assert not heard, "what progress raised did not come out of open"
        with opened(plugin, distant.name) as model:
            assert model.facts.num_layers >= 3

    def test_what_cannot_be_had_is_a_model_error_with_a_cause(
        self, plugin: Loader, distant: Distant | None
    ) -> None:
        """`fetch` raises ModelError, whose `cause` says why (not the general one), when the bytes cannot be
        had; what is here already needs no source."""
        if distant is None:
            return
        with opened(plugin, distant.name) as model, opened(plugin, distant.path) as local:
            model.fetch(1, 2)
            distant.remove()
            model.fetch(1, 2)
            assert_the_same_tensors(model, local, 1, 2)
            with pytest.raises(ModelError) as caught:
                model.fetch(0, model.facts.num_layers)
            assert caught.value.cause is not ModelFailure.REFUSED, f"no cause of its own: {caught.value!r}"
            assert caught.value.hint, "an error without a remedy"
            assert model.to_fetch(1, 2) == 0
            assert model.to_fetch(2, 3) > 0, "bytes are said to be here that could not be had"
