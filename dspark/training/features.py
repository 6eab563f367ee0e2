"""What training needs of a frozen target: tapped layers, the final hidden state, the log-sum-exp of its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dspark.errors import TargetError
from dspark.training.samples import Sample
from dspark.training.teacher import log_sum_exp
from dspark.types import VerifyLayout


@dataclass(frozen=True, slots=True)
class Features:
    """The target's view of one sample of S tokens.

    Attributes:
        taps: raw layer outputs, concatenated, [S, m * d_t].
        last: final hidden state behind the final norm, [S, d_t]; zeros where ``labelled`` rows were asked for alone.
        lse: log-sum-exp of the target's logits, [S] float32.
        best: the target's most likely next token, [S] int32.
    """

    taps: Tensor
    last: Tensor
    lse: Tensor
    best: Tensor


def labelled_rows(sample: Sample) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions whose next token is the assistant's: the only ones whose teacher is ever read."""
    return np.flatnonzero(sample.loss_mask[1:]).astype(np.int64)


class TargetReader:
    """Runs a frozen target over whole samples.

    Args:
        target: see ``dspark.protocols.Target``; it has to show its output head (``target.lm_head``).
        taps: decoder layers, -1 for the embedding.
        max_length: longest sample.
        max_tokens: most tokens of one forward.
    """

    def __init__(self, target: Any, taps: Sequence[int], *, max_length: int, max_tokens: int = 2048) -> None:
        head = getattr(target, "lm_head", None)
        if not isinstance(head, nn.Module) or not isinstance(getattr(head, "weight", None), Tensor):
            raise TargetError(f"target {target.name!r} shows no output head (target.lm_head), which training reads")
        if getattr(head, "bias", None) is not None:
            raise TargetError(f"target {target.name!r}: its output head has a bias, which a drafter can't share")
        self.target, self.taps = target, tuple(taps)
        self.head: Any = head
        self.softcap = softcap_of(target)
        self.max_tokens = max(max_tokens, max_length)
        self._slots = max(1, self.max_tokens // 128)
        self._checked = False
        target.allocate(self._slots, max_length)

    @torch.no_grad()
    def read(self, samples: Sequence[Sample]) -> list[Features]:
        """Features of each sample, in the target's dtype, on its device."""
        out: list[Features] = []
        group: list[Sample] = []
        for sample in samples:
            full = sum(map(len, group)) + len(sample) > self.max_tokens or len(group) == self._slots
            if group and full:
                out += self._forward(group)
                group = []
            group.append(sample)
        return out + (self._forward(group) if group else [])

    def _forward(self, group: Sequence[Sample]) -> list[Features]:
        lengths = [len(s) for s in group]
        ends = np.cumsum([0, *lengths])
        rows = np.concatenate([labelled_rows(s) + start for s, start in zip(group, ends, strict=False)])
        device = self.target.device
        layout = VerifyLayout(
            token_ids=torch.from_numpy(np.concatenate([s.ids for s in group])).to(device),
            positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device),
            slots=np.arange(len(group)),
            starts=np.zeros(len(group), dtype=np.int64),
            cu_query_lens=ends,
            logit_rows=rows,
        )
        seen: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            output = self.target.forward(layout, self.taps)
        finally:
            handle.remove()
        hidden = seen[0].reshape(-1, seen[0].shape[-1])
        sums, best = log_sum_exp(hidden, self.head.weight, self.softcap, logits=output.logits)
        self._check(output.logits, sums)
        at = torch.from_numpy(rows).to(device)
        last = hidden.new_zeros(int(ends[-1]), hidden.shape[1])
        lse, top = sums.new_zeros(len(last)), best.new_zeros(len(last))
        last[at], lse[at], top[at] = hidden, sums, best
        parts = zip(*(t.split(lengths) for t in (output.taps, last, lse, top)), strict=True)
        return [Features(*part) for part in parts]

    def _check(self, logits: Tensor, sums: Tensor) -> None:
        """The target's own logits, once: what it does to them behind its head would be missing from the teacher's law.

        Raises:
            TargetError: they are not its head's products.
        """
        if self._checked or not len(sums):
            return
        own = torch.logsumexp(logits[:4].float(), dim=-1)
        if not torch.allclose(own, sums[:4], rtol=0.02, atol=0.25):
            raise TargetError(
                f"target {self.target.name!r}: its logits are not those of its head (log-sum-exp {float(own[0]):.4g}, "
                f"its head gives {float(sums[0]):.4g}); it scales them in a way that training does not know"
            )
        self._checked = True


def softcap_of(target: Any) -> float | None:
    """Soft cap of a target's logits."""
    config: Any = getattr(getattr(target, "model", None), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    cap: float | None = getattr(text, "final_logit_softcapping", None)
    return cap
