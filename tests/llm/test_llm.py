"""LLM against transformers' own generate: greedy tokens are equal whatever is drafted; order, lengths, stops, log
probabilities, seeds and priorities are those of vLLM's API.

Drafting by the number of running requests: off above a bound and on again, fewer tokens in a larger batch."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.four_bit_experts import SIZES, in_four_bits
from support.models import hf_logits, other_weights, save_tiny, train_byte_level
from support.pairs import VOCAB, TinyPair, greedy_ids

import outrider.llm
from outrider.gateway.speculation import loop
from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.schedule import BatchSchedule, ScheduledDrafter
from outrider.llm import (
    LLM,
    EngineArgs,
    FlatLogprobs,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
    Unsupported,
)
from outrider.llm.backends import Job
from outrider.llm.inputs import Prompt
from outrider.llm.outputs import OutputBuilder
from outrider.rpc.messages import Commit, Credit, Open
from outrider.rpc.words.answer import GenerationDelta, TokenLogprob
from outrider.rpc.words.request import DRAFT_OPTIONS
from outrider.rpc.words.sampling_params import AcceptanceRule
from outrider.rpc.words.sampling_params import SamplingParams as WireSampling
from outrider.target_service import engine as target_engine
from outrider.target_service.sequence import admit

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
        config = {"draft_trial": "off", "model": str(tiny_pair.draft), "num_speculative_tokens": k}
    prompts = prompts_of(4 + k, k)
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config if method else None) as made:
        outputs = made.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32), **QUIET)
        values = {metric.name: metric for metric in made.get_metrics()}
    assert ids_of(outputs) == [greedy_ids(tiny_pair, prompt, 32) for prompt in prompts]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    drafts: Any = values.get("vllm:spec_decode_num_drafts")
    assert (drafts is None) if method is None else drafts.value > 0


def test_experts_in_floats_of_four_bits(tmp_path: Path) -> None:
    """As gpt-oss is published."""
    folder = save_tiny(tmp_path / "model", "gpt_oss", seed=1, vocab_size=VOCAB, **SIZES)
    in_four_bits(folder, vocab_size=VOCAB)
    train_byte_level(VOCAB).save(str(folder / "tokenizer.json"))
    found = []
    for config in (None, {"method": "suffix", "num_speculative_tokens": 4}):
        with LLM(folder, threads=1, speculative_config=config) as made:
            found.append(ids_of(made.generate(prompts_of(3), SamplingParams(temperature=0.0, max_tokens=32), **QUIET)))
    assert found[0] == found[1] and {len(ids) for ids in found[0]} == {32}


@pytest.mark.parametrize("config", [{"parallel_drafting": True}, {"method": "pard"}])
def test_a_draft_in_parallel(tiny_pair: TinyPair, tmp_path: Path, config: dict[str, Any]) -> None:
    draft = shutil.copytree(tiny_pair.draft, tmp_path / "draft")
    written = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(written | {"pard_token": VOCAB - 1}))
    speculation = {
        "method": "draft_model",
        "draft_trial": "off",
        "model": str(draft),
        "num_speculative_tokens": 4,
        **config,
    }
    prompts = prompts_of(3)
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=speculation) as made:
        outputs = made.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32), **QUIET)
        values = {metric.name: metric for metric in made.get_metrics()}
    assert ids_of(outputs) == [greedy_ids(tiny_pair, prompt, 32) for prompt in prompts]
    drafted: Any = values["vllm:spec_decode_num_draft_tokens"]
    assert drafted.value > 0


def test_a_draft_of_another_vocabulary(tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder, prompts = save_tiny(tmp_path, seed=1, vocab_size=280, eos_token_id=None), prompts_of(5)
    train_byte_level(280).save(str(folder / "tokenizer.json"))
    drawn = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    config = {"draft_trial": "off", "model": str(folder), "num_speculative_tokens": 3}
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, mode="branches", speculative_config=config) as made:
        greedy = made.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24), **QUIET)
        coupled = made.generate(prompts, drawn, **QUIET)
        assert metrics_of(made)["num_draft_tokens"].value > 0
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, mode="branches") as made:
        assert ids_of(coupled) == ids_of(made.generate(prompts, drawn, **QUIET))
    assert ids_of(greedy) == [greedy_ids(tiny_pair, prompt, 24) for prompt in prompts]


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
    with pytest.raises(ValueError, match=r"^prompt\[0\]: is 305"):
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


def test_a_prompt_may_bring_a_prediction(tiny_pair: TinyPair) -> None:
    """With a speculative_config or without; over its drafts."""
    prompt = [40, 41, 42]
    expected = greedy_ids(tiny_pair, prompt, 30)
    given = {"prompt_token_ids": prompt, "prediction": [*expected[:10], 7, *expected[10:]]}
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for config in (None, {"draft_trial": "off", "model": str(tiny_pair.draft), "num_speculative_tokens": 4}):
        with LLM(
            tiny_pair.target,
            threads=1,
            batch_invariant=True,
            speculative_config=config,
            per_request_spec_decode_metrics="summary",
        ) as made:
            (output,) = made.generate([given], greedy, **QUIET)
            assert output.outputs[0].token_ids == expected
            metrics = output.outputs[0].spec_decode_metrics
            assert metrics is not None and metrics.num_accepted_draft_tokens >= 20
            with pytest.raises(TypeError, match="'prediction' must be a list of token ids"):
                made.generate([{**given, "prediction": 5}], greedy)


def test_seeds_and_completions(tiny_pair: TinyPair) -> None:
    """The LLM's seed and the request's number make a request's seed; a request's own seed stands alone."""

    def run(llm_seed: int, k: int = 3, **fields: Any) -> list[list[list[int]]]:
        config = {"draft_trial": "off", "model": str(tiny_pair.draft), "num_speculative_tokens": k}
        with LLM(tiny_pair.target, seed=llm_seed, batch_invariant=True, threads=1, speculative_config=config) as made:
            params = SamplingParams(n=2, temperature=1.0, max_tokens=12, **fields)
            return [[c.token_ids for c in output.outputs] for output in made.generate([[5, 6, 7]] * 2, params, **QUIET)]

    first = run(0)
    assert len({tuple(ids) for output in first for ids in output}) == 4
    assert run(1) != first
    own = run(0, seed=11)
    assert own[0] == own[1] == run(1, k=1, seed=11)[0]


def test_a_greedy_draft_of_a_sampled_request(tiny_pair: TinyPair) -> None:
    config = {
        "draft_trial": "off",
        "model": str(tiny_pair.draft),
        "num_speculative_tokens": 3,
        "draft_sample_method": "greedy",
    }
    with LLM(tiny_pair.target, threads=1, speculative_config=config) as made:
        # Cold enough that the most likely token is mostly drawn: at temperature 1 this flat model accepts 0 to 3 of 40.
        params = SamplingParams(temperature=0.1, max_tokens=40, seed=3, ignore_eos=True)
        (output,) = made.generate([[5, 6, 7]], params, **QUIET)
        values = {metric.name: metric for metric in made.get_metrics()}
    accepted: Any = values["vllm:spec_decode_num_accepted_tokens"]
    assert len(output.outputs[0].token_ids) == 40 and accepted.value > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_that_are_unsure_end_early(tiny_pair: TinyPair, temperature: float) -> None:
    """... and the output is the same where the draft does not touch it."""
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=3, ignore_eos=True)
    found = []
    for confidence in (0.0, 1.0):  # at 1 every draft ends behind its first token
        config = {
            "draft_trial": "off",
            "model": tiny_pair.draft,
            "num_speculative_tokens": 3,
            **dict.fromkeys(DRAFT_OPTIONS, confidence),
        }
        with LLM(tiny_pair.target, threads=1, speculative_config=config, acceptance="coupled") as made:
            (output,) = made.generate([[5, 6, 7]], params, **QUIET)
            values: Any = {metric.name: metric for metric in made.get_metrics()}
        drafts, drafted = (values[f"vllm:spec_decode_num_{name}"].value for name in ("drafts", "draft_tokens"))
        found.append((output.outputs[0].token_ids, drafted / drafts))
    (plain, three), (early, one) = found
    assert plain == early and one == 1 < three


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


def test_what_is_enqueued_runs_when_it_is_waited_for(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    prompts, talk = prompts_of(3), [{"role": "user", "content": "hello"}]
    expected = [*llm.generate(prompts, params, **QUIET), *llm.chat(talk, params, **QUIET)]
    ids = llm.enqueue(prompts, params, priority=1) + llm.enqueue_chat(talk, params)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids and ids_of(outputs) == ids_of(expected)
    assert llm.wait_for_completion(RequestOutput, use_tqdm=False) == []
    with pytest.raises(Unsupported, match="do not embed"):
        llm.wait_for_completion(object)
    with pytest.raises(TypeError, match=r"LLM\.enqueue has no keyword 'sampling'"):
        llm.enqueue(prompts, sampling=params)  # type: ignore[call-arg]


def test_one_priority_is_that_of_all_prompts(llm: LLM) -> None:
    jobs = llm._maker.make([Prompt(None, (5,)), Prompt(None, (6,))], SamplingParams(), 1)
    assert [job.request.priority for job in jobs] == [1, 1]
    (output,) = llm.generate([5], SamplingParams(max_tokens=1), priority=1, **QUIET)
    assert output.finished


def test_flat_log_probabilities_are_the_same_ones(llm: LLM) -> None:
    dicts, flat = (
        llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1,
                                               flat_logprobs=is_flat), **QUIET)[0]
        for is_flat in (False, True)
    )  # fmt: skip
    logprobs, of_prompt = flat.outputs[0].logprobs, flat.prompt_logprobs
    assert isinstance(logprobs, FlatLogprobs) and isinstance(of_prompt, FlatLogprobs)
    assert dicts.outputs[0].logprobs == list(logprobs) == [*logprobs[:1], *logprobs[1:]]
    assert dicts.prompt_logprobs == [None, *list(of_prompt)[1:]] and of_prompt[0] == {}
    assert (of_prompt.start_indices[:2], of_prompt.end_indices[0]) == ([0, 0], 0)
    assert (
        logprobs.token_ids[0] in logprobs[0]
        and len(logprobs.ranks) == len(logprobs.logprobs) == logprobs.end_indices[-1]
    )
    with pytest.raises(TypeError, match="only added"):
        logprobs[0] = {}


def test_keywords_as_an_object(tiny_pair: TinyPair) -> None:
    """EngineArgs holds those of LLM, which takes them as they are, defaults and all."""
    given = EngineArgs(model=str(tiny_pair.target), max_model_len=64, threads=1, spec_method="ngram", spec_tokens=2)
    with (
        LLM.from_engine_args(given) as made,
        LLM(**{**asdict(given), "spec_method": None, "spec_tokens": None}) as other,
    ):
        assert made.arguments == other.arguments and made.arguments.max_model_len == 64
        assert made._backend.num_draft_tokens == 2 and other._backend.num_draft_tokens == 0
    assert "secret" not in repr(EngineArgs(token="secret"))


def test_keywords_as_flags() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs()
    line = ["--model", "org/name", "--max-model-len", "64", "--no-enforce-eager", "--enable-lora"]
    given = parser.parse_args([*line, "--speculative-config", '{"method": "ngram"}'])
    assert EngineArgs.from_cli_args(given) == EngineArgs(
        model="org/name", max_model_len=64, enable_lora=True, speculative_config={"method": "ngram"}
    )


def test_names_of_vllms_modules() -> None:
    from outrider.llm.logprobs import Logprob
    from outrider.llm.v1.metrics import reader

    assert outrider.llm.__version__ == version("outrider")
    assert (reader.Vector, reader.Counter, Logprob) == (outrider.llm.Vector, outrider.llm.Counter, outrider.llm.Logprob)


IDS = [1, 2, 3]
ASKED_WRONGLY: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompt: has 600 tokens": ([1] * 600, {}),
    "prompt[1]: is 5000": ([1, 5000], {}),
    "prompt: is empty": ({"prompt_token_ids": []}, {}),
    "structured_outputs: ": (IDS, {"structured_outputs": StructuredOutputsParams(grammar="root ::= x")}),
    "structured_outputs.choice[0]: ": (IDS, {"structured_outputs": StructuredOutputsParams(choice=["x" * 70_000])}),
    "structured_outputs: leaves no token": (
        IDS,
        {"structured_outputs": StructuredOutputsParams(regex="a"), "allowed_token_ids": [5]},
    ),
    "thinking_token_budget: ": (IDS, {"thinking_token_budget": 5}),
    "allowed_token_ids[0]: ": (IDS, {"allowed_token_ids": [5000]}),
    "bad_words[0]: ": (IDS, {"bad_words": ["x" * 300]}),
    "cache_salt: ": ({"prompt_token_ids": IDS, "cache_salt": "x" * 300}, {}),
    "prediction[0]: ": ({"prompt_token_ids": IDS, "prediction": [5000]}, {}),
    "prediction: has ": ({"prompt_token_ids": IDS, "prediction": "a b " * 5000}, {}),
}
OF_THE_WIRE = re.compile(r"token_ids\.ids|sampling\.|open\.|structured_output\b|reasoning\.|\bsalt:|\btext:")


@pytest.mark.parametrize("begins", ASKED_WRONGLY)
def test_what_is_refused_is_named_as_it_is_called_here(llm: LLM, begins: str) -> None:
    """Here, and in what a traceback shows."""
    prompt, fields = ASKED_WRONGLY[begins]
    with pytest.raises(ValueError, match=f"^{re.escape(begins)}") as caught:
        llm.generate(prompt, SamplingParams(**fields), **QUIET)
    assert not OF_THE_WIRE.search(str(caught.value))
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert ("maximum context length is 512 tokens" in str(caught.value)) == (begins == "prompt: has 600 tokens")


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
    with pytest.raises(ValueError, match="takes no pictures"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], greedy)
    with pytest.raises(Unsupported, match="input_audio"):
        llm.chat([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], greedy)


SHOWING_TOOLS = (
    "{% for tool in tools or [] %}<|tool|>{{ tool.function.name }}: {{ tool.function.parameters | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}{% endfor %}"
)


def test_chat_shows_tools_and_gives_text(llm: LLM) -> None:
    """As vLLM's: tools are the template's, a call is text like any other, and nobody chooses among them."""
    greedy = SamplingParams(temperature=0, max_tokens=4)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    talk: list[Mapping[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "8"},
    ]
    options: dict[str, Any] = {"chat_template": SHOWING_TOOLS, **QUIET}
    shown = llm.chat([talk, talk[:1]], greedy, tools=tools, **options)
    assert [output.prompt for output in shown] == [
        '<|tool|>add: {"type": "object"}<|user|>hi<|assistant|>add(7)<|tool|>8',
        '<|tool|>add: {"type": "object"}<|user|>hi',
    ]
    nothings: tuple[list[Any] | None, ...] = (None, [])
    for nothing in nothings:
        (without,) = llm.chat(talk[:1], greedy, tools=nothing, **options)
        assert without.prompt == "<|user|>hi"
    (own,) = llm.chat(talk[:1], greedy, tools=tools, **QUIET)  # the checkpoint's template knows of none
    assert own.prompt == "<|user|>hi<|assistant|>"
    (same,) = llm.generate([shown[0].prompt_token_ids], greedy, **QUIET)
    assert same.outputs == shown[0].outputs and same.outputs[0].text and not hasattr(same.outputs[0], "tool_calls")
    with pytest.raises(TypeError, match="chat has no keyword 'tool_choice'"):
        llm.chat(talk, greedy, tool_choice="required")  # type: ignore[call-arg]


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
    config = {"draft_trial": "off", "model": str(tiny_pair.draft), "num_speculative_tokens": 3}
    params = [SamplingParams(temperature=0, max_tokens=40), SamplingParams(temperature=1, max_tokens=40)]
    with LLM(tiny_pair.target, mode=mode, batch_invariant=True, threads=1, speculative_config=config) as made:
        ids = ids_of(made.generate([[4, 5, 6]] * 2, params, **QUIET))
        values: dict[str, Any] = {metric.name: metric for metric in made.get_metrics()}
    assert ids[0] == greedy_ids(tiny_pair, [4, 5, 6], 40)
    assert len(values["vllm:spec_decode_num_accepted_tokens_per_pos"].values) == 3  # never more than k
    with LLM(tiny_pair.target, acceptance="coupled", batch_invariant=True, threads=1) as plain:
        assert ids_of(plain.generate([[4, 5, 6]] * 2, params, **QUIET)) == ids


def test_vllms_name_of_block_verification(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds for requests with a seed of their own, too; what LLM says comes before it."""
    seen = []

    def noted(opened: Any, *rest: Any) -> Any:
        seen.append(opened.acceptance)
        return admit(opened, *rest)

    monkeypatch.setattr(target_engine, "admit", noted)
    config = {
        "draft_trial": "off",
        "model": str(tiny_pair.draft),
        "num_speculative_tokens": 3,
        "rejection_sample_method": "block",
    }
    params = [SamplingParams(temperature=0, max_tokens=16), SamplingParams(temperature=1, max_tokens=16, seed=7)]
    options: Any
    for options, rule in (({}, AcceptanceRule.BLOCK), ({"acceptance": "coupled"}, AcceptanceRule.COUPLED)):
        with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config, **options) as made:
            ids = ids_of(made.generate([[4, 5, 6]] * 2, params, **QUIET))
        assert ids[0] == greedy_ids(tiny_pair, [4, 5, 6], 16) and len(ids[1]) <= 16
        assert set(seen) == {rule}
        seen.clear()


