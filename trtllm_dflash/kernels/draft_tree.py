"""Trees of drafts: their growth, the path that is accepted, and the move of its keys and values."""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from trtllm_dflash.kernels.attention import TREE_ROWS
from trtllm_dflash.kernels.checks import DTYPES, HALVES, address, check, check_ints
from trtllm_dflash.kernels.library import MOST_JOINED, run, stream, structure
from trtllm_dflash.kernels.pages import Pages, check_table
from trtllm_dflash.kernels.rows import Rows, check_targets

Tensor = torch.Tensor

#: The likeliest tokens of a row that are found; as `dflash_kernels.h` has them, and the next.
TOP_COUNT = 8
#: Nodes that trees may be made of.
MOST_LISTED = 1024


TopIdsParams = structure(
    "dflash_top_ids_params", ints="dtype rows size normalized", pointers="logits ids best total", longs="row_stride"
)


GrowTreeParams = structure(
    "dflash_grow_tree_params",
    ints="slots nodes listed places",
    floats="least toll",
    pointers="list_parents list_places bonus log_probs ids tokens parents",
)


AcceptTreeParams = structure(
    "dflash_accept_tree_params",
    ints="segment_count rows logit_row_count",
    pointers="segments logit_first token_ids target_ids row_path imposed accepted committed bonus next_start path",
    pointers_="row_order choices ranks",
)


JoinRowsParams = structure(
    "dflash_join_rows_params", ints="dtype count rows size", pointers="order out", by_part="parts"
)


MovePathParams = structure(
    "dflash_move_path_params",
    ints="segment_count cache_count page_rows most_bytes",
    pointers="segments path page_table",
    longs="page_table_stride",
    pointers_="caches",
)


@dataclass(frozen=True)
class AcceptedPaths:
    """The accepted paths of a step's G segments with N rows and R logits; int32 but the paths."""

    accepted: Tensor  # [G] drafts
    committed: Tensor  # [G] rows whose tokens are final, those of prompts too
    bonus: Tensor  # [G]
    next_start: Tensor  # [G]
    path: Tensor  # [G] int64, a bit for each accepted row of the segment
    row_order: Tensor  # [N] at a final row's position in its segment its flat row, elsewhere any
    choices: Tensor  # [R] the target's at a segment's accepted rows first, then any
    ranks: Tensor | None  # [R] 0, then each accepted draft's among its siblings, from 1, then 0; None: they are imposed


