"""Text to token ids and back, from the vocabulary inside a GGUF file.

Knows byte-level BPE (`tokenizer.ggml.model` = `gpt2`) and the rules around it: which tokens are control
tokens, when BOS stands in front, what ends a generation. Merging is the `tokenizers` library's. Text from a
user never becomes a control token: the parts of a text where control tokens count are said, not guessed.

Behaviour follows llama.cpp's `llama-vocab.cpp` (`tokenizer_st_partition`, `token_to_piece`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from swactor_core.errors import ModelError, UsageError
from swactor_core.spi.loader import TextStream
from tokenizers import Regex
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from swactor_loader_gguf.index import GgufIndex, ValueType
from swactor_loader_gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from swactor_loader_gguf.stream import Utf8Stream, byte_alphabet
from swactor_loader_gguf.template import ChatTemplate

END_OF_GENERATION_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|return|>",
    "<|call|>",
    "<EOT>",
    "_<EOT>",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
_END_IF_CONTROL = ("</s>", "<eos>", "[EOS]")  # ordinary text in some vocabularies
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Special:
    """A token that is matched in text before merging. `control` ones only where the text is trusted."""

    text: str
    id: int
    control: bool


class GgufTokenizer:
    """Implements `swactor_core.spi.loader.Tokenizer`; raises ModelError for a vocabulary that is malformed or
    of a kind that is not supported. Copies what it needs: the index may be closed afterwards."""

    def __init__(self, index: GgufIndex) -> None:
        pre = _supported(index)
        self._texts = _token_texts(index)
        self._types = _token_types(index, len(self._texts))
        self._ids = {text: number for number, text in enumerate(self._texts)}
        self._end = self._end_of_generation(index)
        self._specials = self._special_tokens()
        self._bpe = _build(index, self._ids, pre)
        self._bos = self._special_id(index, "bos_token_id")
        self._add_bos = index.flag(_PREFIX + "add_bos_token", pre.add_bos) and self._bos is not None
        self._pieces = self._token_pieces()
        self._template = self._chat_template(index)

    def _special_id(self, index: GgufIndex, name: str) -> int | None:
        """The id under that key, or None: files with ids outside their vocabulary exist."""
        number = index.integer(_PREFIX + name, -(1 << 63), (1 << 64) - 1, default=-1)
        return number if 0 <= number < len(self._texts) else None

    def _end_of_generation(self, index: GgufIndex) -> frozenset[int]:
        ends = {number for name in _END_KEYS if (number := self._special_id(index, name)) is not None}
        for text in END_OF_GENERATION_TEXTS:
            if (number := self._ids.get(text)) is not None:
                # Such a token of another type is a converter's slip; as plain text it would be printed.
                self._types[number] = TokenType.CONTROL
                ends.add(number)
        for text in _END_IF_CONTROL:
            if (number := self._ids.get(text)) is not None and self._types[number] == TokenType.CONTROL:
                ends.add(number)
        return frozenset(ends)

    def _special_tokens(self) -> list[_Special]:
        """Longest first: a token is looked for in the whole text before any shorter one."""
        found = [
            _Special(text, number, self._types[number] != TokenType.USER_DEFINED)
            for text, number in self._ids.items()
            if text and self._types[number] in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        ]
        return sorted(found, key=lambda special: (-len(special.text.encode()), special.id))

    def _token_pieces(self) -> list[bytes]:
        """The bytes that each token prints; control tokens print none."""
        alphabet = byte_alphabet()
        return [_piece(text, kind, alphabet) for text, kind in zip(self._texts, self._types, strict=True)]

    def _chat_template(self, index: GgufIndex) -> ChatTemplate | None:
        source = index.text("tokenizer.chat_template", default="")
        if not source:
            return None
        eos = self._special_id(index, "eos_token_id")
        return ChatTemplate(
            source,
            bos_token="" if self._bos is None else self._texts[self._bos],
            eos_token="" if eos is None else self._texts[eos],
        )

    @property
    def end_of_generation(self) -> frozenset[int]:
        return self._end

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._encode(text, () if special else ((0, len(text)),))

    def prompt_ids(self, text: str) -> list[int]:
        return self._with_bos(self.encode(text))

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self._template is None:
            raise ModelError("the model has no chat template", hint="give a raw prompt instead of a message")
        rendered = self._template.render(messages)
        return self._with_bos(self._encode(rendered.text, rendered.contents))

    def stream(self) -> TextStream:
        return Utf8Stream(self._pieces)

    def _with_bos(self, ids: list[int]) -> list[int]:
        # Most templates write BOS themselves; a second one harms the model.
        if self._add_bos and self._bos is not None and ids[:1] != [self._bos]:
            return [self._bos, *ids]
        return ids

    def _encode(self, text: str, untrusted: Sequence[tuple[int, int]]) -> list[int]:
        """Ids of `text`; a control token counts where none of its characters lies in an `untrusted` range.
        Between tokens that were matched, text is merged across the borders of those ranges."""
        if surrogate := re.search(r"[\ud800-\udfff]", text):
            raise UsageError(
                f"the text is not valid Unicode: a lone surrogate at character {surrogate.start()}",
                hint="give the text as UTF-8",
            )
        ids: list[int] = []
        done = 0
        for start, special in self._matches(text, untrusted):
            ids += self._bpe.encode(text[done:start], add_special_tokens=False).ids
            ids.append(special.id)
            done = start + len(special.text)
        return ids + list(self._bpe.encode(text[done:], add_special_tokens=False).ids)

    def _matches(self, text: str, untrusted: Sequence[tuple[int, int]]) -> list[tuple[int, _Special]]:
        """Where which special token stands, in order of place, none overlapping another."""
        fragments, found = [(0, len(text))], list[tuple[int, _Special]]()
        for special in self._specials:
            if special.text not in text:
                continue
            rest = list[tuple[int, int]]()
            for begin, end in fragments:
                at = begin
                while (at := text.find(special.text, at, end)) >= 0:
                    after = at + len(special.text)
                    if special.control and any(at < high and low < after for low, high in untrusted):
                        at += 1
                        continue
                    found.append((at, special))
                    rest.append((begin, at))
                    begin = at = after
                rest.append((begin, end))
            fragments = rest
        return sorted(found, key=lambda match: match[0])


def _supported(index: GgufIndex) -> PreTokenizer:
    """The pre-tokenizer of the file's vocabulary, if its kind is one that this module knows."""
    supported = f"supported: gpt2 with {', '.join(sorted(PRE_TOKENIZERS))}"
    if index.array(_PREFIX + "tokens", (ValueType.STRING,)) is None:
        raise ModelError(f"{index.path}: the file has no vocabulary", hint="give prompts as token ids")
    kind = index.text(_PREFIX + "model")
    if kind != "gpt2":
        raise ModelError(f"{index.path}: vocabularies of kind {kind!r} are not supported", hint=supported)
    name = index.text(_PREFIX + "pre", default="")
    if name not in PRE_TOKENIZERS:
        what = f"pre-tokenizer {name!r} is not supported" if name else "the vocabulary names no pre-tokenizer"
        raise ModelError(f"{index.path}: {what} ({_PREFIX}pre)", hint=supported)
    return PRE_TOKENIZERS[name]


