"""The tokenizer against transformers' AutoTokenizer, and the facts that a pair check compares.

What a service says of its tokenizer, against the gateway's own reading of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import SPECIAL, train_byte_fallback, train_byte_level
from tokenizers import Regex, decoders, normalizers, processors
from tokenizers import Tokenizer as Backend

from outrider.gateway.text.control_tokens import control_tokens
from outrider.gateway.text.tokenizer import LONG_TEXT, Tokenizer, make_detokenizer
from outrider.rpc.errors import Internal, InvalidArgument
from outrider.rpc.vocabulary import read_vocabulary
from outrider.rpc.words.sampling_params import SamplingParams

TEMPLATE = (
    "{% for message in messages %}\n  {% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\n"
    "{{ '<|' + message.role + '|>' + message.content }}{% generation %}{{ eos_token }}{% endgeneration %}\n"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{{ {'a': '<é>'} | tojson }}"
)
TEXTS = ["the quick fox", "", " 你好 🙂 café\n\n", "<|user|>hello<|endoftext|>", "  two  spaces", "\x00\x1f\x7f\xad"]


def save(folder: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield save(tmp_path, train_byte_level(), eos_token="<|endoftext|>", chat_template=TEMPLATE)


def configurations() -> list[tuple[Backend, dict[str, Any]]]:
    truncated = train_byte_level()
    truncated.enable_truncation(max_length=2)
    truncated.enable_padding(length=8, pad_token=SPECIAL[0])
    with_bos = train_byte_level()
    with_bos.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", 0)]
    )
    named = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"}
    return [
        (train_byte_level(), {"eos_token": "<|endoftext|>"}),
        (truncated, {"eos_token": "<|endoftext|>"}),
        (with_bos, {"bos_token": "<|endoftext|>"}),
        (with_bos, {"bos_token": "<|endoftext|>", "add_bos_token": False}),
        (train_byte_fallback(), {**named, "add_bos_token": True}),
        (train_byte_fallback(), {**named, "add_bos_token": True, "add_eos_token": True, "pad_token": "<pad>"}),
    ]


@pytest.mark.parametrize("case", range(6))
def test_matches_auto_tokenizer(tmp_path: Path, case: int) -> None:
    from transformers import AutoTokenizer

    backend, config = configurations()[case]
    save(tmp_path, backend, **config)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.num_tokens == len(theirs)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}


class _Watched:
    """A backend that writes down what is called of it."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.called = backend, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self.backend, name)


@pytest.mark.parametrize("case", range(6))
def test_long_texts_go_as_batches_for_which_other_threads_run(tmp_path: Path, case: int) -> None:
    """And come out as the library has them by themselves."""
    backend, config = configurations()[case]
    tokenizer = Tokenizer.load(save(tmp_path, backend, **config))
    tokenizer.backend = watched = _Watched(tokenizer.backend)  # type: ignore[assignment]
    text = " ".join(TEXTS) * (LONG_TEXT // len(" ".join(TEXTS)) + 1)
    for adds in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=adds)
        assert ids == watched.backend.encode(text, add_special_tokens=adds).ids
    ids *= LONG_TEXT // len(ids) + 1
    for skips in (True, False):
        assert tokenizer.decode(ids, skips) == watched.backend.decode(ids, skip_special_tokens=skips)
    assert watched.called == ["encode_batch_fast"] * 2 + ["decode_batch"] * 2


