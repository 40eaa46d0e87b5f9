"""`serve --harvest`: some replies, as token ids, up to a size; nothing unless asked, and never at a request's cost."""

import json
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_target
from tests.test_service import Client
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.errors import CancelledError, SettingsError
from trtllm_dflash.runtime.harvest import FILE, Harvest
from trtllm_dflash.runtime.request import Sequence
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.train.prompts import split
from trtllm_dflash.train.settings import TrainSettings


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> Iterator[LLM]:
    target = make_target(tmp_path_factory.mktemp("pair") / "target")
    with LLM.from_pretrained(target, None, device="cpu", max_batch=2, max_seq_len=256) as llm:
        yield llm


def sequence(length: int) -> Sequence:
    return Sequence([1, 2], SamplingParams(), 9, frozenset(), token_ids=[3] * length)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_service_harvests_complete_replies_that_train_reads(llm, tmp_path):
    settings = ServiceSettings(harvest=str(tmp_path), harvest_share=1)
    service = llm.service(settings)
    completions = [Client(service, [5, 6, i], 8).wait()[-1].completion for i in range(3)]
    unwanted = Client(service, [9, 9, 9], 200)
    unwanted.first()
    service.cancel(unwanted.ticket)
    assert isinstance(unwanted.wait()[-1].error, CancelledError)
    service.close()
    expected = [{"prompt_ids": [5, 6, i], "reply_ids": reply.token_ids} for i, reply in enumerate(completions)]
    assert lines(tmp_path) == expected
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    parts = split(TrainSettings(target="t", data=tmp_path / FILE, held_out=0.8))
    assert sorted(list(record.reply_ids or []) for record in parts.training + parts.held_out) == sorted(
        row["reply_ids"] for row in expected
    )


def test_without_a_folder_nothing_is_written(llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    service = llm.service(ServiceSettings())
    Client(service, [5], 4).wait()
    service.close()
    assert not list(tmp_path.iterdir())


def test_it_takes_its_share_and_no_more_than_its_size(tmp_path):
    draws = iter([0.4, 0.5, 0.9, 0.0])
    some = Harvest(tmp_path / "some", 0.5, 10**6, lambda: next(draws))
    for length in (2, 3, 4, 5):
        some.take(sequence(length))
    assert [len(row["reply_ids"]) for row in lines(tmp_path / "some")] == [2, 5]

    size = (tmp_path / "some" / FILE).stat().st_size
    for _ in range(2):  # and what an earlier server wrote counts
        full = Harvest(tmp_path / "full", 1.0, 2 * size, lambda: 0.0)
        for _ in range(9):
            full.take(sequence(5))
    assert 0 < (tmp_path / "full" / FILE).stat().st_size <= 2 * size


def test_two_servers_do_not_harvest_into_one_folder(tmp_path):
    """One whose disk is full cuts off what the other has written since."""
    first = Harvest(tmp_path, 1, 10**6)
    with pytest.raises(SettingsError, match=f"^--harvest {tmp_path}: another server harvests there"):
        Harvest(tmp_path, 1, 10**6)
    first.close()
    Harvest(tmp_path, 1, 10**6).close()


def test_replies_that_are_not_the_targets_own_are_left_out(tmp_path):
    harvest = Harvest(tmp_path, 1.0, 10**6)
    for params in (
        SamplingParams(presence_penalty=1.0),
        SamplingParams(logit_bias={3: 5.0}),
        SamplingParams(bad_words=("no",)),
        SamplingParams(temperature=0.7, top_p=0.9),
    ):
        harvest.take(Sequence([1, 2], params, 9, frozenset(), token_ids=[3]))
    harvest.take(Sequence([1, 2], SamplingParams(), 9, frozenset(), token_ids=[4], grammar=object()))
    assert [row["reply_ids"] for row in lines(tmp_path)] == [[3]]  # of the one that is sampled


def test_a_disk_that_becomes_full_leaves_whole_lines(tmp_path, caplog):
    """A file may take but a part of a line without an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    harvest = Harvest(tmp_path, 1.0, 10**6, lambda: 0.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for _ in range(9):
            harvest.take(sequence(5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    taken = len(lines(tmp_path))
    assert 0 < taken < 9 and "harvest: ends" in caplog.text
    Harvest(tmp_path, 1.0, 10**6, lambda: 0.0).take(sequence(2))
    assert [len(row["reply_ids"]) for row in lines(tmp_path)] == [5] * taken + [2]


def test_a_disk_that_fails_ends_the_harvest_alone(tmp_path, caplog):
    with pytest.raises(SettingsError, match=r"--harvest .*: cannot be written"):
        Harvest(Path("/proc/none"), 1.0, 10**6)
    (tmp_path / FILE).symlink_to("/dev/full")
    harvest = Harvest(tmp_path, 1.0, 10**6, lambda: 0.0)
    for _ in range(2):
        harvest.take(sequence(3))
    assert "harvest: ends, for it cannot be written (No space left on device)" in caplog.text
    assert len(caplog.records) == 1
