"""Requests to the OpenAI API: what is taken, and what is refused by its name."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    FiniteFloat,
    NonNegativeInt,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import Self

from trtllm_dflash.runtime.request import (
    BadWord,
    LogitBias,
    Logprobs,
    MaxTokens,
    MinP,
    Penalty,
    RepetitionPenalty,
    StopText,
    Temperature,
    TopK,
)
from trtllm_dflash.runtime.structured import Structured
from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.formats import ResponseFormat, StructuredOutputs
from trtllm_dflash.serving.openai.json_fields import JsonFields
from trtllm_dflash.serving.openai.messages import MOST_FIELDS, Message, ToolChoice, Tools, asked_of

_R = TypeVar("_R", bound=BaseModel)
_KIND = "its type is none of those that are taken here"
#: Of problems that pydantic tells in its own terms.
_REASONS = {"extra_forbidden": "unknown field", "union_tag_invalid": _KIND, "union_tag_not_found": _KIND}

MOST_CHOICES = 128  # of one request; each is a request to the engine

#: Accepted and not acted upon: none of them changes what a reply says.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "request_id",
        "cache_salt",
    }
)

#: What would change a reply and is not done here, with the values that ask for nothing of it. Null always does.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    # vLLM's
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "use_beam_search": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "vllm_xargs": ({},),
}
#: Likewise, of chats and of completions alone.
_UNSUPPORTED_IN_CHAT: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
}
_UNSUPPORTED_IN_COMPLETION: Mapping[str, tuple[object, ...]] = {"add_special_tokens": (True,)}
#: Of /tokenize, where `add_special_tokens` is taken.
_UNSUPPORTED_IN_TOKENIZE: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}

#: Names under which other servers take LoRA adapters.
_ADAPTERS = ("lora_request", "lora_path", "adapter_id")


def _prompt_list(prompt: object) -> object:
    """Reads the prompts of a request: a text, token ids, or a list of either."""
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(prompts) > MOST_CHOICES:
        raise PydanticCustomError("prompts", "more than {most} prompts; send several requests", {"most": MOST_CHOICES})
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and all(type(token) is int for token in each)):
            raise PydanticCustomError("prompt", "must be a text or a list of token ids")
    return prompts


def _by_token(biases: object) -> object:
    """Reads the tokens of `logit_bias`, which are names of fields in JSON."""
    if isinstance(biases, dict):
        return {int(name) if re.fullmatch("[0-9]{1,9}", name) else name: bias for name, bias in biases.items()}
    return biases


def _count(most: object) -> object:
    """Reads a completion's `logprobs`: a number, of which false is none."""
    return None if most is False else most


#: What other servers take, too: a seed of 64 bits with its sign, and -1 for no limit.
_SignedSeed = Annotated[int, Field(ge=-(2**63), lt=2**64), AfterValidator(lambda seed: seed % 2**64)]
_AnyTopK = Annotated[TopK, BeforeValidator(lambda count: 0 if count == -1 else count)]
#: OpenAI's bounds are 0 and 1.
_AnyTopP = Annotated[FiniteFloat, Field(ge=0, le=1)]


def _stop_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


#: OpenAI's words; which of them a model knows is its chat template's matter.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # ignored
    continuous_usage_stats: bool = False  # vLLM's: in each chunk, too

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        return asked_of(values, {}, frozenset(), "stream_options.")


