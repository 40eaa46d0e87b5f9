"""The experts of a mixture, computed by torch: one after another on the CPU, in tiles on a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trtllm_dflash.ops import cpu_products
from trtllm_dflash.ops.activations import gelu, sigmoid, silu
from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.expert_tiles import ExpertTiles
from trtllm_dflash.ops.linear_weight import QuantizedWeight, linear_weight
from trtllm_dflash.ops.mxfp4 import dequantize

Tensor = torch.Tensor

#: Tiles whose weights are gathered at a time: what a GPU holds of them besides the weights themselves.
_TILES = 8

#: Keeps sigmoids that are all zero from being divided by zero.
_TINY = 1e-20


@dataclass(frozen=True)
class ExpertMatrix:
    """One projection [O, I] of each of E experts: numbers, FP8, NVFP4, or MXFP4; see `MoELayer`."""

    weight: Tensor | None  # [E, O, I], as it is stored
    blocks: Tensor | None  # [E, O, I / 32, 16] uint8
    scales: Tensor | None  # [E, O, I / 32] uint8
    bias: Tensor | None  # [E, O]
    quantized: QuantizedWeight | None = None  # `weight` with its scales, where it has some
    tiles: ExpertTiles | None = None  # of MXFP4 or NVFP4, in the place of all the others but the bias

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], name: str) -> "ExpertMatrix":
        """Reads the projection `name` from a rank's weights."""
        weight, blocks, scales, bias, tiles = (
            weights.get(f"{name}.{kind}") for kind in ("weight", "blocks", "scales", "bias", "tiles")
        )
        if tiles is not None:
            is_gate_up = name.endswith("gate_up_proj")
            own = ExpertTiles(tiles, is_gate_up, weights.get(f"{name}.global_scale"))
            return cls(None, None, None, bias, tiles=own)
        stored = None if weight is None else linear_weight(weights, name)
        return cls(weight, blocks, scales, bias, None if isinstance(stored, Tensor) else stored)

    def numbers(self, experts: Tensor | int, dtype: torch.dtype) -> Tensor:
        """Dequantizes the matrices of `experts` [...]: [..., O, I]."""
        if self.tiles is not None:
            return self.tiles.numbers(experts, dtype)
        if self.quantized is not None:
            return self.quantized.of(experts).dequantize().to(dtype)
        if self.weight is not None:
            return self.weight[experts]
        assert self.blocks is not None and self.scales is not None
        return dequantize(self.blocks[experts], self.scales[experts], dtype)


