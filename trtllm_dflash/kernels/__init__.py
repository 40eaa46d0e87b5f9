"""The CUDA kernels of `plugins/`, called on torch tensors.

Each function checks what it is given, launches on torch's current stream and returns. Nothing is copied, no one waits:
all may be captured into a CUDA graph. What they compute, and where they round, is said in `dflash_kernels.h`.
"""

from trtllm_dflash.kernels.all_reduce import ALL_REDUCE_BYTES, ALL_REDUCE_RANKS, ALL_REDUCE_SHARED, AllReduce
from trtllm_dflash.kernels.append import Append, takes_rotary
from trtllm_dflash.kernels.attention import (
    EXACT_TAIL,
    MAX_ROWS,
    TREE_ROWS,
    attend_prompts,
    attend_rows,
    attention,
    takes_heads,
    takes_prompts,
)
from trtllm_dflash.kernels.caches import Scales
from trtllm_dflash.kernels.checks import ALL_HEAD_SIZES, HALVES, HEAD_SIZES
from trtllm_dflash.kernels.choose import argmax
from trtllm_dflash.kernels.delta_net import MOST_KEPT, DeltaNet, advance_states, joins_rows, why_no_delta_net
from trtllm_dflash.kernels.draft_tree import (
    TOP_COUNT,
    AcceptedPaths,
    PathMoves,
    accept_paths,
    grow_tree,
    top_ids,
)
from trtllm_dflash.kernels.embed import embed
from trtllm_dflash.kernels.experts import GRANULE, MOE_ROWS, Matrix, MoE, Routing, part_bytes, takes_tiles
from trtllm_dflash.kernels.gate import gate, takes_gate
from trtllm_dflash.kernels.latent_attention import LatentAppend, attend_latent, takes_latent
from trtllm_dflash.kernels.library import (
    ABI_VERSION,
    LIBRARY_VARIABLE,
    MOST_JOINED,
    Library,
    find,
    load,
    load_for,
    remedy,
)
from trtllm_dflash.kernels.norm import add_normed, add_rms_norm, cap, rms_norm, swiglu, takes_cap, takes_norm
from trtllm_dflash.kernels.pages import PAGE_TILE, PageCopies, Pages, set_pages
from trtllm_dflash.kernels.products import (
    SKINNY_GPUS,
    SKINNY_ROWS,
    WIDE_ROWS,
    Norm,
    bulk_gemm,
    exact_gemm,
    skinny_gemm,
    suits_bulk,
    suits_wide,
    suits_wide_fp8,
    takes_skinny,
    takes_wide,
    wide_gemm,
    wide_gemm_fp8,
)
from trtllm_dflash.kernels.quantize import quantize_blocks, quantize_rows, takes_quantize
from trtllm_dflash.kernels.router import ROUTER_LOGITS, router, takes_router
from trtllm_dflash.kernels.row_attention import (
    attend_single_rows,
    fits_single_rows,
    row_arrivals,
    takes_single_rows,
)
from trtllm_dflash.kernels.rows import MOST_SEGMENTS, Rows, accept_rows, begin_rows, end_rows, send
from trtllm_dflash.kernels.shape import (
    KeptPenalties,
    RowMasks,
    keep_replies,
    log_probabilities,
    shape_changed_logits,
    shape_logits,
)
from trtllm_dflash.kernels.shares import MOST_SHARED, Blocks, Foretold, divide_blocks, divide_rows, keep_drafts
from trtllm_dflash.kernels.support import HOPPER, OLDEST_GPU, gpu_name, why_unsupported

__all__ = [
    "ABI_VERSION",
    "ALL_HEAD_SIZES",
    "ALL_REDUCE_BYTES",
    "ALL_REDUCE_RANKS",
    "ALL_REDUCE_SHARED",
    "EXACT_TAIL",
    "GRANULE",
    "HALVES",
    "HEAD_SIZES",
    "HOPPER",
    "LIBRARY_VARIABLE",
    "MAX_ROWS",
    "MOE_ROWS",
    "MOST_JOINED",
    "MOST_KEPT",
    "MOST_SEGMENTS",
    "MOST_SHARED",
    "OLDEST_GPU",
    "PAGE_TILE",
    "ROUTER_LOGITS",
    "SKINNY_GPUS",
    "SKINNY_ROWS",
    "TOP_COUNT",
    "TREE_ROWS",
    "WIDE_ROWS",
    "AcceptedPaths",
    "AllReduce",
    "Append",
    "Blocks",
    "DeltaNet",
    "Foretold",
    "KeptPenalties",
    "LatentAppend",
    "Library",
    "Matrix",
    "MoE",
    "Norm",
    "PageCopies",
    "Pages",
    "PathMoves",
    "Routing",
    "RowMasks",
    "Rows",
    "Scales",
    "accept_paths",
    "accept_rows",
    "add_normed",
    "add_rms_norm",
    "advance_states",
    "argmax",
    "attend_latent",
    "attend_prompts",
    "attend_rows",
    "attend_single_rows",
    "attention",
    "begin_rows",
    "bulk_gemm",
    "cap",
    "divide_blocks",
    "divide_rows",
    "embed",
    "end_rows",
    "exact_gemm",
    "find",
    "fits_single_rows",
    "gate",
    "gpu_name",
    "grow_tree",
    "joins_rows",
    "keep_drafts",
    "keep_replies",
    "load",
    "load_for",
    "log_probabilities",
    "part_bytes",
    "quantize_blocks",
    "quantize_rows",
    "remedy",
    "rms_norm",
    "router",
    "row_arrivals",
    "send",
    "set_pages",
    "shape_changed_logits",
    "shape_logits",
    "skinny_gemm",
    "suits_bulk",
    "suits_wide",
    "suits_wide_fp8",
    "swiglu",
    "takes_cap",
    "takes_gate",
    "takes_heads",
    "takes_latent",
    "takes_norm",
    "takes_prompts",
    "takes_quantize",
    "takes_rotary",
    "takes_router",
    "takes_single_rows",
    "takes_skinny",
    "takes_tiles",
    "takes_wide",
    "top_ids",
    "why_no_delta_net",
    "why_unsupported",
    "wide_gemm",
    "wide_gemm_fp8",
]
