"""A look ahead of a reply: where its grammar would stand behind tokens that it may yet go on with.

A matcher of llguidance is ruined by an error, and takes longer to copy with every token of its reply. So one copy goes
ahead and back, and a new one is made only where that cannot. What the library (1.9) does not take back:

- The last mask that it made. It gives that again wherever the lexer's state and the number of lexemes are the same,
  which behind other tokens may be wrong. So no copy goes on from a mask to other tokens than those before it; and masks
  of drafts are made backwards, so that the last is of a row that the reply comes to.
- Bytes that the grammar forces, which it adds to the text when it makes a mask: those are gone only where a token is
  taken back, and a token that is consumed over them may not be. So one is taken back in any case.
- Text of grammars with a `stop` or `max_tokens`, for which it says so. They are copied, and go forwards alone.
"""

from collections.abc import Sequence

from llguidance import LLMatcher


class Lookahead:
    """A copy of a reply's matcher that goes ahead of it.

    Args:
        matcher: the reply's, which consumes its tokens and makes no masks.

    Attributes:
        rolls_back: whether the copy can go back, as far as is known.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._reply = matcher
        self._copy: LLMatcher | None = None
        # All from the token on that was the reply's last when the copy moved last:
        self._taken: list[int] = []  # tokens of the reply
        self._at: list[int] = []  # tokens that the copy has consumed
        self._masked: list[int] = []  # tokens before the mask that the library keeps
        self.rolls_back = True

    def accept(self, token: int) -> None:
        """Notes that the reply's matcher has consumed a token."""
        self._taken.append(token)

    def behind(self, tokens: Sequence[int]) -> LLMatcher:
        """Makes the copy stand behind tokens that the reply may go on with; it has an error where it cannot."""
        path = [*self._taken, *tokens]
        # One that made no masks is farther from the library's limits: what another fails at, it may consume.
        if self._copy is None or not self._move(self._copy, path):
            self._copy, self._masked = self._reply.deep_copy(), []
            _consume(self._copy, list(tokens))
        before = max(len(self._taken) - 1, 0)
        self._at, self._masked = path[before:], self._masked[before:]
        del self._taken[:before]
        return self._copy

    def write_mask(self, address: int, size: int) -> None:
        """Writes the mask of so many bytes that the copy has where it stands, unless it has an error then."""
        assert self._copy is not None
        self._copy.unsafe_compute_mask_ptr(address, size)
        # It is not kept where the text is complete or bytes are forced: the one before it still is.
        is_kept = not self._copy.is_stopped() and not self._copy.compute_ff_bytes()
        if is_kept or len(self._at) > len(self._masked):
            self._masked = self._at

    def _move(self, copy: LLMatcher, path: list[int]) -> bool:
        """Makes a copy go back to where it can go on to the end of a path, and there; whether it could."""
        known = _shared(self._at, path)
        if self.rolls_back:
            known = min(known, len(self._at) - 1)
        elif len(self._at) == len(path):
            return False  # bytes that were forced may be in its text
        back = len(self._at) - known
        both = min(len(self._masked), len(path))
        if copy.is_error() or known < 0 or self._masked[:both] != path[:both]:
            return False
        if back and self.rolls_back:
            self.rolls_back = copy.rollback(back)
        return (not back or self.rolls_back) and _consume(copy, path[known:])


def _consume(matcher: LLMatcher, tokens: list[int]) -> bool:
    """Consumes tokens; whether the matcher could."""
    return not tokens or bool(matcher.consume_tokens(tokens))


def _shared(some: list[int], others: list[int]) -> int:
    """Counts the first tokens that two lists share."""
    both = min(len(some), len(others))
    if some[:both] == others[:both]:
        return both
    return next(place for place in range(both) if some[place] != others[place])
