"""Embeddings of tokens, and of blocks to draft."""

import torch

from trtllm_dflash.kernels.checks import DTYPES, HALVES, check
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor


EmbedParams = structure(
    "dflash_embed_params", ints="dtype rows size vocabulary block mask_id", pointers="table ids out"
)


def embed(table: Tensor, ids: Tensor, block: int = 0, mask_id: int = 0) -> Tensor:
    """Looks up ids [B, N] in table [V, H]: [B, N, H]. With a block, ids are [B], each followed by block - 1 masks.

    An id that the table does not have gives zeros.
    """
    check(table.dtype in HALVES and table.is_contiguous() and table.shape[1] % 8 == 0, "a table of 16-bit rows")
    check(ids.dtype == torch.int32 and ids.is_contiguous() and ids.dim() == (1 if block else 2), "ids must be int32")
    shape = (len(ids), block) if block else tuple(ids.shape)
    out = torch.empty(*shape, table.shape[1], dtype=table.dtype, device=table.device)
    params = EmbedParams(
        dtype=DTYPES[table.dtype],
        rows=shape[0] * shape[1],
        size=table.shape[1],
        vocabulary=table.shape[0],
        block=block,
        mask_id=mask_id,
        table=table.data_ptr(),
        ids=ids.data_ptr(),
        out=out.data_ptr(),
    )
    run("dflash_embed", params, stream())
    return out
