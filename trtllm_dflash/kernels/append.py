"""Norm of heads, RoPE and append of rows to a cache."""

import ctypes

import torch

from trtllm_dflash.kernels.caches import Scales, check_caches, scale_addresses
from trtllm_dflash.kernels.checks import ALL_HEAD_SIZES, DTYPES, HALVES, address, check, check_ints, check_rows
from trtllm_dflash.kernels.library import run, stream, structure
from trtllm_dflash.kernels.pages import Pages, page_members
from trtllm_dflash.kernels.rows import Rows

Tensor = torch.Tensor


AppendParams = structure(
    "dflash_append_params",
    ints="dtype slots rows context_rows heads kv_heads head_size cache_rows positions",
    floats="norm_eps",
    pointers="qkv context_k context_v q_norm k_norm cos sin start committed q_out keys values",
    longs="qkv_slot_stride qkv_row_stride context_slot_stride context_row_stride cache_slot_stride cache_head_stride",
    pointers_="key_scale value_scale segments row_segment page_table",
    longs_="page_table_stride",
    pointers__="out",
    ints_="page_rows block",
    pointers___="row_position",
    ints__="rotary_size is_norm_wide keys_as_values norms_values",
)


def takes_rotary(rotary: int, size: int) -> bool:
    """Whether `Append` rotates the first numbers, so many, of heads of that size."""
    return rotary % (16 if size <= 256 else 32) == 0 and 0 < rotary <= size


