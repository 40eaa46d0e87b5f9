"""The output tensors of `tensorrt_llm`: of one response, those that were requested and no others, in a fixed order."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dflash.runtime.request import Completion, Times, TokenLogprobs, Update
from trtllm_dflash.serving.choice_fields import logprob_arrays
from trtllm_dflash.serving.parameters import EngineRequest, Tensors
from trtllm_dflash.serving.tensors import string_tensor

Array = NDArray[Any]

_INT32_ZERO = np.zeros((1, 1), np.int32)
_INT64_ZERO = np.zeros((1, 1), np.int64)
_NO_TEXT = np.array([[b""]], object)


@dataclass(frozen=True)
class Response:
    """One response to a request.

    Attributes:
        update: the counts of drafts so far and, with the last response, the completion.
        token_ids, text: of the steps since the response before, or of the whole reply where it is not streamed.
        tokens: of the reply so far.
        key: of the request, for the other models.
        stopped: it is the last one, since the client stopped the request.
        logprobs: of the reply's tokens among token_ids, where they were asked for.
        cumulative: the sum of the log-probabilities of the reply so far.
    """

    asked: EngineRequest
    update: Update
    token_ids: list[int]
    text: str
    tokens: int
    key: int
    stopped: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative: float = 0.0

    def outputs(self, names: Iterable[str]) -> Tensors:
        """Makes the outputs of these names, each [1, ...]."""
        return {name: OUTPUTS[name](self) for name in names}


def _int32(value: int) -> Array:
    return np.array([[value]], np.int32)


def _acceptance_rate(response: Response) -> Array:
    update = response.update
    rate = update.accepted_tokens / update.drafted_tokens if update.drafted_tokens else 0.0
    return np.array([[rate]], np.float32)


def _accepted_per_step(response: Response) -> Array:
    """Makes the accepted drafts of each decoding step, known with the last response: one may be of several steps."""
    done = response.update.completion
    return np.array([[] if done is None else done.accepted_per_step], np.int32)


def _reused_tokens(response: Response) -> Array:
    """Makes the number of prompt tokens whose K/V rows an earlier request had left, known with the last response."""
    done = response.update.completion
    return _INT32_ZERO if done is None else _int32(done.reused_tokens)


def _finish_reason(response: Response) -> Array:
    done = response.update.completion
    if response.stopped:
        return string_tensor(["cancelled"])
    return _NO_TEXT if done is None else string_tensor([done.finish_reason])


def _output_log_probs(response: Response) -> Array:
    """Makes the log-probabilities of the reply's tokens; clients that did not ask find zeros."""
    if response.asked.params.logprobs is None:
        return np.zeros((1, 1, len(response.token_ids)), np.float32)
    return logprob_arrays(response.logprobs)[0][None]


def _of_prompt(response: Response) -> list[TokenLogprobs]:
    """Lists the log-probabilities of the prompt's tokens but the first, known with the last response."""
    done = response.update.completion
    return [its for its in (done.prompt_logprobs or []) if its is not None] if done is not None else []


def _pages(read: Callable[[Completion], int]) -> Callable[[Response], Array]:
    """Makes the output of a number of the caches' pages; 0 where it is not known yet, or not requested."""

    def output(response: Response) -> Array:
        done = response.update.completion
        return _int32(read(done)) if done is not None and response.asked.perf else _INT32_ZERO

    return output


def _time(read: Callable[[Times], int]) -> Callable[[Response], Array]:
    """Makes the output of a time: nanoseconds since the epoch, 0 where it is not known, or not requested."""

    def output(response: Response) -> Array:
        done = response.update.completion
        return np.array([[read(done.times)]], np.int64) if done is not None and response.asked.perf else _INT64_ZERO

    return output


#: In the order of the model's configuration: clients look for the first tensor of a response, and find `output_ids`.
OUTPUTS: dict[str, Callable[[Response], Array]] = {
    "output_ids": lambda response: np.array([[response.token_ids]], np.int32),
    "sequence_length": lambda response: _int32(len(response.token_ids)),
    "cum_log_probs": lambda response: np.array([[response.cumulative]], np.float32),
    "output_log_probs": _output_log_probs,
    "batch_index": lambda response: _INT32_ZERO,
    "sequence_index": lambda response: _INT32_ZERO,
    "kv_cache_alloc_new_blocks": _pages(lambda done: done.pages - done.shared_pages),
    "kv_cache_reused_blocks": _pages(lambda done: done.shared_pages),
    "kv_cache_alloc_total_blocks": _pages(lambda done: done.pages),
    "arrival_time_ns": _time(lambda times: times.arrival_ns),
    "first_scheduled_time_ns": _time(lambda times: times.first_scheduled_ns),
    "first_token_time_ns": _time(lambda times: times.first_token_ns),
    "last_token_time_ns": _time(lambda times: times.last_token_ns),
    "acceptance_rate": _acceptance_rate,
    "total_accepted_draft_tokens": lambda response: _int32(response.update.accepted_tokens),
    "total_draft_tokens": lambda response: _int32(response.update.drafted_tokens),
    "accepted_per_step": _accepted_per_step,
    "num_input_tokens": lambda response: _int32(len(response.asked.prompt_ids)),
    "num_output_tokens": lambda response: _int32(response.tokens),
    "num_reused_tokens": _reused_tokens,
    "output_text": lambda response: string_tensor([response.text]),
    "finish_reason": _finish_reason,
    "request_key": lambda response: np.array([[response.key]], np.int64),
    "top_log_prob_ids": lambda response: logprob_arrays(response.logprobs)[1],
    "top_log_probs": lambda response: logprob_arrays(response.logprobs)[2],
    "prompt_log_probs": lambda response: logprob_arrays(_of_prompt(response))[0],
    "prompt_top_log_prob_ids": lambda response: logprob_arrays(_of_prompt(response))[1],
    "prompt_top_log_probs": lambda response: logprob_arrays(_of_prompt(response))[2],
}
