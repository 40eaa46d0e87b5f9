"""Both protocols over real connections, against servers that note when they really sent what."""

import asyncio
import json
import shutil
import socket
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from statistics import median, median_low

import numpy as np
import pytest

import trtllm_dflash
from tests.conftest import refusal, succeeds
from tests.http_servers import listening
from trtllm_dflash import SamplingParams
from trtllm_dflash.errors import EngineError
from trtllm_dflash.sweep.dataset import Dataset, Sample
from trtllm_dflash.sweep.load import Amount, ClosedLoop, Reply, Traits, run_load
from trtllm_dflash.sweep.openai_errors import NO_HTTP
from trtllm_dflash.sweep.runtime_metrics import find_metrics, parse_metrics
from trtllm_dflash.sweep.summary import Round, summarize
from trtllm_dflash.text.tokenizer import TextCodec

servers = pytest.importorskip("tests.timed_servers", reason="aiohttp or tritonclient is missing (the sweep extra)")

SHIPPED = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny" / "target"
PARAMS = SamplingParams(max_tokens=22)
DATASET = Dataset("test", tuple(Sample((f"prompt {i}",)) for i in range(64)))


@pytest.fixture(scope="module", params=["openai", "triton"])
def server(request):
    with getattr(servers, f"{request.param}_server")() as running:
        yield running


@pytest.fixture(autouse=True)
def healthy(server):
    yield
    server.fault, server.ttft, server.gap = "", 0.02, 0.005
    server.page, server.drafts_in_replies = "", True
    server.served.clear()


def target(server, model=None):
    from trtllm_dflash.sweep.openai_target import OpenAITarget
    from trtllm_dflash.sweep.triton_target import TritonTarget, chat_text

    if server.url.startswith("http"):
        return OpenAITarget(server.url, model)
    return TritonTarget(server.url, model or "ensemble", *chat_text(None))


def measure(server, concurrency, requests, arm="served", params=PARAMS):
    async def whole():
        async with target(server).opened() as opened:
            await opened.check((arm,), params)
            return await run_load(
                opened, DATASET, ClosedLoop(concurrency), Amount(requests=requests), Traits(params, arm)
            )

    traffic = asyncio.run(whole())
    return traffic, summarize([Round.of(arm, concurrency, 0, traffic)], None, [""] * 64)


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 8, 64])
def test_responses_are_noted_as_they_come(server, concurrency):
    """Never before the server sent them, and where nothing else kept this process busy before it sent the next."""
    server.ttft, server.gap = 0.2, 0.04
    traffic, point = measure(server, concurrency, max(2, concurrency))
    assert not point.errors
    records = {DATASET.samples[record.sample].turns[0]: record for record in traffic.records}
    assert point.requests == len(server.served) == len(records) == max(2, concurrency)
    lags = []  # of each response
    for served in server.served:
        record = records[served.prompt]
        assert traffic.begin + record.due <= served.arrived
        lags.append(list(map(float.__sub__, [traffic.begin + time for time in record.reply.times], served.sent)))
    assert all(len(each) == len(servers.TOKENS) and min(each) >= 0 for each in lags)
    assert min(first for first, *_ in lags) < server.gap


@pytest.mark.parametrize("concurrency", [1, 8])
def test_latencies_and_throughput_are_those_of_the_responses(server, concurrency):
    """To the first token, to the last, between responses, and a token after the first."""
    traffic, point = measure(server, concurrency, 2 * concurrency)
    assert not point.errors
    replies = [(record.due, record.reply.times) for record in traffic.records]
    tokens = sum(servers.TOKENS)
    each = [(times[-1] - times[0]) / (tokens - 1) for _, times in replies]
    truth = {
        "ttft": median(times[0] - due for due, times in replies),
        "e2e": median(times[-1] - due for due, times in replies),
        "tpot": median(each),
    }
    gaps = [gap for _, times in replies for gap in map(float.__sub__, times[1:], times)]
    assert {name: getattr(point, name).p50 for name in truth} == pytest.approx(truth, rel=1e-4)
    assert point.itl.p50 == pytest.approx(median_low(gaps), rel=0.03)  # counted by size
    assert point.tokens_per_second_per_user == pytest.approx(1 / median(each), rel=1e-4)
    seconds = max(times[-1] for _, times in replies)
    assert point.output_tokens_per_second == pytest.approx(len(replies) * tokens / seconds, rel=1e-4)


