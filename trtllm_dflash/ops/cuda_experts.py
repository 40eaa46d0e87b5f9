"""`TorchOps` on a GPU with our kernels for experts, where they take them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import MoELayer, Residual
from trtllm_dflash.ops.expert_tiles import ExpertTiles, have_tiles
from trtllm_dflash.ops.experts import ExpertMatrix, Experts
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight
from trtllm_dflash.ops.int4 import Int4Weight
from trtllm_dflash.ops.linear_weight import Nvfp4Weight
from trtllm_dflash.ops.torch_ops import TorchOps

Tensor = torch.Tensor

#: How the names end by which a layer's experts are found to be in MXFP4 or NVFP4.
_DOWN = ".experts.down_proj."
#: What stacks are called that have the shared expert behind a layer's others.
_WITH_SHARED = "experts+shared_expert"
#: What the names of an expert's tensors end with.
_KINDS = "weight", "scale", "global_scale", "bias", "blocks", "scales", "tiles"


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
        segments = self._row_segment(sum(map(len, rows)))
        more.append(absent if segments is None else segments.split(kernels.MOE_ROWS))
        calls = list(zip(rows, scores, *more, strict=True))
        if not compute.takes(*calls[0][:4]):
            return None
        out = [compute(*call) for call in calls]
        return (out[0] if len(out) == 1 else torch.cat(out)).view_as(x)

    def _row_segment(self, rows: int) -> Tensor | None:
        """Tells which of so many rows are somebody's: int32 [rows], below 0 where one is not. None: all are."""
        return None


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
def tile_experts(weights: dict[str, Tensor], dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Puts tiles for MXFP4's and NVFP4's numbers and scales into a rank's weights, as the kernels take them.

    In layers that the kernels compute beside rows of `dtype` on a GPU of that compute capability: torch would undo it
    in every step. What stood there is freed, whoever else holds those tensors: they are empty then. No more than one
    matrix is in memory twice.
    """
    if dtype not in kernels.HALVES:
        return
    for name in [name for name in weights if name.endswith((_DOWN + "blocks", _DOWN + "global_scale"))]:
        prefix = name.rpartition("down_proj.")[0]
        keys = [f"{prefix}{matrix}_proj." for matrix in ("gate_up", "down")]
        if _are_taken(weights, keys, capability):
            for key in keys:
                weights[key + "tiles"] = _tiles(weights, key, dtype == torch.bfloat16)


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
    """Whether the kernels compute a layer of experts whose down projection is packed: both matrices are, or none."""
    kinds = _packed_kinds(weights, keys[1])
    if any(key + kind not in weights for key in keys for kind in kinds):
        return False
    stored = [(weights[key + kinds[0]].flatten(2), weights[key + kinds[1]]) for key in keys]
    hidden, columns = (2 * values.shape[-1] for values, _ in stored)
    is_taken = kernels.takes_tiles(hidden, columns, capability, is_nvfp4=kinds[0] == "weight")
    return is_taken and all(have_tiles(*each) for each in stored)


def _packed_kinds(weights: Mapping[str, Tensor], key: str) -> tuple[str, str]:
    """Names the numbers and the scales of a matrix in NVFP4, which has a global scale, or in MXFP4."""
    return ("weight", "scale") if key + "global_scale" in weights else ("blocks", "scales")


def _tiles(weights: dict[str, Tensor], key: str, interleaved: bool) -> Tensor:
    """Takes a matrix out of the weights, frees it, and gives its tiles."""
    numbers, scales = stored = [weights.pop(key + kind) for kind in _packed_kinds(weights, key)]
    is_gate_up, global_scale = key.endswith("gate_up_proj."), weights.get(key + "global_scale")
    made = ExpertTiles.of(numbers, scales, is_gate_up, interleaved, global_scale)
    for tensor in stored:
        tensor.set_(tensor.new_empty(0).untyped_storage(), 0, (0,), (1,))
    if made.tiles.is_cuda:
        torch.cuda.empty_cache()  # what was freed is too small for the next matrix
    return made.tiles


def _is_known(layer: MoELayer, experts: Experts) -> bool:
    """Whether the kernels have a layer's routing (softmax, or sigmoids with a correction) and its experts' form."""
    has_form = all(
        matrix.blocks is None and not isinstance(matrix.quantized, Nvfp4Weight)
        for matrix in (experts.gate_up, experts.down)
    )
    return has_form and (layer.scores == "softmax" or experts.correction is not None)


def _kernel_matrix(matrix: ExpertMatrix) -> kernels.Matrix:
    if matrix.tiles is not None:
        return kernels.Matrix(matrix.tiles.tiles, None, matrix.bias, matrix.tiles.global_scale)
    if isinstance(matrix.quantized, Fp8Weight | Int4Weight):
        return kernels.Matrix(matrix.quantized.values, matrix.quantized.scale, matrix.bias)
    assert matrix.weight is not None
    return kernels.Matrix(matrix.weight, None, matrix.bias)
