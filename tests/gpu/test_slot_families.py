"""Families that our kernels compute in part, or in 16 bits alone: the CPU's logits in FP32, and as near in 16 bits."""

import pytest
import torch

from tests.checkpoints import make_drafter, make_minimax_m2, make_target
from tests.gpu.test_cuda import NEAR_TIE, tokens
from tests.gpu.test_hybrids import PARAMS, PROMPTS, load
from tests.gpu.test_kernels import why_not
from tests.near_ties import all_logits, assert_each_is_nearly_the_largest
from trtllm_dflash import kernels

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def gemma(folder, **shape):
    from tests.test_gemma4 import gemma_pair  # it needs a transformers that has Gemma 4

    return gemma_pair(folder, **shape)


def minimax(folder, **shape):
    target = make_minimax_m2(folder / "target", vocab_size=16, **shape)
    return target, make_drafter(folder / "drafter", target, heads=8, head_size=64, seed=3)


def kimi(folder, **shape):
    from tests.test_kimi_k25 import kimi_pair

    return kimi_pair(folder, **shape)


WIDE = {"hidden_size": 128, "intermediate_size": 128}
GEMMA = {**WIDE, "head_dim": 256}
OURS = f"our CUDA kernels {kernels.ABI_VERSION}"
#: Each family's pair, the shape whose heads our kernels have, and what computes its attention. In 16 bits rows take all
#: experts: another choice of them would be no near-tie of the logits.
FAMILIES = {
    "gemma-4 with heads of 32": (gemma, GEMMA, f"{OURS} and torch"),
    "minimax-m2": (minimax, {**WIDE, "head_dim": 64, "rotary_dim": 32, "num_experts_per_tok": 8}, OURS),
    "kimi-k2.5": (kimi, {"hidden_size": 128, "num_experts_per_tok": 8}, "torch"),
}
#: Latents as published, which our kernel has, of experts that our kernels have too.
KIMI = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_experts_per_tok": 8,
}
HALVES = {**FAMILIES, "kimi-k2.5 as published": (kimi, KIMI, OURS)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_logit_is_the_cpus(family, tmp_path):
    make, _, _ = FAMILIES[family]
    ids = (PROMPTS[2] + PROMPTS[1])[:48]
    folders = make(tmp_path)
    with load(folders) as gpu, load(folders, "cpu") as cpu:
        assert gpu.session.choice.attention == gpu.session.choice.products == "torch"
        found, expected = all_logits(gpu, ids).cpu(), all_logits(cpu, ids)
        texts = [tokens(llm.generate(PROMPTS, PARAMS, draft)) for llm in (gpu, cpu) for draft in (True, False)]
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 1e-4, errors
    assert texts[0] == texts[1] == texts[2] == texts[3]


@pytest.mark.parametrize("family", HALVES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_logits_are_as_near_to_fp32_as_the_cpus(family, precision, tmp_path):
    """Not near-ties of texts: rounding alone moves these models' logits by more than lies between them."""
    make, shape, attention = HALVES[family]
    folders = make(tmp_path, **shape)
    # Of more rows than attention takes at once, of fewer, and of as few as our products take.
    prompts = PROMPTS[2], PROMPTS[3], PROMPTS[1][:16]
    with load(folders, precision=precision) as gpu:
        choice = gpu.session.choice
        assert (choice.attention, choice.products) == (attention, OURS)
        found = [all_logits(gpu, ids).float().cpu() for ids in prompts]
        drafted = tokens(gpu.generate(PROMPTS, PARAMS))
        assert all(len(reply) == PARAMS.max_tokens for reply in drafted)
    with load(folders, "cpu", precision) as rounded, load(folders, "cpu") as exact:
        for ids, logits in zip(prompts, found, strict=True):
            expected = all_logits(exact, ids)
            errors = [float((x.float() - expected).norm()) for x in (logits, all_logits(rounded, ids))]
            print(family, precision, len(ids), errors, float(expected.norm()))
            assert errors[0] < 2 * errors[1], (len(ids), errors)


@pytest.mark.skipif(not why_not() and torch.cuda.get_device_capability() != (9, 0), reason="needs SM90")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_kimis_drafted_and_plain_tokens_are_fp32s_or_near_ties(precision, tmp_path):
    """By our kernels for latent attention and for experts in INT4.

    On an H200 in BF16 one token lay further below than by 2 * NEAR_TIE roundings, by 1.2 times as much.
    """
    folders = kimi(tmp_path, **KIMI)
    with load(folders, precision=precision) as llm:
        choice = llm.session.choice
        assert choice.attention == choice.experts == OURS
        texts = [tokens(llm.generate(PROMPTS, PARAMS, draft)) for draft in (True, False)]
        dtype = llm.config.dtype
    with load(folders, "cpu") as exact:
        for each in texts:
            assert all(len(text) == PARAMS.max_tokens for text in each)
            others = assert_each_is_nearly_the_largest(exact, PROMPTS, each, dtype=dtype, count=4 * NEAR_TIE)
            print(precision, others, "near-ties; texts alike:", sum(map(list.__eq__, *texts)))


def test_blocks_of_more_rows_than_our_attention_takes_are_drafted_and_verified(tmp_path):
    """In BF16: a slot's rows are attended in cuts, those of the block that is drafted by torch."""
    shape = {"hidden": 128, "head_size": 64, "intermediate": 128, "vocab": 16, "dtype": torch.bfloat16}
    target = make_target(tmp_path / "target", **shape)
    folders = target, make_drafter(tmp_path / "drafter", target, head_size=64, block_size=40)
    with load(folders, precision="bf16") as llm:
        assert "blocks of at most 32 rows, not of 40" in str(llm.session.choice)
        texts = [tokens(llm.generate(PROMPTS, PARAMS, draft)) for draft in (True, False)]
    with load(folders, "cpu") as exact:
        for each in texts:
            assert all(len(text) == PARAMS.max_tokens for text in each)
            assert_each_is_nearly_the_largest(exact, PROMPTS, each, dtype=torch.bfloat16, count=2 * NEAR_TIE)
