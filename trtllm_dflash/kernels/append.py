"""Norm of heads, RoPE and append of rows to a cache."""

import torch

from trtllm_dflash.kernels.caches import Scales, check_caches, scale_addresses
from trtllm_dflash.kernels.checks import DTYPES, HALVES, HEAD_SIZES, address, check, check_ints, check_rows
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor


AppendParams = structure(
    "dflash_append_params",
    ints="dtype slots rows context_rows heads kv_heads head_size cache_rows positions",
    floats="norm_eps",
    pointers="qkv context_k context_v q_norm k_norm cos sin start committed q_out keys values",
    longs="qkv_slot_stride qkv_row_stride context_slot_stride context_row_stride cache_slot_stride cache_head_stride",
    pointers_="key_scale value_scale",
)


class Append:
    """Norm of heads, RoPE and append of one layer's rows.

    Args:
        cos, sin: the RoPE tables [P, D/2].
        q_norm, k_norm: weights [D] of the norms of heads, where there are any.
        scales: of caches in E4M3, keys' and values': FP32 [] each; None: caches have the tables' type.
    """

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 0.0,
        scales: Scales = None,
    ) -> None:
        check(cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape, "RoPE tables must be contiguous")
        self.cos, self.sin = cos, sin
        self.q_norm, self.k_norm = q_norm, k_norm
        self.norm_eps = norm_eps
        self.scales = scales

    def __call__(
        self,
        keys: Tensor,
        values: Tensor,
        start: Tensor,
        heads: int,
        qkv: Tensor | None = None,
        context: tuple[Tensor, Tensor] | None = None,
        committed: Tensor | None = None,
    ) -> Tensor | None:
        """Writes one run of rows a slot at start [B] into caches [B, Hkv, S, D]; returns q as [B, Hq, N, D].

        The run: context K and V [B, Q, Hkv*D] (the first committed [B] rows, or all), then the rows of
        qkv [B, N, (Hq + 2 Hkv)*D]. Keys are normed and rotated at their positions. Rows at positions below 0 or at and
        past S are dropped.
        """
        slots, kv_heads, length, size = keys.shape
        dtype = self.cos.dtype
        check(dtype in HALVES, f"rows of {dtype}; known: float16, bfloat16")
        check(size in HEAD_SIZES and self.cos.shape[1] * 2 == size, f"head size {size}; known: {HEAD_SIZES}")
        check_caches(keys, values, slots, size, dtype, self.scales)
        check_ints(slots, start=start, committed=committed)
        for x in (self.cos, self.sin, self.q_norm, self.k_norm):
            check(x is None or x.dtype == dtype, "norms and RoPE tables must have one type")
        params = AppendParams(
            dtype=DTYPES[dtype],
            slots=slots,
            heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            cache_rows=length,
            positions=self.cos.shape[0],
            norm_eps=self.norm_eps,
            q_norm=address(self.q_norm),
            k_norm=address(self.k_norm),
            cos=self.cos.data_ptr(),
            sin=self.sin.data_ptr(),
            start=start.data_ptr(),
            committed=address(committed),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            cache_slot_stride=keys.stride(0),
            cache_head_stride=keys.stride(1),
            **scale_addresses(self.scales),
        )
        q = None
        if qkv is not None:
            check_rows(qkv, slots, (heads + 2 * kv_heads) * size, dtype)
            q = torch.empty(slots, qkv.shape[1], heads, size, dtype=qkv.dtype, device=qkv.device)
            params.rows, params.qkv, params.q_out = qkv.shape[1], qkv.data_ptr(), q.data_ptr()
            params.qkv_slot_stride, params.qkv_row_stride = qkv.stride(0), qkv.stride(1)
        if context is not None:
            for x in context:
                check_rows(x, slots, kv_heads * size, dtype)
            k, v = context
            check(k.shape == v.shape and k.stride() == v.stride(), "context K and V must be slices of one tensor")
            params.context_rows, params.context_k, params.context_v = k.shape[1], k.data_ptr(), v.data_ptr()
            params.context_slot_stride, params.context_row_stride = k.stride(0), k.stride(1)
        run("dflash_append", params, stream())
        return None if q is None else q.transpose(1, 2)
