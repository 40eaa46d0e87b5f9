"""Operations that some families alone need, computed by torch: norms of MiniMax, GELU of Gemma."""

from abc import ABC
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from trtllm_dflash.ops.activations import gelu, tanh
from trtllm_dflash.ops.base import AttentionLayer, Ops
from trtllm_dflash.ops.cpu_norm import normed

Tensor = torch.Tensor


class TorchFamilyOps(Ops[Tensor], ABC):
    """What `TorchOps` has of them.

    Attributes:
        weights: as in `TorchOps`.
    """

    weights: Mapping[str, Tensor]

    def norm_projections(self, layer: AttentionLayer, qkv: Tensor, eps: float) -> Tensor:
        sizes = [heads * layer.head_size for heads in (layer.heads, layer.kv_heads, layer.kv_heads)]
        *normed, v = qkv.split(sizes, dim=-1)
        squares = torch.cat([x.float().square().sum(dim=-1, keepdim=True) for x in normed], dim=-1)
        sums = self.all_reduce(squares).split(1, dim=-1)
        for i, (which, x) in enumerate(zip("qk", normed, strict=True)):
            # Keys that several ranks hold are counted as often as they are held, in the sum as in the number.
            root = (sums[i] / (self.tp * sizes[i])).add_(eps).rsqrt_()
            weight = self.weights[f"{layer.prefix}self_attn.{which}_norm.weight"]
            normed[i] = (x.float() * root).to(x.dtype) * weight
        return torch.cat([*normed, v], dim=-1)

    def unit_norm(self, x: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) if x.is_cuda else normed(x, eps)

    def scaled_embedding(self, name: str, ids: Tensor, factor: float) -> Tensor:
        x = self.embedding(name, ids)
        return x * torch.tensor(factor, dtype=x.dtype)  # on the CPU: CUDA takes it as a number

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def multiply(self, name: str, x: Tensor) -> Tensor:
        return x * self.weights[name]

    def geglu(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gelu(gate) * up

    def cap(self, logits: Tensor, cap: float) -> Tensor:
        return (tanh(logits.float() / cap) * cap).to(logits.dtype)
