"""Seeded faults of the block drafters, their heads, their confidence and their checkpoints."""

from __future__ import annotations

from tests.mutants.run import Mutant

GOLDEN = "tests/drafters/test_dspark_golden.py"
ROUNDS = f"{GOLDEN}::test_deepspec_rounds[deepspec_dspark_vanilla]"
RNN_ROUNDS = f"{GOLDEN}::test_deepspec_rounds[deepspec_dspark_rnn]"
PRUNED = f"{GOLDEN}::test_single_block[speculators_dspark_vanilla]"
BONUS = f"{GOLDEN}::test_single_block[speculators_dspark_rnn_bonus_anchor]"
ZLAB = f"{GOLDEN}::test_zlab_rounds"
STATE = "tests/drafters/test_dspark_state.py"
MEMORY = "tests/drafters/test_dspark_memory.py"
REUSE = "tests/sampling/test_draft_reuse.py"
PLAIN = "tests/drafters/test_dspark_backbone.py::test_backbone_equals_the_plain_implementation"
PROBE = "tests/drafters/test_dspark_probe.py"
FORMATS = "tests/checkpoints/test_formats.py"
LOAD = "tests/checkpoints/test_load.py"
HEADS = "tests/heads/test_heads.py"
LINEAR = "tests/confidence/test_linear.py"

BLOCK = [
    Mutant(
        "draft positions shifted by one",
        "dspark/drafters/block.py",
        "return anchors.unsqueeze(1) + torch.arange(size, device=anchors.device)",
        "return anchors.unsqueeze(1) + 1 + torch.arange(size, device=anchors.device)",
        (ROUNDS,),
    ),
    Mutant(
        "the anchor's own feature is visible",
        "dspark/drafters/cached.py",
        "            self.cache.write(index, where, at, k, v)\n",
        "            own = slice(1 if size > 1 else 0, None)\n"
        "            self.cache.write(index, where[own], at[own], k[own], v[own])\n",
        (f"{STATE}::test_anchor_feature_is_never_visible",),
    ),
    Mutant(
        "block layout flipped",
        "dspark/drafters/block.py",
        "return 0 if self.sample_from_anchor else 1",
        "return 1 if self.sample_from_anchor else 0",
        (ZLAB,),
    ),
    Mutant(
        "stale entries behind the block are visible",
        "dspark/drafters/block.py",
        "seen = kv < start + size",
        "seen = kv < start + size + 64",
        (f"{STATE}::test_batch_of_unequal_contexts_equals_solo",),
    ),
    Mutant(
        "full layers are causal in the block",
        "dspark/checkpoints/transformer.py",
        "causal=(sliding and sliding_causal) if causal is None else causal",
        "causal=sliding_causal if causal is None else causal",
        (ROUNDS,),
    ),
    Mutant(
        "sliding layers are bidirectional in the block",
        "dspark/drafters/block.py",
        "            seen = seen & (kv <= query)\n",
        "            seen = seen & (kv < start + size)\n",
        (f"{GOLDEN}::test_specforge_masks",),
    ),
    Mutant(
        "a query window is one position too wide",
        "dspark/drafters/block.py",
        "seen = seen & (kv > query - layer.window)",
        "seen = seen & (kv >= query - layer.window)",
        (f"{GOLDEN}::test_specforge_masks",),
    ),
    Mutant(
        "an anchor window moves with the slot",
        "dspark/drafters/block.py",
        "seen = seen & (kv >= start - layer.window)",
        "seen = seen & (kv >= start + torch.arange(size)[:, None] - layer.window)",
        (f"{PLAIN}[qwen3, anchor window, causal]",),
    ),
    Mutant(
        "rows of a group are written back in the wrong order",
        "dspark/drafters/cached.py",
        "out[group.rows] = self._attend_group(index, layer, q[group.rows], group)",
        "out[group.rows.flip(0)] = self._attend_group(index, layer, q[group.rows], group)",
        (f"{STATE}::test_batch_of_unequal_contexts_equals_solo",),
    ),
    Mutant(
        "context keys miss their norm",
        "dspark/drafters/layers.py",
        "            k = rms_norm(k, self.k_norm, self.eps)\n        return rotate(k, cos, sin), v\n",
        "            k = rms_norm(k, None, self.eps)\n        return rotate(k, cos, sin), v\n",
        (ROUNDS,),
    ),
    Mutant(
        "Gemma 4 values miss their norm",
        "dspark/drafters/layers.py",
        "(rms_norm(v, None, self.eps) if self.gemma else v)",
        "v",
        (f"{GOLDEN}::test_deepspec_rounds[deepspec_dspark_gemma4]",),
    ),
    Mutant(
        "query heads are folded in the wrong order",
        "dspark/drafters/cached.py",
        "q.view(rows, size, spec.num_kv_heads, fold, dim).permute(0, 2, 3, 1, 4)",
        "q.view(rows, size, fold, spec.num_kv_heads, dim).permute(0, 3, 2, 1, 4)",
        (ROUNDS,),
    ),
]