def test_defaults_are_the_models_own(tiny_pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny(tmp_path, seed=1, vocab_size=VOCAB, generation={"temperature": 0.25, "top_k": 7})
    (folder / "tokenizer.json").write_bytes((tiny_pair.target / "tokenizer.json").read_bytes())
    with LLM(folder, threads=1) as made:
        defaults = made.get_default_sampling_params()
        assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.25, 7, 16)
        assert len(made.generate("the", None, **QUIET)[0].outputs[0].token_ids) <= 16
    said = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3, "min_new_tokens": 2, "suppress_tokens": [5]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    caplog.clear()
    with LLM(folder, threads=1, override_generation_config={"top_k": 9}, generation_config="auto") as made:
        assert made.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=9, max_tokens=3)
        made.generate(["the", "the"], None, **QUIET)
    (warning,) = (record.getMessage() for record in caplog.records if "generation_config.json" in record.getMessage())
    assert "suppress_tokens, min_new_tokens has no effect" in warning
    with LLM(folder, threads=1, generation_config="vllm") as made:
        assert made.get_default_sampling_params() == SamplingParams()


def test_what_is_not_there_says_why(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)
    for name in ("prompt_adapter_request", "logits_processor"):
        with pytest.raises(Unsupported, match=name):
            llm.generate(["the"], params, **cast(Any, {name: object()}), **QUIET)
    with pytest.raises(Unsupported, match="beam_search"):
        llm.beam_search(["the"], params)
    assert not hasattr(llm, "encode") and not hasattr(llm, "no_such_method")
    assert llm.reset_prefix_cache() is True


