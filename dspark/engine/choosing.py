"""How much each row drafts: the gamma policy is asked before anything of the round is drawn."""

from __future__ import annotations

import dataclasses

import numpy as np

from dspark.engine.batcher import Work
from dspark.engine.faults import RoundFaults
from dspark.engine.parts import Parts
from dspark.engine.planning import Drafting
from dspark.errors import ComponentError
from dspark.types import BatchView, GammaChoice, GammaInput

Choice = tuple[GammaInput, GammaChoice]


def choose(
    parts: Parts, faults: RoundFaults, work: Work, drafting: Drafting | None
) -> tuple[Drafting | None, Choice | None]:
    """The rows that draft, and the policy's choice with what it knew; all rows and None without a policy.

    A row's own gamma is the room that its drafts have: drafter, plan and packing see ``max_draft`` of it. What the
    policy raises is raised before the step's first draw, so it is nobody's fault and costs nobody anything.
    """
    policy = parts.gamma_policy
    if policy is None or drafting is None:
        return drafting, None
    views = drafting.batch.requests
    known = GammaInput(
        requests=views,
        gamma=drafting.batch.gamma,
        decoding=len(work.decode),
        base_tokens=work.base_tokens,
        context=work.context,
        groups=np.array([parts.group(view) for view in views], dtype=np.int64),
    )
    choice = faults.policy_phase(lambda: _checked(policy.choose(known, parts.cost), known))
    if choice is None:
        return drafting, None
    return _rows(drafting, choice), (known, choice)


def _checked(choice: GammaChoice, known: GammaInput) -> GammaChoice:
    """Raises:
    ComponentError: lengths that are no lengths.
    """
    gammas = choice.gammas
    rows = len(known.requests)
    if gammas.shape != (rows,) or gammas.dtype.kind not in "iu" or ((gammas < 0) | (gammas > known.gamma)).any():
        raise ComponentError(f"gammas: expected {rows} integers in 0..{known.gamma}, got {gammas.tolist()}")
    return choice


def _rows(drafting: Drafting, choice: GammaChoice) -> Drafting | None:
    gammas = choice.gammas.tolist()
    gamma = max(gammas)
    if gamma == 0:
        return None
    if min(gammas) == drafting.batch.gamma:
        return dataclasses.replace(drafting, verify_all=choice.verify_all)
    rows = [i for i, g in enumerate(gammas) if g > 0]
    views = (drafting.batch.requests[i] for i in rows)
    capped = tuple(
        view if gammas[i] >= gamma else dataclasses.replace(view, max_draft=min(view.max_draft, gammas[i]))
        for i, view in zip(rows, views, strict=True)
    )
    return Drafting(tuple(drafting.rows[i] for i in rows), BatchView(capped, gamma), choice.verify_all)
