"""The process environment that tinygrad is imported into: device, compiler, and the cache of kernels.

Knows environment variables, the compiler on PATH and the cache folder. Must not import tinygrad: everything
here has to be settled before its first import, because tinygrad reads the environment then and only then.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import logging
import os
import platform
import pwd
import shutil
import stat
import subprocess
from pathlib import Path

from swactor_core.errors import ResourceError

from swactor_worker_tinygrad import drivers
from swactor_worker_tinygrad.passing_kernels import ROOM, has_room, passing_folder
from swactor_worker_tinygrad.settings import KNOWN_DEVICES, UNDIVIDED, WorkerSettings

log = logging.getLogger(__name__)

TINYGRAD_VERSION = "0.14.0"
COMPILERS = ("clang-19", "clang-18", "clang-17", "clang-16", "clang-15", "clang-14", "clang")
INSTALL_CLANG = "apt-get install clang"
_READ_AS_NUMBERS = (
    "DEBUG",
    "BEAM",
    "JITBEAM",
    "JIT",
    "NOOPT",
    "LRU",
    "CACHELEVEL",
    "CCACHE",
    "THREADS",
    "HCQ2",
)
PROBE_SECONDS = 10.0

# device and compiler that this process was prepared for: one device a process, and one folder of kernels
_prepared: list[tuple[str, str]] = []


def find_compiler(wanted: str = "") -> str:
    """The clang that CPU kernels are built with: `wanted`, else CC, else the newest on PATH.

    gcc does not do: tinygrad's kernels need Clang's flags and vector extensions. Raises ResourceError.
    """
    named = wanted or os.environ.get("CC", "")
    if named and shutil.which(named) is None:
        raise ResourceError(f"the C compiler {named!r} is not on PATH", hint=INSTALL_CLANG)
    if named:
        if not _is_clang(named):
            raise ResourceError(f"the C compiler {named!r} is not clang", hint=INSTALL_CLANG)
        return named
    for candidate in COMPILERS:
        if shutil.which(candidate) is not None:
            return candidate
    raise ResourceError("tinygrad's CPU device needs clang, and there is none on PATH", hint=INSTALL_CLANG)


def check_machine(settings: WorkerSettings, *, named: bool = True) -> None:
    """Raises ResourceError for a compiler or driver that these settings need and that is not here, or another
    tinygrad than this package is written for. Opens no device. Whoever has not `named` a device hears of one
    that is not used."""
    require_tinygrad()
    if settings.device_kind == "CPU":
        find_compiler(settings.cc)
    _require_driver(settings)
    if not named and drivers.cuda_driver() is not None:
        log.warning(
            "NVIDIA's driver is here, but the CPU computes: --device CUDA uses it, --device CPU does not"
        )


def _require_driver(settings: WorkerSettings) -> None:
    if settings.device_kind == "CUDA" and drivers.cuda_driver() is None:
        raise ResourceError(
            "NVIDIA's driver (libcuda.so.1) is not found on this machine", hint=drivers.INSTALL_CUDA
        )


def _is_clang(compiler: str) -> bool:
    try:
        answer = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "clang" in answer.stdout.lower()


def require_tinygrad() -> None:
    """Raises ResourceError unless exactly the tinygrad that this package is written for is installed."""
    from importlib import metadata

    try:
        found = metadata.version("tinygrad")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != TINYGRAD_VERSION:
        raise ResourceError(
            f"tinygrad {TINYGRAD_VERSION} is needed, found {found}",
            hint=f"pip install tinygrad=={TINYGRAD_VERSION}",
        )


def cpu_key(compiler: str) -> str:
    """Names this CPU and compiler: kernels are built for exactly this processor, so a cache shared over a
    network home must not hand them to another one (an illegal instruction would be the result)."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(platform.machine().encode())
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0].splitlines()
        kept = ("model name", "flags", "features", "cpu part", "cpu implementer")
        digest.update("\n".join(line for line in lines if line.lower().startswith(kept)).encode())
    except OSError:
        digest.update(platform.processor().encode())
    path = shutil.which(compiler) if compiler else None
    if path is not None:
        real = os.path.realpath(path)
        digest.update(f"{real} {os.stat(real).st_size}".encode())
    return digest.hexdigest()


DATA_BASE = "kernels.db"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_YOURS = "set SWACTOR_CACHE_DIR or XDG_CACHE_HOME to a folder of yours"
NOT_KEPT = "compiled kernels cannot be kept between runs"


def cache_roots() -> tuple[Path, ...]:
    """Where folders of compiled kernels may be: SWACTOR_CACHE_DIR, where models are too, and the user's own
    under XDG_CACHE_HOME or ~/.cache; none for a user without either."""
    chosen = os.environ.get("SWACTOR_CACHE_DIR", "")
    base = os.environ.get("XDG_CACHE_HOME", "")  # to be ignored when it is relative, says its specification
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    roots = [Path(os.path.abspath(os.path.expanduser(chosen)))] if chosen else []
    roots += [Path(base) / "swactor"] if os.path.isabs(base) else []
    return tuple(dict.fromkeys(roots))


def cache_root() -> Path | None:
    """The first of `cache_roots` in which others could not exchange what is kept, as they could in a cache of
    models that many share; the first, if there is no such; None for none."""
    roots = cache_roots()
    safe = (root for root in roots if _others_folder(root) is None)
    return next(safe, roots[0] if roots else None)


