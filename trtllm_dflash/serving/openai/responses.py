"""Requests to /v1/responses: a conversation of items, which becomes messages for the chat template.

Nothing is stored: each request has the whole conversation.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from trtllm_dflash.runtime.request import MaxTokens
from trtllm_dflash.runtime.structured import Structured
from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.formats import TextFormat
from trtllm_dflash.serving.openai.json_fields import JsonFields
from trtllm_dflash.serving.openai.messages import (
    IGNORED_IN_CALL,
    CalledFunction,
    CalledName,
    ToolCall,
    asked_of,
)
from trtllm_dflash.serving.openai.requests import Effort, GenerationRequest
from trtllm_dflash.serving.openai.response_tools import ResponseToolChoice, ResponseTools, flat_name

#: Accepted and not acted upon: none of them changes what a reply says.
IGNORED = frozenset(
    {
        "user",
        "client_metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "stream_options",
    }
)

#: What would change a reply and is not done here, with the values that ask for nothing of it. Null always does.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
#: What may be included: thinking is not encrypted here, but content of its item, and there are no searches.
_INCLUDED = {"reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results"}
_STATE = {
    "store": "responses are not stored here; leave it out, or false",
    "previous_response_id": "responses are not stored here; send the whole conversation as input",
}

_IGNORED_IN_ITEM = frozenset({"id", "status", "phase", "summary", "encrypted_content", "created_by"}) | IGNORED_IN_CALL


def _text_of(content: object) -> object:
    """Reads a text: a string, or a list of parts of text, which become lines."""
    if not isinstance(content, list):
        return content
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    texts = [
        part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        for part, kind in zip(content, kinds, strict=True)
    ]
    if any(not isinstance(text, str) for text in texts) or any(kind not in _TEXT_PARTS for kind in kinds):
        raise PydanticCustomError("content_part", "only parts of text are supported: {parts}", {"parts": _PARTS})
    return "\n".join(texts)  # type: ignore[arg-type]  # just looked at


_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "text", "refusal")
_PARTS = ", ".join(_TEXT_PARTS)
_Text = Annotated[str, BeforeValidator(_text_of)]


class _Item(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        return asked_of(values, {}, _IGNORED_IN_ITEM, "input.")


class InputMessage(_Item):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text


class InputReasoning(_Item):
    """An assistant's thinking, as replies here have it."""

    type: Literal["reasoning"]
    content: _Text = ""


class InputCall(_Item):
    """A call that an assistant made.

    Attributes:
        namespace: that the function is of, as replies here have it.
    """

    type: Literal["function_call"]
    call_id: str
    name: CalledName
    namespace: CalledName | None = None
    arguments: str


class InputResult(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Text


def _kind(item: object) -> object:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")],
    Discriminator(_kind),
]
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")


def _items_of(given: object) -> object:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    for at, item in enumerate(given if isinstance(given, list) else ()):
        kind = _kind(item)
        if not isinstance(kind, str) or kind in _ITEMS:
            continue
        message = f"only items of type {', '.join(_ITEMS)} are taken, not {kind[:64]!r}"
        if kind == "item_reference":
            message = "items are not stored here; send the item itself, as clients do with store: false"
        raise ApiError(400, f"input.{at}: {message}", f"input.{at}", "unsupported_value")
    return given


class Reasoning(BaseModel):
    """The effort to think with. Summaries of thinking are not made."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextConfig(BaseModel):
    """The form of the reply's text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: TextFormat = TextFormat()

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        return asked_of(values, {"verbosity": ("medium",)}, frozenset(), "text.")


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


class ResponsesRequest(GenerationRequest):
    """The body of /v1/responses."""

    input: Annotated[list[Item], FailFast(), Field(min_length=1), BeforeValidator(_items_of)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: ResponseTools = Field(default_factory=list)
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: TextConfig = TextConfig()
    metadata: JsonFields = Field(default_factory=dict)
    chat_template_kwargs: JsonFields = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        asked = asked_of(values, UNSUPPORTED, IGNORED, "")
        if isinstance(asked, dict) and "include" in asked:
            included = asked.pop("include")
            other = next((one for one in included if one not in _INCLUDED), None) if _is_texts(included) else included
            if other is not None:
                raise ApiError(400, f"include: {other!r} is not supported", "include", "unsupported_value")
        for name, reason in _STATE.items():
            if isinstance(asked, dict) and asked.pop(name, False) is not False:
                raise ApiError(400, f"{name}: {reason}", name, "unsupported_value")
        return asked

    @property
    def structured(self) -> Structured | None:
        """The form that the reply is held to."""
        return self.text.format.structured

    @property
    def form_field(self) -> str:
        """The field that the form comes from."""
        return "text.format"

    def messages(self) -> list[dict[str, Any]]:
        """Converts the conversation for chat templates."""
        conversation = _Conversation()
        if self.instructions:
            conversation.say("system", self.instructions)
        for item in self.input:
            conversation.add(item)
        return conversation.messages


class _Conversation:
    """Messages, made of items: what an assistant thought, said and called in a row is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str, **more: str) -> None:
        self.messages.append({"role": "system" if role == "developer" else role, "content": text, **more})

    def add(self, item: InputMessage | InputReasoning | InputCall | InputResult) -> None:
        if isinstance(item, InputResult):
            self.say("tool", item.output, tool_call_id=item.call_id)
        elif isinstance(item, InputReasoning):
            if item.content:
                self._open("reasoning_content", "content", "tool_calls")["reasoning_content"] = item.content
        elif isinstance(item, InputCall):
            function = CalledFunction(name=flat_name(item.namespace, item.name), arguments=item.arguments)
            call = ToolCall(id=item.call_id, function=function).for_template()
            self._open().setdefault("tool_calls", []).append(call)
        elif item.role == "assistant":
            self._open("content", "tool_calls")["content"] = item.content
        else:
            self.say(item.role, item.content)

    def _open(self, *without: str) -> dict[str, Any]:
        """Returns the assistant's message that goes on: the last one, if it has none of these fields yet."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant" or any(last.get(name) for name in without):
            self.say("assistant", "")
        return self.messages[-1]
