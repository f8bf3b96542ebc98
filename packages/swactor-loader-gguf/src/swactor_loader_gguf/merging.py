"""One stretch of plain text to token ids: byte-level BPE, BPE on text, and SPM's merging by score.

Knows the three ways in which vocabularies in GGUF files merge, as llama.cpp's `llama-vocab.cpp` does it.
BPE is the `tokenizers` library's; SPM is here, since no library merges by score over characters that are no
tokens themselves. Control tokens never come out: text that spells one is merged as if it did not exist.
"""

from __future__ import annotations

import heapq
import re
from itertools import pairwise
from typing import NoReturn, Protocol

from tokenizers import Regex
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from swactor_loader_gguf.index import GgufIndex
from swactor_loader_gguf.pretokenizers import PreTokenizer as Cuts
from swactor_loader_gguf.vocabulary import (
    PREFIX,
    TokenType,
    Vocabulary,
    VocabularyKind,
    malformed,
    token_scores,
)

SPACE_MARK = "▁"  # U+2581 stands for a space in vocabularies that come from SentencePiece
_NEVER_MERGED = (TokenType.CONTROL, TokenType.UNKNOWN)
# Stands for a character that the vocabulary lacks, so that nothing merges across it. No token is empty.
_GAP = ""


class Merger(Protocol):
    def encode(self, text: str) -> list[int]: ...


def merger_of(index: GgufIndex, vocabulary: Vocabulary) -> Merger:
    """Raises ModelError for merges or scores that do not fit the vocabulary."""
    if vocabulary.kind is VocabularyKind.SPM:
        return SpmMerger(vocabulary, token_scores(index, len(vocabulary.texts)))
    return BpeMerger(index, vocabulary)


class BpeMerger:
    """Merges by rank within the pieces that the pre-tokenizer cuts."""

    def __init__(self, index: GgufIndex, vocabulary: Vocabulary) -> None:
        assert vocabulary.pre is not None
        self._cuts = pre = vocabulary.pre
        if pre.needs_merges and PREFIX + "merges" not in index.entries:
            index.fail_value("the vocabulary has no merges", 0)
        self._ids = {
            text: number
            for text, number in vocabulary.ids.items()
            if vocabulary.types[number] not in _NEVER_MERGED
        }
        self._gap = len(vocabulary.texts)
        model = _bpe_model(index, vocabulary.ids, {**self._ids, _GAP: self._gap}, pre)
        self._bpe = BpeTokenizer(model)
        steps: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        if not pre.raw:
            steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
        self._bpe.pre_tokenizer = Steps(steps)

    def encode(self, text: str) -> list[int]:
        if self._cuts.escape_spaces:
            text = text.replace(" ", SPACE_MARK)
        if not self._cuts.whole_lines:
            return self._merged(text)
        ids: list[int] = []
        for piece in re.findall(r"[^\n]+|\n+", text):
            line = self._ids.get(piece) if piece[0] == "\n" else None
            ids += [line] if line is not None else self._merged(piece)
        return ids

    def _merged(self, text: str) -> list[int]:
        ids = self._bpe.encode(text, add_special_tokens=False).ids
        return [number for number in ids if number != self._gap]


def _bpe_model(index: GgufIndex, everything: dict[str, int], ids: dict[str, int], cuts: Cuts) -> BPE:
    merges = _merges(index)

    def build(kept: list[tuple[str, str]]) -> BPE:
        return BPE(
            vocab=ids,
            merges=list(dict.fromkeys(kept)),  # of one that stands twice the first rank counts
            unk_token=_GAP,
            ignore_merges=cuts.ignore_merges,
            byte_fallback=cuts.raw,
        )

    try:
        return build(merges)
    except Exception:  # the library raises nothing more special, and does not say which merge it was
        for number, (left, right) in enumerate(merges):
            if not (left in everything and right in everything and left + right in everything):
                _bad_merge(index, number)
        return build([m for m in merges if m[0] in ids and m[1] in ids and m[0] + m[1] in ids])


def _merges(index: GgufIndex) -> list[tuple[str, str]]:
    merges = []
    texts = [raw.decode("utf-8", "replace") for raw in index.strings(PREFIX + "merges")]
    for number, text in enumerate(texts):
        # A token may begin with a space: the separator is the first one after position 0.
        left, space, right = text[1:].partition(" ")
        if not space:
            _bad_merge(index, number)
        merges.append((text[0] + left, right))
    return merges


def _bad_merge(index: GgufIndex, number: int) -> NoReturn:
    text = index.strings(PREFIX + "merges")[number].decode("utf-8", "replace")
    malformed(index, "merges", f"merge {number} ({text[:80]!r}) is not of two tokens into a third")


class SpmMerger:
    """Joins the two neighbours whose union has the highest score, the leftmost of equals first, until no
    union is a token; what is no token then is bytes, or the unknown token where a byte has no token."""

    def __init__(self, vocabulary: Vocabulary, scores: list[float]) -> None:
        never = (*_NEVER_MERGED, TokenType.BYTE)
        self._prefix = SPACE_MARK if vocabulary.space_prefix else ""
        self._ids = {
            text: number for text, number in vocabulary.ids.items() if vocabulary.types[number] not in never
        }
        self._costs = {text: -scores[number] for text, number in self._ids.items()}
        self._bytes = [
            vocabulary.ids.get(f"<0x{byte:02X}>", self._ids.get(chr(byte) if byte < 128 else ""))
            for byte in range(256)
        ]
        self._unknown = vocabulary.unknown

    def encode(self, text: str) -> list[int]:
        text = self._prefix + text.replace(" ", SPACE_MARK)
        ids: list[int] = []
        for start, end in pairwise(self._bounds(text)):
            number = self._ids.get(text[start:end])
            ids += [number] if number is not None else self._fallback(text[start:end])
        return ids

    def _bounds(self, text: str) -> list[int]:
        """Where the symbols begin that are left when nothing more can be joined, and the end of the text."""
        count, cost_of = len(text), self._costs.get
        # Symbol i is text[i:end[i]]; a joined one has end[i] == i. before[i] is the symbol in front of it.
        end, before = list(range(1, count + 1)), list(range(-1, count - 1))
        heap = [
            (cost, at, at + 2) for at in range(count - 1) if (cost := cost_of(text[at : at + 2])) is not None
        ]
        heapq.heapify(heap)
        while heap:
            _, left, stop = heapq.heappop(heap)
            right = end[left]
            if right == left or right >= stop or end[right] != stop:
                continue  # one of the two has been joined to something else
            end[left], end[right] = stop, right
            if stop < count:
                before[stop] = left
                after = end[stop]
                if (cost := cost_of(text[left:after])) is not None:
                    heapq.heappush(heap, (cost, left, after))
            front = before[left]
            if front >= 0 and (cost := cost_of(text[front:stop])) is not None:
                heapq.heappush(heap, (cost, front, stop))
        bounds, at = [0], 0
        while at < count:
            at = end[at]
            bounds.append(at)
        return bounds

    def _fallback(self, symbol: str) -> list[int]:
        found = [self._bytes[byte] for byte in symbol.encode()]
        if all(number is not None for number in found):
            return [number for number in found if number is not None]
        return [] if self._unknown is None else [self._unknown]