class GenerationRequest(BaseModel):
    """Fields of every request for a reply. `top_k`, `ignore_eos`, `draft` and `priority` are not OpenAI's.

    Attributes:
        temperature: None is OpenAI's 1, or 0 on an engine that is greedy only.
        top_p: 0 leaves the likeliest token alone.
        seed: None is a random one.
        draft: False decodes plainly.
        priority: 1 is the most urgent; 0 is the default, which lies in between.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str
    stream: bool = False
    temperature: Temperature | None = None
    top_p: _AnyTopP = 1.0
    top_k: _AnyTopK = 0
    seed: _SignedSeed | None = None
    stop: Annotated[list[StopText], FailFast(), BeforeValidator(_stop_list)] = []
    ignore_eos: bool = False
    draft: bool = True
    priority: Annotated[NonNegativeInt, Field(lt=2**31)] = 0

    @model_validator(mode="before")
    @classmethod
    def _no_adapter(cls, values: object) -> object:
        named = next((name for name in _ADAPTERS if isinstance(values, dict) and values.get(name) is not None), None)
        if named is not None:
            raise ApiError(400, f"{named}: LoRA adapters are not supported", named, "unsupported_value")
        return values


class CommonRequest(GenerationRequest):
    """Fields that both kinds of completion have. From `repetition_penalty` on they are vLLM's, but `response_format`.

    Attributes:
        n: choices for each prompt, with seeds that follow one another.
        prompt_logprobs: log-probabilities of the prompt's tokens, and of so many likely ones in the place of each.
    """

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = UNSUPPORTED

    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Annotated[LogitBias, BeforeValidator(_by_token)] = Field(default_factory=dict)
    min_p: MinP = 0.0
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    bad_words: Annotated[list[BadWord], FailFast()] = Field(default_factory=list)
    prompt_logprobs: Logprobs | None = None
    response_format: ResponseFormat = ResponseFormat()
    structured_outputs: StructuredOutputs = StructuredOutputs()

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        asked = asked_of(values, cls.unsupported, IGNORED, "")
        if isinstance(asked, dict) and "stream_options" in asked and asked.get("stream") is not True:
            raise ApiError(400, "stream_options: only with stream: true", "stream_options")
        return asked

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs: only without stream", "prompt_logprobs")
        if self.prompt_logprobs is not None and self.n > 1:  # each would bring them all
            raise ApiError(400, "prompt_logprobs: only with n: 1", "prompt_logprobs")
        if self.response_format.structured and self.structured_outputs.structured:
            raise ApiError(400, "structured_outputs: differs from response_format; give one", "structured_outputs")
        return self

    @property
    def structured(self) -> Structured | None:
        """The form that the reply is held to."""
        return self.response_format.structured or self.structured_outputs.structured

    @property
    def form_field(self) -> str:
        """The field that the form comes from."""
        return "structured_outputs" if self.structured_outputs.structured else "response_format"

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def tells_usage(self) -> bool:
        """Whether each chunk of the stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(CommonRequest):
    """The body of /v1/completions. Each prompt has choices of its own.

    Attributes:
        max_tokens: 0, with `echo`, returns the prompt alone.
        best_of: replies to each prompt, of which the `n` likeliest are choices; None: `n`.
        echo: the reply repeats the prompt, with its log-probabilities where they are asked for.
    """

    unsupported = {**UNSUPPORTED, **_UNSUPPORTED_IN_COMPLETION}

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt_list)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    echo: bool = False
    logprobs: Annotated[Logprobs | None, BeforeValidator(_count)] = None

    @property
    def replies(self) -> int:
        """The number of replies that are made to each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def count_field(self) -> str:
        """The field that says how many replies are made."""
        return "prompt" if self.replies == 1 else "n" if self.replies == self.n else "best_of"

    @model_validator(mode="after")
    def _few_choices(self) -> Self:
        if self.replies < self.n or (self.stream and self.replies > self.n):
            raise ApiError(400, f"best_of: at least n ({self.n}), and not streamed", "best_of")
        if self.replies * len(self.prompt) > MOST_CHOICES:
            field = self.count_field
            message = f"{field}: {self.replies} of {len(self.prompt)} prompts are more than {MOST_CHOICES} choices"
            raise ApiError(400, message, field)
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: 0 only with echo: true, which returns the prompt", "max_tokens")
        if self.max_tokens == 0 and self.min_tokens:
            raise ApiError(400, f"min_tokens: {self.min_tokens} is more than max_tokens 0", "min_tokens")
        if self.echo and self.stream:
            raise ApiError(400, "echo: only without stream", "echo")
        if self.replies > 1 and (self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)):
            field = "echo" if self.prompt_logprobs is None else "prompt_logprobs"
            asked = "with logprobs only" if field == "echo" else "only"
            raise ApiError(400, f"{field}: {asked} with {self.count_field}: 1", field)
        return self


class ChatRequest(CommonRequest):
    """The body of /v1/chat/completions. `chat_template_kwargs` is not OpenAI's: variables for the chat template.

    Attributes:
        parallel_tool_calls: False lets a reply make one call at most.
        reasoning_effort: a variable of the chat template; where that can only think or not, "none" is not. A template
            that has no variable and always thinks takes none.
    """

    unsupported = {**UNSUPPORTED, **_UNSUPPORTED_IN_CHAT}

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]  # 4 MB can hold a million faulty ones
    max_completion_tokens: MaxTokens | None = None
    chat_template_kwargs: JsonFields = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: Logprobs = 0
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs: true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            message = "max_tokens: differs from max_completion_tokens, its newer name; give one of them"
            raise ApiError(400, message, "max_tokens")
        return self


class TokenizeRequest(BaseModel):
    """The body of /tokenize: a prompt, or the conversation that a chat would make one of.

    Attributes:
        add_special_tokens: to a prompt.
        return_token_strs: with the tokens' names in the vocabulary.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    messages: Annotated[list[Message], FailFast()] = []
    tools: Tools = []
    chat_template_kwargs: JsonFields = {}

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        return asked_of(values, _UNSUPPORTED_IN_TOKENIZE, frozenset(), "")

    @model_validator(mode="after")
    def _one_of_them(self) -> "TokenizeRequest":
        if (self.prompt is None) == (not self.messages):
            raise ApiError(400, "prompt: give either a prompt or messages", "prompt")
        return self


class DetokenizeRequest(BaseModel):
    """The body of /detokenize."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    tokens: Annotated[list[NonNegativeInt], FailFast()]


def parse(kind: type[_R], body: bytes) -> _R:
    """Parses a body into a request.

    Raises:
        ApiError: it is not one; names the field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MOST_FIELDS:
            raise ApiError(400, f"the body: {error.error_count()} of its fields are wrong") from None
        problem, place = _first_problem(error, body)
        param = ".".join(map(str, place)) or None
        reason = _REASONS.get(problem["type"]) or " ".join(problem["msg"].split())
        raise ApiError(400, f"{param}: {reason}" if param else f"the body: {reason}", param) from None


def _first_problem(error: ValidationError, body: bytes) -> tuple[ErrorDetails, list[str | int]]:
    """Finds the first problem, and its place in the body.

    Of a value that may be one of several forms each form has problems: that of the deepest is what was meant.
    """
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    try:
        document = json.loads(body) if first["loc"] else None
    except ValueError:  # numbers of more digits than Python reads
        return first, list(first["loc"])
    place = _place(first, document)
    if len(place) == len(first["loc"]):
        return first, place
    placed = [(problem, _place(problem, document)) for problem in problems]
    return max((one for one in placed if one[1][:1] == place[:1]), key=lambda one: len(one[1]))


def _place(problem: ErrorDetails, value: Any) -> list[str | int]:
    """Names the fields on the way to a problem: between them stand names of the forms that a field may have."""
    steps = problem["loc"]
    place: list[str | int] = []
    for number, step in enumerate(steps):
        is_there = step in value if isinstance(value, dict) else isinstance(value, list) and isinstance(step, int)
        if is_there:
            value = value[step]
            place.append(step)
        elif problem["type"] == "missing" and number == len(steps) - 1:
            place.append(step)
    return place
