"""The echo backend with one thing broken at a time."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from swactor_core.errors import ConfigError
from swactor_core.faults import RoleFailure
from swactor_core.spi.loader import StageManifest, TensorRef
from swactor_core.spi.provider import Provider
from swactor_core.spi.worker import LoadProgress, RoleError, StageConfig, StepError
from swactor_testing.conformance import WorkerCapabilities, WorkerContract
from swactor_testing.echo import EchoBackend, EchoRole, EchoSettings, LateBridge, LateCopy, reference_tokens
from swactor_testing.worker_kit import stage_config
from wrong_kit import Around, caught_by

PROMPT = (5, 17, 99, 3, 42)
CHILDREN: list[subprocess.Popen[bytes]] = []
COPIES = "test_bytes_come_back_from_the_device_as_they_went[0]"
SAME = "test_the_same_prompt_gives_the_same_tokens"
JUDGED = "test_what_is_refused_beforehand_is_what_configure_refuses"
IN_THIS_FILE = TensorRef("token_embd.weight", 0, "F32", (4,), __file__, 0, 16)
PHASES = "test_progress_runs_through_its_phases_once"


class Wrong(WorkerContract):
    capabilities = WorkerCapabilities(
        provider="echo",
        manifest=lambda start, end: stage_config(start, end).manifest,
        num_layers=4,
        prompt=PROMPT,
        in_process=True,
        expected=tuple(reference_tokens(PROMPT, 5, num_layers=4, vocab_size=101)),
        copy_polls=50,
        settings={"copy_polls": 0},
        wrong_settings={"copy_polls": "many", "hold": "breath"},
    )
    bridge: ClassVar[type] = Around
    role: ClassVar[type] = Around
    backend_class: ClassVar[type] = EchoBackend
    judge: ClassVar[Any] = staticmethod(lambda manifest, positions: judged(manifest, positions))

    check: ClassVar[Any] = staticmethod(lambda settings: EchoSettings.of(settings))

    def provider(self) -> Provider:
        return replace(super().provider(), check_model=self.judge, check_settings=self.check)

    @pytest.fixture
    def plugin(self) -> Any:
        parts = type(self)

        class Backend(parts.backend_class):
            def __init__(self, settings: Mapping[str, object]) -> None:
                super().__init__(settings)
                self.bridge = parts.bridge(self.bridge)

            def configure(self, config: StageConfig, **options: Any) -> Any:
                role = parts.role(super().configure(config, **options))
                role.bridge = self.bridge
                return role

        return Backend


def judged(manifest: StageManifest, positions: int) -> None:
    """What the echo backend's `configure` says of a whole model."""
    if manifest.layer_end_exclusive > manifest.num_layers:
        raise RoleError(RoleFailure.CONFIG_INVALID, f"{manifest.num_layers} layers are too few")


class TestUnbroken(Wrong):
    capabilities = replace(Wrong.capabilities, copy_polls=2000)


# --- beforehand ---


@caught_by(JUDGED, "a layer more than there is: check_model says None, configure says RoleError")
class TestRefusesNothingBeforehand(Wrong):
    judge = staticmethod(lambda manifest, positions: None)


@caught_by(JUDGED, "an architecture that nobody knows: check_model says RoleError.*, configure says None")
class TestRefusesWhatItComputes(Wrong):
    @staticmethod
    def judge(manifest: StageManifest, positions: int) -> None:
        judged(manifest, positions)
        if manifest.architecture != "echo":
            raise RoleError(RoleFailure.CONFIG_INVALID, "not mine")


@caught_by(JUDGED, "ValueError")
class TestJudgesWithAnErrorOfItsOwn(Wrong):
    @staticmethod
    def judge(manifest: StageManifest, positions: int) -> None:
        if manifest.layer_end_exclusive > manifest.num_layers:
            raise ValueError(manifest.layer_end_exclusive)


@caught_by("test_a_model_that_is_computed_is_not_refused_beforehand", "No such file|nowhere")
class TestJudgesByTheFile(Wrong):
    capabilities = replace(
        Wrong.capabilities,
        manifest=lambda start, end: replace(stage_config(start, end).manifest, tensors=(IN_THIS_FILE,)),
    )

    @staticmethod
    def judge(manifest: StageManifest, positions: int) -> None:
        for tensor in manifest.tensors:
            Path(tensor.path).stat()


# --- the bridge ---


class EarlyBridge(LateBridge):
    """Says that a copy is complete at the first question; the bytes move at a later one."""

    def copy_event_complete(self, event: object) -> bool:
        assert isinstance(event, LateCopy)
        for other in list(self.in_flight):
            if other is not event:
                other.target[:] = other.source
                self.in_flight.remove(other)
        return True


