"""`outrider generate` against the three services."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.services import Trio, outrider, outrider_process, succeed

from outrider.gateway.text.tokenizer import Tokenizer

PROMPT = "def parse_args(argv):"
WRITTEN_S = 60  # traces are written every second


def generate(trio: Trio, *arguments: str) -> list[dict[str, Any]]:
    out = succeed("generate", "--gateway", trio.gateway, "--json", "--timeout", "30", *arguments)
    return [json.loads(line) for line in out.splitlines()]


def test_json_has_what_is_promised(trio: Trio) -> None:
    (answer,) = generate(trio, PROMPT, "--max-tokens", "24", "--temperature", "0")
    assert answer["finish_reason"] == "length" and answer["index"] == 0 and answer["stop_reason"] is None
    assert len(answer["token_ids"]) == len(answer["origins"]) == 24
    assert set(answer["origins"]) <= {"accepted", "recovered", "bonus", "plain"} and "accepted" in answer["origins"]
    tokenizer = Tokenizer.load(trio.pair.target)
    assert answer["text"] == tokenizer.decode(answer["token_ids"])
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(PROMPT))
    stats = answer["speculation"]
    # A round commits what it accepted and one token of the target's own; the last one may end before it.
    assert stats["num_rounds"] + stats["num_accepted_tokens"] in (24, 25)
    assert (
        stats["num_accepted_tokens"] == sum(stats["num_accepted_per_position"]) == answer["origins"].count("accepted")
    )
    assert stats["acceptance_rate"] == stats["num_accepted_tokens"] / stats["num_draft_tokens"]
    assert stats["mean_acceptance_length"] == 1 + stats["num_accepted_tokens"] / stats["num_drafts"]
    assert stats["method"] == "draft_model" and stats["mode"] in stats["num_rounds_by_mode"]
    assert sum(stats["num_rounds_by_mode"].values()) == stats["num_rounds"]
    assert isinstance(answer["seed"], int) and answer["request_id"]


def test_speculation_changes_no_token(trio: Trio) -> None:
    arguments = (PROMPT, "--max-tokens", "32", "--temperature", "0")
    (drafted,) = generate(trio, *arguments, "--num-draft-tokens", "6")
    (plain,) = generate(trio, *arguments, "--no-speculation")
    assert drafted["token_ids"] == plain["token_ids"] and drafted["text"] == plain["text"]
    assert set(plain["origins"]) == {"plain"} and plain["speculation"]["num_draft_tokens"] == 0


def test_coupled_sampling_depends_on_the_seed_alone(trio: Trio) -> None:
    arguments = (PROMPT, "--max-tokens", "24", "--temperature", "1", "--seed", "7", "--acceptance", "coupled")
    answers = [generate(trio, *arguments, *more)[0] for more in ([], ["--num-draft-tokens", "2"], ["--no-speculation"])]
    assert answers[0]["seed"] == 7 and answers[0]["speculation"]["acceptance"] == "coupled"
    assert answers[0]["token_ids"] == answers[1]["token_ids"] == answers[2]["token_ids"]


def test_token_ids_are_a_prompt(trio: Trio) -> None:
    ids = Tokenizer.load(trio.pair.target).encode(PROMPT)
    common = ("--max-tokens", "12", "--temperature", "0")
    (by_text,) = generate(trio, PROMPT, *common)
    (by_ids,) = generate(trio, "--token-ids", ",".join(map(str, ids)), *common)
    assert by_ids["token_ids"] == by_text["token_ids"]


def test_several_completions(trio: Trio) -> None:
    answers = generate(trio, PROMPT, "--n", "2", "--max-tokens", "16", "--temperature", "1", "--seed", "3")
    assert sorted(answer["index"] for answer in answers) == [0, 1]
    assert answers[0]["token_ids"] != answers[1]["token_ids"]


def test_the_mode_is_sent(trio: Trio) -> None:
    """No answer names it over gRPC: the trace does."""
    arguments = (PROMPT, "--max-tokens", "24", "--temperature", "0", "--request-id")
    end = time.monotonic() + WRITTEN_S
    for mode in ("sequential", "chains"):
        generate(trio, *arguments, f"in-{mode}", "--mode", mode)
    for mode in ("sequential", "chains"):
        while (done := outrider("trace", str(trio.trace_file), "--request", f"in-{mode}")).returncode:
            assert time.monotonic() < end, done.stderr
            time.sleep(0.2)
        assert f"mode {mode}" in done.stdout


def test_ngram_drafts(trio: Trio) -> None:
    prompt = "one two three four five six seven one two three four five six"
    (answer,) = generate(trio, prompt, "--method", "ngram", "--max-tokens", "16", "--temperature", "0")
    (plain,) = generate(trio, prompt, "--no-speculation", "--max-tokens", "16", "--temperature", "0")
    assert answer["token_ids"] == plain["token_ids"]


def test_a_file_s_text_is_the_prediction(trio: Trio, tmp_path: Path) -> None:
    plainly = (PROMPT, "--max-tokens", "40", "--temperature", "0")
    (plain,) = generate(trio, *plainly, "--no-speculation")
    (tmp_path / "before.txt").write_text(plain["text"], encoding="utf-8")
    (answer,) = generate(trio, *plainly, "--prediction-file", str(tmp_path / "before.txt"))
    assert answer["token_ids"] == plain["token_ids"] and answer["speculation"]["method"] == "prediction"
    assert answer["usage"]["accepted_prediction_tokens"] >= 30
    done = outrider("generate", PROMPT, "--prediction", "a", "--prediction-file", "b")
    assert done.returncode == 2 and "give one prediction" in done.stderr


def test_stop_strings_and_logprobs(trio: Trio) -> None:
    common = (PROMPT, "--max-tokens", "32", "--temperature", "0")
    (whole,) = generate(trio, *common)
    stop = whole["text"][len(whole["text"]) // 2 :][:3]
    (answer,) = generate(trio, *common, "--stop", stop, "--logprobs", "2")
    assert answer["finish_reason"] == "stop" and answer["stop_reason"] == stop
    assert answer["text"] == whole["text"][: whole["text"].index(stop)]
    assert len(answer["logprobs"]) == len(answer["token_ids"])
    assert [position[0]["id"] for position in answer["logprobs"]] == answer["token_ids"]


def test_text_is_the_completion_and_nothing_else(trio: Trio) -> None:
    common = (PROMPT, "--max-tokens", "24", "--temperature", "0")
    (answer,) = generate(trio, *common)
    assert outrider_process("generate", "--gateway", trio.gateway, *common).stdout == answer["text"] + "\n"
    out = succeed("generate", "--gateway", trio.gateway, *common, "--n", "2")
    assert out == f"{answer['text']}\n\n-- completion 2 of 2\n{answer['text']}\n"


def test_variables_and_a_file(trio: Trio, tmp_path: Any) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(f'generate:\n  gateway: "{trio.gateway}"\n  temperature: 0\n  max_tokens: 9\n')
    env = {"OUTRIDER_GENERATE__MAX_TOKENS": "7"}
    answer = json.loads(succeed("generate", PROMPT, "--json", "--config", str(config), env=env))
    assert len(answer["token_ids"]) == 7
    flags = ("--max-tokens", "5", "--json", "--config", str(config))
    assert len(json.loads(succeed("generate", PROMPT, *flags, env=env))["token_ids"]) == 5


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((PROMPT, "--temperature", "-1"), "temperature"),
        ((PROMPT, "--max-tokens", "0"), "max_tokens"),
        ((PROMPT, "--n", "1000"), "n: is 1000"),
        ((PROMPT, "--method", "magic"), "method"),
        ((PROMPT, "--model", "magic"), "the model 'magic' does not exist; served here: "),
        ((PROMPT, "--adapter", "magic"), "adapter: is 'magic', which does not exist; served here: none"),
        (("--token-ids", "999999"), "999999"),
    ],
)
def test_a_refusal_is_one_line(trio: Trio, arguments: tuple[str, ...], complaint: str) -> None:
    done = outrider("generate", "--gateway", trio.gateway, *arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert complaint in done.stderr and done.stderr.count("\n") == 1
    assert done.stderr.startswith("outrider generate: error: ")


def test_an_absent_gateway_is_one_line() -> None:
    done = outrider("generate", "Hi", "--gateway", "127.0.0.1:1", "--timeout", "0.5")
    assert done.returncode == 1
    assert done.stderr == "outrider generate: error: no gateway answers at 127.0.0.1:1 (connection refused)\n"


def test_a_tokenizer_that_is_none_is_refused_also_on_a_pipe() -> None:
    done = outrider("generate", "Hi", "--gateway", "127.0.0.1:1", "--tokenizer", "/nope")
    assert done.returncode == 1 and done.stderr == "outrider generate: error: --tokenizer: /nope is not a folder\n"


def test_a_gateway_without_a_port_is_one_line() -> None:
    done = outrider("generate", "Hi", "--gateway", "nowhere")
    assert done.returncode == 1 and "address" in done.stderr and done.stderr.count("\n") == 1
