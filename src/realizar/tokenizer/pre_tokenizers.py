r"""Pre-tokenizers of byte-pair vocabularies, which cut text before merging, by `tokenizer.ggml.pre`. Standard library
only.

A pattern is an Oniguruma regular expression. Each pattern is applied to every piece that the previous one left; a match
and the text between two matches both become pieces. The names are llama.cpp's. The expressions are those of the models'
own `tokenizer.json`, which llama.cpp rewrites for `std::regex` (its forms differ for some letters outside ASCII).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from realizar.errors import TokenizerError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A pre-tokenizer.

    Attributes:
        patterns: regular expressions, applied in turn.
        ignore_merges: a piece that is a token is not merged from its characters.
        add_bos: BOS is added if the file has no `add_bos_token`.
        force_bos: BOS is always added (gemma 4 files said false by mistake).
        byte_level: characters stand for bytes (GPT-2's alphabet); otherwise tokens are plain text.
        escape_spaces: spaces are written as U+2581.
        whole_newlines: a run of newlines that is a token is not merged from its characters.
        prefix_words: every line starts with U+2581, and each U+2581 starts a piece.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    force_bos: bool = False
    byte_level: bool = True
    escape_spaces: bool = False
    whole_newlines: bool = False
    prefix_words: bool = False


def pre_tokenizer(name: str, path: Path | None = None) -> PreTokenizer:
    """The one that a file's `tokenizer.ggml.pre` names; TokenizerError if unknown, as a guess would give other ids."""
    try:
        return _BY_NAME[name]
    except KeyError:
        prefix = "" if path is None else f"{path}: "
        raise TokenizerError(f"{prefix}unknown pre-tokenizer {name!r} (tokenizer.ggml.pre)") from None


def _ranges(text: str) -> str:
    return "".join("-".join(rf"\x{{{end}}}" for end in item.split("-")) for item in text.split())


# Cased letters, as of the Unicode version that deepseek-llm was made with.
_CASED = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943 "
)
_ASIAN = _ranges(
    "4E00-9FFF 3400-4DBF F900-FAFF 3040-30FF FF65-FF9F 2F00-2FDF E40-EFF 1780-17FF 1000-109F AA60-AA7F A9E0-A9FF "
    "AC00-D7AF 1100-11FF"
)
_HAN_KANA = "[" + _ranges("4E00-9FA5 3040-30FF") + "]+"
_HAN_HANGUL = "[" + _ranges("4E00-9FA5 800-4E00 AC00-D7FF") + "]+"
_WIDE_PUNCTUATION = _ranges("FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F")
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# Groups of three from the right. Only the first looks ahead: looking from each group would take quadratic time.
_DIGITS_FROM_RIGHT = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*+(?!\p{N}))|\p{N}{3}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_BLOOM = r" ?[^(\s|.,!?" + _ranges("2026 3002 FF0C 3001 964 6D4 60C") + ")]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = _DEEPSEEK3_WORDS + r"[\r\n]*|\s*[\r\n]+|" + _SPACES


def _words(
    number: str, *, start: str = _CONTRACTION + "|", letters: str = r"\p{L}+", newlines: str = r"\s*[\r\n]+"
) -> str:
    """The expression of llama 3 and qwen 2, which differ in the number of digits of a piece."""
    return rf"{start}[^\r\n\p{{L}}\p{{N}}]?{letters}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{newlines}|{_SPACES}"


