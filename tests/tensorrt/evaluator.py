"""Computes a TensorRT network in torch, layer by layer, from what TensorRT's documentation says each layer does.

Nothing is taken from `TensorRTOps`: only the `INetworkDefinition` is read. Every tensor is checked against the type and
the shape that TensorRT itself inferred for it. What the bindings do not show is assumed: that a collective that keeps
its shape is an all-reduce by sum, and one that grows its first dimension an all-gather. FP4 and INT4 tensors
are their codes, one a byte.
"""

import ctypes
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tests.tensorrt.plugin_contract import plugin_layer
from trtllm_dflash.ops.mxfp4 import E2M1
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt

Tensor = torch.Tensor
Collective = Generator[Tensor, Tensor, None]  # yields what a rank brings, is sent what it gets

trt = load_tensorrt()

TYPES = {
    trt.float32: torch.float32,
    trt.float16: torch.float16,
    trt.bfloat16: torch.bfloat16,
    trt.int32: torch.int32,
    trt.int64: torch.int64,
    trt.bool: torch.bool,
    trt.fp4: torch.uint8,
    trt.int4: torch.uint8,
    trt.fp8: torch.float8_e4m3fn,
    trt.e8m0: torch.float8_e8m0fnu,
}

E4M3_MOST = 448.0
_E2M1 = torch.tensor(E2M1)

ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "DIV": torch.div,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "EQUAL": torch.eq,
    "LESS": torch.lt,
    "GREATER": torch.gt,
}


