"""Trees of drafts in TensorRT plans: the network, evaluated in a session, drafts and accepts as `RaggedOps` does."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import edit_tensors, make_drafter, make_gpt_oss, make_target
from tests.conftest import refusal
from tests.drafters import make_dflash2
from tests.test_draft_trees import HOSTILE
from trtllm_dflash.build.planning import plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.cost.memory import cache_shapes, plan_memory
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models.weights import unit_range
from trtllm_dflash.ops.draft_tree import RANKS, DraftTree, draft_tree
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.step_times import measure
from trtllm_dflash.session.calls import Decode, Piece, Prefill, SlotSampling, Step, call_of, words_of
from trtllm_dflash.session.trees import with_trees
from trtllm_dflash.session.weights import complete_weights
from trtllm_dflash.step import Drafting
from trtllm_dflash.text.tokenizer import TextCodec

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt import evaluator
from tests.tensorrt.evaluator import evaluate, trt
from tests.tensorrt.test_compile import SHAPE
from tests.tensorrt.test_network import TINY_PAIR, make_config, one_thread  # noqa: F401
from tests.tensorrt.test_session import CPU, EvaluatedEngine, replies
from trtllm_dflash.build.tensorrt_compiler import CompileSettings, compile_rank
from trtllm_dflash.build.tensorrt_network import build_network
from trtllm_dflash.ops.tensorrt_ops import TensorRTOps
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.session.plan_io import DECODE
from trtllm_dflash.session.plan_paths import PlanPaths
from trtllm_dflash.session.tensorrt_session import TensorRTSession
from trtllm_dflash.session.torch_session import TorchSession

pytestmark = pytest.mark.slow

Tensor = torch.Tensor

#: So few tokens that a drafter, which knows nothing, is right now and then, in the branches too.
VOCABULARY = 16
CHUNK = 24


def make_pair(folder: Path, family: str, block: int = 16, window: int = 8, **drafter: Any) -> Pair:
    if family == "gpt-oss":  # windows, shorter than a prompt and than a tree, and sinks
        target = make_gpt_oss(folder / "target", layers=3, window=window, mxfp4=False, vocab=VOCABULARY)
        drafter["attention_bias"] = True
    else:
        target = make_target(folder / "target", family, layers=3, vocab=VOCABULARY, tied=True)
    return open_pair(target, make_drafter(folder / "drafter", target, block_size=block, **drafter))


class Sessions:
    """One engine in a torch session and in a TensorRT session, each step run in both and compared."""

    def __init__(
        self,
        pair: Pair,
        nodes: int,
        sampled: bool = False,
        builder: Any = None,
        plugin: str | None = None,
        drafted: int | None = None,
    ) -> None:
        """drafted: nodes of the trees that are drafted, 0: none are; None: those that the plan is made for."""
        config = make_config(pair, max_seq_len=128)
        drafted = nodes if drafted is None else drafted
        config = config.model_copy(update={"sampling": sampled, "draft_tree": drafted})
        weights = read_rank_weights(pair, 1, 0, config.dtype)
        self.nodes, self.block = nodes, config.block_size
        self.sampled = sampled
        planned = config.model_copy(update={"backend": "tensorrt", "plan_tree": nodes, "plugin": plugin})
        builder = builder or trt.Builder(trt.Logger(trt.Logger.ERROR))
        step = build_network(builder, planned, complete_weights(weights, planned, 0), 0)
        self.engine = EvaluatedEngine(step, aliased=plugin is None)
        self.torch = TorchSession(config, weights, CPU)
        self.tensorrt = TensorRTSession(planned, self.engine, CPU)
        self.accepted: list[int] = []
        self.moved = 0  # accepted rows that lay elsewhere
        self.ranks: list[int] = []  # of accepted drafts

    def read(self, slot: int, prompt: list[int], tree: bool = True) -> None:
        sampling = SlotSampling(temperature=0.8, seed=7 + slot) if self.sampled else SlotSampling()
        for first in range(0, len(prompt), CHUNK):
            part, is_last = prompt[first : first + CHUNK], first + CHUNK >= len(prompt)
            piece = Piece(slot, first, part, is_last, sampling)
            call = Step([], [piece], Drafting.BLOCK, self.block, self.sampled, tree=self.nodes if tree else 0)
            self._run(call, self.nodes + 1 if tree else self.block)

    def decode(self, rows: list[tuple[int, int]], drafting: Drafting = Drafting.BLOCK, block: int = 0) -> None:
        """block: rows of the chains to draft; 0: trees are."""
        tree = 0 if block else self.nodes
        call = Step(rows, [], drafting, block or self.block, self.sampled, tree=tree)
        accepted = [len(tokens) - 1 for tokens in self._run(call, block or self.nodes + 1)]
        self.accepted += accepted
        path = self.tensorrt._view("path", (len(self.torch._slots.start), max(count for _, count in rows)))
        for (slot, _), count in zip(rows, accepted, strict=True):
            self.moved += sum(row != depth for depth, row in enumerate(path[slot, : count + 1].tolist()))

    def _run(self, call: Step, width: int) -> list[tuple[int, ...]]:
        outcomes = self.tensorrt.run(call), self.torch.run(call)
        mine, theirs = (outcome.read() for outcome in outcomes)
        assert mine == theirs
        assert outcomes[0].ranks == outcomes[1].ranks
        self.ranks += [rank for ranks in outcomes[0].ranks for rank in ranks]
        ours, slots = self.tensorrt._slots, self.torch._slots
        assert torch.equal(ours.start, slots.start)
        part = [slot for slot, _ in call.decode] + [piece.slot for piece in call.pieces if piece.last]
        for name in ("tokens", "parents"):
            assert torch.equal(getattr(ours, name)[part, :width], getattr(slots, name)[part, :width]), name
        shift = self.tensorrt._cache_rows("model.", 0)
        for name, cache in self.torch.caches.items():
            first = shift if name.startswith("model.") else 0
            for slot, rows in enumerate(slots.start.tolist()):
                found = self.tensorrt.caches[name][slot, :, first : first + rows, : cache.shape[3]]
                torch.testing.assert_close(found, cache[slot, :, :rows], atol=1e-4, rtol=1e-4, msg=name)
        return mine


def test_the_drafter_reads_no_more_rows_than_a_block_beyond_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, multiply = [], evaluator._LAYERS["MATRIX_MULTIPLY"]
    moves, move = [], PlanPaths.move

    def noted(layer: Any, inputs: list[Tensor]) -> Any:
        if layer.name.startswith("drafter.fc"):
            rows.append(inputs[0].shape[1])
        return multiply(layer, inputs)

    def noted_move(self: PlanPaths, first_slot: int, start: Tensor, path: Tensor) -> None:
        moves.append(path.shape[1])
        move(self, first_slot, start, path)

    monkeypatch.setitem(evaluator._LAYERS, "MATRIX_MULTIPLY", noted)
    monkeypatch.setattr(PlanPaths, "move", noted_move)
    sessions = Sessions(make_pair(tmp_path, "qwen3"), 31)
    sessions.read(0, make_prompts(20)[0])
    sessions.decode([(0, 32)])
    sessions.decode([(0, 32)], block=9)
    sessions.decode([(0, 9)])
    assert rows == [20, 16, 16, 9]
    assert moves == [16, 16, 9]  # nor are a prompt's moved


def test_drafts_that_nobody_made_are_measured_too(tmp_path: Path) -> None:
    """Of a target that always chooses token 0, which all of them are."""
    make_pair(tmp_path, "qwen3")

    def prefer(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"][0] *= 50

    edit_tensors(tmp_path / "target", prefer)
    session = Sessions(open_pair(tmp_path / "target", tmp_path / "drafter"), 31).tensorrt
    times = measure(session, [0, 15])
    assert list(times) == [(1, 0), (1, 15), (3, 0), (3, 15)]
    assert (session._view("accepted", (3,)) == 15).all()


def make_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.principal("qwen3-15-16-False", "gpt-oss-31-16-False")
@pytest.mark.parametrize(
    ("family", "nodes", "block", "sampled"),
    [("qwen3", 15, 16, False), ("qwen3", 63, 16, True), ("gpt-oss", 31, 16, False), ("llama", 15, 5, True)],
)
def test_steps_in_a_row_are_those_of_torch_s_trees(
    family: str, nodes: int, block: int, sampled: bool, tmp_path: Path
) -> None:
    """Trees, then chains, then no drafts, then trees again: outcomes, next rows, their parents, and all K and V."""
    reduced: dict[str, Any] = {"format": "speculators", "draft_vocab": 12} if family == "llama" else {}
    sessions = Sessions(make_pair(tmp_path, family, block, **reduced), nodes, sampled)
    for slot, prompt in enumerate(make_prompts(30, 5, 1)):
        sessions.read(slot, prompt, tree=slot != 1)
    whole = nodes + 1
    sessions.decode([(0, whole), (1, block), (2, whole)])  # a chain beside trees
    sessions.decode([(slot, whole) for slot in range(3)])
    sessions.decode([(0, whole), (2, whole - 3)], block=block - 1)  # one takes no part, another's last rows are padding
    sessions.decode([(0, block - 1), (1, whole), (2, block - 1)], Drafting.CONTEXT, block=1)
    sessions.decode([(slot, 1) for slot in range(3)])
    for _ in range(3):
        sessions.decode([(slot, whole) for slot in range(3)])
    assert sum(sessions.accepted) > 1 and sessions.moved > 0
    assert len(sessions.ranks) == sum(sessions.accepted) and max(sessions.ranks) > 1
    decodes = [context for context in sessions.engine.contexts if context.profile == DECODE]
    # The prompt of one token, in another slot than the first, is none of them.
    assert len(decodes) < sum(context.executed for context in decodes) == 8


@pytest.mark.principal("True-False-15")
@pytest.mark.parametrize(("shipped", "sampled", "nodes"), [(True, False, 15), (False, True, 31)])
def test_tree_text_is_plain_text_and_acceptance_that_of_torch(
    shipped: bool, sampled: bool, nodes: int, tmp_path: Path
) -> None:
    """Of the shipped pair, whose paths are deep; and of one that knows nothing, sampled, with a shared beginning."""
    if shipped:
        pair = open_pair(TINY_PAIR / "target", TINY_PAIR / "drafter")
        codec = TextCodec.load(TINY_PAIR / "target", {})
        assert codec is not None
        texts = [text for of_kind in read_prompts(1).values() for text in of_kind][:1]
        prompts = [codec.encode_chat([{"role": "user", "content": text}]) for text in texts]
    else:
        pair, prompts = make_pair(tmp_path, "qwen3"), make_prompts(3, 20, 11)
        prompts.append([*prompts[1][:18], 3, 3])  # starts from the second one's rows
    sessions, most = Sessions(pair, nodes, sampled), 40 if shipped else 9
    params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.9 if sampled else 0, seed=2**63 + 5)
    mine, theirs = (replies(one, prompts, params, most) for one in (sessions.tensorrt, sessions.torch))
    assert mine == theirs
    plain = sessions.torch.config.model_copy(update={"draft_tree": 0, "drafter": None, "block_size": 1})
    weights = {name: x for name, x in sessions.torch.weights.items() if not name.startswith("drafter.")}
    expected = replies(TorchSession(plain, weights, CPU), prompts, params, most)
    assert [ids for ids, _ in mine] == [ids for ids, _ in expected]
    assert sum(mine[0][1]) > (20 if shipped else 0)


@torch.inference_mode()
def test_both_ranks_grow_one_tree(tmp_path: Path) -> None:
    """Two ranks' networks in lock-step beside a single one's session."""
    pair, nodes = make_pair(tmp_path, "qwen3", format="speculators", draft_vocab=14), 15
    alone = Sessions(pair, nodes)
    config = alone.tensorrt.config.model_copy(update={"tp": 2})
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    networks, ranks = [], []
    for rank in range(2):
        weights = complete_weights(read_rank_weights(pair, 2, rank, config.dtype), config, rank)
        networks.append(build_network(builder, config, weights, rank))
        ranks.append(PlanPaths(cache_shapes(config), config.dtype, CPU, first=0, most=16))
    prompts = make_prompts(9, 9, 9)
    for slot, prompt in enumerate(prompts):
        alone.read(slot, prompt)
    calls: list[dict[str, Tensor]] = [
        dict(zip(("token_ids", "row_count", "logit_rows"), map(ints, ([p], [9], [[8]])), strict=True)) for p in prompts
    ]
    found: dict[str, list[Tensor]] = {"next_tokens": [], "next_parents": []}
    common = {"block_offsets": torch.arange(16, dtype=torch.int32)[None], "is_tree": ints([1])}
    for slot, call in enumerate(calls):
        call |= common | {"start": ints([0]), "parents": ints([[-1]])}
        given = [call | views(paths, slice(slot, slot + 1)) for paths in ranks]
        outputs = evaluate([network.network for network in networks], given)
        for name in found:
            assert torch.equal(outputs[0][name], outputs[1][name])
            found[name].append(outputs[0][name])
    tokens, parents = (torch.cat(found[name]) for name in ("next_tokens", "next_parents"))
    start, rows, accepted = ints([9] * 3), torch.arange(nodes + 1, dtype=torch.int32).expand(3, -1), 0
    for _ in range(3):
        assert torch.equal(tokens, alone.tensorrt._slots.tokens) and torch.equal(parents, alone.tensorrt._slots.parents)
        call = {"token_ids": tokens, "start": start, "row_count": ints([nodes + 1] * 3), "logit_rows": rows}
        call |= common | {"parents": parents}
        given = [call | views(paths, slice(None)) for paths in ranks]
        outputs = evaluate([network.network for network in networks], given)
        for rank, out in enumerate(outputs):
            ranks[rank].move(0, start, out["path"])
        alone.decode([(slot, nodes + 1) for slot in range(3)])
        accepted += int(outputs[0]["accepted"].sum())
        start, tokens, parents = (outputs[1][name] for name in ("next_start", "next_tokens", "next_parents"))
    assert accepted == sum(alone.accepted) > 0 and alone.moved > 0
    for rank, paths in enumerate(ranks):
        for name, cache in alone.tensorrt.caches.items():
            first, last = unit_range(cache.shape[1], 2, rank)
            for slot, count in enumerate(start.tolist()):
                expected = cache[slot, first:last, :count]
                torch.testing.assert_close(paths.caches[name][slot, :, :count], expected, atol=1e-4, rtol=1e-4)


def views(paths: PlanPaths, slots: slice) -> dict[str, Tensor]:
    return {name: cache[slots] for name, cache in paths.caches.items()}


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- single operations, of equals and of ranks that round otherwise ----------------------------------------------------


Operation = Callable[[TensorRTOps, Any], tuple[Any, Any]]


def computed(operation: Operation, given: list[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Emits one operation for each rank, and computes it with that rank's inputs."""
    networks, kept = [], []
    for rank, inputs in enumerate(given):
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        tensors = {}
        for name, x in inputs.items():
            shape = (*(-1 for _ in x.shape[:-1]), x.shape[-1] if x.dim() > 1 else -1)
            tensors[name] = network.add_input(name, trt.int32 if x.dtype == torch.int32 else trt.float32, shape)
        ops = TensorRTOps(network, {}, tensors, len(given), rank, deepest=15)
        for name, tensor in zip("ab", operation(ops, tensors), strict=True):
            tensor.name = name
            network.mark_output(tensor)
        networks.append(network)
        kept.append(ops)  # TensorRT reads constants where they lie
    return [(found["a"], found["b"]) for found in evaluate(networks, given)]


