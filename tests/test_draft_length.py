"""The draft length that follows the load."""

import errno
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from tests.conftest import TINY
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.cost.acceptance import ImposedAcceptance, chain_power
from trtllm_dflash.engine.ladder import batch_sizes, draft_lengths
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime import service
from trtllm_dflash.runtime.draft_length import AdaptiveDraftLength, DraftLength
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.runtime.step_times import FILE, decoding_times, step_times
from trtllm_dflash.runtime.verified import VerifiedDrafts
from trtllm_dflash.serving.repository import DeploySettings

LENGTHS = draft_lengths(16)


def times(cost_of_a_row, drafter=0.2):
    """Seconds as of a GPU: flat while rows are few, then in proportion to them."""
    return {
        (slots, drafts): max(1.0, cost_of_a_row * slots * (drafts + 1)) + (drafter if drafts else 0)
        for slots in (1, 2, 4, 8, 16, 32)
        for drafts in LENGTHS
    }


@pytest.mark.parametrize("drafted", [[15] * 6, [20] * 6, [15, 0, 15, 4, 20, 15], [0] * 6])
def test_sequences_are_counted_by_their_drafts_and_the_accepted_ones(drafted):
    accepted = [min(count, given) for count, given in zip([2, 0, 2, 4, 15, 0], drafted, strict=True)]
    expected = Counter((min(given, 15), n) for given, n in zip(drafted, accepted, strict=True) if given)
    verified = VerifiedDrafts(15)
    for steps in range(1, 40):
        verified.note(drafted, accepted)
        if steps % 19 == 0:
            assert verified.counts() == Counter({key: steps * count for key, count in expected.items()})


def follow(length, slots, survival, steps, seed=0, of_tree=None):
    """Runs a policy against drafts that survive each position with one probability; tokens a second, from the times.

    of_tree: that of the whole block's drafts, where those are a tree.
    """
    chance = random.Random(seed)
    tokens = seconds = 0.0
    drafts = length.choose(slots)
    for _ in range(steps):
        seconds += length._times.of(slots, drafts)
        p = of_tree if of_tree is not None and drafts == LENGTHS[-1] else survival
        for _ in range(slots):
            accepted = next((i for i in range(drafts) if chance.random() > p), drafts)
            length.observe([drafts], [accepted])
            tokens += accepted + 1
        drafts = length.choose(slots)
    return tokens / seconds


def expected_rate(length, drafts, slots, survival):
    """Tokens a second that drafting as much in every step gives in the mean."""
    return slots * sum(survival**i for i in range(drafts + 1)) / length._times.of(slots, drafts)


def test_lengths_end_with_the_whole_block():
    assert draft_lengths(16) == [0, 1, 2, 3, 5, 7, 11, 15]
    assert draft_lengths(10) == [0, 1, 2, 3, 5, 7, 9]
    assert draft_lengths(1) == [0]
    assert batch_sizes(12) == [1, 2, 4, 8, 12]


def test_few_slots_draft_the_whole_block_and_many_a_short_one():
    length = AdaptiveDraftLength(times(1 / 128))
    for slots in (1, 8, 32):
        follow(length, slots, 0.85, 300)
    assert length.choose(1) == 15
    assert 0 < length.choose(32) < 15


@pytest.mark.parametrize("slots", [1, 3, 8, 32])
@pytest.mark.parametrize("survival", [0.0, 0.3, 0.7, 0.95])
def test_it_is_as_fast_as_the_best_constant_but_for_the_probes(slots, survival):
    length = AdaptiveDraftLength(times(1 / 64))
    best = max(expected_rate(length, drafts, slots, survival) for drafts in LENGTHS)
    assert follow(length, slots, survival, 2000) > 0.95 * best


def test_it_is_never_slower_than_plain_decoding_by_more_than_the_probes():
    length = AdaptiveDraftLength(times(1.0))  # every row costs: drafting can only lose
    plain = expected_rate(length, 0, 32, 0.1)
    assert follow(length, 32, 0.1, 3000) > 0.97 * plain


