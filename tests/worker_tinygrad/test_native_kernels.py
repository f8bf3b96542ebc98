"""Each hand-written kernel against numpy, and each weight type against gguf's own dequantisation."""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from kernel_support import (
    BLOCKS,
    FLOATS,
    PACKED,
    SCALES,
    TYPES,
    address,
    dequantised,
    packed,
    run,
    stored_weights,
)
from swactor_worker_tinygrad.environment import COMPILERS


def multiply(
    kernels: Any,
    team: Any,
    kind: int,
    stored: np.ndarray,
    x: np.ndarray,
    *,
    parts: int = 1,
    extra: Any = None,
    lanes: bool = False,
) -> np.ndarray:
    rows, (tokens, columns) = len(stored), x.shape
    out = np.full((tokens, rows), np.nan, np.float32)
    scratch = np.zeros(18 * columns * team.threads + tokens * columns, np.float32)
    bias, residual = extra if extra is not None else (None, None)
    words = [address(bias) if bias is not None else 0, address(residual) if residual is not None else 0]
    weights = packed(kernels, team, kind, stored) if lanes else stored
    kernel = kernels.address("matmul_lanes" if lanes else "matmul", kind)
    shape = [rows, columns, tokens, rows]
    run(team, [kernel, parts, address(out), address(x), address(weights), *shape, *words, address(scratch)])
    return out


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_the_dequantised_rows(kernels: Any, team: Any, name: str) -> None:
    kind, stored, values = stored_weights(name, 9, 512)
    ids = np.array([8, 0, 3, 3], np.uint32)
    out = np.zeros((4, 512), np.float32)
    kernel = kernels.address("rows", kind)
    run(team, [kernel, 1, address(out), address(stored), address(ids), 4, 512])
    np.testing.assert_allclose(out, values[ids], rtol=2e-6, atol=1e-6)


# types whose values are exact in f32: a whole number of few bits times a scale of few bits
EXACT = sorted(set(BLOCKS) - {"Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})


@pytest.mark.parametrize("name", EXACT)
def test_blocks_of_any_bytes_have_the_very_values(kernels: Any, team: Any, name: str) -> None:
    """All scales that are finite, the greatest and subnormal ones too; f16 infinities are not in files."""
    rows, columns = 67, 512
    kind, stored, _ = stored_weights(name, rows, columns)
    generator = np.random.default_rng(22)
    stored[:] = generator.integers(0, 256, stored.shape, dtype=np.uint8)
    stored[:3] = np.array([[0x00], [0x77], [0xFB]], np.uint8)
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]
    blocks = stored.reshape(-1, block_bytes)
    tops = [offset + 1 for offset in SCALES[name]]
    if name == "IQ1_M":
        blocks[:, 55] &= 0xBF
    for top in tops:
        blocks[:, top] = np.where(blocks[:, top] & 0x7C == 0x7C, blocks[:, top] ^ 0x04, blocks[:, top])
    with np.errstate(over="ignore"):  # the greatest scales of MXFP4 are beyond f32
        values = dequantised(name, stored, columns)
    assert len(np.unique(np.abs(values))) > 100
    ids, out = np.arange(rows, dtype=np.uint32), np.zeros((rows, columns), np.float32)
    kernel = kernels.address("rows", kind)
    run(team, [kernel, 1, address(out), address(stored), address(ids), rows, columns])
    np.testing.assert_array_equal(out, values)


def test_the_codebooks_are_those_of_gguf() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "write_codebooks.py"
    written = runpy.run_path(str(script))
    assert written["HEADER"].read_text() == written["text"](), "run scripts/write_codebooks.py"


LAYOUTS = [(name, False) for name in TYPES] + [(name, True) for name in PACKED]


@pytest.mark.parametrize(("name", "lanes"), LAYOUTS)
def test_products_equal_the_dequantised_products(kernels: Any, team: Any, name: str, lanes: bool) -> None:
    kind, stored, values = stored_weights(name, 37, 512)
    x = np.random.default_rng(2).standard_normal((6, 512)).astype(np.float32)
    out = multiply(kernels, team, kind, stored, x, parts=2, lanes=lanes)
    expected = x.astype(np.float64) @ values.astype(np.float64).T
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-5 * np.abs(values).max() * 512**0.5)


