"""Doctor checks of the arena: compiled helper, memfd, memory limits.

Each imports what it checks inside itself, so that a missing extension is a finding and not a crash.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from swactor_core.checks import CheckResult, CheckStatus, DoctorCheck
from swactor_core.errors import SwactorError
from swactor_core.free_memory import available_memory
from swactor_core.ids import RingId
from swactor_core.specs import CACHE_LINE, RING_HEADER_BYTES, RingLayout

if TYPE_CHECKING:
    from swactor_arena.arena import MemfdArenas

_COMFORTABLE_BYTES = 256 << 20
_PROBE_CAPACITY = 4096


def check_native() -> CheckResult:
    """The compiled helper loads and has the ABI that this code was written for."""
    try:
        from swactor_arena.arena import MemfdArenas

        abi = MemfdArenas().abi
    except ImportError as error:
        return CheckResult(
            CheckStatus.FAIL, f"compiled ring helper: {error}", "reinstall swactor-arena with a C compiler"
        )
    except SwactorError as error:
        return CheckResult(CheckStatus.FAIL, error.message, error.hint)
    return CheckResult(CheckStatus.OK, f"compiled ring helper, ABI {abi}")


def check_memfd() -> CheckResult:
    """An arena is made, attached, written through one end and read through the other."""
    try:
        from swactor_arena.arena import MemfdArenas

        moved = _move_one_byte(MemfdArenas())
    except ImportError as error:
        return CheckResult(CheckStatus.FAIL, f"compiled ring helper: {error}", "reinstall swactor-arena")
    except SwactorError as error:
        return CheckResult(CheckStatus.FAIL, error.message, error.hint)
    if not moved:
        return CheckResult(
            CheckStatus.FAIL, "a byte written through one mapping is not seen in another", "report this"
        )
    return CheckResult(CheckStatus.OK, "memfd, seals and shared mappings work")


def _move_one_byte(arenas: MemfdArenas) -> bool:
    layout = RingLayout(
        RingId(1), 0, RING_HEADER_BYTES + _PROBE_CAPACITY, 0, RING_HEADER_BYTES, _PROBE_CAPACITY, CACHE_LINE
    )
    owner = arenas.create(layout.total_len)
    view = None
    try:
        producer = owner.create_ring(layout)
        view = arenas.attach(owner.fd, owner.ceiling)
        consumer = view.open_ring(layout)
        producer.writable_span()[:1] = b"!"
        return producer.advance_commit(1) and bytes(consumer.readable_span()) == b"!"
    finally:
        if view is not None:
            view.close()
        owner.close()


def check_limits() -> CheckResult:
    """Memory that is left, and limits that stop a large sparse mapping."""
    for limit, name, option in (
        (resource.RLIMIT_AS, "address space", "ulimit -v unlimited"),
        (resource.RLIMIT_FSIZE, "file size", "ulimit -f unlimited"),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            detail = f"{name} is limited to {soft} bytes; the arena's sparse ceiling counts against it"
            return CheckResult(CheckStatus.WARN, detail, option)
    available = available_memory()
    if available is None:
        return CheckResult(CheckStatus.WARN, "the free memory of this machine cannot be read")
    if available < _COMFORTABLE_BYTES:
        detail = f"{available >> 20} MiB of memory are left for rings"
        return CheckResult(CheckStatus.WARN, detail, "free memory, or raise the container's limit")
    return CheckResult(CheckStatus.OK, f"{available >> 20} MiB of memory are left, no limit on mappings")


CHECKS = (
    DoctorCheck("arena.native", "compiled ring helper", check_native),
    DoctorCheck("arena.memfd", "shared memory by descriptor", check_memfd),
    DoctorCheck("arena.limits", "memory and mapping limits", check_limits),
)
