"""Packed ragged forwards over the slot cache give the logits that the model gives by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dspark.errors import CapacityError, TargetError
from dspark.targets import groups
from dspark.targets.attention import fuses
from dspark.targets.cache import LayerSpec
from dspark.targets.hf import HFTarget
from dspark.targets.plan import AttentionCost, Group, plan_groups

from .toys import CONFIGS, VOCAB, plain, toy_layout, toy_model

# transformers softmaxes and rotates in float32, whatever the model's dtype
CLOSE = {"rtol": 0.0, "atol": 2e-5}


def target_of(model: Any, **settings: Any) -> HFTarget:
    return HFTarget(model, probe=False, **settings)


def random_text(rng: np.random.Generator, length: int) -> list[int]:
    return [int(t) for t in rng.integers(3, VOCAB, length)]


def walk(target: HFTarget, model: Any, seed: int, *, slots: int = 5, steps: int = 14, longest: int = 60) -> int:
    """Random schedules: arrivals, chunks, drafts, rejections, departures; every wanted row is compared."""
    rng = np.random.default_rng(seed)
    device = str(target.device)
    target.allocate(slots, longest)
    texts: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    compared = 0
    for _ in range(steps):
        for slot in range(slots):
            if slot not in texts and rng.random() < 0.5:
                texts[slot], cached[slot] = random_text(rng, longest), 0
            elif slot in texts and (rng.random() < 0.08 or cached[slot] > longest - 8):
                del texts[slot], cached[slot]
        live = [s for s in texts if rng.random() < 0.85]
        rng.shuffle(live)
        if not live:
            continue
        lengths = {s: int(rng.choice([1, 1, 2, 5, 8, 37])) for s in live}
        sequences = [(s, cached[s], min(lengths[s], longest - cached[s])) for s in live]
        logits = str(rng.choice(["all", "last", "none"]))
        layout = toy_layout(texts, sequences, device, logits)
        output = target.forward(layout)
        assert output.logits.shape == (len(layout.logit_rows), target.vocab_size)
        wanted = torch.cat([plain(model, texts[s][: start + n])[start:] for s, start, n in sequences])
        torch.testing.assert_close(output.logits, wanted[torch.from_numpy(layout.logit_rows)], **CLOSE)
        compared += len(layout.logit_rows)
        for slot, start, n in sequences:
            keep = int(rng.integers(1, n + 1))  # the rest was rejected: its entries are stale from now on
            if keep < n:
                cached[slot] = start + keep
                texts[slot][start + keep :] = random_text(rng, longest - start - keep)
            else:
                cached[slot] = start + n
    return compared


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_random_schedules_match_plain_forwards(kind: str, attention: str, device: str) -> None:
    dtype = torch.float32 if kind == "qwen3-moe" or device != "cpu" else torch.float64
    model = toy_model(kind, dtype, device=device)
    target = target_of(model, attention=attention)
    assert walk(target, model, seed=1) > 40


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("seed", range(3))
def test_more_schedules_in_float32(kind: str, seed: int, device: str) -> None:
    model = toy_model(kind, torch.float32, seed=seed, device=device)
    assert walk(target_of(model), model, seed=10 + seed, slots=9) > 40


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_bfloat16_stays_within_rounding(kind: str, device: str) -> None:
    model = toy_model(kind, torch.bfloat16, device=device)
    target = HFTarget(model)
    assert target.dtype == torch.bfloat16
    target.allocate(2, 16)
    texts = {0: [5, 6, 7, 8, 9], 1: [9, 8, 7]}
    output = target.forward(toy_layout(texts, [(1, 0, 3), (0, 0, 5)], device))
    wanted = torch.cat([plain(model, texts[1]), plain(model, texts[0])])
    assert (output.logits - wanted).abs().max() < 0.06 * wanted.abs().max()


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "phi3", "qwen2-window"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("accepted", range(6))
def test_sliding_window_survives_rejection(kind: str, attention: str, accepted: int, device: str) -> None:
    """Case 29. Window 4, prompt 3, blocks of 5, rejection at each of 0..5: equal to an oracle that keeps everything."""
    model = toy_model(kind, torch.float32, device=device)
    target = target_of(model, attention=attention)
    target.allocate(2, 64)
    committed = [5, 11, 17]
    rng = np.random.default_rng(accepted)
    target.forward(toy_layout({0: committed}, [(0, 0, 2)], device))
    cached = 2
    for _ in range(6):
        block = random_text(rng, 5)
        text = {0: committed + block}
        rows = target.forward(toy_layout(text, [(0, cached, len(committed) - cached + 5)], device)).logits
        torch.testing.assert_close(rows, plain(model, text[0])[cached:], **CLOSE)
        cached = len(committed) + accepted
        committed = committed + block[:accepted] + random_text(rng, 1)


def test_prompt_chunks_join_a_decoding_batch(device: str) -> None:
    model = toy_model("llama", torch.float32, device=device)
    target = target_of(model)
    target.allocate(3, 120)
    rng = np.random.default_rng(0)
    texts = {slot: random_text(rng, 110) for slot in range(3)}
    target.forward(toy_layout(texts, [(0, 0, 20)], device))
    target.forward(toy_layout(texts, [(0, 20, 1), (2, 0, 50)], device, "none"))
    sequences = [(2, 50, 45), (0, 21, 3), (1, 0, 40)]
    rows = target.forward(toy_layout(texts, sequences, device)).logits
    wanted = torch.cat([plain(model, texts[s][: a + n])[a:] for s, a, n in sequences])
    torch.testing.assert_close(rows, wanted, **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_like_rows_that_lie_apart_are_gathered(kind: str, attention: str, device: str) -> None:
    """Short and long contexts in turn, at prices that make a copy of the short ones' keys pay."""
    model = toy_model(kind, torch.float32, device=device)
    target = target_of(model, attention=attention)
    target._cost = AttentionCost(call=50.0, head=0.0, key=1.0, score=0.0, copy=0.001, kv_heads=2, fold=2)
    target.allocate(6, 128)
    rng = np.random.default_rng(0)
    lengths = [3, 100, 5, 110, 2, 105]
    texts = {slot: random_text(rng, n + 3) for slot, n in enumerate(lengths)}
    for slot, n in enumerate(lengths):
        target.forward(toy_layout(texts, [(slot, 0, n)], device, "none"))
    sequences = [(slot, lengths[slot], 1 + slot % 3) for slot in (4, 1, 0, 5, 2, 3)]
    layout = toy_layout(texts, sequences, device)
    planned = plan_groups(layout.slots.tolist(), layout.starts.tolist(), layout.query_lens.tolist(), target._cost)
    assert any(group.gathered for group in planned)
    wanted = torch.cat([plain(model, texts[s][: a + n])[a:] for s, a, n in sequences])
    torch.testing.assert_close(target.forward(layout).logits, wanted, **CLOSE)


