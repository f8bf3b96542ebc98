"""The pre-tokenizers of byte-level BPE vocabularies: how text is cut before merges apply.

Knows `tokenizer.ggml.pre` names and the expressions that belong to them, which a GGUF file does not carry.
The expressions are those of the models' published tokenizers; llama.cpp's `llama-vocab.cpp` says which name
means which. What no expression matches is a piece of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` apply one after another. `ignore_merges`: a piece that is a token as a whole is taken as it
    is. `add_bos` is what a file without the key means."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = PreTokenizer(
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, add_bos=True
)
_QWEN2 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",))

_PLAIN = PreTokenizer((_GPT2,))
_DIGITS_FIRST = PreTokenizer((r"\p{N}", _GPT2))

PRE_TOKENIZERS = {
    "gpt-2": _PLAIN,
    "mpt": _PLAIN,
    "smollm": _DIGITS_FIRST,
    "starcoder": _DIGITS_FIRST,
    "refact": _DIGITS_FIRST,
    "command-r": _DIGITS_FIRST,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
