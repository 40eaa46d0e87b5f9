"""`TorchOps` on a GPU with our kernels for experts, where they take them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import MoELayer, Residual
from trtllm_dflash.ops.experts import ExpertMatrix, Experts
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight
from trtllm_dflash.ops.int4 import Int4Weight
from trtllm_dflash.ops.mxfp4 import interleave
from trtllm_dflash.ops.nvfp4_tiles import Nvfp4Tiles, have_tiles, interleave_values, tile_scales
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor

#: Experts whose bits are put in order at a time.
_PART = 8
#: How the name ends by which a layer's experts are found to be in NVFP4.
_DOWN_NVFP4 = ".experts.down_proj.global_scale"
#: What stacks are called that have the shared expert behind a layer's others.
_WITH_SHARED = "experts+shared_expert"


class CudaExperts(TorchOps):
    """A mixture of experts, wherever its rows lie: [slots, rows] or flat."""

    def moe(self, layer: MoELayer, x: Tensor, logits: Tensor) -> Tensor:
        y = self._mixture(replace(layer, has_shared=False), x, logits)
        return super().moe(layer, x, logits) if y is None else y

    def add_mixture(
        self, layer: MoELayer, stream: Tensor, x: Tensor, logits: Tensor, shared_gate: Tensor | None = None
    ) -> Residual[Tensor]:
        y = self._mixture(layer, x, logits, shared_gate, stream if self.tp == 1 else None)
        if y is None:
            return super().add_mixture(layer, stream, x, logits, shared_gate)
        return Residual(y) if self.tp == 1 else Residual(stream, self.all_reduce(y))

    def _mixture(
        self,
        layer: MoELayer,
        x: Tensor,
        logits: Tensor,
        shared_gate: Tensor | None = None,
        stream: Tensor | None = None,
    ) -> Tensor | None:
        """Computes as many rows at a time as the kernels take, for prompts bring more; None: they do not take these.

        Args:
            stream: is added.
        """
        stacks = _WITH_SHARED if layer.has_shared else "experts"
        if layer.has_shared and f"{layer.prefix}{stacks}.down_proj.weight" not in self.weights:
            return None
        experts = Experts.of(self.weights, layer, stacks)
        if not _is_known(layer, experts):
            return None
        compute = moe_kernel(layer, experts)
        rows, scores = (of.flatten(0, 1).split(kernels.MOE_ROWS) for of in (x, logits))
        absent: tuple[Tensor | None, ...] = (None,) * len(rows)
        more = [absent if of is None else of.flatten(0, 1).split(kernels.MOE_ROWS) for of in (shared_gate, stream)]
        calls = list(zip(rows, scores, *more, strict=True))
        if not compute.takes(*calls[0]):
            return None
        out = [compute(*call) for call in calls]
        return (out[0] if len(out) == 1 else torch.cat(out)).view_as(x)


def moe_kernel(layer: MoELayer, experts: Experts, many: bool | None = None) -> kernels.MoE:
    """Makes the kernels' feed-forward of a layer's experts, with the shared one's if it has one: the last of a stack.

    Args:
        many: as in `kernels.MoE`.
    """
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
        has_shared=layer.has_shared,
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


@torch.inference_mode()
def join_shared_experts(weights: dict[str, Tensor], layers: Iterable[MoELayer], dtype: torch.dtype) -> None:
    """Puts experts that all rows go through behind the others of their layers, in place: views of one stack each.

    Where they are alike, in the engine's type or in FP8: then one kernel computes all, and reads a row's experts
    together. No more than one matrix is in memory twice.
    """
    for layer in layers:
        own, shared, joined = (
            [f"{layer.prefix}{stack}.{name}_proj." for name in ("gate_up", "down")]
            for stack in ("experts", "shared_expert", _WITH_SHARED)
        )
        kinds = [kind for kind in ("weight", "scale", "bias", "blocks", "words", "tiles") if own[0] + kind in weights]
        is_plain = layer.clamp is None and layer.activation == "silu"
        if is_plain and kinds in (["weight"], ["weight", "scale"]) and _are_alike(weights, own, shared, kinds, dtype):
            for names in zip(own, shared, joined, strict=True):
                for kind in kinds:
                    _join(weights, *(name + kind for name in names))


def _are_alike(
    weights: Mapping[str, Tensor], own: list[str], shared: list[str], kinds: list[str], dtype: torch.dtype
) -> bool:
    """Whether a layer's experts and its shared one have the same tensors, of the engine's type or in FP8."""
    types = {dtype} if kinds == ["weight"] else {FP8, torch.float32}
    pairs = [(stack + kind, one + kind) for stack, one in zip(own, shared, strict=True) for kind in kinds]
    return dtype in kernels.HALVES and all(
        one in weights
        and {weights[stack].dtype, weights[one].dtype} <= types
        and weights[stack].dtype == weights[one].dtype
        and weights[stack].shape[1:] == weights[one].shape
        for stack, one in pairs
    )


def _join(weights: dict[str, Tensor], own: str, shared: str, joined: str) -> None:
    stack, one = weights[own], weights[shared]
    whole = stack.new_empty(len(stack) + 1, *one.shape)
    for tensor, place in ((stack, whole[:-1]), (one, whole[-1])):
        place.copy_(tensor)
        # Itself, whoever else holds it, so that its memory is free then.
        tensor.set_(place.untyped_storage(), place.storage_offset(), place.shape, place.stride())
    weights[joined] = whole
    torch.cuda.empty_cache()  # it is too small for the next stack


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
    experts, layer = Experts.of(weights, layer), replace(layer, has_shared=False)
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
