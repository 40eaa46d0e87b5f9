"""Gated delta nets, and where the states stand that they keep of slots."""

from dataclasses import dataclass

import torch

from trtllm_dflash.kernels.checks import DTYPES, HALVES, check, check_ints
from trtllm_dflash.kernels.library import run, run_with_workspace, stream, structure

Tensor = torch.Tensor

#: Chunks of 16 rows whose numbers lie in memory at once; see `delta_net_prompt.cu`.
MOST_CHUNKS = 72
#: Sizes of a net's heads, rows that its convolution sees, and rows at most that a step leaves beside a state.
DELTA_SIZES = (16, 32, 64, 128)
DELTA_TAPS = 4
DELTA_ROWS = 16
#: Rows beside a state up to which steps of single rows leave it unwritten: reading it with them takes longer with each.
MOST_KEPT = 16


DeltaNetParams = structure(
    "dflash_delta_net_params",
    ints="dtype segment_count rows key_heads value_heads head_size kernel pending slots most_rows keeps",
    floats="norm_eps",
    pointers="segments lengths x gates conv a_log dt_bias norm states writes keys decays window counters out",
    longs="x_row_stride gates_row_stride",
)


AdvanceStatesParams = structure(
    "dflash_advance_states_params", ints="segment_count pending keeps", pointers="segments lengths"
)


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net: its weights, and what it keeps of each slot; FP32 but for `conv` and `window`.

    C is (2 Hk + Hv) * D: queries, keys and values.
    """

    conv: Tensor  # [C, 1, taps]
    rates: Tensor  # A_log [Hv]
    dt_bias: Tensor  # [Hv]
    norm: Tensor  # [D]
    norm_eps: float
    states: Tensor  # [slots, Hv, D, D]: of each value, D keys
    writes: Tensor  # [slots, pending, Hv, D]
    keys: Tensor  # [slots, pending, Hk, D]
    decays: Tensor  # [slots, pending, Hv]
    window: Tensor  # [slots, taps - 1 + pending, C]

    def __call__(
        self,
        x: Tensor,
        gates: Tensor,
        segments: Tensor,
        lengths: Tensor,
        counters: Tensor,
        most_rows: int,
        keeps: int = 0,
    ) -> Tensor:
        """Computes flat rows x [N, C + Hv*D] with gates [N, 2 Hv]: [N, Hv*D]; those of no segment become zeros.

        Args:
            segments: [G, 4] int32 of slot, start, first row and count, in the order of their rows; no slot has two.
            lengths: [slots] int32, the positions that states stand at. They are left so: see `advance_states`.
            counters: [slots, Hk] int32 zeros, which every net of one stream may have.
            most_rows: that any segment has.
            keeps: rows, at most those that may be pending, up to which a segment's only row joins the accepted ones
                beside the state instead of their being absorbed; 0: none does, as where `joins_rows` says no.
        """
        slots, value_heads, size = self.states.shape[:3]
        pending, key_heads = self.keys.shape[1:3]
        rows, channels = len(x), (2 * key_heads + value_heads) * size
        self._check(x)
        columns, numbers = channels + value_heads * size, 2 * value_heads
        for name, tensor, width in (("rows", x, columns), ("gates", gates, numbers)):
            is_right = tensor.shape == (rows, width) and tensor.stride(1) == 1 and tensor.dtype == x.dtype
            check(is_right, f"{name} {tuple(tensor.shape)} of {tensor.dtype}, not [{rows}, {width}]")
        is_right = segments.dtype == torch.int32 and segments.shape[1:] == (4,) and segments.is_contiguous()
        check(is_right, "segments must be int32 [G, 4]")
        check_ints(slots, lengths=lengths)
        is_right = counters.dtype == torch.int32 and counters.shape == (slots, key_heads) and counters.is_contiguous()
        check(is_right, f"counters must be int32 [{slots}, {key_heads}]")
        check(most_rows <= rows, f"a segment of {most_rows} of {rows} rows")
        out = torch.empty(rows, value_heads * size, dtype=x.dtype, device=x.device)
        params = DeltaNetParams(
            dtype=DTYPES[x.dtype],
            segment_count=len(segments),
            rows=rows,
            key_heads=key_heads,
            value_heads=value_heads,
            head_size=size,
            kernel=DELTA_TAPS,
            pending=pending,
            slots=slots,
            most_rows=most_rows,
            keeps=keeps,
            norm_eps=self.norm_eps,
            segments=segments.data_ptr(),
            lengths=lengths.data_ptr(),
            x=x.data_ptr(),
            gates=gates.data_ptr(),
            conv=self.conv.data_ptr(),
            a_log=self.rates.data_ptr(),
            dt_bias=self.dt_bias.data_ptr(),
            norm=self.norm.data_ptr(),
            states=self.states.data_ptr(),
            writes=self.writes.data_ptr(),
            keys=self.keys.data_ptr(),
            decays=self.decays.data_ptr(),
            window=self.window.data_ptr(),
            counters=counters.data_ptr(),
            out=out.data_ptr(),
            x_row_stride=x.stride(0),
            gates_row_stride=gates.stride(0),
        )
        run_with_workspace("dflash_delta_net", params, x.device)
        return out

    def _check(self, x: Tensor) -> None:
        """Refuses weights and states that are not of one net for rows of x's type."""
        slots, value_heads, size = self.states.shape[:3]
        pending, key_heads = self.keys.shape[1:3]
        channels = (2 * key_heads + value_heads) * size
        shapes = {
            "A_log": (self.rates, (value_heads,)),
            "dt_bias": (self.dt_bias, (value_heads,)),
            "norm": (self.norm, (size,)),
            "states": (self.states, (slots, value_heads, size, size)),
            "writes": (self.writes, (slots, pending, value_heads, size)),
            "keys": (self.keys, (slots, pending, key_heads, size)),
            "decays": (self.decays, (slots, pending, value_heads)),
        }
        for name, (tensor, shape) in shapes.items():
            is_right = tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()
            check(is_right, f"{name} {tuple(tensor.shape)} of {tensor.dtype}, not FP32 {list(shape)}")
        others = {
            "conv1d": (self.conv, (channels, 1, DELTA_TAPS)),
            "window": (self.window, (slots, DELTA_TAPS - 1 + pending, channels)),
        }
        for name, (tensor, shape) in others.items():
            is_right = tensor.shape == shape and tensor.dtype == x.dtype and tensor.is_contiguous()
            check(is_right, f"{name} {tuple(tensor.shape)} of {tensor.dtype}, not {x.dtype} {list(shape)}")
        check(size in DELTA_SIZES and pending <= DELTA_ROWS, f"heads of {size} with {pending} pending rows")
        check(value_heads % key_heads == 0, f"{value_heads} value heads cannot share {key_heads} key heads")
        is_aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        check(x.dtype in (*HALVES, torch.float32) and is_aligned, "rows must be aligned to 16 bytes")


