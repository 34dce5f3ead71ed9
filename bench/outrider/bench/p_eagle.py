"""How long a P-EAGLE head drafts, beside the draft model:

    python -m outrider.bench.p_eagle [--layers 1 2 4] [--num-draft-tokens 4] [--repeats 3]
    python -m outrider.bench.p_eagle --save DIR [--layers 4]      # the head alone, for any other command

The head has random weights and the shape of the embedded pair's EAGLE-3 head, with that many layers: what it drafts is
refused, how long it takes follows from the shape. A trained head takes in as many rows more a round as it has tokens
accepted. It and the draft model are asked the same prompts in turn, as `outrider compare` does, with as many tokens
drafted in every round. Prints a table in Markdown."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.bench.command import note, report_failures
from outrider.bench.compare.__main__ import CompareSettings, run
from outrider.bench.prompts import PROMPTS
from outrider.bench.results import Json, bracketed, markdown, other_programs
from outrider.engine import checkpoint
from outrider.pairs import pair_path

MASK_TOKEN = 1
WAYS = {"draft_model, sequential": "draft_model", "eagle3, sequential": "P-EAGLE"}


def save_head(folder: Path, num_layers: int, seed: int = 0) -> Path:
    """A P-EAGLE head of random weights, bfloat16 as the pair's other heads."""
    mould = pair_path().head_by("eagle3")
    config = checkpoint.read_config(mould) | {
        "num_hidden_layers": num_layers,
        "parallel_drafting": True,
        "ptd_token_id": MASK_TOKEN,
    }
    shapes = {
        name.replace("midlayer.", "layers.0."): tuple(tensor.shape)
        for name, tensor in checkpoint.read_tensors(checkpoint.weight_files(mould)).items()
    }
    hidden = config["hidden_size"]
    for name, shape in list(shapes.items()):
        if name.startswith("layers.0.") and not name.endswith("hidden_norm.weight"):
            for index in range(1, num_layers):  # which do not see the token beside the state
                inputs = hidden if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else shape[-1]
                shapes[name.replace(".0.", f".{index}.", 1)] = (*shape[:-1], inputs)
    shapes["mask_hidden"] = (1, 1, shapes["fc.weight"][1])
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({name: _random(shape, generator) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:  # of that shape
    """Of a norm ones, else what keeps the size of what it multiplies."""
    found = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return found.to(torch.bfloat16)


def measure(head: Path, folder: Path, options: argparse.Namespace) -> Json:
    """What `outrider compare` finds of the two. Raises ServiceFailed."""
    prompts = folder / "code.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS[: options.prompts]))
    settings = CompareSettings.model_validate(
        {
            "target": "python",
            "files": [prompts],
            "methods": ("draft_model", "eagle3"),
            "draft": [f"eagle3={head}"],
            "modes": ("sequential",),
            "num_draft_tokens": options.num_draft_tokens,
            "max_tokens": options.max_tokens,
            "repeats": options.repeats,
            "threads": options.threads,
        }
    )
    return asyncio.run(run(settings))


def table(results: Sequence[tuple[int, Json]]) -> Iterator[str]:
    """Medians, with the least and the greatest repeat in brackets."""
    cells = []
    for num_layers, result in results:
        (found,) = result["sets"]
        for way, name in WAYS.items():
            own = found["ways"][way]
            layers = str(num_layers) if name == "P-EAGLE" else ""
            cells.append((name, layers, bracketed(own["draft_ms"]), bracketed(own["tokens_per_round"])))
    return markdown(("drafts by", "layers", "drafting, ms a round", "tokens a round"), cells, words=(0, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if a service does not start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4], help="of the head (default: 1 2 4)")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="drafted a round (default: 4)")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many (default: all)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (default: 64)")
    parser.add_argument("--repeats", type=int, default=3, help="of every prompt (default: 3)")
    parser.add_argument("--threads", type=int, default=None, help="of the target (default: all cores)")
    parser.add_argument("--save", type=Path, default=None, help="write the head there, and measure nothing")
    options = parser.parse_args(argv)

    def work() -> int:
        if options.save is not None:
            save_head(options.save, options.layers[0])
            return 0
        results = []
        for num_layers in options.layers:
            note(f"a head of {num_layers} layers")
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                results.append((num_layers, measure(save_head(folder / "head", num_layers), folder, options)))
        print("\n".join(table(results)))
        print(f"\n{options.num_draft_tokens} tokens drafted a round; medians of {options.repeats}, least and greatest")
        print("\n".join(f"{layers} layers: {other_programs(result['other_programs'])}" for layers, result in results))
        return 0

    return report_failures("outrider.bench.p_eagle", work)


if __name__ == "__main__":
    sys.exit(main())
