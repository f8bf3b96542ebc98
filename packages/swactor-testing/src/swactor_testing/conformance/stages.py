"""Stages (spec sections 10, 15 and 16): layers bound once, steps that depend on their context and on it only.

The guarantees are those of `WorkerBackend.configure` and `StageRole` in `swactor_core.spi.worker`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from swactor_core.faults import StepFailure
from swactor_core.messages import LoadPhase
from swactor_core.plan import TokenOutputPolicy
from swactor_core.spi.worker import LoadProgress, RoleError, StepError, StepInput, WorkerBackend

from swactor_testing.conformance.bounds import same_bytes
from swactor_testing.conformance.device import DeviceContract
from swactor_testing.conformance.worker_rig import Device, Stages, never, stage_of, tokens

_PHASES = tuple(LoadPhase)


class StageContract(DeviceContract):
    """What a backend's stages keep."""

    count = 5
    """Token ids that a run of these tests generates."""

    # --- roles ---

    def test_progress_runs_through_its_phases_once(self, backend: WorkerBackend) -> None:
        """`LoadProgress`: weights, then compile, then ready, each from little to all of it (section 15)."""
        stages = Stages.of(backend, self.capabilities)
        phases = [report.phase for report in stages.progress]
        assert phases == sorted(phases, key=_PHASES.index), f"phases out of order: {phases}"
        assert phases[-1] == LoadPhase.READY
        for phase in dict.fromkeys(phases):
            reports = [report for report in stages.progress if report.phase == phase]
            done = [report.done for report in reports]
            assert done == sorted(done), f"{phase} went back: {done}"
            assert all(0 <= report.done <= report.total for report in reports)
            assert reports[-1].done == reports[-1].total, f"{phase} ended at {reports[-1]}"
        stages.close()

    @pytest.mark.parametrize("layers", [(1, 1), (0, 99), (-1, 1)])
    def test_layers_outside_the_model_are_a_role_error(
        self, backend: WorkerBackend, layers: tuple[int, int]
    ) -> None:
        """`configure` checks before it touches a weight, and raises RoleError; the backend lives on."""
        config = stage_of(self.capabilities, 0, 1)
        start, end = layers
        wrong = replace(config.manifest, layer_start=start, layer_end_exclusive=end)
        progress: list[LoadProgress] = []
        with pytest.raises(RoleError, match=r"\d"):
            backend.configure(replace(config, manifest=wrong), progress=progress.append, should_abort=never)
        assert not [report for report in progress if report.done], "weights were touched before the check"
        Stages.of(backend, self.capabilities).close()

    def test_an_abort_ends_a_configure(self, backend: WorkerBackend) -> None:
        """`should_abort` ends a long load: RoleError, and the same backend configures again."""
        config = stage_of(self.capabilities, 0, self.capabilities.num_layers)
        with pytest.raises(RoleError):
            backend.configure(config, progress=lambda report: None, should_abort=lambda: True)
        Stages.of(backend, self.capabilities).close()

    def test_a_role_closes_twice_and_another_takes_its_place(self, backend: WorkerBackend) -> None:
        """`StageRole.close` frees weights and cache; idempotent. A worker outlives many runs: one that ended
        before its first step, too."""
        for _ in range(3):
            stages = Stages.of(backend, self.capabilities)
            stages.close()
            stages.close()

    def test_a_role_says_in_words_how_it_computes(self, backend: WorkerBackend) -> None:
        """`StageRole.facts`: a few short words for the result of a run, its numerics and kernels among them,
        for as long as the role lives."""
        config = stage_of(self.capabilities, 0, self.capabilities.num_layers)
        role = backend.configure(config, progress=lambda report: None, should_abort=never)
        try:
            facts = dict(role.facts)
            assert {"numerics", "kernels"} <= set(facts), f"the facts are only {sorted(facts)}"
            for word in (*facts, *facts.values()):
                short = isinstance(word, str) and 0 < len(word) <= 40
                assert short, f"{word!r} is no short word"
            assert dict(role.facts) == facts
        finally:
            role.close()

    # --- steps ---

    def test_the_same_prompt_gives_the_same_tokens(self, backend: WorkerBackend) -> None:
        """Section 16: prefill resets the context, so a second run of one role is as the first; greedy
        sampling has no chance in it."""
        stages = Stages.of(backend, self.capabilities)
        first = stages.generate(self.capabilities.prompt, self.count)
        vocabulary = stages.configs[0].manifest.vocab_size
        assert all(0 <= token < vocabulary for token in first), f"{first} outside 0..{vocabulary - 1}"
        expected = list(self.capabilities.expected)[: self.count]
        assert first[: len(expected)] == expected
        if self.capabilities.deterministic:
            assert stages.generate(self.capabilities.prompt, self.count) == first, "the second run differs"
        stages.close()

    def test_a_longer_context_changes_what_comes(self, backend: WorkerBackend) -> None:
        """A step depends on the rows before it: the cache is there, and it is this run's."""
        stages = Stages.of(backend, self.capabilities, policy=TokenOutputPolicy.LOGITS)
        prompt = self.capabilities.prompt
        whole = stages.step(prompt, 0)
        alone = stages.step(prompt[-1:], 0)
        assert whole != alone, "the last token's logits do not depend on the tokens before it"
        stages.close()

    def test_prefill_and_single_steps_agree(self, backend: WorkerBackend) -> None:
        """Section 16: decode continues where prefill ended; a prompt in two objects is the same prompt."""
        stages = Stages.of(backend, self.capabilities)
        prompt = self.capabilities.prompt
        whole = stages.step(prompt, 0)
        stages.step(prompt[:1], 0)
        parts = [stages.step(prompt[at : at + 1], at) for at in range(1, len(prompt))]
        if self.capabilities.deterministic:
            assert parts[-1] == whole, "the same context, filled in steps, gives another token"
        stages.close()

    def test_layers_divided_over_stages_compute_the_same(self, backend: WorkerBackend) -> None:
        """Section 10: each stage executes its layer range; together they are the model."""
        capabilities = self.capabilities
        single = Stages.of(backend, capabilities)
        tokens_of_one = single.generate(capabilities.prompt, self.count)
        single.close()
        cuts = range(1, capabilities.num_layers)
        divided = Stages.of(backend, capabilities, cuts=cuts)
        tokens_of_many = divided.generate(capabilities.prompt, self.count)
        divided.close()
        assert len(tokens_of_many) == self.count
        if capabilities.split_invariant and capabilities.deterministic:
            assert tokens_of_many == tokens_of_one, f"{capabilities.num_layers} stages differ from one"

    def test_logits_on_the_wire_agree_with_sampled_ids(self, backend: WorkerBackend) -> None:
        """Section 10: the plan says whether ids or logits travel; greedily the largest is the id, ties
        to the lowest."""
        ids = Stages.of(backend, self.capabilities)
        token = int.from_bytes(ids.step(self.capabilities.prompt, 0), "little")
        ids.close()
        rows = Stages.of(backend, self.capabilities, policy=TokenOutputPolicy.LOGITS)
        logits = list(memoryview(rows.step(self.capabilities.prompt, 0)).cast("f"))
        rows.close()
        vocabulary = rows.configs[-1].manifest.vocab_size
        assert len(logits) == vocabulary, f"{len(logits)} logits of a vocabulary of {vocabulary}"
        if self.capabilities.deterministic:
            assert logits.index(max(logits)) == token

    def test_an_output_stays_until_the_next_step(self, backend: WorkerBackend, device: Device) -> None:
        """`execute`: the allocation stays valid until the next `execute` or `close`; the harness copies it in
        pieces while the node is slow, after the input was freed."""
        stages = Stages.of(backend, self.capabilities)
        config, role = stages.configs[0], stages.roles[0]
        data = tokens(self.capabilities.prompt)
        given = device.bridge.alloc_device(config.input_spec, len(data))
        device.fill(given, data)
        made, extent = role.execute(StepInput(given, len(data), 0, 0), never)
        first = device.read(made, extent)
        device.bridge.free_device(given)
        others = [device.bridge.alloc_device(config.input_spec, len(data)) for _ in range(4)]
        for other in others:
            device.fill(other, b"\xaa" * len(data))
        same_bytes(device.read(made, extent), first, "the output, read a second time")
        for other in others:
            device.bridge.free_device(other)
        stages.close()

    def test_a_position_that_leaves_a_gap_fails_the_step_only(self, backend: WorkerBackend) -> None:
        """`execute` raises StepError with a reason; a role that refused a step can start over."""
        stages = Stages.of(backend, self.capabilities)
        good = stages.step(self.capabilities.prompt, 0)
        with pytest.raises(StepError):
            stages.step(self.capabilities.prompt[:1], len(self.capabilities.prompt) + 3)
        again = stages.step(self.capabilities.prompt, 0)
        if self.capabilities.deterministic:
            assert again == good
        stages.close()

    def test_a_context_that_is_full_fails_the_step(self, backend: WorkerBackend) -> None:
        """`max_context` is the rows of the KV cache: nothing is written behind it."""
        stages = Stages.of(backend, self.capabilities)
        prompt, rows = self.capabilities.prompt, self.capabilities.max_context
        full = [prompt[at % len(prompt)] for at in range(rows)]
        stages.step(full, 0)
        with pytest.raises(StepError):
            stages.step(prompt[:1], rows)
        stages.close()

    def test_an_abort_ends_a_step(self, backend: WorkerBackend, device: Device) -> None:
        """`should_abort` is polled between chunks: StepError with the reason WorkerShuttingDown."""
        stages = Stages.of(backend, self.capabilities)
        data = tokens(self.capabilities.prompt)
        given = device.bridge.alloc_device(stages.configs[0].input_spec, len(data))
        device.fill(given, data)
        with pytest.raises(StepError) as caught:
            stages.roles[0].execute(StepInput(given, len(data), 0, 0), lambda: True)
        assert caught.value.reason is StepFailure.WORKER_SHUTTING_DOWN
        device.bridge.free_device(given)
        stages.close()
