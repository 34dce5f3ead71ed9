"""`lora_request` as vLLM has it: which adapter each prompt gets, and which of them an engine holds."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
from llm.test_backends import gateway
from support.adapters import merged, save_adapter
from support.engines import hf_greedy
from support.fakes import VOCAB, ToyTarget, expected, target_info, with_adapters
from support.gateways import PROMPT
from support.pairs import TinyPair, greedy_ids

from outrider.llm import LLM, LoRARequest, SamplingParams, TokensPrompt, Unsupported
from outrider.llm.arguments import EngineArguments
from outrider.llm.local import LocalBackend
from outrider.llm.lora.held import HeldAdapters
from outrider.llm.lora.request import lora_per_prompt
from outrider.rpc.messages import Adapter

QUIET: dict[str, Any] = {"use_tqdm": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SQL, LAW = LoRARequest("sql", 1, "adapters/sql"), LoRARequest("law", 2, "adapters/law")


def sql(tokens: Any, prompt_len: int) -> int:
    return int((tokens[-1] * 11 + len(tokens)) % (VOCAB - 10) + 5)


def test_vllm_s_names() -> None:
    assert (SQL.lora_name, SQL.lora_int_id, SQL.lora_path) == ("sql", 1, "adapters/sql")
    assert (SQL.name, SQL.adapter_id, SQL.path, SQL.local_path) == ("sql", 1, "adapters/sql", None)
    old = LoRARequest(lora_name="sql", lora_int_id=7, lora_local_path="adapters/old", base_model_name="any")
    assert old == SQL and hash(old) == hash(SQL) and old != LAW  # by name
    assert (old.path, old.local_path) == ("adapters/old", "adapters/old")
    assert LoRARequest("sql", 1, Path("x")).path == "x"
    assert LoRARequest("sql", 1, "x", None, None, None, None, False) == SQL


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("", 1, "x"), "lora_name must be a text of 1 to 128 characters"),
        (("x" * 129, 1, "x"), "lora_name must be"),
        (("sql", 0, "x"), "lora_int_id must be an integer of at least 1"),
        (("sql", "one", "x"), "lora_int_id must be"),
        (("sql", 1, 3), "lora_path"),
    ],
)
def test_what_no_request_says(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRARequest(*given)


@pytest.mark.parametrize(
    "given", [{"long_lora_max_len": 4096}, {"tensorizer_config_dict": {"x": 1}}, {"load_inplace": True}]
)
def test_what_is_not_there_says_why(given: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=next(iter(given))):
        LoRARequest("sql", 1, "x", **given)


def test_each_prompt_has_one_or_none() -> None:
    assert lora_per_prompt(None, 2) == [None, None]
    assert lora_per_prompt(SQL, 2) == [SQL, SQL]
    assert lora_per_prompt([SQL, None], 2) == [SQL, None]
    with pytest.raises(ValueError, match="3 prompts and 2 lora_requests"):
        lora_per_prompt([SQL, None], 3)
    for wrong in ("sql", [SQL, "sql"], 3):
        with pytest.raises(TypeError, match="must be a LoRARequest"):
            lora_per_prompt(wrong, 2)


def test_how_many_are_held() -> None:
    assert EngineArguments(model=Path(__file__).parent).num_adapters == 0
    enabled: dict[str, Any] = {"model": Path(__file__).parent, "enable_lora": True}
    assert EngineArguments(**enabled).num_adapters == 1
    assert EngineArguments(**enabled, max_loras=4).num_adapters == 4
    assert EngineArguments(**enabled, max_loras=1, max_cpu_loras=3).num_adapters == 3
    with pytest.raises(ValueError, match="max_loras must be"):
        EngineArguments(**enabled, max_loras=0)


class Host:
    """Notes what it is told to load and unload."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def load_adapter(self, name: str, path: Path) -> Adapter:
        await asyncio.sleep(0)
        if path.name == "broken":
            raise ValueError("no adapter")
        self.said.append(f"+{name}")
        return Adapter(name, f"digest of {path}", 8)

    async def unload_adapter(self, name: str) -> None:
        self.said.append(f"-{name}")


