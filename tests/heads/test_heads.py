"""Sequential heads: golden values, step equals block, candidates equal the full bias, state is per block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.errors import CheckpointError, ConfigError
from dspark.heads import gated, markov, none, rnn
from dspark.heads.common import HeadConfig
from dspark.protocols import BuildContext, SequentialHead
from tests.drafters.golden import near

torch.set_num_threads(1)
ROOT = Path(__file__).parents[1] / "golden"
D, V, VD, R = 12, 30, 20, 5
HEADS = {
    "markov": (markov.MarkovConfig, markov.build),
    "gated": (gated.GatedConfig, gated.build),
    "rnn": (rnn.RNNConfig, rnn.build),
    "none": (none.NoHeadConfig, none.build),
}


def make(name: str, dtype: torch.dtype = torch.float64, **values: Any) -> Any:
    cls, factory = HEADS[name]
    sizes = {"hidden_size": D, "vocab_size": V, "draft_vocab_size": VD, "rank": R} | values
    return factory(cls(**sizes), BuildContext(dtype=dtype))


def loud(name: str) -> Any:
    """A random head whose weights are large enough that every term shows."""
    head = make(name)
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters() if isinstance(head, torch.nn.Module) else ():
        parameter.data.normal_(0, 0.7, generator=generator)
    return head


def steps(head: SequentialHead, prev: Tensor, hidden: Tensor, candidates: Tensor | None = None) -> Tensor:
    state, out = head.start(prev[:, 0], hidden), []
    for k in range(prev.shape[1]):
        extra = () if candidates is None else (candidates[:, k],)
        bias, state = head.step(state, prev[:, k], hidden[:, k], *extra)
        out.append(bias)
    return torch.stack(out, dim=1)


def example(rows: int = 3, gamma: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    prev = torch.randint(0, V, (rows, gamma), generator=generator)
    return prev, torch.randn(rows, gamma, D, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", ["vanilla", "gated", "rnn"])
def test_golden_heads(case: str) -> None:
    """Teacher-forced blocks with random hidden states: corrected logits of DeepSpec's own heads."""
    folder = ROOT / f"deepspec_dspark_{case}"
    data, stored = load_file(folder / "io.safetensors"), load_file(folder / "model.safetensors")
    weights = {n.removeprefix("markov_head."): t for n, t in stored.items() if n.startswith("markov_head.")}
    sizes = {"hidden_size": 32, "vocab_size": 97, "draft_vocab_size": 97, "rank": 8}
    head = make("markov" if case == "vanilla" else case, torch.float32, **sizes, weights=weights)
    prev, hidden = data["heads.prev_token_ids"].flatten(0, 1), data["heads.hidden"].flatten(0, 1)
    expected = data["heads.corrected_logits"].flatten(0, 1)
    for bias in (head.block(prev, hidden), steps(head, prev, hidden)):
        got = data["heads.base_logits"].flatten(0, 1) + bias
        assert float((got - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("name", HEADS)
def test_step_equals_block(name: str) -> None:
    head, (prev, hidden) = loud(name), example()
    block = head.block(prev, hidden)
    assert block.shape == (3, 6, VD)
    assert isinstance(head, SequentialHead)
    near(steps(head, prev, hidden), block, 1e-12)


@pytest.mark.parametrize("name", HEADS)
def test_candidates_are_entries_of_the_full_bias(name: str) -> None:
    head, (prev, hidden) = loud(name), example()
    generator = torch.Generator().manual_seed(2)
    candidates = torch.rand(3, 6, VD, generator=generator).topk(4, dim=-1).indices
    full = head.block(prev, hidden).gather(2, candidates)
    near(steps(head, prev, hidden, candidates), full, 1e-12)


def test_markov_reads_the_previous_token_alone() -> None:
    head, (prev, hidden) = loud("markov"), example()
    bias = head.block(prev, hidden)
    assert torch.equal(bias, head.block(prev, hidden * 0))
    near(bias[0, 2], head.w2 @ head.w1[prev[0, 2]], 1e-12)


def test_gate_and_state_depend_on_what_they_should() -> None:
    """gated: on this position's hidden state. rnn: on every earlier token too. Neither on later ones."""
    prev, hidden = example()
    other_hidden, other_prev = hidden.clone(), prev.clone()
    other_hidden[:, 3] += 1.0
    other_prev[:, 3] = (prev[:, 3] + 1) % V
    for name, touched in (("gated", {3}), ("rnn", {3, 4, 5})):
        head = loud(name)
        before = head.block(prev, hidden)
        for p, h in ((prev, other_hidden), (other_prev, hidden)):
            moved = (head.block(p, h) != before).flatten(2).any(2)
            assert set(moved.any(0).nonzero().flatten().tolist()) == touched, name


def test_rnn_state_starts_at_zero_each_block() -> None:
    head, (prev, hidden) = loud("rnn"), example()
    first = steps(head, prev, hidden)
    assert torch.equal(steps(head, prev, hidden), first)
    assert not head.start(prev[:, 0], hidden).any()


def test_none_is_silent() -> None:
    head, (prev, hidden) = make("none"), example()
    assert head.silent
    assert not head.block(prev, hidden).any()


def test_misshapen_and_missing_weights_are_listed() -> None:
    weights = {"markov_w1.weight": torch.zeros(V, R + 1)}
    with pytest.raises(CheckpointError) as err:
        make("markov", weights=weights)
    assert "markov_w1.weight: expected [30, 5], got [30, 6]" in str(err.value)
    assert "markov_w2.weight: expected [20, 5], got nothing" in str(err.value)
    with pytest.raises(ConfigError, match="rank must be at least 1"):
        make("markov", rank=0)
    with pytest.raises(ConfigError, match="hidden_size"):
        HeadConfig(hidden_size=0, vocab_size=1, draft_vocab_size=1)
