"""A server of your own: one route around ``SpeculativeDecoder.astream``.

    pip install "dspark[server]"
    python examples/embed_fastapi.py --target smollm2
    curl -N localhost:8000/generate -H "content-type: application/json" -d '{"prompt": "The sky is"}'

All requests share one engine and are decoded together. Where OpenAI's interface will do, ``dspark serve`` has it, with
keys, a bounded queue, time limits and metrics.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

import typer
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from dspark import DSparkError, RequestError, SpeculativeDecoder
from dspark.engine.state import Chunk


class Ask(BaseModel):
    """What a client sends; anything else is refused with 422."""

    model_config = ConfigDict(extra="forbid")
    prompt: str = Field(min_length=1, max_length=20_000)
    max_tokens: int = Field(128, ge=1, le=1024)
    temperature: float = Field(0.0, ge=0, le=2)
    seed: int | None = Field(None, ge=0, lt=2**64)


def create(decoder: SpeculativeDecoder) -> FastAPI:
    """An application around a decoder, which nothing else may drive from now on."""
    app = FastAPI(title="a server of one's own")

    @app.post("/generate")
    async def generate(ask: Ask) -> StreamingResponse:
        sampling = ask.model_dump(exclude={"prompt"})
        chunks = cast("AsyncGenerator[Chunk]", decoder.astream(ask.prompt, **sampling))
        try:
            first = await anext(chunks)  # a refusal is an HTTP error, not half a stream
        except RequestError as error:
            raise HTTPException(422, str(error)) from error
        except DSparkError as error:  # the engine's fault, not the request's
            raise HTTPException(503, str(error)) from error
        return StreamingResponse(lines(first, chunks), media_type="application/x-ndjson")

    @app.get("/health")
    def health() -> dict[str, str]:
        if decoder.front.failure is not None:
            raise HTTPException(503, str(decoder.front.failure))
        return {"status": "ok"}

    return app


async def lines(first: Chunk, rest: AsyncGenerator[Chunk]) -> AsyncIterator[str]:
    """One JSON object a step: its text, and how many of its tokens were drafted and accepted."""
    # A client that disconnects cancels this generator; closing `rest` aborts the request and frees its slot.
    async with contextlib.aclosing(rest):
        yield as_line(first)
        try:
            async for chunk in rest:
                yield as_line(chunk)
        except DSparkError as error:  # a component failed: the status is sent, so the last line says it
            yield json.dumps({"error": str(error)}) + "\n"


def as_line(chunk: Chunk) -> str:
    said = {"text": chunk.text, "tokens": len(chunk.ids), "accepted": chunk.accepted, "finish": chunk.finish_reason}
    return json.dumps(said) + "\n"


def main(target: str = "smollm2", drafter: str = "auto", host: str = "127.0.0.1", port: int = 8000) -> None:
    with SpeculativeDecoder.from_pretrained(target, drafter) as decoder:
        uvicorn.run(create(decoder), host=host, port=port)


if __name__ == "__main__":
    typer.run(main)
