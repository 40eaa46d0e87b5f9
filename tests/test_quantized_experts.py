"""Experts in FP8 and NVFP4: what they stand for, on one rank and several, and quantized with ModelOpt."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import edit_tensors, make_drafter, make_gpt_oss, make_qwen3_moe
from tests.conftest import TINY, refusal, succeeds
from tests.quantized import quantize_folder
from tests.test_quantize import modelopt_numbers
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.planning import as_planned, plan_engine
from trtllm_dflash.build.precision import check_sides
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.cost.shapes import shape_config
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.models import build_target
from trtllm_dflash.models.moe import MoEDecoder
from trtllm_dflash.models.weights import WeightPrecision
from trtllm_dflash.ops.experts import Experts, in_tiles, one_by_one
from trtllm_dflash.ops.linear_weight import linear_weight
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.quantize.quantizer import QuantizeSettings, quantize
from trtllm_dflash.quantize.report import QuantizeReport, as_markdown

pytestmark = pytest.mark.slow

Tensor = torch.Tensor

LAYER = "model.layers.1.mlp."
EXPERTS = 6
# Blocks of 128 divide what one and two ranks hold; of four ranks they do not.
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 128, "head_size": 64, "kv_heads": 4, "intermediate": 256, "vocab": 16}
PRECISIONS = {
    "tensor": WeightPrecision.FP8,
    "channel": WeightPrecision.FP8,
    "blocks": WeightPrecision.FP8_BLOCKS,
    "nvfp4": WeightPrecision.NVFP4,
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """A target in each layout, and what its matrices stand for, by their names."""
    made = {}
    for layout in PRECISIONS:
        path = make_qwen3_moe(tmp_path_factory.mktemp(layout) / "target", experts=EXPERTS, top_k=2, **SHAPE)
        made[layout] = path, quantize_folder(path, layout, input_scale=0.02)
    return made


def planned(path: Path, **settings: Any) -> tuple[Pair, Any]:
    pair = open_pair(path)
    limits: dict[str, Any] = {"max_batch": 2, "max_seq_len": 64, "chunk": 16}
    config = plan_engine(pair, BuildSettings(name="a", target="", **limits, **settings)).config
    return as_planned(pair, config), config


def stacked(numbers: dict[str, Tensor], name: str) -> Tensor:
    """Every expert's gate_up [E, 2F, H] or down [E, H, F], from what its matrices stand for."""
    parts = ("gate", "up") if name == "gate_up" else ("down",)
    each = [torch.cat([numbers[f"{LAYER}experts.{i}.{part}_proj.weight"] for part in parts]) for i in range(EXPERTS)]
    return torch.stack(each)


@pytest.mark.parametrize("layout", PRECISIONS)
def test_an_engine_s_experts_stand_for_the_checkpoint_s_numbers_to_the_bit(layout, quantized):
    path, numbers = quantized[layout]
    pair, config = planned(path)
    assert config.target.linear_precision is PRECISIONS[layout]
    assert config.target.plain_linears == ("model.layers.0.mlp.router", "model.layers.1.mlp.router", "lm_head")
    weights = read_rank_weights(pair, 1, 0, torch.float32)
    for name in ("gate_up", "down"):
        stored = linear_weight(weights, f"{LAYER}experts.{name}_proj")
        assert not isinstance(stored, Tensor)
        assert torch.equal(stored.dequantize(), stacked(numbers, name))
        assert stored.input_scale == torch.tensor(0.02)
    held = sum(x.nbytes for name, x in weights.items() if not name.endswith("input_scale"))
    tables = 2 * config.cache_length * 32 * 4
    assert plan_memory(config.model_copy(update={"backend": "tensorrt"})).weights == held + tables


