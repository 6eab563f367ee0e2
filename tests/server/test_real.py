"""The real SmolLM2 behind the official client: chats that read like one, exact under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.prompts import OWN, load_prompts
from dspark.api import SpeculativeDecoder
from dspark.server import ServerConfig
from tests.server.conftest import Live

pytestmark = pytest.mark.real

TOKENS = 24


def real(**settings: Any) -> SpeculativeDecoder:
    settings = {"cost": None, "max_len": 512, **settings}
    return SpeculativeDecoder.from_pretrained("smollm2", dtype="float32", device="cpu", **settings)


@pytest.fixture(scope="module")
def smollm2(serving: Callable[..., Any]) -> Iterator[Live]:
    with serving(ServerConfig(model_name="smollm2"), decoder=real(drafter="ngram", max_slots=4)) as live:
        yield live


def test_chats_are_plain_decodings_in_a_crowd(smollm2: Live) -> None:
    chats: list[Any] = [[{"role": "user", "content": p.text[:300]}] for p in load_prompts(4, OWN)]
    sampling: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 4}] * 2
    client = smollm2.client()

    def ask(job: Any) -> Any:
        messages, how = job
        return client.chat.completions.create(
            model="smollm2", messages=messages, max_tokens=TOKENS, extra_body={"return_token_ids": True}, **how
        )

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, zip(chats, sampling, strict=True)))
    alone = real(drafter="none", max_slots=1)
    for messages, how, answer in zip(chats, sampling, answers, strict=True):
        expected = alone.generate([messages], max_tokens=TOKENS, **how)[0]
        assert answer.choices[0].model_extra["token_ids"] == expected.ids
        assert answer.choices[0].message.content == expected.text
    alone.close()
    smollm2.settled()


def test_it_knows_a_capital(smollm2: Live) -> None:
    text = ""
    for event in smollm2.client().chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=20,
        temperature=0, stream=True,
    ):  # fmt: skip
        text += event.choices[0].delta.content or ""
    assert "Paris" in text
