"""Products of bytes against what `fast` numerics say they are, by every instruction there is for them."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_support import address, packed, run, stored_weights
from swactor_worker_tinygrad.environment import find_compiler

FAST = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TILE = 8
ROUNDED = np.dtype(
    [
        ("value", "i1", 32),
        ("scales", "f4", 2),  # of the left and the right half
        ("sums", "f4", 2),
        ("sum", "f4"),
        ("totals", "i4", 2),
        ("unused", "i4"),
    ]
)


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes (rows, groups, 2, 16) and scales (rows, groups, 2, 1) of f32 rows, in f32 as kernels have it."""
    groups = x.reshape(len(x), -1, 2, 16)
    greatest = np.abs(groups).max(3, keepdims=True)
    counts = greatest >= np.float32(1e-36)
    inverse = np.divide(np.float32(127), greatest, out=np.zeros_like(greatest), where=counts)
    scale = np.where(counts, greatest / np.float32(127), np.float32(0))
    return np.rint(groups * inverse).astype(np.int8), scale


def as_tiles(x: np.ndarray) -> np.ndarray:
    """The kernel's rows: tiles of eight, in a tile group by group."""
    value, scale = rounded(x)
    made = np.zeros(value.shape[:2], ROUNDED)
    made["value"], made["scales"] = value.reshape(*made.shape, 32), scale[..., 0]
    made["totals"] = value.sum(3, dtype=np.int32)
    made["sums"] = made["totals"].astype(np.float32) * made["scales"]
    made["sum"] = made["sums"][..., 0] + made["sums"][..., 1]
    tiles = [made[start : start + TILE].T.reshape(-1) for start in range(0, len(x), TILE)]
    return np.concatenate(tiles)


