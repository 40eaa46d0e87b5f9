"""The precision of an engine's matrices, from the settings, the checkpoints and the GPU."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from trtllm_dflash.cost.gpus import capability, present_gpu
from trtllm_dflash.cost.memory import stored_there
from trtllm_dflash.engine.config import Backend
from trtllm_dflash.engine.dtypes import DTYPES
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models import pair_weights, target_weights
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import PREFIX, Drafter, DrafterConfig
from trtllm_dflash.models.weights import Precision, WeightPrecision, rounded_to_fp8
from trtllm_dflash.ops.formats import FP8_BLOCK, FP8_MULTIPLE, INT4_BLOCK

#: Formats of few bits, as flags name them, and the compute capability from which on GPUs multiply them.
Format: TypeAlias = Literal["fp8", "nvfp4"]
CAPABILITY: dict[str, int] = {"fp8": 89, "nvfp4": 100}

#: What `--precision` and `--drafter-precision` take besides; None: as the checkpoint is.
TargetPrecision: TypeAlias = Literal[Precision, Format, "auto"]
DrafterPrecision: TypeAlias = Literal[Format, "auto"]

_FORMATS = {
    WeightPrecision.FP8: "fp8",
    WeightPrecision.FP8_BLOCKS: "fp8",
    WeightPrecision.NVFP4: "nvfp4",
    WeightPrecision.INT4: "int4",
}


@dataclass(frozen=True)
class PrecisionChoice:
    """The chosen precision: the engine's own type, the changes to the models' configurations, and remarks."""

    engine: Precision
    target: dict[str, Any]
    drafter: dict[str, Any]
    said: str | None


_BF16 = 80  # the compute capability from which on TensorRT has it


@dataclass(frozen=True)
class _Place:
    """The backend and GPU that an engine is built for."""

    backend: Backend
    engine: Precision
    gpu: int | None  # compute capability; None: no GPU is named, and none present

    @property
    def has(self) -> list[str]:
        """Lists the precisions that it supports, the fewest bits first."""
        formats = [name for name, least in CAPABILITY.items() if self.gpu is None or self.gpu >= least]
        has_bf16 = self.backend == "torch" or self.gpu is None or self.gpu >= _BF16
        return [*reversed(formats), *(["bf16"] if has_bf16 else []), "fp16", "fp32"]

    def check(self, knob: str, wanted: str) -> None:
        if wanted not in self.has:
            raise SettingsError(f"{knob}: sm{self.gpu} has {', '.join(self.has)}, and no {wanted}")


def choose_precision(
    target: DecoderConfig,
    drafter: DrafterConfig | None,
    backend: Backend,
    precision: TargetPrecision | None,
    drafter_precision: DrafterPrecision | None,
    gpu: str | None,
    tp: int = 1,
) -> PrecisionChoice:
    """Choose the precision of an engine's parts; see the flags of `trtllm-dflash build`.

    Args:
        target, drafter: as their checkpoints have them.
        tp: ranks, whose parts of matrices decide on what is said.

    Raises:
        SettingsError: the GPU lacks a precision, or it cannot be made of the checkpoint; names what would do.
    """
    on_gpu = backend == "tensorrt" or gpu is not None or torch.cuda.is_available()
    engine: Precision = "bf16" if on_gpu else "fp32"
    if on_gpu and engine not in _Place(backend, engine, _capability(gpu)).has:
        engine = "fp16"
    if precision == "fp32" or precision == "bf16" or precision == "fp16":
        engine = precision
    place = _Place(backend, engine, _capability(gpu))
    place.check(f"--precision {engine}", engine)
    to_engine = precision == engine
    target_format = None if to_engine else _format(place, "--precision", precision, "target", target)
    changes = _changes(target, target_format, rounded_to_fp8(target_weights(target)))
    drafter_changes: dict[str, Any] = {}
    chosen = {"target": target_format}
    if drafter is not None:
        asked = "auto" if drafter_precision is None and precision == "auto" else drafter_precision
        chosen["drafter"] = _format(place, "--drafter-precision", asked, "drafter", drafter)
        whole = {"linear_precision": WeightPrecision.FP8, "plain_linears": ()}
        drafter_changes = _changes(drafter, chosen["drafter"], whole)
    is_auto = "auto" in (precision, drafter_precision)
    roles = ("target", target), ("drafter", drafter)
    notes = [_dequantized(place, role, model, tp) for role, model in roles if model]
    kept = [note for (_, chosen_format), note in zip(chosen.items(), notes, strict=True) if note and chosen_format]
    said = [_said(place, chosen)] if is_auto else []
    return PrecisionChoice(engine, changes, drafter_changes, "; ".join(said + kept) or None)


def _format(
    place: _Place, knob: str, asked: TargetPrecision | DrafterPrecision | None, role: str, model: DecoderConfig
) -> str | None:
    """Choose the format of a model's matrices; None: the engine's own type."""
    held = None if model.linear_precision is None else _FORMATS[model.linear_precision]
    if asked is None:
        # INT4 is multiplied by no GPU, and dequantized by all.
        if held in CAPABILITY and place.backend == "tensorrt" and held not in place.has:
            hint = "--precision bf16 dequantizes it" if role == "target" else "give the drafter that is not quantized"
            raise SettingsError(f"the {role}'s checkpoint is {held}, and sm{place.gpu} has {_list(place.has)}: {hint}")
        return held
    if asked == "auto":
        if held == "int4":  # no GPU multiplies it, and in any other type it has four times the bytes
            return held
        if place.gpu is None:
            return None
        best = held or "fp8"
        return best if best in place.has else None
    place.check(f"{knob} {asked}", asked)
    if asked == held or (asked == "fp8" and held is None):
        return asked
    if model.moe is not None and model.moe.mxfp4:
        raise SettingsError(f"{knob} {asked}: the {role}'s experts are in MXFP4, and stay so; fp8 rounds its attention")
    of = f"the {role}'s checkpoint is {held}" if held else f"the {role}'s checkpoint is not quantized"
    raise SettingsError(
        f"{knob} {asked}: {of}; make a calibrated {asked} checkpoint of the unquantized one: "
        f"trtllm-dflash quantize --format {asked}"
    )


def _changes(model: DecoderConfig, chosen: str | None, when_rounded: dict[str, Any]) -> dict[str, Any]:
    """Make the changes to a model's configuration: none, where its checkpoint is kept as it is."""
    if chosen is None:
        return {"linear_precision": None, "plain_linears": ()}
    if model.linear_precision is not None:
        return {}
    return when_rounded


