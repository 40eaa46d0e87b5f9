"""The TensorRT session's bookkeeping. No GPU: the engine is a stand-in that evaluates the real network in torch.

The stand-in is given what TensorRT is given, shapes and addresses, and reads and writes that memory. CUDA graphs,
streams and NCCL are not tested here.
"""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import evaluate, trt
from tests.tensorrt.test_moe_network import make_moe_pair
from tests.tensorrt.test_network import ints, make_config, make_pair, make_sampling
from trtllm_dflash.build.tensorrt_network import StepNetwork, build_network
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import Pair
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.tensorrt_attention import PRESENT
from trtllm_dflash.runtime.request import SamplingParams, Sequence
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.calls import Copy, Decode, Prefill
from trtllm_dflash.session.plan_io import DECODE, PREFILL
from trtllm_dflash.session.tensorrt_session import TensorRTSession, capsule
from trtllm_dflash.session.torch_session import TorchSession
from trtllm_dflash.session.weights import complete_weights
from trtllm_dflash.step import Drafting, StepInputs

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
CPU = torch.device("cpu")


class EvaluatedEngine:
    """What the session asks of an ICudaEngine, answered from the network it would have been compiled from."""

    def __init__(self, step: StepNetwork, aliased: bool = True) -> None:
        network = step.network
        self.step = step
        self.aliased = aliased
        self.tensors: dict[str, Any] = {x.name: x for x in map(network.get_input, range(network.num_inputs))}
        self.inputs = set(self.tensors)
        self.tensors |= {x.name: x for x in map(network.get_output, range(network.num_outputs))}
        self.num_io_tensors = len(self.tensors)
        self.contexts: list[EvaluatedContext] = []

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return trt.TensorIOMode.INPUT if name in self.inputs else trt.TensorIOMode.OUTPUT

    def get_tensor_shape(self, name: str) -> Any:
        return self.tensors[name].shape

    def get_tensor_dtype(self, name: str) -> Any:
        return self.tensors[name].dtype

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.removesuffix(PRESENT) if self.aliased and name.endswith(PRESENT) else None

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return 256

    def create_execution_context(self, strategy: Any) -> "EvaluatedContext":
        self.contexts.append(EvaluatedContext(self.step))
        return self.contexts[-1]


class EvaluatedContext:
    """What the session asks of an IExecutionContext."""

    def __init__(self, step: StepNetwork) -> None:
        self.step = step
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.executed = 0

    def set_device_memory(self, address: int, size: int) -> None:
        assert address and size >= 256

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        allowed = self.step.profiles[self.profile][name]
        return all(a <= b <= c for a, b, c in zip(allowed.least, shape, allowed.largest, strict=True))

    def execute_async_v3(self, stream: int) -> bool:
        self.executed += 1
        inputs = {name: self._memory(name, shape) for name, shape in self.shapes.items()}
        (outputs,) = evaluate([self.step.network], [inputs])
        for name, value in outputs.items():
            if name.endswith(PRESENT):
                if self.addresses[name] != self.addresses[name.removesuffix(PRESENT)]:
                    assert ".linear_attn." in name  # states, which the session copies
                    self._memory(name, tuple(value.shape)).copy_(value)
            else:
                self._memory(name, tuple(value.shape)).copy_(value)
        return True

    def _memory(self, name: str, shape: tuple[int, ...]) -> Tensor:
        binding = (self.step.io.inputs | self.step.io.outputs)[name]
        size = torch.Size(shape).numel()
        memory = (ctypes.c_char * (size * binding.dtype.itemsize)).from_address(self.addresses[name])
        return torch.frombuffer(memory, dtype=binding.dtype).view(shape)


