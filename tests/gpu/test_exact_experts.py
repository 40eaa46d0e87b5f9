"""Mixtures of experts whose rows depend on nothing else in the batch, on a GPU: to the bit, with no tolerance."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter, make_qwen3_moe
from tests.gpu import test_fp8_experts as fp8
from tests.gpu import test_int4_experts as int4
from tests.gpu import test_moe as numbers
from tests.gpu import test_nvfp4_experts as nvfp4
from tests.gpu.test_cuda import tokens
from tests.gpu.test_exact import assert_same
from tests.gpu.test_expert_texts import gpt_oss
from tests.gpu.test_hybrids import PARAMS, PROMPTS, load
from tests.gpu.test_kernels import HALVES, why_not_hopper
from tests.quantized import quantize_folder
from trtllm_dflash import SamplingParams
from trtllm_dflash.ops.cuda_experts import moe_kernel, tile_experts
from trtllm_dflash.ops.experts import Experts

WHY_NOT = why_not_hopper("exact rows")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

#: Rows of a call: the kernels for few take the first numbers, those for many the last, where there are such.
COUNTS = (1, 7, 16, 100, 512)
#: How a type's weights, rows and logits are made, of 512 rows.
KINDS: dict[str, tuple[Any, Callable[[Any], tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]]]] = {
    "numbers": (replace(numbers.QWEN3_MOE, rows=512, experts=32, count=32), numbers.make_kernel_inputs),
    "mxfp4": (numbers.Case(512, hidden=576), numbers.make_kernel_inputs),
    "fp8": (replace(fp8.QWEN3, rows=512), lambda case: fp8.make_inputs(case, by_block=False)),
    "fp8 by block": (replace(fp8.QWEN3, rows=512), lambda case: fp8.make_inputs(case, by_block=True)),
    "int4": (replace(int4.KIMI, rows=512, experts=32, count=32), int4.make_inputs),
    "nvfp4": (replace(nvfp4.QWEN3, rows=512), nvfp4.make_inputs),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_experts_give_a_row_is_the_same_alone_and_among_others(kind, dtype, poisoned):
    case, make = KINDS[kind]
    case = replace(case, dtype=dtype)
    weights, x, logits = make(case)
    tile_experts(weights, case.dtype, torch.cuda.get_device_capability())
    moe = moe_kernel(case.layer, Experts.of(weights, case.layer))
    whole = moe(x, logits)
    for count in COUNTS:
        for first in (0, 3, 512 - count):
            rows = slice(first, first + count)
            found = moe(x[rows].contiguous(), logits[rows].contiguous())
            assert_same(found, whole[rows][: len(found)], f"{count} rows from the one at {first} on")


@pytest.mark.parametrize("layout", [None, "blocks", "nvfp4", "mxfp4"], ids=["bf16", "fp8", "nvfp4", "gpt-oss"])
def test_texts_are_the_same_drafted_or_not_alone_or_in_a_batch(layout, tmp_path):
    """Prompts in pieces, and more of them than slots; of gpt-oss, whose windows are shorter than they are."""
    shape = {"head_size": 64, "top_k": 3, "hidden": 256, "intermediate": 256, "vocab": 16}
    if layout == "mxfp4":
        target = gpt_oss(tmp_path / "target", top_k=3, experts=16)  # a product of ours has whole sixteens of outputs
    else:
        target = make_qwen3_moe(tmp_path / "target", **shape)
    if layout in ("blocks", "nvfp4"):
        quantize_folder(target, layout, within=".experts.")
    drafter = make_drafter(tmp_path / "drafter", target, block_size=16, head_size=64, intermediate=128, seed=3)
    sampled = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, top_p=0.95, seed=5)
    with load((target, drafter), precision="bf16", kernels="exact") as llm:
        accepted = 0
        for params in (PARAMS, sampled):
            plain = tokens(llm.generate(PROMPTS, params, draft=False))
            drafted = llm.generate(PROMPTS, params)
            assert tokens(drafted) == plain
            for i, prompt in enumerate(PROMPTS):
                assert tokens(llm.generate([prompt], params)) == plain[i : i + 1], f"drafted alone, {i}"
                assert tokens(llm.generate([prompt], params, draft=False)) == plain[i : i + 1], f"plain alone, {i}"
            accepted += sum(sum(each.accepted_per_step) for each in drafted)
        assert accepted > 0
