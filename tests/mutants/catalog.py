"""The seeded faults, by what they break. Each names the tests that must notice it within 30 seconds.

``edit_plan`` mutants put a cheat of ``dspark.testing.cheats`` behind the scheduler, as a careless engine would edit a
finished plan.
"""

from __future__ import annotations

from tests.mutants.run import Mutant

MATRIX = "tests/exactness/test_matrix.py::test_the_output_law_is_the_targets"
APPENDIX = "tests/exactness/test_appendix_a.py"
COUPLED = "tests/exactness/test_coupled.py"
JOINT = "tests/exactness/test_joint.py"
ONE_ROUND = "tests/exactness/test_one_round.py::test_one_round_from_ten_histories"
PROPERTY = "tests/exactness/test_non_anticipation.py"
DRAWS = "tests/exactness/test_draws.py"
LAW = "tests/engine/test_cases_law.py"
STATE = "tests/engine/test_cases_state.py"

FIXED = f"{MATRIX}[table-token-fixed-dip-T=1]"
CAUSAL = f"{MATRIX}[table-token-causal-rising-T=1]"
KEYS = f"{DRAWS}::test_no_key_repeats_over_200_rounds"


def edit_plan(name: str, edit: str, *tests: str) -> Mutant:
    return Mutant(
        name,
        "dspark/engine/planning.py",
        "        plan = parts.scheduler.plan(request, parts.cost)\n",
        "        from dspark.testing import cheats\n\n"
        "        seconds = lambda tokens: parts.cost.verify_seconds(tokens, request.context)\n"
        "        plan = parts.scheduler.plan(request, parts.cost)\n"
        f"        plan = cheats.{edit}\n",
        tests,
    )


ACCEPTANCE = [
    Mutant(
        "wrong q: the residual takes the draft's law before the warpers",
        "dspark/sampling/draft.py",
        "        self._weights.append(weights)\n",
        "        self._weights.append(reference.softmax_rows(take_rows(logits, self._laws)))\n",
        (f"{LAW}::test_case_3_processors_run_once_before_both_laws",),
    ),
    Mutant(
        "wrong q: acceptance takes a sampled draft for a point mass",
        "dspark/sampling/draft.py",
        "        probs[laws] = picked / weights.sum(-1, dtype=torch.float64)\n",
        "        probs[laws] = 1.0\n",
        (FIXED,),
    ),
    Mutant(
        "wrong q: a point mass has the mass of a uniform draw",
        "dspark/sampling/draft.py",
        "return torch.ones(self.token_ids.shape, dtype=torch.float64, device=self.token_ids.device)",
        "return torch.full(self.token_ids.shape, 0.5, dtype=torch.float64, device=self.token_ids.device)",
        (f"{LAW}::test_case_2_an_argmax_drafter_is_a_point_mass",),
    ),
    Mutant(
        "wrong q: the draft's law of another request",
        "dspark/engine/verification.py",
        "            draft_rows=draft_rows,\n",
        "            draft_rows=draft_rows * 0,\n",
        (f"{JOINT}::test_the_joint_law_of_one_round[fixed]",),
    ),
    Mutant(
        "accept with q / p",
        "dspark/ops/reference.py",
        "(p.to(torch.float64) / q.to(torch.float64))",
        "(q.to(torch.float64) / p.to(torch.float64))",
        (FIXED,),
    ),
    Mutant(
        "the bonus token is drawn from the wrong row",
        "dspark/verifiers/rejection.py",
        "batch.scores, batch.row_starts[rows] + k)",
        "batch.scores, batch.row_starts[rows] + k - ((batch.verify_lens[rows] == k) & (k > 0)))",
        (FIXED,),
    ),
    Mutant(
        "the corrected token is drawn from p, not from the residual",
        "dspark/verifiers/rejection.py",
        "_residual(batch, alive[which], k, law) if rejected else law",
        "law",
        (FIXED,),
    ),
    Mutant(
        "the residual is not clamped at 0",
        "dspark/ops/reference.py",
        "    rest.clamp_(min=0.0)\n",
        "    rest.abs_()\n",
        (FIXED,),
    ),
    Mutant(
        "greedy takes the last of equal scores",
        "dspark/ops/reference.py",
        "scores.detach().numpy().argmax(axis=-1))",
        "scores.shape[-1] - 1 - scores.detach().numpy()[..., ::-1].argmax(axis=-1))",
        (f"{STATE}::test_case_10_an_exact_tie_goes_to_the_lowest_id",),
    ),
    Mutant(
        "greedy's token after a rejection is read from the last verified row",
        "dspark/verifiers/greedy.py",
        "return VerifyResult(accepted, tokens[starts + accepted])",
        "return VerifyResult(accepted, tokens[starts + lens])",
        (f"{STATE}::test_greedy_equals_one_by_one_with_any_drafter",),
    ),
]

