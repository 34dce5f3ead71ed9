"""LLM with a target on vLLM: auto takes it where our engine cannot, scripts of vLLM's documentation run with several
devices and quantised weights, and greedy output is our own engine's."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import cloudpickle
import psutil
import pytest
import torch
from llm.test_vllm_scripts import DRAFT, HEADS, SCRIPTS, TARGET
from pydantic import BaseModel, Field
from safetensors.torch import load_file, save_file
from support.adapters import save_adapter

from outrider.llm import LLM, LoRARequest, SamplingParams, StructuredOutputsParams, Unsupported
from outrider.pairs import pair_path
from outrider.rpc.errors import OutriderError
from outrider.vllm.link import KEY
from outrider.vllm.source import LINK

pytestmark = pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")  # ZeroMQ's, which vLLM leaves
QUIET: dict[str, Any] = {"use_tqdm": False}
PROMPTS = ["def parse_args(argv):", "import os\n", "class Worker:"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(autouse=True)
def a_core_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own choice is a NUMA node for each, of which most machines have one."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")


def run(name: str, *changes: tuple[str, str]) -> dict[str, Any]:
    """A script of vLLM's documentation, with other models, import lines and these changes; its names."""
    script = re.sub(r"^from vllm(\.\w+)? import", r"from outrider.llm\1 import", SCRIPTS[name], flags=re.MULTILINE)
    script = re.sub(DRAFT, str(pair_path().draft), re.sub(TARGET, str(pair_path().target), script))
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # for keywords of before speculative_config
        exec(script, names)
    return names


def engine_of(llm: LLM) -> str:
    info = llm._backend.info
    return info.engine


def greedy_ids(llm: LLM, prompts: Sequence[str] = PROMPTS, lora: LoRARequest | None = None) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, lora_request=lora, **QUIET)
    return [list(output.outputs[0].token_ids) for output in outputs]


def drafted_and_accepted(llm: LLM) -> tuple[int, int]:
    found = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return tuple(found[name] for name in names)  # type: ignore[return-value]


def vllm_processes() -> list[str]:
    """This one's children, at any depth, that are vLLM's and run."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie, too
            found += [word for word in child.cmdline() if "VLLM::" in word]
    return found


@pytest.fixture(scope="module")
def ours() -> list[list[int]]:
    """What our own engine says greedily."""
    with LLM(pair_path().target) as llm:
        assert engine_of(llm).startswith("outrider-")
        return greedy_ids(llm)


def test_two_ranks_and_a_draft_model(ours: list[list[int]], tmp_path: Path) -> None:
    state = load_file(next(pair_path().target.glob("*.safetensors")))
    lora = LoRARequest("sql", 1, save_adapter(tmp_path / "sql", state, scale=0.05))
    with LLM(pair_path().target, enable_lora=True) as llm:
        adapted = greedy_ids(llm, lora=lora)
    assert adapted != ours
    names = run("draft_model", ("tensor_parallel_size=1", "tensor_parallel_size=2, enable_lora=True"))
    with names["llm"] as llm:
        assert engine_of(llm).startswith("vllm-") and len(vllm_processes()) == 3  # the engine and two workers
        assert not {LINK, KEY} & os.environ.keys()  # which another engine, started from here, would follow
        (output,) = names["outputs"]
        assert output.finished and output.outputs[0].token_ids
        assert greedy_ids(llm) == ours
        drafted, accepted = drafted_and_accepted(llm)
        assert drafted >= accepted > 0
        assert greedy_ids(llm, lora=lora) == adapted
        seeded = SamplingParams(seed=7, n=2, max_tokens=8, logprobs=2, ignore_eos=True)
        (several,) = llm.generate(PROMPTS[:1], seeded, **QUIET)
        assert [len(one.token_ids) for one in several.outputs] == [8, 8]
        for one in several.outputs:
            assert one.logprobs is not None
            assert all(token in row for token, row in zip(one.token_ids, one.logprobs, strict=True))
        assert llm.reset_prefix_cache() and 0 <= llm._backend.cache_usage() <= 1
        with pytest.raises(ValueError, match="min_p"):
            llm.generate(PROMPTS[:1], SamplingParams(min_p=0.1), **QUIET)
        assert greedy_ids(llm) == ours  # whoever is refused harms nobody
    assert not vllm_processes()


def test_a_head_is_vllms_own(ours: list[list[int]]) -> None:
    """vLLM drafts by it, without our scheduler; its counts are exact, its tokens the target's."""
    head = str(pair_path().head_by("eagle3"))
    names = run("eagle3", ("tensor_parallel_size=4", "tensor_parallel_size=2"), (HEADS["eagle3"], head))
    with names["llm"] as llm:
        assert engine_of(llm).startswith("vllm-")
        (output,) = names["outputs"]
        assert output.finished and output.outputs[0].text
        info = llm._backend.engine.verifier.info
        assert [method.name for method in info.methods] == ["eagle3"]
        before = drafted_and_accepted(llm)
        assert greedy_ids(llm) == ours
        drafted, accepted = (now - then for now, then in zip(drafted_and_accepted(llm), before, strict=True))
        assert drafted >= accepted > 0
        plain = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1)
        (told,) = llm.generate(PROMPTS[:1], plain, **QUIET)
        assert list(told.outputs[0].token_ids) == ours[0][:12]
        assert told.outputs[0].logprobs is not None and len(told.outputs[0].logprobs) == 12
        assert told.prompt_logprobs is not None and len(told.prompt_logprobs) == len(told.prompt_token_ids or ())
    assert not vllm_processes()


