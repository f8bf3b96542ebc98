"""Hook implementations of this plug-in. Imports nothing heavy: tinygrad comes with the factory's call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from swactor_core.checks import DoctorCheck
from swactor_core.hookspecs import hookimpl
from swactor_core.spi.loader import StageManifest
from swactor_core.spi.provider import Kind, Provider, WorkerMemory
from swactor_core.spi.storage import Storage

from swactor_worker_tinygrad.families import FAMILIES


def _create(settings: Mapping[str, object]) -> Any:
    from swactor_worker_tinygrad.backend import create

    return create(settings)


def _check_model(manifest: StageManifest, max_context: int) -> None:
    from swactor_worker_tinygrad.stage_tensors import check_model

    check_model(manifest, max_context)


def _check_settings(settings: Mapping[str, Any]) -> None:
    from swactor_worker_tinygrad.settings import read_settings

    read_settings(settings)


def _check_machine(settings: Mapping[str, Any]) -> None:
    from swactor_worker_tinygrad.environment import check_machine
    from swactor_worker_tinygrad.settings import read_settings

    check_machine(read_settings(settings), named=bool(settings.get("device")))


def _memory(
    manifest: StageManifest, max_context: int, *, prefill_chunk: int, settings: Mapping[str, object]
) -> WorkerMemory:
    from swactor_worker_tinygrad.memory import model_memory

    return model_memory(manifest, max_context, prefill_chunk=prefill_chunk, settings=settings)


def _kernels() -> Storage:
    from swactor_worker_tinygrad.kept_kernels import KeptKernels

    return KeptKernels()


@hookimpl
def swactor_register_workers() -> Iterable[Provider]:
    return [
        Provider(
            kind=Kind.WORKER,
            name="tinygrad",
            summary="runs a GGUF model's layers on tinygrad: CPU (clang), CUDA and others",
            factory=_create,
            capabilities={
                "architectures": tuple(FAMILIES),
                "devices": ("CPU", "CUDA"),
                "sampling": True,
            },
            check_model=_check_model,
            check_settings=_check_settings,
            check_machine=_check_machine,
            memory=_memory,
            storage=_kernels,
        )
    ]


@hookimpl
def swactor_doctor_checks() -> Iterable[DoctorCheck]:
    from swactor_worker_tinygrad.doctor import CHECKS

    return CHECKS
