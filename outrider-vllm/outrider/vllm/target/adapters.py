"""Low-rank adapters on vLLM. A folder is read and checked as for our engine, by the products that the model's
configuration has, so that an adapter has the same digest on either; what vLLM reads is a copy of what was checked,
which nobody else writes. To vLLM an adapter is its content: it is named by its digest, which parts the prefix cache,
and two names of one content are one adapter there."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from outrider.engine import checkpoint
from outrider.engine.adapters.base import linears_of
from outrider.engine.adapters.config import CONFIG_NAME, UnsupportedAdapter
from outrider.engine.adapters.loader import WEIGHTS_NAME, LoadedAdapter, read_adapter
from outrider.engine.adapters.ranks import MOST_RANK
from outrider.engine.adapters.resident import AdapterRoom
from outrider.engine.batch import PreparedAdapter
from outrider.engine.quantized.choice import kept_as
from outrider.target_service.adapter_changes import MOST_ADAPTERS, adapter_room, adapters_at_start
from outrider.target_service.settings import TargetSettings

log = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of which vLLM makes room for one
ROWS = 2048  # of a step, where nobody says how many: vLLM's own number
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """What adapters are of, and the room for them."""

    linears: Mapping[str, tuple[int, int]]  # outputs and inputs, by the names that our engine has
    digest: str  # of the model
    room: AdapterRoom

    def read(self, folder: Path) -> LoadedAdapter:
        """Checks a folder. Raises UnsupportedAdapter."""
        return read_adapter(folder, self.linears, self.digest, self.room.max_rank)

    @property
    def arguments(self) -> dict[str, Any]:
        """vLLM's engine arguments. All that are loaded stay in the host's memory, so that no step reads files.
        Embeddings and the head, which no adapter changes here, have no room."""
        return {
            "enable_lora": True,
            "max_loras": self.room.num_slots,
            "max_lora_rank": next(rank for rank in RANKS if rank >= self.room.max_rank),
            "max_cpu_loras": MOST_ADAPTERS,
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in self.linears}),
        }


def adapters_of(settings: TargetSettings) -> tuple[AdapterBase | None, dict[str, LoadedAdapter]]:
    """What vLLM is started for, and those of the start by name; None where there are none, and none may come. Raises
    UnsupportedAdapter, before anything is started."""
    if not settings.has_adapters:
        return None, {}
    folder = Path(settings.model)
    linears = linears_of(folder, trust_remote_code=settings.trust_remote_code)
    digest, most_rank = digest_of(settings), settings.max_adapter_rank or MOST_RANK
    loaded = adapters_at_start(settings, lambda path: read_adapter(path, linears, digest, most_rank))
    room = adapter_room(settings, loaded)
    return None if room is None else AdapterBase(linears, digest, room), loaded


def digest_of(settings: TargetSettings) -> str:
    """The model's, as our engine has it; another one where vLLM rounds plain numbers as it loads them."""
    folder = Path(settings.model)
    config = checkpoint.read_config(folder)
    asked = settings.engine_args.get("quantization", settings.quantization)
    rounding = None if kept_as(folder, config) else asked
    with checkpoint.checkpoint_digest(folder, checkpoint.weight_files(folder)) as weights_digest:
        return checkpoint.model_digest(config, weights_digest(), rounding)


def with_rows(arguments: Mapping[str, Any], window: int, longest: Callable[[], int]) -> dict[str, Any]:
    """Engine arguments with as many rows of a step as vLLM asks for where these may have adapters: a whole window of
    every sequence. `longest` is the model's longest text, which a step holds where prompts are not cut. Raises
    ValueError for fewer that were asked for."""
    least = int(arguments["max_num_seqs"]) * (window + 1)
    if (given := arguments.get("max_num_batched_tokens")) is None:
        whole_prompt = 0 if arguments.get("enable_chunked_prefill") else longest()
        return {**arguments, "max_num_batched_tokens": max(ROWS, least, whole_prompt)}
    if given < least:
        asked = f"max_sequences times {window + 1}, a window and a token"
        raise ValueError(f"max_rows (--max-rows): is {given}; allowed with adapters on vLLM: at least {least}, {asked}")
    return dict(arguments)