class EarlyBackend(EchoBackend):
    def __init__(self, settings: Mapping[str, object]) -> None:
        super().__init__(settings)
        self.bridge = EarlyBridge(1 << 30, 1)


@caught_by(COPIES, "seed 0")
class TestSaysCompleteWhileItCopies(Wrong):
    backend_class = EarlyBackend


@caught_by("test_a_run_through_rings_smaller_than_its_objects", r"generate\(.*\) == made")
class TestReleasesRingBytesWhileItCopies(Wrong):
    """What the early word does in a run: the ring's bytes are overwritten under the copy."""

    backend_class = EarlyBackend


@caught_by("test_a_ring_is_quiet_once_it_is_quiesced", "memory that was released")
class TestForgetsQuiescence(Wrong):
    """It says that copies are complete and goes on writing to the ring that was given back."""

    class bridge(Around):
        seen: ClassVar[list[memoryview]] = []

        def host_to_device(self, source: memoryview, allocation: Any, offset: int) -> Any:
            self.seen.append(source)
            return self._inner.host_to_device(source, allocation, offset)

    @pytest.fixture
    def stage(self, plugin: Any) -> Any:
        from swactor_testing.conformance.worker_rig import HarnessedStage

        self.bridge.seen.clear()
        made = HarnessedStage(plugin, self.capabilities)
        progress = made.worker.harness.progress

        def late() -> None:
            progress()
            for source in self.bridge.seen:
                source[:] = b"\1" * len(source)

        made.worker.harness.progress = late
        return made


@caught_by(COPIES, "in vain|was not complete after")
class TestNeverCompletes(Wrong):
    class bridge(Around):
        def copy_event_complete(self, event: Any) -> bool:
            return False


