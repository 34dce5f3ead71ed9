"""What drafts beside an LLM's target, each way with the same few hooks: nothing, methods without a model, a head in the
target, or a model of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from outrider.draft_service.boot import load_draft
from outrider.engine.loader import LoadedModel
from outrider.gateway.peers.draft_trials import TRIAL_S, trial_commits
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.speculation.backends import Drafter
from outrider.gateway.speculation.schedule import BatchSchedule, ScheduledDrafter
from outrider.llm.arguments import EngineArguments
from outrider.llm.backends import LoopThread
from outrider.llm.config import SpeculativeConfig, acceptance_of
from outrider.llm.engine_choice import VLLM, vllms_own
from outrider.llm.service_settings import draft_settings
from outrider.llm.services import LocalDraft, LocalVerifier
from outrider.planner.draft_trial import judge_trial
from outrider.proposers.base import TokenProposer
from outrider.proposers.heads.loading import AnyHead, drafts_in_one_pass
from outrider.proposers.registry import make_proposer, method_of, needs_model
from outrider.rpc.errors import OutriderError
from outrider.rpc.pair import check_pair
from outrider.rpc.words.request import SpeculationOptions, options_for_draft
from outrider.rpc.words.sampling_params import AcceptanceRule
from outrider.target_service.boot import believed_head
from outrider.target_service.engines import engine_of
from outrider.target_service.heads.trial import NO_HEAD, TriedHead
from outrider.target_service.settings import TargetSettings

Encode = Callable[[str], Sequence[int]]  # a text's ids
log = logging.getLogger(__name__)


class PlainDecoding:
    """Nothing drafts. The other ways override what they need of its hooks, which are called in the order in which they
    stand here."""

    options = SpeculationOptions()  # what every request says of speculation
    schedule: BatchSchedule | None = None  # tokens drafted by the number of running requests, where that changes
    loaded: LoadedModel | None = None  # a draft's own model, after `load`

    def of_target(self) -> dict[str, Any]:
        """Settings of a target on our engine, in which this drafts."""
        return {}

    def of_vllm(self) -> dict[str, Any]:
        """Arguments of vLLM's engine, which then drafts so itself."""
        return {}

    def load_head(self, settings: TargetSettings, target: LoadedModel) -> TriedHead:
        """What drafts beside the target's layers. Raises ValueError for another head than the one that was named."""
        return NO_HEAD

    def load(self, longest: int) -> None:
        """Loads what has weights of its own; the target takes sequences of up to `longest` tokens. Raises ValueError
        for a draft that is to take longer ones."""

    def reserve(self, num_blocks: int | None) -> None:
        """The draft's cache gets so many blocks."""

    def start(self, runtime: LoopThread, target: LocalVerifier, num_running: Callable[[], int]) -> Drafter | None:
        """What the loop asks for drafts; None: nothing, or the target has them."""
        return None

    def check(self, target: LocalVerifier) -> str:
        """A warning about the pair; empty: none. Raises FailedPrecondition for models that are no pair."""
        return ""

    def believed(
        self,
        runtime: LoopThread,
        target: LocalVerifier,
        drafter: Drafter | None,
        encode: Callable[[str], Sequence[int]],
    ) -> Drafter | None:
        """What the loop asks, once a draft that is no good for the target was found out."""
        return drafter

    def leave(self) -> None:
        """Gives back what is of the loop, on it, before it ends."""

    def stop(self) -> None:
        """Ends what was started, once the loop has ended."""


class Speculation(PlainDecoding):
    """What all ways of drafting have in common."""

    def __init__(self, arguments: EngineArguments, speculation: SpeculativeConfig) -> None:
        self._arguments, self._speculation = arguments, speculation
        self.schedule = None if speculation.schedule.constant else speculation.schedule
        rule = acceptance_of(speculation.rejection_sample_method)
        self.options = SpeculationOptions(
            acceptance=rule if speculation.tree is None else AcceptanceRule.COUPLED,  # trees are not for rejection
            greedy_draft=speculation.draft_sample_method == "greedy",
            **options_for_draft(speculation),
        )

    def _scheduled(self, drafter: Drafter, num_running: Callable[[], int]) -> Drafter:
        return drafter if self.schedule is None else ScheduledDrafter(drafter, self.schedule, num_running)

    def _lookups(self) -> dict[str, TokenProposer]:
        """The methods without a model, by the names that the configuration has for them."""
        names = [name for name in self._speculation.methods if not method_of(name).needs_model]
        return {name: make_proposer(name, vars(self._speculation), self._arguments.allow_code) for name in names}

    def _require_length(self, longest: int) -> None:
        length = self._speculation.max_model_len
        if length is not None and length > longest:
            raise ValueError(f"speculative_config: max_model_len={length} is more than the target's {longest}")


