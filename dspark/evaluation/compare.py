"""Several drafters on the same prompts: run each, keep what is finished, and put the figures side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dspark.api import SpeculativeDecoder
from dspark.errors import EvaluationError
from dspark.evaluation import about, calibration
from dspark.evaluation.acceptance import (
    Bootstrap,
    ByPrompt,
    Estimate,
    Positions,
    accepted_lengths,
    gain,
    threshold_sweep,
)
from dspark.evaluation.collect import Collection, Item, Record, Sampling, finished
from dspark.evaluation.forced import Overlap, Prefix, forced_overlap
from dspark.evaluation.rounds import RoundLog, Rounds
from dspark.evaluation.store import ResultStore
from dspark.protocols import TeacherForced

FORMAT = "dspark-eval"


class Show(Protocol):
    """Where progress goes."""

    def begin(self, what: str, total: int, done: int) -> None: ...

    def done(self, count: int) -> None: ...

    def tokens(self, count: int) -> None: ...


class Silent:
    """Shows nothing."""

    def begin(self, what: str, total: int, done: int) -> None:
        """A part of the run begins: ``total`` pieces, ``done`` of them earlier."""

    def done(self, count: int) -> None:
        """So many more pieces are finished."""

    def tokens(self, count: int) -> None:
        """So many more tokens are out."""


@dataclass(slots=True)
class Run:
    """What one drafter at one gamma did.

    Attributes:
        label: as figures name it.
        gamma: its block size.
        about: drafter and estimator, as :mod:`dspark.evaluation.about` describes them.
        records: by key.
        forced: teacher-forced overlaps by key; None where the drafter offers none.
        failed: prompts that were refused or failed, and why.
    """

    label: str
    gamma: int
    about: dict[str, Any]
    records: dict[str, Record] = field(default_factory=dict)
    forced: dict[str, tuple[str, Overlap]] | None = None
    failed: dict[str, str] = field(default_factory=dict)


def run_prompts(
    decoder: SpeculativeDecoder,
    log: RoundLog,
    items: Sequence[Item],
    sampling: Sampling,
    path: Path,
    *,
    label: str,
    rounds: int | None = None,
    show: Show | None = None,
    restart: bool = False,
) -> Run:
    """Decode what is not finished yet. Each finished prompt is a line of ``path``.

    Args:
        decoder: at full verify length, with ``log`` among its observers.
        rounds: begin no further prompt once so many rounds verified drafts; None for all prompts.

    Raises:
        EvaluationError: the decoder does not verify whole drafts, or ``path`` holds results of other settings or
            prompts.
    """
    _check_full_length(decoder)
    show = show or Silent()
    engine = decoder.engine
    run = Run(label, engine.parts.gamma, about.drafter_of(engine) | {"estimator": about.estimator_of(engine)})
    settings = run_settings(decoder, run, sampling)
    with ResultStore(path, settings, restart=restart) as store:
        done = finished(items, store.records, str(path))
        run.records = {i.key: Record.from_dict(store.records[i.key]) for i in items if i.key in done}
        so_far = sum(len(r.rounds.drafted()) for r in run.records.values())
        show.begin(label, *((len(items), len(done)) if rounds is None else (rounds, so_far)))

        def keep(item: Item, record: Record) -> None:
            nonlocal so_far
            store.add(item.key, record.as_dict())
            run.records[item.key] = record
            new = len(record.rounds.drafted())
            so_far += new
            show.done(1 if rounds is None else new)

        def fail(item: Item, why: str) -> None:
            run.failed[item.key] = why
            show.done(1 if rounds is None else 0)

        left = deque(i for i in items if i.key not in done)

        def wanted() -> Iterator[Item]:
            while left and (rounds is None or so_far + log.pending < rounds):
                yield left.popleft()

        while left and (rounds is None or so_far < rounds):  # again where live prompts failed and took theirs along
            Collection(decoder, log, sampling, keep, fail, show.tokens).run(wanted())
    run.records = {i.key: run.records[i.key] for i in items if i.key in run.records}
    return run


def run_settings(decoder: SpeculativeDecoder, run: Run, sampling: Sampling) -> dict[str, Any]:
    """What the results of a run depend on, beside the prompts."""
    drawn = sampling.as_dict()
    return {
        "target": about.target_of(decoder.engine),
        "drafter": run.about,
        "gamma": run.gamma,
        "verifier": decoder.engine.parts.name(drawn["mode"]),
        "sampling": drawn,
    }


def _check_full_length(decoder: SpeculativeDecoder) -> None:
    name, config = decoder.engine.parts.name("scheduler"), decoder.engine.config
    if name != "dspark/fixed" or config.scheduler_config:
        raise EvaluationError(
            f"scheduler {name} with {dict(config.scheduler_config)}: rounds have to be verified at full length, since "
            "scheduled ones are censored; leave the scheduler out"
        )


def run_forced(
    run: Run,
    decoder: SpeculativeDecoder,
    prefixes: Sequence[Prefix],
    sampling: Sampling,
    path: Path,
    *,
    span: int,
    anchors: int,
    show: Show | None = None,
    restart: bool = False,
) -> None:
    """Compare draft and target along the prefixes, those that are finished left out; ``run.forced`` stays None for a
    drafter that offers no teacher-forced law."""
    parts = decoder.engine.parts
    if not isinstance(parts.drafter, TeacherForced):
        return
    show = show or Silent()
    about_law = {k: v for k, v in sampling.as_dict().items() if k in ("temperature", "top_k", "top_p", "min_p")}
    drafter = {k: v for k, v in run.about.items() if k != "estimator"}
    settings = {"target": about.target_of(decoder.engine), "drafter": drafter, "gamma": run.gamma}
    more = {"law": about_law, "span": span, "anchors": anchors}
    with ResultStore(path, {**settings, **more}, restart=restart) as store:
        known = {key for key, raw in store.records.items()}
        show.begin(f"{run.label}, teacher-forced", len(prefixes), sum(p.key in known for p in prefixes))
        run.forced = {}
        for prefix in prefixes:
            if prefix.key not in known:
                found = forced_overlap(
                    parts.target,
                    parts.drafter,
                    prefix,
                    gamma=run.gamma,
                    span=span,
                    params=sampling.params,
                    anchors=anchors,
                )
                store.add(prefix.key, {"digest": prefix.digest, "dataset": prefix.dataset, **found.as_dict()})
                show.done(1)
            raw = store.records[prefix.key]
            if raw.get("digest") != prefix.digest:
                raise EvaluationError(f"{path}: the result of {prefix.key} is of another response: use --restart")
            run.forced[prefix.key] = prefix.dataset, Overlap.from_dict(raw)


def prefixes_of(run: Run) -> list[Prefix]:
    """The answers to first turns: responses of the target, whatever drafted them."""
    return [
        Prefix(r.dataset, key.partition(":")[2], tuple(s["prompt_ids"]), tuple(s["response_ids"]))
        for key, r in run.records.items()
        for s in r.samples[:1]
    ]


def summarise(runs: Sequence[Run], bootstrap: Bootstrap, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of all runs over the prompts that every one of them finished; drafters are compared with the first.

    Raises:
        EvaluationError: no prompt was finished by all.
    """
    keys = [k for k in runs[0].records if all(k in run.records for run in runs)]
    if not keys:
        why = next((f"{key}: {text}" for run in runs for key, text in run.failed.items()), "none was given")
        raise EvaluationError(f"no prompt was finished by every drafter ({why})")
    first: dict[str, Estimate] = {}
    found = []
    for run in runs:
        data: dict[str, list[Rounds]] = {}
        for key in keys:
            data.setdefault(run.records[key].dataset, []).append(run.records[key].rounds)
        lengths = accepted_lengths(data, bootstrap)
        first = first or lengths
        found.append({**_figures(run, data, lengths, bootstrap), "gain": _gains(lengths, first, run is runs[0])})
    left_out = sorted({key for run in runs for key in (*run.records, *run.failed)} - set(keys))
    sizes = {name: sum(runs[0].records[k].dataset == name for k in keys) for name in found[0]["datasets"]}
    return {
        "format": FORMAT,
        "version": 1,
        "settings": {**settings, "replicates": bootstrap.replicates, "prompts": sizes},
        "left_out": left_out,
        "drafters": found,
    }


