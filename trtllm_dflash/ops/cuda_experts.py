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
#: What the names of an expert's tensors end with.
_KINDS = "weight", "scale", "global_scale", "bias", "blocks", "scales", "words", "tiles"


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


def takes_experts(layer: MoELayer, weights: Mapping[str, Tensor], hidden: int, dtype: torch.dtype) -> bool:
    """Whether the kernels compute few rows [N, hidden] of such experts."""
    experts, layer = Experts.of(weights, layer), replace(layer, has_shared=False)
    device = next(iter(weights.values())).device
    x, logits = (torch.empty(1, size, dtype=dtype, device=device) for size in (hidden, layer.experts))
    return _is_known(layer, experts) and moe_kernel(layer, experts).takes(x, logits)


@torch.inference_mode()
def interleave_experts(weights: dict[str, Tensor], dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Puts words for MXFP4's blocks into a rank's weights, as the kernels take them beside rows of a type.

    NVFP4's numbers likewise, and tiles for their scales, in layers that the kernels compute on a GPU of that compute
    capability: torch would undo both in every step. Words lie where the numbers lay, whoever else holds those tensors:
    a GPU that holds the experts once has room. A few experts are in memory several times.
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


def join_shared_experts(
    weights: Mapping[str, Tensor],
    layers: Iterable[MoELayer],
    dtype: torch.dtype,
    device: torch.device,
    takes: Callable[[MoELayer, Mapping[str, Tensor], int, torch.dtype], bool] = takes_experts,
) -> dict[str, Tensor]:
    """Puts experts that all rows go through behind the others of their layers, on the device: views of one stack each.

    Where they are alike, in the engine's type or in FP8, and the kernels compute such experts: then one kernel computes
    all, and reads a row's experts together. What was on the device is freed there, whoever else holds those tensors; no
    more than one matrix is in memory twice. To be called before `multiplied_weights`, which dequantizes what is apart.

    Args:
        takes: as `takes_experts`.
    """
    joined = dict(weights)
    for layer in layers:
        stacks, ones, wholes = (
            [f"{layer.prefix}{stack}.{name}_proj." for name in ("gate_up", "down")]
            for stack in ("experts", "shared_expert", _WITH_SHARED)
        )
        is_plain = layer.has_shared and layer.clamp is None and layer.activation == "silu"
        kinds = _kinds_alike(weights, stacks, ones, dtype) if is_plain else ()
        if not kinds:
            continue
        count, _, hidden = weights[stacks[0] + "weight"].shape
        if not takes(replace(layer, first=0, count=count), weights, hidden, dtype):
            continue
        for own, shared, both in zip(stacks, ones, wholes, strict=True):
            for kind in kinds:
                whole = _joined(joined[own + kind], joined[shared + kind], device)
                joined |= {own + kind: whole[:-1], shared + kind: whole[-1], both + kind: whole}
    return joined


def is_joined(weights: Mapping[str, Tensor], linear: str) -> bool:
    """Whether the matrix of `linear` is part of a stack that `join_shared_experts` made."""
    layer, shared, matrix = linear.rpartition("shared_expert.")
    return bool(shared) and f"{layer}{_WITH_SHARED}.{matrix}.weight" in weights


def _kinds_alike(
    weights: Mapping[str, Tensor], own: list[str], shared: list[str], dtype: torch.dtype
) -> tuple[str, ...]:
    """Names the tensors of each matrix of a layer's experts, if its shared one has the same; else none."""
    places = own + shared
    kinds = tuple(kind for kind in _KINDS if any(place + kind in weights for place in places))
    if dtype not in kernels.HALVES or kinds not in (("weight",), ("weight", "scale")):
        return ()
    types = {"weight": FP8 if "scale" in kinds else dtype, "scale": torch.float32}
    names = [(stack + kind, one + kind, types[kind]) for stack, one in zip(own, shared, strict=True) for kind in kinds]
    are_alike = all(_is_alike(weights.get(stack), weights.get(one), wanted) for stack, one, wanted in names)
    return kinds if are_alike else ()


def _is_alike(stack: Tensor | None, one: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether a tensor of that type, of one expert, can go behind those in a stack."""
    if stack is None or one is None:
        return False
    return stack.dtype == one.dtype == dtype and stack.shape[1:] == one.shape


@torch.inference_mode()
def _joined(stack: Tensor, one: Tensor, device: torch.device) -> Tensor:
    whole = torch.empty(len(stack) + 1, *one.shape, dtype=stack.dtype, device=device)
    for tensor, place in ((stack, whole[:-1]), (one, whole[-1])):
        place.copy_(tensor)
        if tensor.device == whole.device:
            tensor.set_(place.untyped_storage(), place.storage_offset(), place.shape, place.stride())
            torch.cuda.empty_cache()  # what was freed is too small for the next stack
    return whole


def _are_taken(weights: Mapping[str, Tensor], keys: list[str], capability: tuple[int, int]) -> bool:
    """Whether the kernels compute a layer of experts whose down projection is in NVFP4: both matrices, or none."""
    if any(key + "global_scale" not in weights for key in keys):
        return False
    stored = [(weights[key + "weight"], weights[key + "scale"]) for key in keys]
    hidden, columns = (2 * values.shape[-1] for values, _ in stored)
    return kernels.takes_nvfp4(hidden, columns, capability) and all(have_tiles(*each) for each in stored)


def _in_words(numbers: Tensor, interleaved: Callable[[Tensor], Tensor]) -> Tensor:
    """Interleaves the bytes of experts' matrices [E, O, ...] where they lie: int32 [E, O, bytes / 4]."""
    words = numbers.flatten(2).view(torch.int32)
    for to, part in zip(words.split(_PART), numbers.split(_PART), strict=True):
        to.copy_(interleaved(part))
    return words


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
