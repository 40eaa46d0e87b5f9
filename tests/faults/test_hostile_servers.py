"""Servers and pages of metrics that answer otherwise than they should: `sweep` and `compare` say so in one line."""

import asyncio
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from tests.conftest import refusal
from tests.http_servers import listening
from trtllm_dflash import SamplingParams
from trtllm_dflash.errors import DFlashError, EngineError
from trtllm_dflash.foreign.compare import CompareSettings, compare
from trtllm_dflash.sweep.dataset import Sample
from trtllm_dflash.sweep.load import Request
from trtllm_dflash.sweep.runtime_metrics import find_metrics

EVENTS, JSON = "text/event-stream", "application/json"
MODELS = b'{"data": [{"id": "m"}]}'
NESTED = b"[" * 100_000


@contextmanager
def answering(content, kind=JSON, status=200, models=MODELS, length=None):
    """A server that answers every request but the one for its models so; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.do_POST()

        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = models if self.path.endswith("/models") else content
            self.send_response(200 if body is models else status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length if length and body is content else len(body)))
            self.end_headers()
            self.wfile.write(body)

    with listening(Handler) as url:
        yield url


def swept(url):
    """The error of a sweep's request; None without one."""
    openai_target = pytest.importorskip("trtllm_dflash.sweep.openai_target", reason="aiohttp is missing")

    async def whole():
        async with openai_target.OpenAITarget(url).opened() as target:
            await target.check(("served",), SamplingParams(max_tokens=4))
            return await target.send(Request(Sample(("hi",)), (), SamplingParams(max_tokens=4), "served"))

    return asyncio.run(whole()).error


def compared(url):
    """The error of a comparison with this server."""
    with pytest.raises(EngineError) as caught:
        compare(CompareSettings(a=url, b=url, prompts=("hi",), timeout=30.0))
    return str(caught.value)


@pytest.mark.parametrize(
    "event",
    [
        b"[1, 2]",
        b"null",
        b"{oops",
        b'{"choices": ["x"]}',
        b'{"choices": [{"delta": "x"}]}',
        b'{"choices": [{"delta": {"content": 5}}]}',
        b'{"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}], "usage": {"completion_tokens": "five"}}',
        NESTED,
    ],
    ids=lambda event: event[:60].decode(),
)
def test_an_event_of_another_form_is_an_error_of_its_request(event):
    with answering(b"data: " + event + b"\n\ndata: [DONE]\n\n", EVENTS) as url:
        assert "the reply is not of OpenAI's form" in swept(url)
        assert "the reply is not of OpenAI's form" in compared(url)


def test_a_server_that_counts_fewer_tokens_than_one_does_not_count_them():
    reply = {"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": -5}}
    with answering(b"data: " + json.dumps(reply).encode() + b"\n\ndata: [DONE]\n\n", EVENTS) as url:
        assert "does not count tokens" in swept(url)


@pytest.mark.parametrize("status", [200, 503])
def test_an_error_is_told_with_its_message_though_it_comes_as_200(status):
    with answering(b'{"error": {"message": "overloaded \\ud83d"}}', status=status) as url:
        assert swept(url) == f"HTTP {status}: overloaded ?"  # half a character could not be written anywhere
        assert f"refuses a request: HTTP {status}: overloaded ?" in compared(url)


@pytest.mark.parametrize("models", [b"\xff\xfe", NESTED, b"[]", b'{"data": [5]}'], ids=lambda models: repr(models[:9]))
def test_a_list_of_models_of_another_form_is_one_line(models):
    with answering(b"{}", models=models) as url:
        with pytest.raises(DFlashError, match="/models is not OpenAI's list of models"):
            swept(url)
        assert "/models is not OpenAI's list of models" in compared(url)


@pytest.mark.parametrize("page", [NESTED, b"[" + b"1" * 5000 + b"]"], ids=["nested", "digits"])
def test_metrics_that_are_no_json_are_named(page):
    with answering(page) as url, pytest.raises(EngineError, match=f"{url}/metrics: .* not valid JSON"):
        find_metrics(f"{url}/metrics")


@pytest.mark.parametrize(
    ("page", "counts"),
    [
        (b'[{"specDecodingStats": "x"}]', False),
        (b'[{"specDecodingStats": {"numDraftTokens": null}}]', True),
        (b"dflash_accepted_nodes 5", True),
    ],
)
def test_metrics_with_gaps_count_what_they_have(page, counts):
    with answering(page) as url:
        drafts = find_metrics(f"{url}/metrics").drafts
    assert (drafts is not None) == counts
    assert drafts is None or (drafts.drafted, drafts.ranks()) == (0, [])


def test_metrics_that_are_cut_off_or_do_not_speak_http_are_one_line():
    with answering(b"vllm:x 1\n", length=1000) as url, pytest.raises(EngineError, match=r"--metrics-url .*as HTTP"):
        find_metrics(f"{url}/metrics")
    with pytest.raises(EngineError, match=r"--metrics-url .*as HTTP"):
        find_metrics("http://local host/metrics")


def test_what_cannot_be_compared_is_refused_by_its_flag():
    refused = ("compare", "--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9")
    for value in ("inf", "1e300", "nan"):
        assert f"--timeout {float(value)}: " in refusal(*refused, "--timeout", value)
        assert value == "1e300" or f"--near-tie {value}: " in refusal(*refused, "--near-tie", value)
    assert "--a http://x/\u00fc: write http://HOST:PORT" in refusal(
        "compare", "--a", "http://x/\u00fc", "--b", "http://y"
    )


@pytest.mark.parametrize("key", ["one\ntwo", "schl\u00fcssel"])
def test_a_key_that_no_header_can_carry_is_refused(key, tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text(key, encoding="utf-8")
    asked = ("sweep", "--url", "http://127.0.0.1:9", "--api-key-file", file, "--output", tmp_path / "out")
    assert f"--api-key-file {file}: a key is one line of printable ASCII" in refusal(*asked)
    monkeypatch.setenv("TRTLLM_DFLASH_API_KEY", key)
    asked = ("compare", "--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9")
    assert "TRTLLM_DFLASH_API_KEY: a key is one line of printable ASCII" in refusal(*asked)
