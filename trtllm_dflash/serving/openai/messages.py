"""Messages and tools of a conversation, as OpenAI's clients write them."""

import json
from collections.abc import Mapping
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.json_fields import JsonFields

MOST_FIELDS = 100  # of a request or a message; and errors that are worth reading
MOST_TOOLS = 128  # of a request, and calls of a message

#: What would change a reply and is not done here, with the values that ask for nothing of it. Null always does.
UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {"function_call": (), "audio": ()}
#: Where a client would have a prompt cached: all of it is, where it can be.
_CACHING = frozenset({"cache_control"})
#: parsed: the official client's own, in what it sends back.
_IGNORED_IN_MESSAGE = frozenset({"annotations", "parsed"}) | _CACHING
IGNORED_IN_CALL = frozenset({"parsed_arguments"}) | _CACHING

LONGEST_NAME = 128  # characters of a function's name
FunctionName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.-]{{1,{LONGEST_NAME}}}$")]
#: A name in the conversation's past: a model calls functions by names that nobody offered, and is told so.
CalledName = Annotated[str, Field(min_length=1, max_length=1024)]


def _text_of(content: object) -> object:
    """Reads the text of a message's content: a string, or a list of text parts, which become lines."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise PydanticCustomError("content_part", "only parts of type text, with a text, are supported")
        texts.append(part[kind])
    return "\n".join(texts)


def asked_of(
    values: object, unsupported: Mapping[str, tuple[object, ...]], ignored: frozenset[str], prefix: str
) -> Any:
    """Drops a request's fields that have no effect; refuses those that ask for something unsupported."""
    if not isinstance(values, dict):
        return values
    if len(values) > MOST_FIELDS:
        raise ApiError(400, f"{prefix or 'the body: '}{len(values)} fields; there are not as many", None)
    asked = {name: value for name, value in values.items() if value is not None and name not in ignored}
    for name in unsupported.keys() & asked.keys():
        value = asked.pop(name)
        # 1 == True in Python, and not here.
        if not any(
            value == nothing and isinstance(value, bool) == isinstance(nothing, bool) for nothing in unsupported[name]
        ):
            only = "".join(f", or at {json.dumps(nothing)}" for nothing in unsupported[name])
            message = f"{prefix}{name}: not supported; leave it out{only}"
            raise ApiError(400, message, prefix + name, "unsupported_value")
    return asked


class CalledFunction(BaseModel):
    """The function that a call names, and its arguments as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: CalledName
    arguments: str

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        return asked_of(values, {}, IGNORED_IN_CALL, "messages.tool_calls.function.")


class ToolCall(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a stream's pieces, which some clients put together so

    def for_template(self) -> dict[str, Any]:
        """Converts the call for chat templates, most of which want its arguments as an object."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": _object(self.function.arguments)},
        }


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text_of)] = None
    refusal: str | None = None  # an assistant's, in place of content
    name: str | None = None
    reasoning_content: str | None = None  # an assistant's, as replies here have it
    tool_calls: Annotated[list[ToolCall], FailFast(), Field(max_length=MOST_TOOLS)] = []
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        asked = asked_of(values, UNSUPPORTED_IN_MESSAGE, _IGNORED_IN_MESSAGE, "messages.")
        if isinstance(asked, dict) and "reasoning" in asked:  # vLLM's newer name
            asked.setdefault("reasoning_content", asked.pop("reasoning"))
        return asked

    @model_validator(mode="after")
    def _whole(self) -> "Message":
        own = self.tool_calls or self.reasoning_content is not None or self.refusal is not None
        if self.role != "assistant" and own:
            raise PydanticCustomError("role", "only an assistant's has tool_calls, reasoning_content or a refusal")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise PydanticCustomError("role", "a message of the role tool, and no other, has a tool_call_id")
        said = (self.content, self.reasoning_content, self.refusal)
        if self.role != "tool" and not self.tool_calls and all(text is None for text in said):
            raise PydanticCustomError("content", "content: missing; only an assistant that did something else has none")
        return self

    def for_template(self) -> dict[str, Any]:
        """Converts the message for chat templates; most of them know no developer, OpenAI's newer name for system."""
        given = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.for_template() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
        }
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": (self.refusal if self.content is None else self.content) or ""}
        return message | {name: value for name, value in given.items() if value is not None}


class _Offered(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _uncached(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in _CACHING}


class Function(_Offered):
    """A function that the model may call.

    Attributes:
        parameters: a JSON schema of its arguments; None: it has none.
        strict: its arguments are held to that.
    """

    name: FunctionName
    description: str | None = None
    parameters: JsonFields | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            message = "parameters: a function's arguments are an object, 'type': 'object'"
            raise PydanticCustomError("parameters", message)
        return self

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of its arguments, of none at all too."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return nothing if self.parameters is None else self.parameters

    def for_template(self) -> dict[str, Any]:
        """Converts the function for chat templates."""
        parameters = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}


def _is_function(kind: object) -> object:
    if isinstance(kind, str) and kind != "function":
        raise PydanticCustomError("tool", "only functions are taken, not {kind}", {"kind": repr(kind[:64])})
    return kind


#: Of a tool: of others, the kind is what is worth telling.
ToolKind = Annotated[Literal["function"], BeforeValidator(_is_function)]


class Tool(_Offered):
    """A tool of a chat: a function."""

    type: ToolKind
    function: Function


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: FunctionName


class NamedTool(BaseModel):
    """The function that a reply must call."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: ToolKind
    function: NamedFunction

    @property
    def called(self) -> str:
        """The function's name."""
        return self.function.name


class _AllowedFunction(NamedFunction):
    model_config = ConfigDict(extra="ignore")  # clients may give the rest of its definition


class AllowedTool(NamedTool):
    """A function of those that a reply may call."""

    model_config = ConfigDict(extra="ignore")

    function: _AllowedFunction


class AllowedTools(BaseModel):
    """The functions that a reply may call (`auto`), or of which it must call one (`required`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], FailFast(), Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedChoice(BaseModel):
    """A `tool_choice` of a chat that allows some of its tools."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = Annotated[list[Tool], FailFast(), Field(max_length=MOST_TOOLS)]
ToolWord = Literal["none", "auto", "required"]


def kind_of_choice(choice: object) -> str:
    """Tells the forms of a `tool_choice` apart."""
    if isinstance(choice, dict | BaseModel):
        kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
        return "allowed" if kind == "allowed_tools" else "named"
    return "word"


ToolChoice = Annotated[
    Annotated[ToolWord, Tag("word")] | Annotated[NamedTool, Tag("named")] | Annotated[AllowedChoice, Tag("allowed")],
    Discriminator(kind_of_choice),
]


def one_instruction(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins the system messages that a conversation begins with: many templates take one alone, and that first.

    Later ones stay where they are, for the template to take or to refuse: what they say may be of their place.
    """
    first = [message["content"] for message in takewhile(lambda one: one["role"] == "system", messages)]
    if len(first) < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(filter(None, first))}, *messages[len(first) :]]


def _object(text: str) -> dict[str, Any] | str:
    """Reads the arguments of a call.

    What is no JSON object, or no text in UTF-8 (half of a surrogate pair), stays as a model wrote it.
    """
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
