"""Many replicas on many machines, by Ray Serve: each replica is a decoder, Ray routes, scales and restarts.

    pip install "dspark[ray]"
    cd examples
    serve run ray_serve_app:build target=Qwen/Qwen3-4B drafter=auto gpus=1 max_replicas=8
    curl -N localhost:8000/generate -H "content-type: application/json" -d '{"prompt": "The sky is"}'

A cluster of several machines is Ray's affair (``ray start``, KubeRay): this file stays as it is. Answers do not depend
on the replica: greedy and seeded requests get the same tokens from each, up to rounding where machines differ. For
OpenAI's interface, hand ``serve.ingress`` a function that returns ``dspark.server.create_app(decoder)``.
"""

# Ray takes a copy of the application where the class is made, and ships it. So what routes use is defined above the
# class, and annotations are types, not strings: no "from __future__ import annotations".
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from ray import serve

app = FastAPI(title="dspark on Ray Serve")


class Settings(BaseModel):
    """Arguments of ``serve run``, as KEY=VALUE; or ``args`` of the application in a Serve config file."""

    model_config = ConfigDict(extra="forbid")
    target: str = "smollm2"
    drafter: str = "auto"
    max_slots: int = 16
    max_len: int = 4096
    gpus: float = 0.0
    cpus: float = 1.0
    min_replicas: int = 1
    max_replicas: int = 4
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0


class Ask(BaseModel):
    """What a client sends; anything else is refused with 422."""

    model_config = ConfigDict(extra="forbid")
    prompt: str = Field(min_length=1, max_length=20_000)
    max_tokens: int = Field(128, ge=1, le=1024)
    temperature: float = Field(0.0, ge=0, le=2)
    seed: int | None = Field(None, ge=0, lt=2**64)


async def lines(first: Any, rest: AsyncGenerator[Any]) -> AsyncIterator[str]:
    """One JSON object a step. When a client leaves, Ray cancels this, and the request's slot becomes free."""
    from dspark import DSparkError

    async with contextlib.aclosing(rest):
        yield as_line(first)
        try:
            async for chunk in rest:
                yield as_line(chunk)
        except DSparkError as error:  # a component failed: the status is sent, so the last line says it
            yield json.dumps({"error": str(error)}) + "\n"


def as_line(chunk: Any) -> str:
    said = {"text": chunk.text, "tokens": len(chunk.ids), "accepted": chunk.accepted, "finish": chunk.finish_reason}
    return json.dumps(said) + "\n"


@serve.deployment
@serve.ingress(app)
class Replica:
    """One decoder, in a process of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from dspark import SpeculativeDecoder  # here, not above: the driver needs no torch

        chosen = Settings(**settings)
        self.decoder = SpeculativeDecoder.from_pretrained(
            chosen.target, chosen.drafter, max_slots=chosen.max_slots, max_len=chosen.max_len
        )
        self.name = serve.get_replica_context().replica_id.unique_id

    def check_health(self) -> None:
        """Ray asks now and then, and replaces a replica that raises."""
        if self.decoder.front.failure is not None:
            raise RuntimeError(str(self.decoder.front.failure))

    @app.post("/generate")
    async def generate(self, ask: Ask) -> StreamingResponse:
        from dspark import DSparkError, RequestError

        chunks = self.decoder.astream(ask.prompt, **ask.model_dump(exclude={"prompt"}))
        try:
            first = await anext(chunks)  # a refusal is an HTTP error, not half a stream
        except RequestError as error:
            raise HTTPException(422, str(error)) from error
        except DSparkError as error:  # the engine's fault, not the request's
            raise HTTPException(503, str(error)) from error
        headers = {"X-Replica": self.name}
        return StreamingResponse(lines(first, chunks), media_type="application/x-ndjson", headers=headers)


def build(args: dict[str, Any]) -> serve.Application:
    """The application, for ``serve run`` and ``serve deploy``."""
    settings = Settings(**args)
    return Replica.options(
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        # More than slots: the next request is there when a slot becomes free. Beyond that Serve keeps them, or, above
        # max_queued_requests, answers 503.
        max_ongoing_requests=2 * settings.max_slots,
        max_queued_requests=64 * settings.max_slots,
        autoscaling_config={
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            # A batch is cheaper than a replica: add one when slots are nearly full.
            "target_ongoing_requests": max(1, round(0.75 * settings.max_slots)),
            "upscale_delay_s": settings.upscale_delay_s,
            "downscale_delay_s": settings.downscale_delay_s,
        },
        graceful_shutdown_timeout_s=120,  # streams that run may finish
    ).bind(settings.model_dump())
