"""DFlash 2, DSpark and windowed drafters in captured steps: the CPU's drafts in FP32, plain text, and acceptance."""

import shutil

import pytest
import torch

from tests.checkpoints import make_target
from tests.conftest import TINY
from tests.drafters import KINDS, PlainSecond, make_kind, make_shipped_second, window_layers
from tests.gpu.test_cuda import NEAR_TIE, acceptance, shipped_prompts, tokens
from tests.gpu.test_hybrids import PROMPTS, load
from tests.gpu.test_kernels import why_not
from tests.gpu.test_shared_rows import Shared, run
from tests.near_ties import assert_each_is_nearly_the_largest, assert_only_near_ties_differ
from tests.test_drafter import first_drafts
from trtllm_dflash import SamplingParams
from trtllm_dflash.runtime.draft_length import FixedDraftLength
from trtllm_dflash.session.cuda_session import CudaSession

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=3)


@pytest.mark.parametrize("kind", [*KINDS, "dspark, speculators, reduced"])
def test_in_fp32_the_first_block_is_what_the_equations_give_and_what_is_accepted_is_the_cpus(kind, tmp_path):
    """Of a small vocabulary, so that some drafts are right; more prompts than slots."""
    target = make_target(tmp_path / "target", vocab=64 if "reduced" in kind else 16)
    folder = make_kind(kind, tmp_path / "drafter", target)
    plain = PlainSecond(folder)
    with load((target, folder)) as gpu, load((target, folder), "cpu") as cpu:
        assert isinstance(gpu.session, CudaSession)
        for prompt in PROMPTS[:2]:
            bonus, drafts = first_drafts(gpu, prompt)
            assert [drafts] == plain.drafts(target, [*prompt, bonus], gpu.config.block_size - 1)
        accepted = 0
        for params in (GREEDY, SAMPLED):
            drafted, on_cpu = gpu.generate(PROMPTS, params), cpu.generate(PROMPTS, params)
            assert tokens(drafted) == tokens(on_cpu) == tokens(gpu.generate(PROMPTS, params, draft=False))
            assert [c.accepted_per_step for c in drafted] == [c.accepted_per_step for c in on_cpu]
            accepted += sum(sum(c.accepted_per_step) for c in drafted)
    assert accepted > 0