class Requests:
    """Requests of adapters, each under way until it is ended."""

    def __init__(self, most: int) -> None:
        self.host = Host()
        self.held = HeldAdapters(self.host, most)
        self._ends: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(self, name: str, path: str = "") -> int:
        self._ends.append(asyncio.Event())
        number = len(self._ends) - 1

        async def run() -> None:
            async with self.held.using(LoRARequest(name, 1, path or f"./adapters/{name}")):
                self.host.said.append(name)
                await self._ends[number].wait()

        self.tasks.append(asyncio.create_task(run()))
        await self.settle()
        return number

    async def end(self, number: int) -> None:
        self._ends[number].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def said(self) -> str:
        text, self.host.said = " ".join(self.host.said), []
        return text


async def test_the_one_that_is_not_used_gives_way() -> None:
    requests = Requests(2)
    first, second = await requests.begin("a"), await requests.begin("b")
    assert requests.said == "+a a +b b"
    third = await requests.begin("a")
    assert requests.said == "a"
    await requests.begin("c")
    assert requests.said == "", "both are in use"
    await requests.end(first)
    assert requests.said == "", "another request has it"
    await requests.end(second)
    assert requests.said == "-b +c c"
    await requests.end(third)
    await requests.begin("d")
    assert requests.said == "-a +d d"


async def test_the_one_used_longest_ago_gives_way() -> None:
    requests = Requests(2)
    for name in ("a", "b", "a"):
        await requests.end(await requests.begin(name))
    assert requests.said == "+a a +b b a"
    await requests.begin("c")
    assert requests.said == "-b +c c"


async def test_who_waits_for_a_place_holds_up_no_other() -> None:
    requests = Requests(1)
    first = await requests.begin("a")
    await requests.begin("b")
    await requests.begin("a")
    assert requests.said == "+a a a"
    requests.tasks[1].cancel()
    await requests.end(first)
    await requests.end(2)
    assert requests.said == "", "who was waiting has gone"


async def test_an_adapter_that_cannot_be_loaded_fails_its_request_alone() -> None:
    requests = Requests(1)
    for path, message in (("./adapters/broken", "no adapter"), (" ", "has no lora_path")):
        asked = LoRARequest("a", 1, path.strip())
        with pytest.raises(ValueError, match=message):
            async with requests.held.using(asked):
                pass
    first = await requests.begin("a")
    with pytest.raises(ValueError, match=r"'a' is of \./adapters/a, and now of other; allowed: one folder for a name"):
        async with requests.held.using(LoRARequest("a", 1, "other")):
            pass
    async with requests.held.using(LoRARequest("a", 9)):  # by its name alone
        pass
    await requests.end(first)
    assert requests.said == "+a a"


async def test_a_gateway_has_adapters_by_name(tmp_path: Path) -> None:
    target = ToyTarget(info=with_adapters(target_info(), sql="a1"), adapter_rules={"sql": sql})

    def use(address: str) -> None:
        prompts = [TokensPrompt(prompt_token_ids=PROMPT)] * 2
        with LLM(gateway=address, tokenizer=tmp_path, enable_lora=True) as llm:
            one, other = llm.generate(prompts, GREEDY, lora_request=[SQL, None], **QUIET)
            assert one.outputs[0].token_ids == expected(PROMPT, 12, sql)
            assert other.outputs[0].token_ids == expected(PROMPT, 12)
            assert one.lora_request is one.outputs[0].lora_request is SQL and other.lora_request is None
            for output in llm.generate(prompts, GREEDY, lora_request=SQL, **QUIET):
                assert output.outputs[0].token_ids == one.outputs[0].token_ids
            (talk,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY, lora_request=SQL, **QUIET)
            assert talk.lora_request is SQL and target.opens[-1].adapter == "sql"
            with pytest.raises(ValueError, match="lora_request: is 'law', which does not exist; served here: 'sql'"):
                llm.generate(prompts, GREEDY, lora_request=LAW, **QUIET)
            with pytest.raises(ValueError, match="2 prompts and 1 lora_requests"):
                llm.generate(prompts, GREEDY, lora_request=[SQL], **QUIET)

    async with gateway(tmp_path, target) as address:
        await asyncio.to_thread(use, address)
    assert sorted(opened.adapter for opened in target.opens) == ["", "sql", "sql", "sql", "sql"]
    with pytest.raises(Unsupported, match="the services behind the gateway decide max_loras"):
        LLM(gateway="127.0.0.1:1", enable_lora=True, max_loras=2)


