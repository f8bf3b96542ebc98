"""`plan`: the numbers of the small models, from their own files, in both shapes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from swactor_core import free_memory
from swactor_core.fitting import NODE_PROCESS
from swactor_core.ids import node_hex, node_id_of

TINY = Path(__file__).parent.parent / "data" / "tiny"
MODELS = ["llama-tied", "llama-gqa", "llama-widehead", "llama-ropefreqs"]


def planned(call: Any, *arguments: object) -> dict[str, Any]:
    said = call("plan", *arguments, "--json")
    assert said.code == 0, said.err
    assert said.err == ""
    lines = said.out.splitlines()
    assert len(lines) == 1
    record: dict[str, Any] = json.loads(lines[0])
    assert record["type"] == "plan"
    return record


@pytest.mark.parametrize("name", MODELS)
def test_one_stage_holds_every_tensor_of_the_file_once(call: Any, name: str) -> None:
    path = TINY / f"{name}.gguf"
    tensors = GGUFReader(path).tensors
    record = planned(call, path, "--nodes", 1)
    assert record["stages"][0]["weight_bytes"] == sum(int(tensor.n_bytes) for tensor in tensors)
    assert sum(kind["tensors"] for kind in record["model"]["tensor_types"]) == len(tensors)
    assert record["model"]["file_bytes"] == path.stat().st_size
    assert record["model"]["architecture"] == "llama"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("nodes", [2, 3])
def test_stages_follow_one_another_and_cover_all_layers(call: Any, name: str, nodes: int) -> None:
    record = planned(call, TINY / f"{name}.gguf", "--nodes", nodes)
    bounds = [(stage["layer_start"], stage["layer_end_exclusive"]) for stage in record["stages"]]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == record["model"]["num_layers"]
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert [stage["node"] for stage in record["stages"]] == [f"node-{index}" for index in range(nodes)]


def test_cache_and_edges_have_the_sizes_that_the_run_needs(call: Any) -> None:
    record = planned(call, TINY / "llama-tied.gguf", "--prompt-tokens", 10, "--max-tokens", 20)
    width, places = record["model"]["hidden_dim"], 30
    assert (record["prompt_tokens"], record["max_tokens"], record["max_seq_len"]) == (10, 20, places)
    # keys and values of 4 heads of 16, in f32, for 2 layers a stage
    assert [stage["kv_bytes"] for stage in record["stages"]] == [2 * 64 * 4 * 2 * places] * 2
    edges = record["edges"]
    assert [edge["kind"] for edge in edges] == ["TokenIn", "Activation", "TokenOut"]
    assert [(edge["producer"], edge["consumer"]) for edge in edges] == [
        ("orchestrator", "stage 0"),
        ("stage 0", "stage 1"),
        ("stage 1", "orchestrator"),
    ]
    assert [edge["max_object_bytes"] for edge in edges] == [places * 4, places * width * 4, 4]
    assert all(edge["ring_bytes"] % 64 == 0 for edge in edges)


def test_the_context_cuts_what_can_be_generated(call: Any) -> None:
    record = planned(call, TINY / "llama-tied.gguf", "--prompt-tokens", 500, "--max-tokens", 1000)
    # 512 places, and the last token is never fed back
    assert (record["max_seq_len"], record["max_tokens"]) == (512, 13)


def test_a_prompt_longer_than_the_context_is_refused(call: Any) -> None:
    said = call("plan", TINY / "llama-tied.gguf", "--prompt-tokens", 513)
    assert said.code == 2
    assert "513 tokens" in said.err


def cluster_of(home: Path, *memories: int | None) -> Path:
    text = f'[cluster]\nid = "c"\ngossip_key = "{"ab" * 32}"\norchestrators = []\n'
    for index, memory in enumerate(memories):
        text += f'[[cluster.nodes]]\nname = "m{index}"\npublic_key = "{index:064x}"\n'
        text += "" if memory is None else f"memory_bytes = {memory}\n"
    file = home / "c.toml"
    file.write_text(text)
    return file


def test_a_cluster_s_nodes_are_used_with_their_names_and_memory(call: Any, home: Path) -> None:
    file = cluster_of(home, 300_000_000, 100_000_000)
    record = planned(call, TINY / "llama-tied.gguf", "--cluster", file)
    first, second = record["stages"]
    assert (first["node"], second["node"]) == ("m0", "m1")
    assert first["node_id"] == node_hex(node_id_of(bytes(32)))
    assert (first["memory_bytes"], second["memory_bytes"]) == (300_000_000, 100_000_000)
    assert first["weight_bytes"] > second["weight_bytes"]


def test_a_model_that_does_not_fit_is_refused_with_need_and_have(call: Any, home: Path) -> None:
    said = call("plan", TINY / "llama-tied.gguf", "--cluster", cluster_of(home, 100_000, 100_000))
    assert said.code == 2
    assert "does not fit" in said.err
    assert "100000" in said.err
    assert "hint:" in said.err


def test_people_get_tables_that_stay_lines_in_a_pipe(call: Any) -> None:
    said = call("plan", TINY / "llama-tied.gguf", "--nodes", 2)
    assert said.code == 0
    assert said.err == ""
    lines = [line.split() for line in said.out.splitlines()]
    assert ["0", "node-0", "0", "to", "1", "-", "313.0", "KiB", "160.0", "KiB"] in [
        line[:10] for line in lines
    ]
    assert "38 F32" in said.out
    assert ["Activation", "stage", "0", "stage", "1", "Activation", "256", "B", "40.0", "KiB"] in [
        line[:10] for line in lines
    ]


def test_memory_is_weights_cache_scratch_copies_and_process(call: Any) -> None:
    record = planned(call, TINY / "llama-tied.gguf", "--nodes", 2, "--prompt-tokens", 10, "--max-tokens", 20)
    for stage in record["stages"]:
        assert stage["need_bytes"] == sum(
            stage[name + "_bytes"] for name in ("weight", "kv", "scratch", "copies", "process")
        )
        assert stage["fetch_bytes"] == 0
    first, last = record["stages"]
    # 30 rows of a chunk: as many spare rows of cache as the run's own, and the last stage's logits
    assert first["scratch_bytes"] > first["kv_bytes"]
    assert last["scratch_bytes"] - first["scratch_bytes"] == 4 * record["model"]["vocab_size"]
    narrow = planned(
        call, TINY / "llama-tied.gguf", "--prompt-tokens", 10, "--max-tokens", 20, "--prefill-chunk", 1
    )
    assert narrow["stages"][0]["scratch_bytes"] < first["scratch_bytes"]


def test_scratch_counts_against_the_declared_memory(call: Any, home: Path) -> None:
    stages = planned(call, TINY / "llama-tied.gguf", "--nodes", 2)["stages"]
    enough = [stage["need_bytes"] for stage in stages]
    assert call("plan", TINY / "llama-tied.gguf", "--cluster", cluster_of(home, *enough)).code == 0
    said = call("plan", TINY / "llama-tied.gguf", "--cluster", cluster_of(home, enough[0], enough[1] - 1))
    assert said.code == 2
    parts = {"weights": "weight", "KV cache": "kv", "scratch": "scratch", "the worker's process": "process"}
    assert f"needs {enough[1]} bytes" in said.err
    assert f"has {enough[1] - 1}" in said.err
    for words, name in parts.items():
        assert f"{words} {stages[1][name + '_bytes']}" in said.err


def test_worker_options_count_as_in_a_run(call: Any, home: Path) -> None:
    """Graphs unpack Q2_K once, into copies, and their process is larger; packing copies nothing for long."""
    model = TINY.parent / "quants" / "Q2_K.gguf"
    plain = planned(call, model, "--nodes", 1)["stages"][0]
    packed = planned(call, model, "--nodes", 1, "--worker-option", "weights=packed")["stages"][0]
    graph = planned(call, model, "--nodes", 1, "--worker-option", "kernels=graph")["stages"][0]
    assert plain["copies_bytes"] == packed["copies_bytes"] == 0
    assert graph["copies_bytes"] > 1 << 20
    assert graph["process_bytes"] > packed["process_bytes"] == plain["process_bytes"] > 0
    larger = sum(graph[name + "_bytes"] - plain[name + "_bytes"] for name in ("process", "scratch"))
    assert graph["need_bytes"] - plain["need_bytes"] == graph["copies_bytes"] + larger
    limit = ("--nodes", 1, "--memory", graph["need_bytes"] - 1)
    assert call("plan", model, *limit).code == 0
    for command in (("plan",), ("run", "--prompt-ids", "1" + ",1" * 31)):
        said = call(command[0], model, *command[1:], *limit, "--worker-option", "kernels=graph")
        assert said.code == 2
        assert f"needs {graph['need_bytes']} bytes" in said.err
        assert f"copies of weights {graph['copies_bytes']}" in said.err
        assert f"has {graph['need_bytes'] - 1}" in said.err
        assert "leave out the worker options" in said.err


@pytest.mark.parametrize("kernels", ["native", "graph"])
def test_a_plan_says_where_weights_will_be(
    call: Any, home: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """For `auto` as a run would decide it: in memory, if all stages here together take half of what is free
    at most. What is free on other machines only a run asks."""
    model = TINY.parent / "variants" / "qwen2-mixed.gguf"
    options: tuple[object, ...] = ("--worker-option", f"kernels={kernels}")
    monkeypatch.setattr("swactor_worker_tinygrad.memory.WORTH_PACKING", 0)
    monkeypatch.setattr(free_memory, "available_memory", lambda: 1 << 40)

    def made(weights: str, *others: object) -> dict[str, Any]:
        return planned(call, model, *options, "--worker-option", f"weights={weights}", *others)

    def told(weights: str) -> str:
        said = call("plan", model, *options, "--worker-option", f"weights={weights}")
        assert said.code == 0
        return str(next(line for line in said.out.splitlines() if line.startswith("weights: ")))

    mapped, packed = made("mapped"), made("packed")
    assert (mapped["weights"], mapped["weights_predicted"]) == ("file", False)
    assert told("mapped") == "weights: in the model's file"
    if kernels == "graph":  # which reads the file whatever is asked for
        assert made("auto") == packed == mapped
        return
    assert (packed["weights"], packed["weights_predicted"]) == ("memory", False)
    assert told("packed") == "weights: in memory, outside of the model's file"
    assert packed["stages"] != mapped["stages"], "rows that are filled up say which account it is"
    half = sum(stage["need_bytes"] for stage in packed["stages"])
    for free, as_if, words in (
        (2 * half, packed, "in memory, outside of the model's file"),
        (2 * half - 1, mapped, "in the model's file"),
        (None, mapped, "in the model's file"),
    ):
        monkeypatch.setattr(free_memory, "available_memory", lambda free=free: free)
        assert made("auto") == {**as_if, "weights_predicted": True}
        assert told("auto") == f"weights: {words}; a run decides by the memory that is free then"
    monkeypatch.setattr(free_memory, "available_memory", lambda: 1 << 40)
    most = max(stage["need_bytes"] for stage in packed["stages"])
    assert made("auto", "--memory", most)["weights"] == "memory"
    assert made("auto", "--memory", most - 1)["weights"] == "file"
    assert made("auto", "--cluster", cluster_of(home, None, None))["weights"] == "file"


def test_who_says_nothing_of_memory_says_nothing_of_weights(call: Any) -> None:
    record = planned(call, TINY / "llama-tied.gguf", "--worker", "echo")
    assert (record["weights"], record["weights_predicted"]) == (None, False)
    assert "weights:" not in call("plan", TINY / "llama-tied.gguf", "--worker", "echo").out


def test_a_cluster_s_nodes_have_the_worker_options_of_its_file(call: Any, home: Path) -> None:
    file = cluster_of(home, None)
    plain = planned(call, TINY.parent / "quants" / "Q2_K.gguf", "--cluster", file)["stages"][0]
    file.write_text(file.read_text() + '[node.worker]\nkernels = "graph"\n')
    graph = planned(call, TINY.parent / "quants" / "Q2_K.gguf", "--cluster", file)["stages"][0]
    assert graph["copies_bytes"] > plain["copies_bytes"] == 0


def test_wrong_worker_options_are_refused_as_in_a_run(call: Any, home: Path) -> None:
    model = TINY / "llama-tied.gguf"
    for option, words in (("weights=folded", "use auto, mapped, packed"), ("weights", "write it like")):
        said = call("plan", model, "--worker-option", option)
        assert said.code == 2
        assert words in said.err
    said = call("plan", model, "--memory", "8GiB", "--cluster", cluster_of(home, None, None))
    assert said.code == 2


def test_a_prompt_beyond_all_bounds_is_refused_with_both_numbers(call: Any) -> None:
    said = call("plan", TINY / "llama-tied.gguf", "--prompt-tokens", 10**20)
    assert (said.code, said.out) == (2, "")
    assert f"the prompt has {10**20} tokens and 'llama-tied' a context of 512" in said.err


def test_what_does_not_fit_into_free_memory_is_refused_before_anything_is_loaded(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control group that leaves less than the plan needs: of weights in a file, and where swap is left,
    only a warning; and a plan, which may be for other machines, is shown with what a run would say."""
    model = TINY / "llama-tied.gguf"
    stages = planned(call, model, "--prompt-tokens", 2)["stages"]
    total = sum(stage["need_bytes"] + NODE_PROCESS for stage in stages)
    kept = total - sum(stage["weight_bytes"] for stage in stages)
    monkeypatch.setattr(free_memory, "machine_rest", lambda: 1 << 40)
    monkeypatch.setattr(free_memory, "available_swap", lambda: 0)

    def leave(count: int, swap: int = 0) -> None:
        monkeypatch.setattr(free_memory, "group_rest", lambda: count)
        monkeypatch.setattr(free_memory, "available_swap", lambda: swap)

    plan: tuple[object, ...] = ("plan", model, "--prompt-tokens", 2)
    run: tuple[object, ...] = ("run", model, "--prompt-ids", "1,2", "--max-tokens", 128)
    leave(kept - 1)
    said = call(*run)
    assert (said.code, said.out) == (2, "")
    assert f"2 stages here need {kept} bytes (KV cache " in said.err
    assert f"{kept - 1} bytes of memory are left in this control group" in said.err
    assert "--memory SIZE" in said.err
    leave(kept - 3, 2)
    said = call(*run)
    assert said.code == 2
    assert f"{kept - 3} bytes of memory are left in this control group, with 2 of swap" in said.err
    quantised = TINY.parent / "quants" / "Q8_0.gguf"
    leave(total)
    said = call("run", quantised, "--prompt-ids", "1,2", "--worker-option", "weights=packed")
    assert said.code == 2
    assert "(weights " in said.err
    for count, swap, expected in (
        (
            kept - 1,
            0,
            "warning: a run on this machine would be refused: the model does not fit: "
            f"2 stages here need {kept} bytes (KV cache ",
        ),
        (kept - 2, 2, "the rest goes to swap, which is slow"),
        (total - 1, 0, "weights that do not stay in memory are read from the file for each token"),
    ):
        leave(count, swap)
        said = call(*plan)
        assert said.code == 0
        assert "node-1" in said.out
        assert expected in " ".join(said.err.split())
        said = call(*plan, "--json")
        assert said.code == 0
        assert json.loads(said.out)["stages"] == stages
    monkeypatch.setattr(free_memory, "lies_in_memory", lambda path: path == str(model))
    leave(total - 1)
    assert call(*plan).err == ""
    leave(kept - 1)
    assert "would be refused" in " ".join(call(*plan).err.split())
    leave(0)
    assert "1 stage here needs " in call(*plan, "--nodes", 1).err
    leave(total)
    assert call(*plan).err == ""
    leave(1)
    assert call(*plan, "--memory", "1GiB").code == 0
    monkeypatch.setattr(free_memory, "group_rest", lambda: None)
    monkeypatch.setattr(free_memory, "machine_rest", lambda: None)
    assert call(*plan).err == ""


def test_nodes_in_this_process_need_none_of_their_own(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY / "llama-tied.gguf"
    stages = planned(call, model, "--prompt-tokens", 2)["stages"]
    monkeypatch.setattr(free_memory, "available_memory", lambda: sum(stage["need_bytes"] for stage in stages))
    assert "warning: " in call("plan", model, "--prompt-tokens", 2).err
    monkeypatch.setenv("SWACTOR_TRANSPORT", "memory")
    said = call("plan", model, "--prompt-tokens", 2)
    assert (said.code, said.err) == (0, "")