@caught_by(COPIES, "seed 0")
class TestIgnoresTheOffset(Wrong):
    class bridge(Around):
        def host_to_device(self, source: memoryview, allocation: Any, offset: int) -> Any:
            return self._inner.host_to_device(source, allocation, offset // 2)


@caught_by("test_allocations_are_apart", "object")
class TestReusesLiveMemory(Wrong):
    class bridge(Around):
        def alloc_device(self, spec: Any, extent: int) -> Any:
            kept = self.__dict__.setdefault("kept", {})
            return kept.setdefault(extent, self._inner.alloc_device(spec, extent))


@caught_by("test_a_copy_outside_an_allocation_is_an_oserror[0-17]", "DID NOT RAISE|IndexError|ValueError")
class TestCutsCopies(Wrong):
    class bridge(Around):
        def host_to_device(self, source: memoryview, allocation: Any, offset: int) -> Any:
            return self._inner.host_to_device(source[: len(allocation) - offset], allocation, offset)


@caught_by("test_a_device_without_room_is_a_memory_error", "RuntimeError")
class TestRaisesItsOwnErrors(Wrong):
    class bridge(Around):
        def alloc_device(self, spec: Any, extent: int) -> Any:
            try:
                return self._inner.alloc_device(spec, extent)
            except MemoryError:
                raise RuntimeError("device error 2") from None


# --- roles ---


@caught_by("test_its_facts_are_small_json", "not JSON serializable")
class TestFactsAreNoJson(Wrong):
    class backend_class(EchoBackend):
        def facts(self) -> dict[str, Any]:
            return {"device": self}


@caught_by(PHASES, "went back")
class TestProgressGoesBack(Wrong):
    class backend_class(EchoBackend):
        def configure(self, config: StageConfig, *, progress: Any, should_abort: Any) -> Any:
            def backwards(report: LoadProgress) -> None:
                progress(replace(report, done=report.total - report.done))

            return super().configure(config, progress=backwards, should_abort=should_abort)


@caught_by(PHASES, "== <LoadPhase.READY")
class TestIsNeverReady(Wrong):
    class backend_class(EchoBackend):
        def configure(self, config: StageConfig, *, progress: Any, should_abort: Any) -> Any:
            quiet = lambda report: None if report.phase == "ready" else progress(report)  # noqa: E731
            return super().configure(config, progress=quiet, should_abort=should_abort)


@caught_by("test_layers_outside_the_model_are_a_role_error", "DID NOT RAISE")
class TestTakesAnyLayers(Wrong):
    class backend_class(EchoBackend):
        def configure(self, config: StageConfig, **options: Any) -> Any:
            layers = {"layer_start": 0, "layer_end_exclusive": config.manifest.num_layers}
            return super().configure(replace(config, manifest=replace(config.manifest, **layers)), **options)


@caught_by("test_an_abort_ends_a_configure", "DID NOT RAISE")
class TestConfiguresToTheEnd(Wrong):
    class backend_class(EchoBackend):
        def configure(self, config: StageConfig, *, progress: Any, should_abort: Any) -> Any:
            return super().configure(config, progress=progress, should_abort=lambda: False)


@caught_by("test_a_role_closes_twice_and_another_takes_its_place", "closed already|one at a time")
class TestClosesOnce(Wrong):
    class role(Around):
        closed = False

        def close(self) -> None:
            if self.closed:
                raise RuntimeError("closed already")
            self.closed = True


@caught_by("test_a_role_closes_twice_and_another_takes_its_place", "BackendError|no room for a second")
class TestKeepsTheMemoryOfClosedRoles(Wrong):
    class backend_class(EchoBackend):
        roles = 0

        def configure(self, config: StageConfig, **options: Any) -> EchoRole:
            self.roles += 1
            if self.roles > 2:
                raise RoleError(RoleFailure.DEVICE_OUT_OF_MEMORY, "no room for a second role")
            return super().configure(config, **options)


# --- steps ---


@caught_by("test_a_role_says_in_words_how_it_computes", "the facts are only")
class TestKeepsItsKernelsToItself(Wrong):
    class role(Around):
        @property
        def facts(self) -> dict[str, str]:
            return {"numerics": "exact"}


@caught_by("test_a_role_says_in_words_how_it_computes", "is no short word")
class TestSaysNumbersForWords(Wrong):
    class role(Around):
        @property
        def facts(self) -> dict[str, Any]:
            return {"numerics": 32, "kernels": "echo"}


@caught_by(SAME, "the second run differs|StepError|holds \\d+ rows")
class TestPrefillKeepsTheContext(Wrong):
    class role(Around):
        runs = 0

        def execute(self, step: Any, should_abort: Any) -> Any:
            if step.position == 0 and self._inner.rows:
                step = replace(step, position=self._inner.rows)
            return self._inner.execute(step, should_abort)


@caught_by(SAME, "== expected|the second run differs")
class TestRollsDice(Wrong):
    class role(Around):
        def execute(self, step: Any, should_abort: Any) -> Any:
            output, extent = self._inner.execute(step, should_abort)
            output[0] = (output[0] + random.randrange(1, 50)) % 101
            return output, extent


@caught_by("test_a_longer_context_changes_what_comes", "do not depend on the tokens before")
class TestHasNoCache(Wrong):
    class role(Around):
        def execute(self, step: Any, should_abort: Any) -> Any:
            allocation = step.allocation[step.extent - 4 : step.extent]
            self._inner.rows = self._inner._context = 0
            only = replace(step, allocation=allocation, extent=4, position=0)
            return self._inner.execute(only, should_abort)


@caught_by("test_layers_divided_over_stages_compute_the_same", "stages differ from one")
class TestCountsLayersFromZero(Wrong):
    class backend_class(EchoBackend):
        def configure(self, config: StageConfig, **options: Any) -> Any:
            role = super().configure(config, **options)
            manifest = config.manifest
            role._added = sum(range(1, manifest.layer_end_exclusive - manifest.layer_start + 1))
            return role


@caught_by("test_logits_on_the_wire_agree_with_sampled_ids", r"max\(logits\)\) == token")
class TestLogitsAreUpsideDown(Wrong):
    class role(Around):
        def execute(self, step: Any, should_abort: Any) -> Any:
            output, extent = self._inner.execute(step, should_abort)
            if extent > 4:
                values = memoryview(output).cast("f")
                for at, value in enumerate(values):
                    values[at] = -value
            return output, extent


@caught_by("test_an_output_stays_until_the_next_step", "the output, read a second time")
class TestGivesItsInputAsOutput(Wrong):
    """The output lives in memory that is given to the next object."""

    class bridge(Around):
        pool: ClassVar[list[bytearray]] = []

        def alloc_device(self, spec: Any, extent: int) -> Any:
            if self.pool:
                return self.pool.pop()
            return self._inner.alloc_device(spec, extent)

    class role(Around):
        def execute(self, step: Any, should_abort: Any) -> Any:
            output, extent = self._inner.execute(step, should_abort)
            room = bytearray(len(step.allocation))
            room[:extent] = output
            self.bridge.pool.append(room)
            return room, extent


@caught_by("test_a_position_that_leaves_a_gap_fails_the_step_only", "DID NOT RAISE")
class TestFillsGaps(Wrong):
    class role(Around):
        def execute(self, step: Any, should_abort: Any) -> Any:
            if step.position:
                step = replace(step, position=self._inner.rows)
            return self._inner.execute(step, should_abort)


@caught_by("test_a_context_that_is_full_fails_the_step", "DID NOT RAISE")
class TestWritesBehindItsContext(Wrong):
    class backend_class(EchoBackend):
        def configure(self, config: StageConfig, **options: Any) -> Any:
            return super().configure(replace(config, max_context=10_000), **options)


@caught_by("test_an_abort_ends_a_step", "DID NOT RAISE")
class TestRunsToTheEnd(Wrong):
    class role(Around):
        def execute(self, step: Any, should_abort: Any) -> Any:
            return self._inner.execute(step, lambda: False)


@caught_by("test_a_position_that_leaves_a_gap_fails_the_step_only", "KeyError")
class TestAStepRaisesAnything(Wrong):
    class role(Around):
        def execute(self, step: Any, should_abort: Any) -> Any:
            try:
                return self._inner.execute(step, should_abort)
            except StepError:
                raise KeyError("gap") from None


@caught_by("test_events_come_in_order", "OutputExtentInvalid|returned .* bytes, the step declares")
class TestLiesAboutItsExtent(Wrong):
    class role(Around):
        def execute(self, step: Any, should_abort: Any) -> Any:
            output, extent = self._inner.execute(step, should_abort)
            return output + b"\0\0\0\0", extent + 4


@caught_by("test_two_workers_of_one_process_are_apart", "disturb each other|StepFailed")
class TestWorkersShareTheirContext(Wrong):
    class role(Around):
        shared: ClassVar[dict[str, int]] = {}

        def execute(self, step: Any, should_abort: Any) -> Any:
            if step.position:
                self._inner._context = self.shared["context"]
            output = self._inner.execute(step, should_abort)
            self.shared["context"] = self._inner._context
            return output


# --- settings, checked before anything starts ---

TAKEN = "test_settings_that_the_worker_is_run_with_are_taken"
UNKNOWN = "test_an_unknown_setting_is_refused_by_name"
MALFORMED = "test_a_malformed_setting_is_refused_by_name"
NOTHING = "test_checking_settings_starts_and_changes_nothing"


@caught_by(TAKEN, "copy_polls is wrong")
class TestRefusesItsOwnSettings(Wrong):
    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        for name in settings:
            raise ConfigError(f"{name} is wrong")


@caught_by(UNKNOWN, "DID NOT RAISE")
class TestTakesAnySetting(Wrong):
    check = staticmethod(lambda settings: None)


@caught_by(UNKNOWN, "does not name 'no_setting_has_this_name'")
class TestDoesNotNameTheSetting(Wrong):
    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        try:
            EchoSettings.of(settings)
        except ConfigError:
            raise ConfigError("a setting is wrong", hint="leave it out") from None


@caught_by(UNKNOWN, "an error without a remedy")
class TestRefusesWithoutARemedy(Wrong):
    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        try:
            EchoSettings.of(settings)
        except ConfigError as error:
            raise ConfigError(error.message) from None


@caught_by(UNKNOWN, "KeyError")
class TestFailsAtAnUnknownSetting(Wrong):
    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        for name in settings:
            {"copy_polls": 0, "hold": ""}[name]
        EchoSettings.of(settings)


@caught_by(MALFORMED, "DID NOT RAISE")
class TestLooksAtNamesOnly(Wrong):
    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        EchoSettings.of(dict.fromkeys(settings, 0) | {"hold": ""})


@caught_by(NOTHING, "a check changed the threads")
class TestAThreadBeginsAtTheCheck(Wrong):
    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        EchoSettings.of(settings)
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


@caught_by(NOTHING, "a check changed the open files")
class TestTheCheckKeepsAFileOpen(Wrong):
    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        os.open(os.devnull, os.O_RDONLY)
        EchoSettings.of(settings)


@caught_by(NOTHING, "a check changed the children")
class TestTheCheckStartsAProcess(Wrong):
    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        CHILDREN.append(subprocess.Popen(["sleep", "5"]))
        EchoSettings.of(settings)


@caught_by(NOTHING, "a check changed the environment")
class TestTheCheckSetsTheEnvironment(Wrong):
    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        EchoSettings.of(settings)
        os.environ["SWACTOR_CHECKED"] = str(len(os.environ))


@caught_by(NOTHING, "a check changed the settings")
class TestTheCheckFillsInDefaults(Wrong):
    @staticmethod
    def check(settings: dict[str, Any]) -> None:
        EchoSettings.of(settings)
        settings.setdefault("hold", "")
