"""The form of a reply of /v1/responses: a response of items, whole or as the events of its stream."""

import secrets
import time
from typing import Any

from pydantic import BaseModel

from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.replies import Added, Form, Reply, Usage, event
from trtllm_dflash.serving.openai.response_tools import UnusedTool, flat_name, members_of
from trtllm_dflash.serving.openai.responses import ResponsesRequest
from trtllm_dflash.text.reply.parts import Part


class ResponseForm(Form):
    """The form of one response.

    Args:
        asked: the request, much of which a response repeats.
        model: its name.
        temperature: that is sampled at.
    """

    def __init__(self, asked: ResponsesRequest, model: str, temperature: float) -> None:
        named = asked.tool_choice
        self._head: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "store": False,
            "temperature": temperature,
            "text": {"format": asked.text.format.body()},
            "tool_choice": named.model_dump(exclude_none=True) if isinstance(named, BaseModel) else named or "auto",
            "tools": [tool.model_dump() for tool in asked.tools if not isinstance(tool, UnusedTool)],
            "top_p": asked.top_p,
            "truncation": "disabled",
        }
        #: Those of a namespace, by the names that a model calls them by: the function's and the namespace's.
        self._members = {
            flat_name(namespace, function.name): {"name": function.name, "namespace": namespace}
            for namespace, function in members_of(asked.tools)
            if namespace is not None
        }
        self._output: list[dict[str, Any]] = []
        self._open = ""  # the kind of the part whose item is being written; "": none is
        self._texts: list[str] = []  # of that item, so far
        self._reason = ""
        self._number = 0  # of the next event

    def whole(self, replies: list[Reply], usage: Usage) -> dict[str, object]:
        (reply,) = replies
        self._parts([Part("thinking", reply.thinking), Part("content", reply.content)])
        for call in reply.calls:
            self._parts([Part("call", call.name), Part("arguments", call.arguments)])
        self._close()
        self._reason = reply.reason
        # Items are in an order of kinds here: the one that was cut off need not be the last.
        ended = next((item for item in reversed(self._output) if item["type"] == _ITEMS.get(reply.last or "")), None)
        if ended is not None:
            ended["status"] = self._status
        return self._response(self._status, usage)

    def opening(self, index: int) -> bytes:
        body = self._response("in_progress")
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def added(self, index: int, added: Added) -> bytes:
        return self._parts(added.parts)

    def ending(self, index: int, reason: str) -> bytes:
        self._reason = reason
        return self._close(self._status)

    def closing(self, usage: Usage) -> bytes:
        return self._event(f"response.{self._status}", response=self._response(self._status, usage))

    def failing(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        ended = self._close("incomplete")
        body = {**self._response("failed"), "error": {"code": code, "message": str(error)}}
        return ended + self._event("response.failed", response=body)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, object]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counts = None if usage is None else _usage(usage)
        state = {"status": status, "error": None, "incomplete_details": incomplete, "usage": counts}
        return {**self._head, **state, "output": list(self._output)}

    def _parts(self, parts: list[Part]) -> bytes:
        return b"".join(self._part(part) for part in parts if part.text)

    def _part(self, part: Part) -> bytes:
        events = b""
        if part.kind == "call" or part.kind not in (self._open, "arguments"):
            events = self._close() + self._begin(part)
        if part.kind == "call":
            return events
        self._texts.append(part.text)
        return events + self._of_part(_DELTAS[part.kind] + ".delta", delta=part.text)

    # -- items -------------------------------------------------------------------------------------------------------

    def _begin(self, part: Part) -> bytes:
        self._open, self._texts = part.kind, []
        item: dict[str, Any]
        if part.kind == "call":
            name = self._members.get(part.text, {"name": part.text})
            call = {"call_id": f"call_{secrets.token_hex(12)}", **name, "arguments": ""}
            item = {"id": f"fc_{secrets.token_hex(12)}", "type": _ITEMS["call"], **call}
        elif part.kind == "content":
            item = {"id": f"msg_{secrets.token_hex(12)}", "type": _ITEMS["content"], "role": "assistant", "content": []}
        else:
            item = {"id": f"rs_{secrets.token_hex(12)}", "type": _ITEMS["thinking"], "summary": [], "content": []}
        item["status"] = "in_progress"
        self._output.append(item)
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))
        if part.kind != "call":
            added += self._of_part("response.content_part.added", part=_content(part.kind, ""))
        return added

    def _close(self, status: str = "completed") -> bytes:
        """Ends the item that is being written, if any; the last one may be cut off."""
        if not self._open:
            return b""
        kind, item, text = self._open, self._output[-1], "".join(self._texts)
        if kind == "call":
            done = self._of_part("response.function_call_arguments.done", arguments=text, name=item["name"])
            item["arguments"] = text
        else:
            part = _content(kind, text)
            done = self._of_part(f"{_DELTAS[kind]}.done", text=text)
            done += self._of_part("response.content_part.done", part=part)
            item["content"] = [part]
        item["status"] = status
        self._open = ""
        return done + self._event("response.output_item.done", output_index=len(self._output) - 1, item=dict(item))

    def _of_part(self, kind: str, **more: object) -> bytes:
        """Makes an event on the open item's part; a call has none."""
        index: dict[str, object] = {} if self._open == "call" else {"content_index": 0}
        if kind.startswith("response.output_text"):
            index["logprobs"] = []
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **index, **more)

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


#: Types of items, by the kind of their parts.
_ITEMS = {"thinking": "reasoning", "content": "message", "call": "function_call", "arguments": "function_call"}

#: Beginnings of the names of events of a part's text.
_DELTAS = {
    "thinking": "response.reasoning_text",
    "content": "response.output_text",
    "arguments": "response.function_call_arguments",
}


def _content(kind: str, text: str) -> dict[str, Any]:
    if kind == "content":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        # No cache is written that a client would pay for; newer clients look for the number.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
