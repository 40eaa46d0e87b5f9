"""`train` on the shipped pair: acceptance is kept, and is that of real decoding; pauses change no bit."""

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TINY, run, succeeds
from tests.processes import ends_at_once
from tests.test_train import LATER
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.checkpoint.drafter import open_drafter
from trtllm_dflash.checkpoint.pair import open_pair
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.train.phases import train
from trtllm_dflash.train.settings import TrainSettings
from trtllm_dflash.train.trainer import BEST, CHECKPOINT, LOG, Trainer, read_log

pytestmark = pytest.mark.slow

LENGTHS: dict[str, Any] = {"max_seq_len": 192, "max_tokens": 40, "max_batch": 8, "held_out": 0.3}
FLAGS = ("--target", TINY / "target", "--device", "cpu", "--pack", 256, "--anchors", 8)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Four prompts of each kind."""
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text().splitlines()][2::16]
    file: Path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": row["prompt"], "domain": row["kind"]}) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> tuple[Path, dict]:
    """30 steps from the shipped drafter: the state directory, and the report."""
    output = tmp_path_factory.mktemp("train") / "tiny"
    lengths = [word for name, value in LENGTHS.items() for word in ("--" + name.replace("_", "-"), value)]
    steps = ("--from", TINY / "drafter", "--steps", 30, "--rate", 1e-5, "--evaluate-every", 30)
    report = json.loads(succeeds("train", *FLAGS, "--data", data, *lengths, *steps, "--output", output, "--json"))
    return output, report


def test_thirty_small_steps_keep_the_acceptance(trained):
    _, report = trained
    before, after = report["evaluations"]
    assert (before["step"], after["step"]) == (0, 30)
    assert before["tau"] > 4
    assert after["tau"] == pytest.approx(before["tau"], rel=0.02)
    assert set(after["by_domain"]) == {"arithmetic", "python", "json", "story"}


def test_simulated_acceptance_is_that_of_real_decoding(trained):
    _, report = trained
    assert report["decoded"]["steps"] > 20
    assert report["exported"]["tau"] == pytest.approx(report["decoded"]["tau"], rel=0.01)


def test_simulated_trees_are_those_of_real_decoding(trained):
    output, report = trained
    rows = [json.loads(line) for line in (output / "replies" / "held_out.jsonl").read_text().splitlines()]
    params = SamplingParams(max_tokens=LENGTHS["max_tokens"])
    pair = TINY / "target", output / "drafter"
    with LLM.from_pretrained(*pair, device="cpu", max_batch=8, max_seq_len=256, draft_tree=31) as llm:
        replies = llm.generate([row["prompt_ids"] for row in rows], params)
    assert sorted(reply.token_ids for reply in replies) == sorted(row["reply_ids"] for row in rows)
    tau = sum(len(reply.token_ids) - 1 for reply in replies) / sum(reply.steps for reply in replies)
    assert report["trees"]["31"] == pytest.approx(tau, rel=0.01)
    assert report["trees"]["31"] > report["exported"]["tau"]


def test_both_formats_are_read_back_equal_and_built_at_once(trained, tmp_path):
    output, _ = trained
    best = load_file(output / BEST)
    for name in ("drafter", "drafter-speculators"):
        opened = open_drafter(output / name, 8)
        assert opened.config == open_drafter(TINY / "drafter").config
        assert all(torch.equal(opened.folder.read(opened.keys[key]), tensor) for key, tensor in best.items())
        assert "# DFlash drafter for" in (output / name / "README.md").read_text()
    pair = ("--target", TINY / "target", "--drafter", output / "drafter")
    assert "built" in succeeds("build", *pair, "--precision", "fp32", "--output", tmp_path / "engine")


def test_a_finished_training_does_nothing_again(trained, data):
    output, report = trained
    times = {file: file.stat().st_mtime_ns for file in output.rglob("*.safetensors")}
    settings = {"target": str(TINY / "target"), "from": str(TINY / "drafter"), "data": data, "device": "cpu", **LENGTHS}
    recipe = {"pack": 256, "anchors": 8, "steps": 30, "rate": 1e-5, "evaluate_every": 30}
    assert train(TrainSettings.model_validate({**settings, **recipe}), output) == report
    assert times == {file: file.stat().st_mtime_ns for file in output.rglob("*.safetensors")}


# -- pauses ------------------------------------------------------------------------------------------------------------


class Killed(Exception):
    """What ends a training as SIGKILL does: nothing is saved."""


def train_from_nothing(
    replies: Path, data: Path, output: Path, progress=lambda *_: None, until: str = "train", **changes: object
) -> None:
    """Eight steps over the same replies, in a state directory of their own."""
    if not output.exists():
        output.mkdir()
        manifest = json.loads((replies / "manifest.json").read_text())
        manifest["phases"] = {name: manifest["phases"][name] for name in ("split", "regenerate")}
        (output / "manifest.json").write_text(json.dumps(manifest))
        for folder in ("prompts", "replies"):
            shutil.copytree(replies / folder, output / folder)
    shape = {"layers": 1, "block": 8, "taps": (2, 5), "pack": 192, "anchors": 4, "packs": 1}
    recipe = {"steps": 8, "rate": 2e-3, "evaluate_every": 4, "save_every": 2, "objective": "kd", **shape, **changes}
    settings = {"target": str(TINY / "target"), "data": data, "device": "cpu", **LENGTHS, **recipe}
    train(TrainSettings.model_validate(settings), output, until, progress)


def test_a_training_that_was_killed_and_interrupted_is_equal_to_one_that_was_not(trained, data, tmp_path):
    replies, _ = trained
    train_from_nothing(replies, data, tmp_path / "whole")

    def kill(what: str, done: int, total: int) -> None:
        if (what, done) == ("training", 5):
            raise Killed

    def interrupt(what: str, done: int, total: int) -> None:
        if (what, done) == ("training", 6):
            os.kill(os.getpid(), signal.SIGINT)

    paused = tmp_path / "paused"
    with pytest.raises(Killed):
        train_from_nothing(replies, data, paused, kill)
    assert '"step": 4' in load_place(paused)
    with pytest.raises(KeyboardInterrupt):
        train_from_nothing(replies, data, paused, interrupt)
    assert '"step": 7' in load_place(paused)
    train_from_nothing(replies, data, paused)

    for name in (CHECKPOINT, BEST):
        whole, parts = (load_file(folder / name) for folder in (tmp_path / "whole", paused))
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[key], parts[key]) for key in whole)
    logs = [read_log(folder / LOG) for folder in (tmp_path / "whole", paused)]
    losses, others = ([(row["step"], row.get("loss"), row.get("acceptance")) for row in log] for log in logs)
    assert losses == others and len(losses) == 8 + 3
    assert losses[0][2]["tau"] >= 1 and losses[-2][1] < losses[1][1]


# -- heads -------------------------------------------------------------------------------------------------------------


def test_a_drafter_of_dflash_2_is_trained_exported_and_decodes_as_was_simulated(trained, data, tmp_path):
    replies, _ = trained
    recipe: dict[str, Any] = {"head": "dflash2", "objective": "greedy", "steps": 40, "evaluate_every": 20, "rate": 5e-3}
    train_from_nothing(replies, data, tmp_path / "new", until="evaluate", **recipe)
    opened = open_drafter(tmp_path / "new" / "drafter")
    assert opened.config == open_drafter(tmp_path / "new" / "drafter-speculators", 8).config
    assert opened.config.selector is not None and opened.config.convolution is not None
    tensors = load_file(tmp_path / "new" / BEST)
    moved = ("candidate_selector.successor_codebook", "layers.0.mlp_conv.kernel_projection.weight")
    assert all(tensors[name].abs().max() > 1e-3 for name in moved)
    facts = json.loads((tmp_path / "new" / "manifest.json").read_text())["phases"]["evaluate"]["facts"]
    assert facts["simulated"]["tau"] == pytest.approx(facts["decoded"]["tau"], rel=0.01)
    assert facts["simulated"]["tau"] > 1.1 and facts["trees"] == {}


# -- several ranks -----------------------------------------------------------------------------------------------------


def test_two_ranks_train_as_one_with_the_same_packs(trained, data, tmp_path):
    replies, _ = trained
    for ranks in (1, 2):
        train_from_nothing(replies, data, tmp_path / str(ranks), packs=2, ranks=ranks, steps=2, evaluate_every=2)
    one, two = (load_file(tmp_path / ranks / CHECKPOINT) for ranks in "12")
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(two[key], one[key], atol=2e-5, rtol=1e-3)
    logs = [read_log(tmp_path / ranks / LOG) for ranks in "12"]
    assert [row["step"] for row in logs[0]] == [row["step"] for row in logs[1]]
    for alone, shared in zip(*logs, strict=True):
        assert shared.get("loss", 0) == pytest.approx(alone.get("loss", 0), rel=1e-4)
        assert shared.get("acceptance") == alone.get("acceptance")


def test_ranks_that_have_no_pack_and_ranks_that_end_are_said_in_one_line(trained, data, tmp_path, monkeypatch):
    replies, _ = trained
    with pytest.raises(SettingsError, match="--packs 3: give a multiple of --ranks 2"):
        train_from_nothing(replies, data, tmp_path / "odd", packs=3, ranks=2)
    monkeypatch.setattr("trtllm_dflash.train.phases.follow", ends_at_once)
    with pytest.raises(EngineError, match="--ranks 2: one of them ended before it was ready"):
        train_from_nothing(replies, data, tmp_path / "ended", packs=2, ranks=2)


def load_place(folder: Path) -> str:
    from safetensors import safe_open

    with safe_open(folder / CHECKPOINT, framework="pt") as opened:
        return str(opened.metadata()["place"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--max-seq-len", 16), r"two tokens or more; \d+ are too long for --max-seq-len 16$"),
        (("--max-seq-len", 192, "--max-tokens", 1), "no training prompt has a reply of two tokens or more$"),
    ],
)
def test_prompts_without_a_reply_to_train_on_are_refused_with_the_reason(words, says, data, tmp_path):
    message = run("train", *FLAGS, "--data", data, "--held-out", 0.3, *words, "--output", tmp_path).stderr
    assert re.search(says, message.strip().splitlines()[-1])


def test_ctrl_c_ends_with_130_and_half_a_line_of_replies_is_made_again(trained, data, tmp_path, monkeypatch):
    replies, _ = trained
    output = tmp_path / "state"
    shutil.copytree(replies, output)
    manifest = json.loads((output / "manifest.json").read_text())
    manifest["phases"] = {"split": manifest["phases"]["split"]}
    (output / "manifest.json").write_text(json.dumps(manifest))
    file = output / "replies" / "training.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-30])  # a process that was killed while it wrote
    monkeypatch.setattr(Trainer, "measure", lambda self: signal.raise_signal(signal.SIGINT))
    lengths = [word for name, value in LENGTHS.items() for word in ("--" + name.replace("_", "-"), value)]
    result = run("train", *FLAGS, "--data", data, *lengths, "--output", output, "--mask-token", 3)
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")
    assert sorted(file.read_text().splitlines()) == sorted(whole.splitlines())


# -- from nothing ------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive(beside="test_a_drafter_of_dflash_2_is_trained_exported_and_decodes_as_was_simulated")
def test_sixty_steps_from_nothing_draft_more_than_two_tokens_a_step(tmp_path):
    """Of one word problem with other names and numbers each time, on prompts that were held out."""
    chance = random.Random(1)
    rows = [
        f"Every month {name} puts {chance.randint(11, 99)} dollars into a box that already holds "
        f"{chance.randint(100, 400)} dollars. After {months} months she takes out {chance.randint(11, 99)} dollars "
        f"for a phone. How much money is left?"
        for name in ("Petra", "Mei", "Julia", "Vera")
        for months in range(3, 9)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    settings = {"target": str(TINY / "target"), "data": tmp_path / "data.jsonl", "device": "cpu", **LENGTHS}
    shape = {"layers": 1, "block": 8, "taps": (1, 2, 3, 4, 5, 6), "optimizer": "muon", "rate": 6e-3}
    steps = {"pack": 256, "anchors": 32, "steps": 60, "evaluate_every": 60}
    train(TrainSettings.model_validate({**settings, **shape, **steps}), tmp_path / "out", "train")
    before, after = [row["acceptance"]["tau"] for row in read_log(tmp_path / "out" / LOG) if "acceptance" in row]
    assert before < 1.1 and after > 2


# -- families ----------------------------------------------------------------------------------------------------------


@pytest.mark.principal("qwen3.5", "minimax-m2")
@pytest.mark.parametrize("family", LATER)
def test_a_drafter_for_a_target_of_any_family_is_trained_from_nothing(family, tmp_path):
    LATER[family](tmp_path / "target")
    chance = random.Random(0)
    rows = [{"prompt_ids": [chance.randrange(120) for _ in range(6)], "reply_ids": [5, 7] * 8} for _ in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"target": str(tmp_path / "target"), "data": tmp_path / "data.jsonl", "device": "cpu", "mask_token": 127}
    recipe = {"layers": 1, "block": 4, "pack": 64, "anchors": 16, "steps": 3, "rate": 1e-3, "objective": "ce"}
    lengths = {"max_seq_len": 64, "max_tokens": 8, "max_batch": 2, "held_out": 0.5, "evaluate_every": 3}
    train(TrainSettings.model_validate({**settings, **recipe, **lengths}), tmp_path / "out", "evaluate")
    losses = [row["loss"] for row in read_log(tmp_path / "out" / LOG) if "loss" in row]
    assert len(losses) == 3 and losses[2] < losses[0]
    pair = open_pair(tmp_path / "target", tmp_path / "out" / "drafter")
    assert pair.drafter is not None and pair.drafter.config.embedding_scale == pair.target_config.embedding_scale