def test_no_proxy_stands_before_what_is_measured(server, monkeypatch):
    server.page = OURS
    for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    _, point = measure(server, 1, 1)
    assert (point.requests, point.errors) == (1, {})
    if server.url.startswith("http"):
        assert find_metrics(f"{server.url}/metrics").server == "trtllm-dflash"


def test_what_the_server_says_of_drafts_is_kept(server):
    _, point = measure(server, 1, 1)
    steps, committed = len(servers.TOKENS) - 1, sum(servers.TOKENS) - 1
    assert point.acceptance_length == pytest.approx(committed / steps)
    assert point.mean_prompt_tokens == 9
    if not server.url.startswith("http"):  # an OpenAI API does not say which drafts were accepted
        at_least = [sum(n > i for n in servers.TOKENS[1:]) / steps for i in range(1, servers.DRAFTS + 1)]
        assert point.acceptance_by_position == pytest.approx(at_least)


def test_each_of_the_steps_that_came_in_one_response_is_counted():
    """Their drafts' positions are not: nobody says which were whose."""
    from trtllm_dflash.sweep.triton_target import count_steps

    reply = Reply()
    for tokens, drafted, accepted, last in [(5, 7, 4, False), (8, 14, 6, False), (3, 14, 2, True)]:
        count_steps(reply, tokens, drafted, accepted, last)
    assert reply.steps == 1 + 2 + 1
    assert (reply.drafted_at, reply.accepted_at) == ([1] * 7, [1] * 4)


@pytest.mark.parametrize("fault", ["refuse", "break off"])
def test_a_reply_that_is_not_whole_is_an_error(server, fault):
    server.fault = fault
    _, point = measure(server, 1, 1)
    (error,) = point.errors
    assert "the queue is full" in error if fault == "refuse" else "ended before" in error
    assert point.requests == 0


def test_arms_are_asked_for_by_name_and_only_then(server):
    def drafts(arm):
        server.served.clear()
        measure(server, 1, 1, arm, SamplingParams(max_tokens=22, ignore_eos=arm != "served"))
        body = server.served[0].body
        assert ("ignore_eos" in body) or arm == "served"
        return body.get("draft")

    said = [drafts(arm) for arm in ("served", "plain", "draft")]
    assert said in ([None, False, True], [None, b"\0", b"\1"])


@pytest.mark.parametrize("server", ["openai"], indirect=True)
@pytest.mark.parametrize("fault, error", [("fail", "a step failed"), ("no usage", "does not count tokens")])
def test_an_openai_stream_that_goes_wrong_is_an_error(server, fault, error):
    server.fault = fault
    _, point = measure(server, 1, 1)
    (said,) = point.errors
    assert error in said


@pytest.mark.parametrize("server", ["openai"], indirect=True)
def test_what_is_not_openai_s_is_sent_only_where_it_is_asked_for(server):
    measure(server, 1, 1)
    assert set(server.served[0].body) == {
        "model",
        "messages",
        "stream",
        "stream_options",
        "max_tokens",
        "temperature",
        "seed",
    }
    measure(server, 1, 1, params=SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5))
    assert server.served[1].body["top_p"] == 0.9
    assert server.served[1].body["top_k"] == 5