@dataclass(frozen=True)
class Experts:
    """A rank's matrices and biases of a layer's experts."""

    gate_up: ExpertMatrix  # [2F, H] each
    down: ExpertMatrix  # [H, F] each
    correction: Tensor | None = None  # FP32 [experts], added to sigmoid scores before the choice; None: nothing is
    scales: Tensor | None = None  # [experts], of their weights in a row

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], layer: MoELayer, stacks: str = "experts") -> "Experts":
        """Reads the experts of `layer` from a rank's weights, where `stacks` are."""
        prefix = f"{layer.prefix}{stacks}."
        gate_up, down = (ExpertMatrix.of(weights, prefix + name) for name in ("gate_up_proj", "down_proj"))
        router = (weights.get(f"{layer.prefix}router.{name}") for name in ("correction_bias", "expert_scale"))
        return cls(gate_up, down, *router)

    def route(self, layer: MoELayer, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses each row's experts and their weights, as `route`."""
        ids, shares = route(layer, logits, self.correction)
        if self.scales is not None:
            shares = shares * self.scales.float()[ids]
        return ids, shares if layer.scale == 1 else shares * layer.scale


def route(layer: MoELayer, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Chooses each row's experts and their weights: ids [N, k] int64 and FP32 [N, k], for logits [N, experts].

    Args:
        correction: FP32 [experts], added to sigmoid scores before the choice; None: they are compared themselves.
    """
    logits = logits.float()
    if layer.scores == "sigmoid":
        return _route_by_sigmoids(layer, sigmoid(logits), correction)
    # Stable, so that of equals the lowest ids win, on every rank and device.
    top, ids = (x[:, : layer.top_k] for x in logits.sort(dim=-1, descending=True, stable=True))
    if layer.normalized:
        return ids, top.softmax(dim=-1)
    return ids, (top - logits.logsumexp(dim=-1, keepdim=True)).exp()


def _route_by_sigmoids(layer: MoELayer, scores: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    corrected = scores if correction is None else scores + correction
    ids = corrected.sort(dim=-1, descending=True, stable=True).indices[:, : layer.top_k]
    shares = scores.gather(-1, ids)
    if layer.normalized:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + _TINY)
    return ids, shares


def activate(gate_up: Tensor, layer: MoELayer) -> Tensor:
    """Computes a layer's activation of gate and up [..., 2F]: [..., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    clamp = layer.clamp
    if clamp is None:
        return (gelu(gate) if layer.activation == "gelu" else silu(gate)) * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return silu(gate, clamp.alpha) * (up + 1)


def one_by_one(layer: MoELayer, experts: Experts, x: Tensor, logits: Tensor) -> Tensor:
    """Computes `Ops.moe` for rows x [N, H], expert by expert: only those that a row chose. The host reads their ids."""
    ids, shares = experts.route(layer, logits)
    total = torch.zeros(x.shape, device=x.device)
    for expert in range(layer.first, layer.first + layer.count):
        rows, places = torch.where(ids == expert)
        if len(rows):
            own = expert - layer.first
            h = activate(_linear(x[rows], experts.gate_up, own), layer)
            y = _linear(h, experts.down, own).float()
            total.index_add_(0, rows, y * shares[rows, places, None])
    return total.to(x.dtype)


def in_tiles(layer: MoELayer, experts: Experts, x: Tensor, logits: Tensor) -> Tensor:
    """Computes `Ops.moe` for rows x [N, H] without the host: shapes depend on N alone, so a CUDA graph can hold it.

    The N * k pairs of row and expert are sorted by expert and laid out in tiles, each of one expert, the last of each
    expert's padded. There are as many tiles as the worst routing needs.
    """
    ids, shares = experts.route(layer, logits)
    rows, k = ids.shape
    pairs = rows * k
    size = max(1, pairs // layer.count)
    tiles = _most_tiles(pairs, layer.count, size)
    # Pairs of experts that other ranks have go last, to no tile.
    own = ids.flatten() - layer.first
    own = torch.where((own >= 0) & (own < layer.count), own, layer.count)
    sorted_own, order = own.sort(stable=True)
    counts = torch.zeros(layer.count + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, own, torch.ones_like(own))
    ends = ((counts + size - 1) // size)[:-1].cumsum(0)  # [E] past each expert's last tile
    first_tile = F.pad(ends, (1, 0))  # [E + 1]
    first_pair = counts.cumsum(0) - counts
    place = first_tile[sorted_own] * size + torch.arange(pairs, device=x.device) - first_pair[sorted_own]
    place = torch.where(sorted_own < layer.count, place, tiles * size)  # a row of scratch behind the tiles
    source = torch.zeros(tiles * size + 1, dtype=torch.int64, device=x.device)
    source[place] = order // k
    expert = torch.searchsorted(ends, torch.arange(tiles, device=x.device), right=True).clamp(max=layer.count - 1)

    laid_out = x[source[:-1]].view(tiles, size, -1)
    parts = []
    for tile in range(0, tiles, _TILES):
        which = expert[tile : tile + _TILES]
        h = activate(_tile_linear(laid_out[tile : tile + _TILES], experts.gate_up, which), layer)
        parts.append(_tile_linear(h, experts.down, which))
    y = torch.cat([part.flatten(0, 1) for part in parts])  # [tiles * size, H]
    y = F.pad(y, (0, 0, 0, 1))  # what the pairs of other ranks take
    back = torch.empty_like(place).scatter_(0, order, place)
    return (y[back].view(rows, k, -1).float() * shares[..., None]).sum(dim=1).to(x.dtype)


def _most_tiles(pairs: int, experts: int, size: int) -> int:
    """Number of tiles of `size` pairs that any routing of so many pairs fits in."""
    busy = min(pairs, experts)
    return busy + (pairs - busy) // size


def _linear(x: Tensor, matrix: ExpertMatrix, expert: int) -> Tensor:
    bias, numbers = None if matrix.bias is None else matrix.bias[expert], matrix.numbers(expert, x.dtype)
    return F.linear(x, numbers, bias) if x.is_cuda else cpu_products.product(x, numbers, bias)


def _tile_linear(x: Tensor, matrix: ExpertMatrix, experts: Tensor) -> Tensor:
    """Multiplies x [t, size, I] by each tile's expert's [O, I], transposed: [t, size, O]."""
    weight = matrix.numbers(experts, x.dtype).transpose(1, 2)
    if matrix.bias is None:
        return torch.bmm(x, weight)
    return torch.baddbmm(matrix.bias[experts, None], x, weight)