@pytest.mark.parametrize("compute", [one_by_one, in_tiles])
@pytest.mark.parametrize("layout", PRECISIONS)
def test_what_experts_compute_is_what_their_dequantized_numbers_compute(layout, compute, quantized):
    path, _ = quantized[layout]
    pair, config = planned(path)
    model = build_target(config.target)
    assert isinstance(model, MoEDecoder)
    layer = model.experts("model.layers.1.", 1, 0)
    few = read_rank_weights(pair, 1, 0, torch.float32)
    plain = read_rank_weights(planned(path, precision="fp32")[0], 1, 0, torch.float32)
    assert LAYER + "experts.down_proj.scale" not in plain
    x, logits = (torch.randn(7, n, generator=torch.Generator().manual_seed(0)) for n in (128, EXPERTS))
    for dtype in (torch.float32, torch.bfloat16):
        wide = {name: tensor.to(dtype) for name, tensor in plain.items()}
        found, expected = (compute(layer, Experts.of(w, layer), x.to(dtype), logits) for w in (few, wide))
        assert found.dtype is dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("tp", "ep"), [(2, False), (2, True)])
@pytest.mark.parametrize("layout", PRECISIONS)
def test_the_ranks_parts_add_up_to_the_whole(layout, tp, ep, quantized):
    path, numbers = quantized[layout]
    pair, config = planned(path, tp=tp, ep=ep)
    model = build_target(config.target)
    assert isinstance(model, MoEDecoder)
    ranks = [read_rank_weights(pair, tp, rank, torch.float32) for rank in range(tp)]
    for weight in model.expert_weights("model.layers.1."):
        for rank, weights in enumerate(ranks):
            stored = linear_weight(weights, weight.linear)
            assert not isinstance(stored, Tensor)
            assert stored.dequantize().shape == weight.shape(tp, rank)
    x, logits = (torch.randn(2, 3, n, generator=torch.Generator().manual_seed(0)) for n in (128, EXPERTS))
    total = sum(
        TorchOps(weights, {}).moe(model.experts("model.layers.1.", tp, rank), x, logits)
        for rank, weights in enumerate(ranks)
    )
    whole = {f"{LAYER}experts.{name}_proj.weight": stacked(numbers, name) for name in ("gate_up", "down")}
    expected = TorchOps(whole, {}).moe(model.experts("model.layers.1.", 1, 0), x, logits)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.principal("blocks", "nvfp4")
@pytest.mark.parametrize("layout", PRECISIONS)
def test_text_is_that_of_the_same_numbers_unquantized_drafted_or_not(layout, quantized, tmp_path):
    path, numbers = quantized[layout]
    drafter = make_drafter(tmp_path / "drafter", path, layers=2, tap_layers=(0, 1), seed=3)
    shutil.copytree(path, tmp_path / "plain")
    (tmp_path / "plain" / "model.safetensors").unlink()
    plain = make_qwen3_moe(tmp_path / "plain", experts=EXPERTS, top_k=2, **SHAPE)
    edit_tensors(plain, lambda tensors: tensors.update(numbers))
    prompts: list[Any] = [[1, 2, 3], [6, 5, 7, 9] * 5]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM.from_pretrained(plain, None, "fp32", "cpu", 2, 64) as llm:
        said = [reply.token_ids for reply in llm.generate(prompts, params)]
    with LLM.from_pretrained(path, drafter, None, "cpu", 2, 64) as llm:
        assert llm.config.target.linear_precision is PRECISIONS[layout]
        drafted, alone = (llm.generate(prompts, params, draft=draft) for draft in (True, False))
    assert [reply.token_ids for reply in drafted] == said == [reply.token_ids for reply in alone]
    assert any(count for reply in drafted for count in reply.accepted_per_step)


