"""The drafter is held to dspark's contracts, with and without sampling from counts, and drafts what it should."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from dspark import SpeculativeDecoder
from dspark.testing import DrafterSuite, PluginSuite, TableTarget
from dspark.types import RequestView, RoundRecord

NAME = "dspark-drafter-suffix/suffix"


class TestPlugin(PluginSuite):
    component = "dspark-drafter-suffix"


class TestSuffix(DrafterSuite):
    component = NAME
    bad_settings = (
        {"min_match": 0},
        {"max_match": 1},
        {"factor": 0},
        {"law": "counted"},
        {"candidates": 2.5},
        {"gamma": True},
    )


class TestPoint(DrafterSuite):
    component = NAME
    settings: ClassVar[dict[str, Any]] = {"law": "point", "min_match": 1}


class TestShort(DrafterSuite):
    component = NAME
    settings: ClassVar[dict[str, Any]] = {"min_match": 1, "max_match": 2, "candidates": 2, "factor": 0.5}


class Watch:
    """Keeps what was drafted: (history, tokens, match length, shares)."""

    def __init__(self) -> None:
        self.drafts: list[tuple[list[int], list[int], int, list[float]]] = []

    def on_round(self, record: RoundRecord) -> None:
        if record.batch is None or record.draft is None:
            return
        for row, request in enumerate(record.batch.requests):
            n, features = int(record.draft.lens[row]), record.draft.features
            tokens = record.draft.token_ids[row, :n].tolist()
            shares = features["share"][row, :n].tolist()
            self.drafts.append((list(request.ids), tokens, int(features["match_length"][row]), shares))

    def on_finish(self, request: RequestView, reason: str) -> None:
        """Nothing."""


def decode(target: TableTarget, prompts: list[list[int]], drafter_config: dict[str, Any], **sampling: Any) -> Any:
    watch = Watch()
    with SpeculativeDecoder.from_pretrained(
        target, NAME, cost=None, gamma=4, max_slots=4, max_len=200, observers=[watch], scheduler="fixed",
        gamma_policy="static", drafter_config=drafter_config,
    ) as decoder:  # fmt: skip
        decoder.generate(prompts, **sampling)
        return decoder.stats.acceptance, watch.drafts


def counting(vocab: int) -> TableTarget:
    """A target that counts on: x + 1 after x."""
    logits = torch.zeros(vocab, vocab, dtype=torch.float64)
    logits[torch.arange(vocab), (torch.arange(vocab) + 1) % vocab] = 30.0
    return TableTarget(logits)


def test_a_loop_is_drafted_on_whole() -> None:
    acceptance, drafts = decode(counting(5), [[0, 1, 2, 3, 4, 0, 1]], {}, max_tokens=40)
    assert acceptance.accepted_length > 4.0
    history, tokens, match, shares = drafts[0]
    assert history == [0, 1, 2, 3, 4, 0, 1]
    assert (tokens, match, shares) == ([2, 3, 4, 0], 2, [1.0] * 4)


def test_drafts_are_as_long_as_matches_allow() -> None:
    _, drafts = decode(counting(9), [[0, 1, 2, 0, 1]], {"factor": 1.0, "min_match": 1}, max_tokens=3)
    assert [len(tokens) for _, tokens, _, _ in drafts][:1] == [2]
    _, drafts = decode(counting(9), [[0, 1, 2, 0, 1]], {"min_match": 3}, max_tokens=3)
    assert all(not tokens or match >= 3 for _, tokens, match, _ in drafts)


@pytest.mark.parametrize("law", ["auto", "point"])
def test_sampling_from_counts_is_accepted_more_often(law: str) -> None:
    """After 0 comes 1 or 2, as likely one as the other, and then 0 again: a fixed token is right half of the time."""
    logits = torch.full((3, 3), -30.0, dtype=torch.float64)
    logits[0, 1:] = logits[1:, 0] = 0.0
    prompts = [[0, 1, 0, 2, 0, 2, 0, 1, 0, 1, 0, 2, 0]] * 4
    # matches of one token see the law itself; longer ones, what followed the same words by chance
    config = {"law": law, "min_match": 1, "max_match": 1}
    acceptance, _ = decode(TableTarget(logits), prompts, config, max_tokens=150, temperature=1.0)
    rate = sum(acceptance.accepted) / sum(acceptance.reached)
    assert (rate > 0.9) if law == "auto" else (rate < 0.8)
