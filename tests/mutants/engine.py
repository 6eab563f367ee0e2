"""Seeded faults of schedules, of answers to faults, and of what the engine keeps.

``edit_plan`` mutants put a cheat of ``dspark.testing.cheats`` behind the scheduler, as a careless engine would edit a
finished plan.
"""

from __future__ import annotations

from tests.mutants.names import APPENDIX, CAUSAL, FIXED, JOINT, LAW, OUTPUT, STATE
from tests.mutants.run import Mutant


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
        (f"{OUTPUT}::test_the_budget_caps_drafts",),
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
        "            self.fail(rows[0], phase, kind, fault)\n",
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
        (f"{OUTPUT}::test_greedy_equals_one_by_one_with_any_drafter", FIXED),
    ),
    Mutant(
        "positions off by one",
        "dspark/engine/pack.py",
        "np.repeat(first - offsets[:-1], lens)",
        "np.repeat(first - offsets[:-1] + 1, lens)",
        (f"{OUTPUT}::test_greedy_equals_one_by_one_with_any_drafter",),
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
        (f"{OUTPUT}::test_case_13_each_of_the_first_tokens_as_eos",),
    ),
    Mutant(
        "EOS is looked for in the last token of a block alone",
        "dspark/engine/commit.py",
        "        ends = token in request.stop_ids\n",
        "        ends = token in request.stop_ids and len(kept) == len(tokens)\n",
        (f"{OUTPUT}::test_case_13_each_of_the_first_tokens_as_eos",),
    ),
    Mutant(
        "the budget wins over a stop at the same token",
        "dspark/engine/commit.py",
        '            reason = "stop"\n        elif',
        '            reason = "stop" if request.output_len < request.params.max_tokens else "length"\n        elif',
        (f"{OUTPUT}::test_case_14_stop_before_the_budget_and_budget_before_the_stop",),
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
        "rows = slice(start, start + len(tokens))",
        "rows = slice(max(start - 1, 0), max(start - 1, 0) + len(tokens))",
        (f"{OUTPUT}::test_case_12_logprobs_are_the_targets_for_every_token",),
    ),
    Mutant(
        "tokens after the cut are counted",
        "dspark/engine/commit.py",
        "request.stats.acceptance.add(offered, accepted, len(kept))",
        "request.stats.acceptance.add(offered, accepted, accepted + 1)",
        (f"{OUTPUT}::test_case_14_stop_before_the_budget_and_budget_before_the_stop",),
    ),
    Mutant(
        "rates divide by rounds",
        "dspark/engine/stats.py",
        "            self.offered[k] += 1\n",
        "            self.offered[k] = self.rounds + 1\n",
        (f"{OUTPUT}::test_case_18_rates_divide_by_what_was_offered",),
    ),
    Mutant(
        "zero acceptance is silent",
        "dspark/engine/watch.py",
        "        if self._idle + self._held != self._rounds:\n",
        "        if self._idle + self._held >= 0:\n",
        (f"{STATE}::test_drafts_that_are_never_accepted_are_said_once",),
    ),
    Mutant(
        "online learns from offers after the first rejection",
        "dspark/confidence/online.py",
        "seen = steps < np.minimum(offered, accepted + 1)[:, None]",
        "seen = steps < offered[:, None]",
        ("tests/confidence/test_estimators.py::test_positions_up_to_the_first_rejection_count_and_no_others",),
    ),
]