@pytest.fixture(scope="module")
def adapters(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of the tiny pair's target."""
    folder = tmp_path_factory.mktemp("adapters")
    state = tiny_pair.hf.state_dict()
    return [save_adapter(folder / f"{seed}", state, seed=seed) for seed in range(3)]


def merged_greedy(pair: TinyPair, adapter: Path, prompt: list[int], length: int) -> list[int]:
    """By transformers, with the adapter merged into the weights."""
    whole = copy.deepcopy(pair.hf)
    whole.load_state_dict(merged(pair.hf.state_dict(), adapter))
    return hf_greedy(whole, prompt, length)


PROMPTS = [[11, 12, 13, 40, 41], [7] * 40]


def test_in_this_process_they_are_loaded_when_they_are_asked_for(tiny_pair: TinyPair, adapters: list[Path]) -> None:
    """In mixed batches, with a draft for the model alone, more than lie on the device or are kept."""
    speculation = {"draft_trial": "off", "model": str(tiny_pair.draft), "num_speculative_tokens": 3}
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "threads": 1}
    asked = [None, *(LoRARequest(f"lora {number}", number + 1, folder) for number, folder in enumerate(adapters))]
    wanted = [greedy_ids(tiny_pair, PROMPTS[0], 16)]
    wanted += [merged_greedy(tiny_pair, folder, PROMPTS[0], 16) for folder in adapters]
    assert len(set(map(tuple, wanted))) == 4, "they differ"
    params = SamplingParams(temperature=0.0, max_tokens=16)
    with LLM(tiny_pair.target, batch_invariant=True, speculative_config=speculation, **options) as llm:
        assert isinstance(llm._backend, LocalBackend)
        for _ in range(2):
            outputs = llm.generate([PROMPTS[0]] * 4, params, lora_request=asked, **QUIET)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
            assert [output.lora_request for output in outputs] == asked
            assert len(llm._backend.target.info.adapters) == 2, "no more are kept"
        with pytest.raises(ValueError, match=r"path: is '/nowhere', which cannot be used"):
            llm.generate(PROMPTS[0], params, lora_request=LoRARequest("none", 9, "/nowhere"), **QUIET)
        with pytest.raises(ValueError, match="the model's own"):
            own = LoRARequest(llm._backend.info.name, 9, adapters[0])
            llm.generate(PROMPTS[0], params, lora_request=own, **QUIET)
        (again,) = llm.generate([PROMPTS[0]], params, lora_request=asked[1], **QUIET)
        assert again.outputs[0].token_ids == wanted[1], "it goes on"


def test_no_prefix_is_shared_between_adapters(tiny_pair: TinyPair, adapters: list[Path]) -> None:
    first, second = (LoRARequest(name, 1, folder) for name, folder in zip("ab", adapters, strict=False))
    params = SamplingParams(temperature=0.0, max_tokens=1)
    with LLM(tiny_pair.target, enable_lora=True, max_loras=2, threads=1) as llm:
        cached = [
            llm.generate([PROMPTS[1]], params, lora_request=asked, **QUIET)[0].num_cached_tokens
            for asked in (None, first, second, None, first, second)
        ]
    assert cached == [0, 0, 0, 32, 32, 32]


def test_without_leave_there_are_none(tiny_pair: TinyPair, llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"LLM was made without adapters; allowed: LLM\(enable_lora=True\)"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=1), lora_request=SQL, **QUIET)


def test_a_rank_above_the_bound_is_refused(tiny_pair: TinyPair, adapters: list[Path]) -> None:
    with (
        LLM(tiny_pair.target, enable_lora=True, max_lora_rank=2, threads=1) as llm,
        pytest.raises(ValueError, match="r: is 4; allowed: 1 to 2"),
    ):
        llm.generate(PROMPTS, SamplingParams(max_tokens=1), lora_request=LoRARequest("a", 1, adapters[0]), **QUIET)
