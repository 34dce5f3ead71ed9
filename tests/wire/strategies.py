"""Hypothesis strategies for every message of the wire."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from outrider.rpc import messages as m
from outrider.rpc import sampling_params as s

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
DOUBLES = st.floats(allow_nan=False)
FLOATS = st.floats(width=32, allow_nan=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


def tuples(elements: SearchStrategy, max_size: int = 5, min_size: int = 0) -> SearchStrategy:
    return st.lists(elements, min_size=min_size, max_size=max_size).map(tuple)


STRUCTURED = st.one_of(
    st.builds(s.StructuredOutput, json_schema=TEXTS),
    st.builds(s.StructuredOutput, regex=TEXTS),
    st.builds(s.StructuredOutput, grammar=TEXTS),
    st.builds(s.StructuredOutput, choice=tuples(TEXTS)),
    st.just(s.StructuredOutput(json_object=True)),
    st.just(s.StructuredOutput()),
)
SAMPLING = st.builds(
    s.SamplingParams,
    temperature=DOUBLES,
    top_p=DOUBLES,
    top_k=INT32,
    min_p=DOUBLES,
    repetition_penalty=DOUBLES,
    presence_penalty=DOUBLES,
    frequency_penalty=DOUBLES,
    logit_bias=st.dictionaries(UINT32, FLOATS, max_size=4),
    allowed_token_ids=tuples(UINT32),
    bad_words=tuples(TEXTS),
    bad_words_ids=tuples(tuples(UINT32)),
    max_tokens=UINT32,
    min_tokens=UINT32,
    stop=tuples(TEXTS),
    stop_token_ids=tuples(UINT32),
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    logprobs=st.none() | INT32,
    prompt_logprobs=st.none() | INT32,
    logprobs_mode=st.sampled_from(s.LogprobsMode),
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    detokenize=st.booleans(),
    structured_output=st.none() | STRUCTURED,
    truncate_prompt_tokens=st.none() | INT32,
    seed=st.none() | UINT64,
)
WEIGHTS = st.builds(m.TokenWeights.of, ids=tuples(UINT32, min_size=1), weights=tuples(UINT32, min_size=1))
LOGPROBS = tuples(tuples(st.builds(m.TokenLogprob, id=UINT32, logprob=FLOATS, rank=UINT32)))
TIMINGS = st.builds(m.StepTimings, *[UINT32] * 5)
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
        features=st.booleans(),
        salt=TEXTS,
        traceparent=TEXTS,
        one_hot=st.booleans(),
        method=TEXTS,
        model_digest=TEXTS,
        suspect=st.booleans(),
    ),
    "close": st.builds(m.Close, UINT32),
    "closed": st.builds(m.Closed, UINT32),
    "failure": st.builds(
        m.Failure, UINT32, st.integers(0, 16), TEXTS, reason=TEXTS, retry_after_ms=st.integers(0, 10**9)
    ),
    "piece": st.builds(
        m.Piece,
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
        features=st.binary(max_size=40),
        finish_reason=st.none() | st.sampled_from(s.FinishReason),
        stop_token_id=st.none() | UINT32,
        dropped=tuples(UINT32),
        timings=TIMINGS,
        load=LOAD,
        num_cached_ids=UINT32,
    ),
    "prompt_logprobs": st.builds(m.PromptLogprobs, UINT32, UINT32, LOGPROBS),
    "header": st.builds(m.FrameHeader, UINT64, UINT64, UINT64, UINT32, st.booleans()),
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
