"""The drafter formats: both give the same drafter, and a config that contradicts itself is refused in one line."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from tests.checkpoints import edit_config, edit_tensors, make_drafter, make_target
from trtllm_dflash.checkpoint.drafter import open_drafter
from trtllm_dflash.checkpoint.drafter_config import default_tap_layers
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.models.drafter import Drafter


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target")


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    return make_drafter(tmp_path / "drafter", target)


@pytest.fixture
def speculators(tmp_path: Path, target: Path) -> Path:
    return make_drafter(tmp_path / "speculators", target, format="speculators", draft_vocab=32)


def refusal(path: Path, target_layers: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_drafter(path, target_layers)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused_with(path: Path, target_layers: int | None = None, /, **changes: Any) -> str:
    return refusal(edit_config(path, lambda config: config.update(changes)), target_layers)


# -- z-lab -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_block_size_is_read_at_the_top_level_and_in_dflash_config(tmp_path, target, nested):
    opened = open_drafter(make_drafter(tmp_path / "drafter", target, block_size=16, nested_block_size=nested))
    assert opened.config.family == "dflash"
    assert opened.config.block_size == 16
    assert opened.config.tap_layers == (0, 2)
    assert opened.config.mask_token_id == 127
    assert opened.config.target_layers == 4
    assert opened.config.draft_vocab_size is None
    assert opened.draft_to_target is None
    assert opened.keys["fc.weight"] == "fc.weight"


def test_attention_biases_are_read(tmp_path, target):
    assert open_drafter(make_drafter(tmp_path / "drafter", target, attention_bias=True)).config.attention_bias


def test_the_drafter_keeps_its_own_rope_scaling(tmp_path, target):
    scaling = {"rope_type": "linear", "factor": 4.0}
    pair = open_pair(target, make_drafter(tmp_path / "drafter", target, rope_scaling=scaling))
    assert pair.drafter is not None
    assert (pair.drafter.config.rope.kind, pair.target_config.rope.kind) == ("linear", "default")


@pytest.mark.parametrize(
    ("target_layers", "layers", "taps"),
    [
        (36, 5, [1, 9, 17, 25, 33]),  # Qwen3-4B, 8B
        (32, 5, [1, 8, 15, 22, 29]),  # Llama 3.1 8B
        (36, 1, [18]),
    ],
)
def test_default_tap_layers_are_the_published_ones(target_layers, layers, taps):
    assert default_tap_layers(target_layers, layers) == taps


def test_a_config_without_tap_layers_gets_the_default(tmp_path):
    target = make_target(tmp_path / "target", layers=8)
    assert open_drafter(make_drafter(tmp_path / "drafter", target, tap_layers=None)).config.tap_layers == (1, 5)


def test_a_trainer_s_model_prefix_is_mapped(tmp_path, drafter):
    plain = open_drafter(drafter)
    weight = Drafter(plain.config).weights()[0]
    expected = plain.reader(1, 0).read(weight, torch.float32)

    def prefix(tensors):
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)

    opened = open_drafter(edit_tensors(drafter, prefix))
    assert opened.keys["fc.weight"] == "model.fc.weight"
    tensor = opened.reader(1, 0).read(weight, torch.float32)
    assert tensor is not None and expected is not None and torch.equal(tensor, expected)


def test_two_block_sizes_are_refused_with_both(drafter):
    edit_config(drafter, lambda config: config["dflash_config"].update(block_size=16))
    assert "block_size is 8 at the top level, but 16 in dflash_config" in refusal(drafter)


def test_a_block_size_in_both_places_is_fine_where_they_agree(drafter):
    edit_config(drafter, lambda config: config["dflash_config"].update(block_size=8))
    assert open_drafter(drafter).config.block_size == 8


def test_a_count_of_tap_layers_that_contradicts_fc_is_refused_with_both(drafter):
    edit_config(drafter, lambda config: config["dflash_config"].update(target_layer_ids=[0, 1, 2]))
    assert "3 tap layers of 64 make 192 columns, but fc.weight has 128" in refusal(drafter)


def test_a_mask_token_outside_the_vocabulary_is_refused_with_both(drafter):
    edit_config(drafter, lambda config: config["dflash_config"].update(mask_token_id=128))
    assert "mask_token_id 128 is outside the vocabulary of 128" in refusal(drafter)


def test_a_tap_layer_outside_its_own_target_is_refused_with_both(drafter):
    edit_config(drafter, lambda config: config["dflash_config"].update(target_layer_ids=[0, 4]))
    assert "tap layer 4 is outside the target's 4 layers" in refusal(drafter)


def test_a_missing_mask_token_is_refused(drafter):
    edit_config(drafter, lambda config: config["dflash_config"].pop("mask_token_id"))
    assert "mask_token_id is missing" in refusal(drafter)


@pytest.mark.parametrize("key", ["block_size", "num_target_layers", "num_hidden_layers", "hidden_size", "rope_theta"])
def test_a_missing_setting_is_named(drafter, key):
    assert f"{key}" in refusal(edit_config(drafter, lambda config: config.pop(key)))


@pytest.mark.parametrize(
    ("changes", "field"), [({"block_size": "many"}, "block_size"), ({"block_size": 1}, "block_size 1")]
)
def test_a_setting_that_is_no_such_number_is_named(drafter, changes, field):
    assert f"config.json: {field}" in refused_with(drafter, **changes)


@pytest.mark.parametrize(
    "changes", [{"layer_types": 1}, {"rope_scaling": 1}, {"dflash_config": [1]}, {"hidden_size": []}]
)
def test_a_setting_of_the_wrong_type_is_one_line(drafter, changes):
    assert f"{drafter}: config.json: " in refused_with(drafter, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_from_anchor": True},
        {"attention_sink_bias": True},
        {"input_embedding_scale": 45.0},
        {"dflash_config": {"mask_token_id": 127, "target_layer_ids": [0, 2], "use_swa": True}},
        {"dflash_config": {"mask_token_id": 127, "target_layer_ids": [0, 2], "causal": True}},
        {"dflash_config": {"mask_token_id": 127, "target_layer_ids": [0, 2], "projector_type": "domino"}},
        {"is_neox_style": False},
    ],
)
def test_a_drafter_that_computes_something_else_is_refused(drafter, changes):
    assert re.search(r"is not supported( here)?; supported:", refused_with(drafter, **changes))


def test_a_plain_model_is_no_drafter(target):
    assert "no DFlash drafter's" in refusal(target)


def test_a_separate_mask_embedding_is_refused(drafter):
    (drafter / "mask_embedding.pt").write_bytes(b"")
    assert "mask_embedding.pt" in refusal(drafter)


def test_missing_and_unexpected_drafter_tensors_are_listed(drafter):
    def spoil(tensors):
        del tensors["hidden_norm.weight"]
        tensors["embed_tokens.weight"] = torch.ones(128, 64)

    message = refusal(edit_tensors(drafter, spoil))
    assert "missing: hidden_norm.weight" in message
    assert "unexpected: embed_tokens.weight" in message


def test_a_drafter_s_own_error_names_its_folder(target, drafter):
    (drafter / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"drafter/model\.safetensors is truncated or damaged"):
        open_pair(target, drafter)


# -- speculators -------------------------------------------------------------------------------------------------------


def test_both_formats_give_the_same_drafter(tmp_path, target, drafter):
    other = make_drafter(tmp_path / "speculators", target, format="speculators")
    ours, theirs = open_pair(target, drafter).drafter, open_pair(target, other).drafter
    assert ours is not None and theirs is not None
    assert ours.config == theirs.config
    for weight in Drafter(ours.config).weights():
        a = ours.reader(1, 0).read(weight, torch.float32)
        b = theirs.reader(1, 0).read(weight, torch.float32)
        assert a is not None and b is not None and torch.equal(a, b)


def test_speculators_tap_layers_are_counted_from_the_embedding(speculators):
    edit_config(speculators, lambda config: config.update(aux_hidden_state_layer_ids=[1, 3]))
    assert open_drafter(speculators, 4).config.tap_layers == (0, 2)


def test_a_config_as_transformers_writes_the_nested_part_is_read(speculators):
    def nest(config):
        old = config["transformer_layer_config"]
        nested = Qwen3Config(**{key: value for key, value in old.items() if key != "model_type"})
        config["transformer_layer_config"] = nested.to_diff_dict()

    before = open_drafter(speculators, 4).config
    assert open_drafter(edit_config(speculators, nest), 4).config == before


def test_a_reduced_vocabulary_maps_draft_ids_to_target_ids(speculators):
    opened = open_drafter(speculators, 4)
    assert opened.config.draft_vocab_size == 32
    assert opened.config.vocab_size == 128
    assert opened.draft_to_target is not None
    assert opened.draft_to_target.dtype == torch.int32
    # d2t holds offsets: target id = draft id + d2t[draft id]
    expected = torch.arange(32) + opened.folder.read("d2t")
    assert torch.equal(opened.draft_to_target.long(), expected)
    assert torch.equal(expected, opened.folder.read("t2d").nonzero()[:, 0])


def test_a_reduced_vocabulary_brings_its_own_head(speculators):
    opened = open_drafter(speculators, 4)
    [head] = [w for w in Drafter(opened.config).weights() if w.name == "drafter.lm_head.weight"]
    tensor = opened.reader(2, 1).read(head, torch.float32)
    assert tensor is not None and tensor.shape == (16, 64)


def test_copies_of_the_target_s_tensors_are_ignored_or_absent(tmp_path, target):
    path = make_drafter(tmp_path / "full", target, format="speculators")
    assert open_drafter(path, 4).config.draft_vocab_size is None

    def drop(tensors):
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    assert open_drafter(edit_tensors(path, drop), 4).draft_to_target is None


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_copy_that_cannot_be_the_target_s_is_refused(tmp_path, target, name):
    path = make_drafter(tmp_path / "full", target, format="speculators")
    edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(100, 64)}))
    assert f"{name} is [100, 64], but the target's is [128, 64]" in refusal(path, 4)


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_missing_vocabulary_map_is_refused(speculators, name):
    edit_tensors(speculators, lambda tensors: tensors.pop(name))
    assert f"{name} is missing, but draft_vocab_size 32 needs it" in refusal(speculators, 4)


def test_a_map_of_absolute_ids_is_refused(speculators):
    edit_tensors(speculators, lambda tensors: tensors["d2t"].add_(torch.arange(32)))
    assert "d2t" in refusal(speculators, 4)


def test_a_map_out_of_the_vocabulary_is_refused(speculators):
    edit_tensors(speculators, lambda tensors: tensors["d2t"].fill_(128))
    assert "d2t leads outside the vocabulary of 128" in refusal(speculators, 4)


def test_a_misshapen_map_is_refused(speculators):
    edit_tensors(speculators, lambda tensors: tensors.update(d2t=torch.zeros(31, dtype=torch.int64)))
    assert "d2t is [31] I64 instead of [32] I64" in refusal(speculators, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"speculators_model_type": "eagle3"},
            "speculators_model_type 'eagle3' is not supported; supported: dflash, dflash2, dspark",
        ),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids names 0, the embedding"),
        ({"aux_hidden_state_layer_ids": "1,2"}, "aux_hidden_state_layer_ids '1,2' is not a list"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"block_size": None}, "block_size is missing"),
        ({"target_hidden_size": 128}, "target_hidden_size 128 differs from hidden_size 64"),
        ({"draft_vocab_size": 129}, "draft_vocab_size 129 exceeds vocab_size 128"),
        ({"transformer_layer_config": None}, "transformer_layer_config is missing"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window None is not a positive number"),
        ({"speculators_model_type": "dspark"}, "sample_from_anchor is missing"),
        ({"speculators_model_type": "dflash2"}, "sliding_window_non_causal is missing"),
    ],
)
def test_a_speculators_config_that_we_cannot_draft_with_is_refused(speculators, changes, message):
    assert message in refused_with(speculators, 4, **changes)


def test_the_number_of_target_layers_comes_from_the_target(speculators):
    assert "does not say how many layers the target has" in refusal(speculators)
