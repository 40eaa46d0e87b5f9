"""The model `tensorrt_llm` where its engine fails and where it ends, with Triton's module faked in this process."""

import json
import sys
from collections import deque
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tests.waiting import wait_until
from trtllm_dflash import SamplingParams


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "internal", "invalid", "unavailable", "cancelled"

    def __init__(self, text, code):
        super().__init__(text)
        self.code = code


class Metric:
    """A metric, and the family of it."""

    GAUGE = COUNTER = None

    def __init__(self, **_):
        self.Metric = lambda labels: self

    def set(self, value):
        pass

    increment = set


class Sender:
    """Keeps what is sent; `gone` once the client is."""

    def __init__(self):
        self.sent, self.gone = [], False

    def send(self, response, flags=0):
        self.sent.append((response, flags))

    def is_cancelled(self):
        return self.gone

    def last(self):
        """The last response, once it is there."""
        wait_until(lambda: self.sent and self.sent[-1][1] == 1, "a last response was sent")
        return self.sent[-1][0]


class BusySender(Sender):
    """Takes until `until` holds to send its first response."""

    def __init__(self, until):
        super().__init__()
        self._until = until

    def send(self, response, flags=0):
        super().send(response, flags)
        if len(self.sent) == 1:
            wait_until(self._until)


class FailingSender(Sender):
    """Fails at responses by their number, from 1, or at all of them where none is named; `tried` has every one."""

    def __init__(self, *numbers):
        super().__init__()
        self._numbers, self.tried = numbers, []

    def send(self, response, flags=0):
        self.tried.append(response)
        if not self._numbers or len(self.tried) in self._numbers:
            raise RuntimeError("no room")
        super().send(response, flags)


class TakenAtOnce(deque):
    """Updates that are taken before the next one is put."""

    def append(self, update):
        wait_until(lambda: not self, "the update before was taken")
        super().append(update)


class Request:
    def __init__(self, sender=None, outputs=("output_ids", "finish_reason"), **tensors):
        self._tensors = tensors
        self._outputs = outputs
        self.sender = sender or Sender()

    def inputs(self):
        return [Tensor(name, value) for name, value in self._tensors.items()]

    def get_response_sender(self):
        return self.sender

    def requested_output_names(self):
        return self._outputs

    def parameters(self):
        return "{}"

    def request_id(self):
        return ""


def request(length, **more):
    number = lambda value: np.array([[value]], np.int32)  # noqa: E731
    return Request(input_ids=number(5), input_lengths=number(1), request_output_len=number(length), **more)


