"""A client of a served engine: token ids in, pieces of the reply out, over Triton gRPC."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferRequestedOutput, InferResult
from tritonclient.grpc.aio import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from trtllm_dflash.errors import (
    CancelledError,
    DeadlineError,
    DFlashError,
    EngineError,
    QueueFullError,
    RequestError,
    ShutdownError,
)
from trtllm_dflash.runtime.request import SamplingParams, TokenLogprobs
from trtllm_dflash.serving.choice_fields import choice_tensors, read_logprobs
from trtllm_dflash.serving.parameters import CODED_ERRORS, COMPLETE

MODEL = "tensorrt_llm"

_OUTPUTS = (
    "sequence_length",
    "output_text",
    "finish_reason",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "num_reused_tokens",
)
_IDS = ("output_ids", "accepted_per_step")
_LOGPROBS = ("output_log_probs", "top_log_prob_ids", "top_log_probs")
_PROMPT_LOGPROBS = ("prompt_log_probs", "prompt_top_log_prob_ids", "prompt_top_log_probs")
#: Options of a channel to a Triton server.
CHANNEL = [
    ("grpc.enable_http_proxy", 0),  # gRPC would ask the environment's, which does not know this machine's ports
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC would wait up to two minutes before it tries a restarted server again. The least wait stays what it is, for
    # so long may a connection take, on a busy machine too.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
#: What stops another request; the first two are required, and not looked at.
_STOP = {"input_ids": np.zeros(1, np.int32), "input_lengths": np.ones(1, np.int32), "stop": np.array([True])}
_SLACK = 5.0  # seconds that a server has to say itself that a deadline passed


class UnavailableError(DFlashError):
    """No Triton server answers, or it does not serve the engine yet."""


#: Settings of a reply that have no tensor here.
_UNSENT = ("stop_token_ids", "stop_token_sequences", "bad_token_sequences")


@dataclass(frozen=True)
class TokenRequest:
    """The inputs of a request to a served engine.

    Attributes:
        token_ids: the prompt.
        draft: False decodes it plainly.
        priority: 1 is the most urgent; 0 is the default, which lies in between.
        deadline: seconds until the whole reply must have arrived.
        request_id: shown in the server's log.
        wants_ids: False spares every response the token ids, and the last one the accepted drafts of each step.
        mark: makes its name at the server one that no other request has.
    """

    token_ids: list[int]
    params: SamplingParams
    draft: bool = True
    priority: int = 0
    deadline: float | None = None
    request_id: str = ""
    wants_ids: bool = True
    mark: str = field(init=False, compare=False, default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        for name in _UNSENT:
            if getattr(self.params, name):
                raise RequestError("it is not sent to a server; give texts (stop, bad_words)", name)

    @property
    def name(self) -> str:
        """Its name at the server, by which it can be ended."""
        return f"{self.request_id}.{self.mark}"


@dataclass(frozen=True)
class Piece:
    """The text and tokens that one response adds to a reply. All pieces' texts, joined, are the reply's.

    Attributes:
        text: may be empty: a character or a possible stop string is not whole yet.
        tokens: number of new tokens.
        token_ids: the new tokens, where the request wants them.
        drafted_tokens, accepted_tokens: drafts verified and accepted since the reply began.
        accepted_per_step: drafts accepted by each of its decoding steps; with the last piece, where the request wants
            ids.
        finish_reason: "stop" or "length" with the last piece, "" before it.
        reused_tokens: of the prompt, whose K/V rows an earlier request had left; with the last piece.
        logprobs: of the new tokens, where the request asks for them.
        prompt_logprobs: of the prompt's tokens but the first, with the last piece.
    """

    text: str
    tokens: int
    token_ids: list[int]
    drafted_tokens: int
    accepted_tokens: int
    accepted_per_step: list[int]
    finish_reason: str
    reused_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class TritonClient:
    """One gRPC channel to a Triton server. To be made and used on one event loop.

    Each reply is a gRPC stream of its own on that channel, so that it is cancelled alone and has an error status of
    its own.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._grpc = InferenceServerClient(url, channel_args=CHANNEL)
        self._closed = False

    async def close(self) -> None:
        """Ends the channel, and every stream on it with a ShutdownError."""
        self._closed = True
        await self._grpc.close()

    async def ready(self, timeout: float = 5.0) -> bool:
        """Whether the server answers and its engine is ready."""
        try:
            return bool(await self._grpc.is_model_ready(MODEL, client_timeout=timeout))
        except InferenceServerException:
            return False

    async def room(self, timeout: float = 5.0) -> tuple[int, int] | None:
        """Asks how many requests have a slot at a time, and how many wait; None where the server does not tell."""
        if self._closed:
            return None
        with suppress(InferenceServerException, ValueError), self._leaving_once_closed():
            config = (await self._grpc.get_model_config(MODEL, client_timeout=timeout)).config
            return config.max_batch_size, int(config.parameters["max_queue"].string_value)
        return None

    async def stream(self, request: TokenRequest) -> AsyncGenerator[Piece, None]:
        """Yields the reply to a request, piece by piece; the last piece has a finish reason.

        To leave early, close the iterator or cancel the task that waits for it: that cancels the request.

        Raises:
            RequestError, QueueFullError, DeadlineError, CancelledError: from the server.
            ShutdownError: from the server, or this client was closed.
            UnavailableError: no server answers, or it went away.
            EngineError: the server failed.
        """

        if self._closed:
            raise ShutdownError("the server takes no more requests")

        async def once() -> AsyncIterator[dict[str, object]]:
            yield {
                "model_name": MODEL,
                "inputs": _inputs(request),
                "outputs": [InferRequestedOutput(name) for name in _outputs(request)],
                "request_id": request.name,
                # The codes of errors as the first words of their texts. Triton would give them as gRPC statuses where
                # the header "triton_grpc_error" is sent, and crashes then (2.51: SIGSEGV after some thousand errors).
                "parameters": {CODED_ERRORS: True},
            }

        responses = self._grpc.stream_infer(
            once(),
            stream_timeout=None if request.deadline is None else request.deadline + _SLACK,
        )
        reason, refusal = "", None
        try:
            async for result, error in responses:  # to its end, also after an error: to cancel then is a race
                if error is not None:
                    refusal = _refusal(error.message())
                    continue
                piece = _piece(result)
                reason = piece.finish_reason
                yield piece
        except grpc.aio.AioRpcError as error:
            raise self._meaning(error) from None
        except asyncio.CancelledError:
            if not self._closed:  # it is the caller's task that is cancelled
                raise
            raise ShutdownError("the server ended before the reply was complete") from None
        finally:
            responses.cancel()  # does nothing to a stream that has ended
        if refusal is not None:
            raise refusal
        if not reason:
            raise EngineError("the server ended the reply before it was whole; see its log")

    async def finish(self, request: TokenRequest) -> None:
        """Tells the server that a reply is complete as far as it has come; its stream may be left then.

        Where the server does not take it in, to leave cancels the request as ever: nobody's reply is worse for it.
        """
        if self._closed:
            return

        async def once() -> AsyncIterator[dict[str, object]]:
            yield {
                "model_name": MODEL,
                "inputs": [_tensor(name, value) for name, value in _STOP.items()],
                "request_id": request.name,
                "parameters": {COMPLETE: True},
            }

        answers = self._grpc.stream_infer(once(), stream_timeout=_SLACK)
        try:
            with suppress(grpc.aio.AioRpcError), self._leaving_once_closed():
                async for _ in answers:
                    pass
        finally:
            answers.cancel()

    @contextmanager
    def _leaving_once_closed(self) -> Iterator[None]:
        """Leaves quietly what waits for the server where this client is closed meanwhile."""
        try:
            yield
        except asyncio.CancelledError:
            if not self._closed:  # it is the caller's task that is cancelled
                raise

    def _meaning(self, error: grpc.aio.AioRpcError) -> DFlashError:
        code, text = error.code(), error.details() or error.code().name
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(text)
        if code == grpc.StatusCode.CANCELLED:
            return CancelledError(text)
        if code == grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(
                f"no Triton server serves an engine at {self._url}; is trtllm-dflash serve running?"
            )
        return EngineError(text)


