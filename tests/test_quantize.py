"""`quantize`: ModelOpt's own numbers, little lost, and drafted text that is plain text in every precision."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import make_drafter, make_target
from tests.conftest import TINY, refusal, succeeds
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.models import build_target
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.models.weights import Part
from trtllm_dflash.ops.linear_weight import linear_weight
from trtllm_dflash.quantize.quantizer import QuantizeSettings, quantize
from trtllm_dflash.quantize.report import QuantizeReport
from trtllm_dflash.quantize.text import read_samples
from trtllm_dflash.text.tokenizer import TextCodec

pytestmark = pytest.mark.slow

pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed: nothing can be quantized")

Tensor = torch.Tensor

PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, tuple[Path, QuantizeReport]]:
    """The shipped pair in both formats: folder, and report."""
    folder = tmp_path_factory.mktemp("quantized")
    few = {"samples": 4, "held_back": 2, "length": 160, "max_tokens": 16, "device": "cpu"}
    pair = {"target": str(TINY / "target"), "drafter": str(TINY / "drafter")}
    reports = {}
    for format, kv in (("fp8", "fp8"), ("nvfp4", None)):
        settings = QuantizeSettings.model_validate({**pair, **few, "format": format, "kv": kv})
        reports[format] = (folder / format, quantize(settings, folder / format))
    return reports


# -- the numbers -------------------------------------------------------------------------------------------------------


def modelopt_numbers(tensors: dict[str, Tensor], name: str, format: str) -> Tensor:
    """A matrix as ModelOpt dequantizes what it exported."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    prefix, values = name.removesuffix("weight"), tensors[name]
    scale: Any = tensors[prefix + "weight_scale"]
    if format == "fp8":
        return FP8QTensor(values.shape, torch.float32, values).dequantize(torch.float32, scale=scale)
    shape = (values.shape[0], values.shape[1] * 2)
    scales = {"scale": scale, "double_scale": tensors[prefix + "weight_scale_2"], "block_sizes": {-1: 16}}
    return NVFP4QTensor(shape, torch.float32, values).dequantize(torch.float32, **scales)


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_dequantized_weights_are_modelopt_s_own_to_the_bit(format, made):
    folder, _ = made[format]
    pair = open_pair(folder / "target", folder / "drafter")
    assert pair.drafter is not None
    weights = read_rank_weights(pair, 1, 0, torch.float32)
    compared = Counter[str]()
    models = {"target": build_target(pair.target_config), "drafter": Drafter(pair.drafter.config)}
    for role, model in models.items():
        tensors = load_file(folder / role / "model.safetensors")
        for weight in model.weights():
            if weight.precision.value == format:
                stored = linear_weight(weights, weight.linear)
                assert not isinstance(stored, Tensor)
                parts: tuple[Part, ...] = weight.parts
                expected = torch.cat([modelopt_numbers(tensors, part.key, format) for part in parts])
                assert torch.equal(stored.dequantize(), expected)
                compared[role] += 1
    assert compared == {"target": 8 * 4, "drafter": 2 * 4 + 1}


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_projections_are_rounded_and_nothing_else_is_touched(role, format, made):
    folder, _ = made[format]
    before, after = (load_file(path / role / "model.safetensors") for path in (TINY, folder))
    rounded = {name for name in before if name.endswith("_proj.weight")}
    assert {name for name in before if not torch.equal(before[name], after[name].to(before[name].dtype))} == rounded
    suffixes = ["weight_scale", "input_scale"] + (["weight_scale_2"] if format == "nvfp4" else [])
    added = {name.removesuffix("weight") + suffix for name in rounded for suffix in suffixes}
    if format == "fp8" and role == "target":
        added |= {f"model.layers.{i}.self_attn.{n}_proj.{n}_scale" for i in range(8) for n in "kv"}
    assert set(after) == set(before) | added
    summary = json.loads((folder / role / "hf_quant_config.json").read_text())["quantization"]
    assert summary["quant_algo"] == format.upper()
    left_alone = {"target": ["lm_head", "model.embed_tokens"], "drafter": ["fc"]}
    assert summary["exclude_modules"] == left_alone[role]
    assert summary["kv_cache_quant_algo"] == ("FP8" if format == "fp8" and role == "target" else None)
    said = json.loads((folder / role / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["quant_algo"]) == ("modelopt", format.upper())


def test_what_is_multiplied_as_one_shares_its_scales(made):
    for role, prefix in (("target", "model.layers.0."), ("drafter", "layers.0.")):
        tensors = load_file(made["nvfp4"][0] / role / "model.safetensors")
        for parts in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
            for scale in ("weight_scale_2", "input_scale"):
                assert len({float(tensors[f"{prefix}{part}_proj.{scale}"]) for part in parts}) == 1


# -- what it costs -----------------------------------------------------------------------------------------------------

# Cosine at least, and norm ratio at most so far from 1: of every product, and of the logits. Measured (these samples):
# FP8 0.9981 and 0.007, NVFP4 0.975 and 0.040.
BOUNDS = {"fp8": (0.995, 0.02), "nvfp4": (0.95, 0.08)}


@pytest.mark.parametrize("format", BOUNDS)
def test_products_of_every_layer_and_logits_stay_close(format, made):
    _, report = made[format]
    cosine, ratio = BOUNDS[format]
    linears = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    expected = {f"model.layers.{i}.{name}" for i in range(8) for name in linears} | {"logits"}
    expected |= {f"drafter.layers.{i}.{name}" for i in range(2) for name in linears}
    assert set(report.errors) >= expected
    print(
        format,
        min(e.cosine for e in report.errors.values()),
        max(abs(1 - e.norm_ratio) for e in report.errors.values()),
    )
    for name, error in report.errors.items():
        assert cosine < error.cosine < 1 + 1e-9 and abs(error.norm_ratio - 1) < ratio, name
        # The drafter's context alone comes from what was not rounded: `fc`.
        assert (error.cosine < 1 - 1e-7) or name == "drafter.fc", name


@pytest.mark.parametrize("format", BOUNDS)
def test_the_report_says_what_was_made_and_what_it_costs(format, made):
    folder, report = made[format]
    assert json.loads((folder / "report.json").read_text())["format"] == format
    for role in ("target", "drafter"):
        assert report.bytes_after[role] == (folder / role / "model.safetensors").stat().st_size
        assert report.bytes_after[role] < {"fp8": 0.56, "nvfp4": 0.36}[format] * report.bytes_before[role]
    assert report.perplexity_before is not None and report.perplexity_after is not None
    assert abs(report.perplexity_after / report.perplexity_before - 1) < 0.05
    rows = {(row.target, row.drafter): row for row in report.acceptance}
    assert set(rows) == {(t, d) for t in ("as it was", format) for d in ("as it was", format)}
    assert all(row.is_plain_text for row in rows.values())
    before = rows["as it was", "as it was"].length
    assert before > 3 and all(row.length > 0.7 * before for row in rows.values())


# -- the same text -----------------------------------------------------------------------------------------------------


@pytest.mark.principal("fp8")
@pytest.mark.parametrize("precision", [None, "fp8", "nvfp4"])
def test_drafted_text_is_plain_text_in_every_precision(precision, made):
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text().splitlines()]
    first = {row["kind"]: row["prompt"] for row in reversed(rows)}
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in first.values()]
    target = TINY / "target" if precision is None else made[precision][0] / "target"
    said: list[list[int]] = []
    for drafter in (TINY, made["fp8"][0], made["nvfp4"][0]):
        computed = "fp32" if precision is None else None
        # Caches in FP8, which one of these checkpoints asks for, have near-ties: see test_fp8_caches.
        with LLM.from_pretrained(target, drafter / "drafter", computed, "cpu", 4, kv="engine") as llm:
            drafted = llm.generate(prompts, PARAMS)
            if not said:
                said = [reply.token_ids for reply in llm.generate(prompts, PARAMS, draft=False)]
        # One text for all drafters: the target's precision decides it, the drafter's only the speed.
        assert [reply.token_ids for reply in drafted] == said
        length = sum(len(reply.token_ids) - 1 for reply in drafted) / sum(reply.steps for reply in drafted)
        print(precision, drafter, length)
        assert length > 3


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_report_and_builds_from_there(tmp_path):
    folder = tmp_path / "made"
    few = ["--samples", 3, "--held-back", 1, "--length", 64, "--max-tokens", 8, "--device", "cpu"]
    printed = succeeds("quantize", "--model", "tiny", "--format", "fp8", "--only", "drafter", "--output", folder, *few)
    assert "| target | drafter | acceptance length |" in printed and f"{folder}: written" in printed
    assert sorted(path.name for path in folder.iterdir()) == ["drafter", "report.json"]
    flags = ["--target", TINY / "target", "--drafter", folder / "drafter", "--output", tmp_path / "engine"]
    succeeds("build", *flags)
    assert "fp8 matrices" in succeeds("inspect", tmp_path / "engine")
    line = refusal("quantize", "--model", "tiny", "--format", "fp8", "--output", folder, *few)
    assert "--force" in line
    again = [
        "--target",
        TINY / "target",
        "--drafter",
        folder / "drafter",
        "--format",
        "nvfp4",
        "--output",
        tmp_path / "x",
    ]
    assert "is quantized already, to fp8" in refusal("quantize", *again, *few)