@pytest.mark.parametrize(("name", "lanes"), LAYOUTS)
def test_many_rows_give_the_bits_of_one_row(kernels: Any, team: Any, name: str, lanes: bool) -> None:
    kind, stored, _ = stored_weights(name, 20, 256)
    x = np.random.default_rng(3).standard_normal((7, 256)).astype(np.float32)
    together = multiply(kernels, team, kind, stored, x, lanes=lanes)
    for row in range(7):
        alone = multiply(kernels, team, kind, stored, np.ascontiguousarray(x[row : row + 1]), lanes=lanes)
        assert alone.tobytes() == together[row : row + 1].tobytes()


# more columns than are unpacked at a time, and such as are no whole number of them
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        *(("Q4_1", 1568), ("Q4_1", 2560), ("Q6_K", 2304), ("F16", 1601), ("F32", 3079)),
        *(("MXFP4", 1568), ("NVFP4", 1600), ("Q1_0", 1664), ("IQ3_S", 1792), ("TQ1_0", 2304)),
    ],
)
def test_many_wide_rows_give_the_bits_of_one_row(kernels: Any, team: Any, name: str, columns: int) -> None:
    kind, stored, values = stored_weights(name, 21, columns)
    x = np.random.default_rng(3).standard_normal((7, columns)).astype(np.float32)
    together = multiply(kernels, team, kind, stored, x, parts=4)
    expected = x.astype(np.float64) @ values.astype(np.float64).T
    np.testing.assert_allclose(together, expected, rtol=1e-4, atol=2e-5 * np.abs(values).max() * columns**0.5)
    for row in range(7):
        alone = multiply(kernels, team, kind, stored, np.ascontiguousarray(x[row : row + 1]))
        assert alone.tobytes() == together[row : row + 1].tobytes()


def test_packing_lays_rows_side_by_side(kernels: Any, team: Any) -> None:
    kind, stored, _ = stored_weights("Q4_1", 21, 64)
    made = packed(kernels, team, kind, stored).reshape(2, 2, 20, 16)  # (rows / 16, blocks, bytes, lanes)
    np.testing.assert_array_equal(made[0, 1, 7], stored[:16, 20 + 7])
    np.testing.assert_array_equal(made[1, 0, 3, :5], stored[16:, 3])
    assert not made[1, :, :, 5:].any()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("columns", [1, 24, 33, 64])
