"""Seeded faults of the prefix cache: what is taken over, what must not be, and what follows it."""

from __future__ import annotations

from tests.mutants.run import Mutant

ENGINE = "tests/engine/test_prefix.py"
DRAFTERS = "tests/drafters/test_prefix.py"
PREFIX = "dspark/engine/prefix.py"
FULL = f"{ENGINE}::test_a_full_house_takes_over_in_place"
TOGETHER = f"{ENGINE}::test_samples_of_one_prompt_read_it_once"
NOT_FINITE = "tests/targets/test_cache.py::test_a_prefix_is_handed_on_where_it_is_sound"
RELEASED = f"{ENGINE}::test_a_drafter_with_state_is_released_when_its_slot_is_taken"
EAGLE = f"{DRAFTERS}::test_eagle_reads_the_last_feature_again_since_it_holds_the_next_token"
GOES_ON = f"{DRAFTERS}::test_a_block_drafter_goes_on_from_another_context"

PREFIX_MUTANTS = [
    Mutant(
        "one token more than is common is taken over",
        PREFIX,
        "    return low\n",
        "    return max(min(low + 1, most), 0)\n",
        (f"{ENGINE}::test_random_texts_of_one_tree_with_leavers_and_few_slots",),
    ),
    Mutant(
        "the last token of a request counts as read",
        PREFIX,
        "length = min(request.num_cached, len(request.ids))",
        "length = len(request.ids)",
        (FULL,),
    ),
    Mutant(
        "what a failed request left is used",
        PREFIX,
        'KEPT = ("stop", "length", "abort")',
        'KEPT = ("stop", "length", "abort", "error")',
        (f"{ENGINE}::test_a_request_that_failed_leaves_nothing",),
    ),
    Mutant(
        "half of a prompt is kept unproven",
        PREFIX,
        " and request.stats.acceptance.rounds > 0",
        "",
        (f"{ENGINE}::test_a_prompt_that_was_given_up_half_read_is_read_again",),
    ),
    Mutant(
        "an interrupted step is not doubted",
        "dspark/engine/engine.py",
        "                request.doubtful = True\n",
        "",
        (f"{ENGINE}::test_what_an_interrupted_step_had_read_is_not_used",),
    ),
    Mutant(
        "another engine's writes go unnoticed",
        PREFIX,
        "if self._target.cache_version != self._version:",
        "if self._version < 0:",
        (f"{ENGINE}::test_who_else_writes_the_targets_cache_is_noticed",),
    ),
    Mutant(
        "a request in whose slot others wrote is trusted",
        PREFIX,
        "                request.doubtful = True\n",
        "                request.doubtful = False\n",
        (f"{ENGINE}::test_who_else_writes_the_targets_cache_is_noticed",),
    ),
    Mutant(
        "what was used last gives way",
        PREFIX,
        "key=lambda s: (-self.parked[s].used if",
        "key=lambda s: (-1 / self.parked[s].used if",
        (f"{ENGINE}::test_what_was_used_least_recently_gives_way",),
    ),
    Mutant(
        "what is displaced is dropped",
        PREFIX,
        "                self._move(slot, old, match)\n",
        "                pass\n",
        (f"{ENGINE}::test_active_requests_stay_low_and_what_they_displace_moves_up",),
    ),
    Mutant(
        "requests run wherever their prefix is",
        PREFIX,
        "match.parked and match.slot <= bound:",
        "match.parked:",
        (f"{ENGINE}::test_active_requests_stay_low_and_what_they_displace_moves_up",),
    ),
    Mutant(
        "nobody waits for what others are about to read",
        PREFIX,
        "request.held = self._promised(request) >=",
        "request.held = 0 * self._promised(request) >=",
        (TOGETHER,),
    ),
    Mutant(
        "those who wait are run all the same",
        "dspark/engine/batcher.py",
        "            if request.held:\n                continue\n",
        "",
        (TOGETHER,),
    ),
    Mutant(
        "a prompt that was read before drafts a round earlier",
        PREFIX,
        "(2 if reads_taps(self._parts) else 1)",
        "1",
        (f"{DRAFTERS}::test_rejection_draws_the_same_whether_a_prompt_was_read_before_or_not[markov]",),
    ),
    Mutant(
        "the target goes on beyond what the drafter has",
        PREFIX,
        "length = min(length, int(kept))",
        "kept = length",
        (f"{DRAFTERS}::test_drafts_are_those_of_requests_that_read_everything[deepspec]",),
    ),
    Mutant(
        "a drafter forgets what is kept for later",
        "dspark/engine/engine.py",
        '                if kept and kind == "drafter":\n',
        '                if kept and kind == "none":\n',
        (RELEASED,),
    ),
    Mutant(
        "a drafter is never told that a slot was taken",
        PREFIX,
        "            if old is not None:\n                self._release(slot, old.generation)\n",
        "",
        (RELEASED,),
    ),
    Mutant(
        "the target copies a position too few",
        "dspark/targets/cache.py",
        "kept[slot, :, :length] = kept[source, :, :length]",
        "kept[slot, :, : length - 1] = kept[source, :, : length - 1]",
        (NOT_FINITE,),
    ),
    Mutant(
        "a slot with logits that are no numbers is handed on",
        "dspark/targets/cache.py",
        "if source in self._dirty or not",
        "if not",
        (NOT_FINITE,),
    ),
    Mutant(
        "a slot that is written keeps what is no number",
        "dspark/targets/cache.py",
        "            self.clear(slot, length)\n",
        "            pass\n",
        (NOT_FINITE,),
    ),
    Mutant(
        "a drafter's context is not copied",
        "dspark/drafters/taps.py",
        "        self._backbone.cache.copy(source, slot, length)\n",
        "",
        (f"{GOES_ON}[False-by copy]",),
    ),
    Mutant(
        "features that wait are not handed on",
        "dspark/drafters/taps.py",
        "dropped, list(state.parts), state.waiting)",
        "dropped, [], 0)",
        (f"{GOES_ON}[True-by copy]",),
    ),
    Mutant(
        "a copied context keeps what was in the slot before",
        "dspark/drafters/context.py",
        "        self.clear(slot, length)\n",
        "",
        (f"{DRAFTERS}::test_a_copied_context_leaves_nothing_of_the_one_before",),
    ),
    Mutant(
        "another generation's context is taken over",
        "dspark/drafters/taps.py",
        "if state is None or state.generation != source_generation:",
        "if state is None:",
        (f"{DRAFTERS}::test_nothing_is_known_of_who_is_not_there",),
    ),
    Mutant(
        "what left the window unseen is passed off as known",
        "dspark/drafters/taps.py",
        "            length = max(0, length - window)\n",
        "            pass\n",
        (f"{DRAFTERS}::test_what_left_the_window_unseen_is_not_passed_off_as_known",),
    ),
    Mutant(
        "eagle's entry with another next token is taken over",
        "dspark/drafters/eagle3.py",
        "source, source_generation, max(length - 1, 0))",
        "source, source_generation, length)",
        (f"{EAGLE}[in place-deepspec_eagle3]",),
    ),
    Mutant(
        "a draft model trusts slots that others used",
        "dspark/drafters/draft_model.py",
        "if self.model.cache_version != self._version or not self.model",
        "if not self.model",
        (f"{DRAFTERS}::test_a_draft_model_does_not_read_a_prefix_again_unless_its_slots_were_used",),
    ),
]