def check_sides(target: DecoderConfig, drafter: DrafterConfig | None, tp: int) -> None:
    """Refuse ranks whose matrices cannot be multiplied in few bits, or would cut blocks that share a scale.

    Raises:
        SettingsError: names the matrix, and what would do.
    """
    for weight in pair_weights(target, drafter):
        shape = weight.shape(tp, 0)[-2:]  # of each, of a stack
        kind = weight.precision
        if kind in (WeightPrecision.FP8, WeightPrecision.NVFP4) and any(side % FP8_MULTIPLE for side in shape):
            sides = " by ".join(map(str, shape))
            raise SettingsError(
                f"{'--drafter-' if weight.name.startswith(PREFIX) else '--'}precision {kind.value}: {weight.name} of a "
                f"rank is {sides} with --tp {tp}, and {kind.name} needs multiples of {FP8_MULTIPLE}"
            )
        if kind is WeightPrecision.INT4 and shape[-1] % INT4_BLOCK:
            raise SettingsError(
                f"--tp {tp}: {weight.name} of a rank has {shape[-1]} columns, no whole number of the checkpoint's INT4 "
                f"blocks of {INT4_BLOCK}; use fewer ranks or --ep"
            )
        parts = weight.parts[: weight.parts_of_each]
        held = [part.held(tp, 0) for part in parts]
        joined = weight.parts_of_each > 1 or held[0] != weight.parts[0].sides
        ends = [side for sides in held for side in sides]
        ends += [row for part in parts if part.run is not None for row in (part.unit, *part.run)]
        if kind is WeightPrecision.FP8_BLOCKS and joined and any(end % FP8_BLOCK for end in ends):
            uncut = weight.stack is not None and not any(side % FP8_BLOCK for side in weight.parts[0].sides)
            hints = ["fewer ranks"] * (tp > 1) + ["--ep"] * (tp > 1 and uncut)
            hints += ["--precision bf16, which dequantizes it"] * (not weight.name.startswith(PREFIX))
            raise SettingsError(
                f"--tp {tp}: {weight.name} of a rank is no whole number of the checkpoint's FP8 blocks of {FP8_BLOCK}"
                + (f"; use {' or '.join(hints)}" if hints else "")
            )


def _dequantized(place: _Place, role: str, model: DecoderConfig, tp: int) -> str | None:
    """Say how this backend dequantizes a format that it does not multiply there; None for others."""
    kind = model.linear_precision
    if place.backend == "tensorrt" or kind is None:
        return None
    said = []
    every = Drafter(model).weights() if isinstance(model, DrafterConfig) else target_weights(model)
    weights = [weight for weight in every if weight.precision is kind]
    alone = [weight for weight in weights if weight.stack is None]
    there = place.backend, DTYPES[place.engine], place.gpu
    left = [weight for weight in alone if stored_there(weight, weight.shape(tp, 0), *there) is not kind]
    if left:
        share = "" if left == alone else "in part "
        said.append(f"{role}: {kind.value} is {share}dequantized to {place.engine} at load by --backend torch")
    if any(weight.stack is not None for weight in weights):
        said.append(
            f"{role}: experts stay in {kind.value}, and those that rows choose are dequantized each time, but by our "
            "kernels, on a GPU in BF16 and FP16"
        )
    return "; ".join(said) or None


def _said(place: _Place, chosen: dict[str, str | None]) -> str:
    parts = [f"{role} in {chosen_format or place.engine}" for role, chosen_format in chosen.items()]
    where = "there is no GPU" if place.gpu is None else f"sm{place.gpu} has {_list(place.has)}"
    said = f"precision auto: {', '.join(parts)} ({where})"
    if place.gpu is not None and "nvfp4" in place.has and "nvfp4" not in chosen.values():
        said += "; for nvfp4 make a checkpoint of it: trtllm-dflash quantize --format nvfp4"
    return said


def _capability(gpu: str | None) -> int | None:
    if gpu is not None:
        return capability(gpu)
    present = present_gpu()
    return None if present is None else present.capability


def _list(names: list[str]) -> str:
    return ", ".join(names)
