"""Accepted paths of trees whose K and V a session moves behind a plan's step: TensorRT updates a cache once a step."""

from collections.abc import Mapping

import torch

from trtllm_dflash.models.drafter import PREFIX

Tensor = torch.Tensor


class PlanPaths:
    """Caches of a plan with trees, and the moves of accepted rows in those of the target.

    Caches of one shape lie in one tensor, so that a move is one read and one write of all layers.

    Args:
        shapes: of the caches, [slots, heads, S, D] by name.
        first: the row of the first token in a target's caches: 1 behind a sink's.

    Attributes:
        caches: by name, in the order of `shapes`.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, int, int, int]], dtype: torch.dtype, device: torch.device, first: int
    ) -> None:
        names: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
        for name, shape in shapes.items():
            names.setdefault((name.startswith(PREFIX), shape), []).append(name)
        made = {key: torch.zeros(len(of), *key[1], dtype=dtype, device=device) for key, of in names.items()}
        views = {name: view for key, of in names.items() for name, view in zip(of, made[key], strict=True)}
        self.caches: dict[str, Tensor] = {name: views[name] for name in shapes}
        self._stacks = [stack for (is_drafter, _), stack in made.items() if not is_drafter]
        self._first = first

    def move(self, first_slot: int, start: Tensor, path: Tensor) -> None:
        """Moves K and V of each slot's rows path [B, R] to positions start [B] and on; a row of its own stays."""
        slots = torch.arange(first_slot, first_slot + len(start), device=start.device)[:, None]
        begin = (start.long() + self._first)[:, None]
        to = begin + torch.arange(path.shape[1], device=start.device)
        for stack in self._stacks:  # [layers, slots, heads, S, D]; all rows are read, then written
            stack[:, slots, :, to] = stack[:, slots, :, begin + path]
