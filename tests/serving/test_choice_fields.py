"""What a client says of log-probabilities, penalties and structure arrives as it was said."""

import numpy as np
import pytest

from trtllm_dflash import SamplingParams, Structured
from trtllm_dflash.errors import RequestError
from trtllm_dflash.runtime.request import TokenLogprobs
from trtllm_dflash.serving.choice_fields import choice_tensors, choice_values, logprob_arrays, read_logprobs
from trtllm_dflash.serving.parameters import Fields, parse_request

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "\u00e9"]}}}


def sent(params):
    """Parameters as the engine reads them from a client's tensors."""
    fields = Fields({name: value[None] for name, value in choice_tensors(params).items()})
    return SamplingParams.model_validate(choice_values(fields))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"logprobs": 0},
        {"logprobs": 20, "prompt_logprobs": 0},
        {"presence_penalty": 0.5, "frequency_penalty": -1.25, "repetition_penalty": 1.5, "min_p": 0.25},
        {"min_tokens": 3, "logit_bias": {3: -100.0, 2000: 0.5}, "bad_words": ("fox", " hedgehog")},
        {"structured": Structured(kind="json_object")},
        {"structured": Structured(kind="json_schema", value=SCHEMA)},
        {"structured": Structured(kind="regex", value="[a-z]+")},
        {"structured": Structured(kind="choice", value=["yes", "no"])},
        {"structured": Structured(kind="grammar", value='start: "a" | "b"')},
    ],
)
def test_parameters_arrive_as_they_were_sent(params):
    assert sent(SamplingParams(**params)) == SamplingParams(**params)


def test_neutral_parameters_are_not_sent():
    assert choice_tensors(SamplingParams(temperature=1.0)) == {}


@pytest.mark.parametrize(
    ("tensors", "refusal"),
    [
        ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"}, "guided_decoding_guide: is not"),
        ({"guided_decoding_guide": "{}"}, "guided_decoding_guide: needs a guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide: missing"),
        ({"guided_decoding_guide_type": "ebnf_grammar"}, "guided_decoding_guide_type: ebnf_grammar is not one of json"),
        ({"logit_bias_ids": [1, 2]}, "logit_bias_values: 0 of them, but 2 logit_bias_ids"),
        ({"bad_words": ["x"] * 17}, "bad_words: 17 of them"),
    ],
)
def test_a_wrong_tensor_is_refused_by_its_name(tensors, refusal):
    def made(value):
        is_text = isinstance(value, str) or isinstance(value[0], str)
        return np.array([[x.encode() for x in np.atleast_1d(value)]], object) if is_text else np.array([value])

    with pytest.raises(RequestError, match=f"^{refusal}"):
        choice_values(Fields({name: made(value) for name, value in tensors.items()}))


@pytest.mark.parametrize("missing", ["input_ids", "input_lengths", "request_output_len"])
def test_a_tensor_that_is_missing_is_named(missing):
    tensors = {name: np.array([[1]], np.int32) for name in ("input_ids", "input_lengths", "request_output_len")}
    del tensors[missing]
    with pytest.raises(RequestError, match=f"^{missing}: missing$"):
        parse_request(Fields(tensors), decoupled=True, echo=True, choices={})


@pytest.mark.parametrize("most", [0, 2])
def test_log_probabilities_arrive_as_they_were_sent(most):
    given = [TokenLogprobs(-0.5 * i, [(i, -0.25), (7, -1.5)][:most]) for i in range(3)]
    assert read_logprobs(*(array.flatten().tolist() for array in logprob_arrays(given))) == given
    assert read_logprobs(*(array.flatten().tolist() for array in logprob_arrays([]))) == []
