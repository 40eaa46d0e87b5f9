"""Accepted nodes of trees, counted by rank: the place that the drafter gave a node's token among those of its depth."""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import torch

from tests.test_draft_trees import GREEDY, HOSTILE, OPS, SAMPLED, best, changed
from trtllm_dflash.bench.imposed import imposed
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.ops.draft_tree import LEAST, RANKS, TOLL, TREE_SIZES, DraftTree, chain_tree, draft_tree, ranks_of
from trtllm_dflash.ops.ragged_ops import RaggedOps
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.batch import Batch
from trtllm_dflash.runtime.draft_length import FixedDraftLength
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.outcome import Outcome


@pytest.fixture(scope="module")
def prompts(tiny):
    texts = [text for kind in read_prompts(1).values() for text in kind]
    return [tiny.encode([{"role": "user", "content": text}]) for text in texts]


def served(llm, prompts, params, drafts=15, draft=True):
    """The sequences of these prompts, run together, and the statistics of it."""
    scheduler = Scheduler(llm.session, draft_length=FixedDraftLength(drafts))
    sequences = [llm.intake.sequence(ids, params, draft) for ids in prompts]
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    assert all(sequence.error is None for sequence in sequences)
    return sequences, scheduler.statistics


def peaked(seed):
    torch.manual_seed(seed)
    return (2 * torch.randn(15, RANKS)).log_softmax(-1).sort(-1, descending=True).values


CHANCES = {"some": peaked(1), "others": peaked(2), **HOSTILE}


@pytest.mark.parametrize("log_probs", CHANCES.values(), ids=CHANCES)
@pytest.mark.parametrize("nodes", TREE_SIZES)
def test_a_node_s_rank_is_its_place_among_its_siblings(nodes, log_probs):
    ids = torch.arange(log_probs.numel(), dtype=torch.int32).view(1, *log_probs.shape)  # each its place
    rows, parents = (
        x[0].tolist() for x in OPS.grow_tree(draft_tree(nodes, 16), torch.tensor([9999]).int(), log_probs[None], ids)
    )
    for row in range(1, nodes + 1):
        path = [row]
        while path[0]:
            path.insert(0, parents[path[0]])
        assert ranks_of(parents, path) == [rows[at] % RANKS + 1 for at in path[1:]]


def test_every_list_has_siblings_in_the_order_of_their_ranks():
    for nodes in TREE_SIZES:
        draft_tree(nodes, 16), draft_tree(15, 5)
    assert ranks_of(chain_tree(5).parents, range(5)) == [1] * 4
    with pytest.raises(AssertionError):
        DraftTree(1, (-1, -1), (1, 0))


class Drafts(RaggedOps):
    """Keeps the drafter's logits of each step that drafts."""

    steps: ClassVar[list[torch.Tensor]] = []

    def top_ids(self, logits, count):
        Drafts.steps.append(logits.clone())
        return super().top_ids(logits, count)


def ranks_on_the_host(logits, tokens, nodes):
    """The ranks of the drafts that a step accepts of its best tree, found one by one.

    Args:
        logits: [depths, V] of the drafter.
        tokens: the target's own from there on.
    """
    likely, ids = (x[:, :RANKS] for x in logits.log_softmax(-1).sort(stable=True, dim=-1, descending=True))
    scores = likely.clamp(min=LEAST) - TOLL
    tree = set(best(scores.tolist(), set(draft_tree(nodes, 1 + len(logits)).paths), nodes))
    path = ()
    for candidates, token in zip(ids.tolist(), tokens, strict=False):
        if token not in candidates or (*path, candidates.index(token)) not in tree:
            break
        path = (*path, candidates.index(token))
    return [1 + rank for rank in path]


@pytest.mark.principal("15")
@pytest.mark.parametrize(("nodes", "params"), [(15, GREEDY), (31, SAMPLED), (63, SAMPLED)], ids=["15", "31", "63"])
def test_ranks_are_those_that_the_drafter_s_logits_tell(nodes, params, tiny, prompts, monkeypatch):
    monkeypatch.setattr("trtllm_dflash.session.torch_session.RaggedOps", Drafts)
    llm, every = changed(tiny, draft_tree=nodes), Counter()
    for ids in prompts:
        Drafts.steps = []
        (sequence,), statistics = served(llm, [ids], params)
        expected, at = Counter(), 1
        for logits, accepted in zip(Drafts.steps, sequence.accepted_per_step, strict=False):
            own = ranks_on_the_host(logits[0], sequence.token_ids[at:], nodes)
            assert len(own) == accepted, (at, own, accepted)
            expected.update(own)
            at += accepted + 1
        assert statistics.ranks == expected
        every += expected
    assert every[1] > every[2] > 0, "the pair is such that breadth is seen"


