"""llama.cpp behind its Python bindings' C functions, for peers.py and for the tests on a real model: batches of streams
in one llama_decode, its own speculation (a drafted token is kept while it is what the target samples), logits.

As a script it makes a file of another kind: PYTHON peers_llama.py KIND FROM.gguf|FOLDER TO.gguf. Nothing of Outrider is
imported."""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

CONTEXT = 1024
# GGUF's names of a Llama's tensors, and how safetensors hold their numbers.
TOP = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
DTYPES = {"F32": "<f4", "BF16": "<u2"}
KINDS = {"F32": 0, "Q4_0": 2, "Q8_0": 7, "Q4_K_S": 14, "Q4_K_M": 15}  # numbers of llama_ftype
CONTROL, NORMAL = 3, 1  # kinds of a vocabulary's tokens
F32 = 0  # the type of a cache
Position = tuple[int, int, int]  # token, its place, its stream


class LlamaCpp:
    """A model and one context of `streams` sequences. `exact`: the cache in float32, without flash attention."""

    def __init__(self, path: Path, threads: int, streams: int, *, context: int = CONTEXT, exact: bool = False) -> None:
        from llama_cpp import llama_cpp as library

        self._library = library
        self._quiet = library.llama_log_callback(lambda level, text, data: None)
        library.llama_log_set(self._quiet, None)
        options = library.llama_model_default_params()
        if hasattr(options, "use_mmap"):
            options.use_mmap = False  # mapped pages may go while it stands still
        self._model = library.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        wanted = library.llama_context_default_params()
        wanted.n_ctx, wanted.n_seq_max = context * streams, streams
        wanted.n_batch = wanted.n_ubatch = max(512, context)
        wanted.n_threads = wanted.n_threads_batch = threads
        if exact:
            wanted.type_k = wanted.type_v = F32
            wanted.flash_attn_type = 0
        self._context = library.llama_init_from_model(self._model, wanted)
        if not self._context:
            raise ValueError(f"llama.cpp makes no context of {streams} streams of {context} tokens for {path}")
        self._memory = library.llama_get_memory(self._context)
        self.vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(max(512, context), 0, 1)
        self._samplers: list[Any] = []

    def reset(self, temperature: float = 0.0, seeds: Sequence[int] = ()) -> None:
        """Empties the cache; a sampler for each seed."""
        self._library.llama_memory_clear(self._memory, True)
        for sampler in self._samplers:
            self._library.llama_sampler_free(sampler)
        self._samplers = [self._sampler(temperature, seed) for seed in seeds]

    def _sampler(self, temperature: float, seed: int) -> Any:
        library = self._library
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        if temperature:
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_temp(temperature))
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_dist(seed & 0xFFFFFFFF))
        else:
            library.llama_sampler_chain_add(chain, library.llama_sampler_init_greedy())
        return chain

    def decode(self, positions: Sequence[Position], wanted: Sequence[int]) -> None:
        """A step; logits are kept of the rows `wanted`."""
        batch = self._batch
        batch.n_tokens = len(positions)
        for row, (token, place, stream) in enumerate(positions):
            batch.token[row], batch.pos[row] = token, place
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, stream
            batch.logits[row] = 0
        for row in wanted:
            batch.logits[row] = 1
        if status := self._library.llama_decode(self._context, batch):
            raise ValueError(f"llama_decode says {status} to {len(positions)} rows")

    def sample(self, stream: int, row: int) -> int:
        """Of a row of the last step."""
        return int(self._library.llama_sampler_sample(self._samplers[stream], self._context, row))

    def forget(self, stream: int, place: int) -> None:
        """All of a stream from a place on."""
        self._library.llama_memory_seq_rm(self._memory, stream, place, -1)

    def logits(self, ids: Sequence[int]) -> Any:
        """Of every token of a text by itself: [tokens, vocab] float32."""
        import numpy as np

        self.reset()
        self.decode([(token, place, 0) for place, token in enumerate(ids)], range(len(ids)))
        rows = [self._library.llama_get_logits_ith(self._context, row) for row in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(row, shape=(self.vocab_size,)).copy() for row in rows])