def test_text_for_triton_begins_once_however_often_that_is_written(tmp_path):
    """Llama's template writes the token that its tokenizer, the server's, puts before any text."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    from trtllm_dflash.sweep.triton_target import chat_text

    shutil.copytree(SHIPPED, tmp_path, dirs_exist_ok=True)
    messages = [{"role": "user", "content": "Hi"}]
    plain, _ = chat_text(tmp_path)
    written = plain(messages)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    name, number = next((token.content, i) for i, token in tokenizer.get_added_tokens_decoder().items())
    tokenizer.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, number)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = tmp_path / "chat_template.jinja"
    render, count = chat_text(tmp_path)
    assert render(messages) == written.removeprefix(name)
    template.write_text(name + template.read_text())
    render, count = chat_text(tmp_path)
    codec = TextCodec.load(tmp_path, {})
    assert codec.encode(render(messages)) == codec.encode_chat(messages)
    assert count("Hi") == len(codec.encode("Hi")) - 1  # of a reply, which begins with nothing


def test_a_tokenizer_without_a_template_or_with_a_damaged_configuration_is_one_line(tmp_path):
    asked = ("sweep", "--url", "127.0.0.1:9", "--tokenizer", tmp_path / "engine", "--output", tmp_path / "out")
    shutil.copytree(SHIPPED, tmp_path / "engine")
    for damaged in ("[1", "[]"):
        (tmp_path / "engine" / "config.json").write_text(damaged)
        assert "config.json" in refusal(*asked)
    (tmp_path / "engine" / "config.json").unlink()
    (tmp_path / "engine" / "chat_template.jinja").unlink()
    assert f"--tokenizer {tmp_path / 'engine'}: has no chat template that takes a message" in refusal(*asked)


def test_bytes_of_a_reply_that_make_no_character_are_shown_as_such():
    from trtllm_dflash.sweep.triton_target import _text

    class Result:
        def as_numpy(self, name):
            return np.array([b"caf\xe9"], object)

    assert _text(Result(), "text_output") == "caf\ufffd"


def test_a_model_that_is_not_there_is_one_line(server, tmp_path):
    said = refusal("sweep", "--url", server.url, "--model", "nope", "--output", tmp_path)
    assert "--model" in said
    assert "nope" in said


def test_a_server_of_something_else_is_told_from_one_of_openais_api(tmp_path):
    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    with listening(Nothing) as url:
        said = refusal("sweep", "--url", url, "--output", tmp_path / "out")
    assert "no OpenAI API answers there: HTTP 404" in said and "Triton is given by its gRPC, as HOST:PORT" in said


@pytest.mark.parametrize("server", ["triton"], indirect=True)
def test_what_grpc_answers_an_http_client_is_not_shown(server, tmp_path):
    said = refusal("sweep", "--url", f"http://{server.url}", "--output", tmp_path / "out")
    assert said == f"error: --url http://{server.url}: no OpenAI API answers there: {NO_HTTP}"


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://127.0.0.1:9"])
def test_no_server_is_one_line(url, tmp_path):
    line = refusal("sweep", "--url", url, "--output", tmp_path / "out")
    assert "127.0.0.1:9" in line and "ssl" not in line


@pytest.mark.parametrize("scheme", ["", "http://"], ids=["triton", "openai"])
def test_a_port_that_takes_connections_and_says_nothing_is_one_line(scheme, tmp_path, monkeypatch):
    for module in ("openai_target", "triton_target"):
        monkeypatch.setattr(f"trtllm_dflash.sweep.{module}.CHECK_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}127.0.0.1:{silent.getsockname()[1]}"
        said = refusal("sweep", "--url", url, "--output", tmp_path / "out")
    assert f"--url {url}: no " in said
    assert said.endswith("nothing came in 0.5 s")
    assert not list(tmp_path.iterdir())


# -- servers' metrics ------------------------------------------------------------------------------------------------

OURS = """# HELP dflash_drafted_tokens_total Drafts verified
dflash_drafted_tokens_total{model="tensorrt_llm",position="1",version="1"} 10
dflash_drafted_tokens_total{model="tensorrt_llm",position="2",version="1"} 8
dflash_accepted_tokens_total{model="tensorrt_llm",position="1",version="1"} 7
dflash_accepted_tokens_total{model="tensorrt_llm",position="2",version="1"} 3
"""
VLLM = """vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
"""


@pytest.mark.parametrize("page, drafted", [(OURS, [10, 8]), (VLLM, [10, 10])])
def test_acceptance_by_position_is_read_from_metrics(page, drafted):
    none = parse_metrics(page.replace("10", "0").replace(" 8", " 0").replace(" 7", " 0").replace(" 3", " 0"))
    assert parse_metrics(page).since(none).by_position() == (drafted, [7, 3])


@pytest.mark.parametrize("server", ["openai"], indirect=True)
def test_metrics_of_something_else_are_refused_where_they_were_named_and_else_left_alone(server):
    server.page = "python_gc_objects_collected_total 3\nhello world\n"
    with pytest.raises(EngineError, match=r"--metrics-url http.* has no metrics of ours"):
        find_metrics(f"{server.url}/metrics")
    with pytest.raises(EngineError, match=r"--metrics-url http.*/nothing: cannot be read"):
        find_metrics(f"{server.url}/nothing")
    assert find_metrics(None, server.url) is None


@pytest.mark.slow
@pytest.mark.parametrize("server", ["openai"], indirect=True)
def test_ranks_of_our_trees_are_read_from_metrics_whatever_replies_tell(server, tmp_path, monkeypatch):
    server.page = lambda replies: (
        OURS
        + "".join(
            f'dflash_accepted_nodes_total{{model="tensorrt_llm",rank="{rank}",version="1"}} {count * replies}\n'
            for rank, count in ((1, 9), (2, 1))
        )
    )
    monkeypatch.setattr("trtllm_dflash.sweep.sweep.SETTLE_SECONDS", 0)
    quick = ("--concurrency", 1, "--requests", 2, "--warmup", 1)
    succeeds("sweep", "--url", server.url, *quick, "--output", tmp_path)
    (point,) = json.loads((tmp_path / "results.json").read_text())["points"]
    assert point["accepted_by_rank"] == [18, 2]  # not the warm-up's
    assert point["acceptance_from"] == "replies"


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("server", ["openai"], indirect=True)
def test_points_of_a_server_that_tells_by_metrics_alone_have_its_acceptance(server, named, tmp_path, monkeypatch):
    server.page = lambda replies: VLLM.replace(" 10.0", f" {10 * replies}").replace(" 7.0", f" {7 * replies}")
    server.drafts_in_replies = False
    monkeypatch.setattr("trtllm_dflash.sweep.sweep.SETTLE_SECONDS", 0)
    quick = ("--concurrency", 1, "--requests", 2, "--warmup", 1)
    page = ("--metrics-url", f"{server.url}/metrics") if named else ()
    succeeds("sweep", "--url", server.url, *quick, *page, "--output", tmp_path)
    (point,) = json.loads((tmp_path / "results.json").read_text())["points"]
    assert point["verified_by_position"] == [20, 20]  # not the warm-up's
    assert point["acceptance_by_position"] == pytest.approx([0.7, 0.0])
    assert point["acceptance_from"] == f"vllm: {server.url}/metrics"


def test_a_server_that_takes_requests_and_answers_none_ends_the_sweep(server, tmp_path):
    server.fault = "silent"
    asked = ("sweep", "--url", server.url, "--concurrency", 2, "--timeout", 0.3, "--output", tmp_path / "sweep")
    tokenizer = () if server.url.startswith("http") else ("--tokenizer", SHIPPED)
    line = refusal(*asked, *tokenizer)
    says = "served, 2 clients: warming up: the server has sent nothing for 0.3 s to 2 requests (--timeout)"
    assert line == f"error: {says}"
    assert not list(tmp_path.iterdir())
