"""Drafts as trees: the best of the listed nodes, of which one path is accepted, and the text unchanged."""

import random
from heapq import heappop, heappush

import pytest
import torch

from tests.checkpoints import make_drafter, make_gpt_oss
from tests.conftest import refusal
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.imposed import draw_accepted, imposed
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.errors import CancelledError, SettingsError
from trtllm_dflash.ops.cpu_attention import TILE, attend, attend_paths, hidden_from_paths, hidden_keys
from trtllm_dflash.ops.draft_tree import RANKS, TREE_SIZES, chain_tree, draft_tree
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session import torch_session
from trtllm_dflash.session.calls import Piece, Step, call_of, words_of
from trtllm_dflash.session.slots import SlotTensors
from trtllm_dflash.session.trees import tree_beside, with_trees
from trtllm_dflash.step import Drafting

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.8, seed=5)
OPS = TorchOps({}, {})


def tokens(completions):
    return [completion.token_ids for completion in completions]


def tokens_a_step(completions):
    return sum(len(reply.token_ids) - 1 for reply in completions) / sum(reply.steps for reply in completions)


# -- the best tree of a list -------------------------------------------------------------------------------------------


def grown(tree, log_probs):
    """The tree that `grow_tree` makes of marginals [depths, RANKS]: the path of each row."""
    ids = torch.arange(log_probs.numel(), dtype=torch.int32).view(1, *log_probs.shape)  # each its place
    rows, parents = OPS.grow_tree(tree, torch.tensor([9999], dtype=torch.int32), log_probs[None], ids)
    assert rows[0, 0] == 9999 and parents[0, 0] == -1
    assert rows.dtype == parents.dtype == torch.int32
    paths = [()]
    for place, parent in zip(rows[0, 1:].tolist(), parents[0, 1:].tolist(), strict=True):
        assert place // RANKS == len(paths[parent]), "a row's token is of its depth"
        paths.append((*paths[parent], place % RANKS))
    return paths


def best(log_probs, listed, nodes):
    """The most likely nodes of a list, found one by one among those whose parents are found."""
    found, heap = [], [(0.0, ())]
    while len(found) <= nodes:
        negative, path = heappop(heap)
        found.append(path)
        for rank in range(RANKS):
            child = (*path, rank)
            if child in listed:
                heappush(heap, (negative - log_probs[len(path)][rank], child))
    return found


@pytest.mark.parametrize("nodes", TREE_SIZES)
def test_a_tree_has_the_most_likely_of_the_listed_nodes(nodes):
    torch.manual_seed(nodes)
    tree = draft_tree(nodes, 16)
    listed = set(tree.paths)
    for peak in (0.5, 2.0, 6.0):
        log_probs = (peak * torch.randn(15, RANKS)).log_softmax(-1).sort(-1, descending=True).values
        paths = grown(tree, log_probs)
        expected = best(log_probs.tolist(), listed, nodes)
        chances = [sum(log_probs[i, r].clamp(min=-15).item() for i, r in enumerate(path)) for path in paths]
        assert len(set(paths)) == nodes + 1
        if min(chances) > -15:  # beyond, nodes are as good as each other
            assert set(paths) == set(expected)
        spine = [path for path in paths if not any(path)]
        assert paths[: len(spine)] == spine, "the most likely chain comes first"


HOSTILE = {
    "certain": torch.tensor([0.0] + [-torch.inf] * (RANKS - 1)).expand(15, -1),
    "all equal": torch.full((15, RANKS), -2.0794415),
    "all certain": torch.zeros(15, RANKS),
    "tiny steps": -1e-7 * torch.arange(15.0 * RANKS).view(15, RANKS),
    "hopeless": torch.full((15, RANKS), -1e30),
}