def test_float_rows_of_any_length(kernels: Any, team: Any, name: str, columns: int) -> None:
    kind, stored, values = stored_weights(name, 5, columns)
    x = np.random.default_rng(4).standard_normal((6, columns)).astype(np.float32)
    np.testing.assert_allclose(multiply(kernels, team, kind, stored, x), x @ values.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("rows", [8, 21])
def test_bias_and_residual_are_added(kernels: Any, team: Any, rows: int, lanes: bool) -> None:
    kind, stored, values = stored_weights("Q4_1", rows, 64)
    generator = np.random.default_rng(5)
    x, bias = generator.standard_normal((6, 64)).astype(np.float32), np.arange(rows, dtype=np.float32)
    residual = generator.standard_normal((6, rows)).astype(np.float32)
    out = multiply(kernels, team, kind, stored, x, extra=(bias, residual), lanes=lanes)
    np.testing.assert_allclose(out, x @ values.T + bias + residual, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [16, 24, 64, 100])
def test_norm(kernels: Any, team: Any, width: int) -> None:
    from swactor_worker_tinygrad.native import float_bits

    generator = np.random.default_rng(6)
    x, weight = generator.standard_normal((5, width)).astype(np.float32), generator.random(width, np.float32)
    out = np.zeros_like(x)
    words = [address(out), address(x), address(weight), width, 5, float_bits(1e-5)]
    run(team, [kernels.address("norm"), 5, *words])
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_norm_in_place_with_a_residual(kernels: Any, team: Any) -> None:
    from swactor_worker_tinygrad.native import float_bits

    generator = np.random.default_rng(16)
    x, rest = (generator.standard_normal((5, 24)).astype(np.float32) for _ in range(2))
    weight = generator.random(24, np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    words = [address(x), address(weight), 24, 5, float_bits(1e-5)]
    kernel, before = kernels.address("norm"), rest.copy()
    run(team, [kernel, 5, address(rest), *words, address(rest)], [kernel, 5, address(x), *words])
    np.testing.assert_allclose(rest, before + expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [16, 5, 1000])
def test_gate_with_gelu(kernels: Any, team: Any, count: int) -> None:
    """Argument and value are rounded to f16 between -10 and 10, as in llama.cpp's table of it."""
    generator = np.random.default_rng(17)
    gate, up = (generator.uniform(-12, 12, count).astype(np.float32) for _ in range(2))
    gate[:5] = [10.0, -10.0, 0.0, 1e-5, 11.123456]
    x = gate.astype(np.float16).astype(np.float64)
    value = (0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))).astype(np.float16)
    value = np.where(np.abs(gate) < 10, value, np.maximum(gate, 0))
    run(team, [kernels.address("gate"), 3, address(gate), address(up), count, 1])
    np.testing.assert_allclose(gate, value * up, rtol=2**-9, atol=1e-6)
    assert (np.abs(gate - value * up) <= 1e-6 * np.abs(gate)).mean() >= 0.99, (
        "one in many may round otherwise"
    )


@pytest.mark.parametrize("count", [16, 5, 1000])
def test_cap(kernels: Any, team: Any, count: int) -> None:
    from swactor_worker_tinygrad.native import float_bits

    x = np.random.default_rng(18).uniform(-200, 200, count).astype(np.float32)
    x[:4] = [0.0, 1e-3, np.inf, -np.inf]
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    run(team, [kernels.address("cap"), 3, address(x), count, float_bits(30.0)])
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=5e-6)


def test_small_values_keep_their_bits_under_a_cap(kernels: Any, team: Any) -> None:
    """Logits of a model whose weights are small are all of them small beside the cap."""
    from swactor_worker_tinygrad.native import float_bits

    x = np.geomspace(1e-7, 25, 1000).astype(np.float32)
    x[::2] *= -1
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    run(team, [kernels.address("cap"), 3, address(x), len(x), float_bits(30.0)])
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=0)


def test_embedding_rows_are_scaled(kernels: Any, team: Any) -> None:
    from swactor_worker_tinygrad.native import float_bits

    kind, stored, values = stored_weights("Q8_0", 9, 64)
    ids, out = np.array([8, 0], np.uint32), np.zeros((2, 64), np.float32)
    words = [address(out), address(stored), address(ids), 2, 64, float_bits(8.0)]
    run(team, [kernels.address("rows", kind), 1, *words])
    np.testing.assert_allclose(out, values[ids] * 8, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("experts", "used"), [(4, 2), (128, 8), (3, 3), (1, 1)])
def test_routing(kernels: Any, team: Any, experts: int, used: int) -> None:
    generator = np.random.default_rng(19)
    scores = generator.standard_normal((5, experts)).astype(np.float32) * 3
    scores[4] = 0.5  # all equal: the lowest indices
    shares = np.exp(scores.astype(np.float64) - scores.max(1, keepdims=True))
    expected = np.argsort(-shares, axis=1, kind="stable")[:, :used]
    taken = np.take_along_axis(shares, expected, 1)
    chosen, made = np.zeros((5, used), np.uint64), np.zeros((5, used), np.float32)
    words = [address(scores), address(chosen), address(made), 5, experts, used]
    run(team, [kernels.address("route"), 2, *words])
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(made, taken / taken.sum(1, keepdims=True), rtol=1e-5)


