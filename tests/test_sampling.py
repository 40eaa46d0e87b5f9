"""Sampling: the target's filtered distribution, exactly, reproducible from a seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import make_drafter, make_target
from tests.near_ties import all_logits, filtered
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.philox import philox, uniform_numbers

KNOWN_ANSWERS = [  # the Random123 distribution's own vectors for philox4x32-10: counter, key, output
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox([torch.tensor([w]) for w in counter], [torch.tensor([w]) for w in key])
    assert tuple(int(word) for word in words) == expected


def test_a_uniform_number_depends_on_seed_and_position_alone():
    whole = uniform_numbers(torch.tensor([5, 6]), torch.tensor([[10, 11, 12], [12, 13, 14]]))
    assert whole[0, 2] == uniform_numbers(torch.tensor([5]), torch.tensor([[12]]))[0, 0]
    assert whole[0, 2] != whole[1, 0]
    assert ((whole >= 0) & (whole < 1)).all()


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(2, 40),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.05, 1.0),
    uniform=st.floats(0, 1, exclude_max=True, width=32),
)
def test_a_drawn_token_is_where_the_filtered_cdf_passes_the_number(
    seed, vocabulary, temperature, top_k, top_p, uniform
):
    # Logits on a coarse grid: ties are common, and none is decided by rounding.
    logits = torch.randint(-8, 9, (1, 1, vocabulary), generator=torch.Generator().manual_seed(seed)).float() / 2
    inputs = SamplingInputs(
        torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([[uniform]])
    )
    drawn = int(TorchOps({}, {}).sample(logits, inputs))
    probs = filtered(logits[0, 0].numpy(), float(np.float32(temperature)), top_k, float(np.float32(top_p)))
    cdf = probs.cumsum()
    slack = 1e-5
    if min(abs(np.append(cdf, 0.0) - uniform)) < slack or probs_depend_on_rounding(logits, inputs):
        return  # at an edge either neighbour is right
    assert drawn == int(np.searchsorted(cdf, uniform, side="right"))


def probs_depend_on_rounding(logits: torch.Tensor, inputs: SamplingInputs) -> bool:
    """Whether top_p falls within rounding of a cumulative probability."""
    p = (logits[0, 0].double() / inputs.temperature).sort(descending=True).values
    k = int(inputs.top_k) or len(p)
    p = p.masked_fill(p < p[min(k, len(p)) - 1], -torch.inf).softmax(0)
    return bool(((p.cumsum(0) - inputs.top_p).abs() < 1e-5).any())


def test_temperature_zero_is_greedy_and_the_number_at_the_very_end_still_draws():
    logits = torch.tensor([[[0.0, 3.0, 1.0, -torch.inf]]])
    almost_one = torch.tensor([[1 - 2.0**-24]])
    for temperature, expected in ((0.0, 1), (1.0, 2)):
        inputs = SamplingInputs(torch.tensor([temperature]), torch.tensor([0]), torch.tensor([1.0]), almost_one)
        assert int(TorchOps({}, {}).sample(logits, inputs)) == expected


def test_a_temperature_near_zero_is_nearly_greedy():
    logits = torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(0)) * 5
    for temperature in (1e-39, 1e-38, 1e-6):
        inputs = SamplingInputs(
            torch.tensor([temperature]), torch.tensor([0]), torch.tensor([1.0]), torch.full((1, 4), 0.7)
        )
        assert TorchOps({}, {}).sample(logits, inputs).tolist() == logits.argmax(-1).tolist()


def test_top_p_one_filters_nothing():
    """In a large vocabulary the probabilities' running sum reaches 1 by rounding long before its end."""
    logits = torch.randn(1, 1, 150_000, generator=torch.Generator().manual_seed(0)).sort(descending=True).values * 4
    inputs = SamplingInputs(torch.ones(1), torch.tensor([0]), torch.ones(1), torch.tensor([[1 - 2.0**-24]]))
    assert int(TorchOps({}, {}).sample(logits, inputs)) > 100_000


@pytest.mark.principal("{'temperature': 1.5, 'top_k': 6, 'top_p': 0.9}")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 1.5, "top_k": 6, "top_p": 0.9}], ids=str)
def test_drafted_sampling_has_the_targets_filtered_distribution(options, tmp_path):
    """Over many seeds, the third token given the two before it: chi-squared against the target's own probabilities."""
    from scipy.stats import chisquare  # of a second, which no other test waits for

    target = make_target(tmp_path / "target", vocab=8, layers=1)
    drafter = make_drafter(tmp_path / "drafter", target, layers=1, tap_layers=(0,), block_size=4)
    llm = LLM.from_pretrained(str(target), str(drafter), precision="fp32", device="cpu", max_batch=64, max_seq_len=16)
    prompt = [1, 2, 3]
    params = [SamplingParams(max_tokens=3, ignore_eos=True, seed=seed, **options) for seed in range(1000)]
    replies = [llm.intake.sequence(prompt, its_params) for its_params in params]
    scheduler = Scheduler(llm.session, prefill_share=1)  # all prompts first: steps decode 64 replies, not one or two
    for reply in replies:
        scheduler.submit(reply)
    while scheduler.busy:
        scheduler.step()
    drawn = [reply.completion().token_ids for reply in replies]
    accepted = [reply.completion().accepted_per_step for reply in replies[:64]]
    assert any(steps[0] > 0 for steps in accepted), "no draft was accepted: nothing is tested"

    temperature, top_k, top_p = options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0)
    most_common = max({tuple(d[:2]) for d in drawn}, key=[tuple(d[:2]) for d in drawn].count)
    for prefix in ((), most_common[:1], most_common):
        follows = [d[len(prefix)] for d in drawn if tuple(d[: len(prefix)]) == prefix]
        logits = all_logits(llm, prompt + list(prefix))[-1]
        expected = filtered(logits.numpy(), temperature, top_k, top_p)
        counts = np.bincount(follows, minlength=8)
        assert counts[expected == 0].sum() == 0, "a token outside the filtered set was drawn"
        likely = expected * len(follows) >= 5
        observed = np.append(counts[likely], counts[~likely].sum())
        wanted = np.append(expected[likely], expected[~likely].sum()) * len(follows)
        if wanted[-1] == 0:
            observed, wanted = observed[:-1], wanted[:-1]
        assert len(follows) > 100
        assert len(wanted) == 1 or chisquare(observed, wanted).pvalue > 1e-3
