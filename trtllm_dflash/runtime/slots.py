"""The slots of a session: the sequence in each, and the tokens whose K/V rows it still holds."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from trtllm_dflash.runtime.request import Sequence

#: Shorter shared prefixes are not worth a copy: a prompt has a template's first words in common with any other.
MIN_COPIED_ROWS = 16


@dataclass
class Slot:
    """One slot of the caches.

    Attributes:
        rows: the tokens whose K/V rows are known to be in the target's caches, from position 0 on. (A slot that takes
            no part in a step may write over the row of the context's last position: no prompt is so long as to use it.)
        drafter_rows: how many of them the drafter's caches hold too.
        block: rows that its next step can verify: the bonus token, and the drafts that its last step left.
        running: past its prefill.
        order: of giving slots to sequences, among all.
    """

    index: int
    sequence: Sequence | None = None
    rows: list[int] = field(default_factory=list)
    drafter_rows: int = 0
    block: int = 1
    running: bool = False
    order: int = 0

    def shared_rows(self, prompt_ids: list[int], drafted: bool) -> int:
        """Counts the first tokens of a prompt whose K/V rows the slot holds, in the drafter's caches too if it drafts.

        The prompt's last token is never among them: a step has to run on it.
        """
        most = min(len(prompt_ids) - 1, self.drafter_rows if drafted else len(self.rows))
        if self.rows[:most] == prompt_ids[:most]:
            return most
        return next(i for i in range(most) if self.rows[i] != prompt_ids[i])

    def keep(self, ids: list[int], with_drafter: bool) -> None:
        """Records the tokens whose K/V rows a step has written."""
        if with_drafter and self.drafter_rows == len(self.rows):
            self.drafter_rows += len(ids)
        self.rows += ids

    def release(self) -> None:
        """Frees the slot; its K/V rows stay, for a later prompt that begins with them."""
        self.sequence = None
        self.running = False

    def forget(self, rows: int = 0) -> None:
        """Forgets all K/V rows but the first `rows`."""
        del self.rows[rows:]
        self.drafter_rows = min(self.drafter_rows, rows)


class Slots:
    """All slots of an engine."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(i) for i in range(count)]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def lowest_free(self) -> Slot | None:
        """Finds the free slot of lowest index: decoding computes all slots up to the highest in use."""
        return next((slot for slot in self._slots if slot.sequence is None), None)

    def longest_prefix(self, prompt_ids: list[int], drafted: bool) -> tuple[Slot, int]:
        """Finds the slot that holds most of a prompt's first tokens, and their number; see `Slot.shared_rows`."""
        found = ((slot, slot.shared_rows(prompt_ids, drafted)) for slot in self._slots)
        return max(found, key=lambda pair: pair[1])
