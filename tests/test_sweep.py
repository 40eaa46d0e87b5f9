"""The sweep: loads, arms, acceptance that is imposed, what is read off the frontier, files, and going on."""

import asyncio
import csv
import json
import re
import struct
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import refusal, run, succeeds
from tests.test_sweep_load import FixedServer
from tests.virtual_time import run_virtually
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.imposed import draw_accepted
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.output import held
from trtllm_dflash.runtime.request import Update
from trtllm_dflash.sweep.dataset import Dataset, Sample, read_dataset
from trtllm_dflash.sweep.load import Reply, Request
from trtllm_dflash.sweep.local_target import LocalTarget
from trtllm_dflash.sweep.pareto import Measured, compare, frontier, measured, rate_at
from trtllm_dflash.sweep.plots import plot_acceptance
from trtllm_dflash.sweep.report import notes, read_plan
from trtllm_dflash.sweep.results import read_results
from trtllm_dflash.sweep.runtime_metrics import Drafts, Reading
from trtllm_dflash.sweep.settings import SweepSettings
from trtllm_dflash.sweep.summary import Requests, Round
from trtllm_dflash.sweep.sweep import Sweep, open_results, plan_results, search_integer, search_real, tidy_command

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the sweep extra)")

ENGINE = object()  # in arguments: the tiny pair's
QUICK = ("--shape", "tiny", "--prompt-tokens", 8, "--output-tokens", 24, "--device", "cpu", "--requests", 8)
SAMPLES = Dataset("test", tuple(Sample((f"prompt {i}",), category="ab"[i % 2]) for i in range(40)))


# -- the frontier ----------------------------------------------------------------------------------------------------


def test_the_frontier_is_what_no_other_point_beats():
    points = [(100.0, 10.0), (80.0, 20.0), (70.0, 15.0), (50.0, 40.0), (40.0, 38.0)]
    assert frontier(points) == [(50.0, 40.0), (80.0, 20.0), (100.0, 10.0)]


def test_throughput_at_a_speed_is_read_off_the_frontier():
    points = [(100.0, 10.0), (50.0, 40.0)]
    assert rate_at(points, 75).value == pytest.approx(25)
    assert rate_at(points, 100).value == 10
    assert rate_at(points, 101).bound == "not reached"
    assert (rate_at(points, 20).value, rate_at(points, 20).bound) == (40, "at least")
    assert rate_at([], 20).bound == "not reached"


def test_throughput_that_a_larger_load_does_not_raise_is_all_there_is():
    points = [(100.0, 10.0), (50.0, 40.0), (30.0, 35.0)]
    assert (rate_at(points, 40).value, rate_at(points, 40).bound) == (40, "")
    assert (rate_at(points, 20).value, rate_at(points, 20).bound) == (40, "at least")


@pytest.mark.parametrize(("ends", "speed"), [([0.2, 0.2, 0.2], None), ([0.2, 0.2, 0.7], None), ([0.2, 0.7, 1.2], 20.0)])
def test_a_load_has_no_speed_where_the_median_reply_came_at_once(ends, speed):
    counts = [11] * len(ends)
    told = {"prompt_tokens": [8] * 3, "steps": [1] * 3, "accepted": [10] * 3, "late": [0.0] * 3}
    requests = Requests(sample=[0, 1, 2], turn=[0] * 3, ttft=[0.2] * 3, e2e=ends, tokens=counts, **told)
    load = measured(
        [Round(arm="draft", load=1, round=0, seconds=2.0, tokens=sum(counts), requests=requests)], closed=True
    )
    assert (load and load.speed) == (speed and pytest.approx(speed))


def made(load, tpot, spread, seed, tokens=100, count=200):
    """A load of a closed loop whose replies' TPOT vary."""
    chance = np.random.default_rng(seed)
    each = tpot * chance.lognormal(0, spread, count)
    seconds = each * tokens
    rate = load * tokens / seconds.mean()
    key = [(0, i, 0) for i in range(count)]
    return Measured(load, rate, key, np.full(count, float(tokens)), seconds, each, closed=True)


def test_the_interval_holds_the_truth_and_narrows_with_more_requests():
    def found_with(count):
        arms = {
            arm: [made(load, 0.01 * load**0.5 / speed, 0.3, 5, count=count) for load in (1, 2, 4)]
            for arm, speed in (("plain", 1.0), ("draft", 2.0))
        }
        return compare(arms, (60.0,), "plain")[0]

    one, many = found_with(50), found_with(800)
    for found in (one, many):
        for arm in ("plain", "draft"):
            reading = found.arms[arm]
            assert reading.low < reading.value < reading.high
    assert many.arms["plain"].high - many.arms["plain"].low < one.arms["plain"].high - one.arms["plain"].low


def test_what_differs_between_prompts_is_not_held_against_the_ratio():
    """The same requests in both arms: each is twice as fast drafted, and so is every resample of them."""
    plain = [made(load, 0.01 * load**0.5, 0.5, load) for load in (1, 2, 4)]
    twice = [
        Measured(one.load, 2 * one.rate, one.key, one.tokens, one.seconds / 2, one.tpot / 2, True) for one in plain
    ]
    speed = 80.0
    (found,) = compare({"plain": plain, "draft": twice}, (speed,), "plain")
    assert found.ratios["draft"].low < found.ratios["draft"].value < found.ratios["draft"].high
    one = rate_at([(p.speed, p.rate) for p in plain], speed).value
    two = rate_at([(p.speed, p.rate) for p in twice], speed).value
    assert found.ratios["draft"].value == pytest.approx(two / one)
    apart = [replace(p, key=[(0, i + 1, 0) for i in range(len(p.key))]) for p in twice]
    (loose,) = compare({"plain": plain, "draft": apart}, (speed,), "plain")
    assert (
        found.ratios["draft"].high - found.ratios["draft"].low < loose.ratios["draft"].high - loose.ratios["draft"].low
    )
    (again,) = compare({"plain": plain, "draft": twice}, (speed,), "plain")
    assert again == found


