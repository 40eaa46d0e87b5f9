"""Checkpoints whose settings and scales mean nothing, or two things: refused in one line before anything is written."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import edit_config, edit_tensors, make_drafter, make_gpt_oss, make_qwen3_moe, make_target
from tests.conftest import TINY, refusal
from tests.drafters import make_dflash2
from tests.quantized import quantize_folder
from tests.test_checkpoint import LLAMA3, NAN
from tests.test_checkpoint import refusal as pair_refusal
from trtllm_dflash.build.planning import plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_engine_tensors
from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.checkpoint.quantized import read_matrix
from trtllm_dflash.cost.published import PUBLISHED
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models import read_target_config
from trtllm_dflash.text.chat_template import check_templates

INFINITY = float("inf")
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *[({"rope_parameters": {**LLAMA3, "low_freq_factor": value}}, "low_freq_factor") for value in (NAN, 4.0, -1)],
        *[
            ({"rope_parameters": {**LLAMA3, "high_freq_factor": value}}, "high_freq_factor")
            for value in (NAN, INFINITY)
        ],
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 2.0}}, "rope_theta 1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e308}}, "beta_fast"),
        ({"max_position_embeddings": 1}, "max_position_embeddings"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),  # was listed without end
    ],
)
def test_a_number_that_no_target_is_computed_with_is_refused(changes, says, tmp_path):
    make_target(tmp_path)
    message = pair_refusal(edit_config(tmp_path, lambda config: config.update(changes)))
    assert message.startswith(f"{tmp_path}: config.json: ")
    assert says in message


@pytest.mark.parametrize("value", [NAN, INFINITY, "x", [], 0, -1])
@pytest.mark.parametrize("key", ["swiglu_alpha", "swiglu_limit"])
def test_an_activation_that_cannot_be_is_refused(key, value, tmp_path):
    """It was written into an engine that could not be loaded, or ended the build with a traceback."""
    make_gpt_oss(tmp_path, layers=1)
    message = pair_refusal(edit_config(tmp_path, lambda config: config.update({key: value})))
    assert message.startswith(f"{tmp_path}: config.json: ")


def test_experts_without_number_are_refused(tmp_path):
    make_qwen3_moe(tmp_path, layers=1)
    message = pair_refusal(edit_config(tmp_path, lambda config: config.update(num_experts=10**9)))
    assert "config.json: experts: Input should be less than or equal to 4096" in message


def test_a_drafters_block_and_multiplier_are_numbers_that_a_step_can_have(tmp_path):
    target = make_target(tmp_path / "target")
    make_drafter(tmp_path / "drafter", target)
    edit_config(tmp_path / "drafter", lambda config: config.update(block_size=100_000))
    assert "config.json: block_size: Input should be less than or equal to 1024" in pair_refusal(
        target, tmp_path / "drafter"
    )
    make_dflash2(tmp_path / "second", target)
    edit_config(tmp_path / "second", lambda config: config["dflash_config"].update(output_multiplier=INFINITY))
    assert "multiplier: Input should be a finite number" in pair_refusal(target, tmp_path / "second")


def test_a_drafter_without_taps_and_with_layers_without_end_is_refused(tmp_path):
    target = make_target(tmp_path / "target")
    make_drafter(tmp_path / "drafter", target, tap_layers=None)
    edit_config(tmp_path / "drafter", lambda config: config.update(num_hidden_layers=10**12))
    assert "config.json: num_hidden_layers: Input should be less than or equal to 1024" in pair_refusal(
        target, tmp_path / "drafter"
    )


def test_a_projection_of_taps_that_is_no_matrix_is_misshapen(tmp_path):
    target = make_target(tmp_path / "target")
    make_drafter(tmp_path / "drafter", target)
    edit_tensors(tmp_path / "drafter", lambda tensors: tensors.update({"fc.weight": torch.tensor(1.0)}))
    assert "misshapen: fc.weight [] instead of [64, 128]" in pair_refusal(target, tmp_path / "drafter")


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"quant_method": ["fp8"]}, "quantized by ['fp8'], which is not read"),
        *[
            ({**PACKED, "config_groups": groups}, "of the wrong type")
            for groups in (5, [1], {"group_0": 5}, {"group_0": {"weights": [1]}})
        ],
    ],
)
def test_what_a_checkpoint_says_of_its_quantization_is_one_line_in_any_form(said, says, tmp_path):
    make_target(tmp_path)
    message = pair_refusal(edit_config(tmp_path, lambda config: config.update(quantization_config=said)))
    assert says in message


def test_a_text_model_that_is_no_object_holds_no_settings(tmp_path):
    make_target(tmp_path)
    pair = open_pair(edit_config(tmp_path, lambda config: config.update(text_config="x", eos_token_id=3)))
    settings = BuildSettings(name="a", target="", precision="fp32", backend="torch")
    assert plan_engine(pair, settings).config.stop_token_ids == (3,)


def test_architectures_that_are_no_list_name_no_drafter(tmp_path):
    make_target(tmp_path)
    assert open_pair(edit_config(tmp_path, lambda config: config.update(architectures=5))).drafter is None


def test_two_rope_settings_that_differ_are_refused(tmp_path):
    """transformers takes the one and forgets the other's theta; text would be another's in silence."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    target = make_target(tmp_path)
    theta = json.loads((target / "config.json").read_text())["rope_parameters"]
    for same in (dict(theta), {"type": "default"}, {"rope_type": "default", "factor": None}):
        edit_config(target, lambda config, same=same: config.update(rope_scaling=same))
        rope = open_pair(target).target_config.rope
        assert (rope.kind, rope.theta) == ("default", theta["rope_theta"])
    edit_config(target, lambda config: config.update(rope_scaling=yarn))
    assert "rope_parameters and rope_scaling differ; put all settings into rope_parameters" in pair_refusal(target)


