"""`export`: the folders that it writes are those that the engine could have been built from."""

import json
import shlex
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import make_drafter, make_target
from tests.conftest import TINY, build_tiny, refusal, succeeds
from trtllm_dflash.build import export as export_module
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.export import export
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.checkpoint.drafter import open_drafter
from trtllm_dflash.engine.directory import digest, read_config, weights_file
from trtllm_dflash.errors import EngineError


def build_from(folder, output, **settings):
    values = {"name": "mine", "target": str(folder / "target"), "precision": "fp32", **settings}
    if (folder / "drafter").is_dir():
        values.setdefault("drafter", str(folder / "drafter"))
    build(BuildSettings.model_validate(values), output)
    return output


def weights_of(engine):
    return [digest(engine / weights_file(rank)) for rank in range(read_config(engine).tp)]


def comes_back(engine, folder, **settings):
    """Exports an engine and builds it again; the weights must be the same bytes."""
    export(engine, folder / "export")
    config = read_config(engine)
    again = build_from(folder / "export", folder / "again", tp=config.tp, precision=config.precision, **settings)
    assert weights_of(again) == weights_of(engine)
    assert read_config(again).model_dump(include={"target", "drafter"}) == config.model_dump(
        include={"target", "drafter"}
    )
    return folder / "export"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_shipped_pair_comes_back_bit_by_bit(tmp_path, precision):
    engine = build_tiny(tmp_path / "engine", precision=precision)
    folder = comes_back(engine, tmp_path)
    for role in ("target", "drafter"):
        published, written = (
            load_file(TINY / role / "model.safetensors"),
            load_file(folder / role / "model.safetensors"),
        )
        assert published.keys() == written.keys()
        for name, tensor in published.items():
            assert torch.equal(tensor.to(written[name].dtype), written[name]), name
        raw = json.loads((TINY / role / "config.json").read_text())
        raw["dtype"] = {"fp32": "float32", "bf16": "bfloat16"}[precision]
        assert json.loads((folder / role / "config.json").read_text()) == raw


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tp", [2, 4])  # with 4, ranks share key/value heads
def test_ranks_are_put_together(tmp_path, family, tp):
    target = make_target(tmp_path / "target", family, attention_bias=family == "qwen3", tied=family == "llama")
    make_drafter(tmp_path / "drafter", target)
    comes_back(build_from(tmp_path, tmp_path / "engine", tp=tp), tmp_path)


def test_a_drafter_with_a_vocabulary_of_its_own_comes_back_in_speculators_format(tmp_path):
    engine = build_tiny(tmp_path / "engine", draft_vocab=512)
    folder = comes_back(engine, tmp_path)
    raw = json.loads((folder / "drafter" / "config.json").read_text())
    assert raw["speculators_model_type"] == "dflash" and raw["aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 15
    assert raw["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    with safe_open(folder / "drafter" / "model.safetensors", framework="pt") as tensors:
        assert {"d2t", "t2d", "lm_head.weight"} <= set(tensors.keys())


def test_a_drafter_that_came_in_speculators_format_comes_back_in_it(tmp_path):
    target = make_target(tmp_path / "target")
    make_drafter(tmp_path / "drafter", target, format="speculators", draft_vocab=64)
    comes_back(build_from(tmp_path, tmp_path / "engine"), tmp_path)


def test_plain_targets_and_large_ones_are_exported(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "_SHARD", 20_000)
    make_target(tmp_path / "target")
    folder = comes_back(build_from(tmp_path, tmp_path / "engine"), tmp_path)
    assert {entry.name for entry in folder.iterdir()} == {"target"}
    names = {file.name for file in (folder / "target").glob("*.safetensors")}
    assert len(names) > 2 and f"model-00001-of-{len(names):05}.safetensors" in names
    index = json.loads((folder / "target" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == names


def test_transformers_loads_the_target_and_says_the_same(tmp_path, tiny_engine):
    export(tiny_engine, tmp_path / "export")
    folders = TINY / "target", tmp_path / "export" / "target"
    ids = AutoTokenizer.from_pretrained(folders[1])("Once upon a time", return_tensors="pt").input_ids
    logits = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits for folder in folders]
    assert torch.equal(*logits)


def test_no_code_is_named_in_what_is_written(tmp_path):
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target)
    raw = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**raw, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}))
    export(build_from(tmp_path, tmp_path / "engine"), tmp_path / "export")
    written = json.loads((tmp_path / "export" / "drafter" / "config.json").read_text())
    assert "auto_map" not in written and written["architectures"] == ["DFlashDraftModel"]
    assert open_drafter(tmp_path / "export" / "drafter").config.tap_layers == (0, 2)


