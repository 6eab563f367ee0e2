"""``response_format``: valid whatever the model says, under drafts as without, and refused where it can't be kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jsonschema
import llguidance.hf
import numpy as np
import pydantic
import pytest
import torch

from benchmarks.schemas import SCHEMAS, response_format
from dspark.api import SpeculativeDecoder
from dspark.errors import DSparkError
from dspark.server.errors import ApiError
from dspark.server.grammar import GrammarProcessor, Grammars
from dspark.server.prompts import RequestReader
from dspark.server.schemas import ResponseFormat
from dspark.types import DraftBlock
from tests.server.conftest import MODEL, Live, start

V = 300


@pytest.fixture(scope="module")
def grammars(tiny_tokenizer: Any) -> Grammars:
    return Grammars(tiny_tokenizer, V, (0,), 1 << 16)


def processor(grammars: Grammars, schema: dict[str, Any]) -> GrammarProcessor:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = grammars.processor(ResponseFormat.model_validate(wanted))
    assert found is not None
    return found


def allowed(one: GrammarProcessor) -> set[int]:
    return set(torch.isfinite(one.process(torch.zeros(V))).nonzero().flatten().tolist())


def walk(one: GrammarProcessor, rng: np.random.Generator, most: int = 300) -> list[int]:
    """Random allowed tokens until the end."""
    ids: list[int] = []
    while len(ids) < most:
        choices = sorted(allowed(one))
        token = int(rng.choice(choices))
        ids.append(token)
        if token == 0:
            return ids
        one.advance(token)
    raise AssertionError(f"no end after {most} tokens")


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_walk_is_valid(grammars: Grammars, tiny_tokenizer: Any, name: str) -> None:
    for seed in range(5):
        ids = walk(processor(grammars, SCHEMAS[name]), np.random.default_rng(seed))
        jsonschema.validate(json.loads(tiny_tokenizer.decode(ids[:-1])), SCHEMAS[name])


def test_a_fork_leaves_its_origin_where_it_was(grammars: Grammars) -> None:
    one = processor(grammars, SCHEMAS["person"])
    rng = np.random.default_rng(0)
    for _ in range(20):
        before = allowed(one)
        fork = one.fork()
        for _ in range(3):
            choices = sorted(allowed(fork) - {0})
            if not choices:
                break
            fork.advance(int(rng.choice(choices)))
        assert allowed(one) == before
        token = int(rng.choice(sorted(before)))
        if token == 0:
            break
        one.advance(token)


def test_an_illegal_token_is_an_error(grammars: Grammars) -> None:
    one = processor(grammars, SCHEMAS["person"])
    wrong = next(i for i in range(2, V) if i not in allowed(one))
    with pytest.raises(DSparkError, match=f"does not allow token {wrong}"):
        one.advance(wrong)


def test_wider_logits_are_masked_to_their_end(tiny_tokenizer: Any) -> None:
    """Targets pad their vocabulary; what no token stands for is never allowed."""
    one = processor(Grammars(tiny_tokenizer, V + 20, (0,), 1 << 16), SCHEMAS["person"])
    assert not torch.isfinite(one.process(torch.zeros(V + 20))[V:]).any()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nothing"}, "nothing"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "object", "properties": 3}, "properties"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "uniqueItems"),
        ({"enum": ["x" * 70_000]}, "at most"),
    ],
)
def test_what_can_not_be_kept_is_refused(grammars: Grammars, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        processor(grammars, schema)
    assert refused.value.status == 400
    assert refused.value.param == "response_format.json_schema.schema"
    assert message.lower() in refused.value.message.lower()


@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_a_schema_beside_another_type_is_refused(grammars: Grammars, kind: str) -> None:
    """It would not be kept, and who sent it believes that it is."""
    wanted = {"type": kind, "json_schema": {"name": "x", "schema": SCHEMAS["person"]}}
    with pytest.raises(ApiError, match=f"only with type json_schema, and it is {kind}") as refused:
        grammars.processor(ResponseFormat.model_validate(wanted))
    assert refused.value.param == "response_format.json_schema"


def test_a_tokenizer_is_needed() -> None:
    with pytest.raises(ApiError, match="no tokenizer"):
        processor(Grammars(None, V, (0,), 1 << 16), {"type": "object"})


def test_the_tokenizer_is_wrapped_before_requests_are_taken(
    make_decoder: Callable[..., SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds in which no thread of Python runs; no request may wait for that, and it is done once."""
    happened: list[str] = []
    wrap, read = llguidance.hf.from_tokenizer, RequestReader.completion

    def wrapping(*args: Any, **more: Any) -> Any:
        happened.append("wrapped")
        return wrap(*args, **more)

    def reading(self: RequestReader, body: Any) -> Any:
        happened.append("request")
        return read(self, body)

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", wrapping)
    monkeypatch.setattr(RequestReader, "completion", reading)
    live = start(make_decoder())
    happened.append("started")
    try:
        for _ in range(2):
            body = {"model": MODEL, "prompt": "a", "max_tokens": 4, "response_format": {"type": "json_object"}}
            assert live.post("/v1/completions", body).status_code == 200
    finally:
        live.stop()
    assert happened == ["wrapped", "started", "request", "request"]


