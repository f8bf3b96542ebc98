"""The pre-tokenizers of BPE vocabularies: how text is cut before merges apply.

Knows `tokenizer.ggml.pre` names and the expressions that belong to them, which a GGUF file does not carry.
Both are those of llama.cpp's `llama-vocab.cpp` and of the hand-written cutters in its `unicode.cpp`, also
where these are coarser than a model's published tokenizer (letters have no case outside ASCII there). What no
expression matches is a piece of its own. Expressions are in Oniguruma's syntax, whose tables are Unicode 16:
characters that came with it are letters and signs here, where llama.cpp still sees unassigned ones.
"""

from __future__ import annotations

from dataclasses import replace

from swactor_core.values import frozen

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BREAKS = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"
_TAIL = rf"{_BREAKS}|{_SPACES}"
_REST = rf"{_SIGNS}|{_TAIL}"

_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
# Code points, and not literals: text tools compose some of them into others.
_DEEPSEEK_LETTERS = (
    "B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D "
    "1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC "
    "2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 "
    "214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 "
    "A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB "
    "10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)

# As llama.cpp's `unicode_cpt_is_han`, which is not the Unicode script.
_HAN = "4E00-9FFF 3400-4DBF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B820-2CEAF 2CEB0-2EBEF F900-FAFF 2F800-2FA1F"
_AFMOE_SCRIPTS = (
    "4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF "
    "1000-109F AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
# llama.cpp's expressions over wide characters see every space outside ASCII as a vertical tab.
_FAR = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}&&[^\s]]+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_NOT_LOWER, _NOT_UPPER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_MARKED_NOT_LOWER, _MARKED_NOT_UPPER = r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]"
_SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
# Threes from the right, the first group with the text in front of it. Only that one looks ahead, and text
# without digits matches at once: else the time would grow with the square of the text.
_GROUPED_FROM_RIGHT = r"(?<=\p{N})\p{N}{3}|\P{N}*+\p{N}{1,3}(?=(?:\p{N}{3})*+(?!\p{N}))|\P{N}+"
_LINES = r"[^\n]+|[\n]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _ranges(points: str) -> str:
    """Hexadecimal code points and ranges of them, as the inside of a bracket expression."""
    return "".join("-".join(rf"\x{{{point}}}" for point in part.split("-")) for part in points.split())


def _cased(upper: str, lower: str, *, suffix: str = "") -> str:
    """Words that begin anew at an ASCII capital behind a small letter."""
    return rf"{_LEAD}{upper}*{lower}+{suffix}|{_LEAD}{upper}+{lower}*{suffix}"


