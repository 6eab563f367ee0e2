"""Whole generations with the golden target: every round's accepted length and the output equal the recorded run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.drafters.golden import ROOT, commit, io, make_drafter, propose, request

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(ROOT / "target_qwen3_tiny", dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("case", "recorded"),
    [
        ("deepspec_dspark_vanilla", "infer.acceptance_lengths"),
        ("deepspec_dspark_gated", "infer.acceptance_lengths"),
        ("deepspec_dspark_rnn", "infer.acceptance_lengths"),
        ("deepspec_dflash", "infer.acceptance_lengths"),
        ("zlab_dflash", "infer.accepted_plus_one_by_round"),
    ],
)
def test_greedy_generation(case: str, recorded: str, target: Any) -> None:
    """Prefill, then draft, verify, commit until the recorded output is complete; features are the target's own."""
    drafter, data = make_drafter(case), io(case)
    output = data["infer.output_ids"][0].tolist()
    ids, cached, accepted = output[:9], 0, []

    def read(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            out = target(torch.tensor([tokens]), output_hidden_states=True)
        taps = torch.cat([out.hidden_states[k + 1][0] for k in drafter.tap_layers], dim=1)
        return taps, out.logits[0].argmax(-1)

    taps, best = read(ids)
    ids = [*ids, int(best[-1])]
    lengths = data[recorded].tolist()
    for _ in lengths:
        commit(drafter, taps[cached : len(ids) - 1], start=cached, end=len(ids) - 1)
        cached = len(ids) - 1
        block, _ = propose(drafter, [request(ids)])
        drafts = block.token_ids[0].tolist()
        taps, best = read(ids + drafts)
        count = 0
        while count < len(drafts) and drafts[count] == int(best[cached + count]):
            count += 1
        ids = [*ids, *drafts[:count], int(best[cached + count])]
        accepted.append(count + 1)
    assert accepted == lengths
    assert ids[: len(output)] == output
    assert len(ids) >= len(output)
    assert sum(accepted) > len(accepted), "something was accepted"
