"""Make the embedded pair's mixture of experts: `python -m outrider.training.mixture`.

A second target of the pair, by its tokenizer and on its corpus, in which a router sends each token to 4 of 16 experts
(Qwen3-MoE's layout), trained on the text and, that no expert is left idle, on the balance of its routers (Fedus et al.,
arXiv 2101.03961, section 2.2). It is a model to test and to try mixtures with; the pair's drafts draft for it, too.
"""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from outrider.pairs import pair_path
from outrider.training.corpus import read_sources, split_sources, tokenize
from outrider.training.pair import add_arguments
from outrider.training.tokenizer import save_tokenizer
from outrider.training.train import Loss, TrainPlan, corpus_batches, train

SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384, "moe_intermediate_size": 96,
    "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 1024, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
PLAN = TrainPlan(steps=1000, decay_steps=500, phases=((0, 256),), tokens_per_step=4096, vector_lr=0.003, seed=3)
BALANCE = 0.01  # weight of the routers' loss


def new_mixture(shape: Mapping[str, Any] = SHAPE, seed: int = 0) -> Qwen3MoeForCausalLM:
    """A model of random float32 weights, in which what writes to the residual stream is zero."""
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shape, "dtype": "float32"})).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if name.endswith(("o_proj.weight", "down_proj")):
                weight.zero_()
            elif weight.ndim >= 2:
                weight.normal_(0.0, 0.02 if "embed" in name else weight.shape[-1] ** -0.5, generator=generator)
    return model


def balanced_loss(model: Qwen3MoeForCausalLM) -> Loss:
    """The mean negative log-likelihood of each window's next tokens, and a little of how unevenly experts are used."""

    def loss(windows: Tensor) -> Tensor:
        found = model(windows[:, :-1], use_cache=False, output_router_logits=True)
        text = F.cross_entropy(found.logits.flatten(0, 1), windows[:, 1:].flatten())
        balanced: Tensor = text + BALANCE * found.aux_loss
        return balanced

    return loss


def export_mixture(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a folder, in bfloat16, by the names that checkpoints of Qwen3-MoE have."""
    model.bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m outrider.training.mixture", description=__doc__)
    add_arguments(parser, output=Path("build/pair/mixture"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(pair_path("python").target / "tokenizer.json"))
    corpus = tokenize(tokenizer, *split_sources(read_sources(options.sources)))
    model = new_mixture()
    batches = corpus_batches(PLAN, corpus.train)
    train(model, balanced_loss(model), PLAN, batches, options.work / "mixture.safetensors")
    export_mixture(model, tokenizer, options.output)


if __name__ == "__main__":
    main()
