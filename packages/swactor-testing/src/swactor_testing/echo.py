"""Worker backend mock `echo`: stages that compute a documented whole-number function instead of a model.

With tokens t_0 .. t_p in the context (ids, from position 0), the first stage makes of position p the row
`h[j] = (s_p + j) mod 65521`, where `s_p = sum over i <= p of (t_i + 1) * (i + 1)`, mod 65521. Every layer l
(0-based, global) adds l + 1 to every element. The last stage's next token is `h[0] mod vocab_size` of the
last row. All values are whole numbers below 2**24, so f32 holds them exactly and the result does not depend
on how the layers are split; it depends on every earlier token and its position, so a lost, doubled or
reordered object, a wrong position or a context that was not reset changes it. `reference_tokens` is the same
function in one place. Sampling settings are ignored; with logits on the wire the largest is the next token's.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swactor_core.errors import ConfigError
from swactor_core.faults import RoleFailure, StepFailure
from swactor_core.messages import LoadPhase
from swactor_core.plan import TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectSpec
from swactor_core.spi.worker import LoadProgress, RoleError, StageConfig, StepError, StepInput
from swactor_core.values import frozen

MODULUS = 65521
EXACT = 1 << 24
HOLD_LIMIT = 60.0
DEVICE_BYTES = 1 << 30
NEVER = -1
EXIT_CODE = 7

_FORMATS = {
    (DTypeFamily.UNSIGNED, 4): "I",
    (DTypeFamily.UNSIGNED, 8): "Q",
    (DTypeFamily.FLOAT, 4): "f",
}


def reference_tokens(prompt: Sequence[int], count: int, *, num_layers: int, vocab_size: int) -> list[int]:
    """The `count` token ids that any split of `num_layers` echo layers generates after `prompt`."""
    layers = num_layers * (num_layers + 1) // 2
    context, tokens = 0, list(prompt)
    for position, token in enumerate(tokens):
        context = (context + (token + 1) * (position + 1)) % MODULUS
    for _ in range(count):
        token = (context + layers) % vocab_size
        context = (context + (token + 1) * (len(tokens) + 1)) % MODULUS
        tokens.append(token)
    return tokens[len(prompt) :]


class EchoBridge:
    """`swactor_core.spi.worker.DeviceBridge` on bytearrays; every copy is over when it returns.

    `live` counts allocations, `copies` copies, for tests.
    """

    def __init__(self, memory_bytes: int, fail_copy: int = 0) -> None:
        """`fail_copy`: the copy of this number, from 1, fails; none for 0."""
        self._free = memory_bytes
        self._fail_copy = fail_copy
        self.live = 0
        self.copies = 0

    def alloc_device(self, spec: ObjectSpec, extent: int) -> bytearray:
        if extent > self._free:
            raise MemoryError(f"echo device has {self._free} bytes left, asked for {extent}")
        self._free -= extent
        self.live += 1
        return bytearray(extent)

    def free_device(self, allocation: bytearray) -> None:
        self._free += len(allocation)
        self.live -= 1

    def host_to_device(self, source: memoryview, allocation: bytearray, device_offset: int) -> Any:
        if device_offset + len(source) > len(allocation):
            raise OSError(f"copy of {len(source)} bytes to {device_offset} of {len(allocation)}")
        allocation[device_offset : device_offset + len(source)] = source
        self._copied()

    def device_to_host(self, allocation: bytearray, device_offset: int, target: memoryview) -> Any:
        if device_offset + len(target) > len(allocation):
            raise OSError(f"copy of {len(target)} bytes from {device_offset} of {len(allocation)}")
        target[:] = memoryview(allocation)[device_offset : device_offset + len(target)]
        self._copied()

    def _copied(self) -> None:
        self.copies += 1
        if self.copies == self._fail_copy:
            raise OSError(f"copy {self.copies} failed, as the setting fail_copy asks")

    def copy_event_complete(self, event: object) -> bool:
        return True


@dataclass(slots=True)
class LateCopy:
    """A copy that happens at its completion, after `polls` more questions."""

    polls: int
    source: memoryview
    target: memoryview


class LateBridge(EchoBridge):
    """An asynchronous device: bytes move at the last moment that the interface allows, so that a ring byte
    released, or an allocation freed, before its copy is complete is noticed in the data."""

    def __init__(self, memory_bytes: int, polls: int, fail_copy: int = 0) -> None:
        super().__init__(memory_bytes, fail_copy)
        self._polls = polls
        self.in_flight: list[LateCopy] = []

    def free_device(self, allocation: bytearray) -> None:
        super().free_device(allocation)
        allocation[:] = b"\xdd" * len(allocation)

    def host_to_device(self, source: memoryview, allocation: bytearray, device_offset: int) -> LateCopy:
        return self._begin(source, memoryview(allocation)[device_offset : device_offset + len(source)])

    def device_to_host(self, allocation: bytearray, device_offset: int, target: memoryview) -> LateCopy:
        return self._begin(memoryview(allocation)[device_offset : device_offset + len(target)], target)

    def copy_event_complete(self, event: object) -> bool:
        assert isinstance(event, LateCopy)
        if event.polls:
            event.polls -= 1
            return False
        event.target[:] = event.source
        self.in_flight.remove(event)
        self._copied()
        return True

    def _begin(self, source: memoryview, target: memoryview) -> LateCopy:
        if len(source) != len(target):
            raise OSError(f"copy of {len(source)} bytes into {len(target)}")
        copy = LateCopy(self._polls, source, target)
        self.in_flight.append(copy)
        return copy


class EchoRole:
    """One configured echo stage. `rows` is how many positions its context holds."""

    def __init__(
        self,
        config: StageConfig,
        hold: Callable[[Callable[[], bool]], None],
        misbehave: Callable[[int], None] = lambda sequence: None,
    ) -> None:
        """`misbehave(sequence)` is called before each step, and may raise."""
        manifest = config.manifest
        self._config = config
        self._hold = hold
        self._misbehave = misbehave
        self._first, self._last = manifest.first, manifest.last
        self._hidden, self._vocab = manifest.hidden_dim, manifest.vocab_size
        self._added = sum(layer + 1 for layer in range(manifest.layer_start, manifest.layer_end_exclusive))
        self._input_format = _format(config.input_spec)
        self._output_format = _format(config.output_spec)
        self._context = 0
        self.rows = 0
        self.facts = {"numerics": "exact", "kernels": "echo"}

    def execute(self, step: StepInput, should_abort: Callable[[], bool]) -> tuple[bytearray, int]:
        self._hold(should_abort)
        if should_abort():
            raise StepError(StepFailure.WORKER_SHUTTING_DOWN, "aborted")
        self._misbehave(step.sequence)
        if step.position == 0:
            self.rows = self._context = 0
        if step.position != self.rows:
            message = f"position {step.position}, but the context holds {self.rows} rows"
            raise StepError(StepFailure.TINYGRAD_ERROR, message)
        count = step.extent // self._config.input_spec.row_bytes
        if self.rows + count > self._config.max_context:
            message = f"{self.rows + count} rows, the context has room for {self._config.max_context}"
            raise StepError(StepFailure.TINYGRAD_ERROR, message)
        # [count * row_width] numbers, token ids or activations
        values = array(self._input_format)
        values.frombytes(memoryview(step.allocation)[: step.extent])
        rows = self._embed(values) if self._first else values
        output = self._next(rows) if self._last else array("f", [v + self._added for v in rows])
        self.rows += count
        return bytearray(output.tobytes()), len(output) * output.itemsize

    def close(self) -> None:
        self.rows = self._context = 0

    def _embed(self, tokens: array[Any]) -> Sequence[float]:
        """Token ids [count] to rows [count * hidden_dim]."""
        rows: list[float] = []
        for position, token in enumerate(tokens, self.rows):
            self._context = (self._context + (token + 1) * (position + 1)) % MODULUS
            rows.extend((self._context + j) % MODULUS for j in range(self._hidden))
        return rows

    def _next(self, rows: Sequence[float]) -> array[Any]:
        """Rows [count * hidden_dim] to one token id, or one row of logits [vocab_size]."""
        token = int(rows[len(rows) - self._hidden] + self._added) % self._vocab
        if self._config.token_output_policy is TokenOutputPolicy.TOKEN_IDS:
            return array(self._output_format, [token])
        return array("f", [-float((j - token) % self._vocab) for j in range(self._vocab)])


@frozen
class EchoSettings:
    """`memory_bytes` of the pretended device. `copy_polls` above 0 makes copies asynchronous: each is
    complete after that many questions. `hold` is `configure` or `execute`: that call then waits until it is
    told to abort, at most `HOLD_LIMIT` seconds; only for a worker with a process of its own.

    Faults by script: the step of sequence `fail_at` fails, that of `exit_at` ends the worker; of the stage
    that holds the layer `fault_layer`, of every stage when NEVER. `fail_copy` is the number of the copy that
    fails, from 1."""

    memory_bytes: int = DEVICE_BYTES
    copy_polls: int = 0
    fail_at: int = NEVER
    exit_at: int = NEVER
    fault_layer: int = NEVER
    fail_copy: int = 0
    hold: str = ""

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> EchoSettings:
        """Raises ConfigError naming the key."""
        numbers = {
            "memory_bytes": DEVICE_BYTES,
            "copy_polls": 0,
            "fail_at": NEVER,
            "exit_at": NEVER,
            "fault_layer": NEVER,
            "fail_copy": 0,
        }
        for key, value in settings.items():
            if key not in (*numbers, "hold"):
                raise ConfigError(
                    f"echo has no setting {key!r}", hint=f"it has {', '.join(numbers)} and hold"
                )
            if key in numbers:
                if not isinstance(value, int) or value < 0:
                    raise ConfigError(f"echo: {key} is {value!r}, expected a number from 0 on")
                numbers[key] = value
        hold = settings.get("hold", "")
        if hold not in ("", "configure", "execute"):
            raise ConfigError(f"echo: hold is {hold!r}, expected configure or execute")
        return cls(**numbers, hold=str(hold))


class EchoBackend:
    """`swactor_core.spi.worker.WorkerBackend`."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings = chosen = EchoSettings.of(settings)
        self.bridge = (
            LateBridge(chosen.memory_bytes, chosen.copy_polls, chosen.fail_copy)
            if chosen.copy_polls
            else EchoBridge(chosen.memory_bytes, chosen.fail_copy)
        )

    def facts(self) -> dict[str, Any]:
        return {"device": "echo", "memory_bytes": self._settings.memory_bytes}

    def configure(
        self,
        config: StageConfig,
        *,
        progress: Callable[[LoadProgress], None],
        should_abort: Callable[[], bool],
    ) -> EchoRole:
        manifest = config.manifest
        if not 0 <= manifest.layer_start < manifest.layer_end_exclusive <= manifest.num_layers:
            layers = f"{manifest.layer_start}..{manifest.layer_end_exclusive} of {manifest.num_layers}"
            raise RoleError(RoleFailure.CONFIG_INVALID, f"layers {layers}")
        if MODULUS + sum(range(manifest.num_layers + 1)) >= EXACT:
            message = f"{manifest.num_layers} layers leave the whole numbers that f32 holds exactly"
            raise RoleError(RoleFailure.CONFIG_INVALID, message)
        role = EchoRole(config, self._holder("execute"), self._misbehaviour(config))
        total = manifest.layer_end_exclusive - manifest.layer_start
        hold = self._holder("configure")
        for done in range(total + 1):
            progress(LoadProgress(LoadPhase.WEIGHTS, done, total))
            hold(should_abort)
            if should_abort():
                raise RoleError(RoleFailure.BACKEND_ERROR, "aborted")
        progress(LoadProgress(LoadPhase.READY, 1, 1))
        return role

    def close(self) -> None:
        """Nothing to give back: the device is this process's heap."""

    def _misbehaviour(self, config: StageConfig) -> Callable[[int], None]:
        chosen, manifest = self._settings, config.manifest
        here = chosen.fault_layer in (NEVER, *range(manifest.layer_start, manifest.layer_end_exclusive))

        def misbehave(sequence: int) -> None:
            if here and sequence == chosen.fail_at:
                raise StepError(StepFailure.TINYGRAD_ERROR, "the step failed, as the setting fail_at asks")
            if here and sequence == chosen.exit_at:
                raise SystemExit(EXIT_CODE)

        return misbehave

    def _holder(self, where: str) -> Callable[[Callable[[], bool]], None]:
        def hold(should_abort: Callable[[], bool]) -> None:
            end = time.monotonic() + HOLD_LIMIT
            while self._settings.hold == where and not should_abort() and time.monotonic() < end:
                time.sleep(0.001)

        return hold


def _format(spec: ObjectSpec) -> str:
    try:
        code = _FORMATS[spec.dtype_family, spec.dtype_width_bytes]
    except KeyError:
        message = f"echo has no {spec.dtype_width_bytes}-byte {spec.dtype_family}"
        raise RoleError(RoleFailure.CONFIG_INVALID, message, hint="use 4-byte floats on the wire") from None
    assert struct.calcsize(f"={code}") == spec.dtype_width_bytes
    return code
