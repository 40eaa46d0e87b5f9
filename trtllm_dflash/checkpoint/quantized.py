"""Quantized checkpoints: the matrices that are stored in FP8, NVFP4 or INT4, their layout, and a rank's slice of one.

Read are NVIDIA ModelOpt's unified exports (FP8, NVFP4) and FP8 as it is published: scaled as a whole or by output
channel (`weight_scale`; compressed-tensors), or by blocks of 128 by 128 (`weight_scale_inv`, which multiplies as well).
And INT4 as compressed-tensors packs it, with a scale for each 32 numbers of a row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_dflash.checkpoint.folder import FLOATING_DTYPES, CheckpointFolder, read_json
from trtllm_dflash.checkpoint.validation import reading_config
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.weights import Part, Weight, WeightPrecision
from trtllm_dflash.ops.formats import FP8_BLOCK, INT4_BLOCK, INT4_PACKED, NVFP4_BLOCK
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight
from trtllm_dflash.ops.int4 import Int4Weight
from trtllm_dflash.ops.linear_weight import Nvfp4Weight, QuantizedWeight

#: ModelOpt's summary of what it did, beside config.json.
MODELOPT_FILE = "hf_quant_config.json"

#: Scales of FP8 caches, which an engine with other caches does not need.
_CACHE_SCALES = ("*.k_scale", "*.v_scale")

#: quant_method in config.json -> the layouts of it that are read; None: whatever the tensors are. MXFP4 is a family's.
_READ: dict[str, tuple[str, ...] | None] = {
    "modelopt": ("FP8", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "W4A16_NVFP4"),
    "compressed-tensors": ("float-quantized", "naive-quantized", "pack-quantized"),
    "fp8": None,
    "mxfp4": None,
}

#: Rows and columns of a matrix that share a scale, and bytes.
_BLOCK = {
    WeightPrecision.FP8: (1, 1),
    WeightPrecision.FP8_BLOCKS: (FP8_BLOCK, FP8_BLOCK),
    WeightPrecision.NVFP4: (1, NVFP4_BLOCK),
    WeightPrecision.INT4: (1, INT4_BLOCK),
}


@dataclass(frozen=True)
class QuantizedMatrix:
    """The format of one matrix [O, I] in a checkpoint, from its tensors' names and shapes."""

    precision: WeightPrecision
    tensors: Mapping[str, tuple[int, ...]]
    scale: str
    global_scale: str | None = None
    input_scale: str | None = None

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of it that share a scale, and bytes."""
        return _BLOCK[self.precision]


def check_tensors(
    folder: CheckpointFolder, weights: Sequence[Weight], ignored: Iterable[str], keys: Mapping[str, str] | None = None
) -> tuple[dict[str, QuantizedMatrix], dict[str, Any]]:
    """Compares a folder's tensors with a model's.

    Args:
        ignored: patterns of tensor names that may be there besides.
        keys: a part's key -> the tensor's name in this checkpoint, where the two differ.

    Returns:
        The quantized ones by their names there, and the `linear_precision` and `plain_linears` of the model.

    Raises:
        CheckpointError: a tensor is missing, unexpected or misshapen, or quantized in a way that is not read.
    """
    parts = [part for weight in weights for part in weight.parts]
    found = _find_quantized(folder, parts, keys or {})
    precision = _common_precision(folder, weights, found, keys or {})
    stored = {name: shape for matrix in found.values() for name, shape in matrix.tensors.items()}
    folder.check(parts, [*ignored, *_CACHE_SCALES], keys, stored)
    return found, precision


def _find_quantized(
    folder: CheckpointFolder, parts: Iterable[Part], keys: Mapping[str, str]
) -> dict[str, QuantizedMatrix]:
    """Finds the quantized matrices among a model's tensors, by their names in this checkpoint.

    Raises:
        CheckpointError: it is quantized in a way that is not read, or a scale is missing or of no known shape.
    """
    _check_method(folder)
    found = {}
    for part in parts:
        name = keys.get(part.key, part.key)
        info = folder.tensors.get(name)
        if info is None or len(part.shape) != 2 or info.dtype not in _LAYOUTS:
            continue
        if part.alternating:
            raise CheckpointError(f"{folder.path}: tensor {name} is quantized, which rotated projections may not be")
        found[name] = _LAYOUTS[info.dtype](folder, name, part.shape)
    return found


def _common_precision(
    folder: CheckpointFolder,
    weights: Iterable[Weight],
    found: Mapping[str, QuantizedMatrix],
    keys: Mapping[str, str],
) -> dict[str, Any]:
    """Chooses a model's `linear_precision` and `plain_linears` from its checkpoint.

    Raises:
        CheckpointError: matrices that are multiplied as one are stored differently, or there are several formats.
    """
    if not found:
        return {}
    kinds: dict[WeightPrecision, str] = {}
    plain = []
    for weight in weights:
        parts = [keys.get(part.key, part.key) for part in weight.parts]
        # What is missing is `CheckpointFolder.check`'s to say.
        own = {found[name].precision if name in found else None for name in parts if name in folder.tensors} or {None}
        if own != {None} and not weight.is_matrix:
            raise CheckpointError(f"{folder.path}: {weight.name} is quantized, which embeddings may not be")
        if len(own) > 1:
            raise CheckpointError(f"{folder.path}: the parts of {weight.name} are not quantized alike")
        kind = own.pop()
        if kind is not None:
            kinds.setdefault(kind, weight.name)
        elif weight.is_matrix:
            plain.append(weight.linear)
    if len(kinds) > 1:
        listed = ", ".join(f"{name} in {kind.value}" for kind, name in kinds.items())
        raise CheckpointError(f"{folder.path}: several formats in one checkpoint are not supported: {listed}")
    return {"linear_precision": next(iter(kinds)), "plain_linears": tuple(plain)}


def read_matrix(
    folder: CheckpointFolder,
    name: str,
    matrix: QuantizedMatrix,
    rows: int,
    dimension: int | None,
    first: int,
    last: int,
) -> QuantizedWeight:
    """Reads indices first..last-1 of a matrix along a dimension, as stored; all of it where that is None.

    Args:
        rows: of the whole matrix.

    Raises:
        CheckpointError: a tensor cannot be read, or holds NaN or infinity.
    """

    def read(key: str, row_unit: int = 1, column_unit: int = 1) -> torch.Tensor:
        """Reads the slice of a tensor with one number for so many rows, and so many columns, of the matrix."""
        if dimension is None:
            return folder.read(key).clone()
        unit = row_unit if dimension == 0 else column_unit
        return folder.read(key, dimension, first // unit, -(-last // unit)).clone()

    input_scale = None if matrix.input_scale is None else _number(folder, matrix.input_scale)
    if matrix.precision is WeightPrecision.NVFP4:
        assert matrix.global_scale is not None
        values, scale = read(name, column_unit=2), read(matrix.scale, column_unit=NVFP4_BLOCK)
        _check_finite(folder, matrix.scale, scale)
        global_scale = _number(folder, matrix.global_scale)
        _check_above_zero(folder, matrix.scale, scale.view(torch.int8) >= 0)  # 0 of a block of numbers near 0
        if not global_scale > 0:
            _check_above_zero(folder, matrix.global_scale, (global_scale == 0) & (values == 0))
        return Nvfp4Weight(values, scale, global_scale.expand(len(values)), input_scale)
    if matrix.precision is WeightPrecision.INT4:
        scale = read(matrix.scale, column_unit=INT4_BLOCK)
        _check_finite(folder, matrix.scale, scale)
        return Int4Weight(read(name, column_unit=INT4_PACKED), scale)
    values = read(name)
    _check_finite(folder, name, values)
    if matrix.precision is WeightPrecision.FP8_BLOCKS:
        scale = read(matrix.scale, FP8_BLOCK, FP8_BLOCK).float()
    else:
        scale = folder.read(matrix.scale).float().flatten().expand(rows)
        scale = scale[first:last] if dimension == 0 else scale
    _check_finite(folder, matrix.scale, scale)
    if not (scale > 0).all():
        wide = Fp8Weight(torch.ones_like(values), scale).dequantize()
        _check_above_zero(folder, matrix.scale, (wide > 0) | (wide == 0) & (values.float() == 0))
    return Fp8Weight(values, scale.contiguous(), input_scale)


def cache_format(folder: CheckpointFolder) -> str | None:
    """Reads the format that a checkpoint sets for caches, in ModelOpt's words (FP8, NVFP4, ...); None: it sets none."""
    said = folder.setting("quantization_config")
    scheme = said.get("kv_cache_scheme") if isinstance(said, dict) else None
    if isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float"):
        return "FP8"
    if (folder.path / MODELOPT_FILE).is_file():
        said = read_json(folder.path / MODELOPT_FILE).get("quantization")
    algorithm = said.get("kv_cache_quant_algo") if isinstance(said, dict) else None
    return algorithm if isinstance(algorithm, str) else None