@pytest.mark.parametrize("slots", [1, 8, 16, 32])
def test_trees_are_weighed_by_what_they_commit_and_chains_by_what_those_do(slots):
    """Whichever of them is drafted teaches of the other."""
    chain = 0.8
    tree = chain ** (1 / chain_power(15))
    length = AdaptiveDraftLength(times(1 / 80), tree=15)
    found = follow(length, slots, chain, 2000, of_tree=tree)
    every = {drafts: expected_rate(length, drafts, slots, chain) for drafts in LENGTHS[:-1]}
    every[15] = expected_rate(length, 15, slots, tree)
    assert found > 0.95 * max(every.values()), every


def test_trees_commit_as_many_more_tokens_as_was_measured():
    usual = ImposedAcceptance(6.49, 16)
    p = usual.tree_survival(15)
    assert sum(p**i for i in range(16)) == pytest.approx(1.109 * 6.49)
    assert p ** chain_power(15) == pytest.approx(usual.survival)
    assert ImposedAcceptance(5.0, 12).tree_survival(15) is None, "of blocks that were not measured"


def test_it_comes_back_when_drafts_become_good_again():
    length = AdaptiveDraftLength(times(1 / 200))
    follow(length, 4, 0.02, 1000)
    assert length.choose(4) <= 1
    follow(length, 4, 0.95, 3000)
    assert length.choose(4) >= 7


class _Random(DraftLength):
    """Any length at any step."""

    lengths = tuple(LENGTHS)

    def __init__(self):
        self._chance = random.Random(3)

    def choose(self, slots):
        return self._chance.choice(LENGTHS)


@pytest.fixture(scope="module")
def llm():
    folders = str(TINY / "target"), str(TINY / "drafter")
    with LLM.from_pretrained(*folders, precision="fp32", device="cpu", max_batch=3, max_seq_len=512) as llm:
        yield llm


@pytest.mark.principal("1")
@pytest.mark.slow
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_text_does_not_depend_on_the_length(llm, ahead):
    prompts = [[{"role": "user", "content": text}] for kind in read_prompts(2).values() for text in kind]
    params = [SamplingParams(max_tokens=50, temperature=0.8 if i % 3 == 0 else 0, seed=i) for i in range(len(prompts))]
    scheduler = Scheduler(llm.session, draft_length=_Random(), ahead=ahead)
    sequences = [llm.intake.sequence(*pair) for pair in zip(prompts, params, strict=True)]
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    replies = llm.generate(prompts, params)
    for sequence, reply in zip(sequences, replies, strict=True):
        assert sequence.completion().text == reply.text
    lengths = [len(reply.accepted_per_step) for reply in replies]
    assert sum(len(sequence.accepted_per_step) for sequence in sequences) > sum(lengths)
    drafted = scheduler.statistics.drafted
    assert drafted[1] > drafted[2] > drafted[15] > 0


def test_step_times_are_kept_with_the_engine(llm, tmp_path, monkeypatch):
    rows = 0
    run = llm.session.run

    def counted(step):
        nonlocal rows
        rows += sum(count for _, count in step.decode)
        return run(step)

    # A clock on which a row takes a second, however busy this machine is.
    monkeypatch.setattr(llm.session, "run", counted)
    monkeypatch.setattr("trtllm_dflash.runtime.step_times.time", SimpleNamespace(perf_counter=lambda: float(rows)))
    found = step_times(llm.session, tmp_path, LENGTHS)
    assert found == {(slots, drafts, 0): slots * (drafts + 1) for slots in (1, 3) for drafts in LENGTHS}
    monkeypatch.setattr("trtllm_dflash.runtime.step_times.measure", lambda session, lengths, shared: {(1, 0): 1.0})
    assert step_times(llm.session, tmp_path, LENGTHS) == found
    written = (tmp_path / FILE).read_text()
    for name in ("device", "rows"):
        kept = json.loads(written)
        kept["machine"][name] = "another"
        (tmp_path / FILE).write_text(json.dumps(kept))
        assert step_times(llm.session, tmp_path, LENGTHS) == {(1, 0, 0): 1.0}
    seconds = json.loads(written)
    seconds["times"]["drafting"][0][-1] = 0.0  # a rate would be without end
    for damaged in ("{", "[" * 100_000, json.dumps(seconds)):
        (tmp_path / FILE).write_text(damaged)
        assert step_times(llm.session, tmp_path, LENGTHS) == {(1, 0, 0): 1.0}


