"""Qwen3's calls: JSON between `<tool_call>` and `</tool_call>`, as Hermes writes them, among other text."""

from trtllm_dflash.text.reply.json_call import JsonCall
from trtllm_dflash.text.reply.parts import TextParser, behind_closing

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Qwen3Parser(TextParser):
    """Sets such calls apart. One that is malformed before its arguments is content, as it stands."""

    def __init__(self) -> None:
        super().__init__()
        self._state = self._content
        self._opening = ""  # of the call that is being read, with the newlines before it
        self._call = JsonCall()
        self._after_call = False

    def _advance(self) -> bool:
        return self._state()

    def _end(self) -> None:
        if self._state == self._in_call:
            self._emit("content", self._opening + self._call.unfinished_head() if not self._call.begun else "")
        elif self._state == self._content and not self._after_call:
            self._emit("content", self._buffer)
        elif self._state == self._content:
            self._emit("content", self._buffer.lstrip("\n"))
        self._buffer = ""

    def _content(self) -> bool:
        if self._after_call:
            self._buffer = self._buffer.lstrip("\n")
        at = self._buffer.find(OPENING)
        if at < 0:
            shown = self._emit_before("content", OPENING)
            self._after_call = self._after_call and not shown
            return False
        before = self._buffer[:at].rstrip("\n")
        self._emit("content", before)
        self._after_call = self._after_call and not before
        self._opening = self._buffer[len(before) : at] + OPENING
        self._buffer = self._buffer[at + len(OPENING) :]
        self._call = JsonCall()
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        parts, self._buffer = self._call.push(self._buffer)
        self._parts += parts
        if self._call.refused:
            self._emit("content", self._opening)
            self._after_call = False
            self._state = self._content
            return True
        if self._call.done:
            self._state = self._closing
        return self._call.done

    def _closing(self) -> bool:
        rest = behind_closing(self._buffer, CLOSING)
        if rest is None:
            return False
        self._buffer = rest
        self._after_call = True
        self._state = self._content
        return True