def make_sessions(pair: Pair, sampled: bool) -> tuple[TorchSession, TensorRTSession, EvaluatedEngine]:
    """Makes both sessions of one small engine."""
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    config = make_config(pair).model_copy(update={"sampling": sampled})
    weights = read_rank_weights(pair, 1, 0, config.dtype)
    planned = config.model_copy(update={"backend": "tensorrt"})
    engine = EvaluatedEngine(build_network(builder, planned, complete_weights(weights, config, 0), 0))
    return TorchSession(config, weights, CPU), TensorRTSession(planned, engine, CPU), engine


@pytest.fixture
def sessions(tmp_path: Path) -> Any:
    def make(
        drafter: dict[str, Any] | None, sampled: bool, family: str = "qwen3"
    ) -> tuple[TorchSession, TensorRTSession, EvaluatedEngine]:
        if family == "qwen3":
            pair = make_pair(tmp_path, "qwen3", drafter, tied=True)
        else:
            pair = make_moe_pair(tmp_path, family)
        return make_sessions(pair, sampled)

    return make


def decode(token_ids: Tensor, start: Tensor, rows: int, offsets: Tensor, sampling: Any = None) -> StepInputs[Tensor]:
    slots = len(token_ids)
    logit_rows = torch.arange(rows, dtype=torch.int32)[None].repeat(slots, 1)
    count = torch.full((slots,), rows, dtype=torch.int32)
    return StepInputs(token_ids[:, :rows], start, count, logit_rows, offsets, sampling)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", [{}, None], ids=["drafted", "plain"])
def test_session_gives_what_the_torch_session_gives(sessions: Any, drafter: Any, sampled: bool) -> None:
    torch_session, session, engine = sessions(drafter, sampled)
    config = session.config
    generator = torch.Generator().manual_seed(11)
    offsets = torch.arange(config.block_size, dtype=torch.int32)[None]
    tokens, start = [], []

    def both(inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int = 0) -> Any:
        outputs = [one.step(inputs, drafting, first_slot) for one in (torch_session, session)]
        expected, found = outputs
        made = {name for name, tensor in vars(expected).items() if tensor is not None}
        assert made == {name for name, tensor in vars(found).items() if tensor is not None}
        assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in made)
        return found

    plain, block = Drafting.OFF, Drafting.OFF if drafter is None else Drafting.BLOCK
    for slot, length in enumerate((9, 14, 3)):
        prompt = torch.randint(config.target.vocab_size, (1, length), generator=generator, dtype=torch.int32)
        sampling = make_sampling(1, 1, generator) if sampled else None
        step = StepInputs(prompt, ints(0), ints(length), ints([length - 1]), offsets, sampling)
        out = both(step, block, slot)
        tokens.append(out.next_tokens[0])
        start.append(int(out.next_start[0]))
    token_ids, position = torch.stack(tokens), ints(*start)
    kinds = [block, plain if drafter is None else Drafting.CONTEXT, block, block]
    for i, drafting in enumerate(kinds):
        rows = token_ids.shape[1]
        sampling = make_sampling(3, rows, generator) if sampled and i != 3 else None  # the last step is greedy
        out = both(decode(token_ids, position, rows, offsets, sampling), drafting)
        token_ids, position = out.next_tokens, out.next_start
    prefill, *decodes = engine.contexts
    assert (prefill.profile, prefill.executed) == (PREFILL, 3)
    assert all(context.profile == DECODE for context in decodes)
    assert sum(context.executed for context in decodes) == len(kinds)
    assert len(decodes) < len(kinds)  # a shape that was seen before has its context


def test_an_engine_that_copies_its_caches_is_refused(sessions: Any) -> None:
    _, session, engine = sessions({}, False)
    engine.aliased = False
    with pytest.raises(EngineError, match=r"does not update model\.layers\.0\.key in place"):
        TensorRTSession(session.config, engine, CPU)


def test_an_engine_of_another_configuration_is_refused(sessions: Any) -> None:
    _, session, engine = sessions({}, False)
    longer = session.config.model_copy(update={"max_seq_len": 128})
    with pytest.raises(EngineError, match=r"drafter\.layers\.0\.key as .*72.* config\.json asks for .*136.*build"):
        TensorRTSession(longer, engine, CPU)


