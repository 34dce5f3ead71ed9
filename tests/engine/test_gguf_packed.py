"""A GGUF file's matrices stay packed in our decoder, whose pass is that of their numbers: on a CPU, and by Triton."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_models import as_gguf
from support.quantized import BLOCKS, random_blocks
from torch import Tensor

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.gguf_state import GgufState
from outrider.engine.kv_cache import KVCache
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.decoder_config import parse_config
from outrider.engine.models.decoder_cpu import NativeDecoder
from outrider.engine.models.products import StackedLinear
from outrider.gguf.config import config_of
from outrider.gguf.header import KINDS, BlockKind, GgufHeader, TensorPlace, WrongGguf, read_gguf
from outrider.kernels.cpu.decoder import Kind as Layout
from outrider.kernels.cpu.library import cpu_library

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C kernels")

HIDDEN, WIDTH, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 256, 512, 4, 2, 64, 99, 2
KINDS_BY_NAME = {kind.name: kind for kind in KINDS.values()}
MIX = ("Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q4_K", "MXFP4", "F16")


def header_of(folder: Path, architecture: str) -> GgufHeader:
    """A file of random tensors of several kinds, without the header that would say so."""
    rows = {
        "attn_q": (HEADS * DIM, HIDDEN), "attn_k": (KV_HEADS * DIM, HIDDEN), "attn_v": (KV_HEADS * DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * DIM), "ffn_gate": (WIDTH, HIDDEN), "ffn_up": (WIDTH, HIDDEN),
        "ffn_down": (HIDDEN, WIDTH),
    }  # fmt: skip
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    if architecture == "phi3":
        del rows["attn_q"], rows["attn_k"], rows["attn_v"], rows["ffn_gate"]
        rows |= {"attn_qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), "ffn_up": (2 * WIDTH, HIDDEN)}
    if architecture == "gemma3":
        norms |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN, "attn_q_norm": DIM, "attn_k_norm": DIM}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in rows.items()}
        shapes |= {f"blk.{layer}.{name}.weight": (size,) for name, size in norms.items()}
    path, places = folder / "model.bin", {}
    with path.open("wb") as file:
        for index, (name, shape) in enumerate(shapes.items()):
            kind = KINDS_BY_NAME["F32" if len(shape) == 1 else MIX[index % len(MIX)]]
            data = stored(kind, shape, index)
            places[name] = TensorPlace(name, shape, kind, path, file.tell(), len(data))
            file.write(data)
    return GgufHeader(metadata_of(architecture), places, (path,))


def metadata_of(architecture: str) -> dict[str, Any]:
    keys = {
        "embedding_length": HIDDEN, "feed_forward_length": WIDTH, "block_count": LAYERS, "context_length": 128,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 16,
    }  # fmt: skip
    if architecture == "llama":
        del keys["attention.sliding_window"]
    if architecture == "phi3":
        keys["rope.dimension_count"] = DIM // 2  # of which the rest does not turn
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in keys.items()}


def stored(kind: BlockKind, shape: tuple[int, ...], seed: int) -> bytes:
    """A tensor of random numbers."""
    if kind.name in BLOCKS:
        return random_blocks(kind.name, shape[0], shape[1], seed).numpy().tobytes()
    numbers = torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(seed)) * 0.05
    numbers = numbers + 1 if len(shape) == 1 else numbers
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
    return numbers.to(dtype).view(torch.uint8).numpy().tobytes()


def logits_of(model: NativeDecoder | Decoder, num_rows: int) -> Tensor:
    """Of every row of one sequence."""
    ids = [7 * at % VOCAB for at in range(num_rows)]
    batch = build_batch([BatchEntry(ids, 0, list(range(8)), num_rows)], 16, model.device)
    return model.forward(batch, KVCache.allocate(model.layers, 8, torch.float32, model.device, 16)).cpu()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_a_file_stays_packed(architecture: str, tmp_path: Path) -> None:
    header = header_of(tmp_path, architecture)
    state, config = GgufState(header), parse_config(config_of(header))
    packed, decoded = NativeDecoder(config, state), NativeDecoder(config, {name: state[name] for name in state})
    for rows in (1, 20, 60):
        torch.testing.assert_close(logits_of(packed, rows), logits_of(decoded, rows), atol=1e-4, rtol=1e-4)
    kinds = {packed.kernel._layers[0].down.kind, packed.kernel._layers[1].qkv.kind, packed.kernel._decoder.head.kind}
    assert Layout.PACKED in kinds
    assert {decoded.kernel._layers[layer].down.kind for layer in range(LAYERS)} <= {Layout.FLOATS, Layout.FLOAT16}


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_numbers_of_16_bits_stay_so(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings, products and head, to the bits of the same numbers as float32."""
    monkeypatch.setattr(f"{__name__}.MIX", (kind,))
    header = header_of(tmp_path, "llama")
    state, config = GgufState(header), parse_config(config_of(header))
    kept, wide = NativeDecoder(config, state), NativeDecoder(config, {name: state[name].float() for name in state})
    layout = Layout.FLOAT16 if kind == "F16" else Layout.HALVES
    matrices = [
        getattr(layer, name) for layer in kept.kernel._layers for name in ("qkv", "output", "gate", "up", "down")
    ]
    assert {matrix.kind for matrix in matrices} == {layout} == {kept.kernel._decoder.head.kind}
    assert kept.kernel._decoder.embeddings_kind == layout
    if kind == "F16":  # others may be multiplied by the matrix unit there
        assert wide.kernel._decoder.head.kind == Layout.FLOATS
        for rows in (1, 3, 20, 60):
            assert torch.equal(logits_of(kept, rows), logits_of(wide, rows))


def test_a_file_stays_packed_by_triton(tmp_path: Path, triton_everywhere: torch.device) -> None:
    """Whose queries, keys and values are of several kinds."""
    header = header_of(tmp_path, "llama")
    state, config = GgufState(header), parse_config(config_of(header))
    numbers = {name: state[name] for name in state}
    packed, decoded = (
        Decoder(config, each, dtype=torch.float32, device=triton_everywhere) for each in (state, numbers)
    )
    assert isinstance(packed._blocks[0]._block._qkv, StackedLinear) and packed.embeddings is None
    torch.testing.assert_close(logits_of(packed, 9), logits_of(decoded, 9), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_what_is_packed_decodes_to_the_tensors(architecture: str, tmp_path: Path) -> None:
    state = GgufState(header_of(tmp_path, architecture))
    found = {name: matrix for name in state if (matrix := state.packed(name)) is not None}
    assert len(found) > 6 and all(torch.equal(matrix.decode(), state[name]) for name, matrix in found.items())


def test_a_draft_of_8_bits_is_rounded_from_the_numbers(tmp_path: Path) -> None:
    header = header_of(tmp_path, "llama")
    state, config = GgufState(header), parse_config(config_of(header))
    rounded = NativeDecoder(config, state, int8=True)
    decoded = NativeDecoder(config, {name: state[name] for name in state}, int8=True)
    assert rounded.kernel.kind is Layout.BYTES
    assert torch.equal(logits_of(rounded, 9), logits_of(decoded, 9))


def test_heads_that_do_not_share_their_rows_are_refused(tmp_path: Path) -> None:
    """By the tensor's name, before anything is turned back."""
    path, _ = as_gguf(tmp_path / "a.gguf", "llama", metadata={"llama.attention.head_count": 255})
    with pytest.raises(
        WrongGguf, match=r"blk\.0\.attn_q\.weight: has \d+ rows for 255 heads; allowed: a multiple of 510"
    ):
        GgufState(read_gguf(path))