def test_replicates_of_replies_of_one_token_have_no_speed_and_take_no_part():
    """Of two replies one has a speed: replicates without it are a quarter, too many for an interval."""
    one = Measured(1, 10.0, [(0, 0, 0), (0, 1, 0)], np.array([1.0, 11]), np.ones(2), np.array([np.nan, 0.05]), True)
    speeds, _ = one.resampled(np.array([[0, 0], [0, 1], [1, 1]]))
    assert np.isnan(speeds[0]) and speeds[1] == speeds[2] == one.speed
    (found,) = compare({"plain": [one]}, (10.0,), "plain")
    assert (found.arms["plain"].value, found.arms["plain"].low) == (10.0, None)
    many = replace(one, key=[*one.key, (0, 2, 0)] * 4, tpot=np.array([np.nan, *[0.05] * 11]))
    many = replace(many, tokens=np.full(12, 11.0), seconds=np.ones(12))
    assert compare({"plain": [many, one]}, (10.0,), "plain")[0].arms["plain"].low > 0


def test_a_ratio_that_cannot_be_known_is_not_given():
    plain, draft = [made(1, 0.01, 0.1, 1)], [made(1, 0.005, 0.1, 2)]
    below, between, above = compare({"plain": plain, "draft": draft}, (20.0, 150.0, 900.0), "plain")
    assert (below.ratios["draft"].value, below.ratios["draft"].bound) == (None, "unknown")
    assert (between.arms["plain"].bound, between.ratios["draft"].bound) == ("not reached", "not reached")
    assert above.arms["draft"].bound == "not reached"


# -- sweeping a server of known timing ---------------------------------------------------------------------------------


class TwoSpeeds(FixedServer):
    """Plain replies take twice as long for each token, and more clients make all slower."""

    async def send(self, request):
        self.gap = 0.02 * (2 if request.arm == "plain" else 1) * (1 + self.running / 8)
        return await super().send(request)


def sweep(target, folder, resume=False, dataset=SAMPLES, **settings):
    settings = SweepSettings.model_validate({"url": "test:1", **settings})
    results = open_results(plan_results(settings, dataset, gpus=settings.gpus), folder, resume, force=False)
    run_virtually(Sweep(settings, dataset, target, results, folder).run())
    return results


def test_arms_take_turns_on_the_same_prompts_and_warm_up_on_others(tmp_path):
    server = TwoSpeeds()
    results = sweep(server, tmp_path, concurrency="4", compare="plain,draft", requests=16, at="10,60", gpus=2)
    arms = [request.arm for request in server.asked]
    # Warm-up of 4 and 8 that count: plain, draft, and once more the other way round.
    assert arms == ["plain"] * 12 + ["draft"] * 24 + ["plain"] * 12
    prompts = [int(request.sample.turns[0].split()[1]) for request in server.asked]
    assert sorted(prompts[:4]) == [36, 37, 38, 39]
    assert sorted(prompts[4:12]) == sorted(prompts[16:24]) == list(range(8))
    assert sorted(prompts[28:36]) == sorted(prompts[40:48]) == list(range(8, 16))
    plain, draft = results.points
    assert (plain.requests, draft.requests) == (16, 16)
    assert draft.tokens_per_second_per_user == pytest.approx(2 * plain.tokens_per_second_per_user, rel=0.01)
    assert draft.tokens_per_second_per_gpu == draft.output_tokens_per_second / 2
    assert [row.at for row in results.fixed_speed] == [10, 60]


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path):
    class Breaks(TwoSpeeds):
        async def send(self, request):
            if len(self.asked) == 40:
                raise KeyboardInterrupt
            return await super().send(request)

    asked = {"concurrency": "1,2", "compare": "plain,draft", "requests": 16}
    with pytest.raises(KeyboardInterrupt):
        sweep(Breaks(), tmp_path, **asked)
    kept = read_results(tmp_path)
    assert not kept.complete
    assert 0 < len(kept.rounds) < 8
    server = TwoSpeeds()
    results = sweep(server, tmp_path, resume=True, **asked)
    assert results.complete
    assert len(results.rounds) == 8
    assert results.rounds[: len(kept.rounds)] == kept.rounds
    assert len(server.asked) < 8 * 10 - len(kept.rounds) * 8
    assert read_results(tmp_path) == results
    with pytest.raises(SettingsError, match="--resume: requests was 16, and is 8 now"):
        sweep(server, tmp_path, resume=True, **{**asked, "requests": 8})
    with pytest.raises(SettingsError, match="has results; give --resume"):
        sweep(server, tmp_path, **asked)


