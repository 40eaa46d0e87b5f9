"""Hybrids of gated delta nets as TensorRT networks: evaluated, they are TorchOps, states included; and they compile."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter
from tests.hybrid_checkpoints import make_hybrid
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.cost.states import state_tensors
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import build_target
from trtllm_dflash.models.hybrid import HybridDecoder
from trtllm_dflash.models.weights import unit_range
from trtllm_dflash.ops.delta_states import DeltaStates, NetState, Run
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.step import Drafting, DraftVerifyStep, StepInputs

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import evaluate, trt
from tests.tensorrt.test_network import BLOCK, CHUNK, SLOTS, Both, bound_inputs, ints, make_config
from tests.tensorrt.test_quantized import compiled
from trtllm_dflash.ops.tensorrt_attention import PRESENT
from trtllm_dflash.ops.tensorrt_delta_net import STATE_LENGTH

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
#: Of a tensor's norm. What FP32 rounds off in a net is larger in the next: 2e-5 is seen.
TOLERANCE = 1e-4
OFFSETS = torch.arange(BLOCK, dtype=torch.int32)[None]


@pytest.fixture(scope="module")
def builder() -> Any:
    return trt.Builder(trt.Logger(trt.Logger.ERROR))


def make_hybrid_pair(folder: Path, layout: str, **shape: int) -> Pair:
    target = make_hybrid(folder / "target", layout, **{"vocab": 32, **shape})
    drafter: dict[str, Any] = {"block_size": BLOCK, "layers": 1, "tap_layers": (0, 1), "heads": 8}
    return open_pair(target, make_drafter(folder / "drafter", target, **drafter))


@dataclass
class HybridBoth(Both):
    """As `Both`, of a hybrid: the states of every slot are compared, too; slots that take no part keep theirs."""

    accepted: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.config.model_copy(update={"tp": 1, "backend": "torch"})
        self.states = DeltaStates(_zeros(whole), whole.block_size)
        for caches in self.rank_caches:
            caches |= _zeros(self.config) | {STATE_LENGTH: torch.zeros(SLOTS, dtype=torch.int32)}

    def run(self, inputs: StepInputs[Tensor], first_slot: int = 0) -> Any:
        slots = slice(first_slot, first_slot + len(inputs.token_ids))
        bound = [
            bound_inputs(inputs) | {name: cache[slots] for name, cache in caches.items()} for caches in self.rank_caches
        ]
        before = [{name: cache.clone() for name, cache in caches.items()} for caches in self.rank_caches]
        results = evaluate([network.network for network in self.emitted], bound)
        each = enumerate(zip(inputs.start.tolist(), inputs.row_count.tolist(), strict=True))
        runs = [Run(first_slot + i, start, count, entry=i, first=0) for i, (start, count) in each if count]
        caches = {name: cache[slots] for name, cache in self.caches.items()}
        expected = self.step(TorchOps(self.weights, caches, None, self.states, runs), inputs, Drafting.BLOCK)
        self.states.finish(runs)
        part = [run.entry for run in runs]
        lengths = torch.where(inputs.row_count > 0, expected.next_start, inputs.start)
        for rank, found in enumerate(results):
            for name in state_tensors(self.config):  # as a session does
                self.rank_caches[rank][name][slots] = found[name + PRESENT]
            is_real = (inputs.logit_rows < inputs.row_count[:, None])[part]
            assert torch.equal(found["target_ids"][part][is_real], expected.target_ids[part][is_real])
            for name in ("accepted", "next_start", "next_tokens"):
                assert torch.equal(found[name][part], getattr(expected, name)[part]), name
            self.rank_caches[rank][STATE_LENGTH] = ints(*self.states.length)
            self._compare_caches(rank, before[rank], lengths, slots)
            self._compare_states(rank, before[rank], {run.slot for run in runs})
        self.compared += 1
        return expected

    def _compare_caches(self, rank: int, before: dict[str, Tensor], lengths: Tensor, slots: slice) -> None:
        """As in `Both`, by norms: the nets make FP32's last digits larger."""
        models = {"model": self.config.target, "drafter": self.config.drafter}
        for name, cache in self.caches.items():
            model = models[name.partition(".")[0]]
            assert model is not None
            first, last = unit_range(model.kv_heads, self.config.tp, rank)
            found = self.rank_caches[rank][name]
            for slot in range(SLOTS):
                if slot not in range(slots.start, slots.stop):
                    assert torch.equal(found[slot], before[name][slot])
                    continue
                rows = int(lengths[slot - slots.start])
                assert_near(found[slot, :, :rows], cache[slot, first:last, :rows], name)

    def _compare_states(self, rank: int, before: dict[str, Tensor], computed: set[int]) -> None:
        target = build_target(self.config.target)
        assert isinstance(target, HybridDecoder)
        held = self.rank_caches[rank]
        tp = self.config.tp
        for prefix in target._nets:
            net = prefix + "linear_attn."
            whole, own = target.delta_layer(net, 1), target.delta_layer(net, tp)
            for slot in range(SLOTS):
                state, pending, window = (held[net + name][slot] for name in ("state", "pending", "window"))
                if slot not in computed:
                    assert all(
                        torch.equal(held[net + name][slot], before[net + name][slot])
                        for name in ("state", "pending", "window")
                    )
                    continue
                expected = self.states.of(net, slot)
                rows = self.states.rows[slot]
                widths = own.value_heads * own.value_size, own.key_heads * own.key_size, own.value_heads
                u, keys, decays = pending[0, :rows].split(widths, dim=1)
                found = NetState(
                    state,
                    u.unflatten(1, (own.value_heads, -1)),
                    keys.unflatten(1, (own.key_heads, -1)),
                    decays.exp(),
                    window[0, : own.kernel - 1 + rows],
                )
                there = _slice_of(expected, rows, whole, rank, tp)
                for part, tensor in vars(found).items():
                    assert_near(tensor, getattr(there, part), net + part)


