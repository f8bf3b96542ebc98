"""The device bridge (spec section 33): range copies, bounds, exhaustion and zero-copy view."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec

SPEC = ObjectSpec(ObjectKind.ACTIVATION, 1 << 62, DTypeFamily.FLOAT, 4, 16)


def test_an_object_is_copied_in_pieces_and_out_in_others(backend: Any) -> None:
    bridge = backend.bridge
    payload = np.arange(1000, dtype=np.uint8).tobytes()
    allocation = bridge.alloc_device(SPEC, len(payload))
    for start in range(0, 1000, 300):
        piece = memoryview(payload)[start : start + 300]
        assert bridge.copy_event_complete(bridge.host_to_device(piece, allocation, start))
    out = bytearray(1000)
    for start in range(0, 1000, 450):
        target = memoryview(out)[start : start + 450]
        assert bridge.copy_event_complete(bridge.device_to_host(allocation, start, target))
    assert bytes(out) == payload
    bridge.free_device(allocation)


def test_copies_take_views_of_any_format(backend: Any) -> None:
    bridge = backend.bridge
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    allocation = bridge.alloc_device(SPEC, numbers.nbytes)
    bridge.host_to_device(memoryview(numbers), allocation, 0)
    out = np.zeros((2, 3), np.float32)
    bridge.device_to_host(allocation, 0, memoryview(out))
    np.testing.assert_array_equal(out, numbers)
    bridge.free_device(allocation)


def test_empty_copies_are_complete(backend: Any) -> None:
    bridge = backend.bridge
    allocation = bridge.alloc_device(SPEC, 8)
    assert bridge.copy_event_complete(bridge.host_to_device(memoryview(b""), allocation, 8))
    assert bridge.copy_event_complete(bridge.device_to_host(allocation, 8, memoryview(bytearray())))
    bridge.free_device(allocation)


def test_ranges_outside_the_allocation_are_refused(backend: Any) -> None:
    bridge = backend.bridge
    allocation = bridge.alloc_device(SPEC, 64)
    with pytest.raises(OSError, match="bytes 60 to 68 are outside an allocation of 64"):
        bridge.host_to_device(memoryview(bytes(8)), allocation, 60)
    with pytest.raises(OSError, match="bytes -1 to 7"):
        bridge.device_to_host(allocation, -1, memoryview(bytearray(8)))
    bridge.free_device(allocation)
    with pytest.raises(OSError, match="freed"):
        bridge.host_to_device(memoryview(bytes(8)), allocation, 0)


def test_extents_that_the_spec_forbids(backend: Any) -> None:
    small = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
    for extent in (0, -4, 65):
        with pytest.raises(ValueError, match=r"outside 1\.\.64"):
            backend.bridge.alloc_device(small, extent)


def test_an_exhausted_device_raises_memory_error(backend: Any) -> None:
    before = backend.bridge.live_bytes
    with pytest.raises(MemoryError):
        backend.bridge.alloc_device(SPEC, 1 << 60)
    assert backend.bridge.live_bytes == before


def test_freeing_twice_is_harmless(backend: Any) -> None:
    before = backend.bridge.live_bytes
    allocation = backend.bridge.alloc_device(SPEC, 128)
    assert backend.bridge.live_bytes == before + 128
    backend.bridge.free_device(allocation)
    backend.bridge.free_device(allocation)
    assert backend.bridge.live_bytes == before


def test_a_wrapped_allocation_is_the_same_memory(backend: Any) -> None:
    from swactor_worker_tinygrad import internals

    bridge = backend.bridge
    allocation = bridge.alloc_device(SPEC, 48)
    tensor = bridge.wrap(allocation, (3, 4), internals.FLOAT32)
    numbers = np.arange(12, dtype=np.float32)
    bridge.host_to_device(memoryview(numbers), allocation, 0)
    np.testing.assert_array_equal(tensor.numpy(), numbers.reshape(3, 4))
    with pytest.raises(ValueError, match="does not fit 48 bytes"):
        bridge.wrap(allocation, (4, 4), internals.FLOAT32)
    bridge.free_device(allocation)


def test_close_frees_what_callers_forgot(backend: Any) -> None:
    from swactor_worker_tinygrad.bridge import TinygradBridge

    bridge = TinygradBridge(backend.device)
    forgotten = bridge.alloc_device(SPEC, 16)
    bridge.close()
    bridge.close()
    assert bridge.live_bytes == 0
    assert forgotten.buffer is None


def test_a_device_without_host_memory_is_copied_through_staging(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of CUDA, whose buffers have no view on the host."""
    from swactor_worker_tinygrad import device_memory, internals
    from swactor_worker_tinygrad.bridge import TinygradBridge

    monkeypatch.setattr(device_memory, "on_host", lambda device: False)
    monkeypatch.setattr(internals, "bytes_view", lambda buffer: None)
    bridge = TinygradBridge(backend.device)
    allocation = bridge.alloc_device(SPEC, 100)
    assert allocation.view is None
    payload = bytes(range(100))
    bridge.host_to_device(memoryview(payload)[:60], allocation, 0)
    bridge.host_to_device(memoryview(payload)[60:], allocation, 60)
    out = bytearray(50)
    bridge.device_to_host(allocation, 30, memoryview(out))
    assert bytes(out) == payload[30:80]
    other = bridge.alloc_device(SPEC, 20)
    device_memory.copy(other, 10, allocation, 50, 10)
    out = bytearray(10)
    bridge.device_to_host(other, 10, memoryview(out))
    assert bytes(out) == payload[50:60]
    tensor = bridge.wrap(allocation, (10, 10), internals.UINT8)
    np.testing.assert_array_equal(tensor.numpy().reshape(-1), np.frombuffer(payload, np.uint8))
    bridge.close()