def write_adapter(folder: Path, adapter: LoadedAdapter) -> None:
    """Writes an adapter in PEFT's layout, in words that leave nothing to interpret: what was checked is what is
    computed."""
    factors = {f"{PEFT_PREFIX}{name}": one for name, one in _by_file_names(adapter)}
    facts = {name: (len(one.down), one.scaling) for name, one in _by_file_names(adapter)}
    (rank, scaling), _ = Counter(facts.values()).most_common(1)[0]
    others = {name: fact for name, fact in facts.items() if fact != (rank, scaling)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": rank,
        "lora_alpha": scaling * rank,
        "rank_pattern": {re.escape(name): one for name, (one, _) in others.items()},
        "alpha_pattern": {re.escape(name): one * times for name, (one, times) in others.items()},
        "target_modules": sorted({name.rpartition(".")[2] for name in facts}),
    }
    tensors = {f"{name}.lora_A.weight": one.down.contiguous() for name, one in factors.items()}
    tensors |= {f"{name}.lora_B.weight": one.up.contiguous() for name, one in factors.items()}
    folder.mkdir(mode=0o700)
    (folder / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / WEIGHTS_NAME, {"format": "pt"})


def _by_file_names(adapter: LoadedAdapter) -> Iterator[tuple[str, Any]]:
    """The tensors by their names without PEFT's prefix."""
    for name, one in adapter.modules.items():
        yield adapter.file_names[name].removeprefix(PEFT_PREFIX), one


@dataclass(slots=True)
class _Held:
    """One content that vLLM has."""

    request: Any  # vLLM's LoRARequest
    folder: Path
    num_names: int = 0


class VllmAdapters:
    """The adapters that vLLM has been given. Belongs to the event loop, but for `read` and `close`."""

    def __init__(self, base: AdapterBase, llm: Any) -> None:
        self._base, self._llm = base, llm
        self._copies = TemporaryDirectory(prefix="outrider-adapters-", ignore_cleanup_errors=True)
        self._numbers = itertools.count(1)
        self._held: dict[str, _Held] = {}  # by digest
        self._requests: dict[PreparedAdapter, set[asyncio.Task[None]]] = {}
        self._lock = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    def read(self, folder: Path) -> LoadedAdapter:
        """Checks a folder, on any thread. Raises UnsupportedAdapter."""
        return self._base.read(folder)

    async def prepare(self, adapter: LoadedAdapter) -> PreparedAdapter:
        """vLLM has loaded it. Raises UnsupportedAdapter for what vLLM refuses."""
        async with self._lock:
            if (held := self._held.get(adapter.digest)) is None:
                held = self._held[adapter.digest] = await self._added(adapter)
            held.num_names += 1
            return PreparedAdapter(adapter.digest, adapter.rank, held.request)

    def note(self, prepared: PreparedAdapter, request: asyncio.Task[None]) -> None:
        """A request of vLLM's has it until it ends."""
        tasks = self._requests.setdefault(prepared, set())
        tasks.add(request)
        request.add_done_callback(tasks.discard)

    def forget(self, prepared: PreparedAdapter) -> None:
        """No sequence has it any more. vLLM keeps it until it has heard of the last request's end, since a step of an
        adapter that it does not have reads files."""
        task = asyncio.create_task(self._forget(prepared))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def close(self) -> None:
        """The copies go; vLLM has ended."""
        self._copies.cleanup()

    async def _added(self, adapter: LoadedAdapter) -> _Held:
        from vllm.lora.request import LoRARequest

        folder = Path(self._copies.name) / adapter.digest
        try:
            await asyncio.to_thread(write_adapter, folder, adapter)
            request = LoRARequest(adapter.digest, next(self._numbers), str(folder))
            if not await self._llm.add_lora(request):
                raise UnsupportedAdapter("vLLM does not take it; see its log")
        except BaseException as error:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            if isinstance(error, UnsupportedAdapter) or not isinstance(error, Exception):
                raise
            raise UnsupportedAdapter(f"vLLM refuses it: {error}") from error
        return _Held(request, folder)

    async def _forget(self, prepared: PreparedAdapter) -> None:
        if requests := self._requests.pop(prepared, None):
            await asyncio.wait(requests)
        async with self._lock:
            held = self._held[prepared.digest]
            held.num_names -= 1
            if held.num_names:
                return
            del self._held[prepared.digest]
            try:
                await self._llm.remove_lora(held.request.lora_int_id)
            except Exception:  # vLLM's engine may have ended
                log.exception("vLLM keeps the adapter %s", prepared.digest[:12])
            await asyncio.to_thread(shutil.rmtree, held.folder, ignore_errors=True)
