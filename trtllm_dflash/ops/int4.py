"""INT4 as compressed-tensors packs it: whole numbers from -8 to 7, and a scale for each 32 of a row.

Eight of a row are one int32, the first in its lowest bits, each stored as itself and 8.
"""

from dataclasses import dataclass

import torch

from trtllm_dflash.ops.formats import INT4_BLOCK, INT4_PACKED

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """A linear's weight in INT4, or a stack of E experts' [E, ...]."""

    values: Tensor  # int32 [O, I / 8]
    scale: Tensor  # BF16 [O, I / 32]
    input_scale: None = None

    def of(self, experts: Tensor | int) -> "Int4Weight":
        """Takes the matrices of `experts` [...] from a stack: [..., O, I]."""
        return Int4Weight(self.values[experts], self.scale[experts])

    def dequantize(self) -> Tensor:
        """Multiplies the numbers by their scales: FP32 [..., O, I], exact."""
        shifts = torch.arange(0, 4 * INT4_PACKED, 4, dtype=torch.int32, device=self.values.device)
        numbers = (self.values[..., None] >> shifts & 15).flatten(-2) - 8
        blocks: Tensor = numbers.float().unflatten(-1, (-1, INT4_BLOCK))
        return (blocks * self.scale.float()[..., None]).flatten(-2)
