"""Llama 3.1's calls: a reply that is one JSON object `{"name": ..., "parameters": {...}}`, or several.

The token `<|python_tag|>`, which may come first, is a special one and no text.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from trtllm_dflash.text.reply.json_call import JsonCall
from trtllm_dflash.text.reply.parts import TextParser


class Llama3Parser(TextParser):
    """Reads calls at the beginning of a reply. From the first text that is none, all is content."""

    def __init__(self) -> None:
        super().__init__()
        self._call: JsonCall | None = JsonCall()
        self._spaces = ""  # before the call that is being read
        self._calls = 0

    def _advance(self) -> bool:
        if self._call is None:
            self._emit("content", self._buffer)
            self._buffer = ""
            return False
        if not self._call.begun and not self._call.unfinished_head():
            self._skip_separators()
        if not self._buffer:
            return False
        parts, self._buffer = self._call.push(self._buffer)
        self._parts += parts
        if self._call.refused:
            self._call = None
            self._buffer = self._spaces + self._buffer
        elif self._call.done:
            self._calls += 1
            self._call, self._spaces = JsonCall(), ""
        else:
            return False
        return True

    def _end(self) -> None:
        if self._call is not None and not self._call.begun:
            head = self._call.unfinished_head()
            # Spaces and a semicolon behind a call separate it from one that did not come.
            self._emit("content", self._spaces + head if head or not self._calls else "")
        self._buffer = ""

    def _skip_separators(self) -> None:
        text = self._buffer.lstrip(" \n;" if self._calls else " \n")
        self._spaces += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divides messages with several calls, each followed by its result: the model's template takes one a message."""
    divided: list[dict[str, Any]] = []
    placed: set[int] = set()  # results that stand behind their calls
    for at, message in enumerate(messages):
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            divided += [message] if at not in placed else []
            continue
        # Up to the next calls: a client may give an id again.
        later = takewhile(lambda place: not messages[place].get("tool_calls"), range(at + 1, len(messages)))
        results = {messages[place]["tool_call_id"]: place for place in later if "tool_call_id" in messages[place]}
        for number, call in enumerate(calls):
            divided.append({**message, "content": message["content"] if number == 0 else "", "tool_calls": [call]})
            place = results.pop(call["id"], None) if "id" in call else None
            if place is not None:
                divided.append(messages[place])
                placed.add(place)
    return divided
