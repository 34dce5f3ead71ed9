"""Tokenizers of GGUF files beside a plain reading of sentencepiece's rule, and beside ids that llama.cpp gave.

data/llama_cpp_ids.json has those, of llama.cpp's commit 86a2835 for GOLDEN_TEXTS and the files that this test writes:
`python tests/gguf/test_tokenizer.py FOLDER` writes them and the texts, and `python3 llama_cpp_ids.py
FOLDER/texts.json FOLDER/*.gguf` calls `llama_tokenize(vocab, text, add_special=True, parse_special=True)`."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import Typed, write_gguf
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.gguf.header import WrongGguf, read_gguf
from outrider.gguf.pre_tokenizers import PRE_TOKENIZERS
from outrider.gguf.tokenizer import generation_config, tokenizer_files

ALPHABET = "▁abcdeé世\n<>0xA"
SPECIAL = {"<unk>": 2, "<s>": 3, "</s>": 3, "<end_of_turn>": 3, "   ": 4, "\n\n": 4, "\n\n\n\n": 4, "<abc>": 4}
NORMAL, BYTE = 1, 6
GOLDEN_TEXTS = (
    "I'LL pay so 12345 €\n\n  if (a&&b) {x2--;}\n/ok",
    "Ünïcode\u2019s 世界。\t<|im_end|>    x\r\n y ",
    "don't WON'T 'tis it'some x_y/z/\n\n\t٣٤ a1b22 …!? camelCase 😀 ",
    "नमस्ते x -+\u0300 e\u0301x",  # with marks on letters
)
WITHOUT_MARKS = {"tekken", "gpt-4o", "llama4", "kanana2", "minimax-m2"}  # for which llama.cpp cuts before a mark
LLAMA_CPP: dict[str, list[list[int]]] = json.loads((Path(__file__).parent / "data/llama_cpp_ids.json").read_text())
CONTENT = (
    "ab",
    "cab",
    "é",
    "世",
    "\n",
    " ",
    "  ",
    "     ",
    "\n\n\n",
    "<s>",
    "</s>",
    "<abc>",
    "<unk>",
    "<0x0A>",
    "😀",
    "ü",
    "x▁y",
)


def small_vocabulary() -> dict[str, Any]:
    """The metadata of a sentencepiece vocabulary in which most tokens come about in many ways."""
    choose = random.Random(7)
    pieces = list(ALPHABET)
    while len(pieces) < 600:
        joined = choose.choice(pieces) + choose.choice(pieces)
        if joined not in pieces and len(joined) <= 12 and joined not in SPECIAL:
            pieces.append(joined)
    texts = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [*SPECIAL.values(), *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [*[0.0] * (len(SPECIAL) + 256), *(-float(rank) for rank in range(len(pieces)))]
    return {
        **of_a_llama(len(texts)),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": Typed("i32", kinds),
    }


def of_a_llama(num_tokens: int) -> dict[str, Any]:
    """What llama.cpp wants to know before it reads a vocabulary."""
    sizes = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 2, "rope.dimension_count": 16, "vocab_size": num_tokens}
    named = {f"llama.{key}": value for key, value in sizes.items()}
    return {"general.architecture": "llama", **named, "llama.attention.layer_norm_rms_epsilon": 1e-5}


def byte_level_vocabulary(pre: str) -> dict[str, Any]:
    """The metadata of a byte-level vocabulary that joins whatever stands beside one another in the golden texts, so
    that each cut between them shows. No merges lead to two of its words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    spelt = [spell(text)[0][0] for text in GOLDEN_TEXTS]
    pairs = list(dict.fromkeys(pair for text in spelt for pair in pairwise(text)))
    pairs += dict.fromkeys((a + b, c) for text in spelt for a, b, c in zip(text, text[1:], text[2:], strict=False))
    special = {"<|endoftext|>": 3, "<|im_end|>": 3, "   ": 4, "\n\n\n": 4}
    texts = list(dict.fromkeys([*letters, *map("".join, pairs), "Ġpay", "ĠWON", *special]))
    return {
        **of_a_llama(len(texts)),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": Typed("i32", [special.get(text, NORMAL) for text in texts]),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.bos_token_id": texts.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": texts.index("<|endoftext|>"),
    }


