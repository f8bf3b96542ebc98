"""The C helper as it is built: what it may contain, sanitizers, optimisers, and two threads on one ring."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ring_programs
from ring_programs import COMPILERS, SOURCES, build

SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREADS = ("-O1", "-fsanitize=thread")
CLANG = next(name for name in COMPILERS if name.startswith("clang"))  # gcc's runtime misses the races below


def run(program: Path, *words: str) -> None:
    done = ring_programs.run(program, *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_the_helper_is_one_file_and_one_header_of_standard_atomics() -> None:
    """No assembler and no `volatile` for synchronisation: sanitizers and model checkers see every access."""
    assert sorted(path.name for path in SOURCES.iterdir()) == ["ring.c", "ring.h"]
    source = (SOURCES / "ring.c").read_text()
    included = re.findall(r"#include\s+[<\"]([\w.]+)", source + (SOURCES / "ring.h").read_text())
    assert set(included) == {"ring.h", "stdatomic.h", "stddef.h", "stdint.h"}
    code = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    assert not re.search(r"\b(asm|__asm__|__asm|volatile|__sync_\w+|__atomic_\w+|__builtin_\w+)\b", code)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_boundaries_and_damage_under_address_and_undefined_behaviour_sanitizers(tmp_path, compiler) -> None:
    program = build(tmp_path, "ring_driver.c", *SANITIZED, compiler=compiler)
    run(program, "boundaries")
    run(program, "threads", "61", "300000")


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("level", ["-O0", "-O2", "-O3"])
def test_every_build_has_the_same_boundaries_and_loses_no_hint(tmp_path, compiler, level) -> None:
    program = build(tmp_path, "ring_driver.c", level, compiler=compiler)
    run(program, "boundaries")
    for capacity, total in (("1", "10000"), ("2", "30000"), ("8", "200000"), ("4096", "4000000")):
        run(program, "threads", capacity, total)


def test_payload_bytes_are_ordered_for_the_thread_sanitizer(tmp_path) -> None:
    """Its view of memory order is the language's: it reports a payload access that no release covers."""
    program = build(tmp_path, "ring_driver.c", *THREADS, compiler=CLANG)
    run(program, "threads", "1", "20000")
    run(program, "threads", "61", "300000")
    run(program, "records", "4096", "200000", "16")


@pytest.mark.long
def test_ten_million_records_under_the_thread_sanitizer(tmp_path) -> None:
    run(build(tmp_path, "ring_driver.c", *THREADS, compiler=CLANG), "records", "65536", "10000000", "16")


@pytest.mark.parametrize("cursor", ["commit, commit", "consume, after"])
def test_the_thread_sanitizer_finds_an_unordered_payload(tmp_path, monkeypatch, cursor) -> None:
    """The same run on a helper that publishes one cursor, and sets wake bits, without a release."""
    source = (SOURCES / "ring.c").read_text()
    place = f"PUBLISH(ring->header->{cursor});"
    assert source.count(place) == 1
    weakened = source.replace(place, f"atomic_store_explicit(&ring->header->{cursor}, memory_order_relaxed);")
    weakened = weakened.replace("ABLE_PENDING, memory_order_release", "ABLE_PENDING, memory_order_relaxed")
    (tmp_path / "ring.c").write_text(weakened)
    (tmp_path / "ring.h").write_text((SOURCES / "ring.h").read_text())
    monkeypatch.setattr(ring_programs, "SOURCES", tmp_path)
    program = build(tmp_path, "ring_driver.c", *THREADS, compiler=CLANG)
    done = ring_programs.run(program, "records", "4096", "50000", "16")
    assert done.returncode != 0
    assert "data race" in done.stderr