CONTEXT = [
    Mutant(
        "draft keys stay stale after a rollback",
        "dspark/drafters/taps.py",
        "        state.add(start, done.taps[:rows])\n",
        "        known = max(0, min(rows, state.length - start))\n"
        "        state.add(start + known, done.taps[known:rows])\n",
        (f"{STATE}::test_a_longer_context_than_the_anchor_is_rolled_back",),
    ),
    Mutant(
        "what waits is not rewound",
        "dspark/drafters/taps.py",
        "        self.rewind(start)\n",
        "",
        (f"{STATE}::test_rollback_of_what_still_waits",),
    ),
    Mutant(
        "a slot keeps its last request's entries",
        "dspark/drafters/taps.py",
        "            del self._slots[slot]\n            self._backbone.cache.clear(slot)\n",
        "            del self._slots[slot]\n",
        (f"{STATE}::test_a_reused_slot_starts_empty",),
    ),
    Mutant(
        "the generation of a slot is ignored",
        "dspark/drafters/taps.py",
        "return state.length if state is not None and state.generation == generation else 0",
        "return state.length if state is not None else 0",
        (f"{STATE}::test_a_request_never_drafts_from_its_predecessors_context",),
    ),
    Mutant(
        "an older generation's release empties the slot",
        "dspark/drafters/taps.py",
        "        if state is not None and state.generation == generation:\n            del self._slots[slot]\n",
        "        if state is not None:\n            del self._slots[slot]\n",
        (f"{STATE}::test_release_of_an_older_generation_changes_nothing",),
    ),
    Mutant(
        "rows with a gap in their context draft",
        "dspark/drafters/dspark.py",
        "return np.where(ready, batch.gamma, 0).astype(np.int64)",
        "return np.full(len(ready), batch.gamma, dtype=np.int64)",
        (f"{STATE}::test_rows_without_their_context_draft_nothing",),
    ),
    Mutant(
        "features of rounds that did not draft are dropped",
        "dspark/drafters/taps.py",
        "            state.clear()\n",
        "            state.clear()\n            del taps[:-1], owners[:-1], places[:-1]\n",
        (f"{STATE}::test_plain_rounds_buffer_and_resume",),
    ),
    Mutant(
        "the context window is one position short",
        "dspark/drafters/block.py",
        "seen = seen & (kv >= start - window)",
        "seen = seen & (kv > start - window)",
        (f"{STATE}::test_context_window",),
    ),
    Mutant(
        "the last tap misses the final norm",
        "dspark/drafters/taps.py",
        "return torch.cat((rest, self._last_norm(last)), dim=1)",
        "return taps",
        (f"{STATE}::test_tap_at_the_last_layer",),
    ),
]