@pytest.mark.principal("sampled")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_ranks_of_all_slots_sum_up_to_what_is_accepted(params, tiny, prompts):
    sequences, statistics = served(changed(tiny, draft_tree=31), prompts, params)
    together = statistics.ranks
    assert sum(together.values()) == sum(statistics.accepted.values()) == sum(s.accepted for s in sequences) > 0
    assert set(together) <= set(range(1, RANKS + 1))
    alone = [served(changed(tiny, draft_tree=31), [ids], params)[1].ranks for ids in prompts]
    assert together == sum(alone, Counter())
    counts = {s.labels["rank"]: s.value for s in statistics.samples() if s.name == "dflash_accepted_nodes_total"}
    assert counts == {str(rank): count for rank, count in together.items()}


def test_of_a_reply_that_ends_in_a_block_no_more_is_counted(tiny, prompts):
    for tokens in (2, 5, 9):
        params = GREEDY.model_copy(update={"max_tokens": tokens})
        _, statistics = served(changed(tiny, draft_tree=15), prompts, params)
        assert sum(statistics.ranks.values()) == sum(statistics.accepted.values())


def test_chains_count_nothing(tiny, prompts):
    """Without trees, where blocks are drafted in part, and in plain decoding."""
    for nodes, drafts in ((0, 15), (15, 7)):
        _, statistics = served(changed(tiny, draft_tree=nodes), prompts[:2], GREEDY, drafts)
        assert sum(statistics.accepted.values()) > 0
        assert not statistics.ranks
    _, statistics = served(changed(tiny, draft_tree=15), prompts[:2], GREEDY, draft=False)
    assert not statistics.ranks


def test_drafts_of_a_length_between_trees_are_not_counted_with_them(tiny, prompts):
    """Trees are drafted at every third step: what those drafted is what counts."""

    class Turns(FixedDraftLength):
        turn = 0

        @property
        def lengths(self):
            return (7, 15)

        def choose(self, slots):
            Turns.turn += 1
            return 15 if Turns.turn % 3 == 0 else 7

    llm = changed(tiny, draft_tree=15)
    scheduler = Scheduler(llm.session, draft_length=Turns(15))
    sequence = llm.intake.sequence(prompts[0], GREEDY, True)
    scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    trees = sequence.accepted_per_step[2::3]  # the prompt's step was the first that drafted
    assert sum(scheduler.statistics.ranks.values()) == sum(trees) > 0


def test_where_some_have_trees_and_others_chains_none_is_taken_for_the_other_s(tiny, prompts):
    """Steps that read a prompt alone leave such slots, where the session does not mix them with decoding."""
    scheduler = Scheduler(changed(tiny, draft_tree=15).session, draft_length=FixedDraftLength(7), ahead=0)
    for ids in prompts[:2]:
        scheduler.submit(tiny.intake.sequence(ids, GREEDY, True))
    for _ in range(4):
        scheduler.step()
    stays = Batch.of(list(scheduler._slots)).stays
    assert [stay.tree for stay in stays] == [False, False]
    stays[0].tree, scheduler._batch = True, None
    assert Batch.of(stays).trees is None
    scheduler.step()
    assert not any(stay.tree for stay in stays), "all have drafted chains now"
    while scheduler.busy:
        scheduler.step()
    assert not scheduler.statistics.ranks


def test_ranks_are_counted_of_the_drafts_that_replies_got():
    ranks = [[1, 2, 1], [3], [], [1, 1, 4, 2]]
    rows = [[len(own), 7, 7, 7, 7, 7, *own, *[0] * (4 - len(own))] for own in ranks]
    rows.append([0, 7, 7, 7, 7, 7, 0, 0, 0, 0])  # a piece of a prompt
    next_tokens = [900, 901, 902]  # behind the ranks of steps that are shaped
    decided = torch.tensor([row + next_tokens for row in rows], dtype=torch.int32)
    captured = Outcome(decided, first_rank=6, rank_columns=4)
    listed = Outcome(decided[:, :6], ranks=[*ranks, []])
    for counts in ([3, 1, 0, 4], [0, 1, 0, 4], [3, 1, 0, 2], [0] * 4):
        expected = Counter(rank for own, count in zip(ranks, counts, strict=True) for rank in own[:count])
        for outcome in (captured, listed):
            assert Counter(rank for rank in outcome.ranks_of(counts).tolist() if rank) == expected
    assert captured.read() == [(7,) * (row[0] + 1) for row in rows]
    assert captured.accepted == listed.accepted == [3, 1, 0, 4, 0]


def test_tokens_that_may_have_come_are_told_before_they_are_read():
    """Those behind a wrong draft too; never accepted drafts' number or ranks."""
    outcome = Outcome(torch.tensor([[1, 7, 8, 9, 2, 0], [0, 6, 7, 7, 0, 0]]), first_rank=4, rank_columns=2)
    for tokens, expected in (([7], True), ([5, 9], True), ([5], False), ([0, 1, 2], False), ([], False), ([8], True)):
        assert outcome.may_have({token: np.full((1, 1), token, np.int32) for token in tokens}) == expected


def test_imposed_paths_have_no_ranks(tiny, prompts):
    rule = imposed(ImposedAcceptance(6.5, 16), 15)
    _, statistics = served(changed(tiny, rule, draft_tree=15), prompts, GREEDY)
    assert sum(statistics.accepted.values()) > 0
    assert not statistics.ranks
