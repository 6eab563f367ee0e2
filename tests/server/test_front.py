"""What the server asks of the asynchronous front: many requests in one stream, and work between steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from dspark.config import SamplingParams
from dspark.engine.stats import RequestStats
from dspark.errors import DSparkError, RequestError


def test_many_requests_in_one_stream(make_decoder: Callable[..., Any], alone: Any) -> None:
    decoder = make_decoder()
    prompts = [[5, 6], [7, 8, 9], [10]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 9, 6)]
    stats = [RequestStats() for _ in prompts]

    async def run() -> list[list[int]]:
        got: list[list[int]] = [[] for _ in prompts]
        async for index, chunk in decoder.front.stream_many(list(zip(prompts, params, strict=True)), stats=stats):
            got[index] += chunk.ids
        return got

    got = asyncio.run(run())
    assert got == [alone.generate([p], q)[0].ids for p, q in zip(prompts, params, strict=True)]
    assert [s.output_tokens for s in stats] == [4, 9, 6]
    decoder.close()


def test_a_refusal_ends_the_others(make_decoder: Callable[..., Any]) -> None:
    decoder = make_decoder()
    good, bad = ([5], SamplingParams(max_tokens=200, ignore_eos=True)), ([10_000], SamplingParams())

    async def run() -> None:
        with pytest.raises(RequestError, match="outside the target's vocabulary"):
            async for _ in decoder.front.stream_many([good, bad]):
                pass
        while await decoder.front.call(lambda engine: engine.has_work):
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert not decoder.engine.live()
    decoder.close()


def test_leaving_early_aborts_all(make_decoder: Callable[..., Any]) -> None:
    decoder = make_decoder()

    async def run() -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        async with contextlib.aclosing(decoder.front.stream_many([([5], params), ([6], params)])) as chunks:
            async for _ in chunks:
                break
        while await decoder.front.call(lambda engine: engine.has_work):
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert decoder.engine.stats.finished == {"abort": 2}
    decoder.close()


def test_calls_run_in_the_engines_thread(make_decoder: Callable[..., Any]) -> None:
    import threading

    decoder = make_decoder()

    async def run() -> Any:
        with pytest.raises(ZeroDivisionError):
            await decoder.front.call(lambda engine: 1 / 0)
        return await decoder.front.call(lambda engine: (threading.current_thread().name, engine is decoder.engine))

    assert asyncio.run(run()) == ("dspark-engine", True)
    assert decoder.front.failure is None
    decoder.close()
    assert "closed" in str(decoder.front.failure)
    with pytest.raises(DSparkError, match="closed"):
        asyncio.run(run())