def test_slices_that_cut_blocks_are_refused_and_may_be_dequantized(quantized):
    path, numbers = quantized["blocks"]
    with pytest.raises(SettingsError, match=r"--tp 4: .* FP8 blocks of 128; use fewer ranks or .*--precision bf16"):
        planned(path, tp=4)
    pair, _ = planned(path, tp=4, precision="fp32")
    down = [read_rank_weights(pair, 4, rank, torch.float32)[LAYER + "experts.down_proj.weight"] for rank in range(4)]
    assert torch.equal(torch.cat(down, dim=2), stacked(numbers, "down"))


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("tensor", "target: experts stay in fp8, and those that rows choose are dequantized each time, but by our"),
        ("nvfp4", "target: nvfp4 is dequantized to fp32 at load by --backend torch; target: experts stay in nvfp4"),
    ],
)
def test_build_says_what_the_torch_backend_dequantizes(layout, says, quantized, tmp_path):
    assert says in succeeds("build", "--target", quantized[layout][0], "--output", tmp_path / "engine")


def test_experts_whose_columns_are_cut_may_stay_whole(tmp_path):
    path = make_qwen3_moe(tmp_path, experts=4, top_k=2, **{**SHAPE, "intermediate": 128, "head_size": 128})
    quantize_folder(path, "blocks")
    with pytest.raises(
        SettingsError, match=r"--tp 2: model.layers.0.mlp.experts.* use fewer ranks or --ep or --precision"
    ):
        planned(path, tp=2)
    planned(path, tp=2, ep=True)


def test_the_published_blocks_of_qwen3_coder_divide_among_two_ranks_and_whole_experts_among_eight():
    limits: dict[str, Any] = {"max_batch": 1, "max_seq_len": 512, "chunk": 64, "tp": 1, "precision": "bf16"}
    target = shape_config("qwen3-coder-30b-a3b", layers=2, **limits).target
    plain = tuple(w.linear for w in build_target(target).weights() if w.is_matrix and not w.linear.endswith("_proj"))
    target = target.model_copy(update={"linear_precision": WeightPrecision.FP8_BLOCKS, "plain_linears": plain})
    assert target.moe is not None
    check_sides(target, None, 2)
    with pytest.raises(SettingsError, match=r"--tp 4: model.layers.0.mlp.experts.gate_up_proj.weight .* or --ep or"):
        check_sides(target, None, 4)
    whole = target.model_copy(update={"moe": target.moe.model_copy(update={"expert_parallel": True})})
    for tp in (4, 8):
        check_sides(whole, None, tp)


