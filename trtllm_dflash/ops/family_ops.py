"""Operations that some families alone need; a backend that lacks them refuses those before it begins: see `Decoder`."""

from abc import ABC
from typing import Generic, TypeVar

from trtllm_dflash.ops.drafting import DraftingOps
from trtllm_dflash.ops.layers import AttentionLayer, DeltaLayer, LatentLayer

T = TypeVar("T")


class FamilyOps(DraftingOps[T], ABC, Generic[T]):
    """The part of `Ops` that some families alone need; its letters."""

    # -- hybrids -----------------------------------------------------------------------------------------------------

    def columns(self, x: T, first: int, count: int) -> T:
        """Takes columns first..first+count-1 of x [B, N, C]: [B, N, count]."""
        raise NotImplementedError

    def gated(self, x: T, gate: T) -> T:
        """Multiplies x [B, N, C] by sigmoid(gate), [B, N, C] or [B, N, 1]."""
        raise NotImplementedError

    def gated_delta(self, layer: DeltaLayer, x: T, gates: T, start: T) -> T:
        """Computes a gated delta net (arXiv 2412.06464) of rows at positions from start [B] on: [B, N, Hv*Dv].

        x [B, N, C + Hv*Dv] holds the channels of queries, keys and values, then the output gates z; gates [B, N, 2 Hv],
        of each value head, b and then a. In FP32, per row t:

            y_t = silu(sum over i < kernel of conv1d[:, i] * x_{t - kernel + 1 + i}), zeros before position 0
            q, k, v = y_t by heads;  q, k <- each / sqrt(sum of its squares + 1e-6);  q <- q / sqrt(Dk)
            S <- exp(-exp(A_log) * softplus(a + dt_bias)) * S        [Dk, Dv] of each value head, 0 before position 0
            u = sigmoid(b) * (v - k S);  S <- S + k^T u;  o = q S
            out_t = o / sqrt(mean of its squares + norm_eps) * norm.weight * silu(z)

        Nothing is rolled back: of a slot is kept S before its last call's rows, or before its last block of them, and
        those rows' u, k, decays and x. The next call's start says how many of them stay, and S absorbs these first. A
        slot that takes no part keeps all as it is; one that starts at 0 needs nothing.
        """
        raise NotImplementedError

    # -- others' -----------------------------------------------------------------------------------------------------

    def norm_projections(self, layer: AttentionLayer, qkv: T, eps: float) -> T:
        """Norms each row's queries of all heads together, on all ranks, and its keys likewise: qkv as it came.

        By `{prefix}self_attn.q_norm.weight` [heads*D] and `k_norm.weight` [kv_heads*D]; qkv as in `self_attention`.
        """
        raise NotImplementedError

    def latent_attention(self, layer: LatentLayer, q: T, kv: T, start: T) -> T:
        """Attends causally over the cache and the rows themselves: [B, N, heads * value size].

        Args:
            q: [B, N, heads * (plain size + rotary size)], as projected.
            kv: [B, N, rank + rotary size], as projected; appended to the cache at start [B], normed and rotated.
        """
        raise NotImplementedError

    def scaled_embedding(self, name: str, ids: T, factor: float) -> T:
        """Embeds ids [B, N] by `name`, times the factor as the table's type has it: [B, N, H]."""
        raise NotImplementedError

    def scale(self, x: T, factor: float) -> T:
        """Multiplies x by a factor, in FP32 inside."""
        raise NotImplementedError

    def multiply(self, name: str, x: T) -> T:
        """Multiplies x by the one number `name` [1]."""
        raise NotImplementedError

    def unit_norm(self, x: T, eps: float) -> T:
        """Computes x / sqrt(mean(x^2) + eps) over the last dimension, in FP32 inside."""
        raise NotImplementedError

    def geglu(self, x: T) -> T:
        """Computes gelu(gate) * up [B, N, F] of x [B, N, 2F], which holds gate, then up; GELU by its form with tanh."""
        raise NotImplementedError

    def cap(self, logits: T, cap: float) -> T:
        """Computes cap * tanh(logits / cap)."""
        raise NotImplementedError
