"""The contract of TensorRT-LLM's Triton backend, as its published clients read it, in a real Triton server."""

import contextlib
import queue

import numpy as np
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from tests.serving.test_models import CHAT, alone, tensors
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")


@pytest.fixture(scope="module")
def client(unary_server):
    """A client of a server whose models answer once, with the defaults of `deploy`."""
    with triton.InferenceServerClient(unary_server.grpc_url) as found:
        yield found


def call(client, model, **inputs):
    return client.infer(model, tensors(inputs), client_timeout=PATIENCE)


def ids_of(ids, **more):
    return {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 20, **more}


@contextlib.contextmanager
def open_stream(server):
    """A gRPC stream, and the queue of its results and errors."""
    results = queue.SimpleQueue()
    with triton.InferenceServerClient(server.grpc_url) as streaming:
        streaming.start_stream(lambda result, error: results.put(error or result))
        yield streaming, results


def taken(results):
    found = []
    while not results.empty():
        found.append(results.get())
    return found


# -- shapes, order, defaults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_text_is_bytes_at_the_first_place(client, tiny, model):
    text = call(client, model, text_input=CHAT, max_tokens=20).as_numpy("text_output")
    assert text.shape == (1,)
    assert text[0].decode() == CHAT + alone(tiny, CHAT, max_tokens=20).text  # clients take the prompt off


def test_a_streamed_text_is_bytes_at_the_first_place_and_has_no_prompt(server, tiny):
    with open_stream(server) as (streaming, results):
        asked = {"text_input": CHAT, "max_tokens": 20, "stream": True, "exclude_input_in_output": False}
        streaming.async_stream_infer("ensemble", tensors(asked))
        streaming.stop_stream()  # which waits for what was asked
        texts = [result.as_numpy("text_output") for result in taken(results)]
    assert {text.shape for text in texts} == {(1,)}
    assert "".join(text[0].decode() for text in texts) == alone(tiny, CHAT, max_tokens=20).text


def test_a_result_is_there_before_its_stream_ends(server):
    with open_stream(server) as (streaming, results):
        streaming.async_stream_infer("tensorrt_llm", tensors(ids_of([5, 6])))
        result = results.get(timeout=PATIENCE)  # one, since it is not streamed
        streaming.stop_stream()
        assert result.as_numpy("output_ids").shape[:2] == (1, 1)
        assert taken(results) == []


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls", "preprocessing"])
def test_outputs_come_in_the_order_of_the_configuration(client, model):
    inputs = {
        "tensorrt_llm": ids_of([5, 6]),
        "tensorrt_llm_bls": {"text_input": "a", "max_tokens": 2},
        "preprocessing": {"QUERY": "a"},
    }[model]
    configured = [output.name for output in client.get_model_config(model).config.output]
    assert configured[0] in ("output_ids", "text_output", "INPUT_ID")
    for names in (configured, configured[3::-1]):
        wanted = None if names is configured else [triton.InferRequestedOutput(name) for name in names]
        result = client.infer(model, tensors(inputs), outputs=wanted, client_timeout=PATIENCE)
        found = [output.name for output in result.get_response().outputs]
        assert found == [name for name in configured if name in names]


def test_output_ids_lead_with_the_prompt_as_sequence_length_counts(client, tiny):
    prompt = tiny.encode(CHAT)
    reply = alone(tiny, CHAT, max_tokens=20).token_ids
    for exclude, expected in ((False, prompt + reply), (True, reply), (None, prompt + reply)):
        more = {} if exclude is None else {"exclude_input_in_output": exclude}
        result = call(client, "tensorrt_llm", **ids_of(prompt, **more))
        assert result.as_numpy("output_ids").tolist() == [[expected]]
        assert result.as_numpy("sequence_length").tolist() == [[len(expected)]]


def test_the_pages_of_a_reply_are_counted_where_metrics_are_asked_for(client):
    names = [f"kv_cache_{kind}_blocks" for kind in ("alloc_new", "reused", "alloc_total")]

    def counts(**more):
        result = call(client, "tensorrt_llm", **ids_of([5, 6], **more))
        return [result.as_numpy(name).tolist() for name in names]

    assert counts(return_perf_metrics=True) == [[[1]], [[0]], [[1]]]  # on a CPU each slot has one long page
    assert counts() == [[[0]]] * 3


# -- model by model --------------------------------------------------------------------------------------------------


