"""Slots, and which sequences run in them: prefill one at a time in chunks, decode all together."""

import time
from collections import deque

import torch

from trtllm_dflash.engine.session import Session
from trtllm_dflash.ops import SamplingInputs
from trtllm_dflash.runtime.philox import uniform_numbers
from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.step import Drafting, StepInputs


class Scheduler:
    """Runs sequences on a session until none is left. A sequence takes the lowest free slot and leaves at its end.

    Args:
        session: what runs the steps.
        draft: False decodes plainly, without the drafter's work.
    """

    def __init__(self, session: Session, draft: bool = True) -> None:
        config = session.config
        self._session = session
        self._chunk = config.chunk
        self._drafting = Drafting.BLOCK if draft and config.drafter else Drafting.OFF
        self._block = torch.arange(config.block_size if self._drafting is Drafting.BLOCK else 1, dtype=torch.int32)[
            None
        ]
        self._waiting: deque[Sequence] = deque()
        self._slots: list[Sequence | None] = [None] * config.max_batch
        self._running: set[int] = set()  # slots past their prefill
        self._decoded = True  # whether the last step was a decoding step
        # Each slot's next rows, and where they go. A free slot's harmless rows go to its committed length as well.
        self._tokens = torch.zeros(config.max_batch, self._block.shape[1], dtype=torch.int32)
        self._start = torch.zeros(config.max_batch, dtype=torch.int32)
        self._begun: dict[int, float] = {}  # slot -> when its prefill began

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._waiting) or any(self._slots)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self._waiting.append(sequence)

    def step(self) -> None:
        """One step of the session: a chunk of a prompt, or a block of all that run; in turn while there are both."""
        self._admit()
        prefilling = [i for i, s in enumerate(self._slots) if s is not None and i not in self._running]
        if prefilling and (self._decoded or not self._running):
            self._prefill(prefilling[0])
            self._decoded = False
        elif self._running:
            self._decode()
            self._decoded = True

    def _admit(self) -> None:
        for slot, sequence in enumerate(self._slots):
            if sequence is None and self._waiting:
                self._slots[slot] = self._waiting.popleft()
                self._start[slot] = 0
                self._begun[slot] = time.perf_counter()

    def _prefill(self, slot: int) -> None:
        sequence = self._slots[slot]
        assert sequence is not None
        first = sequence.prefilled
        ids = sequence.prompt_ids[first : first + self._chunk]
        last_chunk = first + len(ids) == len(sequence.prompt_ids)
        rows = torch.tensor([[len(ids) - 1]], dtype=torch.int32)
        start = torch.tensor([first], dtype=torch.int32)
        inputs = StepInputs(
            token_ids=torch.tensor([ids], dtype=torch.int32),
            start=start,
            row_count=rows[:, 0] + 1,
            logit_rows=rows,
            block_offsets=self._block,
            sampling=self._sampling([sequence], start[:, None] + rows),
        )
        drafting = self._drafting
        if drafting is Drafting.BLOCK and not last_chunk:
            drafting = Drafting.CONTEXT
        out = self._session.step(inputs, drafting, slot)
        sequence.prefilled += len(ids)
        self._start[slot] = out.next_start[0]
        if last_chunk:
            self._tokens[slot] = out.next_tokens[0]
            self._running.add(slot)
            sequence.commit(out.target_ids[0].tolist())
            self._retire_if_done(slot)

    def _decode(self) -> None:
        batch = max(self._running) + 1
        rows = torch.arange(self._tokens.shape[1], dtype=torch.int32).expand(batch, -1)
        start = self._start[:batch].clone()
        inputs = StepInputs(
            token_ids=self._tokens[:batch].clone(),
            start=start,
            row_count=torch.full((batch,), rows.shape[1], dtype=torch.int32),
            logit_rows=rows,
            block_offsets=self._block,
            sampling=self._sampling(self._slots[:batch], start[:, None] + rows),
        )
        out = self._session.step(inputs, self._drafting)
        target_ids, accepted = out.target_ids.tolist(), out.accepted.tolist()
        for slot in sorted(self._running):
            sequence = self._slots[slot]
            assert sequence is not None
            self._tokens[slot] = out.next_tokens[slot]
            self._start[slot] = out.next_start[slot]
            count = sequence.commit(target_ids[slot][: accepted[slot] + 1])
            sequence.accepted_per_step.append(min(accepted[slot], count))
            self._retire_if_done(slot)

    def _retire_if_done(self, slot: int) -> None:
        sequence = self._slots[slot]
        if sequence is not None and sequence.finish_reason is not None:
            sequence.seconds = time.perf_counter() - self._begun.pop(slot)
            self._slots[slot] = None
            self._running.discard(slot)
            self._start[slot] = 0

    def _sampling(
        self, sequences: list[Sequence | None], positions: torch.Tensor
    ) -> SamplingInputs[torch.Tensor] | None:
        """None where all are greedy: that needs neither a sort nor random numbers. positions [B, R]: of the rows."""
        params = [s.params if s is not None else None for s in sequences]
        if not any(p is not None and p.temperature > 0 for p in params):
            return None
        seeds = torch.tensor([p.seed if p else 0 for p in params])
        return SamplingInputs(
            temperature=torch.tensor([p.temperature if p else 0.0 for p in params]),
            top_k=torch.tensor([p.top_k if p else 0 for p in params], dtype=torch.int32),
            top_p=torch.tensor([p.top_p if p else 1.0 for p in params]),
            # The number belongs to the position of the token that is chosen: one after its row.
            uniform=uniform_numbers(seeds, positions + 1),
        )
