"""RMSNorm of rows and what a router says of them, in one kernel."""

import torch

from trtllm_dflash.kernels.checks import address, check
from trtllm_dflash.kernels.library import run, stream, structure

Tensor = torch.Tensor

#: Numbers in a router's outcome up to which `router` takes less time than the norm and a product by cuBLAS.
ROUTER_LOGITS = 33_000
_MOST_SIZE = 4096
_CHUNK = 32

RouterParams = structure(
    "dflash_router_params",
    ints="rows size outputs is_norm_wide",
    floats="eps",
    pointers="x pending norm weight bias sum out logits",
)


def takes_router(x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `router` takes rows x [B, N, H], a norm's weights [H], and a weight [O, H] with its bias [O]."""
    size = x.shape[-1]
    of_rows = [x, weight] if bias is None else [x, weight, bias]
    is_right = all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in of_rows)
    is_normed = norm.dtype in (torch.bfloat16, torch.float32) and norm.is_contiguous()
    is_aligned = all(each.data_ptr() % 16 == 0 for each in (x, norm, weight))
    is_small = x.numel() * len(weight) <= ROUTER_LOGITS * size
    return is_right and is_normed and is_aligned and is_small and 0 < size <= _MOST_SIZE and size % _CHUNK == 0


def router(
    x: Tensor, pending: Tensor | None, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds `pending` to x [B, N, H], norms the sum, and multiplies that by a weight [O, H]; see `takes_router`.

    Returns:
        The sum and what is normed, [B, N, H], and the product [B, N, O].
    """
    check(takes_router(x, norm, weight, bias), f"a router {tuple(weight.shape)} of rows {tuple(x.shape)} {x.dtype}")
    outputs, size = weight.shape
    check(size == x.shape[-1] == len(norm), f"a router {tuple(weight.shape)} and a norm of {len(norm)}")
    check(bias is None or bias.shape == (outputs,), "a bias that is not the router's")
    is_pending = pending is None or (pending.shape == x.shape and pending.dtype == x.dtype and pending.is_contiguous())
    check(is_pending, "what is pending must have x's shape")
    total = x if pending is None else torch.empty_like(x)
    out, logits = torch.empty_like(x), torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    params = RouterParams(
        rows=x.numel() // size,
        size=size,
        outputs=outputs,
        is_norm_wide=int(norm.dtype == torch.float32),
        eps=eps,
        x=x.data_ptr(),
        pending=address(pending),
        norm=norm.data_ptr(),
        weight=weight.data_ptr(),
        bias=address(bias),
        sum=None if pending is None else total.data_ptr(),
        out=out.data_ptr(),
        logits=logits.data_ptr(),
    )
    run("dflash_router", params, stream())
    return total, out, logits
