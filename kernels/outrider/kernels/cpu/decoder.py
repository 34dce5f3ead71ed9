"""A decoder's pass on the CPU as one C function: norms, products, rotary embedding, paged attention and gate of all
layers, on threads that stay together. Everything is computed in float32.

Where all weights are bfloat16 numbers, as most checkpoints' are, they are read as 16 bits: half the memory traffic, the
same function; and multiplied by the processor's matrix unit (AMX) if it has one. Those of a checkpoint in float16 stay
so, too, on the processor's vectors. They may be rounded to 8 bits: half of that again, nearly the same function. Those
of a quantised checkpoint stay as packed as they were: the function of the numbers that they stand for. Every row's bits
depend on its own sequence alone: the pass is batch-invariant."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Iterator, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.cpu.library import cpu_library, cpu_library_name
from outrider.kernels.cpu.memory import in_huge_pages
from outrider.kernels.cpu.packed import Packing, can_pack, can_round, pack_quantized, packing_of
from outrider.kernels.layers.reference import int8_scales, to_int8
from outrider.kernels.quantized.form import QuantizedMatrix

PANEL = 32  # outputs whose weights lie together
DIM_MULTIPLE = 16  # of hidden sizes and heads
STEP = 32  # inputs that the matrix unit adds up at once
MOST_DIM = 256  # of a head
CHUNK = 1 << 20  # elements of a weight that are laid out at a time

log = logging.getLogger(__name__)


class Kind(IntEnum):
    """How weights lie in memory."""

    FLOATS = 0
    HALVES = 1  # bfloat16
    TILES = 2
    BYTES = 3  # rounded to integers of 8 bits, with a scale for each output
    PACKED = 4  # a quantised checkpoint's codes
    SECTIONS = 5  # matrices of several kinds, one below the other
    FLOAT16 = 6


_NUMBERS = {
    Kind.FLOATS: torch.float32, Kind.HALVES: torch.int16, Kind.TILES: torch.int16, Kind.BYTES: torch.int8,
    Kind.FLOAT16: torch.int16,
}  # fmt: skip
_TABLES = {torch.bfloat16: Kind.HALVES, torch.float16: Kind.FLOAT16}  # of embeddings; others become float32


Weight = Tensor | QuantizedMatrix  # [out, in], a tensor of any floating type
Weights = Weight | tuple[Weight, ...]  # several, one below the other, of whatever types


class Matrix(Structure):
    """A weight as the kernels read it."""

    _fields_ = (
        *((name, c_void_p) for name in ("panels", "bias", "scales")),
        *((name, c_int64) for name in ("outputs", "inputs", "kind")),
        ("packing", POINTER(Packing)), ("sections", c_void_p), ("num_sections", c_int64), ("rounds", c_int64),
    )  # fmt: skip


class _Expert(Structure):
    _fields_ = tuple((name, Matrix) for name in ("gate", "up", "down"))


class _Mixture(Structure):
    _fields_ = (
        ("router", Matrix), ("experts", POINTER(_Expert)),
        *((name, c_int64) for name in ("num_experts", "num_chosen", "normalised", "has_shared", "hidden", "widest")),
        ("slope", c_float), ("limit", c_float),
    )  # fmt: skip


class _Layer(Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "gate", "up", "down")), ("mixture", POINTER(_Mixture)),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "output_norm", "down_norm", "qk_norm")),
        ("norms_all_heads", c_int64), ("sinks", c_void_p), ("cos", c_void_p), ("sin", c_void_p),
        ("window", c_int64),
    )  # fmt: skip


class _Decoder(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")),
        ("gate_is_gelu", c_int64), *((name, c_float) for name in ("eps", "scale", "softcap", "logit_softcap")),
        ("layers", POINTER(_Layer)),
        ("embeddings", c_void_p), ("num_embeddings", c_int64), ("embeddings_kind", c_int64),
        ("embedding_scale", c_float), ("norm", c_void_p), ("head", Matrix), ("has_tiles", c_int64),
    )  # fmt: skip


class _Rows(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "sequences", "table_width", "longest", "block_size")),
        *((name, c_void_p) for name in ("positions", "slots", "tables", "starts", "contexts", "parents")),
        *((name, c_void_p) for name in ("keys", "values", "adapters")),
    )


@dataclass(frozen=True, slots=True)
class FeedWeights:
    """A gated feed-forward's, or an expert's: the matrices in any floating type or quantised."""

    gate: Weights  # [intermediate, hidden]
    up: Weights  # [intermediate, hidden]
    down: Weights  # [hidden, intermediate]
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """Experts, and what sends rows to them."""

    router: Weights  # [experts, hidden], and behind them the gate of the shared one
    experts: Iterable[FeedWeights]  # the next is asked for when the one before it is packed; the shared one is last
    num_chosen: int  # of those that are not shared
    normalised: bool  # the weights of the chosen ones sum to 1
    has_shared: bool
    router_bias: Tensor | None = None  # [experts]
    clamp: tuple[float, float] | None = None  # slope and limit of gpt-oss's gate


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's: the matrices in any floating type or quantised, all else float32."""

    qkv: Weights  # [(heads + 2 * kv_heads) * head_dim, hidden]
    output: Weights  # [hidden, heads * head_dim]
    feed: FeedWeights | MixtureWeights
    input_norm: Tensor  # [hidden]: before attention
    post_norm: Tensor  # [hidden]: before the gate
    rotary: tuple[Tensor, Tensor]  # cos and signed sin, [positions, head_dim] each
    output_norm: Tensor | None = None  # [hidden]: of attention's output, before it is added
    down_norm: Tensor | None = None  # [hidden]: of the feed-forward's
    qk_norm: Tensor | None = None  # [heads + kv_heads, head_dim]
    norms_all_heads: bool = False  # queries as one vector, and keys, and not head by head
    sinks: Tensor | None = None  # [heads]: of each a score of no key
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The rows of several sequences: the last ones of each context."""

    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64: where keys and values are stored
    tables: Tensor  # [sequences, most blocks] int64
    starts: Sequence[int]  # [sequences + 1]
    contexts: Sequence[int]  # [sequences]
    parents: Tensor | None = None  # [rows] int32, where there are drafted trees: see attention.tree_mask


def can_run(hidden: int, head_dim: int) -> bool:
    """Whether the kernels are there and take these shapes; the log says where they do not."""
    if cpu_library() is None:
        return False
    fits = hidden % DIM_MULTIPLE == 0 and head_dim % DIM_MULTIPLE == 0 and head_dim <= MOST_DIM
    if not fits:
        log.warning(
            "no C kernels for hidden_size %d and head_dim %d, PyTorch computes, which is slower: they take multiples"
            " of %d, and heads of at most %d", hidden, head_dim, DIM_MULTIPLE, MOST_DIM,
        )  # fmt: skip
    return fits


class CpuDecoder:
    """A model from token ids to logits. One thread at a time may call it: it keeps its scratch memory."""

    def __init__(
        self,
        embeddings: Weight,  # [ids, hidden]
        layers: Iterable[LayerWeights],  # the next is asked for when the one before it is packed
        norm: Tensor,  # [hidden]
        head: Weight,  # [vocab, hidden]; quantised embeddings may be the head, too, and are kept once
        *,
        kind: Kind | None,  # of all weights that are tensors; None: of each what it needs
        rounds: bool = False,  # rows become integers of 16 bits where they meet quantised weights
        heads: int,
        kv_heads: int,
        eps: float,
        scale: float,  # of the scores
        embedding_scale: float = 1.0,
        activation: Literal["silu", "gelu_tanh"] = "silu",  # of the gate
        attention_softcap: float | None = None,
        logit_softcap: float | None = None,
    ) -> None:
        library = cpu_library()
        if library is None:
            raise RuntimeError("the CPU kernels are not there")
        self._library: Any = library
        self.library_name = cpu_library_name() or ""
        self._library.decoder_scratch.restype = self._library.decoder_forward.restype = c_int64
        self.kind, self._rounds = kind, rounds
        self.rounds_some = False  # rows become integers before some matrices
        self._kept: list[object] = []  # what the pointers below point to
        packed = list(map(self._layer, layers))  # no loop variable keeps a layer while the next is made
        self._layers = (_Layer * len(packed))(*packed)
        self.hidden, self.vocab_size, self._num_embeddings = norm.shape[0], head.shape[0], len(embeddings)
        head_matrix = self._matrix(head, None, may_round(head))
        table, table_kind = self._table(embeddings, head_matrix if embeddings is head else None)
        self._decoder = _Decoder(
            len(packed), self.hidden, max(map(_widest, packed)), heads, kv_heads,
            packed[0].qkv.outputs // (heads + 2 * kv_heads), int(activation == "gelu_tanh"),
            eps, scale, attention_softcap or 0.0, logit_softcap or 0.0,
            self._layers, table, len(embeddings), table_kind, embedding_scale, self._pointer(norm), head_matrix,
            int(kind is Kind.TILES),
        )  # fmt: skip
        self._scratch = torch.empty(0)
        self.num_woken = 0  # experts that rows of the last pass went to, over all layers, shared ones apart

    def forward(
        self,
        token_ids: Tensor,  # [rows] int64
        rows: RaggedRows,
        keys: Sequence[Tensor],  # per layer [blocks, block_size, kv_heads, head_dim], where the rows' are stored
        values: Sequence[Tensor],
        logit_rows: Tensor,  # [wanted] int64
        tapped: tuple[Sequence[int], Tensor] | None = None,  # layers, and [at least rows, layers, hidden] for them
        adapters: Structure | None = None,  # what CpuAdapters says of the step, where some row has one
    ) -> Tensor:  # [wanted, vocab] float32
        """The logits of the rows that want them. The hidden states of the layers tapped are written: i is what enters
        block i, the number of blocks what the last norm hands to the head. Raises IndexError for an id that has no
        embedding."""
        taps, states = ((), torch.empty(0)) if tapped is None else tapped
        tensors = (rows.positions, rows.slots, rows.tables)
        starts, contexts = (c_int64 * len(rows.starts))(*rows.starts), (c_int64 * len(rows.contexts))(*rows.contexts)
        caches = [(c_void_p * len(part))(*(tensor.data_ptr() for tensor in part)) for part in (keys, values)]
        batch = _Rows(
            len(token_ids), len(rows.contexts), rows.tables.shape[1], max(rows.contexts), keys[0].shape[1],
            *(tensor.data_ptr() for tensor in tensors), *(ctypes.addressof(part) for part in (starts, contexts)),
            None if rows.parents is None else rows.parents.data_ptr(), *(ctypes.addressof(part) for part in caches),
            None if adapters is None else ctypes.addressof(adapters),
        )  # fmt: skip
        logits = torch.empty(len(logit_rows), self.vocab_size)
        threads = torch.get_num_threads()
        self.num_woken = self._library.decoder_forward(
            byref(self._decoder), byref(batch), c_void_p(token_ids.data_ptr()), c_void_p(logit_rows.data_ptr()),
            c_int64(len(logit_rows)), c_void_p(logits.data_ptr()),
            self._scratch_for(len(token_ids), max(rows.contexts), threads), c_int64(threads),
            (c_int64 * len(taps))(*taps), c_int64(len(taps)), c_void_p(states.data_ptr()),
        )  # fmt: skip
        if self.num_woken < 0:
            raise IndexError(f"a token id is none of the model's {self._num_embeddings}")
        return logits

    def products(self, rows: int) -> None:
        """The products of such a pass alone: its floor."""
        logits = torch.empty(rows, self.vocab_size)
        threads = torch.get_num_threads()
        self._library.decoder_products(
            byref(self._decoder), c_int64(rows), c_void_p(logits.data_ptr()), self._scratch_for(rows, 0, threads),
            c_int64(threads),
        )  # fmt: skip

    def _scratch_for(self, rows: int, keys: int, threads: int) -> c_void_p:
        """Memory that is kept: fresh pages would cost more than the work in them."""
        size = self._library.decoder_scratch(byref(self._decoder), c_int64(rows), c_int64(keys), c_int64(threads))
        if self._scratch.numel() < size:
            self._scratch = torch.zeros(size)
        return c_void_p(self._scratch.data_ptr())

    def _layer(self, layer: LayerWeights) -> _Layer:
        attention = (
            self._matrix(layer.qkv, layer.qkv_bias, may_round(layer.qkv)),
            self._matrix(
                layer.output, layer.output_bias, may_round(layer.output) and layer.rotary[0].shape[1] % STEP == 0
            ),
        )
        if isinstance(layer.feed, MixtureWeights):
            feed, mixture = (Matrix(), Matrix(), Matrix()), ctypes.pointer(self._mixture(layer.feed))
        else:
            feed, mixture = self._feed(layer.feed), None
        return _Layer(
            *attention, *feed, mixture,
            *map(self._pointer, (layer.input_norm, layer.post_norm, layer.output_norm, layer.down_norm, layer.qk_norm)),
            int(layer.norms_all_heads), *map(self._pointer, (layer.sinks, *layer.rotary)), layer.window or 0,
        )  # fmt: skip

    def _feed(self, feed: FeedWeights) -> tuple[Matrix, Matrix, Matrix]:
        """Its matrices; rows lie in one way for gate and up."""
        together = may_round(feed.gate, feed.up)
        return (
            self._matrix(feed.gate, feed.gate_bias, together),
            self._matrix(feed.up, feed.up_bias, together),
            self._matrix(feed.down, feed.down_bias, may_round(feed.down)),
        )

    def _mixture(self, mixture: MixtureWeights) -> _Mixture:
        router = self._matrix(mixture.router, mixture.router_bias, may_round(mixture.router))
        packed = [_Expert(*self._feed(expert)) for expert in mixture.experts]
        experts = (_Expert * len(packed))(*packed)
        widest = max(expert.gate.outputs for expert in packed)
        made = _Mixture(
            router, experts, len(packed) - mixture.has_shared, mixture.num_chosen, int(mixture.normalised),
            int(mixture.has_shared), router.inputs, widest, *(mixture.clamp or (0.0, 0.0)),
        )  # fmt: skip
        self._kept += [experts, made]
        return made

    def _table(self, embeddings: Weight, head: Matrix | None) -> tuple[int, Kind]:
        """Where the embeddings lie, and how: in the head, where that is given and packed."""
        if isinstance(embeddings, Tensor):
            kind = _TABLES.get(embeddings.dtype, Kind.FLOATS)
            self._kept.append(table := (embeddings.float() if kind is Kind.FLOATS else embeddings).contiguous())
            return table.data_ptr(), kind
        matrix = self._matrix(embeddings, None, False) if head is None else head
        if matrix.kind != Kind.PACKED:
            return self._table(embeddings.decode(), None)
        self._kept.append(matrix)
        return ctypes.addressof(matrix), Kind.PACKED

    def _matrix(self, weight: Weights, bias: Tensor | None, rounds: bool) -> Matrix:
        matrix, kept = matrix_of(weight, bias, self.kind, self._rounds and rounds)
        self.rounds_some |= bool(matrix.rounds)
        self._kept.append(kept)
        return matrix

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def _widest(layer: _Layer) -> int:
    """Outputs of its gate, or of its experts' widest."""
    return int(layer.mixture.contents.widest if layer.mixture else layer.gate.outputs)


