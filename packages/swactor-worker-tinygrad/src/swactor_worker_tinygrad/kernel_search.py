"""Kernels found by timing: tinygrad's beam search, with what it finds kept on disk for this host.

With `internals.py` the only user of tinygrad below its public surface. Knows kernels, no models and no
graphs. Searching takes minutes and is asked for (`swactor-cli tune`); using what was found costs a look into
the cache for each kernel of a capture.

Import only after `environment.prepare`.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from swactor_core.values import frozen
from tinygrad.codegen.opt import KernelOptError, Opt, search
from tinygrad.codegen.opt.heuristic import hand_coded_optimizations
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.device import Buffer
from tinygrad.helpers import Context, diskcache_get, diskcache_put
from tinygrad.uop.ops import Ops

_FOUND = "swactor_kernel_search"


@frozen
class Found:
    """What a search of `width` ended with: the optimisations in order, or None where the kernel that tinygrad
    makes without a search is as fast."""

    width: int
    steps: tuple[Opt, ...] | None


#: by its name, what each kernel of this process was made of: tinygrad asks once for each
Choices = Mapping[str, Found | None]
_choices: dict[str, Found | None] = {}


class KernelSearch:
    """While entered, graphs are captured with kernels that were found. With a `width` above 0 those that have
    not been searched, or only with a smaller width, are searched first.

    `width` is how many candidates a round keeps. `on_candidate` is called before each is built, may raise.
    Raises RuntimeError for a search outside of the main thread: tinygrad bounds the building by a signal.
    """

    def __init__(self, width: int, on_candidate: Callable[[], None] = lambda: None) -> None:
        if width and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("kernels are searched in the main thread only")
        self.width, self._on_candidate = width, on_candidate
        self._beam_search, self._try_compile = search.beam_search, search._try_compile
        self._marked = Context(BEAM=1)

    def __enter__(self) -> Self:
        search.beam_search, search._try_compile = self._choose, self._attempt
        self._alarm = signal.getsignal(signal.SIGALRM)
        self._marked.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._marked.__exit__()
        search.beam_search, search._try_compile = self._beam_search, self._try_compile
        if self.width:
            signal.signal(signal.SIGALRM, self._alarm)

    @property
    def choices(self) -> Choices:
        """Of all kernels that this process made while a search was entered."""
        return dict(_choices)

    def holds(self, choices: Choices) -> bool:
        """Whether kernels that were chosen so would be chosen so now."""
        return all(
            (kept := _kept(name)) == choice and (kept.width if kept is not None else 0) >= self.width
            for name, choice in choices.items()
        )

    def forget(self) -> None:
        """Takes back what was found for any kernel that this process has made, by whomever, from the disk
        too: graphs that were kept with it are then captured anew."""
        for name in _choices:
            diskcache_put(_FOUND, name, None)

    def _choose(
        self, kernel: Scheduler, buffers: list[Buffer], values: dict[str, int], _: int, estimate: bool = True
    ) -> Scheduler:
        """In place of tinygrad's `beam_search`."""
        name = f"{kernel.ast.key.hex()} {kernel.ren.target!r}"
        found = _kept(name)
        if self.width > (0 if found is None else found.width):
            found = diskcache_put(_FOUND, name, self._search(kernel, buffers, values, estimate))
        _choices[name] = found
        return _unsearched(kernel) if found is None or found.steps is None else _made(kernel, found.steps)

    def _search(
        self, kernel: Scheduler, buffers: list[Buffer], values: dict[str, int], estimate: bool
    ) -> Found:
        best = self._beam_search(
            kernel.copy(), buffers, values, self.width, allow_test_size=estimate, disable_cache=True
        )
        steps = tuple(best.applied_opts[len(kernel.applied_opts) :])
        plain = self._seconds(_unsearched(kernel), buffers, values)
        if not steps or self._seconds(_made(kernel, steps), buffers, values) >= plain:
            return Found(self.width, None)
        return Found(self.width, steps)

    def _attempt(self, candidate: tuple[int, Scheduler]) -> Any:
        self._on_candidate()
        return self._try_compile(candidate)

    def _seconds(self, kernel: Scheduler, buffers: list[Buffer], values: dict[str, int]) -> float:
        """The shortest of several runs; infinite for a kernel that cannot be built or run."""
        _, made = self._try_compile((0, kernel))
        if made is not None:
            with suppress(RuntimeError):
                return float(min(search._time_program(made[0], values, buffers, cnt=5)))
        return math.inf


def _kept(name: str) -> Found | None:
    found = diskcache_get(_FOUND, name)
    return found if isinstance(found, Found) else None


def _made(kernel: Scheduler, steps: tuple[Opt, ...]) -> Scheduler:
    made = kernel.copy()
    try:
        for step in steps:
            made.apply_opt(step)
    except KernelOptError:  # kept by something that optimised otherwise
        return _unsearched(kernel)
    return made


def _unsearched(kernel: Scheduler) -> Scheduler:
    """The kernel as tinygrad makes it without a search (`postrange.apply_opts`)."""
    if kernel.ast.arg is not None and kernel.ast.arg.applied_opts != ():
        return kernel
    if any(node.op is Ops.STAGE for node in kernel.ast.backward_slice):
        return kernel
    return hand_coded_optimizations(kernel.copy())
