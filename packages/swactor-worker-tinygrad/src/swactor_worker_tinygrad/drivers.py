"""Drivers and compilers of devices other than the CPU: whether they are where tinygrad looks for them.

Knows names of libraries and folders. Must not import tinygrad, nor load or open anything: what is asked here
is asked before a model is fetched, and by the doctor.
"""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

INSTALL_CUDA = (
    "install NVIDIA's driver, or in a container give it the GPU (`docker run --gpus all`); "
    "without --device the CPU computes"
)
_MULTIARCH = str(sysconfig.get_config_var("MULTIARCH") or "")
_TOOLKITS = tuple(
    f"/{root}/cuda/targets/{target}/lib"
    for root in ("opt", "usr/local")
    for target in (_MULTIARCH.rsplit("-", 1)[0], "sbsa-linux")
)
_FOLDERS = (
    *("/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/lib/wsl/lib/", "/lib", "/lib64"),
    f"/lib/{_MULTIARCH}",
)
_INCLUDES = ("/usr/local/cuda/include", "/usr/include", "/opt/cuda/include")
_HEADER = "cuda_fp16.h"  # what tinygrad's sources for halves include


def library(name: str, *, also: tuple[str, ...] = ()) -> Path | None:
    """The file that tinygrad loads as lib`name`.so on Linux, where `also` are further folders: by
    `DLL.findlib` of its runtime/support/c.py."""
    named = os.environ.get(f"{name.upper()}_PATH", "")
    if named and Path(named).is_file():
        return Path(named)
    preset = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    for folder in map(Path, (*([named] if named else []), *preset, *_FOLDERS, *also)):
        try:
            files = [file for file in folder.iterdir() if file.is_file()]
        except OSError:
            continue
        for file in files:
            if re.fullmatch(rf"lib{name}\.so\.?[0-9]*", file.name) and _is_library(file):
                return file
    return None


def _is_library(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"  # and no script of the linker
    except OSError:
        return False


def cuda_driver() -> Path | None:
    """NVIDIA's driver library."""
    return library("cuda")


def compiles_cuda() -> bool:
    """Whether CUDA C can be compiled here: NVRTC and CUDA's headers, which come with the toolkit and not with
    the driver, nor with images that are only for running. Without them kernels are written as PTX, which the
    driver itself assembles."""
    if library("nvrtc", also=_TOOLKITS) is None:
        return False
    toolkit = os.environ.get("CUDA_PATH", "")
    folders = (f"{toolkit}/include",) if toolkit else _INCLUDES
    return any((Path(folder) / _HEADER).is_file() for folder in folders)
