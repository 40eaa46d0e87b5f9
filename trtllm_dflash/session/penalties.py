"""Tensors that the device keeps of the penalties of every slot between two steps."""

from dataclasses import fields

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.kernels import KeptPenalties
from trtllm_dflash.ops.penalties import ANY, NONE, Penalties
from trtllm_dflash.session.calls import SlotPenalties
from trtllm_dflash.session.limits import MOST_BAD_RUNS, MOST_BAD_TOKENS

Tensor = torch.Tensor


class PenaltyTensors:
    """Penalties and replies of every slot, on the device. A slot is `set` before its first step with penalties.

    A reply is counted up to the token before the bonus token, which is the first row of the slot's next step.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        slots, vocabulary = config.max_batch, config.target.vocab_size
        self._device = device

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        self.penalized = zeros(dtype=torch.int32)  # of slots that captured steps penalize: 1
        self.presence, self.frequency, self.repetition = zeros(), zeros(), zeros()
        self.counts = zeros(vocabulary, dtype=torch.int32)
        self.in_prompt = zeros(vocabulary, dtype=torch.bool)
        self.bias = zeros(vocabulary)
        self.ends = zeros(vocabulary, dtype=torch.bool)
        self.ends_from = zeros(dtype=torch.int32)  # the first position that an end token may stand at
        self.runs = zeros(MOST_BAD_RUNS, MOST_BAD_TOKENS, dtype=torch.int32)
        self.recent = zeros(MOST_BAD_TOKENS - 1, dtype=torch.int32)

    def set(self, slot: int, given: SlotPenalties) -> None:
        """Begins a slot's penalties, with the tokens of its prompt, and of its reply so far."""
        # fill_: assigning a number to an element would stop for the device.
        self.presence[slot].fill_(given.presence)
        self.frequency[slot].fill_(given.frequency)
        self.repetition[slot].fill_(given.repetition)
        said = self._moved(torch.tensor(given.reply_ids, dtype=torch.int64))
        self.counts[slot].zero_().scatter_add_(0, said, torch.ones_like(said, dtype=torch.int32))
        for marks, ids in ((self.in_prompt, given.prompt_ids), (self.ends, given.end_ids)):
            marks[slot].zero_().index_fill_(0, self._moved(torch.tensor(ids, dtype=torch.int64)), True)
        self.ends_from[slot].fill_(given.ends_from)
        tokens, values = zip(*given.bias, strict=True) if given.bias else ((), ())
        biased = self._moved(torch.tensor(tokens, dtype=torch.int64))
        self.bias[slot].zero_().index_copy_(0, biased, self._moved(torch.tensor(values, dtype=torch.float32)))
        runs = torch.full_like(self.runs[slot], ANY, device="cpu")
        for place, run in enumerate(given.bad_runs):
            runs[place, -len(run) :] = torch.tensor(run)
        self.runs[slot].copy_(self._moved(runs))
        most = self.recent.shape[1]
        self.recent[slot].copy_(self._moved(torch.tensor(([NONE] * most + given.reply_ids)[-most:], dtype=torch.int32)))

    def choose(self, slots: list[int]) -> None:
        """Lets captured steps penalize these slots, and no others."""
        marks = torch.zeros(len(self.penalized), dtype=torch.int32)
        marks[slots] = 1
        self.penalized.copy_(self._moved(marks))

    @property
    def kept(self) -> KeptPenalties:
        """The tensors, as captured steps read them."""
        return KeptPenalties(**{part.name: getattr(self, part.name) for part in fields(KeptPenalties)})

    def of_rows(
        self, rows: Tensor, slots: Tensor, positions: Tensor, token_ids: Tensor, follows: Tensor
    ) -> Penalties[Tensor]:
        """Makes the penalties of logit rows [n], of these slots [n] at these positions [n].

        Args:
            token_ids: of all rows of the step, [N].
            follows: rows whose tokens the reply has before the token that a logit row chooses, [n, N].
        """
        ids = token_ids.long()
        return Penalties(
            rows=rows,
            presence=self.presence[slots],
            frequency=self.frequency[slots],
            repetition=self.repetition[slots],
            counts=self.counts[slots].scatter_add_(1, ids.expand_as(follows), follows.int()),
            in_prompt=self.in_prompt[slots],
            bias=self.bias[slots],
            banned=self.ends[slots] & (positions + 1 < self.ends_from[slots])[:, None],
            runs=self.runs[slots],
            recent=_recent(self.recent[slots], ids, follows),
        )

    def advance(self, slots: Tensor, penalties: Penalties[Tensor], places: Tensor) -> None:
        """Takes the replies of slots [g] from the rows, places [g] among those of `penalties`, that chose the bonus."""
        self.counts[slots] = penalties.counts[places]
        self.recent[slots] = penalties.recent[places]

    def _moved(self, x: Tensor) -> Tensor:
        """Moves x from the host, which does not wait for it."""
        return x.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else x


def _recent(before: Tensor, ids: Tensor, follows: Tensor) -> Tensor:
    """Finds the last tokens [n, L - 1] of replies that had `before` [n, L - 1], and then these rows [n, N]."""
    order = follows.cumsum(dim=1)
    count, most = order[:, -1:], before.shape[1]
    columns = []
    for back in reversed(range(most)):  # tokens between it and the end
        here = follows & (count - order == back)
        older = before.gather(1, (most - 1 - back + count).clamp(max=most - 1))[:, 0]
        columns.append(torch.where(here.any(dim=1), (ids * here).sum(dim=1).int(), older))
    return torch.stack(columns, dim=1)
