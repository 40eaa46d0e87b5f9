"""A rank's stored tensors on its device, completed with those that need not be stored."""

from collections.abc import Iterable

import torch

from trtllm_dflash.cost.memory import cache_shapes
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models.drafter import PREFIX
from trtllm_dflash.models.rope_tables import rope_tables
from trtllm_dflash.ops.cpu_products import packed, why_inexact
from trtllm_dflash.ops.cuda_experts import is_joined
from trtllm_dflash.ops.fp8 import Fp8Weight, multiplies
from trtllm_dflash.ops.linear_weight import joined_name, linear_weight, stored_tensors

#: Rows of a matrix that our kernels multiply by at a time.
_ROWS = 16


def complete_weights(weights: dict[str, torch.Tensor], config: EngineConfig, rank: int) -> dict[str, torch.Tensor]:
    """Adds RoPE tables, this rank's view of a tied embedding, and a scale of 1 for FP8 caches that were given none."""
    complete = dict(weights)
    target = config.target
    if target.tied_embeddings:
        size = target.vocab_size // config.tp
        complete["lm_head.weight"] = weights["model.embed_tokens.weight"][rank * size : (rank + 1) * size]
    device = weights["model.embed_tokens.weight"].device
    models = {"": target} if config.drafter is None else {"": target, PREFIX: config.drafter}
    for prefix, model in models.items():
        for name, (rope, size) in model.ropes.items():
            for table, values in zip(("cos", "sin"), rope_tables(rope, size, config.cache_length), strict=True):
                complete[f"{prefix}{name}.{table}"] = values.to(device, config.dtype)
    if config.kv == "fp8":
        for name in cache_shapes(config):
            complete.setdefault(name + ".scale", torch.ones((), device=device))
    return complete


def packed_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Lays the matrices of linears out as the CPU multiplies by them; see `cpu_products`."""
    return weights | {name: packed(weights[name]) for name in _matrices(weights)}


def why_rows_differ(weights: dict[str, torch.Tensor]) -> str | None:
    """Says why a row's bits depend on the rows beside it on the CPU; None: they do not."""
    products = ((weights[name], weights.get(name.removesuffix("weight") + "bias")) for name in _matrices(weights))
    return next(filter(None, (why_inexact(weight, bias) for weight, bias in products)), None)


def _matrices(weights: dict[str, torch.Tensor]) -> list[str]:
    """Names the matrices that rows are multiplied by."""
    names = [name for name, tensor in weights.items() if name.endswith(".weight") and tensor.ndim == 2]
    return [name for name in names if name != "model.embed_tokens.weight"]


def join_weights(weights: dict[str, torch.Tensor], joins: Iterable[tuple[str, ...]]) -> None:
    """Joins the matrices of linears of one input, in place: they become parts of one, named by `joined_name`.

    Args:
        joins: the linears' names. What is quantized stays as it is. Zeros make a whole number of kernels' rows.
    """
    for names in joins:
        rows = [len(weights[name + ".weight"]) for name in names]
        types = {weights[name + ".weight"].dtype for name in names}
        if not types <= {torch.bfloat16, torch.float16} or len(types) > 1:
            continue
        parts = [weights[name + ".weight"] for name in names]
        zeros = parts[0].new_zeros(-sum(rows) % _ROWS, parts[0].shape[1])
        whole = torch.cat([*parts, zeros])
        weights |= {name + ".weight": part for name, part in zip(names, whole[: sum(rows)].split(rows), strict=True)}
        weights[joined_name(names) + ".weight"] = whole


def add_norms_less_one(weights: dict[str, torch.Tensor]) -> None:
    """Adds `NORM.less_one`, in BF16, of norms in FP32 that are one more than such numbers: products add the one."""
    for name, weight in list(weights.items()):
        if name.endswith("norm.weight") and weight.dtype == torch.float32:
            less = (weight - 1).bfloat16()
            if (less.float() + 1).equal(weight):
                weights[name.removesuffix("weight") + "less_one"] = less


def multiplied_weights(
    weights: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device, exact: bool = False
) -> dict[str, torch.Tensor]:
    """Moves weights to a device, and dequantizes matrices that it does not multiply as they are stored to `dtype`.

    One after the other, so that no more than one of them is in memory twice. Experts stay as they are, the shared one
    too where it is one of a stack: those that rows choose are dequantized then.

    Args:
        exact: all of the target's are dequantized: products of few rows and of many add up quantized ones otherwise.
    """
    moved: dict[str, torch.Tensor] = {}
    scales: set[str] = set()
    for name, tensor in weights.items():
        linear = name.removesuffix(".weight")
        weight = tensor if linear == name else linear_weight(weights, linear)
        if isinstance(weight, torch.Tensor):
            moved[name] = tensor.to(device)
            continue
        parts = {key: part.to(device) for key, part in stored_tensors(linear, weight).items()}
        is_exact = exact and not name.startswith(PREFIX)
        is_expert = weight.values.ndim == 3 or is_joined(weights, linear)
        multiplied = isinstance(weight, Fp8Weight) and multiplies(device, weight, dtype)
        if is_expert or (multiplied and not is_exact):
            moved |= parts
            continue
        there = linear_weight(parts, linear)
        assert not isinstance(there, torch.Tensor)
        moved[name] = there.dequantize().to(dtype)
        scales |= parts.keys() - {name}
    return {name: tensor for name, tensor in moved.items() if name not in scales}
