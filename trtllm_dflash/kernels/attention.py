"""Attention over caches: of a short block of rows to a long one, and of many rows of prompts."""

import ctypes

import torch

from trtllm_dflash.kernels.caches import Scales, check_caches, scale_addresses
from trtllm_dflash.kernels.checks import ALL_HEAD_SIZES, DTYPES, HALVES, HEAD_SIZES, address, check, check_ints
from trtllm_dflash.kernels.library import is_hopper, processors, run, run_with_workspace, stream, structure
from trtllm_dflash.kernels.pages import Pages, page_members

Tensor = torch.Tensor

#: Rows a slot that attention takes: a block. For more, kernels that share keys among rows are faster.
MAX_ROWS = 32

#: Rows of a slot whose drafts are a tree: each has a bit in a path.
TREE_ROWS = 64

#: Keys of an exact row that add up apart from those before them, its last: no path of a tree of exact rows is longer.
EXACT_TAIL = 16

#: Of `attend_prompts`: rows of a prompt times heads, in an item of its work.
_ITEM_ROWS = 128
#: Items for each of the GPU's processors, at least and at most: it divides no item, so that with fewer some idle, and
#: for more it has no place.
_ITEMS_A_PROCESSOR = (0.75, 64)


AttentionParams = structure(
    "dflash_attention_params",
    ints="dtype slots rows heads kv_heads head_size cache_rows causal window length_offset sinks_dtype",
    floats="scale",
    pointers="q keys values lengths added sinks out",
    longs="q_slot_stride q_row_stride q_head_stride cache_slot_stride cache_head_stride",
    pointers_="key_scale value_scale segments page_table",
    longs_="page_table_stride",
    ints_="page_rows pages block",
    pointers__="row_path",
    ints__="is_exact",
)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    causal: bool,
    window: int = 0,
    sinks: Tensor | None = None,
    added: Tensor | None = None,
    offset: int = 0,
    scales: Scales = None,
    scale: float | None = None,
) -> Tensor:
    """Attends from q [B, Hq, Q, D], Q at most MAX_ROWS, to caches [B, Hkv, S, D] of lengths [B] int32: [B, Q, Hq*D].

    q is read by its strides; its rows are the last of each slot's length. Slots of length 0 or less cost nothing and
    get zeros.

    Args:
        added, offset: a slot's length is its `lengths`, plus its `added` [B], plus offset.
        causal: each row sees the keys up to its own position, else all of the slot's.
        window: a row at position p sees keys > p - window; 0: no window.
        sinks: [Hq], one more logit of each head's softmax, without a value.
        scales: of caches in E4M3, keys' and values'; None: caches have q's type.
        scale: of the logits; None: 1 / sqrt(D).
    """
    slots, heads, rows, size = q.shape
    check(len(keys) == slots, f"caches of {len(keys)} slots for {slots}")
    check_ints(slots, lengths=lengths, added=added)
    check(rows <= MAX_ROWS, f"{rows} rows a slot; at most {MAX_ROWS}")
    params = _params(q.dtype, heads, size, keys, values, rows, causal, window, sinks, scales)
    _set_queries(params, q.transpose(1, 2))
    out = torch.empty(slots, rows, heads * size, dtype=q.dtype, device=q.device)
    params.slots, params.cache_rows, params.length_offset = slots, keys.shape[2], offset
    params.lengths, params.added, params.out = lengths.data_ptr(), address(added), out.data_ptr()
    params.q_slot_stride = q.stride(0)
    params.scale = params.scale if scale is None else scale
    run_with_workspace("dflash_attention", params, q.device)
    return out


def attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Pages,
    segments: Tensor,
    rows: int,
    out: Tensor,
    causal: bool,
    window: int = 0,
    sinks: Tensor | None = None,
    scales: Scales = None,
    added: Tensor | None = None,
    block: int = 0,
    row_path: Tensor | None = None,
    exact: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attends from flat rows q [N, Hq, D] to caches [pages, Hkv, page rows, D]; fills and returns out [..., N, Hq*D].

    Each of segments [G, 4] (slot, start, first row, count) has its own rows, the last of its start + count keys. Rows
    that belong to none of them are neither read nor written.

    Args:
        rows: the most that a segment has, at most MAX_ROWS; or block.
        causal, window, sinks, scales, scale: as in `attention`.
        added, block: with a block, segment g's rows are q's from g * block on, and come after its start + added[g]
            keys. Idle segments get zeros.
        row_path: [N] int64: segments are trees of at most TREE_ROWS rows, each of which sees the keys before its
            segment's first row, and the segment's rows whose bits it has; as deep as it is, a window reaches. None:
            they are runs.
        exact: a row's bits depend on its own keys alone, in the order of their positions; on Hopper, heads of at most
            128, causal, without `added`, or a window below EXACT_TAIL. No path then has more than EXACT_TAIL rows.
    """
    check_ints(len(segments), added=added)
    check(block in (0, rows) and (not block or len(q) == block * len(segments)), f"{len(q)} rows in blocks of {block}")
    most = MAX_ROWS if row_path is None else TREE_ROWS
    check(rows <= most, f"{rows} rows a segment; at most {most}")
    if row_path is not None:
        is_right = row_path.shape == (len(q),) and row_path.dtype == torch.int64 and row_path.is_contiguous()
        check(is_right and causal and not block, f"paths of trees must be int64 [{len(q)}], of causal rows")
    params = _flat_params(q, keys, values, pages, segments, rows, out, causal, window, sinks, scales)
    params.added, params.block, params.row_path, params.is_exact = address(added), block, address(row_path), int(exact)
    params.scale = params.scale if scale is None else scale
    run_with_workspace("dflash_attention", params, q.device)
    return out


def takes_heads(size: int, dtype: torch.dtype, keys: Tensor) -> bool:
    """Whether attention of rows of such a type takes heads of that size, of caches such as `keys`."""
    if dtype not in HALVES or size not in ALL_HEAD_SIZES:
        return False
    return size in HEAD_SIZES or (keys.dtype == dtype and is_hopper(keys.device))


def takes_prompts(q: Tensor, keys: Tensor, rows: int) -> bool:
    """Whether `attend_prompts` computes the attention of so many prompt rows among q, and sooner than in cuts."""
    if not is_hopper(q.device):
        return False
    least, most = (items * processors(q.device) * _ITEM_ROWS for items in _ITEMS_A_PROCESSOR)
    count, heads, size = q.shape
    is_known = keys.dtype == q.dtype and size in HEAD_SIZES
    return is_known and rows * heads >= least and count * heads <= most


def attend_prompts(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Pages,
    segments: Tensor,
    out: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes `attend_rows`, causal, of segments with any number of rows, together at most N; for Hopper GPUs."""
    check(out.data_ptr() % 16 == 0, "out must be aligned to 16 bytes")
    params = _flat_params(q, keys, values, pages, segments, len(q), out, True, window, sinks, None)
    run("dflash_attend_prompts", params, stream())
    return out


def segment_params(
    keys: Tensor,
    values: Tensor,
    pages: Pages,
    segments: Tensor,
    heads: int,
    rows: int,
    out: Tensor,
    causal: bool,
    window: int,
    sinks: Tensor | None,
    scales: Scales,
) -> ctypes.Structure:
    """Checks and gathers what calls on segments of flat rows have, but their queries."""
    is_right = segments.dtype == torch.int32 and segments.shape[1:] == (4,) and segments.is_contiguous()
    check(is_right and segments.data_ptr() % 16 == 0, "segments must be int32 [G, 4]")
    size = out.shape[-1] // heads
    params = _params(out.dtype, heads, size, keys, values, rows, causal, window, sinks, scales)
    for name, value in page_members(pages, keys).items():
        setattr(params, name, value)
    params.slots, params.pages = len(segments), len(keys)
    params.segments, params.out = segments.data_ptr(), out.data_ptr()
    return params


def _flat_params(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Pages,
    segments: Tensor,
    rows: int,
    out: Tensor,
    causal: bool,
    window: int,
    sinks: Tensor | None,
    scales: Scales,
) -> ctypes.Structure:
    """Checks and gathers what calls on flat rows q [N, Hq, D] have."""
    _, heads, size = q.shape
    fits = out.dtype == q.dtype and out.is_contiguous() and out.numel() == q.numel() and out.shape[-1] == heads * size
    check(fits, f"out {tuple(out.shape)} of rows {tuple(q.shape)}")
    params = segment_params(keys, values, pages, segments, heads, rows, out, causal, window, sinks, scales)
    _set_queries(params, q)
    return params


def _params(
    dtype: torch.dtype,
    heads: int,
    size: int,
    keys: Tensor,
    values: Tensor,
    rows: int,
    causal: bool,
    window: int,
    sinks: Tensor | None,
    scales: Scales,
) -> ctypes.Structure:
    """Checks and gathers what all calls have, but their queries."""
    check(dtype in HALVES, f"attention of {dtype}; known: float16, bfloat16")
    check(size in ALL_HEAD_SIZES, f"head size {size}; known: {ALL_HEAD_SIZES}")
    check_caches(keys, values, len(keys), size, dtype, scales)
    check(heads % keys.shape[1] == 0, f"{heads} heads cannot share {keys.shape[1]} key/value heads")
    if sinks is not None:
        check(sinks.shape == (heads,) and sinks.is_contiguous() and sinks.dtype in DTYPES, "sinks must be [Hq]")
    return AttentionParams(
        dtype=DTYPES[dtype],
        rows=rows,
        heads=heads,
        kv_heads=keys.shape[1],
        head_size=size,
        causal=int(causal),
        window=window,
        sinks_dtype=DTYPES[sinks.dtype] if sinks is not None else 0,
        scale=size**-0.5,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        sinks=address(sinks),
        cache_slot_stride=keys.stride(0),
        cache_head_stride=keys.stride(1),
        **scale_addresses(scales),
    )


def _set_queries(params: ctypes.Structure, q: Tensor) -> None:
    """Sets queries [..., N, Hq, D]."""
    is_aligned = q.data_ptr() % 16 == 0 and not any(stride % 8 for stride in q.stride()[:-1])
    check(q.stride(-1) == 1 and is_aligned, "q's heads must be contiguous, and aligned to 16 bytes")
    params.q, params.q_row_stride, params.q_head_stride = q.data_ptr(), q.stride(-3), q.stride(-2)