HEAD = [
    Mutant(
        "wrong previous token at slot 1",
        "dspark/drafters/dspark.py",
        "state, prev, drafted = self.head.start(anchors, hidden), anchors, []",
        "state, prev, drafted = self.head.start(anchors, hidden), torch.full_like(anchors, 96), []",
        (ROUNDS,),
    ),
    Mutant(
        "previous tokens are draft ids",
        "dspark/drafters/dspark.py",
        "            drafted.append(prev)\n",
        "            drafted.append(prev)\n"
        "            if self.token_map is not None:\n"
        "                prev = (self.token_map == prev[:, None]).int().argmax(-1)\n",
        (PRUNED,),
    ),
    Mutant(
        "the draft vocabulary is not mapped",
        "dspark/drafters/dspark.py",
        "names = self.token_map if ids is None else",
        "names = None if ids is None else",
        (PRUNED,),
    ),
    Mutant(
        "confidence reads the token that it scores",
        "dspark/drafters/dspark.py",
        "before = [anchors, *drafted[:-1]]",
        "before = drafted",
        (ROUNDS,),
    ),
    Mutant(
        "head state is kept across rounds and slots",
        "dspark/heads/rnn.py",
        "        return hidden.new_zeros(anchors.shape[0], self.rank)\n",
        "        self.kept = getattr(self, 'kept', hidden.new_zeros(anchors.shape[0], self.rank)) + 0.5\n"
        "        return self.kept.expand(anchors.shape[0], -1)\n",
        (RNN_ROUNDS,),
    ),
    Mutant(
        "the RNN's output sees the new state",
        "dspark/heads/rnn.py",
        "return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)",
        "state = keep * state + (1 - keep) * torch.tanh(candidate)\n        return torch.tanh(output) + state, state",
        (RNN_ROUNDS,),
    ),
    Mutant(
        "the gate reads embedding before hidden state",
        "dspark/heads/gated.py",
        "torch.cat((hidden, e), dim=-1)",
        "torch.cat((e, hidden), dim=-1)",
        (f"{HEADS}::test_golden_heads",),
    ),
    Mutant(
        "candidates' logits are of other tokens",
        "dspark/drafters/dspark.py",
        "base, ids = rows.gather(1, top)",
        "base, ids = rows[:, : self.candidates].clone()",
        (f"{STATE}::test_candidates_bias_and_keep_exactly_the_top",),
    ),
    Mutant(
        "candidates are draft ids of a pruned vocabulary",
        "dspark/drafters/dspark.py",
        "ids if self.token_map is None else self.token_map[ids]",
        "ids",
        (f"{STATE}::test_candidates_of_a_pruned_vocabulary",),
    ),
    Mutant(
        "the head's bias is of the wrong candidates",
        "dspark/drafters/dspark.py",
        "None if ids is None else ids[k])\n",
        "None if ids is None else ids[0])\n",
        (f"{STATE}::test_candidates_bias_and_keep_exactly_the_top",),
    ),
    Mutant(
        "q is kept in a second block",
        "dspark/drafters/dspark.py",
        "names[k], reuse=True)",
        "names[k])",
        (f"{MEMORY}::test_base_logits_and_q_are_one_block",),
    ),
    Mutant(
        "a buffer that was not handed over is written to",
        "dspark/sampling/draft.py",
        "own = reuse or logits.dtype",
        "own = True or logits.dtype",
        (f"{REUSE}::test_a_handed_over_buffer_changes_nothing",),
    ),
    Mutant(
        "laws of scattered rows are left at the wrong rows",
        "dspark/sampling/draft.py",
        "            scores = logits[: len(self._laws)].copy_(scores)",
        "            scores = logits[: len(self._laws)]",
        (f"{REUSE}::test_a_handed_over_buffer_changes_nothing",),
    ),
    Mutant(
        "candidates take the noise of other rows' tokens",
        "dspark/sampling/draft.py",
        "ids = take_rows(token_map, who) if",
        "ids = token_map[: len(who)] if",
        (f"{REUSE}::test_candidates_of_each_row_are_the_masked_vocabulary",),
    ),
    Mutant(
        "q of candidates is read with other rows' tokens",
        "dspark/sampling/draft.py",
        "ids = take_rows(ids, rows[here]) if",
        "ids = ids[: int(here.sum())] if",
        (f"{REUSE}::test_candidates_of_each_row_are_the_masked_vocabulary",),
    ),
    Mutant(
        "soft-capping is left out",
        "dspark/drafters/cached.py",
        "torch.tanh(out / self.softcap) * self.softcap",
        "out",
        (f"{GOLDEN}::test_deepspec_rounds[deepspec_dspark_gemma4]",),
    ),
    Mutant(
        "a gamma beyond the trained block is taken",
        "dspark/drafters/dspark.py",
        "    if gamma > config.max_gamma:\n",
        "    if gamma > 2 * config.max_gamma:\n",
        (f"{STATE}::test_gamma_beyond_the_trained_block_is_refused_with_both_numbers",),
    ),
]