def test_a_hybrid_pair_is_quantized_and_what_it_drafts_is_accepted(tmp_path):
    few = ["--samples", 4, "--held-back", 4, "--length", 64, "--max-tokens", 64, "--device", "cpu"]
    succeeds("quantize", "--model", "tiny-hybrid", "--format", "fp8", "--output", tmp_path / "made", *few)
    report = json.loads((tmp_path / "made" / "report.json").read_text())
    assert abs(report["perplexity_after"] / report["perplexity_before"] - 1) < 0.05
    rows = {(row["target"], row["drafter"]): row for row in report["acceptance"]}
    assert len(rows) == 4 and all(row["is_plain_text"] for row in rows.values())
    before = rows["as it was", "as it was"]["length"]
    assert before > 1.5 and all(row["length"] > 0.7 * before for row in rows.values())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--format", "int4"], "--format int4: Input should be 'fp8' or 'nvfp4'"),
        (["--format", "fp8", "--kv", "int8"], "--kv int8: Input should be 'fp8'"),
        (["--format", "fp8", "--kv", "fp8", "--only", "drafter"], "--kv fp8: is of the target's caches"),
        (["--format", "fp8", "--text", "nowhere.txt"], "--text nowhere.txt: cannot be read: No such file"),
        (["--format", "fp8", "--samples", 0], "--samples 0: "),
        (["--format", "fp8", "--device", "gpu"], "--device gpu: "),
        (["--format", "fp8", "--held-back", 4000], "samples, and 4000 are kept back to measure with"),
        (["--format", "fp8", "--max-tokens", 4090], "--max-tokens 4090: the target takes 4096 positions"),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_name_before_modelopt_is_imported(flags, says, tmp_path, monkeypatch):
    monkeypatch.setattr("trtllm_dflash.quantize.quantizer.load_modelopt", pytest.fail)
    assert says in refusal("quantize", "--model", "tiny", "--output", tmp_path / "made", *flags)
    assert not list(tmp_path.iterdir())


