"""How text is cut before merges, by the names that `tokenizer.ggml.pre` has for it.

The patterns are those of the models' own tokenizer.json files. llama.cpp, whose engine for patterns has neither cases
nor marks of letters beyond ASCII, and no spaces among ranges, cuts otherwise in some places: for tekken and gpt-4o
before marks and where the case changes, for deepseek-llm and deepseek-coder at spaces like U+2009 and U+3000."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UP_THEN_LOW = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_UP_THEN_LOW[0]}|{_UP_THEN_LOW[1]}|\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}"
_GPT4O = (
    rf"{_UP_THEN_LOW[0]}{_CONTRACTIONS}?|{_UP_THEN_LOW[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SYMBOLS_SLASH}|{_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"  # and Korean, and what lies between
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CASED = (  # letters with a case, as far as DeepSeek's tokenizer knows them
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"  # ASCII's, wide ones, quotes and stops
_DEEPSEEK = ("[\r\n]", rf"\s?[{_CASED}]+", rf"\s?{_MARKS}+", r"\s+$", _CHINESE, r"\p{N}+")
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")
_NO_STOP = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"  # nor a space


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one kind of text-cutting goes: each pattern cuts what those before it left."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False  # what is a token as a whole is it, whatever merges lead to
    adds_bos: bool = False  # where no key says whether

    def build(self) -> pre_tokenizers.PreTokenizer:
        """As the tokenizers library has it."""
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, in_bytes])


def _rows() -> Iterator[tuple[str, PreTokenizer]]:
    llama3 = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
    yield "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", llama3
    yield "glm4", PreTokenizer((_LLAMA3,), ignores_merges=True)
    yield "dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))
    qwen2 = "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan grok-2 solar-open kormo bailingmoe bailingmoe2 llada-moe"
    yield qwen2, PreTokenizer((_QWEN2,))
    yield "qwen35", PreTokenizer((_QWEN35,))
    yield "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat exaone4 mellum a.x-4.0", PreTokenizer((_GPT2,))
    yield "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))
    yield "falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))
    yield "default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
    yield "tekken", PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True)
    yield "gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((_GPT4O,))
    yield "deepseek-llm", PreTokenizer(_DEEPSEEK)
    yield "deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)
    yield "deepseek-v3 hunyuan-dense", PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK3))
    yield "seed-coder", PreTokenizer((_SEED,))
    yield "poro-chat bloom gpt3-finnish", PreTokenizer((_NO_STOP,))
    yield "viking", PreTokenizer((_NO_STOP, r"\p{N}"))


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: row for names, row in _rows() for name in names.split()}