def golden_vocabulary(name: str) -> dict[str, Any]:
    """By the name of its way to cut text."""
    return small_vocabulary() if name == "sentencepiece" else byte_level_vocabulary(name)


def load(folder: Path, metadata: Mapping[str, Any]) -> tuple[Backend, dict[str, Any], dict[str, Any]]:
    """What a file of these metadata gives: its tokenizer, that one's configuration and that of generation."""
    header = read_gguf(write_gguf(folder / "model.gguf", metadata))
    return *tokenizer_files(header), generation_config(header)


def fragments(text: str) -> list[str]:
    """The text around the special tokens in it, and these, of which the longest are looked for first."""
    found = [text]
    for special in sorted(SPECIAL, key=lambda one: -len(one.encode())):
        found = [part for one in found for part in (_cut(one, special) if one not in SPECIAL else [one])]
    return [one for one in found if one]


def _cut(text: str, special: str) -> list[str]:
    parts = [part for one in text.split(special) for part in (one, special)]
    return parts[:-1]


def greediest(metadata: Mapping[str, Any], text: str, prefix: bool) -> list[int]:
    """Ids by the rule itself: of all neighbours that make a token, those of the highest score do, the first of such."""
    ids = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores, found = metadata["tokenizer.ggml.scores"], [ids["<s>"]]
    for part in fragments(text):
        if part in SPECIAL:
            found.append(ids[part])
            continue
        symbols = list((" " * prefix + part).replace(" ", "▁"))
        while pairs := [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(pairwise(symbols))
                        if a + b in ids]:  # fmt: skip
            at = -max(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        names = [[one] if one in ids else [f"<0x{byte:02X}>" for byte in one.encode()] for one in symbols]
        found += [ids[name] for several in names for name in several]
    return found


def seeded_texts(seed: int, count: int, pieces: Sequence[str]) -> list[str]:
    choose = random.Random(seed)
    return ["".join(choose.choices(pieces, k=choose.randint(0, 12))) for _ in range(count)]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_makes_the_merges_of_the_highest_scores(tmp_path: Path, prefix: bool) -> None:
    metadata = small_vocabulary() | {"tokenizer.ggml.add_space_prefix": prefix}
    backend, config, _ = load(tmp_path, metadata)
    assert config["add_bos_token"] and config["unk_token"] == "<unk>"
    for text in seeded_texts(1, 1000, [*CONTENT, *"abcde"]):
        ids = backend.encode(text).ids
        assert ids == greediest(metadata, text, prefix), text
        assert backend.decode(ids, skip_special_tokens=False) == "<s>" + shown(text, prefix)


def shown(text: str, prefix: bool) -> str:
    """A text as it comes back: a prefix's space before what no special token precedes, and marks as spaces."""
    parts = fragments(text)
    return "".join(part if part in SPECIAL else " " * prefix + part for part in parts).replace("▁", " ")


def test_a_saved_tokenizer_serves(tmp_path: Path) -> None:
    backend, config, _ = load(tmp_path, small_vocabulary() | {"tokenizer.chat_template": "{{ bos_token }}x"})
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("ab 世\n") == backend.encode("ab 世\n").ids
    assert tokenizer.decode(tokenizer.encode("ab 世 😀\n"), skip_special_tokens=True) == "ab 世 😀\n"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == "<s>x"


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_cut_loses_nothing(tmp_path: Path, name: str) -> None:
    backend, config, _ = load(tmp_path, byte_level_vocabulary(name))
    assert config["add_bos_token"] == PRE_TOKENIZERS[name].adds_bos
    for text in [*GOLDEN_TEXTS, *seeded_texts(2, 20, [*CONTENT, "DON'T", "12345", "नमस्ते"])]:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert backend.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, "sentencepiece"])
