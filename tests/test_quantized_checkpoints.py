"""Checkpoints in few bits, as published, become engines that stand for the same numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import edit_config, edit_tensors, make_drafter, make_target
from tests.conftest import refusal, succeeds
from tests.quantized import METHODS, quantize_folder
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.planning import as_planned, plan_engine
from trtllm_dflash.build.precision import choose_precision
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.cost.memory import plan_memory
from trtllm_dflash.errors import CheckpointError, SettingsError
from trtllm_dflash.models.weights import WeightPrecision
from trtllm_dflash.ops import fp8
from trtllm_dflash.ops.fp8 import Fp8Weight
from trtllm_dflash.ops.linear_weight import Nvfp4Weight, linear_weight

pytestmark = pytest.mark.slow

Tensor = torch.Tensor

SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_size": 128, "intermediate": 512}
PRECISIONS = {
    "tensor": WeightPrecision.FP8,
    "channel": WeightPrecision.FP8,
    "blocks": WeightPrecision.FP8_BLOCKS,
    "nvfp4": WeightPrecision.NVFP4,
}


def make_quantized(path: Path, layout: str, **how: Any) -> tuple[Path, Path, dict[str, Tensor]]:
    """A pair in that layout, and what the target's matrices stand for."""
    target = make_target(path / "target", layers=2, hidden=256, dtype=torch.bfloat16, **SHAPE)
    drafter = make_drafter(path / "drafter", target, layers=1, tap_layers=(0, 1), dtype=torch.bfloat16, **SHAPE)
    quantize_folder(drafter, layout, **how)
    return target, drafter, quantize_folder(target, layout, **how)


def planned(pair: Pair, **settings: Any) -> tuple[Pair, Any]:
    limits: dict[str, Any] = {"max_batch": 2, "max_seq_len": 64, "chunk": 16}
    config = plan_engine(pair, BuildSettings(name="a", target="", drafter="", **limits, **settings)).config
    return as_planned(pair, config), config


