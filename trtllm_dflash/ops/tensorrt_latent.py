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

    def latent_attention(self, latent: LatentLayer, q: ITensor, kv: ITensor, start: ITensor) -> ITensor:
        positions = self.positions(start, q)
        up = self.weights[latent.prefix + "self_attn.latent_up"]
        head = latent.plain_size + latent.rotary_size
        heads = self.split_heads(q, 0, latent.heads, head)  # [B, heads, N, plain + rotary size]
        plain = self._slice(heads, 3, 0, latent.plain_size)
        rotary = self.rope(latent.rope, self._slice(heads, 3, latent.plain_size, latent.rotary_size), positions)
        self._scope = latent.prefix + "self_attn.latent_up"
        down = self._constant(key_up(latent, up).mT.contiguous()[None])  # [1, heads, rank, plain size]
        absorbed = self._concat([self._product(plain, down, "absorb"), rotary], axis=3)

        compressed = self.columns(kv, 0, latent.rank)
        compressed = self.rms_norm(latent.prefix + "self_attn.kv_a_layernorm", compressed, latent.norm_eps)
        key = self.split_heads(self.columns(kv, latent.rank, latent.rotary_size), 0, 1, latent.rotary_size)
        key = self.rope(latent.rope, key, positions)
        rows = self._concat([self._reshape(compressed, (0, 1, -1, latent.rank)), key], axis=3)
        cache = self.append_kv(latent.prefix + "latent", rows, start)
        seen = self.attention(absorbed, cache, cache, self.key_lengths(start, q), True, scale=latent.scale)
        self._scope = latent.prefix + "self_attn.latent_up"
        by_heads = self.split_heads(seen, 0, latent.heads, latent.rank + latent.rotary_size)
        raising = self._constant(value_up(latent, up).contiguous()[None])  # [1, heads, value size, rank]
        raised = self._product(self._slice(by_heads, 3, 0, latent.rank), raising, "raise")
        return self._reshape(raised, (0, 0, latent.heads * latent.value_size), first=(0, 2, 1, 3))
