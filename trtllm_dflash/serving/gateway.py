"""The OpenAI API over a served engine. Text becomes tokens here; Triton's `tensorrt_llm` model does the rest."""

import asyncio
import inspect
import logging
import secrets
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, SecretStr
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from transformers import PreTrainedTokenizerFast

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.directory import check_shared_files, read_config
from trtllm_dflash.errors import (
    EngineError,
    LongPromptError,
    RequestError,
)
from trtllm_dflash.runtime.intake import Intake, Prompt
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.serving.bodies import Bodies
from trtllm_dflash.serving.client import Piece, TokenRequest, TritonClient
from trtllm_dflash.serving.event_stream import EventStream, while_connected
from trtllm_dflash.serving.gate import Gate
from trtllm_dflash.serving.openai.door import Door, broken, refused
from trtllm_dflash.serving.openai.errors import ApiError, as_api_error
from trtllm_dflash.serving.openai.replies import ReplyForm, Usage, error_event
from trtllm_dflash.serving.openai.requests import ChatRequest, CommonRequest, CompletionRequest, parse
from trtllm_dflash.serving.parameters import LONGEST_STOP, MOST_STOPS
from trtllm_dflash.text.stream import TextStream
from trtllm_dflash.text.tokenizer import TextCodec

_log = logging.getLogger(__name__)

_CLIENT_GONE = 499  # nginx's status for it; nobody reads the reply, but the access log shows it
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat's is what the context leaves
_METRICS_SECONDS = 5


# Keys refused in chat_template_kwargs: the renderer's own arguments, another template among them.
_RENDERER_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)


