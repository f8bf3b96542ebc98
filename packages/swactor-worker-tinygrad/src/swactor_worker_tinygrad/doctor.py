"""What `swactor-cli doctor` asks about this plug-in: the compiler, tinygrad's version, the devices' drivers.

Knows the machine. Must not open a device: tinygrad keeps what it opened for good, and a driver that hangs
must not hang the doctor. Every tool that it runs has a bound.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from swactor_core.checks import CheckResult, CheckStatus, DoctorCheck
from swactor_core.errors import SwactorError

from swactor_worker_tinygrad import drivers, environment

BOUND_SECONDS = 5.0
_PROBE = "float probe(float a, float b) { return a * b; }\n"


def _bounded(check: Callable[[], CheckResult]) -> CheckResult:
    """Failures on purpose and slow tools become results, never exceptions."""
    try:
        return check()
    except SwactorError as error:
        return CheckResult(CheckStatus.FAIL, error.message, error.hint)
    except (OSError, subprocess.SubprocessError) as error:
        return CheckResult(CheckStatus.FAIL, f"{type(error).__name__}: {error}", environment.INSTALL_CLANG)


def check_compiler() -> CheckResult:
    """A clang is there and builds an object the way tinygrad asks it to."""

    def check() -> CheckResult:
        compiler = environment.find_compiler()
        built = subprocess.run(
            [compiler, "-c", "-x", "c", "-O2", "-fPIC", "-ffreestanding", "-march=native", "-", "-o", "-"],
            input=_PROBE.encode(),
            capture_output=True,
            timeout=BOUND_SECONDS,
            check=False,
        )
        if built.returncode != 0 or not built.stdout.startswith(b"\x7fELF"):
            said = built.stderr.decode(errors="replace").strip().splitlines()
            return CheckResult(
                CheckStatus.FAIL,
                f"{compiler} does not build: {said[0] if said else 'no object file'}",
                environment.INSTALL_CLANG,
            )
        return CheckResult(CheckStatus.OK, f"{compiler} builds kernels")

    return _bounded(check)


def check_version() -> CheckResult:
    """Exactly the pinned tinygrad is installed."""

    def check() -> CheckResult:
        environment.require_tinygrad()
        return CheckResult(CheckStatus.OK, f"tinygrad {environment.TINYGRAD_VERSION}")

    return _bounded(check)


def check_devices() -> CheckResult:
    """Which devices this host has drivers for; CPU counts when a compiler is there."""

    def check() -> CheckResult:
        found = []
        try:
            environment.find_compiler()
            found.append("CPU")
        except SwactorError:
            pass
        if drivers.cuda_driver() is not None:
            found.append("CUDA" if drivers.compiles_cuda() else "CUDA (as PTX: the toolkit is not here)")
        if Path("/dev/kfd").exists():
            found.append("AMD")
        if not found:
            return CheckResult(CheckStatus.FAIL, "no device can be used", environment.INSTALL_CLANG)
        return CheckResult(CheckStatus.OK, f"device can be set to {', '.join(found)}")

    return _bounded(check)


def check_cache() -> CheckResult:
    """Compiled kernels can be kept where nobody else can write them."""

    def check() -> CheckResult:
        try:
            compiler = environment.find_compiler()
        except SwactorError:
            compiler = ""
        folder = environment.kept_folder(compiler)
        if folder is None:
            return CheckResult(CheckStatus.WARN, environment.NOT_KEPT, environment.keeping_remedy())
        return CheckResult(CheckStatus.OK, f"compiled kernels are kept in {folder}")

    return _bounded(check)


CHECKS = (
    DoctorCheck("tinygrad-compiler", "clang for tinygrad's CPU kernels", check_compiler),
    DoctorCheck("tinygrad-version", "the pinned tinygrad", check_version),
    DoctorCheck("tinygrad-devices", "devices that tinygrad can use here", check_devices),
    DoctorCheck("tinygrad-cache", "cache of compiled kernels", check_cache),
)
