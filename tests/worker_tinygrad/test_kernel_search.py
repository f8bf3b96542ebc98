"""Kernels found by timing: kept for this host, used by whoever captures next, and never believed unseen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stage_support import DATA, Pipeline, config_of, manifest_of
from swactor_core.faults import RoleFailure
from swactor_core.spi.worker import LoadProgress, RoleError

SEARCHED = """
import sys
import numpy as np
from swactor_worker_tinygrad import environment
from swactor_worker_tinygrad.settings import read_settings
environment.prepare(read_settings({}))
from swactor_worker_tinygrad import internals
from swactor_worker_tinygrad.kernel_search import KernelSearch
internals.open_device("CPU")
x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
y = np.random.default_rng(2).standard_normal((64, 32)).astype(np.float32)
def held(data):
    buffer = internals.new_buffer("CPU", data.nbytes)
    internals.write_bytes(buffer, 0, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    return internals.tensor_of(buffer, data.shape, internals.FLOAT32)
def product(inputs):
    inputs[2].assign(inputs[0] @ inputs[1]).realize()
tried = 0
def count():
    global tried
    tried += 1
inputs = [held(x), held(y), held(np.zeros((4, 32), np.float32))]
width = int(sys.argv[1])
search = None if width < 0 else KernelSearch(width, count)
graph = internals.Graph(product, inputs, {}, key="product", search=search)
graph.bind(inputs).run({})
np.testing.assert_allclose(inputs[2].numpy(), x @ y, rtol=1e-4, atol=1e-5)
if "forget" in sys.argv:
    search.forget()
found = [] if search is None else [choice for choice in search.choices.values()]
print(graph.captured, tried > 0, [choice and choice.width for choice in found])
"""


@pytest.fixture
def searched(tmp_path: Path) -> Callable[..., str]:
    """A process that captures one product of matrices with a search of that width, on a cache of its own."""

    def ran(*arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, "-c", SEARCHED, *map(str, arguments)],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return ran


@pytest.mark.timeout(400)
def test_what_was_found_is_used_until_it_is_forgotten(searched: Callable[..., str]) -> None:
    assert searched(0) == "True False [None]"
    assert searched(1) == "True True [1]"  # the kept graph has not the kernels of such a search
    assert searched(0) == "False False []"  # now it has, and nothing is asked
    assert searched(2, "forget") == "True True [2]"  # a wider search searches again
    assert searched(0) == "True False [None]"


@pytest.fixture
def search_module(graph_backend: Any) -> Any:
    from swactor_worker_tinygrad import kernel_search

    return kernel_search


def test_tinygrad_is_left_as_it_was(search_module: Any) -> None:
    from tinygrad.codegen.opt import search
    from tinygrad.helpers import BEAM

    before = search.beam_search, search._try_compile, BEAM.value, signal.getsignal(signal.SIGALRM)
    with search_module.KernelSearch(2):
        assert BEAM.value == 1
        assert search.beam_search != before[0]
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert (search.beam_search, search._try_compile, BEAM.value, signal.getsignal(signal.SIGALRM)) == before


def test_a_search_outside_of_the_main_thread_is_refused(search_module: Any) -> None:
    caught: list[BaseException] = []

    def elsewhere() -> None:
        search_module.KernelSearch(0)
        try:
            search_module.KernelSearch(1)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


@pytest.fixture
def searching(graph_backend: Any, search_module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend that is asked to search, where each search ends at once with the kernel that was there."""
    from dataclasses import replace

    kept: dict[str, Any] = {}
    monkeypatch.setattr(search_module, "_choices", {})
    monkeypatch.setattr(search_module, "diskcache_get", lambda table, name: kept.get(name))
    monkeypatch.setattr(
        search_module, "diskcache_put", lambda table, name, value: kept.setdefault(name, value)
    )
    monkeypatch.setattr(
        search_module.KernelSearch, "_search", lambda self, *_: search_module.Found(self.width, None)
    )
    monkeypatch.setattr(graph_backend, "settings", replace(graph_backend.settings, search=3))
    return graph_backend


def test_a_stage_is_searched_and_says_so(searching: Any) -> None:
    said: list[LoadProgress] = []
    role = searching.configure(
        config_of(manifest_of(DATA / "llama-gqa.gguf"), max_context=17, chunk=4),
        progress=said.append,
        should_abort=lambda: False,
    )
    role.close()
    phases = [progress.phase for progress in said]
    assert phases.count("search") > 2
    assert phases.index("search") < phases.index("compile")


def test_kernels_that_compute_something_else_are_forgotten(
    searching: Any, search_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swactor_worker_tinygrad.graph_engine import GraphEngine

    trial, calls = GraphEngine.trial, []

    def changed(self: Any) -> list[Any]:
        calls.append(trial(self))
        return [made * np.float32(1 + 0.01 * (len(calls) - 1)) for made in calls[-1]]

    forgotten: list[bool] = []
    monkeypatch.setattr(GraphEngine, "trial", changed)
    monkeypatch.setattr(search_module.KernelSearch, "forget", lambda self: forgotten.append(True))
    with pytest.raises(RoleError, match="computes something else") as caught:
        Pipeline(searching, DATA / "llama-gqa.gguf", 1, max_context=18, chunk=4)
    assert caught.value.reason is RoleFailure.BACKEND_ERROR
    assert len(calls) == 2
    assert forgotten == [True]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tokens_stay_the_references_after_a_real_search(tmp_path: Path) -> None:
    """The whole way through the command: tune with a search, then a run that uses what it found."""
    import json

    model = str(DATA / "llama-gqa.gguf")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "swactor_cli"]
    graph = ["--worker-option", "kernels=graph"]

    def run(*options: str) -> list[int]:
        done = subprocess.run(
            [*command, "run", model, "--prompt-ids", "5,6,7", "--nodes", "1", "--max-tokens", "8", "--json",
             *graph, *options],
            env=environment, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout.splitlines()[-1])["token_ids"])

    plain = run("--worker-option", "search=off")
    done = subprocess.run(
        [*command, "tune", model, "--nodes", "1", "--tokens", "64", *graph, "--worker-option", "search=1"],
        env=environment, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert run() == plain
