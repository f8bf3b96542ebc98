"""Models that a worker computes, and those that it refuses: said beforehand as `configure` says it.

The guarantee is that of `Provider.check_model` in `swactor_core.spi.provider`. It is asked before anything is
started, of the whole model, on a machine that may have no byte of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from swactor_core.spi.loader import StageManifest
from swactor_core.spi.worker import RoleError, StageConfig, WorkerBackend

from swactor_testing.conformance.stages import StageContract
from swactor_testing.conformance.worker_rig import never, stage_of

NOWHERE = "/nowhere/no-such-model"


def _spoilt(good: StageManifest) -> Iterator[tuple[str, StageManifest]]:
    """The whole model with one thing changed, which some workers cannot compute with and some can."""
    yield "an architecture that nobody knows", replace(good, architecture="no-such-architecture")
    yield "no metadata", replace(good, metadata={})
    yield "a layer more than there is", replace(good, layer_end_exclusive=good.num_layers + 1)
    yield "a wider hidden state", replace(good, hidden_dim=good.hidden_dim + 32)
    if not good.tensors:
        return
    first, last = good.tensors[0], good.tensors[-1]
    yield "its first tensor missing", replace(good, tensors=good.tensors[1:])
    yield "its last tensor missing", replace(good, tensors=good.tensors[:-1])
    yield "a tensor twice", replace(good, tensors=(*good.tensors, last))
    unknown = replace(first, name="no.such.tensor")
    yield "a tensor that nobody knows", replace(good, tensors=(*good.tensors, unknown))
    longer = replace(first, dims=(first.dims[0] + 32, *first.dims[1:]))
    yield "a tensor of another shape", replace(good, tensors=(longer, *good.tensors[1:]))
    strange = replace(first, ggml_type=9999, type_name="Q0_STRANGE")
    yield "a tensor of a strange type", replace(good, tensors=(strange, *good.tensors[1:]))


class JudgingContract(StageContract):
    """What a provider's `check_model` keeps; one that cannot tell beforehand has none."""

    def test_a_model_that_is_computed_is_not_refused_beforehand(self) -> None:
        """`check_model` opens no file: it says yes to the capabilities' model wherever that may lie."""
        check = self.provider().check_model
        if check is None:
            return
        whole = self.capabilities.manifest(0, self.capabilities.num_layers)
        elsewhere = tuple(replace(tensor, path=NOWHERE) for tensor in whole.tensors)
        for positions in (1, self.capabilities.max_context):
            check(replace(whole, tensors=elsewhere), positions)

    def test_what_is_refused_beforehand_is_what_configure_refuses(self, backend: WorkerBackend) -> None:
        """`check_model` raises RoleError for a model that its `configure` would refuse, and for no other."""
        check = self.provider().check_model
        if check is None:
            return
        refusals = 0
        for what, manifest in _spoilt(self.capabilities.manifest(0, self.capabilities.num_layers)):
            config = self._whole(manifest)
            before = after = None
            try:
                check(manifest, config.max_context)
            except RoleError as error:
                before = error
            try:
                backend.configure(config, progress=lambda report: None, should_abort=never).close()
            except RoleError as error:
                after = error
            assert (before is None) == (after is None), (
                f"{what}: check_model says {before!r}, configure says {after!r}"
            )
            refusals += after is not None
        assert refusals, "configure computes anything"

    def _whole(self, manifest: StageManifest) -> StageConfig:
        """One stage of it, with the edges that such a model would have."""
        given = replace(self.capabilities, manifest=lambda start, end: manifest)
        return stage_of(given, 0, given.num_layers)
