"""Trees of drafts: their growth, and the path that is accepted, with its taps, keys and values."""

import ctypes
from collections.abc import Collection, Sequence
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
    ints="segment_count decode_segments rows logit_row_count tap_count size cache_count page_rows most_bytes",
    pointers="segments logit_first row_segment token_ids target_ids row_path imposed accepted committed bonus",
    pointers_="next_start path choices ranks joined caches page_table window_table",
    longs="page_table_stride window_table_stride",
    by_part="taps",
)


@dataclass(frozen=True)
class AcceptedPaths:
    """The accepted paths of a step's G segments with N rows and R logits; int32 but the paths."""

    accepted: Tensor  # [G] drafts
    committed: Tensor  # [G] rows whose tokens are final, those of prompts too
    bonus: Tensor  # [G]
    next_start: Tensor  # [G]
    path: Tensor  # [G] int64, a bit for each accepted row of the segment
    choices: Tensor  # [R] the target's at a segment's accepted rows first, then any
    ranks: Tensor | None  # [R] 0, then each accepted draft's among its siblings, from 1, then 0; None: they are imposed
    joined: Tensor | None  # [N, T * H] at a final row's position in its segment its taps, elsewhere any row's; or none


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


class PathMoves:
    """The moves of the K and V of accepted paths to their positions, in all of the target's caches.

    `accept_paths` makes them.

    Args:
        caches: [pages, heads, page rows, D] each; heads, D and types may differ. Whoever calls keeps them.
        pages: of every slot.
        windowed: more caches, those whose pages are others.
        window_pages: these; of as many rows.
    """

    def __init__(
        self,
        caches: Collection[Tensor],
        pages: Pages,
        windowed: Collection[Tensor] = (),
        window_pages: Pages | None = None,
    ) -> None:
        self._pages, self._window_pages = pages, window_pages or pages
        for each in (pages, self._window_pages):
            check_table(each.table)
            is_right = each.rows == pages.rows and (each.rows >= TREE_ROWS or each.table.shape[1] == 1)
            check(is_right, f"pages of {each.rows} rows beside pages of {pages.rows}")
        rows: list[list[int]] = []
        for cache in (*caches, *windowed):
            _, heads, page_rows, size = cache.shape
            row_bytes = size * cache.itemsize
            check(cache.is_contiguous() and row_bytes % 16 == 0, f"caches {tuple(cache.shape)} of {cache.dtype}")
            check(page_rows == pages.rows, f"tables of pages of {pages.rows} rows, caches of {page_rows}")
            rows.append([cache.data_ptr(), heads, row_bytes, int(len(rows) >= len(caches))])
        self._most_bytes = max(heads * row_bytes for _, heads, row_bytes, _ in rows)
        self._table = torch.tensor(rows, dtype=torch.int64, device=pages.table.device)  # [C, 4]

    def members(self) -> dict[str, int]:
        """Lists what the kernel reads of them, by member."""
        return {
            "cache_count": len(self._table),
            "page_rows": self._pages.rows,
            "most_bytes": self._most_bytes,
            "caches": self._table.data_ptr(),
            "page_table": self._pages.table.data_ptr(),
            "page_table_stride": self._pages.table.stride(0),
            "window_table": self._window_pages.table.data_ptr(),
            "window_table_stride": self._window_pages.table.stride(0),
        }


def accept_paths(
    rows: Rows,
    target_ids: Tensor,
    imposed: Tensor | None = None,
    taps: Sequence[Tensor] = (),
    moves: PathMoves | None = None,
) -> AcceptedPaths:
    """Accepts of each segment the deepest path on which all rows equal the target's choices [R] at their parents.

    Args:
        rows: of a step with trees.
        imposed: [G] int32, the number of accepted drafts, whatever they are; None: as they are.
        taps: [N, H] each, to be joined along the last dimension.
        moves: of the accepted rows' K and V, to start, start + 1 and so on; None: they stay.
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
        choices=empty(len(rows.logit_rows)),
        ranks=empty(len(rows.logit_rows)) if imposed is None else None,
        joined=_room_for_taps(rows, taps),
    )
    params = AcceptTreeParams(
        segment_count=segments,
        decode_segments=len(rows.decoding),
        rows=len(rows.token_ids),
        logit_row_count=len(rows.logit_rows),
        tap_count=len(taps),
        size=taps[0].shape[1] if taps else 0,
        segments=rows.segments.data_ptr(),
        logit_first=rows.logit_first.data_ptr(),
        row_segment=rows.row_segment.data_ptr(),
        token_ids=rows.token_ids.data_ptr(),
        target_ids=target_ids.data_ptr(),
        row_path=address(rows.row_path),
        imposed=address(imposed),
        accepted=accepted.data_ptr(),
        committed=committed.data_ptr(),
        bonus=bonus.data_ptr(),
        next_start=next_start.data_ptr(),
        path=found.path.data_ptr(),
        choices=found.choices.data_ptr(),
        ranks=address(found.ranks),
        joined=address(found.joined),
        taps=(ctypes.c_void_p * MOST_JOINED)(*[tap.data_ptr() for tap in taps]),
        **({} if moves is None else moves.members()),
    )
    run("dflash_accept_tree", params, stream())
    return found


def _room_for_taps(rows: Rows, taps: Sequence[Tensor]) -> Tensor | None:
    """Makes room for joined taps, which it checks."""
    if not taps:
        return None
    check(len(taps) <= MOST_JOINED, f"{len(taps)} taps to join; at most {MOST_JOINED}")
    (count, size), dtype = taps[0].shape, taps[0].dtype
    alike = all(x.shape == (len(rows.token_ids), size) and x.dtype == dtype and x.is_contiguous() for x in taps)
    is_aligned = size % 8 == 0 and all(x.data_ptr() % 16 == 0 for x in taps)
    check(alike and is_aligned and dtype in HALVES, "taps to join must be alike, contiguous and aligned to 16 bytes")
    return torch.empty(count, len(taps) * size, dtype=dtype, device=taps[0].device)
