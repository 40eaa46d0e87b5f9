"""Single layers of a strongly typed TensorRT network: constants, shapes, arithmetic, and names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.fp8 import FP8

ITensor: TypeAlias = Any  # TensorRT's bindings carry no type stubs


class TensorRTLayers:
    """Emits named layers; a tensor that several layers derive alike is emitted once.

    Args:
        trt: the TensorRT module.
        network: a strongly typed INetworkDefinition.
        weights: tensors by name, on CPU. TensorRT reads them where they lie, so they must outlive the build.
    """

    def __init__(self, trt: Any, network: Any, weights: Mapping[str, torch.Tensor]) -> None:
        self.trt = trt
        self.network = network
        self.weights = weights
        self._types = {
            torch.float32: trt.float32,
            torch.float16: trt.float16,
            torch.bfloat16: trt.bfloat16,
            FP8: trt.fp8,
            torch.int32: trt.int32,
            torch.int64: trt.int64,
        }
        self._scope = "step"
        self._names: dict[str, int] = {}
        self._kept: list[torch.Tensor] = []  # TensorRT holds their addresses
        self._constants: dict[tuple[int, int], ITensor] = {}  # by address and size
        self._memo: dict[tuple[str, ...], ITensor] = {}

    # -- constants -------------------------------------------------------------------------------------------------

    def _weight(self, name: str, shape: tuple[int, ...] | None = None) -> ITensor:
        """Emits a weight as a constant, in its own shape or with leading ones. A tied table is one constant."""
        tensor = self.weights[name]
        shape = shape or tuple(tensor.shape)
        key = (tensor.data_ptr(), tensor.numel())
        if key not in self._constants:
            constant = self._constant(tensor, shape)
            constant.name = self._unique_name(name)
            self._constants[key] = constant
        constant = self._constants[key]
        if tuple(constant.shape) == shape:
            return constant
        return self._once(constant, f"shape{shape}", lambda: self._reshape(constant, shape))

    def _constant(self, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> ITensor:
        shape = tuple(tensor.shape) if shape is None else shape
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        values = self.trt.Weights(self._types[tensor.dtype], tensor.data_ptr(), tensor.numel())
        return self._layer(self.network.add_constant(shape, values), "constant")

    def _packed(self, tensor: torch.Tensor, dtype: ITensor, label: str) -> ITensor:
        """Emits bytes [..., n] as a constant of a type that torch or the bindings lack; of 4 bits, two a byte."""
        tensor = tensor.contiguous()
        shape = list(tensor.shape)
        if dtype in (self.trt.fp4, self.trt.int4):
            shape[-1] *= 2
        self._kept.append(tensor)
        count = torch.Size(shape).numel()
        values = self.trt.Weights(dtype, tensor.data_ptr(), count)
        return self._layer(self.network.add_constant(tuple(shape), values), label)

    def _fill(self, value: float, rank: int, dtype: Any = None) -> ITensor:
        """Emits one number, FP32 by default, as a constant of `rank` dimensions."""
        torch_type = torch.float32 if dtype is None else self._torch_type(dtype)
        key = ("fill", repr(float(value)), str(rank), str(torch_type))
        if key not in self._memo:
            self._memo[key] = self._constant(torch.full((1,) * rank, value, dtype=torch_type))
        return self._memo[key]

    def _ints(self, value: int, rank: int) -> ITensor:
        key = ("int", str(value), str(rank))
        if key not in self._memo:
            self._memo[key] = self._constant(torch.full((1,) * rank, value, dtype=torch.int32))
        return self._memo[key]

    def _longs(self, *values: int) -> ITensor:
        return self._constant(torch.tensor(values, dtype=torch.int64))

    def _torch_type(self, dtype: Any) -> torch.dtype:
        return next(known for known, emitted in self._types.items() if emitted == dtype)

    # -- shapes ----------------------------------------------------------------------------------------------------

    def _size(self, x: ITensor, axis: int) -> ITensor:
        """Emits the size of one dimension of x, int64 [1]."""

        def emit() -> ITensor:
            return self._slice(self._layer(self.network.add_shape(x), "shape"), 0, axis, 1)

        return self._once(x, f"size{axis}", emit)

    def _row_count(self, x: ITensor, axis: int = 2) -> ITensor:
        """Emits the size of one dimension of x, int32 [1, 1]."""
        return self._reshape(self._cast(self._size(x, axis), self.trt.int32), (1, 1))

    def _range(self, count: ITensor) -> ITensor:
        """Emits 0..count-1, int32, for count int64 [1]."""
        first, step = (self._constant(torch.tensor(x, dtype=torch.int32)) for x in (0, [1]))
        layer = self.network.add_fill((1,), self.trt.FillOperation.LINSPACE, self.trt.int32)
        for i, given in enumerate((count, first, step)):
            layer.set_input(i, given)
        return self._layer(layer, "range")

    def _reshape(
        self, x: ITensor, shape: Iterable[int], first: Iterable[int] | None = None, then: Iterable[int] | None = None
    ) -> ITensor:
        """Transposes by `first`, reshapes (0 keeps a size, -1 is what is left), transposes by `then`."""
        layer = self.network.add_shuffle(x)
        if first is not None:
            layer.first_transpose = tuple(first)
        layer.reshape_dims = tuple(shape)
        if then is not None:
            layer.second_transpose = tuple(then)
        return self._layer(layer, "shuffle")

    def _reshape_to(self, x: ITensor, shape: ITensor) -> ITensor:
        """Reshapes to sizes known when the step runs: int64 [rank]."""
        layer = self.network.add_shuffle(x)
        layer.set_input(1, shape)
        return self._layer(layer, "shuffle")

    def _reshape_like(self, x: ITensor, like: ITensor) -> ITensor:
        return self._reshape_to(x, self._layer(self.network.add_shape(like), "shape"))

    def _slice(self, x: ITensor, axis: int, first: int, size: int | ITensor) -> ITensor:
        """Takes first..first+size-1 along one axis; size is a number or int64 [1]."""
        is_static = isinstance(size, int)
        layer = self.network.add_slice(x, (first,), (size if is_static else 1,), (1,))
        layer.axes = (axis,)
        if not is_static:
            layer.set_input(2, size)
        return self._layer(layer, "slice")

    # -- single layers ---------------------------------------------------------------------------------------------

    def _binary(self, operation: str, x: ITensor, y: ITensor, label: str | None = None) -> ITensor:
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self._layer(self.network.add_elementwise(x, y, kind), label or operation.lower())

    def _unary(self, operation: str, x: ITensor) -> ITensor:
        return self._layer(self.network.add_unary(x, getattr(self.trt.UnaryOperation, operation)), operation.lower())

    def _not(self, x: ITensor) -> ITensor:
        return self._unary("NOT", x)

    def _at_least(self, x: ITensor, bound: ITensor) -> ITensor:
        return self._not(self._binary("LESS", x, bound))

    def _reduce(self, operation: str, x: ITensor, axis: int, keep: bool = True) -> ITensor:
        kind = getattr(self.trt.ReduceOperation, operation)
        return self._layer(self.network.add_reduce(x, kind, 1 << axis, keep), operation.lower())

    def _select(self, condition: ITensor, x: ITensor, y: ITensor) -> ITensor:
        return self._layer(self.network.add_select(condition, x, y), "select")

    def _cast(self, x: ITensor, dtype: Any) -> ITensor:
        return x if x.dtype == dtype else self._layer(self.network.add_cast(x, dtype), "cast")

    def _product(self, x: ITensor, weight: ITensor, label: str = "") -> ITensor:
        none, transpose = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        return self._layer(self.network.add_matrix_multiply(x, none, weight, transpose), label)

    def _concat(self, xs: Sequence[ITensor], axis: int) -> ITensor:
        if len(xs) == 1:
            return xs[0]
        layer = self.network.add_concatenation(list(xs))
        layer.axis = axis
        return self._layer(layer, "concat")

    def _gather(self, x: ITensor, index: ITensor, axis: int, per_slot: bool = False) -> ITensor:
        """Gathers x at index along axis; per_slot: index [B, ...] holds each slot's own rows."""
        layer = self.network.add_gather_v2(x, index, self.trt.GatherMode.DEFAULT)
        layer.axis = axis
        layer.num_elementwise_dims = int(per_slot)
        return self._layer(layer, "gather")

    # -- names -----------------------------------------------------------------------------------------------------

    def _layer(self, layer: Any, label: str) -> ITensor:
        """Names a layer and returns its output."""
        if layer is None:
            raise EngineError(f"{self._scope}: TensorRT refused the layer {label or 'itself'!r}")
        layer.name = self._unique(label)
        return layer.get_output(0)

    def _unique(self, label: str) -> str:
        return self._unique_name(f"{self._scope}/{label}" if label else self._scope)

    def _unique_name(self, name: str) -> str:
        seen = self._names.get(name, 0)
        self._names[name] = seen + 1
        return name if seen == 0 else f"{name}#{seen}"

    def _once(self, x: ITensor, what: str, emit: Callable[[], ITensor]) -> ITensor:
        """Emits a tensor derived from x once; returns the same one afterwards."""
        key = (x.name, what)
        if key not in self._memo:
            self._memo[key] = emit()
        return self._memo[key]
