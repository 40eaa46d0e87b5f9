"""The pages of an engine's K/V caches."""

from dataclasses import dataclass

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.kernels import PAGE_TILE

#: Rows of a page where nothing else was asked for: what our kernels read at a time.
PAGE_ROWS = PAGE_TILE


@dataclass(frozen=True)
class Paging:
    """The pages of a session's caches; a page has the same number in every layer, the drafter's too.

    Layers with a window may have fewer pages, numbered apart: of each slot those that its next rows see.
    """

    pages: int
    rows: int  # of a page
    width: int  # pages of a slot, at most
    window: int = 0  # keys that a row of those layers sees; 0: they have the pages that all have
    window_pages: int = 0

    @property
    def linear(self) -> bool:
        """Whether each slot has one page of its own, of its number."""
        return self.width == 1

    def first_seen(self, position: int) -> int:
        """Finds the first place of a slot whose rows are seen through the window, from a position on."""
        return max(0, position + 1 - self.window) // self.rows


def linear_paging(config: EngineConfig) -> Paging:
    """Makes one page of the whole length for each slot."""
    return Paging(config.max_batch, config.cache_length, 1)