def make_half_pair(kind, path):
    """A target in BF16 of few tokens, of sizes that our kernels take, and a drafter of one of `KINDS`."""
    shape = {"hidden": 128, "head_size": 64, "intermediate": 128, "vocab": 16, "dtype": torch.bfloat16}
    target = make_target(path / "target", **shape)
    return target, make_kind(kind, path / "drafter", target, head_size=64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_each_token_is_fp32s_or_a_near_tie(kind, precision, tmp_path):
    folders = make_half_pair(kind, tmp_path)
    with load(folders, precision=precision) as gpu:
        assert gpu.session.library is not None and gpu.session.limits.mixes  # their rows are flat
        assert gpu.session.limits.divides == kind.startswith("windows")
        assert gpu.session.choice.attention.startswith("our CUDA kernels")
        ways, accepted = {}, 0
        for name, params in {"greedy": GREEDY, "sampled": SAMPLED}.items():
            drafted = gpu.generate(PROMPTS, params)
            accepted += sum(sum(c.accepted_per_step) for c in drafted)
            ways[name] = params, [tokens(drafted), tokens(gpu.generate(PROMPTS, params, draft=False))]
        dtype = gpu.config.dtype
    assert accepted > 0
    with load(folders, "cpu") as exact:
        for name, (params, texts) in ways.items():
            for each in texts:
                others = assert_each_is_nearly_the_largest(
                    exact, PROMPTS, each, params, dtype=dtype, count=2 * NEAR_TIE
                )
                print(kind, precision, name, others, "near-ties; texts alike:", sum(map(list.__eq__, *texts)))


@pytest.mark.parametrize("kind", ["windows", "windows, free", "anchor"])
def test_trees_of_those_that_choose_each_row_apart_are_verified(kind, tmp_path):
    """In BF16, greedy and sampled: each token is FP32's or a near-tie."""
    folders = make_half_pair(kind, tmp_path)
    with load(folders, precision="bf16", draft_tree=15) as gpu, load(folders, "cpu") as exact:
        for params in (GREEDY, SAMPLED):
            drafted = gpu.generate(PROMPTS, params)
            assert sum(sum(c.accepted_per_step) for c in drafted) > 0
            assert_each_is_nearly_the_largest(
                exact, PROMPTS, tokens(drafted), params, dtype=gpu.config.dtype, count=2 * NEAR_TIE
            )


@pytest.mark.parametrize("kind", KINDS)
def test_with_exact_kernels_drafted_text_is_plain_text(kind, tmp_path):
    folders = make_half_pair(kind, tmp_path)
    with load(folders, precision="bf16", kernels="exact") as gpu:
        for params in (GREEDY, SAMPLED):
            drafted = gpu.generate(PROMPTS, params)
            assert tokens(drafted) == tokens(gpu.generate(PROMPTS, params, draft=False))
            assert sum(sum(c.accepted_per_step) for c in drafted) > 0


def windows(path):
    """The shipped drafter, with windows that look back 64 tokens."""
    shutil.copytree(TINY / "drafter", path)
    return window_layers(path, [64, 64], is_causal=False)


@pytest.mark.parametrize("make", [make_shipped_second, windows])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_trained_drafters_are_accepted_as_on_the_cpu(make, precision, tmp_path):
    """The shipped pair's drafter with a small selector and convolutions, or windows."""
    folders, params = (TINY / "target", make(tmp_path / "drafter")), SamplingParams(max_tokens=64)
    with load(folders, "cpu", max_seq_len=512) as cpu:
        prompts = [cpu.encode(prompt) for prompt in shipped_prompts(2)]
        expected = cpu.generate(prompts, params)
    with load(folders, precision=precision, max_seq_len=512, draft_tree="off") as gpu:
        drafted, plain = gpu.generate(prompts, params), gpu.generate(prompts, params, draft=False)
        print(make.__name__, precision, "tokens a step:", acceptance(drafted), "on the CPU:", acceptance(expected))
        if precision == "fp32":
            assert tokens(drafted) == tokens(plain) == tokens(expected)
            assert [c.accepted_per_step for c in drafted] == [c.accepted_per_step for c in expected]
        else:
            texts, dtype = (tokens(drafted), tokens(plain)), gpu.config.dtype
            same = assert_only_near_ties_differ(gpu, prompts, *texts, params, dtype=dtype, count=NEAR_TIE)
            assert same >= len(prompts) // 2
            assert acceptance(drafted) == pytest.approx(acceptance(expected), rel=0.1)
    assert acceptance(drafted) > 2


@pytest.mark.parametrize("make", [make_shipped_second, windows])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_over_fp8_caches_they_are_accepted_nearly_as_over_wide_ones(make, precision, tmp_path):
    """Near-ties may turn: every row reads keys that were rounded."""
    folders, params = (TINY / "target", make(tmp_path / "drafter")), SamplingParams(max_tokens=64)
    limits = {"precision": precision, "max_seq_len": 512, "draft_tree": "off"}
    with load(folders, **limits) as wide, load(folders, **limits, kv="fp8") as narrow:
        assert {cache.dtype for cache in narrow.session.caches.values()} == {torch.float8_e4m3fn}
        prompts = [wide.encode(prompt) for prompt in shipped_prompts(2)]
        expected = wide.generate(prompts, params)
        drafted, plain = narrow.generate(prompts, params), narrow.generate(prompts, params, draft=False)
    same = sum(map(list.__eq__, tokens(drafted), tokens(plain)))
    print(make.__name__, precision, "tokens a step:", acceptance(drafted), "wide:", acceptance(expected), "same:", same)
    assert same >= len(prompts) // 2
    assert acceptance(drafted) == pytest.approx(acceptance(expected), rel=0.15)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_slots_of_a_drafter_with_windows_share_their_rows(precision, tmp_path):
    """As those of one without (`test_shared_rows`): in fewer steps, and any difference of text is a near-tie."""
    folders, params = (TINY / "target", windows(tmp_path / "drafter")), SamplingParams(max_tokens=96, ignore_eos=True)
    with load(folders, precision=precision, max_batch=12, max_seq_len=512, draft_tree="off") as gpu:
        assert gpu.session.limits.divides
        prompts = [gpu.encode(prompt) for prompt in shipped_prompts(8)]
        shared, each = (run(gpu, prompts, params, rule(7)) for rule in (Shared, FixedDraftLength))
        texts, dtype = (tokens(shared), tokens(gpu.generate(prompts, params, draft=False))), gpu.config.dtype
        same = assert_only_near_ties_differ(gpu, prompts, *texts, params, dtype=dtype, count=NEAR_TIE)
    assert same >= len(prompts) // 2
    steps, fixed = (sum(reply.steps for reply in replies) for replies in (shared, each))
    print(precision, "steps", steps, "each its own", fixed)
    assert steps < fixed / 1.04
