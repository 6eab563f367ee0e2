"""The official client against a real server: what comes back, and that it is what plain decoding gives."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dspark.api import SpeculativeDecoder
from dspark.config import SamplingParams
from dspark.sampling.draws import choice_seed
from dspark.server.schemas import ChatRequest, CompletionRequest
from tests.server.conftest import MODEL, Live

PROMPT = "the quick brown fox jumps over the lazy dog the quick brown fox jumps"
CHAT: list[Any] = [{"role": "user", "content": "the lazy dog and the lazy dog"}]
IDS: dict[str, Any] = {"return_token_ids": True}


def ids_of(choice: Any) -> list[int]:
    found: list[int] = choice.model_extra["token_ids"]
    return found


def plain(alone: SpeculativeDecoder, prompt: Any, **sampling: Any) -> Any:
    return alone.generate([prompt], **sampling)[0]


def test_chat_is_plain_decodings(live: Live, alone: SpeculativeDecoder) -> None:
    answer = live.client().chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=60, temperature=0, extra_body=IDS
    )
    expected = plain(alone, CHAT, max_tokens=60)
    choice = answer.choices[0]
    assert ids_of(choice) == expected.ids
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert answer.object == "chat.completion"
    assert answer.model == MODEL


def test_usage_says_what_speculation_did(live: Live) -> None:
    answer = live.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=80, temperature=0)
    usage: Any = answer.usage
    did = usage.model_extra["dspark"]
    assert usage.completion_tokens == 80
    assert usage.total_tokens == usage.prompt_tokens + 80
    assert did["drafted_tokens"] >= did["verified_tokens"] >= did["accepted_tokens"]
    assert did["verified_tokens"] > 0
    assert did["rounds"] + did["accepted_tokens"] == 80
    assert did["accepted_length"] == pytest.approx(80 / did["rounds"])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 11, "top_p": 0.9}])
def test_a_stream_adds_up_to_the_answer(live: Live, alone: SpeculativeDecoder, sampling: dict[str, Any]) -> None:
    client = live.client()
    events = list(
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=IDS,
            **sampling,
        )
    )
    expected = plain(alone, CHAT, max_tokens=40, **sampling)
    *body, last = events
    assert "".join(e.choices[0].delta.content or "" for e in body) == expected.text
    assert [i for e in body for i in ids_of(e.choices[0])] == expected.ids
    assert body[0].choices[0].delta.role == "assistant"
    assert [e.choices[0].finish_reason for e in body] == [None] * (len(body) - 1) + [expected.finish_reason]
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.ids)
    assert len({e.id for e in events}) == 1


def test_a_stream_ends_with_done(live: Live) -> None:
    answer = live.post(
        "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 3, "temperature": 0, "stream": True}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in answer.text


def test_samples_of_a_seed(live: Live, alone: SpeculativeDecoder) -> None:
    """Choice i of n is the request with hash(seed, i), under any schedule and in any batch."""
    answer = live.client().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, n=3, seed=5, temperature=1.0, extra_body=IDS
    )
    expected = [plain(alone, PROMPT, max_tokens=24, temperature=1.0, seed=choice_seed(5, i)).ids for i in range(3)]
    assert [ids_of(c) for c in answer.choices] == expected
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len(set(map(tuple, expected))) == 3


def test_prompt_tokens_that_were_not_read_again_are_counted(live: Live) -> None:
    """Each prompt once, whatever n is: where one choice of it read all, nothing was spared."""

    def usage(prompt: str, n: int) -> Any:
        return live.client().completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0, n=n).usage

    prompt = "zebras seldom quote poems of twelve lines by heart"
    first, again, fresh = usage(prompt, 1), usage(prompt, 2), usage(prompt[::-1], 2)
    assert first.prompt_tokens > 20
    assert [u.prompt_tokens_details.cached_tokens for u in (first, fresh)] == [0, 0]
    assert again.prompt_tokens_details.cached_tokens in (first.prompt_tokens - 1, first.prompt_tokens - 2)
    text = live.get("/metrics").text
    assert int(float(text.split("\ndspark_cached_tokens_total ")[1].split()[0])) >= 2 * (first.prompt_tokens - 2)


def test_streamed_choices_keep_apart(live: Live, alone: SpeculativeDecoder) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}
    for event in live.client().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=20, n=2, seed=9, stream=True, extra_body=IDS
    ):
        seen[event.choices[0].index] += ids_of(event.choices[0])
    for i in (0, 1):
        assert seen[i] == plain(alone, PROMPT, max_tokens=20, temperature=1.0, seed=choice_seed(9, i)).ids


def test_negative_seeds_are_seeds(live: Live, alone: SpeculativeDecoder) -> None:
    answer = live.client().completions.create(model=MODEL, prompt="a", max_tokens=8, seed=-1, extra_body=IDS)
    assert ids_of(answer.choices[0]) == plain(alone, "a", max_tokens=8, temperature=1.0, seed=2**64 - 1).ids


def test_temperature_is_one_where_nothing_is_said(live: Live) -> None:
    client = live.client()
    two = {client.completions.create(model=MODEL, prompt="a", max_tokens=30).choices[0].text for _ in range(2)}
    assert len(two) == 2


def test_several_prompts(live: Live, alone: SpeculativeDecoder) -> None:
    prompts = ["the quick", "a small white house by the sea"]
    answer = live.client().completions.create(
        model=MODEL, prompt=prompts, max_tokens=10, temperature=0, n=2, extra_body=IDS
    )
    expected = [plain(alone, p, max_tokens=10).ids for p in prompts]
    assert [ids_of(c) for c in answer.choices] == [expected[0], expected[0], expected[1], expected[1]]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(alone.tokenizer(p)["input_ids"]) for p in prompts)


def test_token_ids_as_prompts(live: Live, alone: SpeculativeDecoder) -> None:
    client = live.client()
    one = client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=5, temperature=0, extra_body=IDS)
    two = client.completions.create(model=MODEL, prompt=[[5, 6, 7], [8]], max_tokens=5, temperature=0, extra_body=IDS)
    assert ids_of(one.choices[0]) == ids_of(two.choices[0]) == plain(alone, [5, 6, 7], max_tokens=5).ids
    assert ids_of(two.choices[1]) == plain(alone, [8], max_tokens=5).ids


def test_echo(live: Live) -> None:
    client = live.client()
    answer = client.completions.create(model=MODEL, prompt="the fox", max_tokens=5, temperature=0)
    echoed = client.completions.create(model=MODEL, prompt="the fox", max_tokens=5, temperature=0, echo=True)
    assert echoed.choices[0].text == "the fox" + answer.choices[0].text


def test_stop_strings_never_show(live: Live, alone: SpeculativeDecoder) -> None:
    whole = plain(alone, PROMPT, max_tokens=60).text
    stop = next(c for c in whole[4:] if c.isalpha() and c.isascii())
    answer = live.client().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, temperature=0, stop=[stop, "§"]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_the_engines_own_parameters(live: Live, alone: SpeculativeDecoder) -> None:
    own = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 4, "stop_token_ids": [9, 12]}
    answer = live.client().completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, seed=3, presence_penalty=0.5, frequency_penalty=0.2,
        logit_bias={"40": 3.0}, temperature=0.9, extra_body={**own, **IDS},
    )  # fmt: skip
    expected = plain(
        alone, PROMPT, max_tokens=30, seed=3, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={40: 3.0},
        temperature=0.9, **own,
    )  # fmt: skip
    assert ids_of(answer.choices[0]) == expected.ids


def test_every_parameter_of_the_engine_is_a_field(live: Live, alone: SpeculativeDecoder) -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)} - {"logits_processors"}  # response_format
    assert names <= set(ChatRequest.model_fields) & set(CompletionRequest.model_fields)
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0.5, "do_sample": False, "logprobs": 2}
    for mode in ("raw", "processed"):
        answer = live.post(
            "/v1/completions", {"model": MODEL, "prompt": PROMPT, **asked, "top_k": 2, "logprobs_mode": mode, **IDS}
        ).json()["choices"][0]
        expected = plain(alone, PROMPT, **asked, top_k=2, logprobs_mode=mode)
        assert answer["token_ids"] == expected.ids == plain(alone, PROMPT, max_tokens=8).ids
        values = [entry.logprob for entry in expected.logprobs]
        assert answer["logprobs"]["token_logprobs"] == pytest.approx(values, abs=1e-4)
    for key in (0, 2**64 - 1):
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "request_key": key}
        assert len({live.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(2)}) == 1


def test_chat_logprobs(live: Live, alone: SpeculativeDecoder) -> None:
    answer = live.client().chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    expected = plain(alone, CHAT, max_tokens=12, logprobs=3)
    content: Any = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [t.logprob for t in content] == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-4)
    assert all(len(t.top_logprobs) == 3 for t in content)
    assert all(t.top_logprobs[0].logprob == t.logprob for t in content)  # greedy
    assert bytes(b for t in content for b in t.bytes).decode("utf-8", "replace") == answer.choices[0].message.content


def test_completion_logprobs(live: Live) -> None:
    answer = live.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2)
    found: Any = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 12
    assert found.text_offset[0] == 0
    assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs


def test_streamed_logprobs_are_the_answers(live: Live) -> None:
    client = live.client()
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 1}
    whole: Any = client.completions.create(**asked).choices[0].logprobs
    parts = [e.choices[0].logprobs for e in client.completions.create(**asked, stream=True) if e.choices[0].logprobs]
    for name in ("tokens", "text_offset"):
        assert [x for p in parts for x in getattr(p, name)] == getattr(whole, name)


def test_models(live: Live) -> None:
    client = live.client()
    (listed,) = client.models.list().data
    assert listed.id == client.models.retrieve(MODEL).id == MODEL
    assert listed.owned_by == "dspark"


def test_accepted_and_ignored_fields(live: Live) -> None:
    live.client().chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=2, user="me", metadata={"a": "b"}, store=False
    )


def test_text_parts_are_joined(live: Live) -> None:
    client = live.client()
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]}]
    whole: Any = [{"role": "user", "content": "the fox"}]
    two = [client.chat.completions.create(model=MODEL, messages=m, max_tokens=6, temperature=0) for m in (parts, whole)]
    assert two[0].choices[0].message.content == two[1].choices[0].message.content


def test_a_chat_that_says_no_length_fills_its_slot(live: Live) -> None:
    answer = live.client().chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == live.decoder.engine.max_len


def test_many_clients_at_once_get_what_each_gets_alone(live: Live, alone: SpeculativeDecoder) -> None:
    jobs: list[dict[str, Any]] = [
        {"prompt": f"{PROMPT} {i}", "max_tokens": 16 + i, **({"temperature": 0} if i % 2 else {"seed": i})}
        for i in range(12)
    ]
    client = live.client()

    def ask(job: dict[str, Any]) -> list[int]:
        return ids_of(client.completions.create(model=MODEL, extra_body=IDS, **job).choices[0])

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(ask, jobs))
    for job, ids in zip(jobs, got, strict=True):
        sampling = {k: v for k, v in job.items() if k != "prompt"}
        assert ids == plain(alone, job["prompt"], **{"temperature": 1.0, **sampling}).ids


def test_an_answer_is_the_next_requests_history(live: Live) -> None:
    """As conversations are kept: the message that came back is appended as it is, its nulls included."""
    client = live.client()
    messages: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, temperature=0)
    messages += [first.choices[0].message, {"role": "user", "content": "and the dog"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, temperature=0)
    assert second.choices[0].message.content is not None
