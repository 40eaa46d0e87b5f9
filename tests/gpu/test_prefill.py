"""Chunks of prompts through fused attention, and slots that take no part in a step."""

import pytest
import torch

from tests.flat_ops import piece_ops
from tests.gpu.test_cuda import NEAR_TIE, load_tiny, shipped_prompts
from tests.gpu.test_kernels import HALVES, assert_close, layer_weights, why_not
from tests.near_ties import assert_only_near_ties_differ
from trtllm_dflash.ops.base import AttentionLayer
from trtllm_dflash.ops.cuda_ops import CudaOps
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.calls import Decode, Prefill, Prepare
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.step import Drafting

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("heads", [2, 8])
def test_chunk_after_chunk_equals_attention_under_a_mask(dtype, size, heads):
    kv_heads, length = 2, 700
    weights = layer_weights(dtype, size, length, normed=True)
    layer = AttentionLayer("l.", "rope", heads, kv_heads, size, 1e-6)
    results = []
    for ops_type in (TorchOps, CudaOps):
        torch.manual_seed(2)
        # Rows that are not yet written count for nothing, whatever they hold.
        shape = (1, kv_heads, length, size)
        caches = {f"l.{name}": torch.full(shape, 1e4, dtype=dtype, device="cuda") for name in ("key", "value")}
        outs, first = [], 0
        for rows in (100, 33, 20, 300):
            qkv = torch.randn(1, rows, (heads + 2 * kv_heads) * size, dtype=dtype, device="cuda")
            start = torch.tensor([first], dtype=torch.int32, device="cuda")
            first += rows
            if ops_type is CudaOps:
                ops, _ = piece_ops(weights, caches, 0, first - rows, [0] * rows)
            else:
                ops = TorchOps(weights, caches)
            outs.append(ops.self_attention(layer, qkv, start))
        results.append(torch.cat(outs, dim=1))
    assert_close(results[1], results[0], dtype, roundings=4)


@pytest.mark.parametrize("drafting", list(Drafting))
def test_a_slot_that_takes_no_part_is_left_as_it_is(drafting):
    session = load_tiny("bf16").session
    assert isinstance(session, CudaSession) and session.library is not None
    session.prepare(Prepare((0, 15), sampled=False))
    rows = 1 if drafting is Drafting.OFF else 16
    prompt = [3] * 40
    for slot in range(4):
        session.prefill(Prefill(slot, 0, prompt, True, Drafting.BLOCK, 16))
    state = session._slots
    torch.cuda.synchronize()
    own = session._tables[1]
    before = {name: cache[own].clone() for name, cache in session.caches.items()}
    start, tokens = state.start[:4].clone(), state.tokens[1].clone()
    for _ in range(3):
        session.decode(Decode([rows, 0, rows, 1], drafting, 16 if drafting is Drafting.BLOCK else 1, False)).read()
    assert all(cache[own].equal(before[name]) for name, cache in session.caches.items())
    assert state.tokens[1].equal(tokens)
    assert state.start[1] == start[1]
    assert (state.start[[0, 2, 3]] > start[[0, 2, 3]]).all()


def test_a_prompt_in_chunks_gives_the_drafts_of_one_chunk():
    """The caches after several chunks are those after one, but for roundings; the tokens but for near-ties."""
    llm = load_tiny("bf16")
    session = llm.session
    same = 0
    prompts = [llm.encode(prompt) for prompt in shipped_prompts(8)]
    for prompt in prompts:
        whole = session.prefill(Prefill(0, 0, prompt, True, Drafting.BLOCK, 16)).read()
        half = len(prompt) // 2
        session.prefill(Prefill(1, 0, prompt[:half], False, Drafting.CONTEXT, 1))
        parts = session.prefill(Prefill(1, half, prompt[half:], True, Drafting.BLOCK, 16)).read()
        for cache in session.caches.values():
            # [heads, rows, D] of each slot
            slots = (cache[pages].transpose(0, 1).flatten(1, 2) for pages in session._tables[:2])
            a, b = (rows[:, : len(prompt)].float() for rows in slots)
            assert (a - b).norm() <= 0.05 * a.norm()
        same += assert_only_near_ties_differ(llm, [prompt], parts, whole, dtype=torch.bfloat16, count=NEAR_TIE)
    assert same >= 0.8 * len(prompts)