def test_rounds_in_which_requests_failed_are_measured_again(tmp_path):
    class GoesAway(TwoSpeeds):
        async def send(self, request):
            reply = await super().send(request)
            gone = "shutdown: the server takes no more requests"
            return Reply(error=gone) if len(self.asked) > 12 else reply

    asked = {"concurrency": "1", "compare": "plain,draft", "requests": 8}
    with pytest.raises(EngineError, match="no request succeeded"):
        sweep(GoesAway(), tmp_path, **asked)
    *whole, broken = read_results(tmp_path).rounds
    assert broken.errors and broken.requests.tokens and not any(round_.errors for round_ in whole)
    results = sweep(TwoSpeeds(), tmp_path, resume=True, **asked)
    assert results.complete and results.rounds[: len(whole)] == whole
    assert [(point.requests, point.errors) for point in results.points] == [(8, {}), (8, {})]


def test_rounds_of_other_kernels_or_another_gpu_are_not_gone_on_from(tmp_path):
    """Of an engine in this process; a server's are its own."""
    settings = SweepSettings.model_validate({"shape": "tiny", "concurrency": "1", "requests": 8})

    def resumed(attention, gpu):
        engine = {"computes": {"attention": attention}}
        fresh = plan_results(settings, SAMPLES, engine=engine, gpus=1, machine={"gpu": gpu})
        return open_results(fresh, tmp_path, resume=(tmp_path / "results.json").exists(), force=False)

    resumed("our CUDA kernels 8", "NVIDIA H200").write(tmp_path)
    assert resumed("our CUDA kernels 8", "NVIDIA H200")
    for attention, gpu in (
        ("torch", "NVIDIA H200"),
        ("our CUDA kernels 9", "NVIDIA H200"),
        ("our CUDA kernels 8", "L40S"),
    ):
        with pytest.raises(SettingsError, match=r"--resume: (computes|gpu) was "):
            resumed(attention, gpu)


@pytest.mark.parametrize("force", [False, True])
def test_results_are_not_written_into_an_engine(tmp_path, force):
    (tmp_path / "config.json").write_text("{}")
    settings = SweepSettings.model_validate({"shape": "tiny", "concurrency": "1", "requests": 8})
    with pytest.raises(SettingsError, match=r"has a config\.json, as engines do; name another folder"):
        open_results(plan_results(settings, SAMPLES, gpus=1), tmp_path, resume=False, force=force)


@pytest.mark.parametrize("name", ["pareto.png", "acceptance.png", "report.html", "results.csv"])
def test_files_that_no_sweep_wrote_are_not_replaced(tmp_path, name):
    settings = SweepSettings.model_validate({"shape": "tiny", "concurrency": "1", "requests": 8})
    fresh = plan_results(settings, SAMPLES, gpus=1)
    (tmp_path / name).write_text("mine")
    with pytest.raises(SettingsError, match=rf"has a {re.escape(name)}; use another, or --force to replace it"):
        open_results(fresh, tmp_path, resume=False, force=False)
    assert open_results(fresh, tmp_path, resume=False, force=True) is fresh
    sweep(TwoSpeeds(), tmp_path / "run", concurrency="1", requests=8)
    if name != "results.csv":
        assert f"has a {name}" in refusal("report", tmp_path / "run", "--output", tmp_path)
        succeeds("report", tmp_path / "run", "--output", tmp_path, "--force")
    assert ((tmp_path / name).exists() and (tmp_path / name).read_bytes() == b"mine") == (name == "results.csv")


def test_a_longer_list_of_loads_may_go_on_from_a_shorter_one(tmp_path):
    sweep(TwoSpeeds(), tmp_path, concurrency="1", requests=8)
    results = sweep(TwoSpeeds(), tmp_path, resume=True, concurrency="1,2", requests=8)
    assert [point.load for point in results.points] == [1, 2]


@pytest.mark.parametrize("arms", ["draft", "plain,draft"])
def test_the_largest_load_that_meets_a_target_is_found(tmp_path, arms):
    results = sweep(TwoSpeeds(), tmp_path, compare=arms, slo_tps=50, max_concurrency=64, requests=16, warmup=0)
    by_load = {(point.arm, point.load): point for point in results.points}
    for limit in results.limits:
        assert 1 < limit.load < limit.missed == limit.load + 1
        assert by_load[limit.arm, limit.load].tokens_per_second_per_user >= 50
        assert by_load[limit.arm, limit.missed].tokens_per_second_per_user < 50
    assert [limit.arm for limit in results.limits] == arms.split(",")


def test_a_target_for_the_first_token_bounds_the_load_too(tmp_path):
    class Queues(FixedServer):
        async def send(self, request):
            self.ttft = 0.1 * (self.running + 1)
            return await super().send(request)

    results = sweep(Queues(), tmp_path, slo_ttft_ms=450, slo_percentile=99, max_concurrency=32, requests=64, warmup=0)
    (limit,) = results.limits
    assert (limit.load, limit.missed) == (4, 5)


def test_a_target_for_the_first_token_holds_for_replies_of_one_token_too(tmp_path):
    one = {"max_concurrency": 4, "requests": 8, "warmup": 0}
    (limit,) = sweep(FixedServer(responses=0), tmp_path / "ttft", slo_ttft_ms=450, **one).limits
    assert (limit.load, limit.missed) == (4, None)
    (limit,) = sweep(FixedServer(responses=0), tmp_path / "tps", slo_tps=1, **one).limits  # they have no speed
    assert limit.load is None