FILES = [
    Mutant(
        "d2t is read as absolute ids",
        "dspark/checkpoints/tensors.py",
        "ids = torch.arange(len(offsets), device=offsets.device) + offsets.long()",
        "ids = offsets.long()",
        (f"{LOAD}::test_golden_folders_load",),
    ),
    Mutant(
        "speculators' layer ids are read as DeepSpec's",
        "dspark/checkpoints/eagle3.py",
        "tuple(k - 1 for k in root.ids(key))",
        "tuple(root.ids(key))",
        (f"{FORMATS}::test_golden_configs",),
    ),
    Mutant(
        "speculators' windows are measured from the query",
        "dspark/checkpoints/formats.py",
        'window_from="anchor"',
        'window_from="query"',
        (PRUNED,),
    ),
    Mutant(
        "an absent layout key of speculators is read as anchor-first",
        "dspark/checkpoints/formats.py",
        '8),\n            "sample_from_anchor": root.flag("sample_from_anchor", False)',
        '8),\n            "sample_from_anchor": root.flag("sample_from_anchor", True)',
        (f"{FORMATS}::test_absent_layout_key_takes_the_formats_default",),
    ),
    Mutant(
        "unexpected tensors are ignored",
        "dspark/checkpoints/tensors.py",
        "extra = [name for name in tensors if name not in specs and",
        "extra = [name for name in () if name not in specs and",
        (f"{LOAD}::test_one_error_lists_missing_unexpected_and_misshapen",),
    ),
    Mutant(
        "padding of the draft vocabulary is kept",
        "dspark/drafters/fit.py",
        "keep = (known < vocab_size).nonzero().flatten()",
        "keep = (known < vocab_size + 8).nonzero().flatten()",
        (f"{STATE}::test_padded_target_vocabulary_with_a_map_beyond_it",),
    ),
    Mutant(
        "a mask id equal to the rows of the embedding is taken",
        "dspark/checkpoints/schema.py",
        "0 <= self.mask_token_id < self.vocab_size",
        "0 <= self.mask_token_id <= self.vocab_size",
        (f"{FORMATS}::test_refused_values",),
    ),
    Mutant(
        "the probe takes the worst alternative for the best",
        "dspark/drafters/probe_text.py",
        "if value > max(score + MARGIN, chance + CHANCE) and hit > hits + MORE_HITS",
        "if value < score - MARGIN and hit < hits - MORE_HITS",
        (f"{PROBE}::test_the_right_checkpoint_passes",),
    ),
    Mutant(
        "STS of another verifier is applied",
        "dspark/confidence/calibration.py",
        "(self.target, self.verifier, self.mode) == (target, verifier, mode)",
        "self.target == target",
        (f"{LINEAR}::test_sts_applies_to_rows_that_it_fits_and_says_where_not",),
    ),
    Mutant(
        "STS multiplies by its temperatures",
        "dspark/confidence/linear.py",
        "logits = logits / self._temperatures(batch, logits.shape[1])",
        "logits = logits * self._temperatures(batch, logits.shape[1])",
        (f"{LINEAR}::test_sts_applies_to_rows_that_it_fits_and_says_where_not",),
    ),
]

DRAFTER_MUTANTS: list[Mutant] = [*BLOCK, *CONTEXT, *HEAD, *FILES]
