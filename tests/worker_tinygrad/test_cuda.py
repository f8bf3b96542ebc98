"""The way to a GPU, as far as it goes without one: tinygrad's own CUDA device, its sources and graphs, over a
stand-in for NVIDIA's driver and compiler (`cuda/`) that allows a host less than a device does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from swactor_core.checks import CheckStatus
from swactor_core.errors import ConfigError, ResourceError
from swactor_core.orchestrator.requests import PREFILL_CHUNK
from swactor_worker_tinygrad import doctor, drivers, environment, plugin
from swactor_worker_tinygrad.settings import read_settings

HERE, DATA = Path(__file__).parent, Path(__file__).parent.parent / "data"
LIBRARIES = {"driver": "libcuda.so.1", "nvrtc": "libnvrtc.so.12"}
MODEL, QUANTISED = "tiny/llama-gqa", "quants/Q4_0"


def reference(name: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return made


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with one CUDA device, whose kernels are built once for all tests."""
    folder = tmp_path_factory.mktemp("cuda")
    clang = environment.find_compiler()
    compiler = [clang, "--driver-mode=g++", "-std=c++17", "-O1", "-Wall", "-Werror"]
    for source, library in LIBRARIES.items():
        code = str(HERE / "cuda" / f"{source}.cpp")
        command = [*compiler, "-fPIC", "-shared", "-o", str(folder / library), code]
        subprocess.run(command, check=True, timeout=60)
    return {
        "LD_LIBRARY_PATH": str(folder),
        "STAND_IN_CUDA": str(HERE / "cuda"),
        "STAND_IN_CUDA_FILES": str(folder),
        "STAND_IN_CUDA_COMPILER": clang,
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
    variables: dict[str, str], *options: str, program: tuple[str, ...] = ("-m", "swactor_cli")
) -> tuple[int, dict[str, Any], str]:
    """Exit code, result and stderr of the command with `--device CUDA`, for the model's reference."""
    made = reference(MODEL)
    command = [sys.executable, *program, "run", str(DATA / f"{MODEL}.gguf"), "--json"]
    command += ["--prompt-ids", ",".join(map(str, made["prompt"])), "--max-tokens", str(len(made["greedy"]))]
    command += ["--temperature", "0", "--ignore-eos", *options]
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


STAGE = """
import ctypes
import json
from pathlib import Path
from stage_support import Pipeline
from swactor_worker_tinygrad import create

backend = create({"device": "CUDA"})
from swactor_worker_tinygrad import internals
TinyJit, captured = internals.TinyJit, []
internals.TinyJit = lambda function: captured.append(1) or TinyJit(function)
driver = ctypes.CDLL("libcuda.so.1")
queued = []

def held():
    backend.bridge.finish()
    free, whole = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(whole)) == 0
    return whole.value - free.value

def counted(execute):
    def counting(*arguments):
        made = execute(*arguments)
        queued.append(driver.stand_in_queued())
        return made
    return counting

made = []
for model, stages, chunk, times, prompt, count in RUNS:
    for _ in range(times):
        context = len(prompt) + count
        pipeline = Pipeline(backend, Path(model), stages, max_context=context, chunk=chunk)
        if stages > 1:
            pipeline.roles[0].execute = counted(pipeline.roles[0].execute)
        tokens = pipeline.generate(prompt, count)
        most = held()
        pipeline.close()
        made.append({"captured": len(captured), "tokens": tokens, "after": held(), "most": most})
print(json.dumps([made, queued]))
"""


@dataclass(frozen=True)
class Start:
    """Of a process that computes models one after the other: what it has captured so far, the tokens, and
    what the device held after a model was closed and before; and what was queued after each step of a first
    stage."""

    models: list[dict[str, Any]]
    queued: list[int]


