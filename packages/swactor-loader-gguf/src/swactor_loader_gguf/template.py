"""Chat templates: messages to the model's own prompt format, with the contents' places known.

A template comes out of the model file and is code that nobody has read, so it runs in a process of its own
(`render.py`) with bounded memory and time, inside jinja2's immutable sandbox. Where the message contents lie
in the result is found by marks around them: the template runs once with the true contents and once with
marked ones, and the two results must agree apart from the marks. A template that looks into or rewrites
contents in a way that moves the marks is refused rather than trusted.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime

from swactor_core.errors import ModelError, UsageError, remedy_of_lack
from swactor_core.values import frozen

MAX_TEMPLATE = 1 << 18
MAX_CONTENTS = 1 << 22  # characters of all messages together
MAX_OUTPUT = 1 << 24
MEMORY_BYTES = 512 << 20
CPU_SECONDS = 2
WALL_SECONDS = 20.0
# -P: a file in the working folder must not stand in for a library.
COMMAND = ("-P", "-m", "swactor_loader_gguf.render")

_ROLE = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_HINT = "give a raw prompt instead, or use a model with a conventional template"


@frozen
class Rendered:
    """The prompt text and the ranges (start, end) of characters that come from message contents."""

    text: str
    contents: tuple[tuple[int, int], ...]


@frozen
class ChatTemplate:
    """One model's template and the texts of its BOS and EOS tokens."""

    source: str
    bos_token: str
    eos_token: str

    def render(self, messages: Sequence[dict[str, str]], *, now: datetime | None = None) -> Rendered:
        """The prompt for `messages`, with the generation prompt. Each message has `role` and `content`.

        Raises UsageError for malformed messages, ModelError for a template that is too long, fails, exceeds
        its bounds, transforms contents, or leaves a system text out.
        """
        _check(messages)
        if len(self.source) > MAX_TEMPLATE:
            raise ModelError(f"the chat template has {len(self.source)} characters", hint=_HINT)
        opening, closing = _marks(self.source, messages)
        marked = [_marked(message, opening, closing) for message in messages]
        moment = now or datetime.now().astimezone()
        plain_text, marked_text = self._run([list(messages), marked], moment)
        contents = _ranges(marked_text, opening, closing)
        if contents is None or marked_text.replace(opening, "").replace(closing, "") != plain_text:
            raise ModelError("the chat template transforms message contents", hint=_HINT)
        _check_system(messages, [plain_text[start:end] for start, end in contents])
        return Rendered(plain_text, contents)

    def _run(self, variants: list[list[dict[str, str]]], moment: datetime) -> tuple[str, str]:
        request = {
            "template": self.source,
            "variants": variants,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "now": moment.isoformat(),
            "max_output": MAX_OUTPUT,
            "memory_bytes": MEMORY_BYTES,
            "cpu_seconds": CPU_SECONDS,
        }
        command = [sys.executable, *COMMAND]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=WALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ModelError("the chat template takes too long to render", hint=_HINT) from None
        except OSError as error:
            raise ModelError(
                f"the chat template's process cannot start: {error}",
                hint=remedy_of_lack(error) or "`swactor-cli doctor` checks this machine",
            ) from error
        if done.returncode:
            raise ModelError(f"the chat template exceeds its bounds: {_last_words(done)}", hint=_HINT)
        answer = json.loads(done.stdout)
        if "error" in answer:
            raise ModelError(f"the chat template cannot be rendered: {answer['error']}", hint=_HINT)
        plain_text, marked_text = answer["texts"]
        return plain_text, marked_text


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why the process ended: the signal of a limit, or the last line that it wrote."""
    if done.returncode == -signal.SIGXCPU:
        return f"more than {CPU_SECONDS} s of processor time"
    if done.returncode < 0:
        return f"stopped by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit {done.returncode}"]
    return lines[-1][:200]


def _check(messages: Sequence[dict[str, str]]) -> None:
    if not messages:
        raise UsageError("a chat needs at least one message", hint="give a message with role and content")
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        # The role is written into the template's own text, where control tokens count.
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise UsageError(f"message {number} has the role {role!r}", hint="use system, user or assistant")
        if not isinstance(content, str) or message.keys() != {"role", "content"}:
            raise UsageError(f"message {number} is not of a role and a text", hint="give role and content")
    total = sum(len(message["content"]) for message in messages)
    if total > MAX_CONTENTS:
        raise UsageError(
            f"the messages have {total} characters, more than {MAX_CONTENTS}", hint="shorten them"
        )


def _check_system(messages: Sequence[dict[str, str]], shown: list[str]) -> None:
    """A template that knows no system text must not drop it in silence: the answer would ignore it."""
    left = [part.casefold() for part in shown]
    for message in messages:
        text = message["content"].strip().casefold()
        if text in left:
            left.remove(text)
        elif text and message["role"] == "system":
            raise ModelError(
                "the chat template leaves out the system text", hint="put it into the user's text instead"
            )


def check_asked(messages: Sequence[dict[str, str]], rendered: Rendered) -> None:
    """Raises ModelError for a template that has dropped what the user said last: the answer would be to
    nothing. What was said before may be cut, as templates of thinking models do."""
    said = [message["content"].strip().casefold() for message in messages if message["role"] == "user"]
    shown = [rendered.text[start:end].casefold() for start, end in rendered.contents]
    if said and said[-1] and said[-1] not in shown:
        raise ModelError("the chat template leaves out the user's text", hint=_HINT)


def _marks(source: str, messages: Sequence[dict[str, str]]) -> tuple[str, str]:
    """Two private-use characters that occur neither in the template nor in any content."""
    used = set(source).union(*(message["content"] for message in messages))
    free = [chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used][:2]
    if len(free) < 2:
        raise UsageError("the messages hold every private-use character", hint="leave some out")
    return free[0], free[1]


def _marked(message: dict[str, str], opening: str, closing: str) -> dict[str, str]:
    """The content's outer whitespace stays outside the marks, so that a template's trim works as ever."""
    content = message["content"]
    core = content.strip()
    if not core:
        return message
    start = content.index(core)
    lead, trail = content[:start], content[start + len(core) :]
    return {**message, "content": f"{lead}{opening}{core}{closing}{trail}"}


def _ranges(text: str, opening: str, closing: str) -> tuple[tuple[int, int], ...] | None:
    """The marked ranges in `text` without its marks; None when the marks are not in pairs."""
    ranges: list[tuple[int, int]] = []
    position, start = 0, -1
    for part in re.split(f"([{opening}{closing}])", text):
        if part == opening and start < 0:
            start = position
        elif part == closing and start >= 0:
            ranges.append((start, position))
            start = -1
        elif part in (opening, closing):
            return None
        else:
            position += len(part)
    return tuple(ranges) if start < 0 else None
