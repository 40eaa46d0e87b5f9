"""The network that `TensorRTOps` emits, evaluated layer by layer, computes what `TorchOps` computes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_drafter, make_target
from tests.near_ties import SidingOps
from trtllm_dflash.build.planning import plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.cost.memory import cache_shapes
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.models.weights import unit_range
from trtllm_dflash.ops.base import SamplingInputs
from trtllm_dflash.ops.tensorrt_attention import write_sink_key
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.session.weights import complete_weights
from trtllm_dflash.step import Drafting, DraftVerifyStep, StepInputs, StepOutputs

Tensor = torch.Tensor

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import evaluate, trt  # noqa: E402
from trtllm_dflash.build.tensorrt_network import build_network  # noqa: E402
from trtllm_dflash.session.plan_io import IO, Binding, step_io, torch_type  # noqa: E402

pytestmark = pytest.mark.slow

TINY_PAIR = Path(__file__).parents[2] / "trtllm_dflash" / "pairs" / "tiny"
SLOTS, CHUNK, BLOCK = 3, 24, 4
#: Roundings between logits in 16 bits, of networks and TorchOps, that count as a near-tie.
NEAR_TIE = 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def builder() -> Any:
    return trt.Builder(trt.Logger(trt.Logger.ERROR))


def make_pair(path: Path, family: str, drafter: dict[str, Any] | None, **target: Any) -> Pair:
    target_path = make_target(path / "target", family, layers=3, **target)
    if drafter is None:
        return open_pair(target_path)
    return open_pair(target_path, make_drafter(path / "drafter", target_path, block_size=BLOCK, **drafter))


def make_config(pair: Pair, tp: int = 1, precision: Any = "fp32", **limits: Any) -> EngineConfig:
    limits = {"max_batch": SLOTS, "max_seq_len": 64, "chunk": CHUNK} | limits
    settings = BuildSettings(
        name="test", target="", drafter="" if pair.drafter else None, precision=precision, tp=tp, **limits
    )
    return plan_engine(pair, settings).config


def io_of(network: Any) -> IO:
    """The inputs and outputs of a network."""

    def binding(tensor: Any) -> Binding:
        return Binding(tuple(tensor.shape), torch_type(tensor.dtype))

    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    return IO({x.name: binding(x) for x in inputs}, {x.name: binding(x) for x in outputs})


@dataclass
class Both:
    """One engine run twice on the same inputs: TorchOps on one rank, and the evaluated networks of all ranks.

    In 16 bits TorchOps take the networks' side where logits nearly tie; then, as in FP32, all else is the same.
    """

    builder: Any
    pair: Pair
    config: EngineConfig
    capability: int | None = None
    ops: type[TorchOps] = TorchOps
    compared: int = field(default=0, init=False)
    turned: int = field(default=0, init=False)  # tokens that near-ties decided otherwise

    def __post_init__(self) -> None:
        self.sampled = self.config.sampling
        whole = self.config.model_copy(update={"tp": 1})
        self.config = self.config.model_copy(update={"backend": "tensorrt"})
        self.weights = self._weights(whole, 0)
        self.caches = self._caches(whole)
        ranks = range(self.config.tp)
        emitted = [
            build_network(self.builder, self.config, self._weights(self.config, rank), rank, self.capability)
            for rank in ranks
        ]
        assert all(io_of(network.network) == step_io(self.config, self.sampled) for network in emitted)
        self.emitted = emitted
        self.rank_caches = [self._caches(self.config) for _ in ranks]
        self.step = DraftVerifyStep(
            build_target(whole.target), Drafter(whole.drafter) if whole.drafter is not None else None
        )

    def _weights(self, config: EngineConfig, rank: int) -> dict[str, Tensor]:
        return complete_weights(read_rank_weights(self.pair, config.tp, rank, config.dtype), config, rank)

    @staticmethod
    def _caches(config: EngineConfig) -> dict[str, Tensor]:
        caches = {name: torch.zeros(shape, dtype=config.dtype) for name, shape in cache_shapes(config).items()}
        for name, cache in caches.items():
            if config.has_sink_keys and name.startswith("model.") and name.endswith("key"):
                write_sink_key(cache)
        return caches

    def run(self, inputs: StepInputs[Tensor], first_slot: int = 0) -> StepOutputs[Tensor]:
        """Runs a step both ways, compares outputs and caches, returns the outputs."""
        slots = slice(first_slot, first_slot + len(inputs.token_ids))
        drafting = Drafting.BLOCK if self.config.drafter is not None else Drafting.OFF
        bound = [
            bound_inputs(inputs) | {name: cache[slots] for name, cache in caches.items()} for caches in self.rank_caches
        ]
        before = [{name: cache.clone() for name, cache in caches.items()} for caches in self.rank_caches]
        results = evaluate([network.network for network in self.emitted], bound)
        ops = self._reference({name: cache[slots] for name, cache in self.caches.items()}, results[0])
        expected = self.step(ops, inputs, drafting)
        self.turned += ops.turned if isinstance(ops, SidingOps) else 0
        for rank, found in enumerate(results):
            for name in ("target_ids", "accepted", "next_start", "next_tokens"):
                assert torch.equal(found[name], getattr(expected, name)), name
            self._compare_caches(rank, before[rank], expected.next_start, slots)
        self.compared += 1
        return expected

    def _reference(self, caches: dict[str, Tensor], found: dict[str, Tensor]) -> TorchOps:
        if self.config.dtype == torch.float32:
            return self.ops(self.weights, caches)
        assert self.ops is TorchOps
        assert self.config.drafter is None or self.config.drafter.draft_vocab_size is None, "drafts have other ids"
        choices = [found["target_ids"], found["next_tokens"][:, 1:]]
        return SidingOps(self.weights, caches, choices, NEAR_TIE)

    def _compare_caches(self, rank: int, before: dict[str, Tensor], lengths: Tensor, slots: slice) -> None:
        """Every committed row of the called slots; all others must be what they were."""
        tolerance = 1e-4 if self.config.dtype == torch.float32 else 3e-2
        for name, cache in self.caches.items():
            first, last = unit_range(cache.shape[1], self.config.tp, rank)
            sink_rows = self.rank_caches[rank][name].shape[2] - cache.shape[2]
            found = self.rank_caches[rank][name][:, :, sink_rows:, : cache.shape[3]]
            expected = cache[:, first:last]
            for slot in range(len(cache)):
                if slot not in range(slots.start, slots.stop):
                    assert torch.equal(self.rank_caches[rank][name][slot], before[name][slot])
                    continue
                rows = int(lengths[slot - slots.start])
                torch.testing.assert_close(
                    found[slot, :, :rows], expected[slot, :, :rows], atol=tolerance, rtol=tolerance
                )


def bound_inputs(inputs: StepInputs[Tensor]) -> dict[str, Tensor]:
    names = ("token_ids", "start", "row_count", "logit_rows", "block_offsets")
    bound = {name: getattr(inputs, name) for name in names}
    if inputs.sampling is not None:
        bound |= {name: getattr(inputs.sampling, name) for name in ("temperature", "top_k", "top_p", "uniform")}
    return bound


def make_sampling(slots: int, rows: int, generator: torch.Generator) -> SamplingInputs[Tensor]:
    """A greedy slot, one with every filter, one with a wide nucleus; as many as there are."""
    temperature, top_k, top_p = [0.7, 0.0, 1.3], [12, 5, 0], [0.9, 0.5, 0.97]
    return SamplingInputs(
        torch.tensor(temperature[:slots]),
        torch.tensor(top_k[:slots], dtype=torch.int32),
        torch.tensor(top_p[:slots]),
        torch.rand(slots, rows, generator=generator),
    )


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def compare_generation(both: Both, prompts: list[int], steps: int = 4) -> int:
    """Prefills prompts of these lengths in chunks, then decodes them together; returns how many drafts survived."""
    config = both.config
    generator = torch.Generator().manual_seed(7)
    offsets = torch.arange(config.block_size, dtype=torch.int32)[None]
    ids = [torch.randint(config.target.vocab_size, (n,), generator=generator, dtype=torch.int32) for n in prompts]
    tokens, start = [], []
    for slot, prompt in enumerate(ids):
        for first in range(0, len(prompt), config.chunk):
            chunk = prompt[first : first + config.chunk]
            padded = torch.zeros(1, min(config.chunk, len(chunk) + 3), dtype=torch.int32)
            padded[0, : len(chunk)] = chunk
            sampling = make_sampling(1, 1, generator) if both.sampled else None
            last = ints([len(chunk) - 1])
            out = both.run(StepInputs(padded, ints(first), ints(len(chunk)), last, offsets, sampling), first_slot=slot)
        tokens.append(out.next_tokens[0])
        start.append(int(out.next_start[0]))
    token_ids, position = torch.stack(tokens), ints(*start)
    slots, block = token_ids.shape
    survived = 0
    for step in range(steps):
        rows = block if step != 1 else max(1, block - 1)  # a shorter block is a shape of its own
        sampling = make_sampling(slots, rows, generator) if both.sampled else None
        logit_rows = torch.arange(rows, dtype=torch.int32)[None].expand(slots, -1).contiguous()
        if step == 2:  # drafts that are right, so that acceptance is more than luck
            token_ids = _with_true_drafts(both, token_ids, position, logit_rows)
        row_count = torch.full((slots,), rows, dtype=torch.int32)
        row_count[0] = max(1, rows - 1)
        inputs = StepInputs(token_ids[:, :rows].contiguous(), position, row_count, logit_rows, offsets, sampling)
        out = both.run(inputs)
        survived += int(out.accepted.sum())
        token_ids, position = out.next_tokens, out.next_start
    return survived


def _with_true_drafts(both: Both, token_ids: Tensor, position: Tensor, logit_rows: Tensor) -> Tensor:
    """token_ids with the target's own next tokens as drafts, from plain greedy decoding on copies of the caches."""
    token_ids = token_ids.clone()
    views = {name: cache[: len(token_ids)].clone() for name, cache in both.caches.items()}
    step = DraftVerifyStep(both.step.target, None)
    zero = torch.zeros(len(token_ids), 1, dtype=torch.int32)
    for i in range(token_ids.shape[1] - 1):
        inputs = StepInputs(token_ids[:, i : i + 1], position + i, torch.ones_like(position), zero, ints([0]))
        token_ids[:, i + 1] = step(both.ops(both.weights, views), inputs, Drafting.OFF).target_ids[:, 0]
    return token_ids


