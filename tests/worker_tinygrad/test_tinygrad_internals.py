"""Each use of tinygrad below its public surface still does what the code relies on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def internals(backend: Any) -> Any:
    from swactor_worker_tinygrad import internals

    return internals


def filled(internals: Any, data: np.ndarray) -> tuple[Any, Any]:
    buffer = internals.new_buffer("CPU", data.nbytes)
    internals.write_bytes(buffer, 0, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    dtype = {np.dtype("f4"): internals.FLOAT32, np.dtype("u1"): internals.UINT8}[data.dtype]
    return buffer, internals.tensor_of(buffer, data.shape, dtype)


def test_open_device_names_it(internals: Any) -> None:
    assert internals.open_device("CPU") == "CPU"


def test_new_buffer_is_allocated_and_full_devices_raise(internals: Any) -> None:
    buffer = internals.new_buffer("CPU", 64)
    assert buffer.is_allocated()
    assert buffer.nbytes == 64
    with pytest.raises(MemoryError):
        internals.new_buffer("CPU", 1 << 60)


@pytest.fixture(params=["direct", "staged"])
def way(request: pytest.FixtureRequest, internals: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Buffers that the host reaches, and buffers that it does not (as on CUDA)."""
    if request.param == "staged":
        monkeypatch.setattr(internals, "bytes_view", lambda buffer: None)
    return request.param


def test_bytes_go_in_and_out_at_offsets(internals: Any, way: str) -> None:
    buffer = internals.new_buffer("CPU", 32)
    internals.write_bytes(buffer, 0, memoryview(bytes(32)))
    internals.write_bytes(buffer, 8, memoryview(b"swactor!"))  # a read-only source
    out = bytearray(16)
    internals.read_bytes(buffer, 4, memoryview(out))
    assert bytes(out) == b"\0\0\0\0swactor!\0\0\0\0"
    assert (internals.bytes_view(buffer) is None) == (way == "staged")


def test_copy_within_device(internals: Any, way: str) -> None:
    source, _ = filled(internals, np.arange(16, dtype=np.uint8))
    target, _ = filled(internals, np.zeros(16, np.uint8))
    internals.copy_within_device(target, 4, source, 8, 4)
    out = bytearray(16)
    internals.read_bytes(target, 0, memoryview(out))
    assert bytes(out) == bytes(4) + bytes([8, 9, 10, 11]) + bytes(8)


def test_tensor_of_shares_memory_and_checks_bounds(internals: Any) -> None:
    buffer, tensor = filled(internals, np.arange(6, dtype=np.float32).reshape(2, 3))
    view = internals.bytes_view(buffer)
    np.frombuffer(view, np.float32)[5] = 50.0
    assert tensor.numpy()[1, 2] == 50.0
    part = internals.tensor_of(buffer, (2,), internals.FLOAT32, 8)
    np.testing.assert_array_equal(part.numpy(), [2, 3])
    with pytest.raises(ValueError, match="does not fit"):
        internals.tensor_of(buffer, (2,), internals.FLOAT32, 20)


def test_buffer_and_address_of_a_tensor(internals: Any) -> None:
    buffer, tensor = filled(internals, np.arange(4, dtype=np.float32))
    assert internals.buffer_of(tensor).base is buffer
    array = np.frombuffer(internals.bytes_view(buffer), np.uint8)
    assert (
        internals.address_of(buffer) == array.ctypes.data == internals.address_of(internals.buffer_of(tensor))
    )


def test_a_tensor_in_memory_reads_foreign_memory(internals: Any) -> None:
    data = np.arange(64, dtype=np.uint8)
    data.flags.writeable = False
    tensor = internals.tensor_in_memory(data.ctypes.data + 32, 32, (32,), internals.UINT8, device="CPU")
    np.testing.assert_array_equal((tensor + 1).numpy(), data[32:] + 1)
    with pytest.raises(ValueError, match="does not fit 32 bytes"):
        internals.tensor_in_memory(data.ctypes.data, 32, (9,), internals.FLOAT32, device="CPU")


def test_release_unused_empties_the_allocator(internals: Any) -> None:
    from tinygrad import Device

    nbytes = 12345 * 16
    buffer = internals.new_buffer("CPU", nbytes)
    del buffer
    assert any(size == nbytes and kept for (size, _), kept in Device["CPU"].allocator.cache.items())
    internals.release_unused("CPU")
    assert not any(Device["CPU"].allocator.cache.values())


