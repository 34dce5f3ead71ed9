# ruff: noqa: E501  lines as they stand elsewhere
"""Faults of one line in the product's own code, each with a test that fails with it: what holds the promises is shown to
hold them. `run.py` puts each into a copy of the tree and runs its test; a line that is gone fails `make check`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One line, or a few, of a file in another form."""

    file: str  # from the repository's root
    line: str  # as it stands there, once
    instead: str
    killed_by: str  # a test that fails then

    def applied(self, text: str) -> str:
        """The file's text with the fault in it."""
        return text.replace(self.line, self.instead, 1)

    def __str__(self) -> str:
        return f"{self.file.rpartition('outrider/')[2]}: {self.instead.strip()[:60]!r}"


VERIFY = "kernels/outrider/kernels/verify/reference.py"
SAMPLING = "kernels/outrider/kernels/sampling/reference.py"
BUFFER = "target_service/outrider/target_service/draft_buffer.py"

MUTANTS = (
    Mutant(
        VERIFY,
        "return (words[:, 0] >> 8).double() * 2.0**-24",
        "return (words[:, 0] >> 9).double() * 2.0**-24",
        "tests/kernels/test_verify.py::test_coins_lie_on_their_grid",
    ),
    Mutant(
        VERIFY,
        "num_accepted = count_accepted(uniforms * drafted_weight < masses, windows)",
        "num_accepted = count_accepted(uniforms * drafted_weight <= masses, windows)",
        "tests/lossless/test_law.py::test_joint_law_is_plain_decodings",
    ),
    Mutant(
        VERIFY,
        "masses, scale = token_probs * total_weight, total_weight  # [drafted] each",
        "masses, scale = token_probs * total_weight, torch.ones_like(total_weight)  # [drafted] each",
        "tests/lossless/test_law.py::test_joint_law_is_plain_decodings",
    ),
    Mutant(
        VERIFY,
        "at_end = uniforms * drafted_weight < reached * masses  # [drafted]",
        "at_end = uniforms * drafted_weight < masses  # [drafted]",
        "tests/lossless/test_law_blocks.py::test_joint_law_is_plain_decodings",
    ),
    Mutant(
        VERIFY,
        "scale = total_weight * reached",
        "scale = total_weight",
        "tests/lossless/test_law_blocks.py::test_joint_law_is_plain_decodings",
    ),
    Mutant(
        VERIFY,
        "reached[index + 1] = min(reached[index] * factors[index], 1.0)",
        "reached[index + 1] = min(factors[index], 1.0)",
        "tests/lossless/test_law_blocks.py::test_joint_law_of_three_drafted_tokens",
    ),
    Mutant(
        VERIFY,
        "            elif last[first + index]:\n                break",
        "            elif not last[first + index]:\n                break",
        "tests/lossless/test_law_blocks.py::test_joint_law_is_plain_decodings",
    ),
    Mutant(
        VERIFY,
        "next_weights[index] = (next_weights[index] - draft_weights.weights[concerned]).clamp_(min=0)",
        "next_weights[index] = (next_weights[index] - draft_weights.weights[concerned]).abs_()",
        "tests/lossless/test_law.py::test_joint_law_is_plain_decodings",
    ),
    Mutant(
        VERIFY,
        "        next_weights[owners[inside], ids[inside]] = 0",
        "        next_weights[owners[inside], ids[inside]] *= 1",
        "tests/lossless/test_law.py::test_joint_law_is_plain_decodings",
    ),
    Mutant(
        VERIFY,
        "        bad[order[1:]] |= keys[1:] == keys[:-1]",
        "        bad[order[1:]] |= False",
        "tests/kernels/test_verify.py::test_an_unusable_vector_is_one_hot",
    ),
    Mutant(
        VERIFY,
        "bad = (ids < 0) | (ids >= vocab_size) | (draft_weights.weights <= 0)",
        "bad = (ids < 0) | (ids >= vocab_size) | (draft_weights.weights < 0)",
        "tests/kernels/test_verify.py::test_an_unusable_vector_is_one_hot",
    ),
    Mutant(
        VERIFY,
        "usable = (num_bad == 0) & (drafted_weight > 0) & (total_weight < MAX_TOTAL_WEIGHT)",
        "usable = (num_bad == 0) & (total_weight < MAX_TOTAL_WEIGHT)",
        "tests/lossless/test_law.py::test_unusable_weights_are_one_hot_and_exact_for_any_draft",
    ),
    Mutant(
        VERIFY,
        "cumulative, fractions * totals, right=True",
        "cumulative, fractions * totals, right=False",
        "tests/kernels/test_verify.py::test_windows_are_ragged",
    ),
    Mutant(
        VERIFY,
        "ids[~np.isfinite(ratios[np.arange(len(ids)), ids])] = -1",
        "ids[np.isnan(ratios[np.arange(len(ids)), ids])] = -1",
        "tests/kernels/test_verify.py::test_no_probability_and_nan_give_no_token",
    ),
    Mutant(
        VERIFY,
        "        while held < count and drafted[first + held] == own[row + held]:\n            held += 1",
        "        while held < count and drafted[first + held] == own[row]:\n            held += 1",
        "tests/kernels/test_verify.py::test_tokens_are_those_of_plain_decoding_for_any_draft",
    ),
    Mutant(
        VERIFY,
        "            if node < num_rows and above[index] == node and drafted[index] == own[row + node]:",
        "            if node < num_rows and drafted[index] == own[row + node]:",
        "tests/lossless/test_law_trees.py::test_every_tree_commits_the_targets_own_tokens",
    ),
    Mutant(
        VERIFY,
        "        if len(empty):\n            next_weights[empty]",
        "        if len(empty) > 1:\n            next_weights[empty]",
        "tests/kernels/test_verify.py::test_a_zero_residual_falls_back_to_the_target",
    ),
    Mutant(
        SAMPLING,
        "totals = cumulative.gather(1, limits[:, None] - 1) if totals is None else totals[:, None]  # [rows, 1]",
        "totals = cumulative[:, -1:] if totals is None else totals[:, None]  # [rows, 1]",
        "tests/kernels/test_sampling.py::test_awkward_sizes",
    ),
    Mutant(
        SAMPLING,
        "by_mass = torch.searchsorted(cumulative, wanted).squeeze(1) + 1  # [rows]: the first sum that reaches it",
        "by_mass = torch.searchsorted(cumulative, wanted).squeeze(1) + 2  # [rows]: the first sum that reaches it",
        "tests/kernels/test_sampling.py::test_equals_the_reference",
    ),
    Mutant(
        SAMPLING,
        "kept[row, at_threshold[int(num_kept[row]) - num_above :]] = 0",
        "kept[row, at_threshold[int(num_kept[row]) - num_above + 1 :]] = 0",
        "tests/kernels/test_sampling.py::test_equals_the_reference",
    ),
    Mutant(
        SAMPLING,
        "kept = _at_least(probs, min_p[:, None] * probs.amax(dim=-1, keepdim=True))",
        "kept = _at_least(probs, min_p[:, None])",
        "tests/kernels/test_sampling.py::test_equals_the_reference",
    ),
    Mutant(
        SAMPLING,
        "logits = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)",
        "logits = logits / penalties.repetition",
        "tests/kernels/test_sampling.py::test_equals_the_reference",
    ),
    Mutant(
        SAMPLING,
        "return logits - penalties.presence * (penalties.output_counts > 0)",
        "return logits - penalties.presence * penalties.output_counts",
        "tests/kernels/test_sampling.py::test_equals_the_reference",
    ),
    Mutant(
        SAMPLING,
        "return (kept * (MAX_WEIGHT / kept.amax(dim=-1, keepdim=True))).round_()",
        "return (kept * (MAX_WEIGHT / kept.amax(dim=-1, keepdim=True))).ceil_()",
        "tests/kernels/test_sampling.py::test_vectors_are_what_the_wire_can_carry",
    ),
    Mutant(
        SAMPLING,
        "points = (totals * words[:, 0] + (totals * words[:, 1] >> 32)) >> 32  # [rows]",
        "points = (totals * (words[:, 0] >> 24 << 24)) >> 32  # [rows]",
        "tests/kernels/test_sampling.py::test_tokens_follow_the_integers",
    ),
    Mutant(
        SAMPLING,
        "entries = torch.searchsorted(cumulative[1:], bounds[:-1] + points, right=True)  # [rows]",
        "entries = torch.searchsorted(cumulative[1:], bounds[:-1] + points, right=False)  # [rows]",
        "tests/kernels/test_sampling.py::test_a_draw_is_the_floor_of_an_exact_product",
    ),
    Mutant(
        SAMPLING,
        "        invalid |= ~raw.amax(dim=-1).isfinite()\n    if sampling.greedy_rows is not None and",
        "        invalid &= ~raw.amax(dim=-1).isfinite()\n    if sampling.greedy_rows is not None and",
        "tests/kernels/test_sampling.py::test_rows_that_cannot_be_sampled_are_invalid",
    ),
    Mutant(
        BUFFER,
        "        if piece.chain in self._dead or piece.chain in self._refused or (chain is not None and chain.ended):",
        "        if piece.chain in self._dead or (chain is not None and chain.ended):",
        "tests/target_service/test_draft_buffer.py::test_a_chain_with_a_gap_takes_no_more",
    ),
    Mutant(
        BUFFER,
        "        elif piece.position <= max(chain.end, self._committed):\n            self._append(chain, piece)",
        "        elif piece.position <= max(chain.end, self._committed) + 1:\n            self._append(chain, piece)",
        "tests/target_service/test_draft_buffer.py::test_a_chain_with_a_gap_takes_no_more",
    ),
    Mutant(
        BUFFER,
        "            if difference is not None:\n                self._mark_dead(chain.number, difference)\n            elif chain.end",
        "            if difference is not None and difference < committed - 1:\n                self._mark_dead(chain.number, difference)\n            elif chain.end",
        "tests/target_service/test_draft_buffer.py::test_refused_token_kills_the_chain_and_its_later_pieces",
    ),
    Mutant(
        BUFFER,
        "self._live = min(reaching, key=lambda chain: chain.number, default=None)",
        "self._live = max(reaching, key=lambda chain: chain.number, default=None)",
        "tests/target_service/test_draft_buffer.py::test_branches_fork_from_held_tokens_and_the_lowest_live_chain_is_used",
    ),
    Mutant(
        BUFFER,
        "                chain.weights[first] = None  # a branch's first id is a guess, whatever its weights say",
        "                pass",
        "tests/target_service/test_draft_buffer.py::test_a_branchs_first_id_is_one_hot_whatever_its_weights",
    ),
)