def test_a_greedy_engine_refuses_to_sample(sessions: Any) -> None:
    _, session, _ = sessions(None, False)
    offsets = ints([0])
    sampling = make_sampling(1, 1, torch.Generator())
    with pytest.raises(EngineError, match="built greedy"):
        session.step(decode(ints([5]), ints(0), 1, offsets, sampling), Drafting.OFF)


def test_more_rows_than_the_engine_was_built_for_are_refused(sessions: Any) -> None:
    _, session, _ = sessions(None, False)
    with pytest.raises(EngineError, match=r"takes no token_ids of shape \(1, 3\); build it with larger limits"):
        session.step(decode(ints([5, 6, 7]), ints(0), 3, ints([0])), Drafting.OFF)


def test_capsule_holds_the_address() -> None:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert pointer(capsule(0x1234), None) == 0x1234


@pytest.mark.principal("qwen3-True")
@pytest.mark.parametrize(("family", "sampled"), [("qwen3", True), ("gpt-oss", False)])
def test_the_scheduler_gets_the_same_replies_from_both_sessions(sessions: Any, family: str, sampled: bool) -> None:
    torch_session, session, _ = sessions({}, sampled, family)
    assert_replies_equal(torch_session, session, sampled)


def assert_both_sessions_reply_alike(pair: Pair) -> None:
    """Asserts that a pair's two sessions give a scheduler the same greedy replies."""
    torch_session, session, _ = make_sessions(pair, sampled=False)
    assert_replies_equal(torch_session, session, sampled=False)


def assert_replies_equal(torch_session: TorchSession, session: TensorRTSession, sampled: bool) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.9 if sampled else 0, seed=2**63 + 5)
    # The last begins as the second does, and starts from that one's rows.
    prompts = [[5, 6, 7], list(range(20)), [9] * 11, [*range(18), 3, 3]]
    assert replies(torch_session, prompts, params) == replies(session, prompts, params)


def replies(
    session: Any, prompts: list[list[int]], params: SamplingParams, most: int = 9
) -> list[tuple[list[int], list[int]]]:
    """What a scheduler over a session gives: tokens, and drafts accepted by step. The second prompt decodes plainly."""
    scheduler = Scheduler(session)
    sequences = [Sequence(prompt, params, most, frozenset(), draft=i != 1) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    return [(s.completion().token_ids, s.accepted_per_step) for s in sequences]


def test_pieces_of_one_token_have_no_contexts_of_their_own(sessions: Any) -> None:
    """Such a piece is what is left of a prompt that is asked again; a decoding step may have as many rows."""
    _, session, engine = sessions({}, False)
    scheduler, made = Scheduler(session), []
    for _ in range(4):
        asked = [Sequence(list(range(1, 15)), SamplingParams(max_tokens=3), 3, frozenset()) for _ in range(3)]
        for sequence in asked:
            scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
        made.append(len(engine.contexts))
    assert [sequence.reused for sequence in asked] == [13] * 3
    assert {first_slot for first_slot, *_ in session._decode} == {0}
    assert made[1:] == made[1:2] * 3


def test_copied_rows_are_those_of_the_same_tokens(sessions: Any) -> None:
    """Of gpt-oss, whose caches have a row before the first token's."""
    replies = []
    for session in sessions({}, False, "gpt-oss")[:2]:
        prompt = list(range(20))
        session.prefill(Prefill(0, 0, prompt, True, Drafting.BLOCK, session.config.block_size))
        session.copy_rows(Copy(0, 1, 18))
        outcome = session.prefill(Prefill(1, 18, prompt[18:], True, Drafting.BLOCK, session.config.block_size))
        replies.append(outcome.read())
        both = session.decode(Decode([4, 4], Drafting.BLOCK, session.config.block_size, False)).read()
        assert both[0] == both[1]
        replies.append(both)
    assert replies[:2] == replies[2:]
