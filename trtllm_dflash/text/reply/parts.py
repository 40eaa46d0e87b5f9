"""The parts of a reply, and parsers that find them in text that comes in pieces of any size."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trtllm_dflash.text.stream import StoppableText, held

PartKind = Literal["thinking", "content", "call", "arguments"]

#: Newlines before a marker that are none of the text, and blanks that may stand between two tags. Others are text, so
#: that few are kept back.
MOST_BLANKS = 64
#: Characters of a function's, a parameter's or a member's name in a reply.
LONGEST_MEMBER = 256


@dataclass(frozen=True)
class Part:
    """A piece of a reply. Pieces of one kind in a row are one text; `arguments` are those of the call before them.

    Attributes:
        text: of a call, the function's name.
    """

    kind: PartKind
    text: str


class Parser(ABC):
    """Takes a reply apart."""

    def __init__(self) -> None:
        self._parts: list[Part] = []  # that are known, and not handed on

    @abstractmethod
    def read(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        """Adds a piece of the reply, as text and as tokens; returns the parts that are known now."""

    @abstractmethod
    def finish(self) -> list[Part]:
        """Ends the reply; returns its last parts."""

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


class TextParser(Parser):
    """Takes a reply's text apart. It keeps back what may turn out to be markup, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = ""  # text that came and is not parsed

    def read(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        return self.push(text)

    def push(self, text: str) -> list[Part]:
        """Adds a piece of the reply's text; returns the parts that are known now."""
        self._buffer += text
        while self._advance():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        self._end()
        return self._take()

    @abstractmethod
    def _advance(self) -> bool:
        """Parses a bit of the buffer; returns False where more text is needed."""

    @abstractmethod
    def _end(self) -> None:
        """Parses what is left of the buffer: nothing follows."""

    def _emit(self, kind: PartKind, text: str) -> None:
        if text or kind == "call":
            self._parts.append(Part(kind, text))

    def _emit_before(self, kind: Literal["thinking", "content"], *markers: str) -> bool:
        """Emits the buffer up to newlines at its end, and up to what may be the beginning of a marker.

        Returns whether that was any text.
        """
        text = self._buffer
        end = len(text) - max((held(text, marker) for marker in markers), default=0)
        end = len(without_newlines(text[:end]))
        self._emit(kind, text[:end])
        self._buffer = text[end:]
        return end > 0

    def _reads_closing(self, closing: str) -> bool:
        """Reads blanks and a call's closing tag, which may be missing; returns False while it may still come."""
        self._buffer = self._buffer.lstrip()
        if self._buffer != closing and closing.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(closing)
        return True


class MarkupParser(TextParser):
    """Takes a reply's text apart that is content, but for calls and the like between markers."""

    def __init__(self) -> None:
        super().__init__()
        self._state: Callable[[], bool] = self._content
        self._markup = ""  # what was read of a call that has not begun, with the newlines before it
        self._after_markup = False  # newlines there are none of the content

    def _advance(self) -> bool:
        return self._state()

    @abstractmethod
    def _content(self) -> bool:
        """Parses content, up to a marker."""

    def _find(self, *markers: str) -> tuple[int, str] | None:
        """Finds the first marker in the buffer, and its place; where none has come, shows what begins none."""
        if self._after_markup:
            self._buffer = self._buffer.lstrip("\n")
        found = [(at, marker) for marker in markers if (at := self._buffer.find(marker)) >= 0]
        if found:
            return min(found)
        shown = self._emit_before("content", *markers)
        self._after_markup = self._after_markup and not shown
        return None

    def _open(self, at: int) -> None:
        """Shows content up to the markup that may begin there."""
        before = without_newlines(self._buffer[:at])
        self._show(before)
        self._markup = self._buffer[len(before) : at]
        self._buffer = self._buffer[at:]

    def _read(self, count: int) -> None:
        """Reads characters of what may be markup."""
        self._markup += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _refuse(self) -> bool:
        """Takes what looked like markup for content."""
        self._show(self._markup)
        self._markup = ""
        self._state = self._content
        return True

    def _show(self, text: str) -> None:
        self._emit("content", text)
        self._after_markup = self._after_markup and not text

    def _show_rest(self) -> None:
        """Shows content that the reply ends in, or markup that it ends in before it has begun."""
        text = self._markup + self._buffer
        self._emit("content", text.lstrip("\n") if self._after_markup else text)


class PlainParser(TextParser):
    """Takes all text for content."""

    def _advance(self) -> bool:
        self._emit("content", self._buffer)
        self._buffer = ""
        return False

    def _end(self) -> None:
        pass


def without_newlines(text: str) -> str:
    """Takes newlines off a text's end, up to `MOST_BLANKS`."""
    return text[: max(len(text.rstrip("\n")), len(text) - MOST_BLANKS)]


class StoppedParts:
    """The parts of a reply up to the first stop string in its content, or up to the last call that is wanted.

    Args:
        stop: texts that end the reply; thinking and calls are not searched.
        most_calls: of one reply; None is any number.
    """

    def __init__(self, stop: tuple[str, ...], most_calls: int | None = None) -> None:
        self._searched = bool(stop)  # a reply of many pieces is not kept for nothing
        self._content = StoppableText(stop)
        self._calls_left = most_calls
        self.stopped = False

    def take(self, parts: list[Part], last: bool) -> list[Part]:
        """Returns what to show, given the new parts and whether they are the last ones."""
        shown: list[Part] = []
        for part in parts:
            if self.stopped:
                break
            if part.kind == "content" and self._searched:
                self._content.append(part.text)
                self._release(shown)
                self.stopped = self._content.stopped
                continue
            self._flush(shown)
            if part.kind == "call" and self._calls_left is not None:
                self.stopped = self._calls_left == 0
                self._calls_left -= 1
            if not self.stopped:
                shown.append(part)
        if last:
            self._flush(shown)
        return shown

    def _flush(self, shown: list[Part]) -> None:
        """Shows content that was kept back: a stop string does not go on behind thinking, a call or the end."""
        self._content.flush()
        self._release(shown)

    def _release(self, shown: list[Part]) -> None:
        text = self._content.release()
        if text:
            shown.append(Part("content", text))