def test_dequantise_knows_its_types(internals: Any) -> None:
    from gguf import GGMLQuantizationType, dequantize, quantize

    types = internals.graph_types()
    assert {0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30} <= types
    assert 10 not in types
    values = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    for name in ("F16", "BF16", "Q4_1", "Q8_0"):
        kind = GGMLQuantizationType[name]
        stored = np.ascontiguousarray(quantize(values, kind)).reshape(-1).view(np.uint8)
        _, blob = filled(internals, stored)
        expected = dequantize(stored.reshape(4, -1), kind).reshape(-1)
        np.testing.assert_array_equal(internals.dequantise(blob, 256, int(kind)).numpy(), expected)


def graph_inputs(internals: Any, seed: int) -> tuple[list[np.ndarray], list[Any]]:
    generator = np.random.default_rng(seed)
    shapes = [(2, 4), (4, 4), (8, 4), (2, 4)]
    arrays = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    return arrays, [filled(internals, array)[1] for array in arrays]


def stepped(inputs: list[Any], place: Any) -> None:
    x, weight, cache, result = inputs
    cache[place : place + 2].assign(x @ weight).realize()
    result.assign(x + cache[: place + 2].sum(0)).realize()


@pytest.mark.parametrize("direct", [True, False])
def test_a_graph_replays_over_other_buffers_and_places(internals: Any, direct: bool) -> None:
    _, sample = graph_inputs(internals, 0)
    variables = {"place": internals.position_variable("place", 6)}
    graph = internals.Graph(stepped, sample, variables, direct=direct)
    assert graph.kernels >= 2
    arrays, inputs = graph_inputs(internals, 1)
    bound = graph.bind(inputs)
    assert bound.direct == direct
    x, weight, cache, _ = arrays
    for place in (3, 0, 6):
        bound.run({"place": place})
        cache[place : place + 2] = x @ weight
        np.testing.assert_allclose(inputs[2].numpy(), cache, atol=1e-5)
        np.testing.assert_allclose(inputs[3].numpy(), x + cache[: place + 2].sum(0), atol=1e-5)


def test_replays_one_behind_the_other_are_one(internals: Any) -> None:
    """The second reads what the first has written, at each of its places."""
    _, sample = graph_inputs(internals, 0)
    arrays, inputs = graph_inputs(internals, 1)
    x, weight, cache, _ = arrays
    variables = {"place": internals.position_variable("place", 6)}
    graph = internals.Graph(stepped, sample, variables, direct=False)
    then, other = filled(internals, np.zeros_like(x))[1], filled(internals, cache)[1]
    bound = [graph.bind(inputs), graph.bind([inputs[3], inputs[1], other, then])]
    [joined] = internals.in_one(bound)
    copied = cache.copy()
    for place in (3, 0, 6):
        joined.run({"place": place})
        cache[place : place + 2] = x @ weight
        between = x + cache[: place + 2].sum(0)
        copied[place : place + 2] = between @ weight
        np.testing.assert_allclose(then.numpy(), between + copied[: place + 2].sum(0), atol=1e-4)
    direct = [internals.Graph(stepped, sample, variables).bind(inputs) for _ in range(2)]
    assert internals.in_one(direct) == direct


def test_a_captured_graph_is_kept_for_the_next_process(internals: Any, tmp_path: Path) -> None:
    """The second process with the same key captures nothing and computes the same; another key, another
    shape, or another bound of the variable is captured anew."""
    code = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from swactor_worker_tinygrad import environment, settings\n"
        "environment.prepare(settings.read_settings({}))\n"
        "from swactor_worker_tinygrad import internals\n"
        "internals.open_device('CPU')\n"
        "from test_tinygrad_internals import filled, graph_inputs, stepped\n"
        "def made(key, last=6):\n"
        "    variables = {'place': internals.position_variable('place', last)}\n"
        "    return internals.Graph(stepped, graph_inputs(internals, 0)[1], variables, key=key)\n"
        "graph = made('one')\n"
        "inputs = graph_inputs(internals, 1)[1]\n"
        "bound = graph.bind(inputs)\n"
        "for place in (3, 0, 6):\n"
        "    bound.run({'place': place})\n"
        "print(graph.captured, inputs[2].numpy().tobytes().hex(), inputs[3].numpy().tobytes().hex())\n"
        "print(made('').captured, made('two' + sys.argv[2]).captured, made('one', 5).captured)\n"
    )
    said = []
    for run in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent), str(run)],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    assert said[0][0].split()[0] == "True"
    assert said[1][0].split()[0] == "False"
    assert said[0][0].split()[1:] == said[1][0].split()[1:]
    assert said[0][1] == "True True True"
    assert said[1][1] == "True True False"