@pytest.mark.parametrize(
    "truth, most, found", [(5, 64, (5, 6)), (0, 64, (None, 1)), (64, 64, (64, None)), (1, 1, (1, None))]
)
def test_bisection_finds_the_last_that_meets(truth, most, found):
    probes = []

    async def meets(load):
        probes.append(load)
        return load <= truth

    assert run_virtually(search_integer(meets, most)) == found
    assert len(probes) <= 13
    assert len(probes) == len(set(probes))


@pytest.mark.parametrize("truth, found", [(7.3, True), (0.01, None), (100, "all")])
def test_bisection_of_rates_comes_within_a_twentieth(truth, found):
    async def meets(load):
        return load <= truth

    good, bad = run_virtually(search_real(meets, 1.0, 64.0, 1.05))
    if found is True:
        assert good <= truth < bad <= 1.0501 * good
    else:
        assert (good, bad) == ((64.0, None) if found == "all" else (None, 1.0))


def test_where_nothing_succeeds_the_sweep_ends_with_the_server_s_words(tmp_path):
    class Refuses(FixedServer):
        async def send(self, request):
            return Reply(error="the queue is full")

    with pytest.raises(EngineError, match="served, 1 clients: no request succeeded: the queue is full"):
        sweep(Refuses(), tmp_path, concurrency="1", requests=4)


# -- in this process, with imposed acceptance --------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1.0, 2.5, 6.49, 16.0])
def test_drawn_acceptance_follows_its_curve(tokens):
    imposed = ImposedAcceptance(tokens, 16)
    seeds = torch.arange(40_000) % 173
    start = torch.arange(40_000, dtype=torch.int32) // 173
    drawn = draw_accepted(seeds, start, imposed.survival, 16)
    assert drawn.dtype == torch.int32
    assert 0 <= drawn.min() <= drawn.max() <= 15
    assert drawn.double().mean() + 1 == pytest.approx(tokens, rel=0.02)
    for depth in (1, 5, 15):
        share = (drawn >= depth).double().mean().item()
        assert share == pytest.approx(imposed.survival**depth, abs=0.01)
    assert torch.equal(drawn, draw_accepted(seeds, start, imposed.survival, 16))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A small sweep of random weights in this process, and what it printed."""
    folder = tmp_path_factory.mktemp("sweep")
    loads = ("--concurrency", "1,3", "--compare", "plain,draft", "--draft-length", 7, "--at", "1,100000")
    printed = succeeds("sweep", *QUICK, *loads, "--simulate-acceptance", 4, "--output", folder)
    return folder, printed


@pytest.mark.slow
def test_imposed_acceptance_is_served_and_said_to_be_imposed(swept):
    folder, printed = swept
    results = read_results(folder)
    assert [(point.load, point.arm) for point in results.points] == [
        (load, arm) for load in (1, 3) for arm in ("plain", "draft")
    ]
    for point in results.points:
        assert point.requests == 8
        assert not point.errors
        assert point.mean_output_tokens == 24
        assert point.mean_prompt_tokens == 8
    drafted = [point for point in results.points if point.arm == "draft"]
    survival = results.imposed_acceptance["survival"]
    for point in drafted:
        # 8 replies of 23 tokens after the first: few steps, and the last of each is cut.
        assert 2.6 < point.acceptance_length < 5
        assert len(point.acceptance_by_position) == 7
        assert point.acceptance_by_position[0] == pytest.approx(survival, abs=0.2)
    assert results.points[0].acceptance_length is None
    assert not any(point.accepted_by_rank for point in results.points)
    assert "imposed, not measured" in printed
    assert "random tokens" in printed
    page = (folder / "report.html").read_text()
    assert "imposed, not measured" in page
    assert "random tokens" in page


def test_a_server_that_ends_replies_sooner_than_asked_is_said_to(swept):
    """One that does not know `ignore_eos`: its figures are of shorter replies than the other arm's."""
    results = read_results(swept[0])
    assert not any("a reply" in note for note in notes(results))
    points = [
        point.model_copy(update={"mean_output_tokens": 17.25}) for point in results.points if point.arm == "draft"
    ]
    kept = [point for point in results.points if point.arm == "plain"]
    [note] = [note for note in notes(results.model_copy(update={"points": kept + points})) if "a reply" in note]
    assert note.startswith("tokens a reply, of 24 asked for: draft 17.25; its server ends replies sooner")


def test_results_say_what_they_are_and_name_no_place_of_the_machine(swept):
    folder, _ = swept
    document = json.loads((folder / "results.json").read_text())
    assert document["schema_version"] == 1
    assert document["complete"]
    assert {"torch", "python", "trtllm-dflash"} <= set(document["versions"])
    assert document["machine"]["cores"] >= 1
    assert len(document["dataset"]["sha256"]) == 64
    assert document["engine"]["random_weights"]
    assert document["command"].startswith("trtllm-dflash")
    assert str(folder.parent) not in (folder / "results.json").read_text()
    assert document["gpus"] is None
    assert [point["tokens_per_second_per_gpu"] for point in document["points"]] == [None] * 4
    lines = (folder / "results.csv").read_text().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("arm,load,")


def test_pictures_and_page_are_there_and_the_page_needs_nothing_else(swept):
    folder, _ = swept
    for name in ("pareto.png", "acceptance.png"):
        image = (folder / name).read_bytes()
        assert image.startswith(b"\x89PNG")
        assert 5_000 < len(image) < 200_000
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    links = re.findall(r'(?:src|href)="([^"]{0,20})', page)
    assert len(links) == 2
    assert all(link.startswith("data:image/png") for link in links)
    assert "<script" not in page