class Append:
    """Norm of heads, RoPE and append of one layer's rows.

    Args:
        cos, sin: the RoPE tables [P, R/2]; the first R numbers of a head are rotated, the others stay.
        q_norm, k_norm: weights [D] of the norms of heads, where there are any; of the tables' type or both in FP32.
        scales: of caches in E4M3, keys' and values': FP32 [] each; None: caches have the tables' type.
        keys_as_values: rows have no values of their own: they are the keys, as projected.
        norms_values: values are normed too, without weights.
    """

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 0.0,
        scales: Scales = None,
        keys_as_values: bool = False,
        norms_values: bool = False,
    ) -> None:
        check(cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape, "RoPE tables must be contiguous")
        self.cos, self.sin = cos, sin
        self.q_norm, self.k_norm = q_norm, k_norm
        self.norm_eps = norm_eps
        self.scales = scales
        self.keys_as_values, self.norms_values = keys_as_values, norms_values

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
        slots = len(keys)
        check_ints(slots, start=start, committed=committed)
        params = self._params(keys, values, heads)
        params.slots, params.cache_rows = slots, keys.shape[2]
        params.start, params.committed = start.data_ptr(), address(committed)
        q = None if qkv is None else self._queries_of(params, qkv, slots)
        if context is not None:
            self._set_context(params, context, slots)
        run("dflash_append", params, stream())
        return None if q is None else q.transpose(1, 2)

    def rows(
        self, keys: Tensor, values: Tensor, pages: Pages, layout: Rows, heads: int, qkv: Tensor, out: Tensor
    ) -> Tensor:
        """Writes a step's flat rows qkv [1, N, (Hq + 2 Hkv)*D] or [N, ...] into pages; returns q [N, Hq, D].

        They are rotated by their positions in the layout, where it has trees, else by those where they lie. Padding
        becomes zeros, in q and in attention's result to be, out [..., N, Hq*D].
        """
        params = self.row_params(keys, values, pages, layout, heads, qkv, out)
        q = torch.empty(len(layout.row_segment), heads, keys.shape[3], dtype=qkv.dtype, device=qkv.device)
        params.q_out = q.data_ptr()
        run("dflash_append", params, stream())
        return q

    def row_params(
        self, keys: Tensor, values: Tensor, pages: Pages, layout: Rows, heads: int, qkv: Tensor, out: Tensor
    ) -> ctypes.Structure:
        """Checks and gathers what `rows` takes, but where its queries go."""
        qkv = qkv.unsqueeze(0) if qkv.dim() == 2 else qkv
        params = self._flat_params(keys, values, pages, layout, heads, None)
        self._set_qkv(params, qkv, 1)
        rows, numbers = qkv.shape[1], heads * params.head_size
        check(rows == len(layout.row_segment), f"{rows} rows, a layout of {len(layout.row_segment)}")
        fits = out.dtype == qkv.dtype and out.is_contiguous() and out.numel() == rows * numbers
        check(fits, f"out {tuple(out.shape)} of {rows} rows of {numbers}")
        params.out, params.row_position = out.data_ptr(), address(layout.row_position)
        return params

    def context(
        self,
        keys: Tensor,
        values: Tensor,
        pages: Pages,
        layout: Rows,
        heads: int,
        context: tuple[Tensor, Tensor],
        committed: Tensor | None = None,
    ) -> None:
        """Writes flat context rows K and V [1, N, Hkv*D] into pages: a segment's first committed [G], or all."""
        params = self._flat_params(keys, values, pages, layout, heads, committed)
        self._set_flat_context(params, context, layout)
        run("dflash_append", params, stream())

    def block(
        self,
        keys: Tensor,
        values: Tensor,
        pages: Pages,
        layout: Rows,
        heads: int,
        qkv: Tensor,
        context: tuple[Tensor, Tensor],
        committed: Tensor,
    ) -> Tensor:
        """Writes context rows as `context` does, and behind each segment's its block; returns q [G*Bd, Hq, D].

        Args:
            qkv: of a block of rows a segment, [G, Bd, (Hq + 2 Hkv)*D].
        """
        params = self._flat_params(keys, values, pages, layout, heads, committed)
        self._set_flat_context(params, context, layout)
        q = self._queries_of(params, qkv, len(layout.segments))
        params.block = params.rows
        run("dflash_append", params, stream())
        return q.flatten(0, 1)

    def _params(self, keys: Tensor, values: Tensor, heads: int) -> ctypes.Structure:
        """Checks and gathers what every call has."""
        kv_heads, size = keys.shape[1], keys.shape[3]
        dtype = self.cos.dtype
        check(dtype in HALVES, f"rows of {dtype}; known: float16, bfloat16")
        rotary = 2 * self.cos.shape[1]
        check(size in ALL_HEAD_SIZES, f"head size {size}; known: {ALL_HEAD_SIZES}")
        check(takes_rotary(rotary, size), f"RoPE of {rotary} numbers of {size}")
        check_caches(keys, values, len(keys), size, dtype, self.scales)
        wide = [x is not None and x.dtype == torch.float32 for x in (self.q_norm, self.k_norm)]
        for x in (self.q_norm, self.k_norm):
            check(x is None or x.dtype == (torch.float32 if all(wide) else dtype), "norms must have one type")
            check(x is None or (x.shape == (size,) and x.is_contiguous()), f"norms of heads of {size}")
        return AppendParams(
            dtype=DTYPES[dtype],
            heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            positions=self.cos.shape[0],
            norm_eps=self.norm_eps,
            q_norm=address(self.q_norm),
            k_norm=address(self.k_norm),
            cos=self.cos.data_ptr(),
            sin=self.sin.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            cache_slot_stride=keys.stride(0),
            cache_head_stride=keys.stride(1),
            rotary_size=rotary,
            is_norm_wide=int(all(wide)),
            keys_as_values=int(self.keys_as_values),
            norms_values=int(self.norms_values),
            **scale_addresses(self.scales),
        )

    def _flat_params(
        self, keys: Tensor, values: Tensor, pages: Pages, layout: Rows, heads: int, committed: Tensor | None
    ) -> ctypes.Structure:
        """Gathers what calls over flat rows have."""
        check_ints(len(layout.segments), committed=committed)
        params = self._params(keys, values, heads)
        for name, value in page_members(pages, keys).items():
            setattr(params, name, value)
        params.slots, params.committed = len(layout.segments), address(committed)
        params.segments, params.row_segment = layout.segments.data_ptr(), layout.row_segment.data_ptr()
        return params

    def _set_qkv(self, params: ctypes.Structure, qkv: Tensor, slots: int) -> None:
        """Sets projected rows [slots, N, (Hq + 2 Hkv)*D]."""
        kinds = 1 if self.keys_as_values else 2
        check_rows(qkv, slots, (params.heads + kinds * params.kv_heads) * params.head_size, self.cos.dtype)
        params.rows, params.qkv = qkv.shape[1], qkv.data_ptr()
        params.qkv_slot_stride, params.qkv_row_stride = qkv.stride(0), qkv.stride(1)

    def _queries_of(self, params: ctypes.Structure, qkv: Tensor, slots: int) -> Tensor:
        """Sets projected rows likewise; returns their queries to be, [slots, N, Hq, D]."""
        self._set_qkv(params, qkv, slots)
        q = torch.empty(slots, qkv.shape[1], params.heads, params.head_size, dtype=qkv.dtype, device=qkv.device)
        params.q_out = q.data_ptr()
        return q

    def _set_context(self, params: ctypes.Structure, context: tuple[Tensor, Tensor], slots: int) -> None:
        """Sets context rows K and V, [slots, N, Hkv*D] each."""
        k, v = context
        for x in context:
            check_rows(x, slots, params.kv_heads * params.head_size, self.cos.dtype)
        check(k.shape == v.shape and k.stride() == v.stride(), "context K and V must be slices of one tensor")
        params.context_rows, params.context_k, params.context_v = k.shape[1], k.data_ptr(), v.data_ptr()
        params.context_slot_stride, params.context_row_stride = k.stride(0), k.stride(1)

    def _set_flat_context(self, params: ctypes.Structure, context: tuple[Tensor, Tensor], layout: Rows) -> None:
        k, v = (x.unsqueeze(0) if x.dim() == 2 else x for x in context)
        self._set_context(params, (k, v), 1)
        check(k.shape[1] == len(layout.row_segment), f"{k.shape[1]} rows, a layout of {len(layout.row_segment)}")
