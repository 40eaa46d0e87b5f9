"""The demo's output. How fast it is is no test's matter: benchmarks measure that."""

import json
import re
from importlib.util import find_spec

import pytest

from tests.conftest import refusal, run, succeeds
from trtllm_dflash import SamplingParams
from trtllm_dflash.pairs.prompts import read_prompts

pytestmark = pytest.mark.slow

TOKENS = 12
SMALL = ["--prompts-per-kind", 2, "--max-tokens", TOKENS, "--device", "cpu"]
FIGURES = {
    "identical",
    "acceptance_length",
    "speedup",
    "plain_tokens_per_second",
    "drafted_tokens_per_second",
    "prompts",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What the demo prints with --json, then without, in an empty directory."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        printed = succeeds("demo", "--json", *SMALL), succeeds("demo", *SMALL)
    compiled = {"tiny-sm120"} if find_spec("tensorrt_rtx") else set()
    assert {path.name for path in (folder / "engines").iterdir()} == {"tiny"} | compiled
    return printed


def test_what_is_no_engine_is_refused_before_the_demo_without_a_flag_that_it_lacks(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("mine")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    said = "is not an engine directory, which would be replaced; use another --output"
    assert refusal("demo", "--output", tmp_path / "mine") == f"error: {tmp_path / 'mine'}: {said}"
    if find_spec("tensorrt_rtx"):
        monkeypatch.setattr("trtllm_dflash.demo.run_demo", pytest.fail)
        (tmp_path / "here-sm120").mkdir()
        (tmp_path / "here-sm120" / "mine").write_text("mine")
        assert refusal("demo", "--output", ".") == f"error: {tmp_path / 'here-sm120'}: {said}"


def test_json_is_all_that_json_prints_and_has_every_figure(outputs):
    result = json.loads(outputs[0])
    assert result.keys() == FIGURES | {"by_kind"}
    assert {kind: part.keys() for kind, part in result["by_kind"].items()} == dict.fromkeys(read_prompts(1), FIGURES)
    assert len(result["by_kind"]) >= 3


def test_drafting_changes_no_token(outputs):
    result = json.loads(outputs[0])
    assert result["identical"] is True
    assert all(part["identical"] for part in result["by_kind"].values())


def test_the_whole_is_the_sum_of_its_kinds(outputs):
    result = json.loads(outputs[0])
    parts = list(result["by_kind"].values())
    assert [part["prompts"] for part in parts] == [2] * len(parts)
    assert result["prompts"] == 2 * len(parts)
    for figure in ("acceptance_length", "plain_tokens_per_second", "drafted_tokens_per_second"):
        values = [part[figure] for part in parts]
        assert min(values) <= result[figure] <= max(values)
    for part in (result, *parts):
        ratio = part["drafted_tokens_per_second"] / part["plain_tokens_per_second"]
        assert part["speedup"] == pytest.approx(ratio, rel=0.05)


def test_the_table_has_a_row_for_every_kind_and_one_for_all(outputs):
    rows = {kind: re.search(rf"^│ ?{kind} .*│$", outputs[1], re.MULTILINE) for kind in (*read_prompts(1), "all")}
    result = json.loads(outputs[0])
    for kind, row in rows.items():
        assert row is not None, kind
        cells = [cell.strip() for cell in row[0].strip("│").split("│")]
        figures = result if kind == "all" else result["by_kind"][kind]
        # Rates differ from run to run; what the drafter does must not.
        assert (cells[1], cells[2]) == (str(figures["prompts"]), f"{figures['acceptance_length']:.2f}")
        assert cells[5].endswith("x")
        assert cells[6] == "yes"


def test_both_streams_are_shown_for_one_prompt_of_every_kind(outputs):
    for prompts in read_prompts(2).values():
        shown = [" ".join(prompt.split()) in " ".join(outputs[1].split()) for prompt in prompts]
        assert shown == [True, False]
    for title in ("plain", "drafted"):
        assert len(re.findall(rf"─ {title} ─", outputs[1])) == len(read_prompts(1))


@pytest.mark.skipif(not find_spec("tensorrt_rtx"), reason="tensorrt-rtx is not installed: nothing can be compiled")
def test_the_same_step_is_compiled_and_said_not_to_have_run(outputs):
    assert re.search(r"tiny-sm120: .* for SM120, not run here: \d+ layers, \d+ MB, [\d.]+ s", outputs[1])


def test_the_histogram_is_of_all_steps(outputs, tiny):
    prompts = [[{"role": "user", "content": prompt}] for kind in read_prompts(2).values() for prompt in kind]
    completions = tiny.generate(prompts, SamplingParams(max_tokens=TOKENS))
    accepted = [count for completion in completions for count in completion.accepted_per_step]
    _, _, histogram = outputs[1].partition("accepted drafts a step\n")
    bars = re.findall(r"^ *(\d+)  (#*) +(\d+\.\d)%$", histogram, re.MULTILINE)
    assert [int(count) for count, _, _ in bars] == list(range(max(accepted) + 1))
    for count, bar, percent in bars:
        share = accepted.count(int(count)) / len(accepted)
        assert float(percent) == pytest.approx(100 * share, abs=0.1)
        assert len(bar) == round(40 * share)


def test_more_tokens_than_any_reply_can_have_are_refused_before_a_server_starts():
    result = run("demo", "--max-tokens", 2**31)
    assert result.exit_code == 2
    assert "'--max-tokens': 2147483648 is not in the range" in result.stderr
