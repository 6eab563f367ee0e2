"""The ASGI application: routes, and what stands around them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import JSONResponse, Response

import dspark
from dspark.api import SpeculativeDecoder
from dspark.engine.stats import RequestStats
from dspark.plugins.manager import PluginManager, load_plugins
from dspark.server.answers import ChatWriter, CompletionWriter, Writer
from dspark.server.auth import KeyGate
from dspark.server.bodies import JsonRoute
from dspark.server.chat import chat_defaults
from dspark.server.config import ServerConfig
from dspark.server.errors import ApiError, add_handlers
from dspark.server.limits import BodyLimits
from dspark.server.metrics import RequestCounter
from dspark.server.pieces import Pieces
from dspark.server.prompts import RequestReader, Work
from dspark.server.response import Answer
from dspark.server.schemas import ChatRequest, CompletionRequest, ErrorAnswer, Sampling
from dspark.server.service import Service
from dspark.server.status import Status, StatusStream, finite

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in (
        (400, "A field is wrong; the error names it."),
        (401, "No API key, or an unknown one."),
        (404, "No such model."),
        (408, "The body did not arrive in time."),
        (413, "The body is too large."),
        (429, "The queue is full; Retry-After says when to try again."),
        (500, "A component failed."),
        (503, "No slot in time, or the server is shutting down."),
        (504, "Not finished in time."),
    )
}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}


def create_app(
    decoder: SpeculativeDecoder, config: ServerConfig | None = None, *, plugins: PluginManager | None = None
) -> FastAPI:
    """An application that serves ``decoder``, which nothing else may drive from now on.

    Args:
        decoder: stays the caller's: the application does not close it.
        config: limits and keys; without one there are no keys.
        plugins: whose routes are added; None for those that the decoder was built with.

    Returns:
        the application. ``app.state.service`` is what decodes; call its ``drain`` before stopping the server.
    """
    config = config if config is not None else ServerConfig()
    engine = decoder.engine
    service = Service(decoder, config)
    model = config.model_name or engine.parts.target.name
    chat = chat_defaults(engine, config.template_args)
    status = Status(service, service.monitor, model, list(chat.notes))
    routes = _Routes(service, RequestReader(engine, config, chat), status, model)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="dspark",
        version=dspark.__version__,
        description="Lossless speculative decoding behind OpenAI's interface.",
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service, app.state.config = service, config
    app.router.route_class = JsonRoute
    routes.add_to(app.router)
    add_handlers(app)
    manager = plugins if plugins is not None else engine.plugins
    if manager is None:  # its engine was put together by hand
        manager = load_plugins(engine.config)
    manager.register_routes(app)
    app.add_middleware(BodyLimits, max_bytes=config.max_body_bytes, timeout=config.body_timeout)
    app.add_middleware(KeyGate, keys=config.api_keys)
    app.add_middleware(RequestCounter, routes=lambda: app.routes, requests=service.metrics.requests)
    return app


class _Routes:
    """The handlers and what they share."""

    def __init__(self, service: Service, reader: RequestReader, status: Status, model: str) -> None:
        self._service, self._reader, self._status, self._model = service, reader, status, model
        self._pieces = Pieces(service.engine.tokenizer)
        self._created = int(time.time())

    def add_to(self, router: APIRouter) -> None:
        """Add all of them."""
        for path, handler, tag in (
            ("/v1/chat/completions", self.chat, "Answer a chat."),
            ("/v1/completions", self.completion, "Continue a prompt."),
        ):
            router.add_api_route(
                path, handler, methods=["POST"], summary=tag, responses=_ERRORS, response_model=None,
                response_class=JSONResponse,
            )  # fmt: skip
        get: Sequence[tuple[str, Any, str]] = (
            ("/v1/models", self.models, "The served model."),
            ("/v1/models/{model:path}", self.one_model, "The served model, by name."),
            ("/health", self.health, "Whether requests are taken."),
            ("/metrics", self.metrics, "Prometheus metrics."),
            ("/status", self.status, "What the scheduler is doing now."),
        )
        for path, handler, tag in get:
            some: dict[int | str, dict[str, Any]] = {k: v for k, v in _ERRORS.items() if k in (401, 404, 503)}
            router.add_api_route(path, handler, methods=["GET"], summary=tag, response_model=None, responses=some)
        router.add_api_route("/status/stream", self.status_stream, methods=["GET"], include_in_schema=False)
        for path in _PAGE:
            router.add_api_route(path, _page(path), methods=["GET"], include_in_schema=False, response_model=None)

    async def chat(self, body: ChatRequest) -> Response:
        arrived = time.perf_counter()
        return await self._answer(ChatWriter, self._reader.chat, body, bool(body.logprobs), arrived)

    async def completion(self, body: CompletionRequest) -> Response:
        arrived = time.perf_counter()
        logprobs = body.logprobs is not None
        return await self._answer(CompletionWriter, self._reader.completion, body, logprobs, arrived)

    async def _answer(self, kind: type[Writer], read: Any, body: Sampling, logprobs: bool, arrived: float) -> Response:
        self._check_model(body.model)
        work: Work = await self._service.read(read, body)
        stats = [RequestStats() for _ in work.choices]
        writer = kind(
            self._model, self._pieces, stats, work.prompt_tokens, logprobs=logprobs,
            token_ids=bool(body.return_token_ids), echoes=work.echoes, samples=work.samples,
        )  # fmt: skip
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return Answer(
            self._service, work, writer, arrived, stream=bool(body.stream), with_usage=usage
        )  # decodes when it is sent

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def one_model(self, model: str) -> Response:
        self._check_model(model)
        return JSONResponse(self._describe())

    async def health(self) -> Response:
        failure = self._service.failure
        if failure is not None:
            raise ApiError(503, failure, code="engine_unavailable")
        if self._service.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(generate_latest(self._service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def status(self) -> Response:
        return JSONResponse(finite(self._status.read()))

    async def status_stream(self) -> Response:
        if self._status.watchers >= self._service.config.max_watchers:
            raise ApiError(503, f"{self._status.watchers} pages watch already", code="too_many_watchers")
        return StatusStream(self._status, self._service)

    def _check_model(self, name: str) -> None:
        if name not in (self._model, self._service.engine.parts.target.name):
            raise ApiError(
                404,
                f"model: there is no {name!r}; this server has {self._model!r}",
                param="model",
                code="model_not_found",
            )

    def _describe(self) -> dict[str, Any]:
        engine = self._service.engine
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "dspark",
            "dspark": {
                "target": engine.parts.target.name,
                "drafter": engine.parts.name("drafter"),
                "max_len": engine.max_len,
            },
        }


def _page(path: str) -> Any:
    name, media = _PAGE[path]
    content = resources.files("dspark.server").joinpath("static", name).read_bytes()

    async def page() -> Response:
        return Response(content, media_type=media, headers={"Content-Security-Policy": CSP, "X-Frame-Options": "DENY"})

    return page
