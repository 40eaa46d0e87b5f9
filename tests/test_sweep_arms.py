"""A sweep whose arms are servers: the same load by turns, and each one's acceptance as its runtime reports it."""

import json
from contextlib import ExitStack
from statistics import median

import pytest

from tests.conftest import refusal, run, succeeds
from tests.test_sweep_load import FixedServer
from tests.virtual_time import run_virtually
from trtllm_dflash.sweep.dataset import Dataset, Sample
from trtllm_dflash.sweep.plots import arm_colors, plot_pareto
from trtllm_dflash.sweep.report import compare_runs
from trtllm_dflash.sweep.results import read_results
from trtllm_dflash.sweep.server_arms import ServerArms
from trtllm_dflash.sweep.settings import SweepSettings
from trtllm_dflash.sweep.sweep import Sweep, plan_results

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the sweep extra)")
servers = pytest.importorskip("tests.timed_servers", reason="aiohttp or tritonclient is missing (the sweep extra)")

QUICK = ("--concurrency", "1,4", "--requests", 8)
GAPS = {"dflash": 0.004, "eagle3": 0.006, "ngram": 0.009, "plain": 0.014}  # seconds between responses


# -- servers as three runtimes have them -----------------------------------------------------------------------------


def vllm_page(replies):
    """Of each reply 10 steps: 15 drafts verified in each, 40 accepted, 9 of them at the first position."""
    name = "vllm:spec_decode_num"
    counts = {"drafts_total": 10, "draft_tokens_total": 150, "accepted_tokens_total": 40}
    lines = [f'{name}_{what}{{engine="0"}} {n * replies}.0' for what, n in counts.items()]
    positions = [9, 8, 7, 6, 5, 3, 2] + [0] * 8
    lines += [
        f'{name}_accepted_tokens_per_pos_total{{position="{i}"}} {n * replies}.0' for i, n in enumerate(positions)
    ]
    return "\n".join(lines)


def sglang_page(replies):
    """A mean over a time of its own, which is not what these replies say."""
    return 'sglang:spec_accept_length{tp_rank="0"} 9.99\nsglang:num_running_reqs 0.0\n'


SGLANG_DETAILS = {
    "spec_verify_ct": 7,
    "spec_num_proposed_drafts": 21,
    "spec_num_correct_drafts": 14,
    "spec_correct_drafts_histogram": [1, 2, 0, 4],
}


class TensorRTLLMPage:
    """Iterations, each told once: one a reply, of 4 steps that accept 6 of 20 drafts."""

    def __init__(self):
        self.told = 0

    def __call__(self, replies):
        stats = {"numRequestsWithDraftTokens": 4, "numDraftTokens": 20, "numAcceptedTokens": 6}
        entries = [{"iter": i, "specDecodingStats": stats} for i in range(self.told, replies)]
        self.told = replies
        return json.dumps(entries)


@pytest.fixture
def four(monkeypatch):
    """DFlash on vLLM, EAGLE-3 on SGLang, n-grams on TensorRT-LLM, and vLLM without drafts."""
    monkeypatch.setattr("trtllm_dflash.sweep.sweep.SETTLE_SECONDS", 0)
    with ExitStack() as stack:
        running = {arm: stack.enter_context(servers.openai_server()) for arm in GAPS}
        for arm, server in running.items():
            server.gap, server.drafts_in_replies = GAPS[arm], False
        running["dflash"].page = vllm_page
        running["eagle3"].page, running["eagle3"].details = sglang_page, SGLANG_DETAILS
        running["ngram"].page = TensorRTLLMPage()
        running["plain"].page = "vllm:num_requests_running 0.0\n"
        yield running


def named(running):
    return ",".join(f"{arm}={server.url}" for arm, server in running.items())


