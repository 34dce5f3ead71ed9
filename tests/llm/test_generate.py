"""LLM against transformers' own generate: greedy tokens are equal whatever is drafted; order, lengths, stops, log
probabilities, seeds and priorities are those of vLLM's API."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from llm.conftest import VOCAB, TinyPair, greedy_ids
from tiny import hf_logits, save_tiny

from outrider.llm import LLM, RequestOutput, SamplingParams, TokensPrompt, Unsupported
from outrider.llm.backends import Job

QUIET: dict[str, Any] = {"use_tqdm": False}


def prompts_of(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("method", ["ngram", "draft_model", None])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_greedy_equals_generate(tiny_pair: TinyPair, method: str | None, k: int) -> None:
    config: dict[str, Any] | None = {"method": method, "num_speculative_tokens": k, "prompt_lookup_min": 1}
    if method == "draft_model":
        config = {"model": str(tiny_pair.draft), "num_speculative_tokens": k}
    prompts = prompts_of(4 + k, k)
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config if method else None) as made:
        outputs = made.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32), **QUIET)
        values = {metric.name: metric for metric in made.get_metrics()}
    assert ids_of(outputs) == [greedy_ids(tiny_pair, prompt, 32) for prompt in prompts]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    drafts: Any = values.get("vllm:spec_decode_num_drafts")
    assert (drafts is None) if method is None else drafts.value > 0


def test_mixed_lengths_in_the_prompts_order(llm: LLM, tiny_pair: TinyPair) -> None:
    prompts, lengths = prompts_of(6, 7), [3, 60, 1, 25, 40, 8]
    params = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params, **QUIET)
    assert ids_of(outputs) == [greedy_ids(tiny_pair, *pair) for pair in zip(prompts, lengths, strict=True)]
    assert [int(output.request_id) for output in outputs] == sorted(int(output.request_id) for output in outputs)
    with pytest.raises(ValueError, match="lengths of prompts and sampling_params"):
        llm.generate(prompts, params[:2], **QUIET)


def test_every_form_of_a_prompt(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = "the quick brown"
    ids = tokenizer.encode(text)
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    forms: list[Any] = [text, {"prompt": text}, ids, TokensPrompt(prompt_token_ids=ids), {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, greedy, **QUIET)
    assert all(output.outputs == outputs[0].outputs and output.prompt_token_ids == ids for output in outputs)
    assert [output.prompt for output in outputs] == [text, text, None, None, None]
    assert outputs[0].outputs[0].text == tokenizer.decode(outputs[0].outputs[0].token_ids)
    for alone in (text, ids, {"prompt": text}):
        (output,) = llm.generate(alone, greedy, **QUIET)
        assert output.outputs == outputs[0].outputs
    with pytest.warns(DeprecationWarning, match="prompt_token_ids"):
        (output,) = llm.generate(prompt_token_ids=[ids], sampling_params=greedy, **QUIET)
    assert output.outputs == outputs[0].outputs
    with pytest.warns(DeprecationWarning, match="prompt_token_ids"):  # the old third argument, beside its text
        (output,) = llm.generate([text], greedy, [ids], **QUIET)
    assert (output.prompt, output.prompt_token_ids) == (text, ids) and output.outputs == outputs[0].outputs
    with pytest.raises(ValueError, match="prompt_token_ids must be the same"), pytest.warns(DeprecationWarning):
        llm.generate([text, text], greedy, [ids], **QUIET)
    with pytest.raises(Unsupported, match="multi_modal_data"):
        llm.generate({"prompt": text, "multi_modal_data": {"image": object()}}, greedy, **QUIET)
    with pytest.raises(TypeError, match="prompt_token_ids"):
        llm.generate({"prompt_tokens_ids": ids}, greedy, **QUIET)
    with pytest.raises(ValueError, match="ids"):
        llm.generate([[VOCAB + 5]], greedy, **QUIET)
    with pytest.raises(ValueError, match="511"):
        llm.generate([[5] * 600], greedy, **QUIET)
    with pytest.raises(ValueError, match="empty"):
        llm.generate([[5], []], greedy, **QUIET)
    assert llm.generate([], greedy, **QUIET) == []
    cut = SamplingParams(temperature=0.0, max_tokens=5, truncate_prompt_tokens=len(ids))
    (output,) = llm.generate([[5] * 600 + ids], cut, **QUIET)
    assert output.outputs == outputs[0].outputs and output.prompt_token_ids == ids  # as it is used


def test_log_probabilities(llm: LLM, tiny_pair: TinyPair) -> None:
    prompt = prompts_of(1, 3)[0] + [9, 8, 7]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate([prompt], params, **QUIET)
    (completion,) = output.outputs
    tokens = prompt + completion.token_ids
    reference = torch.log_softmax(hf_logits(tiny_pair.hf, tokens), dim=-1)  # [tokens, vocab]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
    whole = [*output.prompt_logprobs, *completion.logprobs]
    for position, candidates in enumerate(whole[1:], start=1):
        row = reference[position - 1]
        assert candidates is not None and tokens[position] in candidates
        for token_id, entry in candidates.items():
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert entry.rank == int((row > row[token_id]).sum()) + 1
            assert entry.decoded_token == llm.get_tokenizer().decode([token_id])
    sampled = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(sampled))
    (plain,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2), **QUIET)
    assert plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None
    with pytest.raises(ValueError, match="max_logprobs=20"):
        llm.generate([prompt], SamplingParams(logprobs=21), **QUIET)


def test_stops_keep_ids_and_cut_text(llm: LLM, tiny_pair: TinyPair) -> None:
    prompt = [40, 41, 42]
    ids = greedy_ids(tiny_pair, prompt, 24)
    tokenizer = llm.get_tokenizer()
    end = next(i for i in range(4, 24) if ids[i] not in ids[:i])
    (by_id,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[ids[end]]), **QUIET)
    completion = by_id.outputs[0]
    assert completion.token_ids == ids[: end + 1] and completion.text == tokenizer.decode(ids[:end])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[end])
    text = tokenizer.decode(ids)
    stop = text[5:8]
    (by_text,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24, stop=[stop]), **QUIET)
    completion = by_text.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == text[: text.index(stop)] and completion.token_ids == ids[: len(completion.token_ids)]
    kept = SamplingParams(temperature=0, max_tokens=24, stop=stop, include_stop_str_in_output=True)
    (with_stop,) = llm.generate([prompt], kept, **QUIET)
    assert with_stop.outputs[0].text == completion.text + stop
    assert len(text) > len(with_stop.outputs[0].text)


def test_eos_ends_without_a_reason_and_the_context_by_length(tiny_pair: TinyPair, tmp_path: Any) -> None:
    prompt = [40, 41, 42]
    ids = greedy_ids(tiny_pair, prompt, 24)
    end = next(i for i in range(4, 24) if ids[i] not in ids[:i])
    folder = save_tiny(tmp_path, seed=1, vocab_size=VOCAB, eos_token_id=ids[end])
    (folder / "tokenizer.json").write_bytes((tiny_pair.target / "tokenizer.json").read_bytes())
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(str(folder), max_model_len=32, threads=1, speculative_config=config) as made:
        params = [SamplingParams(temperature=0, max_tokens=None, ignore_eos=ignore) for ignore in (False, True)]
        ended, ran = made.generate([prompt, prompt], params, **QUIET)
    assert ended.outputs[0].token_ids == ids[: end + 1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)
    assert ran.outputs[0].token_ids == greedy_ids(tiny_pair, prompt, 32 - len(prompt))
    assert ran.outputs[0].finish_reason == "length"


def test_seeds_and_completions(tiny_pair: TinyPair) -> None:
    """The LLM's seed and the request's number make a request's seed; a request's own seed stands alone."""

    def run(llm_seed: int, k: int = 3, **fields: Any) -> list[list[list[int]]]:
        config = {"model": str(tiny_pair.draft), "num_speculative_tokens": k}
        with LLM(tiny_pair.target, seed=llm_seed, batch_invariant=True, threads=1, speculative_config=config) as made:
            params = SamplingParams(n=2, temperature=1.0, max_tokens=12, **fields)
            return [[c.token_ids for c in output.outputs] for output in made.generate([[5, 6, 7]] * 2, params, **QUIET)]

    first = run(0)
    assert len({tuple(ids) for output in first for ids in output}) == 4
    assert run(1) != first
    own = run(0, seed=11)
    assert own[0] == own[1] == run(1, k=1, seed=11)[0]


def test_a_greedy_draft_of_a_sampled_request(tiny_pair: TinyPair) -> None:
    config = {"model": str(tiny_pair.draft), "num_speculative_tokens": 3, "draft_sample_method": "greedy"}
    with LLM(tiny_pair.target, threads=1, speculative_config=config) as made:
        (output,) = made.generate([[5, 6, 7]], SamplingParams(max_tokens=40, seed=3, ignore_eos=True), **QUIET)
        values = {metric.name: metric for metric in made.get_metrics()}
    accepted: Any = values["vllm:spec_decode_num_accepted_tokens"]
    assert len(output.outputs[0].token_ids) == 40 and accepted.value > 0


def test_priority_goes_first(tiny_pair: TinyPair) -> None:
    """One request runs at a time; who ends first is who has the lowest number."""
    ended: list[str] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            self.total = options["total"]

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            ended.append(str(self.total))

        def update(self, count: int) -> None: ...

        def set_postfix_str(self, text: str, refresh: bool) -> None: ...

    with LLM(tiny_pair.target, max_num_seqs=1, threads=1) as made:
        iterate = made._runtime.iterate

        def watched(start: Any) -> Any:
            for job in iterate(start):
                assert isinstance(job, Job)
                ended.append(job.builder.output.request_id)
                yield job

        made._runtime.iterate = watched  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=4)
        made.generate(prompts_of(4), params, use_tqdm=Bar, priority=[3, 1, 2, 0])
        assert ended == ["3", "1", "2", "0", "4"]
        ended.clear()
        cut = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=8)
        texts = ["the quick brown " * 1100, "the"]  # one that takes long to tokenise does not lose its place
        made.generate(texts, [cut, params], use_tqdm=Bar, priority=[0, 1])
        assert ended == ["4", "5", "2"]
        with pytest.raises(ValueError, match="priorities"):
            made.generate(prompts_of(2), params, priority=[1])


def test_chat_and_its_templates(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4)
    talk: list[Mapping[str, Any]] = [{"role": "user", "content": "hello"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    one, same = llm.chat([talk, parts], greedy, **QUIET)
    assert one.prompt == same.prompt == "<|user|>hello<|assistant|>" and one.outputs == same.outputs
    assert one.prompt_token_ids == llm.get_tokenizer().encode(one.prompt, add_special_tokens=False)
    (own,) = llm.chat(talk, greedy, chat_template="{{ messages[0].content }}{{ mark }}",
                      chat_template_kwargs={"mark": "!"}, **QUIET)  # fmt: skip
    assert own.prompt == "hello!"
    (going_on,) = llm.chat(talk, greedy, add_generation_prompt=False, continue_final_message=True, **QUIET)
    assert going_on.prompt == "<|user|>hello"
    with pytest.raises(Unsupported, match="image_url"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], greedy)


async def test_inside_a_running_loop(llm: LLM, tiny_pair: TinyPair) -> None:
    """As in a notebook: start, call and end block this loop, not their own."""
    assert asyncio.get_running_loop().is_running()
    params, expected = SamplingParams(temperature=0, max_tokens=8), [greedy_ids(tiny_pair, [4, 5, 6], 8)]
    assert ids_of(llm.generate([[4, 5, 6]], params, **QUIET)) == expected
    with LLM(tiny_pair.target, threads=1, speculative_config={"method": "ngram", "num_speculative_tokens": 2}) as made:
        assert ids_of(made.generate([[4, 5, 6]], params, **QUIET)) == expected


@pytest.mark.parametrize("mode", ["auto", "chains", "branches"])
def test_running_ahead_changes_no_token(tiny_pair: TinyPair, mode: str) -> None:
    """With no seed of their own, requests are then coupled: what they draw follows from the LLM's seed alone."""
    config = {"model": str(tiny_pair.draft), "num_speculative_tokens": 3}
    params = [SamplingParams(temperature=0, max_tokens=40), SamplingParams(temperature=1, max_tokens=40)]
    with LLM(tiny_pair.target, mode=mode, batch_invariant=True, threads=1, speculative_config=config) as made:
        ids = ids_of(made.generate([[4, 5, 6]] * 2, params, **QUIET))
        values: dict[str, Any] = {metric.name: metric for metric in made.get_metrics()}
    assert ids[0] == greedy_ids(tiny_pair, [4, 5, 6], 40)
    assert len(values["vllm:spec_decode_num_accepted_tokens_per_pos"].values) == 3  # never more than k
    with LLM(tiny_pair.target, acceptance="coupled", batch_invariant=True, threads=1) as plain:
        assert ids_of(plain.generate([[4, 5, 6]] * 2, params, **QUIET)) == ids


