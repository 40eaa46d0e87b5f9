"""Parses a request's tensors, named as in TensorRT-LLM, into a prompt and sampling parameters.

An unsupported setting is refused by the name that the client used for it, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from pydantic import ValidationError

from trtllm_dflash.errors import DFlashError, RequestError
from trtllm_dflash.runtime.request import SamplingParams

Tensors = dict[str, NDArray[Any]]

#: A parameter of requests that asks for the code of an error before its text: Triton hands on the text alone, in
#: streams and from one model to another.
CODED_ERRORS = "coded_errors"

#: A parameter of requests that `stop` another: its client has all of the reply that it wants, which is complete then.
COMPLETE = "complete"

MOST_STOPS = 16  # texts, and as many runs of tokens, that may end one reply: each is searched for after every token
LONGEST_STOP = 256  # characters, or tokens

#: How `ensemble` and `tensorrt_llm_bls` call what has another name at `tensorrt_llm`.
TEXT_NAMES = {
    "input_ids": "text_input",
    "prompt": "text_input",
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "streaming": "stream",
}

#: Fields of features that are not here, and the values that do not ask for them.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "length_penalty": (0, 1),  # it weighs beams, of which there is one
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
}

#: How `tensorrt_llm` calls what `Service.submit` and `SamplingParams` know by another name.
_FIELDS = {
    "prompt": "input_ids",
    "deadline": "deadline_ms",
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "stop": "stop_words",
    "stop_token_ids": "end_id",
    "stop_token_sequences": "stop_words_list",
    "bad_token_sequences": "bad_words_list",
    "logprobs": "num_log_probs",
    "prompt_logprobs": "num_prompt_log_probs",
    "logit_bias": "logit_bias_ids",
    "structured": "guided_decoding_guide",
}

#: Values too long for an error's one line.
_LONG_VALUES = ("logit_bias", "structured", "bad_words", "bad_token_sequences")


@dataclass(frozen=True)
class EngineRequest:
    """A request to the engine, and the form of its responses.

    Attributes:
        prompt: the text that prompt_ids were made from, where the client gave a text.
        streaming: a response a step, or for several that ran while one was sent, rather than one at the end.
        echo: the reply begins with the prompt.
        perf: the response has the times of the request's events.
        priority: 1 is the most urgent, 0 none in particular.
        deadline: seconds until its last token must have arrived.
    """

    prompt_ids: list[int]
    prompt: str | None
    params: SamplingParams
    streaming: bool
    echo: bool
    perf: bool
    draft: bool
    priority: int
    deadline: float | None


class Fields:
    """A request's tensors, each [1, ...]: a batch of one.

    Args:
        tensors: by name.
        names: the client's own names for some of them.

    Raises:
        RequestError: a tensor is a batch of several requests.
    """

    def __init__(self, tensors: Tensors, names: dict[str, str] | None = None) -> None:
        self._tensors = tensors
        self._names = names or {}
        for field, tensor in tensors.items():
            if tensor.shape[:1] != (1,):
                raise self.refusal(field, f"a batch of {tensor.shape[0]} in one request; send each alone")

    def __contains__(self, field: str) -> bool:
        return field in self._tensors

    def refusal(self, field: str, reason: str) -> RequestError:
        """Makes an error that begins with the field's name."""
        return RequestError(reason, self._names.get(field, field))

    def refusal_of(self, error: DFlashError) -> DFlashError:
        """Renames the field in the engine's refusal to the name that the client knows."""
        if not isinstance(error, RequestError) or error.field is None:
            return error
        return self.refusal(_FIELDS.get(error.field, error.field), error.reason)

    def require(self, field: str) -> None:
        """Refuses a request without this tensor."""
        if field not in self._tensors:
            raise self.refusal(field, "missing")

    def scalar(self, field: str, default: Any = None) -> Any:
        """Reads the number or truth value in a tensor [1, 1]."""
        return self._tensors[field].item() if field in self._tensors else default

    def row(self, field: str) -> list[int]:
        """Reads the numbers of a tensor [1, N]."""
        return self._tensors[field][0].tolist() if field in self._tensors else []

    def texts(self, field: str) -> list[str]:
        """Reads the texts of a tensor [1, N] that are not empty."""
        if field not in self._tensors:
            return []
        try:
            texts = [value.decode() for value in self._tensors[field].reshape(-1).tolist()]
        except UnicodeDecodeError as error:
            raise self.refusal(field, f"not valid UTF-8 (byte {error.start})") from None
        return [text for text in texts if text]

    def token_runs(self, field: str) -> list[tuple[int, ...]]:
        """Reads runs of tokens from a tensor [1, 2, N]: all their tokens, and each run's end; -1 is no end.

        As TensorRT-LLM has it: [[5, 6, 7, 0], [2, 3, -1, -1]] is (5, 6) and (7).
        """
        if field not in self._tensors:
            return []
        tokens, ends = self._tensors[field][0].tolist()
        ends = [end for end in ends if end >= 0]
        starts = [0, *ends[:-1]]
        if any(start >= end for start, end in zip(starts, ends, strict=False)) or max(ends, default=0) > len(tokens):
            raise self.refusal(field, f"its second row must be the growing ends of runs of tokens, not {ends}")
        return [tuple(tokens[start:end]) for start, end in zip(starts, ends, strict=False)]


