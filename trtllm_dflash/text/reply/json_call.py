"""A call written as one JSON object: `{"name": "f", "arguments": {...}}`."""

import json
import re
from typing import Any

from trtllm_dflash.text.reply.parts import Part

_STRING = r'"(?:[^"\\]|\\.)*"'
_VALUE = rf"(?:{_STRING}|-?[0-9]+|null)"
_PAIRS = rf'\s*\{{\s*(?:"(?:name|type|id)"\s*:\s*{_VALUE}\s*,\s*)*'
#: Up to the arguments, which Llama calls parameters; or the whole of a call that has none.
_HEAD = re.compile(rf'{_PAIRS}"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.DOTALL)
_WITHOUT_ARGUMENTS = re.compile(
    rf'{_PAIRS}(?:"(?:name|type|id)"\s*:\s*{_VALUE}|"(?:arguments|parameters)"\s*:\s*null)\s*\}}', re.DOTALL
)
_FIRST_KEYS = ('{"name"', '{"type"', '{"id"')
#: Of a call whose arguments come before its name, which is read once it is whole.
_ARGUMENTS_FIRST = re.compile(r'\s*\{\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_LAST_KEYS = ('{"arguments"', '{"parameters"')
_LONGEST_HEAD = 1024  # characters before the arguments
_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789truefalsn \t\r\nE')


class JsonObject:
    """Finds where a JSON object ends that comes in pieces. It looks at brackets and strings, not at the rest.

    Args:
        depth: of the brackets that were opened before its first piece.

    Attributes:
        broken: it ended at a character that no JSON has there, which is not part of it.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self.done = False
        self.broken = False

    def push(self, text: str) -> int:
        """Adds a piece; returns how many of its characters belong to the object."""
        for at, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character not in _OUTSIDE_STRINGS:
                self.done = self.broken = True
                return at
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return at + 1
        return len(text)


class JsonCall:
    """A call that comes in pieces. Its arguments are handed on as they are written.

    Attributes:
        begun: its arguments have, and it is handed on.
        refused: what came so far begins no call; none of it was handed on.
        done: the call has ended.
    """

    def __init__(self) -> None:
        self._head = ""
        self._looked = 0  # characters of it, by `_whole`
        self.begun = False
        self._whole = JsonObject()  # where its arguments come first
        self._arguments = JsonObject()
        self._tail = JsonObject(depth=1)
        self.refused = False

    @property
    def done(self) -> bool:
        return self._tail.done or self._arguments.broken

    def push(self, text: str) -> tuple[list[Part], str]:
        """Adds a piece; returns parts of the call, and text that follows it, or that is none where it is refused."""
        parts: list[Part] = []
        if not self.begun:
            self._head += text
            self._read_head(parts)
            if self.refused or not self.begun:
                return parts, self._head if self.refused else ""
            text = self._head
        if not self._arguments.done:
            text = self._read_arguments(text, parts)
        if self._arguments.done and not self.done:
            text = text[self._tail.push(text) :]
        return parts, text

    def unfinished_head(self) -> str:
        """Returns the text of a call whose arguments have not begun: at the end of a reply, it is none."""
        return "" if self.begun else self._head

    def _read_arguments(self, text: str, parts: list[Part]) -> str:
        end = self._arguments.push(text)
        if end:
            parts.append(Part("arguments", text[:end]))
        return text[end:]

    def _read_head(self, parts: list[Part]) -> None:
        """Reads `{"name": "f", "arguments": `; what follows stays in the head."""
        first = _ARGUMENTS_FIRST.match(self._head)
        if first is not None:
            self._read_whole(parts, first.end())
            return
        whole = _WITHOUT_ARGUMENTS.match(self._head)
        head = whole or _HEAD.match(self._head)
        if head is None:
            begun = "".join(self._head[:_LONGEST_HEAD].split())
            possible = any(begun.startswith(keys) or keys.startswith(begun) for keys in _FIRST_KEYS + _LAST_KEYS)
            self.refused = not possible or len(self._head) > _LONGEST_HEAD
            return
        try:
            name = json.loads(head[0] if whole else head[0] + "{}}", strict=False).get("name")
        except ValueError:
            name = None
        self.refused = not is_text(name)
        if self.refused:
            return
        self._begin(parts, name, head.end())
        if whole:
            self._end(parts, "{}")

    def _read_whole(self, parts: list[Part], start: int) -> None:
        """Reads `{"arguments": {...}, "name": "f"}` once it is whole; its arguments begin at `start`."""
        end = self._whole.push(self._head[self._looked :])
        self._looked, end = len(self._head), self._looked + end
        if not self._whole.done:
            return
        try:
            name = json.loads(self._head[:end], strict=False).get("name")
        except (ValueError, RecursionError):
            name = None
        self.refused = not is_text(name)
        if self.refused:
            return
        written = self._head[start : start + JsonObject().push(self._head[start:])]
        self._begin(parts, name, end)
        self._end(parts, written)

    def _begin(self, parts: list[Part], name: str, end: int) -> None:
        self.begun = True
        self._head = self._head[end:]
        parts.append(Part("call", name))

    def _end(self, parts: list[Part], arguments: str) -> None:
        parts.append(Part("arguments", arguments))
        self._arguments.done = self._tail.done = True


def is_text(value: object) -> bool:
    """Whether a value that was read of JSON is a text, and not empty: escapes may write halves of a character."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= one <= "\udfff" for one in value)


def refuse_constant(name: str) -> None:
    """Refuses words that Python's `json` reads and JSON has not, such as NaN: its `parse_constant`."""
    raise ValueError(f"{name} is not JSON")


def begun_object(text: str) -> dict[str, Any]:
    """Reads an object that may be cut off: its last member as far as it goes, or without that; {} of what is none."""
    closings: list[str] = []
    in_string = escaped = False
    last = 0  # where the comma before the last member stands
    for at, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            closings.append("}" if character == "{" else "]")
        elif character in "}]" and closings:
            closings.pop()
        elif character == "," and len(closings) == 1:
            last = at
    for whole in (text + '"' * in_string + "".join(reversed(closings)), text[:last] + "}"):
        try:
            found = json.loads(whole, strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}
