"""Products of rows and a large weight, whose time is that of reading the weight."""

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import torch

from trtllm_dflash.kernels.checks import DTYPES, HALVES, address, check
from trtllm_dflash.kernels.library import is_hopper, load, processors, run, run_with_workspace, stream, structure

Tensor = torch.Tensor

#: Rows and columns of the blocks that have a scale each, of E4M3 weights.
FP8_BLOCK = 128
#: Rows that `skinny_gemm` takes.
SKINNY_ROWS = 16
#: Numbers of a row that `exact_gemm` norms: as many as its kernel has shared memory for.
MOST_NORMED = 24_576
#: Rows that `wide_gemm` takes, up to which it is faster than cuBLAS, and the most that the busiest multiprocessor may
#: then have to read of the weight, in thousandths of an equal share; with SwiGLU no more uneven ones were measured.
WIDE_ROWS, _WIDE_LOAD, _WIDE_GATED_LOAD = 128, 1500, 1100
#: Likewise of FP8 weights, whose products cuBLAS takes longer for. With a scale a block those of more than 64 rows are
#: faster where outputs are so few that each is divided between two blocks.
_WIDE_FP8_GATED_LOAD, _WIDE_BLOCK_ROWS, _WIDE_BLOCK_OUTPUTS, _WIDE_BLOCK_LOAD = 1350, 64, 8192, 1250
#: Rows of an FP8 weight with a scale a row that are multiplied in halves side by side, where outputs are so few.
WIDE_FP8_ROWS, _WIDE_HALVES_OUTPUTS = 256, 4096
#: Likewise where `bulk_gemm` is faster than cuBLAS, and the most that the busiest multiprocessor may have to multiply.
BULK_ROWS, _BULK_LOAD = 256, 1100
#: Likewise where a product is faster in two parts of its columns: they are then as many tiles as there are
#: multiprocessors, and no fewer than this share of them.
_PARTED_ROWS, _TILE, _PARTED_LOAD = 256, 128, 0.9
_HAS_OUT_TYPE = hasattr(torch.ops.aten.bmm, "dtype")  # from torch 2.8 on
#: Compute capabilities (major) whose blocks have the 212 KB of shared memory that it needs; the others' have half.
SKINNY_GPUS = (9, 10)


SkinnyGemmParams = structure(
    "dflash_skinny_gemm_params",
    ints="dtype weight_dtype rows inputs outputs swiglu",
    floats="eps",
    pointers="x norm_weight weight scale bias residual out",
    ints_="norm_adds_one gelu",
    pointers_="row_factors",
    ints__="is_scaled_by_block leaves_room",
)

NormInputsParams = structure(
    "dflash_norm_inputs_params",
    ints="dtype rows size adds_one outputs",
    floats="eps",
    pointers="x weight out factors",
)


@dataclass(frozen=True)
class Norm:
    """RMSNorm of the rows that a product takes."""

    weight: Tensor  # [I], of their type; where rows are rounded to E4M3 behind it, FP32 too
    eps: float
    adds_one: bool = False  # it multiplies by one more than its weight: BF16 rows, and a BF16 weight of the product


def fits_skinny(rows: int, outputs: int, inputs: int, item: int) -> bool:
    """Whether `skinny_gemm` has so many rows, and lines of so many inputs of `item` bytes each."""
    return rows <= SKINNY_ROWS and inputs * item % 128 == 0 and outputs % 16 == 0


def takes_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether `skinny_gemm` multiplies x [..., I] and weight [O, I], on x's GPU."""
    outputs, inputs = weight.shape
    fits = fits_skinny(x.numel() // x.shape[-1], outputs, inputs, weight.element_size())
    return fits and x.dtype in HALVES and torch.cuda.get_device_capability(x.device)[0] in SKINNY_GPUS


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    swiglu: bool = False,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gelu: bool = False,
    leaves_room: bool = False,
) -> Tensor:
    """Multiplies few rows x [..., I] by weight [O, I], transposed, plus bias [O]: [..., O]. No row depends on others.

    Args:
        weight: of x's type, or E4M3 with `scale` in FP32, [O] or by block [ceil(O / 128), I / 128]. See `takes_skinny`
            for the sizes.
        swiglu: its rows are gate, then up: returns silu(gate) * up, [..., O/2].
        norm: norms x first. No less precise than the normed rows, rounded, times the weight.
        residual: [..., O], added at the end; not with swiglu.
        gelu: with swiglu, gates go through GELU by its form with tanh, not through SiLU.
        leaves_room: of shared memory, for `attend_single_rows` to begin while this runs. Its results are the same.
    """
    check(takes_skinny(x, weight), f"x {tuple(x.shape)} times weight {tuple(weight.shape)}")
    how = bias, swiglu, norm, residual, gelu
    return _product("dflash_skinny_gemm", x, weight, scale, *how, leaves_room=leaves_room)


