"""Other weights in a target's place while an LLM lives: they decode what an LLM of their own decodes, with and without
drafts; what cannot be used changes nothing; memory is given back and taken again."""

from __future__ import annotations

import re
import runpy
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import random_head_of
from support.models import other_weights, save_tiny, train_byte_level

from outrider.llm import LLM, SamplingParams, TokensPrompt, Unsupported
from outrider.llm.weights import Doorway
from outrider.rpc.hub import ModelNotFound

VOCAB = 400
PROMPTS = [TokensPrompt(prompt_token_ids=[3 + (7 * i + 5 * j) % 390 for j in range(20)]) for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
COUPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=5)
OPTIONS: dict[str, Any] = {"threads": 1, "max_model_len": 128, "num_gpu_blocks_override": 64}


class Folders:
    """Three checkpoints of one shape and tokenizer, and a draft."""

    def __init__(self, folder: Path) -> None:
        self.first = save_tiny(folder / "first", vocab_size=VOCAB, eos_token_id=None)
        train_byte_level(VOCAB).save(str(self.first / "tokenizer.json"))
        self.second = other_weights(self.first, folder / "second", noise=0.3)
        self.draft = other_weights(self.first, folder / "draft", noise=0.05)
        self.head = random_head_of(self.first, "eagle3", folder / "head")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("weights"))


def ways(folders: Folders) -> Iterator[dict[str, Any] | None]:
    yield None
    yield {"model": str(folders.draft), "num_speculative_tokens": 4, "draft_trial": "off"}
    yield {"method": "suffix", "num_speculative_tokens": 4}
    yield {"model": str(folders.head), "num_speculative_tokens": 3, "draft_trial": "off"}


def decoded(llm: LLM) -> list[list[int]]:
    found = [llm.generate(PROMPTS, sampling, use_tqdm=False) for sampling in (GREEDY, COUPLED)]
    return [list(output.outputs[0].token_ids) for outputs in found for output in outputs]


def alone(folder: Path) -> list[list[int]]:
    with LLM(folder, acceptance="coupled", **OPTIONS) as llm:
        return decoded(llm)


@pytest.mark.parametrize("way", range(4))
def test_updated_weights_decode_what_they_decode_alone(folders: Folders, way: int) -> None:
    """Back and forth, over what the weights of before have cached."""
    expected = {folder: alone(folder) for folder in (folders.first, folders.second)}
    assert expected[folders.first] != expected[folders.second]
    config = list(ways(folders))[way]
    with LLM(folders.first, acceptance="coupled", speculative_config=config, **OPTIONS) as llm:
        name, digests = llm._backend.info.name, set()
        for folder in (folders.first, folders.second, folders.first):
            llm.update_weights(str(folder))
            assert decoded(llm) == expected[folder] == decoded(llm)
            digests.add(llm._backend.info.digest)
            assert llm._backend.info.name == name
    assert len(digests) == 2


def test_tensors_come_in_parts(folders: Folders, tmp_path: Path) -> None:
    state = load_file(folders.second / "model.safetensors")
    expected = alone(folders.second)
    with LLM(folders.first, acceptance="coupled", **OPTIONS) as llm:
        before = decoded(llm)
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.start_weight_update()
        names = sorted(state)
        for part in (names[:7], names[7:]):
            request = SimpleNamespace(update_info={"tensors": {name: state[name] for name in part}})
            llm.update_weights(request)
            assert decoded(llm) == before
        llm.finish_weight_update("step-7")
        assert decoded(llm) == expected and llm._backend.weights is not None
        assert llm._backend.weights.version == "step-7"
        one = names[0]  # what is not given stays
        llm.update_weights({"update_info": {"tensors": {one: load_file(folders.first / "model.safetensors")[one]}}})
        mixed = shutil.copytree(folders.second, tmp_path / "mixed")
        first = load_file(folders.first / "model.safetensors")
        save_file(state | {one: first[one]}, mixed / "model.safetensors", {"format": "pt"})
        assert decoded(llm) == alone(mixed)
        made = llm._backend.weights.target.folder
        assert made.is_dir() and made != folders.first
    assert not made.exists()