def test_a_command_is_kept_without_the_machine_s_folders():
    shown = tidy_command(["sweep", "--output", "/home/me/out", "--engine=/data/mine", "--url", "localhost:8001"])
    assert shown == "trtllm-dflash sweep --output out --engine=mine --url localhost:8001"


@pytest.mark.slow
def test_a_command_that_is_not_utf_8_is_kept_as_a_text():
    assert tidy_command(["sweep", "--output", "caf\udce9"]) == "trtllm-dflash sweep --output 'caf?'"


@pytest.mark.slow
def test_names_that_are_no_formula_and_not_utf_8_are_drawn(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "x", "category": name}) + "\n" for name in ("$_{$", "b")))
    dataset = read_dataset((prompts,))
    runs = [plan_results(SweepSettings(url="a:1", label=label), dataset, gpus=None) for label in ("$_{$", "\udcff")]
    for number, run_ in enumerate(runs):
        columns = {"sample": [0, 1], "turn": [0, 0], "late": [0, 0], "ttft": [0.1, 0.1], "e2e": [1, 1]}
        requests = Requests(**columns, tokens=[9, 9], prompt_tokens=[1, 1], steps=[2, 2], accepted=[6, 6])
        of_round = {"drafted_at": [4, 4], "accepted_at": [4, 2], "requests": requests}
        run_.rounds = [Round(arm="served", load=1, round=0, seconds=1, tokens=18, **of_round)]
        run_.count(())
        (tmp_path / str(number)).mkdir()
        run_.write(tmp_path / str(number))
    succeeds("report", tmp_path / "0", tmp_path / "1", "--output", tmp_path / "page")
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "$_{$ and ?" in page


def test_a_finished_sweep_is_shown_again_compared_and_drawn_over_a_plan(swept, tmp_path):
    folder, _ = swept
    text = succeeds("report", folder)
    assert "imposed, not measured" in text
    assert text.count("plain") == 2
    other = tmp_path / "other"
    other.mkdir()
    results = read_results(folder)
    results.label, results.gpus = "twice", 2
    for round_ in results.rounds:
        round_.seconds /= 2
    results.count(())
    results.write(other)
    shown = run("report", folder, other, "--at", 1, "--output", tmp_path / "both")
    assert shown.exit_code == 0
    text = shown.stdout
    assert "twice: draft" in text
    assert "twice drafted" not in text
    assert "warning: not the same in these sweeps: the number of GPUs;" in shown.stderr
    assert "the number of GPUs" in (tmp_path / "both" / "report.html").read_text()
    assert (tmp_path / "both" / "pareto.png").exists()
    assert "twice" in (tmp_path / "both" / "report.html").read_text()
    plan = tmp_path / "plan.json"
    points = [
        {"arm": arm, "batch": n, "tokens_per_second_per_user": 200 / n, "tokens_per_second_per_gpu": 100 * n, "x": 1}
        for arm in ("plain", "draft")
        for n in (1, 4)
    ]
    plan.write_text(json.dumps({"points": points, "gpu": "b200"}))
    succeeds("report", other, "--plan", plan, "--output", tmp_path / "planned")
    assert (tmp_path / "planned" / "pareto.png").read_bytes() != (tmp_path / "both" / "pareto.png").read_bytes()
    assert "--gpus" in refusal("report", folder, "--plan", plan)
    assert "give one" in refusal("report", folder, other, "--plan", plan)
    plan.write_text(json.dumps({"points": [{"arm": "other"}]}))
    assert "--plan" in refusal("report", other, "--plan", plan)
    assert "same label" in refusal("report", folder, folder)
    (other / "results.json").write_text('{"schema_version": 9}')
    assert "schema version 9" in refusal("report", other)


def test_results_and_plans_that_are_nested_without_end_are_one_line(swept, tmp_path):
    file = tmp_path / "file.json"
    file.write_text("[" * 100_000)
    assert "cannot be read as a sweep's results" in refusal("report", file)
    nowhere = tmp_path / "nowhere"
    assert refusal("report", nowhere) == f"error: {nowhere}: cannot be read: No such file or directory"
    assert "cannot be read as JSON" in refusal("report", swept[0], "--plan", file)


def test_results_whose_parts_do_not_belong_together_are_one_line(swept, tmp_path):
    document, file = json.loads((swept[0] / "results.json").read_text()), tmp_path / "file.json"
    file.write_text(json.dumps({**document, "points": document["points"][1:]}))
    assert "not those of the rounds" in refusal("report", file)
    document["rounds"][0]["requests"]["ttft"].pop()
    file.write_text(json.dumps(document))
    assert "rounds.0.requests: Value error, its columns are not all of the same length" in refusal("report", file)


def test_a_second_sweep_into_a_folder_is_refused_while_the_first_one_runs(tmp_path):
    flags = ("sweep", "--shape", "tiny", "--device", "cpu", "--concurrency", 1, "--requests", 1, "--output", tmp_path)
    with held(tmp_path, "sweep"):
        assert "another sweep is using it" in refusal(*flags)
    assert not list(tmp_path.iterdir())