def test_ranges() -> None:
    def ks(schedule: BatchSchedule, sizes: tuple[int, ...]) -> list[int]:
        return [schedule.num_draft_tokens(size) for size in sizes]

    assert BatchSchedule.of(5, None, None).constant
    assert ks(BatchSchedule.of(5, 8, None), (0, 1, 8, 9, 100)) == [5, 5, 5, 0, 0]
    by_size = BatchSchedule.of(5, None, [(1, 2, 5), (4, 8, 2), (16, 20, 0)])
    assert ks(by_size, (1, 2, 3, 4, 8, 9, 15, 16, 99)) == [5, 5, 5, 2, 2, 2, 2, 0, 0]  # gaps and the tail go on
    assert ks(BatchSchedule.of(5, 6, [(1, 2, 5), (4, 8, 2), (9, 20, 1)]), (1, 6, 7, 10)) == [5, 2, 0, 0]


class Recorded:
    """A drafter that notes what it is sent."""

    info: Any = object()
    round_trip_us = 0.0

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.num_closed = 0

    def open(self, request: Open, on_event: Callable[[Any], None]) -> Any:
        return self

    def send(self, *messages: Any) -> None:
        self.sent.extend(messages)

    def close(self) -> None:
        self.num_closed += 1


async def test_credit_is_cut_and_never_falls() -> None:
    inner, size, events = Recorded(), [1], list[Any]()
    drafter = ScheduledDrafter(inner, BatchSchedule.of(4, 8, [(1, 1, 4), (2, 3, 2), (4, 8, 1)]), lambda: size[0])
    link = drafter.open(Open(0, (1, 2, 3), WireSampling()), events.append)
    assert link is not None
    link.send(Credit(0, 7, 4))
    assert inner.sent == [Credit(0, 7, 4)]
    size[0] = 2
    link.send(Commit(0, 3, (5, 5)), Credit(0, 9, 4))  # 5 tokens are committed: 2 past them
    assert inner.sent[1:] == [Commit(0, 3, (5, 5)), Credit(0, 7, 2)]
    link.send(Commit(0, 5, (5, 5, 5)), Credit(0, 12, 4))
    assert inner.sent[3:] == [Commit(0, 5, (5, 5, 5)), Credit(0, 10, 2)]
    link.send(Commit(0, 8, (5,)))  # the gateway's credit reaches the end: it is passed on by and by
    assert inner.sent[5:] == [Commit(0, 8, (5,)), Credit(0, 11, 2)]
    size[0] = 9
    assert drafter.info is None
    link.send(Commit(0, 9, (5,)))
    await asyncio.sleep(0)
    assert len(events) == 1 and isinstance(events[0], Lost) and len(inner.sent) == 7
    link.close()
    assert inner.num_closed == 1
    absent = drafter.open(Open(0, (1, 2, 3), WireSampling()), events.append)
    assert absent is not None
    absent.send(Credit(0, 7, 4))
    await asyncio.sleep(0)
    assert len(events) == 2 and len(inner.sent) == 7
    size[0] = 8
    assert drafter.info is inner.info


