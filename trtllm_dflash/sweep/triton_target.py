"""A Triton server, through its text-in, text-out model and gRPC streams: ours, or TensorRT-LLM's of the same names."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferRequestedOutput, InferResult
from tritonclient.grpc.aio import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from trtllm_dflash.checkpoint.folder import read_json
from trtllm_dflash.errors import RequestError, SettingsError, first_line
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.serving.client import CHANNEL, UnavailableError
from trtllm_dflash.sweep.dataset import Message
from trtllm_dflash.sweep.load import CHECK_SECONDS, Arm, Reply, Request, Target
from trtllm_dflash.sweep.runtime_metrics import Reading, find_metrics
from trtllm_dflash.text.tokenizer import TextCodec

_OUTPUTS = (
    "text_output",
    "num_input_tokens",
    "num_output_tokens",
    "total_draft_tokens",
    # Ours: TensorRT-LLM's ensemble has none of these.
    "total_accepted_draft_tokens",
    "accepted_per_step",
    "finish_reason",
)

Render = Callable[[list[Message]], str]
Count = Callable[[str], int]


def chat_text(folder: Path | None) -> tuple[Render, Count | None]:
    """Makes the functions that render conversations and count tokens, with the tokenizer of an engine or other folder.

    Without a folder a prompt is sent as it is, and the server counts: for datasets of single turns.

    Raises:
        CheckpointError: the folder's config.json cannot be read.
        SettingsError: there is no tokenizer, or no chat template.
    """
    if folder is None:
        return lambda messages: messages[-1]["content"], None
    config = folder / "config.json"
    arguments = read_json(config).get("chat_arguments", {}) if config.is_file() else {}
    codec = TextCodec.load(folder, arguments)
    if codec is None:
        raise SettingsError(f"--tokenizer {folder}: there is no tokenizer.json")
    try:
        codec.chat_text([{"role": "user", "content": "x"}])
    except RequestError:
        raise SettingsError(
            f"--tokenizer {folder}: has no chat template that takes a message; without --tokenizer prompts are sent raw"
        ) from None
    tokenizer = codec.backend
    plain = tokenizer.encode("x", add_special_tokens=False).ids
    # The server's tokenizer adds these to any text, and many templates write them out: once is enough.
    added = codec.encode("x")
    begin = "".join(map(str, map(tokenizer.id_to_token, added[: added.index(plain[0])])))

    def render(messages: list[Message]) -> str:
        return codec.chat_text(messages).removeprefix(begin)

    return render, lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


class TritonTarget(Target):
    """Streams from `model`. To be made and used on one event loop.

    Args:
        url: HOST:PORT of gRPC.
        render: a conversation as the text that the model is to go on with.
        count: tokens of a text, for servers that do not count them.
        metrics: URL of its metrics, for servers whose replies say nothing of drafts.
        name: of the server, for errors.
    """

    def __init__(
        self,
        url: str,
        model: str,
        render: Render,
        count: Count | None = None,
        metrics: str | None = None,
        name: str | None = None,
    ) -> None:
        self._name, self._metrics = name or f"--url {url}", metrics
        self._model, self._render, self._count = model, render, count
        self._grpc = InferenceServerClient(url, channel_args=CHANNEL)
        self._known: frozenset[str] = frozenset()  # names of inputs and outputs

    async def close(self) -> None:
        await self._grpc.close()

    async def check(self, arms: tuple[Arm, ...], params: SamplingParams) -> None:
        try:
            if not await self._grpc.is_model_ready(self._model, client_timeout=CHECK_SECONDS):
                raise UnavailableError(f"{self._name}: Triton has no model {self._model!r} ready (--model)")
            about = await self._grpc.get_model_metadata(self._model, client_timeout=CHECK_SECONDS)
        except (InferenceServerException, grpc.aio.AioRpcError) as error:
            is_late = "DEADLINE_EXCEEDED" in str(error)
            reason = f"nothing came in {CHECK_SECONDS:g} s" if is_late else first_line(error)
            raise UnavailableError(f"{self._name}: no Triton server answers there: {reason}") from None
        self._known = frozenset(tensor.name for tensor in (*about.inputs, *about.outputs))
        if "text_input" not in self._known:
            raise SettingsError(f"--model {self._model}: it takes no text (text_input); name the ensemble")
        if arms != ("served",) and "draft" not in self._known:
            raise SettingsError(f"--compare: the model {self._model!r} has no input `draft`; leave --compare out")
        if params.ignore_eos and "ignore_eos" not in self._known:
            raise SettingsError(f"--output-tokens: the model {self._model!r} always ends at EOS; give --max-tokens")
        if "num_output_tokens" not in self._known and self._count is None:
            raise SettingsError(f"--tokenizer: the model {self._model!r} does not count tokens; give its tokenizer")
        await asyncio.to_thread(find_metrics, self._metrics)

    async def look(self, arm: Arm) -> Reading | None:
        return await asyncio.to_thread(find_metrics, self._metrics)

    async def send(self, request: Request) -> Reply:
        reply = Reply()
        loop = asyncio.get_running_loop()
        text = self._render(request.sample.messages(request.replies))

        async def once() -> AsyncIterator[dict[str, object]]:
            yield {
                "model_name": self._model,
                "inputs": self._inputs(request, text),
                "outputs": [InferRequestedOutput(name) for name in _OUTPUTS if name in self._known],
            }

        responses = self._grpc.stream_infer(once())
        reason = ""
        try:
            async for result, error in responses:
                self._heard = loop.time()
                if error is not None:
                    reply.error = error.message()
                    continue
                _add(reply, result, self._heard)
                reason = reason or _text(result, "finish_reason")
        except grpc.aio.AioRpcError as error:
            reply.error = error.details() or error.code().name
        except InferenceServerException as error:
            reply.error = error.message()
        finally:
            responses.cancel()
        if reply.error is None and not reply.times:
            reply.error = "the stream ended without a response"
        elif reply.error is None and "finish_reason" in self._known and not reason:
            reply.error = "the stream ended before the reply was whole"
        if "num_output_tokens" not in self._known and self._count is not None:
            reply.tokens, reply.tokens_by_response = self._count(reply.text), []
        return reply

    def _inputs(self, request: Request, text: str) -> list[InferInput]:
        params = request.params
        wanted: dict[str, np.ndarray[Any, Any]] = {
            "text_input": np.array([text.encode()], object),
            "max_tokens": np.array([params.max_tokens], np.int32),
            "stream": np.array([True]),
            "temperature": np.array([params.temperature], np.float32),
            "top_k": np.array([params.top_k if params.temperature > 0 else 1], np.int32),
            "top_p": np.array([params.top_p], np.float32),
            "seed": np.array([params.seed], np.uint64),
            "return_num_input_tokens": np.array([True]),
            "return_num_output_tokens": np.array([True]),
            "ignore_eos": np.array([params.ignore_eos]),
        }
        if request.arm != "served":
            wanted["draft"] = np.array([request.arm == "draft"])
        tensors = []
        for name, value in wanted.items():
            if name in self._known:
                tensor = InferInput(name, [1, 1], np_to_triton_dtype(value.dtype))
                tensor.set_data_from_numpy(value.reshape(1, 1))
                tensors.append(tensor)
        return tensors


def _add(reply: Reply, result: InferResult, now: float) -> None:
    """Adds a response to the reply. Its numbers count from the reply's begin."""
    text = _text(result, "text_output")
    tokens = _number(result, "num_output_tokens")
    new = (tokens or 0) - reply.tokens
    if not text and not new:
        return
    drafted, accepted = _number(result, "total_draft_tokens"), _number(result, "total_accepted_draft_tokens")
    if tokens is not None and drafted is not None and accepted is not None:
        if reply.times:  # the first response is the prefill's
            last = bool(_text(result, "finish_reason"))
            count_steps(reply, new, drafted - (reply.drafted or 0), accepted - (reply.accepted or 0), last)
        else:
            reply.steps = 0
        reply.drafted, reply.accepted = drafted, accepted
        each = result.as_numpy("accepted_per_step")
        if each is not None and each.size:  # with the last response
            take_steps(reply, each.reshape(-1).tolist())
    reply.prompt_tokens = _number(result, "num_input_tokens") or reply.prompt_tokens
    reply.times.append(now)
    reply.text += text
    if tokens is not None:
        reply.tokens = tokens
        reply.tokens_by_response.append(new)


