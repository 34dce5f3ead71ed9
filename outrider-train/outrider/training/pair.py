"""Make an embedded model pair from the standard library's sources: `python -m outrider.training.pair`.

The whole story in order: read the corpus, train the tokenizer, train the target on the text, settle it, distil the
draft from it on the text and on what the target writes, export both, and measure them on the held-out files. The
defaults are those of the pair that comes with the package; its card says where that run differed. Every long stage
goes on from its checkpoint in `--work`.
"""

import argparse
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.training.corpus import (
    Corpus,
    read_sources,
    split_line_breaks,
    split_sources,
    standard_library,
    tokenize,
)
from outrider.training.distill import (
    DistillWeights,
    WrittenPlan,
    distillation_loss,
    mixed_batches,
    write_pool,
)
from outrider.training.evaluate import Report, evaluate, load
from outrider.training.export import export
from outrider.training.model import LlamaShape, new_model
from outrider.training.repetition import RepetitionPlan, settle
from outrider.training.tokenizer import train_tokenizer
from outrider.training.train import Loss, TrainPlan, corpus_batches, save_tensors, text_loss, train

logger = logging.getLogger(__name__)

TARGET_SHAPE = LlamaShape(320, 896, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=64)
DRAFT_SHAPE = LlamaShape(160, 512, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32)
TARGET_PLAN = TrainPlan(steps=1400, decay_steps=600, phases=((0, 256), (1150, 512), (1320, 1024)))
REPETITION_PLAN = RepetitionPlan(
    TrainPlan(
        steps=192,
        decay_steps=187,
        phases=((0, 192),),
        warmup_steps=5,
        tokens_per_step=4096,
        matrix_lr=0.004,
        vector_lr=0.0006,
        seed=100,
    )
)
WRITTEN_PLAN = WrittenPlan(pool_windows=2048, fresh_from=1400)
DRAFT_PLAN = TrainPlan(
    steps=2900, decay_steps=1450, phases=((0, 256), (2700, 512)), tokens_per_step=4096, vector_lr=0.004, seed=1
)
FINISH_WRITTEN_PLAN = WrittenPlan(pool_windows=0, fresh_from=0)
FINISH_PLAN = TrainPlan(
    steps=560, decay_steps=520, warmup_steps=20, tokens_per_step=4096, matrix_lr=0.01, vector_lr=0.002, seed=2
)
SPLIT_SHARE = 0.08
SPLIT_SEED = 7


@dataclass(frozen=True)
class PairBuild:
    """Where a run reads, keeps its checkpoints and writes, and whether it compiles the losses."""

    sources: Path
    work: Path
    output: Path
    compile: bool

    def prepare(self, loss: Loss) -> Loss:
        """The loss, compiled if this run compiles."""
        compiled: Loss = torch.compile(loss, dynamic=False) if self.compile else loss
        return compiled


def make_corpus(sources: Path) -> tuple[Tokenizer, Corpus]:
    """The tokenizer, trained on the training files alone, and both sides' token ids."""
    training_files, held_out_files = split_sources(read_sources(sources))
    tokenizer = train_tokenizer(file.text for file in training_files)
    corpus = tokenize(tokenizer, training_files, held_out_files)
    logger.info("%d training tokens, %d held out", corpus.train.numel(), corpus.num_held_out_tokens)
    return tokenizer, corpus


def make_target(build: PairBuild, stream: Tensor, split: Tensor) -> LlamaForCausalLM:
    """The target, trained on the text, and settled on the text with some line breaks split off."""
    target = new_model(TARGET_SHAPE, seed=0)
    batches = corpus_batches(TARGET_PLAN, stream)
    train(target, build.prepare(text_loss(target)), TARGET_PLAN, batches, build.work / "target.safetensors")
    settled = build.work / "settled.safetensors"
    if settled.exists():
        target.load_state_dict(load_file(settled))
    else:
        settle(target, split, REPETITION_PLAN, build.prepare)
        save_tensors(settled, target.state_dict())
    return target


def make_draft(build: PairBuild, target: LlamaForCausalLM, stream: Tensor, split: Tensor) -> LlamaForCausalLM:
    """The draft, distilled from the exported target on the corpus and on what the target writes."""
    draft = new_model(DRAFT_SHAPE, seed=1)
    pool = _pool(build.work / "written.safetensors", target, stream)
    corpus = corpus_batches(DRAFT_PLAN, stream)
    batches = mixed_batches(corpus, pool, target, stream, WRITTEN_PLAN, DRAFT_PLAN.tokens_per_step)
    loss = build.prepare(distillation_loss(draft, target, DistillWeights()))
    train(draft, loss, DRAFT_PLAN, batches, build.work / "draft.safetensors")
    finish_draft(build, draft, target, split)
    return draft


def finish_draft(build: PairBuild, draft: LlamaForCausalLM, target: LlamaForCausalLM, split: Tensor) -> None:
    """The draft's last steps, slower, on the text with some line breaks split off and on what is written after it."""
    corpus = corpus_batches(FINISH_PLAN, split)
    no_pool = torch.empty(0, dtype=torch.int64)
    batches = mixed_batches(corpus, no_pool, target, split, FINISH_WRITTEN_PLAN, FINISH_PLAN.tokens_per_step)
    loss = build.prepare(distillation_loss(draft, target, DistillWeights()))
    train(draft, loss, FINISH_PLAN, batches, build.work / "finished.safetensors")


def make_pair(build: PairBuild) -> Report:
    """The whole pair below `build.output`, and what it measures."""
    tokenizer, corpus = make_corpus(build.sources)
    split = split_line_breaks(tokenizer, corpus.train, SPLIT_SHARE, SPLIT_SEED)
    export(make_target(build, corpus.train, split), TARGET_SHAPE, tokenizer, build.output / "target")
    target = load(build.output / "target", torch.bfloat16)
    draft = make_draft(build, target, corpus.train, split)
    export(draft, DRAFT_SHAPE, tokenizer, build.output / "draft")
    return evaluate(build.output / "target", build.output / "draft", corpus.held_out)


def main() -> None:
    """The command line."""
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    build = PairBuild(options.sources, options.work, options.output, options.compile)
    report = make_pair(build)
    print(json.dumps(asdict(report) | _rates(report), indent=2))


def _pool(path: Path, target: LlamaForCausalLM, stream: Tensor) -> Tensor:
    if not path.exists():
        save_tensors(path, {"pool": write_pool(target, stream, WRITTEN_PLAN)})
    pool: Tensor = load_file(path)["pool"]
    return pool


def _rates(report: Report) -> dict[str, float]:
    return {
        "greedy_accepted_per_tested": report.greedy.per_tested,
        "greedy_accepted_per_drafted": report.greedy.per_drafted,
        "sampled_accepted_per_tested": report.sampled.per_tested,
        "sampled_accepted_per_drafted": report.sampled.per_drafted,
    }


def add_arguments(parser: argparse.ArgumentParser, output: Path) -> None:
    """What every making of embedded models is told."""
    parser.add_argument("--sources", type=Path, default=standard_library(), help="folder of Python sources to read")
    parser.add_argument("--work", type=Path, default=Path("build/pair/work"), help="folder of the checkpoints")
    parser.add_argument("--output", type=Path, default=output, help="folder to write to")
    parser.add_argument("--threads", type=int, default=2, help="threads of the products")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m outrider.training.pair", description=__doc__)
    add_arguments(parser, output=Path("build/pair/python"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