@pytest.mark.parametrize("log_probs", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("nodes", TREE_SIZES)
def test_no_node_is_without_its_parent(nodes, log_probs):
    for block in (5, 16):
        grown_paths = grown(draft_tree(nodes if block == 16 else 15, block), log_probs[: block - 1].contiguous())
        assert all(path[:-1] in grown_paths[:i] for i, path in enumerate(grown_paths) if i)
        assert len(set(grown_paths)) == len(grown_paths)


def test_the_likely_ids_are_the_largest_logits_the_lowest_among_equals():
    logits = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).round()  # many are equal
    log_probs, ids = OPS.top_ids(logits, RANKS)
    order = sorted(range(64), key=lambda i: (-logits[1, 2, i].item(), i))
    assert ids[1, 2].tolist() == order[:RANKS]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(-1, ids.long()))


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 50, 3])
@pytest.mark.parametrize("heads", [(8, 4), (8, 1), (6, 2)])
def test_a_row_s_attention_along_its_path_is_that_of_the_same_tokens_in_a_run(heads, window):
    torch.manual_seed(0)
    rng, count, size, group = random.Random(3), 12, 16, heads[0] // heads[1]
    for start in (5, TILE - 6, TILE - 1, TILE, 2 * TILE + 40):
        paths = [[0]]
        for row in range(1, count):
            paths.append([*paths[rng.randrange(row)], row])
        depth = max(map(len, paths))
        q = torch.randn(heads[0], count, size)
        keys, values = torch.randn(2, heads[1], start + count, size).unbind()
        sinks = torch.randn(heads[0]) if heads[1] == 1 else None
        first = 0 if window is None else max(0, start + 1 - window) // TILE * TILE
        places = torch.tensor([[*path, *[0] * (depth - len(path))] for path in paths]) + start - first
        hidden = hidden_from_paths(first, [start + len(path) - 1 for path in paths], group, window)
        out = attend_paths(q, keys[:, first:], values[:, first:], start - first, places, hidden, sinks)
        for row, path in enumerate(paths):
            seen = [*range(start), *(start + at for at in path)]
            begin = 0 if window is None else max(0, len(seen) - window) // TILE * TILE
            run = attend(
                q[:, row : row + 1],
                keys[:, seen[begin:]],
                values[:, seen[begin:]],
                hidden_keys(begin, len(seen), 1, group, True, window),
                sinks,
            )
            assert torch.equal(out[row], run[0]), (start, path)


# -- texts -------------------------------------------------------------------------------------------------------------


def changed(llm, accept=None, **update):
    """The same weights in a session of its own, with another configuration, or another rule of acceptance."""
    config, weights = llm.config.model_copy(update=update), dict(llm.session.weights)
    return LLM(torch_session.TorchSession(config, weights, llm.session.device, accept=accept), llm.codec)


@pytest.fixture(scope="module")
def prompts(tiny):
    texts = [text for kind in read_prompts(1).values() for text in kind]
    return [tiny.encode([{"role": "user", "content": text}]) for text in texts]


@pytest.fixture(scope="module")
def known(tiny, prompts):
    """Plain and chain-drafted replies, by parameters."""
    return {id(p): [tiny.generate(prompts, p, draft) for draft in (False, True)] for p in (GREEDY, SAMPLED)}


CASES = [(15, GREEDY), (31, SAMPLED), pytest.param(63, GREEDY, marks=pytest.mark.slow)]


@pytest.mark.principal("15", "31, sampled")
@pytest.mark.parametrize(("nodes", "params"), CASES, ids=["15", "31, sampled", "63"])
def test_a_tree_commits_more_a_step_and_the_text_is_plain_text(nodes, params, tiny, prompts, known):
    """How much more over all held-out prompts is in benchmarks/results/draft-trees-cpu.json."""
    plain, chain = known[id(params)]
    replies = changed(tiny, draft_tree=nodes).generate(prompts, params)
    assert tokens(replies) == tokens(plain)
    assert tokens_a_step(replies) > (1.05 if params is GREEDY else 1) * tokens_a_step(chain)
    assert max(n for reply in replies for n in reply.accepted_per_step) <= 15
    assert all(reply.drafted_tokens >= nodes * (reply.steps - 1) for reply in replies)


def test_a_chain_is_the_tree_whose_list_is_a_chain(tiny, prompts, known, monkeypatch):
    """Drafted, verified, accepted and kept to the bit."""
    monkeypatch.setattr(torch_session, "draft_tree", lambda nodes, block: chain_tree(nodes))
    sessions = changed(tiny, draft_tree=15), changed(tiny)
    ours, theirs = (llm.generate(prompts, SAMPLED) for llm in sessions)
    assert tokens(ours) == tokens(theirs)
    assert [reply.accepted_per_step for reply in ours] == [reply.accepted_per_step for reply in theirs]
    caches, others = (llm.session.caches for llm in sessions)
    assert all(torch.equal(cache, others[name]) for name, cache in caches.items())