@pytest.fixture
def model(tiny_engine, monkeypatch):
    """A loaded model; `ended` holds why its process would have ended."""
    backend = ModuleType("triton_python_backend_utils")
    backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    backend.Tensor, backend.TritonError, backend.MetricFamily = Tensor, TritonError, Metric
    backend.InferenceResponse = lambda tensors=None, error=None: SimpleNamespace(tensors=tensors, error=error)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    for name in [name for name in sys.modules if name.startswith("trtllm_dflash.serving.")]:
        monkeypatch.delitem(sys.modules, name)  # what it imports must see this backend
    from trtllm_dflash.serving import engine_model

    ended = []
    monkeypatch.setattr(engine_model, "end_process", ended.append)
    # A look at all objects takes long where so many files are imported, and these are kept from later ones.
    monkeypatch.setattr(engine_model, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
    parameters = {
        "engine": str(tiny_engine),
        "device": "cpu",
        "kernels": "auto",
        "decoupled": "true",
        "exclude_input_in_output": "true",
        "prefill_tokens": "auto",
        "itl_slack": "1.0",
        "prefill_share": "0.5",
        "max_queue": "0",
        "deadline_seconds": "600.0",
        "draft": "true",
        "draft_length": "15",
        "draft_tree": "31",
        "harvest": "",
        "harvest_share": "0.01",
        "harvest_mb": "1000",
    }
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    loaded = engine_model.EngineModel()
    loaded.initialize({"model_config": json.dumps(config)})
    loaded.ended = ended
    yield loaded
    loaded.finalize()


def test_a_failed_step_fails_its_requests_and_the_next_one_works(model, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(model._llm.session, "run", lambda *_: 1 / 0)
        failing = request(8)
        model.execute([failing])
        assert failing.sender.last().error.code == TritonError.INTERNAL
    working = request(8)
    model.execute([working])
    assert working.sender.last().error is None
    assert not model.ended


def test_a_request_that_a_fault_of_ours_ends_is_not_kept(model, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(model._service, "submit", lambda *_, **__: 1 / 0)
        failing = request(8)
        model.execute([failing])
        assert failing.sender.last().error.code == TritonError.INTERNAL
    wait_until(lambda: not model._replies, "nothing waits for its reply")
    assert not model._outbox._watched


def test_an_engine_that_fails_every_step_ends_the_process_once_all_are_answered(model, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(model._llm.session, "run", lambda *_: 1 / 0)
        for _ in range(3):
            failing = request(8)
            model.execute([failing])
            assert failing.sender.last().error.code == TritonError.INTERNAL
        wait_until(lambda: model.ended, "the process was ended")
    assert "division by zero" in model.ended[0]
    late = request(8)
    model.execute([late])
    assert late.sender.last().error.code == TritonError.INTERNAL


def test_a_reply_that_cannot_be_sent_ends_alone(model):
    failing, other = request(100, sender=FailingSender(2), streaming=np.array([[True]])), request(8)
    model.execute([failing, other])
    error = failing.sender.last().error
    assert error.code == TritonError.INTERNAL and "the reply's response failed: RuntimeError: no room" in str(error)
    assert other.sender.last().error is None
    wait_until(lambda: not model._service.statistics().running, "its slot is free")
    assert len(failing.sender.tried) == 3 and not model._replies and not model._outbox._watched and not model.ended


def test_a_reply_whose_error_cannot_be_sent_either_ends_alone(model):
    failing, other = request(100, sender=FailingSender(), streaming=np.array([[True]])), request(8)
    tried = failing.sender.tried
    model.execute([failing, other])
    assert other.sender.last().error is None
    wait_until(lambda: len(tried) == 2 and not model._service.statistics().running, "its slot is free")
    assert not model._replies and not model._outbox._watched and not model.ended


def test_a_reply_that_fails_before_its_request_is_known_to_run_is_cancelled(model, monkeypatch):
    submit, cancelled = model._service.submit, []
    failing = request(1000, sender=FailingSender(1), streaming=np.array([[True]]))

    def late(*asked, **more):
        ticket = submit(*asked, **more)
        failing.sender.last()
        return ticket

    monkeypatch.setattr(model._service, "submit", late)
    cancel = model._service.cancel
    monkeypatch.setattr(model._service, "cancel", lambda ticket: (cancelled.append(ticket), cancel(ticket)))
    model.execute([failing])
    wait_until(lambda: not model._service.statistics().running, "its slot is free")
    assert len(cancelled) == 1 and len(failing.sender.tried) == 2


def test_a_metric_that_triton_refuses_costs_no_reply(model, monkeypatch):
    refused = []

    def refuse(self, value):
        refused.append(value)
        raise TritonError("no", TritonError.INTERNAL)

    monkeypatch.setattr(Metric, "increment", refuse)
    for _ in range(2):
        working = request(8)
        model.execute([working])
        assert working.sender.last().error is None
        wait_until(lambda: refused, "a metric was refused")
    assert not model.ended


def test_a_bad_request_does_not_touch_the_good_ones_of_its_batch(model):
    requests = [request(3), request(0), request(3, temperature=np.array([[np.nan]], np.float32)), request(3)]
    model.execute(requests)
    codes = [getattr(one.sender.last().error, "code", None) for one in requests]
    assert codes == [None, TritonError.INVALID_ARG, TritonError.INVALID_ARG, None]


def test_a_full_queue_is_an_error_at_once(model):
    slots = model._llm.config.max_batch
    requests = [request(1000, ignore_eos=np.array([[True]])) for _ in range(slots + 1)]
    model.execute(requests)
    assert requests[-1].sender.last().error.code == TritonError.UNAVAILABLE
    for one in requests:
        one.sender.gone = True
    assert {one.sender.last().error.code for one in requests[:-1]} == {TritonError.CANCELLED}


def test_what_runs_when_the_model_ends_gets_an_error(model):
    running = request(1000, ignore_eos=np.array([[True]]), streaming=np.array([[True]]))
    model.execute([running])
    wait_until(lambda: running.sender.sent)
    model._service.close()
    assert "closing" in str(running.sender.last().error)


def test_another_model_can_end_a_request_by_its_key(model):
    key = np.array([[model._keys.make()]], np.int64)
    running = request(1000, ignore_eos=np.array([[True]]), request_key=key)
    stop = request(1, stop=np.array([[True]]), request_key=key)
    model.execute([running])
    model.execute([stop])
    assert stop.sender.last().error is None
    assert running.sender.last().error.code == TritonError.CANCELLED


STREAMED = {"streaming": np.array([[True]]), "ignore_eos": np.array([[True]])}


def tokens_of(responses):
    """The tokens of responses, in order."""
    tensors = [{tensor.name(): tensor.as_numpy() for tensor in response.tensors} for response, _ in responses]
    return [token for outputs in tensors for token in outputs["output_ids"].reshape(-1).tolist()]


def test_a_response_brings_the_tokens_of_one_step(model, tiny):
    expected = tiny.generate([[5]], SamplingParams(max_tokens=24, ignore_eos=True))[0]
    model._unsent = TakenAtOnce()
    streamed = request(24, **STREAMED)
    model.execute([streamed])
    streamed.sender.last()
    assert tokens_of(streamed.sender.sent) == expected.token_ids
    assert len(streamed.sender.sent) == 1 + expected.steps


def test_steps_that_were_run_while_one_was_sent_are_one_response(model, tiny):
    expected = tiny.generate([[5]], SamplingParams(max_tokens=24, ignore_eos=True))[0]
    whole = lambda: model._unsent and model._unsent[-1][1].completion is not None  # noqa: E731
    streamed = request(24, sender=BusySender(whole), **STREAMED)
    model.execute([streamed])
    streamed.sender.last()
    assert tokens_of(streamed.sender.sent) == expected.token_ids
    assert len(streamed.sender.sent) == 2


def test_tokens_that_were_not_sent_yet_come_before_the_error(model):
    counts = model._service.statistics()
    failed = lambda: counts.requests["failed"] == 1  # noqa: E731
    streamed = request(1000, sender=BusySender(failed), **STREAMED)
    model.execute([streamed])
    wait_until(lambda: streamed.sender.sent and counts.committed_tokens > 20, "some tokens are there")
    model._service.close()
    assert "closing" in str(streamed.sender.last().error)
    assert len(tokens_of(streamed.sender.sent[:-1])) == counts.committed_tokens


def test_a_field_that_proves_wrong_in_a_running_reply_has_the_name_that_its_client_knows(model):
    """A schema that is nothing but itself: it compiles, and no token can be chosen by it."""
    tensors = {"guided_decoding_guide_type": b"json_schema", "guided_decoding_guide": b'{"$ref": "#"}'}
    endless = request(8, **{name: np.array([[value]], object) for name, value in tensors.items()})
    model.execute([endless])
    error = endless.sender.last().error
    assert error.code == TritonError.INVALID_ARG
    assert str(error).startswith("guided_decoding_guide: cannot be followed: ")


LOGPROBS = ("output_ids", "cum_log_probs", "output_log_probs", "top_log_prob_ids", "top_log_probs", "prompt_log_probs")


@pytest.mark.principal("True")
@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_log_probabilities_are_those_of_generate(model, tiny, streaming):
    """Of the tokens of each response, and their sum so far; the prompt's with the last one."""
    asked = SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=1, presence_penalty=1.5, logit_bias={7: 3.0})
    tensors = {name: value[None] for name, value in choice_fields().choice_tensors(asked).items()}
    sent = request(20, outputs=LOGPROBS, streaming=np.array([[streaming]]), **tensors)
    model.execute([sent])
    sent.sender.last()
    (expected,) = tiny.generate([[5]], asked)
    responses = [{tensor.name(): tensor.as_numpy()[0] for tensor in answer.tensors} for answer, _ in sent.sender.sent]
    assert (len(responses) > 1) == streaming
    found = []
    for parts in responses:
        own, ids, top = (parts[name].flatten().tolist() for name in LOGPROBS[2:5])
        found += choice_fields().read_logprobs(own, ids, top)
        assert len(own) == parts["output_ids"].size
        assert parts["cum_log_probs"].item() == pytest.approx(sum(its.logprob for its in found), abs=1e-5)
    assert [token for parts in responses for token in parts["output_ids"].flatten().tolist()] == expected.token_ids
    assert [(its.logprob, its.top_logprobs) for its in found] == [
        (its.logprob, its.top_logprobs) for its in expected.logprobs
    ]
    assert responses[-1]["prompt_log_probs"].tolist() == []  # of one token there is none


def choice_fields():
    """The module as it was imported beside this test's Triton."""
    from trtllm_dflash.serving import choice_fields

    return choice_fields
