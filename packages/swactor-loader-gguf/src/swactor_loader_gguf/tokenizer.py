"""Text to token ids and back, from the vocabulary inside a GGUF file.

Knows the rules around merging: where control tokens count, when BOS and EOS stand around a prompt, what a
token prints. Text from a user never becomes a control token: the parts of a text where control tokens count
are said, not guessed.

Behaviour follows llama.cpp's `llama-vocab.cpp` (`tokenizer_st_partition`, `tokenize`, `token_to_piece`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from swactor_core.errors import ModelError, UsageError
from swactor_core.spi.loader import TextStream
from swactor_core.values import frozen

from swactor_loader_gguf.index import GgufIndex
from swactor_loader_gguf.merging import SPACE_MARK, merger_of
from swactor_loader_gguf.stream import Utf8Stream, byte_alphabet
from swactor_loader_gguf.template import ChatTemplate, check_asked
from swactor_loader_gguf.vocabulary import TokenType, Vocabulary, VocabularyKind, read_vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
_ASCII_SPACE = " \t\n\v\f\r"


@frozen
class _Special:
    """A token that is matched in text before merging. `control` ones only where the text is trusted;
    `strips` ones swallow the white space behind them."""

    text: str
    id: int
    control: bool
    strips: bool


@frozen
class _Match:
    start: int
    end: int
    id: int


class GgufTokenizer:
    """Implements `swactor_core.spi.loader.Tokenizer`; raises as `vocabulary.read_vocabulary`. Copies what it
    needs: the index may be closed afterwards."""

    def __init__(self, index: GgufIndex, *, pre: str | None = None) -> None:
        self._vocabulary = vocabulary = read_vocabulary(index, pre)
        self._merger = merger_of(index, vocabulary)
        self._specials = _special_tokens(vocabulary)
        self._pieces = TokenPieces(vocabulary)
        self._template = self._chat_template(index)

    def _chat_template(self, index: GgufIndex) -> ChatTemplate | None:
        source = index.text("tokenizer.chat_template", default="")
        if not source:
            return None
        vocabulary = self._vocabulary
        bos, eos = (
            "" if number is None else vocabulary.texts[number] for number in (vocabulary.bos, vocabulary.eos)
        )
        return ChatTemplate(source, bos_token=bos, eos_token=eos)

    @property
    def end_of_generation(self) -> frozenset[int]:
        return self._vocabulary.end_of_generation

    @property
    def suppressed(self) -> frozenset[int]:
        return self._vocabulary.suppressed

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._encode(text, () if special else ((0, len(text)),))

    def prompt_ids(self, text: str) -> list[int]:
        return self._framed(self.encode(text))

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self._template is None:
            raise ModelError("the model has no chat template", hint="give a raw prompt instead of a message")
        rendered = self._template.render(messages)
        check_asked(messages, rendered)
        return self._framed(self._encode(rendered.text, rendered.contents))

    def stream(self) -> TextStream:
        return Utf8Stream(self._pieces)

    def _framed(self, ids: list[int]) -> list[int]:
        """With BOS in front and EOS behind where the file asks for them. Most templates write BOS themselves;
        a second one harms the model."""
        bos, eos = self._vocabulary.bos, self._vocabulary.eos
        if self._vocabulary.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if self._vocabulary.add_eos and eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
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
        for match in self._matches(text, untrusted):
            if match.start > done:
                ids += self._merger.encode(text[done : match.start])
            ids.append(match.id)
            done = match.end
        if done < len(text):
            ids += self._merger.encode(text[done:])
        return ids

    def _matches(self, text: str, untrusted: Sequence[tuple[int, int]]) -> list[_Match]:
        """The special tokens in `text`, in order of place, none overlapping another."""
        fragments, found = [(0, len(text))], list[_Match]()
        nothing_trusted = (0, len(text)) in untrusted
        for special in self._specials:
            if (special.control and nothing_trusted) or special.text not in text:
                continue
            rest = list[tuple[int, int]]()
            for begin, end in fragments:
                at = begin
                while (at := text.find(special.text, at, end)) >= 0:
                    after = at + len(special.text)
                    if special.control and any(at < high and low < after for low, high in untrusted):
                        at += 1
                        continue
                    while special.strips and after < end and text[after] in _ASCII_SPACE:
                        after += 1
                    found.append(_Match(at, after, special.id))
                    rest.append((begin, at))
                    begin = at = after
                rest.append((begin, end))
            fragments = rest
        return sorted(found, key=lambda match: match.start)


def _special_tokens(vocabulary: Vocabulary) -> list[_Special]:
    """Longest first: a token is looked for in the whole text before any shorter one."""
    found = [
        _Special(
            vocabulary.texts[number],
            number,
            kind != TokenType.USER_DEFINED,
            number in vocabulary.strips_right,
        )
        for number, kind in enumerate(vocabulary.types)
        if kind in _SPECIAL_TYPES
    ]
    return sorted(found, key=lambda special: (-len(special.text.encode()), special.id))


class TokenPieces:
    """The bytes that each token prints; control tokens print none."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        cuts = vocabulary.pre
        self._space_marks = vocabulary.kind is VocabularyKind.SPM or (cuts is not None and cuts.escape_spaces)
        self._as_text = self._space_marks or (cuts is not None and cuts.raw)
        self._alphabet = byte_alphabet()

    def __len__(self) -> int:
        return len(self._vocabulary.texts)

    def __getitem__(self, number: int) -> bytes:
        vocabulary = self._vocabulary
        text, kind = vocabulary.texts[number], vocabulary.types[number]
        if number in vocabulary.printed or kind == TokenType.USER_DEFINED:
            return text.encode()
        if kind == TokenType.BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if kind not in (TokenType.NORMAL, TokenType.BYTE):
            return b""
        if self._as_text:
            return (text.replace(SPACE_MARK, " ") if self._space_marks else text).encode()
        if all(character in self._alphabet for character in text):
            return bytes(self._alphabet[character] for character in text)
        return text.encode()
