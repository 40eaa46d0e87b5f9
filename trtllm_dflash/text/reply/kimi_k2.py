"""Kimi-K2's calls (K2, K2-Thinking, K2.5, K2.6): a section of calls, each with an id and its arguments as JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"path": "notes.txt"}
    <|tool_call_end|><|tool_calls_section_end|>

but on one line. The id is `functions.`, the function's name and the number of the call in the conversation. It thinks
between `<think>`, which K2.5's prompt ends with, and `</think>`; a section ends the thinking too.
"""

import re
from collections.abc import Sequence
from itertools import count
from typing import Any

from trtllm_dflash.text.reply.json_call import JsonObject
from trtllm_dflash.text.reply.parts import MOST_BLANKS, MarkupParser
from trtllm_dflash.text.stream import held

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"\s*(?:functions\.)?([a-zA-Z0-9_.-]+):[0-9]+\s*")
_LONGEST_ID = 256  # characters


class KimiK2Parser(MarkupParser):
    """Sets such calls apart. One whose id names no function is content, as it stands."""

    def __init__(self) -> None:
        super().__init__()
        self._arguments = JsonObject()
        self._owed: set[str] = set()  # closing markers of what was taken for content; others in it are left out

    def _end(self) -> None:
        if self._state == self._section and not self._markup:
            pass  # behind a call stands nothing but a marker that was cut off
        elif self._state in (self._content, self._section, self._id):
            self._show_rest()
        elif self._state == self._arguments_begun:
            self._emit("arguments", "{}")
        self._buffer = ""

    def _content(self) -> bool:
        found = self._find(SECTION, CALL, CALL_END, SECTION_END)  # quantized models leave the first out at times
        if found is None:
            return False
        at, marker = found
        if marker in (CALL_END, SECTION_END):
            return self._stray(at, marker)
        self._open(at)
        if marker == SECTION:
            self._read(len(SECTION))
        self._state = self._section
        return True

    def _section(self) -> bool:
        """Reads what stands between two calls, or at a section's beginning or end."""
        text = self._buffer.lstrip()
        if not self._markup:  # behind a call
            self._buffer = text
        elif len(self._buffer) - len(text) > MOST_BLANKS:
            return self._refuse()
        if text.startswith(CALL):
            self._read(len(self._buffer) - len(text) + len(CALL))
            self._state = self._id
            return True
        if text.startswith(SECTION_END):
            self._buffer, self._markup = text.removeprefix(SECTION_END), ""
            self._after_markup = True
            self._state = self._content
            return True
        return False if CALL.startswith(text) or SECTION_END.startswith(text) else self._refuse()

    def _id(self) -> bool:
        name, end, rest = self._buffer.partition(CALL_ARGUMENTS)
        begun = 0 if end else held(name, CALL_ARGUMENTS)
        if len(name) - begun > _LONGEST_ID:
            return self._refuse()
        if not end:
            return False
        found = _ID.fullmatch(name)
        if found is None:
            return self._refuse()
        self._emit("call", found[1])
        self._buffer, self._markup = rest, ""
        self._arguments = JsonObject()
        self._state = self._arguments_begun
        return True

    def _arguments_begun(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._buffer.startswith("{"):
            self._state = self._in_arguments
        else:  # none, as of a function without parameters
            self._emit("arguments", "{}")
            self._state = self._closing
        return True

    def _in_arguments(self) -> bool:
        end = self._arguments.push(self._buffer)
        self._emit("arguments", self._buffer[:end])
        self._buffer = self._buffer[end:]
        if self._arguments.done:
            self._state = self._closing
        return self._arguments.done

    def _closing(self) -> bool:
        if not self._reads_closing(CALL_END):
            return False
        self._after_markup = True
        self._state = self._section
        return True

    def _stray(self, at: int, marker: str) -> bool:
        """Reads a closing marker in content: part of it behind its opening one that is, else left out."""
        shown = self._buffer[:at] + (marker if marker in self._owed else "")
        self._owed.discard(marker)
        self._show(shown)
        self._buffer = self._buffer[at + len(marker) :]
        return True

    def _refuse(self) -> bool:
        self._owed |= {end for begin, end in ((SECTION, SECTION_END), (CALL, CALL_END)) if begin in self._markup}
        return super()._refuse()


def with_own_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives calls and their results the ids that the model would have written; its template shows it those."""
    numbers = count()
    ids: dict[str, str] = {}  # that the client knows, and that the model does

    def renamed(message: dict[str, Any]) -> dict[str, Any]:
        given = message.get("tool_call_id")
        if given is not None:
            return {**message, "tool_call_id": ids.get(given, given)}
        calls = [
            (call, f"functions.{call['function']['name']}:{next(numbers)}") for call in message.get("tool_calls", ())
        ]
        ids.update({call["id"]: own for call, own in calls if "id" in call})
        return {**message, "tool_calls": [{**call, "id": own} for call, own in calls]} if calls else message

    return [renamed(message) for message in messages]