def round_rows(kernels: Any, team: Any, x: np.ndarray, parts: int = 1) -> np.ndarray:
    tokens, columns = x.shape
    made = np.zeros(tokens * columns // 32, ROUNDED)
    run(team, [kernels.address("round"), parts, address(made), address(x), columns, tokens])
    return made


def packed_quads(kernels: Any, team: Any, kind: int, stored: np.ndarray) -> np.ndarray:
    from swactor_worker_tinygrad.native import QUADS

    return packed(kernels, team, kind, stored, quads=QUADS[kind])


def multiply(
    kernels: Any,
    team: Any,
    kind: int,
    stored: np.ndarray,
    x: np.ndarray,
    *,
    parts: int = 1,
    extra: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    from swactor_worker_tinygrad.native import matmul_words

    rows, (tokens, columns) = len(stored), x.shape
    out = np.full((tokens, rows), 77, np.float32)
    scratch = np.zeros(matmul_words(columns, tokens, threads=team.threads), np.float32)
    given, weights = round_rows(kernels, team, x, parts), packed_quads(kernels, team, kind, stored)
    words = [address(each) for each in extra] if extra is not None else [0, 0]
    shape = [rows, columns, tokens, rows]
    kernel = kernels.address("matmul_fast", kind)
    run(
        team,
        [kernel, parts, address(out), address(given), address(weights), *shape, *words, address(scratch)],
    )
    return out


def stated(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What fast numerics are: rounded rows times dequantised weights."""
    value, scale = rounded(x)
    return (value * scale.astype(np.float64)).reshape(x.shape) @ values.astype(np.float64).T


def rows_of(tokens: int, columns: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, columns)).astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 7, 8, 21])
def test_rows_are_rounded_to_bytes(kernels: Any, team: Any, tokens: int) -> None:
    x = rows_of(tokens, 96)
    x[0, 32:64] = 0
    x[-1, :32] = [1e-37, *[0.0] * 31]
    x[0, 64:] = np.linspace(-1e37, 3e37, 32)
    np.testing.assert_array_equal(round_rows(kernels, team, x, parts=3), as_tiles(x))


def test_the_greatest_magnitude_is_127_and_halves_go_to_even(kernels: Any, team: Any) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [-127, 0.5, 1.5, -2.5, 126.5, 3]
    x[0, 16:18] = [254, 3]
    made = round_rows(kernels, team, x)[0]
    assert made["value"][:6].tolist() == [-127, 0, 2, -2, 126, 3]
    assert made["value"][16:18].tolist() == [127, 2]
    assert (made["scales"].tolist(), made["totals"].tolist()) == ([1.0, 2.0], [2, 129])


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q6_K"])
def test_what_is_no_number_stays_none(kernels: Any, team: Any, name: str, bad: float) -> None:
    """It reaches every product of its own row, whichever place it has, and no other row."""
    kind, stored, _ = stored_weights(name, 20, 256)
    x = rows_of(11, 256)
    x[4, 200], x[10, 0] = bad, bad
    out = multiply(kernels, team, kind, stored, x)
    wrong = np.isnan(out)
    assert wrong[[4, 10]].all()
    assert not np.delete(wrong, [4, 10], axis=0).any()
    assert np.isnan(multiply(kernels, team, kind, stored, x[10:])).all()


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("tokens", [1, 13])
def test_products_are_those_of_rounded_rows(kernels: Any, team: Any, name: str, tokens: int) -> None:
    kind, stored, values = stored_weights(name, 37, 512)
    x = rows_of(tokens, 512)
    out = multiply(kernels, team, kind, stored, x, parts=2)
    size = np.abs(values).max() * 512**0.5
    np.testing.assert_allclose(out, stated(x, values), rtol=2e-5, atol=2e-6 * size)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    np.testing.assert_allclose(out, exact, atol=0.02 * size)
    assert np.abs(out - exact).max() > 1e-4 * size, "nothing was rounded"


@pytest.mark.parametrize("name", FAST)
def test_bytes_at_the_ends_of_their_range(kernels: Any, team: Any, name: str) -> None:
    """All weights' bits set and rows of 127 and -127: what 16 bits on the way would not hold."""
    from gguf import GGMLQuantizationType, dequantize

    kind, stored, _ = stored_weights(name, 16, 256)
    scales = stored.copy()
    for fill in (0xFF, 0x7F, 0x80, 0x00):
        stored[:] = fill
        keep_scales(name, stored, scales)
        values = np.asarray(dequantize(stored, GGMLQuantizationType(kind)), np.float32).reshape(16, 256)
        x = np.full((2, 256), 127, np.float32)
        x[1, ::2] = -127
        x[1, 3::8] = 127
        out = multiply(kernels, team, kind, stored, x)
        size = np.abs(values.astype(np.float64)).max() * 127 * 256
        np.testing.assert_allclose(out, stated(x, values), rtol=1e-5, atol=1e-6 * size)


def keep_scales(name: str, stored: np.ndarray, scales: np.ndarray) -> None:
    from kernel_support import SCALES
    from swactor_worker_tinygrad.tensor_types import BLOCKS

    block_bytes = BLOCKS[stored_weights(name, 1, 256)[0]][1]
    to, of = (array.reshape(-1, block_bytes) for array in (stored, scales))
    for offset in SCALES[name]:
        to[:, offset : offset + 2] = of[:, offset : offset + 2]


@pytest.mark.parametrize("name", FAST)
def test_many_rows_give_the_bits_of_one_row(kernels: Any, team: Any, name: str) -> None:
    kind, stored, _ = stored_weights(name, 20, 256)
    x = rows_of(23, 256, seed=3)
    together = multiply(kernels, team, kind, stored, x, parts=2)
    for row in range(len(x)):
        alone = multiply(kernels, team, kind, stored, x[row : row + 1])
        assert alone.tobytes() == together[row : row + 1].tobytes()


@pytest.mark.parametrize("rows", [8, 21])
def test_bias_and_residual_are_added(kernels: Any, team: Any, rows: int) -> None:
    kind, stored, values = stored_weights("Q4_1", rows, 64)
    x, bias, residual = rows_of(2, 64), np.arange(rows, dtype=np.float32), rows_of(2, rows, seed=5)
    out = multiply(kernels, team, kind, stored, x, extra=(bias, residual))
    np.testing.assert_allclose(out, stated(x, values) + bias + residual, rtol=1e-5, atol=1e-5)


def test_bytes_of_a_row_stay_together_by_fours(kernels: Any, team: Any) -> None:
    kind, stored, _ = stored_weights("Q4_1", 21, 64)
    made = packed_quads(kernels, team, kind, stored).reshape(2, 2, 20 * 16)  # (rows / 16, blocks, bytes)
    np.testing.assert_array_equal(made[0, 1, 3 * 16 : 4 * 16], stored[:16, 20 + 3])
    quads = made[:, :, 4 * 16 :].reshape(2, 2, 4, 16, 4)  # four of sixteen rows' four bytes
    np.testing.assert_array_equal(quads[0, 1, 2], stored[:16, 20 + 12 : 20 + 16])
    np.testing.assert_array_equal(quads[1, 0, 0, :5], stored[16:, 4:8])
    assert not quads[1, :, :, 5:].any()


def processors() -> list[str]:
    """What the compiler can be told to build for and this processor runs: each takes another instruction."""
    if platform.machine() != "x86_64":
        return ["native"]
    flags = Path("/proc/cpuinfo").read_text().split("\nflags", 1)[1].split("\n", 1)[0].split()
    found = ["x86-64", "native"]
    found += ["x86-64-v3"] if {"avx2", "fma", "bmi2"} <= set(flags) else []
    found += (
        ["x86-64-v4"] if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"} <= set(flags) else []
    )
    return found


@pytest.mark.parametrize("march", processors())
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q8_0", "Q6_K"])
def test_every_instruction_gives_the_same(
    kernels: Any, team: Any, tmp_path: Path, name: str, march: str
) -> None:
    from swactor_worker_tinygrad.native import matmul_words, source

    kind, stored, _ = stored_weights(name, 16, 256)
    stored[::2] |= 0x80  # great bytes too
    x = rows_of(9, 256)
    expected = multiply(kernels, team, kind, stored, x)
    library = tmp_path / "kernel.so"
    command = [find_compiler(), "-x", "c", "-O2", "-fPIC", "-ffreestanding", "-nostdlib", "-shared"]
    command += ["-Wno-psabi", "-Wl,-z,defs", "-march=" + march, "-", "-o", str(library)]
    built = subprocess.run(
        command, input=source("matmul_fast", kind).encode(), capture_output=True, timeout=60, check=False
    )
    assert built.returncode == 0, built.stderr.decode()
    kernel = ctypes.CDLL(str(library)).kernel
    given, weights = round_rows(kernels, team, x), packed_quads(kernels, team, kind, stored)
    out, scratch = np.zeros((9, 16), np.float32), np.zeros(matmul_words(256, 9, threads=1), np.float32)
    arrays = [address(each) for each in (out, given, weights)]
    words = np.array([*arrays, 16, 256, 9, 16, 0, 0, address(scratch)], np.uint64)
    kernel(*(ctypes.c_uint64(word) for word in (address(words), 0, 0, 1, 1)))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
