"""Servers of fixed delays in threads of their own: OpenAI's API, and Triton's gRPC. They note what they really did."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from aiohttp import web
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.waiting import PATIENCE

TOKENS = [1, 3, 5, 1, 3, 5, 1, 3]  # of each response
DRAFTS = 7  # that each step after the first verifies


@dataclass
class Served:
    """A request as the server saw it, on the clock that the event loops of this machine share."""

    arrived: float
    prompt: str = ""
    sent: list[float] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)


@dataclass
class TimedServer:
    """What it listens at, and what it did."""

    url: str = ""
    served: list[Served] = field(default_factory=list)
    ttft: float = 0.02
    gap: float = 0.005
    fault: str = ""  # how it answers instead, while that is set
    fault_after: int = 0  # requests that it answers well nevertheless
    page: str | Callable[[int], str] = ""  # its metrics, by the number of replies begun; none while that is empty
    drafts_in_replies: bool = True
    details: dict[str, Any] = field(default_factory=dict)  # of a reply's drafts, as SGLang tells them to who asks

    async def pace(self, served: Served) -> AsyncIterator[int]:
        """The tokens of each response, when it is time."""
        loop = asyncio.get_running_loop()
        # Not all at the same moment, which no real server could do: that would measure this process' own queue.
        begin = served.arrived + self.ttft * (1 + len(self.served) % 16 / 20)
        for i, tokens in enumerate(TOKENS):
            # From the arrival on, so that one late response does not make the next one late.
            await asyncio.sleep(begin + i * self.gap - loop.time())
            served.sent.append(loop.time())
            yield tokens


@contextmanager
def _in_thread(start: Callable[[TimedServer], Any]) -> Iterator[TimedServer]:
    server, ready, loop = TimedServer(), threading.Event(), asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        close = await start(server)
        ready.set()
        await end.wait()
        await close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(PATIENCE)
        loop.close()


@contextmanager
def openai_server() -> Iterator[TimedServer]:
    """/v1/models and streamed /v1/chat/completions."""
    with _in_thread(_start_openai) as server:
        yield server


async def _start_openai(server: TimedServer) -> Any:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "timed"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        served = Served(asyncio.get_running_loop().time())
        served.body = await request.json()
        served.prompt = served.body["messages"][-1]["content"]
        server.served.append(served)
        if server.fault == "refuse" and len(server.served) > server.fault_after:
            return web.json_response({"error": {"message": "the queue is full"}}, status=429)
        while server.fault == "silent" and request.transport is not None:
            await asyncio.sleep(0.01)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)

        async def event(**body: object) -> None:
            head = {"id": "chat-1", "object": "chat.completion.chunk", "created": 1, "model": "timed"}
            await answer.write(b"data: " + json.dumps({**head, **body}).encode() + b"\n\n")

        await event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        async for tokens in server.pace(served):
            await event(choices=[{"index": 0, "delta": {"content": "x " * tokens}}])
            if server.fault == "break off":
                return answer
            if server.fault == "fail":
                await event(error={"message": "a step failed"})
                return answer
        counts: dict[str, Any] = {"completion_tokens": sum(TOKENS), "prompt_tokens": 9}
        steps = len(TOKENS) - 1
        accepted = sum(TOKENS) - 1 - steps
        drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": DRAFTS * steps - accepted}
        if server.drafts_in_replies:
            counts["completion_tokens_details"] = drafts
        if server.details and served.body.get("return_spec_tokens_details"):
            await event(choices=[], sglext={"spec_tokens_details": server.details})
        if server.fault != "no usage":
            await event(choices=[], usage={"total_tokens": 9 + sum(TOKENS), **counts})
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def metrics(request: web.Request) -> web.Response:
        page = server.page(len(server.served)) if callable(server.page) else server.page
        return web.Response(text=page, status=200 if page else 404)

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/metrics", metrics)])
    app.add_routes([web.post("/v1/chat/completions", chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return runner.cleanup


@contextmanager
def triton_server() -> Iterator[TimedServer]:
    """A model `ensemble` that streams."""
    with _in_thread(_start_triton) as server:
        yield server


class _Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, server: TimedServer) -> None:
        self._server = server

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name == "ensemble")

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        tensor = service_pb2.ModelMetadataResponse.TensorMetadata
        inputs = ["text_input", "max_tokens", "stream", "draft", "ignore_eos", "temperature", "top_k"]
        outputs = ["text_output", "num_input_tokens", "num_output_tokens", "finish_reason"]
        outputs += ["total_draft_tokens", "total_accepted_draft_tokens"]
        return service_pb2.ModelMetadataResponse(
            name="ensemble", inputs=[tensor(name=n) for n in inputs], outputs=[tensor(name=n) for n in outputs]
        )

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            served = Served(asyncio.get_running_loop().time())
            pairs = zip(request.inputs, request.raw_input_contents, strict=True)
            served.body = {tensor.name: raw for tensor, raw in pairs}
            served.prompt = served.body["text_input"][4:].decode()  # after its length
            self._server.served.append(served)
            while self._server.fault == "silent" and not context.cancelled():
                await asyncio.sleep(0.01)
            if self._server.fault == "refuse":
                yield service_pb2.ModelStreamInferResponse(error_message="the queue is full")
                return
            total = accepted = 0
            async for tokens in self._server.pace(served):
                accepted += tokens - 1 if total else 0
                total += tokens
                steps = len(served.sent) - 1
                last = len(served.sent) == len(TOKENS)
                yield _response(tokens, total, DRAFTS * steps, accepted, "length" if last else "")
                if self._server.fault == "break off":
                    return


def _response(tokens: int, total: int, drafted: int, accepted: int, reason: str) -> Any:
    response = service_pb2.ModelInferResponse(model_name="ensemble")

    def add(name: str, kind: str, raw: bytes) -> None:
        response.outputs.add(name=name, datatype=kind, shape=[1, 1])
        response.raw_output_contents.append(raw)

    for name, text in (("text_output", "x " * tokens), ("finish_reason", reason)):
        add(name, "BYTES", len(text).to_bytes(4, "little") + text.encode())
    numbers = {"num_input_tokens": 9, "num_output_tokens": total}
    numbers |= {"total_draft_tokens": drafted, "total_accepted_draft_tokens": accepted}
    for name, number in numbers.items():
        add(name, "INT32", np.int32(number).tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=response)


async def _start_triton(server: TimedServer) -> Any:
    grpc_server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Triton(server), grpc_server)
    server.url = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    await grpc_server.start()

    async def close() -> None:
        await grpc_server.stop(None)

    return close
