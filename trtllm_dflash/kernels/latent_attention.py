"""Latent attention (MLA), absorbed: of a short block of rows to a long cache whose rows are keys and values at once."""

from dataclasses import dataclass

import torch

from trtllm_dflash.kernels.attention import MAX_ROWS, AttentionParams
from trtllm_dflash.kernels.checks import DTYPES, HALVES, check, check_ints, check_rows
from trtllm_dflash.kernels.library import is_hopper, run, run_with_workspace, stream, structure

Tensor = torch.Tensor

#: Numbers of a cache row, and of them those that are a value too, its first.
LATENT_ROW, LATENT_RANK = 576, 512


def takes_latent(cache: Tensor, rank: int, rotary_size: int) -> bool:
    """Whether the kernels take a cache [B, 1, S, D] of rows of so many numbers of values, and so many rotated ones."""
    sizes, is_one = (rank, rotary_size, cache.shape[-1]), cache.shape[1] == 1
    is_known = sizes == (LATENT_RANK, LATENT_ROW - LATENT_RANK, LATENT_ROW) and cache.dtype in HALVES
    return is_known and is_one and is_hopper(cache.device)


LatentAppendParams = structure(
    "dflash_latent_append_params",
    ints="dtype slots rows heads plain_size cache_rows positions",
    floats="norm_eps",
    pointers="q kv norm cos sin start cache queries",
    longs="kv_slot_stride kv_row_stride cache_slot_stride",
)


@dataclass(frozen=True)
class LatentAppend:
    """The way of a layer's rows into its cache of latents, and of its queries' rotated parts."""

    norm: Tensor  # [512]
    cos: Tensor  # [positions, 32]
    sin: Tensor
    norm_eps: float

    def __call__(self, q: Tensor, kv: Tensor, start: Tensor, heads: int, cache: Tensor) -> Tensor:
        """Writes rows kv [B, N, 576] at start [B] into a cache [B, 1, S, 576], normed and rotated.

        Rows at positions below 0 or at and past S are dropped.

        Args:
            q: projected queries [B, N, heads * (P + 64)], contiguous.

        Returns:
            Queries [B, N, heads, 576], of which the last 64 numbers are q's, rotated, and the others anything.
        """
        dtype, (slots, rows, width) = cache.dtype, q.shape
        check_ints(slots, start=start)
        check_rows(kv, slots, LATENT_ROW, dtype)
        _check_cache(cache, slots)
        tables = (self.norm, (LATENT_RANK,)), (self.cos, (len(self.cos), 32)), (self.sin, (len(self.cos), 32))
        is_right = all(x.dtype == dtype and x.shape == shape and x.is_contiguous() for x, shape in tables)
        check(is_right, f"a norm of {LATENT_RANK} and RoPE of {LATENT_ROW - LATENT_RANK} numbers in {dtype}")
        plain = width // heads - (LATENT_ROW - LATENT_RANK)
        check(q.dtype == dtype and q.is_contiguous() and plain >= 0 and width % heads == 0, f"queries {tuple(q.shape)}")
        queries = torch.empty(slots, rows, heads, LATENT_ROW, dtype=dtype, device=q.device)
        params = LatentAppendParams(
            dtype=DTYPES[dtype],
            slots=slots,
            rows=rows,
            heads=heads,
            plain_size=plain,
            cache_rows=cache.shape[2],
            positions=len(self.cos),
            norm_eps=self.norm_eps,
            q=q.data_ptr(),
            kv=kv.data_ptr(),
            norm=self.norm.data_ptr(),
            cos=self.cos.data_ptr(),
            sin=self.sin.data_ptr(),
            start=start.data_ptr(),
            cache=cache.data_ptr(),
            queries=queries.data_ptr(),
            kv_slot_stride=kv.stride(0),
            kv_row_stride=kv.stride(1),
            cache_slot_stride=cache.stride(0),
        )
        run("dflash_latent_append", params, stream())
        return queries


def attend_latent(q: Tensor, cache: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Attends from absorbed queries q [B, H, Q, 576] to a cache [B, 1, S, 576] of lengths [B] int32: [B, Q, H*512].

    The Q rows, at most MAX_ROWS, are the last of each slot's length; each sees the rows up to its own position. Slots
    of length 0 or less cost nothing and get zeros.
    """
    slots, heads, rows, size = q.shape
    is_known = size == LATENT_ROW and 0 < rows <= MAX_ROWS and q.dtype == cache.dtype and q.dtype in HALVES
    check(is_known, f"latent attention of {tuple(q.shape)} {q.dtype}")
    _check_cache(cache, slots)
    check_ints(slots, lengths=lengths)
    is_aligned = q.data_ptr() % 16 == 0 and not any(stride % 8 for stride in q.stride()[:-1])
    check(q.stride(-1) == 1 and is_aligned, "q's heads must be contiguous, and aligned to 16 bytes")
    out = torch.empty(slots, rows, heads * LATENT_RANK, dtype=q.dtype, device=q.device)
    params = AttentionParams(
        dtype=DTYPES[q.dtype],
        slots=slots,
        rows=rows,
        heads=heads,
        kv_heads=1,
        head_size=size,
        cache_rows=cache.shape[2],
        causal=1,
        scale=scale,
        q=q.data_ptr(),
        keys=cache.data_ptr(),
        lengths=lengths.data_ptr(),
        out=out.data_ptr(),
        q_slot_stride=q.stride(0),
        q_row_stride=q.stride(2),
        q_head_stride=q.stride(1),
        cache_slot_stride=cache.stride(0),
        cache_head_stride=cache.stride(1),
    )
    run_with_workspace("dflash_latent_attention", params, q.device)
    return out


def _check_cache(cache: Tensor, slots: int) -> None:
    check(cache.shape[:2] == (slots, 1) and cache.shape[3] == LATENT_ROW, f"a cache {tuple(cache.shape)} of latents")
    is_row_by_row = cache.stride()[2:] == (LATENT_ROW, 1) and cache.stride(0) % 8 == 0 and cache.data_ptr() % 16 == 0
    check(is_row_by_row, "a slot's rows of a cache must be contiguous")