def takes_wide(x: Tensor, weight: Tensor) -> bool:
    """Whether `exact_gemm`, and of few rows `wide_gemm`, multiplies x [..., I] and weight [O, I], on x's GPU."""
    outputs, inputs = weight.shape
    fits = inputs % 64 == 0 and outputs % 16 == 0 and weight.dtype == x.dtype
    return fits and x.dtype in HALVES and is_hopper(x.device)


def suits_wide(x: Tensor, weight: Tensor, swiglu: bool) -> bool:
    """Whether `wide_gemm` takes x [..., I] and weight [O, I], and is faster than cuBLAS."""
    if x.numel() > WIDE_ROWS * x.shape[-1] or not takes_wide(x, weight):
        return False
    load = _wide_load(*weight.shape, swiglu, processors(x.device))
    return load <= (_WIDE_GATED_LOAD if swiglu else _WIDE_LOAD)


def suits_wide_fp8(x: Tensor, weight: Tensor, scale: Tensor, swiglu: bool) -> bool:
    """Whether `wide_gemm_fp8` takes rows x [..., I], rounded, and a weight [O, I], and is faster than cuBLAS."""
    (outputs, inputs), rows, by_block = weight.shape, x.numel() // x.shape[-1], scale.ndim == 2
    most, unit = (WIDE_ROWS, FP8_BLOCK) if by_block else (WIDE_FP8_ROWS, 16)
    fits = rows <= most and inputs % unit == 0 and outputs % 16 == 0
    if not fits or x.dtype != torch.bfloat16 or weight.dtype != torch.float8_e4m3fn or not is_hopper(x.device):
        return False
    how = {"weight_dtype": DTYPES[weight.dtype], "is_scaled_by_block": int(by_block), "rows": rows}
    load = _wide_load(outputs, inputs, swiglu, processors(x.device), **how)
    if by_block and rows > _WIDE_BLOCK_ROWS:
        return outputs <= _WIDE_BLOCK_OUTPUTS and load <= _WIDE_BLOCK_LOAD
    if rows > WIDE_ROWS:
        return rows == WIDE_FP8_ROWS and not swiglu and outputs <= _WIDE_HALVES_OUTPUTS and load <= _WIDE_LOAD
    return load <= (_WIDE_FP8_GATED_LOAD if swiglu else _WIDE_LOAD)


@cache
def _wide_load(outputs: int, inputs: int, swiglu: bool, count: int, **how: int) -> int:
    params = SkinnyGemmParams(outputs=outputs, inputs=inputs, swiglu=int(swiglu), **how)
    most: int = load().functions.dflash_wide_gemm_load(ctypes.byref(params), count)
    return most


def wide_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    swiglu: bool = False,
    residual: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """Multiplies at most `WIDE_ROWS` rows as `skinny_gemm` does few, in another order of adding."""
    is_taken = takes_wide(x, weight) and x.numel() <= WIDE_ROWS * x.shape[-1]
    check(is_taken, f"x {tuple(x.shape)} times weight {tuple(weight.shape)}")
    return _product("dflash_wide_gemm", x, weight, None, bias, swiglu, None, residual, gelu)


