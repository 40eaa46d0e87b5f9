"""Tensors that the device keeps of the penalties of every slot between two steps."""

import torch

from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.ops.penalties import ANY, NONE, Penalties
from trtllm_dflash.session.calls import MOST_BAD_RUNS, MOST_BAD_TOKENS, SlotPenalties

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
        self.presence[slot] = given.presence
        self.frequency[slot] = given.frequency
        self.repetition[slot] = given.repetition
        self.counts[slot] = torch.bincount(self._ids(given.reply_ids), minlength=self.counts.shape[1])
        for marks, ids in ((self.in_prompt, given.prompt_ids), (self.ends, given.end_ids)):
            marks[slot] = False
            marks[slot, self._ids(ids)] = True
        self.ends_from[slot] = given.ends_from
        self.bias[slot] = 0
        for token, bias in given.bias:
            self.bias[slot, token] = bias
        self.runs[slot] = ANY
        for place, run in enumerate(given.bad_runs):
            self.runs[slot, place, -len(run) :] = self._ids(run).int()
        self.recent[slot] = NONE
        last = given.reply_ids[-self.recent.shape[1] :]
        if last:
            self.recent[slot, -len(last) :] = self._ids(last).int()

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

    def _ids(self, ids: list[int] | tuple[int, ...]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)


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
