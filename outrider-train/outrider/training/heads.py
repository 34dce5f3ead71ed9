"""How a head that drafts beside a target is made: `outrider model train eagle3`, `mlp`, `medusa`, `mtp`,
`dflash`, `dspark`.

The story is that of a draft (drafts.py), with the target's hidden states in its lessons. The folder that comes of it
has the method's public layout, and is served with no flag but its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.engine import checkpoint
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.models.decoder_config import BY_MODEL_TYPE
from outrider.engine.models.weights import text_model_state
from outrider.proposers.heads.eagle import default_taps
from outrider.proposers.heads.head import TargetWeights
from outrider.proposers.heads.target import target_weights
from outrider.training.block_modules import DFlashModule, DSparkModule
from outrider.training.budget import (
    FLOAT,
    ModelSize,
    Needs,
    lesson_needs,
    logits_bytes,
    require_memory,
    trained_bytes,
)
from outrider.training.course import Course, Tap, TappedCourse
from outrider.training.distill import DistillWeights
from outrider.training.drafts import (
    HELD_OUT,
    MEASURED_TOKENS,
    DraftAcceptance,
    HeldOut,
    RunPlan,
    acceptance_of,
    check_work,
    held_out_lessons,
    measured_ends,
    read_corpus,
    split_stream,
    with_batch,
)
from outrider.training.head_modules import Eagle3Module, HeadModule, MedusaModule, MlpModule, MtpModule
from outrider.training.language_head import LanguageHead
from outrider.training.lessons import Lesson
from outrider.training.model import fast_products
from outrider.training.parallel import acceptance, chosen_ends, window_loss
from outrider.training.teacher import OnWord, Teacher, silent
from outrider.training.train import train

NORM = "model.norm.weight"
HeadMethod = Literal["eagle3", "medusa", "mlp", "mtp", "dflash", "dspark"]
NUM_TOKENS: Mapping[HeadMethod, int] = {"eagle3": 5, "medusa": 4, "mlp": 4, "mtp": 4, "dflash": 7, "dspark": 7}
TAPPED = ("eagle3", "dflash", "dspark")  # read several of the target's layers
BLOCK_LAYERS = 2
MARKOV_RANK = 256  # at most; never more than the hidden size
WRITES = "o_proj.weight", "down_proj.weight", "markov_w2.weight"  # to what a head says
MOST_SPREAD = 4.0  # of the logits of a head's first states, as a standard deviation
NUM_ENDS = 96  # places of a window after which a step drafts
SMALL_VOCAB = 8192  # outputs of an eagle3 that is to be small
SAME_AS_TARGET = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
)


@dataclass(frozen=True, kw_only=True)
class HeadPlan(RunPlan):
    """What is made, of what, and how long it is trained."""

    method: HeadMethod
    num_tokens: int | None = None  # that it learns to draft in a row; None: the method's
    draft_vocab: int | None = None  # eagle3's outputs: the corpus's likeliest tokens; None: all
    inner: int | None = None  # channels of a block drafter's feed-forward; None: the target's
    rank: int | None = None  # of dspark's Markov head; None: MARKOV_RANK

    @property
    def depth(self) -> int:
        """Tokens in a row."""
        return self.num_tokens or NUM_TOKENS[self.method]

    def markov_rank(self, hidden_size: int) -> int:
        """Of dspark's table from a token to the next."""
        return self.rank or min(MARKOV_RANK, hidden_size)


@dataclass(frozen=True)
class HeadTarget:
    """What a head takes from its target's checkpoint: configuration, embeddings and output as they are stored, bfloat16
    or else in float32, and the last norm in float32."""

    config: Mapping[str, Any]
    weights: TargetWeights
    norm: Tensor  # [hidden]

    @classmethod
    def read(cls, folder: Path, loaded: LoadedModel) -> HeadTarget:
        """Raises UnsupportedModel, and ValueError for a checkpoint whose last norm has another name than Llama's."""
        norm = text_model_state(checkpoint.read_weights(folder, checkpoint.weight_files(folder))).get(NORM)
        if norm is None:
            raise ValueError(f"{folder} has no tensor {NORM}, which a head begins with")
        config, found = checkpoint.read_config(folder), target_weights(folder, loaded.model)
        family = BY_MODEL_TYPE.get(loaded.model_type)
        factors = norm.float() + (family is not None and family.norms_from_one)
        kept = torch.bfloat16 if checkpoint.stored_dtype(config) == "bfloat16" else torch.float32
        embeddings = found.embeddings.to(kept)
        tied = found.output.data_ptr() == found.embeddings.data_ptr()
        output = embeddings if tied else found.output.to(kept)
        return cls(config, replace(found, embeddings=embeddings, output=output), factors)


