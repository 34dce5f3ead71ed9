"""vLLM's scheduler with ours above it and nothing below: what stands for its workers computes a chain of numbers, and
what stands for a service hands over what a test says. Imported only where vLLM is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from outrider.rpc.messages import Commit, Credit, DraftTokens, TargetEvent
from outrider.target_service.draft_buffer import ChainBuffer
from outrider.target_service.settings import TargetSettings
from outrider.vllm import DraftScheduler
from outrider.vllm.rows import DraftedRow
from outrider.vllm.source import StepReport
from outrider.vllm.target.assembly import engine_args

VOCAB = 97
BLOCK = 16
K = 4  # most drafted tokens of a step
MAX_MODEL_LEN = 128


def next_token(tokens: Sequence[int]) -> int:
    """The target's own token after these; 0 to 9 are left for stops."""
    return 10 + (tokens[-1] * 31 + len(tokens) * 7) % (VOCAB - 10)


def decoded(prompt: Sequence[int], count: int) -> list[int]:
    """What plain decoding makes of a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class ScriptedSource:
    """A DraftSource: what a test puts into `sent` comes to the rows before the next step."""

    sent: list[DraftTokens | Credit] = field(default_factory=list)
    rows: dict[int, DraftedRow] = field(default_factory=dict)
    closed_rows: list[int] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    credit: int = 1 << 20
    patience_ms: int = 0
    while_waiting: Callable[[], None] = lambda: None
    fault: Callable[[str], None] = lambda method: None
    is_reader: bool = False
    longest_wait_s: float = 0.002
    has_news: bool = False  # what `take` says
    suspects: set[int] = field(default_factory=set)  # of the rows that are opened

    def output_len(self, request: Any) -> int:
        return 0

    def opened(self, request: Any) -> DraftedRow | None:
        self.fault("opened")
        number = (request.sampling_params.extra_args or {}).get("number")
        if number is None:
            return None
        chains = ChainBuffer(request.all_token_ids, VOCAB)
        tokens = request.all_token_ids
        row = DraftedRow(request.request_id, number, tokens, len(tokens), request.max_tokens, False, chains)
        row.suspect = number in self.suspects
        row.grant(Credit(number, len(tokens) + self.credit, K, patience_ms=self.patience_ms))
        self.rows[number] = row
        return row

    def closed(self, row: DraftedRow) -> None:
        self.fault("closed")
        self.closed_rows.append(row.sequence_id)

    def take(self, rows: Mapping[int, DraftedRow]) -> bool:
        self.fault("take")
        sent, self.sent = self.sent, []
        for message in sent:
            row = rows.get(message.sequence_id)
            if row is not None:
                row.grant(message) if isinstance(message, Credit) else row.add(message)
        return self.has_news

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        self.while_waiting()
        if not self.sent:
            time.sleep(timeout_s)

    def stepping(self, started: float) -> None:
        self.fault("stepping")

    def committed(self, report: StepReport) -> None:
        self.fault("committed")
        self.reports.append(report)

    def events(self, number: int) -> list[TargetEvent]:
        return [event for report in self.reports for event in report.events if event.sequence_id == number]

    def commits(self, number: int) -> list[Commit]:
        return [event for event in self.events(number) if isinstance(event, Commit)]


@cache
def vllm_config(folder: Path) -> Any:
    """As the service makes it; a copy is everybody's own."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    own = {"block_size": BLOCK, "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 256}
    settings = TargetSettings(model=folder, engine="vllm", device="cpu", max_window=K, engine_args=own)
    init_none_hash(sha256)
    return EngineArgs(**engine_args(settings)).create_engine_config()


class Steps:
    """A scheduler and what it runs on: every step is planned, computed by `next_token`, and committed."""

    def __init__(self, folder: Path, num_blocks: int = 64, max_loras: int = 0, **credit: Any) -> None:
        config = vllm_config(folder)
        config.cache_config.num_gpu_blocks = num_blocks
        config.lora_config = LoRAConfig(max_loras=max_loras) if max_loras else None
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache_config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.source = ScriptedSource(**credit)
        self.scheduler = DraftScheduler(
            config,
            cache_config,
            StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,  # its counters of drafts are where more than k of them crash
            source=self.source,
        )
        self.requests: dict[int, Request] = {}
        self.windows: dict[int, list[int]] = {}  # of the last step, by number; who was not in it is not there
        self.plan: Any = None
        self.told: list[Any] = []  # to vLLM's client, of the last step

    def open(
        self,
        number: int,
        prompt: Sequence[int],
        priority: int = 0,
        drafted: bool = True,
        adapter: int = 0,
        **params: Any,
    ) -> None:
        extra = ({"number": number} if drafted else {}) | params.pop("extra_args", {})
        sampling = SamplingParams(
            temperature=0, ignore_eos=True, extra_args=extra or None, **{"max_tokens": 40, **params}
        )
        request = Request(
            request_id=f"request-{number}",
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=float(number),
            priority=priority,
            lora_request=LoRARequest(f"adapter {adapter}", adapter, "/nowhere") if adapter else None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.requests[number] = request
        self.scheduler.add_request(request)

    def tokens(self, number: int) -> list[int]:
        return list(self.requests[number].all_token_ids)

    def output(self, number: int) -> list[int]:
        return list(self.requests[number].output_token_ids)

    def draft(self, number: int, chain: int, count: int, right: int | None = None, **fields: Any) -> None:
        """A piece at the committed length: so many tokens, of which the first `right` are what the target takes."""
        tokens = self.tokens(number)
        ids = decoded(tokens, count)
        if right is not None:
            ids[right:] = [10 + (token - 9) % (VOCAB - 10) for token in ids[right:]]
        self.source.sent.append(DraftTokens(number, chain, len(tokens), tuple(ids), **fields))

    def step(self) -> dict[int, list[int]]:
        """One step; the windows of who was in it."""
        self.plan = plan = self.scheduler.schedule()
        numbers = {f"request-{number}": number for number in self.requests}
        ids = list(plan.num_scheduled_tokens)
        self.windows = {numbers[one]: list(plan.scheduled_spec_decode_tokens.get(one, ())) for one in ids}
        sampled = [self._verified(numbers[one], plan.num_scheduled_tokens[one]) for one in ids]
        output = ModelRunnerOutput(ids, {one: at for at, one in enumerate(ids)}, sampled)
        told = self.scheduler.update_from_output(plan, output)
        self.told = [one for part in told.values() for one in part.outputs]
        return self.windows

    def run(self, *numbers: int, steps: int = 200) -> None:
        """Until these have ended, or all."""
        ids = [f"request-{number}" for number in numbers or self.requests]
        for _ in range(steps):
            if not any(one in self.scheduler.requests for one in ids):
                return
            self.step()
        raise AssertionError("requests do not end")

    def abort(self, number: int) -> None:
        self.scheduler.finish_requests([f"request-{number}"], RequestStatus.FINISHED_ABORTED)

    @property
    def num_free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _verified(self, number: int, num_scheduled: int) -> list[int]:
        """What the workers sample: the drafted tokens that hold, and one of the target's own."""
        tokens, window = self.tokens(number), self.windows[number]
        assert all(-1 <= token < VOCAB for token in window)
        assert len(window) <= K
        made: list[int] = []
        for drafted in [*window, None]:
            made.append(next_token(tokens + made))
            if made[-1] != drafted:
                break
        return made
