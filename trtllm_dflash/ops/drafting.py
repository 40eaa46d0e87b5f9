"""Operations that drafters alone need: those of a drafted block, and the choice among its rows' likeliest tokens."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from trtllm_dflash.ops.layers import AttentionLayer

T = TypeVar("T")


@dataclass(frozen=True)
class Candidates(Generic[T]):
    """The C likeliest tokens of each row; C is the same for all, their order any."""

    ids: T  # [B, N, C] int32, in the drafter's vocabulary
    tokens: T  # [B, N, C] int32, the target's ids of these
    logits: T  # [B, N, C] float32


@dataclass(frozen=True)
class Gate(Generic[T]):
    """Factors of the numbers [r] that a token has as a predecessor, for each row's choice.

    Without `projection` they are `rows` [B, N, r] themselves. With one they are sigmoid(linear([row; numbers])) of
    `rows` [B, N, H], by the linear of that name: [r, H + r] and a bias.
    """

    rows: T
    projection: str | None = None


class DraftingOps(ABC, Generic[T]):
    """The part of `Ops` that drafts; its letters."""

    @abstractmethod
    def drop_last_row(self, x: T) -> T:
        """Drops the last row of x [B, N, ...]: [B, N - 1, ...]."""

    # -- blocks of different lengths, which share a step's rows by the chances of their drafts ------------------------

    def divide_blocks(self, next_start: T, bonus: T, rows: int, mask_id: int) -> T:
        """Divides `rows` rows among the blocks to draft behind next_start [B]: their tokens [1, M], bonus and masks."""
        raise NotImplementedError

    def divided_attention(self, layer: AttentionLayer, qkv: T) -> T:
        """Computes `block_attention` of those blocks, whose rows are flat: qkv [1, M, (Hq + 2 Hkv) * D].

        The layer's context rows are in its cache already: `keep_context` comes before, and the blocks over it.
        """
        raise NotImplementedError

    def keep_drafts(self, accepted: T, ids: T, log_probs: T) -> tuple[T, T]:
        """Keeps the likeliest tokens of those blocks' rows and their log-probabilities, [1, M] each.

        Returns the next tokens [B, Bd], zeros behind each block's end; and what one more draft a slot, on average, is
        likely to commit, after none, one and so on, FP32 [Bd - 1]. The acceptance [B] of this step's drafts teaches how
        good such log-probabilities are.
        """
        raise NotImplementedError

    @abstractmethod
    def convolve_block(self, base: str, x: T, kernels: T, side: int) -> T:
        """Mixes each row of a block with the rows before it, whose kernels are a part of its own and a common one.

        y[t] = sum over o < taps of (base[side, o] + kernels[t, side, o]) * x[t - o]; before the block there are zeros.

        Args:
            base: the name of the common part [2, taps, H].
            x: [B, Bd, H].
            kernels: [B, Bd, 2 * taps * G], one number for H / G neighbouring channels.
            side: 0 before a sublayer, 1 after it.
        """

    @abstractmethod
    def top_candidates(self, logits: T, count: int, multiplier: float, softcap: float | None) -> tuple[T, T]:
        """Finds each row's `count` largest logits: ids [B, N, C] int32 of the whole V, and logits [B, N, C] float32.

        logits: [B, N, V/tp]. Those that are returned are z = logit * multiplier, or softcap * tanh(z / softcap).
        """

    @abstractmethod
    def rerank(self, candidates: Candidates[T], predecessor: str, successor: str, gate: Gate[T] | None, first: T) -> T:
        """Chooses each row's token among its candidates by the token before it, row after row: [B, N] int32.

        score(a, b) = logit(b) + sum over r of predecessor[a] * gate * successor[b], in FP32, where a is the token of
        the row before, and `first` [B] before row 0. The largest wins, the first among equals.

        Args:
            predecessor: the name of a table [V, r], by the target's ids.
            successor: the name of a table [V of the drafter, r], by its ids.
            gate: None: ones.
        """
