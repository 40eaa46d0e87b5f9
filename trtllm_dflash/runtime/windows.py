"""Pages of layers with a window: held while a sequence's next rows see them, and kept until others need them.

Each lies behind a page of all layers, which a sequence has from then to its end.
"""

from trtllm_dflash.engine.paging import Paging


class Windows:
    """All pages of layers with a window. There are enough for every slot, by `plan_pages`.

    Args:
        paging: how many there are, and the pages that they lie behind.

    Attributes:
        held: those that sequences see.
    """

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self._free = list(range(paging.window_pages - 1, -1, -1))
        self._behind: dict[int, int] = {}  # page -> window page
        self._refs = [0] * paging.pages
        self._kept: dict[int, None] = {}  # pages whose window pages nobody holds; the first let go of comes first
        self.held = 0

    def of(self, page: int) -> int:
        """The window page that lies behind a page."""
        return self._behind[page]

    def has(self, page: int) -> bool:
        """Whether a window page lies behind a page, whose rows it then has."""
        return page in self._behind

    def seen_prefix(self, pages: list[int]) -> int:
        """Finds the longest run of a prompt's first pages whose next row sees no page that is lost: their number."""
        count = len(pages)
        while count:
            lost = next((i for i in range(count - 1, self.first_seen(count) - 1, -1) if not self.has(pages[i])), None)
            if lost is None:
                return count
            count = lost  # whatever ends behind it by less than a window sees it too
        return 0

    def first_seen(self, pages: int) -> int:
        """Finds the first of so many pages that the row after them sees."""
        return self._paging.first_seen(pages * self._paging.rows)

    def hold(self, page: int) -> int:
        """Keeps the window page behind a page, or gives it one, while a sequence sees it; returns it."""
        if page not in self._behind:
            self._behind[page] = self._take()
        self._kept.pop(page, None)
        self.held += self._refs[page] == 0
        self._refs[page] += 1
        return self._behind[page]

    def let_go(self, page: int) -> None:
        """Ends what `hold` began; its rows are kept for prompts that begin so."""
        self._refs[page] -= 1
        if not self._refs[page]:
            self.held -= 1
            self._kept[page] = None

    def forget(self, page: int) -> None:
        """Takes the window page away that lies behind a page, if any: the page has other rows from now on."""
        if page in self._behind:
            assert not self._refs[page]
            del self._kept[page]
            self._free.append(self._behind.pop(page))

    def exchange(self, page: int, known: int, seen: bool) -> None:
        """Lets a sequence that had a page have another one with the same rows, and what lies behind that.

        Args:
            seen: whether the sequence holds the window page behind it.
        """
        if known not in self._behind and page in self._behind:
            assert self._refs[page] == seen
            self._behind[known] = self._behind.pop(page)
            self._refs[known], self._refs[page] = self._refs[page], 0
            if page in self._kept:
                del self._kept[page]
                self._kept[known] = None
            return
        if seen:
            self.let_go(page)
            self.hold(known)
        self.forget(page)

    def _take(self) -> int:
        if not self._free:
            self.forget(next(iter(self._kept)))
        return self._free.pop()
