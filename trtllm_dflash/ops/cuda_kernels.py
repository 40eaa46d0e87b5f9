"""The CUDA kernels of `plugins/`, called on torch tensors.

Each function checks what it is given, launches on torch's current stream and returns. Nothing is copied, no one waits:
all may be captured into a CUDA graph. What they compute, and where they round, is said in `dflash_kernels.h`.
"""

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.experts import Experts
from trtllm_dflash.step import StepOutputs

Tensor = torch.Tensor

#: Names the library, where it does not lie in `plugins/build`.
LIBRARY_VARIABLE = "TRTLLM_DFLASH_KERNELS"
HEAD_SIZES = (64, 128)
#: Rows a slot that attention takes: a block. For more, kernels that share keys among rows are faster.
MAX_ROWS = 32
#: Rows that `skinny_gemm` takes: the weight's own bytes are what a product of few rows costs.
SKINNY_ROWS = 16
#: Compute capabilities (major) whose blocks have the 212 KB of shared memory that it needs; the others' have half.
SKINNY_GPUS = (9, 10)
#: How many ranks `AllReduce` sums over, the most bytes that it takes, and those of each rank's shared memory.
ALL_REDUCE_RANKS = (2, 4, 8)
ALL_REDUCE_BYTES = 1 << 20
ALL_REDUCE_SHARED = 2 * ALL_REDUCE_BYTES + 4096
#: Rows that `moe` takes: for more, products of many rows are faster.
MOE_ROWS = 512

_BUILD = Path(__file__).parents[2] / "plugins" / "build" / "libdflash_kernels.so"
_ABI_VERSION = 7
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}
_HALVES = (torch.float16, torch.bfloat16)

_MOST_RANKS = 8

#: Of FP8 caches: the keys' and the values', FP32 [] each.
Scales: TypeAlias = tuple[Tensor, Tensor] | None

_Int, _Long, _Float, _Pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


