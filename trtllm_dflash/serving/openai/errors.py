"""Errors in OpenAI's form."""

import logging
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from trtllm_dflash.errors import CancelledError, DeadlineError, QueueFullError, RequestError, ShutdownError
from trtllm_dflash.serving.client import UnavailableError

_log = logging.getLogger(__name__)

_RULE = re.compile(r"^ call_(\d+)_\w+(?=:)")  # of a call's grammar, at the beginning of what is wrong with it

# Names in the server's messages, as OpenAI's clients know them.
_PARAMS = {
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "stop_words": "stop",
    "temperature": "temperature",
    "seed": "seed",
    "priority": "priority",
    "draft": "draft",
    "num_log_probs": "logprobs",
    "num_prompt_log_probs": "prompt_logprobs",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias_ids": "logit_bias",
    "min_p": "min_p",
    "min_tokens": "min_tokens",
    "bad_words": "bad_words",
}


class ApiError(Exception):
    """A refusal in OpenAI's form.

    Args:
        status: of HTTP.
        message: one line.
        param: the field of the request that is at fault.
        code: OpenAI's name of the error, for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """Makes the body, `{"error": {...}}`."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def as_api_error(
    error: Exception,
    request_id: str,
    form_field: str = "response_format",
    functions: Sequence[str] = (),
    implied: Mapping[str, str] = MappingProxyType({}),
) -> ApiError:
    """Turns a failure into the client's error. The message of one that we do not know stays in the log.

    Args:
        form_field: that the reply's form comes from.
        functions: names of those whose calls it is the form of, as `call_grammar` numbers them.
        implied: fields that the client did not send, and those that stand for them.
    """
    again = {"Retry-After": "1"}
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers=again)
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), code="deadline_exceeded")
    if isinstance(error, ShutdownError):
        return ApiError(503, str(error), code="shutdown", headers=again)
    if isinstance(error, CancelledError):
        return ApiError(503, "the server cancelled the request", code="cancelled", headers=again)
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), code="unavailable", headers=again)
    if isinstance(error, RequestError):
        field, colon, reason = str(error).partition(":")
        param = form_field if field == "guided_decoding_guide" else _PARAMS.get(field)
        param = implied.get(param or "", param)
        if functions and param == form_field:
            param = "tools" if _RULE.search(reason) else param
            reason = _RULE.sub(lambda rule: f" {functions[int(rule[1])]!r}", reason).replace(" form:", "", 1)
        return ApiError(400, f"{param or field}{colon}{reason}", param)
    _log.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"the server failed; its log says why (request {request_id})", code="internal")
