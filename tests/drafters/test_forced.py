"""Teacher-forced laws: where the text is what was drafted, they are those that drafting sampled from."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspark.drafters.draft_model import ModelDraft
from dspark.drafters.dspark import DSparkDraft
from dspark.drafters.eagle3 import Eagle3Draft
from dspark.errors import ConfigError
from dspark.protocols import TeacherForced
from tests.drafters.eagle import commit_text, make_eagle
from tests.drafters.golden import commit, context_keys, make_drafter, near, propose, request
from tests.drafters.stepwise import toy_model

CASES = (
    "deepspec_dspark_vanilla",
    "deepspec_dspark_gated",
    "deepspec_dspark_rnn",
    "deepspec_dflash",
    "zlab_dflash",
    "speculators_dspark_vanilla",
    "specforge_dspark_gated_swa",
)
LENGTH = 12


def text(drafter: DSparkDraft | Eagle3Draft, seed: int = 0, length: int = LENGTH) -> tuple[list[int], torch.Tensor]:
    """Random ids, and features of as many positions."""
    generator = torch.Generator().manual_seed(seed)
    width = len(drafter.tap_layers) * drafter.checkpoint.config.target_hidden_size
    ids = torch.randint(0, 90, (length,), generator=generator).tolist()
    return ids, torch.randn(length, width, generator=generator)


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_law_that_drafting_samples_from(case: str) -> None:
    drafter = make_drafter(case)
    assert isinstance(drafter, TeacherForced)
    ids, taps = text(drafter)
    commit(drafter, taps, start=0, end=LENGTH - 1)
    block, logits = propose(drafter, [request(ids)])
    gamma = logits.shape[1]
    whole = torch.tensor([*ids, *block.token_ids[0].tolist()])
    forced, token_map = drafter.forced_logits(whole, taps, np.array([LENGTH - 1]), gamma)
    near(forced, logits, 1e-4)
    assert token_map is drafter.token_map
    shorter, _ = drafter.forced_logits(whole[:-1], taps, np.array([LENGTH - 1]), gamma)
    near(shorter, forced, 1e-6)


@pytest.mark.parametrize("case", ["deepspec_eagle3", "speculators_eagle3"])
def test_eagle_reads_the_text_where_it_would_read_its_drafts(case: str) -> None:
    drafter = make_eagle(case)
    assert isinstance(drafter, TeacherForced)
    ids, taps = text(drafter)
    commit_text(drafter, ids, taps[:-1], start=0)
    block, logits = propose(drafter, [request(ids)], 3)
    whole = torch.tensor([*ids, *block.token_ids[0].tolist()])
    anchors = np.array([4, LENGTH - 1])
    forced, token_map = drafter.forced_logits(whole, taps, anchors, 3)
    near(forced[1:], logits, 1e-4)
    assert token_map is drafter.token_map
    alone, _ = drafter.forced_logits(whole[:7], taps[:4], anchors[:1], 3)
    near(forced[:1], alone, 1e-5)
    with pytest.raises(ConfigError, match="features"):
        drafter.forced_logits(whole, None, anchors, 3)


def test_a_draft_model_reads_the_text_once() -> None:
    model = toy_model(5)
    drafter = ModelDraft(model, SimpleNamespace(name="target", max_len=32, vocab_size=5), gamma=3)
    assert isinstance(drafter, TeacherForced)
    ids = torch.randint(0, 5, (12,), generator=torch.Generator().manual_seed(0))
    logits, token_map = drafter.forced_logits(ids, None, np.array([3, 7]), 3)
    assert token_map is None
    for row, anchor in enumerate((3, 7)):
        for k in range(3):
            near(logits[row, k], model.next_logits(ids[: anchor + k + 1].tolist()))
    with pytest.raises(ConfigError, match="does not hold a text of 36 tokens"):
        drafter.forced_logits(torch.zeros(40, dtype=torch.int64), None, np.array([33]), 3)
    with pytest.raises(ConfigError, match="some token of it"):
        drafter.forced_logits(ids + 1, None, np.array([3]), 3)


def test_anchors_do_not_see_one_another_nor_live_slots() -> None:
    drafter = make_drafter("deepspec_dspark_rnn")
    ids, taps = text(drafter)
    commit(drafter, taps, start=0, end=LENGTH - 1)
    propose(drafter, [request(ids)])
    before = [
        tuple(t.clone() for t in context_keys(drafter, k, 0, LENGTH - 1)) for k in range(len(drafter.backbone.blocks))
    ]
    whole = torch.tensor(ids)
    anchors = np.array([1, 5, 8])
    together, _ = drafter.forced_logits(whole, taps[:8], anchors, 4)
    for row, anchor in enumerate(anchors):
        alone, _ = drafter.forced_logits(whole, taps[:anchor], anchors[row : row + 1], 4)
        near(together[row], alone[0], 1e-5)
    for k, (keys, values) in enumerate(before):
        now = context_keys(drafter, k, 0, LENGTH - 1)
        near(now[0], keys)
        near(now[1], values)
    changed = whole.clone()
    changed[6] += 1
    other, _ = drafter.forced_logits(changed, taps[:8], anchors, 4)
    near(other[0], together[0], 0.0)
    near(other[2], together[2], 0.0)
    assert (other[1, :1] - together[1, :1]).abs().max() == 0, "x_1 does not see itself"
    assert (other[1, 1:] - together[1, 1:]).abs().max() > 1e-4, "x_2 and later see x_1"


def test_what_it_cannot_do_is_refused() -> None:
    drafter = make_drafter("deepspec_dspark_vanilla")
    ids, taps = text(drafter)
    with pytest.raises(ConfigError, match="gamma 9 is beyond"):
        drafter.forced_logits(torch.tensor(ids), taps, np.array([2]), 9)
    with pytest.raises(ConfigError, match="features"):
        drafter.forced_logits(torch.tensor(ids), None, np.array([2]), 2)
