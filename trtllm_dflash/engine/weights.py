"""A rank's tensors: read and fused from the checkpoints, and completed with what need not be stored."""

from collections.abc import Callable

import torch

from trtllm_dflash.checkpoint.pair import Pair
from trtllm_dflash.checkpoint.slicing import read_weight
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import PREFIX, Drafter
from trtllm_dflash.models.rope import rope_tables


def read_rank_weights(
    pair: Pair, tp: int, rank: int, dtype: torch.dtype, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, torch.Tensor]:
    """Every stored engine tensor of a rank, by its engine name. `progress` is told how many are read, of how many."""
    target = build_target(pair.target_config).weights()
    drafter = Drafter(pair.drafter.config).weights() if pair.drafter is not None else []
    total = len(target) + len(drafter)
    tensors = {}
    for weight in target:
        tensors[weight.name] = read_weight(pair.target_folder, weight, tp, rank, dtype)
        progress(len(tensors), total)
    if pair.drafter is not None:
        for weight in drafter:
            tensors[weight.name] = read_weight(pair.drafter.folder, weight, tp, rank, dtype, pair.drafter.keys)
            progress(len(tensors), total)
        tensors[PREFIX + "draft_to_target"] = pair.drafter.draft_to_target
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def complete_weights(weights: dict[str, torch.Tensor], config: EngineConfig, rank: int) -> dict[str, torch.Tensor]:
    """Adds the RoPE tables and, where the head is tied, this rank's view of the embedding."""
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
    return complete