def _token_texts(index: GgufIndex) -> list[str]:
    texts = []
    for number, raw in enumerate(index.strings(_PREFIX + "tokens")):
        try:
            texts.append(raw.decode("utf-8"))
        except UnicodeDecodeError:
            _malformed(index, "tokens", f"token {number} is not valid UTF-8")
    return texts


def _token_types(index: GgufIndex, count: int) -> list[int]:
    entry = index.array(_PREFIX + "token_type", (ValueType.INT32, ValueType.UINT32))
    if entry is None:
        return [TokenType.NORMAL] * count
    if entry.count != count:
        _malformed(index, "token_type", f"{entry.count} types for {count} tokens")
    return [int(kind) for kind in index.numbers(entry)]


def _build(index: GgufIndex, ids: dict[str, int], pre: PreTokenizer) -> BpeTokenizer:
    merges = []
    for number, raw in enumerate(index.strings(_PREFIX + "merges")):
        text = raw.decode("utf-8", "replace")
        # A token may begin with a space: the separator is the first one after position 0.
        cut = text.find(" ", 1)
        left, right = text[:cut], text[cut + 1 :]
        if cut < 0 or not (left in ids and right in ids and left + right in ids):
            _malformed(index, "merges", f"merge {number} ({text[:80]!r}) is not of two tokens into a third")
        merges.append((left, right))
    bpe = BpeTokenizer(BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges))
    cuts = [Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    bpe.pre_tokenizer = Steps([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
    return bpe


def _piece(text: str, kind: int, alphabet: dict[str, int]) -> bytes:
    if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED):
        return b""
    if kind == TokenType.USER_DEFINED:
        return text.encode()
    if kind == TokenType.BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
        return bytes([int(match[1], 16)])
    if all(character in alphabet for character in text):
        return bytes(alphabet[character] for character in text)
    return text.encode()


def _malformed(index: GgufIndex, name: str, what: str) -> NoReturn:
    index.fail(f"{_PREFIX}{name}: {what}", index.entries[_PREFIX + name].offset)