def test_a_plan_is_drawn_with_its_best_draft_lengths(tmp_path):
    plan, build = tmp_path / "plan.json", ("build", "--plan", "--model", "qwen3-8b", "--json")
    plan.write_text(succeeds(*build, "--gpu", "h200", "--acceptance", 6.49))
    points = json.loads(plan.read_text())["points"]
    plain, draft = read_plan(plan)
    batches = sorted({point["batch"] for point in points})
    assert [batch for batch, *_ in plain.points] == [batch for batch, *_ in draft.points] == batches
    for batch, speed, rate in draft.points:
        rates = [p["tokens_per_second_per_gpu"] for p in points if (p["batch"], p["arm"]) == (batch, "draft")]
        assert rate == max(rates) == pytest.approx(batch * speed)
    plan.write_text(succeeds(*build, "--gpu", "h200"))
    assert [predicted.arm for predicted in read_plan(plan)] == ["plain"]
    plan.write_text(succeeds(*build))
    with pytest.raises(SettingsError, match="is of several GPUs; name the one"):
        read_plan(plan)


@pytest.mark.slow
def test_an_engine_is_swept_with_its_real_acceptance_and_text_of_its_own(tiny_engine, tmp_path):
    loads = ("--concurrency", 1, "--compare", "draft", "--draft-length", 15, "--requests", 4, "--max-tokens", 48)
    text = succeeds("sweep", "--engine", tiny_engine, *loads, "--warmup", 0, "--device", "cpu", "--output", tmp_path)
    assert "imposed" not in text
    (point,) = read_results(tmp_path).points
    with LLM.load(tiny_engine, "cpu") as llm:
        samples = read_dataset().shuffled(0).samples[:4]
        replies = llm.generate([sample.messages() for sample in samples], SamplingParams(max_tokens=48))
    steps = sum(reply.steps for reply in replies)
    assert point.acceptance_length == pytest.approx(sum(len(reply.token_ids) - 1 for reply in replies) / steps)
    assert point.mean_output_tokens == sum(len(reply.token_ids) for reply in replies) / 4
    reached = [sum(n > i for reply in replies for n in reply.accepted_per_step) / steps for i in range(15)]
    assert point.acceptance_by_position == pytest.approx(reached)
    assert point.accepted_by_rank == [], "chains have none"


@pytest.mark.principal("draft")
@pytest.mark.slow
@pytest.mark.parametrize("arms", [["draft"], ["plain", "draft"]], ids=",".join)
def test_accepted_nodes_of_trees_are_told_by_rank_and_drawn(arms, tiny_engine, tmp_path):
    loads = ("--concurrency", "1,2", "--compare", ",".join(arms), "--requests", 4, "--max-tokens", 32)
    trees = ("--draft-tree", 15, "--draft-length", 15, "--warmup", 1, "--device", "cpu")
    succeeds("sweep", "--engine", tiny_engine, *loads, *trees, "--output", tmp_path)
    results = read_results(tmp_path)
    for point in results.points:
        accepted = sum(sum(round_.requests.accepted) for round_ in results.rounds_of(point.arm, point.load))
        assert sum(point.accepted_by_rank) == accepted, "not the warm-up's, and all of its rounds'"
        assert bool(point.accepted_by_rank) == (point.arm == "draft")
        assert point.arm == "plain" or 0 < sum(point.accepted_by_rank[1:]) < point.accepted_by_rank[0]
    with (tmp_path / "results.csv").open() as stream:
        told = [line["accepted_by_rank"] for line in csv.DictReader(stream)]
    assert told == [" ".join(map(str, point.accepted_by_rank)) for point in results.points]
    bare = tmp_path / "bare.png"
    without = [point.model_copy(update={"accepted_by_rank": []}) for point in results.points]
    assert plot_acceptance([results.model_copy(update={"points": without})], bare)
    widths = [struct.unpack(">I", file.read_bytes()[16:20])[0] for file in (tmp_path / "acceptance.png", bare)]
    assert widths[0] > widths[1], "bars by rank stand beside the rest"


def test_a_target_in_fp8_is_swept_and_said_to_be(tmp_path):
    succeeds("sweep", *QUICK, "--concurrency", 1, "--precision", "fp8", "--output", tmp_path)
    engine = read_results(tmp_path).engine
    assert (engine["precision"], engine["target_matrices"], engine["drafter_matrices"]) == ("fp32", "fp8", "fp32")


def test_drafts_of_a_tree_are_counted_by_depth():
    """Not one position for each of 31 nodes: no draft stands deeper than the 15 of a block of 16."""
    whole = SimpleNamespace(steps=2, prompt_tokens=3)
    updates = Update([5]), Update([6] * 4, "", 31, 3), Update([7], "", 62, 3, whole)

    def submit(prompt, params, on_update, draft):
        for update in updates:
            on_update(update)

    target = LocalTarget(SimpleNamespace(config=SimpleNamespace(block_size=16)), SimpleNamespace(submit=submit))
    reply = asyncio.run(target.send(Request(SAMPLES.samples[0], (), SamplingParams(), "draft")))
    assert (reply.drafted, reply.drafted_at, reply.accepted_at) == (62, [2] * 15, [1] * 3)


def test_positions_deeper_than_a_server_counts_are_a_tree_s_nodes():
    class Counting:
        async def look(self, arm):
            return Reading("trtllm-dflash", Drafts(2, 62, 3, {1: 1.0}, dict.fromkeys(range(1, 16), 2.0)))

    round_ = Round.model_construct(arm="draft", drafted_at=[2] * 31, accepted_at=[1] * 3)
    asyncio.run(Sweep._count(SimpleNamespace(_target=Counting()), round_, Reading("trtllm-dflash", Drafts())))
    assert (round_.drafted_at, round_.accepted_at) == ([2] * 15, [1] * 3)


