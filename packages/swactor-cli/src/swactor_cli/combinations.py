"""Options that do not go together are refused, those that do nothing alone are warned of.

Knows which options were given, not what they mean. What depends on a value or on the model is refused where
that is known (`prompts`, `worker_options`, `side_files`, the commands).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import typer
from swactor_core.errors import UsageError

_OF_NODES = "nodes of a cluster have their own: in its file under [node.worker], or `swactor-cli node {}`"
_TALK = "leave one of them out"

# Two options, and the remedy for both at once.
RUN_EXCLUDES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("--prompt", "--prompt-file"): "one prompt a run: leave one of them out",
        ("--prompt-file", "--prompt-ids"): "one prompt a run: leave one of them out",
        ("--nodes", "--cluster"): "a cluster file names its nodes",
        ("--device", "--cluster"): _OF_NODES.format("--device"),
        ("--worker-option", "--cluster"): _OF_NODES.format("--worker-option"),
        ("--memory", "--cluster"): "a node says what it has",
        ("--quiet", "--verbose"): _TALK,
    }
)
PLAN_EXCLUDES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("--nodes", "--cluster"): "a cluster file names its nodes",
        ("--memory", "--cluster"): "a cluster file says memory_bytes",
    }
)
NODE_EXCLUDES: Mapping[tuple[str, str], str] = MappingProxyType({("--quiet", "--verbose"): _TALK})

# An option, those of which it needs one, and the remedy when none is given.
_DRAWING = (("--temperature",), "add --temperature, such as 0.8: without it the likeliest token is taken")
RUN_NEEDS: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "--pool-timeout": (("--cluster",), "leave it out: local nodes are not waited for so"),
        "--top-k": _DRAWING,
        "--top-p": _DRAWING,
        "--min-p": _DRAWING,
        "--seed": _DRAWING,
        "--repeat-last-n": (
            ("--repeat-penalty", "--frequency-penalty", "--presence-penalty"),
            "add a penalty, such as --repeat-penalty 1.1",
        ),
    }
)


def given_options(context: typer.Context) -> frozenset[str]:
    """The long names of the options that stand on the command line."""
    given = set[str]()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name) if parameter.name else None
        if source is not None and source.name == "COMMANDLINE":
            given.update(name for name in parameter.opts if name.startswith("--"))
    return frozenset(given)


def refuse_exclusive(given: frozenset[str], excludes: Mapping[tuple[str, str], str]) -> None:
    """Raises UsageError naming both options and the remedy."""
    for pair, remedy in excludes.items():
        if given.issuperset(pair):
            raise UsageError(f"{pair[0]} and {pair[1]} exclude each other", hint=remedy)


def without_effect(given: frozenset[str], needs: Mapping[str, tuple[tuple[str, ...], str]]) -> list[str]:
    """What to tell of options that do nothing alone: the run is what it would be without them."""
    return [
        f"{option} has no effect without {' or '.join(others)}: {remedy}"
        for option, (others, remedy) in needs.items()
        if option in given and given.isdisjoint(others)
    ]
