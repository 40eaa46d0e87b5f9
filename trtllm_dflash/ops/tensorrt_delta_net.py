"""Gated delta nets in TensorRT's own layers, and the other operations of hybrids.

A step's rows are computed together. With G the sums of the rows' logarithmic decays, of n rows behind a state S:

    A[i, j] = sigmoid(b_i) * exp(G_i - G_j) * (k_i . k_j) for i > j, else 0
    U = (I + A)^-1 [sigmoid(b) * (v - exp(G) * (k S))]
    o = exp(G) * (q S) + tril(q k^T * exp(G_i - G_j)) U
    S after c rows = exp(G_c) * S + the sum over j <= c of exp(G_c - G_j) * k_j u_j^T

Only differences that are at most 0 are exponentiated. The inverse is made of blocks, each twice as large as the last:
where X inverts the blocks on the diagonal, X - X C X inverts those of two, C being what of A lies between the two. It
is forward substitution by blocks, with none of the large numbers that powers of A have where keys are nearly parallel.

Three tensors a net are inputs, and outputs at addresses of their own, which a session copies back: see
`plan_part_shapes`. (Updated in place, as caches are, the builder of TensorRT-RTX 1.7.1 crashes from four nets on, and
were both bound to one address, nothing would order a state's reads before its write.) A slot that takes no part gets
back what it had; a slot at 0 takes nothing from what an earlier sequence left.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import torch

from trtllm_dflash.ops.base import DeltaLayer
from trtllm_dflash.ops.tensorrt_attention import PRESENT
from trtllm_dflash.ops.tensorrt_layers import ITensor, TensorRTLayers

#: The input that says where each slot's states stand: [B] int32, the position in front of which they do.
STATE_LENGTH = "state_length"

#: Rows of a prompt in a step unless the user says otherwise: each is compared with all others, in FP32.
NET_CHUNK = 128

_EPS = 1e-6  # of the heads' lengths


def plan_part_shapes(net: DeltaLayer, pending: int) -> dict[str, tuple[int, ...]]:
    """Shapes of what one slot keeps of a net in a plan, by part; the window has the engine's type, the others FP32.

    - `state`: in front of the pending rows.
    - `pending`: of each row u [Hv*Dv], its key [Hk*Dk], and its logarithmic decay [Hv].
    - `window`: what goes into the convolution: the rows before the pending ones, and these.

    Args:
        pending: rows at most, those of a block.
    """
    columns = net.value_heads * (net.value_size + 1) + net.key_heads * net.key_size
    return {
        "state": (net.value_heads, net.key_size, net.value_size),
        "pending": (1, pending, columns),
        "window": (1, net.kernel - 1 + pending, net.channels),
    }


@dataclass(frozen=True)
class _Step:
    """Masks and counts of a step's slots, which all its nets share."""

    takes_part: ITensor  # bool [B, 1, 1]
    is_first: ITensor  # bool [B, 1, 1]: the slot's sequence begins
    accepted: ITensor  # [B, 1] pending rows that the step follows
    absorbed: ITensor  # [B, 1] own rows that the states absorb at once; the others are pending


@dataclass(frozen=True)
class _Rows:
    """Numbers of n rows by heads, in FP32."""

    queries: ITensor  # [B, Hk, n, Dk]
    keys: ITensor  # [B, Hk, n, Dk]
    values: ITensor  # [B, Hv, n, Dv]
    shares: ITensor  # [B, Hv, n, 1] how much of a row is written
    decays: ITensor  # [B, n, Hv] logarithms of what is left of the state before it