class LookupDraft(Speculation):
    """Methods without a model draft, in this process."""

    def __init__(self, arguments: EngineArguments, speculation: SpeculativeConfig) -> None:
        super().__init__(arguments, speculation)
        self._drafter = LocalDrafter([*self._lookups().values()], in_turn=True)

    def start(self, runtime: LoopThread, target: LocalVerifier, num_running: Callable[[], int]) -> Drafter:
        return self._scheduled(self._drafter, num_running)

    def stop(self) -> None:
        self._drafter.close()


class HeadDraft(Speculation):
    """A head drafts within the target's own steps; vLLM has heads of its own."""

    def of_target(self) -> dict[str, Any]:
        tree = None if self._speculation.tree is None else self._speculation.speculative_token_tree
        least = self._speculation.draft_confidence
        return {
            "head": self._speculation.model,
            "head_trial": self._speculation.draft_trial,
            "speculative_token_tree": tree,
            "head_confidence": least,
        }

    def of_vllm(self) -> dict[str, Any]:
        return {engine_of(VLLM).SPECULATIVE: vllms_own(self._speculation)}

    def load_head(self, settings: TargetSettings, target: LoadedModel) -> TriedHead:
        self._require_length(target.max_model_len)
        return believed_head(settings, target, partial(self._check_head, settings.head))

    def _check_head(self, folder: Path | None, head: AnyHead) -> None:
        wanted = self._speculation
        if head.name != wanted.head:
            raise ValueError(
                f"speculative_config['method'] is {wanted.head!r}, and {folder} holds a head of method "
                f"{head.name!r}; allowed: that one, or none"
            )
        if wanted.parallel_drafting and not drafts_in_one_pass(head):
            raise ValueError(
                f"speculative_config['parallel_drafting'] is True, and the head in {folder} was not trained for "
                "it: its config.json has no parallel_drafting; allowed: False"
            )


class ModelDraft(Speculation):
    """A model drafts, on a device thread of its own; methods without a model may draft in turn with it."""

    def __init__(self, arguments: EngineArguments, speculation: SpeculativeConfig, folder: Path, device: str) -> None:
        super().__init__(arguments, speculation)
        self._settings = draft_settings(arguments, speculation, folder, device)
        self.service: LocalDraft | None = None

    def load(self, longest: int) -> None:
        self._require_length(longest)
        self.loaded = load_draft(self._settings, self._arguments.trust_remote_code)

    def reserve(self, num_blocks: int | None) -> None:
        self._settings = self._settings.model_copy(update={"num_blocks": num_blocks})

    def start(self, runtime: LoopThread, target: LocalVerifier, num_running: Callable[[], int]) -> Drafter:
        loaded, lookups = self.loaded, self._lookups()
        if loaded is None:
            raise RuntimeError("the draft's model is not loaded")
        service = runtime.call(lambda: LocalDraft(self._settings, loaded, runtime.loop, lookups))
        self.service = service
        return self._scheduled(service, num_running)

    def check(self, target: LocalVerifier) -> str:
        return "" if self.service is None else check_pair(target.info.model, self.service.info.model)

    def believed(
        self,
        runtime: LoopThread,
        target: LocalVerifier,
        drafter: Drafter | None,
        encode: Callable[[str], Sequence[int]],
    ) -> Drafter | None:
        """It, or without its model where the target keeps no more of that than of a guess."""
        if self.service is None or self._speculation.draft_trial == "off":
            return drafter
        method = next(name for name in self._speculation.methods if method_of(name).needs_model)
        try:
            commits = runtime.run(asyncio.wait_for(trial_commits(self.service, target, encode, method), TRIAL_S))
        except (OutriderError, TimeoutError) as error:
            log.warning("%s could not be tried: %s", self._speculation.model, str(error) or "it takes too long")
            return drafter
        trial = judge_trial(method, commits)
        log.info("%s was tried: %s", self._speculation.model, trial)
        if not trial.num_rounds or not trial.is_useless:
            return drafter
        refused = self._speculation.draft_trial == "refuse"
        log.error(
            "%s is no draft for this target: %s. Was it made for it, and for these weights? %s",
            self._speculation.model, trial,
            "It does not draft (draft_trial='warn' lets it)" if refused else "It drafts all the same",
        )  # fmt: skip
        return self._without_model(runtime) if refused else drafter

    def _without_model(self, runtime: LoopThread) -> Drafter | None:
        """What is left to draft; the model's memory is given back."""
        runtime.call(self.leave)
        self.stop()
        self.service = self.loaded = None
        lookups = [*self._lookups().values()]
        return LocalDrafter(lookups, in_turn=True) if lookups else None

    def leave(self) -> None:
        if self.service is not None:
            self.service.leave()

    def stop(self) -> None:
        if self.service is not None:
            self.service.stop()


def draft_of(arguments: EngineArguments, speculation: SpeculativeConfig | None, device: str) -> PlainDecoding:
    """The way that a configuration names."""
    if speculation is None:
        return PlainDecoding()
    if speculation.head:
        return HeadDraft(arguments, speculation)
    if speculation.model is None or not needs_model(speculation.methods):
        return LookupDraft(arguments, speculation)
    return ModelDraft(arguments, speculation, Path(speculation.model), device)