def test_the_models_called_one_by_one_give_the_ensembles_text(client):
    """As TensorRT-LLM's end-to-end test has it: what one model answers is what the next one takes."""
    words = {"BAD_WORDS_DICT": [""], "STOP_WORDS_DICT": [""]}
    made = call(client, "preprocessing", QUERY=CHAT, REQUEST_OUTPUT_LEN=20, **words).as_numpy
    tokens = call(
        client,
        "tensorrt_llm",
        input_ids=made("INPUT_ID"),
        decoder_input_ids=made("DECODER_INPUT_ID"),
        input_lengths=made("REQUEST_INPUT_LEN"),
        request_output_len=made("REQUEST_OUTPUT_LEN"),
        bad_words_list=made("BAD_WORDS_IDS"),
        stop_words_list=made("STOP_WORDS_IDS"),
        end_id=made("OUT_END_ID"),
        pad_id=made("OUT_PAD_ID"),
    ).as_numpy
    text = call(
        client, "postprocessing", TOKENS_BATCH=tokens("output_ids"), SEQUENCE_LENGTH=tokens("sequence_length")
    ).as_numpy("OUTPUT")
    whole = call(client, "ensemble", text_input=CHAT, max_tokens=20).as_numpy("text_output")
    assert text.shape == whole.shape == (1,)
    special = "<|im_start|>", "<|im_end|>"  # as in TensorRT-LLM, they are lost on the way from tokens to text
    plain = whole[0].decode()
    for token in special:
        plain = plain.replace(token, "")
    assert text[0].decode() == plain


def test_preprocessing_makes_runs_of_tokens_of_words(client, tiny):
    made = call(client, "preprocessing", QUERY="a", STOP_WORDS_DICT=["fox", "", "a bridge"], END_ID=5, PAD_ID=6)
    runs = [tiny.codec.encode_words(word) for word in ("fox", "a bridge")]
    tokens, ends = made.as_numpy("STOP_WORDS_IDS")[0].tolist()
    assert tokens == runs[0] + runs[1]
    assert ends[:2] == [len(runs[0]), len(tokens)]
    assert set(ends[2:]) <= {-1}
    assert made.as_numpy("BAD_WORDS_IDS").tolist() == [[[0], [-1]]]
    assert [made.as_numpy(name).item() for name in ("OUT_END_ID", "OUT_PAD_ID")] == [5, 6]


# -- hints and refusals ----------------------------------------------------------------------------------------------


def test_drafts_of_the_clients_own_change_nothing(client):
    expected = call(client, "tensorrt_llm", **ids_of([5, 6, 7])).as_numpy("output_ids")
    drafted = call(client, "tensorrt_llm", **ids_of([5, 6, 7], draft_input_ids=[1, 2, 3]))
    assert (drafted.as_numpy("output_ids") == expected).all()
    asked = {"text_input": CHAT, "max_tokens": 20, "use_draft_logits": False}
    some = call(client, "tensorrt_llm_bls", num_draft_tokens=5, **asked)
    none = call(client, "tensorrt_llm_bls", num_draft_tokens=0, **asked)
    assert some.as_numpy("text_output") == none.as_numpy("text_output")
    assert some.as_numpy("total_draft_tokens").item() > none.as_numpy("total_draft_tokens").item() == 0


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_empty_biases_are_no_biases_and_others_are_refused(client, model):
    asked = {"text_input": "a", "max_tokens": 2}
    words, weights = np.empty((1, 0), object), np.empty((1, 0), np.float32)
    assert call(client, model, embedding_bias_words=words, embedding_bias_weights=weights, **asked)
    with pytest.raises(InferenceServerException, match="embedding_bias_words: not supported"):
        call(client, model, embedding_bias_words=["fox"], embedding_bias_weights=[1.0], **asked)


BEYOND = {
    "TOKENS_BATCH": np.array([[[9999]]], np.int32),
    "SEQUENCE_LENGTH": np.array([[1]], np.int32),
}  # the vocabulary


