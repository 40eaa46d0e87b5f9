"""Each client example, run as a reader would, says what `generate` says."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.test_gateway import gateway
from tests.waiting import PATIENCE
from trtllm_dflash.runtime.request import SamplingParams

pytestmark = pytest.mark.slow

QUESTION = "Eva is 5 times as old as Isaac, who is 6. Ivan is 8 years older than Eva. How old are the three together?"
CLIENTS = Path(__file__).parents[2] / "examples" / "clients"


@pytest.fixture(scope="module")
def expected(tiny):
    """The reply to the examples' own prompt."""
    chat = [{"role": "user", "content": QUESTION}]
    (completion,) = tiny.generate([chat], SamplingParams(max_tokens=128))
    return completion


def run(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reply_of(printed):
    """The text that a client printed, and the accepted and the drafted tokens."""
    found = re.fullmatch(r"(.*)\n\[(\d+) of (\d+) drafts accepted\]\n", printed, re.S)
    assert found, printed
    return found[1], int(found[2]), int(found[3])


@pytest.mark.parametrize("script", ["grpc_client.py", "grpc_streaming_client.py"])
def test_grpc_clients(server, expected, script):
    printed = run(sys.executable, CLIENTS / script, "--url", server.grpc_url)
    assert reply_of(printed) == (expected.text, expected.accepted_tokens, expected.drafted_tokens)


def test_a_plain_reply_has_the_same_text_and_no_drafts(server, expected):
    printed = run(sys.executable, CLIENTS / "grpc_streaming_client.py", "--url", server.grpc_url, "--no-draft")
    assert reply_of(printed) == (expected.text, 0, 0)


def test_the_openai_client(server, expected):
    with gateway(server.engine, server.grpc_url, api_key="sesame") as url:
        printed = run(sys.executable, CLIENTS / "openai_client.py", "--url", f"{url}/v1", "--api-key", "sesame")
    assert reply_of(printed) == (expected.text, expected.accepted_tokens, expected.drafted_tokens)


def test_curl(server, expected):
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    printed = run(CLIENTS / "curl_generate_stream.sh", "--url", server.http_url.removeprefix("http://"))
    events = [json.loads(line.removeprefix("data: ")) for line in printed.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == expected.text
    assert events[-1]["total_accepted_draft_tokens"] == expected.accepted_tokens
    assert events[-1]["total_draft_tokens"] == expected.drafted_tokens


@pytest.mark.parametrize("script", ["grpc_client.py", "grpc_streaming_client.py", "openai_client.py"])
def test_without_a_server_a_client_says_so_in_one_line(script):
    url = "http://127.0.0.1:9/v1" if script == "openai_client.py" else "127.0.0.1:9"
    done = subprocess.run([sys.executable, CLIENTS / script, "--url", url], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {url}: ") and done.stderr.endswith("Connection refused\n")
    assert done.stderr.count("\n") == 1
