"""`build --plan`: its figures are those of the memory plan, of the counted floor, and of steps that were measured."""

import json
import random
from pathlib import Path

import pytest

from trtllm_dflash.bench.floor import StepCount, experts_touched, step_work
from trtllm_dflash.bench.shapes import SHAPES, shape_config
from trtllm_dflash.catalog import load_catalog
from trtllm_dflash.engine.memory import GPUS
from trtllm_dflash.plan.gpus import PUBLISHED
from trtllm_dflash.plan.prediction import ERROR_BOUND, predict_step, sum_seconds
from trtllm_dflash.step import Drafting

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def config(name="gpt-oss-120b", **settings):
    return shape_config(
        name, **{"precision": "bf16", "tp": 1, "max_batch": 8, "max_seq_len": 4096, "chunk": 512, **settings}
    )


# -- against what was measured on H200s ------------------------------------------------------------------------------


def measured_steps():
    """Of Qwen3-8B's shape: GPUs, batch, rows, cached tokens, seconds."""
    for row in json.loads((RESULTS / "step-qwen3-8b-h200.json").read_text())["rows"]:
        yield 1, row["batch"], row["rows"], row["cache_length"], row["seconds"]
    for gpus, sums, batch, step, ms, *_ in tensor_parallel_rows():
        if sums != "NCCL":  # an engine's own choice
            yield int(gpus), int(batch), 1 if step == "plain" else 16, 1024, float(ms) * 1e-3


def tensor_parallel_rows():
    lines = (RESULTS / "tensor-parallel-h200.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if row[0].isdigit()]


def test_predicted_steps_are_within_the_stated_bound_of_those_measured_on_h200s():
    counts = {tp: StepCount(config("qwen3-8b", tp=tp)) for tp in (1, 2, 4)}
    errors = {}
    for tp, batch, rows, length, seconds in measured_steps():
        drafting = Drafting.BLOCK if rows > 1 else Drafting.OFF
        predicted = predict_step(counts[tp], PUBLISHED["h200"], drafting, batch, rows, length).seconds
        errors[tp, batch, rows, seconds] = predicted / seconds - 1
    assert len(errors) == 27
    assert {(tp, batch) for tp, batch, *_ in errors} == {(tp, batch) for tp in (1, 2, 4) for batch in (1, 8, 32)}
    assert max(map(abs, errors.values())) <= ERROR_BOUND, errors
    assert ERROR_BOUND <= 0.10


def test_predicted_sums_are_those_measured_to_a_few_microseconds():
    for gpus, sums, batch, step, _, us, *_ in tensor_parallel_rows():
        if sums == "ours":
            count = int(batch) * (1 if step == "plain" else 16) * 4096 * 2
            assert sum_seconds(count, int(gpus), PUBLISHED["h200"]) * 1e6 == pytest.approx(float(us), abs=2.0)


# -- counting experts and windows ------------------------------------------------------------------------------------


def test_experts_touched_is_what_uniform_routing_gives():
    moe = config("gpt-oss-20b").target.moe
    assert experts_touched(moe, 1) == pytest.approx(moe.top_k)
    assert experts_touched(moe, 10_000) == pytest.approx(moe.experts)
    draw = random.Random(0)
    trials = [len({e for _ in range(8) for e in draw.sample(range(moe.experts), moe.top_k)}) for _ in range(4000)]
    assert experts_touched(moe, 8) == pytest.approx(sum(trials) / len(trials), rel=0.01)


def test_a_step_reads_the_experts_that_it_touches_and_computes_those_that_its_rows_choose():
    (target,) = step_work(config(), Drafting.OFF, batch=1, rows=1, length=1)
    attention = 2880 * (64 + 2 * 8) * 64 + 64 * 64 * 2880
    expert = 3 * 2880 * 2880
    assert target.flops == pytest.approx(2 * (36 * (attention + 4 * expert + 128 * 2880) + 201088 * 2880), rel=1e-3)
    dense = 2 * (36 * (attention + 128 * 2880) + 201088 * 2880)
    assert target.bytes == pytest.approx(dense + 36 * 4 * expert * (1 / 2 + 1 / 32), rel=2e-3)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "qwen3-coder-30b-a3b"])
def test_ranks_that_hold_whole_experts_read_and_compute_as_much_as_ranks_that_hold_slices(name):
    sliced = config(name, tp=2)
    whole = sliced.model_copy(
        update={
            "target": sliced.target.model_copy(
                update={"moe": sliced.target.moe.model_copy(update={"expert_parallel": True})}
            )
        }
    )
    (a,), (b,) = (step_work(c, Drafting.OFF, batch=4, rows=1, length=100) for c in (sliced, whole))
    assert (a.bytes, a.flops) == pytest.approx((b.bytes, b.flops), rel=0.01)


def test_layers_with_a_window_read_no_more_than_it():
    engine = config()
    (short,), (long,) = (step_work(engine, Drafting.OFF, batch=1, rows=1, length=n) for n in (1000, 2000))
    full_layers = engine.target.windows.count(None)
    assert full_layers == 18
    assert long.bytes - short.bytes == 1000 * full_layers * 2 * 8 * 64 * 2
    assert long.flops - short.flops == 1000 * full_layers * 4 * 64 * 64


# -- shapes and GPUs -------------------------------------------------------------------------------------------------


def test_shapes_of_known_pairs_are_what_the_catalog_says():
    for name, entry in load_catalog().items():
        if name in SHAPES and name != "tiny":  # the shape of that name is a smaller one
            engine = config(name)
            assert engine.target.family == entry.family
            assert engine.target.layers == entry.target_layers
            assert engine.drafter.layers == entry.drafter_layers
            assert engine.drafter.block_size == entry.block_size
            assert entry.tap_layers in (None, engine.drafter.tap_layers)


def test_every_gpu_that_engines_are_built_for_has_its_published_limits():
    assert PUBLISHED.keys() == GPUS.keys()
