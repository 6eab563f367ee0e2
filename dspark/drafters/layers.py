"""One draft layer: Qwen3-, Llama- or Gemma 4-style, over context keys and values and the block's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.checkpoints import DrafterConfig, LayerConfig
from dspark.drafters.rope import rotate
from dspark.ops.packed import linear, pack

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [N, heads, D], k, v [N, kv_heads, D]) -> [N, heads * D]: writes the block's keys and values, then attends."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32 or better; weight is plain (not 1 + w)."""
    if weight is not None and weight.dtype != x.dtype:  # float32 weights under autocast
        x = x.to(weight.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class DraftLayer(nn.Module):
    """A decoder layer whose keys and values come from the context and from the block (METHOD section 2).

    Projections that share an input are fused. The context part never passes through the input norm, the output
    projection or the MLP: its keys and values are projected from H_ctx directly.

    Args:
        config: the drafter.
        index: which layer.
        tensors: its tensors by canonical name, without ``layers.N.``.
    """

    def __init__(self, config: DrafterConfig, index: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.spec: LayerConfig = config.layers[index]
        self.heads, self.eps = config.num_heads, config.rms_norm_eps
        self.gemma = config.family == "gemma4"
        self.scale = 1.0 if self.gemma else self.spec.head_dim**-0.5
        self._act = ACTIVATIONS[config.activation]
        projections = ("q", "k") if self.spec.k_eq_v else ("q", "k", "v")
        self.qkv = _frozen(torch.cat([tensors[f"self_attn.{p}_proj.weight"] for p in projections]))
        self.out = _frozen(tensors["self_attn.o_proj.weight"])
        self.gate_up = _frozen(torch.cat([tensors["mlp.gate_proj.weight"], tensors["mlp.up_proj.weight"]]))
        self.down = _frozen(tensors["mlp.down_proj.weight"])
        self.qkv_bias = self.out_bias = self.gate_up_bias = self.down_bias = None
        if config.attention_bias:
            self.qkv_bias = _frozen(torch.cat([tensors[f"self_attn.{p}_proj.bias"] for p in projections]))
            self.out_bias = _frozen(tensors["self_attn.o_proj.bias"])
        if config.mlp_bias:
            self.gate_up_bias = _frozen(torch.cat([tensors["mlp.gate_proj.bias"], tensors["mlp.up_proj.bias"]]))
            self.down_bias = _frozen(tensors["mlp.down_proj.bias"])
        self.norm_in = _frozen(tensors["input_layernorm.weight"])
        self.norm_attention = _frozen(tensors["post_attention_layernorm.weight"])
        self.q_norm = self.k_norm = self.norm_mlp_in = self.norm_mlp_out = self.scalar = None
        self._qk_norm: Tensor | None = None
        self._packed: dict[str, Tensor | None] = {}
        if config.family != "llama":
            self.q_norm = _frozen(tensors["self_attn.q_norm.weight"])
            self.k_norm = _frozen(tensors["self_attn.k_norm.weight"])
        if self.gemma:
            self.norm_mlp_in = _frozen(tensors["pre_feedforward_layernorm.weight"])
            self.norm_mlp_out = _frozen(tensors["post_feedforward_layernorm.weight"])
            self.scalar = _frozen(tensors["layer_scalar"])

    def pack(self) -> None:
        """Keep packed copies of the weights that blocks are multiplied by."""
        self._packed = {name: pack(getattr(self, name)) for name in ("qkv", "out", "gate_up", "down")}

    def context(self, ctx: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, D] of what attention reads of the context, [n, d] (DSpark: H_ctx), at its
        positions' cosines and sines."""
        rows = self.heads * self.spec.head_dim
        bias = None if self.qkv_bias is None else self.qkv_bias[rows:]
        kv = F.linear(ctx, self.qkv[rows:], bias).view(len(ctx), -1, self.spec.head_dim)
        k, v = self._split_kv(kv)
        if self.k_norm is not None:
            k = rms_norm(k, self.k_norm, self.eps)
        return rotate(k, cos, sin), v

    def _split_kv(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.spec.num_kv_heads
        k = kv[:, :heads]
        v = k if self.spec.k_eq_v else kv[:, heads:]
        return k, (rms_norm(v, None, self.eps) if self.gemma else v)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Block hidden states [N, d] of all rows, flattened -> [N, d]."""
        return self.run(rms_norm(x, self.norm_in, self.eps), x, cos, sin, attend)

    def run(self, h: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The same from what attention reads, h [N, ..], and the residual that it is added to, x [N, d]."""
        heads = linear(h, self.qkv, self.qkv_bias, self._packed.get("qkv")).view(len(h), -1, self.spec.head_dim)
        together = self.heads + self.spec.num_kv_heads
        _, v = self._split_kv(heads[:, self.heads :])
        qk = heads[:, :together]
        if self.q_norm is not None and self.k_norm is not None:
            qk = rms_norm(qk, None, self.eps) * self._both_norms(self.q_norm, self.k_norm)
        qk = rotate(qk, cos, sin)
        attended = attend(qk[:, : self.heads], qk[:, self.heads :], v)
        h = linear(attended, self.out, self.out_bias, self._packed.get("out"))
        if not self.gemma:
            x = x + h
            return x + self._mlp(rms_norm(x, self.norm_attention, self.eps))
        x = x + rms_norm(h, self.norm_attention, self.eps)
        h = self._mlp(rms_norm(x, self.norm_mlp_in, self.eps))
        x = x + rms_norm(h, self.norm_mlp_out, self.eps)
        return x if self.scalar is None else x * self.scalar

    def _both_norms(self, q: Tensor, k: Tensor) -> Tensor:
        """Norm weights of all query and key heads, [heads + kv_heads, D]; kept unless they are being trained."""
        if self._qk_norm is not None and not q.requires_grad:
            return self._qk_norm
        self._qk_norm = torch.cat([q.expand(self.heads, -1), k.expand(self.spec.num_kv_heads, -1)])
        return self._qk_norm

    def canonical(self) -> dict[str, Tensor]:
        """Its tensors by canonical name without ``layers.N.``, the fused ones taken apart: the inverse of the load."""
        dim, kv = self.spec.head_dim, self.spec.num_kv_heads * self.spec.head_dim
        sizes = [self.heads * dim, kv] + ([] if self.spec.k_eq_v else [kv])
        out: dict[str, Tensor] = {}
        for part, weight, bias in (("qkv", self.qkv, self.qkv_bias), ("gate_up", self.gate_up, self.gate_up_bias)):
            names = [f"self_attn.{p}_proj" for p in "qkv"] if part == "qkv" else ["mlp.gate_proj", "mlp.up_proj"]
            split = sizes if part == "qkv" else [len(weight) // 2] * 2
            out |= {f"{n}.weight": t for n, t in zip(names, torch.split(weight, split), strict=False)}
            if bias is not None:
                out |= {f"{n}.bias": t for n, t in zip(names, torch.split(bias, split), strict=False)}
        for name, tensor in (
            ("self_attn.o_proj.weight", self.out),
            ("self_attn.o_proj.bias", self.out_bias),
            ("mlp.down_proj.weight", self.down),
            ("mlp.down_proj.bias", self.down_bias),
            ("input_layernorm.weight", self.norm_in),
            ("post_attention_layernorm.weight", self.norm_attention),
            ("self_attn.q_norm.weight", self.q_norm),
            ("self_attn.k_norm.weight", self.k_norm),
            ("pre_feedforward_layernorm.weight", self.norm_mlp_in),
            ("post_feedforward_layernorm.weight", self.norm_mlp_out),
            ("layer_scalar", self.scalar),
        ):
            if tensor is not None:
                out[name] = tensor
        return out

    def _mlp(self, h: Tensor) -> Tensor:
        gate, up = linear(h, self.gate_up, self.gate_up_bias, self._packed.get("gate_up")).chunk(2, dim=-1)
        return linear(self._act(gate) * up, self.down, self.down_bias, self._packed.get("down"))
