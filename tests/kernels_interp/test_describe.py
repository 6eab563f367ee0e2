"""What kernels are compiled for without a GPU is what they are launched with, by the operations and by an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops.triton.bias_sample import bias_sample
from dspark.ops.triton.describe import PAIRS, Key, key_of, launches
from dspark.ops.triton.launch import Launch, intercepted
from dspark.ops.triton.reject_sample import reject_sample
from tests.drafters.watch import made_engine, requests
from tests.exactness.harness import decode
from tests.kernels_interp.cases import BiasCase, RejectCase

ARCHITECTURE = "sm_90"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sized(key: Key) -> Key:
    """The key of any rank: a toy's head has another than those that are compiled for."""
    name, words = key
    rank = {"RANK": "some" if dict(words).get("RANK", "0") != "0" else "0"}
    return name, tuple(sorted({**dict(words), **rank, "BLOCK_D": ""}.items()))


@pytest.fixture(scope="module")
def listed() -> set[Key]:
    return {sized(key_of(launch)) for launch in launches(ARCHITECTURE)}


def unlisted(run: Any, listed: set[Key]) -> list[Key]:
    """Launches of ``run`` that the list lacks. They are done, with the tiles of the architecture."""
    seen: list[Key] = []

    def note(launch: Launch) -> None:
        seen.append(sized(key_of(launch)))
        launch.run()

    with intercepted(note, ARCHITECTURE):
        run()
    assert seen
    return [key for key in seen if key not in listed]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_calls_of_bias_sample_are_listed(dtype: torch.dtype, listed: set[Key]) -> None:
    for rows in (1, 17):
        for extra in ({}, {"pruned": True}, {"candidates": 5}, {"pruned": True, "candidates": 1}):
            for rank in (0, 8):
                arguments = BiasCase(rows, 33, rank, dtype, **extra).arguments()  # type: ignore[arg-type]
                assert unlisted(lambda a=arguments: bias_sample(**a), listed) == []  # type: ignore[misc]


LAWS: dict[str, dict[str, Any]] = {
    "point-mass": {"law": False},
    "headless": {"rank": 0},
    "head": {},
    "pruned": {"pruned": True, "shuffled": True},
    "candidates": {"candidates": 1, "shuffled": True},
    "pruned-candidates": {"pruned": True, "candidates": 5},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("law", LAWS)
def test_calls_of_reject_sample_are_listed(law: str, dtype: torch.dtype, listed: set[Key]) -> None:
    for rows, settings in ((1, "all"), (2, "temperature"), (17, "")):
        case = RejectCase(rows, 1, 33, dtype=dtype, settings=settings, modes=(1,), **LAWS[law])
        arguments = case.arguments()
        assert unlisted(lambda a=arguments: reject_sample(**a), listed) == []  # type: ignore[misc]


@pytest.mark.parametrize(("head", "candidates"), [("markov", None), ("rnn", None), ("markov", 12)])
def test_an_engines_launches_are_listed(head: str, candidates: int | None, listed: set[Key]) -> None:
    """Greedy, seeded and keyed requests, with masks and with penalties."""
    made = made_engine(head, bias_sample, reject_sample, candidates)
    for params in ({}, {"top_k": 20}, {"repetition_penalty": 1.3}):
        asked = requests(2, **params)
        assert unlisted(lambda asked=asked: decode(made, asked), listed) == []  # type: ignore[misc]


def test_what_is_not_compiled_for_is_noticed(listed: set[Key]) -> None:
    """A dtype that no engine brings together, and noise from a table, which tests alone give."""
    mixed = RejectCase(2, 1, 33, modes=(1,)).arguments() | {"logits": torch.zeros(8, 33, dtype=torch.bfloat16)}
    assert (torch.bfloat16, torch.float32) not in PAIRS
    assert {key[0] for key in unlisted(lambda: reject_sample(**mixed), listed)} == {"final_partials"}
    given = BiasCase(2, 33, 8).arguments() | {"gumbel": torch.zeros(2, 33)}
    assert {key[0] for key in unlisted(lambda: bias_sample(**given), listed)} == {"bias_partials"}


def test_integers_of_any_width_are_brought_to_the_compiled_one(listed: set[Key]) -> None:
    arguments = RejectCase(3, 2, 33, rank=0).arguments()
    want = reject_sample(**arguments)
    wide = {n: arguments[n].to(torch.int64) for n in ("starts", "lens", "mode")} | {"drafts": arguments["drafts"].int()}
    found: list[Any] = []
    assert unlisted(lambda: found.append(reject_sample(**{**arguments, **wide})), listed) == []
    assert torch.equal(found[0].token, want.token)


def test_no_grid_is_larger_than_a_device_takes() -> None:
    """65,535 along every dimension but the first, of more requests than that."""
    for launch in launches(ARCHITECTURE, PAIRS[:1], rows=(70_000,)):
        assert all(size <= 65_535 for size in launch.grid[1:]), (launch.kernel, launch.grid)