def _refusal(text: str) -> DFlashError:
    """Turns the engine's error text into an exception; its first word is the error's code."""
    code, _, rest = text.partition(" ")
    if code == "INVALID_ARG":
        return RequestError(rest)
    if code == "CANCELLED":
        return CancelledError(rest)
    if code == "UNAVAILABLE":  # Triton has one code for all of these, so the message says which
        if rest.startswith("shutdown: "):
            return ShutdownError(rest.removeprefix("shutdown: "))
        return DeadlineError(rest) if "deadline" in rest else QueueFullError(rest)
    return EngineError(rest if code == "INTERNAL" else text)


def _inputs(request: TokenRequest) -> list[InferInput]:
    params = request.params
    values: dict[str, np.ndarray[Any, Any]] = {
        "input_ids": np.array(request.token_ids, np.int32),
        "input_lengths": np.array([len(request.token_ids)], np.int32),
        "request_output_len": np.array([params.max_tokens], np.int32),
        "streaming": np.array([True]),
        "temperature": np.array([params.temperature], np.float32),
        "runtime_top_k": np.array([params.top_k], np.int32),
        "runtime_top_p": np.array([max(params.top_p, np.finfo(np.float32).tiny)], np.float32),  # 0 would be no filter
        "seed": np.array([params.seed], np.uint64),
        "ignore_eos": np.array([params.ignore_eos]),
        "draft": np.array([request.draft]),
        "priority": np.array([request.priority], np.int32),
    }
    if params.stop:
        values["stop_words"] = np.array([text.encode() for text in params.stop], object)
    values |= choice_tensors(params)
    if request.deadline is not None:
        values["deadline_ms"] = np.array([min(request.deadline * 1000, 2**31 - 1)], np.int32)
    return [_tensor(name, value) for name, value in values.items()]


