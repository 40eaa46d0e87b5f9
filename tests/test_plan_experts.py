"""Matrices in few bits in a plan: what is said of them, and the rate at which they are read."""

from math import prod

import pytest

from tests.test_plan import config
from trtllm_dflash.build.assumptions import assumptions
from trtllm_dflash.cost import prediction
from trtllm_dflash.cost.floor import StepCount
from trtllm_dflash.cost.gpus import GPUS
from trtllm_dflash.cost.memory import plan_memory, weight_bytes
from trtllm_dflash.cost.prediction import decoded_share, predict_step
from trtllm_dflash.models import build_target
from trtllm_dflash.models.weights import WeightPrecision
from trtllm_dflash.step import Drafting


def test_experts_in_nvfp4_are_planned_as_our_kernels_read_them():
    """In 4.5 bits a number, at the rate at which they are decoded; without our kernels, and in FP32, unpacked."""
    plain = config("qwen3-coder-30b-a3b")
    listed = [w.linear for w in build_target(plain.target).weights() if w.is_matrix and w.stack is None]
    changes = {"linear_precision": WeightPrecision.NVFP4, "plain_linears": tuple(listed)}
    nvfp4 = plain.model_copy(update={"target": plain.target.model_copy(update=changes)})
    moe = plain.target.moe
    numbers = plain.target.layers * moe.experts * 3 * plain.target.hidden_size * moe.intermediate_size
    saved = weight_bytes(plain) - weight_bytes(nvfp4)
    assert saved == pytest.approx(numbers * (16 - 4.5) / 8, rel=5e-3)  # rows have a scale, too
    for batch, rows in ((1, 1), (8, 8)):
        step = {"batch": batch, "rows": rows, "length": 1000}
        a, b = (predict_step(StepCount(c), GPUS["h200"], Drafting.OFF, **step) for c in (plain, nvfp4))
        assert b.floor < b.seconds < a.seconds
        assert a.seconds - b.seconds < a.floor - b.floor  # decoding takes some of what is saved
    said = assumptions(nvfp4, GPUS["h200"], None)
    assert any(note.startswith("Experts: NVFP4 is read at ") for note in said)
    for precision, says in ("bf16", "without our kernels, "), ("fp32", ""):
        notes = assumptions(nvfp4.model_copy(update={"precision": precision}), GPUS["h200"], None)
        assert f"Experts: {says}the torch backend unpacks their weights in memory: slower than this." in notes


def test_attention_in_fp8_blocks_is_planned_as_it_is_stored_where_a_gpu_multiplies_it_so():
    """On Hopper GPUs; elsewhere the torch backend dequantizes it. MiniMax-M2's head is of 16 bits everywhere."""
    engine = config("minimax-m2.5")
    said = {
        "b300": f"FP8-BLOCKS, but for experts, dequantized to {engine.precision.upper()} at load",
        "h100": "FP8-BLOCKS, read as they are and multiplied at twice BF16's rate",
    }
    for gpu, words in said.items():
        assert any(words in note for note in assumptions(engine, GPUS[gpu], None))
    attention = [w for w in build_target(engine.target).weights() if "self_attn" in w.name and w.is_matrix]
    count = sum(prod(weight.shape(1, 0)) for weight in attention)
    saved = plan_memory(engine, GPUS["b300"]).weights - plan_memory(engine, GPUS["h100"]).weights
    assert saved == count - 4 * count // 128**2  # a byte a number, but for scales
    dequantized, stored = (StepCount(engine, GPUS[gpu]).parts(Drafting.OFF, 1, 1, 0)[0].products for gpu in said)
    assert dequantized.bytes - stored.bytes == saved and dequantized.flops - stored.flops == count


@pytest.mark.parametrize("stored", ["mxfp4", "nvfp4"])
def test_experts_that_our_kernels_do_not_compute_are_not_planned_at_the_rate_at_which_these_decode(stored):
    """Beside FP32, on GPUs before Hopper, and NVFP4 of sizes too wide for shared memory, or no blocks of 32."""
    torchs = "Experts: the torch backend unpacks their weights in memory: slower than this."
    engine, in_mxfp4 = config("gpt-oss-120b" if stored == "mxfp4" else "qwen3-coder-30b-a3b"), stored == "mxfp4"
    if not in_mxfp4:
        engine = with_target(engine, linear_precision=WeightPrecision.NVFP4)
    odd = with_target(engine, moe=engine.target.moe.model_copy(update={"intermediate_size": 672}))
    whole = with_target(odd, moe=odd.target.moe.model_copy(update={"expert_parallel": True}))
    for changed, gpu, share in (
        (engine, "h200", True),
        (engine, "rtx-5090", True),
        (engine, "rtx-4090", False),
        (engine.model_copy(update={"precision": "fp32"}), "h200", False),
        (with_target(engine, hidden_size=4000), "h200", True),
        (with_target(engine, hidden_size=4000), "rtx-5090", in_mxfp4),
        (odd, "h200", True),
        (odd.model_copy(update={"tp": 2}), "h200", in_mxfp4),
        (whole.model_copy(update={"tp": 2}), "h200", True),
    ):
        assert (decoded_share(changed, GPUS[gpu]) is not None) == share
        notes = assumptions(changed, GPUS[gpu], None)
        assert any(" is read at " in note for note in notes) == share
        assert (torchs in notes) == (not share)


@pytest.mark.parametrize(("precision", "slower"), [("bf16", True), ("fp32", False)])
def test_the_rate_at_which_our_kernels_decode_is_in_the_time_of_steps_that_they_compute(precision, slower, monkeypatch):
    engine = with_target(config("qwen3-coder-30b-a3b", precision=precision), linear_precision=WeightPrecision.NVFP4)
    step = {"batch": 1, "rows": 1, "length": 1000}
    before = predict_step(StepCount(engine), GPUS["h200"], Drafting.OFF, **step).seconds
    monkeypatch.setattr(prediction, "_NVFP4_SHARE", 0.1)
    after = predict_step(StepCount(engine), GPUS["h200"], Drafting.OFF, **step).seconds
    assert (after > before) == slower == (after != before)


def with_target(engine, **changes):
    return engine.model_copy(update={"target": engine.target.model_copy(update=changes)})
