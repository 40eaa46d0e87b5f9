"""Gemma 4 in captured steps of flat rows: as near to FP32 as the CPU, drafted as plain, and in pages given back."""

import random
from dataclasses import dataclass

import pytest
import torch

from tests.checkpoints import edit_tensors, make_drafter
from tests.gpu.test_cuda import NEAR_TIE, tokens
from tests.gpu.test_hybrids import PARAMS, PROMPTS, load
from tests.gpu.test_kernels import why_not_hopper
from tests.near_ties import all_logits, assert_each_is_nearly_the_largest
from trtllm_dflash import SamplingParams, kernels
from trtllm_dflash.cost.memory import pages_on_gpu

pytestmark = pytest.mark.skipif(bool(why_not_hopper("heads of 256 and 512")), reason=why_not_hopper("heads of 256"))

#: The published sizes of heads, and wide enough for our products. In 16 bits rows take all experts: another choice of
#: them would be no near-tie of the logits.
SHAPE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 256, "global_head_dim": 512}
KINDS = {"dense": {}, "experts": {"experts": True, "top_k_experts": 8}}
HALVES = "bf16", "fp16"


def soften(tensors):
    """Makes the logits of attention deviate by 1, as trained norms do: they are not divided by sqrt(D).

    By 16 or more, as random norms leave them, rounding moves these models' logits by more than lies between them.
    """
    for name in tensors:
        if name.endswith("self_attn.q_norm.weight"):
            tensors[name] /= len(tensors[name]) ** 0.5


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A Gemma 4 and its drafter, by kind."""
    from tests.test_gemma4 import gemma_pair  # it needs a transformers that has Gemma 4

    made = {}

    def make(kind, **shape):
        key = kind, tuple(shape.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("pair")
            target, _ = gemma_pair(folder, **SHAPE, **KINDS[kind], **shape)
            edit_tensors(target, soften)
            heads = {"heads": 2, "kv_heads": 1, "head_size": 64, "intermediate": 128}
            made[key] = target, make_drafter(folder / "ours", target, tap_layers=(0, 2, 5), seed=3, **heads)
        return made[key]

    return make


@dataclass
class Errors:
    """How far logits lie from FP32's, by how large those are: of each row."""

    of_rows: torch.Tensor

    @classmethod
    def of(cls, found, expected):
        return cls((found.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1))

    def __str__(self):
        numbers = self.of_rows.mean(), self.of_rows.median(), self.of_rows.max()
        return " ".join(f"{float(x):.5f}" for x in numbers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", HALVES)
def test_logits_are_as_near_to_fp32_as_the_cpus(kind, precision, pair):
    """A prompt's rows at once, as many as a block has, and one by one."""
    ids, folders = PROMPTS[2] + PROMPTS[1], pair(kind)
    with load(folders, "cpu", precision) as rounded, load(folders, "cpu") as exact:
        expected = all_logits(exact, ids)
        of_cpu = Errors.of(all_logits(rounded, ids), expected)
    with load(folders, precision=precision) as gpu:
        assert gpu.session.library is not None, "rows are flat, and all is computed by our kernels"
        choice, ours = gpu.session.choice, f"our CUDA kernels {kernels.ABI_VERSION}"
        assert (choice.attention, choice.products) == (ours, ours)
        assert choice.experts == ("none" if kind == "dense" else ours)
        found = [Errors.of(all_logits(gpu, ids, rows), expected) for rows in (None, 16, 1)]
    print(kind, precision, "CPU", of_cpu, "GPU", *map(str, found))
    for errors in found:
        assert errors.of_rows.mean() < 1.25 * of_cpu.of_rows.mean()
        assert errors.of_rows.median() < 1.25 * of_cpu.of_rows.median()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", HALVES)
def test_each_token_is_fp32s_or_a_near_tie(kind, precision, pair):
    """Drafted as plain; more prompts than slots."""
    folders = pair(kind)
    with load(folders, precision=precision) as llm:
        texts = [tokens(llm.generate(PROMPTS, PARAMS, draft)) for draft in (True, False)]
        dtype = llm.config.dtype
    with load(folders, "cpu") as exact:
        for each in texts:
            assert all(len(text) == PARAMS.max_tokens for text in each)
            others = assert_each_is_nearly_the_largest(exact, PROMPTS, each, dtype=dtype, count=2 * NEAR_TIE)
            print(kind, precision, others, "near-ties; texts alike:", sum(map(list.__eq__, *texts)))


def test_layers_with_a_window_give_pages_back(pair):
    """Prompts of many pieces, whose windows slide through pages that other slots had before."""
    chance = random.Random(7)
    prompts = [[chance.randrange(15) for _ in range(n)] for n in (1500, 330, 610, 90)]
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    folders = pair("dense", max_position_embeddings=2048)
    limits = {"max_batch": 2, "max_seq_len": 2000}
    with load(folders, precision="bf16", **limits) as llm:
        paging = pages_on_gpu(llm.config)
        assert 0 < paging.window_pages < paging.pages == 2 * paging.width
        assert len(llm.session.caches["model.layers.0.key"]) == paging.window_pages
        texts = [tokens(llm.generate(prompts, params, draft)) for draft in (True, False)]
        dtype = llm.config.dtype
    with load(folders, "cpu", max_batch=1, max_seq_len=2000) as exact:
        for each in texts:
            assert_each_is_nearly_the_largest(exact, prompts, each, dtype=dtype, count=2 * NEAR_TIE)
