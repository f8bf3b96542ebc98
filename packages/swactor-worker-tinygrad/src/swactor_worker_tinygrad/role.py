"""One configured stage (spec section 16): from an input object on the device to an output object there.

Knows the step contract: rows, positions, chunks, token ids and logits. Must not know how a block is computed
(the engine's matter) nor rings and sequences (the harness's).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from swactor_core.faults import StepFailure
from swactor_core.plan import TokenOutputPolicy
from swactor_core.spi.worker import StageConfig, StepError, StepInput

from swactor_worker_tinygrad import device_memory
from swactor_worker_tinygrad.bridge import TinygradBridge
from swactor_worker_tinygrad.device_memory import Allocation
from swactor_worker_tinygrad.sampling import Sampler
from swactor_worker_tinygrad.settings import KernelChoice
from swactor_worker_tinygrad.weights import WeightFiles

TOKEN_BYTES = 4


class Engine(Protocol):
    """What computes a stage's blocks over a few rows at a time; see `graph_engine.GraphEngine`."""

    logits: Allocation
    #: whose kernels these are
    kernels: KernelChoice

    @property
    def numerics(self) -> dict[str, str]: ...
    @property
    def packed_names(self) -> frozenset[str]: ...

    def count(self, remaining: int) -> int: ...
    def input(self, count: int) -> Allocation: ...
    def output(self, count: int) -> Allocation: ...
    def embed(self, ids: NDArray[np.uint32]) -> None: ...
    def step(self, count: int, position: int) -> None: ...
    def project(self, count: int) -> None: ...
    def close(self) -> None: ...


class ModelStage:
    """A `StageRole`. Token ids are uint32, activations and logits f32 rows, all little-endian."""

    def __init__(
        self,
        config: StageConfig,
        *,
        engine: Engine,
        bridge: TinygradBridge,
        files: WeightFiles,
    ) -> None:
        self._config, self.engine, self._bridge, self._files = config, engine, bridge, files
        self._manifest = config.manifest
        self._row_bytes = config.manifest.hidden_dim * 4
        self.facts = {
            **engine.numerics,
            "kernels": engine.kernels,
            "weights": _held(engine, on_host=device_memory.on_host(files.device)),
        }
        self._filled = 0
        self._sampler = Sampler(config.sampling, config.manifest.token_count)
        self._output: Allocation | None = None
        self._closed = False

    # The step.

    def execute(self, step: StepInput, should_abort: Callable[[], bool]) -> tuple[Allocation, int]:
        """See `StageRole.execute`. Raises StepError."""
        if self._closed:
            raise StepError(StepFailure.ROLE_UNAVAILABLE, "the stage's role has been closed")
        rows = self._rows_of(step)
        if step.position == 0:
            self.reset()
        try:
            return self._run(step, rows, should_abort)
        except MemoryError as error:
            raise StepError(StepFailure.DEVICE_OUT_OF_MEMORY, str(error)) from error
        except OSError as error:
            raise StepError(StepFailure.OUTPUT_COPY_FAILED, str(error)) from error
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise StepError(StepFailure.TINYGRAD_ERROR, f"{type(error).__name__}: {error}") from error

    def reset(self) -> None:
        """Forgets the context: a run starts. Old cache rows are never read, they lie behind the position."""
        self._filled = 0
        self._sampler.restart()

    def _rows_of(self, step: StepInput) -> int:
        unit = TOKEN_BYTES if self._manifest.first else self._row_bytes
        rows, rest = divmod(step.extent, unit)
        allocation = step.allocation
        if not isinstance(allocation, Allocation) or allocation.buffer is None:
            raise StepError(StepFailure.INVALID_INPUT_HANDLE, "the input is not a live device allocation")
        if rest or rows < 1 or step.extent > allocation.nbytes:
            raise StepError(
                StepFailure.INVALID_INPUT_HANDLE,
                f"an input of {step.extent} bytes is not whole rows of {unit} bytes",
            )
        if step.position < 0 or (step.position > self._filled and step.position != 0):
            raise StepError(
                StepFailure.INVALID_INPUT_HANDLE,
                f"position {step.position} leaves a gap after the {self._filled} rows of context",
            )
        if step.position + rows > self._config.max_context:
            raise StepError(
                StepFailure.INVALID_INPUT_HANDLE,
                f"{rows} rows from {step.position} on exceed the context of {self._config.max_context}",
            )
        return rows

    def _run(self, step: StepInput, rows: int, should_abort: Callable[[], bool]) -> tuple[Allocation, int]:
        engine, row_bytes = self.engine, self._row_bytes
        ids = self._ids(step.allocation, rows) if self._manifest.first else None
        output = None if self._manifest.last else self._output_of(rows * row_bytes)
        done = count = 0
        while done < rows:
            if should_abort():
                raise StepError(StepFailure.WORKER_SHUTTING_DOWN, f"stopped after {done} of {rows} rows")
            count = engine.count(rows - done)
            if ids is not None:
                engine.embed(ids[done : done + count])
            else:
                start = done * row_bytes
                device_memory.copy(engine.input(count), 0, step.allocation, start, count * row_bytes)
            engine.step(count, step.position + done)
            if output is not None:
                device_memory.copy(output, done * row_bytes, engine.output(count), 0, count * row_bytes)
            done += count
        self._filled = step.position + rows
        if output is not None:
            self._bridge.finish()  # a queue that is not empty would be the next step's time, and its failure
            return output, rows * row_bytes
        engine.project(count)
        return self._produce_token()

    def _ids(self, allocation: Allocation, rows: int) -> NDArray[np.uint32]:
        raw = bytearray(rows * TOKEN_BYTES)
        self._bridge.device_to_host(allocation, 0, memoryview(raw))
        ids = np.frombuffer(raw, "<u4")
        if int(ids.max()) >= self._manifest.vocab_size:
            raise StepError(
                StepFailure.INVALID_INPUT_HANDLE,
                f"token id {int(ids.max())} is outside the vocabulary of {self._manifest.vocab_size}",
            )
        return ids

    def _produce_token(self) -> tuple[Allocation, int]:
        raw = bytearray(self._manifest.vocab_size * 4)
        device_memory.read(self.engine.logits, 0, memoryview(raw))
        if self._config.token_output_policy is TokenOutputPolicy.LOGITS:
            output = self._output_of(len(raw))
            self._bridge.host_to_device(memoryview(raw), output, 0)
            return output, len(raw)
        token = self._sampler.pick(np.frombuffer(raw, "<f4"))
        output = self._output_of(TOKEN_BYTES)
        self._bridge.host_to_device(memoryview(token.to_bytes(TOKEN_BYTES, "little")), output, 0)
        return output, TOKEN_BYTES

    def _output_of(self, nbytes: int) -> Allocation:
        """The role's one output allocation, grown when needed; the previous output is void by contract."""
        if self._output is None or self._output.nbytes < nbytes:
            if self._output is not None:
                self._bridge.free_device(self._output)
                self._output = None
            self._output = self._bridge.allocate(nbytes)
        return self._output

    def close(self) -> None:
        """See `StageRole.close`."""
        if self._closed:
            return
        self._closed = True
        if self._output is not None:
            self._bridge.free_device(self._output)
            self._output = None
        self.engine.close()
        self._files.close()


def _held(engine: Engine, *, on_host: bool) -> str:
    if not on_host:
        return "copied"
    return "packed" if engine.packed_names else "mapped"
