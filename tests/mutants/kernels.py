"""Seeded faults of the kernels, of what chooses them, and of device-side planning."""

from __future__ import annotations

from tests.mutants.run import Mutant

BIAS = "tests/kernels_interp/test_bias_sample.py"
REJECT = "tests/kernels_interp/test_reject_sample.py"
NOISE = "tests/kernels_interp/test_noise.py"
DESCRIBE = "tests/kernels_interp/test_describe.py"
TILES = "tests/kernels_interp/test_tiles.py"
MEASURE = "tests/ops/test_measure.py"
DRAWN = f"{BIAS}::test_draws_the_references_tokens"
DECIDED = f"{REJECT}::test_decides_as_the_reference"

KERNEL_MUTANTS = [
    Mutant(
        "a NaN with a sign is below every score, and top-k hides it",
        "dspark/ops/triton/masks.py",
        "return tl.where(scores != scores, 0x7FFFFFFF, b ^ ((b >> 31) & 0x7FFFFFFF))",
        "return b ^ ((b >> 31) & 0x7FFFFFFF)",
        (f"{TILES}::test_a_nan_of_either_sign_ends_its_row_under_every_mask[-NaN]",),
    ),
    Mutant(
        "of equal scores of two steps of tiles the later is taken",
        "dspark/ops/triton/fold.py",
        "better = part > top",
        "better = part >= top",
        (f"{TILES}::test_a_draw_from_many_tiles[6x193-r0-float32-tied]",),
    ),
    Mutant(
        "top-p counts the ties of each tile anew",
        "dspark/ops/triton/masks.py",
        "        seen += tl.sum(tied.to(tl.int32), axis=0)\n",
        "",
        (f"{TILES}::test_ties_at_a_masks_edge_that_lie_on_both_sides_of_a_tiles",),
    ),
    Mutant(
        "a head's input of another dtype than W2 reaches the compiler",
        "dspark/ops/bias_sample.py",
        "if latent.dtype != w2.dtype:",
        "if False:",
        (f"{BIAS}::test_a_head_of_two_dtypes_is_refused",),
    ),
    Mutant(
        "a launch takes a constant that is not compiled for",
        "dspark/ops/triton/reject_sample.py",
        "BLOCK_T=FOLD_BLOCK, num_warps=1",
        "BLOCK_T=max(2, tiles), num_warps=1",
        (f"{DESCRIBE}::test_calls_of_reject_sample_are_listed[point-mass-torch.bfloat16]",),
    ),
    Mutant(
        "tuning takes a tile that spills",
        "dspark/ops/triton/measure.py",
        "        if spilled:\n",
        "        if False:\n",
        (f"{MEASURE}::test_a_tile_whose_kernels_spill_is_never_chosen",),
    ),
    Mutant(
        "reject_sample: log q of a view is read as if it had no gaps",
        "dspark/ops/triton/reject_sample.py",
        "keys.contiguous(), dense(log_q, torch.float32)",
        "keys.contiguous(), log_q",
        (f"{REJECT}::test_views_are_read_by_their_strides",),
    ),
    Mutant(
        "reject_sample: two outputs share their memory",
        "dspark/ops/triton/reject_sample.py",
        "accepted = torch.zeros(rows, dtype=torch.int64, device=device)\n    token = torch.zeros_like(accepted)",
        "accepted, token = torch.zeros(2, rows, dtype=torch.int64, device=device)",
        (f"{REJECT}::test_outputs_share_no_memory",),
    ),
    Mutant(
        "bias_sample: the tail of the last tile is not masked",
        "dspark/ops/triton/bias_sample.py",
        'scores = tl.load(base + where, mask=both, other=-float("inf")).to(tl.float32)',
        "scores = tl.load(base + where, mask=both, other=0.0).to(tl.float32)",
        (f"{DRAWN}[small-1x65-r16-float32-plain]",),
    ),
    Mutant(
        "bias_sample: every row has the settings of the first",
        "dspark/ops/triton/bias_sample.py",
        "warmth = tl.load(temperature + r, mask=live, other=1.0)",
        "warmth = tl.load(temperature + r * 0, mask=live, other=1.0)",
        (f"{DRAWN}[small-3x257-r24-bfloat16-plain]",),
    ),
    Mutant(
        "bias_sample: every row has the noise of the first",
        "dspark/ops/triton/common.py",
        "k1 = tl.load(keys + 2 * rows + 1, mask=mask, other=0)",
        "k1 = tl.load(keys + 1 + 0 * rows, mask=mask, other=0)",
        (f"{DRAWN}[small-3x257-r24-bfloat16-plain]",),
    ),
    Mutant(
        "bias_sample: a pruned drafter's noise goes by draft id",
        "dspark/ops/triton/bias_sample.py",
        "counters = tl.load(names + columns, mask=inside, other=0).to(tl.int32) if HAS_NAMES else columns",
        "counters = columns",
        (f"{BIAS}::test_noise_goes_by_target_id",),
    ),
    Mutant(
        "bias_sample: of equal scores the last is taken",
        "dspark/ops/triton/common.py",
        "return tl.min(tl.where(values == best, columns, LAST), axis=axis)",
        "return tl.max(tl.where(values == best, columns, 0), axis=axis)",
        (f"{BIAS}::test_greedy_rows_take_the_lowest_of_equal_scores_without_noise",),
    ),
    Mutant(
        "bias_sample: tiles are folded without their masses",
        "dspark/ops/triton/fold.py",
        "total = total * tl.exp(high - level) + tl.sum(sums * tl.exp(peaks - level), axis=0)",
        "total = total * tl.exp(high - level) + tl.sum(tl.exp(peaks - level), axis=0)",
        (f"{DRAWN}[small-3x257-r24-bfloat16-plain]",),
    ),
    Mutant(
        "noise of the kernels that can be infinite",
        "dspark/ops/triton/common.py",
        "tail = tl.where(lost > 0.0, -tl.log(w) * (u / tl.where(lost > 0.0, lost, 1.0)), u)",
        "tail = -tl.log(w)",
        (f"{NOISE}::test_extremes_are_finite_and_ordered",),
    ),
    Mutant(
        "noise of the kernels: the second round of the hash forgets its key",
        "dspark/ops/triton/common.py",
        "return mix32(mix32(counters ^ k0) + k1)",
        "return mix32(mix32(counters ^ k0))",
        (f"{NOISE}::test_words_equal_the_reference",),
    ),
    Mutant(
        "noise draws are keyed without their purpose",
        "dspark/sampling/draws.py",
        "place = keys.anchor, keys.offset, int(keys.purpose)",
        "place = keys.anchor, keys.offset",
        ("tests/sampling/test_fused.py::test_no_two_draws_share_their_noise",),
    ),
    Mutant(
        "reject_sample: the token after is drawn from the row of the anchor",
        "dspark/ops/triton/reject_kernels.py",
        "n = tl.load(starts + r, mask=live, other=0).to(tl.int64) + taken\n",
        "n = tl.load(starts + r, mask=live, other=0).to(tl.int64)\n",
        (f"{DECIDED}[9x3x65-law-float32-plain]",),
    ),
    Mutant(
        "reject_sample: the residual is not clamped at 0",
        "dspark/ops/triton/reject_kernels.py",
        "rest = tl.maximum(p - q, 0.0)",
        "rest = tl.abs(p - q)",
        (f"{DECIDED}[9x3x65-law-float32-plain]",),
    ),
    Mutant(
        "reject_sample: q is that of another request",
        "dspark/ops/triton/reject_kernels.py",
        "d = tl.load(draft_rows + r, mask=live, other=0).to(tl.int64)",
        "d = r.to(tl.int64)",
        (f"{DECIDED}[8x2x65-law-float32-plain-shuffled]",),
    ),
    Mutant(
        "reject_sample: q at candidates is that of the last one of a tile",
        "dspark/ops/triton/reject_kernels.py",
        "q = tl.where(tokens[None, :] == name[:, None], value[:, None], q)",
        "q = tl.where(tokens[None, :] == name[:, None], value[:, None], 0.0)",
        (f"{DECIDED}[8x2x65-law-float32-plain-9-of]",),
    ),
    Mutant(
        "reject_sample: candidates keep their place while their names are sorted",
        "dspark/ops/triton/reject_sample.py",
        "chances.gather(1, order)",
        "chances",
        (f"{DECIDED}[8x2x90-pruned-bfloat16-plain-40-of-shuffled]",),
    ),
    Mutant(
        "reject_sample: a row that took the argmax has a law",
        "dspark/ops/triton/reject_kernels.py",
        "            certain = cut_short & (warm == 0.0)\n            spread = cut_short & (warm != 0.0)\n",
        "            certain = cut_short & (warm < 0.0)\n            spread = cut_short & (warm >= 0.0)\n",
        (f"{DECIDED}[8x2x65-law-float32-plain-cold]",),
    ),
    Mutant(
        "masks are applied neither by the engine nor by the operation",
        "dspark/verifiers/fused.py",
        "settings_of(batch.unwarped or (), self.device) if sampled else None",
        "None",
        ("tests/drafters/test_kernels_exact.py::test_masks_are_applied_by_the_operation[top_k]",),
    ),
    Mutant(
        "the operation's warpers come on top of the engine's",
        "dspark/sampling/processors.py",
        "[e for e in entries if e.state.mode not in unwarped]",
        "entries",
        ("tests/sampling/test_fused.py::test_the_engine_warps_for_those_that_do_not",),
    ),
    Mutant(
        "processed log-probabilities without the masks",
        "dspark/engine/verification.py",
        "masked(scores, request.params) if request.mode in self.unwarped else scores",
        "scores",
        ("tests/drafters/test_kernels_exact.py::test_logprobs_are_processed_where_the_operation_applies_the_masks",),
    ),
    Mutant(
        "reject_sample: the draft is drawn without the head's bias when q is recomputed",
        "dspark/ops/triton/reject_kernels.py",
        "                if RANK > 0:\n                    drafted +=",
        "                if RANK > 9999:\n                    drafted +=",
        (f"{DECIDED}[9x3x65-law-float32-plain]",),
    ),
    Mutant(
        "reject_sample: coupled rows take the likeliest token",
        "dspark/ops/triton/reject_kernels.py",
        "            if kind == _COUPLED:\n",
        "            if kind == 99:\n",
        (f"{DECIDED}[9x3x65-law-float32-plain]",),
    ),
    Mutant(
        "reject_sample: drafts are accepted against p alone",
        "dspark/ops/triton/reject_kernels.py",
        "                if HAS_Q:\n                    log_ratio",
        "                if False:\n                    log_ratio",
        (f"{DECIDED}[9x3x65-law-float32-plain]",),
    ),
    Mutant(
        "top-p keeps every token equal to its threshold",
        "dspark/ops/triton/masks.py",
        "(columns >= cut)",
        "(columns >= 0)",
        (f"{REJECT}::test_masks_are_those_of_the_engines_warpers[tied]",),
    ),
    Mutant(
        "top-k counts one token too few",
        "dspark/ops/triton/masks.py",
        "k.to(tl.float32), False, BLOCK)",
        "k.to(tl.float32) + 1.0, False, BLOCK)",
        (f"{DECIDED}[4x1x70-law-float32-plain-top_k]",),
    ),
    Mutant(
        "a kernel that was asked for and can't run is not refused",
        "dspark/ops/dispatch.py",
        "        if obstacle:\n            raise ConfigError(",
        "        if False:\n            raise ConfigError(",
        ("tests/ops/test_dispatch.py::test_what_is_asked_for_and_can_not_run_is_refused",),
    ),
    Mutant(
        "device budget: one more than K is admitted",
        "dspark/ops/device.py",
        "admitted = (rank < budget)",
        "admitted = (rank <= budget)",
        ("tests/ops/test_device.py::test_the_budget_is_spent_on_prefixes_and_ties_go_by_place",),
    ),
    Mutant(
        "device packing: a row begins with its first draft",
        "dspark/ops/device.py",
        "token = torch.where(offset == 0,",
        "token = torch.where(offset < 0,",
        ("tests/ops/test_device.py::test_packing_lays_rows_one_after_the_other",),
    ),
    Mutant(
        "flex attention sees the next position",
        "dspark/ops/flex.py",
        "(place <= position[query])",
        "(place <= position[query] + 1)",
        ("tests/ops/test_flex.py::test_each_query_sees_its_own_slot_up_to_itself",),
    ),
]
