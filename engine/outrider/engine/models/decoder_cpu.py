"""The decoder on a CPU, in float32, by our C kernels: the same function as decoder.py's, in one call for all layers.

A draft's matrices may be rounded to 8 bits. The embeddings, of which a pass reads a row a token, are not. What a
checkpoint stores as codes of few bits stays so, embeddings too."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.engine.batch import Batch
from outrider.engine.hidden_states import Taps
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.census import ExpertCensus
from outrider.engine.models.decoder_config import DecoderConfig, rotary_tables
from outrider.engine.models.feed import DENSE
from outrider.engine.models.mixture_config import Mixture
from outrider.engine.models.native_adapters import NativeAdapters
from outrider.engine.models.weights import EMBEDDINGS, HEAD, WeightReader
from outrider.kernels.cpu import decoder
from outrider.kernels.cpu.decoder import CpuDecoder, FeedWeights, Kind, LayerWeights, MixtureWeights, RaggedRows


def can_run(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels are there and take this model."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    return decoder.can_run(config.hidden_size, config.head_dim)


class NativeDecoder:
    """A CausalLM. Batch-invariant whether that was asked for or not."""

    def __init__(
        self, config: DecoderConfig, state: Mapping[str, Tensor], int8: bool = False, *, rounds: bool = False
    ) -> None:
        reader = WeightReader(config, state, torch.float32, torch.device("cpu"), codes=not int8)
        self.config = config = reader.config
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.batch_invariant = True
        self.takes_trees = True
        self.layers = (LayerShape(config.num_kv_heads, config.head_dim),) * config.num_layers
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_model_len = config.max_model_len
        embeddings = reader.matrix_as_stored(EMBEDDINGS)
        if isinstance(embeddings, Tensor):
            embeddings = embeddings.clone()  # apart from the file's mapping
        rotary = rotary_tables(config, torch.float32)
        self.kernel = CpuDecoder(
            embeddings,
            (_layer(config, index, reader, rotary) for index in range(config.num_layers)),
            reader.norm("model.norm.weight"),
            embeddings if config.tied_embeddings else reader.matrix_as_stored(HEAD),
            kind=_kind(reader, int8),
            rounds=rounds,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            embedding_scale=1.0 if config.embedding_scale is None else config.embedding_scale,
            activation=config.activation,
            attention_softcap=config.attention_softcap,
            logit_softcap=config.logit_softcap,
        )
        self.adapters = NativeAdapters(config)
        self.census = None if config.mixture is None else ExpertCensus(config.mixture, self.device)

    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Taps | None = None
    ) -> Tensor:  # [logit rows, vocab] float32
        """Stores the keys and values of all rows of `batch` in `cache`, and the hidden states that are asked for in
        `taps`; returns the logits of `batch.logit_rows` alone."""
        rows = RaggedRows(
            batch.positions, batch.slot_mapping, batch.block_tables, batch.query_starts, batch.context_lens,
            batch.parents,
        )  # fmt: skip
        tapped = None if taps is None else (taps.layers, taps.states)
        slots = batch.adapter_slots
        adapters = None if slots is None else self.adapters.step(slots)
        found = self.kernel.forward(batch.token_ids, rows, cache.keys, cache.values, batch.logit_rows, tapped, adapters)
        if self.census is not None:
            self.census.num_woken.fill_(self.kernel.num_woken)
        return found


def _kind(reader: WeightReader, int8: bool) -> Kind | None:
    """Of the matrices that are tensors."""
    if int8:
        return Kind.BYTES
    return None if reader.is_quantized or not reader.all_bfloat16() else decoder.kind_for(True)


def _layer(
    config: DecoderConfig, index: int, reader: WeightReader, rotary: dict[str | None, tuple[Tensor, Tensor]]
) -> LayerWeights:
    prefix = f"model.layers.{index}."
    qkv, qkv_bias = reader.linear_as_stored(prefix, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output, output_bias = reader.linear_as_stored(prefix, "self_attn.o_proj")
    input_norm, post_norm, output_norm, down_norm = reader.block_norms(prefix)
    mixture = config.mixture
    feed: FeedWeights | MixtureWeights
    if mixture is not None and index in mixture.layers:
        feed = _mixture(mixture, prefix, reader)
    else:
        feed = _feed(prefix, "mlp", DENSE, reader)
    return LayerWeights(
        qkv, output, feed,
        input_norm, post_norm, rotary[config.rotary_types[index]], output_norm, down_norm,
        reader.qk_norm(prefix), config.family.qk_norm == "of all heads", reader.sinks(prefix), qkv_bias, output_bias,
        config.sliding_windows[index],
    )  # fmt: skip


def _feed(prefix: str, stem: str, names: tuple[str, str, str], reader: WeightReader) -> FeedWeights:
    (gate, gate_bias), (up, up_bias), (down, down_bias) = (
        reader.linear_as_stored(prefix, f"{stem}.{name}") for name in names
    )
    return FeedWeights(gate, up, down, gate_bias, up_bias, down_bias)


def _mixture(mixture: Mixture, prefix: str, reader: WeightReader) -> MixtureWeights:
    names = mixture.names.projections
    router, router_bias = reader.linear_as_stored(prefix, *mixture.routers)
    return MixtureWeights(
        router,
        (_feed(prefix, mixture.expert(index), names, reader) for index in range(mixture.num_with_shared)),
        mixture.num_chosen,
        mixture.normalised,
        mixture.shared_width is not None,
        router_bias,
        mixture.clamp,
    )
