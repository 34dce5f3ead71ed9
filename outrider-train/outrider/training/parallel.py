"""Parallel drafting (PARD, An et al., arXiv 2504.18583): a draft learns to give several next tokens in one pass.

Behind the tokens that it reads stand mask tokens, all of one id: the row of the last token gives the next one, the row
of the j-th mask the token j places further on, without the tokens between. In a window of training text some places are
chosen as ends of the reading; the masks of all of them are rows of the same pass, and each sees the text up to its own
end and the masks before it, as in drafting. A token far behind the end counts as much as it would be reached: by how
likely the draft's tokens before it are accepted. With one token a pass it is plain distillation.

The folder that comes of it is that of any causal language model, whose config.json names the mask token: `pard_token`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from outrider.training.distill import DistillWeights
from outrider.training.language_head import LanguageHead
from outrider.training.lessons import Lesson
from outrider.training.model import fast_products

LEAST_REACHED = 0.1  # weight of a token that is hardly ever reached: else nothing far away would begin to learn


@dataclass(frozen=True)
class MaskedRows:
    """The rows of one pass over a window and the masks behind its ends: the window's, then end by end the masks'."""

    positions: Tensor  # [rows]
    sees: Tensor  # [rows, rows] bool
    giving: Tensor  # [ends, tokens]: the rows that give the tokens after each end
    places: Tensor  # [ends, tokens]: the places of the window after which these tokens stand

    @classmethod
    def of(cls, ends: Tensor, length: int, num_tokens: int) -> MaskedRows:
        """`ends` are the places of the last tokens read, [ends]; so many tokens after each are in the window and the
        one behind it."""
        num_masks = num_tokens - 1
        places = ends[:, None] + torch.arange(num_tokens)  # [ends, tokens]
        window, masks = torch.arange(length), torch.arange(length, length + len(ends) * num_masks)
        positions = torch.cat([window, places[:, 1:].flatten()])
        sees = torch.zeros(len(positions), len(positions), dtype=torch.bool)
        sees[:length, :length] = window <= window[:, None]
        sees[length:, :length] = window <= ends.repeat_interleave(num_masks)[:, None]
        end_of, depth = torch.arange(len(masks)) // max(1, num_masks), positions[length:]
        sees[length:, length:] = (end_of[:, None] == end_of) & (depth <= depth[:, None])
        giving = torch.cat([ends[:, None], masks.view(len(ends), num_masks)], dim=1)
        return cls(positions, sees, giving, places)


def draft_head(draft: PreTrainedModel) -> LanguageHead:
    """What says a draft's tokens, of what its layers give. Raises ValueError where its logits are made otherwise."""
    head, cap = draft.get_output_embeddings(), getattr(draft.config, "final_logit_softcapping", None)

    def product(states: Tensor) -> Tensor:
        logits: Tensor = head(states)
        return logits if cap is None else cap * torch.tanh(logits.float() / cap)

    ids = torch.zeros(1, 2, dtype=torch.int64)
    with torch.no_grad():
        expected, found = draft(ids).logits, product(draft.base_model(ids).last_hidden_state)
    if not torch.allclose(found, expected, atol=1e-3, rtol=1e-3):
        raise ValueError(f"{draft.config.model_type}: its logits are not the product of its states and its head alone")
    return LanguageHead(product, expected.shape[-1], tuple(head.parameters()))


def parallel_states(
    draft: PreTrainedModel, ids: Tensor, rows: MaskedRows, mask_id: int
) -> Tensor:  # [windows, length] -> [windows, ends, tokens, hidden]
    """What `draft_head` takes for the tokens after every end."""
    with fast_products():
        return masked_states(draft, ids, rows, mask_id)


def masked_states(
    draft: PreTrainedModel, ids: Tensor, rows: MaskedRows, mask_id: int
) -> Tensor:  # [windows, length] -> [windows, ends, tokens, hidden]
    """The same by products of the weights' numbers."""
    masks = ids.new_full((len(ids), len(rows.positions) - ids.shape[1]), mask_id)
    states: Tensor = draft.base_model(
        torch.cat([ids, masks], dim=1),
        attention_mask=rows.sees[None, None],
        position_ids=rows.positions[None],
        use_cache=False,
    ).last_hidden_state
    return states[:, rows.giving]


