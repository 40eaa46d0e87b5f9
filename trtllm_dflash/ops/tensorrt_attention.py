"""Attention over caches that are updated in place, in TensorRT's own layers: windows and sinks included.

The attention layer has a causal mask and lengths, but neither window nor sink, and fused kernels alone can run it. So:

- A window is a mask over the few rows that any of the call's rows can see, gathered from the cache: window - 1 and the
  call's own. A window of 128 then reads 128 rows and a block, whatever the context's length is.
- A sink is one more key, at row 0 of the cache, before the first token's. Its logit must be one number a query head,
  whatever the query holds, so heads are `SINK_SIZE` wider than the model's: in the first of the added dimensions that
  key has 1, every query its head's sink, and all other keys 0. Its value is zero, as are the values' added dimensions.
  One more logit in an additive mask would do without the wider caches (by an eighth, at a head size of 64), but a mask
  of every head, row and key of the cache is far more to read, and it forbids the causal mask.
"""

import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.tensorrt_layers import ITensor
from trtllm_dflash.ops.tensorrt_tree_rows import TensorRTTreeRows

#: The widest heads that TensorRT has fused kernels for, as far as is known: of TensorRT-RTX 1.7.1, SM89 and SM120.
MOST_FUSED = 256

#: Suffix of the output that updates a cache in place.
PRESENT = ".present"

#: Dimensions that a sink adds to a head: the fewest with which TensorRT-RTX 1.7.1 finds a fused kernel.
SINK_SIZE = 8


def write_sink_key(keys: torch.Tensor) -> None:
    """Writes the key of an attention sink into a cache of zeros [slots, heads, 1 + S, D + SINK_SIZE]."""
    keys[:, :, 0, -SINK_SIZE] = 1


