"""Memory is planned before building: what an engine needs, and which knob helps where it does not fit."""

import re
from typing import Any

import pytest

from trtllm_dflash.cost.gpus import GB, GPUS, RESERVED
from trtllm_dflash.cost.memory import GRAPH_LAYER, MemoryPlan, check_fits, plan_memory, plan_pages
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.rope import RopeConfig

QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_size": 128,
    "intermediate_size": 12288,
    "norm_eps": 1e-6,
    "max_positions": 40960,
    "rope": RopeConfig(theta=1e6),
}


def make_config(tp: int = 1, max_batch: int = 8, max_seq_len: int = 4096, **changes: Any) -> EngineConfig:
    target = DecoderConfig(family="qwen3", layers=36, tied_embeddings=False, **QWEN3_8B)
    drafter = DrafterConfig(
        family="z-lab",
        layers=5,
        tied_embeddings=True,
        block_size=16,
        mask_token_id=151669,
        target_layers=36,
        tap_layers=(1, 9, 17, 25, 33),
        **QWEN3_8B,
    )
    settings: dict[str, Any] = {
        "precision": "bf16",
        "tp": tp,
        "max_batch": max_batch,
        "max_seq_len": max_seq_len,
        "chunk": 512,
        "block_size": 16,
    }
    return EngineConfig(name="qwen3-8b", target=target, drafter=drafter, **(settings | changes))


def test_weights_of_a_known_model() -> None:
    plan = plan_memory(make_config())
    # Qwen3-8B has 8.19e9 parameters; the drafter 5 layers of 193e6, fc of 84e6 and 5 * 8.4e6 of context K and V.
    assert plan.weights == pytest.approx(2 * (8.19e9 + 5 * 0.193e9 + 0.084e9 + 0.042e9), rel=0.01)


def test_caches_are_two_tensors_a_layer() -> None:
    config = make_config()
    plan = plan_memory(config)
    row = 2 * 8 * 128 * 2  # K and V, heads, head size, bytes
    pages = 8 * 65 * 64  # of 64 tokens, for 8 slots of 4096 + 32
    assert plan.target_cache == 36 * row * pages
    assert plan.drafter_cache == 5 * row * pages
    one_page: list[dict[str, Any]] = [{"precision": "fp32"}, {"backend": "tensorrt"}]  # a slot
    for changes in one_page:
        config = make_config(**changes)
        assert plan_memory(config).target_cache == 36 * row // 2 * config.dtype.itemsize * 8 * (4096 + 32)
    assert plan.total == plan.weights + plan.target_cache + plan.drafter_cache + plan.scratch + plan.graphs


