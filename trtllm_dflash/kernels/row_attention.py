"""Append and attention of one row a slot in one launch: of steps that decode without drafts."""

import ctypes

import torch

from trtllm_dflash.kernels.append import Append
from trtllm_dflash.kernels.attention import segment_params
from trtllm_dflash.kernels.checks import check
from trtllm_dflash.kernels.library import Pointer, is_hopper, processors, run, stream
from trtllm_dflash.kernels.pages import Pages
from trtllm_dflash.kernels.rows import Rows

Tensor = torch.Tensor

#: Heads of these sizes, so many that share a key/value head, and slots at most.
_HEAD_SIZES, _GROUP, _SLOTS = (64, 128), 8, 32
#: Numbers of a head that RoPE rotates: a multiple of so many.
_ROTATED = 32
#: Counters of a slot's key/value head, as `dflash_kernels.h` has them.
_ARRIVALS = 16


def row_arrivals(device: torch.device) -> Tensor:
    """Makes what `attend_single_rows` counts in, of layers that run one after the other on one stream."""
    return torch.zeros(processors(device) * _ARRIVALS, dtype=torch.int32, device=device)


def takes_single_rows(append: Append, keys: Tensor, heads: int, slots: int) -> bool:
    """Whether `attend_single_rows` computes such rows: on Hopper, of caches of the rows' type."""
    is_known = is_hopper(keys.device) and append.scales is None and keys.dtype == append.cos.dtype
    is_plain = not append.keys_as_values and not append.norms_values and 2 * append.cos.shape[1] % _ROTATED == 0
    if not is_known or not is_plain or (append.q_norm is None) != (append.k_norm is None):
        return False
    return fits_single_rows(heads, keys.shape[1], keys.shape[3], slots, processors(keys.device))


def fits_single_rows(heads: int, kv_heads: int, size: int, slots: int, processors: int) -> bool:
    """Whether a GPU with so many multiprocessors has place for so many slots of such heads."""
    is_known = size in _HEAD_SIZES and heads <= _GROUP * kv_heads and slots <= _SLOTS
    return is_known and slots * kv_heads <= processors  # in clusters of two blocks, two a multiprocessor


def attend_single_rows(
    append: Append,
    keys: Tensor,
    values: Tensor,
    pages: Pages,
    layout: Rows,
    heads: int,
    qkv: Tensor,
    out: Tensor,
    arrivals: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Computes `append.rows` and `attend_rows` of a layout whose decoding segments have a row each, and all rows.

    Reads the caches before those rows, and the layout, while the kernel before it may run: `embed`, or one that is not
    ours, has been launched since they were written.

    Args:
        qkv: projected rows [1, N, (Hq + 2 Hkv)*D] or [N, ...].
        out: [..., N, Hq*D], filled and returned; padding gets zeros.
        arrivals: of `row_arrivals`.
        window, sinks, scale: as in `attend_rows`.
    """
    segments, kv_heads = layout.decoding, keys.shape[1]
    counts = {len(x) for x in (layout.row_segment, layout.segments, segments)}
    check(len(counts) == 1, f"{len(layout.row_segment)} rows of {len(segments)} segments, of {len(layout.segments)}")
    counters = arrivals.numel() if arrivals.dtype == torch.int32 and arrivals.is_contiguous() else 0
    check(len(segments) * kv_heads * _ARRIVALS <= counters, f"{counters} counters in int32 are too few")
    appended = append.row_params(keys, values, pages, layout, heads, qkv, out)
    params = segment_params(keys, values, pages, segments, heads, 1, out, True, window, sinks, append.scales)
    params.scale = params.scale if scale is None else scale
    needed, both = ctypes.c_size_t(), ctypes.byref(params)
    run("dflash_row_attention_workspace", appended, both, ctypes.byref(needed))
    workspace = torch.empty(needed.value, dtype=torch.uint8, device=qkv.device)
    pointers = Pointer(arrivals.data_ptr()), Pointer(workspace.data_ptr())
    run("dflash_row_attention", appended, both, *pointers, needed, stream())
    return out
