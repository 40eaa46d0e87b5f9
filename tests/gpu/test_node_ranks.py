"""Accepted nodes of trees by rank, in captured steps: found by the kernel that accepts, read with what it decided."""

from collections import Counter

import pytest
import torch

from tests.gpu.test_cuda import SAMPLED, shipped_prompts
from tests.gpu.test_draft_trees import STEPS, choices, load_trees
from tests.gpu.test_kernels import why_not
from tests.gpu.test_ragged_attention import ints
from tests.gpu.test_shared_rows import SharedAtRandom
from trtllm_dflash import LLM, SamplingParams, kernels
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.ops.draft_tree import RANKS, ranks_of
from trtllm_dflash.runtime.draft_length import DraftLength, FixedDraftLength
from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.statistics import Statistics
from trtllm_dflash.sweep.local_engine import random_llm

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)


def served(
    llm: LLM, count: int, params: SamplingParams | list[SamplingParams], length: DraftLength | None = None
) -> tuple[list[Sequence], Statistics]:
    """The replies to so many prompts of each kind, run together, and the statistics of it."""
    scheduler = Scheduler(llm.session, draft_length=length or FixedDraftLength(15))
    prompts = [llm.encode(text) for text in shipped_prompts(count)]
    every = params if isinstance(params, list) else [params] * len(prompts)
    sequences = [llm.intake.sequence(ids, each, True) for ids, each in zip(prompts, every, strict=True)]
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    assert not any(sequence.error for sequence in sequences)
    return sequences, scheduler.statistics


@pytest.mark.parametrize("depths", [1, 7, 15, 31])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_ranks_lie_behind_what_was_decided(step, depths, poisoned):
    rows, chosen, said = step.begin(), ints(choices(step, 0.9)), step.said
    found = kernels.accept_paths(rows, chosen)
    kept = ints(step.layout.tokens), ints(step.layout.kept_start), 900, found.choices, found.accepted, found.next_start
    next_tokens = ints(range(len(said["segments"]))).view(-1, 1)
    decided = kernels.end_rows(rows, *kept, next_tokens, 64, ranks=found.ranks, depths=depths)
    assert decided[:, :65].equal(kernels.end_rows(rows, *kept, next_tokens, 64))
    for index, segment in enumerate(step.segments()):
        path = [row for row in range(64) if found.path[index].item() >> row & 1]
        ranks = ranks_of(segment.parents, path) if segment is not None and len(path) > 1 else []
        assert decided[index, 65:].tolist() == (ranks + [0] * depths)[:depths], index


@pytest.mark.parametrize(("nodes", "params"), [(15, PARAMS), (31, PARAMS), (63, PARAMS.model_copy(update=SAMPLED))])
def test_ranks_are_those_of_the_trees_that_slots_hold(nodes, params):
    """One step after the other: what a step accepts is followed down the tree that the one before it left."""
    follow_trees(load_trees(nodes), nodes, params)


def follow_trees(llm: LLM, nodes: int, params: SamplingParams) -> None:
    every: Counter[int] = Counter()
    for text in shipped_prompts(2):
        scheduler = Scheduler(llm.session, draft_length=FixedDraftLength(15), ahead=0)
        sequence = llm.intake.sequence(llm.encode(text), params, True)
        expected: Counter[int] = Counter()
        scheduler.submit(sequence)
        while scheduler.busy:
            slots, steps, at = llm.session._slots, len(sequence.accepted_per_step), len(sequence.token_ids)
            tree, parents = (x[0, : nodes + 1].tolist() for x in (slots.tokens, slots.parents))
            scheduler.step()
            if len(sequence.accepted_per_step) == steps:
                continue
            path = [0]
            for token in sequence.token_ids[at : at + sequence.accepted_per_step[-1]]:
                path.append(next(row for row in range(nodes + 1) if (parents[row], tree[row]) == (path[-1], token)))
            expected.update(ranks_of(parents, path))
        assert scheduler.statistics.ranks == expected
        every += expected
    print(nodes, "accepted nodes by rank:", dict(sorted(every.items())))
    assert every[1] > every[2] > 0


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_the_ranks_of_all_slots_sum_up_to_what_is_accepted(kv):
    sequences, statistics = served(load_trees(15, kv=kv), 4, PARAMS)
    assert sum(statistics.ranks.values()) == sum(statistics.accepted.values()) > 0
    assert sum(statistics.ranks.values()) == sum(sequence.accepted for sequence in sequences)
    assert set(statistics.ranks) <= set(range(1, RANKS + 1))


def test_chains_and_imposed_paths_count_nothing():
    _, statistics = served(load_trees("off"), 1, PARAMS)
    assert statistics.accepted and not statistics.ranks
    _, statistics = served(load_trees(15), 1, PARAMS, FixedDraftLength(7))
    assert statistics.accepted and not statistics.ranks
    known = load_trees(15)
    with random_llm(known.config, torch.device("cuda"), ImposedAcceptance(6.49, 16), codec=known.codec) as llm:
        _, statistics = served(llm, 1, PARAMS)
    assert statistics.accepted and not statistics.ranks


def test_shaped_steps_tell_the_ranks_of_trees_that_were_left_and_the_drafts_behind_them():
    """Structured replies read drafts behind the ranks; all others go on as they would."""
    llm = load_trees(15)
    short = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1)
    params = [short if i % 3 == 1 else PARAMS for i in range(len(shipped_prompts(3)))]
    sequences, statistics = served(llm, 3, params)
    accepted = sum(statistics.accepted.values())
    assert 0 < sum(statistics.ranks.values()) < accepted == sum(sequence.accepted for sequence in sequences)
    assert set(statistics.ranks) <= set(range(1, RANKS + 1)), "tokens stand behind the ranks"


def test_steps_that_share_rows_tell_the_ranks_of_trees_that_were_left():
    sequences, statistics = served(load_trees(15, max_batch=12), 4, PARAMS, SharedAtRandom())
    accepted = sum(statistics.accepted.values())
    assert 0 < sum(statistics.ranks.values()) < accepted == sum(sequence.accepted for sequence in sequences)
