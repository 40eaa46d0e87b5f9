"""The catalog: every known pair is valid, and a wrong name or file is refused in one line."""

from pathlib import Path

import pytest

from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.catalog import CatalogEntry, find_entry, find_entry_or_target, load_catalog
from trtllm_dflash.checkpoint.drafter_config import default_tap_layers
from trtllm_dflash.checkpoint.hub import PACKAGE, resolve
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.errors import SettingsError

VALID = """
name: mine
family: qwen3
target: org/target
drafter: org/drafter
block_size: 8
drafter_layers: 2
target_layers: 4
"""


def refusal(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_catalog(folder)
    assert str(folder / "mine.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_published_drafter_is_in_the_catalog():
    catalog = load_catalog()
    assert len(catalog) == 25
    assert {"tiny", "tiny-hybrid"} <= catalog.keys()
    assert {"qwen3-4b", "qwen3-8b", "llama-3.1-8b", "gpt-oss-20b", "gpt-oss-120b"} <= catalog.keys()
    drafters = [entry.drafter for entry in catalog.values()]
    assert len(set(drafters)) == len(drafters)
    assert all(drafter.startswith(("z-lab/", "deepseek-ai/", PACKAGE)) for drafter in drafters)


def test_published_tap_layers_of_dense_families_follow_the_default_rule():
    for name in ("qwen3-4b", "qwen3-8b", "llama-3.1-8b"):
        entry = find_entry(name)
        assert entry.tap_layers == tuple(default_tap_layers(entry.target_layers, entry.drafter_layers))


def test_every_known_pair_s_family_is_computed_and_no_other():
    assert all(entry.buildable for entry in load_catalog().values())
    assert not find_entry("tiny").model_copy(update={"family": "bert"}).buildable


def test_qwen3_is_served_without_thinking():
    assert find_entry("qwen3-8b").chat == {"enable_thinking": False}
    assert find_entry("qwen3-8b").mask_token_id == 151669


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_a_shipped_pair_is_what_its_entry_says(name):
    entry = find_entry(name)
    assert entry.build.model_dump(exclude_none=True) == {"max_batch": 8, "max_seq_len": 2048}
    pair = open_pair(resolve(entry.target), resolve(entry.drafter))
    assert pair.drafter is not None
    assert pair.target_config.family == entry.family
    assert pair.target_config.layers == entry.target_layers
    assert pair.drafter.config.block_size == entry.block_size
    assert pair.drafter.config.layers == entry.drafter_layers
    assert pair.drafter.config.tap_layers == entry.tap_layers
    assert pair.drafter.config.mask_token_id == entry.mask_token_id


@pytest.mark.parametrize(("name", "suggestion"), [("qwen3-8B", "qwen3-8b"), ("gpt-oss-120", "gpt-oss-120b")])
def test_an_unknown_name_suggests_the_closest(name, suggestion):
    with pytest.raises(SettingsError) as caught:
        find_entry(name)
    assert f"unknown model '{name}': did you mean" in str(caught.value)
    assert suggestion in str(caught.value)
    assert "`trtllm-dflash models`" in str(caught.value)


def test_a_name_like_no_other_points_at_the_list():
    with pytest.raises(SettingsError) as caught:
        find_entry("zzzzzz")
    assert str(caught.value) == "unknown model 'zzzzzz': `trtllm-dflash models` lists them all"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen/qwen3-8b"])
def test_a_target_s_name_at_hugging_face_finds_its_pair(name):
    assert find_entry(name) == find_entry_or_target(name) == find_entry("qwen3-8b")


def test_an_unknown_repository_suggests_the_closest_target():
    with pytest.raises(SettingsError, match=r"unknown model 'Qwen/Qwen3-9B': did you mean .*Qwen/Qwen3-8B"):
        find_entry("Qwen/Qwen3-9B")


def test_what_is_no_known_pair_s_may_be_a_target_of_one_s_own(tmp_path, monkeypatch):
    assert find_entry_or_target("org/finetuned") is None
    assert find_entry_or_target(str(tmp_path)) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "mine").mkdir()
    assert find_entry_or_target("mine") is None
    assert find_entry_or_target("tiny") == find_entry("tiny")
    with pytest.raises(SettingsError, match="unknown model 'yours'"):
        find_entry_or_target("yours")
    with pytest.raises(SettingsError, match=r"is the drafter of qwen3-8b; name that, or its target Qwen/Qwen3-8B"):
        find_entry_or_target("z-lab/Qwen3-8B-DFlash-b16")


def test_a_file_of_one_s_own_is_read(tmp_path):
    (tmp_path / "mine.yaml").write_text(VALID + "build:\n  precision: bf16\n")
    entry = load_catalog(tmp_path)["mine"]
    assert isinstance(entry, CatalogEntry)
    assert entry.tap_layers is None
    assert entry.build.precision == "bf16"


def test_a_file_is_found_by_its_path(tmp_path):
    (tmp_path / "mine.yaml").write_text(VALID)
    assert find_entry(str(tmp_path / "mine.yaml")).target == "org/target"
    with pytest.raises(SettingsError, match=r"yours.yaml: cannot be read \(No such file or directory\)$"):
        find_entry(str(tmp_path / "yours.yaml"))


def test_build_values_are_build_settings():
    for entry in load_catalog().values():
        settings = BuildSettings(**entry.build_values())
        assert (settings.name, settings.target, settings.drafter) == (entry.name, entry.target, entry.drafter)
        assert (settings.chat_arguments or {}) == entry.chat
    assert BuildSettings(**find_entry("tiny").build_values()).max_seq_len == 2048


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (VALID.replace("block_size: 8", "block_size: -8"), "block_size: Input should be greater than 0"),
        (VALID.replace("drafter_layers: 2\n", ""), "drafter_layers: Field required"),
        (VALID + "blok_size: 8\n", "blok_size: Extra inputs are not permitted"),
        (VALID + "build:\n  precison: bf16\n", "build.precison: Extra inputs are not permitted"),
        (VALID + "tap_layers: [1, 4]\n", "tap layer 4 is outside the 4 target_layers"),
        (VALID.replace("name: mine", "name: yours"), "name: 'yours' differs"),
        (VALID + "notes: [\n", "not valid YAML"),
        (VALID + "notes: [2024-02-31]\n", "not valid YAML"),
        ("just text", "Input should be a valid dictionary"),
    ],
)
def test_a_wrong_file_names_itself_and_the_field(tmp_path, text, message):
    assert message in refusal(tmp_path, text)
