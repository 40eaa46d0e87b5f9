"""`TorchOps` on a GPU with our kernels for experts, where they take them."""

from collections.abc import Callable, Mapping

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.experts import ExpertMatrix, Experts
from trtllm_dflash.ops.fp8 import Fp8Weight
from trtllm_dflash.ops.int4 import Int4Weight
from trtllm_dflash.ops.mxfp4 import interleave
from trtllm_dflash.ops.nvfp4_tiles import Nvfp4Tiles, have_tiles, interleave_values, tile_scales
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor

#: Experts whose bits are put in order at a time.
_PART = 8
#: How the name ends by which a layer's experts are found to be in NVFP4.
_DOWN_NVFP4 = ".experts.down_proj.global_scale"


class CudaExperts(TorchOps):
    """A mixture of experts, wherever its rows lie: [slots, rows] or flat."""

    def moe(self, layer: MoELayer, x: Tensor, logits: Tensor) -> Tensor:
        """Computes as many rows at a time as the kernels take: prompts bring more."""
        experts = Experts.of(self.weights, layer)
        if not _is_known(layer, experts):
            return super().moe(layer, x, logits)
        compute = moe_kernel(layer, experts)
        logits = logits.contiguous()  # it may be a part of a joined product
        rows, scores = (of.flatten(0, 1).split(kernels.MOE_ROWS) for of in (x, logits))
        if not compute.takes(rows[0], scores[0]):
            return super().moe(layer, x, logits)
        out = [compute(*part) for part in zip(rows, scores, strict=True)]
        return (out[0] if len(out) == 1 else torch.cat(out)).view_as(x)


def moe_kernel(layer: MoELayer, experts: Experts, many: bool | None = None) -> kernels.MoE:
    """Makes the kernels' feed-forward of a layer's experts; `many` as in `kernels.MoE`."""
    clamp = (layer.clamp.alpha, layer.clamp.limit) if layer.clamp else None
    routing = kernels.Routing(
        layer.experts,
        layer.first,
        layer.count,
        layer.top_k,
        layer.normalized,
        clamp,
        gelu=layer.activation == "gelu",
        scales=experts.scales,
        correction=experts.correction if layer.scores == "sigmoid" else None,
        scale=layer.scale,
    )
    return kernels.MoE(routing, _kernel_matrix(experts.gate_up), _kernel_matrix(experts.down), many)


def interleave_experts(weights: dict[str, Tensor], dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Puts words for MXFP4's blocks into a rank's weights, as the kernels take them beside rows of a type.

    NVFP4's numbers likewise, and tiles for their scales, in layers that the kernels compute on a GPU of that compute
    capability: torch would undo both in every step. No more than one matrix is in memory twice, and a few of its
    experts several times.
    """
    if dtype not in kernels.HALVES:
        return
    has_words = dtype == torch.bfloat16
    for name in [name for name in weights if has_words and name.endswith(".blocks")]:
        weights[name.removesuffix("blocks") + "words"] = _in_words(weights.pop(name), interleave)
    for name in [name for name in weights if name.endswith(_DOWN_NVFP4)]:
        prefix = name.removesuffix(_DOWN_NVFP4)
        keys = [f"{prefix}.experts.{matrix}_proj." for matrix in ("gate_up", "down")]
        if not _are_taken(weights, keys, capability):
            continue
        for key in keys:
            weights[key + "tiles"] = tile_scales(weights.pop(key + "scale"))
            if has_words:
                weights[key + "words"] = _in_words(weights.pop(key + "weight"), interleave_values)


def _are_taken(weights: Mapping[str, Tensor], keys: list[str], capability: tuple[int, int]) -> bool:
    """Whether the kernels compute a layer of experts whose down projection is in NVFP4: both matrices, or none."""
    if any(key + "global_scale" not in weights for key in keys):
        return False
    stored = [(weights[key + "weight"], weights[key + "scale"]) for key in keys]
    hidden, columns = (2 * values.shape[-1] for values, _ in stored)
    return kernels.takes_nvfp4(hidden, columns, capability) and all(have_tiles(*each) for each in stored)


def _in_words(numbers: Tensor, interleaved: Callable[[Tensor], Tensor]) -> Tensor:
    """Interleaves the bytes of experts' matrices [E, O, ...]: int32 [E, O, bytes / 4]."""
    words = torch.empty(*numbers.shape[:2], numbers[0, 0].numel() // 4, dtype=torch.int32, device=numbers.device)
    for to, part in zip(words.split(_PART), numbers.split(_PART), strict=True):
        to.copy_(interleaved(part))
    return words


def takes_experts(layer: MoELayer, weights: Mapping[str, Tensor], hidden: int, dtype: torch.dtype) -> bool:
    """Whether the kernels compute few rows [N, hidden] of such experts."""
    experts = Experts.of(weights, layer)
    device = next(iter(weights.values())).device
    x, logits = (torch.empty(1, size, dtype=dtype, device=device) for size in (hidden, layer.experts))
    return _is_known(layer, experts) and moe_kernel(layer, experts).takes(x, logits)


def _is_known(layer: MoELayer, experts: Experts) -> bool:
    """Whether the kernels have a layer's routing: by softmax, or by sigmoids with a correction."""
    return layer.scores == "softmax" or experts.correction is not None


def _kernel_matrix(matrix: ExpertMatrix) -> kernels.Matrix:
    if isinstance(matrix.quantized, Nvfp4Tiles):
        stored = matrix.quantized
        return kernels.Matrix(stored.values, stored.tiles, matrix.bias, stored.global_scale)
    if isinstance(matrix.quantized, Fp8Weight | Int4Weight):
        return kernels.Matrix(matrix.quantized.values, matrix.quantized.scale, matrix.bias)
    values = next(each for each in (matrix.weight, matrix.words, matrix.blocks) if each is not None)
    return kernels.Matrix(values, matrix.scales, matrix.bias)