def test_what_cannot_be_used_changes_nothing(folders: Folders, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "wide", vocab_size=VOCAB, eos_token_id=None, hidden_size=128)
    family = save_tiny(tmp_path / "family", "qwen2", vocab_size=VOCAB, eos_token_id=None)
    tokenizer = shutil.copytree(folders.second, tmp_path / "tokenizer")
    train_byte_level(300).save(str(tokenizer / "tokenizer.json"))
    broken = shutil.copytree(folders.second, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    lacking = shutil.copytree(folders.second, tmp_path / "lacking")
    state = load_file(lacking / "model.safetensors")
    name = next(iter(state))
    save_file({one: tensor for one, tensor in state.items() if one != name}, lacking / "model.safetensors")
    nan = {"tensors": {name: torch.full_like(state[name], float("nan"))}}
    wrong: list[tuple[Any, str]] = [
        (other, "hidden_size 128; allowed: "),
        (family, "model_type 'qwen2'; allowed: 'llama'"),
        (tokenizer, "another tokenizer; allowed: the present one"),
        (broken, "cannot be used|Error"),
        (lacking, "cannot be used: .*missing"),
        (tmp_path / "nowhere", "nowhere"),
        ({"update_info": nan}, "holds NaN or infinity; allowed: finite numbers"),
        ({"update_info": {"tensors": {"model.unknown": torch.ones(2)}}}, "is not in the checkpoint"),
        ({"update_info": {"tensors": {name: state[name].int()}}}, "is of torch.int32; allowed: float32"),
        ({"update_info": {"tensors": {name: torch.ones(2)}}}, r"has shape \(2,\); allowed: "),
        ({"update_info": {"names": [], "dtype_names": []}}, "update_info has names, dtype_names; allowed: path"),
        ({"update_info": {"tensors": {name: 3}}}, "is 3; allowed: a tensor"),
        (7, "is 7; allowed: a folder"),
    ]  # fmt: skip
    with LLM(folders.first, acceptance="coupled", **OPTIONS) as llm:
        before, digest = decoded(llm), llm._backend.info.digest
        for request, message in wrong:
            with pytest.raises(Exception, match=message) as caught:
                llm.update_weights(request)
            assert isinstance(caught.value, ValueError | OSError), request
            assert llm._backend.info.digest == digest
        with pytest.raises(RuntimeError, match="no weight update is under way"):
            llm.finish_weight_update()
        with pytest.raises(Unsupported, match="init_weight_transfer_engine"):
            llm.init_weight_transfer_engine({"init_info": {"master_port": 1}})
        assert decoded(llm) == before
        with pytest.raises(ModelNotFound):
            llm.update_weights("nobody/nothing")
        llm.start_weight_update()  # what was refused has begun none


def test_a_start_that_fails_takes_the_weights_of_before(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folders.first, acceptance="coupled", **OPTIONS) as llm:
        before, backend = decoded(llm), llm._backend
        start, calls = backend.target.start_engine, []  # type: ignore[attr-defined]

        def once_without_memory() -> None:
            calls.append(backend.info.digest)
            if len(calls) == 1:
                raise MemoryError("no room for the cache")
            start()

        monkeypatch.setattr(backend.target, "start_engine", once_without_memory)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="no room for the cache; those of before serve on"):
            llm.update_weights(folders.second)
        assert len(calls) == 2 and decoded(llm) == before


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_taken_again(folders: Folders, level: int) -> None:
    config = {"method": "suffix", "num_speculative_tokens": 4}
    with LLM(folders.first, acceptance="coupled", speculative_config=config, **OPTIONS) as llm:
        before, target = decoded(llm), llm._backend.target  # type: ignore[attr-defined]
        kept = [weakref.ref(target.engine.cache), weakref.ref(target.loaded.model)]
        assert all(one() is not None for one in kept)
        llm.sleep(level)
        assert [one() is not None for one in kept] == [False, level == 1], "memory is given back"
        assert target.is_asleep and not hasattr(target, "engine") and (target.loaded is None) == (level == 2)
        assert llm.reset_prefix_cache() and llm.get_metrics()
        with pytest.raises(RuntimeError, match=r"asleep; call wake_up\(\) first"):
            decoded(llm)
        llm.sleep(level)
        llm.wake_up(tags=["weights"])
        assert target.is_asleep and target.loaded is not None
        llm.update_weights(folders.second)
        llm.wake_up(tags=["kv_cache"])
        assert decoded(llm) == alone(folders.second)
        llm.sleep(0)
        llm.update_weights(folders.first)
        assert decoded(llm) == before
        for options, message in (({"level": 3}, "level: is 3; allowed: 0, 1, 2"), ({"mode": "x"}, "mode: is 'x'")):
            with pytest.raises(ValueError, match=message):
                llm.sleep(**options)
        with pytest.raises(ValueError, match="tags: is 'gpu'; allowed: weights"):
            llm.wake_up(tags=["gpu"])
    with pytest.raises(RuntimeError, match="closed"):
        llm.sleep()


