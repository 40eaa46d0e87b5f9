"""Torch's types of an engine's precisions."""

import torch

from trtllm_dflash.models.weights import Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