def joins_rows(rows: int, segments: int, size: int) -> bool:
    """Says whether nets of heads of this size can leave states unwritten by a step of so many rows; see `keeps`."""
    return size == DELTA_SIZES[-1] and rows <= segments


def advance_states(lengths: Tensor, segments: Tensor, pending: int, keeps: int = 0) -> None:
    """Notes in lengths [slots] where states stand after a step of segments [G, 4], once all nets have computed it.

    Args:
        keeps: as the nets had it.
    """
    check_ints(len(lengths), lengths=lengths)
    params = AdvanceStatesParams(
        segment_count=len(segments),
        pending=pending,
        keeps=keeps,
        segments=segments.data_ptr(),
        lengths=lengths.data_ptr(),
    )
    run("dflash_advance_states", params, stream())


def scratch_bytes(rows: int, segments: int, key_heads: int, value_heads: int, size: int, *, prompts: bool) -> int:
    """Counts the bytes of scratch that a net takes for a step, as `dflash_delta_net_workspace` does.

    Args:
        prompts: whether a segment may have more rows than stay beside its state.
    """
    # Rows lie as in shared memory, where those side by side begin in other banks: queries and keys, each number in two
    # parts of FP16, and what lies between rows.
    keys = 2 * DELTA_ROWS * (size + (16 if size % 32 == 0 else 0))
    weights = 2 * DELTA_ROWS * (DELTA_ROWS + 4) + 2 * DELTA_ROWS
    prepared = segments * (key_heads * keys + value_heads * weights)
    numbers = 2 * DELTA_ROWS * size
    of_chunk = key_heads * numbers + value_heads * (numbers + DELTA_ROWS**2 + 2 * DELTA_ROWS)
    chunks = min(rows // DELTA_ROWS + segments, MOST_CHUNKS) if prompts else 0
    return 4 * max(prepared, chunks * of_chunk)


def why_no_delta_net(key_size: int, value_size: int, taps: int, pending: int) -> str | None:
    """Explains why the kernels do not compute nets of such heads, convolutions and blocks; None: they do."""
    if key_size != value_size or key_size not in DELTA_SIZES:
        sizes = ", ".join(map(str, DELTA_SIZES))
        return f"gated delta nets with heads of {sizes}, keys as values, not of {key_size} and {value_size}"
    if taps != DELTA_TAPS:
        return f"gated delta nets with a convolution over {DELTA_TAPS} rows, not over {taps}"
    if pending > DELTA_ROWS:
        return f"gated delta nets with blocks of at most {DELTA_ROWS} rows, not of {pending}"
    return None
