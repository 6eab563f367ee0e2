"""``ray_serve_app``: a replica by itself, and two of them on a local cluster. Skipped where Ray is not installed."""

from __future__ import annotations

import importlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from dspark import DSparkError, SpeculativeDecoder

ray = pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore:Using extra keyword arguments"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [f"the {word} by the sea" for word in ("quick", "brown", "fox", "lazy", "dog", "white", "house", "small")]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example by a name that replicas can import."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("ray_serve_app")


def test_settings_become_a_deployment(example: ModuleType) -> None:
    made = example.build({"max_slots": 8, "max_replicas": 6, "gpus": 1})._bound_deployment
    assert made.max_ongoing_requests == 16
    assert made.ray_actor_options["num_gpus"] == 1
    with pytest.raises(ValueError, match="targt"):
        example.build({"targt": "x"})


@pytest.mark.asyncio
async def test_a_failure_in_mid_stream_is_the_last_line(example: ModuleType) -> None:
    chunk = SimpleNamespace(text="a", ids=[1], accepted=0, finish_reason=None)

    async def broken() -> AsyncIterator[Any]:
        yield chunk
        raise DSparkError("a component failed")

    said = [json.loads(line) async for line in example.lines(chunk, broken())]
    assert [line.get("text") for line in said] == ["a", "a", None]
    assert said[-1] == {"error": "a component failed"}


@pytest.mark.asyncio
async def test_a_replica_answers(
    example: ModuleType, tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class as Ray wraps it, called as its proxy does; there is no cluster."""
    from ray import serve

    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    replica = example.build({})._bound_deployment.func_or_class
    made = replica.__new__(replica)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"), servable_object=made)
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    await replica.__init__(made, {"target": tiny_folder, "drafter": "ngram", "max_slots": 2, "max_len": 256})
    made.check_health()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(made.app), base_url="http://replica") as client:
        answer = await client.post("/generate", json={"prompt": PROMPTS[0], "max_tokens": 24})
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Replica"] == "one"
        said = [json.loads(line) for line in answer.text.splitlines()]
        refused = await client.post("/generate", json={"prompt": "the " * 2000})
        assert refused.status_code == 422
        assert "256" in refused.json()["detail"]
    made.decoder.close()
    with SpeculativeDecoder.from_pretrained(tiny_folder, "none", cost=None, max_slots=1, max_len=256) as plain:
        assert "".join(line["text"] for line in said) == plain.generate(PROMPTS[0], max_tokens=24)[0].text
    with pytest.raises(RuntimeError, match="closed"):
        made.check_health()


@pytest.fixture(scope="module")
def small(tiny_folder: str) -> dict[str, Any]:
    """Settings of a replica that two cores have room for."""
    return {"target": tiny_folder, "drafter": "ngram", "max_slots": 2, "max_len": 256, "cpus": 0.5}


@pytest.fixture(scope="module")
def url(small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        "PYTHONPATH": os.pathsep.join((str(EXAMPLES), str(EXAMPLES.parent))),
        "DSPARK_CACHE": str(tmp_path_factory.mktemp("cache")),
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray_serve_app import build  # by a name that replicas can import

        ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables}, log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build({**small, "min_replicas": 2, "max_replicas": 2}))
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def ask(url: str, **body: Any) -> tuple[str, str, int]:
    """Text, replica and number of chunks."""
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        said = [json.loads(line) for line in answer.iter_lines()]
    assert said[-1]["finish"] in ("stop", "length")
    return "".join(line["text"] for line in said), answer.headers["X-Replica"], len(said)


@pytest.mark.slow
def test_two_replicas_answer_as_one_would(url: str, tiny_folder: str) -> None:
    with SpeculativeDecoder.from_pretrained(tiny_folder, "none", cost=None, max_slots=8, max_len=256) as plain:
        greedy = [r.text for r in plain.generate(PROMPTS, max_tokens=24)]
        seeded = [r.text for r in plain.generate(PROMPTS, max_tokens=24, temperature=1.0, seed=3)]
    with ThreadPoolExecutor(16) as pool:
        first = list(pool.map(lambda p: ask(url, prompt=p, max_tokens=24), PROMPTS * 2))
        second = list(pool.map(lambda p: ask(url, prompt=p, max_tokens=24, temperature=1.0, seed=3), PROMPTS * 2))
    assert [text for text, _, _ in first] == greedy * 2
    assert [text for text, _, _ in second] == seeded * 2
    assert len({replica for _, replica, _ in first + second}) == 2
    assert max(chunks for _, _, chunks in first) > 2


@pytest.mark.slow
def test_what_is_wrong_is_a_4xx_and_who_leaves_is_forgotten(url: str) -> None:
    assert httpx.post(f"{url}/generate", json={"prompt": "x", "temprature": 1}).status_code == 422
    assert httpx.post(f"{url}/generate", json={"prompt": "the " * 2000}).status_code == 422
    for _ in range(6):  # more than there are slots on both replicas
        with httpx.stream("POST", f"{url}/generate", json={"prompt": "the sea", "max_tokens": 200}) as answer:
            next(answer.iter_lines())
    assert ask(url, prompt="the sea", max_tokens=4)[2] >= 1


@pytest.mark.slow
def test_load_adds_a_replica_and_idleness_takes_it_away(
    url: str, small: dict[str, Any], example: ModuleType, tiny_folder: str
) -> None:
    from ray import serve

    with SpeculativeDecoder.from_pretrained(tiny_folder, "none", cost=None, max_slots=1, max_len=256) as plain:
        expected = plain.generate(PROMPTS[0], max_tokens=200)[0].text
    delays = {"upscale_delay_s": 1, "downscale_delay_s": 2}
    app = example.build({**small, **delays, "min_replicas": 1, "max_replicas": 2})
    serve.run(app, name="scaled", route_prefix="/scaled")
    try:
        assert replicas("scaled") == 1
        answered: set[str] = set()
        ends = time.monotonic() + 240
        with ThreadPoolExecutor(12) as pool:  # six times what one replica has slots for
            while len(answered) < 2:
                assert time.monotonic() < ends, "no second replica came"
                waves = [pool.submit(ask, f"{url}/scaled", prompt=PROMPTS[0], max_tokens=200) for _ in range(48)]
                for wave in waves:
                    text, name, _ = wave.result()
                    assert text == expected
                    answered.add(name)
        while replicas("scaled") > 1:
            assert time.monotonic() < ends, "the second replica stayed"
            time.sleep(0.5)
        assert ask(f"{url}/scaled", prompt=PROMPTS[0], max_tokens=200)[0] == expected
    finally:
        serve.delete("scaled")


def replicas(name: str) -> int:
    """Replicas of an application that run."""
    from ray import serve

    (deployment,) = serve.status().applications[name].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)
