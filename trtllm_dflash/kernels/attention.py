"""Attention of a short block of rows over a long cache."""

import ctypes

import torch

from trtllm_dflash.kernels.caches import Scales, check_caches, scale_addresses
from trtllm_dflash.kernels.checks import DTYPES, HALVES, HEAD_SIZES, address, check, check_ints
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor

#: Rows a slot that attention takes: a block. For more, kernels that share keys among rows are faster.
MAX_ROWS = 32


AttentionParams = structure(
    "dflash_attention_params",
    ints="dtype slots rows heads kv_heads head_size cache_rows causal window length_offset sinks_dtype",
    floats="scale",
    pointers="q keys values lengths added sinks out",
    longs="q_slot_stride q_row_stride q_head_stride cache_slot_stride cache_head_stride",
    pointers_="key_scale value_scale",
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
    """
    slots, heads, rows, size = q.shape
    check(q.dtype in HALVES, f"attention of {q.dtype}; known: float16, bfloat16")
    check(size in HEAD_SIZES, f"head size {size}; known: {HEAD_SIZES}")
    check(rows <= MAX_ROWS, f"{rows} rows a slot; at most {MAX_ROWS}")
    is_aligned = q.data_ptr() % 16 == 0 and not any(stride % 8 for stride in q.stride()[:3])
    check(q.stride(3) == 1 and is_aligned, "q's heads must be contiguous, and aligned to 16 bytes")
    check_caches(keys, values, slots, size, q.dtype, scales)
    check(heads % keys.shape[1] == 0, f"{heads} heads cannot share {keys.shape[1]} key/value heads")
    check_ints(slots, lengths=lengths, added=added)
    if sinks is not None:
        check(sinks.shape == (heads,) and sinks.is_contiguous() and sinks.dtype in DTYPES, "sinks must be [Hq]")
    out = torch.empty(slots, rows, heads * size, dtype=q.dtype, device=q.device)
    params = AttentionParams(
        dtype=DTYPES[q.dtype],
        slots=slots,
        rows=rows,
        heads=heads,
        kv_heads=keys.shape[1],
        head_size=size,
        cache_rows=keys.shape[2],
        causal=int(causal),
        window=window,
        length_offset=offset,
        sinks_dtype=DTYPES[sinks.dtype] if sinks is not None else 0,
        scale=size**-0.5,
        q=q.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        lengths=lengths.data_ptr(),
        added=address(added),
        sinks=sinks.data_ptr() if sinks is not None else None,
        out=out.data_ptr(),
        q_slot_stride=q.stride(0),
        q_row_stride=q.stride(2),
        q_head_stride=q.stride(1),
        cache_slot_stride=keys.stride(0),
        cache_head_stride=keys.stride(1),
        **scale_addresses(scales),
    )
    needed = ctypes.c_size_t()
    run("dflash_attention_workspace", params, ctypes.byref(needed))
    workspace = torch.empty(needed.value, dtype=torch.uint8, device=q.device)
    run("dflash_attention", params, workspace.data_ptr(), needed.value, stream())
    return out