def test_step_times_are_not_kept_in_a_folder_that_is_read_only(llm, tmp_path, monkeypatch):
    """A read-only mount says so of a file that is not there, too."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("write_text", "replace", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr("trtllm_dflash.runtime.step_times.measure", lambda session, lengths, shared: {(1, 0): 1.0})
    assert step_times(llm.session, tmp_path, LENGTHS) == {(1, 0, 0): 1.0}
    assert not list(tmp_path.iterdir())


def test_step_times_that_are_not_kept_yet_are_measured_alone(llm, tmp_path, monkeypatch):
    measured = []

    def measure(session, lengths, shared):
        measured.append(list(lengths))
        return {(slots, drafts): 1.0 + len(measured) for slots in (1, 3) for drafts in lengths or [0]}

    monkeypatch.setattr("trtllm_dflash.runtime.step_times.measure", measure)
    for lengths in ([7], [], [0, 7], [7, 0], []):
        found = step_times(llm.session, tmp_path, lengths)
        every = {(slots, drafts) for slots in (1, 3) for drafts in lengths or [0]}
        assert set(decoding_times(found, lengths or [0])) == every
    assert measured == [[7], [], [0]]
    plain = {(slots, 0, 0): 3.0 for slots in (1, 3)}
    assert step_times(llm.session, tmp_path, []) == plain  # not those of a drafter that keeps up
    assert set(decoding_times(step_times(llm.session, tmp_path, [7]), [7])) == {(1, 7), (3, 7)}


def test_step_times_of_other_numbers_of_slots_are_measured_anew(llm, tmp_path, monkeypatch):
    """As of an engine that was built again, for more slots: lengths that are kept and others go together."""

    def measure(session, lengths, shared):
        return {(slots, drafts): 1.0 for slots in {1, session.config.max_batch} for drafts in lengths}

    monkeypatch.setattr("trtllm_dflash.runtime.step_times.measure", measure)
    with monkeypatch.context() as patch:
        patch.setattr(llm.session, "config", llm.config.model_copy(update={"max_batch": 2}))
        step_times(llm.session, tmp_path, [0, 7])
    found = decoding_times(step_times(llm.session, tmp_path, [0, 7, 15]), [0, 7, 15])
    assert set(found) == {(slots, drafts) for slots in (1, 3) for drafts in (0, 7, 15)}
    assert AdaptiveDraftLength(found).choose(2) in (0, 7, 15)


def test_a_length_that_the_engine_cannot_draft_is_refused(llm):
    with pytest.raises(SettingsError, match=r"--draft-length 16: this engine drafts up to 15"):
        llm.service(ServiceSettings(draft_length=16))


@pytest.mark.parametrize("kind", [ServiceSettings, DeploySettings])
def test_a_length_is_read_from_a_text_as_from_a_number(kind):
    lengths = {"auto": "auto", "7": 7, "0": 0, 7: 7}
    assert {given: kind(draft_length=given).draft_length for given in lengths} == lengths
    assert kind().draft_length == "auto"
    for wrong in ("", "seven", "-1", "1.5", -1, 1.0, True, None):
        with pytest.raises(ValidationError, match="choose auto, or a number of tokens"):
            kind(draft_length=wrong)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"draft_length": "auto"}, "0 to 15, what the load makes best by step times (auto)"),
        ({"draft_length": 7}, "7 (--draft-length)"),
        ({"draft": False}, "0: --no-draft"),
    ],
)
def test_a_service_logs_once_how_much_it_drafts_and_why(llm, settings, says, caplog, monkeypatch):
    measured = {(slots, drafts, 0): seconds for (slots, drafts), seconds in times(1 / 128).items()}
    monkeypatch.setattr(service, "step_times", lambda session, folder, lengths: measured)
    with caplog.at_level("INFO", "trtllm_dflash"):
        llm.service(ServiceSettings(**settings)).close()
    lines = [record.getMessage() for record in caplog.records if "draft length" in record.getMessage()]
    assert lines == [f"{llm.config.name}: draft length {says}"]