@pytest.mark.parametrize(
    ("model", "inputs", "refusal"),
    [
        ("tensorrt_llm", ids_of([5], decoder_input_ids=[1, 2]), "decoder_input_ids: not supported"),
        ("tensorrt_llm", ids_of([5], return_context_logits=True), "return_context_logits: true is not supported"),
        ("tensorrt_llm_bls", {"text_input": "a", "max_tokens": 2, "use_draft_logits": True}, "use_draft_logits: not"),
        ("preprocessing", {"QUERY": "a", "STOP_WORDS_DICT": ["x"] * 1000}, "STOP_WORDS_DICT: 1000 of them"),
        ("postprocessing", BEYOND, "TOKENS_BATCH: 9999 is not a token id"),
        ("tensorrt_llm_bls", {"max_tokens": 2}, "text_input: missing"),
        ("tensorrt_llm_bls", {"text_input": "a", "max_tokens": 2, "num_draft_tokens": -1}, "num_draft_tokens: -1;"),
        ("ensemble", {"text_input": ["a", "b"], "max_tokens": 2}, "text_input"),
        # Triton would let such a stream wait for ever.
        ("ensemble", {"text_input": "a", "draft": True}, "max_tokens: missing"),
        ("ensemble", {"max_tokens": 2, "draft": True}, "text_input (QUERY): missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_here_is_refused_in_a_line_that_names_it(client, model, inputs, refusal):
    with pytest.raises(InferenceServerException) as refused:
        call(client, model, **inputs)
    assert refusal in refused.value.message()
    assert "\n" not in refused.value.message()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_field_that_is_no_input_is_refused_by_its_name(client, model):
    """Triton makes parameters of such fields of its HTTP API's JSON."""
    with pytest.raises(InferenceServerException, match="random_seed: there is no such input"):
        client.infer(model, tensors({"text_input": "a", "max_tokens": 2}), parameters={"random_seed": 1})


# -- stopping by request id ------------------------------------------------------------------------------------------

STOP = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
LONG = {"ignore_eos": True, "draft": False, "request_output_len": 1900}


def test_a_stream_is_stopped_by_its_request_id(server):
    with open_stream(server) as (streaming, results):
        asked = {**ids_of([5, 6], streaming=True), **LONG}
        streaming.async_stream_infer("tensorrt_llm", tensors(asked), request_id="7")
        first = results.get(timeout=PATIENCE)
        streaming.async_stream_infer("tensorrt_llm", tensors(STOP), request_id="no such request")
        streaming.async_stream_infer("tensorrt_llm", tensors(STOP), request_id="7")
        streaming.stop_stream()
        answers = [first, *taken(results)]
    pieces = [answer for answer in answers if answer.as_numpy("output_ids") is not None]
    assert len(answers) - len(pieces) == 2  # a stop's answer has no outputs
    assert [piece.as_numpy("finish_reason").item() for piece in pieces] == [b""] * (len(pieces) - 1) + [b"cancelled"]
    assert sum(piece.as_numpy("sequence_length").item() for piece in pieces) < 1900
    server.wait_for_gauge("dflash_slots_in_use", 0)


def test_a_call_is_stopped_by_its_request_id_and_gives_what_it_has(client, unary_server):
    answers = queue.SimpleQueue()
    asked = tensors({**ids_of([5, 6]), **LONG})
    client.async_infer("tensorrt_llm", asked, lambda result, error: answers.put(error or result), request_id="8")
    unary_server.wait_for_gauge("dflash_slots_in_use", 1)
    assert client.infer("tensorrt_llm", tensors(STOP), request_id="8").as_numpy("output_ids") is None
    result = answers.get(timeout=PATIENCE)
    (ids,) = result.as_numpy("output_ids")[0].tolist()
    assert ids[:2] == [5, 6]
    assert 2 <= len(ids) == result.as_numpy("sequence_length").item() < 1900
    assert result.as_numpy("finish_reason").item() == b"cancelled"


def test_a_call_through_the_other_models_is_stopped_by_its_request_id(client, unary_server):
    unary_server.wait_for_gauge("dflash_slots_in_use", 0)
    answers = queue.SimpleQueue()
    asked = tensors({"text_input": "a", "max_tokens": 1900, "ignore_eos": True, "draft": False})
    client.async_infer("tensorrt_llm_bls", asked, lambda result, error: answers.put(error or result), request_id="9")
    unary_server.wait_for_gauge("dflash_slots_in_use", 1)
    assert client.infer("tensorrt_llm", tensors(STOP), request_id="9").as_numpy("output_ids") is None
    assert answers.get(timeout=PATIENCE).as_numpy("finish_reason").item() == b"cancelled"


def test_a_stop_that_names_no_request_is_refused(client):
    with pytest.raises(InferenceServerException, match="stop: it names no request"):
        call(client, "tensorrt_llm", **STOP)
