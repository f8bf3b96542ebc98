"""Memory that runs out (spec section 19): an error from `create_ring`, never SIGBUS at a later access."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import cache

import pytest
from swactor_arena import memory
from swactor_core.errors import ResourceError

FULL = """
import errno, os, sys
from swactor_arena import memory
from swactor_arena.arena import OwnedArena
from swactor_core.errors import ResourceError
from swactor_core.specs import RingLayout

CEILING, RING = 1 << 26, 192 << 10
fd = os.open(sys.argv[1] + "/arena", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, CEILING)
arena = OwnedArena(fd, CEILING)

def layout(number):
    begin = number * RING
    return RingLayout(number, begin, RING, begin, begin + 64, RING - 64, 64)

if sys.argv[2] == "unreserved":
    memory.reserve = lambda fd, offset, length: None
rings = []
try:
    for number in range(1, 300):
        rings.append(arena.create_ring(layout(number)))
except ResourceError as error:
    assert os.strerror(errno.ENOSPC) in error.message and error.hint, error
    refused = number
for ring in rings:  # every page of every ring that was given out
    span = ring.writable_span()
    span[:] = b"x" * len(span)
    ring.advance_commit(len(span))
try:
    arena.create_ring(layout(refused))
    raise SystemExit("there was room after all")
except ResourceError:
    pass
last = rings.pop()
last.close()
arena.discard(last.layout.arena_offset, last.layout.total_len)
again = arena.create_ring(layout(refused))
assert len(again.writable_span()) == RING - 64
assert all(bytes(ring.readable_span()) == b"x" * (RING - 64) for ring in rings)
print(len(rings) + 1)
"""
MOUNT = 'mount -t tmpfs -o size=2m none "$1" && exec "$2" -c "$3" "$1" "$4"'


NAMESPACES = (
    ["unshare", "--mount"],  # root may; also where user namespaces are refused, as in a chroot
    ["unshare", "--user", "--map-root-user", "--mount"],
)


@cache
def namespace() -> list[str] | None:
    """The command that runs another where it may mount, None where this machine allows none."""
    if shutil.which("unshare") is None:
        return None
    for command in NAMESPACES:
        probe = [*command, "mount", "-t", "tmpfs", "none", "/mnt"]
        if subprocess.run(probe, capture_output=True).returncode == 0:
            return command
    return None


def in_a_small_memory(folder: str, mode: str) -> subprocess.CompletedProcess[str]:
    """FULL on a tmpfs of 2 MiB in a mount namespace of its own."""
    command = [*(namespace() or ()), "sh", "-c", MOUNT, "sh"]
    return subprocess.run(
        [*command, folder, sys.executable, FULL, mode], capture_output=True, text=True, timeout=60
    )


needs_mounts = pytest.mark.skipif(namespace() is None, reason="no mounts in a namespace on this machine")


@needs_mounts
def test_a_full_memory_refuses_the_ring_and_spares_those_that_exist(tmp_path) -> None:
    done = in_a_small_memory(str(tmp_path), "reserved")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "10\n", "2 MiB hold ten rings of 192 KiB"


@needs_mounts
def test_without_the_reservation_the_same_program_dies_of_sigbus(tmp_path) -> None:
    assert in_a_small_memory(str(tmp_path), "unreserved").returncode == -signal.SIGBUS


def test_pages_that_the_kernel_does_not_have_are_a_resource_error() -> None:
    """Huge pages, which no machine has a million of: the kernel's own refusal, wherever the tests run."""
    fd = os.memfd_create("huge", os.MFD_HUGETLB)
    try:
        os.ftruncate(fd, 1 << 41)
        with pytest.raises(ResourceError, match="pages for a ring of 4194304 bytes") as caught:
            memory.reserve(fd, 1 << 40, length=4 << 20)
        assert "ceiling" in caught.value.hint
    finally:
        os.close(fd)


def test_signals_without_end_do_not_hold_a_reservation_for_ever(monkeypatch) -> None:
    """tmpfs undoes an allocation that a signal interrupts; a bounded number of tries, then an error."""
    tries = []

    class Interrupted:
        def fallocate(self, *arguments: int) -> int:
            tries.append(arguments)
            return -1

    class Errno:
        errno = 4  # EINTR

    monkeypatch.setattr(memory, "lib", Interrupted())
    monkeypatch.setattr(memory, "ffi", Errno())
    with pytest.raises(ResourceError, match="Interrupted system call"):
        memory.reserve(0, 0, length=4096)
    assert len(tries) == 64
