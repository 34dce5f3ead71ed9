"""The tokenizer of a GGUF file, as the `tokenizers` library has it and as the contents of the files that stand beside a
checkpoint's weights. Neither torch nor transformers is needed.

Two kinds are made: byte-level BPE, whose merges a file lists, and sentencepiece's ("llama"), whose merges its scores
imply: of all neighbours whose joined text is a token, those of the highest score become it first. Ids are llama.cpp's
but for what `pre_tokenizers.py` says, among tokens of one score, of which llama.cpp takes the leftmost, and where one
special token's text runs into another's, of which it takes the longer one and this the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from outrider.gguf.header import GgufHeader, WrongGguf
from outrider.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from outrider.gguf.vocabulary import PREFIX, TOKENS, GgufVocabulary, TokenKind, read_vocabulary, wrong_key

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
MOST_MERGES = 1 << 21  # four times Gemma 3's
MOST_CUTTING = 1 << 26  # six times Gemma 3's: the lengths of texts squared, which is what it takes to cut each anywhere
SPACE = "▁"
MODEL, PRE, MERGES = PREFIX + "model", PREFIX + "pre", PREFIX + "merges"
ADD_BOS, ADD_EOS = PREFIX + "add_bos_token", PREFIX + "add_eos_token"
ADD_PREFIX, COLLAPSE = PREFIX + "add_space_prefix", PREFIX + "remove_extra_whitespaces"
TEMPLATE = "tokenizer.chat_template"
_STRIPPING = ("phi-3", "phi3")  # in a model's name: spaces after its special tokens are theirs
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_files(header: GgufHeader) -> tuple[Backend, dict[str, Any]]:
    """The tokenizer, and what its tokenizer_config.json holds. Raises WrongGguf, which names the key that is wrong."""
    model = _model(header)
    vocabulary = read_vocabulary(header, model == SENTENCEPIECE)
    config = _config(header, vocabulary, model)
    backend = _sentencepiece(header, vocabulary) if model == SENTENCEPIECE else _byte_level(header, vocabulary)
    _add_tokens(backend, header, vocabulary)
    around = {role: vocabulary.roles[role] for role in ("bos", "eos") if config[f"add_{role}_token"]}
    if around:
        backend.post_processor = _around(backend, around)
    return backend, config


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """What a generation_config.json says of the tokens that end an answer, and of the first. Raises WrongGguf."""
    vocabulary = read_vocabulary(header, _model(header) == SENTENCEPIECE)
    found: dict[str, Any] = {"eos_token_id": list(vocabulary.ends)} if vocabulary.ends else {}
    return found | ({"bos_token_id": vocabulary.roles["bos"]} if "bos" in vocabulary.roles else {})


def _model(header: GgufHeader) -> str:
    model = header.metadata.get(MODEL)
    if model not in (BYTE_LEVEL, SENTENCEPIECE):
        raise wrong_key(header, MODEL, f"is {model!r:.60}; allowed: {BYTE_LEVEL}, {SENTENCEPIECE}")
    return str(model)


def _config(header: GgufHeader, vocabulary: GgufVocabulary, model: str) -> dict[str, Any]:
    texts = tuple(vocabulary.ids)
    named = {f"{role}_token": texts[vocabulary.roles[role]] for role in ("bos", "eos", "unk", "pad")
             if role in vocabulary.roles}  # fmt: skip
    adds_bos = model == SENTENCEPIECE or _pre_tokenizer(header).adds_bos
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _flag(header, ADD_BOS, adds_bos),
        "add_eos_token": _flag(header, ADD_EOS, False),
        **named,
    }
    for role in ("bos", "eos"):
        if config[f"add_{role}_token"] and role not in vocabulary.roles:
            raise WrongGguf(f"{header.files[0]} has no {PREFIX}{role}_token_id, and that token is to be added")
    if template := _templates(header):
        config["chat_template"] = template
    return config


def _flag(header: GgufHeader, key: str, usual: bool) -> bool:
    value = header.metadata.get(key, usual)
    if not isinstance(value, bool):
        raise wrong_key(header, key, f"is {value!r:.40}; allowed: true, false")
    return value


def _templates(header: GgufHeader) -> str | list[dict[str, str]] | None:
    """The one there is, or all of them by name."""
    found = {key: value for key, value in header.metadata.items() if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")}
    for key, value in found.items():
        if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
            raise wrong_key(header, key, "allowed: a text in UTF-8")
    if found.keys() <= {TEMPLATE}:
        return found.get(TEMPLATE)
    return [{"name": key.removeprefix(TEMPLATE)[1:] or "default", "template": found[key]} for key in sorted(found)]


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    name = header.metadata.get(PRE, "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise wrong_key(header, PRE, f"is {name!r:.60}; allowed: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _byte_level(header: GgufHeader, vocabulary: GgufVocabulary) -> Backend:
    pre_tokenizer = _pre_tokenizer(header)
    merges = _listed_merges(header, vocabulary)
    model = models.BPE(dict(vocabulary.ids), merges, ignore_merges=pre_tokenizer.ignores_merges)
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _listed_merges(header: GgufHeader, vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    listed, ids = header.metadata.get(MERGES), vocabulary.ids
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise wrong_key(header, MERGES, "allowed: an array of texts")
    if len(listed) > MOST_MERGES:
        raise wrong_key(header, MERGES, f"has {len(listed)} entries; allowed: at most {MOST_MERGES}")
    merges: dict[tuple[str, str], None] = {}  # of one that is there twice the first counts
    for one in listed:
        at = one.find(" ", 1)
        pair = one[:at], one[at + 1 :]
        if at < 0 or pair[0] not in ids or pair[1] not in ids or "".join(pair) not in ids:
            raise wrong_key(header, MERGES, f"has {one!r:.60}, which does not make a token of two")
        merges.setdefault(pair)
    return list(merges)


def _sentencepiece(header: GgufHeader, vocabulary: GgufVocabulary) -> Backend:
    unknown = tuple(vocabulary.ids)[vocabulary.roles["unk"]] if "unk" in vocabulary.roles else None
    merges = _implied_merges(header, vocabulary)
    model = models.BPE(dict(vocabulary.ids), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    has_prefix = _flag(header, ADD_PREFIX, True)
    first = [normalizers.Replace(Regex(r" {2,}"), " "), normalizers.Replace(Regex(r"\A +| +\z"), "")]
    first = first if _flag(header, COLLAPSE, False) else []
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*first, *prefix, normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if has_prefix else parts)
    return backend


def _implied_merges(header: GgufHeader, vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, in the order of its score."""
    ids, scores = vocabulary.ids, vocabulary.scores
    if sum(len(text) ** 2 for text in ids) > MOST_CUTTING:
        raise wrong_key(header, TOKENS, "has texts that are too long")
    texts = tuple(ids)  # of which pairs are made: no text is held twice
    merges: list[tuple[str, str]] = []
    for text in sorted(texts, key=lambda text: -scores[ids[text]]):  # of one score in the order of ids
        for cut in range(1, len(text)):
            if (first := ids.get(text[:cut])) is not None and (second := ids.get(text[cut:])) is not None:
                merges.append((texts[first], texts[second]))
        if len(merges) > MOST_MERGES:
            raise wrong_key(header, TOKENS, f"has more than {MOST_MERGES} pairs that make a token")
    return merges


def _add_tokens(backend: Backend, header: GgufHeader, vocabulary: GgufVocabulary) -> None:
    """What is found in a text before anything else is done to it."""
    name = header.metadata.get("general.name")
    strips = isinstance(name, str) and any(part in name.lower() for part in _STRIPPING)
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for text, kind in zip(vocabulary.ids, vocabulary.kinds, strict=True):
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED):
            special = kind != TokenKind.USER_DEFINED
            rstrip = strips and text not in _NOT_STRIPPING
            added[special].append(AddedToken(text, normalized=False, rstrip=rstrip, special=special))
    backend.add_tokens(added[False])
    backend.add_special_tokens(added[True])


def _around(backend: Backend, roles: Mapping[str, int]) -> processors.TemplateProcessing:
    places = ["bos"] * ("bos" in roles) + ["$A"] + ["eos"] * ("eos" in roles)
    tokens: list[Any] = [{"id": role, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
                         for role, token_id in roles.items()]  # fmt: skip
    return processors.TemplateProcessing(single=places, special_tokens=tokens)
