"""Tools of /v1/responses: functions, alone or in namespaces, and which of them a reply may call.

A model knows a function of a namespace by both names in one. Replies have them apart, as agents look functions up.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator

from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.messages import (
    LONGEST_NAME,
    MOST_TOOLS,
    Function,
    FunctionName,
    ToolKind,
    ToolWord,
    asked_of,
    kind_of_choice,
)

#: Tools that agents offer unasked, and that a model may well leave uncalled: they are left out. All others are refused.
LEFT_OUT = frozenset(
    {
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
        *("image_generation", "tool_search"),
    }
)
#: Of a function, what a reply is the same without: where its schema is for the client, or it need not be offered yet.
_IGNORED = frozenset({"output_schema", "defer_loading"})
_UNSUPPORTED: dict[str, tuple[object, ...]] = {"async": (False,), "allowed_callers": (["direct"],)}
_BETWEEN = "__"  # a namespace and a function, where the namespace does not end so


class _Kind(BaseModel):
    type: ToolKind

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        is_function = isinstance(values, dict) and values.get("type") == "function"
        return asked_of(values, _UNSUPPORTED, _IGNORED, "tools.") if is_function else values


class ResponseTool(Function, _Kind):  # the kind is looked at first: of other tools, nothing else is worth telling
    """A function that the model may call."""


class Namespace(BaseModel):
    """Functions that have a name in common: those of one MCP server, say."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["namespace"]
    name: FunctionName
    description: str = ""
    tools: Annotated[list[ResponseTool], FailFast(), Field(max_length=MOST_TOOLS)]


class UnusedTool(BaseModel):
    """A tool that is left out; see `LEFT_OUT`."""

    model_config = ConfigDict(frozen=True, strict=True)

    type: str


def _kind_of_tool(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if isinstance(kind, str) and kind in LEFT_OUT:
        return "unused"
    return "namespace" if kind == "namespace" else "function"


_Tool = Annotated[
    Annotated[ResponseTool, Tag("function")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[UnusedTool, Tag("unused")],
    Discriminator(_kind_of_tool),
]
ResponseTools = Annotated[list[_Tool], FailFast(), Field(max_length=MOST_TOOLS)]


class NamedResponseTool(BaseModel):
    """The function that a reply must call."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: ToolKind
    name: FunctionName
    namespace: FunctionName | None = None

    @property
    def called(self) -> str:
        """The name that the model knows it by."""
        return flat_name(self.namespace, self.name)


class AllowedResponseTool(NamedResponseTool):
    """A function of those that a reply may call."""

    model_config = ConfigDict(extra="ignore")  # clients may give the rest of its definition


class AllowedResponseTools(BaseModel):
    """The functions that a reply may call (`auto`), or of which it must call one (`required`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedResponseTool], FailFast(), Field(min_length=1, max_length=MOST_TOOLS)]


ResponseToolChoice = Annotated[
    Annotated[ToolWord, Tag("word")]
    | Annotated[NamedResponseTool, Tag("named")]
    | Annotated[AllowedResponseTools, Tag("allowed")],
    Discriminator(kind_of_choice),
]


def flat_name(namespace: str | None, name: str) -> str:
    """Writes a function's names as the one that a model knows it by."""
    if namespace is None:
        return name
    return f"{namespace}{'' if namespace.endswith(_BETWEEN) else _BETWEEN}{name}"


def members_of(tools: Sequence[BaseModel]) -> Iterator[tuple[str | None, ResponseTool]]:
    """Yields all functions, each with the namespace that it is of."""
    for tool in tools:
        if isinstance(tool, ResponseTool):
            yield None, tool
        elif isinstance(tool, Namespace):
            yield from ((tool.name, function) for function in tool.tools)


def functions_of(tools: Sequence[BaseModel]) -> list[Function]:
    """Lists all functions, by the names that a model knows them by.

    Raises:
        ApiError: they are too many, or a namespace makes a name too long or one that another has.
    """
    functions: list[Function] = []
    taken = {function.name for namespace, function in members_of(tools) if namespace is None}
    for namespace, function in members_of(tools):
        name = flat_name(namespace, function.name)
        if namespace is not None:
            reason = f"has more than {LONGEST_NAME} characters" if len(name) > LONGEST_NAME else "is another's, too"
            if name in taken or len(name) > LONGEST_NAME:
                message = f"tools: the name of {function.name!r} of {namespace!r}, {name!r}, {reason}"
                raise ApiError(400, message, "tools")
            taken.add(name)
        functions.append(function.model_copy(update={"name": name}))
    if len(functions) > MOST_TOOLS:
        raise ApiError(400, f"tools: {len(functions)} functions; at most {MOST_TOOLS} are taken", "tools")
    return functions
