"""`outrider bench learning`: texts come by the learner's clock, and what is in use is measured along the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.bench import texts_of

from outrider.bench import learning_served
from outrider.bench.figures import draw_learning, write_figure
from outrider.bench.learning import PROMPT_TOKENS, excerpts, main, render
from outrider.pairs import pair_path

WORDS = "def main(arguments):\n    return [line.strip() for line in arguments if not line.startswith('#')]\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for index in range(3):
        (tmp_path / f"{index}.txt").write_text("".join(f"# {index} {place}\n{WORDS}" for place in range(220)))
    (tmp_path / "short.txt").write_text("x")
    return tmp_path


@pytest.mark.parametrize("head", ["", "eagle3"], ids=["a draft", "a head"])
def test_it_measures_and_tells(
    head: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_served, "TURN_S", 1.0)
    monkeypatch.setattr(learning_served, "WARM_S", 1.0)
    arguments = [
        "--domain", f"first={files}/*.txt", "--domain", f"other={files}/1.txt", "--seconds", "2", "--every", "1",
        "--tokens-per-s", "1600", "--measured", "4", "--no-store", "--output", str(files / "result.json"),
        "--served-turns", "1",
    ]  # fmt: skip
    if head:
        arguments += ["--head", str(pair_path().head_by(head))]
    else:
        arguments += ["--tune-steps", "2", "--distil-steps", "2"]
    assert main(arguments) == 0
    result = json.loads((files / "result.json").read_text())
    assert ("reference" in result, "tuned for 2 steps" in result["setup"]["pair"]) == (not head, not head)
    assert head or result["setup"]["distilled_s"] > 0
    assert [*result["alone"]] == ["first", "other"] and len(result["points"]) >= 2
    assert result["points"][-1]["seconds"] >= 2 and result["points"][-1]["steps"] > 0
    if not result["points"][-1]["promoted"]:
        assert result["points"][-1]["live"] == result["alone"]
    served = result["served"]
    assert served["alone"]["median"] > 0 and served["beside"]["median"] > 0 and len(served["ratio"]["values"]) == 1
    shown = capsys.readouterr().out
    assert "4 streams: " in shown
    assert "first, greedy" in shown and "alone" in shown
    better = {name: {how: value + 0.5 for how, value in one.items()} for name, one in result["alone"].items()}
    result["points"][-1]["live"] = {
        name: {how: value + 0.25 for how, value in one.items()} for name, one in result["alone"].items()
    }
    write_figure(files / "plot.svg", lambda: draw_learning(result | {"reference": better}))
    assert {"first", "other", "greedy", "sampled"} <= texts_of(files / "plot.svg")
    assert [*render(result | {"reference": better})][-3:] == [
        f"of the gap to the reference, {hows}: 50%" for hows in ("greedy", "sampled", "greedy and sampled")
    ]


def test_excerpts_are_of_whole_files_and_what_is_none_is_told(files: Path) -> None:
    found = excerpts("a", f"{files}/*.txt", 5, 1, lambda text: list(text.encode()))
    assert len(found) == 5 and {len(ids) for ids in found} == {PROMPT_TOKENS}
    assert found == excerpts("a", f"{files}/*.txt", 5, 1, lambda text: list(text.encode()))
    with pytest.raises(ValueError, match="domain: a has no file"):
        excerpts("a", f"{files}/short.txt", 5, 1, lambda text: list(text.encode()))


def test_a_reference_is_given_or_made(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--distil-steps", "3", "--reference", "draft"])
    assert "--distil-steps" in capsys.readouterr().err


def test_a_domain_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--domain", "nameless"])
    assert "NAME=GLOB" in capsys.readouterr().err