def metrics_of(made: LLM) -> dict[str, Any]:
    return {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in made.get_metrics()}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_no_drafts_above_the_batch_size(
    tiny_pair: TinyPair, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, "disable_by_batch_size": 2}
    config |= {"prompt_lookup_min": 1} if method == "ngram" else {"draft_trial": "off", "model": str(tiny_pair.draft)}
    prompts = [[7, 8, 9], [20, 21, 22], [50, 60, 70]]
    greedy = SamplingParams(temperature=0, max_tokens=40)
    expected = [greedy_ids(tiny_pair, prompt, 120) for prompt in prompts]
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config) as made:
        outputs = made.generate(prompts, greedy, **QUIET)
        assert [output.outputs[0].token_ids for output in outputs] == [ids[:40] for ids in expected]
        assert metrics_of(made)["num_drafts"].value == 0
        assert "speculation is off" in caplog.text
        made.generate(prompts[:2], greedy, **QUIET)
        few = metrics_of(made)["num_drafts"].value
        assert few > 0
        monkeypatch.setattr(loop, "DRAFT_RETRY_S", 0.0)
        params = [SamplingParams(temperature=0, max_tokens=count) for count in (120, 120, 4)]
        outputs = made.generate(prompts, params, **QUIET)  # on again, once the short one has ended
        assert [len(output.outputs[0].token_ids) for output in outputs] == [120, 120, 4]
        assert [output.outputs[0].token_ids for output in outputs[:2]] == expected[:2]
        assert metrics_of(made)["num_drafts"].value > few