def _struct(name: str, **fields: str) -> type[ctypes.Structure]:
    """A structure of `dflash_kernels.h`: its members by type, in its order."""
    types = {"ints": _Int, "floats": _Float, "pointers": _Pointer, "longs": _Long, "by_rank": _Pointer * _MOST_RANKS}
    members = [(member, types[kind.rstrip("_")]) for kind, names in fields.items() for member in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


_Attention = _struct(
    "dflash_attention_params",
    ints="dtype slots rows heads kv_heads head_size cache_rows causal window length_offset sinks_dtype",
    floats="scale",
    pointers="q keys values lengths added sinks out",
    longs="q_slot_stride q_row_stride q_head_stride cache_slot_stride cache_head_stride",
    pointers_="key_scale value_scale",
)
_Append = _struct(
    "dflash_append_params",
    ints="dtype slots rows context_rows heads kv_heads head_size cache_rows positions",
    floats="norm_eps",
    pointers="qkv context_k context_v q_norm k_norm cos sin start committed q_out keys values",
    longs="qkv_slot_stride qkv_row_stride context_slot_stride context_row_stride cache_slot_stride cache_head_stride",
    pointers_="key_scale value_scale",
)
_SkinnyGemm = _struct(
    "dflash_skinny_gemm_params",
    ints="dtype weight_dtype rows inputs outputs swiglu",
    floats="eps",
    pointers="x norm_weight weight scale bias residual out",
)
_RmsNorm = _struct(
    "dflash_rms_norm_params",
    ints="dtype slots rows size",
    floats="eps",
    pointers="x residual weight sum out",
    longs="x_slot_stride x_row_stride",
)
_Swiglu = _struct("dflash_swiglu_params", ints="dtype rows size", pointers="x out")
_Quantize = _struct("dflash_quantize_params", ints="dtype rows size", pointers="x out scale")
_MoE = _struct(
    "dflash_moe_params",
    ints="dtype logits_dtype packed rows hidden columns experts first count top_k normalized clamped",
    floats="alpha limit",
    pointers="x logits gate_up gate_up_scales gate_up_bias down down_scales down_bias out",
)
_Argmax = _struct("dflash_argmax_params", ints="dtype rows size", pointers="logits ids best", longs="row_stride")
_Accept = _struct(
    "dflash_accept_params",
    ints="slots rows logit_row_count",
    pointers="token_ids target_ids logit_rows row_count start accepted committed bonus next_start",
)
_BeginStep = _struct(
    "dflash_begin_step_params",
    ints="slots rows block step_rows",
    pointers="tokens kept_start row_count token_ids start",
)
_EndStep = _struct(
    "dflash_end_step_params",
    ints="slots block logit_rows next_rows last_start",
    pointers="row_count target_ids accepted next_start next_tokens tokens kept_start decided",
)
_Embed = _struct("dflash_embed_params", ints="dtype rows size vocabulary block mask_id", pointers="table ids out")
_AllReduce = _struct(
    "dflash_all_reduce_params",
    ints="dtype ranks rank",
    longs="count",
    pointers="x out",
    by_rank="shared",
)


@functools.cache
def load() -> ctypes.CDLL:
    """The kernels' library: what TRTLLM_DFLASH_KERNELS names, else the one built in `plugins/build`.

    Raises:
        EngineError: there is none, or it is of another version.
    """
    path = Path(os.environ.get(LIBRARY_VARIABLE) or _BUILD)
    if not path.is_file():
        raise EngineError(f"there are no CUDA kernels at {path}: run `make kernels`, or set {LIBRARY_VARIABLE}")
    try:
        library = ctypes.CDLL(str(path))
        version = library.dflash_abi_version()
    except (OSError, AttributeError) as error:
        raise EngineError(f"{path} is not a library of our CUDA kernels: {error}") from error
    if version != _ABI_VERSION:
        raise EngineError(f"{path} has interface {version}, not {_ABI_VERSION}: run `make kernels` again")
    library.dflash_error_string.restype = ctypes.c_char_p
    library.dflash_attention.argtypes = [_Pointer, _Pointer, ctypes.c_size_t, _Pointer]
    return library


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
    """q [B, Hq, Q, D] by strides, Q at most MAX_ROWS; caches [B, Hkv, S, D]; lengths [B] int32: [B, Q, Hq*D].

    The rows of q are the last of each slot's length. Slots of length 0 or less cost nothing and get zeros.

    Args:
        added, offset: a slot's length is its `lengths`, plus its `added` [B], plus offset.
        causal: each row sees the keys up to its own position, else all of the slot's.
        window: a row at position p sees keys > p - window; 0: no window.
        sinks: [Hq], a logit for each head that takes part in the softmax and has no value.
        scales: of caches in E4M3, keys' and values'; None: caches have q's type.
    """
    slots, heads, rows, size = q.shape
    _check(q.dtype in _HALVES, f"attention of {q.dtype}; known: float16, bfloat16")
    _check(size in HEAD_SIZES, f"head size {size}; known: {HEAD_SIZES}")
    _check(rows <= MAX_ROWS, f"{rows} rows a slot; at most {MAX_ROWS}")
    is_aligned = q.data_ptr() % 16 == 0 and not any(stride % 8 for stride in q.stride()[:3])
    _check(q.stride(3) == 1 and is_aligned, "q's heads must be contiguous, and aligned to 16 bytes")
    _check_caches(keys, values, slots, size, q.dtype, scales)
    _check(heads % keys.shape[1] == 0, f"{heads} heads cannot share {keys.shape[1]} key/value heads")
    _check_ints(slots, lengths=lengths, added=added)
    if sinks is not None:
        _check(sinks.shape == (heads,) and sinks.is_contiguous() and sinks.dtype in _DTYPES, "sinks must be [Hq]")
    out = torch.empty(slots, rows, heads * size, dtype=q.dtype, device=q.device)
    params = _Attention(
        dtype=_DTYPES[q.dtype],
        slots=slots,
        rows=rows,
        heads=heads,
        kv_heads=keys.shape[1],
        head_size=size,
        cache_rows=keys.shape[2],
        causal=int(causal),
        window=window,
        length_offset=offset,
        sinks_dtype=_DTYPES[sinks.dtype] if sinks is not None else 0,
        scale=size**-0.5,
        q=q.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        lengths=lengths.data_ptr(),
        added=_address(added),
        sinks=sinks.data_ptr() if sinks is not None else None,
        out=out.data_ptr(),
        q_slot_stride=q.stride(0),
        q_row_stride=q.stride(2),
        q_head_stride=q.stride(1),
        cache_slot_stride=keys.stride(0),
        cache_head_stride=keys.stride(1),
        **_scale_addresses(scales),
    )
    needed = ctypes.c_size_t()
    _run("dflash_attention_workspace", params, ctypes.byref(needed))
    workspace = torch.empty(needed.value, dtype=torch.uint8, device=q.device)
    _run("dflash_attention", params, workspace.data_ptr(), needed.value, _stream())
    return out


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
        _check(cos.is_contiguous() and sin.is_contiguous() and cos.shape == sin.shape, "RoPE tables must be contiguous")
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
        _check(dtype in _HALVES, f"rows of {dtype}; known: float16, bfloat16")
        _check(size in HEAD_SIZES and self.cos.shape[1] * 2 == size, f"head size {size}; known: {HEAD_SIZES}")
        _check_caches(keys, values, slots, size, dtype, self.scales)
        _check_ints(slots, start=start, committed=committed)
        for x in (self.cos, self.sin, self.q_norm, self.k_norm):
            _check(x is None or x.dtype == dtype, "norms and RoPE tables must have one type")
        params = _Append(
            dtype=_DTYPES[dtype],
            slots=slots,
            heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            cache_rows=length,
            positions=self.cos.shape[0],
            norm_eps=self.norm_eps,
            q_norm=_address(self.q_norm),
            k_norm=_address(self.k_norm),
            cos=self.cos.data_ptr(),
            sin=self.sin.data_ptr(),
            start=start.data_ptr(),
            committed=_address(committed),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            cache_slot_stride=keys.stride(0),
            cache_head_stride=keys.stride(1),
            **_scale_addresses(self.scales),
        )
        q = None
        if qkv is not None:
            _check_rows(qkv, slots, (heads + 2 * kv_heads) * size, dtype)
            q = torch.empty(slots, qkv.shape[1], heads, size, dtype=qkv.dtype, device=qkv.device)
            params.rows, params.qkv, params.q_out = qkv.shape[1], qkv.data_ptr(), q.data_ptr()
            params.qkv_slot_stride, params.qkv_row_stride = qkv.stride(0), qkv.stride(1)
        if context is not None:
            for x in context:
                _check_rows(x, slots, kv_heads * size, dtype)
            k, v = context
            _check(k.shape == v.shape and k.stride() == v.stride(), "context K and V must be slices of one tensor")
            params.context_rows, params.context_k, params.context_v = k.shape[1], k.data_ptr(), v.data_ptr()
            params.context_slot_stride, params.context_row_stride = k.stride(0), k.stride(1)
        _run("dflash_append", params, _stream())
        return None if q is None else q.transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [B, N, H] by strides: [B, N, H]. H is a multiple of 8 and at most 32,768."""
    return _rms_norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and that sum normed; [B, N, H] each."""
    _check(y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous(), "what is added must have x's shape")
    return _rms_norm(x, y, weight, eps)


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    slots, rows, size = x.shape
    _check(x.dtype in _HALVES and weight.dtype == x.dtype, f"norm of {x.dtype} by {weight.dtype}")
    _check(size % 8 == 0 and size <= 1 << 15 and weight.shape == (size,), f"norm of {size} numbers")
    _check_rows(x, slots, size, x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if residual is not None else x
    params = _RmsNorm(
        dtype=_DTYPES[x.dtype],
        slots=slots,
        rows=rows,
        size=size,
        eps=eps,
        x=x.data_ptr(),
        residual=_address(residual),
        weight=weight.data_ptr(),
        sum=total.data_ptr() if residual is not None else None,
        out=out.data_ptr(),
        x_slot_stride=x.stride(0),
        x_row_stride=x.stride(1),
    )
    _run("dflash_rms_norm", params, _stream())
    return total, out


def swiglu(x: Tensor) -> Tensor:
    """x [..., 2F] holds gate, then up: silu(gate) * up, [..., F]. F is a multiple of 8."""
    size = x.shape[-1] // 2
    _check(x.dtype in _HALVES and x.is_contiguous() and size % 8 == 0, "SwiGLU of contiguous 16-bit rows, F by 8")
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    rows = x.numel() // x.shape[-1]
    params = _Swiglu(dtype=_DTYPES[x.dtype], rows=rows, size=size, x=x.data_ptr(), out=out.data_ptr())
    _run("dflash_swiglu", params, _stream())
    return out


def takes_quantize(x: Tensor) -> bool:
    """Whether `quantize_rows` takes contiguous rows x [N, I]."""
    return x.dtype in _HALVES and x.shape[1] % 8 == 0 and x.shape[1] <= 1 << 15


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.fp8.quantize_rows` of 16-bit rows x [N, I] in one kernel. I is a multiple of 8 and at most 32,768."""
    rows, size = x.shape
    _check(takes_quantize(x) and x.is_contiguous(), f"rows of {size} {x.dtype}")
    out = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    params = _Quantize(
        dtype=_DTYPES[x.dtype], rows=rows, size=size, x=x.data_ptr(), out=out.data_ptr(), scale=scale.data_ptr()
    )
    _run("dflash_quantize", params, _stream())
    return out, scale


def takes_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether `skinny_gemm` multiplies x [..., I] and weight [O, I], on x's GPU."""
    outputs, inputs = weight.shape
    line = inputs * weight.element_size()
    fits = x.numel() <= SKINNY_ROWS * inputs and line % 128 == 0 and outputs % 16 == 0
    return fits and x.dtype in _HALVES and _major(x.device) in SKINNY_GPUS


@dataclass(frozen=True)
class Norm:
    """RMSNorm of the rows that a product takes."""

    weight: Tensor  # [I], of their type
    eps: float


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    swiglu: bool = False,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [..., I] of few rows times weight [O, I], transposed, plus bias [O]: [..., O]. A row's result is its own.

    Args:
        weight: of x's type, or E4M3 with `scale` [O] in FP32. See `takes_skinny` for the sizes.
        swiglu: its rows are gate, then up: returns silu(gate) * up, [..., O/2].
        norm: what x is normed by first. No less precise than the normed rows, rounded, times the weight.
        residual: [..., O], added at the end; not with swiglu.
    """
    outputs, inputs = weight.shape
    _check(takes_skinny(x, weight) and x.shape[-1] == inputs, f"x {tuple(x.shape)} times weight {tuple(weight.shape)}")
    _check(x.is_contiguous() and weight.is_contiguous(), "x and the weight must be contiguous")
    _check(weight.dtype == (x.dtype if scale is None else torch.float8_e4m3fn), f"a weight of {weight.dtype}")
    width = outputs // 2 if swiglu else outputs
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if norm is not None:
        is_right = norm.weight.shape == (inputs,) and norm.weight.dtype == x.dtype and norm.weight.is_contiguous()
        _check(is_right, f"a norm of {tuple(norm.weight.shape)} {norm.weight.dtype}")
    if residual is not None:
        is_right = residual.shape == out.shape and residual.dtype == x.dtype and residual.is_contiguous() and not swiglu
        _check(is_right, f"a residual {tuple(residual.shape)} {residual.dtype}")
    params = _SkinnyGemm(
        dtype=_DTYPES[x.dtype],
        weight_dtype=_DTYPES[weight.dtype],
        rows=x.numel() // inputs,
        inputs=inputs,
        outputs=outputs,
        swiglu=int(swiglu),
        eps=norm.eps if norm else 0.0,
        x=x.data_ptr(),
        norm_weight=norm.weight.data_ptr() if norm else None,
        weight=weight.data_ptr(),
        scale=_address(scale),
        bias=_address(bias),
        residual=_address(residual),
        out=out.data_ptr(),
    )
    _run("dflash_skinny_gemm", params, _stream())
    return out


class MoE:
    """A mixture of experts' feed-forward of few rows, which reads the experts that they chose and no others.

    Args:
        layer: the layer, as this rank sees it.
        experts: its tensors; numbers of x's type, or MXFP4.

    Raises:
        EngineError: the kernels are not built, or are of an older version.
    """

    def __init__(self, layer: MoELayer, experts: Experts) -> None:
        load()
        self._layer, self._experts = layer, experts

    def takes(self, x: Tensor, logits: Tensor) -> bool:
        """Whether the kernels compute rows x [N, H] of these experts."""
        if not (0 < len(x) <= MOE_ROWS and x.dtype in _HALVES and logits.dtype in _DTYPES):
            return False
        tensors = [x, logits]
        for matrix in (self._experts.gate_up, self._experts.down):
            if any(part is not None and part.dtype != x.dtype for part in (matrix.weight, matrix.bias)):
                return False
            parts = (matrix.weight, matrix.blocks, matrix.scales, matrix.bias)
            tensors += [part for part in parts if part is not None]
        if not all(tensor.is_contiguous() for tensor in tensors):
            return False
        return self._workspace(self._params(x, logits)) is not None

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """What `Ops.moe` says, of rows x [N, H] with logits [N, experts]: [N, H]."""
        _check(self.takes(x, logits), f"experts' feed-forward of {tuple(x.shape)} {x.dtype}")
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        params = self._params(x, logits)
        params.out = out.data_ptr()
        size = self._workspace(params)
        assert size is not None
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        _run("dflash_moe", params, _Pointer(workspace.data_ptr()), ctypes.c_size_t(size), _stream())
        return out

    def _workspace(self, params: ctypes.Structure) -> int | None:
        """Bytes of scratch; None: the kernels do not compute such experts."""
        needed = ctypes.c_size_t()
        error = load().dflash_moe_workspace(ctypes.byref(params), ctypes.byref(needed))
        return None if error else needed.value

    def _params(self, x: Tensor, logits: Tensor) -> ctypes.Structure:
        layer, gate_up, down = self._layer, self._experts.gate_up, self._experts.down
        weights = [matrix.blocks if matrix.weight is None else matrix.weight for matrix in (gate_up, down)]
        assert weights[0] is not None and weights[1] is not None
        return _MoE(
            dtype=_DTYPES[x.dtype],
            logits_dtype=_DTYPES[logits.dtype],
            packed=int(gate_up.weight is None),
            rows=x.shape[0],
            hidden=x.shape[1],
            columns=weights[0].shape[1] // 2,
            experts=layer.experts,
            first=layer.first,
            count=layer.count,
            top_k=layer.top_k,
            normalized=int(layer.normalized),
            clamped=int(layer.clamp is not None),
            alpha=layer.clamp.alpha if layer.clamp else 0.0,
            limit=layer.clamp.limit if layer.clamp else 0.0,
            x=x.data_ptr(),
            logits=logits.data_ptr(),
            gate_up=weights[0].data_ptr(),
            gate_up_scales=_address(gate_up.scales),
            gate_up_bias=_address(gate_up.bias),
            down=weights[1].data_ptr(),
            down_scales=_address(down.scales),
            down_bias=_address(down.bias),
        )


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row of logits [B, R, V] as FP32, and its id, the lowest among equals: [B, R] each."""
    _check(logits.dtype in _DTYPES and logits.is_contiguous(), "argmax of contiguous logits")
    ids = torch.empty(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    best = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    params = _Argmax(
        dtype=_DTYPES[logits.dtype],
        rows=ids.numel(),
        size=logits.shape[-1],
        logits=logits.data_ptr(),
        ids=ids.data_ptr(),
        best=best.data_ptr(),
        row_stride=logits.shape[-1],
    )
    _run("dflash_argmax", params, _stream())
    return best, ids


def accept(
    token_ids: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What `Ops.accept` says: accepted, committed and bonus, int32 [B] each."""
    slots, rows = token_ids.shape
    _check(target_ids.shape == logit_rows.shape, "one choice a logit row")
    inputs = {"token_ids": token_ids, "target_ids": target_ids, "logit_rows": logit_rows, "row_count": row_count}
    for name, x in inputs.items():
        _check(x.dtype == torch.int32 and x.is_contiguous() and x.shape[0] == slots, f"{name} must be int32")
    out = torch.empty(3, slots, dtype=torch.int32, device=token_ids.device)
    addresses = {name: x.data_ptr() for name, x in inputs.items()}
    params = _Accept(
        slots=slots,
        rows=rows,
        logit_row_count=target_ids.shape[1],
        accepted=out[0].data_ptr(),
        committed=out[1].data_ptr(),
        bonus=out[2].data_ptr(),
        **addresses,
    )
    _run("dflash_accept", params, _stream())
    return out[0], out[1], out[2]


def begin_step(tokens: Tensor, start: Tensor, row_count: Tensor, rows: int, step_rows: int) -> tuple[Tensor, Tensor]:
    """The rows of a step, from what slots kept: token ids [B, rows] and start [B], B of row_count [B].

    Args:
        tokens: [slots, block], of at least B slots, as start [slots].
        row_count: how many of a slot's rows are real; 0: it is idle.
        step_rows: that the step writes to a slot, at most: an idle one starts that far below position 0.
    """
    slots = len(row_count)
    _check_slots(tokens, start, row_count)
    token_ids = torch.empty(slots, rows, dtype=torch.int32, device=tokens.device)
    first = torch.empty(slots, dtype=torch.int32, device=tokens.device)
    params = _BeginStep(
        slots=slots,
        rows=rows,
        block=tokens.shape[1],
        step_rows=step_rows,
        tokens=tokens.data_ptr(),
        kept_start=start.data_ptr(),
        row_count=row_count.data_ptr(),
        token_ids=token_ids.data_ptr(),
        start=first.data_ptr(),
    )
    _run("dflash_begin_step", params, _stream())
    return token_ids, first


def end_step(tokens: Tensor, start: Tensor, row_count: Tensor, last_start: int, out: StepOutputs[Tensor]) -> Tensor:
    """Keeps a step's next rows in tokens [slots, block] and start [slots], of slots whose row_count [B] is not 0.

    Returns what the host reads, [B, 1 + R]: accepted, then target_ids.

    Args:
        last_start: the largest start that is kept.
    """
    slots, logit_rows = out.target_ids.shape
    _check_slots(tokens, start, row_count)
    _check_ints(slots, row_count=row_count, accepted=out.accepted, next_start=out.next_start)
    for x in (out.target_ids, out.next_tokens):
        _check(x.dtype == torch.int32 and x.is_contiguous() and x.shape[0] == slots, "a step's ids must be int32")
    decided = torch.empty(slots, 1 + logit_rows, dtype=torch.int32, device=tokens.device)
    params = _EndStep(
        slots=slots,
        block=tokens.shape[1],
        logit_rows=logit_rows,
        next_rows=out.next_tokens.shape[1],
        last_start=last_start,
        row_count=row_count.data_ptr(),
        target_ids=out.target_ids.data_ptr(),
        accepted=out.accepted.data_ptr(),
        next_start=out.next_start.data_ptr(),
        next_tokens=out.next_tokens.data_ptr(),
        tokens=tokens.data_ptr(),
        kept_start=start.data_ptr(),
        decided=decided.data_ptr(),
    )
    _run("dflash_end_step", params, _stream())
    return decided


def embed(table: Tensor, ids: Tensor, block: int = 0, mask_id: int = 0) -> Tensor:
    """Rows of table [V, H] at ids [B, N]: [B, N, H]. With a block, ids are [B], each followed by block - 1 masks.

    An id that the table does not have gives zeros.
    """
    _check(table.dtype in _HALVES and table.is_contiguous() and table.shape[1] % 8 == 0, "a table of 16-bit rows")
    _check(ids.dtype == torch.int32 and ids.is_contiguous() and ids.dim() == (1 if block else 2), "ids must be int32")
    shape = (len(ids), block) if block else tuple(ids.shape)
    out = torch.empty(*shape, table.shape[1], dtype=table.dtype, device=table.device)
    params = _Embed(
        dtype=_DTYPES[table.dtype],
        rows=shape[0] * shape[1],
        size=table.shape[1],
        vocabulary=table.shape[0],
        block=block,
        mask_id=mask_id,
        table=table.data_ptr(),
        ids=ids.data_ptr(),
        out=out.data_ptr(),
    )
    _run("dflash_embed", params, _stream())
    return out


class AllReduce:
    """Sums of small tensors over ranks that read each other's memory: in FP32, in the order of ranks, the same on all.

    Every rank makes the same calls in one order, or waits for the others for ever.

    Args:
        shared: where each rank's shared memory lies for this one: ALL_REDUCE_SHARED bytes, zeros at first.
        rank: this one.

    Raises:
        EngineError: the kernels are not built, or are of an older version.
    """

    def __init__(self, shared: list[int], rank: int) -> None:
        load()
        self._shared = (_Pointer * _MOST_RANKS)(*shared)
        self._ranks, self._rank = len(shared), rank

    def takes(self, x: Tensor) -> bool:
        """Whether x is small, and such as the kernel can sum."""
        return x.dtype in _DTYPES and x.is_contiguous() and x.nbytes <= ALL_REDUCE_BYTES and x.nbytes % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of every rank's x."""
        out = torch.empty_like(x)
        params = _AllReduce(
            dtype=_DTYPES[x.dtype],
            ranks=self._ranks,
            rank=self._rank,
            count=x.numel(),
            x=x.data_ptr(),
            out=out.data_ptr(),
            shared=self._shared,
        )
        _run("dflash_all_reduce", params, _stream())
        return out


@functools.cache
def _major(device: torch.device) -> int:
    """Of the compute capability."""
    return torch.cuda.get_device_capability(device)[0]


def _run(name: str, params: ctypes.Structure, *rest: object) -> None:
    library = load()
    error = getattr(library, name)(ctypes.byref(params), *rest)
    if error:
        raise EngineError(f"{name}: {library.dflash_error_string(error).decode()}")


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _check(is_met: bool, what: str) -> None:
    if not is_met:
        raise ValueError(f"the CUDA kernels cannot take this: {what}")


def _check_ints(slots: int, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        is_right = x is None or (x.shape == (slots,) and x.dtype == torch.int32 and x.is_contiguous())
        _check(is_right, f"{name} must be int32 [{slots}]")


def _check_slots(tokens: Tensor, start: Tensor, row_count: Tensor) -> None:
    _check(tokens.dtype == torch.int32 and tokens.is_contiguous(), "kept tokens must be int32")
    _check_ints(len(tokens), start=start)
    _check_ints(len(row_count), row_count=row_count)
    _check(len(row_count) <= len(tokens), f"{len(row_count)} slots of {len(tokens)}")


def _scale_addresses(scales: Scales) -> dict[str, int]:
    return {} if scales is None else {"key_scale": scales[0].data_ptr(), "value_scale": scales[1].data_ptr()}


def _check_caches(
    keys: Tensor, values: Tensor, slots: int, size: int, dtype: torch.dtype, scales: Scales = None
) -> None:
    if scales is not None:
        _check(all(x.dtype == torch.float32 and x.numel() == 1 for x in scales), "scales of caches must be FP32 []")
        dtype = torch.float8_e4m3fn
    _check(keys.shape == values.shape and keys.stride() == values.stride(), "caches must be alike")
    _check(keys.dtype == values.dtype == dtype, f"caches must be {dtype}")
    _check(keys.shape[0] == slots and keys.shape[3] == size, f"caches {tuple(keys.shape)} for {slots} slots of {size}")
    _check(keys.stride()[2:] == (size, 1), "each head's rows of a cache must be contiguous")


def _check_rows(x: Tensor, slots: int, size: int, dtype: torch.dtype) -> None:
    _check(x.dim() == 3 and x.shape[0] == slots and x.shape[2] == size, f"rows {tuple(x.shape)}, not of {size}")
    is_aligned = x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0
    _check(x.dtype == dtype and is_aligned, f"rows must be {dtype}, contiguous and aligned to 16 bytes")
