"""What a GGUF file says of its vocabulary: texts, types and scores of tokens, special ids, flags.

Knows the `tokenizer.ggml.*` keys, their defaults and the repairs of `llama_vocab::impl::load` in llama.cpp's
`llama-vocab.cpp`. Must not know how text is merged into tokens. Copies what it needs of the file.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NoReturn

from swactor_core.errors import ModelError, UsageError
from swactor_core.values import frozen

from swactor_loader_gguf.index import GgufIndex, ValueType
from swactor_loader_gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

PREFIX = "tokenizer.ggml."

_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
# Each with the text that begins what it ends. llama.cpp ends at these whatever their type is; where neither
# of a pair is a control token they are ordinary text, such as HTML.
_END_OF_PAIR = {"</s>": "<s>", "<eos>": "<bos>", "[EOS]": "[BOS]"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens of code completion that end a generation, by key or else by text.
_COMPLETION_ENDS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
# Tokens around the gap of code completion, by key (the older one second) or else by text.
_COMPLETION_MARKS = {
    ("fim_pre_token_id", "prefix_token_id"): (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    ("fim_suf_token_id", "suffix_token_id"): (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    ("fim_mid_token_id", "middle_token_id"): (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
}
# Parts of the answer's own format in some families: they print, and they are control tokens all the same.
_CHANNELS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_REFUSED_KINDS = {
    "bert": "WordPiece belongs to encoders",
    "t5": "the unigram vocabularies of T5 belong to encoder-decoder models",
    "rwkv": "RWKV is no transformer",
    "plamo2": "PLaMo-2 is not a linear stack of attention blocks",
    "hybriddna": "models of DNA are not supported",
    "whitespace": "it belongs to models that embed text",
    "none": "prompts must be token ids",
    "no_vocab": "prompts must be token ids",
}


class VocabularyKind(StrEnum):
    """`tokenizer.ggml.model`, as far as decoders have it."""

    BPE = "gpt2"
    SPM = "llama"
    SPM_LIKE_BPE = "gemma4"


class TokenType(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@frozen
class Vocabulary:
    """`pre` is None for SPM. `types` has the repairs that `end_of_generation` needed. `printed` are control
    tokens whose text belongs to the answer; `strips_right` are special tokens that swallow the white space
    behind them; `suppressed` are never to be sampled. Ids are indices of `texts`; special ones that lie
    outside of it are None."""

    kind: VocabularyKind
    pre: PreTokenizer | None
    texts: list[str]
    types: list[int]
    ids: dict[str, int]
    bos: int | None
    eos: int | None
    unknown: int | None
    add_bos: bool
    add_eos: bool
    space_prefix: bool
    end_of_generation: frozenset[int]
    printed: frozenset[int]
    strips_right: frozenset[int]
    suppressed: frozenset[int]


def read_vocabulary(index: GgufIndex, pre_name: str | None = None) -> Vocabulary:
    """The file's vocabulary; `pre_name` overrules the file's pre-tokenizer.

    Raises ModelError for one that is malformed or of a kind that is not supported, UsageError for a
    `pre_name` that does not exist or has no place in this kind.
    """
    kind = _kind(index)
    pre = _pre_tokenizer(index, kind, pre_name)
    texts = _token_texts(index)
    types = _token_types(index, len(texts))
    ids = {text: number for number, text in enumerate(texts)}
    spm = kind is VocabularyKind.SPM

    def special(name: str, default: int = -1) -> int | None:
        """The id under that key, or None: files with ids outside their vocabulary exist."""
        number = index.integer(PREFIX + name, -(1 << 63), (1 << 64) - 1, default=-1)
        if not 0 <= number < len(texts):
            number = default
        return number if 0 <= number < len(texts) else None

    bos, eos = special("bos_token_id", 1 if spm else -1), special("eos_token_id", 2 if spm else -1)
    for keys, marks in _COMPLETION_MARKS.items():
        if all(special(key) is None for key in keys):
            for number in (ids[text] for text in marks if text in ids):
                types[number] = TokenType.CONTROL  # a converter's slip, as in `_end_of_generation`
    keyed = {name: special(name) for name in (*_END_KEYS, *_COMPLETION_ENDS)} | {"eos_token_id": eos}
    ends, printed = _end_of_generation(texts, types, ids, keyed)
    add_bos = index.flag(PREFIX + "add_bos_token", spm if pre is None else pre.add_bos)
    return Vocabulary(
        kind=kind,
        pre=pre,
        texts=texts,
        types=types,
        ids=ids,
        bos=bos,
        eos=eos,
        unknown=special("unknown_token_id", 0 if spm else -1),
        add_bos=(add_bos or (pre is not None and pre.always_bos)) and bos is not None,
        add_eos=index.flag(PREFIX + "add_eos_token", False) and eos is not None,
        space_prefix=index.flag(PREFIX + "add_space_prefix", spm) and spm,
        end_of_generation=ends,
        printed=printed,
        strips_right=_strips_right(index, types, ids),
        suppressed=_suppressed(index, len(texts)),
    )


def malformed(index: GgufIndex, name: str, what: str) -> NoReturn:
    """Raises ModelError for an array of the vocabulary."""
    index.fail_value(f"{PREFIX}{name}: {what}", index.entries[PREFIX + name].offset)


def _kind(index: GgufIndex) -> VocabularyKind:
    if index.array(PREFIX + "tokens", (ValueType.STRING,)) is None:
        raise ModelError(f"{index.path}: the file has no vocabulary", hint="give prompts as token ids")
    name = index.text(PREFIX + "model")
    try:
        return VocabularyKind(name)
    except ValueError:
        reason = _REFUSED_KINDS.get(name, "it is not known")
        raise ModelError(
            f"{index.path}: vocabularies of kind {name!r} are not supported: {reason}",
            hint=f"supported: {', '.join(VocabularyKind)}; token ids need no vocabulary",
        ) from None


def _pre_tokenizer(index: GgufIndex, kind: VocabularyKind, chosen: str | None) -> PreTokenizer | None:
    known = f"supported: {', '.join(sorted(PRE_TOKENIZERS))}"
    if chosen is not None:
        if kind is not VocabularyKind.BPE:
            raise UsageError(
                f"pre-tokenizer {chosen!r} was asked for, and vocabularies of kind {kind} have none",
                hint="leave --pre out",
            )
        if chosen not in PRE_TOKENIZERS:
            raise UsageError(f"there is no pre-tokenizer {chosen!r}", hint=known)
        return PRE_TOKENIZERS[chosen]
    if kind is not VocabularyKind.BPE:
        return None if kind is VocabularyKind.SPM else PRE_TOKENIZERS["gemma4"]
    name = index.text(PREFIX + "pre", default="")
    if name not in PRE_TOKENIZERS:
        what = f"pre-tokenizer {name!r} is not supported" if name else "the vocabulary names no pre-tokenizer"
        raise ModelError(f"{index.path}: {what} ({PREFIX}pre)", hint=f"name one with --pre; {known}")
    return PRE_TOKENIZERS[name]


def _token_texts(index: GgufIndex) -> list[str]:
    raw = index.strings(PREFIX + "tokens")
    try:
        texts = [text.decode("utf-8") for text in raw]
    except UnicodeDecodeError:
        number = next(number for number, text in enumerate(raw) if not _is_utf8(text))
        malformed(index, "tokens", f"token {number} is not valid UTF-8")
    return [text or f"[EMPTY_{number}]" for number, text in enumerate(texts)]


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _token_types(index: GgufIndex, count: int) -> list[int]:
    entry = index.array(PREFIX + "token_type", (ValueType.INT32, ValueType.UINT32))
    if entry is None:
        return [TokenType.NORMAL] * count
    if entry.count != count:
        malformed(index, "token_type", f"{entry.count} types for {count} tokens")
    return [int(kind) for kind in index.numbers(entry)]


def token_scores(index: GgufIndex, count: int) -> list[float]:
    """Of each token; all zero when the file has none."""
    entry = index.array(PREFIX + "scores", (ValueType.FLOAT32, ValueType.INT32))
    if entry is None:
        return [0.0] * count
    if entry.count != count:
        malformed(index, "scores", f"{entry.count} scores for {count} tokens")
    scores = [float(score) for score in index.numbers(entry)]
    if any(score != score for score in scores):
        malformed(index, "scores", "a score is not a number")
    return scores


def _end_of_generation(
    texts: list[str], types: list[int], ids: dict[str, int], keyed: dict[str, int | None]
) -> tuple[frozenset[int], frozenset[int]]:
    """What ends a generation, and the control tokens that print. Repairs `types`: such a token of another
    type is a converter's slip; as plain text it would be printed, and could be written by a user."""
    ends = {number for name in _END_KEYS if (number := keyed[name]) is not None}
    named = [number for text in _END_TEXTS if (number := ids.get(text)) is not None]
    for key, candidates in _COMPLETION_ENDS.items():
        number = keyed[key]
        if number is None:
            named += [ids[text] for text in candidates if text in ids]
        elif types[number] in (TokenType.CONTROL, TokenType.USER_DEFINED):
            named.append(number)
        else:
            ends.add(number)  # a key may point anywhere: ordinary text stays what it is
    for text, partner in _END_OF_PAIR.items():
        pair = [types[ids[name]] for name in (text, partner) if name in ids]
        named += [ids[text]] if text in ids and TokenType.CONTROL in pair else []
    for number in named:
        types[number] = TokenType.CONTROL
        ends.add(number)
    printed = {ids[text] for text in _CHANNELS if text in ids}
    for number in printed:
        types[number] = TokenType.CONTROL
    ending = {texts[number] for number in ends}
    calls = ending & {"<|call|>", "<|calls|>"}
    if calls and ending & {"<|return|>", "<|flush|>"} and "<|end|>" in ending:
        ends.discard(ids["<|end|>"])  # there it closes one part of an answer that goes on
        printed.add(ids["<|end|>"])
    if ending & {"<|tool_response>", "<|plamo:eos|>"} and "</s>" in ending:
        ends.discard(ids["</s>"])
        types[ids["</s>"]] = TokenType.NORMAL
    return frozenset(ends), frozenset(printed)


def _strips_right(index: GgufIndex, types: list[int], ids: dict[str, int]) -> frozenset[int]:
    """Phi-3's special tokens swallow white space; no key says so, llama.cpp goes by the model's name."""
    name = index.text("general.name", default="").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    special = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    found = {number for number, kind in enumerate(types) if kind in special}
    found |= {ids[text] for text in ("</s>",) if text in ids}
    return frozenset(found - {ids[text] for text in ("<unk>", "<s>", "<|endoftext|>") if text in ids})


def _suppressed(index: GgufIndex, count: int) -> frozenset[int]:
    entry = index.array(PREFIX + "suppress_tokens", (ValueType.INT32,))
    listed = () if entry is None else index.numbers(entry)
    return frozenset(int(number) for number in listed if 0 <= number < count)