def test_routing_of_what_is_no_number_stays_within_the_experts(kernels: Any, team: Any) -> None:
    scores = np.full((1, 6), np.nan, np.float32)
    chosen, made = np.full((1, 3), 99, np.uint64), np.zeros((1, 3), np.float32)
    run(team, [kernels.address("route"), 1, address(scores), address(chosen), address(made), 1, 6, 3])
    assert chosen.max() < 6
    assert np.isnan(made).all()


@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("rows", [8, 21])
def test_experts(kernels: Any, team: Any, name: str, rows: int) -> None:
    columns, count, used, tokens = 256, 5, 2, 3
    kind, stored, values = stored_weights(name, rows * count, columns)
    matrices = values.reshape(count, rows, columns).astype(np.float64)
    generator = np.random.default_rng(20)
    chosen = np.array([[4, 0], [1, 2], [3, 4]], np.uint64)
    x, wide, rest = (
        generator.standard_normal(shape).astype(np.float32)
        for shape in ((tokens, columns), (tokens, used, columns), (tokens, rows))
    )
    shares = generator.random((tokens, used)).astype(np.float32)
    apart = np.zeros((tokens, used, rows), np.float32)
    kernel, shape = kernels.address("experts", kind), [rows, columns, tokens, used, address(chosen)]
    run(team, [kernel, 4, address(apart), address(x), address(stored), *shape])
    near = {"rtol": 1e-4, "atol": 2e-5 * np.abs(values).max() * columns**0.5}
    np.testing.assert_allclose(apart, np.einsum("tsrc,tc->tsr", matrices[chosen], x), **near)
    before = rest.copy()
    last = [address(shares), address(rest)]
    run(team, [kernel, 4, address(rest), address(wide), address(stored), *shape, *last])
    mixed = np.einsum("tsrc,tsc,ts->tr", matrices[chosen], wide, shares)
    np.testing.assert_allclose(rest, before + mixed, **near)


def test_slots_are_grouped_by_their_experts(kernels: Any, team: Any) -> None:
    chosen = np.array([[3, 0], [1, 3], [3, 1], [5, 3]], np.uint64)
    order, starts = np.zeros(8, np.uint64), np.full(7, 99, np.uint64)
    run(team, [kernels.address("group"), 1, *map(address, (chosen, order, starts)), 8, 6])
    np.testing.assert_array_equal(starts, [0, 1, 3, 3, 7, 7, 8])
    np.testing.assert_array_equal(order, np.argsort(chosen.reshape(-1), kind="stable"))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows", [8, 21])
def test_experts_of_a_chunk_give_the_bits_of_row_by_row(
    kernels: Any, team: Any, name: str, rows: int
) -> None:
    """Experts with no slot, one, a few, and most of them; in place and apart; rows that fill no panel."""
    from swactor_worker_tinygrad.native import expert_words

    columns, count, used, tokens = 256, 7, 2, 15
    kind, stored, _ = stored_weights(name, rows * count, columns)
    generator = np.random.default_rng(21)
    chosen = np.stack([generator.permutation([0, 2, 2, 4, 5])[:2] for _ in range(tokens)]).astype(np.uint64)
    chosen[:, 0] = np.where(np.arange(tokens) < 11, 6, chosen[:, 0])
    chosen[3, 1] = 3
    x, wide, rest = (
        generator.standard_normal(shape).astype(np.float32)
        for shape in ((tokens, columns), (tokens, used, columns), (tokens, rows))
    )
    shares = generator.random((tokens, used)).astype(np.float32)
    order, starts = np.zeros(tokens * used, np.uint64), np.zeros(count + 1, np.uint64)
    run(team, [kernels.address("group"), 1, *map(address, (chosen, order, starts)), tokens * used, count])
    scratch = np.zeros(expert_words(columns, tokens * used, threads=4), np.float32)
    grouped = [address(order), address(starts), count, address(scratch)]
    kernel, shape = kernels.address("experts", kind), [rows, columns, tokens, used, address(chosen)]
    made = []
    for more in ([], grouped):
        apart, mixed = np.zeros((tokens, used, rows), np.float32), rest.copy()
        run(team, [kernel, 3, address(apart), address(x), address(stored), *shape, 0, 0, *more])
        last = [address(shares), address(mixed)]
        run(team, [kernel, 3, address(mixed), address(wide), address(stored), *shape, *last, *more])
        made.append((apart, mixed))
    for one, other in zip(*made, strict=True):
        assert one.any()
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("count", [16, 5, 1000])
def test_gate(kernels: Any, team: Any, count: int) -> None:
    generator = np.random.default_rng(7)
    gate, up = (generator.uniform(-30, 30, count).astype(np.float32) for _ in range(2))
    expected = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    run(team, [kernels.address("gate"), 3, address(gate), address(up), count])
    np.testing.assert_allclose(gate, expected, rtol=2e-6, atol=1e-9)