PAGED = {"kv": "fp8", "page_size": 16, "chunk": 64}


@pytest.mark.principal("FP8 caches in pages")
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, PAGED], ids=["linear", "FP8 caches in pages"])
def test_layers_with_windows_and_sinks(changes, tmp_path):
    """A vocabulary of 16: a drafter that knows nothing is still right now and then, in the branches too."""
    target = make_gpt_oss(tmp_path / "target", experts=2, top_k=1, window=16, mxfp4=False, vocab=16)
    drafter = make_drafter(tmp_path / "drafter", target)
    prompts = [[1 + 7 * i % 14 for i in range(length)] for length in (1, 30, 120, 131)]  # the last fill the context
    params = [GREEDY, SAMPLED] * 2
    limits = {"precision": "fp32", "device": "cpu", "max_batch": 3, "max_seq_len": 160}
    with LLM.from_pretrained(str(target), str(drafter), **limits) as loaded:
        llm = changed(loaded, **changes)
        expected, chain = (llm.generate(prompts, params, draft) for draft in (False, True))
        replies = changed(loaded, draft_tree=15, **changes).generate(prompts, params)
    assert tokens(replies) == tokens(chain) == tokens(expected)
    assert sum(reply.steps for reply in replies) < sum(reply.steps for reply in chain)


def test_log_probabilities_are_those_of_the_accepted_rows(tiny, prompts):
    params = GREEDY.model_copy(update={"logprobs": 2})
    for mine, plain in zip(
        changed(tiny, draft_tree=15).generate(prompts[2:], params),
        tiny.generate(prompts[2:], params, draft=False),
        strict=True,
    ):
        assert mine.logprobs == plain.logprobs and len(mine.logprobs) == len(mine.token_ids)
        assert mine.accepted_tokens


@pytest.mark.slow
def test_rows_that_trees_have_moved_are_shared_and_survive_a_neighbour_s_cancellation(tiny, prompts):
    """The later requests begin with the earlier ones' prompts and replies."""
    llm = changed(tiny, draft_tree=31, page_size=16, max_batch=2)
    scheduler = Scheduler(llm.session)

    def run(asked, cancelled=None):
        sequences = [llm.intake.sequence(ids, GREEDY, True) for ids in asked]
        for sequence in sequences:
            scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
            if cancelled is not None and len(sequences[cancelled].token_ids) > 9:
                scheduler.cancel(sequences[cancelled], CancelledError("gone"))
        return sequences

    first = run(prompts[:3], cancelled=0)
    assert first[0].error is not None
    longer = [sequence.prompt_ids + sequence.token_ids for sequence in first]
    again = run(longer)
    assert all(sequence.reused > len(ids) for sequence, ids in zip(again, prompts, strict=False))
    assert [sequence.token_ids for sequence in again] == tokens(tiny.generate(longer, GREEDY, draft=False))


def test_imposed_acceptance_is_the_depth_that_a_tree_is_accepted_to(tiny, prompts):
    rule = imposed(ImposedAcceptance(6.5, 16))
    params = [GREEDY.model_copy(update={"seed": i}) for i in range(len(prompts))]
    chains, trees = (changed(tiny, rule, draft_tree=n).generate(prompts, params) for n in (0, 63))
    assert [reply.accepted_per_step for reply in trees] == [reply.accepted_per_step for reply in chains]


def test_trees_may_be_imposed_to_commit_more(tiny, prompts):
    """By the chance that a tree's drafts have, wherever the slots' rows are a tree."""
    usual = ImposedAcceptance(6.49, 16)
    params = [SamplingParams(max_tokens=50, ignore_eos=True, seed=i) for i in range(len(prompts))]
    for seed, (ids, reply) in enumerate(
        zip(prompts, changed(tiny, imposed(usual, 15), draft_tree=15).generate(prompts, params), strict=True)
    ):
        start = len(ids)
        for accepted in reply.accepted_per_step[:-1]:
            at = torch.tensor([seed]), torch.tensor([start], dtype=torch.int32)
            assert accepted == draw_accepted(*at, usual.tree_survival(15), 16).item()
            start += accepted + 1


# -- the choice --------------------------------------------------------------------------------------------------------


def test_calls_of_trees_go_to_other_ranks():
    call = Step([(0, 16)], [Piece(1, 0, [5, 6], True)], Drafting.BLOCK, 16, False, tree=31)
    assert call_of(list(words_of(call))) == call