def read_cache_scales(
    folder: CheckpointFolder, prefix: str, layers: int, keys: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Reads a checkpoint's FP32 scales [] of FP8 caches, by `{prefix}{layer}.key` and `.value`.

    They lie beside the projection (ModelOpt: `k_proj.k_scale`) or the attention (compressed-tensors: `k_scale`). Scales
    of other formats than FP8 are not read.

    Raises:
        CheckpointError: one is not a single number above 0.
    """
    scales: dict[str, torch.Tensor] = {}
    if cache_format(folder) not in (None, "FP8"):
        return scales
    for layer in range(layers):
        for letter, cache in (("k", "key"), ("v", "value")):
            name = f"{prefix}{layer}.self_attn.{letter}_proj.weight"
            name = (keys or {}).get(name, name)
            beside = (
                _beside(name, f"{letter}_scale"),
                _beside(name, "").removesuffix(f"{letter}_proj.") + f"{letter}_scale",
            )
            found = next((key for key in beside if key in folder.tensors), None)
            if found is not None:
                scales[f"{prefix}{layer}.{cache}"] = _cache_scale(folder, found)
    return scales


def _cache_scale(folder: CheckpointFolder, key: str) -> torch.Tensor:
    shape = folder.tensors[key].shape
    if shape not in ((), (1,)):
        raise CheckpointError(f"{folder.path}: tensor {key} is {list(shape)} instead of []; --kv engine does without")
    scale = _number(folder, key)
    if not scale > 0:
        raise CheckpointError(f"{folder.path}: tensor {key} is {float(scale)}, which no cache can be divided by")
    return scale


def _check_method(folder: CheckpointFolder) -> None:
    said = folder.setting("quantization_config")
    if said is None and (folder.path / MODELOPT_FILE).is_file():
        said = read_json(folder.path / MODELOPT_FILE).get("quantization")
    if said is None:
        return
    if not isinstance(said, dict):
        raise CheckpointError(f"{folder.path}: config.json: quantization_config is not an object")
    method = str(said.get("quant_method", "modelopt"))
    kind = said.get("quant_algo") if method == "modelopt" else said.get("format")
    if kind == "pack-quantized":
        with reading_config(folder.path):
            _check_int4(said)
    read = _READ.get(method, ())
    caches_alone = kind is None or (method, kind) == ("compressed-tensors", "dense")
    if method in _READ and caches_alone and cache_format(folder) is not None:
        return
    if read is not None and kind not in read:
        how = method if kind is None else f"{method} as {kind}"
        raise CheckpointError(
            f"{folder.path}: quantized by {how}, which is not read; make FP8 or NVFP4 of the unquantized "
            "checkpoint: trtllm-dflash quantize --format fp8|nvfp4"
        )


def _check_int4(said: Mapping[str, Any]) -> None:
    """Refuses packed whole numbers of another size, or with other scales, than `ops.int4`'s."""
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": INT4_BLOCK}
    for group in (said.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        for key, value in wanted.items():
            if weights.get(key, value) != value:
                raise CheckpointError(f"packed weights of {key} {weights[key]!r} are not read; read: {value!r}")


def _fp8(folder: CheckpointFolder, name: str, shape: tuple[int, ...]) -> QuantizedMatrix:
    outputs, inputs = shape
    scale = _companion(folder, name, "weight_scale", "weight_scale_inv")
    if scale is None:
        raise CheckpointError(f"{folder.path}: tensor {name} is FP8 and has no {_beside(name, 'weight_scale')}")
    scaled = folder.tensors[scale].shape
    blocks = -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK)
    if scaled in ((), (1,), (outputs,), (outputs, 1)):
        precision = WeightPrecision.FP8
    elif scaled == blocks:
        precision = WeightPrecision.FP8_BLOCKS
    else:
        raise CheckpointError(
            f"{folder.path}: tensor {scale} is {list(scaled)}; scales are read of the whole tensor, [{outputs}] by row "
            f"or {list(blocks)} by blocks of {FP8_BLOCK}"
        )
    _check_dtype(folder, scale, FLOATING_DTYPES)
    return _matrix(folder, name, shape, precision, scale, {scale: scaled})


def _nvfp4(folder: CheckpointFolder, name: str, shape: tuple[int, ...]) -> QuantizedMatrix:
    outputs, inputs = shape
    scale, global_scale = _companion(folder, name, "weight_scale"), _companion(folder, name, "weight_scale_2")
    for suffix, found in (("weight_scale", scale), ("weight_scale_2", global_scale)):
        if found is None:
            raise CheckpointError(f"{folder.path}: tensor {name} is NVFP4 and has no {_beside(name, suffix)}")
    assert scale is not None and global_scale is not None
    _check_dtype(folder, scale, ("F8_E4M3",))
    tensors = {scale: (outputs, inputs // NVFP4_BLOCK), global_scale: folder.tensors[global_scale].shape}
    if tensors[global_scale] not in ((), (1,)):
        raise CheckpointError(f"{folder.path}: tensor {global_scale} is {list(tensors[global_scale])} instead of []")
    return _matrix(folder, name, (outputs, inputs // 2), WeightPrecision.NVFP4, scale, tensors, global_scale)


def _int4(folder: CheckpointFolder, name: str, shape: tuple[int, ...]) -> QuantizedMatrix:
    outputs, inputs = shape
    scale = _companion(folder, name, "weight_scale")
    if scale is None:
        raise CheckpointError(f"{folder.path}: tensor {name} is INT4 and has no {_beside(name, 'weight_scale')}")
    _check_dtype(folder, scale, ("BF16",))
    # The last is the matrix's own shape, which config.json says too.
    tensors = {scale: (outputs, inputs // INT4_BLOCK), _beside(name, "weight_shape"): (2,)}
    return _matrix(folder, name, (outputs, inputs // INT4_PACKED), WeightPrecision.INT4, scale, tensors)


#: safetensors' type of a matrix in few bits -> its layout.
_LAYOUTS = {"F8_E4M3": _fp8, "U8": _nvfp4, "I32": _int4}


def _matrix(
    folder: CheckpointFolder,
    name: str,
    stored: tuple[int, ...],
    precision: WeightPrecision,
    scale: str,
    scales: dict[str, tuple[int, ...]],
    global_scale: str | None = None,
) -> QuantizedMatrix:
    tensors = {name: stored, **scales}
    input_scale = _companion(folder, name, "input_scale", "activation_scale")
    if input_scale is not None:
        tensors[input_scale] = folder.tensors[input_scale].shape
        if tensors[input_scale] not in ((), (1,)):
            raise CheckpointError(f"{folder.path}: tensor {input_scale} is {list(tensors[input_scale])} instead of []")
    return QuantizedMatrix(precision, tensors, scale, global_scale, input_scale)


def _number(folder: CheckpointFolder, key: str) -> torch.Tensor:
    """Reads a tensor of one number, FP32 []."""
    number = folder.read(key).float().reshape(())
    _check_finite(folder, key, number)
    return number.clone()


def _check_finite(folder: CheckpointFolder, key: str, tensor: torch.Tensor) -> None:
    # E4M3 has no infinity, and two NaNs; its bytes are looked at as they are, of experts there are many.
    is_finite = torch.isfinite(tensor) if tensor.dtype != FP8 else (tensor.view(torch.uint8) & 0x7F) != 0x7F
    if not is_finite.all():
        raise CheckpointError(f"{folder.path}: tensor {key} holds NaN or infinity; download the checkpoint again")


def _check_above_zero(folder: CheckpointFolder, key: str, is_right: torch.Tensor) -> None:
    """Refuses scales that are negative, or 0 where the numbers that they scale are not."""
    if not is_right.all():
        raise CheckpointError(f"{folder.path}: tensor {key} holds scales of 0 or less; download the checkpoint again")


def _check_dtype(folder: CheckpointFolder, key: str, dtypes: tuple[str, ...]) -> None:
    dtype = folder.tensors[key].dtype
    if dtype not in dtypes:
        raise CheckpointError(f"{folder.path}: tensor {key} is {dtype} instead of {', '.join(dtypes)}")


def _companion(folder: CheckpointFolder, name: str, *suffixes: str) -> str | None:
    return next((found for suffix in suffixes if (found := _beside(name, suffix)) in folder.tensors), None)


def _beside(name: str, suffix: str) -> str:
    return name.removesuffix("_packed").removesuffix("weight") + suffix
