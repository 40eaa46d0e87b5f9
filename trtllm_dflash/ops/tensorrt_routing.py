"""A mixture's router in TensorRT: which experts each row has, and how much each gives."""

import torch

from trtllm_dflash.ops.base import MoELayer
from trtllm_dflash.ops.tensorrt_layers import ITensor, TensorRTLayers

#: Keeps sigmoids that are all zero from being divided by zero.
_TINY = 1e-20


class TensorRTRouting(TensorRTLayers):
    """Emits the choice of experts."""

    def _route(self, mixture: MoELayer, logits: ITensor) -> tuple[ITensor, ITensor]:
        """Chooses each row's experts, as a bool mask and FP32 weights, 0 for the others: [B, N, experts] each."""
        logits = self._cast(logits, self.trt.float32)
        by_sigmoids = mixture.scores == "sigmoid"
        chosen, shares = self._by_sigmoids(mixture, logits) if by_sigmoids else self._by_softmax(mixture, logits)
        scales = mixture.prefix + "router.expert_scale"
        if scales in self.weights:
            own = self._constant(self.weights[scales].float()[None, None])
            shares = self._binary("PROD", shares, own, "expert_scale")
        if mixture.scale != 1:
            shares = self._binary("PROD", shares, self._fill(mixture.scale, 3), "route_scale")
        return chosen, shares

    def _by_softmax(self, mixture: MoELayer, logits: ITensor) -> tuple[ITensor, ITensor]:
        chosen = self._largest(logits, mixture.top_k)
        mass = self._unary("EXP", self._binary("SUB", logits, self._reduce("MAX", logits, 2)))
        own = self._select(chosen, mass, self._fill(0.0, 3))
        total = self._reduce("SUM", own if mixture.normalized else mass, 2)
        return chosen, self._binary("DIV", own, total, "shares")

    def _by_sigmoids(self, mixture: MoELayer, logits: ITensor) -> tuple[ITensor, ITensor]:
        scores = self._layer(self.network.add_activation(logits, self.trt.ActivationType.SIGMOID), "scores")
        # The bias decides who is chosen, and not how much they give.
        bias = self._weight(mixture.prefix + "router.correction_bias", (1, 1, mixture.experts))
        chosen = self._largest(self._binary("SUM", scores, bias, "corrected"), mixture.top_k)
        shares = self._select(chosen, scores, self._fill(0.0, 3))
        if mixture.normalized:
            total = self._binary("SUM", self._reduce("SUM", shares, 2), self._fill(_TINY, 3))
            shares = self._binary("DIV", shares, total, "shares")
        return chosen, shares

    def _largest(self, scores: ITensor, count: int) -> ITensor:
        """Finds the `count` largest of FP32 scores [B, N, experts], the first ones among equals, as a bool mask."""
        top = self.network.add_topk(scores, self.trt.TopKOperation.MAX, count, 1 << 2)
        least = self._reduce("MIN", self._layer(top, "top_k"), 2)  # [B, N, 1]
        # TopK does not say which of equals it returns: of those that equal the least, the first ones.
        above = self._binary("GREATER", scores, least)
        equal = self._binary("EQUAL", scores, least)
        taken = self._reduce("SUM", self._cast(above, self.trt.int32), 2)
        axis = self._constant(torch.tensor(2, dtype=torch.int32))
        ones = self._cast(equal, self.trt.int32)
        run = self._layer(
            self.network.add_cumulative(ones, axis, self.trt.CumulativeOperation.SUM, False, False), "run"
        )
        fits = self._not(self._binary("GREATER", self._binary("SUM", run, taken), self._ints(count, 3)))
        return self._binary("OR", above, self._binary("AND", equal, fits))
