"""The arena's memory (spec section 19): sparse, sealed, shared by descriptor, refused in words."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from swactor_arena import memory
from swactor_arena.arena import MemfdArenas
from swactor_core.errors import ResourceError, RingError, UsageError

PAGE = mmap.PAGESIZE


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_the_arena_is_sparse_and_only_rings_take_pages(layout_of) -> None:
    arena = MemfdArenas().create(1 << 40)
    assert arena.ceiling == 1 << 40
    assert allocated(arena.fd) == 0
    arena.create_ring(layout_of(10 * PAGE - 64, offset=1 << 39))
    assert allocated(arena.fd) == 10 * PAGE
    arena.close()


def test_the_memory_can_neither_shrink_nor_grow_and_is_not_inherited_by_accident(arena) -> None:
    for size in (0, PAGE, arena.ceiling * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) == memory.SEALS
    assert not os.get_inheritable(arena.fd)


def test_discard_gives_pages_back_and_spares_the_neighbours(arena, layout_of) -> None:
    left = arena.create_ring(layout_of(PAGE + 100 - 64))
    middle_at = PAGE + 128
    middle = arena.create_ring(layout_of(4 * PAGE, ring_id=2, offset=middle_at))
    right_at = middle_at + 64 + 4 * PAGE
    right = arena.create_ring(layout_of(PAGE, ring_id=3, offset=right_at))
    for ring in (left, middle, right):
        span = ring.writable_span()
        span[:] = b"x" * len(span)
        ring.advance_commit(len(span))
    before = allocated(arena.fd)
    middle.close()
    arena.discard(middle_at, 64 + 4 * PAGE)
    assert before - allocated(arena.fd) == 3 * PAGE, "pages shared with a neighbour must stay"
    assert bytes(left.readable_span()) == b"x" * (PAGE + 100 - 64)
    assert bytes(right.readable_span()) == b"x" * PAGE
    with pytest.raises(RingError, match="no ring header"):
        arena.open_ring(middle.layout)
    again = arena.create_ring(layout_of(4 * PAGE, ring_id=4, offset=middle_at))
    assert allocated(arena.fd) == before
    assert len(again.writable_span()) == 4 * PAGE


@pytest.mark.parametrize(("offset", "length"), [(-1, 10), (0, 0), (0, -5), (1 << 20, 1), (0, (1 << 20) + 1)])
def test_discard_outside_the_arena_is_a_usage_error(arena, offset, length) -> None:
    with pytest.raises(UsageError, match="no range"):
        arena.discard(offset, length)


def test_a_ring_larger_than_the_free_memory_is_refused_before_the_kernel_ends_somebody(layout_of) -> None:
    arena = MemfdArenas().create(1 << 46)
    with pytest.raises(ResourceError, match="memory are left") as caught:
        arena.create_ring(layout_of(1 << 45))
    assert "ceiling" in caught.value.hint
    assert allocated(arena.fd) == 0
    arena.close()


def test_a_refusal_of_the_kernel_is_a_resource_error_and_leaves_the_header_alone(
    arena, raw, layout_of
) -> None:
    arena.create_ring(layout_of(64)).close()
    header = raw(0)
    before = header.content()
    keep = os.dup(arena.fd)
    reader, writer = os.pipe()
    os.dup2(reader, arena.fd)
    with pytest.raises(ResourceError, match="pages for a ring of 128 bytes"):
        arena.create_ring(layout_of(64, ring_id=2))
    with pytest.raises(ResourceError, match="cannot be given back"):
        arena.discard(0, PAGE)
    os.dup2(keep, arena.fd)
    for fd in (keep, reader, writer):
        os.close(fd)
    assert header.content() == before


@pytest.mark.parametrize("ceiling", [0, -1, 1 << 63, 1 << 70])
def test_an_impossible_ceiling_is_refused(ceiling) -> None:
    with pytest.raises(ResourceError, match="arena cannot have"):
        MemfdArenas().create(ceiling)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("RLIMIT_FSIZE, (1 << 20, 1 << 20)", "ulimit -f"),
        ("RLIMIT_AS, (1 << 31, 1 << 31)", "ulimit -v"),
        ("RLIMIT_NOFILE, (3, 3)", "ulimit -n"),
    ],
)
def test_limits_of_the_process_are_named_with_their_remedy(limit, text) -> None:
    script = f"""
import resource
from swactor_core.errors import ResourceError
from swactor_arena.arena import MemfdArenas
arenas = MemfdArenas()
resource.setrlimit(resource.{limit})
try:
    arenas.create(1 << 33)
except ResourceError as error:
    print(error.message, "|", error.hint)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout


def test_attach_refuses_what_is_no_arena(arena, tmp_path) -> None:
    arenas = MemfdArenas()
    with pytest.raises(ResourceError, match="were announced"):
        arenas.attach(arena.fd, arena.ceiling + 1)
    with pytest.raises(ResourceError, match="were announced"):
        arenas.attach(arena.fd, 0)
    reader, writer = os.pipe()
    plain = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 4096)
    with pytest.raises(ResourceError, match="not an inherited arena") as caught:
        arenas.attach(reader, 4096)
    assert "pass_fds" in caught.value.hint
    with pytest.raises(ResourceError, match="not sealed"):
        arenas.attach(plain, 4096)
    for fd in (reader, writer, plain):
        os.close(fd)
    with pytest.raises(ResourceError, match="not an inherited arena"):
        arenas.attach(plain, 4096)


def test_closing_an_arena_closes_its_rings_and_is_idempotent(layout_of) -> None:
    arenas = MemfdArenas()
    arena = arenas.create(1 << 16)
    view = arenas.attach(arena.fd, 1 << 16)
    ring, other = arena.create_ring(layout_of(64)), view.open_ring(layout_of(64))
    fd = arena.fd
    arena.close()
    arena.close()
    assert arena.fd == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    for call in (
        lambda: ring.commit,
        lambda: arena.open_ring(layout_of(64)),
        lambda: arena.create_ring(layout_of(64)),
    ):
        with pytest.raises(RingError, match="closed"):
            call()
    with pytest.raises(UsageError):
        arena.discard(0, 64)
    assert other.commit == 0, "the other mapping outlives the owner's"
    view.close()
    view.close()
    with pytest.raises(RingError, match="closed"):
        view.open_ring(layout_of(64))


def test_nothing_of_a_closed_arena_stays_mapped_or_open(layout_of) -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("swactor-arena")
        return maps, len(os.listdir("/proc/self/fd"))

    before = held()
    for _ in range(50):
        arenas = MemfdArenas()
        arena = arenas.create(1 << 20)
        view = arenas.attach(arena.fd, 1 << 20)
        ring = arena.create_ring(layout_of(4096))
        span = ring.writable_span()
        view.open_ring(layout_of(4096)).readable_span()
        view.close()
        arena.close()
        with pytest.raises(ValueError, match="released"):
            span[0] = 1
    assert held() == before