def test_an_unfit_tokenizer_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails costs as much as what succeeds, so it is not tried for every request."""
    tried: list[Any] = []

    def wrapping(tokenizer: Any, **more: Any) -> Any:
        tried.append(tokenizer)
        raise ValueError("Only fast tokenizers are supported")

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", wrapping)
    unfit = Grammars("slow", V, (0,), 1 << 16)
    for _ in range(3):
        with pytest.raises(ApiError, match="response_format: not with this tokenizer: Only fast"):
            processor(unfit, {"type": "object"})
    assert tried == ["slow"]


# through the engine


class Guess:
    """Drafts what the target says under the grammar, with mistakes, among them tokens that the grammar forbids."""

    tap_layers: tuple[int, ...] = ()
    max_gamma = None
    default_gamma = 4

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        from dspark.capabilities import DrafterCapabilities

        self.capabilities = DrafterCapabilities(point_mass=True)
        self.answers = answers

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        rows, lens = [], []
        for request in batch.requests:
            ids = list(request.ids)
            known = self.answers.get(tuple(ids[: request.prompt_len]), [])
            draft = known[len(ids) - request.prompt_len :][: batch.gamma]
            draft += [5] * (batch.gamma - len(draft))
            if len(ids) % 3 == 0:
                draft[2] = 7
            rows.append(draft)
            lens.append(min(batch.gamma, request.max_draft))
        return sampler.point_mass(torch.tensor(rows), np.array(lens))  # type: ignore[no-any-return]

    def commit(self, committed: Any) -> None: ...

    def release(self, slot: int, generation: int) -> None: ...


@pytest.fixture(scope="module")
def drafting(serving: Callable[..., Any], make_decoder: Callable[..., SpeculativeDecoder]) -> Iterator[Live]:
    """A server whose drafter knows the answers of ``answers``."""
    decoder = make_decoder(max_len=512)
    decoder.engine.parts.drafter = Guess({})
    with serving(decoder=decoder) as live:
        yield live


@pytest.fixture(scope="module")
def undrafted(make_decoder: Callable[..., SpeculativeDecoder]) -> Iterator[SpeculativeDecoder]:
    decoder = make_decoder(drafter="none", max_slots=1, max_len=512)
    yield decoder
    decoder.close()


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_drafts_change_nothing(
    drafting: Live, undrafted: SpeculativeDecoder, grammars: Grammars, name: str, sampling: dict[str, Any]
) -> None:
    prompt = [5, 6, 7, 8]
    plain = undrafted.generate(
        [prompt], max_tokens=300, logits_processors=(processor(grammars, SCHEMAS[name]),), **sampling
    )[0]
    drafter: Any = drafting.decoder.engine.parts.drafter
    drafter.answers[tuple(prompt)] = plain.ids
    answer = drafting.client().completions.create(
        model=MODEL, prompt=prompt, max_tokens=300,
        extra_body={"response_format": response_format(name), "return_token_ids": True}, **sampling,
    )  # fmt: skip
    choice: Any = answer.choices[0]
    assert choice.token_ids == plain.ids
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.text), SCHEMAS[name])
    usage: Any = answer.usage
    assert usage.dspark["accepted_tokens"] > 0 or len(plain.ids) < 4
    drafting.settled()


def test_unseeded_samples_are_valid(drafting: Live) -> None:
    answer = drafting.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=200, n=4,
        response_format=response_format("person"),  # type: ignore[arg-type]
    )  # fmt: skip
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMAS["person"])


class Leaf(pydantic.BaseModel):
    """Part of a :class:`Tree`."""

    kind: Literal["a", "b"]
    size: bool | None


class Tree(pydantic.BaseModel):
    """What the official client makes a strict schema with ``$defs`` of."""

    left: Leaf
    right: Leaf


def test_the_official_clients_own_models(drafting: Live) -> None:
    """``parse`` with several choices, and ``stream`` with log-probabilities: texts are those of the models."""
    client = drafting.client()
    asked: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "response_format": Tree,
    }  # fmt: skip
    parsed = client.chat.completions.parse(**asked, n=3, seed=1)
    assert [isinstance(c.message.parsed, Tree) for c in parsed.choices] == [True] * 3
    with client.chat.completions.stream(**asked, seed=1, logprobs=True, top_logprobs=2) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert isinstance(choice.message.parsed, Tree)
    raw = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert raw.startswith((choice.message.content or "?").encode())  # and the token of the end


def test_a_stop_string_cuts_under_a_grammar(drafting: Live) -> None:
    body = {
        "model": MODEL, "prompt": "a", "max_tokens": 200, "temperature": 0, "stop": ['"age"'],
        "response_format": response_format("person"),
    }  # fmt: skip
    choice = drafting.post("/v1/completions", body).json()["choices"][0]
    whole = drafting.post("/v1/completions", {**body, "stop": None}).json()["choices"][0]["text"]
    assert '"age"' in whole
    assert choice["text"] == whole[: whole.index('"age"')]
    assert choice["finish_reason"] == "stop"


def test_any_object(drafting: Live) -> None:
    answer = drafting.client().completions.create(
        model=MODEL, prompt="a", max_tokens=200, seed=1, extra_body={"response_format": {"type": "json_object"}}
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].text), dict)
    assert answer.choices[0].text.startswith("{")


@pytest.mark.parametrize(("name", "value"), [("min_tokens", 2), ("ignore_eos", True)])
def test_what_contradicts_the_grammar_is_refused(drafting: Live, name: str, value: Any) -> None:
    answer = drafting.post(
        "/v1/completions",
        {"model": MODEL, "prompt": "a", "max_tokens": 9, "response_format": {"type": "json_object"}, name: value},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