def _cased_words(
    number: str, *, end: str = "", upper: str = _UPPER, lower: str = _LOWER, newlines: str = r"[\r\n/]*"
) -> str:
    """The expression of o200k: a word ends where capitals follow small letters; `end` includes its contraction."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{head}[{upper}]*[{lower}]+{end}|{head}[{upper}]+[{lower}]*{end}|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{newlines}|\s*[\r\n]+|{_SPACES}"
    )


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),))
_LLAMA3_BOS = replace(_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))
_GPT2_PLAIN = PreTokenizer((_GPT2,))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_DEEPSEEK3_PLAIN = PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3))
_GPT4O = PreTokenizer((_cased_words(r"\p{N}{1,3}", end=_CONTRACTION + "?"),))
_BAILING = PreTokenizer(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|" + _SPACES,)
)
# Of \d{1,3}(?=(?:\d{3})*\b), in linear time: a run of digits up to a boundary, what is left of it before groups of
# three, and the groups, which the last expression cuts.
_TINY_AYA = PreTokenizer(
    (
        r"(?<!\d)\d++\b",
        r"\A\d{1,2}(?=(?:\d{3})*+\z)",
        _cased_words(r"\p{N}{1,3}", end=_CONTRACTION + "?"),
    )
)
# Lines are pieces and nothing else is: merges cross words, as in SentencePiece.
_LINES = PreTokenizer((r"[^\n]+|\n+",), byte_level=False, escape_spaces=True)
_GEMMA4 = replace(_LINES, whole_newlines=True, force_bos=True)

_BY_NAME: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _LLAMA3_BOS,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("glm4", "glm5"), replace(_LLAMA3, ignore_merges=True)),
    "jais-2": PreTokenizer(
        (
            _words(r"\p{N}{1,3}").removesuffix(_SPACES)
            + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
            + r"\s{1}",
        )
    ),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    "deepseek-llm": PreTokenizer(
        (
            "[\r\n]",
            rf"\s?[{_CASED}]+",
            r"\s?[!-/:-~" + _ranges("FF01-FF0F FF1A-FF5E 2018-201F 3000-3002") + "]+",
            r"\s+$",
            _HAN_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3_PLAIN),
    "spark2_5": PreTokenizer(
        (r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3_WORDS + r"|[\r\n]|" + _SPACES, r"\p{N}"),
    ),
    "youtu": PreTokenizer(
        (
            f"[{_ranges('AC00-D7A3 3131-318E')}]+|[{_WIDE_PUNCTUATION}]+|[{_ranges('3105-312F')}]+|{_HAN_KANA}",
            _cased_words(r"\p{N}", end=_CONTRACTION + "?"),
        ),
        ignore_merges=True,
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_GPT2
    ),
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
        ),
        _GPT2_PLAIN,
    ),
    **dict.fromkeys(
        (
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ),
        _QWEN2,
    ),
    "qwen35": PreTokenizer(
        (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES,)
    ),
    "ufakzeka": PreTokenizer((_words(r"\p{N}", start=""),)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _words(r"\p{N}"))),
    "seed-coder": PreTokenizer(
        (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|" + _SPACES,)
    ),
    "exaone-moe": PreTokenizer(
        (
            _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
            r"|\s*[\r\n]|" + _SPACES,
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "tekken": PreTokenizer((_cased_words(r"\p{N}"),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "granite-embed-multi-97m": replace(_GPT4O, ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "kimi-k2": PreTokenizer(
        (
            r"\p{Han}+|"
            + _cased_words(
                r"\p{N}{1,3}",
                end=_CONTRACTION + "?",
                upper=_UPPER + r"&&[^\p{Han}]",
                lower=_LOWER + r"&&[^\p{Han}]",
                newlines=r"[\r\n]*",
            ),
        )
    ),
    "superbpe": PreTokenizer((r"\p{N}+", _DIGITS_FROM_RIGHT)),
    "afmoe": PreTokenizer((_DIGITS_FROM_RIGHT, f"[{_ASIAN}]+", _DEEPSEEK3)),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _GEMMA4),
    "sarvam-moe": _LINES,
    "mmbert": replace(
        _LINES, patterns=(r"\n+|\x{2581}?[^\x{2581}\n]+|\x{2581}",), whole_newlines=True, prefix_words=True
    ),
    "whitespace": PreTokenizer((r"\S+",), byte_level=False),
}
