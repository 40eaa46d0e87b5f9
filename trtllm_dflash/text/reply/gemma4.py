"""Gemma 4's replies: thinking in a channel, and calls whose arguments are in a notation of its own.

    <|channel>thought
    I need the weather.
    <channel|><|tool_call>call:weather{city:<|"|>Rome<|"|>,days:[1,2],units:{wind:<|"|>m/s<|"|>}}<tool_call|>

Texts stand between `<|"|>`; names do not, and numbers, `true` and `false` are JSON's. All these markers are special
tokens of its tokenizer. The prompt ends before the channel, or behind one that is empty.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from trtllm_dflash.text.reply.json_call import is_text, refuse_constant
from trtllm_dflash.text.reply.parts import LONGEST_MEMBER, MarkupParser, without_newlines
from trtllm_dflash.text.stream import held

CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
CALL, CALL_END = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
RESPONSES = "tool_responses"  # of a message, as templates know it

_THOUGHT = "thought"  # the channel's name
_HEAD = re.compile(r"\s{0,16}call:([a-zA-Z0-9_.-]{1,128})\{")
_HEAD_BEGUN = re.compile(r"\s{0,16}(c|ca|cal|call|call:[a-zA-Z0-9_.-]{0,128})?")
#: How the template's Jinja writes JSON's words, and how models do.
_WORDS = {"True": "true", "False": "false", "None": "null", "none": "null", "nil": "null"}
_BARE_END = re.compile(rf"[,}}\]]|{re.escape(CALL_END)}")
_IN_JSON = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)  # a text in JSON, between its quotes
_BLANKS = " \n\t\r"


class Arguments:
    """Arguments that come in pieces, and become JSON as they come. Begins behind their first bracket.

    Attributes:
        done: their last bracket has come, or what cannot stand where it does, before which their brackets are closed.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._written: list[str] = ["{"]
        self._brackets = ["}"]  # that close what is open
        self._separator = ""  # before the next member or item
        self._state: Callable[[], bool] = self._member
        self._name = ""  # of a member
        self._read: list[str] = []  # of a value, in which no end of it stands: looked at once
        self.done = False

    def push(self, text: str) -> tuple[str, str]:
        """Adds a piece; returns JSON, and text that follows the arguments."""
        self._buffer += text
        while not self.done and self._state():
            pass
        written, self._written = "".join(self._written), []
        rest = self._buffer if self.done else ""
        self._buffer = "" if self.done else self._buffer
        return written, rest

    def end(self) -> str:
        """Returns the rest of a value that is cut off."""
        cut, self._buffer = "".join(self._read) + self._buffer, ""
        if self._state == self._in_text:
            return _inner(cut)
        cut = cut[: len(cut) - held(cut, CALL_END)].strip()
        if self._state == self._json_text:
            return f'{self._separator}"{_inner(cut[1:])}'
        return self._separator + _scalar(cut) if self._state == self._bare and cut else ""

    # -- states ------------------------------------------------------------------------------------------------------

    def _member(self) -> bool:
        """Reads a member's name, or the bracket that closes an object."""
        self._buffer = self._buffer.lstrip(_BLANKS)
        if self._buffer.startswith("}"):
            return self._close()
        if self._buffer.startswith(QUOTE):
            name, end, rest = self._buffer.removeprefix(QUOTE).partition(QUOTE)
            if len(name) - (0 if end else held(name, QUOTE)) > LONGEST_MEMBER:
                return self._break()
            if not end:
                return False
        elif QUOTE.startswith(self._buffer):
            return False
        else:
            name, end, rest = self._buffer.partition(":")
            if len(name) > LONGEST_MEMBER or any(mark in name for mark in ("{", "}", "[", "]", ",", CALL_END)):
                return self._break()
            if not end:
                return False
            name, rest = name.rstrip(_BLANKS), end + rest
            if len(name) > 1 and name[0] == name[-1] == '"':  # as in JSON
                name = name[1:-1]
        self._name, self._buffer = name, rest
        self._state = self._colon
        return True

    def _colon(self) -> bool:
        self._buffer = self._buffer.lstrip(_BLANKS)
        if not self._buffer:
            return False
        if self._buffer[0] != ":":
            return self._break()
        self._buffer = self._buffer[1:]
        self._write(self._separator + json.dumps(self._name, ensure_ascii=False) + ": ")
        self._separator = ""
        self._state = self._value
        return True

    def _item(self) -> bool:
        """Reads the bracket that closes an array, or leaves an item to be read."""
        self._buffer = self._buffer.lstrip(_BLANKS)
        if self._buffer.startswith("]"):
            return self._close()
        if self._buffer:
            self._state = self._value
        return bool(self._buffer)

    def _value(self) -> bool:
        self._buffer = self._buffer.lstrip(_BLANKS)
        if self._buffer.startswith(QUOTE):
            self._buffer = self._buffer.removeprefix(QUOTE)
            self._write(self._separator + '"')
            self._state = self._in_text
        elif self._buffer[:1] in ("{", "["):
            bracket, self._buffer = self._buffer[0], self._buffer[1:]
            self._write(self._separator + bracket)
            self._separator = ""
            self._brackets.append("}" if bracket == "{" else "]")
            self._state = self._member if bracket == "{" else self._item
        elif QUOTE.startswith(self._buffer):
            return False
        else:
            self._state = self._json_text if self._buffer[0] == '"' else self._bare
        return True

    def _json_text(self) -> bool:
        """Reads a text as JSON writes it; one that the call's closing marker cuts off stands without marks."""
        cut = self._buffer.find(CALL_END)
        begin = 0 if self._read else 1  # behind its first mark
        found = _IN_JSON.match(self._buffer, begin, cut if cut >= 0 else len(self._buffer))
        assert found is not None  # it may be empty
        end = found.end()
        if self._buffer[end : end + 1] == '"':
            self._write_value(end + 1)
        elif cut >= 0:
            self._buffer, self._read = "".join(self._read) + self._buffer, []
            self._state = self._bare
        else:
            self._keep(min(end, len(self._buffer) - held(self._buffer, CALL_END)))
            return False
        return True

    def _bare(self) -> bool:
        found = _BARE_END.search(self._buffer)
        if found is None:
            self._keep(len(self._buffer) - held(self._buffer, CALL_END))
            return False
        self._write_value(found.start())
        return True

    def _keep(self, count: int) -> None:
        """Puts characters of a value aside, before its end has come."""
        self._read.append(self._buffer[:count])
        self._buffer = self._buffer[count:]

    def _write_value(self, end: int) -> None:
        """Writes a value that ends there."""
        self._keep(end)
        written, self._read = "".join(self._read).strip(), []
        self._write(self._separator + (_scalar(written) if written else "null"))
        self._state = self._after

    def _in_text(self) -> bool:
        at = self._buffer.find(QUOTE)
        end = len(self._buffer) - held(self._buffer, QUOTE) if at < 0 else at
        self._write(_inner(self._buffer[:end]) + ("" if at < 0 else '"'))
        self._buffer = self._buffer[end:].removeprefix(QUOTE) if at >= 0 else self._buffer[end:]
        if at >= 0:
            self._state = self._after
        return at >= 0

    def _after(self) -> bool:
        """Reads what stands behind a value: a comma, or a bracket."""
        self._buffer = self._buffer.lstrip(_BLANKS)
        if not self._buffer:
            return False
        if self._buffer[0] == ",":
            self._buffer = self._buffer[1:]
            self._separator = ", "
            self._state = self._member if self._brackets[-1] == "}" else self._item
            return True
        return self._close()

    # ----------------------------------------------------------------------------------------------------------------

    def _close(self) -> bool:
        bracket = self._brackets[-1]
        if self._buffer[0] != bracket:
            return self._break()
        self._buffer = self._buffer[1:]
        self._write(bracket)
        self._brackets.pop()
        self._separator = ""
        self._state = self._after
        self.done = not self._brackets
        return not self.done

    def _break(self) -> bool:
        """Ends at what cannot stand here, which is left to what follows."""
        self._write("".join(reversed(self._brackets)))
        self.done = True
        return False

    def _write(self, text: str) -> None:
        self._written.append(text)