@pytest.mark.slow
def test_each_arm_s_acceptance_is_what_its_runtime_reports(four, tmp_path):
    text = succeeds("sweep", "--compare", named(four), *QUICK, "--label", "4 methods", "--output", tmp_path)
    results = read_results(tmp_path)
    assert [(point.load, point.arm) for point in results.points] == [(load, arm) for load in (1, 4) for arm in GAPS]
    truth = {"dflash": 1 + 40 / 10, "eagle3": 21 / 7, "ngram": 1 + 6 / 4, "plain": None}
    whose = {
        "dflash": f"vllm: {four['dflash'].url}/metrics",
        "eagle3": "replies",
        "ngram": f"tensorrt-llm: {four['ngram'].url}/metrics",
        "plain": None,
    }
    for point in results.points:
        assert not point.errors
        assert point.requests == 8
        assert point.acceptance_length == (None if point.arm == "plain" else pytest.approx(truth[point.arm]))
        assert point.acceptance_from == whose[point.arm]
        # Its own server's pace, which is another thread of this process: both may be late.
        each = median((one.sent[-1] - one.sent[0]) / 21 for one in four[point.arm].served)
        assert 0.5 < point.tokens_per_second_per_user * each < 1.5
    by_arm = {point.arm: point for point in results.points}
    assert by_arm["dflash"].acceptance_by_position[:7] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.2])
    assert by_arm["dflash"].verified_by_position == [80] * 15  # 8 replies, none of the warm-up's
    assert by_arm["eagle3"].acceptance_by_position == pytest.approx([6 / 7, 4 / 7, 4 / 7])
    assert by_arm["ngram"].acceptance_by_position == []
    assert f"dflash from vllm's metrics at {four['dflash'].url}/metrics; eagle3 from its replies" in text
    page = (tmp_path / "report.html").read_text()
    assert all(f"<td>{arm}</td>" in page for arm in GAPS)
    assert page.count("data:image/png;base64,") == 2
    # Only SGLang is asked to tell its drafts, and nobody to draft; all had the same prompts.
    asked = {arm: set.union(*(set(one.body) for one in server.served)) for arm, server in four.items()}
    assert {arm for arm in asked if "return_spec_tokens_details" in asked[arm]} == {"eagle3"}
    assert not any("draft" in fields for fields in asked.values())
    prompts = [sorted(one.prompt for one in server.served) for server in four.values()]
    assert all(each == prompts[0] for each in prompts)


def test_an_older_sglang_says_its_own_mean_and_that_is_said(four, tmp_path):
    four["eagle3"].details = {}
    two = {arm: four[arm] for arm in ("eagle3", "plain")}
    text = succeeds("sweep", "--compare", named(two), "--concurrency", 1, "--requests", 2, "--output", tmp_path)
    assert {point.arm: point.acceptance_length for point in read_results(tmp_path).points} == {
        "eagle3": 9.99,
        "plain": None,
    }
    assert f"eagle3 from sglang's metrics at {four['eagle3'].url}/metrics" in text
    assert "SGLang's own mean" in text


def test_metrics_that_are_elsewhere_are_named_by_arm(four, tmp_path):
    four["ngram"].page = ""
    two = {arm: four[arm] for arm in ("ngram", "plain")}
    elsewhere = ("--metrics-url", f"ngram={four['dflash'].url}/metrics", "--model", "plain=timed")
    quick = ("--concurrency", 1, "--requests", 2, "--warmup", 0)
    four["dflash"].page = lambda replies: vllm_page(len(four["ngram"].served))
    succeeds("sweep", "--compare", named(two), *quick, *elsewhere, "--output", tmp_path)
    point = read_results(tmp_path).points[0]
    assert (point.arm, point.acceptance_length) == ("ngram", 5)
    lost = ("--metrics-url", f"ngram={four['plain'].url}/nothing")
    said = refusal("sweep", "--compare", named(two), *quick, *lost, "--output", tmp_path, "--force")
    assert "--compare ngram: --metrics-url" in said


def test_a_server_that_is_not_there_is_one_line_with_its_arm(four, tmp_path):
    said = refusal("sweep", "--compare", f"{named(four)},gone=http://127.0.0.1:9", *QUICK, "--output", tmp_path / "a")
    assert "--compare gone=http://127.0.0.1:9: no OpenAI API answers there" in said
    assert not any(server.served for server in four.values())
    said = refusal("sweep", "--compare", f"{named(four)},triton=127.0.0.1:9", *QUICK, "--output", tmp_path / "b")
    assert "--compare triton=127.0.0.1:9: no Triton server answers there" in said
    said = refusal("sweep", "--compare", named(four), *QUICK, "--model", "ngram=other", "--output", tmp_path / "c")
    assert "--model other" in said
    assert "ngram" in said
    assert not list(tmp_path.iterdir())  # no folder of which nothing came