PROCESSORS = [
    Mutant(
        "frequency penalty off by one: drafts before a row are not counted",
        "dspark/sampling/history.py",
        "            counts[token] += 1\n",
        "",
        (f"{LAW}::test_case_5_processors_reach_every_verified_row[{{'frequency_penalty': 1.1}}]",),
    ),
    Mutant(
        "repetition penalty off by one: drafts before a row are not counted",
        "dspark/sampling/history.py",
        "            extra.add([token])\n",
        "",
        (f"{LAW}::test_case_5_processors_reach_every_verified_row[{{'repetition_penalty': 1.8}}]",),
    ),
    Mutant(
        "a committed token is forgotten by the penalties",
        "dspark/sampling/history.py",
        "            self._counts.update(token_ids)\n",
        "            self._counts.update(token_ids[:-1])\n",
        (f"{LAW}::test_case_6_a_loop_under_a_frequency_penalty_counts_each_accepted_token",),
    ),
    Mutant(
        "warpers on the last row only",
        "dspark/sampling/processors.py",
        "params[entry.row_start : entry.row_start + entry.rows] = [entry.state.params] * entry.rows",
        "params[entry.row_start + entry.rows - 1] = entry.state.params",
        (f"{LAW}::test_case_5_processors_reach_every_verified_row[{{'min_p': 0.3}}]",),
    ),
    Mutant(
        "min_tokens counts the rows of a block as one token",
        "dspark/sampling/processors.py",
        "        for k in range(short):\n",
        "        for k in range(entry.rows if short > 0 else 0):\n",
        (f"{LAW}::test_case_15_a_draft_eos_that_is_rejected_does_not_end_the_sequence",),
    ),
    Mutant(
        "rejected tokens advance a stateful processor",
        "dspark/sampling/processors.py",
        "[p.fork() for p in entry.state.processors]",
        "list(entry.state.processors)",
        (f"{LAW}::test_case_7_rejected_tokens_never_reach_a_stateful_processor",),
    ),
    Mutant(
        "accepted tokens never reach a stateful processor",
        "dspark/sampling/history.py",
        "                    processor.advance(int(token))\n",
        "                    pass\n",
        (f"{LAW}::test_case_11_a_grammar_with_illegal_drafts",),
    ),
    Mutant(
        "greedy passes the warpers",
        "dspark/sampling/processors.py",
        "if e.state.mode is not Mode.GREEDY and needs_warpers(e.state.params)",
        "if needs_warpers(e.state.params)",
        (f"{STATE}::test_case_9_greedy_ignores_warpers_and_accepts_an_equal_drafter",),
    ),
]

