"""A gRPC server with Triton's interface that does what a test says, for what a real server does not do on demand."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

Script = Callable[[dict[str, list]], Iterator[Any]]  # inputs by name -> responses


class Refuse(Exception):
    """Ends a stream with an error: its code, as Triton calls it, and its text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code} {text}")


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Replies with what `script` yields, given the inputs by name."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.ready = True
        self.cancelled = threading.Event()
        self.room: tuple[int, int] | None = None  # slots, and places in the queue; None: it does not tell
        self.completed: list[str] = []  # requests that were stopped as complete

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=self.ready)

    def ModelConfig(self, request, context):
        if self.room is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        slots, queue = self.room
        answer = service_pb2.ModelConfigResponse()
        answer.config.max_batch_size = slots
        answer.config.parameters["max_queue"].string_value = str(queue)
        return answer

    def ModelStreamInfer(self, requests, context):
        context.add_callback(lambda: context.code() is None and self.cancelled.set())
        try:
            for request in requests:
                inputs = _inputs(request)
                if inputs.get("stop") == [True]:
                    assert request.parameters["complete"].bool_param
                    self.completed.append(request.id)
                else:
                    yield from self.script(inputs)
        except Refuse as refusal:
            yield service_pb2.ModelStreamInferResponse(error_message=str(refusal))


def response(
    text: str, tokens: int, reason: str = "", drafted: int = 0, accepted: int = 0, ids: list[int] | None = None
) -> Any:
    """One response of `tensorrt_llm`; `ids`: its tokens, where anybody looks at them."""
    outputs = {
        "output_ids": np.array(range(tokens) if ids is None else ids, np.int32)[None, None],
        "sequence_length": np.array([[tokens]], np.int32),
        "output_text": np.array([[text.encode()]], object),
        "finish_reason": np.array([[reason.encode()]], object),
        "total_draft_tokens": np.array([[drafted]], np.int32),
        "total_accepted_draft_tokens": np.array([[accepted]], np.int32),
    }
    message = service_pb2.ModelInferResponse(model_name="tensorrt_llm", model_version="1")
    for name, value in outputs.items():
        message.outputs.add(name=name, datatype=np_to_triton_dtype(value.dtype), shape=value.shape)
        raw = serialize_byte_tensor(value).item() if value.dtype == object else value.tobytes()
        message.raw_output_contents.append(raw)
    return service_pb2.ModelStreamInferResponse(infer_response=message)


def _inputs(request) -> dict[str, list]:
    types = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
    return {
        tensor.name: np.frombuffer(raw, types[tensor.datatype]).tolist()
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        if tensor.datatype != "BYTES"
    }


@contextmanager
def fake_triton(script: Script, address: str = "127.0.0.1:0") -> Iterator[tuple[FakeTriton, str]]:
    """A running one, and its HOST:PORT."""
    fake = FakeTriton(script)
    server = grpc.server(ThreadPoolExecutor(80))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield fake, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
