"""1 - TV along fixed texts: against plain softmaxes, and the same anchors whatever drafts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.config import SamplingParams
from dspark.errors import EvaluationError
from dspark.evaluation import forced as module
from dspark.evaluation.forced import Overlap, Prefix, forced_overlap, read_along, read_prefixes, write_prefixes
from dspark.testing import TableTarget
from dspark.testing.toys import random_table
from dspark.types import IntArray
from tests.evaluation.conftest import GOLDEN

VOCAB = 6
GREEDY = SamplingParams()
WARM = SamplingParams(temperature=0.7, top_k=3)


class TableForced:
    """Draft logits of a table by the token before, over its first columns or a map's."""

    tap_layers: tuple[int, ...] = ()

    def __init__(self, table: Tensor, token_map: Tensor | None = None) -> None:
        self.table, self.token_map = table, token_map
        self.asked: list[list[int]] = []

    def forced_logits(
        self, ids: Tensor, taps: Tensor | None, anchors: IntArray, gamma: int
    ) -> tuple[Tensor, Tensor | None]:
        self.asked.append(anchors.tolist())
        assert taps is None
        prev = ids[torch.from_numpy(anchors)[:, None] + torch.arange(gamma)]
        return self.table[prev], self.token_map


@pytest.fixture
def toy() -> TableTarget:
    target = TableTarget(random_table(VOCAB + 1, VOCAB, VOCAB, seed=1), max_len=64)
    target.allocate(1, 64)
    return target


def prefix(length: int = 20, prompt: int = 3) -> Prefix:
    ids = np.random.default_rng(2).integers(0, VOCAB, size=prompt + length).tolist()
    return Prefix("a", "1", tuple(ids[:prompt]), tuple(ids[prompt:]))


def overlap(toy: TableTarget, drafter: TableForced, params: SamplingParams = GREEDY, **more: Any) -> Overlap:
    settings: dict[str, Any] = {"gamma": 3, "span": 4, "anchors": 5} | more
    return forced_overlap(toy, drafter, settings.pop("prefix", prefix()), params=params, **settings)


def law(logits: Tensor, params: SamplingParams) -> Tensor:
    """softmax under temperature and top-k, written plainly."""
    if not params.greedy:
        logits = logits / params.temperature
        kept = logits.topk(params.top_k).indices if params.top_k else torch.arange(len(logits))
        logits = torch.full_like(logits, -torch.inf).scatter(0, kept, logits[kept])
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("kind", ["same", "padded", "narrow", "mapped"])
def test_overlap_is_one_minus_tv_of_the_laws_that_are_sampled(
    toy: TableTarget, params: SamplingParams, kind: str
) -> None:
    """Case 36's vocabularies: as the target's, padded, cut, and pruned with a map."""
    width = {"same": VOCAB, "padded": VOCAB + 2, "narrow": 4, "mapped": 4}[kind]
    table = random_table(VOCAB, width, seed=5)
    token_map = torch.tensor([5, 0, 3, 2]) if kind == "mapped" else None
    got = overlap(toy, TableForced(table, token_map), params)
    text = [*prefix().prompt_ids, *prefix().response_ids]
    anchors = prefix().anchors(5, 4)
    want, agree = np.zeros(3), np.zeros(3)
    for a in anchors.tolist():
        for k in range(3):
            p = law(toy.next_logits(text[: a + k + 1]), params)
            logits = table[text[a + k]][:VOCAB]
            q = torch.zeros(VOCAB, dtype=torch.float64)
            own = law(logits, params)
            q[token_map if token_map is not None else torch.arange(len(own))] = own
            want[k] += 1 - 0.5 * float((p - q).abs().sum())
            agree[k] += int(p.argmax() == q.argmax())
    assert got.anchors == len(anchors) == 5
    np.testing.assert_allclose(got.overlap, want, atol=1e-9)
    assert got.agreement.tolist() == agree.tolist()


def test_a_drafter_that_is_the_target_overlaps_whole() -> None:
    table = random_table(VOCAB, VOCAB, seed=3)
    target = TableTarget(table, max_len=64)
    target.allocate(1, 64)
    got = overlap(target, TableForced(table))
    np.testing.assert_allclose(got.overlap, 5.0, atol=1e-9)
    assert got.agreement.tolist() == [5.0, 5.0, 5.0]


