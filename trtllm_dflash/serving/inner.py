"""Calls from one of the repository's models to another; Triton calls that business logic scripting."""

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from trtllm_dflash.serving.parameters import CODED_ERRORS, Tensors
from trtllm_dflash.serving.tensors import decoded_error

ENGINE_MODEL = "tensorrt_llm"

_HELD_SECONDS = 10
_LEAST_HELD_SECONDS = 0.5  # where the process ends

_held: deque[tuple[float, Any]] = deque()  # when, and a decoupled model's answers
_holding = threading.Lock()


class InnerError(Exception):
    """The other model's error, as a response to pass on."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


def infer(
    model: str, tensors: Tensors, outputs: Iterable[str], decoupled: bool = False, request_id: str = ""
) -> Tensors:
    """Calls a model that answers once, and waits for the answer.

    Args:
        tensors: its inputs, each [1, ...].
        decoupled: whether it is a model that could answer more often.
        request_id: the client's own name for the request, by which it may be ended.

    Raises:
        InnerError: it answers with an error.
    """
    inputs = [pb_utils.Tensor(name, tensor) for name, tensor in tensors.items()]
    request = pb_utils.InferenceRequest(
        request_id=request_id,
        model_name=model,
        requested_output_names=list(outputs),
        inputs=inputs,
        parameters={CODED_ERRORS: True},
    )
    if not decoupled:
        return _read(request.exec())
    responses = request.exec(decoupled=True)
    found: Tensors = {}
    try:
        for response in responses:  # the last one may be empty
            found |= _read(response)
    finally:
        _hold(responses)
    return found


def _read(response: Any) -> Tensors:
    if response.has_error():
        raise InnerError(decoded_error(response.error().message()))
    return {tensor.name(): tensor.as_numpy().copy() for tensor in response.output_tensors()}


def _hold(responses: Any) -> None:
    """Keeps a decoupled model's responses until Triton is done with them too.

    Triton's Python backend (2.51) lets go of them on a thread that does not hold the interpreter's lock. Were it the
    last to do so, it would free their tensors there and sooner or later corrupt the interpreter's memory.
    """
    now = time.monotonic()
    with _holding:
        _held.append((now, responses))
        while _held[0][0] < now - _HELD_SECONDS:
            _held.popleft()


def stop(key: int, decoupled: bool) -> None:
    """Ends the request with that key, if it runs. Ending one that has ended does nothing."""
    tensors: Tensors = {
        "input_ids": np.zeros((1, 1), np.int32),  # required, and not looked at
        "input_lengths": np.ones((1, 1), np.int32),
        "request_output_len": np.ones((1, 1), np.int32),
        "stop": np.array([[True]]),
        "request_key": np.array([[key]], np.int64),
    }
    infer(ENGINE_MODEL, tensors, ["request_key"], decoupled)


def finish() -> None:
    """Frees all responses while Triton's module still exists; must be called by a model's `finalize`."""
    if _held:
        time.sleep(max(0.0, _held[-1][0] + _LEAST_HELD_SECONDS - time.monotonic()))
        _held.clear()