def take_steps(reply: Reply, accepted: list[int]) -> None:
    """Takes the steps of a whole reply as the server counts them, instead of what its responses told.

    Drafts are counted by position where all steps had as many, as far as responses tell.
    """
    reply.steps = len(accepted)
    each, rest = divmod(reply.drafted or 0, len(accepted))
    if not rest and len(reply.drafted_at) in (0, each):
        reply.drafted_at, reply.accepted_at = [], []
        for count in accepted:
            reply.count_step(each, count)


def count_steps(reply: Reply, tokens: int, drafted: int, accepted: int, last: bool) -> None:
    """Counts the steps of a response: a server that is busy sends several in one.

    A step commits the drafts that it accepts and one token more, but a reply's last one may be cut short. Positions of
    drafts are counted where the response is a single step's for certain.
    """
    steps = max(1, tokens - accepted)
    reply.steps = (reply.steps or 0) + steps
    if steps == 1 and (not last or drafted <= len(reply.drafted_at)):
        reply.count_step(drafted, accepted)


def _number(result: InferResult, name: str) -> int | None:
    value = result.as_numpy(name)
    return None if value is None or not value.size else int(value.reshape(-1)[0])


def _text(result: InferResult, name: str) -> str:
    value = result.as_numpy(name)
    return "" if value is None or not value.size else str(value.reshape(-1)[0].decode(errors="replace"))
