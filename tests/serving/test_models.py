"""The models of the repository, in a real Triton server, asked by Triton's own clients."""

import contextlib
import json
import queue
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.serving.conftest import COMPLETED
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash import SamplingParams

pytestmark = pytest.mark.slow

CHAT = "<|im_start|>user\nTell a short story about a fox and a bridge in winter.<|im_end|>\n<|im_start|>assistant\n"
TYPES = {bool: np.bool_, int: np.int32, float: np.float32, str: object}


class Client:
    """Sends Python values; a list is a tensor [1, N], a scalar [1, 1]."""

    def __init__(self, grpc_url, http_url):
        self.grpc = triton.InferenceServerClient(grpc_url)
        self.grpc_url, self.http_url = grpc_url, http_url

    def unary(self, model, **inputs):
        return values(self.grpc.infer(model, tensors(inputs), client_timeout=PATIENCE))

    def stream(self, model, **inputs):
        """All responses, or the error that ends them."""
        with self.open_stream(model, **inputs) as responses:
            return list(responses)

    @contextlib.contextmanager
    def open_stream(self, model, **inputs):
        """An iterator over the responses; leaving the context cancels what has not ended."""
        client, results = triton.InferenceServerClient(self.grpc_url), queue.SimpleQueue()
        client.start_stream(lambda result, error: results.put(error or result))
        client.async_stream_infer(model, tensors(inputs))
        try:
            yield until_final(results)
        finally:
            client.stop_stream(cancel_requests=True)
            client.close()

    def generate(self, model, **inputs):
        return json.loads(self.post(f"{model}/generate", inputs))

    def generate_stream(self, model, **inputs):
        events = self.post(f"{model}/generate_stream", inputs).split("\n\n")
        return [json.loads(event.removeprefix("data: ")) for event in events if event]

    def post(self, path, body):
        request = urllib.request.Request(f"{self.http_url}/v2/models/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return reply.read().decode()


def tensors(inputs):
    built = []
    for name, value in inputs.items():
        if not isinstance(value, np.ndarray):
            row = value if isinstance(value, list) else [value]
            if isinstance(row[0], str):
                row = [text.encode() for text in row]
            kind = np.uint64 if name == "seed" else object if isinstance(row[0], bytes) else TYPES[type(row[0])]
            value = np.array([row], kind)
        tensor = triton.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        built.append(tensor)
    return built


def values(result):
    """Outputs by name: a scalar, or a list."""
    found = {}
    for output in result.get_response().outputs:
        array = result.as_numpy(output.name)
        if array.dtype == object:
            array = np.array([text.decode() for text in array.reshape(-1)], object)
        found[output.name] = array.item() if array.size == 1 and output.name != "output_ids" else array.ravel().tolist()
    return found


def until_final(results):
    while True:
        result = results.get(timeout=PATIENCE)
        if isinstance(result, Exception):
            raise result
        yield values(result)
        if result.get_response().parameters["triton_final_response"].bool_param:
            return


@pytest.fixture(scope="module")
def client(server):
    return Client(server.grpc_url, server.http_url)


def alone(tiny, prompt, **params):
    (completion,) = tiny.generate([prompt], SamplingParams(**params))
    return completion


# -- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.principal("greedy", "bytes-3")
@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (CHAT, {"max_tokens": 60}),
        (CHAT, {"max_tokens": 60, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 2**64 - 1}),
        # The model knows no such letters: nearly random tokens, many of them single bytes of characters.
        ("naïve 日本語 🦊", {"max_tokens": 40, "temperature": 50.0, "seed": 3}),
        ("naïve 日本語 🦊", {"max_tokens": 40, "temperature": 50.0, "seed": 4}),
    ],
    ids=["greedy", "sampled", "bytes-3", "bytes-4"],
)
def test_streamed_and_unary_text_equal_what_generate_gives_alone(client, tiny, prompt, params):
    expected = alone(tiny, prompt, **params)
    pieces = client.stream("ensemble", text_input=prompt, stream=True, **params)
    whole = client.unary("tensorrt_llm_bls", text_input=prompt, **params)
    assert "".join(piece["text_output"] for piece in pieces) == whole["text_output"] == expected.text
    assert [piece["finish_reason"] for piece in pieces] == [""] * (len(pieces) - 1) + [expected.finish_reason]
    assert whole["finish_reason"] == expected.finish_reason
    assert 1 < len(pieces) <= expected.steps + 1  # one a step, or several where this machine is too busy to send it