RANDOMNESS = [
    Mutant(
        "a draft's draw is keyed by absolute position alone",
        "dspark/sampling/draft.py",
        "self._anchors[who], np.full(len(who), offset, dtype=np.int64), Purpose.DRAFT)",
        "self._anchors[who] + offset, np.full(len(who), 0, dtype=np.int64), Purpose.DRAFT)",
        (KEYS,),
    ),
    Mutant(
        "draws are keyed by row, not by request",
        "dspark/sampling/draft.py",
        "return DrawKeys(self._keys[who], self._anchors[who]",
        "return DrawKeys(who.astype(np.uint64), self._anchors[who]",
        (KEYS,),
    ),
    Mutant(
        "draft and residual share a draw",
        "dspark/verifiers/rejection.py",
        "accepted, Purpose.RESIDUAL)",
        "accepted, Purpose.DRAFT)",
        (FIXED, KEYS),
    ),
    Mutant(
        "acceptance and draft share a draw",
        "dspark/verifiers/rejection.py",
        "Purpose.ACCEPT)",
        "Purpose.DRAFT)",
        (FIXED, KEYS),
    ),
    Mutant(
        "the hash adds anchor and offset",
        "dspark/sampling/draws.py",
        "keys.request, keys.anchor, keys.offset, int(keys.purpose))",
        "keys.request, keys.anchor + keys.offset, int(keys.purpose))",
        (f"{DRAWS}::test_no_two_draws_share_their_uniform",),
    ),
    Mutant(
        "the hash drops the purpose",
        "dspark/sampling/draws.py",
        "keys.request, keys.anchor, keys.offset, int(keys.purpose))",
        "keys.request, keys.anchor, keys.offset)",
        (f"{DRAWS}::test_no_two_draws_share_their_uniform",),
    ),
    Mutant(
        "two live requests share a key",
        "dspark/engine/admission.py",
        "        if key in self._live_keys:\n            raise",
        "        if False:\n            raise",
        (f"{STATE}::test_case_8_a_second_live_request_with_the_same_key_is_refused",),
    ),
    Mutant(
        "noise that can be infinite",
        "dspark/ops/noise.py",
        "    return u.neg_().log1p_().neg_().log_().neg_()\n",
        "    return u.log_().neg_().log_().neg_()\n",
        ("tests/ops/test_noise.py::test_extremes_are_finite_and_ordered",),
    ),
    Mutant(
        "coupled: the verifier's noise is off by one position",
        "dspark/verifiers/coupled.py",
        "batch.anchors[rows] + 1 + k, ",
        "batch.anchors[rows] + k, ",
        (f"{COUPLED}::test_every_drafter_and_sampling_gives_the_same_tokens[table-T=.7]",),
    ),
    Mutant(
        "coupled: every row of a block has the noise of the first",
        "dspark/verifiers/coupled.py",
        "batch.anchors[rows] + 1 + k, ",
        "batch.anchors[rows] + 1, ",
        (f"{COUPLED}::test_every_drafter_and_sampling_gives_the_same_tokens[table-T=.7]",),
    ),
    Mutant(
        "coupled: the drafter's noise is off by one position",
        "dspark/sampling/draft.py",
        "self._anchors[who] + 1 + offset, ",
        "self._anchors[who] + offset, ",
        (f"{COUPLED}::test_an_equal_drafter_is_always_accepted",),
    ),
    Mutant(
        "coupled: a pruned drafter's noise goes by draft id",
        "dspark/sampling/draft.py",
        "self.vocab_size, token_map)\n            known",
        "self.vocab_size)\n            known",
        (f"{COUPLED}::test_pruned_drafts_use_the_noise_of_their_target_ids",),
    ),
]