def assert_near(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape
    assert (found - expected).norm() <= TOLERANCE * expected.norm(), what


def _zeros(config: EngineConfig) -> dict[str, Tensor]:
    tensors = state_tensors(config)
    return {name: torch.zeros(config.max_batch, *shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}


def _slice_of(state: NetState, rows: int, layer: Any, rank: int, tp: int) -> NetState:
    """A rank's part of a net's state with so many pending rows."""
    sizes = [layer.key_heads * layer.key_size] * 2 + [layer.value_heads * layer.value_size]
    sections = state.window[: layer.kernel - 1 + rows].split(sizes, dim=1)
    window = torch.cat([section.chunk(tp, dim=1)[rank] for section in sections], dim=1)
    writes, keys, decays = (x[:rows].chunk(tp, dim=1)[rank] for x in (state.writes, state.keys, state.decays))
    return NetState(state.state.chunk(tp)[rank], writes, keys, decays, window)


def plain_text(both: HybridBoth, prompt: list[int], length: int) -> list[int]:
    """A prompt and the target's own reply, one row at a time."""
    caches = {name: torch.zeros_like(cache[:1]) for name, cache in both.caches.items()}
    states = DeltaStates({name: torch.zeros_like(x) for name, x in both.states.tensors.items()}, both.states.pending)
    step = DraftVerifyStep(both.step.target, None)
    text = list(prompt)
    for at in range(length - 1):
        inputs = StepInputs(ints([text[at]]), ints(at), ints(1), ints([0]), ints([0]))
        run = Run(0, at, 1, 0, 0)
        out = step(TorchOps(both.weights, caches, None, states, [run]), inputs, Drafting.OFF)
        states.finish([run])
        if at + 1 >= len(text):
            text.append(int(out.target_ids[0, 0]))
    return text


@dataclass
class Text:
    """A prompt and its reply, in a slot."""

    prompt: int  # tokens of it
    ids: list[int]
    rows: int = 0  # tokens that have rows

    @property
    def is_read(self) -> bool:
        return self.rows >= self.prompt


def write_texts(both: HybridBoth, lengths: list[tuple[int, int]], seed: int) -> None:
    """Reads prompts and writes replies in slots that are used again, with drafts that are right up to a random place.

    Prompts are read between steps that decode all slots together: those in the middle of a prompt, and some others,
    take no part. One text is cancelled, with rows pending.
    """
    chance = random.Random(seed)
    prompts = [([chance.randrange(30) for _ in range(prompt)], prompt + reply) for prompt, reply in lengths]
    texts = [Text(len(prompt), plain_text(both, prompt, total)) for prompt, total in prompts]
    slots: list[Text | None] = [None] * SLOTS
    cancelled = False
    while texts or any(slots):
        slots = [texts.pop(0) if text is None and texts else text for text in slots]
        reading = [(slot, text) for slot, text in enumerate(slots) if text and not text.is_read]
        if reading:
            read_piece(both, *chance.choice(reading), chance)
        decode_some(both, slots, chance)
        for slot, text in enumerate(slots):
            if text and text.rows + 1 >= len(text.ids):
                slots[slot] = None
            elif text and text.rows > text.prompt and texts and not cancelled:
                slots[slot], cancelled = None, True


def read_piece(both: HybridBoth, slot: int, text: Text, chance: random.Random) -> None:
    """Reads some of a prompt in its slot, maybe with padding behind."""
    count = min(chance.randint(1, CHUNK), text.prompt - text.rows)
    padding = chance.choice((0, min(3, CHUNK - count)))
    ids = text.ids[text.rows : text.rows + count] + [0] * padding
    out = both.run(StepInputs(ints(ids), ints(text.rows), ints(count), ints([count - 1]), OFFSETS), slot)
    text.rows += count
    if text.is_read:
        assert int(out.target_ids[0, 0]) == text.ids[text.prompt]


def decode_some(both: HybridBoth, slots: list[Text | None], chance: random.Random) -> None:
    """Decodes some of those slots whose prompts are read, in one step of all."""
    counts, rows, rights = [], [], []
    for text in slots:
        most = min(BLOCK, len(text.ids) - text.rows - 1) if text and text.is_read and chance.random() < 0.8 else 0
        count = chance.choice((most, chance.randint(1, most))) if most else 0
        right = chance.choice((count - 1, chance.randint(0, count - 1))) if count else 0
        ids = text.ids[text.rows : text.rows + count] if text else []
        ids[right + 1 :] = [(token + 1) % 30 for token in ids[right + 1 :]]
        counts.append(count)
        rights.append(right)
        rows.append(ids)
    if not any(counts):
        return
    width = max(counts)
    start = ints(*[text.rows if text else 7 for text in slots])
    logit_rows = torch.arange(width, dtype=torch.int32)[None].repeat(SLOTS, 1)
    token_ids = ints(*[ids + [0] * (width - len(ids)) for ids in rows])
    out = both.run(StepInputs(token_ids, start, ints(*counts), logit_rows, OFFSETS))
    for slot, (text, right) in enumerate(zip(slots, rights, strict=True)):
        if text and counts[slot]:
            both.accepted.add(right)
            assert int(out.accepted[slot]) == right
            assert out.target_ids[slot, : right + 1].tolist() == text.ids[text.rows + 1 : text.rows + 2 + right]
            text.rows += right + 1


#: Lengths of prompts and replies.
FEW = [(5, 9), (30, 9), (1, 6)]
MANY = [(53, 9), (5, 12), (1, 12), (26, 6), (30, 6)]


@pytest.mark.principal("qwen3_next of two ranks")
@pytest.mark.parametrize(
    ("layout", "tp", "lengths"),
    [("qwen3_5_text", 1, MANY), ("qwen3_next", 2, FEW), ("qwen3_5_moe, stacked", 1, FEW)],
    ids=["qwen3_5_text", "qwen3_next of two ranks", "qwen3_5_moe"],
)
@torch.inference_mode()
def test_network_computes_what_torch_ops_computes(
    builder: Any, tmp_path: Path, layout: str, tp: int, lengths: list[tuple[int, int]]
) -> None:
    pair = make_hybrid_pair(tmp_path, layout)
    config = make_config(pair, tp).model_copy(update={"sampling": False})
    both = HybridBoth(builder, pair, config)
    write_texts(both, lengths, seed=2)
    assert both.accepted == set(range(BLOCK)) and both.compared > 7


@pytest.mark.exhaustive(beside="test_network_computes_what_torch_ops_computes")
@torch.inference_mode()
def test_eight_networks_compute_what_torch_ops_compute(builder: Any, tmp_path: Path) -> None:
    """Each has a key head of the net, a query head, and one of two key heads of attention."""
    nets = {
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    layers = {"num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 8}
    pair = make_hybrid_pair(tmp_path, "qwen3_5_text", **nets, **layers)
    both = HybridBoth(builder, pair, make_config(pair, 8).model_copy(update={"sampling": False}))
    write_texts(both, [(7, 4), (2, 6)], seed=2)
    assert both.compared > 3


@pytest.mark.principal("two ranks")
@pytest.mark.parametrize(
    ("layout", "tp", "drafted"),
    [("qwen3_5_text", 1, False), ("qwen3_5_moe", 2, False), ("qwen3_next", 8, True)],
    ids=["one rank", "two ranks", "eight ranks"],
)
def test_it_compiles(tmp_path: Path, layout: str, tp: int, drafted: bool) -> None:
    """Nets and a layer of gated attention, whose heads have the published sizes; the last rank.

    Of one rank four nets: the builder of TensorRT-RTX 1.7.1 crashed at as many that were updated in place.
    """
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
    nets = {"linear_num_key_heads": 8, "linear_num_value_heads": 24}
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "hidden_size": 128}
    nets_of_rank = 4 if tp == 1 else 1
    layers = {"num_hidden_layers": nets_of_rank + 1, "full_attention_interval": nets_of_rank + 1}
    target = make_hybrid(tmp_path / "target", layout, **heads, **nets, **sizes, **layers)
    drafter: dict[str, Any] = {"layers": 1, "heads": 16, "kv_heads": 8, "head_size": 64, "tap_layers": (0, 1)}
    pair = open_pair(target, make_drafter(tmp_path / "drafter", target, **drafter) if drafted else None)
    plan = compiled(pair, "sm120", tp)
    assert plan.data.nbytes > 0
