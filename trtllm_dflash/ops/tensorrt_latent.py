"""Latent attention (MLA) as TensorRT's layers: always absorbed, since one network serves blocks and prompts.

The attention layer takes keys and values of one shape alone. So a cache row is both, and of what a row sees the first
`rank` numbers are meant; see `ops.latent_attention`.
"""

from abc import ABC

from trtllm_dflash.ops.base import LatentLayer, Ops
from trtllm_dflash.ops.latent_attention import key_up, value_up
from trtllm_dflash.ops.tensorrt_layers import ITensor, TensorRTLayers


class TensorRTLatent(TensorRTLayers, Ops[ITensor], ABC):
    """Emits the latent attention of `Ops`."""

    def latent_attention(self, layer: LatentLayer, q: ITensor, kv: ITensor, start: ITensor) -> ITensor:
        positions = self.positions(start, q)
        up = self.weights[layer.prefix + "self_attn.latent_up"]
        head = layer.plain_size + layer.rotary_size
        heads = self.split_heads(q, 0, layer.heads, head)  # [B, heads, N, plain + rotary size]
        plain, rotary = (
            self._slice(heads, 3, 0, layer.plain_size),
            self._slice(heads, 3, layer.plain_size, layer.rotary_size),
        )
        rotary = self.rope(layer.rope, rotary, positions)
        self._scope = layer.prefix + "self_attn.latent_up"
        down = self._constant(key_up(layer, up).mT.contiguous()[None])  # [1, heads, rank, plain size]
        absorbed = self._concat([self._product(plain, down, "absorb"), rotary], axis=3)

        latent = self.columns(kv, 0, layer.rank)
        latent = self.rms_norm(layer.prefix + "self_attn.kv_a_layernorm", latent, layer.norm_eps)
        key = self.split_heads(self.columns(kv, layer.rank, layer.rotary_size), 0, 1, layer.rotary_size)
        key = self.rope(layer.rope, key, positions)
        rows = self._concat([self._reshape(latent, (0, 1, -1, layer.rank)), key], axis=3)
        cache = self.append_kv(layer.prefix + "latent", rows, start)
        seen = self.attention(absorbed, cache, cache, self.key_lengths(start, q), True, scale=layer.scale)
        self._scope = layer.prefix + "self_attn.latent_up"
        by_heads = self.split_heads(seen, 0, layer.heads, layer.rank + layer.rotary_size)
        raised = self._product(
            self._slice(by_heads, 3, 0, layer.rank), self._constant(value_up(layer, up).contiguous()[None]), "raise"
        )
        return self._reshape(raised, (0, 0, layer.heads * layer.value_size), first=(0, 2, 1, 3))
