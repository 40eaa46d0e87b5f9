"""Qwen3's calls: JSON between `<tool_call>` and `</tool_call>`, as Hermes writes them, among other text."""

from trtllm_dflash.text.reply.json_call import JsonCall
from trtllm_dflash.text.reply.parts import MarkupParser

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Qwen3Parser(MarkupParser):
    """Sets such calls apart. One that is malformed before its arguments is content, as it stands."""

    def __init__(self) -> None:
        super().__init__()
        self._call = JsonCall()

    def _end(self) -> None:
        if self._state == self._in_call and not self._call.begun:
            self._emit("content", self._markup + self._call.unfinished_head())
        elif self._state == self._content:
            self._show_rest()
        self._buffer = ""

    def _content(self) -> bool:
        found = self._find(OPENING)
        if found is None:
            return False
        self._open(found[0])
        self._read(len(OPENING))
        self._call = JsonCall()
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        parts, self._buffer = self._call.push(self._buffer)
        self._parts += parts
        if self._call.refused:
            return self._refuse()
        if self._call.done:
            self._state = self._closing
        return self._call.done

    def _closing(self) -> bool:
        if not self._reads_closing(CLOSING):
            return False
        self._markup, self._after_markup = "", True
        self._state = self._content
        return True
