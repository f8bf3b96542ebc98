"""The device bridge (spec section 33): device allocations and range copies between them and host memory.

Knows device buffers and bytes. Must not know rings, objects' meaning or models. On the CPU device an
allocation is host memory, so a copy is one memcpy into it; elsewhere copies go through writable host staging
and are complete when they return.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from swactor_core.specs import ObjectSpec

from swactor_worker_tinygrad import device_memory
from swactor_worker_tinygrad.device_memory import Allocation

if TYPE_CHECKING:
    from tinygrad import Tensor
    from tinygrad.dtype import DType


class CopyEvent(Enum):
    """Every copy of this bridge is synchronous."""

    COMPLETE = "Complete"


class TinygradBridge:
    """One device's allocations; `live_bytes` is what callers have not freed."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._live: dict[int, Allocation] = {}

    @property
    def live_bytes(self) -> int:
        return sum(allocation.nbytes for allocation in self._live.values())

    def alloc_device(self, spec: ObjectSpec, extent: int) -> Allocation:
        """Device memory for one object of `extent` bytes. Raises MemoryError when there is none, ValueError
        for an extent that the spec does not allow."""
        if not 0 < extent <= spec.max_extent:
            raise ValueError(f"an object of {extent} bytes is outside 1..{spec.max_extent}")
        return self.allocate(extent)

    def allocate(self, nbytes: int) -> Allocation:
        """Device memory that belongs to the caller. Raises MemoryError."""
        allocation = device_memory.allocate(self.device, nbytes)
        self._live[id(allocation)] = allocation
        return allocation

    def free_device(self, allocation: Allocation) -> None:
        """Gives the memory back; a second call, or one for memory that is not this bridge's, does nothing."""
        if self._live.pop(id(allocation), None) is not None:
            allocation.view = None
            allocation.buffer = None

    def host_to_device(self, source: memoryview, allocation: Allocation, device_offset: int) -> CopyEvent:
        """Copies all of `source` to the allocation from `device_offset` on. Raises OSError."""
        start, raw = device_offset, source.cast("B")
        self._check(allocation, start, len(raw))
        if len(raw):
            try:
                device_memory.write(allocation, start, raw)
            except (RuntimeError, TypeError) as error:
                raise OSError(f"copy of {len(raw)} bytes to {self.device} failed: {error}") from error
        return CopyEvent.COMPLETE

    def device_to_host(self, allocation: Allocation, device_offset: int, target: memoryview) -> CopyEvent:
        """Fills all of `target` from the allocation from `device_offset` on. Raises OSError."""
        start, raw = device_offset, target.cast("B")
        self._check(allocation, start, len(raw))
        if len(raw):
            try:
                device_memory.read(allocation, start, raw)
            except (RuntimeError, TypeError) as error:
                raise OSError(f"copy of {len(raw)} bytes from {self.device} failed: {error}") from error
        return CopyEvent.COMPLETE

    def finish(self) -> None:
        """Waits until the device has done all that it was given. Raises RuntimeError where that failed."""
        device_memory.finish(self.device)

    def copy_event_complete(self, event: CopyEvent) -> bool:
        return event is CopyEvent.COMPLETE

    def wrap(self, allocation: Allocation, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """The allocation's bytes as a tensor, without a copy (the spec's wrap_for_tinygrad)."""
        from swactor_worker_tinygrad import internals

        if device_memory.on_host(self.device):
            address = allocation.buffer.address
            return internals.tensor_in_memory(address, allocation.nbytes, shape, dtype, device=self.device)
        return internals.tensor_of(allocation.buffer, shape, dtype)

    def close(self) -> None:
        """Frees what callers have not. Idempotent."""
        for allocation in list(self._live.values()):
            self.free_device(allocation)

    def _check(self, allocation: Allocation, start: int, length: int) -> None:
        if allocation.buffer is None:
            raise OSError("the device allocation has been freed")
        if start < 0 or start + length > allocation.nbytes:
            raise OSError(
                f"bytes {start} to {start + length} are outside an allocation of {allocation.nbytes}"
            )
