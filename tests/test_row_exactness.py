"""On the CPU a row becomes what it becomes alone, to the bit: whatever runs beside it, and however prompts are cut."""

import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import build_tiny
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.ops.activations import gelu, silu, tanh
from trtllm_dflash.ops.cpu_attention import BLOCK, TILE, attend, hidden_keys
from trtllm_dflash.ops.cpu_products import packed, product
from trtllm_dflash.pairs.prompts import read_prompts

ROWS = (1, 2, 3, 5, 7, 16, 17, 33, 64, 100)
SAILOR = "Tell me a story about a sailor."
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=4)


# -- operations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1024, 256), (256, 768), (5, 48), (36, 2880)])
def test_a_row_of_a_product_depends_on_no_other_row(shape, dtype):
    torch.manual_seed(0)
    weight, bias = (0.05 * torch.randn(shape)).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(300, shape[1]).to(dtype)
    for matrix in (weight, packed(weight)):
        for added in (None, bias):
            whole = product(x, matrix, added)
            for rows in ROWS:
                assert torch.equal(product(x[90 : 90 + rows], matrix, added), whole[90 : 90 + rows]), rows
    exact = x.double() @ weight.double().t()
    assert ((product(x, weight) - exact).norm() / exact.norm()) < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [(8, 4), (8, 1), (6, 2)])
def test_a_row_s_attention_depends_on_no_later_row_and_on_no_cut(heads, window):
    torch.manual_seed(0)
    length, size = TILE + BLOCK + 9, 32
    q = torch.randn(heads[0], length, size)
    keys, values = torch.randn(2, heads[1], length, size).unbind()
    sinks = torch.randn(heads[0]) if heads[1] == 1 else None

    def rows(start: int, end: int) -> torch.Tensor:
        first = 0 if window is None else max(0, start + 1 - window) // TILE * TILE
        hidden = hidden_keys(first, end, end - start, heads[0] // heads[1], True, window)
        return attend(q[:, start:end], keys[:, first:end], values[:, first:end], hidden, sinks)

    whole = rows(0, length)
    for start, end in ((0, 1), (0, 5), (TILE - 3, TILE + 2), (TILE - 1, TILE), (TILE, TILE + 1), (150, 166)):
        assert torch.equal(rows(start, end), whole[start:end]), (start, end)


def test_what_lies_behind_a_slot_s_rows_does_not_matter():
    """The caches there are another sequence's, or were."""
    torch.manual_seed(0)
    q, (keys, values) = torch.randn(4, 3, 32), torch.randn(2, 2, TILE, 32).unbind()
    hidden = hidden_keys(0, 77, 3, 2, True, None)
    clean = attend(q, keys[:, :77], values[:, :77], hidden, None)
    keys[:, 77:] = values[:, 77:] = torch.nan
    for rows in (77, 100, TILE):  # keys may be all that a page has
        assert torch.equal(attend(q, keys[:, :rows], values[:, :77], hidden, None), clean)


@pytest.mark.parametrize("alpha", [1.0, 1.702])
def test_an_activation_depends_on_no_other_number(alpha):
    x = 4 * torch.randn(101, 333, generator=torch.Generator().manual_seed(0))
    whole = silu(x, alpha)
    for rows in ROWS:
        assert torch.equal(silu(x[1 : 1 + rows], alpha), whole[1 : 1 + rows])
    torch.testing.assert_close(whole, x * torch.sigmoid(alpha * x))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(gelu, lambda x: torch.nn.functional.gelu(x, approximate="tanh")), (tanh, torch.tanh)],
)
def test_gelu_and_tanh_depend_on_no_other_number_and_are_torch_s(ours, theirs):
    x = 4 * torch.randn(101, 333, generator=torch.Generator().manual_seed(0))
    whole = ours(x)
    for rows in ROWS:
        assert torch.equal(ours(x[1 : 1 + rows]), whole[1 : 1 + rows])
    torch.testing.assert_close(whole, theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.principal("1,avx2,AVX2")
@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "ATEN_CPU_CAPABILITY": "default"},
        {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    ],
    ids=lambda environment: ",".join(environment.values()),
)
def test_so_it_is_with_other_instructions_and_threads(environment):
    words = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "depends_on_no and not shape0"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stdout


# -- texts -------------------------------------------------------------------------------------------------------------


def tokens(completions):
    return [completion.token_ids for completion in completions]


def test_a_number_on_a_rounded_boundary_falls_on_the_same_side_drafted_or_not(tiny):
    """Here one last digit of one logit decides between two tokens."""
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=4)
    assert tokens(tiny.generate([SAILOR], params)) == tokens(tiny.generate([SAILOR], params, draft=False))


@pytest.mark.principal("bf16")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_texts_are_the_same_however_they_are_computed(precision, tmp_path):
    """Drafted and plainly, greedy and sampled in a batch and alone, and with prompts cut into chunks of any size."""
    prompts = [[{"role": "user", "content": text}] for kind in list(read_prompts(1).values())[:2] for text in kind]
    prompts += [SAILOR, SAILOR + " " + SAILOR]  # which begin alike
    params = [GREEDY, SAMPLED] * (len(prompts) // 2)
    asked = list(zip(prompts, params, strict=True))
    expected = []
    for chunk in (64, 5):
        build_tiny(tmp_path / str(chunk), precision=precision, chunk=chunk)
        with LLM.load(tmp_path / str(chunk), "cpu") as llm:
            if not expected:
                expected = [tokens(llm.generate([prompt], its, draft=False))[0] for prompt, its in asked]
            for draft in (True, False) if chunk == 5 else (True,):  # steps without drafts are the same steps
                assert tokens(llm.generate(prompts, params, draft)) == expected, (chunk, draft)
            alone = [tokens(llm.generate([prompt], its))[0] for prompt, its in asked[-2:]]
            assert alone == expected[-2:], chunk
