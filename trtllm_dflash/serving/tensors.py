"""Conversions between Triton's requests, responses and errors and NumPy tensors and exceptions."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from numpy.typing import NDArray

from trtllm_dflash.errors import (
    CancelledError,
    DeadlineError,
    DFlashError,
    QueueFullError,
    RequestError,
    SettingsError,
    ShutdownError,
)
from trtllm_dflash.serving.parameters import CODED_ERRORS, COMPLETE, Tensors

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

# Names in pb_utils.TritonError, which Triton puts there only after it has imported the model.
_CODES = {
    QueueFullError: "UNAVAILABLE",
    DeadlineError: "UNAVAILABLE",  # Triton has no code for a deadline
    ShutdownError: "UNAVAILABLE",
    CancelledError: "CANCELLED",
    RequestError: "INVALID_ARG",  # after those that are of its kind
}


def read_tensors(request: Any) -> Tensors:
    """Copies a request's inputs, by name: Triton takes their memory back.

    Raises:
        RequestError: it has a parameter; Triton makes one of each field of a JSON request that is no input.
    """
    unknown = json.loads(request.parameters()).keys() - {CODED_ERRORS, COMPLETE}
    if unknown:
        raise RequestError("there is no such input", min(unknown))
    return {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}


def response(tensors: Tensors, names: Iterable[str]) -> Any:
    """Makes a response of the tensors that are in `names`."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, tensors[name]) for name in names if name in tensors])


def error_response(error: BaseException, coded: bool = False) -> Any:
    """Makes a response of an error. One that is not ours is a fault of this package, and is named with its type.

    Args:
        coded: the text begins with the code; see `wants_codes`.
    """
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "INTERNAL")
    text = str(error) if isinstance(error, DFlashError) else f"{type(error).__name__}: {error}"
    return _error(f"{code} {text}" if coded else text, code)


def wants_codes(request: Any) -> bool:
    """Whether another model sent the request: Triton (2.51) gives it an error's text, and loses the code."""
    return CODED_ERRORS in json.loads(request.parameters())


def stops_as_complete(request: Any) -> bool:
    """Whether a request that stops another one says that its reply is complete."""
    return COMPLETE in json.loads(request.parameters())


def decoded_error(text: str) -> Any:
    """Makes a response of the error that another model answered with."""
    code, _, rest = text.partition(" ")
    known = code in {*_CODES.values(), "INTERNAL"}  # Triton itself says no code
    return _error(rest, code) if known else _error(text, "INTERNAL")


def _error(text: str, code: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, getattr(pb_utils.TritonError, code)))


def string_tensor(texts: list[str]) -> NDArray[np.object_]:
    """Makes a tensor [1, N] of texts."""
    return np.array([[text.encode() for text in texts]], object)


def parameter(model_config: dict[str, Any], name: str) -> str:
    """Reads a parameter of a model's configuration.

    Raises:
        SettingsError: an older version has deployed it, or somebody has removed it.
    """
    try:
        return str(model_config["parameters"][name]["string_value"])
    except KeyError:
        raise SettingsError(f"config.pbtxt of {model_config['name']}: no parameter {name}; deploy again") from None
