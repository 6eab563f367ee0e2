"""The engine: submit, step, abort, stream. Single-threaded; the asynchronous front is in ``dspark.aio``."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dspark.config import EngineConfig, SamplingParams
from dspark.engine.admission import Admission
from dspark.engine.batcher import Batcher, Work
from dspark.engine.follow import Follower
from dspark.engine.live_cost import LiveCost
from dspark.engine.locking import locked
from dspark.engine.parts import Parts, admitted_modes, check_gamma
from dspark.engine.prefix import prefix_cache
from dspark.engine.round import Outcome, run_round
from dspark.engine.state import Chunk, RequestState
from dspark.engine.stats import EngineStats, RequestStats, count_choice, count_round
from dspark.engine.watch import FLAT_COST, STATES, AcceptanceWatch
from dspark.errors import DSparkError, DSparkWarning
from dspark.plugins.manager import PluginManager
from dspark.protocols import RoundObserver


class Engine:
    """Continuous batching around :func:`dspark.engine.round.run_round`.

    Requests join and leave between steps; any thread may call, one is inside at a time. Build it with
    :func:`dspark.engine.build.build_engine` or ``dspark.SpeculativeDecoder``; the constructor takes finished parts.

    Args:
        parts: the components.
        config: the configuration they were built from.
        tokenizer: needed for text, stop strings and chats.
        observers: (name for messages, observer) pairs; they see every finished round.
        on_stop: called once by :meth:`close`.

    Attributes:
        closed: :meth:`close` was called; submissions are refused.
        prefixes: what slots hold of earlier requests; None where it is off, or target or drafter can't.
        live_cost: adjusts the cost table to real steps, between rounds; None where it stays as it is.
        lock: held by whoever is inside; re-entrant.
        plugins: the manager that its components come from; None where finished parts were given.
    """

    plugins: PluginManager | None = None

    def __init__(
        self,
        parts: Parts,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,
        observers: Sequence[tuple[str, RoundObserver]] = (),
        on_stop: Any = None,
    ) -> None:
        self.live_cost: LiveCost | None = None
        self.config = config if config is not None else EngineConfig()
        self.parts = parts
        self.tokenizer = tokenizer
        check_gamma(parts)
        self.modes = admitted_modes(parts, self.config)
        self.max_len = parts.target.allocate(self.config.max_slots, self.config.max_len, self.config.kv_budget_bytes)
        self.batcher = Batcher(self.config.max_slots, self.config.step_tokens)
        self.stats = EngineStats()
        self._admission = Admission(self)
        self._observers = list(observers)
        self._requests: dict[str, RequestState] = {}
        self._leaving: list[RequestState] = []
        self._readers: dict[str, deque[Chunk]] = {}
        self._aside: dict[str, list[Chunk]] = {}
        self.lock = threading.RLock()
        self._on_stop = on_stop
        self.closed = False
        self._index = 0
        self._watch = AcceptanceWatch(self.config.zero_accept_rounds)
        self._said: set[str] = set()
        self.prefixes = prefix_cache(parts, self.config, self.batcher, lambda: self.stats, self._call)

    # requests -----------------------------------------------------------------------------------------------------

    @locked
    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id; it starts at a step that has a free slot.

        Raises:
            RequestError: naming what is wrong with it. No other request is affected.
            DSparkError: the engine is closed.
        """
        if self.closed:
            raise DSparkError("this engine was closed: build another")
        request = self._admission.request(prompt_ids, params if params is not None else SamplingParams(), request_id)
        self._requests[request.request_id] = request
        self.batcher.add(request)
        return request.request_id

    @locked
    def abort(self, request_id: str) -> bool:
        """End a request; its slot is free at the next step. False if it is not known (any more), or leaves already."""
        request = self._requests.get(request_id)
        if request is None or request.finished or request.leaving:
            return False
        self._leave_later(request)
        return True

    def is_live(self, request_id: str) -> bool:
        """True while a request waits or runs."""
        return request_id in self._requests

    @locked
    def live(self) -> tuple[RequestState, ...]:
        """Requests that wait or run."""
        return tuple(self._requests.values())

    @property
    def has_work(self) -> bool:
        """True while a step would do something."""
        return bool(self.batcher.active or self.batcher.waiting or self._leaving)

    def request_stats(self, request_id: str) -> RequestStats:
        """Figures of a live request; what is returned goes on counting."""
        return self._requests[request_id].stats

    # steps --------------------------------------------------------------------------------------------------------

    @locked
    def step(self) -> list[Chunk]:
        """Run one step for every active request and return what it added.

        What escapes from it (an interrupt, say) aborts the requests of the step.
        """
        began = time.perf_counter()
        chunks = self.leave()
        (self.prefixes or self.batcher).admit()
        work = self.batcher.work()
        if not work:
            return chunks
        try:
            chunks += self._round(work)
            if self.prefixes is not None:
                self.prefixes.seen()
        except BaseException:
            for request in work.requests:  # a round is never retried under the same keys (METHOD section 4, rule 6)
                request.doubtful = True
                self._leave_later(request)
            raise
        now = time.perf_counter()
        for request in work.requests:
            request.stats.seconds = now - request.submitted
            if request.finished and self.is_live(request.request_id):
                self._finish(request)
        self.stats.phase_seconds["step"] += now - began
        return chunks

    def _round(self, work: Work) -> list[Chunk]:
        cost = self.parts.cost
        outcome = run_round(self.parts, work, self._index)
        self._index += 1
        learnt = time.perf_counter()
        self._learn(outcome)
        self._refine(outcome, work)
        self._count(outcome, time.perf_counter() - learnt)
        count_choice(self.stats, outcome, work, cost if self.live_cost is not None else None)
        return [*outcome.chunks, *(request.end("error", error) for request, error in outcome.faults.failed.items())]

    def run(self) -> Iterator[Chunk]:
        """Step until nothing is left, chunk by chunk."""
        while self.has_work:
            yield from self.step()

    @locked
    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Follower:
        """Submit, and return this request's chunks as they come. Leaving the loop early aborts it.

        Raises:
            RequestError: at once.
        """
        chunks = self.follow()
        chunks.add(self.submit(prompt_ids, params, request_id=request_id))
        return chunks

    def follow(self) -> Follower:
        """An iterator over the chunks of some requests that steps the engine for all.

        Other requests' chunks of these steps are kept: for who follows them, or for :meth:`take`.
        """
        return Follower(self)

    @locked
    def take(self, request_id: str) -> list[Chunk]:
        """Chunks that were put aside while other requests were followed; its last one may be among them."""
        return self._aside.pop(request_id, [])

    @locked
    def route(self, request_id: str, reader: deque[Chunk]) -> None:
        """Deliver a request's chunks to ``reader`` from now on, beginning with what was put aside."""
        reader.extend(self.take(request_id))
        if request_id in self._requests:
            self._readers[request_id] = reader

    @locked
    def unroute(self, request_id: str) -> None:
        """Forget a reader."""
        self._readers.pop(request_id, None)

    @locked
    def deliver(self, chunks: Iterable[Chunk]) -> None:
        """Hand chunks to those who follow their requests, and put the others aside."""
        for chunk in chunks:
            reader = self._readers.get(chunk.request_id)
            if reader is None:
                self._aside.setdefault(chunk.request_id, []).append(chunk)
                continue
            reader.append(chunk)
            if chunk.finish_reason is not None:
                self.unroute(chunk.request_id)

    @locked
    def observe(self, name: str, observer: RoundObserver) -> None:
        """Let one more observer see every round from the next on; ``name`` is for messages."""
        self._observers.append((name, observer))

    @locked
    def close(self) -> None:
        """Abort what is live and tell plugins. Nothing can be submitted any more."""
        self.closed = True
        for request in self.live():
            self.abort(request.request_id)
        self.deliver(self.leave())
        if self.prefixes is not None:
            self.prefixes.clear()
        if self._on_stop is not None:
            stop, self._on_stop = self._on_stop, None
            stop(self)

    # bookkeeping --------------------------------------------------------------------------------------------------

    @locked
    def leave(self) -> list[Chunk]:
        """Free the slots of aborted requests without running a step; their last chunks."""
        leaving, self._leaving = self._leaving, []
        chunks = []
        for request in leaving:
            if self._requests.get(request.request_id) is request:  # else the step that it was aborted in ended it
                chunks.append(request.end("abort"))
                self._finish(request)
        return chunks

    def _leave_later(self, request: RequestState) -> None:
        if not request.leaving:
            request.leaving = True
            self._leaving.append(request)

    def _finish(self, request: RequestState) -> None:
        self.batcher.remove(request)
        self._requests.pop(request.request_id, None)
        self._admission.release(request)
        self.stats.finished[request.finish_reason or "stop"] += 1
        if request.slot >= 0:
            kept = self.prefixes is not None and self.prefixes.park(request)
            for kind in self.parts.in_use():
                if kept and kind == "drafter":
                    continue  # it is released when the slot is taken
                self._call(kind, "release", getattr(self.parts, kind).release, request.slot, request.generation)
        view = request.view()
        for entry in list(self._observers):
            self._observe(entry, entry[1].on_finish, view, request.finish_reason or "stop")

    def _refine(self, outcome: Outcome, work: Work) -> None:
        """Adjust the cost table to what the step took. It is exchanged here alone: frozen within a round."""
        if self.live_cost is not None and not outcome.prefill_tokens:
            table = self.live_cost.observe(outcome.record, work.context)
            if table is not None:
                self.parts.cost = table
                self.stats.cost_updates += 1

    def _learn(self, outcome: Outcome) -> None:
        """After the draws of a round, and before those of the next: drafter, estimator, gamma policy, observers."""
        record = outcome.record
        if self.parts.drafting:
            self._call("drafter", "commit", self.parts.drafter.commit, record.committed)
        if self.parts.planning:
            self._call("estimator", "observe", self.parts.estimator.observe, record)
        if self.parts.gamma_policy is not None:
            self._call("gamma_policy", "observe", self.parts.gamma_policy.observe, record)
        for entry in list(self._observers):
            self._observe(entry, entry[1].on_round, record)

    def _call(self, kind: str, phase: str, call: Any, *args: Any) -> Any:
        """A component's bookkeeping: what raises switches it off, and no request is affected; then it is None."""
        try:
            return call(*args)
        except Exception as fault:
            self.stats.faults[f"{self.parts.name(kind)}:{phase}"] += 1
            if kind == "drafter":
                self.parts.drafting = False
            elif kind == "gamma_policy":
                self.parts.gamma_policy = None
            else:
                self.parts.planning = False
            who = self.parts.title(kind)
            self._say(f"{who} failed in phase {phase!r} ({type(fault).__name__}: {fault}); it is no longer used")

    def _observe(self, entry: tuple[str, RoundObserver], call: Any, *args: Any) -> None:
        try:
            call(*args)
        except Exception as fault:
            self._observers.remove(entry)
            name = entry[0]
            self.stats.faults[f"{name}:observe"] += 1
            self._say(f"observer {name} failed ({type(fault).__name__}: {fault}) and was dropped")

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, DSparkWarning, stacklevel=3)

    def _count(self, outcome: Outcome, observed: float) -> None:
        stats, record = self.stats, outcome.record
        offered = count_round(stats, outcome)
        stats.phase_seconds["observe"] += observed
        if record.choice is not None and record.choice[1].reason == "no-cost-table":
            self._named_state("gamma-not-chosen")
        if record.draft is not None and record.plan is not None:
            stats.drafting_steps += 1
            stats.drafted += int(record.draft.lens.sum())
            for view, drafted in zip(record.batch.requests if record.batch else (), record.draft.lens, strict=False):
                if view.request_id in self._requests:
                    self._requests[view.request_id].stats.drafted += int(drafted)
            stats.stop_reasons[record.plan.stop_reason] += 1
            self._named_state(record.plan.stop_reason)
        warning = self._watch.see(record, offered, self.parts.name("drafter"))
        if warning is not None:
            self._say(warning)

    def _named_state(self, reason: str) -> None:
        for state in filter(STATES.__contains__, reason.split("+")):
            self.stats.states[state] += 1
            self._say(f"{state}: {STATES[state]}")
        if getattr(self.parts.cost, "flat", False):
            self.stats.states["flat-cost"] += 1
            self._say(FLAT_COST)
