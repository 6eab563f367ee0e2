"""Golden checkpoints in the real engine, built by name from the catalog, on the real (tiny) Hugging Face target."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.api import SpeculativeDecoder
from dspark.config import EngineConfig, SamplingParams
from dspark.engine.build import build_engine
from dspark.errors import CheckpointError, ConfigError
from tests.drafters.golden import ROOT

torch.set_num_threads(1)
CASES = sorted(
    p.parent.name
    for p in ROOT.glob("*/model.safetensors")
    if p.parent.name not in ("target_qwen3_tiny", "deepspec_dspark_gemma4")
)
TRAINED = (
    *("deepspec_dspark_vanilla", "deepspec_dspark_gated", "deepspec_dspark_rnn", "deepspec_dflash", "zlab_dflash"),
    "deepspec_eagle3",
)
PROMPTS = [[58, 83, 35, 87, 12, 64, 56, 33, 6], [7, 26, 15], [41, 15, 14, 84, 37, 41, 89, 14, 3, 3, 1, 2, 3]]


@pytest.fixture(scope="module")
def target() -> Any:
    from dspark.targets.hf import HFTarget

    return HFTarget.from_pretrained(str(ROOT / "target_qwen3_tiny"), dtype="float32", device="cpu")


def decode(target: Any, drafter: str, params: list[SamplingParams], **config: Any) -> tuple[list[list[int]], Any]:
    settings = {"max_slots": 3, "max_len": 96, "scheduler": "fixed", "drafter": drafter} | config
    engine = build_engine(EngineConfig(**settings), target=target)
    names = [engine.submit(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for chunk in engine.run():
        assert chunk.error is None
        tokens[chunk.request_id] += chunk.ids
    return [tokens[name] for name in names], engine


def mixed() -> list[SamplingParams]:
    """A greedy request between two seeded ones."""
    return [
        SamplingParams(max_tokens=20, temperature=0.0 if i == 1 else 1.0, seed=None if i == 1 else i) for i in range(3)
    ]


@pytest.fixture(scope="module")
def plain(target: Any) -> list[list[int]]:
    return decode(target, "none", mixed())[0]


@pytest.mark.parametrize("case", CASES)
def test_the_output_is_plain_decodings(case: str, target: Any, plain: list[list[int]]) -> None:
    """Greedy and seeded requests in one batch, whatever the format, layout, head and vocabulary of the drafter."""
    tokens, engine = decode(target, str(ROOT / case), mixed())
    assert engine.parts.name("drafter") == ("dspark/eagle3" if case.endswith("eagle3") else "dspark/dspark")
    assert tokens == plain
    drafter = engine.parts.drafter
    assert drafter.rows_without_context == 0
    engine.close()
    assert drafter.buffered_tokens == 0, "what was kept for later requests goes with the engine"


@pytest.mark.parametrize("case", TRAINED)
def test_trained_drafts_are_accepted(case: str, target: Any) -> None:
    """The golden drafters were trained on this target: more than nothing is accepted, in fewer steps than tokens."""
    greedy = [SamplingParams(max_tokens=24, temperature=0.0)] * 3
    plain, steps = decode(target, "none", greedy)
    tokens, fewer = decode(target, str(ROOT / case), greedy)
    assert tokens == plain
    assert fewer.stats.steps < steps.stats.steps
    assert sum(fewer.stats.acceptance.accepted) > 0


def test_linear_confidence_schedules(target: Any, plain: list[list[int]]) -> None:
    case = {"checkpoint": str(ROOT / "deepspec_dspark_rnn")}
    tokens, engine = decode(
        target,
        "dspark",
        mixed(),
        drafter_config=case,
        estimator="linear",
        scheduler="threshold",
        scheduler_config={"threshold": 0.5},
    )
    assert tokens == plain
    assert engine.parts.estimator.__class__.__name__ == "LinearConfidence"


@pytest.mark.parametrize("case", ["deepspec_dspark_gated", "zlab_dflash"])
def test_n_samples_with_a_seed_differ_and_are_plain_decodings(case: str, target: Any) -> None:
    """Case 8: choice i of n has a seed of its own."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3)
    ids = []
    for drafter in (str(ROOT / case), "none"):
        decoder = SpeculativeDecoder.from_pretrained(target, drafter, cost=None, scheduler="fixed", max_len=64)
        ids.append([result.ids for result in decoder.generate(PROMPTS[0], params)])
        decoder.close()
    assert ids[0] == ids[1]
    assert len({tuple(one) for one in ids[0]}) == 3


def test_what_does_not_fit_is_refused_when_the_engine_is_built(target: Any) -> None:
    with pytest.raises(ConfigError, match="gamma 9 is beyond"):
        decode(target, "dspark", mixed(), gamma=9, drafter_config={"checkpoint": str(ROOT / "zlab_dflash")})
    with pytest.raises(CheckpointError, match="not a drafter checkpoint"):
        decode(target, "dspark", mixed(), drafter_config={"checkpoint": str(ROOT / "target_qwen3_tiny")})
    eagle3, block = ({"checkpoint": str(ROOT / f"deepspec_{name}")} for name in ("eagle3", "dflash"))
    with pytest.raises(CheckpointError, match="is an EAGLE-3 drafter: use drafter 'eagle3'"):
        decode(target, "dspark", mixed(), drafter_config=eagle3)
    with pytest.raises(CheckpointError, match="is a dflash drafter: use drafter 'dspark'"):
        decode(target, "eagle3", mixed(), drafter_config=block)
    with pytest.raises(ConfigError, match="no confidence head"):
        decode(
            target, "dspark", mixed(), estimator="linear", drafter_config={"checkpoint": str(ROOT / "deepspec_dflash")}
        )
