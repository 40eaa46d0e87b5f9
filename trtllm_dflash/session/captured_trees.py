"""Captured steps of trees: what moves the K and V of accepted paths."""

from collections.abc import Collection, Mapping

import torch

from trtllm_dflash import kernels
from trtllm_dflash.models.drafter import PREFIX

Tensor = torch.Tensor


def path_moves(
    caches: Mapping[str, Tensor], windowed: Collection[str], pages: kernels.Pages, window_pages: kernels.Pages
) -> kernels.PathMoves:
    """Makes the moves of trees' paths in the target's caches, and in those whose pages are others."""
    own: dict[bool, list[Tensor]] = {False: [], True: []}
    for name, cache in caches.items():
        if not name.startswith(PREFIX):
            own[name in windowed].append(cache)
    return kernels.PathMoves(own[False], pages, own[True], window_pages)
