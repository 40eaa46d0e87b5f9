"""Acceptance, splicing and the caches' arithmetic, against plain Python."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_dflash.ops.base import AttentionLayer
from trtllm_dflash.ops.torch_ops import TorchOps

ops = TorchOps({}, {})
few_tokens = st.integers(0, 2)  # so that runs of equal tokens are common


@settings(deadline=None)
@given(st.data())
def test_a_draft_survives_while_it_and_all_before_it_equal_the_targets_choice(data):
    slots, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 16))
    grid = st.lists(st.lists(few_tokens, min_size=rows, max_size=rows), min_size=slots, max_size=slots)
    token_ids, target_ids = data.draw(grid), data.draw(grid)
    row_count = data.draw(st.lists(st.integers(1, rows), min_size=slots, max_size=slots))
    logit_rows = torch.arange(rows, dtype=torch.int32).expand(slots, -1)
    verdict = ops.accept(
        torch.tensor(token_ids, dtype=torch.int32),
        torch.tensor(target_ids, dtype=torch.int32),
        logit_rows,
        torch.tensor(row_count, dtype=torch.int32),
    )
    for slot in range(slots):
        accepted = 0
        while accepted + 1 < row_count[slot] and token_ids[slot][accepted + 1] == target_ids[slot][accepted]:
            accepted += 1
        assert verdict.accepted[slot] == accepted
        assert verdict.committed[slot] == accepted + 1
        assert verdict.bonus[slot] == target_ids[slot][accepted]


@given(st.integers(1, 64), st.integers(0, 63))
def test_a_prefill_chunk_commits_all_its_real_rows(rows, last):
    last = min(last, rows - 1)
    ids = torch.zeros(1, rows, dtype=torch.int32)
    one = torch.tensor([[last]], dtype=torch.int32)
    verdict = ops.accept(ids, torch.tensor([[7]], dtype=torch.int32), one, one[:, 0] + 1)
    assert [int(x) for x in (verdict.accepted, verdict.committed, verdict.bonus)] == [0, last + 1, 7]


@settings(deadline=None)
@given(st.data())
def test_the_block_follows_the_committed_context_rows_at_once(data):
    slots, rows, block = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 16)), data.draw(st.integers(1, 16))
    committed = data.draw(st.lists(st.integers(1, rows), min_size=slots, max_size=slots))
    context = torch.arange(slots * 2 * rows * 3.0).view(slots, 2, rows, 3)
    drafts = -1 - torch.arange(slots * 2 * block * 3.0).view(slots, 2, block, 3)
    run = ops.splice_rows(context, drafts, torch.tensor(committed, dtype=torch.int32))
    assert run.shape == (slots, 2, rows + block, 3)
    for slot, count in enumerate(committed):
        assert run[slot, :, :count].equal(context[slot, :, :count])
        assert run[slot, :, count : count + block].equal(drafts[slot])


@settings(deadline=None)
@given(st.data())
def test_rows_are_written_at_their_start_and_dropped_past_the_end(data):
    slots, rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8)), data.draw(st.integers(1, 12))
    start = data.draw(st.lists(st.integers(0, 14), min_size=slots, max_size=slots))
    cache = torch.zeros(slots, 1, length, 2)
    new = 1 + torch.arange(slots * rows * 2.0).view(slots, 1, rows, 2)
    result = TorchOps({}, {"c": cache}).append_kv("c", new, torch.tensor(start, dtype=torch.int32))
    for slot in range(slots):
        for position in range(length):
            row = position - start[slot]
            expected = new[slot, 0, row] if 0 <= row < rows else torch.zeros(2)
            assert result[slot, 0, position].equal(expected)


@settings(deadline=None)
@given(st.data())
def test_attention_sees_exactly_the_rows_it_may(data):
    slots, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(rows, 12), min_size=slots, max_size=slots))
    causal = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(slots, 4, rows, 8, generator=generator)
    k, v = (torch.randn(slots, 2, 14, 8, generator=generator) for _ in range(2))
    out = ops.attention(q, k, v, torch.tensor(lengths, dtype=torch.int32), causal)
    for slot in range(slots):
        for row in range(rows):
            seen = lengths[slot] - rows + row + 1 if causal else lengths[slot]
            for head in range(4):
                scores = q[slot, head, row] @ k[slot, head // 2, :seen].T / 8**0.5
                expected = scores.softmax(-1) @ v[slot, head // 2, :seen]
                torch.testing.assert_close(out[slot, row, head * 8 : head * 8 + 8], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_eps", [1e-6, None])
def test_heads_are_normed_and_rotated_to_the_bit_as_torchs_own_operations_would(norm_eps, dtype):
    slots, rows, heads, kv_heads, size = 2, 5, 6, 2, 32
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(slots, rows, (heads + 2 * kv_heads) * size, generator=generator).to(dtype)
    weights = {f"x.self_attn.{which}_norm.weight": torch.rand(size, generator=generator).to(dtype) for which in "qk"}
    angles = torch.rand(40, size // 2, generator=generator) * 7
    weights |= {"rope.cos": angles.cos().to(dtype), "rope.sin": angles.sin().to(dtype)}
    positions = torch.tensor([[3, 4, 5, 6, 7], [31, 32, 33, 34, 35]], dtype=torch.int32)
    layer = AttentionLayer("x.", "rope", heads, kv_heads, size, norm_eps)
    q, k, v = TorchOps(weights, {})._split_qkv(layer, qkv, positions)

    def expected(which: str, part: torch.Tensor) -> torch.Tensor:
        x = part.unflatten(-1, (-1, size)).transpose(1, 2)
        if norm_eps is not None:
            x = F.rms_norm(x.float(), (size,), None, norm_eps).to(dtype) * weights[f"x.self_attn.{which}_norm.weight"]
        a, b = x.chunk(2, dim=-1)
        cos, sin = (weights[f"rope.{table}"][positions][:, None] for table in ("cos", "sin"))
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    ends = heads * size, (heads + kv_heads) * size
    assert q.equal(expected("q", qkv[..., : ends[0]]))
    assert k.equal(expected("k", qkv[..., ends[0] : ends[1]]))
    assert v.equal(qkv[..., ends[1] :].unflatten(-1, (-1, size)).transpose(1, 2))