def test_the_random_bytes_hold_characters_that_are_torn(tiny):
    torn = alone(tiny, "naïve 日本語 🦊", max_tokens=40, temperature=50.0, seed=3)
    assert "�" in torn.text


def test_the_engine_streams_tokens_and_text(client, tiny):
    ids = tiny.encode(CHAT)
    expected = alone(tiny, ids, max_tokens=40)
    asked = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 40}
    pieces = client.stream("tensorrt_llm", streaming=True, **asked)
    assert [token for piece in pieces for token in piece["output_ids"]] == expected.token_ids
    assert "".join(piece["output_text"] for piece in pieces) == expected.text
    assert [piece["sequence_length"] for piece in pieces] == [len(piece["output_ids"]) for piece in pieces]
    (whole,) = client.stream("tensorrt_llm", **asked)
    assert (whole["output_ids"], whole["output_text"]) == (expected.token_ids, expected.text)


def test_http_generate_and_generate_stream(client, tiny):
    expected = alone(tiny, CHAT, max_tokens=30)
    # As in TensorRT-LLM's own examples: empty words are no words.
    asked = {"text_input": CHAT, "max_tokens": 30, "bad_words": "", "stop_words": ""}
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert client.generate(model, **asked)["text_output"] == expected.text
    pieces = client.generate_stream("ensemble", stream=True, **asked)
    assert "".join(piece["text_output"] for piece in pieces) == expected.text
    assert pieces[-1]["finish_reason"] == expected.finish_reason


def test_preprocessing_and_postprocessing_alone(client, tiny):
    prompt = client.unary("preprocessing", QUERY=CHAT, REQUEST_OUTPUT_LEN=7)
    assert prompt["INPUT_ID"] == tiny.encode(CHAT)
    assert (prompt["REQUEST_INPUT_LEN"], prompt["REQUEST_OUTPUT_LEN"]) == (len(tiny.encode(CHAT)), 7)
    ids = np.array([[tiny.encode("héllo"), tiny.encode("héllo")]], np.int32)
    lengths = np.array([[ids.shape[2], 1]], np.int32)
    decoded = client.unary("postprocessing", TOKENS_BATCH=ids, SEQUENCE_LENGTH=lengths)
    assert decoded["OUTPUT"] == ["héllo", tiny.codec.decode(ids[0, 0, :1].tolist())]


# -- what a request may ask for --------------------------------------------------------------------------------------


def test_draft_statistics_equal_those_of_the_completion(client, tiny):
    expected = alone(tiny, CHAT, max_tokens=60)
    pieces = client.stream("ensemble", text_input=CHAT, max_tokens=60, stream=True)
    whole = client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=60)
    for last in (pieces[-1], whole):
        assert last["total_draft_tokens"] == expected.drafted_tokens > 0
        assert last["total_accepted_draft_tokens"] == expected.accepted_tokens > 0
        assert last["acceptance_rate"] == pytest.approx(expected.accepted_tokens / expected.drafted_tokens)
        assert (last["num_input_tokens"], last["num_output_tokens"]) == (expected.prompt_tokens, 60)
    drafted = [piece["total_draft_tokens"] for piece in pieces]
    assert drafted == sorted(drafted)  # so far, in every response


def test_a_request_without_drafts_says_the_same(client):
    drafted = client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=30)
    plain = client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=30, draft=False)
    assert plain["text_output"] == drafted["text_output"]
    assert (plain["total_draft_tokens"], plain["acceptance_rate"]) == (0, 0.0)


def test_stop_words_end_the_reply_before_them(client, tiny):
    text = alone(tiny, CHAT, max_tokens=60).text
    stop = text[30:37]
    expected = text[: text.index(stop)]
    pieces = client.stream("ensemble", text_input=CHAT, max_tokens=60, stop_words=["no such", stop], stream=True)
    assert "".join(piece["text_output"] for piece in pieces) == expected
    assert pieces[-1]["finish_reason"] == "stop"


def test_runs_of_tokens_and_end_id_end_the_reply(client, tiny):
    prompt = tiny.encode(CHAT)
    ids = alone(tiny, prompt, max_tokens=40).token_ids
    asked = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": 40}
    runs = np.array([[[1, 1, 1, *ids[9:11], 0], [3, 5, -1, -1, -1, -1]]], np.int32)  # (1, 1, 1) and those two
    (reply,) = client.stream("tensorrt_llm", stop_words_list=runs, **asked)
    assert (reply["output_ids"], reply["finish_reason"]) == (ids[:11], "stop")
    (reply,) = client.stream("tensorrt_llm", end_id=ids[5], pad_id=0, **asked)
    assert reply["output_ids"] == ids[: ids.index(ids[5]) + 1]


