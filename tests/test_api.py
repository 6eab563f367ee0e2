"""The public front: prompts of every form, n samples, errors that stay with their request, streams, coroutines."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dspark import ConfigError, DSparkError, RequestError, SamplingParams, SpeculativeDecoder
from dspark.types import RoundRecord

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown fox"
CHAT = [{"role": "user", "content": "the lazy dog"}]


@pytest.fixture
def decoder(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    made = SpeculativeDecoder.from_pretrained(
        tiny_model, "ngram", tokenizer=tiny_tokenizer, cost=None, scheduler="fixed", max_len=256, max_slots=4
    )
    yield made
    made.close()


def test_text_chat_and_ids_in_one_call(decoder: Any, tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer(PROMPT)["input_ids"]
    text, chat, raw = decoder.generate([PROMPT, CHAT, ids], max_tokens=12, ignore_eos=True)
    assert text.ids == raw.ids
    assert text.prompt_ids == ids
    assert tiny_tokenizer.decode(chat.prompt_ids) == "<|start|>user: the lazy dog<|end|><|start|>assistant: "
    for result in (text, chat, raw):
        assert len(result.ids) == len(result.accepted) == 12
        assert result.finish_reason == "length"
        assert result.text == tiny_tokenizer.decode(result.ids, skip_special_tokens=True)
        assert result.stats.output_tokens == 12


def test_one_prompt_of_each_form_is_one_prompt(decoder: Any) -> None:
    for prompt in (PROMPT, CHAT, [1, 2, 3]):
        assert len(decoder.generate(prompt, max_tokens=2)) == 1


def test_a_refused_prompt_leaves_the_others_alone(decoder: Any) -> None:
    good, bad, also = decoder.generate([PROMPT, [1, 10_000], CHAT], max_tokens=4, ignore_eos=True)
    assert isinstance(bad.error, RequestError)
    assert bad.finish_reason == "error"
    assert len(good.ids) == len(also.ids) == 4
    with pytest.raises(RequestError, match="10000"):
        decoder.generate([1, 10_000])
    assert not decoder.engine.live()


def test_n_samples_with_a_seed_differ_and_repeat(decoder: Any) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=3, n=3, ignore_eos=True)
    first = [r.ids for r in decoder.generate(PROMPT, params)]
    assert len({tuple(ids) for ids in first}) == 3
    assert [r.ids for r in decoder.generate([CHAT, PROMPT], params)][3:] == first


def test_stream_yields_what_generate_returns(decoder: Any) -> None:
    [whole] = decoder.generate(PROMPT, max_tokens=20, ignore_eos=True)
    chunks = list(decoder.stream(PROMPT, max_tokens=20, ignore_eos=True))
    assert [i for c in chunks for i in c.ids] == whole.ids
    assert "".join(c.text for c in chunks) == whole.text
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["length"]


def test_unknown_parameters_are_named_with_the_nearest(decoder: Any, tiny_model: Any) -> None:
    with pytest.raises(ConfigError, match=r"'max_token'.*max_tokens"):
        decoder.generate(PROMPT, max_token=3)
    with pytest.raises(ConfigError, match=r"'schedular'.*scheduler"):
        SpeculativeDecoder.from_pretrained(tiny_model, schedular="fixed")


def test_logprobs_are_the_targets_for_every_token(decoder: Any, tiny_model: Any) -> None:
    import torch

    [result] = decoder.generate([1, 5, 9, 5, 9, 5, 9], max_tokens=16, logprobs=3, ignore_eos=True)
    assert any(result.accepted)
    with torch.no_grad():
        logits = tiny_model(torch.tensor([result.prompt_ids + result.ids])).logits[0].double()
    rows = logits[len(result.prompt_ids) - 1 : -1].log_softmax(-1)
    for row, token, entry in zip(rows, result.ids, result.logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()


def test_coroutines_share_the_engine(decoder: Any) -> None:
    expected = [decoder.generate(p, max_tokens=15, ignore_eos=True)[0].ids for p in (PROMPT, CHAT)]

    async def run() -> Any:
        async def stream() -> list[int]:
            return [i async for c in decoder.astream(PROMPT, max_tokens=15, ignore_eos=True) for i in c.ids]

        return await asyncio.gather(stream(), decoder.agenerate(CHAT, max_tokens=15, ignore_eos=True))

    streamed, [generated] = asyncio.run(run())
    assert [streamed, generated.ids] == expected
    assert generated.stats.output_tokens == 15
    with pytest.raises(DSparkError, match="asynchronous"):
        decoder.generate(PROMPT)


def test_a_cancelled_coroutine_frees_its_slot(decoder: Any) -> None:
    async def run() -> list[Any]:
        stream = decoder.astream(PROMPT, max_tokens=180, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(RequestError, match="10000"):
            await decoder.agenerate([10_000])
        return await decoder.agenerate(CHAT, max_tokens=3, ignore_eos=True)

    [result] = asyncio.run(run())
    assert len(result.ids) == 3
    decoder.close()
    assert decoder.engine.stats.finished["abort"] == 1


def test_observers_see_rounds_and_a_broken_one_is_dropped(tiny_model: Any, tiny_tokenizer: Any) -> None:
    class Watcher:
        def __init__(self, breaks: bool) -> None:
            self.breaks, self.rounds, self.reasons = breaks, 0, []

        def on_round(self, record: RoundRecord) -> None:
            if self.breaks:
                raise RuntimeError("broken watcher")
            self.rounds += 1

        def on_finish(self, request: Any, reason: str) -> None:
            self.reasons.append(reason)

    good, bad = Watcher(False), Watcher(True)
    decoder = SpeculativeDecoder.from_pretrained(
        tiny_model, "none", tokenizer=tiny_tokenizer, observers=[bad, good], max_len=128, max_slots=2
    )
    with pytest.warns(UserWarning, match="broken watcher"):
        [result] = decoder.generate(PROMPT, max_tokens=5, ignore_eos=True)
    assert len(result.ids) == 5
    assert good.rounds == 5
    assert good.reasons == ["length"]
    assert bad.rounds == 0


# what was found by attacking it ---------------------------------------------------------------------------------------


def within(seconds: float, call: Any) -> Any:
    """The result of a call that must not hang."""
    import threading

    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert done, "it hangs"
    return done[0]


def test_generate_in_the_middle_of_a_stream_or_of_another_generate(decoder: Any) -> None:
    expected = [r.ids for r in decoder.generate([PROMPT, CHAT], max_tokens=12, ignore_eos=True)]
    stream = decoder.stream(PROMPT, max_tokens=12, ignore_eos=True)
    streamed = [*next(stream).ids]
    inner: list[list[int]] = []

    def on_chunk(index: int, chunk: Any) -> None:
        if not inner:
            inner.extend(r.ids for r in decoder.generate([CHAT], max_tokens=12, ignore_eos=True))

    [outer] = decoder.generate(PROMPT, max_tokens=12, ignore_eos=True, on_chunk=on_chunk)
    assert outer.ids == expected[0]
    assert outer.finish_reason == "length"
    assert inner == [expected[1]]
    streamed += within(30, lambda: [i for c in stream for i in c.ids])
    assert streamed == expected[0]


def test_a_callback_that_raises_leaves_nothing_behind(decoder: Any) -> None:
    def on_chunk(index: int, chunk: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        decoder.generate([PROMPT, CHAT], max_tokens=12, on_chunk=on_chunk)
    assert not decoder.engine.live()
    assert len(decoder.engine.batcher.pool) == 4


def test_a_prompt_that_can_not_be_read_leaves_no_other_behind(
    decoder: Any, tiny_tokenizer: Any, monkeypatch: Any
) -> None:
    template = "{{ raise_exception('no such role') }}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    with pytest.raises(Exception, match="no such role"):
        decoder.generate([PROMPT, CHAT], max_tokens=4)
    assert not decoder.engine.live()


def test_a_refused_stream_says_so_at_once(decoder: Any) -> None:
    with pytest.raises(RequestError, match="10000"):
        decoder.stream([10_000])
    decoder.stream(PROMPT, max_tokens=4)  # forgotten before it began
    decoder.generate(PROMPT, max_tokens=1)
    assert not decoder.engine.live()


@pytest.mark.parametrize("prompts", [7, None, b"text", {"role": "user", "content": "x"}, iter([[1]]), [[1.5]], [["a"]]])
def test_what_is_no_prompt_is_refused_by_name(decoder: Any, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        decoder.generate(prompts, max_tokens=2)


def test_numpy_ids_are_a_prompt(decoder: Any) -> None:
    import numpy as np

    ids = [5, 6, 7]
    [expected] = decoder.generate(ids, max_tokens=4)
    for prompt in (np.array(ids), list(np.array(ids))):
        assert [r.ids for r in decoder.generate(prompt, max_tokens=4)] == [expected.ids]
    assert [r.ids for r in decoder.generate(np.array([ids, ids]), max_tokens=4)] == [expected.ids] * 2


def test_a_closed_decoder_refuses_both_kinds_of_calls(decoder: Any) -> None:
    stream = decoder.stream(PROMPT, max_tokens=20, ignore_eos=True)
    next(stream)
    decoder.close()
    assert [c.finish_reason for c in within(10, lambda: list(stream))] == ["abort"]
    with pytest.raises(DSparkError, match="closed"):
        decoder.generate([PROMPT, CHAT])
    with pytest.raises(DSparkError, match="closed"):
        asyncio.run(asyncio.wait_for(decoder.agenerate(PROMPT), 10))


def test_a_thread_that_ends_leaves_no_coroutine_waiting(decoder: Any) -> None:
    def exits(*args: Any) -> Any:
        raise SystemExit(3)

    decoder.engine.parts.target.forward = exits

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(DSparkError, match="SystemExit"):
                await asyncio.wait_for(decoder.agenerate(PROMPT, max_tokens=3), 10)

    asyncio.run(run())


def test_closing_while_coroutines_wait_ends_all_of_them(decoder: Any) -> None:
    async def run() -> list[Any]:
        work = [asyncio.ensure_future(decoder.agenerate(p, max_tokens=200, ignore_eos=True)) for p in (PROMPT, CHAT)]
        await asyncio.sleep(0.05)
        await asyncio.get_running_loop().run_in_executor(None, decoder.close)
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 10)

    assert all(isinstance(r, DSparkError) or len(r[0].ids) == 200 for r in asyncio.run(run()))
    assert not decoder.engine.live()


def test_a_loop_that_was_closed_leaves_no_request_running(decoder: Any) -> None:
    import time

    forward = decoder.engine.parts.target.forward

    def slow(*args: Any) -> Any:
        time.sleep(0.02)
        return forward(*args)

    decoder.engine.parts.target.forward = slow
    loop = asyncio.new_event_loop()
    stream = decoder.astream(PROMPT, max_tokens=180, ignore_eos=True)
    loop.run_until_complete(anext(stream))
    loop.close()
    deadline = time.monotonic() + 3
    while decoder.engine.live() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not decoder.engine.live()


@pytest.mark.parametrize("temperature", [1e-31, 5e-324])
def test_a_temperature_that_nothing_can_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"temperature: .* too small to divide by; 0 is greedy"):
        SamplingParams(temperature=temperature)
    assert SamplingParams(temperature=1e-30).temperature == 1e-30


def test_the_engines_thread_gets_the_processors(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the thread that built the engine go as the engine's own thread starts: once, and from there."""
    released: list[int] = []
    monkeypatch.setattr("dspark.aio.release_workers", lambda: released.append(threading.get_ident()))

    async def run() -> None:
        for _ in range(2):
            await decoder.agenerate(PROMPT, max_tokens=2)

    asyncio.run(run())
    assert released == [threading.get_ident()]
