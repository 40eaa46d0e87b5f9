"""The weight of a linear as an engine stores it: a tensor of the engine's own type, or one in few bits with its scales.

`NAME.weight` holds the numbers, `NAME.scale` their scales, `NAME.global_scale` (NVFP4) the scales of those, and
`NAME.input_scale`, where a calibration found one, the scale of what goes in.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from trtllm_dflash.ops.formats import NVFP4_BLOCK
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight, taken
from trtllm_dflash.ops.int4 import Int4Weight
from trtllm_dflash.ops.mxfp4 import unpack

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Nvfp4Weight:
    """A linear's weight in NVFP4, or a stack of E experts' [E, ...].

    A checkpoint has one global scale for each of its tensors; here each row has its tensor's, as several are fused.
    """

    values: Tensor  # uint8 [O, I / 2]: two numbers a byte, the first in the low bits
    scale: Tensor  # E4M3 [O, I / 16]
    global_scale: Tensor  # FP32 [O]
    input_scale: Tensor | None = None  # FP32 []: the global scale that calibration found for what it is multiplied by

    def of(self, experts: Tensor | int) -> "Nvfp4Weight":
        """Takes the matrices of `experts` [...] from a stack: [..., O, I]."""
        scales = taken(self.scale, experts), self.global_scale[experts]
        return Nvfp4Weight(self.values[experts], *scales, self.input_scale)

    def dequantize(self) -> Tensor:
        """Multiplies the numbers by their scales: FP32 [..., O, I]."""
        scale = self.scale.float() * self.global_scale[..., None]
        blocks: Tensor = unpack(self.values).unflatten(-1, (-1, NVFP4_BLOCK))
        return (blocks * scale[..., None]).flatten(-2)


QuantizedWeight: TypeAlias = Fp8Weight | Nvfp4Weight | Int4Weight
LinearWeight: TypeAlias = Tensor | QuantizedWeight


def linear_weight(weights: Mapping[str, Tensor], name: str) -> LinearWeight:
    """Reads the weight of the linear `name` from an engine's tensors."""
    values = weights[name + ".weight"]
    if values.dtype == FP8:
        return Fp8Weight(values, weights[name + ".scale"], weights.get(name + ".input_scale"))
    if values.dtype == torch.int32:
        return Int4Weight(values, weights[name + ".scale"])
    if values.dtype == torch.uint8:
        scales = weights[name + ".scale"], weights[name + ".global_scale"]
        return Nvfp4Weight(values, *scales, weights.get(name + ".input_scale"))
    return values


def joined_name(names: Iterable[str]) -> str:
    """Names the linear whose weight is those of the linears `names`, one above the other."""
    return "+".join(names)


def stored_tensors(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Names the tensors of a weight as `linear_weight` reads them."""
    tensors = {name + ".weight": weight.values, name + ".scale": weight.scale}
    if isinstance(weight, Nvfp4Weight):
        tensors[name + ".global_scale"] = weight.global_scale
    if weight.input_scale is not None:
        tensors[name + ".input_scale"] = weight.input_scale
    return tensors