SCHEDULE = [
    Mutant(
        "causal is retrospective",
        "dspark/scheduling/causal.py",
        "from dspark._sched import Causal, CostTable\n",
        "from dspark._sched import CostTable\nfrom dspark._sched import Global as Causal\n",
        (f"{APPENDIX}::test_what_ships_keeps_the_law[causal]",),
    ),
    edit_plan(
        "lookahead retreats to the best point that it passed",
        "retreat(plan, request, seconds)",
        f"{APPENDIX}::test_lookahead_crosses_the_dip_in_both_cases",
    ),
    edit_plan(
        "a guard vetoes a finished plan",
        "veto(plan, request, seconds, 1.2)",
        CAUSAL,
    ),
    edit_plan(
        "the minimum over requests",
        "minimum(plan, request)",
        f"{JOINT}::test_the_joint_law_of_one_round[causal]",
    ),
    edit_plan(
        "the plan is rounded down to a bucket",
        "bucket_down(plan, request, (2, 4, 8))",
        f"{JOINT}::test_the_joint_law_of_one_round[causal]",
    ),
    Mutant(
        "without ragged batches the shortest is verified for all",
        "dspark/engine/planning.py",
        "int(plan.verify_lens.max(initial=0))",
        "int(plan.verify_lens.min(initial=99))",
        (
            f"{STATE}::test_case_26_without_ragged_batches_the_longest_is_verified_for_all",
            f"{JOINT}::test_the_joint_law_where_the_longest_is_verified_for_all[causal]",
        ),
    ),
    Mutant(
        "the estimate reads the token that it scores",
        "dspark/engine/planning.py",
        "        return Confidence(probs, survival(probs, max_lens(drafting, block)))\n",
        "        probs = np.where(block.token_ids.numpy() == 1, 0.0, probs)\n"
        "        return Confidence(probs, survival(probs, max_lens(drafting, block)))\n",
        (CAUSAL,),
    ),
    Mutant(
        "a doubtful draft is cut because of its own value",
        "dspark/engine/pack.py",
        "        length = 0 if row is None or plan is None else int(plan.verify_lens[row])\n",
        "        length = 0 if row is None or plan is None else int(plan.verify_lens[row])\n"
        "        length = 0 if length and draft_ids[row][0] == 1 else length\n",
        (FIXED,),
    ),
    Mutant(
        "a retrospective scheduler is admitted with rejection",
        "dspark/engine/parts.py",
        "    if parts.scheduler.capabilities.anticipates:\n",
        "    if False:\n",
        (f"{APPENDIX}::test_global_is_refused_with_rejection_and_biased_where_the_user_insists",),
    ),
    Mutant(
        "drafts beyond the budget are verified",
        "dspark/engine/state.py",
        "self.params.max_tokens - self.output_len - 1, ",
        "self.params.max_tokens - self.output_len, ",
        (f"{STATE}::test_the_budget_caps_drafts",),
    ),
]

FAULTS = [
    Mutant(
        "fallback to l = 0 after a fault",
        "dspark/engine/planning.py",
        '    return plan if plan is not None else fixed_plan(lens, None, "fault")\n',
        '    return plan if plan is not None else fixed_plan(lens, 0, "fault")\n',
        (f"{LAW}::test_case_32a_a_batch_wide_fault_verifies_all_that_was_drawn[schedule]",),
    ),
    Mutant(
        "a fault attributed to a request is forgiven",
        "dspark/engine/faults.py",
        "        self.failed.setdefault(request, error)\n",
        "        pass\n",
        (f"{LAW}::test_case_32a_a_request_alone_errors_and_is_never_biased",),
    ),
    Mutant(
        "a batch-wide fault with one rejection row is forgiven",
        "dspark/engine/faults.py",
        "            self.fail(rows[0], phase, component, fault)\n",
        "            pass\n",
        (f"{LAW}::test_case_32a_a_request_alone_errors_and_is_never_biased[False-confidence]",),
    ),
    Mutant(
        "draws are made anew when a phase is repeated for the rows that are left",
        "dspark/engine/verification.py",
        "                draws.repeat()\n",
        "                pass\n",
        (f"{LAW}::test_case_32a_neighbours_keep_their_joint_law[verify late]",),
    ),
    Mutant(
        "a target fault takes the neighbours along",
        "dspark/engine/round.py",
        "            packed = lay_out() or packed\n",
        "            pass\n",
        (f"{LAW}::test_case_32a_neighbours_keep_their_joint_law[target]",),
    ),
]

