"""Tensors of log-probabilities, penalties and structure, as a client writes them and `tensorrt_llm` reads them.

Names are TensorRT-LLM's where it has them.
"""

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dflash.runtime.request import SamplingParams, TokenLogprobs
from trtllm_dflash.serving.parameters import Fields, Tensors, check_stops

Array = NDArray[Any]

_FLOATS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p")
_INTS = {"min_tokens": "min_tokens", "logprobs": "num_log_probs", "prompt_logprobs": "num_prompt_log_probs"}

#: Kinds of structure, by what `guided_decoding_guide_type` calls them.
_GUIDES = {
    "json": "json_object",
    "json_schema": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "lark_grammar": "grammar",
}
_JSON_GUIDES = ("json_schema", "choice")


def choice_values(fields: Fields) -> dict[str, Any]:
    """Reads the values of `SamplingParams` that the tensors of this page give.

    Raises:
        RequestError: a tensor is wrong; begins with its name.
    """
    words, runs = fields.texts("bad_words"), fields.token_runs("bad_words_list")
    check_stops(fields, "bad_words", words, "characters")
    check_stops(fields, "bad_words_list", runs, "tokens")
    values: dict[str, Any] = {"bad_words": tuple(words), "bad_token_sequences": tuple(runs)}
    for name in _FLOATS:
        if name in fields:
            values[name] = fields.scalar(name)
    for name, field in _INTS.items():
        if field in fields:
            values[name] = fields.scalar(field)
    if fields.scalar("return_log_probs", False):
        values.setdefault("logprobs", 0)
    ids, biases = fields.row("logit_bias_ids"), fields.row("logit_bias_values")
    if len(ids) != len(biases):
        raise fields.refusal("logit_bias_values", f"{len(biases)} of them, but {len(ids)} logit_bias_ids")
    if len(set(ids)) < len(ids):
        raise fields.refusal("logit_bias_ids", "a token is in it twice")
    if not all(map(math.isfinite, biases)):
        raise fields.refusal("logit_bias_values", "one is not a finite number")
    values["logit_bias"] = dict(zip(ids, biases, strict=True))
    values["structured"] = _structured(fields)
    return values


def _structured(fields: Fields) -> dict[str, Any] | None:
    types, guides = (fields.texts(f"guided_decoding_guide{suffix}") for suffix in ("_type", ""))
    if not types:
        if guides:
            raise fields.refusal("guided_decoding_guide", "needs a guided_decoding_guide_type")
        return None
    kind, guide = types[0], "".join(guides)
    if kind not in _GUIDES:
        raise fields.refusal("guided_decoding_guide_type", f"{kind[:40]} is not one of {', '.join(_GUIDES)}")
    if kind != "json":
        fields.require("guided_decoding_guide")
    if kind in _JSON_GUIDES:
        try:
            return {"kind": _GUIDES[kind], "value": json.loads(guide)}
        except (ValueError, RecursionError) as error:
            raise fields.refusal("guided_decoding_guide", f"is not JSON: {error}") from None
    return {"kind": _GUIDES[kind], "value": guide if kind != "json" else guide or None}


def choice_tensors(params: SamplingParams) -> Tensors:
    """Writes the tensors [N] that `choice_values` reads; none of what is neutral."""
    tensors: Tensors = {}
    for name in _FLOATS:
        value = getattr(params, name)
        if value != SamplingParams.model_fields[name].default:
            tensors[name] = np.array([value], np.float32)
    for name, field in _INTS.items():
        value = getattr(params, name)
        if value:
            tensors[field] = np.array([value], np.int32)
    if params.logprobs is not None:
        tensors["return_log_probs"] = np.array([True])
    if params.prompt_logprobs is not None:
        tensors["num_prompt_log_probs"] = np.array([params.prompt_logprobs], np.int32)
    if params.logit_bias:
        tensors["logit_bias_ids"] = np.array(list(params.logit_bias), np.int32)
        tensors["logit_bias_values"] = np.array(list(params.logit_bias.values()), np.float32)
    if params.bad_words:
        tensors["bad_words"] = np.array([word.encode() for word in params.bad_words], object)
    if params.structured is not None:
        kind = next(name for name, ours in _GUIDES.items() if ours == params.structured.kind)
        guide = params.structured.value
        tensors["guided_decoding_guide_type"] = np.array([kind.encode()], object)
        if kind != "json":
            text = json.dumps(guide) if kind in _JSON_GUIDES else guide
            tensors["guided_decoding_guide"] = np.array([text.encode()], object)
    return tensors


def logprob_arrays(logprobs: list[TokenLogprobs]) -> tuple[Array, Array, Array]:
    """Makes the outputs of some tokens' log-probabilities: [1, n], and of the most likely, ids and values [1, n, k]."""
    own = np.array([[its.logprob for its in logprobs]], np.float32)
    shape = (1, len(logprobs), len(logprobs[0].top_logprobs) if logprobs else 0)
    pairs = [pair for its in logprobs for pair in its.top_logprobs]
    ids = np.array([token for token, _ in pairs], np.int32).reshape(shape)
    return own, ids, np.array([value for _, value in pairs], np.float32).reshape(shape)


def read_logprobs(own: list[float], ids: list[int], values: list[float]) -> list[TokenLogprobs]:
    """Reads the log-probabilities of tokens from the numbers of those outputs."""
    most = len(ids) // len(own) if own else 0
    top = list(zip(ids, values, strict=True))
    return [TokenLogprobs(number, top[i * most : (i + 1) * most]) for i, number in enumerate(own)]
