"""How a draft is made for any target, by distillation: `outrider model train`.

The whole story in order: read a corpus with the target's tokenizer, let the target write on from places of it, train
the draft on what it wrote, from another draft's weights if one is given, write the draft's folder, and measure it where
the corpus was held out. A run that was cut short goes on from its last checkpoint, in a folder beside the draft's."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.engine.loader import LoadedModel, load_model
from outrider.training.budget import (
    FLOAT,
    ModelSize,
    Needs,
    lesson_needs,
    logits_bytes,
    require_memory,
    trained_bytes,
)
from outrider.training.course import Course, CoursePlan
from outrider.training.distill import DistillWeights
from outrider.training.language_head import LanguageHead
from outrider.training.lessons import Lesson
from outrider.training.model import fast_products, randomised
from outrider.training.parallel import (
    MaskedRows,
    acceptance,
    deepened,
    draft_head,
    parallel_loss,
    parallel_states,
    with_mask_token,
)
from outrider.training.teacher import OnWord, Teacher, silent
from outrider.training.train import TrainPlan, train

HELD_OUT = 32  # one block of the corpus in so many
MEASURED_TOKENS = 8  # of a draft
MEASURED_EVERY = 4  # places
HeldOut = tuple[Iterable[Lesson], Iterable[Lesson]]  # written greedily, and sampled
TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "chat_template*", "*.model", "vocab.*", "merges.txt")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run makes, of what, and how long it trains."""

    target: Path
    corpus: Path
    out: Path
    steps: int = 1200
    course: CoursePlan = field(default_factory=CoursePlan)

    @property
    def work(self) -> Path:
        """The run's own folder."""
        return self.out.with_name(f"{self.out.name}.work")

    @property
    def training(self) -> TrainPlan:
        """The steps of the optimizer."""
        decay = max(1, int(0.7 * self.steps))
        tokens = self.course.batch_size * self.course.length
        return TrainPlan(self.steps, decay, warmup_steps=30, tokens_per_step=tokens, matrix_lr=0.012)


Run = TypeVar("Run", bound=RunPlan)


@dataclass(frozen=True, kw_only=True)
class DraftPlan(RunPlan):
    """Of a draft."""

    parallel: bool  # it drafts all tokens in one pass
    start: Path | None = None  # a draft whose weights it starts from
    layers: int | None = None  # None: the start's, and twice as many for a parallel draft

    @property
    def num_tokens(self) -> int:
        """That are drafted in one pass."""
        return MEASURED_TOKENS if self.parallel else 1

    @property
    def num_ends(self) -> int:
        """Places of a window after which a step drafts."""
        return 32 if self.parallel else self.course.length


@dataclass(frozen=True)
class DraftAcceptance:
    """Of a draft's tokens where the target writes: the share that holds at each position, of those whose predecessors
    did."""

    name: str
    greedy: tuple[float, ...]
    sampled: tuple[float, ...]  # by rejection, at temperature 1


def make_draft(
    plan: DraftPlan, on_step: Callable[[int, float], None], on_word: OnWord = silent
) -> list[DraftAcceptance]:
    """Writes `plan.out`; `on_step` is told of every step's number and loss, `on_word` of what is done between. What it
    and its start accept. Raises ValueError for what cannot be used, and where memory lacks."""
    if plan.out.exists():
        raise ValueError(f"{plan.out} exists; nothing is overwritten")
    require_memory(draft_needs(plan), {"--batch 1": draft_needs(with_batch(plan, 1))})
    check_work(plan)
    on_word("reads the target and the corpus")
    loaded = load_model(plan.target)
    stream, held_out = split_stream(read_corpus(plan.corpus, plan.target), plan.course.length)
    teacher = Teacher(loaded, plan.course.length, on_word=on_word)
    course = Course(teacher, stream, plan.work / "lessons", plan.course)
    start = None if plan.start is None else _load(plan.start)
    draft, mask_id = new_draft(plan, loaded, start)
    loss = parallel_loss(draft, mask_id, plan.num_tokens, plan.num_ends, DistillWeights())
    train(draft, loss, plan.training, course.batch, plan.work / "run.safetensors", on_step)
    export(draft, plan)
    greedy, sampled = held_out_lessons(teacher, held_out, plan.course)
    lessons = list(greedy), list(sampled)
    measured = [measure(plan.out.name, draft, mask_id if plan.parallel else None, lessons)]
    if plan.start is not None and start is not None and getattr(start.config, "pard_token", None) is None:
        measured.append(measure(plan.start.name, start, None, lessons))
    shutil.rmtree(plan.work)
    return measured


