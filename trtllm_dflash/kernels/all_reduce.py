"""Small sums over ranks that read each other's memory."""

import torch

from trtllm_dflash.kernels.checks import DTYPES
from trtllm_dflash.kernels.library import MOST_RANKS, Pointer, load, run, stream, structure

Tensor = torch.Tensor

#: How many ranks `AllReduce` sums over, the most bytes that it takes, and those of each rank's shared memory.
ALL_REDUCE_RANKS = (2, 4, 8)
ALL_REDUCE_BYTES = 1 << 20
ALL_REDUCE_SHARED = 2 * ALL_REDUCE_BYTES + 4096


AllReduceParams = structure(
    "dflash_all_reduce_params",
    ints="dtype ranks rank",
    longs="count",
    pointers="x out",
    by_rank="shared",
)


class AllReduce:
    """Sums small tensors over ranks that read each other's memory: in FP32, in the order of ranks, the same on all.

    Every rank makes the same calls in one order, or waits for the others for ever.

    Args:
        shared: addresses in this process of each rank's shared memory: ALL_REDUCE_SHARED bytes, zeros at first.
        rank: this one.

    Raises:
        EngineError: the kernels are not built, or are of an older version.
    """

    def __init__(self, shared: list[int], rank: int) -> None:
        load()
        self._shared = (Pointer * MOST_RANKS)(*shared)
        self._ranks, self._rank = len(shared), rank

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel can sum x: its size, type and layout."""
        return x.dtype in DTYPES and x.is_contiguous() and x.nbytes <= ALL_REDUCE_BYTES and x.nbytes % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        """Sums x over the ranks."""
        out = torch.empty_like(x)
        params = AllReduceParams(
            dtype=DTYPES[x.dtype],
            ranks=self._ranks,
            rank=self._rank,
            count=x.numel(),
            x=x.data_ptr(),
            out=out.data_ptr(),
            shared=self._shared,
        )
        run("dflash_all_reduce", params, stream())
        return out