@frozen
class PreTokenizer:
    """`patterns` apply one after another, each within the pieces of the one before.

    `ignore_merges`: a piece that is a token as a whole is taken as it is. `add_bos` is what a file without
    the key means; `always_bos` overrules the key. `raw`: tokens are text in UTF-8, bytes stand as `<0xNN>`;
    otherwise they are bytes in GPT-2's alphabet. `escape_spaces`: a space stands as U+2581.
    `whole_lines`: a run of line feeds that is a token is taken as it is. `needs_merges`: a file without
    merges is malformed."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    always_bos: bool = False
    raw: bool = False
    escape_spaces: bool = False
    whole_lines: bool = False
    needs_merges: bool = True


_PLAIN = PreTokenizer((_GPT2,))
_DIGITS_FIRST = PreTokenizer((r"\p{N}", _GPT2))
_THREE_DIGITS = PreTokenizer((rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",))
_ONE_DIGIT = PreTokenizer((rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_REST}",))
_LLAMA3 = replace(_THREE_DIGITS, ignore_merges=True, add_bos=True)
_CHATGLM4 = replace(_THREE_DIGITS, ignore_merges=True)
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        _CJK,
        rf"{_ASCII_SIGNS}[A-Za-z]+|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
    )
)
_GPT4O = PreTokenizer(
    (
        rf"{_cased(_NOT_LOWER, _NOT_UPPER, suffix=_SUFFIX + '?')}|\p{{N}}{{1,3}}|"
        rf"{_SIGNS_SLASH}|{_TAIL}",
    )
)
_TINY_AYA = PreTokenizer(
    (
        _GROUPED_FROM_RIGHT,
        rf"{_LEAD}[\p{{L}}\p{{M}}]+{_SUFFIX}?|\p{{N}}{{1,3}}|{_SIGNS_SLASH}|{_TAIL}",
    )
)
_BAILING = PreTokenizer(
    (
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
        rf"|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|{_SPACES}",
    )
)
_SPM_LIKE = PreTokenizer((_LINES,), raw=True, escape_spaces=True)
_GEMMA4 = replace(_SPM_LIKE, add_bos=True, always_bos=True, whole_lines=True)
_POEM = PreTokenizer((_BLOOM,))

_FAMILIES: dict[PreTokenizer, str] = {
    # what llama.cpp takes, with a warning, for files from before there was the key
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): "default",
    _PLAIN: "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
    "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4",
    _DIGITS_FIRST: "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    _LLAMA3: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    _THREE_DIGITS: "dbrx smaug-bpe chatglm-bpe",
    _CHATGLM4: "glm4 glm5",
    _ONE_DIGIT: "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    PreTokenizer(
        (rf"{_SUFFIX}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}",)
    ): "qwen35",
    PreTokenizer(
        (
            rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BREAKS}|"
            + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"|\s{1,2}(?!\S)|\s",
        )
    ): "jais-2",
    PreTokenizer(
        (
            "[\r\n]",
            rf"\s?[A-Za-z{_ranges(_DEEPSEEK_LETTERS)}]+",
            "\\s?[!-/:-~！-／：-～‘-‟、-。]+",
            r"\s+\z",
            _FAR,
            r"\p{N}+",
        )
    ): "deepseek-llm",
    PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _FAR, r"\p{N}")): "deepseek-coder",
    _DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    PreTokenizer(
        (
            r"\p{N}{1,3}",
            _CJK,
            rf"{_ASCII_SIGNS}[A-Za-z]+|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}",
            r"\p{N}",
        )
    ): "spark2_5",
    PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            rf"{_LEAD}[\p{{L}}\p{{M}}]+{_SUFFIX}?|\p{{N}}|{_SIGNS_SLASH}|{_TAIL}",
        ),
        ignore_merges=True,
    ): "youtu",
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")): "falcon",
    _POEM: "poro-chat bloom gpt3-finnish",
    PreTokenizer((_BLOOM, r"\p{N}")): "viking",
    PreTokenizer(
        (rf"{_cased(_NOT_LOWER, _NOT_UPPER)}|\p{{N}}|{_SIGNS_SLASH}|{_TAIL}",),
        ignore_merges=True,
        add_bos=True,
    ): "tekken",
    PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(?:IMGIMG)(?:(?:A|B|C|D|E|F|G|H|I){1,4})Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ): "chameleon",
    _GPT4O: "gpt-4o llama4 kanana2 talkie minimax-m2",
    PreTokenizer(
        (
            rf"{_cased(_MARKED_NOT_LOWER, _MARKED_NOT_UPPER, suffix=_SUFFIX + '?')}|\p{{N}}{{1,3}}|"
            rf"{_SIGNS_SLASH}|{_TAIL}",
        ),
        ignore_merges=True,
    ): "granite-embed-multi-97m",
    _TINY_AYA: "tiny_aya cohere2moe",
    PreTokenizer(
        (rf"[{_ranges(_HAN)}]+|{_LEAD}[\p{{L}}&&[^{_ranges(_HAN)}]]+{_SUFFIX}?|\p{{N}}{{1,3}}|{_REST}",),
        needs_merges=False,
    ): "kimi-k2",
    PreTokenizer((r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))")): "superbpe",
    _BAILING: "bailingmoe bailingmoe2 llada-moe",
    PreTokenizer((rf"{_SUFFIX}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",)): "seed-coder",
    PreTokenizer((rf"{_WORD}|\p{{N}}|{_REST}",)): "ufakzeka",
    PreTokenizer(
        (
            _GROUPED_FROM_RIGHT,
            rf"[{_ranges(_AFMOE_SCRIPTS)}]+",
            rf"{_ASCII_SIGNS}[A-Za-z]+|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
        )
    ): "afmoe",
    PreTokenizer((_LINES, rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_REST}")): "laguna",
    PreTokenizer(
        (
            rf"{_SUFFIX}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
            rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
        )
    ): "exaone-moe",
    PreTokenizer((r"\p{N}{1,3}", rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_REST}"), ignore_merges=True): "minicpm5",
    _GEMMA4: "gemma4 granite-embed-multi-311m",
    _SPM_LIKE: "sarvam-moe",
    PreTokenizer((r"\S+",), raw=True): "whitespace",
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre for pre, names in _FAMILIES.items() for name in names.split()
}
