"""Experts in MXFP4 and NVFP4 as our kernels read them: the same bits, in tiles that lie as they are loaded.

A granule is 16 rows of a matrix; of gate and up, 8 of gate and the same 8 of up. Four granules are a slab, an expert's
last ones may be fewer. A tile is a granule's 128 columns, the last of a row those that are left: parts of 32 columns,
each the numbers of its first 8 rows [8, 16 bytes], those of the others, and all scales [8, 2 halves of the rows, bytes
of 32 numbers]. Of MXFP4 the 8 are rows 0, 2, 4, 6, 1, 3, 5 and 7. A slab's tiles of the same columns lie together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trtllm_dflash.kernels import GRANULE, part_bytes
from trtllm_dflash.ops.formats import E8M0_ONE, MXFP4_BLOCK_BYTES
from trtllm_dflash.ops.linear_weight import Nvfp4Weight
from trtllm_dflash.ops.mxfp4 import dequantize, in_order, interleave

Tensor = torch.Tensor

_SLAB = 4  # granules
_PARTS = 4  # of a tile
_HALF = GRANULE // 2
#: Experts that are put in order at a time.
_AT_ONCE = 8
#: The largest scale that one factor of a 16-bit type can be, as `mxfp4.cuh` makes it.
_MOST_SCALE = E8M0_ONE + 1
#: The code of E4M3's NaN; those beyond it have a sign.
_NAN = 0x7F


@dataclass(frozen=True, eq=False)
class ExpertTiles:
    """A stack of E experts' matrices [O, I], of multiples of 16 rows and of 32 columns."""

    tiles: Tensor  # [E, O / 16, bytes of a granule]: uint8, or int32 where numbers' bits are `interleave`d, beside BF16
    is_gate_up: bool
    global_scale: Tensor | None = None  # NVFP4's FP32 [E, O]; None: MXFP4

    @classmethod
    def of(
        cls, numbers: Tensor, scales: Tensor, is_gate_up: bool, interleaved: bool, global_scale: Tensor | None = None
    ) -> "ExpertTiles":
        """Makes them of what `have_tiles`: MXFP4's blocks and scales, or what `Nvfp4Weight` has."""
        tiles = _tiled(numbers.flatten(2), scales.view(torch.uint8), is_gate_up, interleaved)
        return cls(tiles, is_gate_up, global_scale)

    def numbers(self, experts: Tensor | int, dtype: torch.dtype) -> Tensor:
        """Dequantizes the matrices of `experts` [...]: [..., O, I]."""
        chosen = self.tiles[experts]
        tiles = chosen.flatten(0, -3) if chosen.ndim > 2 else chosen[None]
        values, scales = self._in_order(tiles)
        values, scales = (x.view(*chosen.shape[:-2], *x.shape[-2:]) for x in (values, scales))
        if self.global_scale is None:
            return dequantize(values.unflatten(-1, (-1, MXFP4_BLOCK_BYTES)), scales, dtype)
        scales = scales.view(torch.float8_e4m3fn)
        return Nvfp4Weight(values, scales, self.global_scale[experts]).dequantize().to(dtype)

    def _in_order(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Undoes `_tiled`: uint8 numbers [E, O, I / 2] and scales [E, O, I / 32 or I / 16]."""
        interleaved = tiles.dtype == torch.int32
        tiles = tiles.view(torch.uint8)
        part = part_bytes(is_nvfp4=self.global_scale is not None)
        count, granules, size = tiles.shape
        blocks, rows = size // part, granules * GRANULE
        values = tiles.new_empty(count, rows, blocks * MXFP4_BLOCK_BYTES)
        scales = tiles.new_empty(count, rows, blocks * (part // GRANULE - MXFP4_BLOCK_BYTES))
        for of_tiles, of_rows in _places(tiles, values, scales, self.is_gate_up):
            of_rows.copy_(of_tiles)
        if interleaved:
            values = in_order(values.view(torch.int32)).flatten(-2)
        return values, scales


def have_tiles(blocks: Tensor, scales: Tensor) -> bool:
    """Whether our kernels have an order for numbers uint8 [E, O, I / 2] and their scales: E8M0 uint8, or E4M3.

    Of MXFP4 they take no scale above 2, nor NaN; of NVFP4 they read no sign of a scale, and a NaN as 480. Nobody writes
    any. Waits for the device.
    """
    if blocks.shape[-2] % GRANULE or blocks.shape[-1] % MXFP4_BLOCK_BYTES:
        return False
    if scales.dtype == torch.uint8:
        return not bool((scales > _MOST_SCALE).any())
    return not bool((scales.view(torch.uint8) >= _NAN).any())


def _tiled(values: Tensor, scales: Tensor, is_gate_up: bool, interleaved: bool) -> Tensor:
    """Puts numbers uint8 [E, O, I / 2] and scales uint8 [E, O, I / 32 or I / 16] in our kernels' order."""
    count, rows, row_bytes = values.shape
    blocks = row_bytes // MXFP4_BLOCK_BYTES
    size = GRANULE * (row_bytes + scales.shape[-1])
    tiles = values.new_empty(count, rows // GRANULE, size)
    for parts in zip(*(x.split(_AT_ONCE) for x in (tiles, values, scales)), strict=True):
        own = interleave(parts[1].unflatten(-1, (blocks, -1))).view(torch.uint8) if interleaved else parts[1]
        for of_tiles, of_rows in _places(parts[0], own, parts[2], is_gate_up):
            of_tiles.copy_(of_rows)
    return tiles.view(torch.int32) if interleaved else tiles


def _places(tiles: Tensor, values: Tensor, scales: Tensor, is_gate_up: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs views of the same shape: of what lies in tiles uint8, and of the same in rows."""
    count, granules, _ = tiles.shape
    blocks = values.shape[-1] // MXFP4_BLOCK_BYTES
    is_nvfp4 = scales.shape[-1] > blocks
    part, number_bytes = part_bytes(is_nvfp4=is_nvfp4), GRANULE * MXFP4_BLOCK_BYTES
    flat = tiles.view(count, -1)
    by_granule = [_by_granule(x.unflatten(-1, (blocks, -1)), is_gate_up, is_nvfp4) for x in (values, scales)]
    for first, past in _runs(granules, _SLAB):
        slab = min(_SLAB, granules - first)
        own = flat[:, first * blocks * part : past * blocks * part].view(count, -1, slab * blocks * part)
        own_rows = [x[:, first:past].unflatten(1, (-1, slab)) for x in by_granule]  # [E, S, g, 2, 2, 4, blocks, .]
        for column, end in _runs(blocks, _PARTS):
            n = min(_PARTS, blocks - column)
            # [E, S, tiles of a granule, g, n, bytes]
            held = own[:, :, column * slab * part : end * slab * part].unflatten(-1, (-1, slab, n, part))
            own_numbers, own_scales = held.split([number_bytes, part - number_bytes], dim=-1)
            # [E, S, g, 2, 2, 4, tiles, n, .]
            of_numbers, of_scales = (x[..., column:end, :].unflatten(-2, (-1, n)) for x in own_rows)
            yield own_numbers.unflatten(-1, (2, 2, 4, -1)), of_numbers.permute(0, 1, 6, 2, 7, 3, 4, 5, 8)
            yield own_scales.unflatten(-1, (2, 4, 2, -1)), of_scales.permute(0, 1, 6, 2, 7, 4, 5, 3, 8)


def _by_granule(x: Tensor, is_gate_up: bool, is_nvfp4: bool) -> Tensor:
    """Views rows [E, O, blocks, .] by granules: [E, O / 16, 2 halves, 2, 4, blocks, .], 8 as they lie in a part."""
    granules: Tensor = x.unflatten(1, (2, -1, _HALF) if is_gate_up else (-1, 2, _HALF))
    if is_gate_up:
        granules = granules.transpose(1, 2)
    in_part: Tensor = granules.unflatten(3, (2, 4) if is_nvfp4 else (4, 2))
    return in_part if is_nvfp4 else in_part.transpose(3, 4)


def _runs(count: int, whole: int) -> list[tuple[int, int]]:
    """Divides so many into whole ones and what is left behind them: each a first and a past one."""
    at = count // whole * whole
    return [(first, past) for first, past in ((0, at), (at, count)) if past > first]
