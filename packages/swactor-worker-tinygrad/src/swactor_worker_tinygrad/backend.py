"""The worker backend: opens the device, checks a stage's manifest, binds its weights and warms its kernels.

Knows the order of those steps and which failure each becomes. Must not know rings, NDJSON or kernels.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from swactor_core.errors import ResourceError, SwactorError, remedy_of_lack
from swactor_core.faults import RoleFailure
from swactor_core.free_memory import available_memory, available_swap, rest_in_words
from swactor_core.memory import F32_BYTES
from swactor_core.messages import LoadPhase
from swactor_core.plan import TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, align_up
from swactor_core.spi.loader import TensorRef
from swactor_core.spi.worker import LoadProgress, RoleError, StageConfig

from swactor_worker_tinygrad import environment
from swactor_worker_tinygrad.families import FAMILIES
from swactor_worker_tinygrad.memory import packed_weights
from swactor_worker_tinygrad.parameters import ModelParameters
from swactor_worker_tinygrad.settings import (
    KNOWN_DEVICES,
    KernelChoice,
    Numerics,
    WeightsChoice,
    WorkerSettings,
    read_settings,
)
from swactor_worker_tinygrad.stage_tensors import StageTensors, check_model
from swactor_worker_tinygrad.tensor_types import GRAPH_TYPES

if TYPE_CHECKING:
    from swactor_worker_tinygrad.rope_tables import Tables
    from swactor_worker_tinygrad.weights import Ends, Weight, WeightFiles

PROGRESS_SECONDS = 1.0
_LESS_MEMORY = "use more stages, a smaller max_tokens, or a smaller quantisation"
SEARCHED_DIFFERENCE = 1e-3  # of the greatest, at most, between kernels of one stage


def create(settings: Mapping[str, object]) -> TinygradBackend:
    """Factory of the provider. Raises ConfigError for a wrong setting and ResourceError, with the remedy,
    when compiler, tinygrad or device are not there."""
    wanted = read_settings(settings)
    variables = environment.prepare(wanted)
    if wanted.has_native_kernels and wanted.kernels is not KernelChoice.GRAPH:
        return TinygradBackend(wanted, wanted.device_name, variables)
    return TinygradBackend(wanted, _opened(wanted), variables)


def _opened(wanted: WorkerSettings) -> str:
    """Imports tinygrad and opens its device, which native kernels do without; the device's canonical name."""
    environment.require_tinygrad()
    from swactor_worker_tinygrad import internals

    try:
        return internals.open_device(wanted.device_name)
    except Exception as error:  # a driver's own failure may be of any type
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ResourceError(
            f"device {wanted.device!r} cannot be opened: {said}",
            hint=_opening_hint(wanted.device_kind),
        ) from error


def _opening_hint(kind: str) -> str:
    if kind == "CUDA":
        return "`nvidia-smi` lists what the driver has: the first is CUDA, the second CUDA:1"
    return f"known devices are {', '.join(KNOWN_DEVICES)}; CPU needs no more than clang"