def test_ids_are_llama_cpps(tmp_path: Path, name: str) -> None:
    backend, _, _ = load(tmp_path, golden_vocabulary(name))
    same = [backend.encode(text).ids == ids for text, ids in zip(GOLDEN_TEXTS, LLAMA_CPP[name], strict=True)]
    assert same == [True, True, True, name not in WITHOUT_MARKS]


def test_all_ends_of_an_answer_are_told(tmp_path: Path) -> None:
    _, config, generation = load(tmp_path, small_vocabulary() | {"tokenizer.ggml.eot_token_id": 300})
    assert generation == {"eos_token_id": [2, 3, 300], "bos_token_id": 1}  # by role, by text and by key
    metadata = byte_level_vocabulary("qwen2")
    _, config, generation = load(tmp_path, metadata)
    end, im_end = map(metadata["tokenizer.ggml.tokens"].index, ("<|endoftext|>", "<|im_end|>"))
    assert generation == {"eos_token_id": [end, im_end], "bos_token_id": end}
    assert not config["add_bos_token"] and config["eos_token"] == "<|endoftext|>" and "pad_token" not in config


def with_tokens(*more: str, kind: int = NORMAL) -> dict[str, Any]:
    """The small vocabulary with these tokens at its end."""
    metadata = small_vocabulary()
    kinds = [*metadata["tokenizer.ggml.token_type"].value, *[kind] * len(more)]
    return metadata | {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], *more],
        "tokenizer.ggml.scores": [*metadata["tokenizer.ggml.scores"], *[-1e3] * len(more)],
        "tokenizer.ggml.token_type": Typed("i32", kinds),
    }


def test_an_end_that_is_none_beside_others(tmp_path: Path) -> None:
    first = len(small_vocabulary()["tokenizer.ggml.tokens"])
    backend, _, generation = load(tmp_path, with_tokens("<|return|>", "<|end|>", "<|call|>", "<|message|>"))
    assert generation["eos_token_id"] == [2, 3, first, first + 2]  # harmony's <|end|> ends a message
    added = backend.get_added_tokens_decoder()
    assert [added[first + at].special for at in range(4)] == [True, False, True, False]
    backend, _, generation = load(tmp_path, with_tokens("<|tool_response>"))
    assert generation["eos_token_id"] == [3, first]
    assert backend.encode("</s>").ids[-1] != 2


def test_what_surrounds_a_text_is_as_the_file_says(tmp_path: Path) -> None:
    both = small_vocabulary() | {"tokenizer.ggml.add_eos_token": True}
    ids = load(tmp_path, both)[0].encode("a").ids
    assert (ids[0], ids[-1]) == (1, 2)
    none = small_vocabulary() | {"tokenizer.ggml.add_bos_token": False}
    assert 1 not in load(tmp_path, none)[0].encode("a").ids