def draft_needs(plan: DraftPlan) -> Needs:
    """The memory that a run takes."""
    target, course = ModelSize.read(plan.target), plan.course
    draft = new_size(plan, target) if plan.start is None else ModelSize.read(plan.start)
    layers = plan.layers or draft.num_layers * (1 + (plan.parallel and plan.start is not None))
    output = draft.vocab_size * draft.hidden_size
    numbers = draft.num_parameters + max(0, layers - draft.num_layers) * draft.layer_parameters
    window_rows = course.length + plan.num_ends * (plan.num_tokens - 1)
    rows = course.batch_size * window_rows
    scores = 2 * FLOAT * rows * window_rows * draft.num_heads  # where attention keeps them
    says = course.batch_size * plan.num_ends * plan.num_tokens
    kept = 0 if plan.start is None else FLOAT * draft.num_parameters  # the start, which is measured, too
    return replace(
        lesson_needs(target, course.length, num_taps=0),
        trained=kept + trained_bytes(numbers, output),
        losses=layers * (rows * draft.row_bytes + scores) + logits_bytes(says, draft.vocab_size),
    )


def with_batch(plan: Run, batch_size: int) -> Run:
    """The plan with so many windows in a step."""
    return replace(plan, course=replace(plan.course, batch_size=batch_size))


def read_corpus(path: Path, target: Path) -> Tensor:  # [tokens] int64
    """The tokens of a text file, or of every line's "text" in a JSONL file, with an end token between. Raises
    ValueError."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = path.read_text(encoding="utf-8")
    texts = [text]
    if path.suffix == ".jsonl":
        texts = [_text_of(path, number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [token for text in texts for token in (*tokenizer.encode(text, add_special_tokens=False), *end)]
    return torch.tensor(ids, dtype=torch.int64)


def split_stream(stream: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(what is learnt, what is held out): one block in so many, none shorter than some windows. Raises ValueError for a
    corpus that is too short."""
    least = 2 * HELD_OUT * (length + 1)
    if len(stream) < least:
        raise ValueError(f"the corpus has {len(stream)} tokens; allowed: at least {least}")
    block = 2 * (length + 1)
    held_out = torch.arange(len(stream)) // block % HELD_OUT == HELD_OUT - 1
    return stream[~held_out], stream[held_out]


def new_draft(plan: DraftPlan, target: LoadedModel, start: PreTrainedModel | None) -> tuple[PreTrainedModel, int]:
    """The draft before its first step, and its mask token (-1: it needs none)."""
    if start is None:
        draft = _new_llama(plan, target)
    else:
        own = start.config.num_hidden_layers
        draft = deepened(start, plan.layers or own * (1 + plan.parallel))
    return draft.train(), with_mask_token(draft) if plan.parallel else -1


