"""A mixture's experts in TensorRT: as its own layer where the GPU has kernels for it, else as one wide feed-forward.

TensorRT has a mixture layer for SM100, SM103 and SM110 alone; on all other GPUs, TensorRT-RTX's included, the experts
are emitted as the one matrix that they are when stacked: gate and up [E * 2F, H], down [H, E * F]. Between the two,
each expert's part is multiplied by the row's weight for it, which is zero where the row did not choose it, and the
second product sums over the experts. That is right for any routing, needs no sort and no shape that depends on data (a
step of those could not be captured into a CUDA graph), and costs this:

- Bytes: a step reads every expert once, however many rows it has. Were routing uniform, a drafted step of 8 sequences
  of 10 rows would choose 118 of gpt-oss-120b's 128 experts: nearly all are due anyway. One sequence of 10 rows chooses
  35, so there a step reads 3.7 times what it must, and plain decoding of one sequence 32 times. (Gathering the chosen
  matrices first would read, write and read them again: more than this from 11 rows on.)
- Work: experts / top_k times that of the chosen ones, 32 times for gpt-oss-120b, 8 times for gpt-oss-20b. In a step of
  few rows the bytes hide it; a prefill pays for it.

MXFP4 experts stay MXFP4 where the GPU multiplies FP4 (SM100 and later): 4.25 bits a number in the plan, dequantized in
the product. Elsewhere they are constants of the engine's own type. The mixture layer takes NVFP4 (see `ops.nvfp4`).

FP8, NVFP4 and INT4 experts stay that. The mixture layer has SiLU alone: experts of GELU, and those in INT4, which were
never tried in it, go through the wide feed-forward everywhere. What goes into gate and up is rounded where a
calibration found how, as into any linear; what goes into down is not, since its rows bear their experts' weights then.
"""

from collections.abc import Callable

import torch

from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.fp8 import Fp8Weight
from trtllm_dflash.ops.int4 import Int4Weight
from trtllm_dflash.ops.linear_weight import Nvfp4Weight, QuantizedWeight, linear_weight
from trtllm_dflash.ops.mxfp4 import dequantize
from trtllm_dflash.ops.nvfp4 import from_mxfp4
from trtllm_dflash.ops.tensorrt_layers import ITensor
from trtllm_dflash.ops.tensorrt_quantized import TensorRTQuantized
from trtllm_dflash.ops.tensorrt_routing import TensorRTRouting
from trtllm_dflash.ops.transcoded import Transcoded

Tensor = torch.Tensor

#: Compute capabilities that have kernels for TensorRT's mixture layer.
MOE_LAYER_CAPABILITIES = (100, 103, 110)


def multiplies_fp4(capability: int | None) -> bool:
    """Whether a GPU of this compute capability multiplies FP4; None: one that is not known."""
    return capability is not None and capability >= 100


def has_mixture_layer(capability: int | None, activation: str, in_int4: bool = False) -> bool:
    """Whether TensorRT's mixture layer computes experts of this activation on such a GPU; None: one not known."""
    return capability in MOE_LAYER_CAPABILITIES and activation == "silu" and not in_int4


