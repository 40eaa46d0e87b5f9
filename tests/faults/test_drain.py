"""SIGTERM while requests run: new ones are refused, those that run end whole or with an error, and nothing crashes."""

import http.client
import json
import queue
import re
from urllib.request import urlopen

import pytest

from tests.faults.streams import LONG, GrpcStream, OpenAIStream, completion, post
from tests.serving.runs import WHOLE_BLOCK, serve
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash import SamplingParams
from trtllm_dflash.errors import ShutdownError
from trtllm_dflash.runtime.service import Service
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.serving.drain import DrainListener, DrainOrder
from trtllm_dflash.serving.lifeline import FOLDER

LATE = "shutdown: the server takes no more requests"
CUT = "shutdown: the reply was not complete after 4 s (--drain-seconds)"


@pytest.mark.slow
def test_at_sigterm_new_requests_are_refused_and_every_running_one_is_answered(triton, served_engine, tmp_path):
    log = tmp_path / "triton.log"
    flags = [*WHOLE_BLOCK, "--openai-port", 0, "--drain-seconds", 4, "--log", log, "--json"]
    with serve("--engine", served_engine, *flags) as run:
        at = json.loads(run.line())
        bls = post(at["http"] + "/v2/models/tensorrt_llm_bls/generate", {"text_input": "Count.", **LONG})
        native = [GrpcStream(at["grpc"]) for _ in range(2)]
        assert all(stream.begun.wait(PATIENCE) for stream in native)
        streams = [OpenAIStream(at["openai"]) for _ in range(10)]  # more than there are slots for
        wait_until(lambda: requests(at) == len(streams) + 3, "the engine has all of them")
        said_before = len(log.read_text())
        run.process.terminate()
        wait_until(lambda: answer(completions(at))[0] == 503, "new requests are refused")
        late = [GrpcStream(at["grpc"], max_tokens=1)]
        while LATE not in late[-1].joined().said:  # the order reaches the gateway and the engine one after the other
            late.append(GrpcStream(at["grpc"], max_tokens=1))
        status, body = answer(completions(at))
        assert (status, json.loads(body)["error"]["message"]) == (503, LATE)

        for stream in streams:
            *_, last = [stream.said] if stream.joined().status == 503 else stream.events[:-1]
            assert json.loads(last)["error"]["message"] == CUT
            assert stream.status == 503 or stream.events[-1] == "[DONE]"
        assert [stream.joined().said.partition("'ensemble', ")[2] for stream in native] == [CUT, CUT]
        assert json.loads(answer(bls)[1]) == {"error": CUT}  # of whatever status: Triton 2.51 says 400
        assert run.ends() == (143, "")
        assert not said(log.read_text()[said_before:])
        wait_until(run.leaves_nothing, "nothing of it is left")


def requests(at: dict[str, str]) -> int:
    """Requests that run or wait."""
    page = urlopen(at["metrics"], timeout=PATIENCE).read().decode()
    return sum(int(float(count)) for count in re.findall(r"^dflash_requests_(?:running|waiting)\S* (\S+)$", page, re.M))


def completions(at: dict[str, str]) -> http.client.HTTPConnection:
    return post(at["openai"] + "/completions", completion({"max_tokens": 1}))


def answer(connection: http.client.HTTPConnection) -> tuple[int, str]:
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def said(log: str) -> list[str]:
    """The lines of Triton's log that are no ordinary information."""
    return [line for line in log.splitlines() if line and not line.startswith("I")]


def test_a_draining_service_finishes_what_runs_and_then_gives_up(tiny):
    now = [0.0]
    service = Service(tiny.session, tiny.intake, ServiceSettings(draft_length=15), clock=lambda: now[0])
    try:
        updates: queue.SimpleQueue = queue.SimpleQueue()
        whole = service.submit("Count.", SamplingParams(max_tokens=20, ignore_eos=True), lambda _: None)
        service.submit("Count.", SamplingParams(max_tokens=1500, ignore_eos=True), updates.put, draft=False)
        service.drain(7)
        with pytest.raises(ShutdownError, match="takes no more"):
            service.submit("Late.", SamplingParams(), updates.put)
        wait_until(lambda: whole.sequence.done, "the short one ends")
        assert len(whole.sequence.completion().token_ids) == 20
        assert not service.idle
        now[0] = 7.0
        while (update := updates.get(timeout=PATIENCE)).error is None:
            assert update.completion is None
        assert str(update.error) == "shutdown: the reply was not complete after 7 s (--drain-seconds)"
        wait_until(lambda: service.idle, "none is left")
        assert service.failure is None
    finally:
        service.close()


def test_the_order_to_drain_passes_through_the_servers_folder(tmp_path, monkeypatch):
    order = DrainOrder(tmp_path)
    assert not order.is_heard
    monkeypatch.setenv(FOLDER, str(tmp_path))
    listener = DrainListener()
    assert order.is_heard
    assert listener.seconds() is None
    order.give(30)
    assert listener.seconds() == 30
    assert not order.is_done
    listener.report_done()
    assert order.is_done
    monkeypatch.delenv(FOLDER)
    alone = DrainListener()  # a Triton that `serve` did not start
    assert alone.seconds() is None
    alone.report_done()
