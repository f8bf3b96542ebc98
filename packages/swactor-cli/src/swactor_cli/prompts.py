"""The operator's prompt to token ids: text with the model's template, raw text, or ids as they are."""

from __future__ import annotations

from swactor_core.errors import UsageError
from swactor_core.spi.loader import ModelFacts, Tokenizer


def prompt_ids_of(
    text: str | None,
    ids: str | None,
    *,
    raw: bool,
    facts: ModelFacts,
    tokenizer: Tokenizer | None,
    system: str | None = None,
) -> tuple[int, ...]:
    """Raises UsageError naming the option and the remedy."""
    if (text is None) == (ids is None):
        raise UsageError("give exactly one of --prompt and --prompt-ids")
    if system is not None and (ids is not None or raw):
        other = "--raw" if raw else "--prompt-ids"
        raise UsageError(
            f"--system and {other} exclude each other", hint="a system text needs a chat template"
        )
    if ids is not None:
        return _parse_ids(ids, facts)
    assert text is not None
    if tokenizer is None:
        raise UsageError("the model has no vocabulary", hint="give token ids with --prompt-ids 1,2,3")
    if system is not None and not tokenizer.has_chat_template:
        raise UsageError("--system was given, and the model has no chat template", hint="leave --system out")
    if raw or not tokenizer.has_chat_template:
        prompt = tokenizer.prompt_ids(text)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        prompt = tokenizer.chat_ids([*messages, {"role": "user", "content": text}])
    if not prompt:
        raise UsageError("the prompt is empty", hint="give some text")
    return tuple(prompt)


def _parse_ids(ids: str, facts: ModelFacts) -> tuple[int, ...]:
    parts = [part.strip() for part in ids.split(",") if part.strip()]
    bad = next((part for part in parts if not part.isdecimal()), None)
    if bad is not None:
        raise UsageError(f"--prompt-ids: {bad!r} is not a token id", hint="write them like 1,2,3")
    if not parts:
        raise UsageError("--prompt-ids is empty", hint="write token ids like 1,2,3")
    prompt = tuple(int(part) for part in parts)
    outside = next((token for token in prompt if token >= facts.vocab_size), None)
    if outside is not None:
        raise UsageError(f"--prompt-ids: {outside} is outside the vocabulary of {facts.vocab_size}")
    return prompt
