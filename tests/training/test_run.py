"""Whole runs over a tiny target: every kind of drafter, online and cached, written and decoded with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.api import SpeculativeDecoder
from dspark.checkpoints import load_checkpoint
from dspark.errors import ConfigError
from tests.training.tiny import hf_target, make_run, records

DRAFTERS: dict[str, dict[str, Any]] = {
    "markov": {"head": "markov"},
    "gated": {"head": "gated", "confidence_with_markov": False},
    "rnn": {"head": "rnn"},
    "dflash, mask-only": {"head": "none", "confidence": False, "layout": "mask-only"},
    "pruned": {"vocab_size": 120},
    "windowed": {"window": 6},
    "llama": {"family": "llama"},
    "eagle3": {"algorithm": "eagle3"},
    "eagle3, pruned": {"algorithm": "eagle3", "vocab_size": 120},
}


@pytest.fixture(scope="module")
def target(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    return hf_target(tiny_model, tiny_tokenizer)


@pytest.mark.parametrize("kind", sorted(DRAFTERS))
def test_a_trained_drafter_decodes(kind: str, target: Any, tmp_path: Path, tiny_tokenizer: Any) -> None:
    """What is written reads back as what was trained, and drafts losslessly."""
    lines: list[str] = []
    run = make_run(tmp_path, target, lines, drafter=DRAFTERS[kind])
    trainer = run.train()
    assert trainer.step == 4
    kinds = [(r["kind"], r["step"]) for r in records(run)]
    assert kinds == [("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)]
    assert len(records(run)[0]["accept"]) == 4

    folder = run.output / "drafter"
    read = load_checkpoint(folder, target_layers=target.num_layers)
    held = trainer.objective.drafter.canonical()
    for name, tensor in read.tensors.items():
        assert torch.equal(tensor, held[name].bfloat16()), name
    assert read.config.draft_vocab_size == DRAFTERS[kind].get("vocab_size", 300)
    plain = SpeculativeDecoder.from_pretrained(target, "none", tokenizer=tiny_tokenizer, cost=None)
    expected = plain.generate([[7, 8, 9]], max_tokens=12)[0].ids
    with SpeculativeDecoder.from_pretrained(target, str(folder), tokenizer=tiny_tokenizer, cost=None) as decoder:
        assert decoder.generate([[7, 8, 9]], max_tokens=12)[0].ids == expected
        assert decoder.stats.drafted > 0


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_a_cache_gives_what_the_target_gives_online(algorithm: str, target: Any, tmp_path: Path) -> None:
    """Features in float32 make no difference; both see the same anchors in the same order."""
    drafter = {"algorithm": algorithm}
    online = make_run(tmp_path, target, drafter=drafter, run={"output": str(tmp_path / "a")})
    online.train()
    cache = {"cache": str(tmp_path / "cache")}
    cached = make_run(tmp_path, target, drafter=drafter, data=cache, run={"output": str(tmp_path / "b")})
    cached.train()
    for a, b in zip(records(online), records(cached), strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=2e-3)
        assert a["ce"] == pytest.approx(b["ce"], rel=2e-3)


def test_training_learns(target: Any, tmp_path: Path) -> None:
    """On a few conversations the loss falls, and acceptance rises."""
    optim = {"steps": 60, "sequences": 4, "anchors": 12, "lr": 1e-2}
    loss = {"ce": 1.0, "tv": 0.5}
    run = make_run(tmp_path, target, drafter={"vocab_size": 200}, optim=optim, loss=loss, data={"holdout": 0})
    run.train()
    seen = [r for r in records(run) if r["kind"] == "train"]
    assert seen[-1]["ce"] < 0.7 * seen[0]["ce"]
    assert seen[-1]["accepted_length"] > seen[0]["accepted_length"]


def test_going_on_from_a_checkpoint(target: Any, tmp_path: Path) -> None:
    """``drafter.start`` takes shape, vocabulary and weights of a drafter that was trained before."""
    drafter = {"vocab_size": 120, "head": "gated", "gamma": 3}
    first = make_run(tmp_path, target, drafter=drafter, run={"output": str(tmp_path / "a")})
    first.train()
    start = {"start": str(tmp_path / "a" / "drafter")}
    second = make_run(tmp_path, target, drafter=start, run={"output": str(tmp_path / "b")})
    trainer = second.prepare()
    config = trainer.objective.drafter.config
    assert (config.head, config.max_gamma, config.draft_vocab_size) == ("gated", 3, 120)
    before = load_checkpoint(tmp_path / "a" / "drafter", target_layers=2).tensors
    held = trainer.objective.drafter.canonical()
    assert all(torch.equal(held[n], t.float()) for n, t in before.items() if n != "lm_head.weight")


def test_initialisations(target: Any, tmp_path: Path) -> None:
    """Layers that are the target's, and a Markov head that knows the bigrams of the data."""
    drafter = {"init": "target", "init_head": "bigram", "rank": 100, "vocab_size": 200}
    trainer = make_run(tmp_path, target, drafter=drafter).prepare()
    held, state = trainer.objective.drafter.canonical(), target.model.state_dict()
    for i in (0, 1):
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"):
            assert torch.equal(held[f"layers.{i}.{part}.weight"], state[f"model.layers.{i}.{part}.weight"])
    assert trainer.objective.drafter.config.family == "llama"
    sequential = trainer.objective.drafter.sequential
    known: dict[int, set[int]] = {}
    for i in range(len(trainer.source)):
        sample = trainer.source.sample(i)
        for a, b, said in zip(sample.ids, sample.ids[1:], sample.loss_mask[1:], strict=False):
            if said:
                known.setdefault(int(a), set()).add(int(trainer.objective.draft_ids[int(b)]))
    prev = torch.tensor(sorted(known))
    best = sequential.block(prev.unsqueeze(1), torch.zeros(len(prev), 1, 32))[:, 0].argmax(-1).tolist()
    hits = sum(b in known[int(a)] for a, b in zip(prev, best, strict=True))
    assert hits > 0.9 * len(prev)


def test_heads_without_bigrams_refuse_them(target: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"init_head.*rnn"):
        make_run(tmp_path, target, drafter={"head": "rnn", "init_head": "bigram"}).prepare()
    with pytest.raises(ConfigError, match=r"drafter\.init:.*gate_proj.*down_proj"):
        make_run(tmp_path, target, drafter={"init": "target", "intermediate_size": 48}).prepare()