def test_what_means_nothing_here_may_be_sent_at_its_neutral_value(client, tiny):
    reply = client.unary(
        "tensorrt_llm_bls", text_input=CHAT, max_tokens=10, beam_width=1, num_return_sequences=1, length_penalty=1.0,
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0, return_log_probs=False,
        end_id=-1, top_k=1, top_p=0.0, temperature=1.0, stream=False,
    )  # fmt: skip
    assert reply["text_output"] == alone(tiny, CHAT, max_tokens=10).text


def test_a_filter_without_a_temperature_samples(client, tiny):
    asked = {"text_input": CHAT, "max_tokens": 30, "seed": 5}
    expected = alone(tiny, CHAT, max_tokens=30, seed=5, temperature=1.0, top_p=0.9)
    assert client.unary("tensorrt_llm_bls", top_p=0.9, **asked)["text_output"] == expected.text


def test_temperature_one_alone_is_greedy_as_it_is_to_nvidias_clients(client, tiny):
    reply = client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=20, temperature=1.0)
    assert reply["text_output"] == alone(tiny, CHAT, max_tokens=20).text


def test_the_prompt_leads_the_reply_where_it_is_asked_for(client, tiny):
    text = alone(tiny, CHAT, max_tokens=10).text
    reply = client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=10, exclude_input_in_output=False)
    assert reply["text_output"] == CHAT + text
    pieces = client.stream("ensemble", text_input=CHAT, max_tokens=10, exclude_input_in_output=False, stream=True)
    assert "".join(piece["text_output"] for piece in pieces) == text  # a stream never repeats it


def test_times_are_given_where_they_are_asked_for(client):
    names = ["arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"]
    before = time.time_ns()
    reply = client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=20, return_perf_metrics=True)
    times = [before, *(reply[name] for name in names), time.time_ns()]
    assert times == sorted(times)
    reply = client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=5)
    assert [reply[name] for name in names] == [0] * 4


def test_a_deadline_ends_a_request_that_is_too_long(client):
    with pytest.raises(InferenceServerException, match="deadline"):
        client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=1500, ignore_eos=True, deadline_ms=1)
    assert client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=5, deadline_ms=1_000_000, priority=1)


# -- refusals --------------------------------------------------------------------------------------------------------

TEXT_REFUSALS: dict[str, list[dict]] = {
    "max_tokens": [{"max_tokens": 0}, {"max_tokens": -1}],
    "temperature": [{"temperature": float("nan")}, {"temperature": -1.0}, {"temperature": float("inf")}],
    "top_p": [{"top_p": 1.5}, {"top_p": -0.5}, {"top_p": float("nan")}],
    "top_k": [{"top_k": -1}],
    "text_input": [{"text_input": ""}, {"text_input": "word " * 3000}, {"text_input": b"\xff\xfe"}],
    "stop_words": [{"stop_words": ["x"] * 1000}, {"stop_words": ["x" * 100_000]}, {"stop_words": [b"\xff"]}],
    "bad_words": [{"bad_words": ["x"] * 1000}, {"bad_words": ["antidisestablishmentarianism"]}],
    "beam_width": [{"beam_width": 2}, {"beam_width": 0}],
    "num_return_sequences": [{"num_return_sequences": 2}],
    "length_penalty": [{"length_penalty": 0.5}],
    "repetition_penalty": [{"repetition_penalty": 1e-40}, {"repetition_penalty": float("nan")}],
    "presence_penalty": [{"presence_penalty": 2.1}],
    "frequency_penalty": [{"frequency_penalty": -2.1}],
    "min_p": [{"min_p": 1.1}],
    "min_tokens": [{"min_tokens": -1}, {"min_tokens": 3}],
    "logit_bias_ids": [{"logit_bias_ids": [9999], "logit_bias_values": [1.0]}],
    "logit_bias_values": [{"logit_bias_values": [1.0]}],
    "guided_decoding_guide_type": [{"guided_decoding_guide_type": "poem"}],
    "guided_decoding_guide": [{"guided_decoding_guide": "{}"}],
    "return_context_logits": [{"return_context_logits": True}],
    "return_generation_logits": [{"return_generation_logits": True}],
    "end_id": [{"end_id": 10**6}, {"end_id": -2}],
    "priority": [{"priority": -1}],
    "deadline_ms": [{"deadline_ms": 0}],
}