def test_calls_of_other_threads_see_one_model(folders: Folders) -> None:
    expected = [alone(folder) for folder in (folders.first, folders.second)]
    found: list[list[list[int]]] = []
    with LLM(folders.first, acceptance="coupled", **OPTIONS) as llm:
        ended = threading.Event()

        def decode() -> None:
            while not ended.is_set():
                outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
                found.append([list(output.outputs[0].token_ids) for output in outputs])

        threads = [threading.Thread(target=decode) for _ in range(2)]
        for thread in threads:
            thread.start()
        for folder in (folders.second, folders.first, folders.second):
            llm.update_weights(folder)
        ended.set()
        for thread in threads:
            thread.join()
    halves = [one[: len(PROMPTS)] for one in expected]
    assert found and all(one in halves for one in found)


def test_adapters_are_of_the_present_weights(folders: Folders, tmp_path: Path) -> None:
    from support.adapters import save_adapter

    from outrider.llm.lora.request import LoRARequest

    state = load_file(folders.first / "model.safetensors")
    adapter = save_adapter(tmp_path / "adapter", {n: t for n, t in state.items() if "layers" in n}, scale=0.3)
    asked = LoRARequest("one", 1, str(adapter))

    def adapted(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=asked)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with LLM(folders.second, enable_lora=True, **OPTIONS) as llm:
        expected = adapted(llm)
    with LLM(folders.first, enable_lora=True, **OPTIONS) as llm:
        assert adapted(llm) != expected
        llm.update_weights(folders.second)
        assert adapted(llm) == expected


def test_a_change_waits_and_is_waited_for() -> None:
    door, order = Doorway(), []

    def change() -> None:
        with door.alone():
            order.append("change")

    with door.passing():
        thread = threading.Thread(target=change)
        thread.start()
        thread.join(0.05)
        order.append("call")
    thread.join()
    assert order == ["call", "change"]
    with pytest.raises(RuntimeError), door.alone():
        raise RuntimeError
    with door.passing():
        pass


def test_weights_behind_a_gateway_are_its_own() -> None:
    llm = LLM.__new__(LLM)
    llm.arguments = SimpleNamespace(gateway="x")  # type: ignore[assignment]
    llm._backend, llm._close = SimpleNamespace(weights=None), SimpleNamespace(alive=True)  # type: ignore[assignment]
    for call in (llm.sleep, llm.wake_up, llm.start_weight_update, lambda: llm.update_weights("x")):
        with pytest.raises(Unsupported, match="the services behind the gateway have the weights"):
            call()


def test_rollouts_have_the_log_probabilities_of_the_weights_that_drew(capsys: pytest.CaptureFixture[str]) -> None:
    """The example, shorter: after each update they are those that the trainer computes by its own."""
    names = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "rollouts.py"))
    names["main"].__globals__.update(STEPS=3, SAMPLES=2, LENGTH=12)
    names["main"]()
    assert re.findall(r"update (\d): .* differ by (0\.000\d), ", capsys.readouterr().out) == [
        (str(step), "0.0000") for step in range(3)
    ]
