"""Compiles a rank's step into a TensorRT plan: settings, progress, the log, and refusals in our own words."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from trtllm_dflash.build.tensorrt_network import StepNetwork, build_network
from trtllm_dflash.cost.gpus import capability, present_gpu
from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.models.weights import units_per_rank
from trtllm_dflash.ops.tensorrt_attention import MOST_FUSED
from trtllm_dflash.ops.tensorrt_delta_net import STATE_LENGTH
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt
from trtllm_dflash.ops.transcoded import Transcoded
from trtllm_dflash.signals import holding_signals

MIB = 1 << 20


class CompileSettings(BaseModel):
    """Settings of TensorRT's compiler; each field is a flag of `build`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str | None = None  # sm89, or a GPU's name; None: the GPU present
    optimization_level: int = Field(default=3, ge=0, le=5)
    workspace: PositiveInt | None = None  # MiB of scratch that a kernel may take; None: all there is
    timing_cache: Path | None = None  # read if it exists, and written; TensorRT-RTX times nothing and has none
    log: Path | None = None  # the builder's whole log


@dataclass(frozen=True)
class Plan:
    """A rank's compiled plan."""

    data: memoryview  # in TensorRT's own memory
    layers: int  # of the network, before the compiler fused them
    weights: int  # tensors
    transcoded: Transcoded  # what became of MXFP4 blocks that were made NVFP4


def compile_rank(
    config: EngineConfig,
    weights: Mapping[str, torch.Tensor],
    rank: int,
    settings: CompileSettings,
    progress: Progress = lambda *_: None,
) -> Plan:
    """Compiles a rank's step.

    Args:
        weights: the rank's tensors with RoPE tables (`complete_weights`), on CPU.

    Raises:
        SettingsError: TensorRT does not compile for that GPU.
        EngineError: TensorRT refused the network.
        KeyboardInterrupt: the compilation was cancelled.
    """
    trt = load_tensorrt()
    target = compile_target(trt, settings.gpu)
    with _logger(trt, settings.log) as logger:
        builder = trt.Builder(logger)
        step = build_network(builder, config, weights, rank, _capability(target))
        options = _options(trt, builder, step, settings, target)
        cache = None if hasattr(trt, "ComputeCapability") else settings.timing_cache
        if cache is not None:
            load_timing_cache(options, cache)
        monitor = _monitor(trt, f"rank {rank}" if config.tp > 1 else "engine", progress)
        options.progress_monitor = monitor
        # They cancel at TensorRT's next step, and no exception passes through it.
        with holding_signals(partial(setattr, monitor, "is_cancelled", True)):
            plan = builder.build_serialized_network(step.network, options)
        if monitor.is_cancelled:
            raise KeyboardInterrupt
        if plan is None:
            raise EngineError(_refusal(config, step, logger.errors))
        if cache is not None:
            save_timing_cache(options, cache)
    return Plan(memoryview(plan), step.network.num_layers, step.weight_count, step.transcoded)


def compile_target(trt: Any, gpu: str | None) -> str | None:
    """Chooses the compute capability to compile for, such as `SM89`; None where TensorRT takes the GPU present.

    Raises:
        SettingsError: this TensorRT does not compile for that GPU; names `--gpu`.
    """
    wanted = f"SM{capability(gpu)}" if gpu is not None else None
    if hasattr(trt, "ComputeCapability"):
        offered = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
        known = ", ".join(sorted((name.lower() for name in offered), key=lambda name: int(name[2:])))
        if wanted is None:
            raise SettingsError(f"--gpu is not given: TensorRT-RTX compiles for {known}")
        if wanted not in offered:
            raise SettingsError(
                f"--gpu {gpu}: TensorRT-RTX compiles for {known}; for {wanted.lower()} install tensorrt beside that GPU"
            )
        return wanted
    present = present_gpu()
    if present is None:
        raise SettingsError("TensorRT compiles for the GPU present, and there is none: build where the engine will run")
    if gpu is not None and capability(gpu) != present.capability:
        raise SettingsError(f"--gpu {gpu}: TensorRT compiles for the GPU present, which is sm{present.capability}")
    return None


def _capability(target: str | None) -> int:
    """Parses the compute capability to compile for: 120 for `SM120`; None: that of the GPU present."""
    if target is not None:
        return int(target.removeprefix("SM"))
    present = present_gpu()
    assert present is not None  # `compile_target` looked
    return present.capability