def wide_gemm_fp8(
    x: Tensor,
    factors: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    swiglu: bool = False,
    residual: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """Multiplies E4M3 rows as `wide_gemm` does, by an E4M3 weight: BF16.

    Args:
        x, factors: as `quantize_rows` makes them: [..., I], a multiple of 16 of them, and a scale each, FP32 [N, 1].
            By a weight with a scale a block as `quantize_blocks` does: FP32 [I / 128, N].
        weight, scale: [O, I], and FP32 [O], or by block [ceil(O / 128), I / 128].
    """
    rows, inputs = x.numel() // x.shape[-1], x.shape[-1]
    shape = (inputs // FP8_BLOCK, rows) if scale.ndim == 2 else (rows, 1)
    is_right = factors.shape == shape and factors.dtype == torch.float32 and factors.is_contiguous()
    check(x.dtype == weight.dtype == torch.float8_e4m3fn, f"x of {x.dtype} and a weight of {weight.dtype}")
    check(scale.data_ptr() % 8 == 0, "a weight's scales must lie at a multiple of 8 bytes")
    check(is_right and rows <= WIDE_FP8_ROWS, f"scales {tuple(factors.shape)} of x {tuple(x.shape)}")
    how = bias, swiglu, None, residual, gelu
    return _product("dflash_wide_gemm", x, weight, scale, *how, row_factors=factors)


def count_parts(x: Tensor, weight: Tensor) -> int:
    """Counts the parts of its columns in which x [..., I] is best multiplied by weight [O, I]; 1: as a whole."""
    rows, outputs = x.numel() // x.shape[-1], weight.shape[0]
    tiles = math.ceil(rows / _TILE) * math.ceil(outputs / _TILE)
    fits = WIDE_ROWS < rows <= _PARTED_ROWS and x.shape[-1] % (2 * _TILE) == 0
    if not fits or not _HAS_OUT_TYPE or x.dtype not in HALVES or not is_hopper(x.device):
        return 1
    count = processors(x.device)
    return 2 if _PARTED_LOAD * count <= 2 * tiles <= count else 1


def product_in_parts(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Multiplies x [B, N, I] by weight [O, I] in parts of its columns: FP32 [parts, B, N, O], to be added up."""
    rows = x.reshape(-1, parts, x.shape[-1] // parts).transpose(0, 1)
    columns = weight.view(len(weight), parts, -1).permute(1, 2, 0)
    return torch.bmm(rows, columns, out_dtype=torch.float32).view(parts, *x.shape[:-1], len(weight))


def suits_bulk(x: Tensor, weight: Tensor) -> bool:
    """Whether `bulk_gemm` takes x [..., I] and weight [O, I], and is faster than cuBLAS and a kernel that gates."""
    rows = x.numel() // x.shape[-1]
    if not WIDE_ROWS < rows <= BULK_ROWS or weight.shape[0] % 32 or not takes_wide(x, weight):
        return False
    return _bulk_load(rows, *weight.shape, processors(x.device)) <= _BULK_LOAD


@cache
def _bulk_load(rows: int, outputs: int, inputs: int, count: int) -> int:
    params = SkinnyGemmParams(rows=rows, outputs=outputs, inputs=inputs, swiglu=1)
    most: int = load().functions.dflash_bulk_gemm_load(ctypes.byref(params), count)
    return most


def bulk_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    """Multiplies hundreds of rows as `skinny_gemm` does few with `swiglu`: [..., O/2].

    A row's bits may depend on how many there are. Weights' rows are a multiple of 32.
    """
    check(takes_wide(x, weight), f"x {tuple(x.shape)} times weight {tuple(weight.shape)}")
    return _product("dflash_bulk_gemm", x, weight, None, bias, True, None, None, gelu)


def exact_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    swiglu: bool = False,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """Multiplies any number of rows as `skinny_gemm` does few: a row's bits do not depend on how many there are.

    Where chains of a row's lines are whole pairs of lines they are `skinny_gemm`'s (`product_order.cuh`).

    Args: as in `skinny_gemm`; sizes as in `takes_wide`, and a norm of BF16 rows alone, of at most MOST_NORMED numbers.
    """
    check(takes_wide(x, weight), f"x {tuple(x.shape)} times weight {tuple(weight.shape)}")
    factors = None
    if norm is not None:
        check(x.dtype == torch.bfloat16, f"a norm of {x.dtype}")
        if x.numel() > SKINNY_ROWS * x.shape[-1]:
            x, factors = _norm_inputs(x, norm, len(weight))
            norm = None
    return _product(
        "dflash_exact_gemm", x, weight, None, bias, swiglu, norm, residual, gelu, factors, has_workspace=True
    )


def _norm_inputs(x: Tensor, norm: Norm, outputs: int) -> tuple[Tensor, Tensor]:
    """Makes the inputs of a product behind a norm, as x, and what each row's sums are then multiplied by, in FP32."""
    check(x.is_contiguous(), "x must be contiguous")
    _check_norm(x, norm)
    rows, size = x.numel() // x.shape[-1], x.shape[-1]
    check(size <= MOST_NORMED, f"a norm of {size} numbers; at most {MOST_NORMED}")
    out, factors = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    params = NormInputsParams(
        dtype=DTYPES[x.dtype],
        rows=rows,
        size=size,
        adds_one=int(norm.adds_one),
        outputs=outputs,
        eps=norm.eps,
        x=x.data_ptr(),
        weight=norm.weight.data_ptr(),
        out=out.data_ptr(),
        factors=factors.data_ptr(),
    )
    run("dflash_norm_inputs", params, stream())
    return out, factors


def _check_norm(x: Tensor, norm: Norm) -> None:
    is_right = norm.weight.shape == x.shape[-1:] and norm.weight.dtype == x.dtype and norm.weight.is_contiguous()
    check(is_right, f"a norm of {tuple(norm.weight.shape)} {norm.weight.dtype}")


def _product(
    function: str,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    swiglu: bool,
    norm: Norm | None,
    residual: Tensor | None,
    gelu: bool,
    row_factors: Tensor | None = None,
    has_workspace: bool = False,
    leaves_room: bool = False,
) -> Tensor:
    outputs, inputs = weight.shape
    check(x.shape[-1] == inputs, f"x {tuple(x.shape)} times weight {tuple(weight.shape)}")
    check(x.is_contiguous() and weight.is_contiguous(), "x and the weight must be contiguous")
    check(weight.dtype == (x.dtype if scale is None else torch.float8_e4m3fn), f"a weight of {weight.dtype}")
    dtype = torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype
    if scale is not None:
        shapes = (outputs,), (-(-outputs // FP8_BLOCK), inputs // FP8_BLOCK)
        is_right = scale.shape in shapes and scale.dtype == torch.float32 and scale.is_contiguous()
        check(is_right, f"scales {tuple(scale.shape)} {scale.dtype} of a weight {tuple(weight.shape)}")
    width = outputs // 2 if swiglu else outputs
    out = torch.empty(*x.shape[:-1], width, dtype=dtype, device=x.device)
    if norm is not None:
        _check_norm(x, norm)
        is_right = not norm.adds_one or (x.dtype == torch.bfloat16 and scale is None)
        check(is_right, f"a norm by one more than its weight, of {x.dtype} by {weight.dtype}")
    if residual is not None:
        is_right = residual.shape == out.shape and residual.dtype == dtype and residual.is_contiguous() and not swiglu
        check(is_right, f"a residual {tuple(residual.shape)} {residual.dtype}")
    # `skinny_gemm` reads a number at a time, the others two, or eight of more rows.
    piece = 16 if out.numel() > WIDE_ROWS * width else x.element_size() if function == "dflash_skinny_gemm" else 4
    is_aligned = not any(y is not None and y.data_ptr() % piece for y in (bias, residual))
    check(is_aligned, f"a bias and a residual of so many rows must lie at a multiple of {piece} bytes")
    params = SkinnyGemmParams(
        dtype=DTYPES[dtype],
        weight_dtype=DTYPES[weight.dtype],
        rows=x.numel() // inputs,
        inputs=inputs,
        outputs=outputs,
        swiglu=int(swiglu),
        eps=norm.eps if norm else 0.0,
        x=x.data_ptr(),
        norm_weight=norm.weight.data_ptr() if norm else None,
        weight=weight.data_ptr(),
        scale=address(scale),
        bias=address(bias),
        residual=address(residual),
        out=out.data_ptr(),
        norm_adds_one=int(norm is not None and norm.adds_one),
        gelu=int(gelu),
        row_factors=address(row_factors),
        is_scaled_by_block=int(scale is not None and scale.ndim == 2),
        leaves_room=int(leaves_room),
    )
    if has_workspace:
        run_with_workspace(function, params, x.device)
    else:
        run(function, params, stream())
    return out
