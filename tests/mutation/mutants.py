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
VERIFIER = "target_service/outrider/target_service/verifier.py"
OUTPUTS = "target_service/outrider/target_service/outputs.py"
TARGET_SEQUENCE = "target_service/outrider/target_service/sequence.py"
SAMPLER = "engine/outrider/engine/sampler.py"
CACHE = "engine/outrider/engine/kv_cache_manager.py"
GRAMMAR = "engine/outrider/engine/grammar.py"
MASKS = "engine/outrider/engine/token_masks.py"
NOISE = "engine/outrider/engine/random.py"
LAYOUT = "kernels/outrider/kernels/types.py"
DRAFT_ENGINE = "draft_service/outrider/draft_service/engine.py"
DRAFT_SEQUENCE = "draft_service/outrider/draft_service/sequence.py"
CHAINS = "draft_service/outrider/draft_service/chains.py"
BRANCHES = "draft_service/outrider/draft_service/scheduler.py"
DRAFT_ADMISSION = "draft_service/outrider/draft_service/admission.py"
DRAWING = "proposers/outrider/proposers/drawing.py"
DRAFT_ROWS = "proposers/outrider/proposers/draft_rows.py"
LOCAL_DRAFTS = "gateway/outrider/gateway/peers/local_drafts.py"
LOCAL_HEAD = "target_service/outrider/target_service/local_draft.py"
FORCED = "target_service/outrider/target_service/forced.py"
GATEWAY = "gateway/outrider/gateway/engine.py"
PHILOX = "kernels/outrider/kernels/random/reference.py"
KV_STORE = "kernels/outrider/kernels/kv_store/reference.py"
FRAMES = "rpc/outrider/rpc/frames.py"
CORE = "gateway/outrider/gateway/speculation/core.py"

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
    Mutant(
        VERIFIER,
        "(Purpose.ACCEPT, Purpose.RECOVERED, Purpose.BONUS)  # the order",
        "(Purpose.ACCEPT, Purpose.ACCEPT, Purpose.BONUS)  # the order",
        "tests/lossless/test_state.py::test_no_counter_serves_two_purposes",
    ),
    Mutant(
        VERIFIER,
        "(Purpose.ACCEPT, Purpose.RECOVERED, Purpose.BONUS)  # the order",
        "(Purpose.ACCEPT, Purpose.DRAFT, Purpose.BONUS)  # the order",
        "tests/lossless/test_scenarios_sampling.py::test_scenario_05_draft_and_residual_share_no_noise",
    ),
    Mutant(
        VERIFIER,
        "(Purpose.ACCEPT, Purpose.RECOVERED, Purpose.BONUS)  # the order",
        "(Purpose.DRAFT, Purpose.RECOVERED, Purpose.BONUS)  # the order",
        "tests/lossless/test_state.py::test_no_counter_serves_two_purposes",
    ),
    Mutant(
        VERIFIER,
        "probs, invalid = logits_to_probs(logits, sampling)  # [rows, vocab], [rows]",
        "probs, invalid = logits_to_probs(logits, RowSampling())  # [rows, vocab], [rows]",
        "tests/lossless/test_scenarios_law.py::test_scenario_01_target_probs_are_processed",
    ),
    Mutant(
        VERIFIER,
        "probs, invalid = logits_to_probs(logits, sampling)  # [rows, vocab], [rows]",
        "probs, invalid = logits_to_probs(0.75 * logits, sampling)  # [rows, vocab], [rows]",
        "tests/lossless/test_statistics.py::test_tokens_follow_the_targets_law",
    ),
    Mutant(
        VERIFIER,
        "DraftWeights.of([vector for member in self._members for vector",
        "DraftWeights.of([vector for member in self._members[::-1] for vector",
        "tests/lossless/test_scenarios_sampling.py::test_scenario_03_draft_probs_stay_with_their_sequence",
    ),
    Mutant(
        VERIFIER,
        "vectors = [(w.ids, w.weights) if w is not None else None for w",
        "vectors = [None for w",
        "tests/lossless/test_scenarios_sampling.py::test_scenario_02_draft_probs_reach_the_acceptance",
    ),
    Mutant(
        VERIFIER,
        "    for member in members:\n        key, ahead, first",
        "    for member in members[::-1]:\n        key, ahead, first",
        "tests/lossless/test_scenarios_stream.py::test_scenario_24_a_seeds_output_depends_on_nothing_else",
    ),
    Mutant(
        LAYOUT,
        "return self.row_starts + torch.minimum(num_accepted, self.num_rows - 1)",
        "return self.row_starts + torch.minimum(num_accepted + 1, self.num_rows - 1)",
        "tests/lossless/test_scenarios_law.py::test_scenario_10_the_residual_is_of_the_refused_row",
    ),
    Mutant(
        LAYOUT,
        "return self.row_starts + torch.minimum(num_accepted, self.num_rows - 1)",
        "return self.row_starts + torch.minimum(num_accepted, self.num_rows - 2).clamp(min=0)",
        "tests/lossless/test_law.py::test_joint_law_is_plain_decodings",
    ),
    Mutant(
        TARGET_SEQUENCE,
        "return replace(self.random_key, draw=start) if self.by_block else self.random_key",
        "return self.random_key",
        "tests/lossless/test_state.py::test_no_counter_serves_two_purposes",
    ),
    Mutant(
        OUTPUTS,
        "for index, token in enumerate(ids):",
        "for index, token in list(enumerate(ids))[-1:]:",
        "tests/lossless/test_scenarios_stream.py::test_scenario_22_a_stop_inside_a_window_ends_it",
    ),
    Mutant(
        OUTPUTS,
        "if index + 1 >= max_tokens_left:",
        "if index + 1 > max_tokens_left:",
        "tests/lossless/test_scenarios_stream.py::test_scenario_22_a_stop_inside_a_window_ends_it",
    ),
    Mutant(
        OUTPUTS,
        "after_minimum = num_output + index >= sampling.min_tokens",
        "after_minimum = num_output >= sampling.min_tokens",
        "tests/lossless/test_scenarios_sampling.py::test_scenario_25_min_tokens_and_bad_words_hold_inside_a_window",
    ),
    Mutant(
        NOISE,
        "return words(seeds, positions, Purpose.DRAFT, completions, draws)",
        "return words(seeds, positions, Purpose.BONUS, completions, draws)",
        "tests/lossless/test_state.py::test_no_counter_serves_two_purposes",
    ),
    Mutant(
        SAMPLER,
        "for token in drafted[: first + row] if token in column_of",
        "for token in drafted[:first] if token in column_of",
        "tests/lossless/test_scenarios_sampling.py::test_scenario_18_penalties_count_the_drafted_tokens",
    ),
    Mutant(
        SAMPLER,
        ".masked_fill_(counts[:, num_seen:] == 0, 1.0)",
        ".masked_fill_(counts[:, num_seen:] < 0, 1.0)",
        "tests/engine/test_sampler.py::test_each_row_of_a_window_equals_plain_decoding",
    ),
    Mutant(
        SAMPLER,
        "if holds_back and self.num_output + len(drafted) < self.params.min_tokens:",
        "if holds_back and self.num_output < self.params.min_tokens:",
        "tests/engine/test_sampler.py::test_min_tokens_hold_back_eos_and_stop_ids_by_position",
    ),
    Mutant(
        SAMPLER,
        "tail = (*self._tail, *drafted)",
        "tail = self._tail",
        "tests/engine/test_sampler.py::test_bad_words_match_over_committed_and_drafted_output",
    ),
    Mutant(
        SAMPLER,
        "prefix = plan.drafted[: plan.first + row - rows.start]",
        "prefix = plan.drafted[: plan.first]",
        "tests/lossless/test_scenarios_sampling.py::test_scenario_25_min_tokens_and_bad_words_hold_inside_a_window",
    ),
    Mutant(
        CACHE,
        "max(0, min(sequence.num_computed_tokens, length - 1))",
        "max(0, min(sequence.num_computed_tokens, length))",
        "tests/lossless/test_scenarios_stream.py::test_scenario_11_refusing_the_last_candidate_keeps_the_lengths",
    ),
    Mutant(
        CACHE,
        "full = min(num_committed, sequence.num_computed_tokens) // self.block_size",
        "full = num_committed // self.block_size",
        "tests/engine/test_kv_cache_manager.py::test_tokens_committed_but_not_computed_are_not_published",
    ),
    Mutant(
        CACHE,
        "full = min(num_committed, sequence.num_computed_tokens) // self.block_size",
        "full = (min(num_committed, sequence.num_computed_tokens) - 3) // self.block_size",
        "tests/lossless/test_scenarios_stream.py::test_scenario_15_the_prefix_cache_holds_committed_tokens_and_all_of_them",
    ),
    Mutant(
        CACHE,
        "for index in range((len(sequence) - 1) // self.block_size):",
        "for index in range(len(sequence) // self.block_size):",
        "tests/engine/test_kv_cache_manager.py::test_a_hit_covers_whole_blocks_and_at_most_all_but_one",
    ),
    Mutant(
        CACHE,
        "sequence.num_computed_tokens = len(sequence.block_table) * self.block_size",
        "sequence.num_computed_tokens = len(sequence) - 1 if sequence.block_table else 0",
        "tests/engine/test_kv_cache_manager.py::test_a_hit_covers_whole_blocks_and_at_most_all_but_one",
    ),
    Mutant(
        CACHE,
        "hashlib.sha256(parent + struct.pack(",
        "hashlib.sha256(struct.pack(",
        "tests/engine/test_kv_cache_manager.py::test_keys_depend_on_everything_before_and_around",
    ),
    Mutant(
        CACHE,
        "repr((salt, adapter, cache_dtype)).encode()",
        "repr((adapter, cache_dtype)).encode()",
        "tests/engine/test_kv_cache_manager.py::test_salt_and_cache_dtype_separate",
    ),
    Mutant(
        CACHE,
        "        for block in blocks:\n            self._forget(block)\n            self._references[block] = 1",
        "        for block in blocks:\n            self._references[block] = 1",
        "tests/engine/test_kv_cache_manager.py::test_cached_blocks_are_reused_last_and_least_recently_freed_first",
    ),
    Mutant(
        GRAMMAR,
        "if count and self._matcher is not None and not self._matcher.rollback(count):",
        "if count and self._matcher is None:",
        "tests/lossless/test_scenarios_sampling.py::test_scenario_25_a_grammars_state_moves_and_rolls_back_with_the_draft",
    ),
    Mutant(
        GRAMMAR,
        "ends = self._matcher.is_accepting() or self._matcher.is_stopped()",
        "ends = True",
        "tests/engine/test_grammar.py::test_it_allows_what_fits_and_nothing_else",
    ),
    Mutant(
        GRAMMAR,
        "return 0 < bound <= place.num_reasoned",
        "return 0 < bound < place.num_reasoned",
        "tests/engine/test_grammar.py::test_reasoning_may_be_bounded_without_a_constraint",
    ),
    Mutant(
        GRAMMAR,
        "return self._slow_from is not None and self._num_taken + len(drafted) >= self._slow_from",
        "return self._slow_from is not None",
        "tests/engine/test_grammar.py::test_slow_masks_are_said_of_a_place_and_those_behind_it",
    ),
    Mutant(
        GRAMMAR,
        "if self._matcher is not None and token in self._compiler.eos_ids:",
        "if self._matcher is None and token in self._compiler.eos_ids:",
        "tests/engine/test_grammar.py::test_output_without_reasoning_is_constrained_from_the_first_token",
    ),
    Mutant(
        MASKS,
        "if held.any():",
        "if len(held):",
        "tests/lossless/test_grammars.py::test_where_only_the_end_may_follow_other_wishes_yield",
    ),
    Mutant(
        DRAFT_ENGINE,
        "self.cache.publish(draft.sequence, draft.text.num_own(draft.committed) - 1)",
        "self.cache.publish(draft.sequence, len(draft.sequence))",
        "tests/lossless/test_state.py::test_keys_and_values_of_branches",
    ),
    Mutant(
        BRANCHES,
        "        if copy is not None:\n            copies.append(copy)",
        "        if copy is not None:\n            copies.clear()",
        "tests/lossless/test_state.py::test_keys_and_values_of_branches",
    ),
    Mutant(
        DRAFT_SEQUENCE,
        "if self.chain.drawn > self.committed:",
        "if self.chain.drawn > self.committed + MAX_AHEAD:",
        "tests/draft_service/test_in_turn.py::test_while_drawn_tokens_wait_no_lookup_is_asked",
    ),
    Mutant(
        DRAFT_SEQUENCE,
        "elif self.chain.number in commit.dropped:",
        "elif self.chain.number in commit.dropped and not new:",
        "tests/draft_service/test_sequence.py::test_a_commit_meets_a_chain",
    ),
    Mutant(
        CHAINS,
        "return min(agreeing, key=lambda branch: branch.number, default=None)",
        "return max(agreeing, key=lambda branch: branch.number, default=None)",
        "tests/draft_service/test_chains.py::test_the_lowest_number_wins",
    ),
    Mutant(
        CHAINS,
        "return TokenWeights(drafted.ids, drafted.weights) if drafted.ids else None",
        "return TokenWeights(drafted.ids, drafted.weights[4:] + drafted.weights[:4]) if drafted.ids else None",
        "tests/lossless/test_statistics.py::test_tokens_follow_the_targets_law",
    ),
    Mutant(
        DRAFT_ADMISSION,
        "context = context if request.may_recall else context.alone()",
        "context = context if request else context.alone()",
        "tests/lossless/test_seed_memory.py::test_each_call_has_the_targets_law",
    ),
    Mutant(
        LOCAL_DRAFTS,
        "drafted = context if request.may_recall else context.alone()",
        "drafted = context if request else context.alone()",
        "tests/lossless/test_seed_memory.py::test_each_call_has_the_targets_law",
    ),
    Mutant(
        DRAFT_ROWS,
        "if not self.by_chain:",
        "if not self.by_chain or number:",
        "tests/lossless/test_state.py::test_no_counter_serves_two_purposes",
    ),
    Mutant(
        FRAMES,
        "if received.header.number != self.last_number + 1:",
        "if received.header.number < self.last_number + 1:",
        "tests/rpc/test_frames.py::test_a_broken_peer_is_a_protocol_error",
    ),
    Mutant(
        FRAMES,
        "discarded = number < self._cut.get(sequence_id, 0)",
        "discarded = number < 0",
        "tests/rpc/test_frames.py::test_nothing_follows_a_close",
    ),
    Mutant(
        FRAMES,
        "if parent is not None and parent in self._opening and parent in self._lanes:",
        "if parent is not None and parent not in self._opening and parent in self._lanes:",
        "tests/rpc/test_frames.py::test_a_fork_waits_for_its_parents_whole_open",
    ),
    Mutant(
        FRAMES,
        "        elif sequence_id in self._forks:\n            self._late",
        "        elif sequence_id in self._finished:\n            self._late",
        "tests/rpc/test_frames.py::test_a_parents_close_waits_for_its_forks",
    ),
    Mutant(
        FRAMES,
        "over = sequence_id < self._highest - ID_WINDOW or self._is_marked",
        "over = self._is_marked",
        "tests/rpc/test_frames.py::test_ids_below_the_window_are_over",
    ),
    Mutant(
        FRAMES,
        "if len(self.ids) > self.num_ids:",
        "if len(self.ids) > self.num_ids + 1:",
        "tests/rpc/test_frames.py::test_a_broken_peer_is_a_protocol_error",
    ),
    Mutant(
        FRAMES,
        "        elif ends:\n            # Our",
        "        elif ends and state is SequenceState.LIVE:\n            # Our",
        "tests/rpc/test_frames.py::test_late_events_are_ignored_and_a_failure_ends",
    ),
    Mutant(
        CORE,
        "if event.position > self._draft_until:",
        "if event.position > self._draft_until + 1:",
        "tests/gateway/test_core.py::test_a_piece_past_the_drafts_credit_is_dropped",
    ),
    Mutant(
        CORE,
        "self._last_chain = max(self._last_chain, event.chain)",
        "self._last_chain = max(self._last_chain, 0)",
        "tests/gateway/test_core.py::test_the_number_of_a_dropped_piece_is_not_given_again",
    ),
    Mutant(
        CORE,
        "if len(self._journal) >= MAX_PIECES:",
        "if len(self._journal) > MAX_PIECES:",
        "tests/gateway/test_core.py::test_a_draft_that_floods_is_left",
    ),
    Mutant(
        CORE,
        "if self._num_bytes > most:",
        "if self._num_bytes > 2 * most:",
        "tests/gateway/test_core.py::test_a_draft_that_floods_by_bytes_is_left",
    ),
    Mutant(
        CORE,
        "enough = self.policy.plain_ahead // 2 if not",
        "enough = self.policy.plain_ahead if not",
        "tests/gateway/test_core.py::test_plain_credit_is_renewed_when_half_of_it_is_spent",
    ),
    Mutant(
        CORE,
        "known = self._prompt_told - event.position",
        "known = 0",
        "tests/gateway/test_core.py::test_the_prompts_logprobs_that_were_lost_between_slices_are_told_once",
    ),
    Mutant(
        CORE,
        "last = [ToDraft(_slim(news))] if news and self.draft_learns else []",
        "last = [ToDraft(_slim(news))] if news else []",
        "tests/gateway/test_core.py::test_another_draft_hears_of_no_finish",
    ),
    Mutant(
        CORE,
        "or closed.mode != self.policy.mode:",
        'or closed.mode == "":',
        "tests/gateway/test_core.py::test_rounds_without_the_chosen_draft_are_not_shown_to_the_chooser",
    ),
    Mutant(
        CORE,
        "        if until <= bound:\n            return until",
        "        if until:\n            return until",
        "tests/gateway/test_core.py::test_reading_is_looked_at_where_it_held_credit_back",
    ),
    Mutant(
        CORE,
        "return replace(self.request, output_ids=output_ids, timeout_ms",
        "return replace(self.request, timeout_ms",
        "tests/gateway/test_core.py::test_a_draft_that_learns_and_is_lost_is_sought_again",
    ),
    Mutant(
        OUTPUTS,
        "origin = TokenOrigin.BONUS if is_whole else TokenOrigin.RECOVERED",
        "origin = TokenOrigin.RECOVERED if is_whole else TokenOrigin.BONUS",
        "tests/lossless/test_state.py::test_a_block_is_findable_only_once_its_last_token_is_computed",
    ),
    Mutant(
        CORE,
        "suspect=suspect, resumed=resumed, prediction=())",
        "suspect=suspect, resumed=resumed, prediction=(), seed=self.request.seed + self._target_opens - 1)",
        "tests/simulation/test_worlds.py::test_every_invariant_holds_under_faults",
    ),
    Mutant(
        DRAFT_SEQUENCE,
        "return not self._weighs or chain.num_unsent == 1",
        "return True",
        "tests/draft_service/test_engine.py::test_a_draft_with_weights_ends_by_nothing_that_was_drawn",
    ),
    Mutant(
        DRAFT_ROWS,
        "return len(self.text) + self.offset",
        "return len(self.sequence) + self.offset",
        "tests/draft_service/test_mapped.py::test_rounds_are_those_of_a_draft_that_computes_all_afresh",
    ),
    Mutant(
        DRAWING,
        "return logits.new_full((len(logits), self.size), -torch.inf)",
        "return logits.new_full((len(logits), self.size), 0.0)",
        "tests/lossless/test_law.py::test_a_draft_of_another_vocabulary",
    ),
    Mutant(
        GRAMMAR,
        "self._write_mask(place, masks[length - first])",
        "self._write_mask(place, masks[max(0, length - first - 1)])",
        "tests/engine/test_grammar.py::test_masks_along_drafted_tokens_are_those_of_single_steps",
    ),
    Mutant(
        LOCAL_HEAD,
        "weights = tuple(TokenWeights(token.ids, token.weights) if token.ids else None for token in line.drawn)",
        "weights = tuple(TokenWeights(token.ids, token.weights) if token.ids else None for token in line.drawn[::-1])",
        "tests/lossless/test_statistics.py::test_tokens_follow_the_targets_law",
    ),
    Mutant(
        GATEWAY,
        "self._num_returned += cut.num_ids",
        "self._num_returned += len(commit.ids)",
        "tests/lossless/test_scenarios_stream.py::test_scenario_23_usage_counts_what_was_streamed",
    ),
    Mutant(
        GATEWAY,
        "token_ids=commit.ids[: cut.num_ids],",
        "token_ids=commit.ids,",
        "tests/lossless/test_scenarios_stream.py::test_scenario_22_a_stop_string_inside_a_window_ends_it",
    ),
    Mutant(
        PHILOX,
        "(purposes << PURPOSE_SHIFT) + draw, completions, seeds,",
        "(purposes << PURPOSE_SHIFT) + draw, 0 * completions, seeds,",
        "tests/kernels/test_random.py::test_purposes_draws_and_completions_share_no_word",
    ),
    Mutant(
        KV_STORE,
        "key_cache.flatten(0, 1).index_copy_(0, slot_mapping, keys)",
        "key_cache.flatten(0, 1).index_add_(0, slot_mapping, keys)",
        "tests/kernels/test_kv_store.py::test_rows_go_to_their_slots_and_others_stay",
    ),
    Mutant(
        FORCED,
        "if target.open.plain or window.parents or (target.rejects and window.goes_on) or (chain and chain.end > end):",
        "if target.open.plain or window.parents or (chain and chain.end > end):",
        "tests/lossless/test_forced_tokens.py::test_nothing_is_forced_where_the_drafts_next_token_takes_part",
    ),
)