class GatewaySettings(BaseModel):
    """Settings of the gateway.

    Attributes:
        engine: the engine directory that Triton serves; its tokenizer and chat template are used here.
        triton_url: Triton's gRPC endpoint, HOST:PORT.
        metrics_url: Triton's metrics, which `/metrics` hands on to those who have the key; None: there is no such page.
        model_name: the model's name in the API; by default the engine's name.
        api_key: required of clients as `Authorization: Bearer ...`; None lets everyone in.
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
    app.add_middleware(Door, api_key=settings.api_key, gate=gate)
    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(Exception, broken)
    for path, method, endpoint in (
        ("/health", "GET", gateway.health),
        ("/metrics", "GET", gateway.metrics),
        ("/v1/models", "GET", gateway.models),
        ("/v1/models/{name:path}", "GET", gateway.model),
        ("/v1/completions", "POST", gateway.completions),
        ("/v1/chat/completions", "POST", gateway.chat_completions),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


@dataclass(frozen=True)
class _Job:
    """A request, ready for Triton, and the form of its reply.

    Attributes:
        request: of its first prompt.
        others: of the prompts after it.
    """

    request: TokenRequest
    form: ReplyForm
    stream: bool
    reply: TextStream | None = None  # what a chat's tokens mean; None: their text is the reply
    others: tuple[TokenRequest, ...] = ()

    def text(self, piece: Piece) -> str:
        """Adds a piece to the reply; returns its new text."""
        if self.reply is None:
            return piece.text
        for token in piece.token_ids:
            self.reply.push(token)
        if piece.finish_reason:
            self.reply.finish()
        return self.reply.release()

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text that the reader sees; the server does not look for it."""
        return self.reply is not None and self.reply.stopped


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
        self._codec = codec
        self._intake = Intake(config, codec, settings.max_prompt_tokens)
        self._name = settings.model_name or config.name
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
        self._check_name(name)
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Response:
        """Completes a text."""
        return await self._answer(request, self._completion_job)

    async def chat_completions(self, request: Request) -> Response:
        """Replies to a conversation."""
        return await self._answer(request, self._chat_job)

    def _model(self) -> dict[str, object]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "trtllm-dflash",
            "max_model_len": self._config.max_seq_len,
        }

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise ApiError(404, f"the model {name!r} does not exist; {self._name!r} does", "model", "model_not_found")

    # -- from a body to a job; on a thread, so that a long prompt holds up no stream --------------------------------

    def _completion_job(self, body: bytes, request_id: str) -> _Job:
        asked = parse(CompletionRequest, body)
        self._check_name(asked.model)
        limit = asked.max_tokens or _COMPLETION_TOKENS
        first, *others = (
            self._job(asked, self._tokens(prompt, "prompt"), limit, request_id) for prompt in asked.prompt
        )
        return replace(first, others=tuple(job.request for job in others))

    def _chat_job(self, body: bytes, request_id: str) -> _Job:
        asked = parse(ChatRequest, body)
        self._check_name(asked.model)
        taken = sorted(_RENDERER_ARGUMENTS & asked.chat_template_kwargs.keys())
        if taken:
            param = f"chat_template_kwargs.{taken[0]}"
            raise ApiError(400, f"{param}: not a variable of the chat template", param)
        messages = [message.for_template() for message in asked.messages]
        ids = self._tokens(messages, "messages", asked.chat_template_kwargs)
        limit = asked.max_completion_tokens or asked.max_tokens or self._config.max_seq_len - len(ids)
        return self._job(asked, ids, limit, request_id)

    def _tokens(self, prompt: Prompt, param: str, chat_arguments: Mapping[str, Any] | None = None) -> list[int]:
        try:
            return self._intake.encode(prompt, chat_arguments)
        except RequestError as error:
            code = "context_length_exceeded" if isinstance(error, LongPromptError) else None
            raise ApiError(400, f"{param}: {error.reason}", param, code) from None

    def _job(self, asked: CommonRequest, ids: list[int], max_tokens: int, request_id: str) -> _Job:
        temperature = asked.temperature
        if temperature is None:
            temperature = 1.0 if self._config.sampling else 0.0
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=asked.seed if asked.seed is not None else secrets.randbelow(2**63),
            stop=tuple(asked.stop),
            ignore_eos=asked.ignore_eos,
        )
        chat = isinstance(asked, ChatRequest)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        reply = None
        if chat and self._codec.sets_thinking_apart:
            if len(params.stop) > MOST_STOPS or max(map(len, params.stop), default=0) > LONGEST_STOP:
                raise ApiError(400, f"stop: at most {MOST_STOPS}, of {LONGEST_STOP} characters each, are taken", "stop")
            reply = self._codec.reply(params.stop)
            params = params.model_copy(update={"stop": ()})  # which the server would find in the thinking
        return _Job(
            TokenRequest(
                ids, params, asked.draft, asked.priority, self._settings.timeout, request_id, reply is not None
            ),
            ReplyForm(chat, name, int(time.time()), self._name, asked.include_usage),
            asked.stream,
            reply,
        )

    # -- from a job to a reply ---------------------------------------------------------------------------------------

    async def _answer(self, request: Request, prepare: Callable[[bytes, str], _Job]) -> Response:
        request_id = request.scope["request_id"]
        try:
            job = await self._bodies.process(request, lambda body: prepare(body, request_id))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        if job.stream:
            return EventStream(self._events(job))
        return await while_connected(request.receive, self._whole(job), Response(status_code=_CLIENT_GONE))

    async def _whole(self, job: _Job) -> Response:
        tasks = [asyncio.create_task(self._reply(job, request)) for request in (job.request, *job.others)]
        try:
            replies = await asyncio.gather(*tasks)
        except Exception as error:
            raise as_api_error(error, job.request.request_id) from None
        finally:
            for task in tasks:  # where one has failed, nobody reads the others
                task.cancel()
        first, *others = (usage for _, usage in replies)
        return JSONResponse(job.form.whole([reply for reply, _ in replies], sum(others, first)))

    async def _reply(self, job: _Job, request: TokenRequest) -> tuple[tuple[str, str], Usage]:
        """Reads one reply of a job: its text and finish reason, and its usage."""
        usage = Usage(len(request.token_ids))
        texts = []
        reason = ""
        async with aclosing(self._triton.stream(request)) as pieces:
            async for piece in pieces:
                _count(usage, piece)
                texts.append(job.text(piece))
                reason = "stop" if job.stopped else piece.finish_reason
                if job.stopped and not piece.finish_reason:
                    break
        return ("".join(texts), reason), usage

    async def _events(self, job: _Job) -> AsyncGenerator[bytes, None]:
        """Yields a reply's events, some at a time. Raises an ApiError only before the first."""
        usage = Usage(len(job.request.token_ids))
        begun = False
        try:
            async with aclosing(self._triton.stream(job.request)) as pieces:
                async for piece in pieces:
                    _count(usage, piece)
                    events = b"" if begun else job.form.opening()
                    text = job.text(piece)
                    if text:
                        events += job.form.piece(text)
                    reason = "stop" if job.stopped else piece.finish_reason
                    if reason:
                        events += job.form.ending(reason, usage)
                    begun = True
                    yield events
                    if job.stopped and not piece.finish_reason:
                        break
        except Exception as error:
            refusal = as_api_error(error, job.request.request_id)
            if not begun:
                raise refusal from None
            yield error_event(refusal)


def _fetch(url: str) -> bytes:
    """Reads a page of this machine, past any proxy that the environment names."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=_METRICS_SECONDS) as page:
        return bytes(page.read())


def _count(usage: Usage, piece: Piece) -> None:
    usage.completion_tokens += piece.tokens
    usage.drafted_tokens = piece.drafted_tokens
    usage.accepted_tokens = piece.accepted_tokens
