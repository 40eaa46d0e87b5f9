"""What launchers refuse that only a caller in C can ask for: our Python checks it before."""

import ctypes

import pytest
import torch

from tests.gpu.test_kernels import why_not, why_not_hopper
from trtllm_dflash import kernels
from trtllm_dflash.kernels.attention import AttentionParams
from trtllm_dflash.kernels.experts import MoEParams
from trtllm_dflash.kernels.library import Pointer
from trtllm_dflash.kernels.products import SkinnyGemmParams

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
on_hopper = pytest.mark.skipif(bool(why_not_hopper("attention")), reason=why_not_hopper("attention"))

#: As the CUDA runtime numbers them.
SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 1, 801
#: Of a tensor that no launcher reads before it has looked at everything else.
SOME = 1 << 20

LATENTS = {
    "dtype": 1,
    "slots": 1,
    "rows": 2,
    "heads": 8,
    "kv_heads": 1,
    "head_size": 576,
    "cache_rows": 64,
    "causal": 1,
}
ROWS = {"dtype": 1, "slots": 1, "rows": 2, "heads": 8, "kv_heads": 2, "head_size": 128, "cache_rows": 64, "causal": 1}
PROMPTS = {**ROWS, "slots": 0, "segments": SOME, "page_table": SOME, "pages": 1, "page_rows": 64}
MOE = {"dtype": 1, "logits_dtype": 1, "rows": 3, "hidden": 256, "columns": 256, "experts": 8, "count": 8, "top_k": 2}
MOE |= {"logits_row_stride": 8}
NVFP4 = dict.fromkeys(("gate_up_row_scales", "down_row_scales"), SOME)
PRODUCT = {"dtype": 1, "weight_dtype": 1, "rows": 0, "inputs": 128, "outputs": 64}


def workspace(name, params):
    needed = ctypes.c_size_t()
    return getattr(kernels.load().functions, name + "_workspace")(ctypes.byref(params), ctypes.byref(needed))


def launch(name, params):
    """Of a shape that there is nothing to compute of: no workspace is needed."""
    rest = (Pointer(), ctypes.c_size_t()) if name == "dflash_exact_gemm" else ()
    return getattr(kernels.load().functions, name)(
        ctypes.byref(params), *rest, Pointer(torch.cuda.current_stream().cuda_stream)
    )


@on_hopper
@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({}, SUCCESS),
        ({"row_path": SOME}, INVALID_VALUE),
        ({"block": 2}, INVALID_VALUE),
        ({"is_exact": 1}, NOT_SUPPORTED),
    ],
    ids=str,
)
def test_latent_attention_has_neither_trees_nor_blocks_nor_exact_rows(asked, code):
    assert workspace("dflash_latent_attention", AttentionParams(**LATENTS | asked)) == code


@on_hopper
@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({}, SUCCESS),
        ({"row_path": SOME}, INVALID_VALUE),
        ({"added": SOME}, INVALID_VALUE),
        ({"heads": 0}, INVALID_VALUE),
        ({"is_exact": 1}, NOT_SUPPORTED),
    ],
    ids=str,
)
def test_prompts_are_neither_trees_nor_exact(asked, code):
    assert launch("dflash_attend_prompts", AttentionParams(**PROMPTS | asked)) == code


def test_attention_needs_heads():
    assert workspace("dflash_attention", AttentionParams(**ROWS)) == SUCCESS
    assert workspace("dflash_attention", AttentionParams(**ROWS | {"heads": 0})) == INVALID_VALUE


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({}, SUCCESS),
        ({"gelu": 1}, SUCCESS),
        ({"clamped": 1}, SUCCESS),
        ({"gelu": 1, "clamped": 1}, INVALID_VALUE),
        ({"rows": -1}, INVALID_VALUE),
        ({"format": 1}, SUCCESS),
        ({"format": 1, "gate_up_scales": SOME, "down_scales": SOME}, INVALID_VALUE),
        ({"format": 2, "gate_up_scales": SOME, "down_scales": SOME}, SUCCESS),
        ({"format": 2, "gate_up_scales": SOME}, INVALID_VALUE),
        ({"format": 4}, INVALID_VALUE),
        ({"format": 5}, INVALID_VALUE),
        ({"format": 5, **NVFP4, "gate_up_scales": SOME}, INVALID_VALUE),
        ({"format": 5, **NVFP4}, SUCCESS),
        ({"format": 6, **NVFP4}, INVALID_VALUE),
        ({"has_shared": 1}, SUCCESS),
        ({"has_shared": 1, "shared_gate": SOME}, SUCCESS),
        ({"has_shared": 2}, INVALID_VALUE),
        ({"shared_gate": SOME}, INVALID_VALUE),
        ({"logits_row_stride": 7}, INVALID_VALUE),
        ({"experts": 64, "count": 64, "top_k": 32, "logits_row_stride": 64}, SUCCESS),
        ({"experts": 64, "count": 64, "top_k": 32, "logits_row_stride": 64, "has_shared": 1}, INVALID_VALUE),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["dflash_moe", pytest.param("dflash_moe_many", marks=on_hopper)])
def test_experts_are_clamped_or_go_through_gelu_and_packed_ones_have_scales(name, asked, code):
    assert workspace(name, MoEParams(**MOE | asked)) == code


@pytest.mark.parametrize(
    ("asked", "code"),
    [({}, SUCCESS), ({"swiglu": 1, "gelu": 1}, SUCCESS), ({"gelu": 1}, INVALID_VALUE), ({"rows": -1}, INVALID_VALUE)],
    ids=str,
)
@pytest.mark.parametrize(
    "name", ["dflash_skinny_gemm", *(pytest.param(f"dflash_{x}_gemm", marks=on_hopper) for x in ("wide", "exact"))]
)
def test_products_have_gelu_with_gates_alone(name, asked, code):
    assert launch(name, SkinnyGemmParams(**PRODUCT | asked)) == code
