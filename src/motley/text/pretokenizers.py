r"""How each family of byte-level BPE vocabularies cuts text into words before merging (`tokenizer.ggml.pre`).

A wrong cut gives legal tokens that the model has never seen side by side, so an unknown name is an error and
not a guess. The patterns are those of the models' own tokenizers, in the regular expressions of the
`tokenizers` library; several patterns are applied one after the other, each to what the previous one left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from motley.errors import TokenizerError


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut and normalized before the merges."""

    patterns: tuple[str, ...]
    is_byte_level: bool = True  # False: a space is U+2581, and what is no token becomes byte tokens
    normalizes: bool = False  # Unicode NFC first
    ignores_merges: bool = False  # a word that is a token is taken whole, however its merges would have gone
    adds_bos: bool = False  # unless `tokenizer.ggml.add_bos_token` says otherwise


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letters: str = r"\p{L}", marks: str = "") -> str:
    """The shape that GPT-4's first tokenizer made popular; families differ in how digits are grouped."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _o200k(digits: str, contraction: str) -> str:
    """The same with words also cut where lower case turns into upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{contraction}|{start}{upper}+{lower}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _class(code_points: str) -> str:
    r"""The inside of a character class from code points and ranges of them, in hexadecimal."""
    return re.sub("[0-9A-F]+", lambda point: chr(int(point[0], 16)), code_points).replace(" ", "")


# The cased letters that DeepSeek LLM lists one by one; no Unicode class is the same set.
_DEEPSEEK_LETTERS = _class(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A "
    "38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF "
    "1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D "
    "1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 "
    "1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F "
    "2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F "
    "A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

_gpt2 = PreTokenizer((_GPT2,))
_starcoder = PreTokenizer((r"\p{N}", _GPT2))
_llama3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_qwen2 = PreTokenizer((_cl100k(r"\p{N}"),), normalizes=True)
_gpt4o = PreTokenizer((_o200k(r"\p{N}{1,3}", _CONTRACTION + "?"),))

PRETOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        "gpt-2": _gpt2,
        "phi-2": _gpt2,
        "gigachat": _gpt2,
        "exaone4": _gpt2,
        "mpt": replace(_gpt2, normalizes=True),
        "olmo": replace(_gpt2, normalizes=True),
        "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
        "starcoder": _starcoder,
        "refact": _starcoder,
        "smollm": _starcoder,
        "codeshell": _starcoder,
        "exaone": _starcoder,
        "command-r": replace(_starcoder, normalizes=True),
        "llama3": _llama3,
        "llama-v3": _llama3,
        "llama-bpe": _llama3,
        "falcon3": _llama3,
        "falcon-h1": _llama3,
        "pixtral": _llama3,
        "lfm2": _llama3,
        "smaug-bpe": replace(_llama3, ignores_merges=False, adds_bos=False),
        "dbrx": replace(_llama3, ignores_merges=False, adds_bos=False),
        "glm4": replace(_llama3, ignores_merges=False, adds_bos=False),
        "chatglm-bpe": replace(_llama3, ignores_merges=False, adds_bos=False),
        "qwen2": _qwen2,
        "qwen35": replace(_qwen2, patterns=(_cl100k(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"),)),
        "deepseek-r1-qwen": replace(_qwen2, normalizes=False),
        "stablelm2": replace(_qwen2, normalizes=False),
        "megrez": replace(_qwen2, normalizes=False),
        "hunyuan": replace(_qwen2, normalizes=False),
        "deepseek-llm": PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}",
            )
        ),
        "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
        "deepseek-v3": PreTokenizer(
            (
                r"\p{N}{1,3}",
                "[一-龥぀-ゟ゠-ヿ]+",
                rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
                rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
            )
        ),
        "tekken": PreTokenizer((_o200k(r"\p{N}", ""),), ignores_merges=True, adds_bos=True),
        "gpt-4o": _gpt4o,
        "llama4": _gpt4o,
        "minimax-m2": _gpt4o,
        "gemma4": PreTokenizer((), is_byte_level=False, adds_bos=True),
    }
)


def find_pretokenizer(name: str) -> PreTokenizer:
    """The entry of that name, or an error that lists the names there are."""
    if name not in PRETOKENIZERS:
        known = ", ".join(sorted(PRETOKENIZERS))
        raise TokenizerError(f"tokenizer.ggml.pre is {name!r}, which is unknown", hint=f"known: {known}")
    return PRETOKENIZERS[name]