class TinygradBackend:
    """A `WorkerBackend`. All calls from one thread: tinygrad's caches are not made for more."""

    def __init__(self, settings: WorkerSettings, device: str, variables: Mapping[str, str]) -> None:
        from swactor_worker_tinygrad.bridge import TinygradBridge

        self.device, self.settings, self._variables = device, settings, variables
        self._bridge = TinygradBridge(device)
        self._roles: weakref.WeakSet[Any] = weakref.WeakSet()
        self._captures_apart = True

    @property
    def bridge(self) -> Any:
        return self._bridge

    def facts(self) -> dict[str, Any]:
        """Device, kernels, versions, and memory that is free now where the system says so."""
        facts: dict[str, Any] = {
            "worker": "tinygrad",
            "device": self.settings.device,
            "kernels": self.settings.kernels,
            "numerics": self.settings.numerics,
            "tinygrad": environment.TINYGRAD_VERSION,
            "compiler": self._variables.get("CC", ""),
            "architectures": list(FAMILIES),
            "settings": asdict(self.settings),
        }
        if self.settings.device_kind == "CPU":
            facts["threads"] = self.settings.threads
            if (free := available_memory()) is not None:
                facts["free_bytes"] = free
        return facts

    def configure(
        self,
        config: StageConfig,
        *,
        progress: Callable[[LoadProgress], None],
        should_abort: Callable[[], bool],
    ) -> Any:
        """See `WorkerBackend.configure`. Raises RoleError."""
        return self._made(config, progress, should_abort, partial(self._warm, config))

    def capture(self, config: StageConfig, progress: Callable[[int, int], None]) -> None:
        """Captures the stage's graphs, for other processes to find them on the disk. Raises RoleError."""

        def compiled(engine: Any, *_: Any) -> None:
            self._choose_kernels(engine, lambda _: None, lambda: None)
            steps = engine.compile_steps()
            for done, step in enumerate(steps):
                step()
                progress(done + 1, len(steps))
            engine.close()

        self._captures_apart = False
        self._made(config, lambda _: None, lambda: False, compiled)

    def _made(
        self,
        config: StageConfig,
        progress: Callable[[LoadProgress], None],
        should_abort: Callable[[], bool],
        finish: Callable[..., Any],
    ) -> Any:
        """What `finish(engine, tensors, files, progress, should_abort)` makes of the stage's engine."""
        from swactor_worker_tinygrad import weights

        parameters, tensors = check_model(config.manifest, config.max_context)
        _check_config(config, parameters)
        files = weights.WeightFiles(self.device)
        engine = None
        try:
            files.open(tensors.all())
            engine = self._build(config, parameters, tensors, files, progress, should_abort)
            if self._lacks_graphs(engine):
                from swactor_worker_tinygrad.capturing import capture_apart

                engine.close()
                capture_apart(self.settings, config, progress=progress, should_abort=should_abort)
                engine = self._build(config, parameters, tensors, files, progress, should_abort)
            return finish(engine, tensors, files, progress, should_abort)
        except BaseException as error:
            if engine is not None:
                engine.close()
            files.close()
            if isinstance(error, RoleError) or not isinstance(error, Exception):
                raise
            packing = self._computes_natively() and self._packs(config)
            raise _role_error(error, self._less_memory(packing=packing)) from error

    def _lacks_graphs(self, engine: Any) -> bool:
        """Whether graphs are to be captured first, in a process of its own. A search needs this one's."""
        if (
            engine.kernels is not KernelChoice.GRAPH
            or not self._captures_apart
            or isinstance(self.settings.search, int)
        ):
            return False
        from swactor_worker_tinygrad.capturing import keeps_graphs

        if self.settings.device_kind != "CPU" or not keeps_graphs():
            return False
        self._choose_kernels(engine, lambda _: None, lambda: None)
        return not engine.kept

    def _build(
        self,
        config: StageConfig,
        parameters: ModelParameters,
        tensors: StageTensors,
        files: Any,
        progress: Callable[[LoadProgress], None],
        should_abort: Callable[[], bool],
    ) -> Any:
        from swactor_worker_tinygrad import weights
        from swactor_worker_tinygrad.native import TYPES
        from swactor_worker_tinygrad.native_engine import NativeEngine

        native = self._computes_natively()
        if not native:
            _opened(self.settings)
        chunk = min(config.prefill_chunk, config.max_context)
        context = align_up(config.max_context, chunk) + chunk
        packing = self._packs(config)
        self._check_room(parameters, tensors, context=context, packing=native and packing)
        bound = weights.bind_all(
            files,
            _bound_tensors(tensors, native=native),
            TYPES.keys() if native else GRAPH_TYPES,
            progress=lambda done, total: progress(LoadProgress(LoadPhase.WEIGHTS, done, total)),
            should_abort=should_abort,
        )
        blocks = [{name: bound[ref.name] for name, ref in block.items()} for block in tensors.blocks]
        ends = _ends(tensors, bound)
        tables = _tables(parameters, tensors, files, context=context)
        if native:
            return NativeEngine(
                parameters,
                context=context,
                chunk=chunk,
                threads=self.settings.threads,
                packing=packing,
                fast=self.settings.numerics is Numerics.FAST,
                blocks=blocks,
                ends=ends,
                embedding=None if tensors.embedding is None else bound[tensors.embedding.name],
                stored_rows=lambda ids: files.read_rows(tensors.embedding, ids),
                rope=tables,
            )
        from swactor_worker_tinygrad.graph_engine import GraphEngine

        return GraphEngine(
            parameters,
            device=self.device,
            context=context,
            chunk=chunk,
            blocks=blocks,
            ends=ends,
            lookup=lambda ids: files.rows(tensors.embedding, ids),
            rope=tables,
        )

    def _computes_natively(self) -> bool:
        """Whether the native kernels compute: by the settings alone, because engines differ in the last bits
        and every split of a model must give the same tokens. Raises RoleError when they are asked for and
        cannot."""
        if self.settings.kernels is KernelChoice.GRAPH:
            return False
        if self.settings.has_native_kernels:
            return True
        for name, value, hint in (
            ("kernels", KernelChoice.NATIVE, "leave the worker option kernels out, or set it to graph"),
            (
                "numerics",
                Numerics.FAST,
                "leave the worker option numerics out: it is only for native kernels",
            ),
        ):
            if getattr(self.settings, name) is value:
                raise RoleError(
                    RoleFailure.CONFIG_INVALID,
                    f"device {self.settings.device} has no native kernels, which {name} = {value} asks for",
                    hint=hint,
                )
        return False

    def _warm(
        self,
        config: StageConfig,
        engine: Any,
        tensors: StageTensors,
        files: Any,
        progress: Callable[[LoadProgress], None],
        should_abort: Callable[[], bool],
    ) -> Any:
        """Compiles every kernel and runs the stage once, so that the first token finds all of it warm."""
        from swactor_worker_tinygrad.role import ModelStage

        def check() -> None:
            if should_abort():
                raise RoleError(RoleFailure.BACKEND_ERROR, "stopped while compiling kernels")

        if engine.kernels is KernelChoice.GRAPH:
            self._choose_kernels(engine, progress, check)
        steps = engine.compile_steps()
        total = len(steps) + len(engine.warm_counts)
        stored = {ref.name: ref for ref in tensors.all()}
        for done, step in enumerate(steps):
            check()
            step()
            # at once, or all that is packed would for a moment be held twice
            for name in stored.keys() & engine.packed_names:
                files.let_go(stored.pop(name))
            progress(LoadProgress(LoadPhase.COMPILE, done + 1, total))
        for done, count in enumerate(engine.warm_counts):
            check()
            engine.step(count, 0)
            if config.manifest.last:
                engine.project(count)
            self._bridge.finish()
            progress(LoadProgress(LoadPhase.COMPILE, len(steps) + done + 1, total))
        role = ModelStage(config, engine=engine, bridge=self._bridge, files=files)
        self._roles.add(role)
        progress(LoadProgress(LoadPhase.READY, 1, 1))
        return role

    def _choose_kernels(
        self, engine: Any, progress: Callable[[LoadProgress], None], check: Callable[[], None]
    ) -> None:
        """Sets how the graph engine's kernels are chosen; searches first where that is asked for. Raises
        RoleError, and forgets what was found, when the stage computes something else with it."""
        from swactor_worker_tinygrad.kernel_search import KernelSearch

        wanted = self.settings.search
        if wanted == "off":
            return
        if isinstance(wanted, int):
            steps = engine.compile_steps()
            for step in steps:
                check()
                step()
            expected = engine.trial()
            done, said = 0, time.monotonic()

            def tried() -> None:
                nonlocal said
                check()
                if time.monotonic() - said > PROGRESS_SECONDS:
                    said = time.monotonic()
                    progress(LoadProgress(LoadPhase.SEARCH, done, len(steps)))

            engine.search = KernelSearch(wanted, tried)
            for done, step in enumerate(engine.compile_steps()):
                progress(LoadProgress(LoadPhase.SEARCH, done, len(steps)))
                step()
            if not all(map(_alike, expected, engine.trial())):
                engine.search.forget()
                raise RoleError(
                    RoleFailure.BACKEND_ERROR,
                    "with the kernels that were found the stage computes something else: they are forgotten",
                    hint="leave the worker option search out, or set it to off",
                )
        engine.search = KernelSearch(0)

    def _check_room(
        self, parameters: ModelParameters, tensors: StageTensors, *, context: int, packing: bool
    ) -> None:
        """Raises RoleError for what the kernel would end this process for, before any weight is read."""
        free = available_memory() if self.settings.device_kind == "CPU" else None
        if free is None:
            return
        layers = len(tensors.blocks)
        cache = F32_BYTES * layers * context * (parameters.key_width + parameters.value_width)
        packed = sum(ref.nbytes for ref in packed_weights(tensors)) if packing else 0
        if cache + packed > free + (swap := available_swap()):
            held = f"a KV cache of {cache} bytes" + f" and packed weights of {packed}" * bool(packed)
            paged = f", and {swap} of swap" * bool(swap)
            raise _no_memory(
                f"{held}, and {free} bytes are left {rest_in_words()}{paged}",
                hint=self._less_memory(packing=bool(packed)),
            )

    def _less_memory(self, *, packing: bool) -> str:
        """The remedy for a stage that memory ran out for; weights that stay in the file take none."""
        optional = packing and self.settings.numerics == "exact"
        return "use the worker option weights=mapped, or " * optional + _LESS_MEMORY

    def _packs(self, config: StageConfig) -> bool:
        """Whether quantised matrices are laid out anew. That is faster, but changes the last bits: never by
        what this stage alone can see, or stages of one run would differ."""
        return self.settings.weights is WeightsChoice.PACKED or (
            self.settings.weights is WeightsChoice.AUTO and config.weights_in_memory
        )

    def close(self) -> None:
        """Closes every role and frees what is left on the device. Idempotent."""
        for role in tuple(self._roles):
            role.close()
        self._bridge.close()
        gc.collect()


