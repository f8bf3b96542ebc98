"""The process that runs a model's chat template: `python -P -m swactor_loader_gguf.render`.

Reads one request as JSON on stdin, answers `{"texts": [...]}` or `{"error": "..."}` on stdout. Limits itself
before it looks at the template: address space, processor time, files. Imports jinja2 and nothing of swactor.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; for a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """As `json.dumps`: unlike jinja2's own filter it escapes nothing for HTML."""
    allowed = {key: options[key] for key in ("separators", "sort_keys", "ensure_ascii") if key in options}
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **allowed})


def environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """What model authors expect of their template's surroundings (the Hugging Face chat template guide)."""
    result = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    strftime_now: Callable[[str], str] = now.strftime
    result.globals.update(raise_exception=_raise_exception, strftime_now=strftime_now)
    result.filters["tojson"] = _to_json
    return result


def limit(memory_bytes: int, cpu_seconds: int) -> None:
    """From here on the process can neither grow nor run beyond these, nor write a file."""
    for which, bound in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _lower(which, bound, bound)
    # The softer bound ends the process with a signal of its own, which says which bound it was.
    _lower(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)


def _lower(which: int, soft: int, hard: int) -> None:
    """This user may have less already, and no process may give itself more."""
    _, had = resource.getrlimit(which)
    if had != resource.RLIM_INFINITY:
        soft, hard = min(soft, had), min(hard, had)
    resource.setrlimit(which, (soft, hard))


def render(request: dict[str, Any]) -> list[str]:
    """The template's text for each variant of the messages. No tools are None, as model authors expect; where
    a template cannot take that, they are an empty list."""
    template = environment(datetime.fromisoformat(request["now"])).from_string(request["template"])
    try:
        return [_text(template, request, messages, tools=None) for messages in request["variants"]]
    except TypeError as error:
        try:
            return [_text(template, request, messages, tools=[]) for messages in request["variants"]]
        except Exception:  # with the same right as the first one, which is the one that is told
            raise error from None


def _text(
    template: Template,
    request: dict[str, Any],
    messages: list[dict[str, str]],
    *,
    tools: list[Any] | None,
) -> str:
    parts, room = [], request["max_output"]
    for part in template.generate(
        messages=messages,
        tools=tools,
        documents=tools,
        add_generation_prompt=True,
        bos_token=request["bos_token"],
        eos_token=request["eos_token"],
    ):
        room -= len(part)
        if room < 0:
            raise TemplateError(f"it writes more than {request['max_output']} characters")
        parts.append(part)
    return "".join(parts)


def main() -> int:
    request = json.loads(sys.stdin.buffer.read())
    limit(request["memory_bytes"], request["cpu_seconds"])
    try:
        answer: dict[str, Any] = {"texts": render(request)}
    except MemoryError:
        answer = {"error": "it needs too much memory"}
    except Exception as error:  # a template may raise anything
        answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    sys.stdout.buffer.write(json.dumps(answer).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
