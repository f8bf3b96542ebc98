"""`tune`: each stage is configured as a run would, and the next worker finds its kernels compiled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from swactor_cli.commands.tune import _Bar
from swactor_cli.output import Output
from swactor_core import free_memory
from swactor_core.messages import LoadPhase
from swactor_core.spi.worker import LoadProgress

TINY = Path(__file__).parent.parent / "data" / "tiny"


def tuned(said: Any) -> list[dict[str, Any]]:
    assert said.code == 0, said.err
    return [json.loads(line) for line in said.out.splitlines()]


def test_the_stages_of_a_plan_are_configured_one_after_the_other(call: Any) -> None:
    records = tuned(call("tune", TINY / "llama-tied.gguf", "--nodes", 3, "--worker", "echo", "--json"))
    assert [record["stage_index"] for record in records] == [0, 1, 2]
    assert records[0]["layer_start"] == 0
    assert all(record["type"] == "tuned" and record["kernels"] == "echo" for record in records)


def test_people_are_told_what_was_done(call: Any) -> None:
    said = call("tune", TINY / "llama-tied.gguf", "--nodes", 1, "--worker", "echo")
    assert said.code == 0, said.err
    assert said.out.startswith("stage 0, layers 0 to 3: ready after ")


def test_a_long_search_is_said_once_where_no_bar_is(capsys: pytest.CaptureFixture[str]) -> None:
    bar = _Bar(Output(), 2)
    with bar:
        for phase in (LoadPhase.WEIGHTS, LoadPhase.SEARCH, LoadPhase.SEARCH, LoadPhase.COMPILE):
            bar.show(LoadProgress(phase, 1, 2))
    assert capsys.readouterr().err == "stage 2: searching kernels, which takes minutes\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--nodes", "9"), 2, "9"),
        (("--worker-option", "kernels"), 2, "write it like threads=2"),
        (("--worker-option", "kernels=fast"), 2, "kernels = 'fast' is not known"),
        (("--worker", "nobody"), 2, "nobody"),
    ],
)
def test_what_cannot_be_tuned_is_said(call: Any, arguments: tuple[str, ...], code: int, words: str) -> None:
    said = call("tune", TINY / "llama-tied.gguf", *arguments)
    assert said.code == code, said.err
    assert words in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(("free", "weights"), [(1 << 40, "packed"), (1 << 20, "mapped")])
def test_auto_is_what_a_run_here_would_make_of_it(
    call: Any, monkeypatch: pytest.MonkeyPatch, free: int, weights: str
) -> None:
    monkeypatch.setattr("swactor_worker_tinygrad.memory.WORTH_PACKING", 0)
    monkeypatch.setattr(free_memory, "available_memory", lambda: free)
    option = ("--worker-option", "weights=auto", "--json")
    records = tuned(call("tune", TINY.parent / "quants" / "Q8_0.gguf", "--nodes", 2, *option))
    assert [record["weights"] for record in records] == [weights, weights]


PATIENT = '#!/bin/sh\necho compiled >> {log}\nexec {compiler} "$@"\n'


@pytest.mark.parametrize("kernels", ["native", pytest.param("graph", marks=pytest.mark.long)])
def test_a_run_after_it_compiles_nothing(spawn: Any, tmp_path: Path, kernels: str) -> None:
    """Counted at the compiler itself: `tune` calls it, a run of the same stages does not."""
    from swactor_worker_tinygrad.environment import find_compiler

    log, compiler = tmp_path / "log", tmp_path / "clang-counted"
    real = shutil.which(find_compiler())
    compiler.write_text(PATIENT.format(log=log, compiler=real))
    compiler.chmod(0o755)
    variables = {"CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "kernels")}
    option = ("--worker-option", f"kernels={kernels}")
    model = TINY / "llama-tied.gguf"
    said = spawn("tune", model, "--tokens", "11", "--nodes", "2", *option, "--json", **variables)
    first, second = tuned(said)
    assert first["kernels"] == second["kernels"] == kernels

    def compiled() -> int:
        return len(log.read_text().splitlines())

    before = compiled()
    what = ("--prompt-ids", "5,6,7", "--max-tokens", "8", "--nodes", "2")
    said = spawn("run", model, *what, *option, "--json", **variables)
    assert said.code == 0, said.err
    result = json.loads(said.out.splitlines()[-1])
    assert result["stats"]["kernels"] == kernels
    probes = 2 * 2  # each worker asks the named compiler for its version
    assert before > probes
    assert compiled() - before <= probes, "the run compiled"