class Gemma4Parser(MarkupParser):
    """Sets thinking and calls apart, wherever they stand. What begins no call behind a call's marker is content.

    Args:
        calls: are looked for.
    """

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self._markers = (CHANNEL, CALL, CALL_END) if calls else (CHANNEL,)
        self._arguments = Arguments()
        self._is_owed = False  # the closing marker of what was taken for content; another in it is left out
        self._skipped: list[str] = []  # behind a call's arguments, in which no marker stands

    def _end(self) -> None:
        if self._state in (self._content, self._named):
            self._show_rest()
        elif self._state == self._in_arguments:
            self._emit("arguments", self._arguments.end())
        elif self._state == self._closing:
            text = ("".join(self._skipped) + self._buffer).lstrip()
            self._emit("content", "" if CALL_END.startswith(text) else text)
        elif self._state in (self._before_thinking, self._thinking):
            self._emit("thinking", self._buffer.strip("\n"))
        self._buffer = ""

    # -- states ------------------------------------------------------------------------------------------------------

    def _content(self) -> bool:
        found = self._find(*self._markers)
        if found is None:
            return False
        at, marker = found
        if marker == CALL_END:
            return self._stray(at)
        self._open(at)
        self._read(len(marker))
        self._state = self._named if marker == CALL else self._channel
        return True

    def _stray(self, at: int) -> bool:
        """Reads a call's closing marker in content: part of it behind an opening one that is, else left out."""
        shown = self._buffer[:at] + (CALL_END if self._is_owed else "")
        self._is_owed = False
        self._show(shown)
        self._buffer = self._buffer[at + len(CALL_END) :]
        return True

    def _channel(self) -> bool:
        """Reads the channel's name; a channel without it is thinking all the same."""
        if _THOUGHT.startswith(self._buffer):
            return False
        if self._buffer[len(_THOUGHT) :][:1] in ("\n", CHANNEL_END[0]):
            self._buffer = self._buffer.removeprefix(_THOUGHT)
        self._state = self._before_thinking
        return True

    def _before_thinking(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._thinking
        return bool(self._buffer)

    def _thinking(self) -> bool:
        at = self._buffer.find(CHANNEL_END)
        if at < 0:
            self._emit_before("thinking", CHANNEL_END)
            return False
        self._emit("thinking", without_newlines(self._buffer[:at]))
        self._buffer = self._buffer[at + len(CHANNEL_END) :]
        self._markup, self._after_markup = "", True
        self._state = self._content
        return True

    def _named(self) -> bool:
        head = _HEAD.match(self._buffer)
        if head is None:
            if _HEAD_BEGUN.fullmatch(self._buffer):
                return False
            self._is_owed = True
            return self._refuse()
        self._emit("call", head[1])
        self._markup = ""
        self._buffer = self._buffer[head.end() :]
        self._arguments = Arguments()
        self._state = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        written, self._buffer = self._arguments.push(self._buffer)
        self._emit("arguments", written)
        if self._arguments.done:
            self._state = self._closing
        return self._arguments.done

    def _closing(self) -> bool:
        """Reads a call's closing marker, and leaves out what stands before it; it is content if another comes first."""
        found = [(at, marker) for marker in self._markers if (at := self._buffer.find(marker)) >= 0]
        if not found:
            end = len(self._buffer) - max(held(self._buffer, marker) for marker in self._markers)
            self._skipped.append(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        at, marker = min(found)
        skipped, self._skipped = "".join(self._skipped), []
        self._buffer = self._buffer[at + len(CALL_END) :] if marker == CALL_END else (skipped + self._buffer).lstrip()
        self._after_markup = True
        self._state = self._content
        return True


def with_responses(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives the results of calls to the message that made them: each version of the template looks there for them."""
    names: dict[str, str] = {}  # so far: a client may give an id again
    joined: list[dict[str, Any]] = []
    responses: list[dict[str, Any]] | None = None  # of the last message, where that is a copy which has them
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        name = names.get(message.get("tool_call_id", ""))
        if name is None or not joined or "tool_calls" not in joined[-1]:
            joined.append(message)
            responses = None
            continue
        if responses is None:
            responses = list(joined[-1].get(RESPONSES, ()))
            joined[-1] = {**joined[-1], RESPONSES: responses}
        responses.append({"name": name, "response": message["content"]})
    return joined


def _scalar(written: str) -> str:
    """Makes JSON of a value that stands without marks: the word or number that it is, else a text."""
    written = _WORDS.get(written, written)
    try:
        value = json.loads(written, strict=False, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(written, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and is_text(value) else written


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