@pytest.mark.slow
def test_open_loop_in_this_process(tmp_path):
    succeeds("sweep", *QUICK, "--rate", "40", "--arrival", "constant", "--output", tmp_path, "--json")
    (point,) = read_results(tmp_path).points
    assert point.load == 40
    assert point.requests == 8


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "give one of --url"),
        (("--url", "a:1", "--shape", "tiny"), "give one of --url"),
        (("--url", ""), "--url : write HOST:PORT of Triton's gRPC, or http://HOST:PORT"),
        (("--url", "ftp://a:1"), "--url ftp://a:1: write HOST:PORT of Triton's gRPC, or http://HOST:PORT"),
        (("--url", "http://me:secret@a:1"), "no user and password in an address"),
        (("--compare", "a=http://me:secret@a:1,b=http://b:1"), "no user and password in an address"),
        (("--url", "a:1", "--simulate-acceptance", 3), "--simulate-acceptance goes with --engine or --shape"),
        (("--url", "a:1", "--draft-length", 3), "--draft-length goes with --engine or --shape"),
        (("--url", "a:1", "--device", "cpu"), "--device goes with --engine or --shape"),
        (("--shape", "tiny", "--concurrency", "1", "--rate", "2"), "--concurrency and --rate: give one"),
        (("--shape", "tiny", "--concurrency", "0,1"), "--concurrency 0,1"),
        (("--shape", "tiny", "--rate", "x"), "--rate x: write positive numbers"),
        (("--shape", "tiny", "--at", "-3"), "--at -3: write positive numbers"),
        (("--shape", "tiny", "--compare", "plain,fast"), "--compare plain,fast: write plain,draft"),
        (("--compare", "a=http://x:1,b=ftp://y:2"), "--compare a=http://x:1,b=ftp://y:2: write plain,draft"),
        (("--compare", "a=http://x:1,b=host"), "NAME=http://HOST:PORT"),
        (("--compare", "a=http://x:1,plain"), "name a server for each"),
        (("--compare", "a=http://x:1,a=http://y:2"), "give each arm once"),
        (("--compare", "a=http://x:1,b=http://y:2", "--url", "z:1"), "--url and --compare NAME=URL"),
        (("--compare", "a=http://x:1,b=http://y:2", "--metrics-url", "http://x:2/metrics"), "say whose"),
        (("--compare", "a=http://x:1,b=http://y:2", "--metrics-url", "c=http://x:2"), "--compare has no c, but a, b"),
        (("--compare", "a=http://x:1,b=http://y:2", "--model", "c=m"), "--model c=: --compare has no c"),
        (("--compare", "a=http://x:1,b=http://y:2", "--tokenizer", "t"), "--tokenizer: an OpenAI API has its own"),
        (("--compare", "a=http://x:1,b=http://y:2", "--draft-vocab", 9), "--draft-vocab goes with --shape"),
        (("--shape", "tiny", "--slo-tps", 5, "--concurrency", 2), "--concurrency: with --slo-tps"),
        (("--shape", "tiny", "--slo-tps", 5, "--slo-percentile", 42), "--slo-percentile 42"),
        (("--shape", "tiny", "--max-rate", 5), "give --slo-tps"),
        (("--shape", "tiny", "--slo-percentile", 90), "--slo-percentile: of what"),
        (("--shape", "tiny", "--api-key-file", "key"), "--api-key-file: an engine in this process has no keys"),
        (("--shape", "tiny", "--arrival", "poisson"), "--arrival goes with --rate"),
        (("--shape", "tiny", "--top-p", 0.9), "--top-p: without --temperature replies are greedy"),
        (("--shape", "tiny", "--ramp", "2"), "--ramp: clients begin before the seconds that count"),
        (("--shape", "tiny", "--max-tokens", 5), "--prompt-tokens and --output-tokens"),
        (("--shape", "tiny", "--simulate-acceptance", 9), "a block of 8 rows commits 1 to 8"),
        (("--shape", "tiny", "--draft-length", 9), "this engine drafts up to 7"),
        (
            ("--engine", ENGINE, "--output-tokens", 99_999),
            "--output-tokens 99999: the engine's --max-seq-len 2048",
        ),
        (
            ("--engine", ENGINE, "--prompt-tokens", 2000, "--output-tokens", 49),
            "--prompt-tokens 2000 and --output-tokens 49: the engine's --max-seq-len 2048 holds no more",
        ),
        (("--shape", "nope"), "--shape nope is not known"),
        (
            ("--url", "a:1", "--dataset", "/nope.jsonl"),
            "--dataset /nope.jsonl: cannot be read: No such file or directory",
        ),
        (("--shape", "tiny", "--resume"), "--resume: there is no results.json"),
        *(
            (("--url", "a:1", *flags), f"{flags[-2]} inf: Input should be a finite number")
            for flags in (
                ("--seconds", "inf"),
                ("--seconds", "1", "--ramp", "inf"),
                ("--slo-ttft-ms", "inf"),
                ("--slo-tps", "1", "--max-rate", "inf"),
            )
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, said, tiny_engine, tmp_path):
    arguments = [tiny_engine if one is ENGINE else one for one in arguments]
    result = run("sweep", *arguments, "--output", tmp_path / "out")
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1
    assert said in errors[0]


