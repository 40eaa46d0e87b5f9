"""A target's quantized checkpoint: Hugging Face's model, calibrated and exported by ModelOpt."""

import importlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from trtllm_dflash.errors import CheckpointError, first_line, one_line
from trtllm_dflash.models.qwen3_moe import Qwen3Moe
from trtllm_dflash.quantize.modelopt import load_modelopt, quiet, recipe
from trtllm_dflash.quantize.text import Sample
from trtllm_dflash.text.tokenizer import TOKENIZER_FILES


def quantize_target(
    source: Path,
    output: Path,
    format: str,
    kv: str | None,
    samples: list[Sample],
    device: torch.device,
    progress: Callable[[int, int], None],
) -> dict[str, list[int]]:
    """Writes ModelOpt's unified export of the target in `source` to the folder `output`.

    Of a mixture, returns the experts that no token of the samples chose, by the name of their router. ModelOpt scales
    every expert's weights by their own largest numbers, and what goes into any expert of a layer by the largest that
    went into those that were chosen.

    Raises:
        CheckpointError: transformers cannot load it, or ModelOpt cannot quantize it.
    """
    modelopt = load_modelopt()
    export = importlib.import_module("modelopt.torch.export").export_hf_checkpoint
    model = _load(source, device)

    chosen: dict[str, torch.Tensor] = {}

    def calibrate(model: Any) -> None:
        with _counting(model, chosen):
            for done, sample in enumerate(samples, start=1):
                model(torch.tensor([sample.token_ids], device=device))
                progress(done, len(samples))

    try:
        with quiet(), torch.inference_mode():
            modelopt.quantize(model, recipe(modelopt, format, kv), forward_loop=calibrate)
            export(model, export_dir=output)
    except (OSError, SafetensorError):  # of the output
        raise
    except Exception as error:  # the library raises whatever comes of a model that it does not know
        raise CheckpointError(f"{source}: ModelOpt cannot quantize it to {format}: {one_line(error)}") from error
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)
    without = {name: torch.where(counts == 0)[0].tolist() for name, counts in chosen.items()}
    return {name: experts for name, experts in without.items() if experts}


@contextmanager
def _counting(model: Any, chosen: dict[str, torch.Tensor]) -> Iterator[None]:
    """Counts, while it lasts, how many tokens chose each expert: [experts], by the name of their router."""

    def count(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(router: Any, x: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output  # [tokens, experts]
            ids = logits.topk(model.config.num_experts_per_tok).indices.flatten()
            chosen[name] = chosen.get(name, 0) + torch.bincount(ids, minlength=logits.shape[-1]).cpu()

        return hook

    routers = [(name, module) for name, module in model.named_modules() if name.endswith(Qwen3Moe.router)]
    hooks = [router.register_forward_hook(count(name)) for name, router in routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _load(source: Path, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
    except Exception as error:  # the library raises whatever its parsers raise
        raise CheckpointError(f"{source}: transformers cannot load it: {first_line(error)}") from error
    if model.config.architectures is None:  # an image model's text model alone; ModelOpt looks there
        model.config.architectures = [type(model).__name__]
    return model.to(device).eval()
