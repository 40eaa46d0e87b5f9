"""A drafter's quantized checkpoint: calibrated on the target's own hidden states, exported as ModelOpt exports."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from trtllm_dflash.checkpoint.drafter import DrafterCheckpoint
from trtllm_dflash.checkpoint.quantized import MODELOPT_FILE
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.llm import LLM
from trtllm_dflash.models import build_target
from trtllm_dflash.models.decoder import Features
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.ops.delta_states import DeltaStates, Run
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.quantize.modelopt import load_modelopt, quiet, recipe
from trtllm_dflash.quantize.text import Sample
from trtllm_dflash.session.torch_session import TorchSession

Tensor = torch.Tensor
OpsKind = TypeVar("OpsKind", bound=TorchOps)

#: Blocks that are drafted in each sample.
_BLOCKS = 4
#: What is multiplied as one: ModelOpt gives each such group one scale of its inputs, and in NVFP4 of its weights.
_GROUPS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


class DrafterLinears(nn.Module):
    """A drafter's matrices as modules, which ModelOpt can quantize, under their names in its checkpoint."""

    def __init__(self, checkpoint: DrafterCheckpoint, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.parts: dict[str, list[str]] = {}  # the engine's linear -> the modules whose outputs are joined in it
        for weight in Drafter(checkpoint.config).weights():
            if not weight.is_matrix:
                continue
            self.parts[weight.linear] = [checkpoint.keys[part.key].removesuffix(".weight") for part in weight.parts]
            for name in self.parts[weight.linear]:
                self._add(name, checkpoint.folder.read(name + ".weight").to(device, dtype))

    def _add(self, name: str, values: Tensor) -> None:
        *path, last = name.split(".")
        parent: nn.Module = self
        for step in path:
            if step not in parent._modules:
                parent.add_module(step, nn.Module())
            parent = parent.get_submodule(step)
        linear = nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(values, requires_grad=False)
        parent.add_module(last, linear)

    def product(self, name: str, x: Tensor) -> Tensor:
        """Computes the engine's linear `name` of x, without its bias."""
        return torch.cat([self.get_submodule(part)(x) for part in self.parts[name]], dim=-1)


class ModuleOps(TorchOps):
    """TorchOps that multiplies by the modules of a drafter's matrices."""

    matrices: DrafterLinears

    def linear(self, name: str, x: Tensor) -> Tensor:
        if name not in self.matrices.parts:
            return super().linear(name, x)
        y, bias = self.matrices.product(name, x), self.weights.get(name + ".bias")
        return y if bias is None else y + bias


def quantize_drafter(
    checkpoint: DrafterCheckpoint,
    output: Path,
    format: str,
    samples: list[Sample],
    llm: LLM,
    progress: Callable[[int, int], None],
) -> None:
    """Writes the drafter's quantized checkpoint to the folder `output`: its other tensors are copied bit for bit.

    Args:
        llm: the target that it will draft for, with this drafter unquantized.

    Raises:
        CheckpointError: ModelOpt cannot quantize it.
    """
    modelopt = load_modelopt()
    linears = DrafterLinears(checkpoint, llm.config.dtype, llm.session.device)

    def calibrate(linears: Any) -> None:
        ops = ops_over(llm, ModuleOps)
        ops.matrices = linears
        for done, sample in enumerate(samples, start=1):
            for _ in draft_blocks(ops, llm, sample):
                pass
            progress(done, len(samples))

    try:
        with quiet(), torch.inference_mode():
            modelopt.quantize(linears, recipe(modelopt, format, None), forward_loop=calibrate)
            tensors, summary = _export(linears)
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(f"{checkpoint.folder.path}: ModelOpt cannot quantize it to {format}: {error}") from error
    for name in checkpoint.folder.tensors:
        if name not in tensors:
            tensors[name] = checkpoint.folder.read(name)
    output.mkdir(parents=True)
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, output / "model.safetensors")
    convert = importlib.import_module("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    config = json.loads((checkpoint.folder.path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = convert(summary)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (output / MODELOPT_FILE).write_text(json.dumps(summary, indent=4) + "\n", encoding="utf-8")


def ops_over(llm: LLM, kind: type[OpsKind]) -> OpsKind:
    """Makes operations of that kind over an engine's weights and what it keeps of its first slot."""
    session = llm.session
    assert isinstance(session, TorchSession), "loaded from checkpoints"
    states = session.states if isinstance(session.states, DeltaStates) else None
    return kind(session.weights, {name: cache[:1] for name, cache in session.caches.items()}, states=states)


def target_features(ops: TorchOps, llm: LLM, ids: Tensor, taps: tuple[int, ...]) -> Features[Tensor]:
    """Runs an engine's target over a whole text, ids [1, N], in its first slot."""
    ops.runs = [Run(slot=0, start=0, count=ids.shape[1], entry=0, first=0)]  # it begins with no state
    start = torch.zeros(1, dtype=torch.int32, device=ids.device)
    return build_target(llm.config.target).forward(ops, ids, start, taps)


def draft_blocks(ops: TorchOps, llm: LLM, sample: Sample) -> Iterator[Tensor]:
    """Runs the target over a sample and the drafter after several of its tokens; yields each block's drafts."""
    config = llm.config.drafter
    assert config is not None
    drafter, device = Drafter(config), llm.session.device
    ids = torch.tensor([sample.token_ids], dtype=torch.int32, device=device)
    start = torch.zeros(1, dtype=torch.int32, device=device)
    features = target_features(ops, llm, ids, config.tap_layers)
    context = drafter.context(ops, ops.concat(features.taps), start)
    block = torch.arange(llm.config.block_size, dtype=torch.int32, device=device)[None]
    last = ids.shape[1] - 1
    for committed in sorted({max(1, last * (i + 1) // _BLOCKS) for i in range(_BLOCKS)}):
        count = torch.full((1,), committed, dtype=torch.int32, device=device)
        yield drafter.draft(ops, context, start, count, ids[:, committed], block)


def _export(linears: DrafterLinears) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Exports the tensors of all quantized matrices, and ModelOpt's summary of the quantization."""
    tools = importlib.import_module("modelopt.torch.export.quant_utils")
    quantized = {
        name: module
        for name, module in linears.named_modules()
        if hasattr(module, "weight_quantizer") and module.weight_quantizer.is_enabled
    }
    for name in quantized:
        for first, *others in _GROUPS:
            if name.endswith(first):
                prefix = name.removesuffix(first)
                tools.preprocess_linear_fusion([quantized[prefix + part] for part in (first, *others)])
    tensors = {}
    for name, module in quantized.items():
        scale = tools.get_weight_scaling_factor(module)
        global_scale = tools.get_weight_scaling_factor_2(module)
        kind, block = tools.get_quantization_format(module), tools.get_weight_block_size(module)
        tensors[name + ".weight"] = tools.to_quantized_weight(
            module.weight.data.clone(), scale, kind, global_scale, block
        )
        tensors[name + ".weight_scale"] = scale if kind == "nvfp4" else scale.squeeze()
        tensors[name + ".input_scale"] = tools.get_activation_scaling_factor(module).squeeze()
        if global_scale is not None:
            tensors[name + ".weight_scale_2"] = global_scale.squeeze()
    return tensors, tools.get_quant_config(linears)
