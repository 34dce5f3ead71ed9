"""Checkpoint folders that are damaged, or made to harm: each is refused with the name of the file or the field, at
load, in bounded memory; none ends the process by another error."""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.gateways import save_toy_tokenizer
from support.models import SMALLEST, save_tiny

from outrider.engine.checkpoint import INDEX_NAME, WEIGHTS_NAME
from outrider.engine.loader import load_model
from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.vocabulary import read_vocabulary

WEIGHTS = "model.safetensors"
MOST_BYTES = 400 << 20  # that refusing takes
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that loads."""
    folder = save_tiny(
        tmp_path_factory.mktemp("whole"),
        generation={"eos_token_id": [2], "temperature": 0.7},
        vocab_size=400,
        **SMALLEST,
    )
    save_toy_tokenizer(folder)
    load_model(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "broken"))


@contextmanager
def in_little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert taken < MOST_BYTES, f"{taken >> 20} MiB more"


def parts_of(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the tensors of a safetensors file."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(header: bytes, tensors: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + tensors


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    """The same file, in which the first tensor is described otherwise."""

    def change(raw: bytes) -> bytes:
        header, tensors = parts_of(raw)
        name = next(name for name in header if name != "__metadata__")
        header[name] = {**header[name], **fields}
        return with_header(json.dumps(header).encode(), tensors)

    return change


def raw_header(header: bytes, length: int | None = None) -> Callable[[bytes], bytes]:
    return lambda raw: with_header(header, parts_of(raw)[1], length)


def overlapping(raw: bytes) -> bytes:
    header, tensors = parts_of(raw)
    names = [name for name in header if name != "__metadata__"]
    sizes = [header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in names]
    for name, size in zip(names, sizes, strict=True):
        header[name]["data_offsets"] = [0, size]
    return with_header(json.dumps(header).encode(), tensors)


def many_tensors(raw: bytes) -> bytes:
    header, tensors = parts_of(raw)
    header |= {f"x{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(5_000)}
    return with_header(json.dumps(header).encode(), tensors)


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut in its length": lambda raw: raw[:5],
    "cut in its header": lambda raw: raw[:200],
    "cut in its tensors": lambda raw: raw[:-1],
    "longer than its tensors": lambda raw: raw + b"\0",
    "a header of nothing": raw_header(b""),
    "a header of 2^63 bytes": raw_header(b"{}", 1 << 63),
    "a header of 2^64 - 1 bytes": raw_header(b"{}", (1 << 64) - 1),
    "a header of 99 million bytes": raw_header(b"{}", 99_000_000),
    "a header that is a list": raw_header(b"[]"),
    "a header that is null": raw_header(b"null"),
    "a header that is cut": raw_header(b'{"a":'),
    "a header nested 100,000 deep": raw_header(b"[" * 100_000),
    "a header nested 50,000 objects deep": raw_header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "a header of no UTF-8": raw_header(b'{"\xff": 1}'),
    "a tensor that is a number": raw_header(b'{"a": 1}'),
    "a tensor without a shape": raw_header(b'{"a": {"dtype": "F32", "data_offsets": [0, 4]}}'),
    "metadata that is a number": raw_header(b'{"__metadata__": 7}'),
    "offsets that fall": changed(data_offsets=[64, 0]),
    "offsets below 0": changed(data_offsets=[-64, 0]),
    "offsets behind the file": changed(data_offsets=[0, 1 << 40]),
    "offsets of 2^64": changed(data_offsets=[0, 1 << 64]),
    "offsets that are texts": changed(data_offsets=["0", "64"]),
    "offsets that are parts": changed(data_offsets=[0.5, 64.5]),
    "one offset": changed(data_offsets=[0]),
    "offsets that are null": changed(data_offsets=None),
    "tensors that overlap": overlapping,
    "a shape of more than there is": changed(shape=[1 << 20, 1 << 20]),
    "a shape whose size overflows": changed(shape=[1 << 62, 1 << 62]),
    "a shape below 0": changed(shape=[-1, -64]),
    "a shape that is a text": changed(shape="64"),
    "a type that is none": changed(dtype="F31"),
    "a type that is a number": changed(dtype=7),
    "another shape": changed(shape=[1, 2, 3]),
    "5,000 tensors more": many_tensors,
    "a pickle": lambda raw: b"\x80\x04\x95" + raw[3:],
}


@pytest.mark.parametrize("kind", BROKEN)
def test_weights_that_are_none_are_refused(kind: str, folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(BROKEN[kind](path.read_bytes()))
    with in_little_memory(), pytest.raises(UnsupportedModel) as refused:
        load_model(folder)
    assert str(path) in str(refused.value) or "not a llama of this configuration" in str(refused.value)


def test_flipped_bytes_of_a_header(folder: Path, prove: bool) -> None:
    """It loads, or is refused."""
    path, rng = folder / WEIGHTS, random.Random(5)
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    num_refused = 0
    with in_little_memory():
        for _ in range(2000 if prove else 60):
            flipped = bytearray(raw)
            for _ in range(rng.choice([1, 1, 2, 8])):
                flipped[rng.randrange(8 if rng.random() < 0.1 else end)] = rng.choice(
                    [0, 0x22, 0x2C, 0x7D, rng.randrange(256)]
                )
            path.write_bytes(flipped)
            num_refused += is_refused(folder)
    assert num_refused > 10


def is_refused(folder: Path) -> bool:
    """Whether a folder is refused; any error but that one fails the test."""
    try:
        load_model(folder)
    except UnsupportedModel as error:
        assert str(error)
        return True
    return False


VALUES: list[Any] = [
    None, True, 0, -1, 1, 3, 1.5, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "x", "float32", [], [1],
    [None], ["full_attention"], {}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": "default", "rope_theta": 0},
    json.loads("[" * 200 + "]" * 200),
]  # fmt: skip
FURTHER = ["layer_types", "quantization_config", "rope_scaling", "text_config", "auto_map", "torch_dtype", "pard_token"]


def test_configurations_with_odd_values(folder: Path, prove: bool) -> None:
    """Each field, set to each: the model loads, or the refusal says what is wrong."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    cases = [(name, value) for name in sorted({*config, *FURTHER}) for value in VALUES]
    with in_little_memory():
        for name, value in cases if prove else cases[::6]:
            path.write_text(json.dumps({**config, name: value}))
            try:
                load_model(folder)
            except UnsupportedModel as error:
                assert str(error)
            except Exception as error:
                raise AssertionError(f"{name} = {value!r:.60}: {error!r}") from error


