"""What the worker may be asked for: the settings of its factory, checked.

Knows the names of settings and their values. Must not know whether this machine has what they ask for, which
is `environment`'s matter, nor what they do; and imports no tinygrad.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from swactor_core.errors import ConfigError, did_you_mean
from swactor_core.processors import available_cores
from swactor_core.values import frozen

KNOWN_DEVICES = ("CPU", "CUDA", "METAL", "AMD", "NV", "QCOM", "PYTHON")
UNDIVIDED = ("CL", "WEBGPU")  # whose buffers tinygrad cannot divide, as stages must
SETTINGS = ("device", "cc", "kernels", "numerics", "search", "threads", "weights")
MOST_THREADS = 256
SEARCHES = ("found", "off")  # the first is the default
WIDEST_SEARCH = 16


class KernelChoice(StrEnum):
    """Whose kernels compute: hand-written ones (an error where they do not do), tinygrad's own, or AUTO: the
    former where they do, else the latter."""

    AUTO = "auto"
    NATIVE = "native"
    GRAPH = "graph"


class Numerics(StrEnum):
    """EXACT is f32 activations; FAST rounds them to bytes, which native kernels do over packed weights."""

    EXACT = "exact"
    FAST = "fast"


class WeightsChoice(StrEnum):
    """Read from the file, laid out anew in memory for speed, or AUTO: packed where the run's plan lets all
    stages hold weights in memory."""

    AUTO = "auto"
    MAPPED = "mapped"
    PACKED = "packed"


# of the settings that have a choice; the first is the default
CHOICES: dict[str, tuple[StrEnum, ...]] = {
    "kernels": tuple(KernelChoice),
    "numerics": tuple(Numerics),
    "weights": tuple(WeightsChoice),
}


@frozen
class WorkerSettings:
    """What the factory was asked for.

    `device` is a kind, with a renderer or an index where wanted (`CPU`, `CUDA`, `CUDA:PTX`, `CUDA:1`); `cc` a
    compiler's name, or empty; `threads` run the native kernels. `search` is of graph's kernels: `found` uses
    those that a search on this host has found, `off` none, and a number searches, keeping as many candidates
    a round.
    """

    device: str
    cc: str
    kernels: KernelChoice
    numerics: Numerics
    threads: int
    weights: WeightsChoice
    search: str | int

    @property
    def device_kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def device_name(self) -> str:
        """What tinygrad opens: the kind, with its index if there is one."""
        return self.device if _indexed(self.device) else self.device_kind

    @property
    def selection(self) -> str:
        """The value of DEV: the kind, with its renderer if there is one."""
        return self.device_kind if _indexed(self.device) else self.device

    @property
    def has_native_kernels(self) -> bool:
        """Whether the device runs machine code built from C: the CPU with tinygrad's Clang renderer, which it
        has unless another is named."""
        renderer = self.device.split(":")[1] if ":" in self.device else ""
        return self.device_kind == "CPU" and (renderer.upper() in ("", "CLANG") or renderer.isdigit())


def _indexed(device: str) -> bool:
    return device.partition(":")[2].isdigit()


def read_settings(settings: Mapping[str, object]) -> WorkerSettings:
    """Checks the factory's settings. Raises ConfigError naming the setting, its value and what it may be."""
    for name, value in settings.items():
        _check(name, value)
    device = _device(str(settings.get("device", "")) or "CPU")
    chosen = {name: _chosen(name, str(settings.get(name, ""))) for name in CHOICES}
    if chosen["numerics"] == Numerics.FAST:  # which has no other weights, whatever a plan says
        asked = str(settings.get("weights", ""))
        chosen["weights"] = WeightsChoice.PACKED if asked in ("", WeightsChoice.AUTO) else asked
        _check_fast(device.partition(":")[0], chosen)
    return WorkerSettings(
        device=device,
        cc=str(settings.get("cc", "")),
        kernels=KernelChoice(chosen["kernels"]),
        numerics=Numerics(chosen["numerics"]),
        weights=WeightsChoice(chosen["weights"]),
        threads=int(str(settings.get("threads", 0))) or default_threads(),
        search=_search(settings.get("search")),
    )


def _check(name: str, value: object) -> None:
    """Raises ConfigError for a name that no setting has, or a value of the wrong kind."""
    if name not in SETTINGS:
        raise ConfigError(
            f"worker tinygrad has no setting {name!r}",
            hint=f"{did_you_mean(name, SETTINGS)}its settings are {', '.join(SETTINGS)}",
        )
    if name == "threads":
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_THREADS:
            raise ConfigError(
                f"worker tinygrad: threads = {value!r} is not a count", hint=f"use 1 to {MOST_THREADS}"
            )
    elif name == "search":
        numbered = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= WIDEST_SEARCH
        if not numbered and value not in ("", *SEARCHES):
            raise ConfigError(
                f"worker tinygrad: search = {value!r} is not known",
                hint=f"use {', '.join(SEARCHES)}, or 1 to {WIDEST_SEARCH} to search",
            )
    elif not isinstance(value, str):
        raise ConfigError(f"worker tinygrad: {name} = {value!r} is not a string", hint=f'{name} = "..."')


def _device(named: str) -> str:
    """With its kind in upper case. Raises ConfigError for a kind that cannot compute stages."""
    kind = named.split(":", 1)[0]
    if kind.upper() in UNDIVIDED:
        raise ConfigError(
            f"worker tinygrad: device {named!r} cannot compute stages: tinygrad cannot divide its buffers",
            hint=f"use one of {', '.join(KNOWN_DEVICES)}",
        )
    if kind.upper() not in KNOWN_DEVICES:
        raise ConfigError(
            f"worker tinygrad: device {named!r} is not known", hint=f"use one of {', '.join(KNOWN_DEVICES)}"
        )
    return kind.upper() + named[len(kind) :]


def _chosen(name: str, value: str) -> str:
    """The value, or the default for none. Raises ConfigError for one that is no choice."""
    choices = CHOICES[name]
    if value and value not in choices:
        raise ConfigError(
            f"worker tinygrad: {name} = {value!r} is not known",
            hint=f"{did_you_mean(value, choices)}use {', '.join(choices)}",
        )
    return value or choices[0]


def _search(value: object) -> str | int:
    return value if isinstance(value, int) else str(value or SEARCHES[0])


def _check_fast(kind: str, chosen: Mapping[str, str]) -> None:
    """Raises ConfigError where other settings ask for what fast numerics do not have."""
    for name, found, needed in (
        ("device", kind, ("CPU",)),
        ("kernels", chosen["kernels"], (KernelChoice.AUTO, KernelChoice.NATIVE)),
        ("weights", chosen["weights"], (WeightsChoice.PACKED,)),
    ):
        if found not in needed:
            raise ConfigError(
                f"worker tinygrad: numerics = 'fast' does not go with {name} = {found!r}",
                hint="fast numerics are those of the CPU's native kernels over packed weights: "
                f"leave {name} out, or use numerics=exact",
            )


def default_threads() -> int:
    """All cores that this process has, at most 8: beyond that nothing was measured. The stages of one machine
    compute in turn, and node processes have next to nothing to do while one of them does."""
    return min(8, available_cores())
