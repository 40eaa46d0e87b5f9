"""Mixtures of experts, windows and sinks on a GPU: what torch computes where no kernel of ours does."""

import pytest
import torch

from tests.checkpoints import make_drafter, make_gpt_oss
from tests.gpu.test_kernels import why_not as why_no_kernels
from tests.test_experts import CLAMP, make
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.ops import MoELayer
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.ops.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("packed", [False, True], ids=["numbers", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 8, 100])
def test_captured_experts_equal_the_cpus_for_any_routing(rows, packed):
    layer = MoELayer("mlp.", 16, 4, 8, 4, True, CLAMP)
    weights = make(8, layer, packed=packed)
    ops = TorchOps({name: tensor.cuda() for name, tensor in weights.items()}, {})
    x, logits = torch.zeros(1, rows, 32, device="cuda"), torch.zeros(1, rows, 16, device="cuda")
    ops.moe(layer, x, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.moe(layer, x, logits)
    generator = torch.Generator().manual_seed(0)
    for spread in (1.0, 0.0):
        given = torch.randn(x.shape, generator=generator), spread * torch.randn(logits.shape, generator=generator)
        x.copy_(given[0])
        logits.copy_(given[1])
        graph.replay()
        torch.testing.assert_close(out.cpu(), TorchOps(weights, {}).moe(layer, *given), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(bool(why_no_kernels()), reason=why_no_kernels())
@pytest.mark.parametrize("window", [None, 1, 30, 1000])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("start", [0, 200])
def test_a_chunks_attention_has_windows_and_sinks(start, has_sinks, window):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, 100, 64, generator=generator).bfloat16()
    keys, values = (torch.randn(1, 2, 400, 64, generator=generator).bfloat16() for _ in range(2))
    sinks = torch.randn(8, generator=generator) * 3
    lengths, name = torch.tensor([start + 100], dtype=torch.int32), "sinks" if has_sinks else None
    wide = [x.float() for x in (q, keys, values)]
    expected = TorchOps({"sinks": sinks}, {}).attention(*wide, lengths, True, window, name)
    ops = CudaOps({"sinks": sinks.cuda()}, {}, chunk_end=start + 100)
    actual = ops.attention(q.cuda(), keys.cuda(), values.cuda(), lengths.cuda(), True, window, name)
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=0.02, atol=0.02)


def test_gpt_oss_in_fp32_gives_the_cpus_tokens(tmp_path):
    target = make_gpt_oss(tmp_path / "target", layers=3, vocab=16)
    drafter = make_drafter(tmp_path / "drafter", target, attention_bias=True, block_size=8)
    prompts = [[1, 2, 3] * 20, [4, 5]]
    texts = []
    for device in ("cpu", "cuda"):
        with LLM.from_pretrained(target, drafter, precision="fp32", device=device, max_batch=2, max_seq_len=128) as llm:
            texts.append([c.token_ids for c in llm.generate(prompts, SamplingParams(max_tokens=40))])
    assert texts[0] == texts[1]
