"""Whole trainings on a GPU: acceptance is kept, and is that of real decoding; a pause changes no bit."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TINY
from tests.test_train_run import LENGTHS, Killed, train_from_nothing
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.train.phases import train
from trtllm_dflash.train.settings import TrainSettings
from trtllm_dflash.train.trainer import CHECKPOINT, LOG, read_log

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Sixteen prompts of each kind."""
    rows = [(kind, text) for kind, texts in read_prompts(16).items() for text in texts]
    file: Path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "domain": kind}) + "\n" for kind, text in rows))
    return file


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> tuple[Path, dict]:
    """30 steps from the shipped drafter, all phases: the state directory, and the report."""
    output = tmp_path_factory.mktemp("train") / "tiny"
    settings = {"target": str(TINY / "target"), "from": str(TINY / "drafter"), "data": data, "device": "cuda"}
    recipe = {"pack": 1024, "anchors": 64, "steps": 30, "rate": 1e-5, "evaluate_every": 30}
    report = train(TrainSettings.model_validate({**settings, **recipe, **LENGTHS}), output, say=print)
    assert report is not None
    return output, report


def test_thirty_small_steps_keep_the_acceptance_which_is_that_of_real_decoding(trained):
    _, report = trained
    before, after = report["evaluations"]
    print(before["tau"], after["tau"], report["exported"]["tau"], report["decoded"])
    assert before["tau"] > 4
    assert after["tau"] == pytest.approx(before["tau"], rel=0.02)
    assert report["exported"]["tau"] == pytest.approx(report["decoded"]["tau"], rel=0.03)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_training_that_was_killed_is_equal_to_one_that_was_not(optimizer, trained, data, tmp_path):
    replies, _ = trained
    recipe = {"attention": "flex", "optimizer": optimizer, "anchors": 16}
    begin = partial(train_from_nothing, replies, data, device="cuda", **recipe)
    begin(tmp_path / "whole")

    def kill(what: str, done: int, total: int) -> None:
        if (what, done) == ("training", 5):
            raise Killed

    with pytest.raises(Killed):
        begin(tmp_path / "paused", kill)
    begin(tmp_path / "paused")
    folders = tmp_path / "whole", tmp_path / "paused"
    whole, parts = (load_file(folder / CHECKPOINT) for folder in folders)
    differ = {
        key: (whole[key] - parts[key]).abs().max().item() for key in whole if not torch.equal(whole[key], parts[key])
    }
    print(len(differ), "of", len(whole), "tensors differ", dict(list(differ.items())[:4]))
    assert whole.keys() == parts.keys() and not differ
    losses, others = ([(row["step"], row.get("loss")) for row in read_log(folder / LOG)] for folder in folders)
    assert losses == others


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_two_gpus_train_as_one_with_the_same_packs(trained, data, tmp_path):
    replies, _ = trained
    for ranks in (1, 2):
        recipe = {"packs": 2, "ranks": ranks, "steps": 4, "evaluate_every": 2, "attention": "flex", "anchors": 16}
        train_from_nothing(replies, data, tmp_path / str(ranks), device="cuda", **recipe)
    one, two = (load_file(tmp_path / ranks / CHECKPOINT) for ranks in "12")
    differ = {key: (one[key] - two[key]).abs().max().item() for key in one if not torch.equal(one[key], two[key])}
    print(len(differ), "of", len(one), "tensors differ, at most by", max(differ.values(), default=0))
    assert one.keys() == two.keys() and all(difference < 2e-5 for difference in differ.values())
    logs = [read_log(tmp_path / ranks / LOG) for ranks in "12"]
    for alone, shared in zip(*logs, strict=True):
        assert shared.get("loss", 0) == pytest.approx(alone.get("loss", 0), rel=1e-4)
        # Ranks measure on documents packed otherwise: a draft may fall differently where two tokens are as likely.
        taus = [row.get("acceptance", {"tau": 0})["tau"] for row in (alone, shared)]
        assert taus[1] == pytest.approx(taus[0], rel=0.02)