def test_what_else_has_a_report_and_what_is_read_are_not_replaced(tmp_path):
    few = ["--format", "fp8", "--samples", 3, "--held-back", 1, "--length", 64, "--max-tokens", 8, "--force"]
    training = tmp_path / "training"
    shutil.copytree(TINY / "drafter", training / "drafter")
    (training / "report.json").write_text("{}")
    pair = ["--target", TINY / "target", "--drafter", training / "drafter"]
    assert "holds the drafter that is read" in refusal("quantize", *pair, "--output", training, *few)
    (training / "checkpoints").mkdir()
    line = refusal("quantize", "--model", "tiny", "--output", training, *few)
    assert line.startswith(
        f"error: --output {training}: is no quantized pair, which --force would replace; use another"
    )
    assert sorted(path.name for path in training.iterdir()) == ["checkpoints", "drafter", "report.json"]


def test_output_and_text_are_looked_at_before_checkpoints_are_fetched(tmp_path):
    hub = ["--target", "nobody/nothing", "--format", "fp8"]
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").touch()
    assert f"--output {taken}: is no quantized pair" in refusal("quantize", *hub, "--output", taken)
    line = refusal("quantize", *hub, "--output", tmp_path / "made", "--text", tmp_path / "none.txt")
    assert line == f"error: --text {tmp_path / 'none.txt'}: cannot be read: No such file or directory"


def test_a_text_s_own_ends_of_lines_end_no_line_of_json(tmp_path):
    codec = TextCodec.load(TINY / "target", {})
    file = tmp_path / "text.jsonl"
    file.write_text('{"prompt": "a\u2028 b"}\n{"prompt": "c\u0085 d"}\n', encoding="utf-8")
    assert len(read_samples(file, codec, 1, 1, 64).calibration) == 1


def test_without_modelopt_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", None)
    line = refusal("quantize", "--model", "tiny", "--format", "fp8", "--output", tmp_path / "made")
    assert pip_install("quantization") in line


def test_a_target_without_a_tokenizer_is_refused(tmp_path):
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target)
    settings = QuantizeSettings(target=str(target), drafter=str(drafter), format="fp8")
    with pytest.raises(SettingsError, match=r"no tokenizer\.json to read a text with"):
        quantize(settings, tmp_path / "made")


# -- the text ----------------------------------------------------------------------------------------------------------


def test_samples_come_from_all_of_a_text_and_none_is_used_twice(tmp_path):
    codec = TextCodec.load(TINY / "target", {})
    assert codec is not None
    lines = tmp_path / "lines.jsonl"
    rows = [{"prompt": f"number {i}", "reference": f"it is {i}"} for i in range(100)]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = read_samples(lines, codec, 20, 5, 64)
    texts = [codec.decode(sample.token_ids) for sample in samples.calibration + samples.held_back]
    assert (len(samples.calibration), len(samples.held_back), len(set(texts))) == (20, 5, 25)
    assert any("number 9" in text for text in texts) and all("it is" in text for text in texts)
    held = samples.held_back[1]
    assert held.token_ids[: held.prompt] == codec.encode_chat([{"role": "user", "content": "number 20"}])
    text = tmp_path / "long.txt"
    text.write_text("The dog ran home. " * 400)
    pieces = read_samples(text, codec, 10, 2, 32)
    assert [len(sample.token_ids) for sample in pieces.calibration] == [32] * 10
    (tmp_path / "wrong.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(SettingsError, match='line 1 is not a JSON object with "prompt" or "text"'):
        read_samples(tmp_path / "wrong.jsonl", codec, 1, 1, 16)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": "\\ud800 a"}'], ids=["nested", "half a character"])
def test_a_line_of_half_characters_or_without_end_is_named(line, tmp_path):
    codec = TextCodec.load(TINY / "target", {})
    assert codec is not None
    (tmp_path / "text.jsonl").write_text(line + "\n")
    with pytest.raises(SettingsError, match=r"line 1 is not a JSON object with"):
        read_samples(tmp_path / "text.jsonl", codec, 4, 1, 64)
