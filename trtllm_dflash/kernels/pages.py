"""Pages of K/V caches: the tables that say which ones a slot has, and their updates on the device."""

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
