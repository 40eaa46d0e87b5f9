"""The judge itself: it lets a near-tie pass, and nothing else."""

import pytest
import torch

from tests.checkpoints import make_target
from tests.near_ties import (
    SidingOps,
    all_logits,
    assert_each_is_nearly_the_largest,
    assert_only_near_ties_differ,
    first_difference,
    is_near_tie,
    randomly_rounded_logits,
    rounding_gap,
)
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.ops.base import SamplingInputs

LOGITS = torch.tensor([0.0, 4.0, 3.99, -4.0])


def drawn(uniform: float, temperature: float = 1.0, top_k: int = 0) -> SamplingInputs[torch.Tensor]:
    top = torch.tensor([top_k], dtype=torch.int32)
    return SamplingInputs(torch.tensor([temperature]), top, torch.ones(1), torch.tensor([[uniform]]))


@pytest.mark.parametrize(("token", "gap", "near"), [(1, 0.0, True), (2, 0.011, True), (2, 0.009, False), (0, 1, False)])
def test_the_largest_logit_may_be_another_only_within_the_gap(token, gap, near):
    assert is_near_tie(LOGITS, token, gap) is near
    assert is_near_tie(LOGITS, token, gap, drawn(0.3, temperature=0)) is near


def test_a_drawn_token_may_be_its_neighbour_only_where_the_number_lies_at_their_edge():
    edges = LOGITS.softmax(-1).cumsum(-1)  # 0.009, 0.508, 1.000, 1
    for uniform, token, near in (
        (edges[1] - 0.001, 1, True),
        (edges[1] - 0.001, 2, True),
        (edges[1] + 0.001, 1, True),
        (edges[1] - 0.1, 2, False),
        (edges[1] + 0.1, 1, False),
        (edges[1] - 0.001, 0, False),
        (edges[1] - 0.001, 3, False),
    ):
        assert is_near_tie(LOGITS, token, 0.02, drawn(float(uniform))) is near, (uniform, token)
    assert not is_near_tie(LOGITS, 0, 0.02, drawn(0.001, top_k=2))
    assert is_near_tie(LOGITS, 0, 0.02, drawn(0.001))


def test_texts_differ_first_where_their_tokens_do():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3, 4], [1, 5]) == 1
    with pytest.raises(AssertionError, match="a text of 3 tokens"):
        first_difference([1, 2, 3], [1, 2])


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    target = make_target(tmp_path_factory.mktemp("judge") / "target", vocab=16)
    with LLM.from_pretrained(str(target), None, "fp32", "cpu", max_seq_len=64) as llm:
        yield llm


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=1, seed=3)])
def test_a_text_with_another_token_is_refused_and_the_text_itself_is_not(params, llm):
    prompts = [[1, 2, 3], [7] * 5]
    texts = [reply.token_ids for reply in llm.generate(prompts, params.model_copy(update={"ignore_eos": True}))]
    assert assert_only_near_ties_differ(llm, prompts, texts, texts, params, dtype=torch.bfloat16) == 2
    least = int(all_logits(llm, prompts[1] + texts[1][:4])[-1].argmin())
    wrong = [texts[0], [*texts[1][:4], least, *texts[1][5:]]]
    for pair in ((wrong, texts), (texts, wrong)):
        with pytest.raises(AssertionError, match="no near-tie at token 4"):
            assert_only_near_ties_differ(llm, prompts, *pair, params, dtype=torch.bfloat16)
    # So many roundings that any token is near: the same texts pass.
    assert assert_only_near_ties_differ(llm, prompts, wrong, texts, params, dtype=torch.bfloat16, count=500) == 1


@pytest.mark.parametrize("at", [0, 4, 7])
def test_a_token_that_is_not_nearly_the_largest_is_refused_wherever_it_stands(at, llm):
    prompts = [[1, 2, 3], [7] * 5]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    texts = [reply.token_ids for reply in llm.generate(prompts, params)]
    assert assert_each_is_nearly_the_largest(llm, prompts, texts, dtype=torch.bfloat16, count=1) == 0
    ids = prompts[1] + texts[1]
    logits = all_logits(llm, ids, rows=3)
    assert torch.allclose(logits, all_logits(llm, ids), atol=1e-5)
    wrong = [texts[0], [*texts[1][:at], int(logits[len(prompts[1]) + at - 1].argmin()), *texts[1][at + 1 :]]]
    with pytest.raises(AssertionError, match=f"text 1, token {at}"):
        assert_each_is_nearly_the_largest(llm, prompts, wrong, dtype=torch.bfloat16, count=1)


def test_random_roundings_move_logits_by_as_much_as_the_type_has_digits(llm):
    ids = [1, 2, 3, 4, 5, 6, 7]
    exact = all_logits(llm, ids)[-1]
    moved = {dtype: (randomly_rounded_logits(llm, ids, dtype) - exact).std() for dtype in (torch.bfloat16, torch.half)}
    assert 6 < moved[torch.bfloat16] / moved[torch.half] < 10  # three digits
    assert 0.1 < moved[torch.bfloat16] / rounding_gap(1, exact, torch.bfloat16) < 4
    assert torch.equal(all_logits(llm, ids)[-1], exact)


def test_ops_take_a_side_in_a_near_tie_and_in_nothing_else():
    logits = torch.stack([LOGITS, LOGITS.roll(1)])[None]
    own = torch.tensor([[1, 2]], dtype=torch.int32)
    for theirs, count, turned in (([1, 2], 1, 0), ([2, 2], 4, 1), ([2, 3], 4, 2)):
        ops = SidingOps({}, {}, [torch.tensor([theirs], dtype=torch.int32)], count)
        assert ops.argmax(logits.half()).tolist() == [theirs]
        assert ops.turned == turned
    for theirs, count in (([2, 2], 1), ([1, 0], 4)):
        with pytest.raises(AssertionError, match="is no near-tie"):
            SidingOps({}, {}, [torch.tensor([theirs], dtype=torch.int32)], count).argmax(logits.half())
    at_the_edge = SamplingInputs(
        torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.ones(1), torch.tensor([[0.505, 0.3]])
    )
    assert SidingOps({}, {}, [own.clone()], 4).sample(logits, at_the_edge).tolist() == own.tolist()
    turned = torch.tensor([[2, 2]], dtype=torch.int32)
    assert SidingOps({}, {}, [turned], 8).sample(logits.half(), at_the_edge).tolist() == [[2, 2]]
    with pytest.raises(AssertionError, match="slot 0, row 1: 3 instead of 2"):
        SidingOps({}, {}, [torch.tensor([[1, 3]], dtype=torch.int32)], 8).sample(logits.half(), at_the_edge)
