"""Accepted paths of trees whose K and V a session moves behind a plan's step: TensorRT updates a cache once a step."""

from collections.abc import Mapping
from math import prod

import torch

from trtllm_dflash.models.drafter import PREFIX
from trtllm_dflash.ops.draft_tree import ranks_of
from trtllm_dflash.session.outcome import Outcome

Tensor = torch.Tensor

#: Bytes that TensorRT wants a tensor's address to be a multiple of.
ALIGNMENT = 256


class PlanPaths:
    """Caches of a plan with trees, and the moves of accepted rows in those of the target.

    Caches of one shape lie in one tensor, so that a move is one read and one write of all layers.

    Args:
        shapes: of the caches, [slots, heads, S, D] by name.
        first: the row of the first token in a target's caches: 1 behind a sink's.
        most: rows of the longest path.

    Attributes:
        caches: by name, in the order of `shapes`.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
        first: int,
        most: int,
    ) -> None:
        names: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
        for name, shape in shapes.items():
            names.setdefault((name.startswith(PREFIX), shape), []).append(name)
        made = {key: _stack(len(of), key[1], dtype, device) for key, of in names.items()}
        views = {name: view for key, of in names.items() for name, view in zip(of, made[key], strict=True)}
        self.caches: dict[str, Tensor] = {name: views[name] for name in shapes}
        self._stacks = [stack for (is_drafter, _), stack in made.items() if not is_drafter]
        self._first = first
        self._depths = torch.arange(most, device=device)
        # What is read before it is written, of one stack after the other; made once, not in each captured step.
        largest = max(stack[:, :, :, :most].numel() for stack in self._stacks)
        self._moved = torch.empty(largest, dtype=dtype, device=device)

    def move(self, first_slot: int, start: Tensor, path: Tensor) -> None:
        """Moves K and V of each slot's rows path [B, R] to positions start [B] and on; a row of its own stays.

        Args:
            path: of at most as many rows as the longest has.
        """
        slots, rows = path.shape
        begin = (start.long() + self._first)[:, None]
        read, write = ((begin + x)[None, :, None, :, None] for x in (path, self._depths[:rows]))
        for stack in self._stacks:
            here = stack[:, first_slot : first_slot + slots]
            shape = (*here.shape[:3], rows, here.shape[4])
            moved = self._moved[: prod(shape)].view(shape)
            torch.gather(here, 3, read.expand(shape), out=moved)
            here.scatter_(3, write.expand(shape), moved)


class PathOutcome(Outcome):
    """The outcome of a plan's step where drafts may be trees: [B, 1 + 3 R].

    Behind `accepted` and `target_ids` come the accepted path and all rows' parents, an output and an input of the plan:
    the host finds drafts' ranks, and the device has no work more. A piece of a prompt has neither.
    """

    @property
    def ranks(self) -> list[list[int]]:
        whole = self.read_whole()
        rows = (len(whole[0]) - 1) // 3
        return [
            ranks_of(row[1 + 2 * rows :], row[1 + rows : 2 + rows + row[0]]) if rows else []
            for row in (whole if self._places is None else [whole[place] for place in self._places])
        ]


def _stack(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes so many contiguous tensors of zeros, each of which begins at an aligned address: [count, *shape]."""
    unit = ALIGNMENT // dtype.itemsize
    stride = -(-prod(shape) // unit) * unit
    return torch.zeros(count, stride, dtype=dtype, device=device)[:, : prod(shape)].view(count, *shape)
