"""Tensors that the device keeps of every slot between two steps."""

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.session.calls import SlotSampling, signed
from trtllm_dflash.session.philox import uniform_numbers

Tensor = torch.Tensor


class SlotTensors:
    """Next rows, position and sampling of every slot, on the device; B of `sampling` are the slots of its slice.

    Attributes:
        block: rows of a drafted block: no more tokens than these are accepted in a step.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.block = config.block_size
        slots, rows = config.max_batch, config.slot_rows if config.drafter else 1
        self.tokens = torch.zeros(slots, rows, dtype=torch.int32, device=device)  # bonus token and drafts
        # Of those, where drafts may be trees. Before any are drafted a chain, no deeper than one is: what is measured
        # may verify more rows than were drafted.
        chain = torch.arange(-1, rows - 1, dtype=torch.int32, device=device).clamp_(max=max(self.block - 2, -1))
        self.parents = chain.repeat(slots, 1)
        self.start = torch.zeros(slots, dtype=torch.int32, device=device)  # position of the bonus token
        self.temperature = torch.zeros(slots, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int32, device=device)
        self.top_p = torch.ones(slots, device=device)
        self.min_p = torch.zeros(slots, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)

    def sampling(self, slots: slice, positions: Tensor) -> SamplingInputs[Tensor]:
        """Sampling inputs of `slots` for rows at `positions` [B, R]."""
        # The number belongs to the position of the token that is chosen: one after its row.
        uniform = uniform_numbers(self.seed[slots], positions + 1)
        return SamplingInputs(self.temperature[slots], self.top_k[slots], self.top_p[slots], uniform)

    def row_sampling(self, slots: Tensor, positions: Tensor) -> SamplingInputs[Tensor]:
        """Sampling inputs of flat rows, of these slots [R] at these positions [R]: each row as a slot of its own."""
        return self.row_sampling_with(slots, uniform_numbers(self.seed[slots], positions[:, None] + 1))

    def row_sampling_with(self, slots: Tensor, uniform: Tensor, min_p: bool = False) -> SamplingInputs[Tensor]:
        """Sampling inputs of flat rows, of these slots [R] and with these random numbers [R, 1].

        Args:
            min_p: whether to have those too; steps in which nobody has one do without.
        """
        temperature, top_k, top_p = (x.index_select(0, slots) for x in (self.temperature, self.top_k, self.top_p))
        least = self.min_p.index_select(0, slots) if min_p else None
        return SamplingInputs(temperature, top_k, top_p, uniform, least)

    def set_drafts(self, drafts: list[tuple[int, list[int]]]) -> None:
        """Puts drafts in place of slots' own; the host waits for nothing."""
        width, device = self.tokens.shape[1], self.tokens.device
        pairs = [(slot * width + i, token) for slot, tokens in drafts for i, token in enumerate(tokens, start=1)]
        if not pairs:
            return
        places, tokens = torch.tensor(pairs, pin_memory=device.type == "cuda").to(device, non_blocking=True).unbind(1)
        self.tokens.view(-1).index_copy_(0, places, tokens.int())

    def set_sampling(self, slot: int, sampling: SlotSampling) -> None:
        # fill_: assigning a number to an element would stop for the device.
        self.temperature[slot].fill_(sampling.temperature)
        self.top_k[slot].fill_(sampling.top_k)
        self.top_p[slot].fill_(sampling.top_p)
        self.min_p[slot].fill_(sampling.min_p)
        self.seed[slot].fill_(signed(sampling.seed))
