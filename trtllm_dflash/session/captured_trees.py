"""Captured steps of trees: what moves the K and V of accepted paths."""

from collections.abc import Collection, Mapping

import torch

from trtllm_dflash import kernels
from trtllm_dflash.models.drafter import PREFIX

Tensor = torch.Tensor


def path_moves(
    caches: Mapping[str, Tensor], windowed: Collection[str], pages: kernels.Pages, window_pages: kernels.Pages
) -> list[tuple[kernels.PathMoves, kernels.Pages]]:
    """Makes the moves of trees' paths in the target's caches, and of those whose pages are others."""
    moves = []
    for has_window, of in ((False, pages), (True, window_pages)):
        named = caches.items()
        moved = [x for name, x in named if (name in windowed) == has_window and not name.startswith(PREFIX)]
        if moved:
            moves.append((kernels.PathMoves(moved), of))
    return moves