@pytest.mark.parametrize(
    ("choice", "update", "device", "says"),
    [
        (7, {}, "cpu", "--draft-tree 7: choose auto, off, 15, 31 or 63"),
        ("much", {}, "cpu", "--draft-tree much: choose auto, off, 15, 31 or 63"),
        (15, {"drafter": None}, "cpu", "--draft-tree 15: this engine has no drafter"),
        ("31", {"backend": "tensorrt"}, "cuda", "--draft-tree 31: this plan drafts chains; leave it out, or build"),
        (15, {}, "cuda", "--draft-tree 15: on a GPU trees need our CUDA kernels, which compute bf16 and fp16"),
        (63, {"block_size": 4}, "cpu", "--draft-tree 63: blocks of 4 have not so many nodes to choose from; use 31"),
        (15, {"block_size": 2}, "cpu", "--draft-tree 15: blocks of 2 have not so many nodes to choose from; leave it"),
    ],
)
def test_what_cannot_draft_trees_is_refused_in_one_line(choice, update, device, says, tiny):
    with pytest.raises(SettingsError) as refused:
        with_trees(tiny.config.model_copy(update=update), choice, torch.device(device))
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("update", "kernels", "capability", "nodes"),
    [
        ({}, "auto", (9, 0), 15),
        ({"tp": 2}, "auto", (9, 0), 0),
        ({"block_size": 8}, "auto", (9, 0), 0),
        ({"precision": "fp32"}, "auto", (9, 0), 0),
        ({}, "torch", (9, 0), 0),
        ({}, "exact", (9, 0), 15),
        ({}, "auto", (8, 9), 0),
    ],
)
def test_auto_drafts_trees_where_they_are_known_to_be_faster(update, kernels, capability, nodes, tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = tiny.config.model_copy(update={"precision": "bf16", **update})
    assert with_trees(config, "auto", torch.device("cuda"), kernels).draft_tree == nodes
    assert with_trees(config, "auto", torch.device("cpu"), kernels).draft_tree == 0


def test_shorter_drafts_than_a_block_leave_auto_no_trees():
    assert tree_beside("auto", 7, 16) == "off"
    assert [tree_beside("auto", length, 16) for length in (15, "auto")] == ["auto", "auto"]
    assert tree_beside(31, 7, 16) == 31, "as was asked for"


def test_a_gpu_joins_no_more_taps_than_its_kernel_takes(tiny):
    most, more = (
        tiny.config.model_copy(
            update={"precision": "bf16", "drafter": tiny.config.drafter.model_copy(update={"tap_layers": (0,) * taps})}
        )
        for taps in (8, 9)
    )
    assert with_trees(most, 15, torch.device("cuda")).draft_tree == 15
    with pytest.raises(SettingsError, match="--draft-tree 15: on a GPU trees need a drafter of at most 8 taps; this"):
        with_trees(more, 15, torch.device("cuda"))


def test_auto_and_off_draft_chains(tiny):
    for choice in ("auto", "off"):
        assert with_trees(tiny.config, choice, torch.device("cpu")).draft_tree == 0


@pytest.mark.parametrize("nodes", [0, 63])
def test_before_any_drafts_a_slot_s_rows_are_a_chain_no_deeper_than_one_is(nodes, tiny):
    config = tiny.config.model_copy(update={"draft_tree": nodes})
    for parents in SlotTensors(config, torch.device("cpu")).parents.tolist():
        depths = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        assert depths == [min(row, config.block_size - 1) for row in range(max(nodes + 1, config.block_size))]


def test_a_wrong_flag_is_refused(tiny_engine, tmp_path):
    said = refusal("generate", "--engine", tiny_engine, "-p", "hello", "--draft-tree", "8", "--device", "cpu")
    assert "--draft-tree 8: choose auto, off, 15, 31 or 63" in said
    said = refusal("demo", "--draft-tree", "8", "--output", tiny_engine, "--device", "cpu")
    assert "--draft-tree 8: choose auto, off, 15, 31 or 63" in said
    said = refusal("deploy", "--engine", tiny_engine, "--output", tmp_path / "models", "--draft-tree", "twelve")
    assert "--draft-tree twelve: choose auto, off, 15, 31 or 63" in said
