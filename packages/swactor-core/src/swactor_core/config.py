"""Configuration: which plug-ins, which cluster, which bounds; from TOML, environment and options.

The border where text from people becomes typed settings: every error names the file or variable, the field
and the remedy. Precedence: option, environment (`SWACTOR_…`), file, default. Knows no component.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from swactor_core.errors import ConfigError, did_you_mean

_HEX32 = r"^[0-9a-f]{64}$"
_HOST_PORT = r"^(\[[0-9a-fA-F:]+\]|[^:\s]+):[0-9]{1,5}$"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
Hex32 = Annotated[str, StringConstraints(pattern=_HEX32)]
HostPort = Annotated[str, StringConstraints(pattern=_HOST_PORT)]
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, StringConstraints(pattern=_NAME)]
_OF_NAMES = "letters, digits, dots, dashes and underscores, at most 63, a letter or digit first"

# What is wrong with text of another form, and the remedy; keys are not shown, one of them is a secret.
_FORMS = {
    _HEX32: (
        "is not 64 hexadecimal digits, small letters",
        "`swactor-cli key` prints a public key, `swactor-cli cluster new` makes a file with a gossip key",
    ),
    _HOST_PORT: ("is not host:port", "write it like 10.0.0.1:7946 or [::1]:7946"),
    _NAME: ("cannot be a name", _OF_NAMES),
}

_SAID = {"extra_forbidden": "is not a field", "missing": "is missing"}

MOST_OF_A_FILE = 16 << 20
"""Bytes of a cluster file: tens of thousands of nodes."""
_OF_FILES = "`swactor-cli cluster new` writes a whole one; docs/cluster.md names every field"

_YES, _NO = frozenset({"1", "yes", "true", "on"}), frozenset({"0", "no", "false", "off"})


class Settings(BaseModel):
    # a process checks few of these tables: each is made ready when it is first needed
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


SettingsT = TypeVar("SettingsT", bound=Settings)


class PluginChoice(Settings):
    """Which provider of each kind is used, and which plug-ins are not loaded at all."""

    arena: str = "memfd"
    transport: str = "quic"
    membership: str = "swim"
    worker: str = "tinygrad"
    loader: str = "gguf"
    blocked: tuple[str, ...] = ()


class NodeEntry(Settings):
    """One node of a cluster file. `memory_bytes` is what the planner may use on it."""

    name: Name
    public_key: Hex32
    memory_bytes: int | None = Field(default=None, gt=0)


class ClusterConfig(Settings):
    """What all members of one cluster share. Keys in lower-case hexadecimal."""

    id: Name
    gossip_key: Hex32
    orchestrators: tuple[Hex32, ...]
    seeds: tuple[HostPort, ...] = ()
    nodes: tuple[NodeEntry, ...] = ()

    @model_validator(mode="after")
    def _nodes_differ(self) -> Self:
        for what in ("name", "public_key"):
            counts = Counter(getattr(node, what) for node in self.nodes)
            twice = next((value for value, count in counts.items() if count > 1), None)
            if twice is not None:
                raise ValueError(f"two nodes have the {what} {twice!r}")
        return self


class NodeSettings(Settings):
    """One node process. `managed` means that a parent process owns its life through standard input."""

    name: Name
    cluster: ClusterConfig
    key: Hex32
    plugins: PluginChoice = Field(default_factory=PluginChoice)
    bind_host: str = "127.0.0.1"
    bind_port: Port = 0
    advertise_host: str = ""
    membership_port: Port = 0
    arena_ceiling: int = Field(default=1 << 30, ge=1 << 20)
    memory_bytes: int | None = Field(default=None, gt=0)
    worker: dict[str, Any] = {}
    transport: dict[str, Any] = {}
    membership: dict[str, Any] = {}
    managed: bool = False


class MemberTable(Settings):
    """What `[node]` and `[orchestrator]` share: where a process listens, how others reach it, and the tables
    of its transport and membership plug-ins. A cluster is reached from outside, so the default listens on
    every address; an empty `advertise_host` is found out by `node/addresses.py`."""

    bind_host: str = "0.0.0.0"  # noqa: S104 - other machines must reach a node
    bind_port: Port = 0
    advertise_host: str = ""
    membership_port: Port = 0
    transport: dict[str, Any] = {}
    membership: dict[str, Any] = {}


class NodeTable(MemberTable):
    """`[node]`: what every node that starts from this cluster file begins with; its options come first."""

    arena_ceiling: int = Field(default=1 << 30, ge=1 << 20)
    worker: dict[str, Any] = {}


class ClusterFile(Settings):
    """A cluster file as people write it."""

    cluster: ClusterConfig
    plugins: PluginChoice = Field(default_factory=PluginChoice)
    node: NodeTable = Field(default_factory=NodeTable)
    orchestrator: MemberTable = Field(default_factory=MemberTable)


def split_host_port(text: str) -> tuple[str, int]:
    """`host:port`, IPv6 in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise ConfigError(f"{text!r} is not host:port", hint="write it like 10.0.0.1:7946 or [::1]:7946")
    return host.strip("[]"), int(port)


