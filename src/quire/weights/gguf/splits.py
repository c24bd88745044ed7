"""How byte-level tokenizers cut text into words before merging, by the names that GGUF files give (tokenizer.ggml.pre).

Facts are llama.cpp's table (src/llama-vocab.cpp) and the tokenizer.json of each model; patterns are applied in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.text.vocab import LLAMA3_SPLIT, QWEN2_SPLIT


@dataclass(frozen=True, slots=True)
class Splitting:
    """`patterns` None is GPT-2's own way. `whole_words`: a word that is a token stays whole, whatever the merges."""

    patterns: tuple[str, ...] | None
    whole_words: bool = False
    add_bos: bool = False  # where the file does not say
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_SUFFIX}|{_HEAD}{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)
_TEKKEN = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+|{_HEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥\x{3040}-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_END}",
)
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_NO_HAN = "&&[^\\p{Han}]"
_UPPER_NO_HAN, _LOWER_NO_HAN = f"{_UPPER[:-1]}{_NO_HAN}]", f"{_LOWER[:-1]}{_NO_HAN}]"
_KIMI = (
    rf"\p{{Han}}+|{_HEAD}{_UPPER_NO_HAN}*{_LOWER_NO_HAN}+{_SUFFIX}|{_HEAD}{_UPPER_NO_HAN}+{_LOWER_NO_HAN}*{_SUFFIX}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
)
_SEED = rf"{_CONTRACTED}|{_HEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}"
_EXAONE_MOE = (
    rf"{_CONTRACTED}|{_HEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = (
    rf"{_CONTRACTED}|{_HEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
    r"|\s{1,2}(?!\S)|\s"
)
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_SPARK = (
    rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
)
_ASIAN = (
    "[一-\u9fff㐀-\u4dbf豈-\ufaff\u3040-ゟ゠-ヿ\uff65-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7af"
    "ᄀ-ᇿ]+"
)
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    _ASIAN,
    rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}",
)
_YOUTU = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\x{3040}-ゟ゠-ヿ]+",
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_SUFFIX}|{_HEAD}{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}",
)
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{1d400}-\x{1d7ff}\x{16e40}-\x{16e7f}]]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-\x{d7ff}]+",
    r"\p{N}+",
)
_BAILING = (
    rf"'(?i:[sdmt]|ll|ve|re)|{_HEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_QWEN35 = rf"{_CONTRACTED}|{_HEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}"
_MINICPM5 = rf"{_CONTRACTED}|{_HEAD}\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_TURKISH = rf"{_HEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BY_NAMES: tuple[tuple[str, Splitting], ...] = (
    (
        "gpt-2 gpt2 phi-2 mpt olmo jina-es jina-de jina-v1-en jina-v2-es jina-v2-de modern-bert jais exaone4 "
        "trillion granite-docling gigachat a.x-4.0 mellum",
        Splitting(None),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Splitting((LLAMA3_SPLIT,), whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", Splitting((LLAMA3_SPLIT,))),
    ("glm4 glm5", Splitting((LLAMA3_SPLIT,), whole_words=True)),
    ("qwen2", Splitting((QWEN2_SPLIT,), nfc=True)),
    ("deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2 kormo f2llmv2", Splitting((QWEN2_SPLIT,))),
    ("qwen35", Splitting((_QWEN35,), nfc=True)),
    ("laguna", Splitting((r"[^\n]+|[\n]+", QWEN2_SPLIT))),
    ("minicpm5", Splitting((r"\p{N}{1,3}", _MINICPM5), whole_words=True)),
    ("ufakzeka", Splitting((_TURKISH,))),
    ("bailingmoe bailingmoe2 llada-moe", Splitting((_BAILING,))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", Splitting((r"\p{N}", _GPT2))),
    ("chameleon", Splitting(_CHAMELEON, add_bos=True)),
    ("superbpe", Splitting((r"\p{N}+", r"\d{1,3}(?=(?:\d{3})*(?!\d))"))),
    ("deepseek-llm", Splitting(_DEEPSEEK)),
    ("afmoe", Splitting(_AFMOE)),
    ("youtu", Splitting(_YOUTU, whole_words=True)),
    ("spark2_5", Splitting((*_DEEPSEEK3[:2], _SPARK, r"\p{N}"))),
    ("falcon", Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("default", Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (
        "deepseek-coder",
        Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\x{d7ff}]+", r"\p{N}")),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Splitting(_DEEPSEEK3)),
    ("kimi-k2", Splitting((_KIMI,))),
    ("seed-coder", Splitting((_SEED,))),
    ("exaone-moe", Splitting((_EXAONE_MOE,))),
    ("jais-2", Splitting((_JAIS2,))),
    ("bloom poro-chat gpt3-finnish", Splitting((_BLOOM,))),
    ("viking", Splitting((_BLOOM, r"\p{N}"))),
    ("gpt-4o llama4 kanana2 minimax-m2 talkie", Splitting((_GPT4O,))),
    ("tiny_aya cohere2moe", Splitting((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    ("tekken", Splitting((_TEKKEN,), whole_words=True, add_bos=True)),
)
SPLITTINGS: Mapping[str, Splitting] = {
    name: splitting for names, splitting in _BY_NAMES for name in names.split()
}
