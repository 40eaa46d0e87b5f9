"""Decoding tokens as they arrive: characters split across tokens, and stop strings split across steps."""

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of a growing token sequence. Text that it has released never changes.

    Args:
        tokenizer: the engine's tokenizer.
        stop: texts that end the sequence; the text ends before the first of them.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._text = ""
        self._released = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, final or not."""
        return self._text

    def push(self, token: int) -> None:
        """Adds a token."""
        if self.stopped:
            return
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer, token)
        if piece:
            self._append(piece)

    def finish(self) -> None:
        """Ends the sequence: an unfinished character at the end is shown as the decoder shows it."""
        if not self.stopped:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
            self._append(whole[len(self._text) :])
            self._stop = ()

    def release(self) -> str:
        """Returns new text that is final: all but an ending that may turn out to begin a stop string."""
        end = len(self._text) - (0 if self.stopped else self._held())
        piece = self._text[self._released : end]
        self._released = max(self._released, end)
        return piece

    def _append(self, piece: str) -> None:
        # A stop string may begin in the text before: search from where its first character could stand.
        reach = max((len(s) for s in self._stop), default=1) - 1
        start = max(0, len(self._text) - reach)
        self._text += piece
        found = [at for s in self._stop if (at := self._text.find(s, start)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _held(self) -> int:
        lengths = [n for s in self._stop for n in range(1, len(s)) if self._text.endswith(s[:n])]
        return max(lengths, default=0)
