"""A student that is a head beside a target: it reads the target's hidden states of the texts, which it has computed by
weights of its own, on its own cores; what serves is asked for nothing but texts.

A head is trained by other code than it serves by (`training.head_modules`). Both are asked for the same before anything
is learned: a head whose files are read otherwise there is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine import checkpoint
from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.base import CausalLM
from outrider.learning.student import LOWEST, Base, StudentPlan
from outrider.learning.window_student import WindowStudent
from outrider.proposers.heads.adapters import LAYER
from outrider.proposers.heads.eagle import default_taps
from outrider.proposers.heads.layer import LayerHead
from outrider.proposers.heads.loading import head_digest, load_head
from outrider.proposers.heads.target import target_weights
from outrider.rpc.messages import Lesson
from outrider.training.head_modules import Eagle3Module, HeadModule, MtpModule
from outrider.training.heads import HeadTarget
from outrider.training.language_head import LanguageHead
from outrider.training.lessons import Lesson as Windows
from outrider.training.teacher import Teacher

FEATURES_BYTES = 256 << 20  # of texts that are read again
LAYERS = {"eagle3": "midlayer", "mtp": "model.mtp_layers.0"}  # the module that learns, by method
OTHER_NAMES = {  # by whom these were saved
    "layers.0.": "midlayer.", "model.layers.0.": "midlayer.", "model.midlayer.": "midlayer.",
    "model.fc.": "fc.", "model.norm.": "norm.",
}  # fmt: skip
CHECKED_TOKENS = 24  # of a text on which both say the same
CLOSE = 2e-2  # of their logits


class HeadStudent(WindowStudent):
    """An eagle3 or mtp head of one layer."""

    first_end = 1  # the first one follows the prompt's pass, behind which no head has drafted

    def __init__(self, folder: Path, target: Path, plan: StudentPlan, max_tokens: int = 2048) -> None:
        """`target` is the folder of the target's weights; texts of at most `max_tokens` are learned from. Raises
        ValueError for a head that cannot learn."""
        loaded = load_model(target)
        served = load_head(folder, target_weights(target, loaded.model), loaded.model.dtype, loaded.model.device)
        if not isinstance(served, LayerHead) or not served.may_learn or served.name not in LAYERS:
            told = f"{folder} holds a {served.name} head, which does not learn here"
            raise ValueError(f"head: {told}; allowed: eagle3 and mtp, of one layer, a token a pass")
        module = trained_module(served.name, folder, HeadTarget.read(target, loaded))
        require_same(folder, served, module, loaded)
        base = Base(
            folder, head_digest(folder), loaded.vocab_size, loaded.eos_token_ids, served.adapters.linears,
            (LAYER, LAYERS[served.name]),
        )  # fmt: skip
        super().__init__(base, module, plan)
        self.target_digest, self._loaded = loaded.digest, loaded
        self._longest = min(max_tokens, loaded.max_model_len - plan.num_tokens)
        self._taps, self._says_tokens = served.taps, module.language_head
        self._reader = TextReader(loaded.model, served.taps, self._longest)
        self._replay: Windows | None = None

    def takes(self, lesson: Lesson) -> bool:
        """Those of the target whose weights it has, which leave room for what is drafted behind them."""
        is_its = lesson.target_digest == self.target_digest
        return is_its and len(lesson.prompt_ids) + len(lesson.output_ids) <= self._longest

    def _says(self, lesson: Lesson, ends: Tensor, num_tokens: int) -> Tensor:
        ids, features = padded(num_tokens, *self._reader.read(lesson))
        first = len(lesson.prompt_ids) + lesson.num_given - 1  # of the last token before any was drawn
        return self._logits(ids, features, first + ends, num_tokens)[0]

    def _logits(self, ids: Tensor, features: Tensor, ends: Tensor, num_tokens: int) -> Tensor:
        """Shapes: `HeadModule.forward`; returns [windows, ends, tokens, vocab]."""
        states = self._model(ids, features, ends, num_tokens)
        return whole_logits(self._says_tokens, states, self.vocab_size)

    def _replayed(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Of texts that the target writes, behind a few of their tokens."""
        if self._replay is None:
            self._replay = self._written()
        num_tokens, length = self.plan.num_tokens, self.plan.replay_length
        ids, features = self._replay.ids[places, :-1], self._replay.features[places]
        ends = self._some_ends(length - num_tokens - 1) + 1
        with torch.no_grad(), self._model.disable_adapter():
            before = self._logits(ids, features, ends, num_tokens)
        return before, self._logits(ids, features, ends, num_tokens)

    def _written(self) -> Windows:
        """Each behind a token of its own."""
        plan, generator = self.plan, torch.Generator().manual_seed(self.plan.seed)
        ids = torch.randint(self.vocab_size, (plan.replay_windows, 1), generator=generator)
        teacher = Teacher(self._loaded, plan.replay_length, self._taps)
        parts = list(teacher.lessons("texts of no traffic", ids, 1.0, generator))
        return Windows(
            torch.cat([part.ids for part in parts]), torch.empty(0), torch.empty(0),
            torch.cat([part.features for part in parts]).float(),
        )  # fmt: skip


