"""The proposer for vLLM, driven as vLLM drives one: rows of a persistent batch that move, join, leave and pause.

vLLM itself is not needed: the interface is plain lists and arrays. Where it is installed, ``VLLM_PYTHON`` names its
interpreter, and the last test runs it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dspark import ConfigError, DSparkWarning, SpeculativeDecoder
from dspark.checkpoints import load_checkpoint, write_deepspec, write_speculators
from dspark.drafters.draft_model import ModelDraft
from dspark.drafters.ngram import NgramConfig, NgramDrafter
from dspark.integrations.vllm import DSparkProposer, TokenProposer
from dspark.targets.hf import HFTarget

torch.set_num_threads(1)
CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[1] / "golden"
V, LENGTH, GAMMA = 300, 96, 4


@dataclass
class Request:
    """A request as vLLM has it: all that plain decoding will write, and how far it is."""

    text: list[int]
    prompt: int
    known: int = 0
    drafts: list[int] = field(default_factory=list)

    def step(self) -> list[int]:
        """Verify the drafts: the tokens that a step adds."""
        at, accepted = self.known, 0
        while accepted < len(self.drafts) and self.text[at + accepted : at + accepted + 1] == [self.drafts[accepted]]:
            accepted += 1
        new = self.text[at : at + accepted + 1]
        self.known += len(new)
        return new


class Batch:
    """vLLM's input batch: a table of tokens whose rows are swapped and moved up."""

    def __init__(self, proposer: TokenProposer, slots: int) -> None:
        self.proposer, self.rows = proposer, list[Request]()
        self.tokens = np.zeros((slots, LENGTH), dtype=np.int32)
        self.verified = self.accepted = 0

    def step(self, scheduled: Sequence[Request]) -> None:
        self.rows = list(scheduled)
        texts: dict[int, Any] = {}
        new: dict[int, int] = {}
        for i, request in enumerate(self.rows):
            added = request.step()
            self.verified += len(request.drafts)
            self.accepted += len(added) - 1
            self.tokens[i, : request.known] = request.text[: request.known]
            texts[i], new[i] = self.tokens[i, : request.known].astype(np.int64), len(added)
        drafts = self.proposer.propose(texts, new)
        for i, request in enumerate(self.rows):
            request.drafts = drafts.get(i, [])[: len(request.text) - request.known - 1]


@pytest.fixture(scope="module")
def target(tiny_model: Any, tiny_tokenizer: Any) -> HFTarget:
    return HFTarget(tiny_model, tiny_tokenizer, name="tiny")


@pytest.fixture(scope="module")
def texts(tiny_model: Any) -> list[tuple[int, list[int]]]:
    """(prompt length, prompt and greedy output) of requests; some share their beginning, or all of it."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, V, size=n).tolist() for n in (3, 9, 5, 12, 7)]
    prompts += [prompts[0], prompts[1][:6], prompts[3]]
    with SpeculativeDecoder.from_pretrained(tiny_model, "none", cost=None, max_slots=8, max_len=LENGTH) as plain:
        results = plain.generate(prompts, max_tokens=40, ignore_eos=True)
    return [(len(p), p + r.ids) for p, r in zip(prompts, results, strict=True)]


def proposer_of(drafter: Any, slots: int = 4) -> TokenProposer:
    return TokenProposer(drafter, gamma=GAMMA, slots=slots, max_len=LENGTH, vocab_size=V, device=CPU)


def run(batch: Batch, texts: list[tuple[int, list[int]]], seed: int) -> None:
    """Everything is decoded by up to four rows at a time, in an order that changes with every step."""
    rng = np.random.default_rng(seed)
    waiting = [Request(text, prompt, prompt) for prompt, text in texts]
    live: list[Request] = []
    while waiting or live:
        while waiting and len(live) < 4:
            live.append(waiting.pop(int(rng.integers(len(waiting)))))
        some = [request for request in live if rng.random() < 0.8] or live[:1]  # the others are not scheduled
        rng.shuffle(some)
        batch.step(some)
        live = [request for request in live if request.known < len(request.text)]


def test_a_drafter_that_is_the_target_is_always_right(
    target: HFTarget, tiny_model: Any, texts: list[tuple[int, list[int]]]
) -> None:
    """Every draft is accepted: no row ever gets the cache of another, or of an earlier request."""
    draft = HFTarget(tiny_model, name="the same")
    batch = Batch(proposer_of(ModelDraft(draft, SimpleNamespace(max_len=LENGTH), slots=4)), 4)
    run(batch, texts, seed=1)
    assert batch.verified > 150
    assert batch.accepted == batch.verified


def test_drafts_are_a_function_of_the_text(texts: list[tuple[int, list[int]]]) -> None:
    """Whatever went on in the batch, a row drafts what a proposer drafts that has seen nothing else."""
    drafter = NgramDrafter(NgramConfig(min_n=1))
    batch = Batch(proposer_of(drafter), 4)
    propose, seen = batch.proposer.propose, 0

    def compared(rows: Any, new: Any) -> dict[int, list[int]]:
        nonlocal seen
        drafts = propose(rows, new)
        for row, ids in rows.items():
            fresh = proposer_of(NgramDrafter(NgramConfig(min_n=1))).propose({0: ids}, {0: new[row]})
            assert drafts.get(row) == fresh.get(0)
            seen += row in drafts
        return drafts

    batch.proposer.propose = compared  # type: ignore[method-assign]
    run(batch, texts, seed=2)
    assert seen > 50
    assert len(drafter._indexes) <= 4


def test_a_drafter_is_told_what_was_committed(texts: list[tuple[int, list[int]]]) -> None:
    """Each text once, in order, prompts as the view and what follows as new tokens; released slots begin anew."""

    class Log(NgramDrafter):
        def __init__(self) -> None:
            super().__init__(NgramConfig(min_n=1))
            self.texts: dict[tuple[int, int], list[int]] = {}
            self.released: list[tuple[int, int]] = []

        def commit(self, committed: Any) -> None:
            for c in committed:
                key = c.request.slot, c.request.generation
                assert self.texts.setdefault(key, list(c.request.ids)) == list(c.request.ids)
                assert 0 <= c.accepted <= min(c.offered, len(c.new_ids) - 1)
                self.texts[key] += c.new_ids
                assert c.num_cached == len(self.texts[key]) - 1

        def release(self, slot: int, generation: int) -> None:
            super().release(slot, generation)
            self.released.append((slot, generation))

    drafter = Log()
    run(Batch(proposer_of(drafter), 4), texts, seed=3)
    whole = [text for _, text in texts]
    assert all(any(text[: len(said)] == said for text in whole) for said in drafter.texts.values())
    assert all(text in drafter.texts.values() for text in whole)
    assert len(set(drafter.released)) == len(drafter.released) == len(drafter.texts) - 4


def config(**dspark: Any) -> SimpleNamespace:
    """The attributes of ``VllmConfig`` that are read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=GAMMA),
        model_config=SimpleNamespace(
            model="tiny",
            max_model_len=LENGTH,
            dtype=torch.float32,
            get_vocab_size=lambda: V,
            tokenizer="tiny",
            tokenizer_revision=None,
            skip_tokenizer_init=True,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        device_config=SimpleNamespace(device="cpu"),
        additional_config={"dspark": dspark},
    )