def parallel_loss(
    draft: PreTrainedModel, mask_id: int, num_tokens: int, num_ends: int, weights: DistillWeights
) -> Callable[[Lesson], Tensor]:
    """The draft's loss on a lesson: how far it is from the target after every end, which are drawn for each lesson
    anew."""
    head = draft_head(draft)

    def loss(lesson: Lesson) -> Tensor:
        inputs = lesson.ids[:, :-1]
        rows = MaskedRows.of(chosen_ends(lesson, num_tokens, num_ends), inputs.shape[1], num_tokens)
        return window_loss(lesson, rows.places, head, parallel_states(draft, inputs, rows, mask_id), weights)

    return loss


def window_loss(
    lesson: Lesson,
    places: Tensor,
    head: LanguageHead,
    states: Tensor,
    weights: DistillWeights,
    sureness: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """How far what was drafted after the places, [ends, tokens], is from the target; states: [windows, ends, tokens,
    hidden], of which `head` says what, and `sureness` the logit of how likely it is accepted, if the head tells."""
    following = lesson.ids[:, 1:][:, places]  # [windows, ends, tokens]
    ids = torch.cat([lesson.top_ids[:, places], following[..., None]], dim=-1)
    with fast_products():
        whole, picked = head.said(states, ids)
    each, overlap = weights.apart(whole, picked, lesson.top_probs[:, places])
    with torch.no_grad():
        before = torch.cat([torch.ones_like(overlap[..., :1]), overlap[..., :-1]], dim=-1)
        reached = before.cumprod(-1).clamp_min(LEAST_REACHED)  # [windows, ends, tokens]
    if sureness is not None:
        accepted = overlap.detach().clamp(0.0, 1.0)
        each = each + F.binary_cross_entropy_with_logits(sureness(states), accepted, reduction="none")
    return (reached * each).sum(-1).mean()


@torch.no_grad()
def acceptance(
    lesson: Lesson, places: Tensor, head: LanguageHead, states: Tensor, greedy: bool
) -> Tensor:  # [windows, ends, tokens], as states are
    """Of what was drafted after the places, [ends, tokens]: whether the likeliest token is the text's, or how likely a
    drawn one is accepted."""
    if greedy:
        return (head.best(states) == lesson.ids[:, 1:][:, places]).float()
    whole, picked = head.said(states, lesson.top_ids[:, places])
    return torch.minimum((picked - whole[..., None]).exp(), lesson.top_probs[:, places]).sum(-1)


def chosen_ends(lesson: Lesson, num_tokens: int, num_ends: int, first: int = 0) -> Tensor:  # [ends]
    """Places from the first on, with so many tokens behind each; a function of the lesson alone, so that a run can be
    resumed."""
    room = lesson.ids.shape[1] - num_tokens - first
    generator = torch.Generator().manual_seed(int(lesson.ids.sum()))
    return first + torch.randperm(room, generator=generator)[:num_ends].sort().values


def with_mask_token(draft: PreTrainedModel) -> int:
    """The id of the draft's mask token. A draft that has none gets one, behind its vocabulary."""
    found = getattr(draft.config, "pard_token", None)
    if found is not None:
        return int(found)
    mask_id = int(draft.config.vocab_size)
    with torch.no_grad():
        mean = draft.get_input_embeddings().weight.mean(0)  # [hidden]
        draft.resize_token_embeddings(mask_id + 1, mean_resizing=False)
        draft.get_input_embeddings().weight[mask_id] = mean
    draft.config.pard_token = mask_id
    return mask_id


def deepened(draft: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The same function in more layers: those added are copies of the draft's own that write nothing yet. Raises
    ValueError for fewer."""
    own = draft.config.num_hidden_layers
    if num_layers < own:
        raise ValueError(f"layers: is {num_layers}; allowed: at least those of the draft that is given, {own}")
    options = draft.config.to_dict() | {"num_hidden_layers": num_layers}
    if types := options.get("layer_types"):
        options["layer_types"] = [types[index % own] for index in range(num_layers)]
    config = type(draft.config)(**options)
    deeper: PreTrainedModel = type(draft)(config)
    deeper.load_state_dict(draft.state_dict(), strict=False)
    layers, copied = deeper.base_model.layers, draft.base_model.layers
    for index in range(own, num_layers):
        layers[index].load_state_dict(copied[index % own].state_dict())
        for name, weight in layers[index].named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.data.zero_()
    return deeper
