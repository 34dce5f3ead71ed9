"""What plain decoding makes of the prompts, each decoded once, in a second process beside the cells."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType
from typing import Self

import torch
from exactness.identity_prompts import Arithmetic, Prompt, decode_plainly

_Key = tuple[tuple[int, ...], int, Arithmetic, bool]


class PlainOutputs:
    """Use as a context. One process, started afresh: a forked one would share this one's threads."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, context, torch.set_num_threads, (1,))
        self._outputs: dict[_Key, Future[list[int]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)

    def start(self, prompts: Iterable[Prompt], arithmetic: Arithmetic, twins: bool = False) -> None:
        """Decodes those that were not started before, in the background."""
        for prompt in prompts:
            key = _key(prompt, arithmetic, twins)
            if key not in self._outputs:
                self._outputs[key] = self._executor.submit(decode_plainly, prompt, arithmetic, twins)

    def of(self, prompt: Prompt, arithmetic: Arithmetic, twins: bool = False) -> list[int]:
        """The output of one prompt, by now or after a wait."""
        self.start([prompt], arithmetic, twins)
        return self._outputs[_key(prompt, arithmetic, twins)].result()


def _key(prompt: Prompt, arithmetic: Arithmetic, twins: bool) -> _Key:
    return prompt.ids, prompt.sampling.max_tokens, arithmetic, twins