class TextReader:
    """What a target's layers say of texts, the latest of which are kept."""

    def __init__(self, model: CausalLM, taps: tuple[int, ...], max_tokens: int) -> None:
        self._table = range(-(-max_tokens // BLOCK_SIZE))
        self._runner = ModelRunner(model, len(self._table), taps=taps)
        self._kept: OrderedDict[int, tuple[Lesson, Tensor]] = OrderedDict()  # a lesson is known while it is kept
        self._bytes = 0

    def read(self, lesson: Lesson) -> tuple[Tensor, Tensor]:  # [1, tokens], [1, tokens, taps, hidden] float32
        """A text but for its last token, and its states."""
        ids = [*lesson.prompt_ids, *lesson.output_ids[:-1]]
        kept = self._kept.get(id(lesson))
        if kept is None:
            kept = self._kept[id(lesson)] = lesson, self._features(ids)
            self._bytes += kept[1].nbytes
        self._kept.move_to_end(id(lesson))
        while self._bytes > FEATURES_BYTES and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1][1].nbytes
        return torch.tensor([ids]), kept[1].float()[None]

    @torch.inference_mode()
    def _features(self, ids: list[int]) -> Tensor:  # [tokens, taps, hidden]
        self._runner.forward([BatchEntry(ids, 0, self._table, 1)])
        states = self._runner.hidden_states
        if states is None:
            raise ValueError("the target taps no layer")
        return states.clone()


def padded(count: int, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Texts with places behind them, which nobody sees who stands before."""
    more = ids.new_zeros(len(ids), count), features.new_zeros(len(features), count, *features.shape[2:])
    return torch.cat([ids, more[0]], dim=1), torch.cat([features, more[1]], dim=1)


def whole_logits(says: LanguageHead, states: Tensor, vocab_size: int) -> Tensor:  # [..., hidden] -> [..., vocab]
    """Of all ids, also those that the head cannot say."""
    logits = says.product(states).float()  # [..., outputs]
    if says.ids is None:
        return logits
    return logits.new_full((*logits.shape[:-1], vocab_size), LOWEST).index_copy(-1, says.ids, logits)


def trained_module(method: str, folder: Path, target: HeadTarget) -> HeadModule:
    """A head's weights as they are trained. Raises ValueError for names and shapes that are not known there."""
    config = checkpoint.read_config(folder)
    state = checkpoint.read_tensors(checkpoint.weight_files(folder, lone=True))
    if method == "mtp":
        module: HeadModule = MtpModule(config, target.weights)
        named = {name: tensor for name, tensor in state.items() if name.startswith(LAYERS["mtp"])}
    else:
        module = _eagle3(config, state, target)
        named = {_own_name(name): tensor for name, tensor in state.items()}
    known = module.state_dict().keys()
    problems = [f"{name} is missing" for name in sorted(known - named.keys())]
    problems += [f"{name} is not known" for name in sorted(named.keys() - known)]
    if problems:
        raise ValueError(f"head: {folder} cannot be trained: {', '.join(problems):.300}")
    module.load_state_dict(named)
    return module.float()


def _eagle3(config: Mapping[str, Any], state: Mapping[str, Tensor], target: HeadTarget) -> HeadModule:
    taps = config.get("eagle_aux_hidden_state_layer_ids") or default_taps(target.weights.num_layers)
    said = {
        "draft_vocab_size": len(target.weights.output), "norm_before_residual": False, **config,
        "eagle_aux_hidden_state_layer_ids": taps,
    }  # fmt: skip
    if "d2t" not in state:
        return Eagle3Module(said, target.weights)
    return Eagle3Module(said, target.weights, state["d2t"] + torch.arange(len(state["d2t"])))


def _own_name(name: str) -> str:
    found = next((other for other in OTHER_NAMES if name.startswith(other)), None)
    return name if found is None else OTHER_NAMES[found] + name.removeprefix(found)


@torch.inference_mode()
def require_same(folder: Path, served: LayerHead, module: HeadModule, loaded: LoadedModel) -> None:
    """Raises ValueError where a head says something else as it is trained than as it serves: then its files ask for
    what the one knows, and the other does not."""
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.vocab_size, (CHECKED_TOKENS,), generator=dice)
    reader = TextReader(loaded.model, served.taps, CHECKED_TOKENS + 1)
    features = reader._features(ids.tolist())  # [tokens, taps, hidden]
    table = range(-(-CHECKED_TOKENS // BLOCK_SIZE))
    batch = build_batch([BatchEntry(ids[1:].tolist(), 1, table, 1)], BLOCK_SIZE, features.device)
    cache = KVCache.allocate(served.layers, len(table), features.dtype, features.device, BLOCK_SIZE)
    says, _ = served.first(batch, features[:-1], cache)  # [1, vocab]
    module.eval()
    states = module(*padded(1, ids[None], features[None].float()), torch.tensor([CHECKED_TOKENS - 1]), 1)
    trained = whole_logits(module.language_head, states, loaded.vocab_size)[0, 0].clamp_min(LOWEST)  # [1, vocab]
    worst = float((trained.log_softmax(-1) - says.float().clamp_min(LOWEST).log_softmax(-1)).abs().max())
    if not worst < CLOSE:
        raise ValueError(
            f"head: {folder} says otherwise as it is trained than as it serves (by {worst:.2g}): its config.json asks "
            "for what is not known there; allowed: a head as outrider model train makes them"
        )
