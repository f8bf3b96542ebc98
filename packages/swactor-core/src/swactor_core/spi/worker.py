"""Worker interface (spec sections 28 to 33): the device bridge and the stage role inside a worker process.

Provider factory of kind `worker`: `factory(*, settings: Mapping[str, object]) -> WorkerBackend`, called in
the worker process on the one device thread; every method here is called from that thread only. The harness
(`swactor_core.worker`) owns NDJSON, rings, sequence checks and handles; a plug-in adds a device and a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from swactor_core.errors import SwactorError
from swactor_core.faults import RoleFailure, StepFailure
from swactor_core.messages import LoadPhase
from swactor_core.plan import SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import ObjectSpec
from swactor_core.spi.loader import StageManifest
from swactor_core.values import frozen, value


class RoleError(SwactorError):
    """ConfigureRole cannot succeed; `reason` travels in RoleFailed, message and hint to the operator."""

    def __init__(self, reason: RoleFailure, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class StepError(SwactorError):
    """A step failed; `reason` travels in StepFailed."""

    def __init__(self, reason: StepFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@frozen
class StageConfig:
    """What ConfigureRole's `config` holds. `max_context` is the rows of the KV cache (prompt plus max_tokens,
    capped by the model's context), `prefill_chunk` the rows of one step at most. Objects come in as
    `input_spec` and leave as `output_spec`: token ids [rows], activations [rows, hidden_dim] in f32, and of
    the last stage for each step the id that it has sampled or one row of f32 logits [vocab_size], as
    `token_output_policy` says. With `weights_in_memory` the plan lets all stages of the run hold their
    weights in memory of their own, outside of the model's file; without it none may choose to."""

    manifest: StageManifest
    max_context: int
    prefill_chunk: int
    input_spec: ObjectSpec
    output_spec: ObjectSpec
    sampling: SamplingPolicy
    token_output_policy: TokenOutputPolicy
    weights_in_memory: bool = False


@frozen
class LoadProgress:
    """`done` of `total` bytes or steps of a phase of the worker's, which is any but DOWNLOAD; the last report
    of a stage is of READY."""

    phase: LoadPhase
    done: int
    total: int


@value
class StepInput:
    """One loaded object: its device allocation (as `alloc_device` returned it), extent in bytes, sequence,
    and the position of its first row in the context (0 for prefill)."""

    allocation: Any
    extent: int
    sequence: int
    position: int


class DeviceBridge(Protocol):
    """Section 33. Offsets and lengths in bytes. A copy that returns a complete event was synchronous."""

    def alloc_device(self, spec: ObjectSpec, extent: int) -> Any:
        """Raises MemoryError when the device is out of memory."""

    def free_device(self, allocation: Any) -> None: ...
    def host_to_device(self, source: memoryview, allocation: Any, device_offset: int) -> Any:
        """Starts copying all of `source`; returns a CopyEvent. Raises OSError when the copy fails."""

    def device_to_host(self, allocation: Any, device_offset: int, target: memoryview) -> Any:
        """Starts filling all of `target`; returns a CopyEvent. Raises OSError when the copy fails."""

    def copy_event_complete(self, event: Any) -> bool: ...


class StageRole(Protocol):
    """One configured stage: weights bound, KV cache allocated, kernels warm."""

    @property
    def facts(self) -> Mapping[str, str]:
        """How this role computes, a few short words for the result of a run: `numerics` is `exact` where
        weights mean what dequantising them means and activations are f32, `fast` where any product rounds
        activations, `kernels` whose they are, `weights` where it has choices how these are held."""

    def execute(self, step: StepInput, should_abort: Callable[[], bool]) -> tuple[Any, int]:
        """Runs one step over the input's rows and returns (allocation, extent) of the output object.

        Prefill (position 0) resets the KV cache. The allocation stays valid until the next `execute` or
        `close`, and the harness does not free it. `should_abort` is polled between chunks, the first
        included, and ends the step with StepError of WORKER_SHUTTING_DOWN. Raises StepError.
        """

    def close(self) -> None:
        """Frees weights and cache. Idempotent."""


class WorkerBackend(Protocol):
    @property
    def bridge(self) -> DeviceBridge: ...
    def facts(self) -> dict[str, Any]:
        """Small JSON facts for WorkerReady: device, versions; `settings`, which `Provider.memory` is asked
        with; `free_bytes` of this machine's memory where the device computes in that."""

    def configure(
        self,
        config: StageConfig,
        *,
        progress: Callable[[LoadProgress], None],
        should_abort: Callable[[], bool],
    ) -> StageRole:
        """Binds the stage's weights and warms its kernels. Every tensor type and metadata key is checked
        before the first weight is touched. Raises RoleError: for layers that the model has not, for what
        would not fit, and once `should_abort` says so, which is asked all along. The backend then configures
        again."""

    def close(self) -> None: ...