def test_layers_with_a_window_are_counted_with_the_pages_that_they_use() -> None:
    config = shape_config("gpt-oss-120b", precision="bf16", tp=1, max_batch=64, max_seq_len=32768, chunk=512)
    page = 64 * 2 * 8 * 64 * 2  # tokens, K and V, heads, head size, bytes
    full, windowed = 64 * -(-(32768 + 20) // 64), plan_pages(config, paged=True).window_pages
    plan = plan_memory(config)
    assert config.drafter is not None
    assert windowed < full / 40
    assert plan.target_cache == 18 * page * (full + windowed)
    assert plan.drafter_cache == config.drafter.layers * page // 64 * full * 64  # which has no windows


def test_ranks_share_weights_and_caches() -> None:
    one, two = plan_memory(make_config()), plan_memory(make_config(tp=2))
    assert two.target_cache * 2 == one.target_cache
    assert 0.5 < two.weights / one.weights < 0.56  # the embedding, fc and norms are whole on both


def test_graphs_are_those_of_every_step_that_may_be_prepared_of_the_torch_backend_alone() -> None:
    config = make_config(max_batch=8)
    # Greedy and sampled. That decode: 1, 2, 4 and 8 slots, with blocks of 2, 4, 8 and 16 rows. Beside 64, 256 and 512
    # prompt rows: 2 and 8 slots with blocks of 4, 6, 8 and 16 rows, and none; no slots, with the largest and none; and
    # one step that verifies the last drafts.
    mixed = {(slots, rows, prompt) for slots in (2, 8) for rows in (1, 4, 6, 8, 16) for prompt in (64, 256, 512)}
    mixed |= {(0, rows, prompt) for rows in (1, 16) for prompt in (64, 256, 512)}
    drafted, plain = 2 * (4 * (1 + 2 + 4) + len(mixed) + 1), 2 * (4 + 9)
    # With log-probabilities, penalties and masks: 1, 2, 4 and 8 slots, with blocks of 8 and 16 rows, none, or the last
    # drafts. Beside 64 and 512 prompt rows: 0 and 8 slots, with the largest and none; and the last drafts.
    drafted, plain = drafted + 2 * (4 * (1 + 2 + 2) + 2 * (2 * 2 + 1)), plain + 2 * (4 + 2 * 2)
    assert plan_memory(config).graphs == drafted * (36 + 5) * GRAPH_LAYER
    assert plan_memory(config.model_copy(update={"drafter": None, "block_size": 1})).graphs == plain * 36 * GRAPH_LAYER
    assert plan_memory(config.model_copy(update={"backend": "tensorrt", "gpu": "sm90"})).graphs == 0


def test_an_engine_that_fits() -> None:
    assert check_fits(make_config(), "rtx-5090").total < GPUS["rtx-5090"].memory * GB - RESERVED


def test_what_does_not_fit_names_the_knobs() -> None:
    with pytest.raises(EngineError, match=r"needs .* GB on each GPU .* GB more than rtx-5090 has: use --max") as error:
        check_fits(make_config(max_batch=48), "rtx-5090")
    advised = {knob: int(value) for knob, value in re.findall(r"--([a-z-]+) (\d+)", str(error.value))}
    assert list(advised) == ["max-batch", "max-seq-len", "tp"]
    for knob, value in advised.items():
        check_fits(make_config(**{"max_batch": 48, knob.replace("-", "_"): value}), "rtx-5090")
    with pytest.raises(EngineError):
        check_fits(make_config(max_batch=advised["max-batch"] + 1), "rtx-5090")


def test_pages_that_do_not_fit_name_how_much_memory_they_may_take() -> None:
    config = make_config(max_batch=256, max_seq_len=16_384, backend="torch", kv_memory=125 * GB)
    with pytest.raises(EngineError, match=r"GB more than h200 has: use --kv-memory ") as error:
        check_fits(config, "h200")
    (advised,) = re.findall(r"--kv-memory (\S+)", str(error.value))

    def bytes_of(gigabytes: float) -> int:
        return check_fits(config.model_copy(update={"kv_memory": int(gigabytes * GB)}), "h200").total

    assert bytes_of(float(advised))
    with pytest.raises(EngineError):
        bytes_of(float(advised) + 0.1)


def test_slots_that_are_too_many_and_too_long_are_fewer_and_shorter_together() -> None:
    config = make_config(max_batch=500, max_seq_len=40_960)
    with pytest.raises(EngineError, match=r"has: use --max-batch (\d+) with --max-seq-len (\d+)$") as error:
        check_fits(config, "rtx-4090")
    slots, length = map(int, re.findall(r"--max-\S+ (\d+)", str(error.value)))
    assert check_fits(config.model_copy(update={"max_batch": slots, "max_seq_len": length}), "rtx-4090")


def test_too_large_a_model_asks_for_ranks_alone() -> None:
    with pytest.raises(EngineError, match=r"more than rtx-4090 has: use --tp 2 or --precision bf16$"):
        check_fits(make_config(max_batch=1, precision="fp32"), "rtx-4090")


def test_a_model_that_no_knob_fits_asks_for_a_larger_gpu_that_has_room() -> None:
    def advice(layers: int, **changes: Any) -> str:
        config = make_config(max_batch=1, **changes)
        with pytest.raises(EngineError, match="more than h100 has: use ") as error:
            check_fits(
                config.model_copy(update={"target": config.target.model_copy(update={"layers": layers})}), "h100"
            )
        return str(error.value).partition(": use ")[2]

    assert advice(1700, tp=8) == "--gpu h200"
    assert advice(1700) == "--gpu h200 --tp 8"
    assert advice(10_000) == "a smaller model"
    assert advice(10_000, precision="fp32") == "--precision bf16, or a smaller model"


def test_an_unknown_gpu_lists_the_known() -> None:
    with pytest.raises(SettingsError, match=r"--gpu gtx-970 is not known; known: b300, .*l40s"):
        check_fits(make_config(), "gtx-970")


def test_a_plan_of_gpt_oss_keeps_its_experts_as_the_gpu_multiplies_them() -> None:
    def plan(backend: str, gpu: str | None = None) -> MemoryPlan:
        limits: dict[str, Any] = {"max_batch": 8, "max_seq_len": 4096, "chunk": 512}
        config = shape_config("gpt-oss-120b", precision="bf16", tp=8, **limits)
        return plan_memory(config.model_copy(update={"backend": backend, "gpu": gpu}))

    stored = plan("torch")
    numbers = 36 * 128 * 3 * 2880 * 384  # layers, experts, matrices; columns are padded to whole blocks
    added = {gpu: plan("tensorrt", gpu).weights - stored.weights for gpu in ("rtx-pro-6000", "sm103", "sm89")}
    assert added == {
        "rtx-pro-6000": 0,  # MXFP4
        "sm103": numbers // 32,  # NVFP4: a scale for 16, not for 32
        "sm89": numbers * 2 - numbers * 17 // 32,  # BF16
    }
    # Every row goes through every expert, but in TensorRT's mixture layer. It has no rows of both kinds in a step.
    assert plan("tensorrt", "sm103").scratch < stored.scratch < plan("tensorrt", "sm120").scratch
    # A row for the sink's key, and an eighth of a head's 64 dimensions.
    row = 36 * 2 * 64 * 2 * 8  # layers, K and V, dimensions, bytes, slots
    rows = 4096 + 2 * 10  # of a slot, and two blocks
    assert plan("tensorrt", "sm120").target_cache == (rows + 1) * row * 72 // 64
