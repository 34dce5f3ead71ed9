"""A toy of vLLM's engine for what drafts come to: requests with the fields that are read, and steps that follow the
toys' rule."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from support.fakes import VOCAB, Rule, arithmetic

from outrider.rpc.messages import Commit, Load, StepTimings
from outrider.rpc.words.sampling_params import FinishReason
from outrider.vllm.draft_client import DraftClient
from outrider.vllm.rows import DraftedRow
from outrider.vllm.source import StepReport

STEP_S = 0.004


def vllm_config(num_speculative_tokens: int = 4, **model: Any) -> Any:
    """What is read of vLLM's configuration."""
    fields = {"model": "toy", "tokenizer": "nowhere", "tokenizer_revision": None, "max_model_len": 256, **model}
    return SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB, **fields),
        speculative_config=SimpleNamespace(num_speculative_tokens=num_speculative_tokens),
    )


def vllm_sampling(**fields: Any) -> Any:
    """vLLM's SamplingParams, as far as they are read."""
    unset: dict[str, Any] = {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None, "min_tokens": 0, "ignore_eos": False,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "allowed_token_ids": None, "bad_words_token_ids": None, "all_stop_token_ids": set(),
    }  # fmt: skip
    return SimpleNamespace(**{**unset, **fields})


def vllm_request(prompt: Sequence[int] = (11, 12, 13), max_tokens: int = 60, **fields: Any) -> Any:
    """A request as vLLM's scheduler has it."""
    unset: dict[str, Any] = {
        "request_id": f"request-{id(fields)}", "prompt_token_ids": list(prompt), "all_token_ids": list(prompt),
        "num_prompt_tokens": len(prompt), "max_tokens": max_tokens, "sampling_params": vllm_sampling(),
        "structured_output_request": None, "prompt_embeds": None, "mm_features": [], "resumable": False,
        "priority": 0, "cache_salt": None, "trace_headers": None,
        "lora_request": None,
    }  # fmt: skip
    return SimpleNamespace(**{**unset, **fields})


class Steps:
    """Runs requests as the scheduler does: takes, cuts windows, verifies, reports."""

    def __init__(self, client: DraftClient, window: int = 4, rule: Rule = arithmetic) -> None:
        self._client, self._window, self._rule = client, window, rule
        self.rows: dict[int, DraftedRow] = {}
        self.num_drafted = self.num_accepted = self.num_held = self.num_steps = 0

    def add(self, request: Any) -> DraftedRow:
        row = self._client.opened(request)
        assert row is not None
        self.rows[row.sequence_id] = row
        return row

    async def step(self) -> None:
        """One step of all rows that may run."""
        self._client.take(self.rows)
        while self.rows and not self._due(time.monotonic()):
            self.num_held += 1
            await asyncio.sleep(0.0005)
            self._client.take(self.rows)
        started, events = time.monotonic(), []
        running = [(row, row.cut_window(self._window)) for row in self._due(started)]
        self._client.stepping(started)
        await asyncio.sleep(STEP_S)
        for row, window in running:
            drafted = window.ids if row.num_own_tokens else ()  # the first token waits for no draft
            events.append(self._commit(row, drafted, window.chain))
        self.num_steps += 1
        for event in events:
            if event.finish_reason is not None:
                self._client.closed(self.rows.pop(event.sequence_id))
        timings = StepTimings(num_rows=1, num_sequences=1)
        self._client.committed(StepReport(0, time.monotonic() - started, timings, events, Load()))

    def _due(self, now: float) -> list[DraftedRow]:
        dues = [(row, row.due(now)) for row in self.rows.values()]
        return [row for row, due in dues if due is not None and due <= now]

    async def until_drafted(self, *rows: DraftedRow) -> None:
        """Takes what comes until each of these rows has drafted tokens for its next step."""
        async with asyncio.timeout(60):
            while any(row.chains.live() is None for row in rows):
                self._client.take(self.rows)
                await asyncio.sleep(0.001)

    async def run(self, num_steps: int = 1000) -> None:
        """To the end of all rows, or so many steps."""
        for _ in range(num_steps):
            if not self.rows:
                return
            await self.step()

    def _commit(self, row: DraftedRow, drafted: Sequence[int], chain: int | None) -> Commit:
        position, num_accepted = row.committed, 0
        tokens: Any = row.tokens
        for token in (*drafted, None):
            tokens.append(self._rule(tokens, row.prompt_len))
            if token != tokens[-1]:
                break
            num_accepted += 1
        self.num_drafted += len(drafted)
        self.num_accepted += num_accepted
        row.advance(time.monotonic())
        finish = FinishReason.LENGTH if row.tokens_left <= 0 else None
        return Commit(
            row.sequence_id, position, tuple(tokens[position:]), (), chain, len(drafted), num_accepted,
            finish_reason=finish, dropped=row.chains.take_dropped(),
        )  # fmt: skip
