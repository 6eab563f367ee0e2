"""Seeded faults of the drafters that draft a token a forward: EAGLE-3 and draft models."""

from __future__ import annotations

from tests.mutants.run import Mutant

ROUNDS = "tests/drafters/test_eagle3_golden.py::test_deepspec_rounds"
STEPS = "tests/drafters/test_eagle3_golden.py::test_speculators_steps"
STATE = "tests/drafters/test_eagle3_state.py"
MODEL = "tests/drafters/test_draft_model.py"

EAGLE = [
    Mutant(
        "a feature is paired with its own token",
        "dspark/drafters/eagle3.py",
        "tokens += [*ids[low : high + 1],",
        "tokens += [*ids[low - 1 : high],",
        (ROUNDS,),
    ),
    Mutant(
        "the hidden state is fed back behind the norm",
        "dspark/drafters/eagle3.py",
        "hidden = read[-1] if core.eagle.norm_output else out",
        "hidden = read[-1]",
        (ROUNDS,),
    ),
    Mutant(
        "the residual is the raw hidden state, whatever the config says",
        "dspark/drafters/eagle3.py",
        "return read, normed if self._normed_residual else hidden",
        "return read, hidden",
        (STEPS,),
    ),
    Mutant(
        "steps begin at the anchor's position",
        "dspark/drafters/eagle3.py",
        "rows.anchors - 1 + k",
        "rows.anchors + k",
        (ROUNDS,),
    ),
    Mutant(
        "what a step wrote stays in a feature's place",
        "dspark/drafters/eagle3.py",
        "        self.cache.write(0, self._index(slots), at, ",
        "        at = torch.where(at < int(self.cache.used[slots].max()), at[-1], at)\n"
        "        self.cache.write(0, self._index(slots), at, ",
        (f"{STATE}::test_rounds_that_accept_differently_equal_fresh_contexts",),
    ),
    Mutant(
        "a later feature stands in for the last one",
        "dspark/drafters/eagle3.py",
        "self.core.last[r.slot][0] == r.anchor_position - 1",
        "self.core.last[r.slot][0] >= r.anchor_position - 1",
        (f"{STATE}::test_a_context_that_was_shortened_below_its_last_feature_waits_for_it",),
    ),
]

DRAFT_MODEL = [
    Mutant(
        "rejected drafts count as read",
        "dspark/drafters/draft_model.py",
        "if self.length >= len(request.ids) or request.ids[self.length] != token:",
        "if self.length >= len(request.ids):",
        (f"{MODEL}::test_rounds_without_drafts_are_caught_up",),
    ),
    Mutant(
        "a slot's last request is taken for the new one",
        "dspark/drafters/draft_model.py",
        "if state is None or state.generation != request.generation:",
        "if state is None:",
        (f"{MODEL}::test_a_reused_slot_starts_empty",),
    ),
    Mutant(
        "tokenizers of equal size are equal",
        "dspark/drafters/draft_model.py",
        "    if own != wanted:\n",
        "    if len(own) != len(wanted):\n",
        (f"{MODEL}::test_another_tokenizer_is_refused_by_name",),
    ),
    Mutant(
        "tokens of rows that do not draft are mixed up with others'",
        "dspark/drafters/steps.py",
        "return sampler.sample(wide, offset, token_map, reuse=True)[at]",
        "return sampler.sample(wide, offset, token_map, reuse=True)[: len(self)]",
        (f"{MODEL}::test_rows_that_the_model_cannot_read_draft_nothing",),
    ),
]

STEPWISE_MUTANTS: list[Mutant] = [*EAGLE, *DRAFT_MODEL]