def may_round(*weights: Weights) -> bool:
    """Whether rows of integers can be multiplied with all of them."""
    parts = [part for weight in weights for part in (weight if isinstance(weight, tuple) else (weight,))]
    ends = [len(part) for weight in weights if isinstance(weight, tuple) for part in weight[:-1]]
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix) and can_round(part)]
    return len(quantized) == len(parts) and not any(end % PANEL for end in ends)


def matrix_of(weight: Weights, bias: Tensor | None, kind: Kind | None, rounds: bool = False) -> tuple[Matrix, object]:
    """A weight as the kernels read it, and what its pointers point to. `kind` is that of tensors; None: as few bits as
    hold the numbers of each, on the processor's vectors. `rounds`: rows become integers, which `may_round` allows.
    Raises ValueError for tiles beside quantised ones: rows lie in one way for all of them."""
    if kind is Kind.TILES and not isinstance(weight, Tensor):
        raise ValueError("kind: is TILES, with quantised weights; allowed: None")
    if isinstance(weight, tuple):
        return _sections(weight, bias, kind, rounds)
    if isinstance(weight, QuantizedMatrix) and can_pack(weight):
        packing = packing_of(weight.form)
        packed, bias = pack_quantized(weight), None if bias is None else bias.contiguous()
        matrix = Matrix(
            packed.data_ptr(), _address(bias), None, *weight.shape, Kind.PACKED, ctypes.pointer(packing),
            rounds=int(rounds),
        )  # fmt: skip
        return matrix, (packed, bias, packing)
    numbers = weight if isinstance(weight, Tensor) else weight.decode()
    kind = narrowest(numbers) if kind is None else kind
    scales = row_scales(numbers) if kind is Kind.BYTES else None
    panels, bias = pack(numbers, kind, scales), None if bias is None else bias.contiguous()
    matrix = Matrix(panels.data_ptr(), _address(bias), _address(scales), *numbers.shape, kind)
    return matrix, (panels, bias, scales)


