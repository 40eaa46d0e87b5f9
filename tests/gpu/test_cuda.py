"""The torch backend on a GPU: the same text as on the CPU, drafted or not."""

from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter, make_target
from tests.conftest import TINY
from tests.gpu.test_kernels import why_not
from tests.near_ties import assert_only_near_ties_differ
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.session.kernels import Kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

#: Roundings between logits in 16 bits, of two kinds of kernels or two shapes of one product, that count as a near-tie.
NEAR_TIE = 4
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 11}


#: Where our kernels are not built, torch's are tested alone.
KERNELS: Kernels = "torch" if why_not() else "auto"


def load_tiny(precision: str, kernels: Kernels = KERNELS, draft_tree: int | str = "auto") -> LLM:
    folders = str(TINY / "target"), str(TINY / "drafter")
    more: dict[str, Any] = {"max_batch": 8, "max_seq_len": 1024, "kernels": kernels, "draft_tree": draft_tree}
    return LLM.from_pretrained(*folders, precision=precision, device="cuda", **more)


def shipped_prompts(per_kind: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for kind in read_prompts(per_kind).values() for text in kind]


def tokens(completions) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def acceptance(completions) -> float:
    return sum(len(c.token_ids) - 1 for c in completions) / sum(c.steps for c in completions)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_drafted_equals_plain_in_fp32_and_equals_the_cpu(sampling, tiny):
    llm, prompts = load_tiny("fp32"), shipped_prompts(4)
    params = SamplingParams(max_tokens=64, **sampling)
    drafted = llm.generate(prompts, params)
    plain = llm.generate(prompts, params, draft=False)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    on_cpu = tiny.generate(prompts, params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in on_cpu]
    assert acceptance(drafted) == pytest.approx(acceptance(on_cpu), rel=0.02)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_any_difference_is_a_near_tie(precision):
    llm = load_tiny(precision)
    prompts = [llm.encode(prompt) for prompt in shipped_prompts(8)]
    params = SamplingParams(max_tokens=96)
    drafted, plain = llm.generate(prompts, params), llm.generate(prompts, params, draft=False)
    texts = tokens(drafted), tokens(plain)
    same = assert_only_near_ties_differ(llm, prompts, *texts, params, dtype=llm.config.dtype, count=NEAR_TIE)
    assert same >= len(prompts) // 2
    assert acceptance(drafted) > 5


@pytest.mark.parametrize("rows", [2, 16, 40])
def test_attention_of_many_rows_that_share_keys_is_the_cpus(rows):
    """Where torch attends by groups of heads, and where by heads."""
    slots, heads, kv_heads, size, length = 9, 6, 2, 64, 200
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(slots, heads, rows, size, generator=generator)
    keys, values = (torch.randn(slots, kv_heads, length, size, generator=generator) for _ in range(2))
    lengths = torch.randint(rows, length + 1, (slots,), generator=generator, dtype=torch.int32)
    expected = TorchOps({}, {}).attention(q, keys, values, lengths, True)
    on_gpu = [x.cuda() for x in (q, keys, values, lengths)]
    found = TorchOps({}, {}).attention(*on_gpu, True).cpu()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_each_family_gives_the_text_of_the_cpu(family, tmp_path):
    target = make_target(tmp_path / "target", family, vocab=16)
    drafter = make_drafter(tmp_path / "drafter", target, format="speculators", draft_vocab=8)
    prompts = [[1], [2, 3, 4], list(range(15)) * 4]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    texts = []
    for device in ("cpu", "cuda"):
        llm = LLM.from_pretrained(str(target), str(drafter), "fp32", device, max_batch=4, max_seq_len=128)
        texts.append([c.token_ids for c in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