def _gains(lengths: Mapping[str, Estimate], first: Mapping[str, Estimate], same: bool) -> dict[str, list[float]] | None:
    return None if same else {name: gain(own, first[name]).as_list() for name, own in lengths.items()}


def _figures(run: Run, data: ByPrompt, lengths: Mapping[str, Estimate], bootstrap: Bootstrap) -> dict[str, Any]:
    """One drafter's figures."""
    every = Rounds.concat([r for prompts in data.values() for r in prompts], run.gamma)
    by_dataset = {name: Rounds.concat(prompts, run.gamma) for name, prompts in data.items()}
    judged = calibration.judge(every).as_dict() if every.offered.any() else None
    return {
        "label": run.label,
        "gamma": run.gamma,
        "about": run.about,
        "rounds": len(every),
        "tokens": int(every.committed.sum()),
        "accepted_length": {name: e.as_list() for name, e in lengths.items()},
        "datasets": {
            name: {"rounds": len(r), "tokens": int(r.committed.sum()), **Positions.of(r).as_dict()}
            for name, r in by_dataset.items()
        },
        "positions": Positions.of(every).as_dict(),
        "teacher_forced": None if run.forced is None else _forced_figures(run.forced, run.gamma, bootstrap),
        "thresholds": threshold_sweep(every),
        "calibration": judged,
        "failed": run.failed,
    }


def _forced_figures(
    forced: Mapping[str, tuple[str, Overlap]], gamma: int, bootstrap: Bootstrap
) -> dict[str, Any] | None:
    """1 - TV and agreement by position, with intervals over responses; None without any anchor."""
    overlaps = [o for _, o in forced.values()]
    anchors = np.array([float(o.anchors) for o in overlaps])
    if not anchors.sum():
        return None
    figures: dict[str, Any] = {"responses": int((anchors > 0).sum()), "anchors": int(anchors.sum())}
    for name in ("overlap", "agreement"):
        sums = np.stack([getattr(o, name) for o in overlaps])
        figures[name] = [bootstrap.ratio("teacher-forced", sums[:, k], anchors).as_list() for k in range(gamma)]
    return figures