class TensorRTAttention(TensorRTTreeRows):
    """Emits the caches and attention of `Ops`.

    A cache whose heads are wider than the rows that come into it is one of a layer with sinks: [B, heads, 1 + S,
    D + SINK_SIZE], with the sink's key at row 0 (see `write_sink_key`) and the token at position p at row 1 + p.
    """

    def append_kv(self, name: str, rows: ITensor, start: ITensor) -> ITensor:
        self._scope = name
        cache = self.caches[name]
        if cache.shape[3] > rows.shape[3]:
            rows = self._widen(rows, cache.shape[3])
            start = self._past_sink(start)
        mode = self.trt.KVCacheMode.LINEAR
        present = self._layer(self.network.add_kv_cache_update(cache, rows, start, mode), "")
        present.name = name + PRESENT
        self.network.mark_output(present)
        return present

    def attention(
        self,
        q: ITensor,
        keys: ITensor,
        values: ITensor,
        lengths: ITensor,
        causal: bool,
        window: int | None = None,
        sinks: str | None = None,
        scale: float | None = None,
    ) -> ITensor:
        return self._attention(q, keys, values, lengths, causal, window, sinks, scale)

    def _attention(
        self,
        q: ITensor,
        keys: ITensor,
        values: ITensor,
        lengths: ITensor,
        causal: bool,
        window: int | None,
        sinks: str | None,
        scale: float | None,
        tree_start: ITensor | None = None,
    ) -> ITensor:
        """Emits `attention`; of a target's rows that may be trees, from tree_start [B] on."""
        size = q.shape[3]
        # The layer has no scale of its own.
        q = self._binary("PROD", q, self._fill(size**-0.5 if scale is None else scale, 4, q.dtype), "scale")
        if sinks is not None:
            q = self._with_sinks(q, sinks, keys.shape[3])
        if window is None:
            # LOWER_RIGHT aligns the last row with the last of `lengths` keys: lengths count padded rows too.
            is_run, has_sink = causal and tree_start is None, sinks is not None
            kind = self.trt.CausalMaskKind.LOWER_RIGHT if is_run else self.trt.CausalMaskKind.NONE
            lengths = self._past_sink(lengths) if has_sink else lengths
            mask = None
            if tree_start is not None:
                mask = self._once(
                    tree_start, f"tree {has_sink}", lambda: self._tree_mask(q, keys, tree_start, has_sink)
                )
            layer = self._attend(q, keys, values, kind)
            layer.key_value_lengths = lengths
            if mask is not None:
                layer.mask = mask
        else:
            has_sink, is_tree = sinks is not None, tree_start is not None
            what = f"window {window} {causal} {has_sink} {is_tree}"
            rows, mask = self._once(
                lengths, what, lambda: self._window(q, keys, lengths, causal, window, has_sink, is_tree)
            )
            keys, values = (self._gather(x, rows, axis=2, per_slot=True) for x in (keys, values))
            layer = self._attend(q, keys, values, self.trt.CausalMaskKind.NONE)
            layer.mask = mask
        out = layer.get_output(0)
        if sinks is not None:
            out = self._slice(out, 3, 0, size)
        return self._reshape(out, (0, 0, -1), first=(0, 2, 1, 3))

    def _attend(self, q: ITensor, keys: ITensor, values: ITensor, causal_kind: ITensor) -> ITensor:
        layer = self.network.add_attention_v2(q, keys, values, self.trt.AttentionNormalizationOp.SOFTMAX, causal_kind)
        if layer is None:
            raise EngineError(f"{self._scope}: TensorRT accepts no attention of {q.dtype} here; choose another dtype")
        layer.name = self._unique("attention")
        # Into two products and a softmax, whose scores of every row and key then pass through memory.
        layer.decomposable = q.shape[3] > MOST_FUSED
        return layer

    def _window(
        self, q: ITensor, keys: ITensor, lengths: ITensor, causal: bool, window: int, has_sink: bool, is_tree: bool
    ) -> tuple[ITensor, ITensor]:
        """Finds the cache rows [B, K] that any of q's N rows sees, and the mask of each row, bool [B, 1, N, K].

        K is window - 1 + N, from the first row's oldest key to the last row; and the sink's row before them.
        """
        sink = int(has_sink)
        count = self._size(q, 2)
        total = self._binary("SUM", count, self._longs(window - 1 + sink))
        # Keys are counted from the oldest that the first row sees; the sink's is -1.
        key = self._binary("SUB", self._reshape(self._range(total), (1, -1)), self._ints(sink, 2))  # [1, K]
        seen = self._binary("SUM", self._row_count(q), self._ints(window - 1, 2))
        position = self._binary("SUM", self._binary("SUB", self._reshape(lengths, (-1, 1)), seen), key)  # [B, K]
        # Before the first token there is nothing, and padded rows may stand past the cache's end.
        last = self._ints(keys.shape[2] - sink - 1, 2)
        rows = self._binary("MIN", self._binary("MAX", position, self._ints(0, 2)), last)
        key_4d = self._reshape(key, (1, 1, 1, -1))
        if is_tree:
            mask = self._tree_window(q, self._binary("SUB", key, self._ints(window - 1, 2)), window)
        else:
            # Row i stands at window - 1 + i.
            row = self._reshape(self._range(count), (1, 1, -1, 1))
            age = self._binary("SUB", self._binary("SUM", row, self._ints(window - 1, 4)), key_4d)  # [1, 1, N, K]
            mask = self._binary("LESS", age, self._ints(window, 4))
            if causal:
                mask = self._binary("AND", mask, self._binary("GREATER", age, self._ints(-1, 4)))
        exists = self._binary("GREATER", self._reshape(position, (0, 1, 1, -1)), self._ints(-1, 4))
        mask = self._binary("AND", mask, exists)  # [B, 1, N, K]
        if has_sink:
            rows = self._select(self._binary("LESS", key, self._ints(0, 2)), key, rows)
            rows = self._binary("SUM", rows, self._ints(1, 2))
            mask = self._binary("OR", mask, self._binary("LESS", key_4d, self._ints(0, 4)))
        return rows, mask

    def _with_sinks(self, q: ITensor, sinks: str, size: int) -> ITensor:
        """Widens q [B, heads, N, D] by each head's sink, in the dimension after its own: [B, heads, N, size]."""
        tensor = self.weights[sinks]
        added = torch.zeros(1, len(tensor), 1, size, dtype=tensor.dtype)
        added[0, :, 0, q.shape[3]] = tensor
        return self._binary("SUM", self._widen(q, size), self._constant(added), "sinks")

    def _past_sink(self, rows: ITensor) -> ITensor:
        """Shifts rows or lengths [B] of tokens by the sink's row, which precedes them in the cache."""
        return self._once(rows, "past sink", lambda: self._binary("SUM", rows, self._ints(1, 1)))

    def _widen(self, x: ITensor, size: int) -> ITensor:
        """Pads the last dimension of x [B, heads, N, D] with zeros: [B, heads, N, size]."""
        zero = self._fill(0.0, 0, x.dtype)
        layer = self.network.add_slice(x, (0,), (size,), (1,))
        layer.axes = (3,)
        layer.mode = self.trt.SampleMode.FILL
        layer.set_input(4, zero)
        return self._layer(layer, "widen")
