"""The engine directory: written whole or not at all, and loaded only as it was built."""

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import edit_config, edit_tensors, make_drafter, make_target
from tests.conftest import TINY, refusal, run, succeeds
from tests.processes import start
from tests.waiting import PATIENCE
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build import planning
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.engine.directory import load_weights, read_config, written_aside
from trtllm_dflash.errors import EngineError


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    make_drafter(folder / "drafter", make_target(folder / "target"), block_size=8)
    return folder


@pytest.fixture
def pair(checkpoints) -> list[str]:
    """The flags of `build` for a small random pair."""
    return ["--target", str(checkpoints / "target"), "--drafter", str(checkpoints / "drafter"), "--precision", "fp32"]


@pytest.fixture(scope="module")
def intact(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact") / "engine"
    build(settings(checkpoints), folder)
    return folder


@pytest.fixture
def engine(intact, tmp_path) -> Path:
    """An engine to break."""
    return Path(shutil.copytree(intact, tmp_path / "engine"))


def settings(checkpoints: Path, **others: object) -> BuildSettings:
    folders = {"target": str(checkpoints / "target"), "drafter": str(checkpoints / "drafter")}
    return BuildSettings.model_validate({"name": "small", "precision": "fp32", "max_seq_len": 64, **folders, **others})


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def load_refusal(engine: Path) -> str:
    with pytest.raises(EngineError) as caught:
        LLM.load(engine, "cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_build_makes_each_choice_once(checkpoints, tmp_path, monkeypatch):
    spies = {name: Mock(wraps=getattr(planning, name)) for name in ("choose_precision", "choose_caches")}
    for name, spy in spies.items():
        monkeypatch.setattr(planning, name, spy)
    build(settings(checkpoints), tmp_path / "engine")
    assert {name: spy.call_count for name, spy in spies.items()} == {"choose_precision": 1, "choose_caches": 1}


# -- what is written -------------------------------------------------------------------------------------------------


def test_an_engine_holds_its_ranks_tokenizer_and_chat_template_and_says_so(tiny_engine):
    config = json.loads((tiny_engine / "config.json").read_text())
    assert config["schema_version"] == 1
    names = {"rank0.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names <= config["files"].keys()
    assert {file.name for file in tiny_engine.iterdir()} == {*config["files"], "config.json"}


def test_every_digest_is_the_file_s_own(tiny_engine):
    for name, digest in json.loads((tiny_engine / "config.json").read_text())["files"].items():
        assert hashlib.sha256((tiny_engine / name).read_bytes()).hexdigest() == digest


def test_every_rank_has_a_file_with_its_share(checkpoints, tmp_path):
    build(settings(checkpoints, tp=2), tmp_path / "engine")
    ranks = [load_file(tmp_path / "engine" / f"rank{i}.safetensors") for i in (0, 1)]
    assert ranks[0].keys() == ranks[1].keys()
    whole = load_file(checkpoints / "target" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(torch.cat([rank["lm_head.weight"] for rank in ranks]), whole)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_engine_stores_and_generates_in_its_precision(precision, dtype, checkpoints, tmp_path):
    build(settings(checkpoints, precision=precision), tmp_path / "engine")
    assert {tensor.dtype for tensor in load_file(tmp_path / "engine" / "rank0.safetensors").values()} == {dtype}
    with LLM.load(tmp_path / "engine", "cpu") as llm:
        assert {cache.dtype for cache in llm.session.caches.values()} == {dtype}
        (completion,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9))
    assert len(completion.token_ids) == 9


# -- building again --------------------------------------------------------------------------------------------------


def test_building_the_same_engine_again_reuses_it(checkpoints, engine):
    before = {file: file.stat().st_mtime_ns for file in engine.iterdir()}
    assert build(settings(checkpoints), engine) is False
    assert {file: file.stat().st_mtime_ns for file in engine.iterdir()} == before


@pytest.mark.parametrize("name", ["tokenizer_config.json", "sentencepiece.model"])
def test_a_changed_tokenizer_is_another_engine(name, checkpoints, tmp_path):
    shutil.copytree(checkpoints, tmp_path / "pair")
    changed = settings(tmp_path / "pair")
    assert build(changed, tmp_path / "engine")
    assert not build(changed, tmp_path / "engine")
    (tmp_path / "pair" / "target" / name).write_text("{}")
    with pytest.raises(EngineError, match="exists and is not this engine"):
        build(changed, tmp_path / "engine")


def test_an_empty_folder_is_built_into(checkpoints, tmp_path):
    (tmp_path / "engine").mkdir()
    assert build(settings(checkpoints), tmp_path / "engine")


def test_a_mount_is_refused_before_anything_is_built(checkpoints, tmp_path, monkeypatch):
    """Nothing could be renamed to it in the end."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "engine")
    with pytest.raises(EngineError, match=r"engine: is a mount, .* name a folder in it \(--output\)"):
        build(settings(checkpoints), tmp_path / "engine")
    assert not list(tmp_path.iterdir())


def test_another_engine_at_the_output_is_replaced_only_by_force(pair, tmp_path):
    output = tmp_path / "engine"
    pair = (*pair, "--backend", "torch")
    assert succeeds("build", *pair, "--output", output).endswith(f"{output}: built\n")
    assert succeeds("build", *pair, "--output", output).endswith(f"{output}: up to date\n")
    around = output.parent / "nowhere" / ".." / output.name
    assert succeeds("build", *pair, "--output", around).endswith(f"{output}: up to date\n")
    before = contents(output)
    line = refusal("build", *pair, "--output", output, "--chunk", 7)
    assert str(output) in line
    assert "--force" in line
    assert contents(output) == before
    succeeds("build", *pair, "--output", output, "--chunk", 7, "--force")
    assert json.loads((output / "config.json").read_text())["chunk"] == 7
    assert os.listdir(tmp_path) == ["engine"]


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_changed_checkpoint_is_not_taken_for_the_one_that_was_built(role, checkpoints, engine, tmp_path):
    changed = Path(shutil.copytree(checkpoints, tmp_path / "changed"))
    edit_tensors(
        changed / role, lambda tensors: tensors["norm.weight" if role == "drafter" else "model.norm.weight"].mul_(2)
    )
    with pytest.raises(EngineError, match="--force"):
        build(settings(changed), engine)
    assert build(settings(changed), engine, force=True)


def test_a_moved_checkpoint_is_still_the_same(checkpoints, engine, tmp_path):
    assert build(settings(Path(shutil.copytree(checkpoints, tmp_path / "moved"))), engine) is False


def test_force_replaces_the_engine_behind_a_link(checkpoints, engine, tmp_path):
    link = tmp_path / "links" / "engine"
    link.parent.mkdir()
    link.symlink_to(engine)
    assert build(settings(checkpoints, chunk=7), link, force=True)
    assert link.is_symlink() and not engine.is_symlink()
    assert json.loads((engine / "config.json").read_text())["chunk"] == 7
    assert (sorted(os.listdir(tmp_path)), os.listdir(link.parent)) == (["engine", "links"], ["engine"])


def test_what_a_dangling_link_leads_to_is_built(checkpoints, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "large" / "engine")
    assert build(settings(checkpoints), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "large" / "engine" / "config.json").is_file()
    assert not build(settings(checkpoints), tmp_path / "link")


def test_a_link_that_was_left_beside_an_output_goes_and_what_it_leads_to_stays(checkpoints, engine, tmp_path):
    gone = start([sys.executable, "-c", ""])
    gone.communicate()
    output, precious = tmp_path / "output", contents(engine)
    build(settings(checkpoints), output)
    (tmp_path / f".output.{gone.pid}.old").symlink_to(engine)
    build(settings(checkpoints, chunk=7), output, force=True)
    assert sorted(os.listdir(tmp_path)) == ["engine", "output"]
    assert contents(engine) == precious


def test_of_two_builds_at_once_only_one_says_that_it_built(checkpoints, tmp_path):
    """One may take an hour: the other one's engine is not replaced without a word."""
    output = tmp_path / "engine"

    def build_another(*_: object) -> None:
        if not output.exists():
            build(settings(checkpoints, chunk=7), tmp_path / "another")
            (tmp_path / "another").rename(output)

    with pytest.raises(EngineError, match=r"engine: something else was written there .* another --output, or --force"):
        build(settings(checkpoints), output, progress=build_another)
    assert json.loads((output / "config.json").read_text())["chunk"] == 7
    assert os.listdir(tmp_path) == ["engine"]
    shutil.rmtree(output)
    assert build(settings(checkpoints), output, force=True, progress=build_another)
    assert json.loads((output / "config.json").read_text())["chunk"] != 7


def test_of_two_equal_builds_at_once_the_later_one_finds_the_engine_there(checkpoints, tmp_path):
    output = tmp_path / "engine"

    def build_the_same(*_: object) -> None:
        if not output.exists():
            build(settings(checkpoints), tmp_path / "another")
            (tmp_path / "another").rename(output)

    assert not build(settings(checkpoints), output, progress=build_the_same)
    assert os.listdir(tmp_path) == ["engine"]


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")], ids=["file", "link"])
def test_a_file_that_comes_to_an_output_meanwhile_is_kept(make, checkpoints, tmp_path):
    output = tmp_path / "engine"
    with pytest.raises(EngineError, match="something else was written there"):
        build(settings(checkpoints), output, progress=lambda *_: None if os.path.lexists(output) else make(output))
    assert os.listdir(tmp_path) == ["engine"] and not output.is_dir()


def test_what_is_called_like_a_checkpoint_s_file_and_is_none_is_passed_over(checkpoints, engine, tmp_path):
    strange = Path(shutil.copytree(checkpoints, tmp_path / "strange"))
    (strange / "target" / "extra.json").symlink_to("nowhere")
    (strange / "drafter" / "results.json").mkdir()
    assert not build(settings(strange), engine)  # the same engine


# -- failing ---------------------------------------------------------------------------------------------------------


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_build_leaves_nothing(checkpoints, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build(settings(checkpoints), tmp_path / "engine", progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_an_interrupted_replacement_leaves_the_old_engine(checkpoints, engine, tmp_path):
    before = contents(engine)
    with pytest.raises(KeyboardInterrupt):
        build(settings(checkpoints, chunk=7), engine, force=True, progress=interrupt)
    assert contents(engine) == before
    assert os.listdir(tmp_path) == ["engine"]


def test_a_replacement_whose_checkpoint_is_broken_leaves_the_old_engine(checkpoints, engine, tmp_path):
    broken = Path(shutil.copytree(checkpoints, tmp_path / "broken"))
    edit_tensors(broken / "target", lambda tensors: tensors["model.layers.3.mlp.up_proj.weight"].fill_(torch.nan))
    before = contents(engine)
    line = refusal("build", "--target", broken / "target", "--output", engine, "--force")
    assert "model.layers.3.mlp.up_proj.weight holds NaN" in line
    assert contents(engine) == before
    assert sorted(os.listdir(tmp_path)) == ["broken", "engine"]


def test_force_does_not_replace_what_is_no_engine(pair, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("mine")
    (tmp_path / "file").write_text("mine")
    checkpoint = shutil.copytree(pair[1], tmp_path / "checkpoint")  # has a config.json as well
    for name in ("home", "file", "checkpoint"):
        assert "not an engine" in refusal("build", *pair, "--output", tmp_path / name, "--force")
    assert (tmp_path / "home" / "precious").read_text() == (tmp_path / "file").read_text() == "mine"
    assert contents(checkpoint) == contents(Path(pair[1]))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "file", "home"]


def test_the_current_directory_as_output_is_refused(pair, tmp_path, monkeypatch):
    (tmp_path / "precious").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert "not an engine" in refusal("build", *pair, "--output", ".", "--force")
    assert os.listdir(tmp_path) == ["precious"]


def test_the_current_directory_as_output_is_built_and_replaced_where_it_may_be(pair, tmp_path, monkeypatch):
    """The commands go on in the folder that took its place: what went has no relative paths."""
    (tmp_path / "engine").mkdir()
    monkeypatch.chdir(tmp_path / "engine")
    assert succeeds("build", *pair, "--output", ".").endswith("engine: built\n")
    assert succeeds("build", *pair, "--output", "../engine", "--max-batch", 2, "--force").endswith("built\n")
    assert read_config(Path()).max_batch == 2
    assert os.listdir(tmp_path) == ["engine"]


def test_a_folder_is_written_where_the_current_directory_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with written_aside(tmp_path / "engine", replaces=False) as aside:
        (aside / "mine").write_text("mine")
    assert os.listdir(tmp_path / "engine") == ["mine"]


def test_an_output_that_cannot_be_written_is_named(pair, tmp_path):
    (tmp_path / "file").write_text("mine")
    line = refusal("build", *pair, "--output", tmp_path / "file" / "engine")
    assert str(tmp_path / "file" / "engine") in line
    assert "--output" in line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-seq-len", 513], "--max-seq-len 513: the target takes at most 512"),
        (["--block-size", 9], "--block-size 9: the drafter was trained for blocks of 2 to 8"),
        (["--block-size", 1], "--block-size 1: the drafter was trained for blocks of 2 to 8"),
        (["--tp", 3], "--tp 3 does not divide the 4 query heads; possible: 1, 2, 4"),
        (["--tp", 0], "--tp 0: "),
        (["--max-batch", 0], "--max-batch 0: "),
        (["--chunk", -1], "--chunk -1: "),
        (["--precision", "fp4"], "--precision fp4: "),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint_is_refused_by_name(flags, says, pair, tmp_path):
    assert says in refusal("build", *pair, "--output", tmp_path / "engine", *flags)
    assert os.listdir(tmp_path) == []


def test_a_block_needs_a_drafter(checkpoints, tmp_path):
    flags = ["--target", checkpoints / "target", "--output", tmp_path / "engine"]
    line = refusal("build", *flags, "--block-size", 4)
    assert "--block-size 4" in line
    assert "--drafter" in line
    succeeds("build", *flags, "--precision", "fp32")
    with LLM.load(tmp_path / "engine", "cpu") as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=5))[0].acceptance_length == 1


# -- loading ---------------------------------------------------------------------------------------------------------


def test_no_directory_and_no_engine_are_told_how_to_get_one(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        line = load_refusal(folder)
        assert line.startswith(f"{folder}: ")
        assert "trtllm-dflash build" in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Expecting property name"),
        ("\xff", "build the engine again"),
        ('{"schema_version": 2}', "schema version 2, this release reads 1"),
        ("{}", "has no schema_version, so it is no engine's"),
        ("[]", "has no schema_version, so it is no engine's"),
    ],
)
def test_a_config_of_another_form_is_refused(text, says, engine):
    (engine / "config.json").write_bytes(text.encode("latin-1"))
    line = load_refusal(engine)
    assert line.startswith(f"{engine / 'config.json'}: ")
    assert says in line
    assert "build the engine again" in line


@pytest.mark.parametrize(("key", "value"), [("speed", 11), ("max_batch", 0), ("precision", "fp4"), ("target", {})])
def test_a_field_that_is_unknown_or_wrong_is_named(key, value, engine):
    config = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps({**config, key: value}))
    line = load_refusal(engine)
    assert line.startswith(f"{engine / 'config.json'}: {key}")
    assert line.endswith("build the engine again")


def test_a_family_of_a_later_release_is_named(engine):
    edit_config(engine, lambda config: config["target"].update(family="qwen9"))
    assert load_refusal(engine) == (
        f"{engine / 'config.json'}: target.family: there is no 'qwen9' here; build the engine again"
    )


def test_ranks_that_heads_cannot_be_divided_among_are_refused(engine):
    edit_config(engine, lambda config: config.update(tp=7))
    line = f"{engine / 'config.json'}: 2 units cannot be divided among 7 ranks; build the engine again"
    assert load_refusal(engine) == line
    result = run("generate", "--engine", engine, "--prompt", "hello", "--device", "cpu")
    assert (result.exit_code, result.stderr) == (1, f"error: {line}\n")


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


BREAKAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "flipped": flip_a_byte,
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_rank_file_that_is_not_what_was_built_is_refused(breakage, engine):
    file = engine / "rank0.safetensors"
    BREAKAGES[breakage](file)
    line = load_refusal(engine)
    assert line.startswith(f"{file}: ")
    assert line.endswith("build the engine again")
    result = run("generate", "--engine", engine, "--prompt", "hello", "--device", "cpu")
    assert (result.exit_code, result.stderr) == (1, f"error: {line}\n")


@pytest.mark.parametrize("breakage", ["missing", "truncated", "empty"])
def test_inspect_names_a_rank_file_that_is_not_whole(breakage, engine):
    file = engine / "rank0.safetensors"
    BREAKAGES[breakage](file)
    line = refusal("inspect", engine)
    assert line.startswith(f"error: {file}: ") and line.endswith("; build the engine again")


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_engine_is_built_again_where_that_is_asked(breakage, checkpoints, engine):
    """What loading calls broken, building must not call up to date."""
    BREAKAGES[breakage](engine / "rank0.safetensors")
    with pytest.raises(EngineError, match="--force"):
        build(settings(checkpoints), engine)
    assert build(settings(checkpoints), engine, force=True)
    assert LLM.load(engine, "cpu").generate([[1]], SamplingParams(max_tokens=3))[0].token_ids


@pytest.mark.parametrize("breakage", BREAKAGES)
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_tokenizer_that_is_not_what_was_built_is_refused(name, breakage, tiny_engine, tmp_path):
    """A changed template is valid text, and would change every reply without a word."""
    engine = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    BREAKAGES[breakage](engine / name)
    line = load_refusal(engine)
    assert line.startswith(f"{engine / name}: ")
    assert line.endswith("build the engine again")


@pytest.mark.parametrize("kept", [0, 0.5, 0.999])
def test_a_checkpoint_s_tokenizer_that_is_cut_off_is_refused_before_anything_is_written(kept, tmp_path):
    target = Path(shutil.copytree(TINY / "target", tmp_path / "target"))
    content = (target / "tokenizer.json").read_bytes()
    (target / "tokenizer.json").write_bytes(content[: int(len(content) * kept)])
    line = refusal("build", "--target", target, "--output", tmp_path / "engine")
    assert f"{target / 'tokenizer.json'} is truncated or damaged" in line
    assert line.endswith("download it again")
    assert not (tmp_path / "engine").exists()


def closed(file: Path) -> None:
    """Makes a file one that cannot be read, for root too: a name that is too long stands for a mode that forbids it."""
    file.unlink(missing_ok=True)
    file.symlink_to("x" * 300)


@pytest.mark.parametrize("name", ["config.json", "rank0.safetensors", "tokenizer.json"])
def test_a_file_of_an_engine_that_cannot_be_read_is_named_with_the_cause(name, tiny_engine, tmp_path):
    engine = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    closed(engine / name)
    assert load_refusal(engine) == f"{engine / name}: cannot be read (File name too long)"


def test_a_file_of_an_engine_that_may_not_be_opened_is_named_with_the_cause(engine, monkeypatch):
    opened = Path.open

    def forbidden(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", forbidden)
    for name in ("rank0.safetensors", "config.json"):
        assert load_refusal(engine) == f"{engine / name}: cannot be read (Permission denied)"


# -- what a stranger found ---------------------------------------------------------------------------------------------


def test_force_does_not_take_a_stray_rank_file_for_an_engine(pair, tmp_path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "rank0.csv").write_text("1,2")
    for more in ((), ("--force",)):
        assert "is not an engine directory" in refusal("build", *pair, "--output", folder, *more)
    assert (folder / "rank0.csv").read_text() == "1,2"


def test_a_refreshed_build_replaces_what_differs_and_reuses_what_does_not(checkpoints, tmp_path):
    output = tmp_path / "engine"
    assert build(settings(checkpoints), output)
    assert not build(settings(checkpoints), output, refresh=True)
    assert build(settings(checkpoints, max_batch=3), output, refresh=True)
    assert json.loads((output / "config.json").read_text())["max_batch"] == 3


def test_others_may_read_an_engine_s_weights(intact):
    modes = {file.name: file.stat().st_mode & 0o777 for file in intact.iterdir()}
    assert modes["rank0.safetensors"] == modes["config.json"]


@pytest.mark.parametrize(
    ("fact", "value"),
    [("block_size", 16), ("target_layers", 5), ("tap_layers", [0, 1]), ("mask_token_id", 1), ("drafter_layers", 1)],
)
def test_a_build_configuration_that_is_not_true_of_its_checkpoints_is_refused(fact, value, checkpoints, tmp_path):
    entry = {
        "name": "mine",
        "family": "qwen3",
        "target": str(checkpoints / "target"),
        "drafter": str(checkpoints / "drafter"),
        "block_size": 8,
        "target_layers": 4,
        "drafter_layers": 2,
    }
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(entry))
    succeeds("build", "--model", file, "--output", tmp_path / "engine")
    file.write_text(json.dumps({**entry, fact: value}))
    said = refusal("build", "--model", file, "--output", tmp_path / "other")
    assert f"mine: its build configuration says {fact}" in said and "but the checkpoints have" in said
    if fact != "target_layers":  # what is deduced of a drafter is no reason not to build with it
        file.write_text(json.dumps({**entry, fact: value, "deduced": True}))
        succeeds("build", "--model", file, "--output", tmp_path / "deduced")


@pytest.mark.parametrize(
    "content", ["[1, 2]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": -1}', '{"eos_token_id": [1, 999]}']
)
def test_end_tokens_that_are_none_are_refused(content, checkpoints, tmp_path):
    shutil.copytree(checkpoints, tmp_path / "pair")
    (tmp_path / "pair" / "target" / "generation_config.json").write_text(content)
    flags = ["--target", tmp_path / "pair" / "target", "--drafter", tmp_path / "pair" / "drafter"]
    said = refusal("build", *flags, "--output", tmp_path / "engine")
    assert "generation_config.json" in said or "eos_token_id" in said


def test_end_tokens_left_open_are_the_configuration_s(checkpoints, tmp_path):
    shutil.copytree(checkpoints, tmp_path / "pair")
    target = tmp_path / "pair" / "target"
    (target / "generation_config.json").write_text('{"eos_token_id": null}')
    edit_config(target, lambda config: config.update(eos_token_id=[0, 7]))
    llm = LLM.from_pretrained(target, tmp_path / "pair" / "drafter", device="cpu")
    assert llm.config.stop_token_ids == (0, 7)


def test_a_known_target_gets_the_chat_arguments_that_its_drafter_needs(checkpoints, tmp_path, monkeypatch):
    folders = {"Qwen/Qwen3-8B": checkpoints / "target", "mine": checkpoints / "drafter"}
    monkeypatch.setattr("trtllm_dflash.build.planning.resolve", lambda name, **_: folders[name])
    assert LLM.from_pretrained("Qwen/Qwen3-8B", "mine", device="cpu").config.chat_arguments == {
        "enable_thinking": False
    }
    thinking = {"enable_thinking": True}
    llm = LLM.from_pretrained("Qwen/Qwen3-8B", "mine", device="cpu", chat_arguments=thinking)
    assert llm.config.chat_arguments == thinking


def test_heads_that_cannot_share_key_value_heads_are_refused(checkpoints, tmp_path):
    shutil.copytree(checkpoints, tmp_path / "pair")
    edit_config(tmp_path / "pair" / "target", lambda config: config.update(num_attention_heads=3))
    said = refusal("build", "--target", tmp_path / "pair" / "target", "--output", tmp_path / "engine")
    assert "3 attention heads cannot share 2 key/value heads" in said


@pytest.mark.slow
def test_a_killed_build_leaves_nothing(checkpoints, tmp_path):
    script = (
        "import sys, time\n"
        "import trtllm_dflash.build.builder as builder\n"
        "from trtllm_dflash.cli import main\n"
        "builder.read_engine_tensors = lambda *_: (print('reading', flush=True), time.sleep(3600))\n"
        "main()\n"
    )
    flags = ["--target", str(checkpoints / "target"), "--output", str(tmp_path / "engine")]
    process = start([sys.executable, "-c", script, "build", *flags], stderr=None)
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    assert list(tmp_path.iterdir())
    process.terminate()
    assert process.wait(PATIENCE) == 143
    assert not list(tmp_path.iterdir())


def test_caches_that_do_not_fit_in_memory_name_the_knobs(checkpoints):
    with pytest.raises(EngineError, match="--max-batch or --max-seq-len"):
        LLM.from_pretrained(checkpoints / "target", None, device="cpu", max_batch=2**31 - 1)


def test_pages_that_do_not_fit_in_memory_name_theirs(pair, tmp_path):
    many = ("--max-batch", str(2**31 - 1), "--kv-memory", "1e9")
    succeeds("build", *pair, *many, "--output", str(tmp_path / "engine"))
    with pytest.raises(EngineError, match="build with a smaller --kv-memory, --max-batch or --max-seq-len"):
        LLM.load(tmp_path / "engine", "cpu")


@pytest.mark.parametrize("target", ["5", "[a]", "null"])
def test_a_target_that_is_no_text_is_refused(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "target" in refusal("build", "--set", f"target={target}")


def test_the_current_folder_as_target_names_the_engine_after_it(checkpoints, tmp_path, monkeypatch):
    shutil.copytree(checkpoints / "target", tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    assert "engines/mine: built" in succeeds("build", "--target", ".")


def test_a_checkpoint_inside_the_engine_that_force_replaces_is_kept(pair, engine):
    """The old engine went with all that lay in it, the checkpoint that was read too."""
    target = Path(shutil.copytree(pair[1], engine / "target"))
    line = refusal("build", "--target", str(target), "--precision", "fp32", "--output", str(engine), "--force")
    assert line == f"error: {engine}: holds the target that is read; use another --output"
    assert (target / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("page_size", "says"),
    [
        ([], "--kv-memory 1e-05 GB holds 0 tokens, fewer than one sequence of 512; give it at least 0.0"),
        (["--page-size", "9999"], "--kv-memory 1e-05 GB: a page is a whole slot, and 8 slots take 0.0"),
    ],
)
def test_memory_that_no_sequence_fits_is_refused_when_the_engine_is_built(page_size, says, pair, tmp_path):
    """It was built, and then no command could load it; or it was ignored."""
    line = refusal("build", *pair, "--kv-memory", "0.00001", *page_size, "--output", str(tmp_path / "engine"))
    assert says in line
    assert "0.0 GB" not in line
    assert not (tmp_path / "engine").exists()


def test_ctrl_c_while_weights_are_loaded_is_no_damaged_file(intact, monkeypatch):
    """The library makes an error of its own of what a handler raises inside it."""
    done = []

    def interrupted(file):
        signal.raise_signal(signal.SIGINT)
        done.append(load_file(file))

    monkeypatch.setattr("safetensors.torch.load_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_weights(intact, read_config(intact), rank=0)
    assert len(done) == 1
