"""Bare arguments, and values that are lists."""

from __future__ import annotations

from dataclasses import fields

import pytest

from outrider.cli.generate import GenerateSettings
from outrider.cli.terminal import name_bare, parse
from outrider.rpc.sampling_params import LogprobsMode, SamplingParams, StructuredOutput


def generate(*argv: str) -> GenerateSettings:
    return parse(GenerateSettings, argv, "outrider generate", "", bare=("prompt",), short={"--json": "--output=json"})


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["Hi"], ["--prompt=Hi"]),
        (["--n", "2", "Hi"], ["--n", "2", "--prompt=Hi"]),
        (["--plain", "Hi", "--n=2"], ["--plain", "--prompt=Hi", "--n=2"]),
        (["--top-k", "-1", "Hi"], ["--top-k", "-1", "--prompt=Hi"]),
        (["--", "--n"], ["--prompt=--n"]),
        (["Hi", "you"], ["--prompt=Hi", "you"]),
        (["--config", "x.yaml", "Hi"], ["--config", "x.yaml", "--prompt=Hi"]),
        (["--json", "Hi"], ["--output=json", "--prompt=Hi"]),
        (["--n"], ["--n"]),
    ],
)
def test_bare_arguments_become_flags(argv: list[str], named: list[str]) -> None:
    assert name_bare(GenerateSettings, argv, ("prompt",), {"--json": "--output=json"}) == named


def test_every_sampling_parameter_is_a_flag() -> None:
    assert {field.name for field in fields(SamplingParams)} <= GenerateSettings.model_fields.keys()


def test_only_what_is_given_is_sent() -> None:
    assert generate("Hi").given() == {}
    assert generate("Hi", "--temperature", "0", "--no-detokenize").given() == {"temperature": 0.0, "detokenize": False}


def test_lists_and_mappings() -> None:
    settings = generate(
        "--token-ids", "1, 2,3", "--token-ids", "4", "--stop", "a,b", "--stop", "\n", "--stop-token-ids", "5,6",
        "--bad-words-ids", "7,8", "--bad-words-ids", "9", "--logit-bias", '{"3": -1.5}',
        "--seed", "18446744073709551615",
        "--logprobs-mode", "raw_logits", "--structured-output", '{"regex": "a+"}',
    )  # fmt: skip
    assert settings.token_ids == (1, 2, 3, 4) and settings.prompt is None
    assert settings.given() == {
        "stop": ("a,b", "\n"),
        "stop_token_ids": (5, 6),
        "bad_words_ids": ((7, 8), (9,)),
        "logit_bias": {3: -1.5},
        "seed": 2**64 - 1,
        "logprobs_mode": LogprobsMode.RAW_LOGITS,
        "structured_output": StructuredOutput(regex="a+"),
    }
