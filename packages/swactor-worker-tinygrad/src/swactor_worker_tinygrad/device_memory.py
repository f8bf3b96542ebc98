"""Memory that stages compute in: of this process where the device computes on the host, else tinygrad's.

Knows bytes and where they lie. Must not know rings, objects' meaning or models. Imports no tinygrad by
itself: native kernels need none, and importing it and opening its device would be a third of their start.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class HostMemory:
    """Zeroed bytes from a page's first on, which live as long as this does."""

    def __init__(self, nbytes: int) -> None:
        """Raises MemoryError."""
        try:
            self.view = memoryview(mmap.mmap(-1, nbytes))
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{nbytes} bytes cannot be had on the host") from error
        self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)


def large_memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed host memory in large pages where the system has them. Raises MemoryError."""
    try:
        room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{nbytes} bytes cannot be had on the host") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, np.uint8)


@dataclass(slots=True)
class Allocation:
    """`nbytes` of device memory in `buffer`, a `HostMemory` or tinygrad's; `view` is the same memory where
    the host can reach it."""

    buffer: Any
    nbytes: int
    view: memoryview | None


def on_host(device: str) -> bool:
    """Whether the device computes in this process's own memory."""
    return device.partition(":")[0] == "CPU"


def allocate(device: str, nbytes: int) -> Allocation:
    """Device memory; contents undefined. Raises MemoryError when there is none."""
    if on_host(device):
        memory = HostMemory(nbytes)
        return Allocation(memory, nbytes, memory.view)
    from swactor_worker_tinygrad import internals

    return of_buffer(internals.new_buffer(device, nbytes))


def of_buffer(buffer: Any) -> Allocation:
    """A buffer of tinygrad's as an allocation."""
    from swactor_worker_tinygrad import internals

    return Allocation(buffer, buffer.nbytes, internals.bytes_view(buffer))


def copy(target: Allocation, target_offset: int, source: Allocation, source_offset: int, nbytes: int) -> None:
    """Copies bytes between two allocations of one device."""
    if target.view is not None and source.view is not None:
        taken = source.view[source_offset : source_offset + nbytes]
        target.view[target_offset : target_offset + nbytes] = taken
        return
    from swactor_worker_tinygrad import internals

    internals.copy_within_device(target.buffer, target_offset, source.buffer, source_offset, nbytes)


def read(source: Allocation, offset: int, target: memoryview) -> None:
    """Fills `target`; complete on return."""
    if source.view is not None:
        target[:] = source.view[offset : offset + len(target)]
        return
    from swactor_worker_tinygrad import internals

    internals.read_bytes(source.buffer, offset, target)


def write(target: Allocation, offset: int, source: memoryview) -> None:
    """Copies host bytes; complete, with `source` free again, on return."""
    if target.view is not None:
        target.view[offset : offset + len(source)] = source
        return
    from swactor_worker_tinygrad import internals

    internals.write_bytes(target.buffer, offset, source)


def finish(device: str) -> None:
    """Waits until the device has done all that it was given."""
    if on_host(device):
        return
    from swactor_worker_tinygrad import internals

    internals.finish(device)
