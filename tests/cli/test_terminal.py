"""What the commands write: colours by origin, and the demo's figures.

Bare arguments, and values that are lists."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from support.models import train_byte_level

from outrider.cli import chat, demo
from outrider.cli.arguments import name_bare, parse
from outrider.cli.generate import CollectedCompletion, GenerateSettings
from outrider.cli.terminal import Painter, TokenWriter, make_painter
from outrider.client import Part, SpeculationStats, Usage
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.words.sampling_params import AcceptanceRule, FinishReason, LogprobsMode, SamplingParams, TokenOrigin
from outrider.rpc.words.structured import StructuredOutput

GREEN, YELLOW, CYAN, RESET = "\x1b[32m", "\x1b[33m", "\x1b[36m", "\x1b[0m"
A, R, B, P = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS, TokenOrigin.PLAIN


def part(
    text: str = "", ids: Sequence[int] = (), origins: Sequence[TokenOrigin] = (), stats: SpeculationStats | None = None
) -> Part:
    """A response; the last one if it has statistics."""
    last = stats is not None
    return Part(
        request_id="r",
        index=0,
        text=text,
        token_ids=tuple(ids),
        origins=tuple(origins),
        logprobs=(),
        finish_reason=FinishReason.LENGTH if last else None,
        stop_reason=None,
        usage=Usage(3, len(ids), 0) if last else None,
        speculation=stats,
        seed=5,
        prompt_token_ids=(),
        prompt_logprobs=(),
    )


def stats(acceptance: AcceptanceRule = AcceptanceRule.REJECTION) -> SpeculationStats:
    return SpeculationStats(4, 3, 9, 5, (3, 2, 0), (3, 3, 2), acceptance, 1500)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.load(tmp_path)


def written(tokenizer: Tokenizer | None, *parts: Part, colours: bool = True) -> str:
    out = io.StringIO()
    writer = TokenWriter(Painter(out, colours), tokenizer)
    for one in parts:
        writer.write(one)
    return out.getvalue()


def test_each_token_has_its_colour(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("quick brown fox")[:3]
    one, two, three = (tokenizer.decode([token_id]) for token_id in ids)
    text = written(tokenizer, part(one + two + three, ids, (A, R, B)))
    assert text == f"{GREEN}{one}{RESET}{YELLOW}{two}{RESET}{CYAN}{three}{RESET}"


def test_half_a_character_waits_for_its_end(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_bytes.index(bytes([byte])) for byte in "🙂".encode()]
    text = written(tokenizer, part("", ids[:3], (A, A, A)), part("🙂", ids[3:], (P,)))
    assert text == "🙂"


def test_without_a_tokenizer_a_round_has_one_colour() -> None:
    assert written(None, part("two words", (1, 2), (A, B)), part("!", (3,), (R,))) == (
        f"{GREEN}two words{RESET}{YELLOW}!{RESET}"
    )


def test_the_text_counts_where_tokens_make_another(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("quick brown")
    assert written(tokenizer, part("qu", ids, (A,) * len(ids))) == f"{GREEN}qu{RESET}"


def test_reasoning_is_grey_and_left_out_without_colours() -> None:
    parts = replace(part("", (1,), (A,)), reasoning="hm"), part("so", (2,), (A,))
    assert written(None, *parts) == f"\x1b[2mhm{RESET}{GREEN}so{RESET}"
    assert written(None, *parts, colours=False) == "so"


def test_a_terminal_does_not_obey_the_model() -> None:
    assert written(None, part("a\x1b[2Jb\x07\n", (1,), (P,))) == "a\\x1b[2Jb\\x07\n"
    assert written(None, part("a\x1b[2Jb", (1,), (A,)), colours=False) == "a\x1b[2Jb"  # a file gets what came


def test_no_terminal_has_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not make_painter(plain=False).colours
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert make_painter(plain=False).colours and not make_painter(plain=True).colours
    monkeypatch.setenv("NO_COLOR", "1")
    assert not make_painter(plain=False).colours


def answer(
    ids: Sequence[int], seconds: float, acceptance: AcceptanceRule = AcceptanceRule.REJECTION
) -> CollectedCompletion:
    """A completion that took so long after its first token."""
    made = CollectedCompletion(0)
    made.add(part("x", ids[:1], (P,)))
    made.add(part("y", ids[1:], (A,) * (len(ids) - 1), stats(acceptance)))
    made.times.decoding_s = seconds
    return made


def test_an_answer_is_json() -> None:
    shown = answer((1, 2, 3), 1.0).as_json()
    assert (
        shown["token_ids"] == [1, 2, 3] and shown["text"] == "xy" and shown["origins"] == ["plain", *["accepted"] * 2]
    )
    assert shown["finish_reason"] == "length" and shown["seed"] == 5 and shown["usage"]["prompt_tokens"] == 3
    assert shown["speculation"]["acceptance"] == "rejection" and shown["speculation"]["num_rounds"] == 4
    assert shown["speculation"]["acceptance_rate"] == 5 / 9
    assert shown["speculation"]["mean_acceptance_length"] == 1 + 5 / 3
    assert "logprobs" not in shown


def test_the_speed_leaves_the_first_response_out() -> None:
    assert answer((1, 2, 3), 0.5).tokens_per_s == pytest.approx(4.0)
    assert CollectedCompletion(0).tokens_per_s == 0.0


def test_the_figures_of_a_completion() -> None:
    text = "\n".join(demo.summary(answer((1, 2, 3, 4, 5, 6), 1.0)))
    assert "6 (1 plain, 5 accepted), then length" in text
    assert "1.50 in 4 rounds" in text
    assert "56% (5/9) of the drafted tokens" in text
    assert "1: 100% (3/3)  2: 67% (2/3)  3: 0% (0/2)" in text
    assert "1.50 ms a round" in text


def test_forced_tokens_are_told_where_there_are_any() -> None:
    made = answer((1, 2, 3, 4, 5, 6), 1.0)
    assert "forced" not in "\n".join(demo.summary(made)) + chat.summary(made)
    assert made.speculation is not None and made.usage is not None
    made.speculation = replace(made.speculation, num_forced_tokens=8, num_accepted_forced_tokens=6)
    made.usage = replace(made.usage, reasoning_tokens=2)
    assert "  forced tokens     75% (6/8) accepted" in demo.summary(made)
    assert chat.summary(made).startswith(
        "[6 tokens (2 of reasoning) in 4 rounds (1.50 a round), acceptance 56% (5/9), "
    )
    assert "forced 6/8" in chat.summary(made)


def compared(*ids: Sequence[int], greedy: bool = True, acceptance: AcceptanceRule = AcceptanceRule.REJECTION) -> str:
    drafted, plain = answer(ids[0], 1.0, acceptance), answer(ids[1], 2.0, acceptance)
    return "\n".join(demo.comparison(demo.Comparison((drafted,) * 3, (plain,), greedy)))


def test_the_comparison() -> None:
    text = compared((1, 2, 3), (1, 2, 3))
    assert "2.0 tokens/s (median of 2.0, 2.0, 2.0)" in text and "1.0 tokens/s (median of 1.0)" in text
    assert "2.00 (of the medians)" in text and "yes, in every completion" in text


def test_a_difference_is_told() -> None:
    assert "no, they part at token 3" in compared((1, 2, 3), (1, 2, 4))
    assert "no, they part at token 3" in compared((1, 2), (1, 2, 4))


def test_rejection_sampling_promises_no_same_tokens() -> None:
    assert "not to be expected" in compared((1, 2), (1, 3), greedy=False)
    assert "yes" in compared((1, 2), (1, 2), greedy=False, acceptance=AcceptanceRule.COUPLED)


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
    """But for lists of ids for each token of a prompt, which only programs have."""
    names = {field.name for field in fields(SamplingParams)} - {"prompt_logprob_token_ids", "prompt_logprob_start"}
    assert names <= GenerateSettings.model_fields.keys()


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
