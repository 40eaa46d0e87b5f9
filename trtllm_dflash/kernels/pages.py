"""Pages of K/V caches: the tables that say which ones a slot has, their updates on the device, and copies of pages."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trtllm_dflash.kernels.checks import check
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor

#: Pages of a slot that has several hold a multiple of so many rows: attention reads them by tiles.
PAGE_TILE = 64


SetPagesParams = structure(
    "dflash_set_pages_params", ints="count", pointers="updates page_table", longs="page_table_stride"
)


CopyPagesParams = structure(
    "dflash_copy_pages_params", ints="cache_count page_rows source target rows", pointers="caches"
)


@dataclass(frozen=True)
class Pages:
    """Page tables of slots: position p of slot s is row p % rows of page table[s, p // rows] of every cache.

    One page a slot, all of its rows, is a linear cache.
    """

    table: Tensor  # [slots, width] int32; entries past a slot's length are never read
    rows: int  # of a page: a multiple of PAGE_TILE, or all of a slot

    @property
    def length(self) -> int:
        """The most rows that a slot can have."""
        return int(self.table.shape[1]) * self.rows


def page_members(pages: Pages, keys: Tensor) -> dict[str, int]:
    """Checks the tables of a cache [pages, Hkv, page rows, D]; returns what kernels read of them, by member."""
    check_table(pages.table)
    check(keys.shape[2] == pages.rows, f"pages of {keys.shape[2]} rows, tables of pages of {pages.rows}")
    is_right = pages.rows % PAGE_TILE == 0 or pages.table.shape[1] == 1
    check(is_right, f"several pages a slot of {pages.rows} rows; of a multiple of {PAGE_TILE} alone")
    table = pages.table
    return {
        "page_table": table.data_ptr(),
        "page_table_stride": table.stride(0),
        "page_rows": pages.rows,
        "cache_rows": pages.length,
    }


def check_table(table: Tensor) -> None:
    """Refuses a page table that is not int32 [slots, width] with its rows contiguous."""
    is_right = table.dtype == torch.int32 and table.dim() == 2 and (table.stride(1) == 1 or table.shape[1] == 1)
    check(is_right, "a page table must be int32 [slots, width]")


def set_pages(table: Tensor, updates: Tensor) -> None:
    """Gives slots pages, from updates [U, 3] int32 of slot, index and page: table[slot, index] = page.

    No entry may be named twice. Both are on the GPU.
    """
    check_table(table)
    is_right = updates.dtype == torch.int32 and updates.dim() == 2 and updates.shape[1] == 3 and updates.is_contiguous()
    check(is_right, "updates of pages must be int32 [U, 3]")
    params = SetPagesParams(
        count=len(updates),
        updates=updates.data_ptr(),
        page_table=table.data_ptr(),
        page_table_stride=table.stride(0),
    )
    run("dflash_set_pages", params, stream())


class PageCopies:
    """Copies pages of all caches of an engine, one launch a copy.

    Args:
        caches: [pages, heads, page rows, D] each; heads, D and types may differ. Whoever calls keeps them.
    """

    def __init__(self, caches: Iterable[Tensor]) -> None:
        every = list(caches)
        self._pages, _, self._page_rows, _ = every[0].shape
        rows = []
        for cache in every:
            pages, heads, page_rows, size = cache.shape
            alike = (pages, page_rows) == (self._pages, self._page_rows) and cache.is_contiguous()
            check(alike, f"caches {tuple(cache.shape)} beside pages of {self._page_rows} rows")
            check(size * cache.itemsize % 16 == 0, f"rows of {size} {cache.dtype}; of a multiple of 16 bytes alone")
            rows.append([cache.data_ptr(), heads, size * cache.itemsize])
        self._table = torch.tensor(rows, dtype=torch.int64, device=every[0].device)  # [C, 3]

    def __call__(self, source: int, target: int, rows: int) -> None:
        """Copies the first rows of page `source` to page `target`."""
        is_there = 0 <= source < self._pages and 0 <= target < self._pages and 0 <= rows <= self._page_rows
        check(is_there, f"{rows} rows of page {source} to {target}, of {self._pages} of {self._page_rows} rows")
        params = CopyPagesParams(
            cache_count=len(self._table),
            page_rows=self._page_rows,
            source=source,
            target=target,
            rows=rows,
            caches=self._table.data_ptr(),
        )
        run("dflash_copy_pages", params, stream())
