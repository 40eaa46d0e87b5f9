"""What a session does beside a plan of trees: caches, moves of accepted rows, inputs, captured steps. No GPU."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.step import Drafting, StepInputs

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: no network can be defined")

from tests.tensorrt.test_draft_tree import Sessions, ints, make_pair, make_prompts, planned
from tests.tensorrt.test_network import TINY_PAIR
from tests.tensorrt.test_session import CPU
from trtllm_dflash.session.plan_io import step_io
from trtllm_dflash.session.plan_paths import PlanPaths
from trtllm_dflash.session.tensorrt_session import bound_inputs

pytestmark = pytest.mark.slow

Tensor = torch.Tensor


def test_a_path_s_rows_are_all_read_before_any_is_written() -> None:
    shapes = dict.fromkeys(("model.layers.0.key", "model.layers.1.key", "drafter.layers.0.key"), (2, 1, 8, 1))
    paths = PlanPaths(shapes, torch.float32, CPU, first=1, most=4)
    for cache in paths.caches.values():
        cache.copy_(torch.arange(16.0).view(2, 1, 8, 1))
    paths.move(1, ints([2]), ints([[0, 2, 1, 3]]))
    moved = [*range(8), 8, 9, 10, 11, 13, 12, 14, 15]
    assert [cache.flatten().tolist() == moved for cache in paths.caches.values()] == [True, True, False]


def test_caches_begin_where_tensorrt_reads_them_and_lie_in_one_piece() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        caches = PlanPaths({f"model.layers.{i}.key": (3, 1, 5, 7) for i in range(4)}, dtype, CPU, 0, 1).caches
        first = caches["model.layers.0.key"].data_ptr()
        assert all((cache.data_ptr() - first) % 256 == 0 and cache.is_contiguous() for cache in caches.values())


class _Memory(TorchDispatchMode):
    """Notes where the numbers lie that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            self.found.add(out.untyped_storage().data_ptr())
        return out


def test_a_move_takes_no_memory_of_its_own() -> None:
    """Every captured step would keep what it takes."""
    shapes = {"model.layers.0.key": (2, 1, 8, 4), "model.layers.0.value": (2, 1, 8, 2)}
    paths = PlanPaths(shapes, torch.float32, CPU, first=0, most=4)
    known = {x.untyped_storage().data_ptr() for x in (*paths.caches.values(), paths._moved)}
    with _Memory() as memory:
        paths.move(0, ints([2, 0]), ints([[0, 2, 1, 3]] * 2))
    assert memory.found == known and paths._moved.numel() == 2 * 4 * 4


def test_captured_steps_share_one_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, pools = Sessions(make_pair(tmp_path, "qwen3"), 15).tensorrt, []

    def capture(graph: Any, pool: Any = None, **given: Any) -> Any:
        pools.append(pool)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(session, "_execute", lambda *given: None)
    monkeypatch.setattr(session, "_own_stream", object())
    monkeypatch.setattr(session, "_pool", "one", raising=False)
    for _ in range(2):
        session._capture(None, 0, {})
    assert pools == ["one", "one"]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("drafting", [Drafting.BLOCK, Drafting.CONTEXT])
def test_a_step_s_inputs_are_made_on_its_device(sampled: bool, drafting: Drafting) -> None:
    config = planned(open_pair(TINY_PAIR / "target", TINY_PAIR / "drafter"), draft_tree=15, precision="bf16")
    numbers, rows = (
        torch.zeros(2, dtype=torch.int32, device="meta"),
        torch.zeros(2, 4, dtype=torch.int32, device="meta"),
    )
    inputs = StepInputs(rows, numbers, numbers, rows, rows[:1])
    given = bound_inputs(config, step_io(config, sampled), inputs, drafting)
    assert {"block_offsets", "is_tree", "parents"} < given.keys() and ("uniform" in given) == sampled
    assert {x.device.type for x in given.values()} == {"meta"}


def test_a_plan_of_trees_that_drafts_chains_moves_nothing(tmp_path: Path) -> None:
    sessions = Sessions(make_pair(tmp_path, "qwen3"), 15, drafted=0)
    assert sessions.tensorrt._paths is None
    sessions.read(0, make_prompts(30)[0], tree=False)
    for _ in range(2):
        sessions.decode([(0, 16)], block=16)
    assert sessions.moved == 0