def _bound_tensors(tensors: StageTensors, *, native: bool) -> list[TensorRef]:
    """What engines read while they compute: the embedding only natively, as a graph is given its rows."""
    wanted = [ref for block in tensors.blocks for ref in block.values()]
    single = (tensors.output_norm, tensors.head, tensors.head_bias)
    wanted += [ref for ref in single if ref is not None]
    if native and tensors.embedding is not None and tensors.embedding not in wanted:
        wanted.append(tensors.embedding)
    return wanted


def _ends(tensors: StageTensors, bound: Mapping[str, Weight]) -> Ends | None:
    """The last stage's norm and head; None of a stage before it."""
    from swactor_worker_tinygrad.weights import Ends

    if tensors.output_norm is None or tensors.head is None:
        return None
    bias = None if tensors.head_bias is None else bound[tensors.head_bias.name]
    return Ends(bound[tensors.output_norm.name], bound[tensors.head.name], bias)


def _tables(
    parameters: ModelParameters, tensors: StageTensors, files: WeightFiles, *, context: int
) -> list[Tables]:
    """Each layer's rope tables, of `context` positions; layers that turn alike share theirs."""
    from swactor_worker_tinygrad.rope_tables import rope_tables
    from swactor_worker_tinygrad.weights import unpack_on_host

    factors, ref = None, tensors.rope_factors
    if ref is not None:
        factors = unpack_on_host(files.stored(ref)[None, :], ref.ggml_type, ref.dims[0])[0]
    made = {
        rope: rope_tables(rope, context, factors=factors, temperature=parameters.temperature)
        for rope in {parameters.rope_of(layer) for layer in parameters.layers}
    }
    return [made[parameters.rope_of(layer)] for layer in parameters.layers]