def parse_request(fields: Fields, decoupled: bool, echo: bool, choices: Mapping[str, Any]) -> EngineRequest:
    """Parses a request of `tensorrt_llm`. `Service.submit` checks whether the engine can serve it.

    Args:
        decoupled: whether the model may answer more than once.
        echo: whether a reply begins with its prompt, unless the request says otherwise.
        choices: what `choice_values` reads of it.

    Raises:
        RequestError: a field is wrong, or not supported; begins with the field's name.
    """
    for field, neutral in _NEUTRAL.items():
        value = fields.scalar(field, neutral[0])
        if value not in neutral:
            expected = " or ".join(str(number).lower() for number in neutral)
            given = str(value).lower() if isinstance(value, bool) else f"{value:g}"
            raise fields.refusal(field, f"{given} is not supported; leave it out, or at {expected}")
    if len(fields.row("decoder_input_ids")) > 1:  # one is what `preprocessing` gives for every model
        raise fields.refusal("decoder_input_ids", "not supported: this model has no encoder; leave it out")
    streaming = fields.scalar("streaming", False)
    if streaming and not decoupled:
        raise fields.refusal("streaming", "this repository was deployed or served --unary, which does not stream")
    deadline = fields.scalar("deadline_ms")
    return EngineRequest(
        prompt_ids=_prompt_ids(fields),
        prompt="".join(fields.texts("prompt")) if "prompt" in fields else None,
        params=_sampling_params(fields, choices),
        streaming=streaming,
        echo=not fields.scalar("exclude_input_in_output", not echo),
        perf=fields.scalar("return_perf_metrics", False),
        draft=fields.scalar("draft", True),
        priority=fields.scalar("priority", 0),
        deadline=None if deadline is None else deadline / 1000,
    )


def _prompt_ids(fields: Fields) -> list[int]:
    for field in ("input_ids", "input_lengths"):
        fields.require(field)
    ids = fields.row("input_ids")
    if fields.scalar("input_lengths") != len(ids):
        raise fields.refusal("input_lengths", f"{fields.scalar('input_lengths')}, but input_ids has {len(ids)}")
    return ids


def _sampling_params(fields: Fields, choices: Mapping[str, Any]) -> SamplingParams:
    end_id = fields.scalar("end_id", -1)
    if end_id < -1:
        raise fields.refusal("end_id", f"{end_id}; give a token id, or -1 for the model's own")
    stop_ids = () if end_id == -1 else (end_id,)
    runs = fields.token_runs("stop_words_list")
    stops = fields.texts("stop_words")
    check_stops(fields, "stop_words", stops, "characters")
    check_stops(fields, "stop_words_list", runs, "tokens")
    temperature, top_k, top_p = _filters(fields)
    fields.require("request_output_len")
    values = {
        "max_tokens": fields.scalar("request_output_len"),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": fields.scalar("seed", 0),
        "stop": tuple(stops),
        "stop_token_ids": stop_ids,
        "stop_token_sequences": tuple(runs),
        "ignore_eos": fields.scalar("ignore_eos", False),
        **choices,
    }
    try:
        params = SamplingParams.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        given = "" if name in _LONG_VALUES else f"{values[name]}: "
        raise fields.refusal(_FIELDS.get(name, name), f"{given}{problem['msg']}") from None
    if params.top_k == 1:
        params = params.model_copy(update={"temperature": 0.0})  # the same tokens for less work
    return params


def _filters(fields: Fields) -> tuple[float, int, float]:
    """Reads temperature, top-k and top-p; those left out or 0 mean what they mean to TensorRT-LLM's clients.

    Nothing given is greedy. Top-k or top-p alone sample at temperature 1. Top-p 0 is no filter beside a top-k, and
    greedy without one. Temperature 1 alone is greedy: NVIDIA's clients send it with every request.
    """
    top_k, top_p = fields.scalar("runtime_top_k", 0), fields.scalar("runtime_top_p")
    sampled = top_k > 1 or (top_k == 0 and top_p is not None)
    temperature = fields.scalar("temperature", 1.0)
    if not sampled and temperature == 1:
        temperature = 0.0
    if top_p == 0:
        return temperature, top_k or 1, 1.0
    return temperature, top_k, 1.0 if top_p is None else top_p


def check_stops(fields: Fields, field: str, stops: "list[str] | list[tuple[int, ...]]", unit: str) -> None:
    """Refuses texts, or runs of tokens, that are too many or too long to search a reply for."""
    if len(stops) > MOST_STOPS:
        raise fields.refusal(field, f"{len(stops)} of them; at most {MOST_STOPS} are taken")
    longest = max(map(len, stops), default=0)
    if longest > LONGEST_STOP:
        raise fields.refusal(field, f"one has {longest} {unit}; at most {LONGEST_STOP} are taken")