def test_the_command_says_how_to_serve_it_and_replaces_only_exports(tmp_path, tiny_engine):
    output = tmp_path / "export"
    output.mkdir()  # an empty folder is nothing that would be replaced
    said = succeeds("export", "--engine", tiny_engine, "--output", output)
    assert f"launch --runtime vllm --target {output}/target --drafter {output}/drafter" in said
    assert "exists; --force replaces it" in refusal("export", "--engine", tiny_engine, "--output", output)
    succeeds("export", "--engine", tiny_engine, "--output", output, "--force")
    (output / "mine").touch()
    line = refusal("export", "--engine", tiny_engine, "--output", output, "--force")
    assert "exists and is not an export; remove it yourself" in line
    assert {entry.name for entry in tmp_path.iterdir()} == {"export"}  # nothing half-written


def test_neither_folder_may_hold_the_other(tmp_path, tiny_engine):
    engine = shutil.copytree(tiny_engine, tmp_path / "all" / "target")
    (tmp_path / "link").symlink_to(engine)
    for output in (engine / "pair", tmp_path / "link" / "a" / "pair"):
        line = refusal("export", "--engine", engine, "--output", output)
        assert f"{output}: lies in the engine, and would go when that is built again; use another --output" in line
    files = {file.name for file in engine.iterdir()}
    line = refusal("export", "--engine", engine, "--output", tmp_path / "all", "--force")
    assert "holds the engine that is read; use another --output" in line
    assert {file.name for file in engine.iterdir()} == files == {file.name for file in tiny_engine.iterdir()}


@pytest.mark.parametrize("command", ["export", "deploy"])
def test_the_line_that_serves_it_can_be_pasted(command, tmp_path, tiny_engine):
    output = tmp_path / "it's here; really"
    said = succeeds(command, "--engine", tiny_engine, "--output", output)
    words = shlex.split(said.partition("serve it: ")[2])
    folders = {"export": [f"{output}/target", f"{output}/drafter"], "deploy": [f"{tiny_engine}", f"{output}"]}[command]
    assert words[0] == "trtllm-dflash" and [word for word in words if "/" in word] == folders


def test_the_exported_pair_is_launched(tmp_path, tiny_engine):
    export(tiny_engine, tmp_path / "pair")
    folders = ("--target", tmp_path / "pair" / "target", "--drafter", tmp_path / "pair" / "drafter")
    for runtime in ("vllm", "sglang", "tensorrt-llm"):
        script = succeeds("launch", "--runtime", runtime, *folders, "--gpu", "h200", "--dry-run")
        assert str(tmp_path / "pair" / "target") in script and str(tmp_path / "pair" / "drafter") in script


def test_what_these_folders_cannot_hold_is_refused(tmp_path):
    fp8 = build_tiny(tmp_path / "fp8", drafter_precision="fp8")
    target = build_tiny(tmp_path / "fp8-target", precision="fp8")
    for engine in (fp8, target):
        assert "is stored as FP8, which is not written back" in refusal(
            "export", "--engine", engine, "--output", tmp_path / "x"
        )
    caches = build_tiny(tmp_path / "fp8-caches", kv="fp8")
    assert "its caches are FP8" in refusal("export", "--engine", caches, "--output", tmp_path / "x")
    windows = build_tiny(tmp_path / "windows", draft_window=64)
    assert "windows of --draft-window" in refusal("export", "--engine", windows, "--output", tmp_path / "x")
    old = build_tiny(tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    del config["files"]["target_config.json"]
    (old / "config.json").write_text(json.dumps(config))
    assert "build it again: --force" in refusal("export", "--engine", old, "--output", tmp_path / "x")
    config["backend"] = "tensorrt"
    (old / "config.json").write_text(json.dumps(config))
    assert "inside TensorRT plans" in refusal("export", "--engine", old, "--output", tmp_path / "x")
    assert "not an engine directory" in refusal("export", "--engine", tmp_path, "--output", tmp_path / "x")


def test_an_export_that_would_not_come_back_is_not_written(tmp_path, tiny_engine, monkeypatch):
    """Whatever a later family does to its tensors: what cannot be undone exactly is refused, not written wrong."""
    whole = export_module._unsliced
    monkeypatch.setattr(export_module, "_unsliced", lambda *args: whole(*args).roll(1))
    with pytest.raises(EngineError, match=r"cannot be exported: .* of rank 0 would not be read as it is"):
        export(tiny_engine, tmp_path / "export")
    assert not list(tmp_path.iterdir())


def test_force_replaces_the_export_behind_a_link(tmp_path, tiny_engine):
    link = tmp_path / "link"
    link.symlink_to("export")
    export(tiny_engine, link)
    (tmp_path / "export" / "target" / "tokenizer.json").unlink()
    export(tiny_engine, link, force=True)
    assert link.is_symlink() and (tmp_path / "export" / "target" / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "link"]
