"""The workers of this repository keep the worker contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from swactor_core.messages import WorkerFatal
from swactor_core.spi.loader import StageManifest
from swactor_core.spi.worker import WorkerBackend
from swactor_testing.conformance import WorkerCapabilities, WorkerContract
from swactor_testing.conformance.worker_rig import HarnessedStage, WorkerFactory
from swactor_testing.echo import EchoBackend, reference_tokens
from swactor_testing.worker_kit import stage_config

PROMPT = (5, 17, 99, 3, 42)
ECHO = WorkerCapabilities(
    provider="echo",
    manifest=lambda start, end: stage_config(start, end).manifest,
    num_layers=4,
    prompt=PROMPT,
    in_process=True,
    expected=tuple(reference_tokens(PROMPT, 5, num_layers=4, vocab_size=101)),
)
TINY = Path(__file__).parents[1] / "data" / "tiny"
REFERENCE = json.loads((TINY / "llama-tied.json").read_text())


class TestEcho(WorkerContract):
    capabilities = ECHO

    @pytest.fixture
    def plugin(self) -> WorkerFactory:
        return EchoBackend


class TestEchoWithLateCopies(TestEcho):
    """Bytes move at the last moment that the interface allows."""

    capabilities = WorkerCapabilities(
        provider="echo",
        manifest=ECHO.manifest,
        num_layers=4,
        prompt=PROMPT,
        in_process=True,
        expected=ECHO.expected,
        settings={"copy_polls": 3},
    )


@cache
def tiny(start: int, end: int) -> StageManifest:
    from swactor_loader_gguf.model import GgufModel

    model = GgufModel(str(TINY / "llama-tied.gguf"))
    manifest = model.manifest(start, end)
    model.close()
    return manifest


class TestTinygrad(WorkerContract):
    capabilities = WorkerCapabilities(
        provider="tinygrad",
        manifest=tiny,
        num_layers=4,
        prompt=tuple(REFERENCE["prompt"]),
        expected=tuple(REFERENCE["greedy"]),
        settings={"device": "CPU"},
        wrong_settings={"device": "TOASTER", "threads": 0, "weights": "heavy", "kernels": 3, "search": -1},
    )

    @pytest.fixture
    def plugin(self) -> WorkerFactory:
        def factory(settings: Mapping[str, object]) -> WorkerBackend:
            from swactor_worker_tinygrad import create

            return create(settings)

        return factory


def test_a_factory_is_called_as_the_runtime_calls_it() -> None:
    """By the argument's name: what passes here must not fail in a run, and the other way round."""
    asked: list[Mapping[str, object]] = []

    def named(*, settings: Mapping[str, object]) -> WorkerBackend:
        asked.append(settings)
        return EchoBackend(settings)

    (backend,) = HarnessedStage(named, ECHO).backends
    backend.close()
    assert len(asked) == 1
    wrongly_named: Any = lambda conf: EchoBackend(conf)  # noqa: E731 - what the type forbids is tried here
    of_another_name = HarnessedStage(wrongly_named, ECHO)
    (fatal,) = of_another_name.worker.events
    assert isinstance(fatal, WorkerFatal)
    assert "unexpected keyword argument 'settings'" in fatal.detail