def test_a_drafter_in_the_targets_place_is_named(tmp_path):
    drafter = make_drafter(tmp_path / "drafter", make_target(tmp_path / "target"))
    assert f"{drafter}: is a drafter's checkpoint: --drafter takes it" in pair_refusal(drafter)


def test_heads_that_are_not_pairs_are_refused(tmp_path):
    make_target(tmp_path)
    assert "heads of 15 dimensions cannot be rotated in pairs" in pair_refusal(
        edit_config(tmp_path, lambda config: config.update(head_dim=15))
    )


@pytest.mark.parametrize(
    ("templates", "says"),
    [
        ([{"name": "default", "template": "{% if"}], "the chat template's line 1: "),
        ([{"name": "rag", "template": "x"}], "none of its chat templates is named default; there are rag"),
        ([{"template": "x"}], "chat_template is not a list of names and templates"),
    ],
)
def test_chat_templates_by_name_are_looked_at(templates, says, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        check_templates(templates, tmp_path / "tokenizer_config.json")
    assert says in str(caught.value)
    check_templates([{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}], tmp_path)


@pytest.mark.parametrize("value", [NAN, INFINITY, -1, 0, 2.5])
def test_gemmas_cap_and_share_are_numbers_that_it_can_have(value):
    raw = PUBLISHED["gemma-4-31b"].target
    for setting in ("final_logit_softcapping", "partial_rotary_factor"):
        changed = json.loads(json.dumps(raw))
        text = changed["text_config"]
        inside = text if setting == "final_logit_softcapping" else text["rope_parameters"]["full_attention"]
        assert setting in inside
        inside[setting] = value
        if (setting, value) != ("final_logit_softcapping", 2.5):
            with pytest.raises(ValueError, match=r"logit_cap|share"):
                read_target_config(changed)


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["other numbers", "another shape"])
def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(head, tmp_path):
    make_target(tmp_path, tied=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table * 2 if head == "other numbers" else table[:-1].clone()

    assert pair_refusal(edit_tensors(tmp_path, add)) == (
        f"{tmp_path}: lm_head.weight differs from model.embed_tokens.weight, though config.json has "
        "tie_word_embeddings true; set that to false to keep lm_head.weight, or save the checkpoint without it"
    )


def quantized(path: Path, layout: str, **how: Any) -> Path:
    target = make_target(path, layers=1, hidden=128, intermediate=128, heads=2, kv_heads=1, head_size=128)
    quantize_folder(target, layout, **how)
    return target


def build_refusal(target: Path) -> str:
    pair = open_pair(target)
    config = plan_engine(pair, BuildSettings(name="a", target="", backend="torch", max_batch=1)).config
    with pytest.raises(CheckpointError) as caught:
        read_engine_tensors(pair, config, 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INFINITY])
