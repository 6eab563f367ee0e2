"""The estimator is held to dspark's contracts, and its calibration and its use are measured on toy runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from dspark_estimator_online.estimator import LogisticConfig, LogisticEstimator
from dspark_estimator_online.features import Standard, law_features, named_features

from dspark import SamplingParams, SpeculativeDecoder
from dspark.testing import EstimatorSuite, PluginSuite, TableTarget
from dspark.tokens import TokenView
from dspark.types import BatchView, Committed, DraftBlock, Mode, RequestView, RoundRecord

NAME = "dspark-estimator-online/logistic"
BINS = 20


class TestPlugin(PluginSuite):
    component = "dspark-estimator-online"


class TestLogistic(EstimatorSuite):
    component = NAME
    bad_settings = (
        {"prior_mean": 1.0},
        {"rate": -1.0},
        {"request_memory": float("nan")},
        {"explore_every": 2.5},
        {"reads": "match_length"},
    )


class TestExploring(EstimatorSuite):
    component = NAME
    settings: ClassVar[dict[str, Any]] = {"explore_every": 1}


def ece(probs: np.ndarray, outcomes: np.ndarray) -> float:
    """Expected calibration error, 20 bins of equal width."""
    at = np.minimum((probs * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(at, weights=probs - outcomes, minlength=BINS)).sum() / len(probs))


def log_loss(probs: np.ndarray, outcomes: np.ndarray) -> float:
    inside = np.clip(probs, 1e-6, 1 - 1e-6)
    return float(-np.mean(outcomes * np.log(inside) + (1 - outcomes) * np.log(1 - inside)))


@dataclass
class Law:
    """q as a table [R, gamma, V]."""

    laws: torch.Tensor
    token_ids: torch.Tensor

    def token_probs(self) -> torch.Tensor:
        return self.laws.gather(2, self.token_ids.unsqueeze(2)).squeeze(2)

    def probs(self, rows: Any, positions: Any) -> torch.Tensor:
        return self.laws[torch.as_tensor(rows), torch.as_tensor(positions)]


def request(slot: int, generation: int = 1, mode: Mode = Mode.REJECTION) -> RequestView:
    params = SamplingParams(temperature=0.0 if mode is Mode.GREEDY else 1.0)
    return RequestView(f"r{slot}.{generation}", slot, generation, TokenView([1, 2, 3]), 2, 2, 8, params, mode, slot + 1)


def block(laws: torch.Tensor, tokens: torch.Tensor, **features: Any) -> DraftBlock:
    return DraftBlock(tokens, np.full(len(tokens), tokens.shape[1]), Law(laws, tokens), features=features)


def record(batch: BatchView, draft: DraftBlock, accepted: np.ndarray, offered: np.ndarray) -> RoundRecord:
    done = tuple(
        Committed(r, i, (0,) * (int(a) + 1), int(o), int(a), 3 + int(a))
        for i, (r, a, o) in enumerate(zip(batch.requests, accepted, offered, strict=True))
    )
    return RoundRecord(0, batch, draft, None, None, done, 1, {})


class Simulated:
    """A drafter that is right the likelier the surer it is: x_k ~ q_k of a random temperature, c*_k by that and k."""

    def __init__(self, rows: int = 4, gamma: int = 3, vocab: int = 6, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.batch = BatchView(tuple(request(r) for r in range(rows)), gamma)
        self.shape = rows, gamma, vocab

    def round(self) -> tuple[DraftBlock, np.ndarray, np.ndarray]:
        """A block, its true c* [R, gamma], and how many drafts would be accepted [R]."""
        rows, gamma, vocab = self.shape
        sharp = self.rng.uniform(0.2, 4.0, size=(rows, gamma, 1))
        laws = torch.softmax(torch.from_numpy(sharp * self.rng.normal(size=self.shape)), dim=-1)
        tokens = torch.from_numpy(self.rng.integers(0, vocab, size=(rows, gamma)))
        entropy = torch.special.entr(laws).sum(-1).numpy()
        true = 1.0 / (1.0 + np.exp(-(2.5 - 2.0 * entropy - 0.3 * np.arange(gamma))))
        accepted = np.logical_and.accumulate(self.rng.random((rows, gamma)) < true, axis=1).sum(axis=1)
        return block(laws, tokens), true, accepted

    def run(self, made: Any, rounds: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """c, outcomes and c* of what was seen: offered up to the first rejection."""
        kept: list[tuple[np.ndarray, ...]] = []
        rows, gamma, _ = self.shape
        for _ in range(rounds):
            draft, true, wanted = self.round()
            probs = made.estimate(self.batch, draft)
            offered = np.full(rows, gamma if length is None else length)
            accepted = np.minimum(wanted, offered)
            made.observe(record(self.batch, draft, accepted, offered))
            seen = np.arange(gamma) < np.minimum(offered, accepted + 1)[:, None]
            kept.append((probs[seen], (np.arange(gamma) < accepted[:, None])[seen], true[seen]))
        probs, outcomes, true = (np.concatenate(part) for part in zip(*kept, strict=True))
        return probs, outcomes.astype(float), true


def make(**settings: Any) -> LogisticEstimator:
    return LogisticEstimator(LogisticConfig(**{"explore_every": 0, **settings}))


def test_it_learns_acceptance_from_the_law() -> None:
    world, made = Simulated(), make()
    world.run(made, 400)
    probs, outcomes, true = world.run(made, 600)
    noise = ece(true, outcomes)
    assert ece(probs, outcomes) < noise + 0.03
    average = np.full_like(outcomes, outcomes.mean())
    gained = log_loss(average, outcomes) - log_loss(probs, outcomes)
    possible = log_loss(average, outcomes) - log_loss(true, outcomes)
    assert gained > 0.8 * possible > 0.0


def test_positions_that_were_never_offered_take_the_shared_weights() -> None:
    world, made = Simulated(), make()
    world.run(made, 300, length=1)
    draft, _, _ = world.round()
    probs = made.estimate(world.batch, draft)
    entropy = law_features(world.batch, draft)[:, :, 0]
    assert np.corrcoef(probs[:, 2], entropy[:, 2])[0, 1] < -0.5
    assert not made.weights.values[:, 2:].any()


def test_the_match_length_of_drafters_that_copy_is_learned() -> None:
    rng, made = np.random.default_rng(1), make()
    batch = BatchView(tuple(request(r, mode=Mode.GREEDY) for r in range(4)), 2)
    for _ in range(400):
        tokens = torch.zeros(4, 2, dtype=torch.int64)
        match = rng.integers(2, 20, size=4)
        draft = block(torch.nn.functional.one_hot(tokens, 5).double(), tokens, match_length=match)
        made.estimate(batch, draft)
        accepted = np.where(rng.random(4) < np.where(match > 8, 0.9, 0.2), 2, 0)
        made.observe(record(batch, draft, accepted, np.full(4, 2)))
    draft = block(draft.q.laws, tokens, match_length=np.array([2, 4, 12, 19]))  # type: ignore[attr-defined]
    first = made.estimate(batch, draft)[:, 0]
    assert first[:2].max() < 0.45 < 0.7 < first[2:].min()


def test_a_request_has_a_hit_rate_of_its_own_until_it_leaves() -> None:
    made = make()
    batch = BatchView((request(0), request(1)), 2)
    tokens = torch.zeros(2, 2, dtype=torch.int64)
    draft = block(torch.full((2, 2, 5), 0.2, dtype=torch.float64), tokens)
    for _ in range(200):
        made.estimate(batch, draft)
        made.observe(record(batch, draft, np.array([2, 0]), np.array([2, 2])))
    easy, hard = made.estimate(batch, draft)[:, 0]
    assert easy > 0.8 > 0.2 > hard
    made.release(1, 1)
    fresh = made.estimate(BatchView((request(0), request(1, generation=2)), 2), draft)[:, 0]
    assert hard + 0.1 < fresh[1] < easy


def test_of_a_rejected_draft_only_what_was_reached_counts() -> None:
    batch = BatchView((request(0),), 3)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    draft = block(torch.full((1, 3, 5), 0.2, dtype=torch.float64), tokens)
    made = make(decay=0.0)
    made.observe(record(batch, draft, np.array([1]), np.array([3])))
    moved = made.weights.values[list(Mode).index(Mode.REJECTION), :, 0]
    assert moved[1] > 0 > moved[2]
    assert moved[3] == 0


def test_greedy_rows_have_no_law_to_read() -> None:
    tokens = torch.tensor([[1, 2]])
    draft = block(torch.nn.functional.one_hot(tokens, 5).double(), tokens)
    assert np.isnan(law_features(BatchView((request(0, mode=Mode.GREEDY),), 2), draft)).all()
    assert np.allclose(law_features(BatchView((request(0),), 2), draft)[0, 0], [0.0, 20.0, 1.0])


def test_features_of_a_wrong_shape_are_named() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    draft = block(torch.full((2, 3, 5), 0.2, dtype=torch.float64), tokens, share=np.zeros(3))
    with pytest.raises(ValueError, match=r"features\['share'\] is \[3\], expected \[2\] or \[2, 3\]"):
        named_features(draft, ("share",))


def test_standardised_features_have_mean_0_and_variance_1() -> None:
    rng, standard = np.random.default_rng(0), Standard(2)
    for _ in range(100):
        values = rng.normal([5.0, -1.0], [3.0, 0.1], size=(20, 2))
        values[rng.random(20) < 0.3, 1] = np.nan
        standard.learn(values)
    values = standard(rng.normal([5.0, -1.0], [3.0, 0.1], size=(4000, 2)))
    assert np.allclose(values.mean(axis=0), 0.0, atol=0.15)
    assert np.allclose(values.std(axis=0), 1.0, atol=0.15)
    assert not standard(np.full((1, 2), np.nan)).any()


class Watch:
    """Keeps c and outcomes of what an engine offered up to the first rejection."""

    def __init__(self) -> None:
        self.probs: list[float] = []
        self.outcomes: list[float] = []

    def on_round(self, seen: RoundRecord) -> None:
        for one in seen.committed:
            if seen.confidence is None or one.row < 0:
                continue
            for k in range(min(one.offered, one.accepted + 1)):
                self.probs.append(float(seen.confidence.probs[one.row, k]))
                self.outcomes.append(float(k < one.accepted))

    def on_finish(self, finished: RequestView, reason: str) -> None:
        """Nothing."""


def test_it_is_calibrated_in_an_engine_and_saves_drafts() -> None:
    """`ngram` on a target that counts on from one half of the vocabulary, and says anything after the other."""
    logits = torch.full((12, 12), -20.0, dtype=torch.float64)
    logits[:6, :6] = logits[6:, 6:] = 0.0
    logits[torch.arange(6), (torch.arange(6) + 1) % 6] = 6.0
    prompts = [[0, 1, 2, 3, 4, 5, 0, 1, 2], [6, 7, 8, 6, 9, 7, 6, 7]] * 6

    def run(scheduler: str, watch: Watch) -> float:
        with SpeculativeDecoder.from_pretrained(
            TableTarget(logits), "ngram", cost=None, gamma=4, max_slots=4, max_len=80, observers=[watch],
            estimator=NAME, estimator_config={"explore_every": 16}, scheduler=scheduler, gamma_policy="static",
        ) as decoder:  # fmt: skip
            decoder.generate(prompts, max_tokens=60, temperature=1.0)
            accepted, offered = (sum(getattr(decoder.stats.acceptance, name)) for name in ("accepted", "offered"))
            return accepted / offered

    watch = Watch()
    fixed = run("fixed", watch)
    half = len(watch.probs) // 2
    probs, outcomes = np.array(watch.probs[half:]), np.array(watch.outcomes[half:])
    honest = probs < 1.0  # an exploring row says c = 1 to be offered, not because it is so
    assert honest.sum() > 150
    assert ece(probs[honest], outcomes[honest]) < 0.12
    assert run("threshold", Watch()) > 1.15 * fixed