@pytest.mark.parametrize("command", ["sweep", "report"])
def test_a_folder_that_cannot_be_written_is_one_line(command, swept, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    what = (*QUICK, "--concurrency", 1) if command == "sweep" else (swept[0],)
    result = run(command, *what, "--output", file)
    assert result.exit_code == 1
    assert result.stderr == f"error: --output {file}: cannot be written (File exists)\n"


# -- datasets --------------------------------------------------------------------------------------------------------

FORMS = {
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, ("How many?",), ""),
    "math-500": ({"problem": "Find x.", "solution": "1", "subject": "Algebra", "level": 2}, ("Find x.",), "Algebra"),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}, ("def f():",), ""),
    "mbpp": ({"task_id": 2, "text": "Write a function.", "code": "x", "test_list": []}, ("Write a function.",), ""),
    "mbpp-sanitized": ({"task_id": 2, "prompt": "Write it.", "code": "x"}, ("Write it.",), ""),
    "mt-bench": ({"question_id": 81, "category": "writing", "turns": ["One", "Two"]}, ("One", "Two"), "writing"),
    "speed-bench": (
        {"question_id": "a", "category": "coding", "sub_category": "x", "turns": ["One"], "multiturn": False},
        ("One",),
        "coding",
    ),
    "livecodebench": (
        {"question_title": "T", "question_content": "Sum.", "starter_code": "class S:", "difficulty": "easy"},
        ("Sum.\n\nBegin with this code:\n\nclass S:",),
        "easy",
    ),
    "aime": ({"ID": "2024-I-1", "Problem": "Find n.", "Answer": 7}, ("Find n.",), ""),
    "shipped": ({"kind": "json", "prompt": "Say {}.", "reference": "{}"}, ("Say {}.",), "json"),
    "chat": (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"}]},
        ("Hi",),
        "",
    ),
    "sharegpt": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "no"}]}, ("Hi",), ""),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_in_the_form_of_a_public_benchmark_is_read(form, tmp_path):
    row, turns, category = FORMS[form]
    file = tmp_path / f"{form}.jsonl"
    file.write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    dataset = read_dataset((file,))
    assert dataset.name == form
    assert [(sample.turns, sample.category) for sample in dataset.samples] == [(turns, category)] * 2
    file.write_text(json.dumps([row]))
    assert len(read_dataset((file,)).samples) == 1


def test_a_system_message_is_kept():
    sample = Sample(("Hi",), system="Be kind.")
    assert sample.messages()[0] == {"role": "system", "content": "Be kind."}


def test_the_shipped_prompts_are_the_default_and_a_digest_knows_their_order():
    dataset = read_dataset()
    assert len(dataset.samples) == 256
    assert {sample.category for sample in dataset.samples} == {"arithmetic", "python", "json", "story"}
    assert dataset.digest == read_dataset().digest != dataset.shuffled(0).digest
    assert dataset.shuffled(0).digest == dataset.shuffled(0).digest != dataset.shuffled(1).digest
    assert len({sample.category for sample in dataset.shuffled(0).samples[:16]}) == 4


@pytest.mark.parametrize(
    "text, said",
    [
        ("{}\n", "line 1 has no prompt"),
        ("x\n", "line 1 is not JSON"),
        ("\n", "no prompt"),
        ('{"prompt": "x"}\n{"prompt": ' + "[" * 100_000, "line 2 is not JSON"),
        ('{"prompt": "x", "id": ' + "1" * 5000 + "}\n", "line 1 is not JSON"),
        ('{"prompt": "x", "category": "\\ud83d"}\n', "line 1 is not text: it holds half of a surrogate pair"),
        ("[" * 100_000, "is not JSON"),
    ],
    ids=lambda text: text[:30],
)
def test_a_file_without_prompts_is_refused_by_its_line(text, said, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(SettingsError, match=said):
        read_dataset((file,))


def test_conversations_need_a_chat_template_where_the_server_takes_text(tmp_path):
    file = tmp_path / "mt_bench.jsonl"
    file.write_text('{"turns": ["one", "two"], "category": "writing"}\n')
    asked = ("sweep", "--url", "127.0.0.1:9", "--dataset", file, "--output", tmp_path / "out")
    assert "--tokenizer DIR" in refusal(*asked)


def test_without_matplotlib_there_are_figures_and_word_of_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("trtllm_dflash.sweep.plots.can_plot", lambda: False)
    result = run("sweep", *QUICK, "--concurrency", 1, "--draft-length", 7, "--output", tmp_path)
    assert result.exit_code == 0
    assert pip_install("sweep") in result.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results.csv", "results.json"]
    assert "matplotlib" in refusal("report", tmp_path, "--output", tmp_path / "page")


@pytest.mark.parametrize("drafted_at", [[5, 4], []], ids=["told by replies", "not told"])
def test_a_server_whose_metrics_end_with_a_round_costs_what_only_they_tell(drafted_at):
    class Silent:
        async def look(self, arm):
            raise EngineError("no metrics any more")

    round_ = Round.model_construct(arm="draft", drafted_at=drafted_at, accepted_by_rank=[])
    counting = Sweep._count(SimpleNamespace(_target=Silent()), round_, Reading("trtllm-dflash", Drafts()))
    if drafted_at:
        asyncio.run(counting)
        assert round_.accepted_by_rank == []
    else:
        with pytest.raises(EngineError, match="no metrics any more"):
            asyncio.run(counting)