def kept_folder(compiler: str) -> Path | None:
    """A folder for compiled kernels that only this user can write, as cached values are unpickled when read:
    in the first of `cache_roots` that can have one. None where none can be written, its disk has no room for
    them, or another user could put another in its place. Raises ResourceError when the folder is somebody
    else's."""
    refused = None
    for root in cache_roots():
        if _others_folder(root) is not None:
            continue
        try:
            if (folder := _kept_in(root, compiler)) is not None:
                return folder
        except ResourceError as error:
            refused = error
    if refused is not None:
        raise refused
    return None


def _kept_in(root: Path, compiler: str) -> Path | None:
    folder = _of_tinygrad(root) / cpu_key(compiler)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise ResourceError(f"the kernel cache {folder} belongs to another user", hint=_YOURS)
        usable = _closed_to_others(folder) and os.access(folder, os.W_OK | os.X_OK)
        return folder if usable and has_room(folder, used=(folder / DATA_BASE).exists()) else None
    except OSError:
        return None


def _of_tinygrad(root: Path) -> Path:
    return root / f"tinygrad-{TINYGRAD_VERSION}"


def _others_folder(root: Path) -> Path | None:
    """The one of the folders above that of compiled kernels in which others can put another in the place of
    what is in it, at any time: neither this user's nor root's, or written by others and without a sticky bit.
    A group that is this user's alone is no other."""
    for folder in (root, _of_tinygrad(root)):
        with contextlib.suppress(OSError):  # none is there yet
            state = folder.stat()
            group = 0 if _own_group(state.st_gid) else stat.S_IWGRP
            written = state.st_mode & (stat.S_IWOTH | group) and not state.st_mode & stat.S_ISVTX
            if state.st_uid not in (0, os.geteuid()) or written:
                return folder
    return None


def _own_group(number: int) -> bool:
    """Whether it is the group that most systems make for each user, of the user's number or name; elsewhere
    users share a group, their first one too."""
    user = os.geteuid()
    try:
        group, named = grp.getgrgid(number), pwd.getpwuid(user)
    except KeyError:
        return number == user
    return group.gr_name == named.pw_name and set(group.gr_mem) <= {named.pw_name}


def _closed_to_others(folder: Path) -> bool:
    """Whether only this user can write into it now; what others could have put there is gone. Raises
    OSError."""
    if not folder.stat().st_mode & _OTHERS_WRITE:
        return True
    folder.chmod(0o700)
    if folder.stat().st_mode & _OTHERS_WRITE:
        return False  # a file system that keeps no modes
    log.warning("others could write into the kernel cache %s: it is begun anew", folder)
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return True


def cache_folder(compiler: str) -> Path:
    """`kept_folder`, or else one that goes with this process (`passing_kernels`). Raises ResourceError."""
    kept = kept_folder(compiler)
    if kept is None:
        log.warning("%s, so each run compiles them anew: %s", NOT_KEPT, keeping_remedy())
    return kept or passing_folder()


def keeping_remedy() -> str:
    """What lets compiled kernels be kept."""
    root = cache_root()
    if root is None:
        return "set SWACTOR_CACHE_DIR to a folder that can be written"
    if (others := _others_folder(root)) is not None:
        return f"{others} belongs to another user, or others write into it: {_YOURS}"
    return f"make {root} writable, with {ROOM >> 20} MiB free, or set SWACTOR_CACHE_DIR to another folder"


def _selection(settings: WorkerSettings) -> str:
    """The value of DEV, with the renderer that this machine has the compiler for where none is named."""
    if settings.selection == "CUDA" and not drivers.compiles_cuda():
        return "CUDA:PTX"
    return settings.selection


def prepare(settings: WorkerSettings) -> dict[str, str]:
    """Sets what tinygrad reads at import and returns it: DEV, CC, CACHEDB, PARALLEL, NUM_CPU_THREADS.
    OPENBLAS_NUM_THREADS too, unless the operator has: numpy's library would start a thread a core, and
    nothing here multiplies matrices with it.

    No pool of compiler processes (every stage of a host would start one), no split of CPU kernels into parts
    that run one after another anyway. Raises ResourceError for a missing compiler or driver.
    """
    wanted = {"DEV": _selection(settings), "PARALLEL": "0", "NUM_CPU_THREADS": "1"}
    compiler = ""
    if settings.device_kind == "CPU":
        compiler = find_compiler(settings.cc)
        wanted["CC"] = compiler
    if _prepared and _prepared[0][0] != settings.selection:
        raise ResourceError(
            f"tinygrad was already started in this process with DEV={_prepared[0][0]!r}",
            hint="one process serves one device",
        )
    _require_driver(settings)
    if _prepared == [(settings.selection, compiler)] and "CACHEDB" in os.environ:
        wanted["CACHEDB"] = os.environ["CACHEDB"]
    else:
        wanted["CACHEDB"] = str(cache_folder(compiler) / DATA_BASE)
    # tinygrad asserts on its old switches (CPU=1) and cannot read an empty value
    for name, value in list(os.environ.items()):
        if name in (*KNOWN_DEVICES, *UNDIVIDED) or (value == "" and name in _READ_AS_NUMBERS):
            del os.environ[name]
    os.environ.setdefault("PATH", os.defpath)  # which tinygrad reads and takes to be set
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.update(wanted)
    _prepared[:] = [(settings.selection, compiler)]
    return wanted
