"""What decoding must equal: the target's law, one token at a time, with transformers' own processors.

Nothing here is shared with the engine. Presence and frequency penalties, which transformers lacks, are written out
below: over the generated tokens, once per token and per occurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dspark.config import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

TokenRule = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""A custom processor as a plain function: (generated tokens, logits [V]) -> logits [V]."""


def next_scores(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int] = (),
    rule: TokenRule | None = None,
) -> Tensor:
    """Processed scores [V] of the next token, from raw logits [V]; a greedy request gets no warpers."""
    from transformers.generation import logits_process as hf

    ids = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    scores = logits.clone()[None]
    for token, bias in params.logit_bias.items():
        scores[0, token] += bias
    if params.repetition_penalty != 1.0:
        scores = _apply(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty), ids, scores)
    for token in set(output):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    if len(output) < params.min_tokens:
        ends = [*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids]
        scores[0, ends] = -torch.inf
    if rule is not None:
        scores = rule(output, scores[0])[None]
    if params.greedy:
        return scores[0]
    warpers: list[Any] = []
    if params.temperature != 1.0:
        warpers.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(hf.MinPLogitsWarper(params.min_p))
    for warper in warpers:
        scores = _apply(warper, ids, scores)
    return scores[0]


def _apply(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    out: Tensor = processor(ids, scores)
    return out


def target_law(
    next_logits: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int] = (),
    rule: TokenRule | None = None,
    output: Sequence[int] = (),
) -> dict[tuple[int, ...], float]:
    """Law of the output of one-by-one decoding: tokens (EOS included, where one ends it) -> probability.

    Args:
        next_logits: raw logits [V] after a list of ids, such as ``TableTarget.next_logits``.
        rule: a custom processor, between penalties and temperature.
        output: tokens that were generated before, none of which ends it; the law is that of what follows them.
    """
    known = tuple(output)
    ends = {*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids}
    done: dict[tuple[int, ...], float] = {}
    live: dict[tuple[int, ...], float] = {(): 1.0}
    if len(known) >= params.max_tokens:
        return live
    while live:
        tail, mass = live.popitem()
        raw = next_logits([*prompt, *known, *tail])
        scores = next_scores(raw, prompt, known + tail, params, eos_token_ids=eos_token_ids, rule=rule)
        for token, p in enumerate(_law(scores, greedy=params.greedy)):
            if p > 0.0:
                longer = (*tail, token)
                ended = token in ends or len(known + longer) == params.max_tokens
                (done if ended else live)[longer] = mass * p
    return done


def _law(scores: Tensor, *, greedy: bool) -> list[float]:
    if greedy:
        best = next(i for i, s in enumerate(scores.tolist()) if s == scores.max().item())
        return [float(i == best) for i in range(len(scores))]
    law: list[float] = torch.softmax(scores, dim=-1).tolist()
    return law


def coupled_output(
    next_logits: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    params: SamplingParams,
    noise: Tensor,
    *,
    eos_token_ids: Sequence[int] = (),
    cache: dict[tuple[int, ...], Tensor] | None = None,
) -> tuple[int, ...]:
    """y_n = argmax(log p_t(. | y_<n) + g_n), one by one; ``noise`` [P, V] by absolute position.

    Args:
        cache: log-laws by output so far, to share between noise tables of one prompt.
    """
    ends = {*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids}
    cache = {} if cache is None else cache
    output: tuple[int, ...] = ()
    while len(output) < params.max_tokens and not (output and output[-1] in ends):
        if output not in cache:
            raw = next_logits([*prompt, *output])
            scores = next_scores(raw, prompt, output, params, eos_token_ids=eos_token_ids)
            cache[output] = torch.log_softmax(scores, dim=-1)
        output = (*output, int((cache[output] + noise[len(prompt) + len(output)]).argmax()))
    return output
