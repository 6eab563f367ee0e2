"""Three lines from a target to text: ``SpeculativeDecoder.from_pretrained(target, drafter=..).generate(prompts)``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.aio import AsyncFront
from dspark.config import EngineConfig, SamplingParams, build_config
from dspark.engine.build import build_engine
from dspark.engine.engine import Engine
from dspark.engine.follow import Follower
from dspark.engine.state import Chunk
from dspark.engine.stats import EngineStats, RequestStats
from dspark.errors import DSparkError, RequestError
from dspark.prompts import Prompt, as_prompts, encode
from dspark.protocols import RoundObserver
from dspark.sampling.draws import choice_seed


@dataclass(slots=True)
class Generation:
    """One finished sample.

    Attributes:
        prompt_ids, ids: token ids of prompt and output.
        text: the output's text; empty without a tokenizer.
        accepted: one flag a token of ``ids``: drafted and accepted.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``.
        logprobs: one entry a token where asked for.
        stats: figures of the request.
        error: what ended it, for ``error``.
    """

    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    accepted: list[bool] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    error: Exception | None = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self.ids += chunk.ids
        self.text += chunk.text or ""
        self.accepted += [k < chunk.accepted for k in range(len(chunk.ids))]
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason
        self.error = chunk.error


class SpeculativeDecoder:
    """A target, a drafter and everything between, ready to decode.

    ``generate`` and ``stream`` drive the engine in the caller's thread; ``agenerate`` and ``astream`` drive it in one
    background thread, for any number of coroutines. Use one kind at a time. Several threads may call ``generate`` and
    ``stream`` of one decoder: their requests are decoded together.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._front = AsyncFront(engine)

    @classmethod
    def from_pretrained(
        cls,
        target: Any,
        drafter: str = "auto",
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        tokenizer: Any = None,
        cost: Any = "auto",
        observers: Sequence[RoundObserver] = (),
        extra_plugins: Mapping[str, object] | None = None,
        **settings: Any,
    ) -> SpeculativeDecoder:
        """Load a target and build an engine around it.

        Args:
            target: hub id, local folder, ``.gguf`` file, ``smollm2``, a loaded transformers model, or a ``Target``.
            drafter: a registered drafter, a checkpoint's folder or hub id, ``none`` for plain decoding, or
                ``auto``: the preset of the target, else ``ngram``.
            revision, dtype, device: how the target is loaded.
            tokenizer: for a loaded model; else the target's own.
            cost: the scheduler's cost table: ``auto`` (measured once for this machine and target, then cached),
                ``measure``, a path, a profile, a table, or None.
            observers: see every round.
            extra_plugins: name -> plugin object without an entry point.
            settings: fields of ``EngineConfig`` (``gamma``, ``scheduler``, ``max_slots``, ...).

        Raises:
            DSparkError: naming what is unknown, missing or does not fit.
        """
        target_config = dict(settings.pop("target_config", {}))
        built: Any = None
        if isinstance(target, (str, Path)):
            target_config = {
                "model": str(target), "revision": revision, "dtype": dtype, "device": device, **target_config,
            }  # fmt: skip
        elif hasattr(target, "allocate") and hasattr(target, "forward") and hasattr(target, "capabilities"):
            built = target
        else:
            target_config = {"model": target, "tokenizer": tokenizer, **target_config}
        config = build_config(EngineConfig, {"drafter": drafter, "target_config": target_config, **settings})
        engine = build_engine(
            config, target=built, tokenizer=tokenizer, cost=cost, observers=observers, extra_plugins=extra_plugins
        )
        return cls(engine)

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self.engine.tokenizer

    @property
    def front(self) -> AsyncFront:
        """The asynchronous front, for token ids and many requests at once."""
        return self._front

    @property
    def stats(self) -> EngineStats:
        """Figures since the engine was built or ``reset_stats``."""
        return self.engine.stats

    def reset_stats(self) -> EngineStats:
        """Start counting anew; returns the old figures."""
        old, self.engine.stats = self.engine.stats, EngineStats()
        return old

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        on_chunk: Callable[[int, Chunk], None] | None = None,
        **sampling: Any,
    ) -> list[Generation]:
        """Decode prompts together and return one Generation a sample, in order (``n`` samples of a prompt in a row).

        Args:
            prompts: text, a chat (a list of ``{"role", "content"}``), token ids, or a list of any of these.
            params: how to sample; ``sampling`` sets or overrides its fields by keyword.
            on_chunk: called with (index of the sample, chunk) as tokens arrive.

        Raises:
            RequestError: the only prompt was refused. With several, a refused one has ``error`` and the others go on.
        """
        self._front.check_idle()
        many = as_prompts(prompts)
        choices = expand(merge(params, sampling))
        results: list[Generation] = []
        index: dict[str, int] = {}
        with contextlib.closing(self.engine.follow()) as chunks:
            for prompt in many:
                for choice in choices:
                    result = Generation()
                    results.append(result)
                    try:
                        result.prompt_ids = encode(prompt, self.tokenizer)
                        with self.engine.lock:  # another thread may step, and the request end, in between
                            name = self.engine.submit(result.prompt_ids, choice)
                            result.stats = self.engine.request_stats(name)
                            chunks.add(name)
                    except RequestError as error:
                        if len(many) == 1:
                            raise
                        result.finish_reason, result.error = "error", error
                        continue
                    index[name] = len(results) - 1
            for chunk in chunks:
                i = index[chunk.request_id]
                results[i].add(chunk)
                if on_chunk is not None:
                    on_chunk(i, chunk)
        return results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any) -> Iterator[Chunk]:
        """Decode one prompt and yield what each step adds. Leaving the loop early aborts it.

        Raises:
            RequestError: at once, if the prompt is refused.
            ComponentError: if a component's fault ended it.
        """
        self._front.check_idle()
        chosen = merge(params, sampling)
        return self._stream(self.engine.stream(encode(prompt, self.tokenizer), chosen))

    def _stream(self, chunks: Follower) -> Iterator[Chunk]:
        with contextlib.closing(chunks):
            for chunk in chunks:
                if chunk.error is not None:
                    raise chunk.error
                yield chunk

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any
    ) -> list[Generation]:
        """Decode one prompt (``n`` samples) beside whatever else is running; cancelling aborts it."""
        chosen = merge(params, sampling)
        ids = encode(prompt, self.tokenizer)
        return list(await self._front.gather([self._collect(ids, choice) for choice in expand(chosen)]))

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any
    ) -> AsyncIterator[Chunk]:
        """Decode one prompt and yield what each step adds. Leaving the loop or cancelling aborts it."""
        ids = encode(prompt, self.tokenizer)
        async for chunk in self._front.stream(ids, merge(params, sampling)):
            if chunk.error is not None:
                raise chunk.error
            yield chunk

    async def _collect(self, ids: list[int], params: SamplingParams) -> Generation:
        result = Generation(prompt_ids=ids)
        async for chunk in self._front.stream(ids, params, stats=result.stats):
            result.add(chunk)
        if result.error is not None:
            raise result.error
        return result

    def close(self) -> None:
        """Stop the background thread, abort what is live, and tell plugins. Nothing can be decoded any more."""
        self._front.close()
        self.engine.close()

    def __enter__(self) -> SpeculativeDecoder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def merge(params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
    """Parameters with keyword overrides.

    Raises:
        ConfigError: for an unknown keyword, with the nearest name.
    """
    if params is None:
        return build_config(SamplingParams, sampling)
    if not isinstance(params, SamplingParams):
        raise DSparkError(f"params: expected SamplingParams, got {type(params).__name__}")
    if not sampling:
        return params
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    return build_config(SamplingParams, {**values, **sampling})


def expand(params: SamplingParams) -> list[SamplingParams]:
    """One set of parameters a sample; choice i of n > 1 uses hash(seed, i)."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else choice_seed(params.seed, i) for i in range(params.n)]
    return [dataclasses.replace(params, n=1, seed=seed, request_key=None) for seed in seeds]