def make_head(plan: HeadPlan, on_step: Callable[[int, float], None], on_word: OnWord = silent) -> list[DraftAcceptance]:
    """Writes `plan.out`; `on_step` is told of every step's number and loss, `on_word` of what is done between. What the
    head accepts. Raises ValueError for what cannot be used, and where memory lacks."""
    if plan.out.exists():
        raise ValueError(f"{plan.out} exists; nothing is overwritten")
    require_memory(head_needs(plan), {flag: head_needs(other) for flag, other in smaller(plan).items()})
    on_word("reads the target and the corpus")
    loaded = load_model(plan.target)
    length = plan.course.length
    tap = Tap.read(plan.corpus, loaded.digest) if plan.corpus.is_dir() else None
    stream, held_out = tap.split(HELD_OUT) if tap else split_stream(read_corpus(plan.corpus, plan.target), length)
    config, head = new_head(plan, HeadTarget.read(plan.target, loaded), stream)
    teacher = Teacher(loaded, length, head.taps, on_word)
    course = (
        TappedCourse(tap, head.taps, HELD_OUT, plan.course)
        if tap
        else Course(teacher, stream, plan.work / "lessons", plan.course)
    )
    check_work(plan)
    train(head, head_loss(head, plan.depth), plan.training, course.batch, plan.work / "run.safetensors", on_step)
    export_head(config, head, plan.out)
    measured = measure_head(plan.out.name, head, held_out_lessons(teacher, held_out, plan.course))
    shutil.rmtree(plan.work)
    return [measured]


def smaller(plan: HeadPlan) -> dict[str, HeadPlan]:
    """The same with flags by which it takes less memory."""
    others = {"--batch 1": with_batch(plan, 1)}
    if plan.method == "eagle3" and plan.draft_vocab is None:
        others = {f"--draft-vocab {SMALL_VOCAB}": replace(plan, draft_vocab=SMALL_VOCAB), **others}
    return others


def head_needs(plan: HeadPlan) -> Needs:
    """The memory that a run takes."""
    target, course = ModelSize.read(plan.target), plan.course
    hidden, vocab_size = target.hidden_size, target.vocab_size
    num_taps = len(eagle3_taps(target.num_layers)) if plan.method in TAPPED else 1
    num_outputs = min(plan.draft_vocab or vocab_size, vocab_size)
    markov = vocab_size * plan.markov_rank(hidden)  # a table of it, of two
    layers = BLOCK_LAYERS * replace(target, intermediate_size=plan.inner or target.intermediate_size).layer_parameters
    output = {"eagle3": num_outputs * hidden, "mlp": vocab_size * hidden, "dspark": markov}.get(plan.method, 0)
    inner = {
        "eagle3": num_taps * hidden**2 + target.layer_parameters + hidden * (target.query_size + 2 * target.key_size),
        "mtp": 2 * hidden**2 + target.layer_parameters,
        "medusa": plan.depth * hidden**2,
        "mlp": vocab_size * hidden + 2 * hidden**2,
        "dflash": num_taps * hidden**2 + layers,
        "dspark": num_taps * hidden**2 + layers + markov,
    }[plan.method]
    shared = (2 - target.tied_embeddings) * target.kept_itemsize * vocab_size * hidden
    if plan.method in ("mtp", *TAPPED):
        shared += target.rotary_bytes
    rows = course.batch_size * NUM_ENDS * (plan.depth + (plan.method == "dflash"))
    scores = 3 * FLOAT * rows * target.num_heads * (course.length + plan.depth)
    windows = FLOAT * course.batch_size * course.length * ((2 * num_taps + 4) * hidden + 4 * target.query_size)
    return replace(
        lesson_needs(target, course.length, num_taps),
        trained=shared + trained_bytes(inner + output, output),
        losses=windows + rows * target.row_bytes + scores + logits_bytes(rows, num_outputs),
    )


def new_head(plan: HeadPlan, target: HeadTarget, stream: Tensor) -> tuple[dict[str, Any], HeadModule]:
    """Its config.json, and the head before its first step. `stream` is the corpus's tokens, [tokens]."""
    weights = target.weights
    hidden, vocab_size = weights.output.shape[1], len(weights.output)
    config: dict[str, Any] = {
        name: target.config[name] for name in SAME_AS_TARGET if target.config.get(name) is not None
    }
    config |= {"num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16"}
    head: HeadModule
    if plan.method == "eagle3":
        num_outputs = min(plan.draft_vocab or vocab_size, vocab_size)
        config |= {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": num_outputs,
            "target_hidden_size": hidden,
            "eagle_aux_hidden_state_layer_ids": list(eagle3_taps(weights.num_layers)),
            "norm_before_residual": True,
        }
        ids = None if num_outputs == vocab_size else likeliest_tokens(stream, vocab_size, num_outputs)
        head = Eagle3Module(config, weights, ids)
    elif plan.method == "mtp":
        config |= {
            "model_type": "mimo",
            "architectures": ["MiMoForCausalLM"],
            "num_nextn_predict_layers": 1,
            "attention_bias": True,
        }
        head = MtpModule(config, weights)
    elif plan.method in ("dflash", "dspark"):
        config |= _block_fields(plan, config, weights)
        head = (DSparkModule if plan.method == "dspark" else DFlashModule)(config, weights)
    elif plan.method == "medusa":
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "num_heads": plan.depth,
            "num_hidden_layers": 1,
            "hidden_size": hidden,
            "vocab_size": vocab_size,
            "original_lm_head": True,
            "medusa_fc_bias": True,
            "dtype": "bfloat16",
        }
        head = MedusaModule(config, weights)
    else:
        config = {
            "model_type": "mlp_speculator",
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "n_predict": plan.depth,
            "emb_dim": hidden,
            "inner_dim": hidden,
            "vocab_size": vocab_size,
            "tie_weights": True,
            "scale_input": True,
            "top_k_tokens_per_head": [1] * plan.depth,
            "dtype": "bfloat16",
        }
        head = MlpModule(config, weights)
    return config, randomised_head(head, target)


