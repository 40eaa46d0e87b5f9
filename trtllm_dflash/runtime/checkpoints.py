"""States of recurrent layers that are kept, for prompts that begin like earlier ones.

K/V rows can be gone on from at any length; a state stands at one position, or a few rows behind it. So sequences go on
from where both are: rows by the tree of pages, and the state that stands furthest among those kept.
"""

from collections.abc import Collection, Container
from dataclasses import dataclass

from trtllm_dflash.ops.delta_states import absorbed_rows
from trtllm_dflash.session.session import Session

#: Tokens between two states that are kept of one prompt; its end is one of them in any case. Also how many more a kept
#: state must spare later prompts for a piece to end there.
SPACING = 256


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A kept state.

    Attributes:
        place: among all states, behind those of the slots.
        tokens: up to the last row that it can be gone on behind.
        length: tokens up to the first one.
        ends: whether they are a whole prompt: what came behind them was a reply.
    """

    place: int
    tokens: list[int]
    length: int
    ends: bool


class Checkpoints:
    """The kept states of an engine; the one that was used longest ago gives way first.

    Args:
        slots: of the engine.
        count: of states that can be kept.
        pending: rows at most that a step leaves beside a state.
    """

    def __init__(self, slots: int, count: int, pending: int) -> None:
        self.pending = pending
        self._free = list(range(slots + count - 1, slots - 1, -1))
        self._kept: list[Checkpoint] = []  # the one that was used last is the last

    def find(self, ids: list[int], most: int, unwritten: Collection[int] = ()) -> tuple[int, Checkpoint | None]:
        """Finds the state from which a sequence goes on furthest, up to `most` rows: how far, and the state.

        Args:
            unwritten: places whose states are yet to be copied there; they are not found.
        """
        best, found = 0, None
        for kept in self._kept:
            if kept.place in unwritten or kept.length > most or ids[: kept.length] != kept.tokens[: kept.length]:
                continue
            reached, end = kept.length, min(most, len(kept.tokens))
            while reached < end and ids[reached] == kept.tokens[reached]:
                reached += 1
            if reached > best:
                best, found = reached, kept
        return best, found

    def use(self, kept: Checkpoint) -> None:
        """Notes that a state is gone on from."""
        self._kept.remove(kept)
        self._kept.append(kept)

    def keep(self, tokens: list[int], first: int, ends: bool) -> Checkpoint | None:
        """Keeps the state behind a step on a sequence's rows from `first` on; None where it is kept already.

        Args:
            tokens: the sequence's, up to and with the step's.
            ends: whether they are its whole prompt.
        """
        length = first + absorbed_rows(len(tokens) - first, self.pending)
        if any(kept.length == length and kept.tokens == tokens for kept in self._kept):
            return None
        place = self._free.pop() if self._free else self._kept.pop(0).place
        self._kept.append(Checkpoint(place, tokens, length, ends))
        return self._kept[-1]

    def drop(self, state: Checkpoint) -> bool:
        """Forgets a state, if it is kept still; returns whether it was."""
        others = [kept for kept in self._kept if kept is not state]
        is_kept = len(others) < len(self._kept)
        if is_kept:
            self._kept = others
            self._free.append(state.place)
        return is_kept

    def drop_at(self, places: Container[int]) -> None:
        """Forgets the states that are kept at these places."""
        for state in [kept for kept in self._kept if kept.place in places]:
            self.drop(state)


class StateReach:
    """Reach of a prompt into rows that others left: it goes on from them as far as a kept state does.

    Attributes:
        rows: that others were found to have left, more than that perhaps.
    """

    def __init__(self, checkpoints: Checkpoints, ids: list[int], unwritten: Collection[int]) -> None:
        self._checkpoints, self._ids, self._unwritten = checkpoints, ids, unwritten
        self.rows = 0

    def __call__(self, rows: int) -> int:
        self.rows = max(self.rows, rows)
        return self._find(rows)[0]

    def go_on(self, rows: int) -> Checkpoint | None:
        """Notes that the prompt goes on behind so many rows, which it can; returns the state, None behind none."""
        reached, kept = self._find(rows)
        assert reached == rows
        if kept is not None:
            self._checkpoints.use(kept)
        return kept

    def branch(self, rows: int, kept: Checkpoint | None, prompt: int) -> int:
        """Finds where the prompt parts from another that began alike, for later ones to go on from there.

        Nowhere where it goes on from the other's reply, as the next turn of a conversation does. Nor near its own end:
        the state that is kept there serves as well.

        Args:
            rows: that it goes on behind, from the state `kept`.
            prompt: its tokens.

        Returns:
            Tokens up to there; 0: not worth a state.
        """
        is_next_turn = kept is not None and kept.ends and len(kept.tokens) == rows
        is_worth_it = self.rows - rows >= SPACING and prompt - self.rows > self._checkpoints.pending
        return self.rows if is_worth_it and not is_next_turn else 0

    def _find(self, rows: int) -> tuple[int, Checkpoint | None]:
        return self._checkpoints.find(self._ids, rows, self._unwritten)


def checkpoints_of(session: Session) -> Checkpoints | None:
    """Makes room for the states that a session can keep; None where its rows need none."""
    count, config = session.limits.checkpoints, session.config
    return None if count is None else Checkpoints(config.max_batch, count, config.block_size)
