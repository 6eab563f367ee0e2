"""Every broken plugin is caught by the check that is meant for it, with words that tell its author what is wrong."""

from __future__ import annotations

import pytest

from dspark.testing import ContractViolation, run_checks

from .base import Broken
from .deciders import KERNELS, TARGETS, VERIFIERS
from .drafters import DRAFTERS
from .heads import HEADS
from .planners import CALIBRATORS, ESTIMATORS, SCHEDULERS
from .policies import POLICIES

ALL = [*HEADS, *DRAFTERS, *ESTIMATORS, *CALIBRATORS, *SCHEDULERS, *VERIFIERS, *KERNELS, *TARGETS, *POLICIES]
BROKEN = [b for b in ALL if b.check]
SOUND = [b for b in ALL if not b.check]


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_it_is_caught(broken: Broken) -> None:
    suite = broken.make_suite()
    with pytest.raises(ContractViolation) as caught:
        getattr(suite, broken.check)()
    text = str(caught.value)
    assert text.startswith(f"{suite.subject} breaks a contract.\ncontract: ")
    for words in ("seen:     ", *broken.words):
        assert words in text


@pytest.mark.parametrize("sound", SOUND, ids=str)
def test_its_sound_twin_passes(sound: Broken) -> None:
    assert [str(o.violation) for o in run_checks(sound.make_suite()) if o.violation] == []


def test_there_are_enough() -> None:
    assert len(BROKEN) >= 30
    assert len({str(b) for b in ALL}) == len(ALL)