def test_a_graph_over_values_that_capturing_made_is_not_kept(internals: Any) -> None:
    """What lies in a buffer of its own before the first kernel would not be there in the next process."""
    _, held = filled(internals, np.arange(8, dtype=np.float32))

    def added(inputs: list[Any]) -> None:
        inputs[1].assign(inputs[0] + held).realize()

    for _ in range(2):
        inputs = [filled(internals, np.full(8, value, np.float32))[1] for value in (1, 0)]
        graph = internals.Graph(added, inputs, {}, key=f"held {os.getpid()}")
        assert graph.captured
        graph.bind(inputs).run({})
        np.testing.assert_array_equal(inputs[1].numpy(), np.arange(8) + 1)


def test_what_capturing_leaves_in_caches_is_let_go(internals: Any) -> None:
    """And is not needed: the same is captured again, with the same result."""
    from tinygrad import Tensor
    from tinygrad.codegen import to_program_cache
    from tinygrad.engine.realize import runtime_cache
    from tinygrad.schedule import indexing, schedule_cache

    def doubled(inputs: list[Tensor]) -> None:
        inputs[1].assign(inputs[0].reshape(3, 2).permute(1, 0).reshape(6) * 2).realize()

    results = []
    for _ in range(2):
        x, y = (filled(internals, data)[1] for data in (np.arange(6, dtype="f4"), np.zeros(6, "f4")))
        graph = internals.Graph(doubled, [x, y], {})
        assert not any((to_program_cache, schedule_cache, runtime_cache))
        assert indexing.apply_movement_op.cache_info().currsize == 0
        graph.bind([x, y]).run({})
        results.append(y.numpy().tolist())
    assert results == [[0, 4, 8, 2, 6, 10]] * 2
    Tensor([1.0, 2.0]).sum().realize()
    assert to_program_cache  # these are the caches that tinygrad fills
    assert schedule_cache
    internals.forget_captures()
    assert not any((to_program_cache, schedule_cache, runtime_cache))


def test_a_variable_of_one_value_is_widened(internals: Any) -> None:
    variable = internals.position_variable("place", 0)
    assert (variable.vmin, variable.vmax) == (0, 1)


def test_native_functions_run_and_are_cached(internals: Any) -> None:
    import ctypes

    from tinygrad.helpers import diskcache_get

    text = "void twice(unsigned long long *p) { p[0] *= 2; }"
    function = internals.NativeFunction(text, "twice")
    cell = np.array([21], np.uint64)
    function.function(ctypes.c_uint64(cell.ctypes.data))
    assert cell[0] == 42
    assert function.address > 0
    compiler = internals.cpu_compiler()
    assert diskcache_get(compiler.cachekey, text) is not None


def test_the_cpu_device_runs_what_clang_builds(internals: Any) -> None:
    """`WorkerSettings.has_native_kernels` says so without asking tinygrad."""
    from tinygrad import Device

    assert type(Device["CPU"].renderer).__name__ == "ClangRenderer"


CALLS_OTHERS = "extern double cos(double); void far(double *p) { p[0] = cos(p[0]); }"
HAS_CONSTANTS = """
static const unsigned long long table[4] = {3, 1, 4, 1};
void near(unsigned long long *p) { p[0] = table[p[0] & 3]; }
"""


def test_code_that_may_lie_anywhere_has_an_image(internals: Any) -> None:
    # not loaded: others may lie too far away for tinygrad's loader
    assert internals.portable_code(internals.cpu_compiler().compile_cached(CALLS_OTHERS)) is None
    image = internals.NativeFunction(HAS_CONSTANTS, "near").image
    assert image is not None
    assert (4).to_bytes(8, "little") in image


def test_the_devices_own_programs_are_generated_once_per_host(tmp_path: Path) -> None:
    """A second process that opens the CPU device finds the programs that the first one generated."""
    code = (
        "from swactor_worker_tinygrad import environment, settings\n"
        "environment.prepare(settings.read_settings({}))\n"
        "from swactor_worker_tinygrad import internals\n"
        "from tinygrad.runtime import ops_cpu\n"
        "made, generate = [], ops_cpu.do_to_program\n"
        "def counted(*given): made.append(given); return generate(*given)\n"
        "ops_cpu.do_to_program = counted\n"
        "assert internals.open_device('CPU') == 'CPU'\n"
        "assert ops_cpu.do_to_program is counted\n"
        "from tinygrad import Tensor\n"
        "assert (Tensor([1, 2, 3]) * 2).tolist() == [2, 4, 6]\n"
        "print(len(made))"
    )
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        counts.append(int(done.stdout))
    assert counts == [4, 0]