def test_gate_at_the_ends_of_the_range(kernels: Any, team: Any) -> None:
    gate = np.array([-1e30, -200, -88, 0, 88, 200, 1e30, np.nan] * 2, np.float32)
    up = np.ones(16, np.float32)
    run(team, [kernels.address("gate"), 1, address(gate), address(up), 16])
    np.testing.assert_allclose(gate[:7], [0, 0, 0, 0, 88, 200, 1e30], atol=1e-5)
    assert np.isnan(gate[7])


def tiled(keys: np.ndarray) -> np.ndarray:
    """(context, kv_heads, key_dim) to the cache's (kv_heads, context / 16, key_dim, 16)."""
    context, kv_heads, key_dim = keys.shape
    return np.ascontiguousarray(keys.reshape(context // 16, 16, kv_heads, key_dim).transpose(2, 0, 3, 1))


@pytest.mark.parametrize(("key_dim", "value_dim", "rope_dims"), [(8, 8, 8), (24, 20, 20), (64, 128, 64)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (5, 1), (9, 3)])
@pytest.mark.parametrize(
    ("tokens", "position", "window", "cap", "halves"),
    [
        (1, 0, 0, 0.0, 0),
        (1, 111, 21, 1.5, 1),
        (3, 15, 1, 0.0, 1),
        (3, 15, 0, 0.0, 0),
        (7, 80, 21, 1.5, 1),
        (7, 80, 0, 0.0, 0),
    ],
)
def test_rope_and_attention(
    kernels: Any,
    team: Any,
    key_dim: int,
    value_dim: int,
    rope_dims: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    position: int,
    window: int,
    cap: float,
    halves: int,
) -> None:
    from swactor_worker_tinygrad.native import float_bits, shares_words

    context, group = 112, heads // kv_heads
    generator = np.random.default_rng(8)

    def random(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    q, k, v = (
        random(tokens, heads, key_dim),
        random(tokens, kv_heads, key_dim),
        random(tokens, kv_heads, value_dim),
    )
    keys, values = random(context, kv_heads, key_dim), random(context, kv_heads, value_dim)
    keys[position:], values[position + tokens :] = np.nan, np.nan  # what must never count
    angle = random(context, rope_dims // 2)
    cosines, sines = np.cos(angle), np.sin(angle)
    rows = slice(position, position + tokens)

    def turned(x: np.ndarray) -> np.ndarray:
        result = x.astype(np.float64)
        half = rope_dims // 2
        first = slice(0, half) if halves else slice(0, rope_dims, 2)
        second = slice(half, rope_dims) if halves else slice(1, rope_dims, 2)
        a, b = result[..., first].copy(), result[..., second].copy()
        cos, sin = cosines[rows, None, :], sines[rows, None, :]
        result[..., first], result[..., second] = a * cos - b * sin, a * sin + b * cos
        return result

    expected_keys, expected_values = keys.copy(), values.copy()
    expected_keys[rows], expected_values[rows] = turned(k), v
    expected = np.zeros((tokens, heads, value_dim))
    for t in range(tokens):
        for h in range(heads):
            seen = slice(max(0, position + t + 1 - window) if window else 0, position + t + 1)
            scores = expected_keys[seen, h // group].astype(np.float64) @ turned(q)[t, h] * 0.25
            scores = cap * np.tanh(scores / cap) if cap else scores
            shares = np.exp(scores - scores.max())
            expected[t, h] = shares @ expected_values[seen, h // group] / shares.sum()

    key_cache, value_cache = tiled(keys), np.ascontiguousarray(values.transpose(1, 0, 2))
    out, place = np.zeros((tokens, heads, value_dim), np.float32), np.array([position], np.uint64)
    scratch = np.zeros(shares_words(context, team.threads), np.float32)
    cache = [address(key_cache), address(value_cache)]
    shape = [address(place), tokens, heads, kv_heads, key_dim, value_dim, context]
    tables = [address(cosines), address(sines)]
    softmax = [float_bits(0.25), address(scratch), window, float_bits(cap)]
    turn = [address(q), address(k), address(v), *tables, *cache, *shape, rope_dims, halves]
    run(
        team,
        [kernels.address("rope"), 2, *turn],
        [kernels.address("attention"), 4, address(out), address(q), *cache, *shape, *softmax],
    )
    np.testing.assert_allclose(key_cache, tiled(expected_keys), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(value_cache, expected_values.transpose(1, 0, 2))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_a_team_gives_the_bits_of_one_thread_every_time(kernels: Any) -> None:
    from swactor_worker_tinygrad.native import Team

    kind, stored, _ = stored_weights("Q8_0", 203, 64)
    x = np.random.default_rng(9).standard_normal((1, 64)).astype(np.float32)
    alone = Team(kernels, 1)
    expected = multiply(kernels, alone, kind, stored, x)
    for threads in (2, 5):
        team = Team(kernels, threads)
        for _ in range(200):
            assert multiply(kernels, team, kind, stored, x, parts=4 * threads).tobytes() == expected.tobytes()
        team.close()
        team.close()


def test_kernels_are_built_once(kernels: Any) -> None:
    assert kernels.function("norm") is kernels.function("norm")
    assert kernels.address("norm") != kernels.address("gate")


PLAIN = [
    (name, None) for name in ("attention", "cap", "gate", "group", "norm", "rope", "round", "route", "run")
]
# one of each way to look values up, and the largest codebook
CODED_KERNELS = [("matmul", 17), ("experts", 21), ("rows", 29), ("rows", 34), ("matmul", 40)]
OLD_PROCESSORS = (
    ["x86-64", "x86-64-v3", "x86-64-v4", "alderlake"] if platform.machine() == "x86_64" else ["native"]
)
# by what the names mean: `clang` is one of the others
COMPILERS_HERE = list(
    {os.path.realpath(path): name for name in reversed(COMPILERS) if (path := shutil.which(name))}.values()
)


@pytest.mark.parametrize("compiler", COMPILERS_HERE)
@pytest.mark.parametrize("march", OLD_PROCESSORS)
def test_sources_compile_for_old_compilers_and_processors(compiler: str, march: str) -> None:
    from swactor_worker_tinygrad.native import source

    weights = (("matmul", 1), ("matmul_lanes", 3), ("matmul_fast", 8), ("experts", 12), *CODED_KERNELS)
    for kernel, kind in (*weights, *PLAIN):
        built = subprocess.run(
            [
                compiler,
                "-c",
                "-x",
                "c",
                "-O1",
                "-ffreestanding",
                "-nostdlib",
                f"-march={march}",
                "-",
                "-o",
                "-",
            ],
            input=source(kernel, kind).encode(),
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert built.returncode == 0, built.stderr.decode()