def _options(trt: Any, builder: Any, step: StepNetwork, settings: CompileSettings, target: str | None) -> Any:
    options = builder.create_builder_config()
    options.builder_optimization_level = settings.optimization_level
    if settings.workspace is not None:
        options.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace * MIB)
    if STATE_LENGTH in step.io.inputs:
        options.clear_flag(trt.BuilderFlag.TF32)  # states are sums of products in FP32, over thousands of rows
    if target is not None:
        options.num_compute_capabilities = 1
        options.set_compute_capability(getattr(trt.ComputeCapability, target), 0)
    for ranges in step.profiles:
        profile = builder.create_optimization_profile()
        for name, shapes in ranges.items():
            profile.set_shape(name, shapes.least, shapes.usual, shapes.largest)
        options.add_optimization_profile(profile)
    return options


def load_timing_cache(options: Any, path: Path) -> None:
    """Gives the builder an earlier build's measurements, or an empty cache to fill."""
    known = path.read_bytes() if path.is_file() else b""
    options.set_timing_cache(options.create_timing_cache(known), ignore_mismatch=False)


def save_timing_cache(options: Any, path: Path) -> None:
    """Keeps this build's measurements; a reader sees the old file or the new one, never half of one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    aside.write_bytes(memoryview(options.get_timing_cache().serialize()))
    aside.replace(path)


# -- what TensorRT calls back ------------------------------------------------------------------------------------------


@contextmanager
def _logger(trt: Any, path: Path | None) -> Iterator[Any]:
    """Makes an ILogger that writes to a file, if one is given, and keeps the errors."""

    class Logger(trt.ILogger):
        def __init__(self, file: TextIO | None) -> None:
            super().__init__()
            self.file = file
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)
            if self.file is not None and severity != trt.ILogger.Severity.VERBOSE:
                self.file.write(f"{severity.name}: {message}\n")

    if path is None:
        yield Logger(None)
        return
    with path.open("a") as file:
        yield Logger(file)


def _monitor(trt: Any, what: str, progress: Progress) -> Any:
    """Makes an IProgressMonitor that reports the outermost phase and can be cancelled."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            super().__init__()
            self.is_cancelled = False
            self.lock = threading.Lock()  # TensorRT calls from several threads
            self.outermost: tuple[str, int] | None = None

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            with self.lock:
                if parent is None:
                    self.outermost = (name, steps)
                    progress(what, 0, steps)

        def step_complete(self, name: str, step: int) -> bool:
            with self.lock:
                if self.outermost is not None and name == self.outermost[0]:
                    progress(what, min(step + 1, self.outermost[1]), self.outermost[1])
            return not self.is_cancelled

        def phase_finish(self, name: str) -> None:
            with self.lock:
                if self.outermost is not None and name == self.outermost[0]:
                    progress(what, self.outermost[1], self.outermost[1])

    return Monitor()


# -- refusals ----------------------------------------------------------------------------------------------------------


_MOST_SAID = 1000  # characters of TensorRT's words; its log goes with the engine that is not made


def _refusal(config: EngineConfig, step: StepNetwork, errors: list[str]) -> str:
    """Writes one line: where, why and which knob, then TensorRT's own words."""
    # The last error is the cause; without a GPU the first only says that there is none.
    said = " ".join(errors[-1].split()) if errors else "no reason given"
    names = [step.network.get_layer(i).name for i in range(step.network.num_layers)]
    layer = max((name for name in names if any(name in error for error in errors)), key=len, default=None)
    where = f" at {layer}" if layer else ""
    return f"TensorRT refused the step{where}: {_knob(config, said)}; it says: {said[:_MOST_SAID]}"


def _knob(config: EngineConfig, said: str) -> str:
    if "ttention" in said and "dedicated kernel" in said:
        if config.precision == "fp32":
            return "there is no fused attention in FP32, use --precision bf16 or fp16"
        models = [config.target] if config.drafter is None else [config.target, config.drafter]
        heads = min(units_per_rank(model.heads, config.tp) for model in models)
        if heads == 1:
            return f"there is no fused attention for one query head a rank, use --tp below {config.tp}"
        sizes = " and ".join(map(str, (size for size in config.head_sizes if size <= MOST_FUSED)))
        return f"there is no fused attention for head size {sizes} on this GPU, use another --gpu or --precision"
    if "memory" in said.lower() or "workspace" in said.lower():
        return "a kernel needs more scratch, raise --workspace"
    return "try another --optimization-level or --gpu"