@pytest.mark.parametrize(
    ("layout", "scale"),
    [
        ("tensor", "weight_scale"),
        ("channel", "weight_scale"),
        ("blocks", "weight_scale_inv"),
        ("nvfp4", "weight_scale_2"),
    ],
)
def test_a_scale_that_numbers_cannot_be_multiplied_by_is_refused(layout, scale, value, tmp_path):
    name = f"model.layers.0.mlp.up_proj.{scale}"
    target = edit_tensors(quantized(tmp_path, layout), lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    what = "scales of 0 or less" if value in (0, -1) else "NaN or infinity"
    assert build_refusal(target) == f"{target}: tensor {name} holds {what}; download the checkpoint again"


def test_a_block_scale_below_zero_is_refused(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight_scale"
    target = edit_tensors(
        quantized(tmp_path, "nvfp4"), lambda tensors: tensors[name].view(torch.uint8).bitwise_or_(0x80)
    )
    assert f"tensor {name} holds scales of 0 or less" in build_refusal(target)


@pytest.mark.parametrize("layout", ["channel", "blocks"])
def test_a_scale_of_zero_is_taken_where_there_is_nothing_to_scale(layout, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    scale = name + ("_scale_inv" if layout == "blocks" else "_scale")

    def clear(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.uint8).zero_()
        tensors[scale].zero_()

    pair = open_pair(edit_tensors(quantized(tmp_path, layout), clear))
    stored = read_matrix(pair.target_folder, name, pair.quantized[name], 128, None, 0, 128)
    assert not stored.dequantize().any()


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_an_input_scale_that_nothing_is_divided_by_is_refused(value, tmp_path):
    target = quantized(tmp_path, "tensor", input_scale=value)
    assert f"self_attn.qkv_proj.weight is {value}, which no input can be divided by" in build_refusal(target)


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_tokenizer_of_a_larger_vocabulary_is_another_models(tmp_path):
    target = make_target(tmp_path / "target", vocab=128)
    shutil.copy(TINY / "target" / "tokenizer.json", target)
    line = refusal("build", "--target", str(target), "--output", str(tmp_path / "engine"))
    assert "tokenizer.json has 2048 tokens, but config.json a vocabulary of 128: it is another model's" in line
    assert not (tmp_path / "engine").exists()


def test_a_chat_template_that_is_no_text_is_refused(tmp_path):
    """It was built, and found when the engine was loaded; `launch` ended with a traceback."""
    target = make_target(tmp_path / "target")
    (target / "chat_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    says = f"{target}/chat_template.jinja is not UTF-8"
    assert says in refusal("build", "--target", str(target), "--output", str(tmp_path / "engine"))
    flags = ("--method", "none", "--gpu", "h200", "--dry-run")
    assert says in refusal("launch", "--runtime", "vllm", "--target", str(target), *flags)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_half_a_chat_template_is_refused(name, tmp_path):
    """It was built and served, and refused every conversation."""
    target = make_target(tmp_path / "target")
    half = "{% generation %}{{ x }}{% endgeneration %}\n{% if x"
    (target / name).write_text(half if name.endswith("jinja") else json.dumps({"chat_template": half}))
    line = refusal("build", "--target", str(target), "--output", str(tmp_path / "engine"))
    assert f"{target / name}: the chat template's line 2: " in line and line.endswith("; download it again")


@pytest.mark.parametrize("content", ["", "[]", '{"chat_template": "{% if'])
def test_half_a_tokenizers_configuration_is_refused_by_name(content, tmp_path):
    target = make_target(tmp_path / "target")
    (target / "tokenizer_config.json").write_text(content)
    line = refusal("build", "--target", str(target), "--output", str(tmp_path / "engine"))
    assert f"{target}/tokenizer_config.json" in line and "download it again" in line


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_a_link_to_a_file_that_is_gone_is_no_missing_file(name, tmp_path):
    """As in a cache that lost what its links point at: an engine without tokenizer, or without end tokens."""
    target = make_target(tmp_path / "target")
    (target / name).unlink(missing_ok=True)
    (target / name).symlink_to(tmp_path / "gone")
    line = refusal("build", "--target", str(target), "--output", str(tmp_path / "engine"))
    assert f"{target / name} is no file, nor a link to one; download it again" in line


def test_a_signal_while_a_tensor_is_read_is_heard_behind_it(tmp_path, monkeypatch):
    """The library makes an error of its own of what a handler raises inside it."""
    target, done = CheckpointFolder.open(make_target(tmp_path / "target")), []

    class Opened:
        def get_tensor(self, key):
            signal.raise_signal(signal.SIGINT)
            done.append(key)

    monkeypatch.setattr("trtllm_dflash.checkpoint.folder._opened", lambda *_: Opened())
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        target.read(next(iter(target.tensors)))
    assert len(done) == 1 and signal.getsignal(signal.SIGINT) is before