def _sections(
    weights: tuple[Weight, ...], bias: Tensor | None, kind: Kind | None, rounds: bool
) -> tuple[Matrix, object]:
    """Tensors become one, and so do all where one ends within a panel."""
    weights = tuple(weight if isinstance(weight, Tensor) or can_pack(weight) else weight.decode() for weight in weights)
    if all(isinstance(weight, Tensor) for weight in weights) or any(len(weight) % PANEL for weight in weights[:-1]):
        parts = [weight if isinstance(weight, Tensor) else weight.decode() for weight in weights]
        return matrix_of(parts[0] if len(parts) == 1 else torch.cat(parts), bias, kind)
    biases = [None] * len(weights) if bias is None else torch.split(bias, [len(weight) for weight in weights])
    made = [matrix_of(weight, part, kind, rounds) for weight, part in zip(weights, biases, strict=True)]
    if len(made) == 1:
        return made[0]
    sections = (Matrix * len(made))(*(matrix for matrix, _ in made))
    outputs = sum(len(weight) for weight in weights)
    matrix = Matrix(
        None, None, None, outputs, weights[0].shape[1], Kind.SECTIONS, None, ctypes.addressof(sections), len(made),
        int(rounds),
    )  # fmt: skip
    return matrix, (sections, made)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def kind_for(all_bfloat16: bool) -> Kind:
    """How the matrices of a decoder are kept that are not to be rounded, by whether all their numbers are bfloat16's.
    Raises RuntimeError where the kernels are not there."""
    library: Any = cpu_library()
    if library is None:
        raise RuntimeError("the CPU kernels are not there")
    if not all_bfloat16:
        return Kind.FLOATS
    return Kind.TILES if library.tiles_allowed() else Kind.HALVES