def evaluate(networks: Sequence[Any], inputs: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The outputs of each rank's network, all ranks in lock-step. Caches among the inputs are updated in place."""
    ranks = [_Rank(network, given) for network, given in zip(networks, inputs, strict=True)]
    running = [rank.run() for rank in ranks]
    brought = [next(rank, None) for rank in running]
    while any(x is not None for x in brought):
        tensors = [x for x in brought if x is not None]
        assert len(tensors) == len(ranks), "the ranks' collectives do not match: this would hang"
        brought = [_resume(rank, torch.stack(tensors)) for rank in running]
    return [rank.outputs() for rank in ranks]


def _resume(rank: Collective, everyone: Tensor) -> Tensor | None:
    try:
        return rank.send(everyone)
    except StopIteration:
        return None


@dataclass(frozen=True)
class _Declared:
    """What TensorRT inferred of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # -1: known when it runs

    @classmethod
    def of(cls, tensor: Any) -> "_Declared":
        return cls(tensor.name, TYPES[tensor.dtype], tuple(tensor.shape))

    def check(self, value: Tensor) -> None:
        assert value.dtype == self.dtype, f"{self.name}: {value.dtype}, declared {self.dtype}"
        if value.shape == self.shape:
            return
        assert len(self.shape) == value.dim(), f"{self.name}: {tuple(value.shape)}, declared {self.shape}"
        for size, wanted in zip(value.shape, self.shape, strict=True):
            assert wanted in (-1, size), f"{self.name}: {tuple(value.shape)}, declared {self.shape}"


@dataclass(frozen=True)
class _Layer:
    """A layer of a network, read once: steps in a row are computed by one network."""

    layer: Any
    kind: str
    inputs: tuple[str | None, ...]  # None: an optional input that is not set
    outputs: tuple[_Declared, ...]
    constant: Tensor | None

    @classmethod
    def of(cls, layer: Any) -> "_Layer":
        kind = str(layer.type).rpartition(".")[2]
        tensors = [layer.get_input(i) for i in range(layer.num_inputs)]
        return cls(
            layer,
            kind,
            tuple(None if x is None else x.name for x in tensors),
            tuple(_Declared.of(layer.get_output(i)) for i in range(layer.num_outputs)),
            _constant(layer) if kind == "CONSTANT" else None,
        )


@lru_cache(maxsize=8)  # all ranks' of one engine
def _layers(network: Any) -> tuple[_Layer, ...]:
    return tuple(_Layer.of(network.get_layer(i)) for i in range(network.num_layers))


class _Rank:
    """One rank's network and the values that its tensors have, by name."""

    def __init__(self, network: Any, inputs: Mapping[str, Tensor]) -> None:
        self.network = network
        self.values = dict(inputs)
        for i in range(network.num_inputs):
            given = _Declared.of(network.get_input(i))
            given.check(self.values[given.name])

    def run(self) -> Collective:
        """Computes layer by layer; at a collective, yields its input and takes all ranks' inputs, stacked."""
        for step in _layers(self.network):
            inputs: list[Any] = [None if name is None else self.values[name] for name in step.inputs]
            result: Tensor | tuple[Tensor, ...]
            if step.kind == "DIST_COLLECTIVE":
                result = _collective(step.layer, (yield inputs[0]))
            elif step.constant is not None:
                result = step.constant
            else:
                result = _LAYERS[step.kind](step.layer, inputs)
            results = result if isinstance(result, tuple) else (result,)
            for output, value in zip(step.outputs, results, strict=True):
                output.check(value)
                self.values[output.name] = value

    def outputs(self) -> dict[str, Tensor]:
        names = [self.network.get_output(i).name for i in range(self.network.num_outputs)]
        return {name: self.values[name] for name in names}


# -- layers: (layer, inputs) -> output --------------------------------------------------------------------------------


def _as(layer: Any, name: str) -> Any:
    """The layer with its own type's properties."""
    layer.__class__ = getattr(trt, name)
    return layer


def _collective(layer: Any, everyone: Tensor) -> Tensor:
    assert layer.num_ranks == len(everyone)
    declared = layer.get_output(0).shape
    if declared[0] == layer.get_input(0).shape[0]:
        return everyone.sum(dim=0, dtype=everyone.dtype)
    return everyone.flatten(0, 1)


class _Weights(ctypes.Structure):
    """nvinfer1::Weights."""

    _fields_ = (("type", ctypes.c_int32), ("values", ctypes.c_void_p), ("count", ctypes.c_int64))


def _constant(layer: Any) -> Tensor:
    layer = _as(layer, "IConstantLayer")
    weights, dtype = layer.weights, layer.get_output(0).dtype
    if not isinstance(weights, trt.Weights):  # an array
        return torch.from_numpy(weights.copy()).reshape(tuple(layer.shape))
    # The bindings do not show numbers that numpy has no type for. Behind a Python object's header is the C++ one.
    address = ctypes.c_void_p.from_address(id(weights) + object.__basicsize__).value
    assert address is not None
    raw = _Weights.from_address(address)
    assert (raw.type, raw.count) == (dtype.value, weights.size) and raw.count == math.prod(layer.shape)
    is_half = dtype in (trt.fp4, trt.int4)
    size = raw.count // 2 if is_half else raw.count * TYPES[dtype].itemsize
    data = torch.frombuffer((ctypes.c_char * size).from_address(raw.values), dtype=torch.uint8).clone()
    if is_half:
        return torch.stack([data & 15, data >> 4], dim=-1).reshape(tuple(layer.shape))
    return data.view(TYPES[dtype]).reshape(tuple(layer.shape))


def _top_k(layer: Any, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    layer = _as(layer, "ITopKLayer")
    axis = layer.axes.bit_length() - 1
    assert layer.op.name == "MAX" and layer.axes == 1 << axis
    # Of equals, the last ones: what relies on the first ones then fails.
    values, index = inputs[0].flip(axis).sort(dim=axis, descending=True, stable=True)
    ids = inputs[0].shape[axis] - 1 - index
    return values.narrow(axis, 0, layer.k), ids.narrow(axis, 0, layer.k).int()


def _mixture_of_experts(layer: Any, inputs: list[Tensor]) -> Tensor:
    layer = _as(layer, "IMoELayer")
    assert layer.activation_type.name == "SILU" and layer.num_inputs in (6, 9)
    x, ids, shares, gates, ups, downs, *biases = inputs
    assert x.dtype == shares.dtype == gates.dtype == ups.dtype == downs.dtype and ids.dtype == torch.int32
    assert ((ids >= 0) & (ids < len(gates))).all()
    gate_bias, up_bias, down_bias = biases if biases else (None, None, None)
    limit, alpha, beta = (getattr(layer, f"swiglu_param_{name}") for name in ("limit", "alpha", "beta"))

    def projected(x: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:  # [B, N, k, I] -> [B, N, k, O]
        y = (x[..., None, :].float() @ matrices[ids.long()].float())[..., 0, :]
        return y if bias is None else y + bias[ids.long()].float()

    rows = x[:, :, None].expand(-1, -1, ids.shape[2], -1)
    gate = projected(rows, gates, gate_bias).clamp(max=limit)
    up = projected(rows, ups, up_bias).clamp(-limit, limit)
    h = gate * torch.sigmoid(alpha * gate) * (up + beta)
    return (projected(h, downs, down_bias) * shares[..., None].float()).sum(dim=2).to(x.dtype)


def _quantize(layer: Any, inputs: list[Tensor]) -> Tensor:
    x, scale = inputs
    assert _as(layer, "IQuantizeLayer").to_type == trt.fp8 and scale.dim() == 0
    return (x.float() / scale).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn)


def _dequantize(layer: Any, inputs: list[Tensor]) -> Tensor:
    """By a scale of everything, of an index along `axis`, or of a block: of `block_shape`, or as the shapes say."""
    layer = _as(layer, "IDequantizeLayer")
    x, scale = inputs[0], inputs[1].float()
    kind = TYPES[layer.to_type]
    if layer.get_input(0).dtype == trt.int4:
        values = ((x.int() ^ 8) - 8).float()  # two's complement
    else:
        values = _E2M1[x.int()] if x.dtype == torch.uint8 else x.float()
    if scale.dim() == 0:
        return (values * scale).to(kind)
    if scale.dim() == 1:
        return (values * scale.view([-1 if i == layer.axis else 1 for i in range(x.dim())])).to(kind)
    try:
        block = list(layer.block_shape)
    except RuntimeError:  # not set
        block = [size // count for size, count in zip(x.shape, scale.shape, strict=True)]
    for i, size in enumerate(block):
        scale = scale.repeat_interleave(size, dim=i).narrow(i, 0, x.shape[i])
    return (values * scale).to(kind)


def _dynamic_quantize(layer: Any, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """E2M1 numbers and their E4M3 scales, by blocks along the last axis, under a global scale."""
    layer = _as(layer, "IDynamicQuantizeLayer")
    x, global_scale = inputs
    assert (layer.to_type, layer.scale_type) == (trt.fp4, trt.fp8) and layer.axis == x.dim() - 1
    blocks = x.float().unflatten(-1, (-1, layer.block_size))
    scale = (blocks.abs().amax(dim=-1) / 6 / global_scale).clamp(max=E4M3_MOST).to(torch.float8_e4m3fn)
    divisor = scale.float() * global_scale
    scaled = (blocks / torch.where(divisor == 0, 1, divisor)[..., None]).flatten(-2)
    # Nearest, and of two as near the even one: E2M1's magnitudes by their three bits.
    distance = (scaled.abs()[..., None] - _E2M1[:8]).abs()
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    code = even_first[distance[..., even_first].argmin(dim=-1)]
    return (code + 8 * (scaled < 0)).to(torch.uint8), scale


def _elementwise(layer: Any, inputs: list[Tensor]) -> Tensor:
    x, y = inputs
    assert x.dtype == y.dtype and x.dim() == y.dim()
    operation = _as(layer, "IElementWiseLayer").op.name
    return ELEMENTWISE[operation](x, y)


def _unary(layer: Any, inputs: list[Tensor]) -> Tensor:
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "SQRT": torch.sqrt,
        "EXP": torch.exp,
        "LOG": torch.log,
        "ABS": torch.abs,
        "NEG": torch.neg,
        "NOT": torch.logical_not,
    }
    return operations[_as(layer, "IUnaryLayer").op.name](inputs[0])


def _activation(layer: Any, inputs: list[Tensor]) -> Tensor:
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "GELU_TANH": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "SIGMOID": torch.sigmoid,
        "TANH": torch.tanh,
    }
    return operations[_as(layer, "IActivationLayer").type.name](inputs[0])


def _cast(layer: Any, inputs: list[Tensor]) -> Tensor:
    return inputs[0].to(TYPES[_as(layer, "ICastLayer").to_type])


def _select(layer: Any, inputs: list[Tensor]) -> Tensor:
    condition, x, y = inputs
    assert condition.dtype == torch.bool and x.dtype == y.dtype and condition.dim() == x.dim() == y.dim()
    return torch.where(condition, x, y)


def _reduce(layer: Any, inputs: list[Tensor]) -> Tensor:
    layer = _as(layer, "IReduceLayer")
    axis = layer.axes.bit_length() - 1
    assert layer.axes == 1 << axis, "one axis"
    x, keep = inputs[0], layer.keep_dims
    if layer.op.name == "SUM":
        return x.sum(dim=axis, keepdim=keep, dtype=x.dtype)
    if layer.op.name == "AVG":
        return x.mean(dim=axis, keepdim=keep)
    return x.amax(dim=axis, keepdim=keep) if layer.op.name == "MAX" else x.amin(dim=axis, keepdim=keep)


def _cumulative(layer: Any, inputs: list[Tensor]) -> Tensor:
    layer = _as(layer, "ICumulativeLayer")
    assert not layer.exclusive and not layer.reverse and layer.op.name == "SUM"
    return inputs[0].cumsum(dim=int(inputs[1]), dtype=inputs[0].dtype)


def _matrix_multiply(layer: Any, inputs: list[Tensor]) -> Tensor:
    layer = _as(layer, "IMatrixMultiplyLayer")
    x, y = inputs
    assert x.dim() == y.dim()
    x, y = (
        matrix.mT if operation.name == "TRANSPOSE" else matrix for matrix, operation in ((x, layer.op0), (y, layer.op1))
    )
    return x @ y


def _gather(layer: Any, inputs: list[Tensor]) -> Tensor:
    layer = _as(layer, "IGatherLayer")
    data, index = inputs
    if layer.mode.name == "ELEMENT":
        return data.take_along_dim(index.long(), dim=layer.axis)
    assert layer.mode.name == "DEFAULT"
    size = data.shape[layer.axis]
    assert ((index >= 0) & (index < size)).all(), f"{layer.name}: an index is outside 0..{size - 1}"
    if layer.num_elementwise_dims == 0:
        return _taken(data, index, layer.axis)
    assert data.shape[0] == index.shape[0] and layer.axis > 0
    return torch.stack([_taken(data[b], index[b], layer.axis - 1) for b in range(len(data))])


def _taken(data: Tensor, index: Tensor, axis: int) -> Tensor:
    return data.index_select(axis, index.flatten()).unflatten(axis, index.shape) if index.dim() else data[index]


def _concatenation(layer: Any, inputs: list[Tensor]) -> Tensor:
    assert len({x.dtype for x in inputs}) == 1
    return torch.cat(inputs, dim=_as(layer, "IConcatenationLayer").axis)


def _shape(layer: Any, inputs: list[Tensor]) -> Tensor:
    return torch.tensor(inputs[0].shape, dtype=torch.int64)


def _slice(layer: Any, inputs: list[Tensor]) -> Tensor:
    layer = _as(layer, "ISliceLayer")
    (axis,), (first,), (stride,) = layer.axes, layer.start, layer.stride
    size = int(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else layer.shape[0]
    if layer.mode.name == "FILL":
        assert first == 0 and axis == inputs[0].dim() - 1
        return torch.nn.functional.pad(inputs[0], (0, size - inputs[0].shape[axis]), value=inputs[4].item())
    assert stride == 1 and size > 0 and first + size <= inputs[0].shape[axis]
    return inputs[0].narrow(axis, first, size)


def _shuffle(layer: Any, inputs: list[Tensor]) -> Tensor:
    layer = _as(layer, "IShuffleLayer")
    x = inputs[0].permute(tuple(layer.first_transpose)[: inputs[0].dim()])
    if len(inputs) > 1:
        sizes = inputs[1].tolist()
    else:
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(layer.reshape_dims)]
    x = x.reshape(sizes)
    return x.permute(tuple(layer.second_transpose)[: x.dim()])


def _fill(layer: Any, inputs: list[Tensor]) -> Tensor:
    assert _as(layer, "IFillLayer").operation.name == "LINSPACE"
    (size,), alpha, (beta,) = inputs
    steps = torch.arange(int(size), dtype=alpha.dtype)
    line: Tensor = alpha + beta * steps
    return line


def _rotary_embedding(layer: Any, inputs: list[Tensor]) -> Tensor:
    layer = _as(layer, "IRotaryEmbeddingLayer")
    x, cos, sin, positions = inputs
    assert not layer.interleaved and layer.rotary_embedding_dim == 2 * cos.shape[1] <= x.shape[3]
    assert x.dtype == cos.dtype == sin.dtype and positions.dtype == torch.int64
    assert ((positions >= 0) & (positions < len(cos))).all(), f"{layer.name}: a position is outside the table"
    cos, sin = cos[positions][:, None], sin[positions][:, None]  # [B, 1, Q, D/2]
    rotated, rest = x[..., : layer.rotary_embedding_dim], x[..., layer.rotary_embedding_dim :]
    a, b = rotated.chunk(2, dim=3)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=3)


def _kv_cache_update(layer: Any, inputs: list[Tensor]) -> Tensor:
    assert _as(layer, "IKVCacheUpdateLayer").cache_mode.name == "LINEAR"
    cache, update, indices = inputs
    # As long as the cache where that is known when the network is compiled.
    longest = cache.shape[2] - (layer.get_input(1).shape[2] == -1)
    assert update.shape[2] <= longest and len(cache) == len(update) == len(indices)
    for slot, first in enumerate(indices.tolist()):
        room = cache[slot, :, first : first + update.shape[2]]  # rows out of range are dropped
        room.copy_(update[slot, :, : room.shape[1]])
    return cache


def _attention(layer: Any, inputs: list[Tensor]) -> Tensor:
    attention = _as(layer, "IAttentionInputLayer").attention
    assert attention.norm_op.name == "SOFTMAX"
    assert attention.query_form.name == attention.key_value_form.name == "PADDED_BHND"
    q, keys, values, *_ = inputs
    assert attention.decomposable == (q.shape[3] > 256), "fused wherever there are such kernels"
    assert q.dtype == keys.dtype == values.dtype and keys.shape == values.shape and keys.shape[3] == q.shape[3]
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = q.float() @ keys.mT  # no scale
    lengths = inputs[6] if len(inputs) > 6 else None
    if attention.mask is not None:
        mask = inputs[3]
        assert attention.causal_kind.name == "NONE" and mask.dtype == torch.bool
        assert mask.dim() == 4 and mask.shape[2:] == scores.shape[2:]
        scores = scores.masked_fill(~mask, -torch.inf)
    if lengths is None:
        assert attention.mask is not None and len(inputs) == 4
        return (scores.softmax(dim=-1) @ values).to(q.dtype)
    row, key = torch.arange(q.shape[2])[:, None], torch.arange(keys.shape[2])
    seen = lengths[:, None, None].expand(-1, q.shape[2], 1)
    if attention.causal_kind.name == "LOWER_RIGHT":
        seen = torch.minimum(seen, lengths[:, None, None] - q.shape[2] + row + 1)
    else:
        assert attention.causal_kind.name == "NONE"
    scores = scores.masked_fill(key >= seen[:, None], -torch.inf)
    return (scores.softmax(dim=-1) @ values).to(q.dtype)


_LAYERS: dict[str, Callable[[Any, list[Tensor]], Tensor | tuple[Tensor, ...]]] = {
    "ACTIVATION": _activation,
    "ATTENTION_INPUT": _attention,
    "ATTENTION_OUTPUT": lambda layer, inputs: inputs[0],
    "CAST": _cast,
    "CONCATENATION": _concatenation,
    "CUMULATIVE": _cumulative,
    "DEQUANTIZE": _dequantize,
    "DYNAMIC_QUANTIZE": _dynamic_quantize,
    "ELEMENTWISE": _elementwise,
    "FILL": _fill,
    "GATHER": _gather,
    "KV_CACHE_UPDATE": _kv_cache_update,
    "MATRIX_MULTIPLY": _matrix_multiply,
    "MOE": _mixture_of_experts,
    "PLUGIN_V3": plugin_layer,
    "QUANTIZE": _quantize,
    "REDUCE": _reduce,
    "ROTARY_EMBEDDING": _rotary_embedding,
    "SELECT": _select,
    "SHAPE": _shape,
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "TOPK": _top_k,
    "UNARY": _unary,
}
