"""1 - TV between draft and target by position, teacher-forced on fixed texts: identical prefixes for every drafter.

Decoding with a poor drafter visits other anchors than decoding with a good one. Here every drafter stands at the same
anchors of the same responses, and position k follows the response's own x_1..x_{k-1}. 1 - TV is the share of x_k that
`rejection` accepts there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.config import SamplingParams
from dspark.errors import EvaluationError
from dspark.ops.reference import index_tensor, softmax_rows
from dspark.protocols import Target, TeacherForced
from dspark.sampling.warpers import Warpers, warp
from dspark.types import FloatArray, IntArray, VerifyLayout

CHUNK = 512
"""Tokens of a text that one target forward reads."""
ANCHORS = 16
"""Anchors of a response."""
SPAN = 16
"""Tokens behind every anchor, so that drafters of other block sizes stand at the same ones."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A response of the target, with its prompt.

    Attributes:
        dataset, name: where it is from.
        prompt_ids, response_ids: token ids.
    """

    dataset: str
    name: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    @property
    def key(self) -> str:
        """What its record is kept under."""
        return f"{self.dataset}:{self.name}"

    @property
    def digest(self) -> str:
        """Of its ids."""
        return hashlib.sha256(json.dumps([self.prompt_ids, self.response_ids]).encode()).hexdigest()[:16]

    def anchors(self, most: int, span: int) -> IntArray:
        """At most ``most`` positions, evenly spaced, from the prompt's last token on, with ``span`` tokens behind each;
        the same for every drafter of a run, whatever its gamma."""
        first = max(1, len(self.prompt_ids) - 1)
        last = len(self.prompt_ids) + len(self.response_ids) - 1 - span
        if last < first:
            return np.zeros(0, dtype=np.int64)
        return np.unique(np.linspace(first, last, min(most, last - first + 1)).round().astype(np.int64))


def read_prefixes(path: Path) -> list[Prefix]:
    """JSON lines with ``prompt_ids`` and ``response_ids``; ``source`` names the data set, ``index`` the prompt.

    Raises:
        EvaluationError: naming the line that has neither.
    """
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as err:
        raise EvaluationError(f"{path}: {err}") from err
    found: dict[str, Prefix] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            ids = [tuple(int(i) for i in raw[name]) for name in ("prompt_ids", "response_ids")]
            prefix = Prefix(str(raw.get("source") or path.stem), str(raw.get("index", number)), *ids)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            what = "expected an object with prompt_ids and response_ids"
            raise EvaluationError(f"{path} line {number}: {what}: {type(err).__name__}: {err}") from err
        if prefix.key in found:
            raise EvaluationError(f"{path} line {number}: {prefix.key} is there twice")
        found[prefix.key] = prefix
    if not found:
        raise EvaluationError(f"{path}: no responses")
    return list(found.values())


def write_prefixes(path: Path, prefixes: Sequence[Prefix]) -> None:
    """The inverse of :func:`read_prefixes`.

    Raises:
        EvaluationError: it can't be written.
    """
    rows = [
        {"index": p.name, "source": p.dataset, "prompt_ids": p.prompt_ids, "response_ids": p.response_ids}
        for p in prefixes
    ]
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except OSError as err:
        raise EvaluationError(f"{path}: {err}") from err


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one response, summed over its anchors.

    Attributes:
        anchors: how many.
        overlap: sum of 1 - TV at each position, [gamma].
        agreement: how often both laws have one most likely token, [gamma].
    """

    anchors: int
    overlap: FloatArray
    agreement: FloatArray

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"anchors": self.anchors, "overlap": self.overlap.tolist(), "agreement": self.agreement.tolist()}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Overlap:
        """The inverse of :meth:`as_dict`.

        Raises:
            EvaluationError: a malformed record.
        """
        try:
            return cls(int(raw["anchors"]), np.array(raw["overlap"], float), np.array(raw["agreement"], float))
        except (KeyError, TypeError, ValueError) as err:
            raise EvaluationError(f"malformed record: {type(err).__name__}: {err}") from err


