"""The functions that a reply may call, as `tools` and `tool_choice` of a request have them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.messages import AllowedChoice, AllowedTools, Function, NamedTool
from trtllm_dflash.serving.openai.response_tools import AllowedResponseTools, NamedResponseTool

#: A `tool_choice`, of a chat or of /v1/responses.
Chosen = str | NamedTool | NamedResponseTool | AllowedChoice | AllowedResponseTools | None


@dataclass(frozen=True)
class Offer:
    """The functions that a reply may call.

    Attributes:
        functions: that its prompt tells of.
        callees: those of them that it may call.
        must: it calls one at least, and says nothing else.
        parallel: it may call several.
        held: its form is held to that of calls.
    """

    functions: tuple[Function, ...]
    callees: tuple[Function, ...]
    must: bool
    parallel: bool
    held: bool

    @classmethod
    def of(cls, functions: Sequence[Function], choice: Chosen, parallel: bool | None = None) -> "Offer":
        """Makes the offer of a request.

        Args:
            parallel: False lets a reply make one call at most.

        Raises:
            ApiError: a function is chosen that there is not, or two have one name.
        """
        names = [function.name for function in functions]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ApiError(400, f"tools: two functions have the name {twice!r}", "tools")
        if choice == "none":
            return cls((), (), False, parallel is not False, False)
        if choice is None or isinstance(choice, str):
            if choice == "required" and not functions:
                raise _no_tool()
            return cls._made(functions, functions, choice == "required", parallel)
        if isinstance(choice, NamedTool | NamedResponseTool):
            named = [function for function in functions if function.name == choice.called]
            if not named:
                raise _no_tool(choice.called)
            return cls._made(named, named, True, False)
        allowed: AllowedTools | AllowedResponseTools
        allowed = choice.allowed_tools if isinstance(choice, AllowedChoice) else choice
        called = {tool.called for tool in allowed.tools}
        missing = called - set(names)
        if missing:
            raise _no_tool(min(missing))
        callees = [function for function in functions if function.name in called]
        return cls._made(functions, callees, allowed.mode == "required", parallel)

    @classmethod
    def _made(
        cls, functions: Sequence[Function], callees: Sequence[Function], must: bool, parallel: bool | None
    ) -> "Offer":
        # What the prompt tells of and may not be called, the form alone keeps out.
        held = must or len(callees) < len(functions) or any(function.strict for function in callees)
        return cls(tuple(functions), tuple(callees), must, parallel is not False, held)

    @property
    def schemas(self) -> dict[str, dict[str, Any]] | None:
        """The schemas of arguments, by function; None: there are no functions."""
        return {function.name: function.schema_of_arguments for function in self.functions} or None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those that may be called."""
        return tuple(function.name for function in self.callees)

    @property
    def most_calls(self) -> int | None:
        """The most calls that a reply may have; None: any number."""
        return None if self.parallel else 1


def _no_tool(name: str | None = None) -> ApiError:
    which = "no such tool to choose" if name is None else f"no tool {name!r} to choose"
    return ApiError(400, f"tool_choice: there is {which}", "tool_choice")
