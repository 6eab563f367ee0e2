"""Seeded faults of the choice of gamma, of the guard, and of the costs that they go by."""

from __future__ import annotations

from tests.mutants.run import Mutant

EXACT = "tests/exactness/test_gamma.py"
ENGINE = "tests/engine/test_gamma.py"
LIVE = "tests/engine/test_live_cost.py"
RATES = "tests/scheduling/test_rates.py"
PLACEMENT = "tests/scheduling/test_placement.py"

HISTORY = f"{EXACT}::test_no_drafted_token_decides_who_drafts_or_how_much_is_packed[history]"
LAW = f"{EXACT}::test_the_output_law_is_the_targets_whatever_gamma_is_chosen[restless-fixed]"

ROUND = "            block = planning.draft(parts, faults, drafting, sampler)\n"

GAMMA_MUTANTS = [
    Mutant(
        "the guard decides after drafting, from the drafts",
        "dspark/engine/round.py",
        ROUND,
        ROUND + "        if block is not None and int(block.token_ids[0, 0]) == 1:\n            block = None\n",
        (HISTORY, LAW),
    ),
    Mutant(
        "early exit reads the first drafted token",
        "dspark/engine/round.py",
        ROUND,
        ROUND
        + "        if block is not None:\n"
        + "            import dataclasses\n"
        + "            block = dataclasses.replace(block, lens=block.lens * (block.token_ids[:, 0].numpy() != 2))\n",
        (HISTORY, LAW),
    ),
    Mutant(
        "gamma is shortened after drafting by a doubtful token",
        "dspark/engine/planning.py",
        "    return np.minimum(block.lens, room)\n",
        "    return np.minimum(block.lens, np.where(block.token_ids[:, 0].numpy() == 1, 0, room))\n",
        (HISTORY, LAW),
    ),
    Mutant(
        "the round's confidences turn the guard over within the round",
        "dspark/engine/planning.py",
        "    if drafting.verify_all:\n",
        "    if confidence.survival.sum() < 1.5:\n        return fixed_plan(lens, 0, 'guard', confidence)\n"
        "    if drafting.verify_all:\n",
        (HISTORY,),
    ),
    Mutant(
        "a row's own gamma is forgotten where lengths are packed",
        "dspark/engine/choosing.py",
        "max_draft=min(view.max_draft, gammas[i])",
        "max_draft=view.max_draft",
        (f"{ENGINE}::test_each_row_drafts_and_packs_at_most_its_own_gamma",),
    ),
    Mutant(
        "rows that sit out draft all the same",
        "dspark/engine/choosing.py",
        "rows = [i for i, g in enumerate(gammas) if g > 0]",
        "rows = [i for i, g in enumerate(gammas) if g >= 0]",
        (f"{ENGINE}::test_each_row_drafts_and_packs_at_most_its_own_gamma",),
    ),
    Mutant(
        "a probe is cut by the scheduler that expects nothing",
        "dspark/engine/planning.py",
        "    if drafting.verify_all:\n",
        "    if False:\n",
        (f"{ENGINE}::test_a_probe_is_verified_in_full_whatever_the_scheduler_says",),
    ),
    Mutant(
        "a plain phase never probes",
        "dspark/scheduling/_guard.py",
        "        self._credit += self._share * plain\n",
        "        pass\n",
        (f"{ENGINE}::test_probing_spends_its_share_whatever_happens",),
    ),
    Mutant(
        "the guard has no hysteresis",
        "dspark/scheduling/_guard.py",
        "(hysteresis if before is False else 0.0)",
        "0.0",
        (f"{ENGINE}::test_case_23_no_flapping_where_the_gain_hovers_at_the_threshold",),
    ),
    Mutant(
        "the guard takes any gain",
        "dspark/scheduling/_guard.py",
        "self.on = gain >= threshold + ",
        "self.on = gain >= 0 * threshold + ",
        (f"{ENGINE}::test_case_23_a_gain_of_one_percent_is_not_taken_and_the_threshold_is_a_setting",),
    ),
    Mutant(
        "offers after the first rejection count",
        "dspark/scheduling/_history.py",
        "        reached = min(one.offered, one.accepted + 1)\n        seen[:reached] += 1.0\n",
        "        seen[: one.offered] += 1.0\n",
        (f"{ENGINE}::test_rates_are_of_positions_up_to_the_first_rejection_and_uncensored",),
    ),
    Mutant(
        "what the scheduler left out counts as rejected",
        "dspark/scheduling/_history.py",
        "            won[k] += alive * c\n",
        "            pass\n",
        (f"{ENGINE}::test_rates_are_of_positions_up_to_the_first_rejection_and_uncensored",),
    ),
    Mutant(
        "a changed drafter is averaged away",
        "dspark/scheduling/_rates.py",
        "            if shift.evidence > self._alarm:\n",
        "            if False:\n",
        (f"{RATES}::test_how_soon_a_change_is_found",),
    ),
    Mutant(
        "a useless drafter keeps a promising tail",
        "dspark/scheduling/_rates.py",
        "        mean, strength = self._prior\n        out = np.empty(gamma)\n        for k in range(gamma):\n",
        "        strength = self._prior[1]\n        out = np.empty(gamma)\n"
        "        for k in range(gamma):\n            mean = self._prior[0]\n",
        (f"{RATES}::test_positions_never_reached_follow_the_last_that_was",),
    ),
    Mutant(
        "difficulty is believed before it has proved itself",
        "dspark/scheduling/_difficulty.py",
        "        return self.outcomes >= LEAST_OUTCOMES and ",
        "        return self.outcomes >= LEAST_OUTCOMES or ",
        (f"{RATES}::test_difficulty_that_tells_nothing_is_not_believed",),
    ),
    Mutant(
        "entropy of the row before",
        "dspark/engine/verification.py",
        "    rows = [int(packed.row_starts[i]) + accepted for i, (accepted, _) in decisions.items()]\n",
        "    rows = [int(packed.row_starts[i]) for i, (accepted, _) in decisions.items()]\n",
        (f"{ENGINE}::test_entropies_are_those_of_the_target_and_asked_for_where_they_are_read",),
    ),
    Mutant(
        "a policy that fails takes the requests along",
        "dspark/engine/faults.py",
        "            self.parts.gamma_policy = None\n",
        "            self.parts.gamma_policy, self.parts.drafting, self.forced = None, False, True\n",
        (f"{ENGINE}::test_a_policy_that_fails_costs_nobody_anything",),
    ),
    Mutant(
        "noise turns the cost table over",
        "dspark/engine/live_cost.py",
        "        if not _moved(self.profile, candidate, least):\n",
        "        if not _moved(self.profile, candidate, 0.0):\n",
        (f"{LIVE}::test_noise_alone_never_turns_a_table_over",),
    ),
    Mutant(
        "one slow step counts in full",
        "dspark/engine/live_cost.py",
        "        return weight * statistics.median(own) + (1.0 - weight) * shared\n",
        "        return weight * statistics.mean(own) + (1.0 - weight) * shared\n",
        (f"{LIVE}::test_an_outlier_does_not_either",),
    ),
    Mutant(
        "bisection stops at the middle of a step",
        "dspark/scheduling/placement.py",
        "            consider(a, b, tolerance / 2 if straight else None)\n",
        "            consider(a, b, tolerance / 2)\n",
        (f"{PLACEMENT}::test_steps_are_found_to_the_token_and_straight_lines_take_one_look",),
    ),
    Mutant(
        "a profile is keyed by what was asked for",
        "dspark/scheduling/placement.py",
        "            executed = int(target.executed_tokens(layout))\n",
        "            executed = tokens\n",
        (f"{PLACEMENT}::test_a_target_that_pads_has_a_staircase_by_what_it_executed",),
    ),
    Mutant(
        "another drafter's times are planned with",
        "dspark/scheduling/cost.py",
        "        if not self.draft or not differences(self.drafter, drafter):\n",
        "        if True:\n",
        (f"{PLACEMENT}::test_drafting_times_are_kept_for_their_drafter_alone",),
    ),
]