def checked_name(name: str) -> str:
    """A node's or cluster's name as it may stand in a cluster file. Raises ConfigError."""
    try:
        return str(TypeAdapter(Name).validate_python(name))
    except ValidationError:
        raise ConfigError(
            f"{name!r} cannot be a name",
            hint=_OF_NAMES,
        ) from None


def load_cluster_file(path: str) -> ClusterFile:
    """Raises ConfigError naming the file and the field. It may be a pipe, and is read once."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MOST_OF_A_FILE + 1)
    except OSError as error:
        raise ConfigError(
            f"cluster file {path!r}: {error.strerror}", hint="name a readable TOML file"
        ) from None
    if len(text) > MOST_OF_A_FILE:
        raise ConfigError(f"cluster file {path!r} has more than {MOST_OF_A_FILE >> 20} MiB", hint=_OF_FILES)
    try:
        data = tomllib.loads(text.decode("utf-8-sig"))  # some editors begin with a byte order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster file {path!r} is not TOML: {error}", hint=_OF_FILES) from None
    return validated(ClusterFile, data, origin=f"cluster file {path!r}", remedy=_OF_FILES)


def validated(kind: type[SettingsT], data: Mapping[str, Any], *, origin: str, remedy: str = "") -> SettingsT:
    """`data` as `kind`. Raises ConfigError with the origin, the field and what is wrong with it; `remedy` is
    that of a field that is missing."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)  # a field that is missing may be one that is misspelt
        first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        hint = remedy if first["type"] == "missing" else ""
        if first["type"] == "extra_forbidden":
            hint = _known_fields(kind, first["loc"])
        pattern = first.get("ctx", {}).get("pattern")
        what = _SAID.get(first["type"], first["msg"].removeprefix("Value error, "))
        if pattern in _FORMS:
            what, hint = _FORMS[pattern]
        raise ConfigError(f"{origin}: {where}: {what}", hint=hint) from None


def _known_fields(kind: type[Settings], location: tuple[int | str, ...]) -> str:
    """What may stand where the unknown field at `location` stands, the nearest name first."""
    table: type[Settings] = kind
    for part in location[:-1]:
        field = table.model_fields.get(str(part))
        for candidate in () if field is None else (field.annotation, *get_args(field.annotation)):
            if isinstance(candidate, type) and issubclass(candidate, Settings):
                table = candidate
    known = list(table.model_fields)
    return f"{did_you_mean(str(location[-1]), known)}fields: {', '.join(known)}"


def from_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The plug-in choices that `SWACTOR_ARENA`, `SWACTOR_TRANSPORT`, … make; empty values count as unset."""
    source = os.environ if environment is None else environment
    kinds = ("arena", "transport", "membership", "worker", "loader")
    values = {kind: source.get(f"SWACTOR_{kind.upper()}", "") for kind in kinds}
    return {kind: value for kind, value in values.items() if value}


def choose_plugins(file: PluginChoice, options: Mapping[str, str | None]) -> PluginChoice:
    """Option over environment over file, per kind."""
    merged = {**file.model_dump(), **from_environment(), **{k: v for k, v in options.items() if v}}
    return validated(PluginChoice, merged, origin="plug-in choice")


def offline(environment: Mapping[str, str] | None = None) -> str:
    """The variable that forbids to ask any server for a model, empty where none does: SWACTOR_OFFLINE, or
    HF_HUB_OFFLINE where that is not set. Raises ConfigError for a value that says neither yes nor no."""
    source = os.environ if environment is None else environment
    own = source.get("SWACTOR_OFFLINE", "").strip().lower()
    if own in _YES:
        return "SWACTOR_OFFLINE"
    if own and own not in _NO:
        raise ConfigError(f"SWACTOR_OFFLINE is {own[:40]!r}", hint="set it to 1 or 0, or unset it")
    hub = source.get("HF_HUB_OFFLINE", "").strip().lower()  # whose own library takes all else for no
    return "HF_HUB_OFFLINE" if hub in _YES and not own else ""