def _tensor(name: str, value: np.ndarray[Any, Any]) -> InferInput:
    tensor = InferInput(name, [1, value.size], np_to_triton_dtype(value.dtype))  # [1, N]: a batch of one
    tensor.set_data_from_numpy(value.reshape(1, -1))
    return tensor


def _outputs(request: TokenRequest) -> tuple[str, ...]:
    ids = _IDS if request.wants_ids else ()
    logprobs = _LOGPROBS if request.params.logprobs is not None else ()
    prompt = _PROMPT_LOGPROBS if request.params.prompt_logprobs is not None else ()
    return (*_OUTPUTS, *ids, *logprobs, *prompt)


def _piece(result: InferResult) -> Piece:
    """Reads a response from its bytes: `as_numpy` takes several times as long, for every response of every stream."""
    response = result.get_response()
    values = {tensor.name: raw for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)}
    tokens = _number(values["sequence_length"])
    return Piece(
        text=_text(values["output_text"]),
        tokens=tokens,
        token_ids=_numbers(values.get("output_ids", b""))[:tokens],
        drafted_tokens=_number(values["total_draft_tokens"]),
        accepted_tokens=_number(values["total_accepted_draft_tokens"]),
        accepted_per_step=_numbers(values.get("accepted_per_step", b"")),
        finish_reason=_text(values["finish_reason"]),
        reused_tokens=_number(values.get("num_reused_tokens", b"")),
        logprobs=_logprobs(values, _LOGPROBS),
        prompt_logprobs=_logprobs(values, _PROMPT_LOGPROBS),
    )


def _logprobs(values: dict[str, bytes], names: tuple[str, str, str]) -> list[TokenLogprobs]:
    """Reads log-probabilities from three tensors, where they are there."""
    own, ids, top = (values.get(name, b"") for name in names)
    return read_logprobs(_reals(own), _numbers(ids), _reals(top))


def _reals(raw: bytes) -> list[float]:
    """Reads a tensor of FP32."""
    reals: list[float] = np.frombuffer(raw, np.float32).tolist()
    return reals


def _numbers(raw: bytes) -> list[int]:
    """Reads a tensor of INT32."""
    numbers: list[int] = np.frombuffer(raw, np.int32).tolist()
    return numbers


def _number(raw: bytes) -> int:
    """Reads a tensor of one INT32."""
    return int.from_bytes(raw, "little", signed=True)


def _text(raw: bytes) -> str:
    """Reads a tensor of one BYTES: its length in four bytes, and the text."""
    return raw[4:].decode()
