"""Experts in NVFP4 as our kernels read them: the same bits in another order."""

from dataclasses import dataclass

import torch

from trtllm_dflash.ops.formats import MXFP4_BLOCK, MXFP4_BLOCK_BYTES, NVFP4_BLOCK
from trtllm_dflash.ops.fp8 import taken
from trtllm_dflash.ops.linear_weight import Nvfp4Weight
from trtllm_dflash.ops.mxfp4 import in_order, interleave

Tensor = torch.Tensor

#: Rows whose scales lie beside each other, and scales of each there: a copy of 16 bytes, which a warp reads by eight
#: rows at once.
_ROWS, _SCALES = 8, MXFP4_BLOCK // NVFP4_BLOCK
#: The code of E4M3's NaN; those beyond it have a sign.
_NAN = 0x7F


@dataclass(frozen=True, eq=False)
class Nvfp4Tiles:
    """A stack of E experts' matrices, of multiples of 8 rows and of 32 columns."""

    values: Tensor  # uint8 [E, O, I / 2] as `Nvfp4Weight` has them, or int32 [E, O, I / 8]: `interleave` of them
    tiles: Tensor  # E4M3 [E, O / 8, I / 32, 8, 2]: scales of 8 rows' 32 numbers
    global_scale: Tensor  # FP32 [E, O]

    def of(self, experts: Tensor | int) -> "Nvfp4Tiles":
        """Takes the matrices of `experts` [...] from a stack: [..., O, I]."""
        return Nvfp4Tiles(self.values[experts], taken(self.tiles, experts), self.global_scale[experts])

    def dequantize(self) -> Tensor:
        """Multiplies the numbers by their scales: FP32 [..., O, I]."""
        values = self.values
        if values.dtype == torch.int32:
            values = in_order(values).flatten(-2)
        return Nvfp4Weight(values, scales_in_order(self.tiles), self.global_scale).dequantize()


def have_tiles(values: Tensor, scale: Tensor) -> bool:
    """Whether our kernels have an order for numbers uint8 [..., O, I / 2] and scales [..., O, I / 16].

    They read no sign of a scale, and a NaN as 480; ModelOpt writes neither. Waits for the device.
    """
    is_whole = values.shape[-2] % _ROWS == 0 and values.shape[-1] % MXFP4_BLOCK_BYTES == 0
    return is_whole and not bool((scale.view(torch.uint8) >= _NAN).any())


def interleave_values(values: Tensor) -> Tensor:
    """Puts numbers uint8 [..., O, I / 2] in the order of `mxfp4.interleave`: int32 [..., O, I / 8]."""
    return interleave(values.unflatten(-1, (-1, MXFP4_BLOCK_BYTES)))


def tile_scales(scale: Tensor) -> Tensor:
    """Puts E4M3 scales [..., O, I / 16] in our kernels' order: [..., O / 8, I / 32, 8, 2]."""
    rows: Tensor = scale.view(torch.uint8).unflatten(-1, (-1, _SCALES)).unflatten(-3, (-1, _ROWS))
    return rows.transpose(-3, -2).contiguous().view(scale.dtype)


def scales_in_order(tiles: Tensor) -> Tensor:
    """Undoes `tile_scales`."""
    return tiles.view(torch.uint8).transpose(-3, -2).flatten(-2).flatten(-3, -2).view(tiles.dtype)
