"""Arguments of another kind: one clear line, before anything is loaded or generated."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from llm.conftest import TinyPair

from outrider.llm import LLM, SamplingParams
from outrider.llm.config import EngineArguments
from outrider.llm.inputs import conversations_of, parse_prompts
from outrider.llm.sampling_params import one_each

QUIET: dict[str, Any] = {"use_tqdm": False}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": "a"}, "seed must be an integer, or None; got 'a'"),
        ({"seed": True}, "seed must be an integer, or None; got True"),
        ({"threads": 0}, "threads must be an integer from 1 to 256, or None; got 0"),
        ({"threads": "2"}, "threads must be an integer from 1 to 256, or None; got '2'"),
        ({"max_model_len": "9"}, "max_model_len must be an integer of at least 2, or None; got '9'"),
        ({"max_num_seqs": "a"}, "max_num_seqs must be an integer of at least 1, or None; got 'a'"),
        ({"max_num_batched_tokens": 10**6}, "max_num_batched_tokens must be an integer from 1 to 65536, or None; "
         "got 1000000"),
        ({"gpu_memory_utilization": "a"}, "gpu_memory_utilization must be a number in (0, 1], got 'a'"),
        ({"trust_remote_code": "no"}, "trust_remote_code must be True or False, got 'no'"),
        ({"override_generation_config": "a"}, "override_generation_config must be a dict, got 'a'"),
        ({"model": 5}, "model must be a folder's path or a hub id, a str or a Path; got 5"),
        ({"tokenizer": b"x"}, "tokenizer must be a folder's path or a hub id, a str or a Path; got b'x'"),
    ],
)  # fmt: skip
def test_keywords_of_llm(given: dict[str, Any], message: str, tiny_pair: TinyPair) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        LLM(**{"model": tiny_pair.target, **given})
    assert str(raised.value) == message


def test_keywords_that_may_be_none(tiny_pair: TinyPair) -> None:
    names = ("seed", "threads", "max_model_len", "max_num_seqs", "max_logprobs", "enable_prefix_caching")
    made = EngineArguments.of({"model": tiny_pair.target, **dict.fromkeys(names)})
    assert (made.seed, made.threads, made.max_num_seqs, made.max_logprobs) == (None, None, 256, 20)
    assert type(EngineArguments.of({"model": tiny_pair.target, "threads": np.int64(2)}).threads) is int


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"abc", "a list of token ids or a dict, not bytes"),
        (bytearray(b"abc"), "not bytearray"),
        ([b"abc"], "not b'abc'"),
        ([[True, False]], r"not \[True, False\]"),
        ({"prompt": 5}, "a prompt's 'prompt' must be a str, got 5"),
        ({"prompt": "a", "cache_salt": 5}, "a prompt's 'cache_salt' must be a str, got 5"),
        ({"prompt_token_ids": "12"}, "'prompt_token_ids' must be a list of token ids, got '12'"),
        ({"prompt_token_ids": b"12"}, "'prompt_token_ids' must be a list of token ids, got b'12'"),
        ({"prompt_token_ids": [1.5]}, r"'prompt_token_ids' must be a list of token ids, got \[1.5\]"),
        ({"prompt_token_ids": 5}, "'prompt_token_ids' must be a list of token ids, got 5"),
    ],
)
def test_prompts(prompts: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        parse_prompts(prompts)


def test_prompts_that_are_no_unicode() -> None:
    for prompts in ("a\ud800", ["a\ud800"], {"prompt": "a\ud800"}):
        with pytest.raises(ValueError, match=r"must be Unicode; '\\ud800' at 1") as raised:
            parse_prompts(prompts)
        assert type(raised.value) is ValueError
    (prompt,) = parse_prompts({"prompt_token_ids": np.array([3, 4])})
    assert prompt.token_ids == (3, 4)


def test_sampling_params_of_a_call() -> None:
    given: Any
    for given in ({"temperature": 0}, [{"temperature": 0}], "a", 5, [None]):
        with pytest.raises(TypeError, match="sampling_params must be a SamplingParams, or a list of one for each"):
            one_each(given, 1)
    with pytest.raises(TypeError, match=r"write SamplingParams\(\.\.\.\)"):
        one_each({"temperature": 0}, 1)
    assert one_each((SamplingParams(seed=3),), 1)[0].seed == 3


@pytest.mark.parametrize(
    ("messages", "kind", "message"),
    [
        ([{"content": "hi"}], ValueError, "needs a 'role', such as 'user', got {'content': 'hi'}"),
        ([[{"role": 5, "content": "hi"}]], ValueError, "needs a 'role'"),
        (["hi"], TypeError, "messages are a list of"),
        ([["hi"]], TypeError, r"got \['hi'\]"),
        (b"hi", TypeError, "messages are a list of"),
        ([{"role": "user", "content": 5}], TypeError, "'content' is a str or a list of parts, got 5"),
        ([{"role": "user", "content": [{"type": "text"}]}], TypeError, "part needs a 'text'"),
    ],
)
def test_messages(messages: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        conversations_of(messages)


def test_calls_of_an_llm(llm: LLM) -> None:
    """What is checked alone above holds for the methods, too; keywords say what was meant, warnings where."""
    params: Any = {"temperature": 0}
    with pytest.raises(TypeError, match="must be a SamplingParams"):
        llm.generate(["a"], params, **QUIET)
    for prompts in (b"abc", {"prompt": 5}, "\ud800"):
        with pytest.raises((TypeError, ValueError), match="a prompt"):
            llm.generate(prompts, **QUIET)
    for content in ("hi", "\ud800"):
        role = {} if content == "hi" else {"role": "user"}
        with pytest.raises(ValueError, match=r"role|Unicode"):
            llm.chat([{**role, "content": content}], **QUIET)
    with pytest.raises(TypeError, match="generate has no keyword 'sampling_parms'; did you mean 'sampling_params'"):
        llm.generate(["a"], sampling_parms=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="chat has no keyword 'chat_templat'; did you mean 'chat_template'"):
        llm.chat([], chat_templat="")  # type: ignore[call-arg]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm.generate(prompt_token_ids=[[5]], sampling_params=SamplingParams(max_tokens=1), **QUIET)
    assert [warning.filename for warning in caught] == [__file__]
