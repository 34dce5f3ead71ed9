"""Every message survives the wire, byte for byte."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire.strategies import INFOS, MESSAGES, SAMPLING

from outrider.rpc import codec, sampling_params
from outrider.rpc import codec as rpc_codec
from outrider.rpc.errors import InvalidArgument
from outrider.rpc.messages import Commit, Failure, TokenLogprob
from outrider.rpc.sampling_params import LogprobsMode, SamplingParams, StructuredOutput
from outrider.v1 import common_pb2 as pb

FEW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", [*MESSAGES, *INFOS])
@FEW
@given(data=st.data())
def test_a_message_survives_the_wire(name: str, data: st.DataObject) -> None:
    module = next(m for m in (codec, rpc_codec, rpc_codec) if hasattr(m, f"encode_{name}"))
    message = data.draw((MESSAGES | INFOS)[name])
    encoded = getattr(module, f"encode_{name}")(message)
    parsed = type(encoded).FromString(encoded.SerializeToString())
    assert getattr(module, f"decode_{name}")(parsed) == message


@FEW
@given(params=SAMPLING)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    encoded = sampling_params.encode_sampling(params)
    defaults = SamplingParams(seed=params.seed, logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs)
    assert sampling_params.decode_sampling(encoded) == params
    # Whatever the receiver's defaults are, only what the sender left absent (None) is taken from them.
    other = dataclasses.replace(defaults, temperature=0.5, top_k=7, max_tokens=3, detokenize=False)
    assert sampling_params.decode_sampling(encoded, other) == params


def test_absent_fields_come_from_the_defaults_and_present_zeros_do_not() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=16)
    assert sampling_params.decode_sampling(pb.SamplingParams(), defaults) == defaults
    zeros = sampling_params.decode_sampling(pb.SamplingParams(temperature=0.0, top_k=0, seed=0), defaults)
    assert (zeros.temperature, zeros.top_k, zeros.top_p, zeros.seed) == (0.0, 0, 0.95, 0)
    assert sampling_params.decode_sampling(pb.SamplingParams()).max_tokens == 16


def test_every_field_of_the_dataclasses_is_encoded() -> None:
    """A field added to SamplingParams and forgotten in the codec would silently take its default."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def test_an_enum_of_a_newer_peer_reads_as_unspecified_in_an_answer() -> None:
    newer = pb.Commit(ids=[1, 2], origins=[77, 4], finish_reason=9)  # type: ignore[list-item, arg-type]
    commit = codec.decode_commit(newer)
    assert [origin.name for origin in commit.origins] == ["UNSPECIFIED", "PLAIN"]
    assert commit.finish_reason is not None and commit.finish_reason.name == "UNSPECIFIED"  # it has ended
    assert codec.encode_commit(commit) == newer  # and whoever knows the number gets it
    described = pb.ModelInfo(default_sampling=pb.SamplingParams(top_k=7, logprobs_mode=9))  # type: ignore[arg-type]
    assert rpc_codec.decode_model_info(described).default_sampling == SamplingParams(top_k=7)


def test_an_enum_of_a_newer_peer_is_refused_in_a_request() -> None:
    with pytest.raises(InvalidArgument, match=r"^sampling.logprobs_mode: is 9, which .*; allowed: 0 to 4$"):
        sampling_params.decode_sampling(pb.SamplingParams(logprobs_mode=9))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"^open.acceptance: is 3, which .*; allowed: 0 to 2$"):
        codec.decode_open(pb.Open(acceptance=3))  # type: ignore[arg-type]


def test_a_number_that_no_field_holds_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        codec.encode_commit(Commit(1, -1, ()))


def test_small_codecs_of_parts() -> None:
    unspecified = pb.SamplingParams(logprobs_mode=pb.LOGPROBS_MODE_UNSPECIFIED)
    assert sampling_params.decode_sampling(unspecified).logprobs_mode is LogprobsMode.RAW_LOGPROBS
    empty = StructuredOutput(choice=())
    encoded = sampling_params.encode_structured_output(empty)
    assert sampling_params.decode_structured_output(encoded) == empty
    position = (TokenLogprob(1, -0.5, 2), TokenLogprob(2**32 - 1, float("-inf"), 1))
    assert rpc_codec.decode_position_logprobs(rpc_codec.encode_position_logprobs(position)) == position


def test_a_failure_is_a_rich_status() -> None:
    encoded = codec.encode_failure(Failure(3, 8, "no blocks", "NO_BLOCKS", 250))
    assert encoded.status.code == 8
    assert [detail.TypeName() for detail in encoded.status.details] == [
        "google.rpc.ErrorInfo",
        "google.rpc.RetryInfo",
    ]
