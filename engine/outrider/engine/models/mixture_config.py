"""What a mixture's configuration says of its experts, and by which names checkpoints hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.engine.models.base import NotForDecoder, UnsupportedModel

# Above every model's: what is larger is a damaged file, or one that is to fill the memory.
MOST_EXPERTS, MOST_WIDTH, MOST_IN_ALL, MOST_STEP = 1 << 12, 1 << 22, 1 << 16, 1 << 12


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Of a family: how its checkpoints call the parts of a layer of experts, and its configuration their number."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    width: str = "moe_intermediate_size"
    always_normalised: bool = False  # else norm_topk_prob says so
    has_shared: bool = False  # an expert that all rows go to, behind a gate of its own
    router: str = "gate"
    has_biases: bool = False  # router and experts
    fused: bool = False  # a layer's experts lie in one tensor, gate and up by turns: see fused_experts.py
    clamped: bool = False  # gates are gpt-oss's

    @property
    def projections(self) -> tuple[str, str, str]:
        """Of an expert: gate, up and down."""
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a model."""

    names: ExpertNames
    layers: frozenset[int]  # which have them; others have one feed-forward
    num_experts: int
    num_chosen: int  # by a token
    width: int  # of an expert's feed-forward
    shared_width: int | None  # of the shared one
    normalised: bool  # the weights of the chosen ones sum to 1
    clamp: tuple[float, float] | None = None  # slope and limit of gpt-oss's gate

    def expert(self, index: int) -> str:
        """The stem of an expert's projections in a layer; behind the last one the shared one's."""
        shared = f"{self.names.block}.shared_expert"
        return shared if index == self.num_experts else f"{self.names.block}.experts.{index}"

    @property
    def num_with_shared(self) -> int:
        """All experts of a layer."""
        return self.num_experts + (self.shared_width is not None)

    @property
    def routers(self) -> tuple[str, ...]:
        """What tells a token's experts, and the gate of the shared one, in a layer."""
        own = f"{self.names.block}.{self.names.router}"
        return (own,) if self.shared_width is None else (own, f"{self.names.block}.shared_expert_gate")

    def linears(self, hidden: int) -> list[tuple[str, int, int, bool]]:
        """The matrices of a layer of experts: name, outputs, inputs, and whether they have a bias."""
        names, bias = self.names, self.names.has_biases
        outputs_of = zip(self.routers, (self.num_experts, 1), strict=False)
        found = [(name, outputs, hidden, bias) for name, outputs in outputs_of]
        for index in range(self.num_with_shared):
            width = self.width if index < self.num_experts else self.shared_width or 0
            stem = self.expert(index)
            found += [(f"{stem}.{names.gate}", width, hidden, bias), (f"{stem}.{names.up}", width, hidden, bias)]
            found.append((f"{stem}.{names.down}", hidden, width, bias))
        return found


def mixture_of(hf: Any, names: ExpertNames) -> Mixture:
    """Of transformers' configuration. Raises UnsupportedModel; NotForDecoder for what transformers may compute."""
    num_experts = _size(hf, "num_experts" if hasattr(hf, "num_experts") else "num_local_experts", MOST_EXPERTS)
    num_chosen = _size(hf, "num_experts_per_tok", num_experts)
    if num_experts * hf.num_hidden_layers > MOST_IN_ALL:
        given = f"{num_experts} experts in each of {hf.num_hidden_layers} layers"
        raise UnsupportedModel(f"{hf.model_type} with {given}; allowed: {MOST_IN_ALL} in all")
    if getattr(hf, "clip_qkv", None) is not None:
        raise NotForDecoder(f"{hf.model_type} with clip_qkv: is {hf.clip_qkv}; allowed: null")
    dense = set(getattr(hf, "mlp_only_layers", None) or ())
    step = _size(hf, "decoder_sparse_step", MOST_STEP) if hasattr(hf, "decoder_sparse_step") else 1
    layers = (index for index in range(hf.num_hidden_layers) if index not in dense and (index + 1) % step == 0)
    return Mixture(
        names,
        frozenset(layers),
        num_experts,
        num_chosen,
        _size(hf, names.width, MOST_WIDTH),
        _size(hf, "shared_expert_intermediate_size", MOST_WIDTH) if names.has_shared else None,
        names.always_normalised or bool(hf.norm_topk_prob),
        (_real(hf, "swiglu_alpha", 1.702), _real(hf, "swiglu_limit", 7.0)) if names.clamped else None,
    )


def _real(hf: Any, name: str, default: float) -> float:
    value = getattr(hf, name, default)
    if type(value) not in (int, float) or not 0 < value < 1e6:
        raise UnsupportedModel(f"{hf.model_type} with {name}: is {value!r:.100}; allowed: a number above 0")
    return float(value)


def _size(hf: Any, name: str, most: int) -> int:
    value = getattr(hf, name)
    if not (type(value) is int and 1 <= value <= most):
        raise UnsupportedModel(f"{hf.model_type} with {name}: is {value!r:.100}; allowed: 1 to {most}")
    return value