def grown(tree: DraftTree, given: list[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return computed(lambda ops, x: ops.grow_tree(tree, x["bonus"], x["log_probs"], x["ids"]), given)


@pytest.mark.parametrize(
    ("parents", "accepted", "path"),
    [
        ([-1, 0, 0, 0, 0, 0], 1, [0, 1, 2, 3, 4, 5]),  # one token's siblings
        ([-1, 0, 0, 2, 2, 0], 2, [0, 1, 3, 3, 4, 5]),
        (range(-1, 31), 15, range(32)),  # deeper than any draft
    ],
)
def test_what_is_accepted_of_rows_that_nobody_drafted_stays_among_them(
    parents: Sequence[int], accepted: int, path: Sequence[int]
) -> None:
    rows = ints([range(len(parents))])
    given = {"token_ids": rows * 0, "target_ids": rows * 0, "logit_rows": rows, "row_count": ints([len(parents)])}

    def accept(ops: TensorRTOps, x: Any) -> tuple[Any, Any]:
        verdict = ops.accept(x["token_ids"], x["target_ids"], x["logit_rows"], x["row_count"])
        return verdict.accepted, verdict.path

    ((found, order),) = computed(accept, [given | {"parents": ints([list(parents)])}])
    assert found.tolist() == [accepted] and order.tolist() == [list(path)]


@pytest.mark.parametrize("nodes", [15, 63])
def test_trees_of_hostile_chances_are_torch_s(nodes: int) -> None:
    """Of equals too, the nodes that the list has first."""
    tree, bonus = draft_tree(nodes, 16), ints([3] * len(HOSTILE))
    log_probs = torch.stack([x.contiguous() for x in HOSTILE.values()])
    ids = torch.arange(15 * RANKS, dtype=torch.int32).view(1, 15, RANKS).expand(len(log_probs), -1, -1)
    given = {"bonus": bonus, "ids": ids, "log_probs": log_probs, "is_tree": ints([1])}
    ((tokens, parents),) = grown(tree, [given])
    expected = TorchOps({}, {}).grow_tree(tree, bonus, log_probs, ids)
    assert torch.equal(tokens, expected[0]) and torch.equal(parents, expected[1])
    # A block of 5, of which a chain is wanted: the most likely drafts, whatever the chances are.
    short = {"log_probs": log_probs[:, :4], "ids": ids[:, :4], "is_tree": ints([0])}
    ((tokens, parents),) = grown(tree, [given | short])
    assert (tokens[:, :5] == torch.cat([bonus[:1], ids[0, :4, 0]])).all()
    assert (parents[:, :5] == torch.arange(-1, 4)).all()


def test_all_ranks_take_the_first_one_s_tree() -> None:
    tree, ids = draft_tree(15, 16), torch.arange(15 * RANKS, dtype=torch.int32).view(1, 15, RANKS)
    generator = torch.Generator().manual_seed(2)
    common = {"bonus": ints([3]), "ids": ids, "is_tree": ints([1])}
    chances = [torch.randn(1, 15, RANKS, generator=generator).log_softmax(dim=-1) for _ in range(2)]
    first, other = (TorchOps({}, {}).grow_tree(tree, ints([3]), x, ids) for x in chances)
    assert not torch.equal(first[0], other[0])
    for found in grown(tree, [common | {"log_probs": x} for x in chances]):
        assert torch.equal(found[0], first[0]) and torch.equal(found[1], first[1])


@pytest.mark.parametrize("tp", [1, 2])
def test_the_lowest_of_equal_ids_come_first(tp: int) -> None:
    """Eight stand out in each row, with two equals of each and, of two ranks, on either side."""
    logits = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(4))
    for place, token in enumerate((3, 40, 17, 63, 0, 32, 31, 5)):
        logits[..., token] = 9.0 - place // 2
    parts = [{"logits": part.contiguous()} for part in logits.chunk(tp, dim=-1)]
    expected = TorchOps({}, {}).top_ids(logits, RANKS)
    for log_probs, ids in computed(lambda ops, x: ops.top_ids(x["logits"], RANKS), parts):
        assert torch.equal(ids, expected[1])
        torch.testing.assert_close(log_probs, expected[0])


# -- compiled ----------------------------------------------------------------------------------------------------------


def planned(pair: Pair, **settings: Any) -> EngineConfig:
    limits: dict[str, Any] = {"max_batch": 4, "max_seq_len": 256, "chunk": 64, "backend": "tensorrt", "gpu": "sm120"}
    return plan_engine(pair, BuildSettings(name="test", target="", drafter="", **{**limits, **settings})).config


@pytest.mark.exhaustive(beside="test_both_profiles_compile")
def test_the_shipped_pair_compiles() -> None:
    pair = open_pair(TINY_PAIR / "target", TINY_PAIR / "drafter")
    config = planned(pair, draft_tree=15, precision="bf16", sampling=False)
    weights = complete_weights(read_rank_weights(pair, 1, 0, config.dtype), config, 0)
    assert compile_rank(config, weights, 0, CompileSettings(gpu="sm120")).data.nbytes > 0


@pytest.mark.principal("gpt-oss")
@pytest.mark.parametrize(
    ("family", "gpu", "nodes", "tp"), [("qwen3", "sm89", 31, 2), ("gpt-oss", "sm120", 63, 1)], ids=["qwen3", "gpt-oss"]
)
def test_both_profiles_compile(family: str, gpu: str, nodes: int, tp: int, tmp_path: Path) -> None:
    shape = SHAPE | {"hidden": 128, "vocab": 512}
    if family == "gpt-oss":
        target = make_gpt_oss(tmp_path / "target", layers=2, mxfp4=False, **shape)
    else:
        target = make_target(tmp_path / "target", layers=2, **shape)
    pair = open_pair(target, make_drafter(tmp_path / "drafter", target, layers=1, tap_layers=(0, 1), **SHAPE))
    config = planned(pair, draft_tree=nodes, precision="fp16", tp=tp, gpu=gpu, sampling=tp == 2)
    weights = complete_weights(read_rank_weights(pair, tp, tp - 1, config.dtype), config, tp - 1)
    assert compile_rank(config, weights, tp - 1, CompileSettings(gpu=gpu)).data.nbytes > 0


# -- what is chosen and refused ----------------------------------------------------------------------------------------


def test_a_plan_drafts_the_trees_that_it_was_built_for_or_chains() -> None:
    config = planned(open_pair(TINY_PAIR / "target", TINY_PAIR / "drafter"), draft_tree=31, precision="bf16")
    assert (config.plan_tree, config.draft_tree, config.slot_rows) == (31, 0, 32)
    for choice, nodes in (("auto", 31), (31, 31), ("off", 0)):
        chosen = with_trees(config, choice, torch.device("cuda"))
        assert chosen == config.model_copy(update={"draft_tree": nodes})
    for built, says in ((config, "trees of 31"), (config.model_copy(update={"plan_tree": 0}), "chains")):
        with pytest.raises(SettingsError, match=f"--draft-tree 15: this plan drafts {says}; leave it out, or build"):
            with_trees(built, 15, torch.device("cuda"))


def test_what_trees_take_is_in_the_memory_plan() -> None:
    config = planned(open_pair(TINY_PAIR / "target", TINY_PAIR / "drafter"), draft_tree=63, precision="bf16")
    less = plan_memory(config.model_copy(update={"plan_tree": 0})).scratch
    row = sum(2 * heads * size for name, (_, heads, _, size) in cache_shapes(config).items() if name[:6] == "model.")
    assert plan_memory(config).scratch - less > 2 * 256 * config.cache_length + 4 * 16 * row


def test_a_plan_without_trees_has_nothing_of_them() -> None:
    config = planned(open_pair(TINY_PAIR / "target", TINY_PAIR / "drafter"), precision="bf16")
    assert config.plan_tree == with_trees(config, "auto", torch.device("cuda")).draft_tree == 0


def test_what_cannot_be_planned_is_refused_in_one_line(tmp_path: Path) -> None:
    pair = open_pair(TINY_PAIR / "target", TINY_PAIR / "drafter")
    selects = open_pair(
        make_target(tmp_path / "target", layers=3), make_dflash2(tmp_path / "drafter", tmp_path / "target")
    )
    short = make_pair(tmp_path / "short", "qwen3", block=4)
    long = make_pair(tmp_path / "long", "qwen3", block=24)
    for asked, settings, says in (
        (selects, {"draft_tree": 15}, "--draft-tree 15: DFlash 2 and DSpark draft chains alone"),
        (short, {"draft_tree": 63}, "--draft-tree 63: blocks of 4 have not so many nodes"),
        (
            long,
            {"draft_tree": 31},
            "--draft-tree 31: its nodes make chains of 15 drafts, blocks have 23; use --block-s",
        ),
        (pair, {"draft_tree": 15, "backend": "torch", "gpu": None}, "--draft-tree is a setting of --backend tensorrt"),
    ):
        with pytest.raises(SettingsError) as refused:
            planned(asked, precision="bf16", **settings)
        assert str(refused.value).startswith(says)
    said = refusal("build", "--model", "tiny", "--backend", "tensorrt", "--gpu", "sm120", "--draft-tree", "16")
    assert "choose 15, 31 or 63" in said


def test_calls_of_trees_survive_the_way_to_other_ranks() -> None:
    for call in (
        Decode([16, 0, 3], Drafting.BLOCK, 16, True, 15),
        Prefill(1, 5, [3, 4], True, Drafting.BLOCK, 16, SlotSampling(), 63),
    ):
        assert call_of(list(words_of(call))) == call
