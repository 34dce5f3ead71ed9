"""`outrider compare`: what it reads, a small run of every mode, and the prompt sets. No speed is judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.bench import texts_of
from support.heads import random_head_of
from support.models import save_tiny
from support.services import outrider, succeed

from outrider.bench import prompts
from outrider.bench.compare import CompareSettings
from outrider.bench.compare_runs import Method, read_requests
from outrider.bench.results import shares
from outrider.pairs import pair_path
from outrider.proposers.registry import HEADS, METHODS, TOKEN_METHODS

GUESS = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n"
LINES = [
    {"prompt": GUESS + "\n\ndef add(a, b):", "prediction": GUESS, "max_tokens": 24, "counts": False},
    {"prompt": GUESS + "\n\ndef add(a, b):", "prediction": GUESS, "max_tokens": 24},
    {"prompt": [300, 301, 302], "prediction": [303], "max_tokens": 8, "temperature": 1.0},
]


def write(folder: Path, *values: Any, name: str = "requests.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], set[str]]:
    """What a small run prints, its result, and the words of its figure."""
    folder = tmp_path_factory.mktemp("compare")
    bare = write(folder, {"prompt": "class Stack:"}, name="bare.jsonl")
    flags = ["--methods", "suffix,prediction", "--repeats", "2", "--max-tokens", "16", "--threads", "1"]
    flags += ["--output", str(folder / "result.json"), "--plot", str(folder / "plot.svg")]
    text = succeed("compare", "python", str(write(folder, *LINES)), str(bare), *flags)
    return text, json.loads((folder / "result.json").read_text()), texts_of(folder / "plot.svg")


def test_every_method_in_every_mode_gives_plain_decodings_tokens(small: tuple[str, dict[str, Any], set[str]]) -> None:
    _, result, _ = small
    first, bare = result["sets"]
    assert (first["name"], first["prompts"], bare["prompts"]) == ("requests", 2, 1)
    names = ("suffix", "prediction")
    assert first["ways"].keys() == {"plain"} | {f"{name}, {mode}" for name in names for mode in ("sequential", "auto")}
    assert bare["ways"].keys() == {"plain", "suffix, sequential", "suffix, auto"}  # there is no prediction
    for way in (*first["ways"].values(), *bare["ways"].values()):
        assert way["different"] == 0 and way["tokens_per_s"]["median"] > 0
    plain = first["ways"]["plain"]
    assert plain["over_plain"]["values"] == [1.0, 1.0] == plain["off"]["values"] == plain["tokens_per_round"]["values"]
    for way in first["ways"].values():
        if way["mode"] == "sequential":
            assert way["off"]["max"] == 0 and way["tested"][0] > 0 and len(way["accepted"]) <= 8
            assert all(0 <= share <= 1 for share in shares(way))


def test_a_repeat_remembers_its_own_answers_alone(small: tuple[str, dict[str, Any], set[str]]) -> None:
    """Of the first file the prompt that counts is the one before it again, so suffix decoding knows its answer; of the
    other file it would know it from the repeat before."""
    _, result, _ = small
    known, fresh = (found["ways"]["suffix, sequential"]["tokens_per_round"] for found in result["sets"])
    assert known["min"] > 2 > fresh["max"]


def test_answers_under_a_schema(tmp_path: Path) -> None:
    """Plainly nothing is forced. What is forced is the target's, whichever method drafts."""
    schema = {"type": "object", "properties": {"first_name": {"enum": ["ada", "grace"]}}, "required": ["first_name"],
              "additionalProperties": False}  # fmt: skip
    asked = write(tmp_path, {"prompt": "# as JSON:\n", "json_schema": schema, "max_tokens": 40})
    output = tmp_path / "result.json"
    flags = ["--methods", "ngram", "--modes", "sequential", "--repeats", "1", "--threads", "1", "--output", str(output)]
    text = succeed("compare", "python", str(asked), *flags)
    (found,) = json.loads(output.read_text())["sets"]
    plain, drafted = found["ways"]["plain"], found["ways"]["ngram, sequential"]
    assert plain["forced"] == 0 == plain["forced_accepted"] and plain["tokens_per_round"]["median"] == 1.0
    assert 0 < drafted["forced_accepted"] <= drafted["forced"] and drafted["tokens_per_round"]["median"] > 1
    assert {"forced", f"{drafted['forced_accepted']}/{drafted['forced']}"} <= {*text.split()}
    assert drafted["different"] == 0


def test_the_table_and_the_figure(small: tuple[str, dict[str, Any], set[str]]) -> None:
    text, result, words = small
    assert "forced" not in text
    for found in result["sets"]:
        assert f"{found['name']}: {found['prompts']} prompt" in text
        assert f"{found['name']}: tokens a round" in words
        for name in ("suffix", "prediction"):
            way = found["ways"].get(f"{name}, sequential")
            if way is not None:
                assert f"{way['tokens_per_round']['median']:.2f}" in text
                assert {name, f"{way['tokens_per_round']['median']:.2f}"} <= words
    assert "sequential / plain" in text and "auto / plain" in text and "auto off" in text