def test_fewer_tokens_by_batch_size(tiny_pair: TinyPair) -> None:
    config: dict[str, Any] = {
        "draft_trial": "off", "model": str(tiny_pair.draft), "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [(1, 2, 2), (3, 8, 1)],
    }  # fmt: skip
    prompts = [[7, 8, 9], [20, 21, 22], [50, 60, 70]]
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config) as made:
        outputs = made.generate(prompts, SamplingParams(temperature=0, max_tokens=40), **QUIET)
        found = metrics_of(made)
        assert [o.outputs[0].token_ids for o in outputs] == [greedy_ids(tiny_pair, p, 40) for p in prompts]
        assert found["num_accepted_tokens_per_pos"].values[2:] == [0, 0]
        assert 0 < found["num_drafts"].value <= found["num_draft_tokens"].value <= 2 * found["num_drafts"].value


def test_single_ids_are_scored_along_the_prompt(tiny_pair: TinyPair) -> None:
    """As a teacher scores what a student drew: a list for each of the prompt's last tokens, and one for all of them."""
    prompt, asked = TokensPrompt(prompt_token_ids=[5, 6, 7, 8, 9, 10]), [[9, 3], [4, 4], [10, 11]]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprob_token_ids=asked, prompt_logprob_start=2)
    for_all = replace(scored, prompt_logprob_token_ids=[3, 10], prompt_logprob_start=3)
    with LLM(tiny_pair.target, max_logprobs=-1, threads=1) as made:
        every = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
        rows: Any = made.generate(prompt, every, **QUIET)[0].prompt_logprobs
        assert rows is not None
        for params, start, lists in ((scored, 2, asked), (for_all, 3, [[3, 10]] * 2)):
            output = made.generate(prompt, params, **QUIET)[0]
            wanted = [[rows[start + 1 + row][token].logprob for token in ids] for row, ids in enumerate(lists)]
            assert output.prompt_token_id_logprobs is not None and output.prompt_logprobs is None
            assert output.prompt_token_id_logprobs.tolist() == wanted
        with pytest.raises(
            ValueError, match="prompt_logprob_token_ids: has 3 entries from position 3 of a prompt of 6"
        ):
            made.generate(prompt, replace(scored, prompt_logprob_start=3), **QUIET)
    with pytest.raises(ValueError, match="differ in length"):
        SamplingParams(prompt_logprob_token_ids=[[1], [1, 2]])


