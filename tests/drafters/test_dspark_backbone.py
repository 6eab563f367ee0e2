"""The backbone against a second, plain implementation: every family, window, causality and rope; and rope itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.checkpoints import DrafterConfig, LayerConfig, RopeConfig, make_checkpoint, random_tensors
from dspark.drafters.block import Layout, block_positions, length_groups
from dspark.drafters.rope import frequencies
from tests.drafters.golden import make_drafter, near, stub_target

torch.set_num_threads(1)
V, D, HEADS, TAP = 23, 16, 4, 10

ROPES = {
    "default": RopeConfig(),
    "linear": RopeConfig(rope_type="linear", factor=4.0),
    "llama3": RopeConfig(rope_type="llama3", theta=500_000.0, factor=8.0, original_max=64, low_freq=1.0, high_freq=4.0),
    "yarn": RopeConfig(rope_type="yarn", factor=4.0, original_max=64),
    "yarn, scaled": RopeConfig(rope_type="yarn", factor=40.0, original_max=4096, mscale=1.0, mscale_all_dim=0.5),
    "proportional": RopeConfig(rope_type="proportional", theta=1e6, partial=0.25),
}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = ROPES[name]
    values: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    if rope.rope_type != "default":
        values |= {"factor": rope.factor, "partial_rotary_factor": rope.partial}
    if rope.original_max:
        values["original_max_position_embeddings"] = rope.original_max
    if rope.rope_type == "llama3":
        values |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.mscale:
        values |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=values)
    if rope.rope_type == "default":
        expected, scale = 1.0 / rope.theta ** (torch.arange(0, 64, 2).float() / 64), 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"))
    got, factor = frequencies(rope, 64)
    near(got, expected, 1e-6)
    assert factor == pytest.approx(scale)


def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    return y if weight is None else y * weight


def turned(x: Tensor, position: int, rope: RopeConfig) -> Tensor:
    """x [heads, D] at a position, pair by pair."""
    inverse, scale = frequencies(rope, x.shape[-1])
    half, out = x.shape[-1] // 2, torch.empty_like(x)
    for i in range(half):
        angle = position * float(inverse[i])
        c, s = math.cos(angle) * scale, math.sin(angle) * scale
        out[:, i] = x[:, i] * c - x[:, i + half] * s
        out[:, i + half] = x[:, i + half] * c + x[:, i] * s
    return out


class Plain:
    """One row at a time, one query at a time, weights unfused, nothing cached."""

    def __init__(self, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
        self.c = config
        self.t = {name: t.double() for name, t in tensors.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.t[f"{name}.weight"].T
        return y + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else y

    def keys(self, i: int, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        spec, at = self.c.layers[i], f"layers.{i}.self_attn."
        raw = self.linear(at + "k_proj", x).view(spec.num_kv_heads, spec.head_dim)
        value = raw if spec.k_eq_v else self.linear(at + "v_proj", x).view(spec.num_kv_heads, spec.head_dim)
        if self.c.family == "gemma4":
            value = norm(value)
        if self.c.family != "llama":
            raw = norm(raw, self.t[at + "k_norm.weight"])
        return turned(raw, position, spec.rope), value

    def seen(self, spec: LayerConfig, slot: int, anchor: int, position: int) -> bool:
        if position < anchor:
            if spec.window is None:
                return True
            return (
                position >= anchor - spec.window
                if spec.window_from == "anchor"
                else position > anchor + slot - spec.window
            )
        inside = position - anchor
        if spec.causal and inside > slot:
            return False
        return spec.window is None or spec.window_from == "anchor" or inside > slot - spec.window

    def hidden(self, taps: Tensor, ids: list[int]) -> Tensor:
        context = [norm(self.linear("fc", row), self.t["hidden_norm.weight"]) for row in taps]
        anchor = len(context)
        scale = self.c.embed_scale or 1.0
        x = [self.t["embed_tokens.weight"][token] * scale for token in ids]
        for i, spec in enumerate(self.c.layers):
            at = f"layers.{i}."
            inputs = [norm(h, self.t[at + "input_layernorm.weight"]) for h in x]
            pairs = [self.keys(i, h, p) for p, h in enumerate(context)]
            pairs += [self.keys(i, h, anchor + k) for k, h in enumerate(inputs)]
            out = []
            for k, h in enumerate(inputs):
                q = self.linear(at + "self_attn.q_proj", h).view(HEADS, spec.head_dim)
                if self.c.family != "llama":
                    q = norm(q, self.t[at + "self_attn.q_norm.weight"])
                q = turned(q, anchor + k, spec.rope)
                open_to = [p for p in range(anchor + len(ids)) if self.seen(spec, k, anchor, p)]
                heads = []
                for head in range(HEADS):
                    kv = head // (HEADS // spec.num_kv_heads)
                    scores = torch.stack([q[head] @ pairs[p][0][kv] for p in open_to])
                    scores = scores if self.c.family == "gemma4" else scores / math.sqrt(spec.head_dim)
                    weights = scores.softmax(0)
                    heads.append(sum(w * pairs[p][1][kv] for w, p in zip(weights, open_to, strict=True)))
                y = self.linear(at + "self_attn.o_proj", torch.cat(heads))
                out.append(self.after(at, x[k], y))
            x = out
        return torch.stack([norm(h, self.t["norm.weight"]) for h in x])

    def after(self, at: str, x: Tensor, y: Tensor) -> Tensor:
        def mlp(h: Tensor) -> Tensor:
            gate = self.linear(at + "mlp.gate_proj", h)
            act = (
                gate * torch.sigmoid(gate)
                if self.c.activation == "silu"
                else torch.nn.functional.gelu(gate, approximate="tanh")
            )
            return self.linear(at + "mlp.down_proj", act * self.linear(at + "mlp.up_proj", h))

        weight = {name.removeprefix(at): t for name, t in self.t.items() if name.startswith(at)}
        if self.c.family != "gemma4":
            x = x + y
            return x + mlp(norm(x, weight["post_attention_layernorm.weight"]))
        x = x + norm(y, weight["post_attention_layernorm.weight"])
        y = mlp(norm(x, weight["pre_feedforward_layernorm.weight"]))
        return (x + norm(y, weight["post_feedforward_layernorm.weight"])) * weight["layer_scalar"]


def config_of(family: str, layers: tuple[LayerConfig, ...], **values: Any) -> DrafterConfig:
    return DrafterConfig(
        source_format="deepspec",
        algorithm="dflash",
        family=family,
        hidden_size=D,
        intermediate_size=20,
        num_heads=HEADS,
        vocab_size=V,
        draft_vocab_size=V,
        layers=layers,
        target_layer_ids=(0, 2),
        target_hidden_size=TAP,
        block_size=6,
        sample_from_anchor=True,
        mask_token_id=V - 1,
        requires_embeddings=True,
        **values,
    ).validate("test")


def spec(**values: Any) -> LayerConfig:
    return LayerConfig(**({"num_kv_heads": 2, "head_dim": 8} | values))


CONFIGS = {
    "qwen3, full": config_of("qwen3", (spec(), spec(rope=ROPES["yarn"]))),
    "qwen3, query window, causal": config_of("qwen3", (spec(window=4, causal=True), spec())),
    "qwen3, query window, not causal": config_of("qwen3", (spec(window=3), spec(window=20))),
    "qwen3, anchor window, causal": config_of("qwen3", (spec(window=4, causal=True, window_from="anchor"), spec())),
    "qwen3, anchor window, not causal": config_of("qwen3", (spec(window=5, window_from="anchor"),)),
    "qwen3, full but causal": config_of("qwen3", (spec(causal=True), spec())),
    "qwen3, biases": config_of("qwen3", (spec(),), attention_bias=True),
    "llama": config_of("llama", (spec(rope=ROPES["llama3"]), spec(num_kv_heads=4))),
    "llama, biases": config_of("llama", (spec(num_kv_heads=1),), attention_bias=True, mlp_bias=True),
    "gemma4": config_of(
        "gemma4",
        (spec(window=4, causal=True), spec(num_kv_heads=1, head_dim=12, k_eq_v=True, rope=ROPES["proportional"])),
        embed_scale=4.0,
        activation="gelu_pytorch_tanh",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_backbone_equals_the_plain_implementation(name: str) -> None:
    """Rows of 1 to 11 context positions in one batch; random norms and biases, so that each of them shows."""
    config = CONFIGS[name]
    tensors = random_tensors(config, seed=3, std=0.4)
    generator = torch.Generator().manual_seed(9)
    for key, tensor in tensors.items():
        if "norm" in key or key.endswith(("bias", "layer_scalar")):
            tensors[key] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
    drafter = make_drafter(make_checkpoint(config, tensors, source=name), stub_target(V), dtype=torch.float64)
    plain = Plain(config, tensors)
    lengths, blocks = [5, 1, 11, 8], torch.randint(0, V, (4, 6), generator=generator)
    taps = [torch.randn(n, 2 * TAP, generator=generator, dtype=torch.float64) for n in lengths]
    for slot, (n, rows) in enumerate(zip(lengths, taps, strict=True)):
        drafter.backbone.remember(rows, np.full(n, slot), np.arange(n))
    hidden = drafter.backbone(blocks, np.arange(4), np.array(lengths))
    for row in range(4):
        expected = plain.hidden(taps[row], blocks[row].tolist())
        near(hidden[row], expected, 2e-6)


def test_layouts() -> None:
    anchors = torch.tensor([7, 30])
    first, masks = Layout(True, 9), Layout(False, 9)
    assert first.inputs(anchors, 3).tolist() == [[7, 9, 9], [30, 9, 9]]
    assert masks.inputs(anchors, 3).tolist() == [[7, 9, 9, 9], [30, 9, 9, 9]]
    assert (first.skip, masks.skip) == (0, 1)
    assert block_positions(anchors, 3).tolist() == [[7, 8, 9], [30, 31, 32]]


def test_rows_are_grouped_so_that_padding_is_bounded() -> None:
    assert [g.tolist() for g in length_groups(np.array([3, 250, 90]))] == [[0, 1, 2]]
    lengths = np.array([40, 3000, 500, 200, 2500, 900, 1700])
    groups = length_groups(lengths)
    assert sorted(i for g in groups for i in g.tolist()) == list(range(7))
    for group in groups:
        own = lengths[group]
        assert own.max() <= max(256, 2 * own.min())
    assert length_groups(np.array([], dtype=np.int64)) == []
    assert len(length_groups(np.full(32, 4000))) == 1
