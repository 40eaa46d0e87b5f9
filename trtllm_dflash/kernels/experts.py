"""A mixture of experts' feed-forward, of few rows and of many."""

import ctypes
from dataclasses import dataclass

import torch

from trtllm_dflash.kernels.checks import DTYPES, HALVES, address, check, check_ints
from trtllm_dflash.kernels.library import Pointer, load, run, stream, structure
from trtllm_dflash.kernels.support import shared_bytes

Tensor = torch.Tensor

#: Rows that `MoE` takes: for more, products of many rows are faster.
MOE_ROWS = 512
# From which on an expert is read once for up to 64 of its rows (Hopper), not for 8 or 16.
#: Of tiles, pairs of a row and an expert: as soon as what comes before the products is worth its time. Not where blocks
#: of the first product find the routing: `kOwnRows` and `kOwnPairs` of experts_own_route.cuh.
_MANY_PAIRS = 40
_OWN_ROWS, _OWN_PAIRS = 16, 128
#: Rows of an expert, on average, in 16 bits and else: sooner where rows like the same ones, which they mostly do.
_MANY_ROWS = 1, 4
#: Likewise all rows, where they go through one expert besides: it would be read for each 8 or 16 of them.
_MANY_SHARED = 16, 48

# Members of `dflash_moe_format`.
_NUMBERS, _MXFP4, _FP8_ROWS, _FP8_BLOCKS, _INT4, _NVFP4 = range(6)
_NAMES = ("numbers", "MXFP4", "FP8", "FP8 by block", "INT4", "NVFP4")

#: Rows of a weight that a warp multiplies.
GRANULE = 16
# Of `Layout` in experts_work.cuh: the fewest warps and rows of a block; columns of a tile, two of which a warp has four
# times in its ring; and the bytes between one row's inputs and the next one's.
_WARPS, _ROWS, _TILE, _UNITS, _APART = 4, 8, 128, 4, 64


MoEParams = structure(
    "dflash_moe_params",
    ints="dtype logits_dtype format rows hidden columns experts first count top_k normalized clamped",
    floats="alpha limit",
    pointers="x logits gate_up gate_up_scales gate_up_bias down down_scales down_bias out expert_scale correction",
    ints_="gelu",
    floats_="share_scale",
    pointers_="gate_up_row_scales down_row_scales shared_gate residual",
    ints__="has_shared logits_row_stride shared_gate_row_stride",
    pointers__="row_segment",
)