@pytest.mark.parametrize("flag", ["in-process", "no-local"])
def test_everything_in_one_process_or_a_service_each(flag: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ("--methods=suffix", "--modes=sequential", "--repeats=1", "--max-tokens=16", "--threads=1")
    succeed("compare", "python", str(write(tmp_path, *LINES)), *options, f"--{flag}", f"--output={output}")
    result = json.loads(output.read_text())
    assert (result["setup"]["local"], result["setup"]["in_process"]) == (flag != "no-local", flag == "in-process")
    way = result["sets"][0]["ways"]["suffix, sequential"]
    assert way["different"] == 0 and way["tokens_per_round"]["median"] > 1.5


def test_a_head_has_a_target_of_its_own(tmp_path: Path) -> None:
    head = random_head_of(pair_path().target, "mlp_speculator", tmp_path / "head")
    output = tmp_path / "result.json"
    options = ("--methods=suffix,mlp_speculator", "--repeats=1", "--max-tokens=16", "--threads=1", "--in-process")
    files = str(write(tmp_path, *LINES))
    succeed("compare", "python", files, *options, f"--draft=mlp_speculator={head}", f"--output={output}")
    ways = json.loads(output.read_text())["sets"][0]["ways"]
    way = ways["mlp_speculator, sequential"]
    assert way["different"] == 0 and way["tested"][0] > 0 and way["draft_ms"]["median"] > 0
    assert ways["suffix, sequential"]["different"] == 0


def test_methods_are_those_of_the_registry(tmp_path: Path) -> None:
    def settings(**fields: Any) -> CompareSettings:
        return CompareSettings.model_validate({"target": "python", "files": ["a"], **fields})

    shipped = [name for name in HEADS if name in pair_path().heads]
    assert [method.name for method in settings().chosen] == [*METHODS, *shipped]
    drafting = [served.draft.method if served.draft else served.target.head for _, served in settings().served()]
    assert drafting == [*METHODS, *(pair_path().heads[name] for name in shipped)]
    head = dict(settings(methods="eagle", draft=["eagle=x"]).served())[Method("eagle")]
    assert head.target.head == Path("x") and head.draft is None and head.target.model == pair_path().target
    with pytest.raises(ValueError, match="names 'eagle3', which drafts beside the target; allowed: that alone"):
        settings(methods="suffix+eagle3")
    with pytest.raises(ValueError, match="the embedded pair 'python' has no head 'eagle'; there are: "):
        settings(methods="eagle").served()
    assert [method.parts for method in settings(methods="suffix,ngram+suffix").chosen] == [
        ("suffix",),
        ("ngram", "suffix"),
    ]
    folder = save_tiny(tmp_path / "tiny", vocab_size=300)
    own = settings(target=folder)
    assert {method.name for method in own.chosen} == {*TOKEN_METHODS}
    draft = pair_path().draft
    served = dict(settings(target=folder, methods="draft_model", draft=[str(draft)]).served())
    by_model = served[Method("draft_model")].draft
    assert by_model is not None and by_model.model == draft
    with pytest.raises(ValueError, match="draft_model drafts with a model: give --draft"):
        settings(target=folder, methods="draft_model").served()
    with pytest.raises(ValueError, match="draft: ngram drafts without a model"):
        settings(draft=["ngram=x"])
    with pytest.raises(ValueError, match="did you mean suffix"):
        settings(methods="ngram+sufix")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"promt": "a"}, "prompt: field required"),
        ({"prompt": "a", "guess": "b"}, "guess: is no field; allowed: prompt, prediction, max_tokens"),
        ({"prompt": ""}, "prompt: string should have at least 1 character"),
        ({"prompt": [1, -1]}, "prompt: "),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"prompt": "a", "counts": "no"}, "counts: input should be a valid boolean"),
        (5, "prompt: "),
    ],
)
def test_a_wrong_line_is_named(value: Any, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a", value)
    with pytest.raises(ValueError, match=r"requests\.jsonl, prompt 2: ") as raised:
        read_requests(path)
    assert problem in str(raised.value)


def test_a_file_that_measures_nothing_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = outrider("compare", "python", str(write(tmp_path, {"prompt": "a", "counts": False})))
    assert done.returncode == 1 and "has no prompt that counts" in done.stderr and "starting" not in done.stderr


def test_the_prompt_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "PROMPTS", prompts.PROMPTS[:3])
    monkeypatch.setattr(prompts, "NUM_CHANGED", 2)
    monkeypatch.setattr(sys, "argv", ["prompts", str(tmp_path), "--tokens", "40"])
    prompts.main()
    sets = {path.stem: read_requests(path) for path in tmp_path.iterdir()}
    assert {name: len(found) for name, found in sets.items()} == {
        "code": 3, "changed": 10, "predictions": 3, "random": 8,
    }  # fmt: skip
    assert [request.counts for request in sets["changed"]] == [False] * 2 + [True] * 8
    assert len({request.prompt for request in sets["changed"]}) == 10
    for request in sets["predictions"]:
        assert isinstance(request.prediction, tuple) and 30 < len(request.prediction) < 50 and request.max_tokens == 40
    assert all(isinstance(request.prompt, tuple) and request.temperature == 1 for request in sets["random"])
