"""The OpenAI API over a served engine. Text becomes tokens here; Triton's `tensorrt_llm` model does the rest."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, SecretStr
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from trtllm_dflash import __version__
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.directory import check_shared_files, read_config
from trtllm_dflash.errors import EngineError
from trtllm_dflash.runtime.intake import Intake
from trtllm_dflash.serving.bodies import Bodies
from trtllm_dflash.serving.client import TritonClient
from trtllm_dflash.serving.event_stream import EventStream, while_connected
from trtllm_dflash.serving.gate import Gate
from trtllm_dflash.serving.openai.door import Door, Pages, broken, refused
from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.jobs import Job
from trtllm_dflash.serving.openai.preparation import Preparation
from trtllm_dflash.text.tokenizer import TextCodec

_CLIENT_GONE = 499  # nginx's status for it; nobody reads the reply, but the access log shows it
_METRICS_SECONDS = 5


class GatewaySettings(BaseModel):
    """Settings of the gateway.

    Attributes:
        engine: the engine directory that Triton serves; its tokenizer and chat template are used here.
        triton_url: Triton's gRPC endpoint, HOST:PORT.
        metrics_url: Triton's metrics, which `/metrics` hands on to those who have the key; None: there is no such page.
        model_name: the model's name in the API; by default the engine's name.
        api_key: required of clients as `Authorization: Bearer ...`; None lets everyone in.
        origins: of web pages, as browsers name them, whose scripts may use the API; those of all others may not.
        max_body_bytes: largest body of a request.
        max_prompt_tokens: longest prompt; by default the engine's limit.
        body_timeout: seconds in which a request's body must have come.
        timeout: seconds for a whole reply, waiting included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Path
    triton_url: str = "127.0.0.1:8001"
    metrics_url: str | None = None
    model_name: str | None = Field(None, min_length=1)
    api_key: SecretStr | None = Field(None, min_length=1)
    origins: tuple[str, ...] = ()
    max_body_bytes: PositiveInt = 4 << 20
    max_prompt_tokens: PositiveInt | None = None
    body_timeout: PositiveFloat = 20.0
    timeout: PositiveFloat = 600.0


def create_app(settings: GatewaySettings, gate: Gate | None = None) -> FastAPI:
    """Makes the gateway as an ASGI application. Triton need not run yet.

    Args:
        gate: by default one that stays open.

    Raises:
        EngineError: the engine directory is not sound, or has no tokenizer.
        SettingsError: a setting contradicts the engine.
    """
    gateway = Gateway(settings)
    gate = gate or Gate()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway.open()
        loop = asyncio.get_running_loop()

        def end_replies() -> None:
            asyncio.run_coroutine_threadsafe(gateway.end_replies(), loop)

        gate.on_shut(end_replies)
        yield
        await gateway.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Door, api_key=settings.api_key, gate=gate, origins=settings.origins)
    if settings.origins:  # before the door: a browser asks whether it may without the key
        app.add_middleware(
            Pages,
            allow_origins=settings.origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(Exception, broken)
    for path, method, endpoint in (
        ("/health", "GET", gateway.health),
        ("/version", "GET", gateway.version),
        ("/metrics", "GET", gateway.metrics),
        ("/tokenize", "POST", gateway.tokenize),
        ("/detokenize", "POST", gateway.detokenize),
        ("/v1/models", "GET", gateway.models),
        ("/v1/models/", "GET", gateway.models),
        ("/v1/models/{name:path}", "GET", gateway.model),
        ("/v1/completions", "POST", gateway.completions),
        ("/v1/chat/completions", "POST", gateway.chat_completions),
        ("/v1/responses", "POST", gateway.responses),
    ):
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    return app


class Gateway:
    """The endpoints of the API, with the client of Triton, tokenizer and settings that they share."""

    _triton: TritonClient

    def __init__(self, settings: GatewaySettings) -> None:
        config = read_config(settings.engine)
        check_shared_files(settings.engine, config)
        codec = TextCodec.load(settings.engine, config.chat_arguments)
        if codec is None:
            raise EngineError(f"{settings.engine}: no tokenizer.json, so no OpenAI gateway; leave out --openai-port")
        self._settings = settings
        self._config: EngineConfig = config
        self._name = settings.model_name or config.name
        intake = Intake(config, codec, settings.max_prompt_tokens)
        self._preparation = Preparation(config, codec, intake, self._name, settings.timeout)
        self._created = int((settings.engine / "config.json").stat().st_mtime)

    def open(self) -> None:
        """Connects to Triton; must be called on the event loop that serves."""
        self._triton = TritonClient(self._settings.triton_url)
        self._bodies = Bodies(self._settings.max_body_bytes, self._settings.body_timeout)

    async def end_replies(self) -> None:
        """Ends every reply with an error, and the connection to Triton."""
        await self._triton.close()

    async def close(self) -> None:
        """Ends every reply, and what made them."""
        await self.end_replies()
        self._bodies.close()

    # -- endpoints -----------------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        """Answers whether a request would be served."""
        if not await self._triton.ready():
            raise ApiError(503, f"Triton at {self._settings.triton_url} is not ready", code="unavailable")
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        """Tells the version of this server."""
        return JSONResponse({"version": __version__})

    async def metrics(self) -> Response:
        """Hands on Triton's metrics, for Prometheus."""
        if self._settings.metrics_url is None:
            raise ApiError(404, "/metrics: no metrics are served here", code="unknown_url")
        try:
            page = await asyncio.to_thread(_fetch, self._settings.metrics_url)
        except OSError:
            raise ApiError(503, "Triton's metrics are away", code="unavailable") from None
        return Response(page, media_type="text/plain; version=0.0.4")

    async def models(self) -> Response:
        """Lists the one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """Describes the one model, by its name."""
        self._preparation.check_name(name)
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Response:
        """Completes a text."""
        return await self._answer(request, self._preparation.completion)

    async def chat_completions(self, request: Request) -> Response:
        """Replies to a conversation."""
        return await self._answer(request, self._preparation.chat)

    async def responses(self, request: Request) -> Response:
        """Replies to a conversation of items."""
        return await self._answer(request, self._preparation.response)

    async def tokenize(self, request: Request) -> Response:
        """Counts the tokens of a prompt or a conversation, and lists them."""
        return await self._convert(request, self._preparation.tokenized)

    async def detokenize(self, request: Request) -> Response:
        """Decodes tokens."""
        return await self._convert(request, self._preparation.detokenized)

    async def _convert(self, request: Request, work: Callable[[bytes], dict[str, object]]) -> Response:
        try:
            return await self._bodies.convert(request, work)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)

    def _model(self) -> dict[str, object]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "trtllm-dflash",
            "max_model_len": self._config.max_seq_len,
        }

    async def _answer(self, request: Request, prepare: Callable[[bytes, str], Job]) -> Response:
        request_id = request.scope["request_id"]
        try:
            job = await self._bodies.process(request, lambda body: prepare(body, request_id))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        if job.stream:
            return EventStream(job.events(self._triton))
        return await while_connected(request.receive, self._whole(job), Response(status_code=_CLIENT_GONE))

    async def _whole(self, job: Job) -> Response:
        return JSONResponse(await job.whole(self._triton))


def _fetch(url: str) -> bytes:
    """Reads a page of this machine, past any proxy that the environment names."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=_METRICS_SECONDS) as page:
        return bytes(page.read())