class TensorRTDeltaNet(TensorRTLayers):
    """Emits gated delta nets, and the gates of hybrids.

    Attributes:
        caches: besides those of attention the parts of nets' states by name, and the inputs `row_count` and
            `STATE_LENGTH`.
        most_rows: of a slot in a call.
    """

    caches: Mapping[str, ITensor]
    most_rows: int

    # -- gates -----------------------------------------------------------------------------------------------------

    def gated(self, x: ITensor, gate: ITensor) -> ITensor:
        share = self._sigmoid(self._cast(gate, self.trt.float32))
        return self._cast(self._binary("PROD", self._cast(x, self.trt.float32), share, "gated"), x.dtype)

    def _sigmoid(self, x: ITensor) -> ITensor:
        return self._layer(self.network.add_activation(x, self.trt.ActivationType.SIGMOID), "sigmoid")

    def _silu(self, x: ITensor) -> ITensor:
        return self._binary("PROD", x, self._sigmoid(x), "silu")

    # -- the net ---------------------------------------------------------------------------------------------------

    def gated_delta(self, net: DeltaLayer, x: ITensor, gates: ITensor, start: ITensor) -> ITensor:
        self._scope = net.prefix.rstrip(".")
        step = self._step(net, start)
        unit = gcd(net.key_size, net.value_size)
        units = net.channels // unit
        parts = self._reshape(x, (0, 0, x.shape[2] // unit, unit))
        channels = self._reshape(self._slice(parts, 2, 0, units), (0, 0, net.channels))
        z = self._slice(parts, 2, units, x.shape[2] // unit - units)
        inputs = self._convolved_inputs(net, step, channels)
        rows = self._rows(net, inputs, channels, gates)
        state = self._absorb_accepted(net, step)
        out, writes, after = self._chunk(net, step, start, rows, state)
        self._keep(net, "state", step, after)
        self._keep_pending(net, step, rows, writes)
        return self._gated_output(net, out, z, x.dtype)

    def _step(self, net: DeltaLayer, start: ITensor) -> _Step:
        pending = self.caches[net.prefix + "pending"].shape[2]
        row_count, length = self.caches["row_count"], self.caches[STATE_LENGTH]
        zero = self._ints(0, 1)

        def clamped(count: ITensor, most: int | None = None) -> ITensor:
            count = self._binary("MAX", count, zero)
            return count if most is None else self._binary("MIN", count, self._ints(most, 1))

        def column(x: ITensor, *ones: int) -> ITensor:
            return self._reshape(x, (-1, 1, *ones))

        is_first = self._once(start, "is first", lambda: self._binary("EQUAL", start, zero))
        return _Step(
            takes_part=self._once(row_count, "takes part", lambda: column(self._binary("GREATER", row_count, zero), 1)),
            is_first=self._once(is_first, "column", lambda: column(is_first, 1)),
            # A slot that takes no part may stand anywhere.
            accepted=self._once(
                start,
                "accepted",
                lambda: column(self._select(is_first, zero, clamped(self._binary("SUB", start, length), pending))),
            ),
            absorbed=self._once(
                start, "absorbed", lambda: column(clamped(self._binary("SUB", row_count, self._ints(pending, 1))))
            ),
        )

    def _convolved_inputs(self, net: DeltaLayer, step: _Step, channels: ITensor) -> ITensor:
        """Puts the rows that the convolution looks back on before a step's channels [B, n, C]; keeps the last ones."""
        name, before = net.prefix + "window", net.kernel - 1
        held = self.caches[name].shape[2]
        window = self._reshape(self.caches[name], (0, held, net.channels))
        index = self._run(step.accepted, before)
        last = self._gather(window, index, axis=1, per_slot=True)
        last = self._select(step.is_first, self._fill(0.0, 3, last.dtype), last)
        inputs = self._concat([last, channels], axis=1)  # [B, kernel - 1 + n, C]
        kept = self._last_rows(inputs, step.absorbed, held)
        self._keep(net, "window", step, self._reshape(kept, (0, 1, held, net.channels)))
        return inputs

    def _run(self, first: ITensor, count: int) -> ITensor:
        """Indexes `count` rows from first [B, 1] on: [B, count]."""

        def emit() -> ITensor:
            return self._binary("SUM", first, self._constant(torch.arange(count, dtype=torch.int32)[None]))

        return self._once(first, f"run of {count}", emit)

    def _last_rows(self, x: ITensor, first: ITensor, count: int) -> ITensor:
        """Takes `count` rows of x [B, n, C] from first [B, 1] on; those past its last one are scratch."""
        last = self._binary("SUB", self._row_count(x, 1), self._ints(1, 2))
        return self._gather(x, self._binary("MIN", self._run(first, count), last), axis=1, per_slot=True)

    def _rows(self, net: DeltaLayer, inputs: ITensor, channels: ITensor, gates: ITensor) -> _Rows:
        """Computes what rows ask and write, from the convolution's inputs [B, kernel - 1 + n, C] and gates."""
        taps = self.weights[net.prefix + "conv1d.weight"].float()  # [C, 1, kernel]
        count = self._size(channels, 1)
        wide = self._cast(inputs, self.trt.float32)
        mixed = None
        for i in range(net.kernel):
            tap = self._constant(taps[:, 0, i].contiguous(), (1, 1, net.channels))
            term = self._binary("PROD", self._slice(wide, 1, i, count), tap)
            mixed = term if mixed is None else self._binary("SUM", mixed, term)
        mixed = self._silu(mixed)
        size = net.key_heads * net.key_size

        def heads(first: int, count: int, size: int) -> ITensor:
            part = self._slice(mixed, 2, first, count * size)
            return self._reshape(part, (0, 0, count, size), then=(0, 2, 1, 3))

        queries, keys = (self._unit(heads(i * size, net.key_heads, net.key_size)) for i in range(2))
        queries = self._binary("PROD", queries, self._fill(net.key_size**-0.5, 4))
        halves = self._reshape(self._cast(gates, self.trt.float32), (0, 0, 2, net.value_heads))
        b, a = (self._reshape(self._slice(halves, 2, i, 1), (0, 0, net.value_heads)) for i in range(2))
        shape = (1, 1, net.value_heads)
        bias = self._constant(self.weights[net.prefix + "dt_bias"].float(), shape)
        rates = self._constant(self.weights[net.prefix + "A_log"].float().exp().neg(), shape)
        return _Rows(
            queries=queries,
            keys=keys,
            values=heads(2 * size, net.value_heads, net.value_size),
            shares=self._by_head(self._sigmoid(b)),
            decays=self._binary("PROD", self._softplus(self._binary("SUM", a, bias)), rates, "decays"),
        )

    def _unit(self, x: ITensor) -> ITensor:
        """Divides heads [B, heads, n, D] by their lengths."""
        square = self._reduce("SUM", self._binary("PROD", x, x), 3)
        return self._binary("DIV", x, self._unary("SQRT", self._binary("SUM", square, self._fill(_EPS, 4))))

    def _softplus(self, x: ITensor) -> ITensor:
        """Computes log(1 + exp(x)) of x [B, n, Hv], which for a large x is x."""
        small = self._unary("EXP", self._unary("NEG", self._unary("ABS", x)))
        rest = self._unary("LOG", self._binary("SUM", small, self._fill(1.0, 3)))
        return self._binary("SUM", self._binary("MAX", x, self._fill(0.0, 3)), rest, "softplus")

    def _by_head(self, x: ITensor) -> ITensor:
        """Transposes x [B, n, Hv] to [B, Hv, n, 1]."""
        return self._reshape(x, (0, 0, 0, 1), first=(0, 2, 1))

    def _spread(self, net: DeltaLayer, x: ITensor) -> ITensor:
        """Gives each value head its key head's numbers: [B, Hk, n, D] -> [B, Hv, n, D]."""
        group = net.value_heads // net.key_heads
        if group == 1:
            return x
        owners = torch.arange(net.value_heads, dtype=torch.int32) // group
        return self._gather(x, self._constant(owners), axis=1)

    def _transposed_product(self, x: ITensor, y: ITensor) -> ITensor:
        """Multiplies x [B, H, n, I] transposed by y [B, H, n, O]: [B, H, I, O]."""
        none, transpose = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        return self._layer(self.network.add_matrix_multiply(x, transpose, y, none), "outer")

    def _matrix_product(self, x: ITensor, y: ITensor) -> ITensor:
        """Multiplies x [B, H, n, I] by y [B, H, I, O]: [B, H, n, O]."""
        none = self.trt.MatrixOperation.NONE
        return self._layer(self.network.add_matrix_multiply(x, none, y, none), "product")

    def _sums(self, x: ITensor) -> ITensor:
        """Adds up x [B, n, Hv] row by row."""
        axis = self._constant(torch.tensor(1, dtype=torch.int32))
        sum_ = self.trt.CumulativeOperation.SUM
        return self._layer(self.network.add_cumulative(x, axis, sum_, False, False), "sums")

    # -- states ----------------------------------------------------------------------------------------------------

    def _absorb_accepted(self, net: DeltaLayer, step: _Step) -> ITensor:
        """Lets the kept state absorb the pending rows that were accepted: [B, Hv, Dk, Dv]."""
        held = self.caches[net.prefix + "pending"]
        count, width = held.shape[2:]

        def emit() -> ITensor:
            index = self._constant(torch.arange(count, dtype=torch.int32)[None])
            return self._reshape(self._binary("LESS", index, step.accepted), (0, 0, 1))

        is_accepted = self._once(step.accepted, "is accepted", emit)
        # What is not accepted, and whatever an earlier sequence has left, is nothing at all.
        rows = self._select(is_accepted, self._reshape(held, (0, count, width)), self._fill(0.0, 3))
        written, keyed = net.value_heads * net.value_size, net.key_heads * net.key_size

        def heads(first: int, count: int, size: int) -> ITensor:
            part = self._slice(rows, 2, first, count * size)
            return self._reshape(part, (0, 0, count, size), then=(0, 2, 1, 3))

        writes = heads(0, net.value_heads, net.value_size)
        keys = heads(written, net.key_heads, net.key_size)
        decays = self._slice(rows, 2, written + keyed, net.value_heads)
        state = self._select(
            self._once(step.is_first, "4d", lambda: self._reshape(step.is_first, (0, 0, 0, 1))),
            self._fill(0.0, 4),
            self.caches[net.prefix + "state"],
        )
        return self._decayed(net, state, keys, writes, self._reduce("SUM", decays, 1), self._sums(decays))

    def _decayed(
        self, net: DeltaLayer, state: ITensor, keys: ITensor, writes: ITensor, total: ITensor, sums: ITensor
    ) -> ITensor:
        """Lets a state decay by exp(total [B, 1, Hv]) and absorb rows, each by what decays behind it is left."""
        behind = self._binary("MIN", self._binary("SUB", total, sums), self._fill(0.0, 3))
        left = self._by_head(self._unary("EXP", behind))  # [B, Hv, n, 1]
        added = self._transposed_product(self._spread(net, keys), self._binary("PROD", writes, left))
        kept = self._binary("PROD", state, self._by_head(self._unary("EXP", total)))
        return self._binary("SUM", kept, added, "state")

    def _chunk(
        self, net: DeltaLayer, step: _Step, start: ITensor, rows: _Rows, state: ITensor
    ) -> tuple[ITensor, ITensor, ITensor]:
        """Takes a state through rows: what they read and write, [B, Hv, n, Dv] both, and the state to be kept."""
        keys, queries = self._spread(net, rows.keys), self._spread(net, rows.queries)
        sums = self._sums(rows.decays)  # [B, n, Hv]
        down = self._by_head(sums)
        across = self._reshape(sums, (0, 0, 1, -1), first=(0, 2, 1))
        zero = self._fill(0.0, 4)
        between = self._unary("EXP", self._binary("MIN", self._binary("SUB", down, across), zero))  # [B, Hv, n, n]
        grown = self._unary("EXP", down)
        levels = self._once(start, "levels", lambda: self._levels(rows.decays))
        products = self._binary("PROD", self._binary("PROD", self._product(keys, keys, "keys"), between), rows.shares)
        inverse = self._inverse(products, levels, start)
        known = self._binary("PROD", grown, self._matrix_product(keys, state))
        wanted = self._binary("PROD", rows.shares, self._binary("SUB", rows.values, known))
        writes = self._matrix_product(inverse, wanted)
        is_past = self._once(start, "is past", lambda: self._binary("GREATER", levels, self._ints(-2, 4)))
        shown = self._binary("PROD", self._product(queries, keys, "shown"), between)
        own = self._matrix_product(self._select(is_past, shown, zero), writes)
        out = self._binary("SUM", self._binary("PROD", grown, self._matrix_product(queries, state)), own, "read")

        def emit() -> ITensor:
            index = self._reshape(self._range(self._size(rows.decays, 1)), (1, -1))
            return self._reshape(self._binary("LESS", index, step.absorbed), (0, -1, 1))

        is_absorbed = self._once(step.absorbed, "rows", emit)
        total = self._reduce("SUM", self._select(is_absorbed, rows.decays, self._fill(0.0, 3)), 1)
        by_head = self._once(is_absorbed, "by head", lambda: self._reshape(is_absorbed, (0, 1, -1, 1)))
        absorbed = self._select(by_head, writes, zero)
        return out, writes, self._decayed(net, state, rows.keys, absorbed, total, sums)

    def _levels(self, rows: ITensor) -> ITensor:
        """Emits of each pair of rows i > j the largest power of two whose blocks part them: [1, 1, n, n] int32.

        -1 on the diagonal, -2 above it.
        """
        index = range(self.most_rows)
        table = [[(i ^ j).bit_length() - 1 if i >= j else -2 for j in index] for i in index]
        levels = self._constant(torch.tensor(table, dtype=torch.int32)[None, None])
        count = self._size(rows, 1)
        return self._slice(self._slice(levels, 2, 0, count), 3, 0, count)

    def _inverse(self, products: ITensor, levels: ITensor, start: ITensor) -> ITensor:
        """Inverts I + what of products [B, H, n, n] lies below the diagonal; see the module's docstring."""
        zero = self._fill(0.0, 4)

        def parted(level: int) -> ITensor:
            is_there = self._once(start, f"level {level}", lambda: self._binary("EQUAL", levels, self._ints(level, 4)))
            return self._select(is_there, products, zero)

        def emit_identity() -> ITensor:
            is_diagonal = self._binary("EQUAL", levels, self._ints(-1, 4))
            return self._select(is_diagonal, self._fill(1.0, 4), zero)

        inverse = self._once(start, "identity", emit_identity)
        for level in range((self.most_rows - 1).bit_length()):
            between = parted(level)
            if level:
                between = self._matrix_product(self._matrix_product(inverse, between), inverse)
            inverse = self._binary("SUB", inverse, between)
        return inverse

    def _keep_pending(self, net: DeltaLayer, step: _Step, rows: _Rows, writes: ITensor) -> None:
        """Keeps what pending rows write, their keys and their decays."""
        count, width = self.caches[net.prefix + "pending"].shape[2:]
        size = width - net.value_heads

        def flat(x: ITensor) -> ITensor:
            return self._reshape(x, (0, 0, -1), first=(0, 2, 1, 3))

        written = net.value_heads * net.value_size
        u = self._reshape(flat(writes), (0, 0, written))
        k = self._reshape(flat(rows.keys), (0, 0, size - written))
        kept = self._last_rows(self._concat([u, k, rows.decays], axis=2), step.absorbed, count)
        self._keep(net, "pending", step, self._reshape(kept, (0, 1, count, width)))

    def _keep(self, net: DeltaLayer, part: str, step: _Step, new: ITensor) -> None:
        """Outputs a part of a net's state; slots that take no part keep theirs."""
        name = net.prefix + part
        cache = self.caches[name]
        takes_part = self._once(step.takes_part, "4d", lambda: self._reshape(step.takes_part, (0, 0, 0, 1)))
        present = self._select(takes_part, new, cache)
        present.name = name + PRESENT
        self.network.mark_output(present)

    def _gated_output(self, net: DeltaLayer, out: ITensor, z: ITensor, dtype: ITensor) -> ITensor:
        """Norms what rows read, [B, Hv, n, Dv], and gates it by z: [B, n, Hv*Dv]."""
        mean = self._reduce("AVG", self._binary("PROD", out, out), 3)
        root = self._unary("SQRT", self._binary("SUM", mean, self._fill(net.norm_eps, 4)))
        weight = self._constant(self.weights[net.prefix + "norm.weight"].float(), (1, 1, 1, net.value_size))
        normed = self._binary("PROD", self._binary("DIV", out, root), weight, "norm")
        rows = self._reshape(normed, (0, 0, net.value_heads * net.value_size), first=(0, 2, 1, 3))
        gate = self._reshape(self._cast(z, self.trt.float32), (0, 0, net.value_heads * net.value_size))
        return self._cast(self._binary("PROD", rows, self._silu(gate), "gated"), dtype)
