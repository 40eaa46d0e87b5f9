"""Operations that some families alone need, as TensorRT's layers: norms of MiniMax, GELU and scales of Gemma."""

from abc import ABC
from math import gcd

from trtllm_dflash.ops.base import AttentionLayer, Ops
from trtllm_dflash.ops.tensorrt_layers import ITensor, TensorRTLayers


class TensorRTFamilyOps(TensorRTLayers, Ops[ITensor], ABC):
    """Emits the part of `Ops` that some families alone need."""

    def norm_projections(self, attention: AttentionLayer, qkv: ITensor, eps: float) -> ITensor:
        self._scope = attention.prefix + "self_attn.qk_norm"
        # By heads, as attention will take them: see `split_heads`.
        heads = self._reshape(qkv, (0, 0, qkv.shape[2] // attention.head_size, attention.head_size))
        counts = attention.heads, attention.kv_heads, attention.kv_heads
        *normed, v = (self._slice(heads, 2, sum(counts[:i]), count) for i, count in enumerate(counts))
        wide = [self._cast(self._reshape(x, (0, 0, -1)), self.trt.float32) for x in normed]
        squares = [self._reduce("SUM", self._binary("PROD", x, x), 2) for x in wide]
        sums = self.all_reduce(self._concat(squares, axis=2))  # [B, N, 2]: one collective for both
        parts = []
        for i, which in enumerate("qk"):
            # Keys that several ranks hold are counted as often as they are held, in the sum as in the number.
            number = self._fill(1 / (self.tp * counts[i] * attention.head_size), 3)
            mean = self._binary("PROD", self._slice(sums, 2, i, 1), number)
            root = self._unary("SQRT", self._binary("SUM", mean, self._fill(eps, 3)))
            x = self._cast(self._binary("DIV", wide[i], root), qkv.dtype)
            weight = self._weight(
                f"{attention.prefix}self_attn.{which}_norm.weight", (1, 1, counts[i] * attention.head_size)
            )
            parts.append(self._binary("PROD", x, weight, "scale"))
        return self._concat([*parts, self._reshape(v, (0, 0, -1))], axis=2)

    def columns(self, x: ITensor, first: int, count: int) -> ITensor:
        # In as wide groups as there are: see `split_heads`.
        size = gcd(first, count, x.shape[2])
        groups = self._once(x, f"groups of {size}", lambda: self._reshape(x, (0, 0, x.shape[2] // size, size)))
        return self._reshape(self._slice(groups, 2, first // size, count // size), (0, 0, count))

    def unit_norm(self, x: ITensor, eps: float) -> ITensor:
        return self._cast(self._normed(x, eps), x.dtype)

    def _normed(self, x: ITensor, eps: float) -> ITensor:
        """Divides x by its root mean square over the last dimension, in FP32."""
        last = len(x.shape) - 1
        wide = self._cast(x, self.trt.float32)
        mean = self._reduce("AVG", self._binary("PROD", wide, wide), last)
        root = self._unary("SQRT", self._binary("SUM", mean, self._fill(eps, len(x.shape))))
        return self._binary("DIV", wide, root)

    def scaled_embedding(self, name: str, ids: ITensor, factor: float) -> ITensor:
        x = self.embedding(name, ids)
        return self._binary("PROD", x, self._fill(factor, 3, x.dtype), "scale")  # the factor is rounded, too

    def scale(self, x: ITensor, factor: float) -> ITensor:
        wide = self._cast(x, self.trt.float32)
        return self._cast(self._binary("PROD", wide, self._fill(factor, len(x.shape)), "scale"), x.dtype)

    def multiply(self, name: str, x: ITensor) -> ITensor:
        return self._binary("PROD", x, self._weight(name, (1,) * len(x.shape)), "scale")

    def geglu(self, x: ITensor) -> ITensor:
        size = x.shape[2] // 2
        halves = self._reshape(x, (0, 0, 2, size))  # see `split_heads`
        gate, up = (self._reshape(self._slice(halves, 2, i, 1), (0, 0, size)) for i in range(2))
        gelu = self._layer(self.network.add_activation(gate, self.trt.ActivationType.GELU_TANH), "gelu")
        return self._binary("PROD", gelu, up, "geglu")

    def cap(self, logits: ITensor, cap: float) -> ITensor:
        most = self._fill(cap, 3)
        ratio = self._binary("DIV", self._cast(logits, self.trt.float32), most)
        bent = self._layer(self.network.add_activation(ratio, self.trt.ActivationType.TANH), "tanh")
        return self._cast(self._binary("PROD", bent, most, "cap"), logits.dtype)