@pytest.fixture(scope="session")
def starts(stand_in: dict[str, str]) -> list[Start]:
    """Two processes, one after the other: the model in two stages, of the first one three times; then a
    quantised one in one stage, row by row: what takes the time is to capture."""
    made = []
    for times in (3, 1):
        runs = [(MODEL, 2, PREFILL_CHUNK, times), (QUANTISED, 1, 1, 1)]
        all_of = [
            (str(DATA / f"{name}.gguf"), *how, reference(name)["prompt"], len(reference(name)["greedy"]))
            for name, *how in runs
        ]
        made.append(Start(*json.loads(python(STAGE.replace("RUNS", repr(all_of)), stand_in))))
    return made


@pytest.fixture(scope="session")
def tuned(stand_in: dict[str, str], starts: list[Start]) -> dict[str, str]:
    """The machine, with the graphs of the model: runs of it read what `starts` has captured."""
    return stand_in


def test_a_closed_stage_leaves_nothing_on_the_device(starts: list[Start]) -> None:
    times = starts[0].models[:3]
    after, most = [each["after"] for each in times], [each["most"] for each in times]
    assert most[0] > 500_000, "two stages of 0.5 MB"
    assert after[2] == after[1] == after[0] < 100_000, times
    assert max(most) < 1.01 * most[0], times


def test_a_second_start_captures_nothing(starts: list[Start]) -> None:
    counts = [[model["captured"] for model in start.models] for start in starts]
    assert counts[0] == [3, 3, 3, 3 + 2], "one row, a chunk of rows, the head; one row, the head"
    assert counts[1] == [0, 0]


def test_stages_of_both_starts_give_the_tokens_of_the_reference(starts: list[Start]) -> None:
    for start in starts:
        *whole, quantised = (model["tokens"] for model in start.models)
        assert whole == [reference(MODEL)["greedy"]] * len(whole)
        assert quantised == reference(QUANTISED)["greedy"]


def test_a_stage_has_done_its_step_when_it_says_so(starts: list[Start]) -> None:
    """Work that is only queued would be the next stage's time, or its failure."""
    steps = len(reference(MODEL)["greedy"])
    assert [start.queued for start in starts] == [[0] * 3 * steps, [0] * steps]


def test_nodes_give_the_tokens_of_the_reference(tuned: dict[str, str]) -> None:
    code, result, said = run(tuned, "--nodes", "2")
    assert (code, result["outcome"]) == (0, "completed"), said
    assert result["token_ids"] == reference(MODEL)["greedy"]
    assert [stage["kernels"] for stage in result["stats"]["stages"]] == ["graph", "graph"]


def test_a_lost_device_ends_the_run_with_its_own_words(tuned: dict[str, str]) -> None:
    code, result, said = run({**tuned, "STAND_IN_CUDA_LAUNCHES": "200"})
    assert (code, result["outcome"]) == (1, "faulted")
    assert "CUDA Error 700, an illegal memory access was encountered" in result["fault"]["detail"]
    assert "Traceback" not in said


LOADED = """
from pathlib import Path
from stage_support import config_of, manifest_of
from swactor_core.spi.worker import RoleError
from swactor_worker_tinygrad import create

backend, said = create({"device": "CUDA"}), []
config = config_of(manifest_of(Path(MODEL)), max_context=CONTEXT, chunk=CHUNK)
try:
    backend.configure(config, progress=said.append, should_abort=lambda: False)
except RoleError as error:
    print(said[-1].phase, error.reason, error.message)
"""


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("MEMORY", 300000, "weights DeviceOutOfMemory the device has not enough memory for this stage"),
        ("LAUNCHES", 20, "compile BackendError RuntimeError: CUDA Error 700, an illegal memory access"),
    ],
)
def test_a_device_that_is_full_or_lost_while_a_stage_is_loaded(
    variable: str, value: int, error: str, tuned: dict[str, str]
) -> None:
    made = reference(MODEL)
    code = LOADED.replace("MODEL", repr(str(DATA / f"{MODEL}.gguf"))).replace("CHUNK", str(PREFILL_CHUNK))
    code = code.replace("CONTEXT", str(len(made["prompt"]) + len(made["greedy"])))
    said = python(code, {**tuned, f"STAND_IN_CUDA_{variable}": str(value)})
    assert said.startswith(error), said