@torch.inference_mode()
def forced_overlap(
    target: Target,
    drafter: TeacherForced,
    prefix: Prefix,
    *,
    gamma: int,
    span: int,
    params: SamplingParams,
    anchors: int = ANCHORS,
) -> Overlap:
    """Compare both laws along one response.

    Args:
        target: allocated, without live requests: slot 0 is used.
        span: tokens behind every anchor, at least gamma.
        params: laws are those of its temperature, top-k, top-p and min-p; of temperature 1 where it is greedy.
        anchors: most anchors.

    Raises:
        EvaluationError: a response that is longer than the target's slots, or a gamma beyond the span.
    """
    if gamma > span:
        raise EvaluationError(f"gamma {gamma} is beyond the {span} tokens behind every anchor: name it with --gamma")
    ids = [*prefix.prompt_ids, *prefix.response_ids]
    at = prefix.anchors(anchors, span)
    if not len(at):
        return Overlap(0, np.zeros(gamma), np.zeros(gamma))
    if len(ids) > target.max_len:
        raise EvaluationError(f"{prefix.key}: {len(ids)} tokens, and a slot has {target.max_len}: raise max_len")
    layers = tuple(getattr(drafter, "tap_layers", ()))
    steps = np.arange(gamma)
    rows = np.unique(at[:, None] + steps)
    scores, taps = read_along(target, ids[: int(rows[-1]) + 1], rows, layers)
    text = torch.tensor(ids, device=target.device)
    drafted, token_map = drafter.forced_logits(text, taps, at, gamma)
    warpers = None if params.greedy else params
    overlap, agreement = np.zeros(gamma), np.zeros(gamma)
    for k in steps.tolist():
        where = index_tensor(np.searchsorted(rows, at + k), scores.device)
        p = _law(scores[where], warpers)
        q = _widened(_law(_cut(drafted[:, k], token_map, target.vocab_size), warpers), token_map, p)
        overlap[k] = float(torch.minimum(p.double(), q.double()).sum())
        agreement[k] = float((p.argmax(-1) == q.argmax(-1)).sum())
    return Overlap(len(at), overlap, agreement)


def read_along(
    target: Target, ids: Sequence[int], rows: IntArray, layers: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """The target's logits [n, V] at ``rows`` [n] of a text, and the taps of all of it [len(ids), m * d_t]."""
    logits: list[Tensor] = []
    taps: list[Tensor] = []
    for start in range(0, len(ids), CHUNK):
        stop = min(start + CHUNK, len(ids))
        layout = VerifyLayout(
            token_ids=torch.tensor(ids[start:stop], device=target.device),
            positions=torch.arange(start, stop, device=target.device),
            slots=np.zeros(1, dtype=np.int64),
            starts=np.array([start], dtype=np.int64),
            cu_query_lens=np.array([0, stop - start], dtype=np.int64),
            logit_rows=rows[(rows >= start) & (rows < stop)] - start,
        )
        out = target.forward(layout, layers)
        logits.append(out.logits.clone())
        if out.taps is not None:
            taps.append(out.taps.clone())
    return torch.cat(logits), torch.cat(taps) if taps else None


def _law(scores: Tensor, params: SamplingParams | None) -> Tensor:
    if params is not None:
        scores = warp(scores, Warpers.of([params] * len(scores)))
    return softmax_rows(scores)


def _cut(logits: Tensor, token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Without the padding of a draft vocabulary that is wider than the target's."""
    return logits if token_map is not None else logits[:, :vocab_size]


def _widened(law: Tensor, token_map: Tensor | None, like: Tensor) -> Tensor:
    if token_map is None and law.shape == like.shape:
        return law
    wide = torch.zeros_like(like, dtype=law.dtype)
    if token_map is None:
        wide[:, : law.shape[1]] = law
        return wide
    return wide.scatter_(1, token_map.expand(law.shape), law)
