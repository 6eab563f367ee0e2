"""Seeded faults of acceptance, of processors and of randomness."""

from __future__ import annotations

from tests.mutants.names import COUPLED, DRAWS, FIXED, JOINT, KEYS, LAW, OUTPUT
from tests.mutants.run import Mutant

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
        "_placed(probs, self._laws, picked / weights.sum(-1, dtype=torch.float64))",
        "_placed(probs, self._laws, torch.ones_like(picked))",
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
        (f"{OUTPUT}::test_case_10_an_exact_tie_goes_to_the_lowest_id",),
    ),
    Mutant(
        "greedy's token after a rejection is read from the last verified row",
        "dspark/verifiers/greedy.py",
        "return VerifyResult(accepted, tokens[starts + accepted])",
        "return VerifyResult(accepted, tokens[starts + lens])",
        (f"{OUTPUT}::test_greedy_equals_one_by_one_with_any_drafter",),
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
        (f"{OUTPUT}::test_case_9_greedy_ignores_warpers_and_accepts_an_equal_drafter",),
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
        (f"{OUTPUT}::test_case_8_a_second_live_request_with_the_same_key_is_refused",),
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
        ("tests/verifiers/test_coupled.py::test_noise_is_asked_for_lazily_and_at_the_tokens_position",),
    ),
    Mutant(
        "coupled: every row of a block has the noise of the first",
        "dspark/verifiers/coupled.py",
        "batch.anchors[rows] + 1 + k, ",
        "batch.anchors[rows] + 1, ",
        ("tests/verifiers/test_coupled.py::test_noise_is_asked_for_lazily_and_at_the_tokens_position",),
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
        "+ 1 + offset, self.vocab_size, ids)",
        "+ 1 + offset, self.vocab_size)",
        (f"{COUPLED}::test_pruned_drafts_use_the_noise_of_their_target_ids",),
    ),
]
