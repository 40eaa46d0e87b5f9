"""Requests to the OpenAI API: what is taken, and what is refused by its name."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    NonNegativeInt,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from trtllm_dflash.runtime.request import MaxTokens, Seed, StopText, Temperature, TopK, TopP
from trtllm_dflash.serving.openai.errors import ApiError

_R = TypeVar("_R", bound="CommonRequest")

MOST_PROMPTS = 128  # of one request; each is a request to the engine

#: Accepted and not acted upon: none of them changes what a reply says.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
    }
)

#: What would change a reply and is not done here, with the values that ask for nothing of it. Null always does.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "reasoning_effort": (),
    "web_search_options": (),
    "moderation": (),
}
#: Likewise, in a message.
UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}
_IGNORED_IN_MESSAGE = frozenset({"refusal", "annotations"})
_MOST_FIELDS = 100  # of a request or a message; and errors that are worth reading


def _text_of(content: object) -> object:
    """Reads the text of a message's content: a string, or a list of text parts, which become lines."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError("content_part", "only parts of type text, with a text, are supported")
        texts.append(part["text"])
    return "\n".join(texts)


def _prompt_list(prompt: object) -> object:
    """Reads the prompts of a request: a text, token ids, or a list of either."""
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(prompts) > MOST_PROMPTS:
        raise PydanticCustomError("prompts", "more than {most} prompts; send several requests", {"most": MOST_PROMPTS})
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and all(type(token) is int for token in each)):
            raise PydanticCustomError("prompt", "must be a text or a list of token ids")
    return prompts


def _stop_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _asked(values: object, unsupported: Mapping[str, tuple[object, ...]], ignored: frozenset[str], prefix: str) -> Any:
    """Drops a request's fields that have no effect; refuses those that ask for something unsupported."""
    if not isinstance(values, dict):
        return values
    if len(values) > _MOST_FIELDS:
        raise ApiError(400, f"{prefix or 'the body: '}{len(values)} fields; there are not as many", None)
    asked = {name: value for name, value in values.items() if value is not None and name not in ignored}
    for name in unsupported.keys() & asked.keys():
        value = asked.pop(name)
        # 1 == True in Python, and not here.
        if not any(
            value == nothing and isinstance(value, bool) == isinstance(nothing, bool) for nothing in unsupported[name]
        ):
            hint = (
                "; give it in chat_template_kwargs if the chat template knows it" if name == "reasoning_effort" else ""
            )
            raise ApiError(
                400, f"{prefix}{name}: this value is not supported{hint}", prefix + name, "unsupported_value"
            )
    return asked


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        return _asked(values, UNSUPPORTED_IN_MESSAGE, _IGNORED_IN_MESSAGE, "messages.")

    def for_template(self) -> dict[str, str]:
        """Converts the message for chat templates; most of them know no developer, OpenAI's newer name for system."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content} | ({"name": self.name} if self.name is not None else {})


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # ignored


class CommonRequest(BaseModel):
    """Fields that both kinds of completion have. `top_k`, `ignore_eos`, `draft` and `priority` are not OpenAI's.

    Attributes:
        temperature: None is OpenAI's 1, or 0 on an engine that is greedy only.
        seed: None is a random one.
        draft: False decodes plainly.
        priority: 1 is the most urgent; 0 is the default, which lies in between.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP = 1.0
    top_k: TopK = 0
    seed: Seed | None = None
    stop: Annotated[list[StopText], FailFast(), BeforeValidator(_stop_list)] = []
    ignore_eos: bool = False
    draft: bool = True
    priority: Annotated[NonNegativeInt, Field(lt=2**31)] = 0

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        asked = _asked(values, UNSUPPORTED, IGNORED, "")
        if isinstance(asked, dict) and "stream_options" in asked and asked.get("stream") is not True:
            raise ApiError(400, "stream_options: only with stream: true", "stream_options")
        return asked

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(CommonRequest):
    """The body of /v1/completions. Each prompt has a choice of its own."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt_list)]

    @model_validator(mode="after")
    def _one_stream(self) -> "CompletionRequest":
        if self.stream and len(self.prompt) > 1:
            raise ApiError(400, "prompt: one prompt a stream is supported; send several requests", "prompt")
        return self


class ChatRequest(CommonRequest):
    """The body of /v1/chat/completions. `chat_template_kwargs` is not OpenAI's: variables for the chat template."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]  # 4 MB can hold a million faulty ones
    max_completion_tokens: MaxTokens | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            message = "max_tokens: differs from max_completion_tokens, its newer name; give one of them"
            raise ApiError(400, message, "max_tokens")
        return self


def parse(kind: type[_R], body: bytes) -> _R:
    """Parses a body into a request.

    Raises:
        ApiError: it is not one; names the field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > _MOST_FIELDS:
            raise ApiError(400, f"the body: {error.error_count()} of its fields are wrong") from None
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(step) for step in problem["loc"]) or None
        reason = "unknown field" if problem["type"] == "extra_forbidden" else " ".join(problem["msg"].split())
        raise ApiError(400, f"{param}: {reason}" if param else f"the body: {reason}", param) from None