def test_a_long_prompts_log_probabilities_come_in_slices() -> None:
    builder = OutputBuilder("r", Prompt(None, (5, 6, 7)), SamplingParams(prompt_logprobs=1), None)
    for part in (((), (TokenLogprob(6, -1.0, 2),)), ((TokenLogprob(7, -2.0, 1), TokenLogprob(9, -3.0, 2)),)):
        builder.add(GenerationDelta("r", 0, prompt_logprobs=part))
    rows = builder.output.prompt_logprobs
    assert rows is not None and rows[0] is None
    assert [list(row) for row in rows[1:] if row is not None] == [[6], [7, 9]]


def test_a_draft_that_knows_nothing_of_its_target_does_not_draft(
    tiny_pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noise = other_weights(tiny_pair.draft, tmp_path / "noise", noise=10.0)
    prompt, greedy = [7, 8, 9, 7, 8, 9, 7, 8], SamplingParams(temperature=0, max_tokens=12)
    plain = greedy_ids(tiny_pair, prompt, 12)
    drafted = {}
    for trial, method in (("refuse", "draft_model"), ("warn", "draft_model"), ("refuse", "ngram,draft_model")):
        lookups = {"prompt_lookup_min": 1} if "ngram" in method else {}
        config = {"model": str(noise), "method": method, "num_speculative_tokens": 3, "draft_trial": trial, **lookups}
        with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config) as made:
            assert ids_of(made.generate([TokensPrompt(prompt_token_ids=prompt)], greedy, **QUIET)) == [[*plain]]
            counts: dict[str, Any] = {metric.name: metric for metric in made.get_metrics()}
            drafted[trial, method] = counts["vllm:spec_decode_num_draft_tokens"].value
    assert drafted["refuse", "draft_model"] == 0 < drafted["warn", "draft_model"]
    assert drafted["refuse", "ngram,draft_model"] > 0
    assert "is no draft for this target" in caplog.text and "It drafts all the same" in caplog.text


def test_a_draft_that_takes_too_long_to_try_drafts(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outrider.llm.drafts.TRIAL_S", 0.0)
    config = {"model": str(tiny_pair.draft), "num_speculative_tokens": 3}
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config) as made:
        greedy = SamplingParams(temperature=0, max_tokens=12)
        assert ids_of(made.generate([TokensPrompt(prompt_token_ids=[7, 8])], greedy, **QUIET)) == [
            greedy_ids(tiny_pair, [7, 8], 12)
        ]
        counts: dict[str, Any] = {metric.name: metric for metric in made.get_metrics()}
        assert counts["vllm:spec_decode_num_draft_tokens"].value > 0
    assert "could not be tried: it takes too long" in caplog.text