def test_anchors_depend_on_the_text_and_the_span_alone(toy: TableTarget) -> None:
    """Drafters of other gammas stand at the same anchors; each has ``span`` tokens behind it."""
    drafter = TableForced(random_table(VOCAB, VOCAB))
    for gamma in (1, 2, 4):
        overlap(toy, drafter, gamma=gamma)
    assert drafter.asked[0] == drafter.asked[1] == drafter.asked[2] == prefix().anchors(5, 4).tolist()
    anchors = prefix().anchors(5, 4)
    assert (anchors[0], anchors[-1]) == (2, 18), "the prompt's last token, and four before the end"
    assert len(prefix().anchors(100, 4)) == 17
    assert len(prefix(length=4).anchors(9, 4)) == 1
    assert len(prefix(length=3).anchors(9, 4)) == 0
    assert Prefix("a", "1", (3,), tuple(range(8))).anchors(9, 4).tolist() == [1, 2, 3, 4], "never without context"
    assert overlap(toy, drafter, prefix=prefix(length=3)).anchors == 0
    with pytest.raises(EvaluationError, match="gamma 5 is beyond the 4 tokens"):
        overlap(toy, drafter, gamma=5)
    with pytest.raises(EvaluationError, match=r"a:1: 73 tokens, and a slot has 64"):
        overlap(toy, drafter, prefix=prefix(length=70))


def test_long_texts_are_read_in_chunks(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and taps of a real target, against one plain forward."""
    target.allocate(2, 128)
    ids = np.random.default_rng(0).integers(0, 97, size=50).tolist()
    rows = np.array([3, 15, 16, 17, 40, 49])
    monkeypatch.setattr(module, "CHUNK", 16)
    logits, taps = read_along(target, ids, rows, (0, 3))
    want = target.plain_logits(ids)
    assert (logits - want[torch.from_numpy(rows)]).abs().max() < 1e-4
    monkeypatch.setattr(module, "CHUNK", 512)
    whole, features = read_along(target, ids, rows, (0, 3))
    assert (logits - whole).abs().max() < 1e-4
    assert taps is not None
    assert features is not None
    assert taps.shape == (50, 2 * 32)
    assert (taps - features).abs().max() < 1e-4


def test_it_is_what_rejection_accepts(target: Any) -> None:
    """Acceptance at position 1, drawn by the real engine at one anchor, is 1 - TV there, for one block size."""
    from dspark import SpeculativeDecoder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoder = SpeculativeDecoder.from_pretrained(
            target, str(GOLDEN / "deepspec_dspark_vanilla"), cost=None, scheduler="fixed", max_slots=32, max_len=64
        )
    params = SamplingParams(max_tokens=6, temperature=1.0)
    ids = np.random.default_rng(4).integers(0, 97, size=9).tolist()
    first = decoder.generate(ids, max_tokens=1)[0].ids[0]
    prefix = Prefix("a", "1", (*ids, first), tuple(np.random.default_rng(5).integers(0, 97, size=4).tolist()))
    parts = decoder.engine.parts
    want = forced_overlap(parts.target, parts.drafter, prefix, gamma=4, span=4, params=params, anchors=1)  # type: ignore[arg-type]
    runs = decoder.generate([ids] * 1500, params)
    second = [r for r in runs if r.ids[0] == first]
    hits = [r.accepted[1] for r in second]
    share, spread = float(np.mean(hits)), float(np.std(hits)) / len(hits) ** 0.5
    assert len(hits) > 60
    assert abs(share - want.overlap[0]) < 4 * spread


def test_prefixes_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    two = [prefix(), Prefix("b", "x", (1,), (2, 3))]
    write_prefixes(path, two)
    assert read_prefixes(path) == two
    path.write_text(
        '{"prompt_ids": [1, 2], "response_ids": [3]}\n\n{"prompt_ids": [1], "response_ids": [], "source": null}\n'
    )
    assert [p.key for p in read_prefixes(path)] == ["p:1", "p:3"], "named by file and line where nothing is said"
    for text, words in (
        ("", "no responses"),
        ('{"prompt_ids": [1]}', "line 1: expected an object with"),
        ("[]", "line 1"),
        ("{", "line 1"),
        ('{"prompt_ids": [1], "response_ids": [2], "index": 1}\n' * 2, "line 2: p:1 is there twice"),
    ):
        path.write_text(text)
        with pytest.raises(EvaluationError, match=words):
            read_prefixes(path)
    with pytest.raises(EvaluationError, match="absent"):
        read_prefixes(tmp_path / "absent")
    with pytest.raises(EvaluationError, match="absent"):
        write_prefixes(tmp_path / "absent" / "p.jsonl", two)


def test_a_digest_is_of_the_tokens() -> None:
    assert prefix().digest == prefix().digest
    moved = Prefix("a", "1", prefix().prompt_ids[:-1], (prefix().prompt_ids[-1], *prefix().response_ids))
    assert moved.digest != prefix().digest


def test_overlaps_survive_json(toy: TableTarget) -> None:
    got = overlap(toy, TableForced(random_table(VOCAB, VOCAB)))
    again = Overlap.from_dict(got.as_dict())
    assert again.as_dict() == got.as_dict()
    with pytest.raises(EvaluationError, match="malformed"):
        Overlap.from_dict({"anchors": 1})
