"""A rank's tensors: read and fused from the checkpoints, and completed with what need not be stored."""

from collections.abc import Callable

import torch

from trtllm_dflash.checkpoint.pair import Pair
from trtllm_dflash.checkpoint.slicing import read_weight
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import DRAFT_TO_TARGET, HEAD, PREFIX, Drafter
from trtllm_dflash.models.rope import rope_tables
from trtllm_dflash.models.weights import Weight, WeightPrecision
from trtllm_dflash.ops.fp8 import FP8, dequantize_rows, multiplies_fp8, quantize_rows


def read_rank_weights(
    pair: Pair, tp: int, rank: int, dtype: torch.dtype, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, torch.Tensor]:
    """Every stored engine tensor of a rank, by its engine name. `progress` is told how many are read, of how many."""
    target = build_target(pair.target_config).weights()
    drafter = Drafter(pair.drafter.config).weights() if pair.drafter is not None else []
    total = len(target) + len(drafter)
    tensors: dict[str, torch.Tensor | None] = {}
    for done, weight in enumerate(target, start=1):
        tensors[weight.name] = read_weight(pair.target_folder, weight, tp, rank, dtype)
        progress(done, total)
    if pair.drafter is not None:
        for done, weight in enumerate(drafter, start=len(target) + 1):
            is_fp8 = weight.precision is WeightPrecision.FP8
            tensor = _read_drafter_weight(pair, weight, tp, rank, torch.float32 if is_fp8 else dtype)
            if tensor is not None and is_fp8:
                tensor, scale = quantize_rows(tensor)
                tensors[weight.scale_name] = scale.flatten()
            tensors[weight.name] = tensor
            progress(done, total)
        tensors[DRAFT_TO_TARGET] = pair.drafter.draft_to_target
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _read_drafter_weight(pair: Pair, weight: Weight, tp: int, rank: int, dtype: torch.dtype) -> torch.Tensor | None:
    drafter = pair.drafter
    assert drafter is not None
    if weight.name != HEAD or not drafter.borrows_head:
        return read_weight(drafter.folder, weight, tp, rank, dtype, drafter.keys)
    assert drafter.draft_to_target is not None
    first, last = weight.parts[0].bounds(tp, rank)
    tied = pair.target_config.tied_embeddings
    head = pair.target_folder.read("model.embed_tokens.weight" if tied else "lm_head.weight")
    return head[drafter.draft_to_target[first:last]].to(dtype)


def complete_weights(weights: dict[str, torch.Tensor], config: EngineConfig, rank: int) -> dict[str, torch.Tensor]:
    """Adds the RoPE tables and, where the head is tied, this rank's view of the embedding.

    Where the device does not multiply FP8 (no CPU does), what is stored as FP8 becomes the same numbers in the engine's
    own type.
    """
    complete = dict(weights)
    target = config.target
    if target.tied_embeddings:
        size = target.vocab_size // config.tp
        complete["lm_head.weight"] = weights["model.embed_tokens.weight"][rank * size : (rank + 1) * size]
    device = weights["model.embed_tokens.weight"].device
    models = {"rope": target} if config.drafter is None else {"rope": target, PREFIX + "rope": config.drafter}
    for name, model in models.items():
        cos, sin = rope_tables(model.rope, model.head_size, config.cache_length)
        complete[name + ".cos"] = cos.to(device, config.dtype)
        complete[name + ".sin"] = sin.to(device, config.dtype)
    if not multiplies_fp8(device):
        for name, tensor in weights.items():
            if tensor.dtype == FP8:
                scale = complete.pop(name.removesuffix(".weight") + ".scale")
                complete[name] = dequantize_rows(tensor, scale).to(config.dtype)
    return complete
