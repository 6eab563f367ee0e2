"""Jobs from real prompts. What a drafter makes of random tokens says nothing, so such prompts are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from dspark.bench.load import Job
from dspark.errors import EvaluationError
from dspark.evaluation.collect import Item, Sampling
from dspark.prompts import encode

PROBE = "The sun rose over the hills, and the farmer went out to the barn to feed his horses before breakfast."
"""A text that any language model of English finds likelier in order than shuffled."""
KNOWS = 1.0
"""Nats a token by which a target has to prefer the probe in order, to be a judge of prompts at all."""
LEAST_SHARE = 0.15
"""Of that preference, what a prompt has to reach: random tokens have no order to lose."""
JUDGED_TOKENS, JUDGED_PROMPTS, LEAST_TOKENS = 192, 4, 16


def prompts_of(items: Sequence[Item], tokenizer: Any) -> list[tuple[str, list[int]]]:
    """(name, token ids) of the first turn of each prompt.

    Raises:
        EvaluationError: a prompt is given as token ids.
        RequestError: a text without a tokenizer, or a chat without a template.
    """
    found = []
    for item in items:
        prompt = item.begin().next_prompt()
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], int):
            raise EvaluationError(
                f"{item.key}: a prompt of token ids; benchmarks take text (turns, messages or prompt), since what is "
                "accepted after random tokens says nothing of real ones"
            )
        found.append((item.key, encode(prompt, tokenizer)))
    return found


def check_real(prompts: Sequence[tuple[str, Sequence[int]]], target: Any, tokenizer: Any, seed: int = 0) -> str:
    """Refuse prompts that are no text: a trained target finds a text much likelier in order than shuffled.

    Returns:
        What was judged, for the report; ``not judged: ...`` where the target can't tell.

    Raises:
        EvaluationError: the prompts read like random tokens.
    """
    if getattr(target, "plain_logits", None) is None or tokenizer is None:
        return "not judged: the target gives no plain logits"
    knows = _order(list(tokenizer(PROBE)["input_ids"]), target, seed)
    if knows < KNOWS:
        return "not judged: the target does not tell text from its tokens in random order"
    long = [(name, ids) for name, ids in prompts if len(ids) >= LEAST_TOKENS]
    some = long[:: max(1, len(long) // JUDGED_PROMPTS)][:JUDGED_PROMPTS]
    gains = {name: _order(list(ids[-JUDGED_TOKENS:]), target, seed) for name, ids in some}
    poor = [name for name, gain in gains.items() if gain < LEAST_SHARE * knows]
    if gains and 2 * len(poor) > len(gains):
        raise EvaluationError(
            f"{', '.join(poor)}: to the target these prompts are no likelier than their tokens in random order; "
            "benchmarks take real text"
        )
    least = min(gains.values(), default=0.0)
    return f"{len(gains)} prompts judged: likelier in order by {least:.2f} nats a token at least"


def _order(ids: list[int], target: Any, seed: int) -> float:
    """Nats a token that order is worth: mean log-likelihood as it is, minus that of the shuffled tokens."""
    mixed = ids[:]
    random.Random(seed).shuffle(mixed)
    return _likelihood(ids, target) - _likelihood(mixed, target)


def _likelihood(ids: Sequence[int], target: Any) -> float:
    import torch

    with torch.no_grad():
        logprobs = target.plain_logits(ids)[:-1].float().log_softmax(-1)
    chosen = torch.tensor(list(ids[1:]), device=logprobs.device)
    return float(logprobs.gather(1, chosen[:, None]).mean())


def jobs_of(
    prompts: Sequence[tuple[str, Sequence[int]]],
    items: Sequence[Item],
    sampling: Sampling,
    count: int,
    turn: int = 0,
) -> list[Job]:
    """``count`` jobs: the prompts one after the other, again and again, beginning elsewhere in each turn.

    Every system gets the same jobs in a turn. Sampled ones draw from hash(seed, prompt, sample).
    """
    jobs = []
    for i in range(count):
        place = (i + turn * max(1, len(prompts) // 3)) % len(prompts)
        name, ids = prompts[place]
        sample = i // len(prompts)
        params = sampling.of(items[place].again(sample + turn * count), 0)
        jobs.append(Job(name, tuple(ids), params))
    return jobs