GENERATION = ["eos_token_id", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"]


def test_recommendations_with_odd_values(folder: Path) -> None:
    path = folder / "generation_config.json"
    for name in GENERATION:
        for value in VALUES:
            path.write_text(json.dumps({name: value}))
            try:
                loaded = load_model(folder)
            except WrongCheckpoint as error:
                assert name in str(error)
                continue
            assert all(type(token) is int and token >= 0 for token in loaded.eos_token_ids)
            assert all(type(number) in (int, float) for number in loaded.default_sampling.values())


FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
NO_JSON = {
    "nothing": b"",
    "cut": b'{"a":',
    "a list": b"[]",
    "a number": b"7",
    "no UTF-8": b"\xff\xfe\x00",
    "nested": b"[" * 100_000,
    "objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "an index that is a list": b'{"weight_map": []}',
    "an index of numbers": b'{"weight_map": {"a": 7}}',
    "an index that leaves the folder": b'{"weight_map": {"a": "../../etc/passwd"}}',
    "a template without a name": b'{"chat_template": [{"template": "x"}]}',
    "a template that is a number": b'{"chat_template": [7]}',
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_json(name: str, folder: Path) -> None:
    """Who reads a file names it; who does not is not kept from loading."""
    if name == INDEX_NAME:
        (folder / WEIGHTS_NAME).unlink()  # beside which it would not be read
    for content in NO_JSON.values():
        (folder / name).write_bytes(content)
        problems = []
        with in_little_memory():
            for read in (load_model, read_vocabulary, Tokenizer.load):
                try:
                    read(folder)
                except ValueError as error:
                    problems.append(str(error))
        if content[:1] not in (b"{", b"") or content == NO_JSON["cut"]:
            assert any(name in problem for problem in problems), (content[:20], problems)


def test_a_file_that_is_too_large(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 33)  # 8 GiB, of which none is on the disk
    with in_little_memory(), pytest.raises(WrongCheckpoint, match=r"config\.json has 8589934592 bytes; allowed"):
        load_model(folder)


ODD_TOKENIZERS: list[tuple[tuple[str, ...], Any]] = [
    (("model", "vocab", "the"), 2**32 - 1),
    (("model", "vocab", "the"), 2**31),
    (("model", "vocab", "the"), -1),
    (("model", "vocab"), {}),
    (("model", "vocab"), [["a", 1.0]]),
    (("model", "merges"), [["a", "nothing"]]),
    (("model", "type"), "Made up"),
    (("model",), None),
    (("added_tokens",), [{"id": 2**32 - 1, "content": "x", "special": True}]),
    (("added_tokens",), "x"),
    (("decoder",), {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
    (("decoder",), {"type": "Sequence", "decoders": []}),
    (("pre_tokenizer",), {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "x"}),
    (("normalizer",), {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    (("normalizer",), {"type": "Precompiled", "precompiled_charsmap": ""}),
    (("post_processor",), {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
    (("truncation",), {"max_length": 2**40}),
]


def test_tokenizers_that_are_none(folder: Path, prove: bool) -> None:
    """They load and take a text, or are refused: some values are fine, others the library's to find."""
    path = folder / "tokenizer.json"
    layout = path.read_text()
    contents = [json.dumps(with_part(json.loads(layout), *case)).encode() for case in ODD_TOKENIZERS]
    rng = random.Random(9)
    for _ in range(1500 if prove else 40):
        flipped = bytearray(layout.encode())
        for _ in range(rng.choice([1, 1, 3])):
            flipped[rng.randrange(len(flipped))] = rng.choice([0, 0x22, 0x2C, 0x30, 0x7B, rng.randrange(256)])
        contents.append(bytes(flipped))
    num_refused = 0
    with in_little_memory():
        for content in contents:
            path.write_bytes(content)
            try:
                read_vocabulary(folder)
                tokenizer = Tokenizer.load(folder)
                _ = tokenizer.fingerprint, tokenizer.encode("the quick"), tokenizer.decode([1, 2])
            except ValueError as error:
                assert str(error)
                num_refused += 1
    assert num_refused > 5


def with_part(layout: Any, place: tuple[str, ...], value: Any) -> Any:
    inner = layout
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return layout
