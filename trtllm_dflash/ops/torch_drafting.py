"""`DraftingOps` computed by PyTorch; nothing in it waits for the device."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from trtllm_dflash.ops.base import Ops
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.ops.drafting import Candidates, Gate

Tensor = torch.Tensor


class TorchDraftingOps(Ops[Tensor]):
    """The operations of drafting, for `TorchOps`."""

    weights: Mapping[str, Tensor]
    communicator: Communicator

    def drop_last_row(self, x: Tensor) -> Tensor:
        return x[:, :-1]

    def convolve_block(self, base: str, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        common = self.weights[base][side]  # [taps, H]
        taps = len(common)
        own = kernels.unflatten(-1, (2, taps, -1))[:, :, side]  # [B, Bd, taps, G]
        rows = x.unflatten(-1, (own.shape[-1], -1))  # [B, Bd, G, H / G]
        common = common.view(taps, *rows.shape[2:])
        out: Tensor = (common[0] + own[:, :, 0, :, None]) * rows
        for offset in range(1, taps):
            before = F.pad(rows, (0, 0, 0, 0, offset, 0))[:, : rows.shape[1]]
            out = out + (common[offset] + own[:, :, offset, :, None]) * before
        return out.flatten(2)

    def top_candidates(
        self, logits: Tensor, count: int, multiplier: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        best, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
        if self.communicator.size > 1:
            ids = ids + self.communicator.rank * logits.shape[-1]
            every = torch.cat(self.communicator.all_gather(best), dim=-1)
            ids = torch.cat(self.communicator.all_gather(ids), dim=-1)
            best, places = every.topk(count, dim=-1)
            ids = ids.gather(-1, places)
        scaled = best.float() * multiplier
        return ids.int(), scaled if softcap is None else softcap * torch.tanh(scaled / softcap)

    def rerank(
        self,
        candidates: Candidates[Tensor],
        predecessor: str,
        successor: str,
        gate: Gate[Tensor] | None,
        first: Tensor,
    ) -> Tensor:
        successors = self.weights[successor][candidates.ids].float()  # [B, N, C, r]
        token, path = first, []
        for row in range(candidates.ids.shape[1]):
            numbers = self.weights[predecessor][token]  # [B, r]
            wanted = numbers.float()
            if gate is not None:
                wanted = wanted * self._gated(gate, row, numbers).float()
            scores = candidates.logits[:, row] + (successors[:, row] * wanted[:, None]).sum(dim=-1)
            best = scores.argmax(dim=-1, keepdim=True)
            token = candidates.tokens[:, row].gather(1, best)[:, 0]
            path.append(token)
        return torch.stack(path, dim=1)

    def _gated(self, gate: Gate[Tensor], row: int, numbers: Tensor) -> Tensor:
        """Computes the factors [B, r] of one row's choice."""
        rows = gate.rows[:, row]
        if gate.projection is None:
            return rows
        joined = torch.cat([rows, numbers.to(rows.dtype)], dim=-1)[:, None]
        return self.linear(gate.projection, joined)[:, 0].sigmoid()
