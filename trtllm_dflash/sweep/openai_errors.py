"""Errors of servers with OpenAI's API, whatever form they give them."""

import json
from collections.abc import Mapping
from typing import Any

#: What reading a document raises that has another form than OpenAI's: no JSON, or other types, or nested without end.
OTHER_FORM = (ValueError, KeyError, TypeError, AttributeError, RecursionError)

#: Why a server cannot be asked whose first bytes are no answer of HTTP's: they are not for a terminal.
NO_HTTP = "what answers is not HTTP, but Triton's gRPC, say"


def error_text(body: Mapping[str, Any]) -> str:
    """Reads the message of an error, as a text that can be written anywhere: without halves of surrogate pairs."""
    error = body.get("error", body)
    text = str(error.get("message", error) if isinstance(error, dict) else error)
    return text.encode(errors="replace").decode()


def refusal(status: int, content: bytes) -> str:
    """Describes an answer that is no reply: its status, and its error's message or how it begins."""
    try:
        text = error_text(json.loads(content))
    except OTHER_FORM:
        text = " ".join(content.decode(errors="replace").split())
    return f"HTTP {status}: {text[:500]}"