def test_mlp_speculator_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"mlp_speculator.*tensor_parallel_size=1"):
        head = str(pair_path().head_by("mlp_speculator"))
        run("mlp_speculator", ("tensor_parallel_size=4", "tensor_parallel_size=2"), (HEADS["mlp_speculator"], head))


def num_threads(worker: Any) -> int:
    """In a rank of vLLM's, of its products."""
    return torch.get_num_threads()


def test_threads_and_rows_act_and_a_dead_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for a function that a rank runs
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    llm = LLM(pair_path().target, engine="vllm", threads=1, max_num_batched_tokens=300, **SMALL)
    with llm:
        target = llm._backend.target  # type: ignore[attr-defined]
        vllm = target.engine._llm
        assert vllm.vllm_config.scheduler_config.max_num_batched_tokens == 300
        assert llm._runtime.run(vllm.collective_rpc(num_threads)) == [1]
        assert os.environ["OMP_NUM_THREADS"] == "2" and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
        del vllm
        assert len(greedy_ids(llm)) == len(PROMPTS)
        kill_vllm_soon()
        with pytest.raises(OutriderError, match="the target's engine has ended"):
            llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), **QUIET)
        with pytest.raises(OutriderError, match="the target's engine has ended"):  # and at once
            greedy_ids(llm)
    assert not vllm_processes()
    with pytest.raises(RuntimeError, match="closed"):
        greedy_ids(llm)


def kill_vllm_soon() -> None:
    """The engine's own process, in half a second."""
    engines = [child for child in psutil.Process().children(recursive=True) if "EngineCore" in "".join(child.cmdline())]
    assert engines
    for child in engines:
        threading.Timer(0.5, child.kill).start()


class Point(BaseModel):
    x: Annotated[int, Field(ge=0, le=99)]
    name: Literal["a", "b"]


def quantised(folder: Path, to: Path) -> Path:
    """The same in 8 bits, as compressed-tensors' W8A8: a scale for each output, and one for each token."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (to / "config.json").write_text(json.dumps(config))
    (file,) = to.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors[name].float()  # [out, in]
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    return to


def test_quantised_weights_and_ngrams(tmp_path: Path) -> None:
    folder = quantised(pair_path().target, tmp_path / "w8a8")
    state = load_file(next(pair_path().target.glob("*.safetensors")))
    adapters = [save_adapter(tmp_path / f"{seed}", state, seed=seed, scale=0.1) for seed in range(2)]
    first, second = (LoRARequest(f"lora {n}", n + 1, adapter) for n, adapter in enumerate(adapters))
    speculative = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    prompt = "x = 1\ny = 1\nx = 1\ny = 1\n"
    with LLM(folder, speculative_config=speculative, enable_lora=True, max_loras=1, max_cpu_loras=2, **SMALL) as llm:
        assert engine_of(llm).startswith("vllm-")
        together = greedy_ids(llm, [prompt, *PROMPTS])
        assert [greedy_ids(llm, [one])[0] for one in (prompt, *PROMPTS)] == together
        drafted, accepted = drafted_and_accepted(llm)
        assert drafted >= accepted > 0
        asked, mixed = [None, first, second], [prompt] * 3
        by_adapter = [
            list(one.outputs[0].token_ids) for one in llm.generate(mixed, GREEDY, lora_request=asked, **QUIET)
        ]
        assert by_adapter[0] == together[0] and len(set(map(tuple, by_adapter))) == 3
        (alone,) = llm.generate([prompt], GREEDY, lora_request=second, **QUIET)
        assert list(alone.outputs[0].token_ids) == by_adapter[2] and alone.lora_request is second
        with pytest.raises(ValueError, match=r"path: is '/nowhere', which cannot be used"):
            llm.generate([prompt], GREEDY, lora_request=LoRARequest("none", 9, "/nowhere"), **QUIET)
        constraint = StructuredOutputsParams(json=Point, disable_any_whitespace=True)
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=64, structured_outputs=constraint)
            for output in llm.generate(PROMPTS, params, **QUIET):
                assert output.outputs[0].finish_reason == "stop"
                Point.model_validate_json(output.outputs[0].text)
        wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(["))
        with pytest.raises(ValueError, match=r"regex|structured_output"):
            llm.generate(PROMPTS[:1], wrong, **QUIET)
        assert greedy_ids(llm, [prompt, *PROMPTS]) == together
    assert not vllm_processes()
