"""Every message survives the wire, byte for byte; what has no sense is refused by name, for every entry point."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from rpc.test_sampling_params import CONTEXT, FEW, FLOATS, INT32, SAMPLING, TEXTS, UINT32, UINT64, VOCAB, fields, tuples

from outrider.rpc import codec
from outrider.rpc import messages as m
from outrider.rpc.errors import InvalidArgument, shown
from outrider.rpc.generation_codec import POSITIONS
from outrider.rpc.messages import Commit, Credit, DraftTokens, Failure, Open, TokenWeights, validate_sampling
from outrider.rpc.sampling_codec import decode_sampling, decode_structured_output, encode_structured_output
from outrider.rpc.words import sampling_params as s
from outrider.rpc.words.answer import TokenLogprob
from outrider.rpc.words.request import DRAFT_OPTIONS
from outrider.rpc.words.sampling_params import SamplingParams, TokenOrigin
from outrider.rpc.words.structured import Reasoning, StructuredOutput
from outrider.v1 import common_pb2
from outrider.v1 import generation_pb2 as pb

WEIGHTS = st.builds(m.TokenWeights.of, ids=tuples(UINT32, min_size=1), weights=tuples(UINT32, min_size=1))
LOGPROBS = tuples(tuples(st.builds(TokenLogprob, id=UINT32, logprob=FLOATS, rank=UINT32)))
TIMINGS = st.builds(m.StepTimings, *[UINT32] * 9)
LOAD = st.builds(m.Load, *[UINT32] * 3)
MESSAGES: dict[str, SearchStrategy] = {
    "open": st.builds(
        m.Open,
        sequence_id=UINT32,
        prompt_ids=tuples(UINT32),
        sampling=SAMPLING,
        output_ids=tuples(UINT32),
        fork_of=st.none() | UINT32,
        completion=UINT32,
        acceptance=st.sampled_from(s.AcceptanceRule),
        seed=UINT64,
        timeout_ms=UINT64,
        first_chain=UINT32,
        priority=INT32,
        salt=TEXTS,
        traceparent=TEXTS,
        one_hot=st.booleans(),
        method=TEXTS,
        model_digest=TEXTS,
        adapter=TEXTS,
        tokenizer_fingerprint=TEXTS,
        suspect=st.booleans(),
        plain=st.booleans(),
        reasoning=st.none() | st.builds(Reasoning, tuples(UINT32, min_size=1), tuples(UINT32), UINT32, st.booleans()),
    ),
    "close": st.builds(m.Close, UINT32),
    "closed": st.builds(m.Closed, UINT32),
    "failure": st.builds(
        m.Failure, UINT32, st.integers(0, 16), TEXTS, reason=TEXTS, retry_after_ms=st.integers(0, 10**9)
    ),
    "piece": st.builds(
        m.DraftTokens,
        sequence_id=UINT32,
        chain=UINT32,
        position=UINT32,
        ids=tuples(UINT32),
        weights=tuples(st.none() | WEIGHTS),
        parent=st.none() | UINT32,
        more=st.booleans(),
        parents=tuples(UINT32),
        draft_us=UINT32,
    ),
    "credit": st.builds(m.Credit, *[UINT32] * 5),
    "commit": st.builds(
        m.Commit,
        sequence_id=UINT32,
        position=UINT32,
        ids=tuples(UINT32),
        origins=tuples(st.sampled_from(s.TokenOrigin)),
        chain=st.none() | UINT32,
        num_drafted=UINT32,
        num_accepted=UINT32,
        logprobs=LOGPROBS,
        finish_reason=st.none() | st.sampled_from(s.FinishReason),
        stop_token_id=st.none() | UINT32,
        dropped=tuples(UINT32),
        timings=TIMINGS,
        load=LOAD,
        num_cached_ids=UINT32,
        num_forced=UINT32,
    ),
    "prompt_logprobs": st.builds(m.PromptLogprobs, UINT32, UINT32, LOGPROBS),
    "header": st.builds(m.FrameHeader, UINT64, UINT64, UINT64, UINT32, st.booleans(), UINT32),
    "load": LOAD,
    "timings": TIMINGS,
}
MODEL_INFO = st.builds(
    m.ModelInfo,
    name=TEXTS,
    digest=TEXTS,
    vocab_size=UINT32,
    max_model_len=UINT32,
    num_tokens=UINT32,
    tokenizer_fingerprint=TEXTS,
    eos_token_ids=tuples(UINT32),
    default_sampling=SAMPLING,
    dtype=TEXTS,
    device=TEXTS,
    batch_invariant=st.booleans(),
    num_blocks=UINT32,
    block_size=UINT32,
    protocol_major=UINT32,
    protocol_minor=UINT32,
    engine=TEXTS,
    kernels=TEXTS,
    mapped_fingerprints=tuples(TEXTS),
)
INFOS: dict[str, SearchStrategy] = {
    "model_info": MODEL_INFO,
    "draft_info": st.builds(
        m.DraftInfo,
        MODEL_INFO,
        tuples(st.builds(m.DraftMethod, TEXTS, st.booleans(), st.booleans())),
        capabilities=tuples(TEXTS, min_size=1),
    ),
    "target_info": st.builds(
        m.TargetInfo, MODEL_INFO, UINT32, LOAD, tuples(st.tuples(UINT32, UINT32)), tuples(TEXTS, min_size=1)
    ),
}


@pytest.mark.parametrize("name", [*MESSAGES, *INFOS])
@FEW
@given(data=st.data())
def test_a_message_survives_the_wire(name: str, data: st.DataObject) -> None:
    message = data.draw((MESSAGES | INFOS)[name])
    both: Any = getattr(codec, name.upper())
    encoded = both.encode(message)
    parsed = type(encoded).FromString(encoded.SerializeToString())
    assert both.decode(parsed) == message


def test_an_enum_of_a_newer_peer_reads_as_unspecified_in_an_answer() -> None:
    newer = common_pb2.Commit(ids=[1, 2], origins=[77, 4], finish_reason=9)  # type: ignore[list-item, arg-type]
    commit = codec.COMMIT.decode(newer)
    assert [origin.name for origin in commit.origins] == ["UNSPECIFIED", "PLAIN"]
    assert commit.finish_reason is not None and commit.finish_reason.name == "UNSPECIFIED"  # it has ended
    assert codec.COMMIT.encode(commit) == newer  # and whoever knows the number gets it
    described = pb.ModelInfo(default_sampling=pb.SamplingParams(top_k=7, logprobs_mode=9))  # type: ignore[arg-type]
    assert codec.MODEL_INFO.decode(described).default_sampling == SamplingParams(top_k=7)


def test_an_enum_of_a_newer_peer_is_refused_in_a_request() -> None:
    with pytest.raises(InvalidArgument, match=r"^sampling.logprobs_mode: is 9, which .*; allowed: 0 to 4$"):
        decode_sampling(pb.SamplingParams(logprobs_mode=9))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"^open.acceptance: is 9, which .*; allowed: 0 to 3$"):
        codec.OPEN.decode(common_pb2.Open(acceptance=9))  # type: ignore[arg-type]


def test_a_number_that_no_field_holds_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        codec.COMMIT.encode(Commit(1, -1, ()))


@pytest.mark.parametrize(
    ("num_origins", "num_accepted", "num_forced", "kept"),
    [
        (6, 4, 2, 2),  # all held
        (5, 4, 2, 1),  # ... up to a stop, or a token that another spelling took
        (3, 4, 2, 0),  # a stop among the drafted ones, of which more held
        (2, 2, 2, 0),
        (4, 4, 0, 0),  # none were forced
        (3, 0, 3, 3),  # nothing was drafted
    ],
)
def test_which_of_the_kept_tokens_were_forced(num_origins: int, num_accepted: int, num_forced: int, kept: int) -> None:
    origins = (s.TokenOrigin.ACCEPTED,) * num_origins + (s.TokenOrigin.RECOVERED,)
    ids = (5,) * len(origins)
    commit = Commit(1, 9, ids, origins, num_drafted=4, num_accepted=num_accepted, num_forced=num_forced)
    assert commit.num_accepted_forced == kept


def test_small_codecs_of_parts() -> None:
    unspecified = pb.SamplingParams(logprobs_mode=pb.LOGPROBS_MODE_UNSPECIFIED)
    assert decode_sampling(unspecified).logprobs_mode is s.LogprobsMode.RAW_LOGPROBS
    empty = StructuredOutput(choice=())
    encoded = encode_structured_output(empty)
    assert decode_structured_output(encoded) == empty
    position = (TokenLogprob(1, -0.5, 2), TokenLogprob(2**32 - 1, float("-inf"), 1))
    assert POSITIONS.decode(POSITIONS.encode((position,))) == (position,)


def test_a_failure_is_a_rich_status() -> None:
    encoded = codec.FAILURE.encode(Failure(3, 8, "no blocks", "NO_BLOCKS", 250))
    assert encoded.status.code == 8
    assert [detail.TypeName() for detail in encoded.status.details] == [
        "google.rpc.ErrorInfo",
        "google.rpc.RetryInfo",
    ]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_are_as_many_as_the_flag_allows(field: str) -> None:
    def asked(count: int) -> Open:
        return dataclasses.replace(GOOD_OPEN, sampling=SamplingParams(**{field: count}))  # type: ignore[arg-type]

    allowed = {20: (0, 20), 0: (0,), 50: (50,), -1: (-1, VOCAB)}
    refused = {20: (-1, 21), 0: (-1, 1), 50: (-1, 51), -1: (-2, VOCAB + 1)}
    for bound, counts in allowed.items():
        for count in counts:
            m.validate_open(asked(count), VOCAB, CONTEXT, bound)
    for bound, counts in refused.items():
        for count in counts:
            assert fields(lambda n=count, most=bound: m.validate_open(asked(n), VOCAB, CONTEXT, most)) == [  # type: ignore[misc]
                f"open.sampling.{field}"
            ]


def test_prompt_and_max_tokens_fit_together() -> None:
    m.validate_length(4000, 96, CONTEXT)
    assert fields(lambda: m.validate_length(4000, 97, CONTEXT)) == ["sampling.max_tokens"]
    assert fields(lambda: m.validate_length(CONTEXT, 1, CONTEXT)) == ["prompt"]
    assert fields(lambda: m.validate_prompt_ids((), VOCAB, CONTEXT)) == ["prompt_ids"]
    assert fields(lambda: m.validate_prompt_ids((1, VOCAB), VOCAB, CONTEXT)) == ["prompt_ids[1]"]
    assert fields(lambda: m.validate_prompt_ids((1,) * CONTEXT, VOCAB, CONTEXT)) == ["prompt_ids"]


GOOD_OPEN = Open(1, (1, 2), SamplingParams())
BAD_OPEN: list[tuple[str, dict[str, Any]]] = [
    ("open.prompt_ids", {"prompt_ids": ()}),
    ("open.prompt_ids[0]", {"prompt_ids": (VOCAB,)}),
    ("open.prompt_ids", {"fork_of": 1}),
    ("open.output_ids[0]", {"output_ids": (-1,)}),
    ("open.output_ids", {"output_ids": (1,) * 17}),
    ("open.completion", {"completion": 64}),
    ("open.first_chain", {"first_chain": 2**31}),
    ("open.seed", {"seed": 2**64}),
    ("open.priority", {"priority": 2**31}),
    *((f"open.{name}", {name: float("nan")}) for name in DRAFT_OPTIONS),
    ("open.salt", {"salt": "x" * 129}),
    ("open.adapter", {"adapter": "x" * 129}),
    ("open.reasoning.end_ids", {"reasoning": Reasoning(())}),
    ("open.reasoning.start_ids[0]", {"reasoning": Reasoning((1,), (VOCAB,))}),
    ("open.reasoning.max_tokens", {"reasoning": Reasoning((1,), max_tokens=2**31)}),
    ("open.method", {"method": "x" * 129}),
    ("open.sampling.top_p", {"sampling": SamplingParams(top_p=0)}),
]


@pytest.mark.parametrize(("field", "change"), BAD_OPEN)
def test_a_bad_open_is_refused_by_name(field: str, change: dict[str, Any]) -> None:
    m.validate_open(GOOD_OPEN, VOCAB, CONTEXT)
    assert field in fields(lambda: m.validate_open(dataclasses.replace(GOOD_OPEN, **change), VOCAB, CONTEXT))


@pytest.mark.parametrize(
    ("field", "piece"),
    [
        ("piece.ids", DraftTokens(1, 0, 4, (1,) * 1025)),
        ("piece.weights", DraftTokens(1, 0, 4, (1,), (None, None))),
        ("piece.weights[0]", DraftTokens(1, 0, 4, (1,), (TokenWeights.of((1,) * 5000, (1,) * 5000),))),
        ("piece.parents", DraftTokens(1, 0, 4, (1, 2), parents=(0,))),
        ("piece.parents[1]", DraftTokens(1, 0, 4, (1, 2), parents=(0, 2))),
        ("piece.parent", DraftTokens(1, 3, 4, (1,), parent=3)),
        ("piece.position", DraftTokens(1, 0, 2**31, ())),
    ],
)
def test_a_bad_piece_is_refused_by_name(field: str, piece: DraftTokens) -> None:
    assert fields(lambda: m.validate_piece(piece)) == [field]


def test_ids_and_weights_of_a_piece_are_not_judged() -> None:
    m.validate_piece(DraftTokens(1, 0, 4, (2**32 - 1, 5), (TokenWeights.of((1, 1), (0,)), None), parents=(0, 1)))


def test_credits_and_commits() -> None:
    m.validate_credit(Credit(1, 10, 128, 60_000))
    assert fields(lambda: m.validate_credit(Credit(1, -1, 129, 60_001))) == [
        "credit.until",
        "credit.max_window",
        "credit.patience_ms",
    ]
    m.validate_commit(Commit(1, 4, (5,), (TokenOrigin.PLAIN,)), VOCAB)
    bad = Commit(1, 4, (VOCAB,), (TokenOrigin.PLAIN,) * 2, num_accepted=1)
    assert fields(lambda: m.validate_commit(bad, VOCAB)) == ["commit.ids[0]", "commit.origins", "commit.num_accepted"]
    endless = Commit(1, 4, (5,), num_drafted=2**32 - 1, num_accepted=2**32 - 1)
    assert fields(lambda: m.validate_commit(endless, VOCAB)) == ["commit.num_drafted"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ids": (VOCAB,)}, "commit.ids[0]"),
        ({"ids": (5,) * 2}, "commit.origins"),
        ({"ids": (5,) * (m.MAX_PIECE_IDS + 1), "origins": ()}, "commit.ids"),
        ({"num_drafted": 1, "num_accepted": 2}, "commit.num_accepted"),
        ({"num_drafted": m.MAX_PIECE_IDS + 1}, "commit.num_drafted"),
        ({"num_forced": m.MAX_PIECE_IDS + 1}, "commit.num_forced"),
        ({"position": m.MAX_INT32 + 1}, "commit.position"),
    ],
)
def test_what_came_over_the_wire_is_judged_alike(change: dict[str, Any], field: str) -> None:
    """It is looked through at once, without a word for each of its fields."""
    sound = Commit(1, 4, (5,), (TokenOrigin.PLAIN,))
    m.validate_commit(codec.COMMIT.decode(codec.COMMIT.encode(sound)), VOCAB)
    came = codec.COMMIT.decode(codec.COMMIT.encode(dataclasses.replace(sound, **change)))
    assert came.encoded is not None
    assert fields(lambda: m.validate_commit(came, VOCAB)) == [field]


def test_types_have_json_s_names() -> None:
    values: list[object] = [None, True, 1.5, "x", [1], {}, (1,)]
    assert [shown(value) for value in values] == ["null", "true", "1.5", "a text", "a list", "an object", "a list"]


def test_the_validator_is_fast_and_its_messages_hold_no_text() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0), allowed_token_ids=tuple(range(VOCAB)))
    prompt = Open(1, tuple(i % VOCAB for i in range(100_000)), params)
    started = time.thread_time()
    m.validate_open(prompt, VOCAB, 200_000)
    assert time.thread_time() - started < 0.25  # measured 4 ms
    with pytest.raises(InvalidArgument) as caught:
        validate_sampling(SamplingParams(stop=("canary" * 100,), bad_words=("canary" * 100,)), VOCAB, CONTEXT)
    assert "canary" not in str(caught.value)
