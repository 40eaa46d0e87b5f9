"""Replies that have a form unless they are calls: which of the two one is, its beginning says."""

from collections.abc import Sequence

from trtllm_dflash.text.reply.parts import PlainParser, TextParser


class BesideFormParser(TextParser):
    """Leaves a reply that begins as calls do to another parser. Any other is content as it stands, markup or not.

    Args:
        calls: parses a reply that begins so.
        openings: what it begins with.
    """

    def __init__(self, calls: TextParser, openings: Sequence[str]) -> None:
        super().__init__()
        self._calls = calls
        self._openings = tuple(openings)
        self._rest: TextParser | None = None  # which of the two parsers, once that is known

    def _advance(self) -> bool:
        if self._rest is None:
            is_opened = self._buffer.startswith(self._openings)
            if not is_opened and any(opening.startswith(self._buffer) for opening in self._openings):
                return False
            self._rest = self._calls if is_opened else PlainParser()
        self._parts += self._rest.push(self._buffer)
        self._buffer = ""
        return False

    def _end(self) -> None:
        rest = self._rest or PlainParser()
        self._parts += [*rest.push(self._buffer), *rest.finish()]
        self._buffer = ""
