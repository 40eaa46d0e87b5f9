"""Random weights of an engine's shape: enough to time its steps, without a checkpoint."""

import math

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import DRAFT_TO_TARGET, Drafter
from trtllm_dflash.models.weights import Content, Weight, WeightPrecision
from trtllm_dflash.ops.formats import E8M0_ONE, FP8_BLOCK, INT4_BLOCK, INT4_PACKED
from trtllm_dflash.ops.fp8 import FP8, Fp8Weight, quantize_rows
from trtllm_dflash.ops.int4 import Int4Weight
from trtllm_dflash.ops.linear_weight import stored_tensors

#: Of random matrices, as models are initialised: activations stay far from what BF16 and FP16 hold.
_STD = 0.02


def random_weights(config: EngineConfig, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Makes every stored tensor of a rank on its device: random matrices, norms of 1, biases of 0."""
    weights = build_target(config.target).weights()
    generator = torch.Generator(device).manual_seed(rank)
    tensors = {}
    if config.drafter is not None:
        weights = weights + Drafter(config.drafter).weights()
        if config.drafter.draft_vocab_size is not None:
            tensors[DRAFT_TO_TARGET] = torch.arange(config.drafter.draft_vocab_size, dtype=torch.int32, device=device)
    for weight in weights:
        if weight.precision is WeightPrecision.BYTES:
            tensors[weight.name] = _random_bytes(weight, config, rank, generator)
            continue
        if weight.precision is WeightPrecision.INT4:
            tensors |= stored_tensors(weight.linear, _random_int4(weight, config, rank, generator))
            continue
        if weight.precision is WeightPrecision.FP8_BLOCKS:
            tensors |= stored_tensors(weight.linear, _random_fp8_blocks(weight, config, rank, generator))
            continue
        tensor = torch.empty(weight.shape(config.tp, rank), dtype=_dtype(weight, config), device=device)
        if tensor.ndim > 1:
            tensor.normal_(0, _STD, generator=generator)
        else:
            tensor.fill_(0 if weight.name.endswith("bias") else 1)
        if weight.precision is WeightPrecision.FP8:
            values, scale = quantize_rows(tensor)
            tensors |= stored_tensors(weight.linear, Fp8Weight(values, scale.flatten()))
        else:
            tensors[weight.name] = tensor
    return tensors


def _dtype(weight: Weight, config: EngineConfig) -> torch.dtype:
    return torch.float32 if weight.precision is WeightPrecision.FP32 else config.dtype


def _random_fp8_blocks(weight: Weight, config: EngineConfig, rank: int, generator: torch.Generator) -> Fp8Weight:
    """Numbers of about 1, all with the scale that makes them about as large as other matrices' numbers."""
    *stack, outputs, inputs = weight.shape(config.tp, rank)
    numbers = torch.empty(*stack, outputs, inputs, dtype=config.dtype, device=generator.device)
    sides = (-(-side // FP8_BLOCK) for side in (outputs, inputs))
    scale = torch.full((*stack, *sides), _STD, device=generator.device)
    return Fp8Weight(numbers.normal_(generator=generator).to(FP8), scale)


def _random_int4(weight: Weight, config: EngineConfig, rank: int, generator: torch.Generator) -> Int4Weight:
    """Whole numbers of about 5, all with the scale that makes them about as large as other matrices' numbers."""
    *stack, columns = weight.shape(config.tp, rank)
    shape, device, most = (*stack, columns // INT4_PACKED), generator.device, torch.iinfo(torch.int32)
    values = torch.randint(most.min, most.max, shape, generator=generator, dtype=torch.int32, device=device)
    scale = torch.full((*stack, columns // INT4_BLOCK), _STD / 5, dtype=torch.bfloat16, device=device)
    return Int4Weight(values, scale)


def _random_bytes(weight: Weight, config: EngineConfig, rank: int, generator: torch.Generator) -> torch.Tensor:
    """MXFP4 bytes: numbers of about 3, all with the scale that makes them about as large as other matrices' numbers."""
    shape, device = weight.shape(config.tp, rank), generator.device
    if weight.parts[0].content is Content.E8M0:
        return torch.full(shape, E8M0_ONE + round(math.log2(_STD / 3)), dtype=torch.uint8, device=device)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device=device)
