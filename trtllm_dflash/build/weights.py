"""A rank's tensors, read and fused from the checkpoints."""

from collections.abc import Callable

import torch

from trtllm_dflash.checkpoint.pair import Pair
from trtllm_dflash.checkpoint.quantized import read_cache_scales
from trtllm_dflash.checkpoint.slicing import RankReader
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import DRAFT_TO_TARGET, HEAD, PREFIX, Drafter
from trtllm_dflash.models.weights import Weight, WeightPrecision
from trtllm_dflash.ops.fp8 import Fp8Weight, quantize_rows
from trtllm_dflash.ops.linear_weight import stored_tensors


def read_rank_weights(
    pair: Pair, tp: int, rank: int, dtype: torch.dtype, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, torch.Tensor]:
    """Reads every stored engine tensor of a rank, by its engine name. `progress` gets the number read and the total."""
    target = build_target(pair.target_config).weights()
    drafter = Drafter(pair.drafter.config).weights() if pair.drafter is not None else []
    total = len(target) + len(drafter)
    tensors: dict[str, torch.Tensor] = {}
    reader = pair.target_reader(tp, rank)
    for done, weight in enumerate(target, start=1):
        tensors |= _read(reader, weight, dtype)
        progress(done, total)
    if pair.drafter is not None:
        checkpoint = pair.drafter
        reader = checkpoint.reader(tp, rank)
        for done, weight in enumerate(drafter, start=len(target) + 1):
            if weight.name == HEAD and checkpoint.borrows_head:
                tensors |= _stored(weight, _borrowed_head(pair, weight, tp, rank), dtype)
            else:
                tensors |= _read(reader, weight, dtype)
            progress(done, total)
        if checkpoint.draft_to_target is not None:
            tensors[DRAFT_TO_TARGET] = checkpoint.draft_to_target
    return tensors


def read_engine_tensors(
    pair: Pair,
    config: EngineConfig,
    rank: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, torch.Tensor]:
    """Reads all tensors of a rank of the torch backend: its weights, and the scales of FP8 caches.

    Args:
        pair: as the engine's configuration has it: see `planning.as_planned`.
    """
    tensors = read_rank_weights(pair, config.tp, rank, config.dtype, progress)
    return tensors | cache_scales(pair) if config.kv == "fp8" else tensors


def cache_scales(pair: Pair) -> dict[str, torch.Tensor]:
    """Reads the FP32 scale [] of each FP8 cache that a checkpoint has, as `CACHE.scale`; the same on every rank."""
    scales = read_cache_scales(pair.target_folder, "model.layers.", pair.target_config.layers, pair.keys)
    if pair.drafter is not None:
        layers = "layers.", pair.drafter.config.layers
        found = read_cache_scales(pair.drafter.folder, *layers, pair.drafter.keys)
        scales |= {PREFIX + name: scale for name, scale in found.items()}
    return {name + ".scale": scale for name, scale in scales.items()}


def _read(reader: RankReader, weight: Weight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Reads the tensors that an engine stores of a weight: as the checkpoint has it, dequantized, or rounded to FP8."""
    if reader.is_quantized(weight):
        if weight.precision is WeightPrecision.ENGINE:
            return {weight.name: reader.read_dequantized(weight).to(dtype)}
        return stored_tensors(weight.linear, reader.read_quantized(weight))
    wide = weight.precision in (WeightPrecision.FP8, WeightPrecision.FP32)
    tensor = reader.read(weight, torch.float32 if wide else dtype)
    return {} if tensor is None else _stored(weight, tensor, dtype)


def _stored(weight: Weight, tensor: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if weight.precision in (WeightPrecision.BYTES, WeightPrecision.FP32):
        return {weight.name: tensor}
    if weight.precision is not WeightPrecision.FP8:
        return {weight.name: tensor.to(dtype)}
    values, scale = quantize_rows(tensor.float())
    return stored_tensors(weight.linear, Fp8Weight(values, scale.flatten()))


def _borrowed_head(pair: Pair, weight: Weight, tp: int, rank: int) -> torch.Tensor:
    assert pair.drafter is not None and pair.drafter.draft_to_target is not None
    first, last = weight.parts[0].bounds(tp, rank)
    tied = pair.target_config.tied_embeddings
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    head = pair.target_folder.read(pair.keys.get(name, name))
    return head[pair.drafter.draft_to_target[first:last]]