def test_the_class_speaks_vllms_interface(tiny_model: Any) -> None:
    proposer = DSparkProposer(config(drafter="draft-model", drafter_config={"model": tiny_model}))
    proposer.load_model(object())
    tokens = np.zeros((4, LENGTH), dtype=np.int32)
    tokens[0, :6], tokens[1, :4], tokens[2, :LENGTH] = [5, 6, 7, 5, 6, 7], [9, 9, 9, 9], 3
    drafts = proposer.propose([[7], [], [3]], np.array([6, 4, LENGTH, 0]), tokens, slot_mappings=None)
    assert [len(row) for row in drafts] == [GAMMA, 0, 0]  # a prompt that is not read yet, and a text without room
    with SpeculativeDecoder.from_pretrained(tiny_model, "none", cost=None, max_slots=1, max_len=LENGTH) as plain:
        assert drafts[0] == plain.generate([[5, 6, 7, 5, 6, 7]], max_tokens=GAMMA, ignore_eos=True)[0].ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": "dspark"}, "hidden states"),
        ({"drafter": "eagle3"}, "hidden states"),
        ({"drafter": str(GOLDEN / "deepspec_dspark_vanilla")}, "dspark export"),
        ({"draftr": "ngram"}, "drafter"),
        ({"drafter": "ngrm"}, "ngram"),
    ],
)
def test_what_cannot_run_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        DSparkProposer(config(**settings))
    assert caught.type.__module__ == "dspark.errors"


def test_settings_of_the_drafter_are_read() -> None:
    with pytest.raises(ConfigError, match="max_n"):
        DSparkProposer(config(drafter_config={"max_m": 3})).load_model()


def test_a_drafter_that_fails_costs_no_request() -> None:
    proposer = DSparkProposer(config())
    proposer.load_model()

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("no")

    assert proposer._proposer is not None
    proposer._proposer.drafter.propose = broken  # type: ignore[assignment, method-assign]
    tokens = np.tile(np.array([5, 6, 7], dtype=np.int32), (2, LENGTH // 3))
    with pytest.warns(DSparkWarning, match="ngram failed"):
        assert proposer.propose([[7], [6]], np.array([9, 8]), tokens) == [[], []]
    assert proposer.propose([[7]], np.array([12]), tokens) == [[]]


def test_exports_have_at_their_root_what_vllm_reads(tmp_path: Path) -> None:
    """The keys of docs/embedding.md, in the format that is served as it is, and in the one that vLLM translates."""
    checkpoint = load_checkpoint(GOLDEN / "deepspec_dspark_vanilla")
    assert write_deepspec(tmp_path / "deepspec", checkpoint) == ()
    raw = json.loads((tmp_path / "deepspec" / "config.json").read_text())
    page = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text(encoding="utf-8")
    keys = [line.split("|")[1].strip().strip("`") for line in page.splitlines() if line.startswith("| `")]
    assert "markov_rank" in keys
    optional = {"sample_from_anchor", "draft_vocab_size"}
    assert {key for key in keys if key in raw} >= set(keys) - optional
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert raw["markov_head_type"] == "vanilla"
    named = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, target_name="target"))
    assert write_speculators(tmp_path / "speculators", named, keep_embeddings=True) == ()
    raw = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert raw["speculators_model_type"] == "dspark"
    assert raw["sample_from_anchor"] is True
    assert raw["aux_hidden_state_layer_ids"] == [k + 1 for k in checkpoint.config.target_layer_ids]


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("VLLM_PYTHON"), reason="VLLM_PYTHON names no interpreter that has vLLM")
@pytest.mark.timeout(900)
def test_vllm_decodes_with_it(tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Greedy output of vLLM with the proposer is vLLM's without it, and drafts are accepted."""
    config = copy.deepcopy(tiny_model.config)
    config.update({"hidden_size": 128, "head_dim": 32})  # heads as narrow as the tiny model's have no kernel there
    torch.manual_seed(0)
    type(tiny_model)(config).eval().save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    script = Path(__file__).with_name("vllm_side.py")
    command = [os.environ["VLLM_PYTHON"], str(script), str(tmp_path / "target")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["plain"] == found["drafted"]
    assert found["accepted"] > 0
