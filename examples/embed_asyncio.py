"""An event loop and a queue of your own: urgent requests go first.

    python examples/embed_asyncio.py --target smollm2

The engine takes requests in order of arrival. Whoever wants another order keeps them back, and gives the engine no more
than it has slots for; then the next free slot goes to the most urgent one.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import typer

from dspark import SpeculativeDecoder
from dspark.api import Generation

Job = tuple[str, dict[str, Any], "asyncio.Future[Generation]"]


class PriorityFront:
    """Requests wait here, by priority; as many run as the engine has slots.

    Args:
        decoder: whose engine decodes.
        waiting: how many may wait; ``ask`` itself waits while it is full.
    """

    def __init__(self, decoder: SpeculativeDecoder, waiting: int = 256) -> None:
        self._decoder = decoder
        self._queue: asyncio.PriorityQueue[tuple[int, int, Job]] = asyncio.PriorityQueue(waiting)
        self._order = itertools.count()  # among equals, first come, first served
        self._workers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> PriorityFront:
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._decoder.engine.config.max_slots)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        while not self._queue.empty():
            self._queue.get_nowait()[2][2].cancel()
            await asyncio.sleep(0)  # whom the full queue kept out comes in, and is let go as well

    async def ask(self, prompt: str, *, priority: int = 0, **sampling: Any) -> Generation:
        """Decode a prompt; lower numbers are more urgent. Cancelling takes it out, waiting or running."""
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        await self._queue.put((priority, next(self._order), (prompt, sampling, answer)))
        return await answer

    async def _work(self) -> None:
        """One of these a slot: take the most urgent request, decode it, and again."""
        while True:
            _, _, (prompt, sampling, answer) = await self._queue.get()
            if answer.done():  # given up while it waited
                continue
            run = asyncio.ensure_future(self._decoder.agenerate(prompt, **sampling))
            answer.add_done_callback(lambda done, run=run: run.cancel())  # given up while it runs: frees the slot
            try:
                [result] = await run
            except asyncio.CancelledError:
                if not answer.cancelled():  # it is this worker that ends
                    answer.cancel()
                    raise
            except Exception as error:  # refused, or a component failed: this request's alone
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(result)


async def show(decoder: SpeculativeDecoder, count: int, max_tokens: int) -> list[str]:
    """Some long jobs in the background, then one that is urgent; the order in which they end."""
    ended: list[str] = []

    async def ask(name: str, prompt: str, priority: int) -> None:
        result = await front.ask(prompt, priority=priority, max_tokens=max_tokens, ignore_eos=True)
        ended.append(name)
        print(f"{name:>13}: {result.text[:60]!r}")

    async with PriorityFront(decoder) as front:
        jobs = [asyncio.create_task(ask(f"background {i}", f"Chapter {i}:", 10)) for i in range(count)]
        await asyncio.sleep(0)  # they are in the queue
        await ask("urgent", "The sky is", 0)
        await asyncio.gather(*jobs)
    return ended


def main(
    target: str = "smollm2", drafter: str = "auto", max_slots: int = 4, count: int = 12, max_tokens: int = 64
) -> None:
    with SpeculativeDecoder.from_pretrained(target, drafter, max_slots=max_slots) as decoder:
        asyncio.run(show(decoder, count, max_tokens))


if __name__ == "__main__":
    typer.run(main)
