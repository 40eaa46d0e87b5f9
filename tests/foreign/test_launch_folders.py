"""`launch` and `deploy` of pairs in folders: named in any way, with any letters in their paths, and damaged."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from tests.checkpoints import edit_config
from tests.conftest import HYBRID, TINY, succeeds
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.foreign.plan import LaunchSettings
from trtllm_dflash.foreign.registry import RUNTIMES, launch_of, plan_for

BUILD_CONFIGS = Path(__file__).parents[2] / "build_configs"


def settings(runtime: str, **values: object) -> LaunchSettings:
    return LaunchSettings.model_validate({"runtime": runtime, "gpu": "h200", **values})


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_folders_are_absolute_however_they_are_named(runtime, tmp_path, monkeypatch):
    """A runtime runs in a folder of its own, where `pair/target` is a name at Hugging Face."""
    shutil.copytree(TINY, tmp_path / "pair")
    monkeypatch.chdir(tmp_path)
    found = launch_of(settings(runtime, target="pair/target", drafter="pair/drafter"))
    assert str(tmp_path / "pair" / "target") in found.words
    assert str(tmp_path / "pair" / "drafter") in found.script()
    assert " pair/" not in found.script()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_text_model_saved_alone_is_launched_as_the_whole_model_is(runtime, tmp_path):
    shutil.copytree(HYBRID, tmp_path / "pair")
    pair = {"target": str(tmp_path / "pair" / "target"), "drafter": str(tmp_path / "pair" / "drafter")}
    alone = launch_of(settings(runtime, **pair)).script()
    edit_config(tmp_path / "pair" / "target", lambda config: config.update(model_type="qwen3_5"))
    assert launch_of(settings(runtime, **pair)).script() == alone


@pytest.mark.parametrize("target", [".", "../target", "../target/.", "../drafter/../target"])
def test_a_model_has_its_folders_own_name(target, tmp_path, monkeypatch):
    shutil.copytree(TINY, tmp_path / "pair")
    monkeypatch.chdir(tmp_path / "pair" / "target")
    plan = plan_for(settings("vllm", target=target, drafter="../drafter"))
    assert (plan.name, plan.target) == ("target", str(tmp_path / "pair" / "target"))


def test_a_slurm_script_and_what_deploy_says_quote_their_paths(tmp_path):
    target = Path(shutil.copytree(TINY / "target", tmp_path / "a b'c"))
    several = settings("tensorrt-llm", target=str(target), method="none", tp=2, nodes=2)
    script = next(text for name, text in launch_of(several).files.items() if name.endswith(".sbatch"))
    assert str(target) in shlex.split(script.splitlines()[-1])
    arguments = ("--runtime", "tensorrt-llm", "--target", str(target), "--method", "none", "--gpu", "h200")
    said = succeeds("deploy", *arguments, "--output", str(tmp_path / "re po"))
    assert shlex.split(said)[-1] == f"--model-repository={tmp_path / 're po'}"


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("folder", "changes"),
    [
        ("target", {"num_hidden_layers": 0}),
        ("target", {"num_attention_heads": float("inf")}),
        ("target", {"max_position_embeddings": -1}),
        ("target", {"text_config": [1]}),
        ("drafter", {"architectures": 5}),
        ("drafter", {"dflash_config": 5}),
    ],
)
def test_a_damaged_configuration_is_one_line(runtime, folder, changes, tmp_path):
    shutil.copytree(TINY, tmp_path / "pair")
    damaged = edit_config(tmp_path / "pair" / folder, lambda config: config.update(changes))
    target, drafter = (str(tmp_path / "pair" / name) for name in ("target", "drafter"))
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(damaged))}: config.json: [^\n]+$"):
        launch_of(settings(runtime, target=target, drafter=drafter))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_notes_of_several_lines_are_comments_and_no_commands(runtime, tmp_path):
    entry = yaml.safe_load((BUILD_CONFIGS / "qwen3-8b.yaml").read_text())
    notes = {**entry, "name": "mine", "notes": ["it drafts\nrm -rf nothing\n"]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(notes))
    script = launch_of(settings(runtime, model=str(tmp_path / "mine.yaml"))).script()
    assert "\n# rm -rf nothing\n" in script
    assert "\nrm" not in script