def _block_fields(plan: HeadPlan, config: Mapping[str, Any], target: TargetWeights) -> dict[str, Any]:
    """Of a block drafter, in the layout of its first checkpoints. The target has no id to spare for the mask: the head
    keeps a row of its own for it, behind the vocabulary."""
    hidden, is_dspark = target.output.shape[1], plan.method == "dspark"
    fields: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3DSparkModel" if is_dspark else "DFlashDraftModel"],
        "num_hidden_layers": BLOCK_LAYERS,
        "intermediate_size": plan.inner or config["intermediate_size"],
        "head_dim": config.get("head_dim") or hidden // config["num_attention_heads"],
        "num_target_layers": target.num_layers,
        "block_size": plan.depth if is_dspark else plan.depth + 1,
        "dflash_config": {
            "target_layer_ids": [layer - 1 for layer in eagle3_taps(target.num_layers)],
            "mask_token_id": len(target.output),
            "sample_from_anchor": is_dspark,
        },
    }
    if is_dspark:
        fields |= {"markov_rank": plan.markov_rank(hidden), "markov_head_type": "vanilla"}
        fields |= {"confidence_head_with_markov": True}
    return fields


@torch.no_grad()
def randomised_head(head: HeadModule, target: HeadTarget, seed: int = 0) -> HeadModule:
    """The head with random weights, but that what writes to its residual stream is zero, and that it reads its last
    state as the target does; less loudly where that would make a random state sure of a token, as a Gemma's norm
    does: a head that begins with certainties unlearns them first."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(head.named_parameters()):
        if name.endswith((*WRITES, ".bias")) or name.startswith(("blocks.", "confidence_head.")):
            weight.zero_()
        elif name == "lm_head.weight":
            weight.copy_(target.weights.output[getattr(head, "_ids", None) if hasattr(head, "d2t") else slice(None)])
        elif name == "norm.weight" or name.endswith("final_layernorm.weight"):
            weight.copy_(target.norm * min(1.0, MOST_SPREAD / spread(target)))
        elif weight.ndim == 2:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    return head.train()


def spread(target: HeadTarget) -> float:
    """The standard deviation of the logits that the target's last norm and output make of random states."""
    rows = target.weights.output[:: max(1, len(target.weights.output) // 4096)].float() * target.norm  # [some, hidden]
    return float(rows.square().sum(1).mean().sqrt())


def eagle3_taps(num_layers: int) -> tuple[int, ...]:
    """The usual three; fewer of a target that is not deep enough."""
    return tuple(dict.fromkeys(min(max(layer, 0), num_layers) for layer in default_taps(num_layers)))


def likeliest_tokens(stream: Tensor, vocab_size: int, count: int) -> Tensor:  # [tokens] -> [count], ascending
    """The tokens that stand there most often."""
    counts = torch.bincount(stream, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def head_loss(head: HeadModule, num_tokens: int, num_ends: int = NUM_ENDS) -> Callable[[Lesson], Tensor]:
    """The head's loss on a lesson: how far it is from the target after ends that are drawn for each lesson anew."""
    says = head.language_head

    def loss(lesson: Lesson) -> Tensor:
        ends = chosen_ends(lesson, num_tokens, num_ends, first=1)
        with fast_products():
            states = head(lesson.ids[:, :-1], lesson.features.float(), ends, num_tokens)
        places = ends[:, None] + torch.arange(num_tokens)
        return window_loss(lesson, places, says, states, DistillWeights(), head.sureness)

    return loss


def export_head(config: Mapping[str, Any], head: HeadModule, folder: Path) -> None:
    """Writes the folder, whole or not at all: config.json and bfloat16 safetensors."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.rename(folder)


def measure_head(name: str, head: HeadModule, lessons: HeldOut) -> DraftAcceptance:
    """What holds of its drafts where the target writes."""
    head.eval()
    says = head.language_head
    return acceptance_of(name, lessons, lambda lesson, greedy: _accepted(head, says, lesson, greedy))


@torch.no_grad()
def _accepted(head: HeadModule, says: LanguageHead, lesson: Lesson, greedy: bool) -> Tensor:  # [ends, tokens]
    """Of a lesson of one window, as `acceptance`."""
    num_tokens = min(MEASURED_TOKENS, head.most_tokens or MEASURED_TOKENS)
    ends = measured_ends(lesson.ids.shape[1] - 1)
    states = head(lesson.ids[:, :-1], lesson.features.float(), ends, num_tokens)
    return acceptance(lesson, ends[:, None] + torch.arange(num_tokens), says, states, greedy)[0]