def top_ids(logits: Tensor, normalized: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the TOP_COUNT largest of each row of logits [..., V], the lowest ids among equals first.

    Returns:
        ids and logits, normalized log-probabilities, [..., TOP_COUNT] int32 and FP32; and the log of the sum of all
        exponentials, [...] FP32.
    """
    check(logits.dtype in DTYPES and logits.is_contiguous(), "the likeliest of contiguous logits")
    check(logits.shape[-1] >= TOP_COUNT, f"{TOP_COUNT} of {logits.shape[-1]} logits")
    ids = torch.empty(*logits.shape[:-1], TOP_COUNT, dtype=torch.int32, device=logits.device)
    best = torch.empty_like(ids, dtype=torch.float32)
    total = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    params = TopIdsParams(
        dtype=DTYPES[logits.dtype],
        rows=total.numel(),
        size=logits.shape[-1],
        normalized=normalized,
        logits=logits.data_ptr(),
        ids=ids.data_ptr(),
        best=best.data_ptr(),
        total=total.data_ptr(),
        row_stride=logits.shape[-1],
    )
    run("dflash_top_ids", params, stream())
    return ids, best, total


def grow_tree(
    list_parents: Tensor,
    list_places: Tensor,
    nodes: int,
    least: float,
    toll: float,
    bonus: Tensor,
    log_probs: Tensor,
    ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """Grows each slot's tree of so many nodes out of a list: tokens and parents of its rows, [B, nodes + 1] each.

    Args:
        list_parents: [listed] int32, each node's parent in the list, before it; -1: the root.
        list_places: [listed] int32, each node's token, among those of all depths, TOP_COUNT for each.
        least, toll: log-probabilities below are taken for it, and so much is taken off for each depth.
        bonus: [B] int32, the root's token.
        log_probs, ids: [B, depths, TOP_COUNT] FP32 and int32.
    """
    slots, listed, places = len(bonus), len(list_parents), log_probs[0].numel()
    check_ints(slots, bonus=bonus)
    check_ints(listed, list_parents=list_parents, list_places=list_places)
    check(nodes < TREE_ROWS and nodes <= listed <= MOST_LISTED, f"trees of {nodes} of {listed} nodes")
    is_right = log_probs.dtype == torch.float32 and ids.dtype == torch.int32 and log_probs.shape == ids.shape
    is_right = is_right and len(ids) == slots and log_probs.is_contiguous() and ids.is_contiguous()
    check(is_right, f"log-probabilities and ids must be FP32 and int32 [{slots}, depths, {TOP_COUNT}]")
    tokens, parents = torch.empty(2, slots, nodes + 1, dtype=torch.int32, device=bonus.device).unbind()
    params = GrowTreeParams(
        slots=slots,
        nodes=nodes,
        listed=listed,
        places=places,
        least=least,
        toll=toll,
        list_parents=list_parents.data_ptr(),
        list_places=list_places.data_ptr(),
        bonus=bonus.data_ptr(),
        log_probs=log_probs.data_ptr(),
        ids=ids.data_ptr(),
        tokens=tokens.data_ptr(),
        parents=parents.data_ptr(),
    )
    run("dflash_grow_tree", params, stream())
    return tokens, parents


def accept_paths(rows: Rows, target_ids: Tensor, imposed: Tensor | None = None) -> AcceptedPaths:
    """Accepts of each segment the deepest path on which all rows equal the target's choices [R] at their parents.

    Args:
        rows: of a step with trees.
        imposed: [G] int32, the number of accepted drafts, whatever they are; None: as they are.
    """
    check_targets(rows, target_ids)
    check(rows.row_path is not None, "a step without trees has no paths")
    segments = len(rows.segments)
    check_ints(segments, imposed=imposed)

    def empty(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, dtype=dtype, device=target_ids.device)

    accepted, committed, bonus, next_start = empty(4 * segments).view(4, segments).unbind()
    found = AcceptedPaths(
        accepted,
        committed,
        bonus,
        next_start,
        path=empty(segments, torch.int64),
        row_order=empty(len(rows.token_ids)),
        choices=empty(len(rows.logit_rows)),
        ranks=empty(len(rows.logit_rows)) if imposed is None else None,
    )
    params = AcceptTreeParams(
        segment_count=segments,
        rows=len(rows.token_ids),
        logit_row_count=len(rows.logit_rows),
        segments=rows.segments.data_ptr(),
        logit_first=rows.logit_first.data_ptr(),
        token_ids=rows.token_ids.data_ptr(),
        target_ids=target_ids.data_ptr(),
        row_path=address(rows.row_path),
        imposed=address(imposed),
        accepted=accepted.data_ptr(),
        committed=committed.data_ptr(),
        bonus=bonus.data_ptr(),
        next_start=next_start.data_ptr(),
        path=found.path.data_ptr(),
        row_order=found.row_order.data_ptr(),
        choices=found.choices.data_ptr(),
        ranks=address(found.ranks),
    )
    run("dflash_accept_tree", params, stream())
    return found


def join_rows(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Joins parts [N, H] along the last dimension, their rows by order [N] int32: [N, len(parts) * H]."""
    rows, size = parts[0].shape
    dtype, device = parts[0].dtype, parts[0].device
    check(1 <= len(parts) <= MOST_JOINED, f"{len(parts)} parts to join; at most {MOST_JOINED}")
    alike = all(x.shape == (rows, size) and x.dtype == dtype and x.is_contiguous() for x in parts)
    is_aligned = size % 8 == 0 and all(x.data_ptr() % 16 == 0 for x in parts)
    check(alike and is_aligned and dtype in HALVES, "parts to join must be alike, contiguous and aligned to 16 bytes")
    check_ints(rows, order=order)
    out = torch.empty(rows, len(parts) * size, dtype=dtype, device=device)
    addresses = [x.data_ptr() for x in parts] + [None] * (MOST_JOINED - len(parts))
    params = JoinRowsParams(
        dtype=DTYPES[dtype],
        count=len(parts),
        rows=rows,
        size=size,
        order=order.data_ptr(),
        out=out.data_ptr(),
        parts=(ctypes.c_void_p * MOST_JOINED)(*addresses),
    )
    run("dflash_join_rows", params, stream())
    return out


class PathMoves:
    """Moves the K and V of accepted paths to their positions, in all caches that share a page table by one launch.

    Args:
        caches: [pages, heads, page rows, D] each; heads, D and types may differ. Whoever calls keeps them.
    """

    def __init__(self, caches: Iterable[Tensor]) -> None:
        rows, page_rows = [], set()
        for cache in caches:
            _, heads, rows_of_page, size = cache.shape
            row_bytes = size * cache.itemsize
            check(cache.is_contiguous() and row_bytes % 16 == 0, f"caches {tuple(cache.shape)} of {cache.dtype}")
            page_rows.add(rows_of_page)
            rows.append([cache.data_ptr(), heads, row_bytes])
            device = cache.device
        check(len(page_rows) == 1, f"caches whose pages have {sorted(page_rows)} rows")
        (self._page_rows,) = page_rows
        self._most_bytes = max(heads * row_bytes for _, heads, row_bytes in rows)
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)  # [C, 3]

    def __call__(self, pages: Pages, segments: Tensor, path: Tensor) -> None:
        """Moves of segments [G, 4] the rows of path [G] int64, a bit each, to start, start + 1 and so on."""
        check_table(pages.table)
        check(pages.rows == self._page_rows, f"tables of pages of {pages.rows} rows, caches of {self._page_rows}")
        is_right = path.shape == (len(segments),) and path.dtype == torch.int64 and path.is_contiguous()
        check(is_right and segments.shape[1:] == (4,) and segments.is_contiguous(), "paths must be int64 [G]")
        params = MovePathParams(
            segment_count=len(segments),
            cache_count=len(self._table),
            page_rows=self._page_rows,
            most_bytes=self._most_bytes,
            segments=segments.data_ptr(),
            path=path.data_ptr(),
            page_table=pages.table.data_ptr(),
            page_table_stride=pages.table.stride(0),
            caches=self._table.data_ptr(),
        )
        run("dflash_move_path", params, stream())