@pytest.mark.parametrize("layout", PRECISIONS)
def test_an_engine_s_matrices_stand_for_the_checkpoint_s_numbers_to_the_bit(layout, tmp_path):
    target, drafter, expected = make_quantized(tmp_path, layout, input_scale=0.02)
    pair, config = planned(open_pair(target, drafter))
    assert config.target.linear_precision is PRECISIONS[layout] is config.drafter.linear_precision
    assert (config.target.plain_linears, config.drafter.plain_linears) == (("lm_head",), ("drafter.fc",))
    weights = read_rank_weights(pair, 1, 0, torch.float32)
    layer = "model.layers.1."
    joined = {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up"), "mlp.down_proj": ("down",)}
    for linear, parts in joined.items():
        stored = linear_weight(weights, layer + linear)
        assert isinstance(stored, Nvfp4Weight if layout == "nvfp4" else Fp8Weight)
        block = linear.split(".")[0]
        assert torch.equal(stored.dequantize(), torch.cat([expected[f"{layer}{block}.{n}_proj.weight"] for n in parts]))
        assert stored.input_scale is not None and stored.input_scale == torch.tensor(0.02)
    stored_bytes = sum(x.nbytes for name, x in weights.items() if not name.endswith("input_scale"))
    planned_bytes = plan_memory(config.model_copy(update={"backend": "tensorrt"})).weights
    tables = 2 * 2 * config.cache_length * 64 * 4
    assert planned_bytes == stored_bytes + tables


@pytest.mark.parametrize("layout", PRECISIONS)
def test_ranks_hold_slices_of_it(layout, tmp_path):
    target, drafter, expected = make_quantized(tmp_path, layout)
    pair, _ = planned(open_pair(target, drafter), tp=2)
    ranks = [read_rank_weights(pair, 2, rank, torch.float32) for rank in (0, 1)]
    layer = "model.layers.0."
    down, o, qkv = (
        [linear_weight(weights, layer + name) for weights in ranks]
        for name in ("mlp.down_proj", "self_attn.o_proj", "self_attn.qkv_proj")
    )
    for parts, name in ((down, "mlp.down_proj"), (o, "self_attn.o_proj")):
        found = torch.cat([part.dequantize() for part in parts], dim=1)
        assert torch.equal(found, expected[f"{layer}{name}.weight"])
    q, k, v = (expected[f"{layer}self_attn.{n}_proj.weight"].chunk(2) for n in "qkv")
    for rank in (0, 1):
        assert torch.equal(qkv[rank].dequantize(), torch.cat([q[rank], k[rank], v[rank]]))


@pytest.mark.parametrize("layout", PRECISIONS)
def test_it_says_what_the_same_numbers_unquantized_say(layout, tmp_path):
    target, drafter, expected = make_quantized(tmp_path, layout)
    plain = make_target(tmp_path / "plain", layers=2, hidden=256, **SHAPE)
    stored = load_file(target / "model.safetensors")
    edit_tensors(plain, lambda tensors: tensors.update({n: expected.get(n, stored[n]).float() for n in tensors}))
    prompts: list[Any] = [[1, 2, 3], [60, 5, 7, 9]]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM.from_pretrained(plain, None, precision="fp32", device="cpu", max_batch=2, max_seq_len=64) as llm:
        said = [reply.token_ids for reply in llm.generate(prompts, params)]
    with LLM.from_pretrained(target, drafter, device="cpu", max_batch=2, max_seq_len=64) as llm:
        assert llm.config.target.linear_precision is PRECISIONS[layout]
        for draft in (True, False):
            assert [reply.token_ids for reply in llm.generate(prompts, params, draft=draft)] == said


@pytest.mark.parametrize("layout", ["tensor", "nvfp4"])
def test_a_shortlist_s_head_is_the_target_s_and_stays_as_it_is(layout, tmp_path):
    target, drafter, _ = make_quantized(tmp_path, layout)
    pair, config = planned(open_pair(target, drafter), draft_vocab=128)
    assert config.drafter.plain_linears == ("drafter.fc", "drafter.lm_head")
    head = read_rank_weights(pair, 1, 0, torch.float32)["drafter.lm_head.weight"]
    assert torch.equal(head, load_file(target / "model.safetensors")["lm_head.weight"].float())


def test_a_drafter_may_have_all_its_matrices_in_nvfp4(tmp_path):
    """ModelOpt leaves out none but those that it is told."""
    target, drafter, _ = make_quantized(tmp_path, "nvfp4")

    def pack(tensors: dict[str, Tensor]) -> None:
        rows, columns = tensors["fc.weight"].shape
        tensors["fc.weight"] = torch.full((rows, columns // 2), 0x22, dtype=torch.uint8)  # 1 and 1
        tensors["fc.weight_scale"] = torch.full((rows, columns // 16), 0.5).to(torch.float8_e4m3fn)
        tensors["fc.weight_scale_2"] = torch.tensor(0.25)

    edit_tensors(drafter, pack)
    pair, config = planned(open_pair(target, drafter))
    assert config.drafter.plain_linears == ()
    weights = read_rank_weights(pair, 1, 0, torch.float32)
    assert (linear_weight(weights, "drafter.fc").dequantize() == 0.125).all()


def test_what_is_asked_for_decides_over_the_checkpoint(tmp_path):
    target, drafter, expected = make_quantized(tmp_path, "channel")
    pair, config = planned(open_pair(target, drafter), precision="bf16")
    assert config.target.linear_precision is None and config.precision == "bf16"
    o = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(read_rank_weights(pair, 1, 0, torch.bfloat16)[o], expected[o].bfloat16())


def test_a_target_is_rounded_row_by_row_at_a_build_and_its_head_is_not(tmp_path):
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target)
    flags = ["--target", target, "--drafter", drafter, "--max-seq-len", 64, "--precision", "fp8"]
    succeeds("build", *flags, "--output", tmp_path / "engine")
    weights = load_file(tmp_path / "engine" / "rank0.safetensors")
    assert {name for name, x in weights.items() if x.dtype == torch.float8_e4m3fn} == {
        f"model.layers.{i}.{name}_proj.weight"
        for i in range(4)
        for name in ("self_attn.qkv", "self_attn.o", "mlp.gate_up", "mlp.down")
    }
    assert "fp8 matrices, the rest in fp32" in succeeds("inspect", tmp_path / "engine")
    with LLM.load(tmp_path / "engine", "cpu") as llm:
        replies = [llm.generate([[1, 2, 3]], SamplingParams(max_tokens=16), draft=draft) for draft in (True, False)]
    assert replies[0][0].token_ids == replies[1][0].token_ids


# -- auto, and what a GPU has ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "gpu", "target", "drafter"),
    [
        (None, "sm80", None, None),
        (None, "sm89", "fp8", "fp8"),
        (None, "sm90", "fp8", "fp8"),
        (None, "b300", "fp8", "fp8"),
        ("nvfp4", "sm120", "nvfp4", "nvfp4"),
        ("nvfp4", "h200", None, None),
        ("tensor", "sm80", None, None),
        ("tensor", "sm120", "fp8", "fp8"),
        ("blocks", "sm90", "fp8-blocks", "fp8-blocks"),
    ],
)
def test_auto_takes_the_fewest_bits_that_gpu_and_checkpoint_have(layout, gpu, target, drafter, tmp_path):
    if layout is None:
        target_path = make_target(tmp_path / "target", layers=2)
        pair = open_pair(target_path, make_drafter(tmp_path / "drafter", target_path, tap_layers=(0, 1)))
    else:
        pair = open_pair(*make_quantized(tmp_path, layout)[:2])
    choice = choose_precision(pair.target_config, pair.drafter.config, "tensorrt", "auto", None, gpu)
    found = [pair.target_config.model_copy(update=choice.target), pair.drafter.config.model_copy(update=choice.drafter)]
    assert [model.linear_precision for model in found] == [target, drafter]
    assert choice.engine == "bf16"
    assert choice.said is not None and "precision auto: target in" in choice.said
    says_how = layout != "nvfp4" and gpu in ("b300", "sm120")
    assert ("quantize --format nvfp4" in choice.said) == says_how


@pytest.mark.parametrize("precision", [None, "auto"])
def test_a_gpu_without_bf16_gets_fp16_of_tensorrt(precision, tmp_path):
    config = open_pair(make_target(tmp_path, layers=2)).target_config
    assert choose_precision(config, None, "tensorrt", precision, None, "sm75").engine == "fp16"
    assert choose_precision(config, None, "torch", precision, None, "sm75").engine == "bf16"
    with pytest.raises(SettingsError, match="--precision bf16: sm75 has fp16, fp32, and no bf16"):
        choose_precision(config, None, "tensorrt", "bf16", None, "sm75")


def test_build_says_what_auto_chose(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = succeeds("build", "--model", "tiny", "--precision", "auto", "--output", tmp_path / "engine")
    assert said.startswith("precision auto: target in fp32, drafter in fp32 (there is no GPU)\n")


def test_build_says_what_the_torch_backend_dequantizes(tmp_path):
    target, drafter, _ = make_quantized(tmp_path, "nvfp4")
    said = succeeds("build", "--target", target, "--drafter", drafter, "--output", tmp_path / "engine")
    assert "target: nvfp4 is dequantized to fp32 at load by --backend torch" in said


def test_it_is_said_which_gpus_dequantize_blocks_of_fp8_and_whether_all(tmp_path):
    """Hopper GPUs multiply them as they are, but where rows are no four blocks: of a hidden size of 256, not of 512."""
    target = make_target(tmp_path / "wide", layers=1, hidden=512, dtype=torch.bfloat16, **SHAPE)
    quantize_folder(target, "blocks")
    wide = open_pair(target).target_config
    pair = open_pair(*make_quantized(tmp_path, "blocks")[:2])

    def said(target, drafter, gpu, tp=1):
        return choose_precision(target, drafter, "torch", None, None, gpu, tp).said

    for gpu, share in (("sm89", ""), ("sm90", "in part "), ("sm120", "")):
        note = f"fp8-blocks is {share}dequantized to bf16 at load by --backend torch"
        assert said(pair.target_config, pair.drafter.config, gpu) == f"target: {note}; drafter: {note}"
    assert said(wide, None, "sm90") is None
    assert "target: fp8-blocks is in part dequantized" in said(wide, None, "sm90", tp=2)  # rows of 256
    assert "target: fp8-blocks is dequantized" in said(wide, None, "sm120")


def test_on_hopper_torch_and_its_cuda_decide(monkeypatch):
    known = {("2.10.0", "12.8"): False, ("2.8.0", "13.0"): False, ("2.9.1+cu129", "12.9"): True, ("2.13.0", None): True}
    for (release, cuda), takes in known.items():
        monkeypatch.setattr(torch, "__version__", release)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert fp8._takes_blocks.__wrapped__() == takes


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--precision", "fp8", "--backend", "tensorrt", "--gpu", "sm80"], "sm80 has bf16, fp16, fp32, and no fp8"),
        (["--precision", "nvfp4", "--backend", "tensorrt", "--gpu", "sm89"], "sm89 has fp8, bf16, fp16, fp32, and no"),
        (["--precision", "nvfp4"], "not quantized; make a calibrated nvfp4 checkpoint of the unquantized one: trtllm-"),
        (["--drafter-precision", "nvfp4"], "the drafter's checkpoint is not quantized; make a calibrated nvfp4"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_can(flags, says, tmp_path):
    assert says in refusal("build", "--model", "tiny", *flags, "--output", tmp_path / "engine")


def test_a_plan_of_a_checkpoint_that_the_gpu_does_not_multiply_is_refused(tmp_path):
    target, drafter, _ = make_quantized(tmp_path, "nvfp4")
    pair = ["--target", target, "--drafter", drafter, "--output", tmp_path / "engine"]
    line = refusal("build", *pair, "--backend", "tensorrt", "--gpu", "sm89")
    assert (
        "the target's checkpoint is nvfp4, and sm89 has fp8, bf16, fp16, fp32: --precision bf16 dequantizes it" in line
    )
    assert "the target's checkpoint is nvfp4; make a calibrated fp8" in refusal("build", *pair, "--precision", "fp8")


def test_blocks_that_ranks_would_cut_are_refused(tmp_path):
    target = make_target(tmp_path / "target", layers=2, hidden=128, heads=4, kv_heads=2, head_size=64, intermediate=256)
    drafter = make_drafter(tmp_path / "drafter", target, layers=1, tap_layers=(0, 1))
    quantize_folder(target, "blocks")
    pair = open_pair(target, drafter)
    planned(pair)
    with pytest.raises(
        SettingsError, match=r"--tp 2: .*qkv_proj.* no whole number of the checkpoint's FP8 blocks of 128"
    ):
        planned(pair, tp=2)


# -- checkpoints that are not what they say --------------------------------------------------------------------------

_O = "model.layers.0.self_attn.o_proj."


@pytest.mark.parametrize(
    ("layout", "edit", "says"),
    [
        (
            "channel",
            lambda t: t.pop(_O + "weight_scale"),
            "is FP8 and has no model.layers.0.self_attn.o_proj.weight_scale",
        ),
        (
            "nvfp4",
            lambda t: t.pop(_O + "weight_scale_2"),
            "is NVFP4 and has no model.layers.0.self_attn.o_proj.weight_scale_2",
        ),
        (
            "channel",
            lambda t: t.update({_O + "weight_scale": torch.ones(7)}),
            "[7]; scales are read of the whole tensor",
        ),
        ("nvfp4", lambda t: t.update({_O + "weight_scale": torch.ones(256, 32)}), "is F32 instead of F8_E4M3"),
        ("tensor", lambda t: t.update({_O + "input_scale": torch.ones(3)}), "input_scale is [3] instead of []"),
        (
            "tensor",
            lambda t: t.update({_O + "weight": torch.ones(256, 512)}),
            "unexpected: model.layers.0.self_attn.o_proj",
        ),
        (
            "tensor",
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(512, 256)}),
            "the parts of model.layers.0.self_attn.qkv_proj.weight are not quantized alike",
        ),
        (
            "tensor",
            lambda t: t.update(
                {
                    _O + "weight": torch.zeros(256, 256, dtype=torch.uint8),
                    _O + "weight_scale": torch.ones(256, 32).to(torch.float8_e4m3fn),
                    _O + "weight_scale_2": torch.ones(()),
                }
            ),
            "several formats in one checkpoint are not supported",
        ),
    ],
)
def test_a_damaged_one_is_refused_by_tensor(layout, edit, says, tmp_path):
    target, _, _ = make_quantized(tmp_path, layout)
    edit_tensors(target, edit)
    with pytest.raises(CheckpointError) as refused:
        open_pair(target)
    assert says in str(refused.value)


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    target, _, _ = make_quantized(tmp_path, "tensor")
    edit_tensors(target, lambda tensors: tensors.update({_O + "weight_scale": torch.tensor(float("nan"))}))
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_scale holds NaN"):
        read_rank_weights(open_pair(target), 1, 0, torch.float32)


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_other_formats_are_refused_with_the_command_that_makes_one(method, tmp_path):
    target, _, _ = make_quantized(tmp_path, "tensor")
    edit_config(target, lambda config: config.update(quantization_config=method))
    with pytest.raises(CheckpointError, match=r"which is not read; .*trtllm-dflash quantize --format fp8\|nvfp4"):
        open_pair(target)


def test_a_summary_beside_the_configuration_counts_too(tmp_path):
    target, _, _ = make_quantized(tmp_path, "tensor")
    edit_config(target, lambda config: config.pop("quantization_config"))
    summary = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_AWQ"}}
    (target / "hf_quant_config.json").write_text(json.dumps(summary))
    with pytest.raises(CheckpointError, match="quantized by modelopt as W4A16_AWQ"):
        open_pair(target)
    summary["quantization"] = {"quant_algo": METHODS["tensor"]["quant_algo"]}
    (target / "hf_quant_config.json").write_text(json.dumps(summary))
    assert open_pair(target).target_config.linear_precision is WeightPrecision.FP8