def takes_tiles(hidden: int, columns: int, capability: tuple[int, int], *, is_nvfp4: bool) -> bool:
    """Whether the kernels compute experts of sizes H and F, of a rank, in MXFP4 or NVFP4 on a GPU: not tiles yet.

    As `dflash_moe_workspace` has it: shared memory has to hold 8 rows of the wider, and each warp's ring.
    """
    if hidden % 32 or columns % 32:
        return False
    warp = _UNITS * 2 * _TILE // 32 * part_bytes(is_nvfp4=is_nvfp4)
    steps = -(-max(hidden, columns) // _TILE)  # whose inputs a row has, zeros behind them
    row = steps * 2 * _TILE + _APART
    return _WARPS * warp + _ROWS * row <= shared_bytes(capability)


def part_bytes(*, is_nvfp4: bool) -> int:
    """Counts those of a tile's 16 rows by 32 columns, with their scales."""
    return GRANULE * (16 + (2 if is_nvfp4 else 1))


@dataclass(frozen=True)
class Routing:
    """The rule by which rows choose experts, and the experts of this rank; letters as in `ops.MoELayer`."""

    experts: int  # that rows choose among
    first: int  # the first that this rank has
    count: int  # how many it has
    top_k: int
    normalized: bool  # a row's top_k weights add up to 1
    clamp: tuple[float, float] | None = None  # alpha and limit of a clamped SwiGLU; None: a plain one
    gelu: bool = False  # gates go through GELU by its form with tanh, not through SiLU
    scales: Tensor | None = None  # [experts] of the rows' type, by which their shares are multiplied in the end
    correction: Tensor | None = None  # FP32 [experts], of scores that are sigmoids; None: softmax
    scale: float = 1.0  # that a row's shares are multiplied by, last
    has_shared: bool = False  # the matrices have one more expert, the last: all rows go through it

    @property
    def matrices(self) -> int:
        """Experts whose matrices this rank has."""
        return self.count + self.has_shared


@dataclass(frozen=True)
class Matrix:
    """One projection [O, I] of each of E experts.

    Raises:
        ValueError: scales or biases are not of the shape that goes with the numbers.
    """

    # [E, O, I] of the rows' type, or E4M3; INT4's [E, O, I / 8] int32; MXFP4's and NVFP4's tiles, [E, O / 16, bytes of
    # 16 rows] uint8, or int32 words of them beside BF16, whose numbers are interleaved
    values: Tensor
    scales: Tensor | None = None  # INT4's BF16 [E, O, I / 32]; E4M3's FP32, [E, O] or of 128 by 128
    bias: Tensor | None = None  # [E, O]
    row_scales: Tensor | None = None  # NVFP4's FP32 [E, O]

    def __post_init__(self) -> None:
        check(self.is_tiled or self.row_scales is None, f"NVFP4 alone has rows' scales: {self}")
        part = part_bytes(is_nvfp4=self.format == _NVFP4)
        is_whole = not self.is_tiled or (self.values.ndim == 3 and self._bytes % part == 0)
        check(is_whole, f"tiles {list(self.values.shape)} are not whole blocks of 32 columns: {self}")
        # The kernels find their places by the numbers' shape alone: of another they would read other numbers.
        experts, outputs, inputs = self.shape
        expected = {
            _INT4: (experts, outputs, inputs // 32),
            _FP8_ROWS: (experts, outputs),
            _FP8_BLOCKS: (experts, -(-outputs // 128), -(-inputs // 128)),
        }
        for name, tensor, shape in (
            ("scales", self.scales, expected.get(self.format, ())),
            ("biases", self.bias, (experts, outputs)),
            ("rows' scales", self.row_scales, (experts, outputs)),
        ):
            is_right = tensor is None or tensor.shape == shape
            check(is_right, f"{name} {None if tensor is None else list(tensor.shape)}, not {list(shape)}: {self}")

    def __str__(self) -> str:
        return f"{_NAMES[self.format]} of experts {list(self.shape)}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, O and I."""
        experts, outputs, columns = self.values.shape[:3]
        if self.is_tiled:
            return experts, outputs * GRANULE, self._bytes // part_bytes(is_nvfp4=self.format == _NVFP4) * 32
        return experts, outputs, columns * (8 if self.values.dtype == torch.int32 else 1)

    @property
    def is_tiled(self) -> bool:
        """Whether it is in MXFP4 or NVFP4, whose scales lie with the numbers."""
        return self.scales is None and self.values.dtype in (torch.int32, torch.uint8)

    @property
    def _bytes(self) -> int:
        """Counts those of the tiles of 16 rows."""
        return self.values.shape[-1] * self.values.itemsize

    @property
    def format(self) -> int:
        """The `dflash_moe_format` of its numbers."""
        if self.is_tiled:
            return _MXFP4 if self.row_scales is None else _NVFP4
        if self.scales is None:
            return _NUMBERS
        if self.values.dtype == torch.int32:
            return _INT4
        return _FP8_ROWS if self.scales.ndim == 2 else _FP8_BLOCKS

    def suits(self, dtype: torch.dtype) -> bool:
        """Whether its tensors are of the types that go with rows of a type."""
        packed = torch.int32 if dtype == torch.bfloat16 else torch.uint8
        types = {
            _NUMBERS: (dtype, None),
            _MXFP4: (packed, None),
            _INT4: (torch.int32, torch.bfloat16),
            _NVFP4: (packed, None),
        }
        expected = types.get(self.format, (torch.float8_e4m3fn, torch.float32))
        found = self.values.dtype, None if self.scales is None else self.scales.dtype
        is_scaled = self.row_scales is None or self.row_scales.dtype == torch.float32
        return found == expected and is_scaled and (self.bias is None or self.bias.dtype == dtype)


class MoE:
    """A mixture of experts' feed-forward, which reads the experts that rows chose and no others.

    Args:
        routing: the rule of choice.
        gate_up: [2F, H] of each expert: gate, then up.
        down: [H, F] of each expert.
        many: computes by the kernels for many rows (True) or for few (False) alone; None: by the number of rows.

    Raises:
        EngineError: the kernels are not built, or are of an older version.
    """

    def __init__(self, routing: Routing, gate_up: Matrix, down: Matrix, many: bool | None = None) -> None:
        load()
        self._routing, self._gate_up, self._down, self._many = routing, gate_up, down, many

    def takes(
        self, x: Tensor, logits: Tensor, shared_gate: Tensor | None = None, residual: Tensor | None = None
    ) -> bool:
        """Whether the kernels compute these experts of rows x [N, H]: arguments as those of a call.

        Raises:
            ValueError: rows, logits and matrices are not of the same sizes.
        """
        if not (0 < len(x) <= MOE_ROWS and x.dtype in HALVES and logits.dtype in DTYPES):
            return False
        tensors = [x] if residual is None else [x, residual]
        if logits.stride(-1) != 1 or not (residual is None or residual.dtype == x.dtype):
            return False
        if shared_gate is not None and shared_gate.dtype != logits.dtype:
            return False
        for numbers, dtype in ((self._routing.scales, x.dtype), (self._routing.correction, torch.float32)):
            if numbers is not None:
                if numbers.dtype != dtype or numbers.shape != (self._routing.experts,):
                    return False
                tensors.append(numbers)
        for matrix in (self._gate_up, self._down):
            if not matrix.suits(x.dtype) or matrix.format != self._gate_up.format:
                return False
            parts = matrix.values, matrix.scales, matrix.bias, matrix.row_scales
            tensors += [part for part in parts if part is not None]
        self._check_sizes(x, logits, shared_gate, residual)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return False
        return self._kernels(self._params(x, logits, shared_gate, residual)) is not None

    def __call__(
        self,
        x: Tensor,
        logits: Tensor,
        shared_gate: Tensor | None = None,
        residual: Tensor | None = None,
        row_segment: Tensor | None = None,
    ) -> Tensor:
        """Computes `Ops.moe` for rows x [N, H]: [N, H].

        Args:
            logits: [N, experts]; rows may lie apart, as parts of wider ones do.
            shared_gate: [N, 1], likewise: how much the expert of all rows gives, before its sigmoid. None: all of it.
            residual: [N, H], added.
            row_segment: int32 [N]: rows below 0 are nobody's, and choose no expert. None: all choose.
        """
        check(self.takes(x, logits, shared_gate, residual), f"experts' feed-forward of {tuple(x.shape)} {x.dtype}")
        check_ints(len(x), row_segment=row_segment)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        params = self._params(x, logits, shared_gate, residual)
        params.out, params.row_segment = out.data_ptr(), address(row_segment)
        chosen = self._kernels(params)
        assert chosen is not None
        name, size = chosen
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        run(name, params, Pointer(workspace.data_ptr()), ctypes.c_size_t(size), stream())
        return out

    def _check_sizes(
        self, x: Tensor, logits: Tensor, shared_gate: Tensor | None = None, residual: Tensor | None = None
    ) -> None:
        """Refuses what `Matrix` cannot see: tensors that do not belong together."""
        rows, count = len(x), self._routing.matrices
        hidden, columns = self._down.shape[1:]
        matrices = self._gate_up.shape, self._down.shape
        fits = matrices == ((count, 2 * columns, hidden), (count, hidden, columns))
        check(fits, f"gate and up {list(matrices[0])} beside down {list(matrices[1])} of {count} experts")
        fits = x.shape == (rows, hidden) and logits.shape == (rows, self._routing.experts)
        check(
            fits, f"rows {list(x.shape)} and logits {list(logits.shape)} of {self._routing.experts} experts of {hidden}"
        )
        is_gated = shared_gate is None or (self._routing.has_shared and shared_gate.shape == (rows, 1))
        check(is_gated, f"a gate of {'the' if self._routing.has_shared else 'no'} shared expert for {rows} rows")
        check(residual is None or residual.shape == x.shape, f"a residual that is not {list(x.shape)}")

    def _kernels(self, params: ctypes.Structure) -> tuple[str, int] | None:
        """Chooses by the number of rows: the function and its bytes of scratch; None: none computes such experts."""
        many = self._are_many(params) if self._many is None else self._many
        for name in ["dflash_moe_many"] * many + ["dflash_moe"] * (not self._many):
            needed = ctypes.c_size_t()
            if not getattr(load().functions, name + "_workspace")(ctypes.byref(params), ctypes.byref(needed)):
                return name, needed.value
        return None

    def _are_many(self, params: ctypes.Structure) -> bool:
        """Whether so many rows take less time by the kernels for many."""
        rows: int = params.rows
        pairs: int = rows * params.top_k
        if self._gate_up.is_tiled:
            is_short = rows <= _OWN_ROWS and pairs + rows * params.has_shared <= _OWN_PAIRS
            is_own = is_short and params.normalized and not params.correction and params.logits_dtype == params.dtype
            return pairs >= _MANY_PAIRS and not is_own
        is_small = self._gate_up.format != _NUMBERS
        least: int = _MANY_ROWS[is_small] * params.experts
        return rows >= _MANY_SHARED[is_small] if params.has_shared else pairs >= least

    def _params(
        self, x: Tensor, logits: Tensor, shared_gate: Tensor | None, residual: Tensor | None
    ) -> ctypes.Structure:
        routing, gate_up, down = self._routing, self._gate_up, self._down
        alpha, limit = routing.clamp or (0.0, 0.0)
        return MoEParams(
            dtype=DTYPES[x.dtype],
            logits_dtype=DTYPES[logits.dtype],
            format=gate_up.format,
            rows=x.shape[0],
            hidden=x.shape[1],
            columns=gate_up.shape[1] // 2,
            experts=routing.experts,
            first=routing.first,
            count=routing.count,
            top_k=routing.top_k,
            normalized=int(routing.normalized),
            clamped=int(routing.clamp is not None),
            alpha=alpha,
            limit=limit,
            x=x.data_ptr(),
            logits=logits.data_ptr(),
            gate_up=gate_up.values.data_ptr(),
            gate_up_scales=address(gate_up.scales),
            gate_up_bias=address(gate_up.bias),
            down=down.values.data_ptr(),
            down_scales=address(down.scales),
            down_bias=address(down.bias),
            expert_scale=address(routing.scales),
            correction=address(routing.correction),
            gelu=int(routing.gelu),
            share_scale=routing.scale,
            gate_up_row_scales=address(gate_up.row_scales),
            down_row_scales=address(down.row_scales),
            shared_gate=address(shared_gate),
            residual=address(residual),
            has_shared=int(routing.has_shared),
            logits_row_stride=logits.stride(0),
            shared_gate_row_stride=0 if shared_gate is None else shared_gate.stride(0),
        )
