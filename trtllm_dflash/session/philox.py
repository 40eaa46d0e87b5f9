"""Philox4x32-10 (Salmon et al., SC 2011): random numbers that are a pure function of a key and a counter.

A token's number depends on its request's seed and its absolute position alone: not on the batch, the step it fell in,
or whether it was drafted.
"""

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Computes four words from a counter of four and a key of two; all int64 tensors of one shape with 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return [c0, c1, c2, c3]


def uniform_numbers(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draws a number in [0, 1) for each position [B, R] by its slot's seed [B] int64: [B, R] FP32, on a 2^-24 grid."""
    positions = positions.long()
    seeds = seeds[:, None].expand_as(positions)
    zero = torch.zeros_like(positions)
    words = philox([positions, zero, zero, zero], [seeds & _WORD, (seeds >> 32) & _WORD])
    return (words[0] >> 8).float() * 2.0**-24


def _multiply(x: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes high and low word of the 64-bit product; in halves, because a signed int64 cannot hold it."""
    low = (x & 0xFFFF) * constant  # below 2^48
    high = (x >> 16) * constant  # below 2^48
    carried = high + (low >> 16)
    return carried >> 16, ((carried & 0xFFFF) << 16) | (low & 0xFFFF)
