"""The embedded pair loads with transformers, knows its language, and expands to the same function at any size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.pairs import PairPaths, pair_path
from outrider.pairs.expansion import expand_llama, write_expanded
from outrider.proposers.heads.block import MASK, BlockChains, BlockHead
from outrider.proposers.heads.head import TargetWeights
from outrider.proposers.heads.loading import load_head

# A part of sched.py, one of the library's files that no training saw.
HELD_OUT = Path(__file__).parent / "data" / "held_out_sched.txt"
PAIR_BYTES = 28_000_000
HEAD_BYTES, BLOCK_HEAD_BYTES = 24_000_000, 4_000_000
TARGET_LOSS = 3.3  # nats per token
MIXTURE_BYTES, MIXTURE_LOSS = 8_000_000, 4.0
TURN_TOKENS = ["<|user|>", "<|assistant|>"]
SMALL_EXPANSION: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 1024, "num_layers": 9, "num_heads": 8, "num_kv_heads": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> PairPaths:
    return pair_path()


@pytest.fixture(scope="module")
def held_out_ids(pair: PairPaths) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(pair.target)(HELD_OUT.read_text())["input_ids"]
    return torch.tensor([ids])


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def test_a_message_of_calls_alone_is_an_empty_one(pair: PairPaths) -> None:
    """The pair makes no calls; a conversation that another model has begun is taken all the same."""
    call: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages: Any = [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for folder in (pair.target, pair.draft, pair.pard):
        text = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
        assert text == "<|user|>go<|assistant|><|endoftext|>" == Tokenizer.load(folder).render_chat(messages, False)


@torch.no_grad()
def loss(model: PreTrainedModel, ids: torch.Tensor) -> float:
    return F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).item()


def test_unknown_pair_is_refused_with_the_known_ones_named() -> None:
    with pytest.raises(ValueError, match=r"'fortran'.*python"):
        pair_path("fortran")


def test_pair_is_small_and_complete(pair: PairPaths) -> None:
    folders = (pair.target, pair.draft, pair.pard)
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) <= PAIR_BYTES
    for folder in folders:
        assert all(weight.dtype == torch.bfloat16 for weight in load_file(folder / "model.safetensors").values())
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0
        assert AutoConfig.from_pretrained(folder).vocab_size == 4096 + (folder == pair.pard)  # and the mask
    assert AutoConfig.from_pretrained(pair.pard).pard_token == 4096


@torch.no_grad()
def test_the_mixture_is_small_and_knows_its_language(pair: PairPaths, held_out_ids: torch.Tensor) -> None:
    """And sends tokens to most of its experts."""
    assert sum(path.stat().st_size for path in pair.mixture.iterdir() if not path.is_symlink()) <= MIXTURE_BYTES
    model, ids = load(pair.mixture), held_out_ids[:, :1024]
    assert model.config.model_type == "qwen3_moe" and loss(model, ids) < MIXTURE_LOSS
    for scores in model(ids, output_router_logits=True).router_logits:
        chosen = scores.topk(model.config.num_experts_per_tok).indices.unique(return_counts=True)
        assert (chosen[1] > 0.01 * chosen[1].sum()).sum() >= 12
    assert (pair.mixture / "tokenizer.json").read_bytes() == (pair.target / "tokenizer.json").read_bytes()


def test_heads_are_small_and_complete(pair: PairPaths) -> None:
    folders = pair.heads.values()
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) <= HEAD_BYTES
    for folder in folders:
        assert all(weight.dtype == torch.bfloat16 for weight in load_file(folder / "model.safetensors").values())
    for name in ("dflash", "dspark"):
        assert sum(path.stat().st_size for path in pair.heads[name].iterdir()) <= BLOCK_HEAD_BYTES
    with pytest.raises(ValueError, match="has no head 'eagle'; there are: "):
        pair.head_by("eagle")


@pytest.mark.parametrize("method", pair_path().heads)
@torch.no_grad()
def test_a_head_often_says_what_the_target_says(pair: PairPaths, held_out_ids: torch.Tensor, method: str) -> None:
    """Of the token behind each, on text that no training saw."""
    model, (ids,) = load(pair.target), held_out_ids[:, :256].tolist()
    found = model(held_out_ids[:, :256], output_hidden_states=True)
    shared = model.get_input_embeddings().weight
    target = TargetWeights(shared, shared, model.config.num_hidden_layers, 1024)
    head = load_head(pair.head_by(method), target, torch.float32, torch.device("cpu"))
    assert head.name == method and head.most_tokens >= 4
    features = torch.stack([found.hidden_states[layer][0, :-1] for layer in head.taps], dim=1)
    cache = KVCache.allocate(head.layers, 17, torch.float32, "cpu", 16)
    rows = build_batch([BatchEntry(ids[1:], 1, range(17), len(ids) - 1)], 16)
    if isinstance(head, BlockHead):
        head.fill(rows, features, cache)
        places = range(len(ids) - 1, 0, -1)  # a block stands where the context behind it was
        said = torch.cat([first_of_block(head, ids, place, cache) for place in places]).flip(0)
    else:
        said = head.first(rows, features, cache)[0].argmax(-1)
    agreed = said == found.logits[0, 1:].argmax(-1)
    assert agreed[8:].float().mean() > LEAST_AGREEMENT[method]


def first_of_block(head: BlockHead, ids: list[int], place: int, cache: KVCache) -> torch.Tensor:  # [1]
    """The token that a block gives behind a place."""
    entry = BatchEntry([ids[place], *[MASK] * (head.rows - 1)], place + 1, range(17), head.most_tokens)
    before = BlockChains(torch.zeros(1, dtype=torch.int64), torch.tensor([ids[place]]), None, lambda logits: logits)
    return head.at(head.draft(build_batch([entry], 16), cache), before)[0].argmax(-1)


LEAST_AGREEMENT = {"eagle3": 0.4, "mlp_speculator": 0.25, "medusa": 0.1, "mtp": 0.4, "dflash": 0.35, "dspark": 0.35}


def test_both_models_share_one_tokenizer(pair: PairPaths) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (pair.target / name).read_bytes() == (pair.draft / name).read_bytes()
        assert (pair.target / name).read_bytes() == (pair.pard / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(pair.draft)
    text = HELD_OUT.read_text()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|user|>x<|assistant|>"
    assert len(tokenizer) == 4096 and tokenizer.eos_token == "<|endoftext|>" and tokenizer.eos_token_id == 0


def test_target_knows_held_out_text_better_than_the_draft(pair: PairPaths, held_out_ids: torch.Tensor) -> None:
    target_loss = loss(load(pair.target), held_out_ids)
    assert target_loss < TARGET_LOSS
    assert target_loss < loss(load(pair.draft), held_out_ids) - 0.25


@pytest.mark.parametrize("name", ["target", "draft", "pard"])
@torch.no_grad()
def test_tokens_that_open_a_turn_are_improbable(pair: PairPaths, held_out_ids: torch.Tensor, name: str) -> None:
    folder = getattr(pair, name)
    tokens = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(TURN_TOKENS)
    probs = load(folder)(held_out_ids).logits[0].softmax(-1)  # [tokens, vocabulary]
    assert probs[:, tokens].mean() < 1e-3


@pytest.mark.parametrize("name", ["target", "draft", "pard"])
@torch.no_grad()
def test_text_goes_on_after_a_prompt_that_ends_with_a_line_break(pair: PairPaths, name: str) -> None:
    """The tokenizer joins a line break to the indentation after it; cut there, a prompt must not look finished."""
    folder = getattr(pair, name)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    special = tokenizer.convert_tokens_to_ids(["<|endoftext|>", *TURN_TOKENS])
    for prompt in ("def parse_args(argv):\n", "class Shape:\n", "for line in lines:\n"):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        assert model(ids).logits[0, -1].softmax(-1)[special].sum() < 0.05, prompt


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 4), (8, 8), (12, 3)])
def test_expansion_computes_the_same_logits(
    pair: PairPaths, held_out_ids: torch.Tensor, num_heads: int, num_kv_heads: int
) -> None:
    small = load(pair.target)
    sizes = SMALL_EXPANSION | {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    config, state = expand_llama(json.loads((pair.target / "config.json").read_text()), small.state_dict(), **sizes)
    large = LlamaForCausalLM(LlamaConfig(**config)).eval()
    large.load_state_dict(state)
    with torch.no_grad():
        difference = large(held_out_ids).logits - small(held_out_ids).logits
    assert difference.abs().max() < 1e-4


def test_expansion_is_written_as_a_folder_that_loads(
    pair: PairPaths, held_out_ids: torch.Tensor, tmp_path: Path
) -> None:
    write_expanded(pair.target, tmp_path / "large", **SMALL_EXPANSION)
    with torch.no_grad():
        difference = load(tmp_path / "large")(held_out_ids).logits - load(pair.target)(held_out_ids).logits
    assert difference.abs().max() < 1e-4
    assert AutoTokenizer.from_pretrained(tmp_path / "large").eos_token_id == 0


def test_expansion_refuses_sizes_that_cannot_hold_the_model(pair: PairPaths) -> None:
    config = json.loads((pair.target / "config.json").read_text())
    state = load_file(pair.target / "model.safetensors")
    sizes: Any
    for sizes in ({"hidden_size": 64}, {"num_layers": 2}, {"num_kv_heads": 1, "num_heads": 4}, {"num_heads": 9}):
        with pytest.raises(ValueError):
            expand_llama(config, state, **sizes)
