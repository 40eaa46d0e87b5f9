"""`CudaOps` on flat rows over paged caches, for captured steps: the layout of the rows lies on the device."""

from collections.abc import Mapping

import torch

from trtllm_dflash import kernels
from trtllm_dflash.ops.base import Acceptance, AttentionLayer, Context, MoELayer, SamplingInputs
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.ops.cuda_ops import CudaOps

Tensor = torch.Tensor


class RaggedCudaOps(CudaOps):
    """Computes a step of flat rows: x is [1, N, H] for models, and what is per slot is [G], one for each segment.

    Args: as `CudaOps`, but
        caches: K/V caches by name, [pages, heads, page rows, D].
        pages: of every slot.
        layout: of the step's rows.
        slots: leading segments that are decoding slots; the others are pieces of prompts.
        rows: the most that a decoding slot has.

    Raises:
        EngineError: the kernels are not built.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        caches: Mapping[str, Tensor],
        communicator: Communicator | None,
        pages: kernels.Pages,
        layout: kernels.Rows,
        slots: int,
        rows: int,
    ) -> None:
        super().__init__(weights, caches, communicator)
        self._pages = pages
        self._layout = layout
        self._decoding = layout.segments[:slots]
        self._most = rows

    # -- attention ---------------------------------------------------------------------------------------------------

    def self_attention(self, layer: AttentionLayer, qkv: Tensor, start: Tensor) -> Tensor:
        keys, values = self._caches(layer)
        out = torch.empty(qkv.shape[1], layer.heads * layer.head_size, dtype=qkv.dtype, device=qkv.device)
        q = self._append(layer).rows(keys, values, self._pages, self._layout, layer.heads, qkv[0], out)
        runs = [(self._decoding, self._most)] if len(self._decoding) else []
        if len(self._layout.cuts):
            runs.append((self._layout.cuts, kernels.MAX_ROWS))
        for segments, most in runs:
            kernels.attend_rows(
                q,
                keys,
                values,
                self._pages,
                segments,
                most,
                out,
                causal=True,
                window=layer.window or 0,
                sinks=self._sinks(layer.sinks),
                scales=self._scales(layer),
            )
        return out[None]

    def context_rows(self, layer: AttentionLayer, kv: Tensor, index: int, start: Tensor) -> Context[Tensor]:
        return super().context_rows(layer, kv[0], index, start)

    def keep_context(self, layer: AttentionLayer, context: Context[Tensor], start: Tensor) -> None:
        keys, values = self._caches(layer)
        k, v = context.tensors
        self._append(layer).context(keys, values, self._pages, self._layout, layer.heads, (k, v))

    def block_attention(
        self, layer: AttentionLayer, context: Context[Tensor], qkv: Tensor, start: Tensor, committed: Tensor
    ) -> Tensor:
        keys, values = self._caches(layer)
        (segments, block, _), (k, v) = qkv.shape, context.tensors
        q = self._append(layer).block(keys, values, self._pages, self._layout, layer.heads, qkv, (k, v), committed)
        out = torch.empty(segments * block, layer.heads * layer.head_size, dtype=qkv.dtype, device=qkv.device)
        kernels.attend_rows(
            q,
            keys,
            values,
            self._pages,
            self._layout.segments,
            block,
            out,
            causal=False,
            window=layer.window or 0,
            sinks=self._sinks(layer.sinks),
            scales=self._scales(layer),
            added=committed,
            block=block,
        )
        return out.view(segments, block, -1)

    # -- the network -------------------------------------------------------------------------------------------------

    def moe(self, layer: MoELayer, x: Tensor, logits: Tensor) -> Tensor:
        """Computes as many rows at a time as the kernels take: prompts bring more."""
        parts = zip(x.split(kernels.MOE_ROWS, dim=1), logits.split(kernels.MOE_ROWS, dim=1), strict=True)
        if x.shape[1] <= kernels.MOE_ROWS:
            return super().moe(layer, x, logits)
        return torch.cat([super(RaggedCudaOps, self).moe(layer, *part) for part in parts], dim=1)

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x if rows.shape[1] == x.shape[1] else x[:, rows[0]]

    # -- choosing tokens ---------------------------------------------------------------------------------------------

    def sample(self, logits: Tensor, sampling: SamplingInputs[Tensor]) -> Tensor:
        """Draws each row's id: logits [1, R, V/tp] -> [1, R]; parameters are a row's, [R], and uniform is [R, 1]."""
        return super().sample(logits.transpose(0, 1), sampling).transpose(0, 1)

    def accept(
        self, token_ids: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
    ) -> Acceptance[Tensor]:
        accepted, committed, bonus, _ = kernels.accept_rows(self._layout, target_ids[0])
        return Acceptance(accepted, committed, bonus)

    def acceptance(
        self, accepted: Tensor, target_ids: Tensor, logit_rows: Tensor, row_count: Tensor
    ) -> Acceptance[Tensor]:
        """Makes the outcome of so many accepted drafts [G]; of fewer where a segment has not so many."""
        first, counts = self._layout.logit_first, self._layout.segments[:, 3]
        logits = first[1:] - first[:-1]
        accepted = accepted.minimum((logits - 1).clamp(min=0))
        index = (first[:-1] + accepted).clamp(max=target_ids.shape[1] - 1)
        committed = torch.where(counts > 0, counts - logits + accepted + 1, 0)
        return Acceptance(accepted, committed, target_ids[0, index])

    def slots(self, start: Tensor) -> Tensor:
        return self._layout.segments[:, 0]