_EXPERT = "model.layers.0.mlp.experts.2.up_proj."


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.pop(_EXPERT + "weight_scale"), f"{_EXPERT}weight is FP8 and has no {_EXPERT}weight_scale"),
        (
            lambda t: t.update({_EXPERT + "weight": torch.ones(256, 128)}),
            "the parts of model.layers.0.mlp.experts.gate_up_proj.weight are not quantized alike",
        ),
        (lambda t: t.update({_EXPERT + "weight_scale": torch.tensor(float("nan"))}), "up_proj.weight_scale holds NaN"),
        (lambda t: t[_EXPERT + "weight"].view(torch.uint8)[3, 5].fill_(0xFF), "up_proj.weight holds NaN or infinity"),
        (lambda t: t.pop(_EXPERT + "weight"), f"missing: {_EXPERT}weight"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_tensor(edit, says, quantized, tmp_path):
    path = tmp_path / "target"
    shutil.copytree(quantized["tensor"][0], path)
    edit_tensors(path, edit)
    assert says in refusal("build", "--target", path, "--output", tmp_path / "engine")


# -- quantize ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A mixture with the shipped pair's tokenizer. Few of its many experts see a short text."""
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed: nothing can be quantized")
    path = tmp_path_factory.mktemp("mixture") / "target"
    shape: dict[str, Any] = {"layers": 2, "hidden": 64, "intermediate": 32, "vocab": 2048}
    make_qwen3_moe(path, experts=24, top_k=2, **shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / "target" / name, path / name)
    return path


@pytest.fixture(scope="module")
def made(target, tmp_path_factory) -> dict[str, tuple[Path, QuantizeReport]]:
    """Quantized with two samples: folder, and report."""
    folder = tmp_path_factory.mktemp("quantized")
    few = {"samples": 2, "held_back": 1, "length": 24, "max_tokens": 4, "device": "cpu"}
    reports = {}
    for format in ("fp8", "nvfp4"):
        settings = QuantizeSettings.model_validate({"target": str(target), "format": format, **few})
        reports[format] = folder / format / "target", quantize(settings, folder / format)
    return reports


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_dequantized_experts_are_modelopt_s_own_to_the_bit(format, made):
    path, _ = made[format]
    pair = open_pair(path)
    assert pair.target_config.linear_precision == format
    weights, tensors = read_rank_weights(pair, 1, 0, torch.float32), load_file(path / "model.safetensors")
    compared = 0
    for weight in build_target(pair.target_config).weights():
        if weight.stack is None:
            continue
        stored = linear_weight(weights, weight.linear)
        assert not isinstance(stored, Tensor)
        expected = torch.cat([modelopt_numbers(tensors, part.key, format) for part in weight.parts])
        assert torch.equal(stored.dequantize().flatten(0, 1), expected)
        compared += len(weight.parts)
    assert compared == 2 * 24 * 3


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_routers_are_left_alone(format, made, target):
    before, after = load_file(target / "model.safetensors"), load_file(made[format][0] / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name].to(before[name].dtype))}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    assert "model.layers.0.mlp.gate.weight" not in changed


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_experts_that_no_token_chose_are_named_and_scaled_like_the_others(format, made, target):
    path, report = made[format]
    unseen = report.experts_without_tokens
    assert set(unseen) == {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    assert all(0 < len(experts) < 24 for experts in unseen.values())
    (line,) = (line for line in as_markdown(report).splitlines() if "saw no token" in line)
    first = unseen["model.layers.0.mlp.gate"][0]
    assert line.startswith(f"{sum(map(len, unseen.values()))} experts saw no token (model.layers.0.mlp.gate {first}")
    before, after = load_file(target / "model.safetensors"), load_file(path / "model.safetensors")
    prefix = "model.layers.0.mlp.experts."
    largest = {"fp8": 448.0, "nvfp4": 6 * 448.0}[format]
    for i in range(24):
        amax = before[f"{prefix}{i}.down_proj.weight"].abs().max()
        scale = after[f"{prefix}{i}.down_proj.weight_scale{'_2' if format == 'nvfp4' else ''}"]
        torch.testing.assert_close(scale, amax / largest)
        for name in ("gate", "up", "down"):
            key = "_proj.input_scale"
            assert after[f"{prefix}{i}.{name}{key}"] == after[f"{prefix}0.{name}{key}"] > 0


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_the_report_has_the_error_of_every_layer_s_experts(format, made):
    _, report = made[format]
    first, second = (report.errors[f"model.layers.{i}.mlp.experts"] for i in range(2))
    # The second layer's router, which is random and so nearly undecided, now and then chooses other experts.
    assert {"fp8": 0.99, "nvfp4": 0.9}[format] < first.cosine < 1 - 1e-6 and abs(first.norm_ratio - 1) < 0.05
    assert second.cosine < first.cosine
    assert report.bytes_after["target"] < report.bytes_before["target"]


@pytest.mark.parametrize(("mxfp4", "says"), [(True, "in MXFP4 as published"), (False, "in the published checkpoint")])
def test_gpt_oss_keeps_its_experts(mxfp4, says, tmp_path):
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed: nothing can be quantized")
    path = make_gpt_oss(tmp_path / "target", layers=2, mxfp4=mxfp4)
    line = refusal("quantize", "--target", path, "--format", "fp8", "--output", tmp_path / "made")
    assert says in line
    assert "give --only drafter, or round its attention at a build: build --precision fp8" in line
    succeeds("build", "--target", path, "--precision", "fp8", "--output", tmp_path / "engine")