def export(draft: PreTrainedModel, plan: DraftPlan) -> None:
    """Writes the folder, whole or not at all: bfloat16 safetensors, configuration, and the target's tokenizer."""
    partial = plan.out.with_name(f"{plan.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    source = plan.target if plan.start is None else plan.start
    copy.deepcopy(draft).bfloat16().save_pretrained(partial)
    for pattern in (*TOKENIZER_FILES, "generation_config.json"):
        for path in source.glob(pattern):
            shutil.copyfile(path, partial / path.name)
    partial.rename(plan.out)


def held_out_lessons(teacher: Teacher, held_out: Tensor, plan: CoursePlan) -> HeldOut:
    """What the target writes after places that no draft has learnt from, as it is asked for."""
    generator = torch.Generator().manual_seed(plan.seed)
    starts = torch.randint(len(held_out) - plan.prompt, (plan.num_measured,), generator=generator)
    prompts = held_out[starts[:, None] + torch.arange(plan.prompt)]  # [windows, prompt]
    sampled = teacher.lessons("held out, sampled", prompts, 1.0, generator)
    return teacher.lessons("held out, greedy", prompts, 0.0), sampled


def measure(name: str, draft: PreTrainedModel, mask_id: int | None, lessons: HeldOut) -> DraftAcceptance:
    """A draft that drafts in parallel has a mask token; any other draws one token after the other."""
    head = draft_head(draft.eval())

    def accepted(lesson: Lesson, greedy: bool) -> Tensor:
        return _accepted(draft, mask_id, head, lesson, greedy)

    return acceptance_of(name, lessons, accepted)


def acceptance_of(name: str, lessons: HeldOut, accepted: Callable[[Lesson, bool], Tensor]) -> DraftAcceptance:
    """`accepted` gives of a lesson of one window, and whether it is greedy, [ends, tokens]."""
    greedy, sampled = (
        by_position(torch.cat([accepted(part.window(index), kind) for part in of for index in range(len(part.ids))]))
        for of, kind in zip(lessons, (True, False), strict=True)
    )
    return DraftAcceptance(name, greedy, sampled)


@torch.no_grad()
def _accepted(
    draft: PreTrainedModel, mask_id: int | None, head: LanguageHead, lesson: Lesson, greedy: bool
) -> Tensor:  # [ends, tokens]
    """Of a lesson of one window, as `acceptance`."""
    length = lesson.ids.shape[1] - 1
    ends = measured_ends(length)
    places = ends[:, None] + torch.arange(MEASURED_TOKENS)
    if mask_id is None:
        rows = MaskedRows.of(torch.arange(length), length, 1)
        states = parallel_states(draft, lesson.ids[:, :-1], rows, 0)[:, places, 0]  # [1, ends, tokens, hidden]
    else:
        states = parallel_states(draft, lesson.ids[:, :-1], MaskedRows.of(ends, length, MEASURED_TOKENS), mask_id)
    with fast_products():
        return acceptance(lesson, places, head, states, greedy)[0]


def measured_ends(length: int) -> Tensor:  # [ends]
    """The places of a window after which a draft is measured."""
    return torch.arange(length // 4, length - MEASURED_TOKENS + 1, MEASURED_EVERY)


def by_position(accepted: Tensor) -> tuple[float, ...]:  # [ends, tokens]
    """The share that holds at each position, of those whose predecessors did."""
    reached = torch.cat([torch.ones(len(accepted), 1), accepted.cumprod(-1)], dim=-1).sum(0)
    return tuple((reached[1:] / reached[:-1].clamp_min(1e-9)).tolist())


def new_size(plan: DraftPlan, target: ModelSize) -> ModelSize:
    """Of a Llama half as wide as the target, with two layers."""
    hidden = max(64, target.hidden_size // 64 * 32)
    size = replace(
        target,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=plan.layers or 2 * (1 + plan.parallel),
        query_size=hidden,
        key_size=hidden,
        num_heads=hidden // 32,
        tied_embeddings=True,
    )
    return replace(size, num_parameters=size.num_layers * size.layer_parameters + hidden * size.vocab_size)


def _new_llama(plan: DraftPlan, target: LoadedModel) -> PreTrainedModel:
    config, size = AutoConfig.from_pretrained(plan.target), new_size(plan, ModelSize.read(plan.target))
    eos = target.eos_token_ids
    return randomised(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=target.vocab_size,
                hidden_size=size.hidden_size,
                intermediate_size=size.intermediate_size,
                num_hidden_layers=size.num_layers,
                num_attention_heads=size.num_heads,
                num_key_value_heads=size.num_heads,
                head_dim=32,
                max_position_embeddings=target.max_model_len,
                tie_word_embeddings=True,
                bos_token_id=config.bos_token_id,
                eos_token_id=list(eos) if len(eos) > 1 else next(iter(eos), None),
            )
        )
    )


def _load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {number} is not JSON ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise ValueError(f'{path}: line {number} has no text; allowed: an object with "text", a string')
    return str(found["text"])


def check_work(plan: RunPlan) -> None:
    """Notes what the run is, or compares. Raises ValueError where another was begun."""
    noted, said = plan.work / "plan.json", json.dumps(asdict(plan), default=str, indent=2)
    if noted.exists() and noted.read_text(encoding="utf-8") != said:
        raise ValueError(f"{plan.work} holds a run of other settings; remove it, or give another folder")
    plan.work.mkdir(parents=True, exist_ok=True)
    noted.write_text(said, encoding="utf-8")
