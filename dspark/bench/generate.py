"""transformers' ``generate`` under load: plain, or with its prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from dspark.bench.load import Event, Job
from dspark.errors import EvaluationError

LOOKUP_TOKENS = 10
"""Tokens that prompt lookup drafts, transformers' usual setting."""


class _Ticks:
    """Times at which ``generate`` had new tokens; asked after each of its steps, and never stops it."""

    def __init__(self) -> None:
        self.ticks: list[tuple[int, float]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.ticks.append((int(input_ids.shape[1]), time.perf_counter()))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class GenerateBackend:
    """Waiting requests are decoded together, one batch after another: ``generate`` admits nobody in between.

    Args:
        model: as transformers loads it.
        pad: id on the left of shorter prompts.
        lookup: draft by prompt lookup; transformers does so for one request at a time, so others wait.
    """

    def __init__(self, model: Any, pad: int, *, lookup: bool = False) -> None:
        self.model, self.pad, self.lookup = model, pad, lookup
        self._eos = model.generation_config.eos_token_id
        self._waiting: list[tuple[int, Job]] = []

    def begin(self) -> None:
        """Nothing is counted."""

    def figures(self) -> dict[str, Any]:
        """None."""
        return {}

    def submit(self, number: int, job: Job) -> None:
        """Queue a job."""
        self._waiting.append((number, job))

    def step(self) -> list[Event]:
        """Decode a whole batch.

        Raises:
            EvaluationError: jobs that ``generate`` can't decode together.
        """
        count = 1 if self.lookup else len(self._waiting)
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        if not batch:
            return []
        params = batch[0][1].params
        if any(_key(job) != _key(batch[0][1]) for _, job in batch):
            raise EvaluationError("transformers' generate decodes requests together only under the same parameters")
        width = max(len(job.ids) for _, job in batch)
        rows = [[self.pad] * (width - len(job.ids)) + list(job.ids) for _, job in batch]
        mask = [[0] * (width - len(job.ids)) + [1] * len(job.ids) for _, job in batch]
        ticks = _Ticks()
        out = self._generate(torch.tensor(rows), torch.tensor(mask), params, ticks)
        return list(self._events(batch, out[:, width:].tolist(), width, ticks))

    @torch.no_grad()
    def _generate(self, ids: torch.Tensor, mask: torch.Tensor, params: Any, ticks: _Ticks) -> torch.Tensor:
        from transformers import StoppingCriteriaList

        sampling: dict[str, Any] = {"do_sample": False}
        if not params.greedy:
            sampling = {
                "do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k or 0,
            }  # fmt: skip
        if self.lookup:
            sampling["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        device = self.model.device
        # generate fills what is None in its arguments from the model's own config, so EOS is turned off there
        self.model.generation_config.eos_token_id = None if params.ignore_eos else self._eos
        made: torch.Tensor = self.model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=params.max_tokens,
            pad_token_id=self.pad,
            stopping_criteria=StoppingCriteriaList([ticks]),
            use_cache=True,
            **sampling,
        )
        return made

    def _events(
        self, batch: Sequence[tuple[int, Job]], outputs: Sequence[list[int]], width: int, ticks: _Ticks
    ) -> list[Event]:
        ends = self._ends()
        events = []
        for (number, job), ids in zip(batch, outputs, strict=True):
            end = len(ids)
            if not job.params.ignore_eos:
                end = next((k + 1 for k, token in enumerate(ids) if token in ends), end)
            done = 0
            for length, seconds in ticks.ticks:
                upto = min(length - width, end)
                if upto > done:
                    events.append(Event(number, tuple(ids[done:upto]), upto - done, seconds, upto == end))
                    done = upto
            if done < end or not end:
                events.append(Event(number, tuple(ids[done:end]), end - done, time.perf_counter(), True))
        return sorted(events, key=lambda event: event.seconds)

    def _ends(self) -> set[int]:
        return set(self._eos) if isinstance(self._eos, (list, tuple)) else {self._eos}


def _key(job: Job) -> tuple[Any, ...]:
    p = job.params
    return (p.max_tokens, p.greedy, p.temperature, p.top_k, p.top_p, p.ignore_eos)