STATE_FAULTS = [
    Mutant(
        "stale keys and values after a rollback: rejected drafts count as read",
        "dspark/engine/commit.py",
        "    request.num_cached += pending + accepted\n",
        "    request.num_cached += pending + (offered if len(kept) < offered else accepted)\n",
        (f"{STATE}::test_greedy_equals_one_by_one_with_any_drafter", FIXED),
    ),
    Mutant(
        "positions off by one",
        "dspark/engine/pack.py",
        "np.repeat(first - offsets[:-1], lens)",
        "np.repeat(first - offsets[:-1] + 1, lens)",
        (f"{STATE}::test_greedy_equals_one_by_one_with_any_drafter",),
    ),
    Mutant(
        "a sequence written to the slot of another",
        "dspark/engine/pack.py",
        "[r.slot for r in decode] + ",
        "sorted((r.slot for r in decode), reverse=True) + ",
        (f"{STATE}::test_case_31_requests_that_accept_different_lengths_and_swap_slots",),
    ),
    Mutant(
        "a slot's next request keeps the generation",
        "dspark/engine/state.py",
        "        self._generations[slot] += 1\n",
        "        self._generations[slot] = 1\n",
        (f"{STATE}::test_case_31_requests_that_accept_different_lengths_and_swap_slots",),
    ),
    Mutant(
        "EOS inside a block ends the output after the block",
        "dspark/engine/commit.py",
        "        if reason is not None:\n            break\n",
        "",
        (f"{STATE}::test_case_13_each_of_the_first_tokens_as_eos",),
    ),
    Mutant(
        "EOS is looked for in the last token of a block alone",
        "dspark/engine/commit.py",
        "        ends = token in request.stop_ids\n",
        "        ends = token in request.stop_ids and len(kept) == len(tokens)\n",
        (f"{STATE}::test_case_13_each_of_the_first_tokens_as_eos",),
    ),
    Mutant(
        "the budget wins over a stop at the same token",
        "dspark/engine/commit.py",
        '            reason = "stop"\n        elif',
        '            reason = "stop" if request.output_len < request.params.max_tokens else "length"\n        elif',
        (f"{STATE}::test_case_14_stop_before_the_budget_and_budget_before_the_stop",),
    ),
    Mutant(
        "a stop string across two tokens is missed",
        "dspark/text/stops.py",
        "        text = self._held + piece\n",
        "        text = piece\n",
        ("tests/text/test_stops.py::test_found_when_split_over_pieces",),
    ),
    Mutant(
        "an aborted request keeps its slot",
        "dspark/engine/batcher.py",
        "            self.pool.give_back(request.slot)\n",
        "            pass\n",
        (f"{STATE}::test_case_32_a_client_leaves_in_mid_flight",),
    ),
    Mutant(
        "logprobs of the row before",
        "dspark/engine/commit.py",
        "source[start : start + len(tokens)]",
        "source[max(start - 1, 0) : max(start - 1, 0) + len(tokens)]",
        (f"{STATE}::test_case_12_logprobs_are_the_targets_for_every_token",),
    ),
    Mutant(
        "tokens after the cut are counted",
        "dspark/engine/commit.py",
        "request.stats.acceptance.add(offered, accepted, len(kept))",
        "request.stats.acceptance.add(offered, accepted, accepted + 1)",
        (f"{STATE}::test_case_14_stop_before_the_budget_and_budget_before_the_stop",),
    ),
    Mutant(
        "rates divide by rounds",
        "dspark/engine/stats.py",
        "            self.offered[k] += 1\n",
        "            self.offered[k] = self.rounds + 1\n",
        (f"{STATE}::test_case_18_rates_divide_by_what_was_offered",),
    ),
    Mutant(
        "online learns from offers after the first rejection",
        "dspark/confidence/online.py",
        "seen = steps < np.minimum(offered, accepted + 1)[:, None]",
        "seen = steps < offered[:, None]",
        ("tests/confidence/test_estimators.py::test_positions_up_to_the_first_rejection_count_and_no_others",),
    ),
]

MUTANTS: list[Mutant] = [*ACCEPTANCE, *PROCESSORS, *RANDOMNESS, *SCHEDULE, *FAULTS, *STATE_FAULTS]
