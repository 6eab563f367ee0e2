"""Seeded faults of calibration fitting, drift, collected rounds and what is computed from them."""

from __future__ import annotations

from tests.mutants.run import Mutant

CALIBRATION = "tests/evaluation/test_calibration.py"
DRIFT = "tests/confidence/test_drift.py"
ACCEPTANCE = "tests/evaluation/test_acceptance.py"
COLLECT = "tests/evaluation/test_collect.py"
COMPARE = "tests/evaluation/test_compare.py"
FORCED = "tests/evaluation/test_forced.py"
STORE = "tests/evaluation/test_store.py"

EVALUATION_MUTANTS: list[Mutant] = [
    Mutant(
        "held-out rounds are judged by what they taught",
        "dspark/evaluation/calibration.py",
        "temperatures_of(together.take(fold != i))",
        "temperatures",
        (f"{CALIBRATION}::test_held_out_rounds_are_judged_by_what_others_taught",),
    ),
    Mutant(
        "folds are dealt by round, not by prompt",
        "dspark/evaluation/calibration.py",
        "fold = np.repeat(deal(len(parts), folds), [len(part) for part in parts])",
        "fold = deal(len(together), folds)",
        (f"{CALIBRATION}::test_held_out_rounds_are_judged_by_what_others_taught",),
    ),
    Mutant(
        "positions that were not offered are judged",
        "dspark/evaluation/calibration.py",
        "weight = rounds.weight.astype(np.float64)",
        "weight = np.ones(rounds.weight.shape)",
        (f"{CALIBRATION}::test_positions_that_were_not_offered_do_not_count",),
    ),
    Mutant(
        "drift forgets nothing",
        "dspark/confidence/drift.py",
        "self._sums *= np.array([keep, keep**2, keep])[:, None, None]",
        "self._sums *= np.array([1.0, 1.0, 1.0])[:, None, None]",
        (f"{DRIFT}::test_old_rounds_are_forgotten",),
    ),
    Mutant(
        "drift judges positions that were not offered",
        "dspark/confidence/drift.py",
        "np.nonzero(np.arange(gamma) < offered[:, None])",
        "np.nonzero(np.arange(gamma) < gamma * (offered[:, None] >= 0))",
        (f"{DRIFT}::test_noise_alone_is_quiet",),
    ),
    Mutant(
        "drift takes noise for drift",
        "dspark/confidence/drift.py",
        "limit = expected + np.maximum(self.tolerance, self.sigmas * spread)",
        "limit = np.full_like(expected, self.tolerance)",
        (f"{DRIFT}::test_noise_alone_is_quiet",),
    ),
    Mutant(
        "raw rounds are watched for drift",
        "dspark/confidence/linear.py",
        "if entry is not None:\n                rows",
        "entry = entry or self.calibration.entries[0]\n            if entry is not None:\n                rows",
        (f"{DRIFT}::test_linear_watches_what_it_calibrated",),
    ),
    Mutant(
        "the bootstrap draws anew for each drafter",
        "dspark/evaluation/acceptance.py",
        "np.random.default_rng([self.seed, zlib.crc32(dataset.encode())])",
        "np.random.default_rng()",
        (f"{ACCEPTANCE}::test_replicates_are_shared_between_drafters_and_repeat",),
    ),
    Mutant(
        "the accepted length is a mean of means",
        "dspark/evaluation/acceptance.py",
        "found[dataset] = bootstrap.ratio(dataset, committed, rounds)",
        "found[dataset] = bootstrap.ratio(dataset, committed / rounds, rounds / rounds)",
        (f"{ACCEPTANCE}::test_prompts_are_drawn_not_rounds",),
    ),
    Mutant(
        "conditional acceptance divides by what was offered",
        "dspark/evaluation/acceptance.py",
        "reached = offered & (np.arange(rounds.gamma) <= rounds.accepted[:, None])",
        "reached = offered",
        (f"{ACCEPTANCE}::test_positions_divide_by_what_was_offered",),
    ),
    Mutant(
        "a threshold keeps the draft that fell below it",
        "dspark/evaluation/acceptance.py",
        "offered = np.minimum(first, rounds.offered)",
        "offered = np.minimum(first + 1, rounds.offered)",
        (f"{ACCEPTANCE}::test_the_sweep_cuts_as_the_scheduler_does",),
    ),
    Mutant(
        "the prefill's token is a round",
        "dspark/evaluation/rounds.py",
        "if not done.new_ids or (_reads_prompt(done.request) and not _drafted(record, done)):",
        "if not done.new_ids:",
        (f"{COLLECT}::test_rounds_add_up_to_the_output",),
    ),
    Mutant(
        "every prompt draws the same",
        "dspark/evaluation/collect.py",
        'f"{self.seed}/{item.key}/{turn}"',
        'f"{self.seed}/{item.dataset}/{turn}"',
        (f"{COLLECT}::test_a_record_depends_on_its_prompt_alone",),
    ),
    Mutant(
        "scheduled rounds are measured",
        "dspark/evaluation/compare.py",
        'if name != "dspark/fixed" or config.scheduler_config:',
        'if name != "dspark/fixed":',
        (f"{COMPARE}::test_scheduled_rounds_are_refused",),
    ),
    Mutant(
        "drafters are compared on different prompts",
        "dspark/evaluation/compare.py",
        "if all(k in run.records for run in runs)]",
        "if any(k in run.records for run in runs)]",
        (f"{COMPARE}::test_drafters_are_compared_on_what_all_finished",),
    ),
    Mutant(
        "results of other settings are mixed",
        "dspark/evaluation/store.py",
        "if settings.get(key) != self.settings.get(key)]",
        "if key not in self.settings]",
        (f"{STORE}::test_other_settings_are_refused_by_name",),
    ),
    Mutant(
        "a line that was cut off stays",
        "dspark/evaluation/store.py",
        "file.truncate(whole)",
        "pass",
        (f"{STORE}::test_a_line_that_was_cut_off_is_dropped",),
    ),
    Mutant(
        "anchors depend on the drafter's gamma",
        "dspark/evaluation/forced.py",
        "at = prefix.anchors(anchors, span)",
        "at = prefix.anchors(anchors, gamma)",
        (f"{FORCED}::test_anchors_depend_on_the_text_and_the_span_alone",),
    ),
    Mutant(
        "target rows are one too late along a text",
        "dspark/evaluation/forced.py",
        "rows = np.unique(at[:, None] + steps)",
        "rows = np.unique(at[:, None] + steps) + 1",
        (f"{FORCED}::test_overlap_is_one_minus_tv_of_the_laws_that_are_sampled",),
    ),
    Mutant(
        "a pruned drafter's columns are taken for target ids",
        "dspark/evaluation/forced.py",
        "    return wide.scatter_(1, token_map.expand(law.shape), law)\n",
        "    wide[:, : law.shape[1]] = law\n    return wide\n",
        (f"{FORCED}::test_overlap_is_one_minus_tv_of_the_laws_that_are_sampled",),
    ),
]