def test_a_device_that_is_not_there(stand_in: dict[str, str]) -> None:
    code, result, said = run({**stand_in, "STAND_IN_CUDA_DEVICES": "1"}, "--device", "CUDA:1")
    assert code == 1
    error = "device 'CUDA:1' cannot be opened: RuntimeError: CUDA Error 101, invalid device ordinal"
    assert error in result["fault"]["detail"]
    assert "`nvidia-smi` lists what the driver has" in said


def test_a_machine_whose_driver_has_no_device(stand_in: dict[str, str]) -> None:
    code = """
from swactor_core.errors import ResourceError
from swactor_worker_tinygrad import create
try:
    create({"device": "CUDA"}).bridge
except ResourceError as error:
    print(error.message)
"""
    said = python(code, {**stand_in, "STAND_IN_CUDA_DEVICES": "0"})
    error = "CUDA Error 100, no CUDA-capable device is detected"
    assert said.strip() == f"device 'CUDA' cannot be opened: RuntimeError: {error}"


def test_a_second_device_is_another_one(stand_in: dict[str, str]) -> None:
    code = "from swactor_worker_tinygrad import create; print(create({'device': 'CUDA:1'}).bridge.device)"
    assert python(code, {**stand_in, "STAND_IN_CUDA_DEVICES": "2"}).strip() == "CUDA:1"


def test_nothing_is_started_without_a_driver() -> None:
    program = "from swactor_worker_tinygrad import drivers; drivers.cuda_driver = lambda: None\n"
    program += "import swactor_cli.__main__"
    code, result, said = run({}, program=("-c", program))
    assert (code, result) == (1, {})
    assert "NVIDIA's driver (libcuda.so.1) is not found on this machine" in said
    assert "docker run --gpus all" in said


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for libraries and headers, the only one of its kind on the machine."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.setattr(drivers, "_FOLDERS", ())
    monkeypatch.setattr(drivers, "_TOOLKITS", ())
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
    settings = read_settings({"device": "CUDA"})
    put(machine / "libcuda.so.1")
    environment.check_machine(settings)
    assert environment.prepare(settings)["DEV"] == "CUDA:PTX"
    put(machine / "libnvrtc.so.12")
    assert environment._selection(settings) == "CUDA:PTX", "NVRTC without CUDA's headers"
    put(machine / "include" / "cuda_fp16.h", b"")
    assert environment._selection(settings) == "CUDA"
    assert environment._selection(read_settings({"device": "CUDA:1"})) == "CUDA"
    assert environment._selection(read_settings({"device": "CUDA:PTX"})) == "CUDA:PTX"


def test_libraries_are_found_where_tinygrad_finds_them(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    from tinygrad.helpers import getenv
    from tinygrad.runtime.support.c import DLL

    machine, name = tmp_path, "probe"  # no machine has one of this name
    monkeypatch.setenv("LD_LIBRARY_PATH", str(machine))

    def both() -> Path | None:
        getenv.cache_clear()
        found, theirs = drivers.library(name), DLL.findlib(name, [name])
        assert (None if found is None else str(found)) == theirs
        return found

    assert both() is None
    put(machine / "libprobe.so", b"INPUT(-lprobe)")  # a script of the linker
    put(machine / "libproberun.so.12")
    assert both() is None
    library = put(machine / "libprobe.so.1")
    assert both() == library
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    first = put(elsewhere / "libprobe.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{machine}:{elsewhere}")
    assert both() == library
    monkeypatch.setenv("PROBE_PATH", str(elsewhere))
    assert both() == first
    monkeypatch.setenv("PROBE_PATH", str(put(elsewhere / "mine")))
    assert both() == elsewhere / "mine"
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
        read_settings({"device": device})


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
