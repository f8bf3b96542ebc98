"""The operator's prompt to token ids: text with the model's template, raw text, or ids as they are; the text
itself, or out of a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from swactor_core.errors import UsageError, remedy_of_encoding
from swactor_core.spi.loader import ModelFacts, Tokenizer
from swactor_core.stop_text import StopText

MAX_PROMPT_BYTES = 64 << 20  # more than the context of any model
MAX_ID_DIGITS = 18  # more than any vocabulary needs, and what fits where ids travel


def check_prompt(
    text: str | None, ids: str | None, *, raw: bool, system: str | None, stops: Sequence[str]
) -> None:
    """Refuses what no model could make right, before one is opened or fetched. Raises UsageError."""
    if (text is None) == (ids is None):
        raise UsageError(
            "give exactly one of --prompt, --prompt-file and --prompt-ids",
            hint='such as --prompt "hello world"; --prompt-file - reads standard input',
        )
    if system is not None and (ids is not None or raw):
        other = "--raw" if raw else "--prompt-ids"
        raise UsageError(
            f"--system and {other} exclude each other", hint="a system text needs a chat template"
        )
    if ids is not None:
        _parse_ids(ids)
    for option, given in (("--prompt", text), ("--system", system), *(("--stop", stop) for stop in stops)):
        check_text(option, given or "")
    StopText(stops)  # which refuses an empty one


def prompt_ids_of(
    text: str | None,
    ids: str | None,
    *,
    raw: bool,
    facts: ModelFacts,
    tokenizer: Tokenizer | None,
    system: str | None = None,
) -> tuple[int, ...]:
    """What `check_prompt` has let pass, as token ids. Raises UsageError naming the option and the remedy."""
    if ids is not None:
        return _within(_parse_ids(ids), facts)
    assert text is not None
    if tokenizer is None:
        raise UsageError("the model has no vocabulary", hint="give token ids with --prompt-ids 1,2,3")
    if system is not None and not tokenizer.has_chat_template:
        raise UsageError("--system was given, and the model has no chat template", hint="leave --system out")
    if raw or not tokenizer.has_chat_template:
        prompt = tokenizer.prompt_ids(text)
    else:
        if not text.strip():
            raise UsageError("--prompt is empty", hint="give some text")
        messages = [{"role": "system", "content": system}] if system is not None else []
        prompt = tokenizer.chat_ids([*messages, {"role": "user", "content": text}])
    if not prompt:
        raise UsageError("the prompt is empty", hint="give some text")
    return tuple(prompt)


def read_prompt(path: str) -> str:
    """The text of a file, of standard input for `-`, without the line end that an editor leaves behind it.
    Raises UsageError."""
    name = "standard input" if path == "-" else f"the prompt file {path!r}"
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{name} cannot be read: {said}", hint="give a file with the prompt") from None
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(
            f"{name} has more than {MAX_PROMPT_BYTES >> 20} MiB", hint="no model has a context for that"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not valid UTF-8 behind {error.start} bytes", hint="give the text as UTF-8"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def check_text(option: str, text: str) -> None:
    """Raises UsageError for bytes that were no UTF-8, which arrive as lone surrogates."""
    if (broken := re.search(r"[\ud800-\udfff]", text)) is not None:
        raise UsageError(
            f"{option} is not valid UTF-8 behind {broken.start()} characters",
            hint=remedy_of_encoding(text, "give the text as UTF-8"),
        )


def token_id(text: str) -> int | None:
    """The token id that `text` writes in ASCII digits, or None."""
    written = text.isascii() and text.isdecimal() and len(text) <= MAX_ID_DIGITS
    return int(text) if written else None


def _parse_ids(ids: str) -> tuple[int, ...]:
    if not ids.strip(" ,"):
        raise UsageError("--prompt-ids is empty", hint="write token ids like 1,2,3")
    prompt = list[int]()
    for part in ids.split(","):
        number = token_id(part.strip())
        if number is None:
            raise UsageError(
                f"--prompt-ids: {part.strip()[:40]!r} is not a token id", hint="write them like 1,2,3"
            )
        prompt.append(number)
    return tuple(prompt)


def _within(ids: tuple[int, ...], facts: ModelFacts) -> tuple[int, ...]:
    for number in ids:
        if number >= facts.vocab_size:
            raise UsageError(
                f"--prompt-ids: {number} is outside the vocabulary of {facts.vocab_size}",
                hint=f"this model's token ids are 0 to {facts.vocab_size - 1}",
            )
    return ids