def test_idle_slots_with_nan_do_not_reach_their_neighbours(device: str) -> None:
    model = toy_model("mistral", torch.float32, device=device)
    target = target_of(model)
    target.allocate(4, 32)
    texts = {slot: [7 + slot, 20, 30, 40, 50, 6, 8] for slot in range(4)}
    cache = target._cache
    assert cache is not None
    for layer in cache.keys:
        cache.keys[layer][1:3] = float("nan")
        cache.values[layer][1:3] = float("nan")
    rows = target.forward(toy_layout(texts, [(0, 0, 7), (3, 0, 5)], device)).logits
    torch.testing.assert_close(rows, torch.cat([plain(model, texts[0]), plain(model, texts[3][:5])]), **CLOSE)


def test_a_slot_left_with_nan_is_wiped_for_the_next_request(device: str) -> None:
    model = toy_model("llama", torch.float32, device=device)
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = float("nan")
    target = target_of(model)
    target.allocate(2, 32)
    texts = {0: [5, 6, 7, 8, 60, 9], 1: [9, 8, 7, 6, 5, 4, 3]}
    broken = target.forward(toy_layout(texts, [(0, 0, 6), (1, 0, 7)], device)).logits
    assert broken[5].isnan().all()
    assert broken[6:].isfinite().all()
    texts[0] = [11, 12, 13]
    rows = target.forward(toy_layout(texts, [(0, 0, 2), (1, 5, 2)], device)).logits
    torch.testing.assert_close(rows[:2], plain(model, texts[0])[:2], **CLOSE)


