"""Decoding tokens as they arrive: characters split across tokens, and stop strings split across steps."""

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

#: Tokens without text that are decoded again with each token that follows. A character has four bytes at most, but
#: decoders of bytes show a run of them as one.
_MOST_PENDING = 256
#: Of those, the last ones that may be the beginning of a character.
_UNFINISHED = 4


class StoppableText:
    """A text that grows, up to the first stop string. Text that it has released never changes.

    Args:
        stop: texts that end it; it ends before the one that is complete first, whatever pieces it comes in.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = stop
        self._final: list[str] = []  # pieces that never change: one text of them would be copied with each that comes
        self._released = 0  # of those
        self._kept = ""  # behind them: what may turn out to begin a stop string
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, final or not."""
        return "".join(self._final) + self._kept

    def append(self, piece: str) -> None:
        """Adds a piece, unless a stop string has come."""
        if self.stopped:
            return
        if not self._stop:  # as mostly, and this is done for each token
            self._final.append(piece)
            return
        text = self._kept + piece
        # By their ends: one that begins sooner would else win where it comes in the same piece, and only there.
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        self.stopped = bool(found)
        end = min(found)[1] if found else len(text) - max(held(text, s) for s in self._stop)
        self._final.append(text[:end])
        self._kept = "" if found else text[end:]

    def release(self) -> str:
        """Returns new text that is final: all but an ending that may turn out to begin a stop string."""
        new = self._final[self._released :]
        self._released += len(new)
        return "".join(new)

    def flush(self) -> None:
        """Makes all text so far final: no stop string goes on from here."""
        self._final.append(self._kept)
        self._kept = ""


class TextStream(StoppableText):
    """The text of a growing token sequence: the decoder's own, as far as that never changes what it began with.

    Decoders of bytes do where a run of them turns out to be no text: they show none of it, not even whole characters.
    Characters that were released stay; what follows them is decoded by itself.

    Args:
        tokenizer: the engine's tokenizer.
        stop: texts that end the sequence; the text ends before the first of them.
        hidden: tokens that are no text; None: the tokenizer's special ones.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), hidden: frozenset[int] | None = None) -> None:
        super().__init__(stop)
        self._tokenizer = tokenizer
        self._hidden = frozenset(special_tokens(tokenizer)) if hidden is None else hidden
        self._stream = self._new_stream()
        self._ids: list[int] = []
        self._shown = 0  # of those, the ones whose text has come

    def push(self, token: int) -> None:
        """Adds a token."""
        if self.stopped or token in self._hidden:
            return
        self._ids.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception:  # the library has no other class for a text that does not go on as it began
            piece = self._begin_again()
        self._show(piece)
        if len(self._ids) - self._shown > _MOST_PENDING:
            self._settle()

    def finish(self) -> None:
        """Ends the sequence: an unfinished character at the end is shown as the decoder shows it."""
        if not self.stopped:
            whole = self._decode(self._ids)
            text = self.text
            rest = whole[len(text) :] if whole.startswith(text) else self._decode(self._ids[self._shown :])
            self.append(rest)
            self.flush()

    def _show(self, piece: str | None) -> None:
        if piece:
            self._shown = len(self._ids)
            self.append(piece)

    def _settle(self) -> None:
        """Shows the tokens whose text has not come as the decoder shows them now, but for an unfinished character."""
        ids = self._ids[self._shown :]
        whole = self._decode(ids)
        ends = range(len(ids) - 1, len(ids) - 1 - _UNFINISHED, -1)
        end = next((end for end in ends if self._decode(ids[:end]) + self._decode(ids[end:]) == whole), len(ids))
        self.append(self._decode(ids[:end]))
        self._shown += end
        self._show(self._begin_again())

    def _begin_again(self) -> str:
        """Decodes the tokens whose text has not come by themselves; returns what of it is final."""
        self._stream = self._new_stream()
        try:
            return "".join(self._stream.step(self._tokenizer, token) or "" for token in self._ids[self._shown :])
        except Exception:
            self._stream = self._new_stream()
            return self._decode(self._ids[self._shown :])

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Lists a tokenizer's special tokens, which are no text, with what is written for them."""
    return {token: its.content for token, its in tokenizer.get_added_tokens_decoder().items() if its.special}


def held(text: str, marker: str) -> int:
    """Returns the length of the longest ending of `text` that begins, and is not yet, the marker."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0