def generate(model: LlamaCpp, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Plain decoding of all prompts at once, a row of each a step."""
    tokens: list[list[int]] = []
    for stream, ids in enumerate(prompts):
        model.decode([(token, place, stream) for place, token in enumerate(ids)], [len(ids) - 1])
        tokens.append([model.sample(stream, -1)])
    for step in range(max_tokens - 1):
        model.decode(
            [(tokens[stream][-1], len(ids) + step, stream) for stream, ids in enumerate(prompts)], range(len(prompts))
        )
        for stream in range(len(prompts)):
            tokens[stream].append(model.sample(stream, stream))
    return tokens


def speculate(model: LlamaCpp, draft: LlamaCpp, prompt: Sequence[int], max_tokens: int, k: int) -> list[int]:
    """One stream with a draft model, which drafts `k` tokens greedily each round."""
    text = list(prompt)
    for engine in (model, draft):  # the last token is the next step's first
        engine.decode([(token, place, 0) for place, token in enumerate(text[:-1])], [len(text) - 2])
    known = len(text) - 1  # of the draft's cache
    while len(text) < len(prompt) + max_tokens:
        start, drafted = len(text) - 1, list[int]()
        behind = [(token, known + row, 0) for row, token in enumerate(text[known:])]
        draft.decode(behind, [len(behind) - 1])
        drafted.append(draft.sample(0, -1))
        for step in range(1, k):
            draft.decode([(drafted[-1], start + step, 0)], [0])
            drafted.append(draft.sample(0, -1))
        rows = [text[-1], *drafted]
        model.decode([(token, start + row, 0) for row, token in enumerate(rows)], range(len(rows)))
        for row in range(len(rows)):
            text.append(model.sample(0, row))
            if row == k or text[-1] != drafted[row]:
                break
        known = min(len(text) - 1, start + k)  # drafted tokens that were kept are in its cache
        draft.forget(0, known)
        model.forget(0, len(text) - 1)
    return text[len(prompt) : len(prompt) + max_tokens]


def make(mode: str, target: Path, draft: Path, threads: int, k: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The handler of peers.py; folders are written as GGUF in float32. Mode logits answers {"ids", "path"} with a file
    of NumPy's."""
    import llama_cpp  # noqa: F401  # who lacks it learns so before a file is written

    with tempfile.TemporaryDirectory(prefix="outrider-gguf-") as folder:
        model = LlamaCpp(as_file(target, Path(folder)), threads, STREAMS[mode], exact=mode == "logits")
        drafts = LlamaCpp(as_file(draft, Path(folder)), threads, 1) if mode == "draft" else None

    def logits(question: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        np.save(question["path"], model.logits(question["ids"]))
        return {}

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        prompts, seed = question["prompts"], question["seed"] * 1000
        model.reset(question["temperature"], range(seed, seed + len(prompts)))
        if drafts is not None:
            drafts.reset(seeds=[seed])
        started = time.perf_counter()
        if drafts is None:
            tokens = generate(model, prompts, question["max_tokens"])
        else:
            tokens = [speculate(model, drafts, prompts[0], question["max_tokens"], k)]
        return {"seconds": time.perf_counter() - started, "num_tokens": sum(map(len, tokens)), "tokens": tokens}

    return logits if mode == "logits" else handle, {"max_batch": STREAMS[mode]}


STREAMS = {"plain": 16, "draft": 1, "logits": 1}  # at once, by mode


def as_file(model: Path, folder: Path) -> Path:
    """A GGUF file as it is, a checkpoint's folder as one in float32."""
    return model if model.is_file() else write_gguf(model, Path(tempfile.mkstemp(suffix=".gguf", dir=folder)[1]))


def quantize(kind: str, source: Path, path: Path) -> None:
    """Writes what llama.cpp makes of a file in `kind`."""
    from llama_cpp import llama_cpp as library

    options = library.llama_model_quantize_default_params()
    options.ftype, options.nthread, options.allow_requantize = KINDS[kind], 2, True
    if status := library.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options)):
        raise ValueError(f"llama_model_quantize says {status} to {source}")


def write_gguf(folder: Path, path: Path) -> Path:
    """Converts a Llama's checkpoint to GGUF in float32, with the vocabulary of its tokenizer.json."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{folder}: model_type is {config['model_type']}; only llama can be written")
    if config.get("rope_scaling") or "rope_theta" not in config:
        raise ValueError(f"{folder}: only a plain rope_theta can be written")
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    for set_value, value in (
        (writer.add_block_count, config["num_hidden_layers"]),
        (writer.add_context_length, config["max_position_embeddings"]),
        (writer.add_embedding_length, config["hidden_size"]),
        (writer.add_feed_forward_length, config["intermediate_size"]),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, kv_heads),
        (writer.add_key_length, head_dim),
        (writer.add_value_length, head_dim),
        (writer.add_rope_dimension_count, head_dim),
        (writer.add_rope_freq_base, config["rope_theta"]),
        (writer.add_layer_norm_rms_eps, config["rms_norm_eps"]),
        (writer.add_vocab_size, config["vocab_size"]),
    ):
        set_value(value)
    _add_vocabulary(writer, folder, config)
    for name, tensor in _tensors(folder):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleave(tensor, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(_renamed(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """Of a byte-level BPE. How it splits words is not said: what is measured is given as ids."""
    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {number: token for token, number in said["model"]["vocab"].items()}
    tokens |= {added["id"]: added["content"] for added in said["added_tokens"]}
    special = {added["id"] for added in said["added_tokens"]}
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(number, f"<unused{number}>") for number in range(size)])
    writer.add_token_types([CONTROL if number in special else NORMAL for number in range(size)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in said["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_add_bos_token(False)


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of the safetensors files, as float32."""
    import numpy as np

    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            raw = np.frombuffer(data[start + first : start + last], DTYPES[entry["dtype"]])
            wide = raw if entry["dtype"] == "F32" else (raw.astype("<u4") << 16).view("<f4")
            yield name, wide.reshape(entry["shape"])


def _renamed(name: str) -> str:
    if name in TOP:
        return f"{TOP[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{LAYER[part.removesuffix('.weight')]}.weight"


def _interleave(weight: Any, heads: int) -> Any:
    """[heads x head_dim, in]: the two halves of each head that rotary embedding pairs, alternating."""
    outputs, inputs = weight.shape
    return weight.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def main(argv: Sequence[str]) -> int:
    """Writes the file."""
    kind, source, path = argv[0], Path(argv[1]), Path(argv[2])
    with tempfile.TemporaryDirectory(prefix="outrider-gguf-") as folder:
        quantize(kind, as_file(source, Path(folder)), path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
