"""Folders, slicing and pairs: what is read is what was saved, and what does not fit is refused in one line."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import YARN, edit_config, edit_tensors, make_drafter, make_target, split_into_shards
from trtllm_dflash.checkpoint.folder import CheckpointFolder
from trtllm_dflash.checkpoint.hub import resolve
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.checkpoint.ranks import check_tp
from trtllm_dflash.checkpoint.slicing import RankReader
from trtllm_dflash.errors import CheckpointError, DFlashError, PairError, SettingsError
from trtllm_dflash.models import build_target, read_target_config
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import Drafter
from trtllm_dflash.models.weights import Part, Split, Weight, unit_range

NORM = "model.layers.0.input_layernorm.weight"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def refusal(path: Path, drafter: Path | None = None, kind: type[DFlashError] = CheckpointError) -> str:
    """The message with which a pair is refused; always one line."""
    with pytest.raises(kind) as caught:
        open_pair(path, drafter)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"attention_bias": True}, {"rope_scaling": LLAMA3}])
def test_every_variant_that_transformers_saves_is_accepted(tmp_path, family, options):
    pair = open_pair(make_target(tmp_path, family, **options))
    assert pair.target_config.family == family
    assert pair.target_config.tied_embeddings == options.get("tied", False)
    assert pair.target_config.rope.kind == ("llama3" if "rope_scaling" in options else "default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tensors_are_accepted(tmp_path, dtype):
    assert open_pair(make_target(tmp_path, dtype=dtype)).drafter is None


def test_random_targets_write_text_that_varies(tmp_path):
    for tied in (False, True):
        model = AutoModelForCausalLM.from_pretrained(make_target(tmp_path / str(tied), tied=tied))
        text = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=40, do_sample=False, pad_token_id=0)
        assert len(set(text[0].tolist())) > 15


def test_shards_read_as_one_file_does(tmp_path):
    whole = CheckpointFolder.open(make_target(tmp_path / "whole"))
    shards = CheckpointFolder.open(make_target(tmp_path / "shards", shards=3))
    assert len({info.file for info in shards.tensors.values()}) == 3
    assert whole.tensors.keys() == shards.tensors.keys()
    for key in whole.tensors:
        assert torch.equal(whole.read(key), shards.read(key))


def test_shards_may_be_links_as_in_the_hugging_face_cache(tmp_path):
    make_target(tmp_path / "blobs", shards=2)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert open_pair(tmp_path / "snapshot").target_config.layers == 4


def test_a_slice_equals_the_same_rows_or_columns_of_the_tensor(tmp_path):
    folder = CheckpointFolder.open(make_target(tmp_path))
    key = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(folder.read(key, 0, 8, 24), folder.read(key)[8:24])
    assert torch.equal(folder.read(key, 1, 8), folder.read(key)[:, 8:])


def test_rotary_buffers_and_a_redundant_tied_head_are_ignored(tmp_path):
    make_target(tmp_path, tied=True)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    open_pair(edit_tensors(tmp_path, add))


def test_null_settings_mean_the_default(tmp_path):
    make_target(tmp_path)
    open_pair(edit_config(tmp_path, lambda config: config.update(layer_types=None, attention_bias=None)))


def test_a_missing_folder_is_named(tmp_path):
    assert refusal(tmp_path / "nowhere") == (
        f"{tmp_path}/nowhere is not a folder; pass a checkpoint folder that has a config.json"
    )


def test_an_adapter_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert refusal(tmp_path) == (
        f"{tmp_path} is an adapter (adapter_config.json): LoRA is not supported; merge it into its model, and pass that"
    )


def test_a_missing_config_is_named(tmp_path):
    (make_target(tmp_path) / "config.json").unlink()
    assert refusal(tmp_path).startswith(f"{tmp_path}/config.json is missing")


@pytest.mark.parametrize("text", ["{", "", "[1]", '{"a": \n nul}', "\udcff", pytest.param("[" * 100_000, id="nested")])
def test_a_config_that_is_not_json_is_named(tmp_path, text):
    (make_target(tmp_path) / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert f"{tmp_path}/config.json" in refusal(tmp_path)


def test_an_index_that_is_not_json_is_named(tmp_path):
    (make_target(tmp_path, shards=2) / "model.safetensors.index.json").write_text("{")
    assert f"{tmp_path}/model.safetensors.index.json is not valid JSON" in refusal(tmp_path)


def test_an_index_without_a_map_is_named(tmp_path):
    (make_target(tmp_path, shards=2) / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json has no weight_map" in refusal(tmp_path)


def test_an_unknown_family_is_named(tmp_path):
    make_target(tmp_path)
    message = refusal(edit_config(tmp_path, lambda config: config.update(model_type="mamba")))
    assert str(tmp_path) in message
    assert "model_type 'mamba' is not supported; supported: qwen3, llama" in message


def test_a_missing_or_wrong_setting_is_named(tmp_path):
    make_target(tmp_path)
    assert "hidden_size: Input should be greater than 0" in refusal(
        edit_config(tmp_path, lambda config: config.update(hidden_size=-1))
    )
    assert "'hidden_size' is missing" in refusal(edit_config(tmp_path, lambda config: config.pop("hidden_size")))


@pytest.mark.parametrize("value", ["eight", 0])
@pytest.mark.parametrize("key", ["num_hidden_layers", "max_position_embeddings"])
def test_a_wrong_setting_is_named_as_the_file_has_it(tmp_path, key, value):
    make_target(tmp_path)
    message = refusal(edit_config(tmp_path, lambda config: config.update({key: value})))
    assert f"{tmp_path}: config.json: {key}: Input should be " in message


@pytest.mark.parametrize(
    "changes", [{"model_type": []}, {"rope_parameters": 1}, {"layer_types": 1}, {"vocab_size": "x"}]
)
def test_a_setting_of_the_wrong_type_is_one_line(tmp_path, changes):
    make_target(tmp_path)
    assert f"{tmp_path}: config.json: " in refusal(edit_config(tmp_path, lambda config: config.update(changes)))


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *[({"rms_norm_eps": value}, "rms_norm_eps") for value in (NAN, -1, 0)],
        *[({"rope_parameters": {"rope_theta": value}}, "rope_theta") for value in (NAN, -1, 0)],
        *[({"rope_parameters": {"rope_type": "linear", "factor": value}}, "factor") for value in (NAN, -1, 0)],
        ({"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": -5}}, "original_max_position_embeddings"),
        ({"rope_parameters": {**YARN, "beta_fast": -1}}, "beta_fast"),
        ({"rope_parameters": {**YARN, "beta_slow": NAN}}, "beta_slow"),
    ],
)
def test_a_number_that_nothing_is_computed_with_is_refused(tmp_path, changes, field):
    """It would fail when the first token is generated, or make every logit NaN."""
    make_target(tmp_path)
    message = refusal(edit_config(tmp_path, lambda config: config.update(changes)))
    assert f"{tmp_path}: config.json: {field}: Input should be " in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.5}, "rotates 8 of a head's 16 dimensions is not supported; llama rotates all"),
        ({"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}, "llama rotates all"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
            "rope_parameters of kinds of layers (full_attention) is not supported here",
        ),
        ({"is_causal": False}, "is_causal false is not supported"),  # an embedding model's
    ],
)
def test_settings_that_a_family_does_not_compute_are_refused(tmp_path, changes, message):
    make_target(tmp_path, "llama", layers=1)
    assert message in refusal(edit_config(tmp_path, lambda config: config.update(changes)))


@pytest.mark.parametrize("keep", [0, 5, 100, -4])
def test_a_truncated_file_is_named(tmp_path, keep):
    file = make_target(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{file} is truncated or damaged" in refusal(tmp_path)


def test_weights_that_may_not_be_read_are_not_called_damaged(tmp_path, monkeypatch):
    file = make_target(tmp_path) / "model.safetensors"
    opened = Path.open

    def forbidden(path: Path, *args: Any, **options: Any) -> Any:
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    def missing(*_: object, **options: object) -> None:
        raise FileNotFoundError(f"No such file or directory: {file}")  # what safetensors says then

    monkeypatch.setattr(Path, "open", forbidden)
    monkeypatch.setattr("trtllm_dflash.checkpoint.folder.safe_open", missing)
    assert refusal(tmp_path) == f"{file} cannot be read (Permission denied)"


def test_a_missing_shard_is_named(tmp_path):
    shard = make_target(tmp_path, shards=3) / "model-00002-of-00003.safetensors"
    shard.unlink()
    assert refusal(tmp_path).startswith(f"{shard} is missing, but model.safetensors.index.json names it")


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path):
    shard = make_target(tmp_path, shards=2) / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    name = next(iter(tensors))
    del tensors[name]
    save_file(tensors, shard)
    assert f"{shard} does not hold {name}" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..\\model.safetensors", "C:model.safetensors"]
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, name):
    index = make_target(tmp_path / "inner", shards=2) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NORM: name}}))
    assert f"{index} names a file outside its folder: {name}" in refusal(tmp_path / "inner")


def test_pickle_weights_are_refused(tmp_path):
    (make_target(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert "pickle weights only (pytorch_model.bin)" in message
    assert "safetensors" in message


def test_a_folder_without_weights_is_named(tmp_path):
    (make_target(tmp_path) / "model.safetensors").unlink()
    assert f"{tmp_path} holds no weights" in refusal(tmp_path)


def test_missing_unexpected_misshapen_and_mistyped_tensors_are_all_listed_in_one_line(tmp_path):
    make_target(tmp_path)

    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.ones(2)
        tensors[NORM] = torch.ones(65)
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].double()

    message = refusal(edit_tensors(tmp_path, spoil))
    assert message == (
        f"{tmp_path}: tensors do not fit config.json; missing: model.norm.weight; unexpected: model.extra.weight; "
        f"misshapen: {NORM} [65] instead of [64]; "
        "dtype other than F32, BF16, F16: model.layers.1.mlp.up_proj.weight F64"
    )


def test_integer_weights_are_refused(tmp_path):
    make_target(tmp_path)
    message = refusal(edit_tensors(tmp_path, lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int8)})))
    assert f"{NORM} I8" in message


def test_a_long_list_is_cut_short(tmp_path):
    make_target(tmp_path)
    message = refusal(edit_config(tmp_path, lambda config: config.update(num_hidden_layers=3)))
    assert "... and 7 more" in message  # eleven tensors of layer 3
    assert len(message) < 400


def test_a_tensor_that_is_not_there_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match="tensor nothing is missing"):
        CheckpointFolder.open(make_target(tmp_path)).read("nothing")


def test_a_file_that_vanishes_after_opening_is_named(tmp_path):
    folder = CheckpointFolder.open(make_target(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"cannot read tensor {NORM}"):
        folder.read(NORM)


# -- slicing -----------------------------------------------------------------------------------------------------------


def test_one_rank_holds_every_tensor_whole(tmp_path):
    folder = CheckpointFolder.open(make_target(tmp_path, attention_bias=True))
    for weight in build_target(read_target_config(folder.config)).weights():
        tensor = RankReader(folder, 1, 0).read(weight, torch.float32)
        assert tensor is not None
        assert torch.equal(tensor, torch.cat([folder.read(part.key) for part in weight.parts]))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_ranks_slices_make_up_the_whole(tmp_path, tp):
    options: dict[str, Any] = {"heads": 8, "kv_heads": 8, "head_size": 8, "attention_bias": True}
    target = make_target(tmp_path / "target", **options)
    drafter = make_drafter(tmp_path / "drafter", target, **options)
    pair = open_pair(target, drafter)
    assert pair.drafter is not None
    models = [
        (pair.target_folder, build_target(pair.target_config).weights()),
        (pair.drafter.folder, Drafter(pair.drafter.config).weights()),
    ]
    for folder, weights in models:
        for part in (part for weight in weights for part in weight.parts):
            alone = Weight("alone", (part,))
            slices = [RankReader(folder, tp, rank).read(alone, torch.float32) for rank in range(tp)]
            held = [piece for piece in slices if piece is not None]
            whole = folder.read(part.key)
            if part.split is Split.WHOLE:
                assert all(torch.equal(piece, whole) for piece in held) and len(held) == tp
            elif part.split is Split.FIRST_RANK:
                assert slices[0] is not None and torch.equal(slices[0], whole) and len(held) == 1
            else:
                assert torch.equal(torch.cat(held, 0 if part.split is Split.ROWS else 1), whole)
                assert len({piece.shape for piece in held}) == 1


@pytest.mark.parametrize("tp", [4, 8])
def test_neighbouring_ranks_share_a_key_value_head(tmp_path, tp):
    folder = CheckpointFolder.open(make_target(tmp_path, heads=8, kv_heads=2))
    weights = build_target(read_target_config(folder.config)).weights()
    [qkv] = [weight for weight in weights if weight.name == "model.layers.0.self_attn.qkv_proj.weight"]
    q, k, v = (folder.read(part.key) for part in qkv.parts)
    for rank in range(tp):
        first, last = unit_range(8, tp, rank)
        shared = rank * 2 // tp
        rows = slice(shared * 16, shared * 16 + 16)
        expected = torch.cat([q[first * 16 : last * 16], k[rows], v[rows]])
        tensor = RankReader(folder, tp, rank).read(qkv, torch.float32)
        assert tensor is not None and torch.equal(tensor, expected)
        # The query heads of a rank must be those that the shared head serves.
        assert all(head * 2 // 8 == shared for head in range(first, last))


def test_an_output_bias_is_on_the_first_rank_alone(tmp_path):
    folder = CheckpointFolder.open(make_target(tmp_path, attention_bias=True))
    bias = Weight("bias", (Part("model.layers.0.self_attn.o_proj.bias", (64,), Split.FIRST_RANK),))
    assert RankReader(folder, 2, 0).read(bias, torch.float32) is not None
    assert RankReader(folder, 2, 1).read(bias, torch.float32) is None


def test_weights_are_converted_to_the_asked_type_and_own_their_memory(tmp_path):
    folder = CheckpointFolder.open(make_target(tmp_path))
    norm = Weight("norm", (Part(NORM, (64,)),))
    halved = RankReader(folder, 1, 0).read(norm, torch.bfloat16)
    assert halved is not None and torch.equal(halved, folder.read(NORM).bfloat16())
    own = RankReader(folder, 1, 0).read(norm, torch.float32)
    assert own is not None
    own.zero_()
    assert folder.read(NORM).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_named(tmp_path, value):
    make_target(tmp_path)
    folder = CheckpointFolder.open(edit_tensors(tmp_path, lambda tensors: tensors[NORM].fill_(value)))
    with pytest.raises(CheckpointError) as caught:
        RankReader(folder, 1, 0).read(Weight("norm", (Part(NORM, (64,)),)), torch.bfloat16)
    assert f"tensor {NORM} holds NaN or infinity" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_too_large_for_the_precision_is_named(tmp_path):
    make_target(tmp_path)
    folder = CheckpointFolder.open(edit_tensors(tmp_path, lambda tensors: tensors[NORM].fill_(1e6)))
    with pytest.raises(CheckpointError, match=f"{NORM} does not fit torch.float16"):
        RankReader(folder, 1, 0).read(Weight("norm", (Part(NORM, (64,)),)), torch.float16)


def config(tmp_path: Path, **options: int) -> DecoderConfig:
    return open_pair(make_target(tmp_path, **options)).target_config  # type: ignore[arg-type]


def test_tp_that_divides_everything_is_accepted(tmp_path):
    plain = config(tmp_path, heads=8, kv_heads=2)
    for tp in (1, 2, 4, 8):
        check_tp(tp, plain)


@pytest.mark.parametrize(
    ("options", "tp", "message"),
    [
        ({}, 3, "--tp 3 does not divide the 4 query heads; possible: 1, 2, 4"),
        ({}, 8, "--tp 8 does not divide the 4 query heads; possible: 1, 2, 4"),
        ({}, 0, "--tp 0 does not divide the 4 query heads; possible: 1, 2, 4"),
        ({"intermediate": 98}, 4, "--tp 4 does not divide the 98 FFN columns; possible: 1, 2"),
        ({"vocab": 130}, 4, "--tp 4 does not divide the 130 rows of the vocabulary; possible: 1, 2"),
        (
            {"heads": 12, "kv_heads": 3, "vocab": 132},
            2,
            "--tp 2 does not divide the 3 key/value heads, nor they it; possible: 1, 3, 6, 12",
        ),
        (
            {"heads": 12, "kv_heads": 3, "vocab": 132},
            8,
            "--tp 8 does not divide the 12 query heads, nor the 3 key/value heads, nor they it; possible: 1, 3, 6, 12",
        ),
    ],
)
def test_tp_that_does_not_divide_names_what_would(tmp_path, options, tp, message):
    with pytest.raises(SettingsError) as caught:
        check_tp(tp, config(tmp_path, **options))
    assert str(caught.value) == message


def test_tp_must_divide_the_drafter_too(tmp_path):
    target = make_target(tmp_path / "target", heads=8)
    pair = open_pair(target, make_drafter(tmp_path / "drafter", target, heads=4))
    assert pair.drafter is not None
    with pytest.raises(SettingsError, match=r"^--tp 8 does not divide the drafter's 4 query heads; possible: 1, 2, 4$"):
        check_tp(8, pair.target_config, pair.drafter.config)


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_a_pair_that_belongs_together_is_opened(tmp_path):
    target = make_target(tmp_path / "target")
    pair = open_pair(target, make_drafter(tmp_path / "drafter", target))
    assert pair.drafter is not None
    assert pair.drafter.config.target_layers == pair.target_config.layers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 32}, "hidden size 32, but {target} has 64"),
        ({"vocab": 256}, "vocabulary 256, but {target} has 128"),
        ({"layers": 6}, "number of layers 6, but {target} has 4"),
    ],
)
def test_a_drafter_for_another_target_is_refused_with_both_values(tmp_path, options, message):
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", make_target(tmp_path / "other", **options))
    assert refusal(target, drafter, PairError).endswith(message.format(target=target))


def test_tap_layers_outside_the_target_are_refused_with_both_values(tmp_path):
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target, format="speculators", tap_layers=(0, 4))
    assert refusal(target, drafter, PairError) == f"{drafter} taps layer 4, but the last layer of {target} is 3"


# -- where checkpoints come from -------------------------------------------------------------------------------------


def fail_with(monkeypatch, online: Exception, cached: Exception | None = None) -> None:
    """Makes the Hugging Face client raise: `cached` when asked for its cache alone, else `online`."""

    def snapshot_download(repository: str, *, local_files_only: bool, **_: object) -> str:
        raise (cached or errors.LocalEntryNotFoundError("not here")) if local_files_only else online

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    # A stand-in: the client's releases have had three HTTP libraries.
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("two\nlines", response=response)


def unresolved(name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_local_folder_is_used_as_it_is(tmp_path):
    assert resolve(str(tmp_path)) == tmp_path


def test_the_cache_is_asked_first_and_only_for_what_is_needed(monkeypatch, tmp_path):
    make_target(tmp_path)
    calls = []

    def snapshot_download(repository: str, **options: Any) -> str:
        calls.append((repository, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/model") == tmp_path
    [(repository, options)] = calls
    assert repository == "org/model"
    assert options["local_files_only"] is True
    assert not any(pattern in options["allow_patterns"] for pattern in ("*", "*.bin", "*.pt"))


def test_what_is_not_cached_is_downloaded(monkeypatch):
    def snapshot_download(repository: str, *, local_files_only: bool, **_: object) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not here")
        return "/cache/snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/model") == Path("/cache/snapshot")


@pytest.mark.parametrize("is_online", [True, False])
def test_a_cache_without_a_tokenizer_is_completed_where_there_is_a_network(is_online, monkeypatch, tmp_path):
    make_target(tmp_path)

    def snapshot_download(repository: str, *, local_files_only: bool, **_: object) -> str:
        if not local_files_only:
            if not is_online:
                raise http_error(errors.HfHubHTTPError, 503)
            (tmp_path / "tokenizer.json").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/drafter") == tmp_path and not (tmp_path / "tokenizer.json").exists()
    assert resolve("org/model", with_tokenizer=True) == tmp_path
    assert (tmp_path / "tokenizer.json").exists() is is_online


def test_a_gated_repository_says_where_to_accept(monkeypatch):
    fail_with(monkeypatch, http_error(errors.GatedRepoError, 403))
    message = unresolved("org/model")
    assert "https://huggingface.co/org/model" in message
    assert "HF_TOKEN" in message


def test_an_unknown_repository_is_named(monkeypatch):
    fail_with(monkeypatch, http_error(errors.RepositoryNotFoundError, 404))
    assert unresolved("org/model").startswith("org/model is neither a folder nor a repository")


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "model-00002-of-00003.safetensors"])
def test_a_cached_part_of_a_repository_is_completed(lost, monkeypatch, tmp_path):
    make_target(tmp_path, shards=3 if lost.startswith("model-") else 1)
    (tmp_path / lost).rename(tmp_path / "elsewhere")
    asked = []

    def snapshot_download(_: str, *, local_files_only: bool, **__: object) -> str:
        asked.append(local_files_only)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/model") == tmp_path
    assert asked == [True, False]
    (tmp_path / "elsewhere").rename(tmp_path / lost)
    resolve("org/model")
    assert asked == [True, False, True]


def test_without_a_network_the_ways_out_are_named(monkeypatch):
    fail_with(monkeypatch, errors.LocalEntryNotFoundError("no\nnetwork"))
    message = unresolved("org/model")
    assert "org/model is no folder here and not in the Hugging Face cache" in message
    assert "`hf download org/model`" in message
    assert "local folder" in message


@pytest.mark.parametrize("error", [http_error(errors.HfHubHTTPError, 503), OSError("disk\nfull"), RuntimeError()])
def test_any_other_failure_of_a_download_is_one_line(monkeypatch, error):
    fail_with(monkeypatch, error)
    assert unresolved("org/model").startswith("org/model cannot be downloaded (")


@pytest.mark.parametrize("name", ["./model", "/no/such/model", "~/no-such-model", "a/b/c", "model/"])
def test_a_path_that_does_not_exist_never_asks_the_network(monkeypatch, name):
    fail_with(monkeypatch, AssertionError("asked"), AssertionError("asked"))
    assert unresolved(name).startswith(f"{name} does not exist")


def test_a_name_that_is_too_long_for_a_folder_is_refused():
    assert unresolved("x" * 300) == f"{'x' * 300} cannot be read (File name too long)"


def test_a_file_is_not_a_checkpoint(tmp_path):
    file = make_target(tmp_path) / "model.safetensors"
    assert unresolved(str(file)) == f"{file} is a file; pass the checkpoint's folder"


def test_a_name_that_no_repository_can_have_is_refused():
    assert "neither a folder nor a Hugging Face repository name" in unresolved("what is this?")


def test_package_names_are_folders_of_the_installed_package():
    assert (resolve("package:models") / "qwen3.py").is_file()
    assert "package:nowhere is not in this installation" in unresolved("package:nowhere")


def test_splitting_keeps_every_tensor(tmp_path):
    before = CheckpointFolder.open(make_target(tmp_path)).tensors.keys()
    split_into_shards(tmp_path, 4)
    assert CheckpointFolder.open(tmp_path).tensors.keys() == before
