"""The device bridge (spec section 33): range copies that are complete when they say so, memory of one's own.

The guarantees are those of `DeviceBridge` in `swactor_core.spi.worker`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest
from swactor_core.spi.worker import WorkerBackend

from swactor_testing.conformance.base import Contract
from swactor_testing.conformance.bounds import same_bytes, seeded
from swactor_testing.conformance.capabilities import WorkerCapabilities
from swactor_testing.conformance.worker_rig import Device, WorkerFactory
from swactor_testing.worker_kit import activation_spec, token_spec


class DeviceContract(Contract[WorkerFactory, WorkerCapabilities]):
    """What a backend's device keeps."""

    @pytest.fixture
    def backend(self, plugin: WorkerFactory) -> Iterator[WorkerBackend]:
        made = plugin(settings=dict(self.capabilities.settings))
        yield made
        made.close()

    @pytest.fixture
    def device(self, backend: WorkerBackend) -> Device:
        return Device(backend.bridge, self.capabilities.copy_polls)

    def test_its_facts_are_small_json(self, backend: WorkerBackend) -> None:
        """`facts`: small JSON facts for WorkerReady; payload bytes are forbidden in JSON (section 28)."""
        assert len(json.dumps(backend.facts())) < 4096

    # --- the device bridge ---

    @pytest.mark.parametrize("seed", range(3))
    def test_bytes_come_back_from_the_device_as_they_went(self, device: Device, seed: int) -> None:
        """Section 33: range copies, in any order. A copy that is said to be complete is: its host memory is
        the caller's again, and is overwritten at once; the ring's bytes are released on this word."""
        random = seeded(seed)
        data = random.randbytes(4 * random.randint(10, 5000))
        allocation = device.bridge.alloc_device(token_spec(len(data) // 4), len(data))
        cuts = sorted({0, len(data), *(random.randrange(len(data)) for _ in range(6))})
        ranges = list(pairwise(cuts))
        random.shuffle(ranges)
        for start, end in ranges:
            device.fill(allocation, data[start:end], start)
        same_bytes(device.read(allocation, len(data)), data, f"seed {seed}: all at once")
        for start, end in ranges:
            same_bytes(device.read(allocation, end - start, start), data[start:end], f"seed {seed}: {start}")
        device.bridge.free_device(allocation)

    def test_allocations_are_apart(self, device: Device) -> None:
        """`alloc_device`: one object's memory is no other's, also after others were freed."""
        spec = activation_spec(8, 16)
        live: dict[int, object] = {}
        for number in range(40):
            live[number] = device.bridge.alloc_device(spec, spec.max_extent)
            device.fill(live[number], bytes([number]) * spec.max_extent)
            if number % 3 == 2:
                device.bridge.free_device(live.pop(number - 1))
        for number, allocation in live.items():
            found = device.read(allocation, spec.max_extent)
            same_bytes(found, bytes([number]) * spec.max_extent, f"object {number}")
            device.bridge.free_device(allocation)

    @pytest.mark.parametrize(("offset", "count"), [(0, 17), (16, 1), (12, 8), (1 << 40, 4)])
    def test_a_copy_outside_an_allocation_is_an_oserror(
        self, device: Device, offset: int, count: int
    ) -> None:
        """`host_to_device`, `device_to_host`: OSError when the copy fails, and nothing was touched."""
        allocation = device.bridge.alloc_device(token_spec(4), 16)
        device.fill(allocation, bytes(range(16)))
        with pytest.raises(OSError, match=r"\S"):
            device.wait(device.bridge.host_to_device(memoryview(bytearray(count)), allocation, offset))
        with pytest.raises(OSError, match=r"\S"):
            device.wait(device.bridge.device_to_host(allocation, offset, memoryview(bytearray(count))))
        same_bytes(device.read(allocation, 16), bytes(range(16)), "after refused copies")
        device.bridge.free_device(allocation)

    def test_a_device_without_room_is_a_memory_error(self, device: Device) -> None:
        """`alloc_device` raises MemoryError when the device is out of memory; it stays usable."""
        rows = 1 << 56
        with pytest.raises(MemoryError):
            device.bridge.alloc_device(token_spec(rows), rows * 4)
        allocation = device.bridge.alloc_device(token_spec(4), 16)
        device.fill(allocation, b"still here: yes!")
        assert device.read(allocation, 16) == b"still here: yes!"
        device.bridge.free_device(allocation)