def test_loading_keeps_torch_and_transformers_out(folder: Path) -> None:
    program = f"""
import sys
from outrider.gateway.text.tokenizer import TextStream
from outrider.gateway.text.tokenizer import Tokenizer
Tokenizer.load({str(folder)!r}).render_chat([{{"role": "user", "content": "hi"}}])
sys.exit(1 if {{"torch", "transformers", "numpy"}} & set(sys.modules) else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)})


def test_falls_back_to_transformers_without_tokenizer_json(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert Tokenizer.load(tmp_path).encode("the quick fox") == backend.encode("the quick fox").ids


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        Tokenizer.load(tmp_path / "nowhere")


def test_chat_matches_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    messages: Any = [{"role": "user", "content": "hello", "name": None}, {"role": "assistant", "content": "the end."}]
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder))
    for opening in (True, False):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening)
        assert ours.render_chat(messages, opening) == expected
        assert ours.encode(expected, add_special_tokens=False) == theirs.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "system", "content": ""}], "refused the conversation: no system"),
        ([], "it has no message"),
        ([{"role": "user"}], "refused the conversation"),
    ],
)
def test_chat_refusals(folder: Path, messages: list[dict[str, str]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Tokenizer.load(folder).render_chat(messages)


def test_chat_templates_are_found_and_sandboxed(tmp_path: Path) -> None:
    save(tmp_path, train_byte_level())
    with pytest.raises(ValueError, match="has no chat template"):
        Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "x"}])
    save(tmp_path, train_byte_level(), chat_template=[{"name": "default", "template": "D{{ messages[0].content }}"}])
    assert Tokenizer.load(tmp_path).render_chat([{"content": "x"}]) == "Dx"
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="unsafe"):
        Tokenizer.load(tmp_path).render_chat([{"content": "x"}])


def test_token_bytes_join_to_the_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for text in TEXTS:
        parts = [tokenizer.token_bytes[token_id] or b"" for token_id in tokenizer.encode(text)]
        assert b"".join(parts) == text.encode()
    assert {tokenizer.token_bytes[token_id] for token_id in tokenizer.special_ids} == {t.encode() for t in SPECIAL}


def test_fingerprints() -> None:
    first = Tokenizer(train_byte_level(), "first", {}, None)
    same = Tokenizer(train_byte_level(), "same", {}, None)
    assert first.fingerprint == same.fingerprint
    assert len(first.fingerprint) == 64
    longer = train_byte_level()
    longer.add_tokens(["<extra>"])
    padded = Tokenizer(longer, "padded", {}, None)
    assert padded.fingerprint != first.fingerprint


def test_bad_words_with_and_without_a_space(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    the, spaced = tokenizer.encode("the"), tokenizer.encode(" the")
    assert len(the) == len(spaced) == 1
    assert tokenizer.bad_words_ids(["the", "  the"]) == ((the[0],), (spaced[0],)) * 2
    assert tokenizer.bad_words_ids([]) == ()
    with pytest.raises(InvalidArgument, match=r"^sampling\.bad_words: '  ' has no tokens"):
        tokenizer.bad_words_ids(["  "])


def save_with(folder: Path, backend: Backend, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("train", [train_byte_level, train_byte_fallback])
@pytest.mark.parametrize("config", [{}, {"eos_token": {"content": "<|new|>"}, "pad_token": None}])
def test_agrees_with_the_gateways_tokenizer(tmp_path: Path, train: object, config: dict[str, object]) -> None:
    folder = save_with(tmp_path, train(), **config)  # type: ignore[operator]
    vocabulary = read_vocabulary(folder)
    tokenizer = Tokenizer.load(folder)
    assert vocabulary is not None and len(vocabulary.fingerprint) == 64
    assert (vocabulary.num_tokens, vocabulary.fingerprint) == (tokenizer.num_tokens, tokenizer.fingerprint)


def test_a_token_more_changes_the_fingerprint(tmp_path: Path) -> None:
    plain = read_vocabulary(save_with(tmp_path / "a", train_byte_level()))
    other = read_vocabulary(save_with(tmp_path / "b", train_byte_level(), eos_token="<|new|>"))
    assert plain is not None and other is not None
    assert other.num_tokens == plain.num_tokens + 1 and other.fingerprint != plain.fingerprint


def test_no_tokenizer_no_vocabulary(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path) is None


def test_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, outrider.rpc.vocabulary; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def test_a_panic_of_the_library_is_an_error_of_the_call() -> None:
    """Of a decoder that cuts more off a token than it has, and of a normalizer whose pattern takes for ever."""
    backend = train_byte_level()
    backend.decoder = decoders.Strip("a", 0, 2)
    backend.normalizer = normalizers.Replace(Regex("(a+)+$"), "")
    broken = Tokenizer(backend, "broken", {"eos_token": "<|endoftext|>"}, None)
    (letter,) = train_byte_level().encode("a").ids
    for ids in ([letter], [letter] * (LONG_TEXT + 1)):
        with pytest.raises(Internal, match="tokenizers library"):
            broken.decode(ids)
    with pytest.raises(Internal, match="tokenizers library"):
        make_detokenizer(broken, SamplingParams(), ()).step(letter)
    control = control_tokens(broken)
    assert control is not None
    with pytest.raises(Internal, match="tokenizers library"):
        control.stands_in("a" * 24 + "!")
    assert broken.encode("the fox")
