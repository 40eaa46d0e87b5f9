"""The TensorRT session of a hybrid: whose states stand where, over slots that are used again, cancelled and copied."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.evaluator import trt
from tests.tensorrt.test_hybrid_network import make_hybrid_pair
from tests.tensorrt.test_network import make_config
from tests.tensorrt.test_session import CPU, EvaluatedContext, EvaluatedEngine
from trtllm_dflash.build.tensorrt_network import build_network
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.errors import DFlashError
from trtllm_dflash.runtime.request import SamplingParams, Sequence
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.calls import Place
from trtllm_dflash.session.tensorrt_session import TensorRTSession
from trtllm_dflash.session.torch_session import TorchSession
from trtllm_dflash.session.weights import complete_weights

pytestmark = pytest.mark.slow


@pytest.fixture
def sessions(tmp_path: Path) -> tuple[TorchSession, TensorRTSession, EvaluatedEngine]:
    pair = make_hybrid_pair(tmp_path, "qwen3_5_text", vocab=16, num_hidden_layers=2, full_attention_interval=2)
    config = make_config(pair, max_batch=2).model_copy(update={"sampling": False})
    weights = read_rank_weights(pair, 1, 0, config.dtype)
    planned = config.model_copy(update={"backend": "tensorrt"})
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    engine = EvaluatedEngine(build_network(builder, planned, complete_weights(weights, config, 0), 0))
    return TorchSession(config, weights, CPU), TensorRTSession(planned, engine, CPU), engine


@pytest.fixture(autouse=True)
def check_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step follows rows that are pending: none starts before its slot's states, or far behind them."""
    execute = EvaluatedContext.execute_async_v3

    def checked(context: EvaluatedContext, stream: int) -> bool:
        names = "start", "row_count", "state_length"
        start, count, length = (context._memory(name, context.shapes[name]) for name in names)
        follows = (start == 0) | (count == 0) | ((start >= length) & (start <= length + 4))
        assert follows.all(), (start, count, length)
        return execute(context, stream)

    monkeypatch.setattr(EvaluatedContext, "execute_async_v3", checked)


def written(session: Any) -> tuple[list[list[int]], int]:
    """Replies to prompts that take turns in two slots, one of them cancelled; and the tokens found in other slots."""
    scheduler = Scheduler(session)
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    begin = [1, 2, 3, 4] * 7
    prompts = [[5, 6, 7] * 3, begin, [9] * 3, [*begin, 8, 8], [*begin, 8, 8, 3], [4]]
    sequences = [Sequence(prompt, params, 7, frozenset(), draft=i != 2) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        if len(sequences[0].token_ids) > 2:
            scheduler.cancel(sequences[0], DFlashError("cancelled"))
        scheduler.step()
    return [sequence.completion().token_ids for sequence in sequences[1:]], scheduler.statistics.reused_tokens


@torch.inference_mode()
def test_slots_that_are_used_again_give_what_the_torch_session_gives(
    sessions: tuple[TorchSession, TensorRTSession, EvaluatedEngine],
) -> None:
    torch_session, session, _ = sessions
    expected, found = written(torch_session)[0], written(session)
    assert found[0] == expected and all(len(reply) == 7 for reply in expected)
    assert found[1] >= 28, "no prompt went on from a state that was kept"


def test_a_placed_slot_is_read_on_from_there(sessions: tuple[TorchSession, TensorRTSession, EvaluatedEngine]) -> None:
    _, session, _ = sessions
    session.place(Place(1, 30))
    assert session.states.lengths.tolist()[:2] == [0, 30]


def test_what_it_holds_is_what_was_planned(sessions: tuple[TorchSession, TensorRTSession, EvaluatedEngine]) -> None:
    torch_session, session, _ = sessions
    held = sum(
        x.nbytes for x in (*session.caches.values(), *session.states.tensors.values(), *session.states.made.values())
    )
    plan = plan_memory(session.config)
    assert held == plan.target_cache + plan.drafter_cache + plan.states
    assert torch_session.states is not None
    # Two slots' and four kept, and what a step makes of the two.
    assert plan.states * 6 == sum(x.nbytes for x in torch_session.states.tensors.values()) * 8