def test_defaults_are_the_models_own(tiny_pair: TinyPair, tmp_path: Any) -> None:
    folder = save_tiny(tmp_path, seed=1, vocab_size=VOCAB, generation={"temperature": 0.25, "top_k": 7})
    (folder / "tokenizer.json").write_bytes((tiny_pair.target / "tokenizer.json").read_bytes())
    with LLM(folder, threads=1) as made:
        defaults = made.get_default_sampling_params()
        assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.25, 7, 16)
        assert len(made.generate("the", None, **QUIET)[0].outputs[0].token_ids) <= 16
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7, "max_new_tokens": 3}')
    with LLM(folder, threads=1, override_generation_config={"top_k": 9}, generation_config="auto") as made:
        assert made.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=9, max_tokens=3)
    with LLM(folder, threads=1, generation_config="vllm") as made:
        assert made.get_default_sampling_params() == SamplingParams()


def test_what_is_not_there_says_why(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    for name in ("lora_request", "prompt_adapter_request", "logits_processor"):
        with pytest.raises(Unsupported, match=name):
            llm.generate(["the"], params, **{name: object()}, **QUIET)
    with pytest.raises(Unsupported, match="beam_search"):
        llm.beam_search(["the"], params)
    assert not hasattr(llm, "encode") and not hasattr(llm, "no_such_method")
    assert llm.reset_prefix_cache() is True
