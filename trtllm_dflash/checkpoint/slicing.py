"""One rank's engine tensors, assembled from slices of a checkpoint's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.checkpoint.quantized import QuantizedMatrix, read_matrix
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.weights import Content, Part, Split, Weight
from trtllm_dflash.ops.formats import E8M0_NAN
from trtllm_dflash.ops.fp8 import Fp8Weight
from trtllm_dflash.ops.int4 import Int4Weight
from trtllm_dflash.ops.linear_weight import Nvfp4Weight, QuantizedWeight


@dataclass(frozen=True)
class RankReader:
    """Reads the weights that `rank` of `tp` holds of a model, each in memory of its own.

    Attributes:
        keys: a part's key -> the tensor's name in this checkpoint, where the two differ.
        quantized: the tensors that are stored in few bits, by their names in this checkpoint.
    """

    folder: CheckpointFolder
    tp: int
    rank: int
    keys: Mapping[str, str] = field(default_factory=dict)
    quantized: Mapping[str, QuantizedMatrix] = field(default_factory=dict)

    def is_quantized(self, weight: Weight) -> bool:
        """Whether the checkpoint stores a weight in few bits."""
        return self._name(weight.parts[0]) in self.quantized

    def read(self, weight: Weight, dtype: torch.dtype) -> torch.Tensor | None:
        """Reads a weight that is not quantized; None where the rank holds nothing of it.

        Raises:
            CheckpointError: a tensor cannot be read, holds NaN or infinity, or does not fit the type.
        """
        slices = []
        for part in weight.parts_of(self.tp, self.rank):
            if part.split is Split.FIRST_RANK and self.rank != 0:
                return None
            slices.append(self._read_part(part, dtype))
        return torch.cat(slices).reshape(weight.shape(self.tp, self.rank))

    def read_quantized(self, weight: Weight) -> QuantizedWeight:
        """Reads a quantized weight: the parts' slices joined, or stacked, as they are stored.

        No slice cuts a block that shares a scale: see `build.precision.check_sides`.

        Raises:
            CheckpointError: a tensor cannot be read, or holds NaN or infinity.
        """
        slices = [self._read_runs(part) for part in weight.parts_of(self.tp, self.rank)]

        def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
            tensor = torch.cat(tensors)
            return tensor if weight.stack is None else tensor.unflatten(0, (len(slices) // weight.parts_of_each, -1))

        values = joined([part.values for part in slices])
        scale = joined([part.scale for part in slices])
        if isinstance(slices[0], Int4Weight):
            return Int4Weight(values, scale)
        # What goes in is one and the same, so the largest is its true range. Of experts it is the largest of all, too.
        inputs = [part.input_scale for part in slices if part.input_scale is not None]
        input_scale = torch.stack(inputs).amax() if len(inputs) == len(slices) else None
        if input_scale is not None and not input_scale > 0:
            raise CheckpointError(
                f"{self.folder.path}: the input scale of {weight.name} is {float(input_scale)}, which no input can be "
                "divided by; download the checkpoint again"
            )
        scales = [part.global_scale for part in slices if isinstance(part, Nvfp4Weight)]
        if scales:
            return Nvfp4Weight(values, scale, joined(scales), input_scale)
        return Fp8Weight(values, scale, input_scale)

    def read_dequantized(self, weight: Weight) -> torch.Tensor:
        """Reads and dequantizes a quantized weight: FP32. A slice may cut blocks.

        Raises:
            CheckpointError: a tensor cannot be read, or holds NaN or infinity.
        """
        slices = []
        for part in weight.parts_of(self.tp, self.rank):
            dimension, first, last = self._bounds(part)
            unit = 1 if dimension is None else self.quantized[self._name(part)].block[dimension]
            start, stop = first // unit * unit, min(-(-last // unit) * unit, part.sides[dimension or 0])
            numbers = self._read_matrix(part, dimension, start, stop).dequantize()
            numbers = numbers if dimension is None else numbers.narrow(dimension, first - start, last - first)
            slices.append(_deinterleaved(_runs(numbers, part), part))
        return torch.cat(slices).reshape(weight.shape(self.tp, self.rank))

    def _name(self, part: Part) -> str:
        return self.keys.get(part.key, part.key)

    def _bounds(self, part: Part) -> tuple[int | None, int, int]:
        """Finds the dimension that ranks divide, and the first and past-the-last index of it that this rank holds."""
        axis = part.axis
        return (None, 0, 0) if axis is None else (axis, *part.bounds(self.tp, self.rank))

    def _read_runs(self, part: Part) -> QuantizedWeight:
        """Reads a rank's rows of a quantized part, with the scales of these."""
        matrix = self._read_matrix(part, *self._bounds(part))
        if part.run is None:
            return matrix
        values, scale = _runs(matrix.values, part), _runs(matrix.scale, part, len(matrix.values) // len(matrix.scale))
        if isinstance(matrix, Nvfp4Weight):
            return Nvfp4Weight(values, scale, _runs(matrix.global_scale, part), matrix.input_scale)
        return Fp8Weight(values, scale, matrix.input_scale)

    def _read_matrix(self, part: Part, dimension: int | None, first: int, last: int) -> QuantizedWeight:
        name = self._name(part)
        return read_matrix(self.folder, name, self.quantized[name], part.sides[0], dimension, first, last)

    def _read_part(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        axis, key = part.axis, self._name(part)
        stored = self.folder.read(key, *self._bounds(part), matrix=part.matrix)
        if part.content is Content.NUMBERS:
            values = _deinterleaved(_runs(_as_numbers(self.folder, key, stored, dtype), part), part)
            values = values + 1 if part.less_one else values
        else:
            values = stored
            if part.content is Content.E8M0 and bool((stored == E8M0_NAN).any()):
                raise CheckpointError(f"{self.folder.path}: tensor {key} holds NaN; download the checkpoint again")
        if axis is not None:
            values = _pad(values, axis, part.held(self.tp, self.rank)[axis], part.content.padding)
        if part.transposed:
            values = values.transpose(1, 2)
        if part.interleaved:
            # Padding is whole blocks of pairs, so that it stands behind the gates as behind the ups.
            values = values.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return values


def _as_numbers(folder: CheckpointFolder, key: str, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = stored.to(dtype)
    if not torch.isfinite(values).all():
        if torch.isfinite(stored).all():
            raise CheckpointError(f"{folder.path}: tensor {key} does not fit {dtype}; choose another precision")
        raise CheckpointError(f"{folder.path}: tensor {key} holds NaN or infinity; download the checkpoint again")
    return values


def _runs(x: torch.Tensor, part: Part, rows: int = 1) -> torch.Tensor:
    """Takes the part's run out of each unit of x, of which an index stands for so many rows of the part."""
    if part.run is None:
        return x
    first, last = (row // rows for row in part.run)
    units = x.view(-1, part.unit // rows, *x.shape[1:])
    return units[:, first:last].flatten(0, 1)


def _deinterleaved(x: torch.Tensor, part: Part) -> torch.Tensor:
    """Sets apart the first and the second of the pairs that end each of a part's units."""
    if not part.alternating:
        return x
    units = x.unflatten(0, (-1, part.shape[0] // part.units))
    plain, pairs = units.split([units.shape[1] - part.alternating, part.alternating], dim=1)
    return torch.cat([plain, pairs[:, 0::2], pairs[:, 1::2]], dim=1).flatten(0, 1)


def _pad(x: torch.Tensor, axis: int, size: int, padding: int) -> torch.Tensor:
    """Pads dimension `axis` of x to `size`."""
    if x.shape[axis] == size:
        return x
    rest = x.new_full((*x.shape[:axis], size - x.shape[axis], *x.shape[axis + 1 :]), padding)
    return torch.cat([x, rest], dim=axis)
