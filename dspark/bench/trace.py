"""Acceptance traces: what a drafter proposed at which place of which output, and how much of it the target accepts.

Greedy and ``coupled`` requests write the same tokens under every schedule. So their trace is recorded with nothing
verified: a draft is made at *every* place, and how much of it would have been accepted is read off the tokens that the
target went on to write. A replay then knows the outcome at whichever place it comes to. Under ``rejection`` what is
accepted is drawn, so every draft is verified in full, and drafts are known only where rounds began.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspark import _sched
from dspark.api import SpeculativeDecoder
from dspark.config import SamplingParams
from dspark.drive import RequestLoop
from dspark.errors import EvaluationError
from dspark.types import Committed, Mode, RequestView, RoundRecord

FORMAT, VERSION = "dspark-trace", 1


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request, with a round a place at which a draft is known.

    Attributes:
        prompt_tokens, output_tokens, max_tokens: its lengths.
        at: output tokens before each round, rising.
        drafted, accepted: tokens drafted, and how many of them, from the first, the target accepts.
        probs: c of the drafted tokens of each round, calibrated.
    """

    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    at: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    probs: tuple[tuple[float, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("prompt_tokens", "output_tokens", "max_tokens", "at", "drafted", "accepted", "probs")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class AcceptanceTrace:
    """A recorded sample of requests.

    Attributes:
        requests: in the order in which they were asked.
        gamma: longest draft.
        taps: the drafter reads the target's features, and drafts nothing in the step that reads a prompt.
        learned: confidences were learned from outcomes while decoding: a replay learns its own.
        dense: a draft is known at every place.
        about: target, drafter and sampling, for people.
    """

    requests: tuple[TracedRequest, ...]
    gamma: int
    taps: bool = False
    learned: bool = False
    dense: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def confidence(self) -> str:
        """Where a replay takes c from."""
        return "learned" if self.learned else "recorded"

    def native(self) -> _sched.Trace:
        """For :func:`dspark._sched.simulate`.

        Raises:
            EvaluationError: entries that contradict one another.
        """
        try:
            counts = {
                name: np.array([getattr(r, name) for r in self.requests], dtype=np.int64)
                for name in ("prompt_tokens", "output_tokens", "max_tokens")
            }
            rounds = {
                name: np.array([n for r in self.requests for n in getattr(r, name)], dtype=np.int64)
                for name in ("at", "drafted", "accepted")
            }
            offsets = np.cumsum([0, *(len(r.at) for r in self.requests)], dtype=np.int64)
            probs = np.zeros((len(rounds["at"]), self.gamma))
            for row, values in zip(probs, (p for r in self.requests for p in r.probs), strict=True):
                row[: len(values)] = values
            prompt, output, most = counts.values()
            at, drafted, accepted = rounds.values()
            return _sched.Trace(prompt, output, most, offsets, at, drafted, accepted, probs, taps=self.taps)
        except (TypeError, ValueError) as err:
            raise EvaluationError(f"trace: {err}") from err

    def save(self, path: Path) -> None:
        """Write JSON lines: a head, then a request a line.

        Raises:
            EvaluationError: it can't be written.
        """
        head = {
            "format": FORMAT, "version": VERSION, "gamma": self.gamma, "taps": self.taps, "learned": self.learned,
            "dense": self.dense, "about": dict(self.about),
        }  # fmt: skip
        lines = [head, *(request.as_dict() for request in self.requests)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
        except OSError as err:
            raise EvaluationError(f"{path}: {err}") from err

    @classmethod
    def load(cls, path: Path) -> AcceptanceTrace:
        """Read what ``save`` wrote.

        Raises:
            EvaluationError: naming the file, and the line that is none of a trace.
        """
        try:
            lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as err:
            raise EvaluationError(f"{path}: can't read a trace: {err}") from err
        requests: list[TracedRequest] = []
        heads = 0
        try:
            head = json.loads(lines[0]) if lines else {}
            if head.get("format") != FORMAT or head.get("version") != VERSION:
                raise ValueError(f"no {FORMAT} file of version {VERSION}")
            heads = 1
            for line in lines[1:]:
                requests.append(_request(json.loads(line)))
            flags = {name: bool(head[name]) for name in ("taps", "learned", "dense")}
            trace = cls(tuple(requests), int(head["gamma"]), about=dict(head["about"]), **flags)
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            raise EvaluationError(f"{path} line {heads + len(requests) + 1}: {type(err).__name__}: {err}") from err
        trace.native()
        return trace


def _request(raw: Mapping[str, Any]) -> TracedRequest:
    prompt, output, most = (int(raw[name]) for name in ("prompt_tokens", "output_tokens", "max_tokens"))
    at, drafted, accepted = (tuple(int(n) for n in raw[name]) for name in ("at", "drafted", "accepted"))
    probs = tuple(tuple(float(c) for c in row) for row in raw["probs"])
    return TracedRequest(prompt, output, most, at, drafted, accepted, probs)


@dataclass(slots=True)
class _Place:
    at: int
    drafted: int
    accepted: int
    probs: tuple[float, ...]
    tokens: tuple[int, ...] | None


@dataclass(slots=True)
class TraceRecorder:
    """An observer that keeps the drafts of each request, and what became of them.

    Attributes:
        finished: request id -> its trace, once it ended by EOS, stop or length.
    """

    finished: dict[str, TracedRequest] = field(default_factory=dict)
    _places: dict[str, list[_Place]] = field(default_factory=dict)

    def on_round(self, record: RoundRecord) -> None:
        """Keep every draft of the round."""
        if record.batch is None:
            return
        rows = {view.request_id: i for i, view in enumerate(record.batch.requests)}
        ids = record.draft.token_ids.cpu().numpy() if record.draft is not None else None
        for done in record.committed:
            row = rows.get(done.request.request_id)
            if row is not None and done.new_ids:
                place = _place(record, done, row, ids)
                self._places.setdefault(done.request.request_id, []).append(place)

    def on_finish(self, request: RequestView, reason: str) -> None:
        """Read off what would have been accepted of drafts that were not verified."""
        places = self._places.pop(request.request_id, [])
        output = list(request.ids[request.prompt_len :])
        if reason not in ("stop", "length") or not output:
            return
        for place in places:
            if place.tokens is not None:
                _compare(place, output, cut=reason == "length")
        self.finished[request.request_id] = TracedRequest(
            request.prompt_len,
            len(output),
            request.params.max_tokens,
            tuple(p.at for p in places),
            tuple(p.drafted for p in places),
            tuple(p.accepted for p in places),
            tuple(p.probs[: p.drafted] for p in places),
        )


def _place(record: RoundRecord, done: Committed, row: int, ids: Any) -> _Place:
    view = done.request
    at = len(view.ids) - view.prompt_len
    if record.draft is None or ids is None:
        return _Place(at, 0, 0, (), None)
    drafted = int(record.draft.lens[row])
    known = record.confidence.probs[row, :drafted].tolist() if record.confidence is not None else [0.0] * drafted
    if view.mode is Mode.REJECTION:  # what was not verified has no outcome
        return _Place(at, done.offered, done.accepted, tuple(known[: done.offered]), None)
    return _Place(at, drafted, 0, tuple(known), tuple(int(i) for i in ids[row, :drafted]))


def _compare(place: _Place, output: Sequence[int], *, cut: bool) -> None:
    """Accepted: as many of the drafted tokens as the output went on with. ``cut``: it was not the target that ended."""
    rest = output[place.at : place.at + place.drafted]
    tokens = place.tokens or ()
    place.accepted = next((k for k, (a, b) in enumerate(zip(tokens, rest, strict=False)) if a != b), len(rest))
    if cut and place.accepted == len(rest):
        place.drafted = min(place.drafted, len(rest))


def recording_settings(params: SamplingParams, *, coupled: bool = False) -> dict[str, Any]:
    """Fields of ``EngineConfig`` that an engine needs to record under."""
    pathwise = params.greedy or coupled or params.seed is not None
    return {"scheduler": "off" if pathwise else "fixed", "gamma_policy": "static", "prefix_cache": False}


def record_trace(
    decoder: SpeculativeDecoder,
    prompts: Iterable[Sequence[int]],
    params: Callable[[int], SamplingParams],
    on_tokens: Callable[[int], None] = lambda count: None,
) -> AcceptanceTrace:
    """Decode prompts and record their drafts.

    Args:
        decoder: built under :func:`recording_settings`, and idle.
        prompts: token ids.
        params: of prompt i.
        on_tokens: called with the number of tokens that a step added.

    Raises:
        EvaluationError: the engine's settings record nothing, or no prompt was finished.
    """
    engine = decoder.engine
    pathwise = params(0).greedy or params(0).seed is not None
    wanted = "dspark/off" if pathwise else "dspark/fixed"
    if engine.parts.gamma == 0 or engine.parts.name("scheduler") != wanted:
        raise EvaluationError(
            f"a trace of {'greedy or seeded' if pathwise else 'sampled'} requests is recorded by an engine that drafts "
            f"and whose scheduler is {wanted}, not {engine.parts.name('scheduler')}"
        )
    recorder = TraceRecorder()
    engine.observe("trace", recorder)
    order: list[str] = []
    source = iter(enumerate(prompts))
    loop: RequestLoop[int] = RequestLoop(decoder, lambda index, result: None, on_tokens)

    def fill() -> None:
        while len(loop) < engine.config.max_slots:
            entry = next(source, None)
            if entry is None:
                return
            index, ids = entry
            order.append(loop.submit([int(i) for i in ids], params(index), index))

    loop.run(fill)
    requests = tuple(recorder.finished[name] for name in order if name in recorder.finished)
    if not requests:
        raise EvaluationError("no request was finished: nothing is recorded")
    estimator = engine.parts.estimator.capabilities
    return AcceptanceTrace(
        requests,
        engine.parts.gamma,
        taps=bool(engine.parts.drafter.capabilities.needs_taps),
        learned=bool(getattr(estimator, "shared_state", False)),
        dense=pathwise,
        about={
            "target": engine.parts.target.name,
            "drafter": engine.parts.name("drafter"),
            "estimator": engine.parts.name("estimator"),
            "temperature": 0.0 if params(0).greedy else params(0).temperature,
        },
    )