def is_bfloat16(weight: Tensor) -> bool:  # [out, in] of any floating type
    """Whether every number is one of bfloat16."""
    if weight.dtype == torch.bfloat16:
        return True
    return not any(bool((part.float().view(torch.int32) & 0xFFFF).any()) for part in _chunks(weight))


def narrowest(weight: Tensor) -> Kind:  # [out, in] of any floating type
    """As few bits as hold the numbers. Infinities, of which not every processor's float16 knows, are float32's."""
    if is_bfloat16(weight):
        return Kind.HALVES
    is_float16 = weight.dtype == torch.float16 and all(bool(part.isfinite().all()) for part in _chunks(weight))
    return Kind.FLOAT16 if is_float16 else Kind.FLOATS


def row_scales(weight: Tensor) -> Tensor:  # [out, in] of any floating type -> [out] float32
    """What 8 bits of each output are multiplied with."""
    return torch.cat([int8_scales(part) for part in _chunks(weight)])


def pack(weight: Tensor, kind: Kind, scales: Tensor | None = None) -> Tensor:
    """[out, in] of any floating type -> panels of 32 outputs, filled up with zeros: [ceil(out / 32), in, 32] float32,
    int16 with the bfloat16 or float16 numbers' bits, or int8, of which each output has its scale in `scales`, [out];
    for tiles [ceil(out / 32), ceil(in / 32), 2, 16, 16, 2]: halves of a panel's outputs, pairs of inputs, outputs, the
    two of a pair. Takes little memory beside the result."""
    outputs, inputs = weight.shape
    shape: tuple[int, ...] = (-(-outputs // PANEL), inputs, PANEL)
    if kind is Kind.TILES:
        shape = (shape[0], -(-inputs // STEP), 2, STEP // 2, PANEL // 2, 2)
    packed = in_huge_pages(shape, _NUMBERS[kind])
    start = 0
    for part in _chunks(weight):
        panels = _panels(part, kind, None if scales is None else scales[start * PANEL :][: len(part)])
        packed[start : start + len(panels)] = panels
        start += len(panels)
    return packed


def _chunks(weight: Tensor) -> Iterator[Tensor]:
    """Whole panels."""
    return iter(torch.split(weight, max(CHUNK // weight.shape[1] // PANEL, 1) * PANEL))


def _panels(weight: Tensor, kind: Kind, scales: Tensor | None) -> Tensor:  # as `pack`, maybe not contiguous
    if scales is not None:
        numbers = to_int8(weight, scales)
    elif kind is Kind.FLOAT16:
        numbers = weight.half().view(torch.int16)
    else:
        numbers = weight.float() if kind is Kind.FLOATS else weight.bfloat16().view(torch.int16)
    numbers = F.pad(numbers, (0, 0, 0, -len(weight) % PANEL)).contiguous()
    if kind is not Kind.TILES:
        return numbers.view(-1, PANEL, numbers.shape[1]).transpose(1, 2)
    numbers = F.pad(numbers, (0, -numbers.shape[1] % STEP))
    tiles = numbers.view(-1, 2, PANEL // 2, numbers.shape[1] // STEP, STEP // 2, 2)  # [panels, 2, out, steps, pairs, 2]
    return tiles.permute(0, 3, 1, 4, 2, 5)