def test_named_templates_come_by_name(tmp_path: Path) -> None:
    given = {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    _, config, _ = load(tmp_path, small_vocabulary() | given)
    assert config["chat_template"] == [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]


def test_extra_spaces_go_where_the_file_says(tmp_path: Path) -> None:
    backend, _, _ = load(tmp_path, small_vocabulary() | {"tokenizer.ggml.remove_extra_whitespaces": True})
    assert backend.encode(" ab  c ").ids == backend.encode("ab c").ids
    backend, _, _ = load(tmp_path, small_vocabulary())
    assert backend.encode(" ab  c ").ids != backend.encode("ab c").ids


def test_phi_3_takes_the_spaces_after_its_special_tokens(tmp_path: Path) -> None:
    backend, _, _ = load(tmp_path, small_vocabulary() | {"general.name": "Phi-3 mini"})
    assert backend.encode("a<end_of_turn> \nb").ids == backend.encode("a<end_of_turn>b").ids
    assert backend.encode("a<s> b").ids != backend.encode("a<s>b").ids


def test_the_first_of_two_equal_merges_counts(tmp_path: Path) -> None:
    metadata = byte_level_vocabulary("gpt-2")
    merges = metadata["tokenizer.ggml.merges"]
    twice = load(tmp_path, metadata | {"tokenizer.ggml.merges": [*merges, *reversed(merges)]})[0]
    once = load(tmp_path, metadata)[0]
    assert [twice.encode(text).ids for text in GOLDEN_TEXTS] == [once.encode(text).ids for text in GOLDEN_TEXTS]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model: is 'bert'; allowed: gpt2, llama"),
        ({"tokenizer.ggml.model": Typed("u32", 4)}, "tokenizer.ggml.model: is 4"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens: has 'a' twice: 0 and 2"),
        ({"tokenizer.ggml.tokens": Typed("i32", [1, 2])}, "tokenizer.ggml.tokens: allowed: an array of texts"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens: allowed: an array of texts"),
        ({"tokenizer.ggml.tokens": [b"a", b"\xff"]}, "tokenizer.ggml.tokens: has a token that is not UTF-8: 1"),
        ({"tokenizer.ggml.tokens": ["a" * 20_000]}, "tokenizer.ggml.tokens: has texts that are too long"),
        ({"tokenizer.ggml.scores": [0.0]}, "tokenizer.ggml.scores: has 1 entries for 2 tokens"),
        ({"tokenizer.ggml.scores": [0.0, float("nan")]}, "tokenizer.ggml.scores: holds what is no number"),
        ({"tokenizer.ggml.scores": None}, "has no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": "a"}, "tokenizer.ggml.scores: allowed: an array of numbers"),
        ({"tokenizer.ggml.token_type": [1, 1, 1]}, "tokenizer.ggml.token_type: has 3 entries for 2 tokens"),
        ({"tokenizer.ggml.eot_token_id": 2}, "tokenizer.ggml.eot_token_id: is 2; allowed: 0 to 1"),
        ({"tokenizer.ggml.unknown_token_id": 0.5}, "tokenizer.ggml.unknown_token_id: is 0.5"),
        ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token: is 1; allowed: true, false"),
        ({"tokenizer.ggml.add_eos_token": True}, "has no tokenizer.ggml.eos_token_id, and that token is to be added"),
        ({"tokenizer.chat_template": b"\xff"}, "tokenizer.chat_template: allowed: a text in UTF-8"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "unheard"}, "pre: is 'unheard'; allowed: llama-bpe,"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.merges: allowed: an array of texts"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"]}, "merges: has 'a b', which does not make"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": ["aa", "aaa", "aaaaa"],
                "tokenizer.ggml.scores": None,
                "tokenizer.ggml.merges": ["aaa"],
            },
            "merges: has 'aaa', which does not make",
        ),
    ],
)
def test_what_is_wrong_is_named_at_once(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    sound = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.0, 0.0]}
    whole = {key: value for key, value in (sound | changes).items() if value is not None}
    if len(whole["tokenizer.ggml.tokens"]) == 1:
        whole["tokenizer.ggml.scores"] = [0.0]
    header = read_gguf(write_gguf(tmp_path / "model.gguf", whole | {"tokenizer.ggml.bos_token_id": 0}))
    begin = time.monotonic()
    with pytest.raises(WrongGguf) as caught:
        tokenizer_files(header)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize(("bound", "most"), [("tokenizer.MOST_MERGES", 100), ("vocabulary.MOST_TOKENS", 800)])
def test_what_is_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int) -> None:
    monkeypatch.setattr(f"outrider.gguf.{bound}", most)
    with pytest.raises(WrongGguf, match=r"tokenizer\.ggml\.tokens: has .*" + str(most)):
        load(tmp_path, small_vocabulary())
    if "MERGES" in bound:
        with pytest.raises(WrongGguf, match=r"tokenizer\.ggml\.merges: has .*at most 100"):
            load(tmp_path, byte_level_vocabulary("qwen2"))


def write_golden(folder: Path) -> None:
    """What llama.cpp is asked about."""
    folder.mkdir(exist_ok=True)
    (folder / "texts.json").write_text(json.dumps(GOLDEN_TEXTS))
    for name in [*PRE_TOKENIZERS, "sentencepiece"]:
        write_gguf(folder / f"{name}.gguf", golden_vocabulary(name))


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]))