def test_taps_are_the_layers_raw_outputs(device: str) -> None:
    model = toy_model("gemma3", torch.float32, device=device)
    target = target_of(model)
    target.allocate(2, 32)
    texts = {0: [5, 6, 7, 8, 9], 1: [11, 12, 13]}
    raw: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    hooks = [
        layer.register_forward_hook(lambda m, a, out, i=i: raw[i].append(out[0] if isinstance(out, tuple) else out))
        for i, layer in enumerate(model.model.layers)
    ]
    hidden = []
    for text in (texts[0], texts[1]):
        with torch.no_grad():
            hidden.append(model(torch.tensor([text], device=device), output_hidden_states=True).hidden_states)
    for hook in hooks:
        hook.remove()
    layout = toy_layout(texts, [(0, 0, 5), (1, 0, 3)], device, "last")
    output = target.forward(layout, taps=(1, -1, 0))
    assert output.taps is not None
    assert output.taps.shape == (8, 3 * target.hidden_size)
    last, embedded, first = output.taps.split(target.hidden_size, dim=-1)
    torch.testing.assert_close(embedded, torch.cat([h[0][0] for h in hidden]), **CLOSE)
    torch.testing.assert_close(first, torch.cat([h[1][0] for h in hidden]), **CLOSE)
    torch.testing.assert_close(last, torch.cat([t[0] for t in raw[1]]), **CLOSE)
    normed = torch.cat([h[2][0] for h in hidden])
    assert not torch.allclose(last, normed, atol=1e-3)
    assert target.forward(layout).taps is None
    with pytest.raises(TargetError, match="no layer 2"):
        target.forward(layout, taps=(2,))


def test_forward_asks_for_memory_first_and_keeps_inside_it(device: str) -> None:
    target = target_of(toy_model("llama", torch.float32, device=device))
    layout = toy_layout({0: [3, 4, 5]}, [(0, 0, 3)], device)
    with pytest.raises(TargetError, match="allocate"):
        target.forward(layout)
    target.allocate(1, 2)
    with pytest.raises(CapacityError, match="position 3, slots hold 2"):
        target.forward(layout)
    target.allocate(1, 4)
    with pytest.raises(CapacityError, match="slot 1"):
        target.forward(toy_layout({1: [3]}, [(1, 0, 1)], device))
    assert target.executed_tokens(layout) == 3


def test_a_users_model_is_left_as_it_was(device: str) -> None:
    model = toy_model("gemma2", torch.float32, device=device)
    ids = torch.tensor([[5, 6, 7, 8]], device=device)
    before = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    target = HFTarget(model)
    assert model.config._attn_implementation == "eager"
    assert target.input_embeddings.weight is model.get_input_embeddings().weight
    during = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    target.close()
    assert torch.equal(before, during)
    with pytest.raises(TargetError, match="closed"):
        target.allocate(1, 4)


def test_close_gives_an_owned_model_its_attention_back(device: str) -> None:
    model = toy_model("llama", torch.float32, device=device)
    wanted = plain(model, [5, 6, 7])
    target = HFTarget(model, share=False)
    with pytest.raises(TargetError, match="close"):
        plain(model, [5, 6, 7])
    target.allocate(1, 8)
    target.forward(toy_layout({0: [5, 6, 7]}, [(0, 0, 3)], device), taps=(0,))
    target.close()
    assert torch.equal(plain(model, [5, 6, 7]), wanted)
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_the_kernel_of_a_group_depends_on_its_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(dtype: torch.dtype, softcap: bool = False) -> dict[int, LayerSpec]:
        return {0: LayerSpec(0, 3, 9, 64, 64, None, dtype, softcap)}

    def group(slots: int, keys: int) -> Group:
        return Group(tuple(range(slots)), 0, slots, 1, keys)

    monkeypatch.setattr(groups, "matrix_tiles", lambda dtype: False)
    half, full = spec(torch.bfloat16), spec(torch.float32)
    assert fuses(group(1, 600), "auto", half, "cpu")
    assert not fuses(group(32, 300), "auto", half, "cpu")
    assert fuses(group(32, 900), "auto", half, "cpu")
    assert fuses(group(32, 300), "auto", full, "cpu")
    assert fuses(group(32, 300), "auto", half, "cuda")
    assert not fuses(group(1, 1), "eager", full, "cuda")
    assert not fuses(group(1, 1), "sdpa", spec(torch.float32, softcap=True), "cuda")
    monkeypatch.setattr(groups, "matrix_tiles", lambda dtype: dtype == torch.bfloat16)
    assert fuses(group(32, 300), "auto", half, "cpu")
    assert not fuses(group(32, 300), "auto", spec(torch.float16), "cpu")
    assert not fuses(group(32, 300), "auto", spec(torch.bfloat16, softcap=True), "cpu")
