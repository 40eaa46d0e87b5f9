"""Thinking between `<think>` and `</think>`, at the beginning of a reply."""

from collections.abc import Callable

from trtllm_dflash.text.reply.parts import MOST_BLANKS, TextParser, without_newlines

OPENING, CLOSING = "<think>", "</think>"


class ThinkingParser(TextParser):
    """Sets thinking apart, and leaves the rest to another parser.

    Args:
        rest: parses what follows the thinking.
        begun: the prompt ended inside the thinking.
        ends: markers that end it besides its own, and belong to what follows.
    """

    def __init__(self, rest: TextParser, begun: bool = False, ends: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._ends = (CLOSING, *ends)
        self._rest = rest
        self._state = self._before_thinking if begun else self._start

    def _advance(self) -> bool:
        return self._state()

    def _end(self) -> None:
        if self._state in (self._before_thinking, self._thinking):
            self._emit("thinking", self._buffer.strip("\n"))
        else:
            self._parts += self._rest.push(self._buffer)
            self._parts += self._rest.finish()
        self._buffer = ""

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if len(self._buffer) - len(text) > MOST_BLANKS:
            self._state = self._answer
            return True
        if text.startswith(OPENING):
            self._buffer = text.removeprefix(OPENING)
            self._state = self._before_thinking
            return True
        if OPENING.startswith(text):
            return False
        self._state = self._answer
        return True

    def _before_thinking(self) -> bool:
        return self._skip_newlines(self._thinking)

    def _thinking(self) -> bool:
        ends = self._ends if "<" in self._buffer else ()  # as each begins: of many functions each may have one
        found = [at for marker in ends if (at := self._buffer.find(marker)) >= 0]
        if not found:
            self._emit_before("thinking", *ends)
            return False
        at = min(found)
        self._emit("thinking", without_newlines(self._buffer[:at]))
        self._buffer = self._buffer[at:].removeprefix(CLOSING)
        self._state = self._before_answer
        return True

    def _before_answer(self) -> bool:
        return self._skip_newlines(self._answer)

    def _answer(self) -> bool:
        self._parts += self._rest.push(self._buffer)
        self._buffer = ""
        return False

    def _skip_newlines(self, state: Callable[[], bool]) -> bool:
        """Goes on to a state once there is more than newlines."""
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = state
        return bool(self._buffer)
