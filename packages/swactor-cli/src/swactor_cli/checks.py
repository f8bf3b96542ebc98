"""What `doctor` asks of the machine itself, whatever plug-ins are installed. Each check is bounded.

Knows the operating system, no plug-in and no cluster.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import resource
import socket
import sys
import sysconfig
from pathlib import Path

from swactor_core import free_memory
from swactor_core.checks import CheckResult, CheckStatus, DoctorCheck
from swactor_core.errors import ConfigError
from swactor_core.node.identity import state_directory

from swactor_cli.sizes import bytes_text

FEWEST_FILES = 64
ENOUGH_FILES = 256
ENOUGH_MEMORY = 512 << 20
DATAGRAM = 1200


def check_python() -> CheckResult:
    found = f"{platform.python_implementation()} {platform.python_version()} on {sys.platform}"
    if sys.platform != "linux":
        return CheckResult(CheckStatus.FAIL, found, "swactor runs on Linux")
    if sys.version_info < (3, 11):  # noqa: UP036 - told in words, where the package was put there by force
        return CheckResult(CheckStatus.FAIL, found, "install Python 3.11 or later")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        found = f"{found}, free-threaded, which swactor is not tested on"
        return CheckResult(CheckStatus.WARN, found, "install the usual build of Python")
    return CheckResult(CheckStatus.OK, found)


def check_memfd() -> CheckResult:
    """A sealed memory file can be made and mapped shared; /dev/shm and its size play no part."""
    try:
        descriptor = os.memfd_create("swactor-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_SHARED) as shared:
                shared[0] = 1
        finally:
            os.close(descriptor)
    except OSError as error:
        return CheckResult(CheckStatus.FAIL, f"memfd: {error.strerror}", "allow memfd_create in the sandbox")
    return CheckResult(CheckStatus.OK, "sealed memory files work, /dev/shm is not used")


def check_open_files() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return CheckResult(CheckStatus.OK, f"{soft} open files are allowed")
    status = CheckStatus.FAIL if soft < FEWEST_FILES else CheckStatus.WARN
    return CheckResult(status, f"only {soft} open files are allowed, of {hard}", f"ulimit -n {ENOUGH_FILES}")


def check_memory() -> CheckResult:
    """Free memory of the machine and of its control group, the lesser of the two."""
    left = free_memory.available_memory()
    if left is None:
        return CheckResult(CheckStatus.WARN, "the free memory of this machine cannot be read")
    narrow = left == free_memory.group_rest()
    detail = f"{bytes_text(left)} are free" + (" in this control group" if narrow else "")
    if left < ENOUGH_MEMORY:
        return CheckResult(CheckStatus.WARN, detail, "free memory, or raise the container's limit")
    return CheckResult(CheckStatus.OK, detail)


LOOPBACK = "put the loopback interface up (`ip link set lo up`) and allow UDP sockets on 127.0.0.1"


def check_udp() -> CheckResult:
    """A datagram of the size that QUIC sends goes to this machine's own loopback and back."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(2.0)
            udp.bind(("127.0.0.1", 0))
            udp.sendto(bytes(DATAGRAM), udp.getsockname())
            received = len(udp.recv(2 * DATAGRAM))
    except OSError as error:
        return CheckResult(CheckStatus.FAIL, f"UDP on loopback: {error}", LOOPBACK)
    if received != DATAGRAM:
        return CheckResult(
            CheckStatus.FAIL, f"{received} of {DATAGRAM} bytes came back over loopback", LOOPBACK
        )
    return CheckResult(CheckStatus.OK, f"{DATAGRAM} bytes went over loopback")


def check_state() -> CheckResult:
    """The folder of keys, or the nearest one above it, can be written."""
    try:
        folder = state_directory()
    except ConfigError as error:
        return CheckResult(CheckStatus.WARN, error.message, error.hint)
    nearest = next((f for f in (folder, *folder.parents) if f.exists()), Path("/"))
    if not os.access(nearest, os.W_OK | os.X_OK):
        return CheckResult(
            CheckStatus.WARN, f"keys cannot be kept in {folder}", "set SWACTOR_STATE_DIR to another folder"
        )
    return CheckResult(CheckStatus.OK, f"keys are kept in {folder}")


CORE_CHECKS = (
    DoctorCheck("core.python", "Python and operating system", check_python),
    DoctorCheck("core.memfd", "memory shared by descriptor", check_memfd),
    DoctorCheck("core.files", "limit of open files", check_open_files),
    DoctorCheck("core.memory", "free memory", check_memory),
    DoctorCheck("core.udp", "UDP on loopback", check_udp),
    DoctorCheck("core.state", "folder of keys", check_state),
)