FAMILIES = {
    "qwen3": ("qwen3", {}, {"tied": True}),
    "llama": ("llama", {"format": "speculators", "draft_vocab": 64}, {"attention_bias": True}),
    "plain": ("qwen3", None, {}),
}


@pytest.mark.principal("qwen3-2-False", "llama-1-True", "plain-2-False")
@pytest.mark.parametrize(("tp", "sampled"), [(1, False), (1, True), (2, False), (4, True)])
@pytest.mark.parametrize("kind", FAMILIES)
@torch.inference_mode()
def test_network_computes_what_torch_ops_computes(
    builder: Any, tmp_path: Path, kind: str, tp: int, sampled: bool
) -> None:
    family, drafter, target = FAMILIES[kind]
    pair = make_pair(tmp_path, family, drafter, **target)
    both = Both(builder, pair, make_config(pair, tp).model_copy(update={"sampling": sampled}))
    survived = compare_generation(both, [30, 5, 1])
    assert both.compared == 4 + 4
    if drafter is not None and not sampled:
        assert survived > 0


@pytest.mark.principal("greedy")
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_fp16_network_keeps_fp16_caches(builder: Any, tmp_path: Path, sampled: bool) -> None:
    pair = make_pair(tmp_path, "qwen3", {}, tied=True)
    both = Both(builder, pair, make_config(pair, precision="fp16").model_copy(update={"sampling": sampled}))
    survived = compare_generation(both, [20, 7])
    assert both.compared == 2 + 4
    assert sampled or survived > 0


@pytest.mark.principal("2-False")
@pytest.mark.parametrize(("tp", "sampled"), [(1, True), (2, False)])
@torch.inference_mode()
def test_network_of_the_shipped_pair(builder: Any, tp: int, sampled: bool) -> None:
    pair = open_pair(TINY_PAIR / "target", TINY_PAIR / "drafter")
    config = make_config(pair, tp).model_copy(update={"sampling": sampled})
    compare_generation(Both(builder, pair, config), [30, 5, 1])