@pytest.mark.parametrize(
    ("field", "poison"),
    [(field, poison) for field, poisons in TEXT_REFUSALS.items() for poison in poisons],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:40],
)
def test_a_poisoned_request_is_refused_by_its_fields_name(client, field, poison):
    asked = {"text_input": "hello", "max_tokens": 2}
    with pytest.raises(InferenceServerException) as refused:
        client.unary("tensorrt_llm_bls", **(asked | poison))
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert refused.value.message().startswith(field)
    with pytest.raises(InferenceServerException) as refused:
        client.stream("ensemble", stream=True, **(asked | poison))
    # The prefix is Triton's own.
    assert refused.value.message().removeprefix("in ensemble 'ensemble', ").startswith(field)
    assert client.unary("tensorrt_llm_bls", **asked)["num_output_tokens"] == 2  # the next one works


@pytest.mark.parametrize(
    ("field", "poison"),
    [
        ("input_ids", {"input_ids": [10**6]}),
        ("input_ids", {"input_ids": [-1]}),
        ("input_ids", {"input_ids": [5] * 5000, "input_lengths": 5000}),
        ("input_lengths", {"input_lengths": 2}),
        ("input_lengths", {"input_lengths": -1}),
        ("request_output_len", {"request_output_len": 0}),
        ("runtime_top_p", {"runtime_top_p": 2.0}),
        ("runtime_top_k", {"runtime_top_k": -7}),
        ("stop_words_list", {"stop_words_list": np.array([[[5, 6], [9, -1]]], np.int32)}),
        ("stop_words_list", {"stop_words_list": np.array([[[10**6, 6], [1, -1]]], np.int32)}),
        ("bad_words_list", {"bad_words_list": np.array([[[5, 6], [9, -1]]], np.int32)}),
        ("stop", {"stop": True}),
        ("input_ids", {"input_ids": np.array([[5], [5]], np.int32), **{
            name: np.ones((2, 1), np.int32) for name in ("input_lengths", "request_output_len")
        }}),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:40],
)  # fmt: skip
def test_the_engine_refuses_by_its_own_names(client, field, poison):
    asked = {"input_ids": [5], "input_lengths": 1, "request_output_len": 2}
    with pytest.raises(InferenceServerException) as refused:
        client.stream("tensorrt_llm", **(asked | poison))
    assert refused.value.message().startswith(field)


def test_an_empty_tensor_of_tokens_is_refused(client):
    with pytest.raises(InferenceServerException, match="input_ids"):
        client.stream(
            "tensorrt_llm", input_ids=np.zeros((1, 0), np.int32), input_lengths=0, request_output_len=2
        )  # fmt: skip


def test_bls_does_not_stream(client):
    with pytest.raises(InferenceServerException, match="stream: tensorrt_llm_bls answers once"):
        client.unary("tensorrt_llm_bls", text_input="hello", max_tokens=2, stream=True)


def test_http_says_what_is_wrong(client):
    with pytest.raises(urllib.error.HTTPError) as refused:
        client.generate("ensemble", text_input="hello", max_tokens=0)
    assert "max_tokens" in json.loads(refused.value.read())["error"]


# -- together --------------------------------------------------------------------------------------------------------


def test_unary_calls_run_together(client, server, tiny):
    lengths = [50 + count for count in range(8)]  # the last is there long before the first has ended
    expected = [
        completion.text for completion in tiny.generate([CHAT] * 8, [SamplingParams(max_tokens=n) for n in lengths])
    ]
    before = server.settled_metrics()
    with ThreadPoolExecutor(8) as pool:
        replies = pool.map(
            lambda n: client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=n, draft=False), lengths
        )
        assert [reply["text_output"] for reply in replies] == expected
    steps, tokens = 'dflash_steps_total{kind="decode"}', "dflash_committed_tokens_total"
    server.wait_for_increase(before, {tokens: sum(lengths)})
    after = server.settled_metrics()
    assert after[steps] - before.get(steps, 0) < sum(lengths) / 2  # one at a time, there would be a step a token