def _alike(one: Any, other: Any) -> bool:
    """Whether two results differ by no more than sums in another order do."""
    import numpy as np

    return bool(np.abs(one - other).max() <= SEARCHED_DIFFERENCE * np.abs(one).max())


def _check_config(config: StageConfig, parameters: ModelParameters) -> None:
    """Raises RoleError when context, chunk or the edges' objects do not fit the stage."""

    def refuse(message: str) -> RoleError:
        return RoleError(RoleFailure.CONFIG_INVALID, message)

    if config.max_context < 1 or config.prefill_chunk < 1:
        raise refuse(
            f"max_context {config.max_context} and prefill_chunk {config.prefill_chunk} must be positive"
        )
    limit = config.manifest.metadata.get(f"{config.manifest.architecture}.context_length")
    if isinstance(limit, int) and not isinstance(limit, bool) and config.max_context > limit:
        raise refuse(f"max_context {config.max_context} exceeds the model's context of {limit}")
    if parameters.vocab_size < 1 or config.manifest.token_count < 0:
        raise refuse(f"vocab_size {parameters.vocab_size} is not positive")
    hidden, vocab = parameters.hidden_dim, parameters.vocab_size
    tokens = (ObjectKind.TOKENS, DTypeFamily.UNSIGNED, 1)
    rows = (ObjectKind.ACTIVATION, DTypeFamily.FLOAT, hidden)
    logits = (ObjectKind.LOGITS, DTypeFamily.FLOAT, vocab)
    sampled = config.token_output_policy is TokenOutputPolicy.TOKEN_IDS
    produced = rows if not config.manifest.last else tokens if sampled else logits
    for place, spec, expected in (
        ("input", config.input_spec, tokens if config.manifest.first else rows),
        ("output", config.output_spec, produced),
    ):
        found = (spec.kind, spec.dtype_family, spec.row_width)
        if found != expected or spec.dtype_width_bytes != 4:
            raise refuse(
                f"the stage's {place} is {_words(spec)}, this worker needs {expected[0]} of 4-byte "
                f"{expected[1]}, {expected[2]} a row"
            )


