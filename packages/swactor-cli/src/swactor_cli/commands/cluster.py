"""`swactor-cli cluster new`: a whole cluster file to start from, with comments that say what each line is."""

from __future__ import annotations

import re
import secrets
import tomllib
from collections import Counter
from contextlib import closing

from swactor_core.config import (
    ClusterFile,
    PluginChoice,
    checked_name,
    choose_plugins,
    split_host_port,
    validated,
)
from swactor_core.errors import UsageError
from swactor_core.node.identity import load_or_create_seed
from swactor_core.plugins import load_plugins
from swactor_core.values import frozen
from swactor_core.whole_files import WholeFile

from swactor_cli.errors import ExitCode
from swactor_cli.keys import node_key_file, orchestrator_key_file, public_key_of
from swactor_cli.output import Output

MEMBERSHIP_PORT = 7946

_FILE = """\
# A swactor cluster: the same file on every machine. It holds the gossip key: keep it from others.

[cluster]
id = "{id}"
# Seals every membership datagram: who has it can join and watch the membership.
gossip_key = "{gossip_key}"
# Public keys of the machines that may run models here; `swactor-cli key --orchestrator` prints one's own.
orchestrators = ["{orchestrator}"]
# Membership endpoints, host:port, through which members find each other. One that is always up is enough.
seeds = [{seeds}]

# The nodes, in the order of their stages. `swactor-cli key --name NAME`, on its machine, prints a node's key.
# memory_bytes, where given, is what a stage's worker may take on that node, its process included.
{nodes}
[plugins]
# arena = "{choice.arena}"
# transport = "{choice.transport}"
# membership = "{choice.membership}"
# worker = "{choice.worker}"
# loader = "{choice.loader}"

# What every node begins with; the options of `swactor-cli node` come first.
[node]
bind_host = "0.0.0.0"
# The UDP port of the data plane; 0 lets the kernel choose.
bind_port = 0
membership_port = {port}

[node.worker]
# device = "CPU"

# The same for the machine that runs `swactor-cli run --cluster`.
[orchestrator]
bind_host = "0.0.0.0"
bind_port = 0
membership_port = 0
"""

_NODE = """
[[cluster.nodes]]
name = "{name}"
public_key = "{key}"
# memory_bytes = 8589934592
"""


@frozen
class NewClusterOptions:
    """The command's options, as given. `nodes` holds names, or NAME=PUBLICKEY, with commas between."""

    nodes: str
    out: str
    seeds: list[str]
    cluster_id: str | None
    force: bool


def new_cluster_file(options: NewClusterOptions, output: Output) -> ExitCode:
    """Writes the file with mode 0600. Raises UsageError; an existing file needs `force`."""
    for seed in options.seeds:
        split_host_port(seed)
        if re.fullmatch(r"[0-9A-Za-z._:%\[\]-]+", seed) is None:
            raise UsageError(f"--seed {seed!r} is no address", hint="write it like 10.0.0.1:7946")
    choice = choose_plugins(PluginChoice(), {})
    plugins = load_plugins()
    entries = []
    parts = [part.strip() for part in options.nodes.split(",") if part.strip()]
    names = Counter(part.partition("=")[0] for part in parts)
    for name in (name for name, count in names.items() if count > 1):
        raise UsageError(f"--nodes has {name!r} twice", hint="give each node a name of its own")
    for part in parts:
        name, given, key = part.partition("=")
        if given and not re.fullmatch(r"[0-9a-f]{64}", key):
            raise UsageError(
                f"--nodes: {key[:80]!r} is no public key of node {checked_name(name)!r}",
                hint=f"give the 64 digits that `swactor-cli key --name {name}` prints on its machine",
            )
        if not given:
            secret = load_or_create_seed(node_key_file(name))
            key = public_key_of(secret, plugins, choice)
            output.note(f"node {name}: key of this machine, for a node that runs here")
        entries.append(_NODE.format(name=checked_name(name), key=key))
    if not entries:
        raise UsageError("--nodes names no node", hint="write it like a,b or a=PUBLICKEY,b=PUBLICKEY")
    orchestrator = public_key_of(load_or_create_seed(orchestrator_key_file()), plugins, choice)
    text = _FILE.format(
        id=checked_name(options.cluster_id or f"cluster-{secrets.token_hex(4)}"),
        gossip_key=secrets.token_hex(32),
        orchestrator=orchestrator,
        seeds=", ".join(f'"{seed}"' for seed in options.seeds),
        nodes="".join(entries).lstrip("\n"),
        choice=choice,
        port=split_host_port(options.seeds[0])[1] if options.seeds else MEMBERSHIP_PORT,
    )
    validated(ClusterFile, tomllib.loads(text), origin="the new cluster file")
    _write(options.out, text, force=options.force)
    if not options.seeds:
        output.warning(f"no --seed: put one into {options.out}, or the nodes will not find each other")
    output.note(f"wrote {options.out}: copy it to every machine")
    return ExitCode.COMPLETED


def _write(path: str, text: str, *, force: bool) -> None:
    try:
        with closing(WholeFile(path, private=True, replace=force)) as file:
            file.write(text.encode())
            file.commit(durable=True)
    except FileExistsError:
        raise UsageError(f"{path!r} is there already", hint="choose another --out, or add --force") from None
    except OSError as error:
        raise UsageError(f"--out {path!r}: {error.strerror}", hint="name a file to write") from None
