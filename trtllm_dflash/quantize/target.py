"""A target's quantized checkpoint: Hugging Face's model, calibrated and exported by ModelOpt."""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.quantize.modelopt import load_modelopt, quiet, recipe
from trtllm_dflash.quantize.text import Sample
from trtllm_dflash.tokenizer import TOKENIZER_FILES


def quantize_target(
    source: Path,
    output: Path,
    format: str,
    kv: str | None,
    samples: list[Sample],
    device: torch.device,
    progress: Callable[[int, int], None],
) -> None:
    """Writes ModelOpt's unified export of the target in `source` to the folder `output`.

    Raises:
        CheckpointError: transformers cannot load it, or ModelOpt cannot quantize it.
    """
    modelopt = load_modelopt()
    export = importlib.import_module("modelopt.torch.export").export_hf_checkpoint
    model = _load(source, device)

    def calibrate(model: Any) -> None:
        for done, sample in enumerate(samples, start=1):
            model(torch.tensor([sample.token_ids], device=device))
            progress(done, len(samples))

    try:
        with quiet(), torch.inference_mode():
            modelopt.quantize(model, recipe(modelopt, format, kv), forward_loop=calibrate)
            export(model, export_dir=output)
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(f"{source}: ModelOpt cannot quantize it to {format}: {error}") from error
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)


def _load(source: Path, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
    except Exception as error:  # the library raises whatever its parsers raise
        raise CheckpointError(f"{source}: transformers cannot load it: {str(error).splitlines()[0]}") from error
    return model.to(device).eval()