def _words(spec: ObjectSpec) -> str:
    return f"{spec.kind} of {spec.dtype_width_bytes}-byte {spec.dtype_family}, {spec.row_width} a row"


def _no_memory(what: str, *, hint: str) -> RoleError:
    said = f"the device has not enough memory for this stage: {what}"
    return RoleError(RoleFailure.DEVICE_OUT_OF_MEMORY, said, hint=hint)


def _role_error(error: Exception, less_memory: str) -> RoleError:
    """What a failure of memory, compiler or device becomes; `less_memory` is the remedy of the first."""
    if isinstance(error, MemoryError):
        what = str(error) or "an allocation failed"  # Python's own says nothing
        return _no_memory(what, hint=less_memory)
    if isinstance(error, SwactorError):
        return RoleError(RoleFailure.BACKEND_ERROR, error.message, hint=error.hint)
    data_bases = sys.modules.get("sqlite3")  # which tinygrad imports, and native kernels do without
    if data_bases is not None and isinstance(error, data_bases.Error):
        path = os.environ.get("CACHEDB", "")
        return RoleError(
            RoleFailure.BACKEND_ERROR,
            f"compiled kernels cannot be kept in {path!r}: {error}",
            hint=_remedy_of_data_base(path, getattr(error, "sqlite_errorcode", 0) & 0xFF),
        )
    said = f"{type(error).__name__}: {error}"
    return RoleError(RoleFailure.BACKEND_ERROR, said, hint=remedy_of_lack(error))


def _remedy_of_data_base(path: str, code: int) -> str:
    """By SQLite's primary result code (sqlite.org/rescode.html)."""
    if code in (11, 26):  # SQLITE_CORRUPT, SQLITE_NOTADB
        return f"remove {path!r}: it is made anew"
    if code == 5:  # SQLITE_BUSY
        return "another process holds it for too long: end that one, or run again"
    return "make room on that disk, or set SWACTOR_CACHE_DIR to a folder on another"
