"""The way to a GPU, as far as it goes without one: tinygrad's own CUDA device, its sources and graphs, over a
stand-in for NVIDIA's driver and compiler (`cuda/`) that allows a host less than a device does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from swactor_core.checks import CheckStatus
from swactor_core.errors import ConfigError, ResourceError
from swactor_worker_tinygrad import doctor, drivers, environment, plugin

HERE, DATA = Path(__file__).parent, Path(__file__).parent.parent / "data"
LIBRARIES = {"driver": "libcuda.so.1", "nvrtc": "libnvrtc.so.12"}


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with one CUDA device, whose kernels are built once for all tests."""
    folder = tmp_path_factory.mktemp("cuda")
    for source, library in LIBRARIES.items():
        compiler = ["clang++", "-std=c++17", "-O1", "-Wall", "-Werror", "-fPIC", "-shared"]
        command = [*compiler, "-o", str(folder / library), str(HERE / "cuda" / f"{source}.cpp")]
        subprocess.run(command, check=True, timeout=60)
    return {
        "LD_LIBRARY_PATH": str(folder),
        "STAND_IN_CUDA": str(HERE / "cuda"),
        "CUDA_PATH": str(HERE / "cuda"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def python(code: str, variables: dict[str, str]) -> str:
    """What `code` printed, in a process of its own: one process serves one device."""
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(
    model: Path, variables: dict[str, str], *options: str, ids: str = "1,2,3,4", tokens: int = 8
) -> tuple[int, dict[str, Any], str]:
    """Exit code, result and stderr of the command with `--device CUDA`."""
    command = [sys.executable, "-m", "swactor_cli", "run", str(model), "--prompt-ids", ids, "--json"]
    command += ["--max-tokens", str(tokens), "--temperature", "0", "--ignore-eos", *options]
    if "--device" not in options:
        command += ["--device", "CUDA"]
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


@pytest.mark.parametrize(
    ("name", "nodes"), [("tiny/llama-gqa", 1), ("tiny/llama-gqa", 2), ("quants/Q4_1", 1)]
)
def test_tokens_are_those_of_the_reference(name: str, nodes: int, stand_in: dict[str, str]) -> None:
    reference = json.loads((DATA / f"{name}.json").read_text())
    prompt = ",".join(map(str, reference["prompt"]))
    code, result, said = run(
        DATA / f"{name}.gguf", stand_in, "--nodes", str(nodes), ids=prompt, tokens=len(reference["greedy"])
    )
    assert (code, result["outcome"]) == (0, "completed"), said
    assert result["token_ids"] == reference["greedy"]
    stages = result["stats"]["stages"]
    assert [stage["kernels"] for stage in stages] == ["graph"] * nodes
    # work that was only queued would be counted where somebody waits for it: on the last stage, or nowhere
    assert all(stage["decode_seconds"] > 0.3 * stages[-1]["decode_seconds"] for stage in stages)


STAGE = """
import ctypes
from pathlib import Path
from stage_support import Pipeline
from swactor_worker_tinygrad import create

backend = create({"device": "CUDA"})
driver = ctypes.CDLL("libcuda.so.1")

def held():
    backend.bridge.finish()
    free, whole = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(whole)) == 0
    return whole.value - free.value

made = []
for _ in range(3):
    pipeline = Pipeline(backend, Path(MODEL), 2)
    GENERATE
    most = held()
    pipeline.close()
    made.append((held(), most))
print(made)
"""


def test_a_closed_stage_leaves_nothing_on_the_device(stand_in: dict[str, str]) -> None:
    code = STAGE.replace("MODEL", repr(str(DATA / "tiny/llama-gqa.gguf")))
    code = code.replace("GENERATE", "pipeline.generate([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 4)")
    made = eval(python(code, stand_in))  # a list of pairs of numbers
    after, most = zip(*made, strict=True)
    assert most[0] > 500_000, "two stages of 0.5 MB"
    assert after[2] == after[1] == after[0] < 100_000, made
    assert max(most) < 1.01 * most[0], made


KEPT = """
from pathlib import Path
from stage_support import Pipeline
from swactor_worker_tinygrad import create

backend = create({"device": "CUDA"})
from swactor_worker_tinygrad import internals
TinyJit, captured = internals.TinyJit, []
internals.TinyJit = lambda function: captured.append(function) or TinyJit(function)
pipeline = Pipeline(backend, Path(MODEL), 1)
print(len(captured), *GENERATE)
pipeline.close()
"""


def test_a_second_start_captures_nothing(stand_in: dict[str, str], tmp_path: Path) -> None:
    reference = json.loads((DATA / "tiny/llama-gqa.json").read_text())
    code = KEPT.replace("MODEL", repr(str(DATA / "tiny/llama-gqa.gguf")))
    code = code.replace("GENERATE", f"pipeline.generate({reference['prompt']}, {len(reference['greedy'])})")
    variables = {**stand_in, "XDG_CACHE_HOME": str(tmp_path)}
    first, second = (python(code, variables).split() for _ in range(2))
    assert int(first[0]) == 3, "one row, a chunk of rows, the head"
    assert int(second[0]) == 0
    assert first[1:] == second[1:] == [str(token) for token in reference["greedy"]]


def test_a_full_device_is_told_as_that(stand_in: dict[str, str]) -> None:
    code, result, said = run(DATA / "tiny/llama-gqa.gguf", {**stand_in, "STAND_IN_CUDA_MEMORY": "300000"})
    assert (code, result["outcome"]) == (1, "faulted")
    assert result["fault"]["reason"] == "DeviceOutOfMemory"
    assert "the device has not enough memory for this stage" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("launches", [20, 200])
def test_a_lost_device_ends_the_run_with_its_own_words(launches: int, stand_in: dict[str, str]) -> None:
    variables = {**stand_in, "STAND_IN_CUDA_LAUNCHES": str(launches)}
    code, result, said = run(DATA / "tiny/llama-gqa.gguf", variables, tokens=64)
    assert (code, result["outcome"]) == (1, "faulted")
    assert "CUDA Error 700, an illegal memory access was encountered" in result["fault"]["detail"]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("device", "devices", "error"),
    [
        ("CUDA", "0", "CUDA Error 100, no CUDA-capable device is detected"),
        ("CUDA:1", "1", "CUDA Error 101, invalid device ordinal"),
    ],
)
def test_a_device_that_is_not_there(device: str, devices: str, error: str, stand_in: dict[str, str]) -> None:
    variables = {**stand_in, "STAND_IN_CUDA_DEVICES": devices}
    code, result, said = run(DATA / "tiny/llama-gqa.gguf", variables, "--device", device)
    assert code == 1
    assert f"device '{device}' cannot be opened: RuntimeError: {error}" in result["fault"]["detail"]
    assert "`nvidia-smi` lists what the driver has" in said


def test_a_second_device_is_another_one(stand_in: dict[str, str]) -> None:
    code = "from swactor_worker_tinygrad import create; print(create({'device': 'CUDA:1'}).bridge.device)"
    assert python(code, {**stand_in, "STAND_IN_CUDA_DEVICES": "2"}).strip() == "CUDA:1"


def test_nothing_is_started_without_a_driver(tmp_path: Path) -> None:
    code, result, said = run(DATA / "tiny/llama-gqa.gguf", {"LD_LIBRARY_PATH": "", "CUDA_PATH": ""})
    assert (code, result) == (1, {})
    assert "NVIDIA's driver (libcuda.so.1) is not found on this machine" in said
    assert "docker run --gpus all" in said


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for libraries and headers, the only one of its kind on the machine."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    return tmp_path


def check_machine(settings: dict[str, str]) -> None:
    [worker] = plugin.swactor_register_workers()
    assert worker.check_machine is not None
    worker.check_machine(settings)


def put(path: Path, data: bytes = b"\x7fELF") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def test_kernels_are_ptx_where_cuda_cannot_be_compiled(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_prepared", [])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    settings = environment.read_settings({"device": "CUDA"})
    put(machine / "libcuda.so.1")
    environment.check_machine(settings)
    assert environment.prepare(settings)["DEV"] == "CUDA:PTX"
    put(machine / "libnvrtc.so.12")
    assert environment._selection(settings) == "CUDA:PTX", "NVRTC without CUDA's headers"
    put(machine / "include" / "cuda_fp16.h", b"")
    assert environment._selection(settings) == "CUDA"
    assert environment._selection(environment.read_settings({"device": "CUDA:1"})) == "CUDA"
    assert environment._selection(environment.read_settings({"device": "CUDA:PTX"})) == "CUDA:PTX"


def test_libraries_are_found_where_tinygrad_finds_them(
    machine: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    from tinygrad.helpers import getenv
    from tinygrad.runtime.support.c import DLL

    def both(name: str) -> Path | None:
        getenv.cache_clear()
        found, theirs = drivers.library(name), DLL.findlib(name, [name])
        assert (None if found is None else str(found)) == theirs
        return found

    assert both("cuda") is None
    put(machine / "libcuda.so", b"INPUT(-lcuda)")  # a script of the linker
    put(machine / "libcudart.so.12")
    assert both("cuda") is None
    library = put(machine / "libcuda.so.1")
    assert both("cuda") == library
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    first = put(elsewhere / "libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{machine}:{elsewhere}")
    assert both("cuda") == library
    monkeypatch.setenv("CUDA_PATH", str(elsewhere))
    assert both("cuda") == first
    monkeypatch.setenv("CUDA_PATH", str(put(elsewhere / "mine")))
    assert both("cuda") == elsewhere / "mine"
    getenv.cache_clear()


def test_the_doctor_says_which_way_kernels_go(machine: Path) -> None:
    assert "CUDA" not in doctor.check_devices().detail
    put(machine / "libcuda.so.1")
    result = doctor.check_devices()
    assert result.status is CheckStatus.OK
    assert "CUDA (as PTX: the toolkit is not here)" in result.detail
    put(machine / "libnvrtc.so.12")
    put(machine / "include" / "cuda_fp16.h", b"")
    assert doctor.check_devices().detail.endswith("CUDA")


@pytest.mark.parametrize("device", ["CL", "cl:0", "WEBGPU"])
def test_devices_whose_buffers_cannot_be_divided(device: str) -> None:
    with pytest.raises(ConfigError, match="tinygrad cannot divide its buffers"):
        environment.read_settings({"device": device})


def test_a_driver_is_asked_for_before_anything_is_fetched(machine: Path) -> None:
    with pytest.raises(ResourceError, match="is not found on this machine"):
        check_machine({"device": "CUDA"})


def test_whoever_names_no_device_hears_of_the_one_that_is_idle(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_machine({})
    put(machine / "libcuda.so.1")
    for named in ({"device": "CPU"}, {"device": "CUDA"}):
        check_machine(named)
    assert not caplog.records
    check_machine({"device": ""})
    assert "the CPU computes: --device CUDA uses it" in caplog.text


def test_the_stand_in_needs_what_the_project_needs() -> None:
    assert shutil.which("clang++") is not None