class TensorRTMoE(TensorRTRouting, TensorRTQuantized):
    """Emits the mixture of experts of `Ops`.

    Attributes:
        transcoded: the MXFP4 blocks that were made NVFP4, counted.
    """

    capability: int | None
    transcoded = Transcoded()

    def moe(self, mixture: MoELayer, x: ITensor, logits: ITensor) -> ITensor:
        self._scope = mixture.prefix + "experts"
        chosen, shares = self._route(mixture, logits)
        in_int4 = isinstance(self._quantized(mixture.prefix + "experts.down_proj"), Int4Weight)
        if has_mixture_layer(self.capability, mixture.activation, in_int4):
            return self._mixture(mixture, x, chosen, shares)
        return self._wide_feed_forward(mixture, x, shares)

    # -- one wide feed-forward -------------------------------------------------------------------------------------

    def _wide_feed_forward(self, mixture: MoELayer, x: ITensor, shares: ITensor) -> ITensor:
        shares = self._slice(shares, 2, mixture.first, mixture.count)
        name = mixture.prefix + "experts.gate_up_proj"
        stored = self._quantized(name)
        if stored is None:
            gate_up = self._product(x, self._matrix(name, x.dtype), "gate_up")
        else:
            gate_up = self._quantized_product(name, x, _joined_rows(stored))
        name += ".bias"
        if name in self.weights:
            gate_up = self._binary("SUM", gate_up, self._weight(name, (1, 1, gate_up.shape[2])), "gate_up_bias")
        size = gate_up.shape[2] // (2 * mixture.count)
        halves = self._reshape(gate_up, (0, 0, mixture.count, 2, size))  # before it is sliced: see split_heads
        h = self._activate(mixture, self._slice(halves, 3, 0, 1), self._slice(halves, 3, 1, 1))
        name = mixture.prefix + "experts.down_proj"
        down, scale = self._side_by_side(name, x.dtype)
        scaled = shares if scale is None else self._binary("PROD", shares, self._constant(scale[None, None]))
        spread = self._reshape(scaled, (0, 0, mixture.count, 1, 1))
        h = self._cast(self._binary("PROD", self._cast(h, self.trt.float32), spread, "weighted"), x.dtype)
        h = self._reshape(h, (0, 0, mixture.count * size))
        y = self._product(h, down, "down")
        name += ".bias"
        if name in self.weights:
            bias = self._constant(self.weights[name].t().contiguous()[None])  # [1, H, E]
            y = self._binary("SUM", y, self._product(self._cast(shares, x.dtype), bias, "down_bias"))
        return y

    def _activate(self, mixture: MoELayer, gate: ITensor, up: ITensor) -> ITensor:
        """Emits SwiGLU, or GELU's gate, of gate and up, [B, N, E, 1, F] each."""
        slope = gate
        if mixture.clamp is not None:
            limit, alpha = (self._fill(x, 5, gate.dtype) for x in (mixture.clamp.limit, mixture.clamp.alpha))
            gate = self._binary("MIN", gate, limit)
            up = self._binary("MAX", self._binary("MIN", up, limit), self._fill(-mixture.clamp.limit, 5, up.dtype))
            up = self._binary("SUM", up, self._fill(1.0, 5, up.dtype))
            slope = self._binary("PROD", gate, alpha)
        if mixture.activation == "gelu":
            gelu = self._layer(self.network.add_activation(gate, self.trt.ActivationType.GELU_TANH), "gelu")
            return self._binary("PROD", gelu, up, "geglu")
        sigmoid = self._layer(self.network.add_activation(slope, self.trt.ActivationType.SIGMOID), "sigmoid")
        return self._binary("PROD", self._binary("PROD", gate, sigmoid, "silu"), up, "swiglu")

    def _matrix(self, name: str, dtype: ITensor, side_by_side: bool = False) -> ITensor:
        """Joins every expert's matrix [O, I] into one: [1, E * O, I], or, side by side, [1, O, E * I]."""

        def joined(x: Tensor) -> Tensor:  # [E, O, ...]
            return (x.transpose(0, 1).flatten(1, 2) if side_by_side else x.flatten(0, 1))[None].contiguous()

        if name + ".weight" in self.weights:
            return self._constant(joined(self.weights[name + ".weight"]))
        blocks, scales = self.weights[name + ".blocks"], self.weights[name + ".scales"]
        if not multiplies_fp4(self.capability):
            return self._constant(joined(dequantize(blocks, scales, self._torch_type(dtype))))
        values = self._packed(joined(blocks).flatten(2), self.trt.fp4, "values")
        powers = self._packed(joined(scales), self.trt.e8m0, "scales")
        return self._layer(self.network.add_dequantize(values, powers, dtype), "dequantize")

    def _side_by_side(self, name: str, dtype: ITensor) -> tuple[ITensor, torch.Tensor | None]:
        """Joins every expert's matrix [O, I] into [1, O, E * I]; also each expert's remaining factor, [E], if any."""
        stored = self._quantized(name)
        if stored is None:
            return self._matrix(name, dtype, side_by_side=True), None
        values = stored.values.transpose(0, 1).flatten(1)  # [O, E * I], or bytes of them
        outputs = len(values)
        rest = None
        if isinstance(stored, Nvfp4Weight):
            # The layers have one scale of scales. Each expert has one too: here is the largest of them.
            own = stored.global_scale[:, 0]
            largest = own.amax()
            rest = None if (own == largest).all() else own / largest
            numbers = self._nvfp4_numbers(name, values, stored.scale.transpose(0, 1).flatten(1), largest, dtype)
        elif isinstance(stored, Fp8Weight) and stored.by_block:
            numbers = self._fp8_numbers(name, Fp8Weight(values, stored.scale.transpose(0, 1).flatten(1)), dtype)
        elif isinstance(stored, Int4Weight):
            numbers = self._int4_numbers(name, values, stored.scale.transpose(0, 1).flatten(1), dtype)
        else:
            constants = self._named(name + ".weight", values), self._named(name + ".scale", stored.scale.t())
            layer = self.network.add_dequantize(*constants, dtype)
            layer.block_shape = (1, stored.values.shape[2])  # a row of an expert's
            numbers = self._layer(layer, "scale")
        return self._reshape(numbers, (1, outputs, -1)), rest

    def _quantized(self, name: str) -> QuantizedWeight | None:
        """Reads every expert's matrix in FP8 or NVFP4; None where they are in another type."""
        stored = linear_weight(self.weights, name) if name + ".weight" in self.weights else None
        return None if isinstance(stored, Tensor) else stored

    # -- TensorRT's mixture layer ----------------------------------------------------------------------------------

    def _mixture(self, mixture: MoELayer, x: ITensor, chosen: ITensor, shares: ITensor) -> ITensor:
        # The first experts rank highest, so that TopK has no equals to choose from.
        order = torch.arange(mixture.experts, 0, -1, dtype=torch.float32)
        ranked = self._select(chosen, self._constant(order[None, None]), self._fill(0.0, 3))
        top = self.network.add_topk(ranked, self.trt.TopKOperation.MAX, mixture.top_k, 1 << 2)
        self._layer(top, "experts_of_rows")
        ids = top.get_output(1)  # [B, N, k]
        taken = self.network.add_gather_v2(shares, ids, self.trt.GatherMode.ELEMENT)
        taken.axis = 2
        shares = self._layer(taken, "shares_of_rows")
        if mixture.count != mixture.experts:
            ids, shares = self._own(mixture, ids, shares)
        gate_up, down = mixture.prefix + "experts.gate_up_proj", mixture.prefix + "experts.down_proj"
        gate, up = (self._stacked(gate_up, x.dtype, half) for half in (0, 1))
        matrices = gate, up, self._stacked(down, x.dtype)
        biases = self._biases(gate_up, down, mixture.count, x.shape[2])
        layer = self.network.add_moe(x, ids, self._cast(shares, x.dtype))
        y = self._layer(layer, "mixture")
        layer.set_gated_weights(*matrices, self.trt.MoEActType.SILU)
        if biases:
            layer.set_gated_biases(*biases)
        if mixture.clamp is not None:
            layer.set_swiglu_params(mixture.clamp.limit, mixture.clamp.alpha, 1.0)
        return y

    def _biases(self, gate_up: str, down: str, count: int, size: int) -> list[ITensor]:
        """Emits the biases of gate, up and down: [E, F], [E, F], [E, H]; an empty list where there are none."""
        if gate_up + ".bias" not in self.weights:
            return []
        bias = self.weights[gate_up + ".bias"]
        # Where columns are divided, rank 0 alone adds what comes after the sum; the layer wants all three.
        after = self.weights.get(down + ".bias", torch.zeros(count, size, dtype=bias.dtype))
        return [self._constant(b) for b in (*bias.chunk(2, dim=1), after)]

    def _own(self, mixture: MoELayer, ids: ITensor, shares: ITensor) -> tuple[ITensor, ITensor]:
        """Renumbers ids as this rank's experts; those of other ranks become its first, with a weight of 0."""
        own = self._binary("SUB", ids, self._ints(mixture.first, 3))
        is_own = self._binary("LESS", own, self._ints(mixture.count, 3))
        is_own = self._binary("AND", is_own, self._binary("GREATER", own, self._ints(-1, 3)))
        return self._select(is_own, own, self._ints(0, 3)), self._select(is_own, shares, self._fill(0.0, 3))

    def _stacked(self, name: str, dtype: ITensor, half: int | None = None) -> ITensor:
        """Emits every expert's matrix [O, I], or a half of its rows, as TensorRT's layer takes them: [E, I, O]."""

        def part(x: Tensor) -> Tensor:  # [E, O, ...]
            return x if half is None else x.chunk(2, dim=1)[half]

        stored = self._quantized(name)
        if stored is not None:
            return self._reshape(self._stacked_numbers(name, stored, part, dtype), (0, 0, 0), first=(0, 2, 1))
        if name + ".weight" in self.weights:
            return self._reshape(
                self._constant(part(self.weights[name + ".weight"]).contiguous()), (0, 0, 0), (0, 2, 1)
            )
        blocks, scales = (part(self.weights[f"{name}.{kind}"]) for kind in ("blocks", "scales"))
        converted, transcoded = from_mxfp4(blocks, scales)
        self.transcoded += transcoded
        values = self._packed(converted.packed, self.trt.fp4, "values")
        block_scales = self._packed(converted.scales, self.trt.fp8, "scales")
        # The scales' type must be that of what they scale.
        block_scales = self._layer(
            self.network.add_dequantize(block_scales, self._constant(converted.scale), dtype), "dequantize_scales"
        )
        numbers = self._layer(self.network.add_dequantize(values, block_scales, dtype), "dequantize")
        return self._reshape(numbers, (0, 0, 0), first=(0, 2, 1))

    def _stacked_numbers(
        self, name: str, stored: QuantizedWeight, part: Callable[[Tensor], Tensor], dtype: ITensor
    ) -> ITensor:
        """Emits the numbers [E, O, I] of every expert's matrix, or of a part of its rows."""
        values = part(stored.values)
        count, outputs, inputs = values.shape
        if isinstance(stored, Fp8Weight):
            flat = Fp8Weight(values.flatten(0, 1), part(stored.scale).flatten(0, 1))
            return self._reshape(self._fp8_numbers(name, flat, dtype), (count, outputs, inputs))
        assert isinstance(stored, Nvfp4Weight)  # INT4 goes another way
        # An expert's scale of scales, along the first dimension.
        numbers = self._packed(values, self.trt.fp4, "values")
        scales, own = self._named(name + ".scale", part(stored.scale)), self._constant(part(stored.global_scale)[:, 0])
        layer = self.network.add_dequantize(scales, own, dtype)
        layer.axis = 0
        return self._layer(self.network.add_dequantize(numbers, self._layer(layer, "scales"), dtype), "scale")


def _joined_rows(stored: QuantizedWeight) -> QuantizedWeight:
    """Joins a stack of matrices [E, O, I] into one [E * O, I]."""
    values, scale = stored.values.flatten(0, 1), stored.scale.flatten(0, 1)
    if isinstance(stored, Fp8Weight):
        return Fp8Weight(values, scale, stored.input_scale)
    if isinstance(stored, Int4Weight):
        return Int4Weight(values, scale)
    return Nvfp4Weight(values, scale, stored.global_scale.flatten(), stored.input_scale)