def test_metrics_count_what_is_done(client, server):
    prompt = client.unary("preprocessing", QUERY=CHAT)["REQUEST_INPUT_LEN"]
    counted = {
        COMPLETED: 3,
        "dflash_committed_tokens_total": 60,
        "dflash_prompt_tokens_total": 3 * prompt,
        "dflash_request_seconds_count": 3,
    }
    before = server.settled_metrics()
    for _ in range(3):
        client.unary("tensorrt_llm_bls", text_input=CHAT, max_tokens=20)
    server.wait_for_increase(before, counted)
    after = server.settled_metrics()  # others are published behind those
    assert after['dflash_drafted_tokens_total{position="1"}'] > before['dflash_drafted_tokens_total{position="1"}']
    assert after["dflash_slots_total"] == 8


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_a_stream_whose_client_is_gone_frees_its_slot(client, server, model):
    cancelled = 'dflash_requests_total{outcome="cancelled"}'
    before = server.settled_metrics()
    text = {"text_input": "hello", "max_tokens": 1900, "stream": True, "draft": False}
    ids = {"input_ids": [5], "input_lengths": 1, "request_output_len": 1900, "streaming": True, "draft": False}
    with client.open_stream(model, ignore_eos=True, **(text if model == "ensemble" else ids)) as responses:
        next(responses)
    server.wait_for_increase(before, {cancelled: 1})
    server.wait_for_gauge("dflash_slots_in_use", 0)


def test_an_http_stream_whose_client_is_gone_frees_its_slot(server):
    cancelled = 'dflash_requests_total{outcome="cancelled"}'
    before = server.settled_metrics()
    url = f"{server.http_url}/v2/models/ensemble/generate_stream"
    asked = {"text_input": "hello", "max_tokens": 1900, "ignore_eos": True, "stream": True, "draft": False}
    with urllib.request.urlopen(url, json.dumps(asked).encode(), timeout=PATIENCE) as reply:
        reply.readline()
    server.wait_for_increase(before, {cancelled: 1})
    server.wait_for_gauge("dflash_slots_in_use", 0)


def test_a_unary_call_whose_client_is_gone_frees_its_slot(client, server):
    cancelled = 'dflash_requests_total{outcome="cancelled"}'
    before = server.settled_metrics()
    asked = tensors({"text_input": "hello", "max_tokens": 1900, "ignore_eos": True, "draft": False})
    call = client.grpc.async_infer("tensorrt_llm_bls", asked, lambda result, error: None)
    server.wait_for_gauge("dflash_slots_in_use", 1)
    call.cancel()
    server.wait_for_increase(before, {cancelled: 1})
    server.wait_for_gauge("dflash_slots_in_use", 0)


# -- deployed --unary ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unary_client(unary_server):
    return Client(unary_server.grpc_url, unary_server.http_url)


def test_deployed_unary_every_model_answers_once(unary_client, tiny):
    expected = alone(tiny, CHAT, max_tokens=20)
    ids = tiny.encode(CHAT)
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert unary_client.unary(model, text_input=CHAT, max_tokens=20)["text_output"] == CHAT + expected.text
    asked = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 20}
    assert unary_client.unary("tensorrt_llm", **asked)["output_ids"] == ids + expected.token_ids
    with pytest.raises(InferenceServerException, match="streaming: this repository was deployed or served --unary"):
        unary_client.unary("tensorrt_llm", streaming=True, **asked)
    with pytest.raises(InferenceServerException, match="stream: "):
        unary_client.unary("ensemble", text_input=CHAT, max_tokens=20, stream=True)


def test_a_full_queue_is_an_error_at_once_and_room_is_room(unary_client):
    """Eight slots, and no place to wait."""
    refusals, calls = [], []
    for _ in range(12):
        asked = tensors({"text_input": CHAT, "max_tokens": 1900, "ignore_eos": True})
        calls.append(
            unary_client.grpc.async_infer(
                "tensorrt_llm_bls", asked, lambda result, error: refusals.append(str(error)) if error else None
            )
        )
    wait_until(lambda: len(refusals) == 4, "four are refused")
    assert all("the queue is full: 8 requests have a slot, and 0 wait (--max-queue)" in text for text in refusals)
    for call in calls:
        call.cancel()

    def served():
        try:
            return unary_client.unary("ensemble", text_input=CHAT, max_tokens=1)
        except InferenceServerException as error:
            assert "the queue is full" in str(error)
            return None

    wait_until(served, "a slot is free")