@pytest.mark.slow
def test_a_server_that_goes_away_is_named_and_what_was_finished_is_kept(four, tmp_path):
    four["eagle3"].fault, four["eagle3"].fault_after = "refuse", 10  # two rounds of one client, each 4 and a warm-up
    asked = ("--compare", named(four), *QUICK, "--output", tmp_path)
    result = run("sweep", *asked)
    assert result.exit_code == 1
    assert result.stderr == "error: eagle3, 4 clients: no request succeeded: HTTP 429: the queue is full\n"
    assert "interrupted: --resume" in result.stdout
    kept = read_results(tmp_path)
    assert [(round_.load, round_.arm) for round_ in kept.rounds[8:]] == [(4, "dflash")]
    four["eagle3"].fault = ""
    succeeds("sweep", *asked, "--resume")
    whole = read_results(tmp_path)
    assert whole.complete
    assert whole.rounds[:9] == kept.rounds
    assert len(whole.rounds) == 16


@pytest.mark.slow
def test_metrics_that_go_away_are_named_too(four, tmp_path):
    four["dflash"].page = lambda replies: vllm_page(replies) if replies <= 5 else ""
    two = {arm: four[arm] for arm in ("plain", "dflash")}
    result = run("sweep", "--compare", named(two), "--concurrency", 1, "--requests", 8, "--output", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: --compare dflash: {four['dflash'].url}/metrics: cannot be read: HTTP")
    assert result.stderr.count("\n") == 1
    assert [round_.arm for round_ in read_results(tmp_path).rounds] == ["plain", "dflash"]


# -- ratios ----------------------------------------------------------------------------------------------------------


class Paced(FixedServer):
    """Slower with more clients, from a pace of its own."""

    def __init__(self, pace):
        super().__init__()
        self.pace = pace

    async def send(self, request):
        assert request.arm == "served"
        self.gap = self.pace * (1 + self.running / 4)
        return await super().send(request)


PACES = {"dflash": 0.02, "eagle3": 0.03, "plain": 0.06}


def paced_sweep(folder, arms):
    settings = SweepSettings.model_validate(
        {"compare": ",".join(f"{arm}=http://{arm}:1" for arm in arms), "concurrency": "1,2,4,8,16", "at": "50,60"}
    )
    dataset = Dataset("test", tuple(Sample((f"prompt {i}",)) for i in range(64)))
    results = plan_results(settings, dataset, gpus=None)
    target = ServerArms({arm: Paced(PACES[arm]) for arm in arms})
    run_virtually(Sweep(settings, dataset, target, results, folder).run())
    return results


@pytest.mark.principal("dflash eagle3-eagle3")
@pytest.mark.parametrize(
    "arms, reference", [("dflash eagle3 plain", "plain"), ("plain dflash eagle3", "plain"), ("dflash eagle3", "eagle3")]
)
def test_ratios_are_to_plain_or_to_the_last(arms, reference, tmp_path):
    results = paced_sweep(tmp_path, arms.split())
    assert read_results(tmp_path) == results
    for reading in (*results.fixed_speed, *compare_runs([results], (50.0,))):
        assert reading.reference == reference
        assert len(reading.ratios) == len(reading.arms) - 1
        for name, ratio in reading.ratios.items():
            assert ratio.value == pytest.approx(reading.arms[name].value / reading.arms[reading.reference].value)
            assert ratio.value > 1.3
    shown = succeeds("report", tmp_path, "--at", 50)
    assert shown.count(f"/ {reference} ") == len(results.arms) - 1


def drawn_texts(monkeypatch, results, file):
    """What a picture of the frontier says beside its points, and in its legend."""
    from matplotlib.axes import Axes

    said, legends, annotate, legend = [], [], Axes.annotate, Axes.legend
    with monkeypatch.context() as patch:
        patch.setattr(Axes, "annotate", lambda self, text, *a, **k: said.append(text) or annotate(self, text, *a, **k))
        patch.setattr(Axes, "legend", lambda self, *a, **k: legends.append(self) or legend(self, *a, **k))
        plot_pareto([results], file)
    return said, legends


@pytest.mark.slow
def test_each_curve_is_named_where_it_ends_and_by_a_legend_where_there_is_no_room(tmp_path, monkeypatch):
    (tmp_path / "same").mkdir()
    said, legends = drawn_texts(monkeypatch, paced_sweep(tmp_path, list(PACES)), tmp_path / "a.png")
    assert set(PACES) <= set(said)
    assert not legends
    colors = arm_colors([read_results(tmp_path)])
    assert len(set(colors.values())) == 3
    monkeypatch.setattr("tests.test_sweep_arms.PACES", dict.fromkeys("abcdefg", 0.02))
    said, legends = drawn_texts(monkeypatch, paced_sweep(tmp_path / "same", list("abcdefg")), tmp_path / "b.png")
    assert not set("abcdefg") <= set(said)
    assert legends
