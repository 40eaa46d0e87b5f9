"""Calls with a tag for each argument, as Qwen3-Coder and MiniMax-M2 write them, each with tags of its own.

Values are written as they are: which of them are texts, and which are JSON, the function's schema says.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_dflash.text.reply.json_call import begun_object, refuse_constant
from trtllm_dflash.text.reply.parts import LONGEST_MEMBER, MOST_BLANKS, MarkupParser
from trtllm_dflash.text.reply.schema_parts import listed, referred
from trtllm_dflash.text.stream import held


@dataclass(frozen=True)
class Tags:
    """The tags of such a format.

    Attributes:
        opening, closing: around a call, or around several.
        function, parameter: before a function's and a parameter's name; name_end: behind either.
        edge: before and behind a value, and none of it.
    """

    opening: str
    closing: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    name_end: str
    edge: str


_TYPES: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_AS_JSON = "text as JSON"  # of a schema with a reference: calls that are held to it write even texts so
_PYTHONS = {"True": "true", "False": "false", "None": "null"}  # how templates have written JSON's words


class XmlCallParser(MarkupParser):
    """Sets such calls apart, and makes JSON of their arguments.

    Args:
        schemas: of each function's parameters, by its name.
        held: behind an opening tag calls are held to be written as templates write them, with all of their tags.
        bare_held: so are those that leave that tag out.
    """

    def __init__(
        self, tags: Tags, schemas: Mapping[str, Mapping[str, Any]], held: bool = False, bare_held: bool = False
    ) -> None:
        super().__init__()
        self._tags = tags
        self._end_of_call = f"{tags.edge}{tags.function_end}\n{tags.closing}"  # behind the last value's own tag
        self._behind_values = (tags.parameter, tags.function_end, tags.closing, tags.function)
        self._schemas = schemas
        self._held = held
        self._bare_held = bare_held
        self._is_held = False  # what is being read, up to the closing tag
        self._function = ""
        self._beginnings: tuple[str, ...] = ()  # of what follows a value whose own tag is left out
        self._types: frozenset[str] = frozenset()  # of the value that is being read
        self._value: list[str] = []  # of that, where it is no text
        self._separator = ""  # before the next argument

    def _end(self) -> None:
        if self._state in (self._content, self._opened, self._named):
            self._show_rest()
        elif self._state == self._in_value:
            self._end_of_value()
        self._buffer = ""

    # -- states ------------------------------------------------------------------------------------------------------

    def _content(self) -> bool:
        found = self._find(self._tags.opening, self._tags.function)  # the model leaves the first out at times
        if found is None:
            return False
        at, tag = found
        self._open(at)
        if tag == self._tags.opening:
            self._read(len(self._tags.opening))
        self._is_held = self._held if tag == self._tags.opening else self._is_held or self._bare_held
        self._state = self._opened
        return True

    def _opened(self) -> bool:
        text = self._buffer.lstrip()
        if len(self._buffer) - len(text) > MOST_BLANKS:
            return self._refuse()
        if text.startswith(self._tags.function):
            self._read(len(self._buffer) - len(text) + len(self._tags.function))
            self._state = self._named
            return True
        return False if self._tags.function.startswith(text) else self._refuse()

    def _named(self) -> bool:
        name, end, rest = self._buffer.partition(self._tags.name_end)
        if len(name) > LONGEST_MEMBER or "\n" in name or (end and name not in self._schemas):
            return self._refuse()
        if not end:
            return False
        self._function, self._buffer, self._markup = name, rest, ""
        self._beginnings = () if self._is_held else self._beginnings_behind(name)
        self._emit("call", name)
        self._separator = "{"
        self._state = self._between
        return True

    def _between(self) -> bool:
        text = self._buffer = self._buffer.lstrip()
        tags = {self._tags.parameter: self._key, self._tags.function_end: self._ended, self._tags.closing: self._ended}
        for tag, state in tags.items():
            if text.startswith(tag):
                self._buffer = text if tag == self._tags.closing else text.removeprefix(tag)
                if state == self._ended:
                    self._emit("arguments", "}" if self._separator == ", " else "{}")
                self._state = state
                return True
        if any(tag.startswith(text) for tag in tags):
            return False
        at = text.find("<", 1)  # which all tags begin with; up to there stands nothing that could be an argument
        self._buffer = text[at:] if at > 0 else ""
        return True

    def _key(self) -> bool:
        key, end, rest = self._buffer.partition(self._tags.name_end)
        begun = 0 if end else held(key, self._tags.name_end)
        if len(key) - begun > LONGEST_MEMBER:
            self._state = self._between  # no argument: it is left out
            return True
        if not end:
            return False
        self._buffer = rest
        schema = self._schemas[self._function]
        properties, more = schema.get("properties", {}), schema.get("additionalProperties")
        self._types = types_of(properties.get(key, more), schema) if isinstance(properties, Mapping) else frozenset()
        self._value = []
        # No call gives one twice: this value, or one behind it, has text that looks like it.
        self._beginnings = tuple(each for each in self._beginnings if each != self._beginning_of(key))
        self._emit("arguments", f"{self._separator}{_json(key)}: ")
        self._separator = ", "
        self._state = self._value_begun
        return True

    def _value_begun(self) -> bool:
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix(self._tags.edge)
        if self._is_text:
            self._emit("arguments", '"')
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        ending = self._tags.parameter_end
        at = self._buffer.find(ending)
        beginnings = self._beginnings if f"{self._tags.edge}<" in self._buffer else ()  # as each begins
        follows = min((found for each in beginnings if (found := self._buffer.find(each)) >= 0), default=-1)
        if follows >= 0 and not 0 <= at < follows:
            self._close_value(self._buffer[:follows])
            self._buffer = self._buffer[follows:]
            self._state = self._between
            return True
        if at < 0:
            end = self._end_of_known()
            self._add_to_value(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        value, behind = self._buffer[:at], self._buffer[at + len(ending) :]
        ends = self._ends_value(value, behind)
        if ends is None:
            return False
        if ends:
            self._close_value(value.removesuffix(self._tags.edge))
            self._state = self._between
        else:
            self._add_to_value(value + ending)
        self._buffer = behind
        return True

    def _beginnings_behind(self, function: str) -> tuple[str, ...]:
        """Lists what stands behind a value of that function where each tag has a line: a parameter or another call."""
        tags, properties = self._tags, self._schemas[function].get("properties")
        if not tags.edge:
            return ()
        names = properties if isinstance(properties, Mapping) else ()
        calls = f"{self._end_of_call}\n{tags.opening}", f"{tags.edge}{tags.function_end}\n{tags.function}"
        return (*calls, *map(self._beginning_of, names))

    def _beginning_of(self, parameter: str) -> str:
        tags = self._tags
        return f"{tags.edge}{tags.parameter}{parameter}{tags.name_end}{tags.edge}"

    def _ends_value(self, value: str, behind: str) -> bool | None:
        """Whether a tag between these two ends the value, as texts may have one in them; None: more must tell."""
        if value.endswith(self._tags.edge) and behind.startswith("\n"):
            return True
        if self._is_held:
            return False if behind else None
        text = behind.lstrip()
        if len(behind) - len(text) > MOST_BLANKS:
            return False
        if text.startswith(self._behind_values):
            return True
        return None if any(tag.startswith(text) for tag in self._behind_values) else False

    def _close_value(self, last: str) -> None:
        self._add_to_value(last)
        self._emit("arguments", '"' if self._is_text else value_of("".join(self._value), self._types))

    def _end_of_value(self) -> None:
        """Hands on a value that is cut off, as far as it went; or whole, where the model has left out its tag alone."""
        at = self._buffer.find(self._tags.parameter_end)
        if at >= 0:  # and nothing stands behind it
            self._close_value(self._buffer[:at].removesuffix(self._tags.edge))
            return
        end = self._end_of_known()
        if self._buffer[end:].rstrip() == self._end_of_call:
            self._close_value(self._buffer[:end])
            self._emit("arguments", "}")
            return
        if self._is_text:
            self._add_to_value(self._buffer)
            return
        cut = "".join([*self._value, self._buffer[:end]])
        self._emit("arguments", value_of(cut, self._types) if cut.strip() else "")

    def _end_of_known(self) -> int:
        """Finds what may be the beginning of what ends a value, or such an end, if nothing comes behind it."""
        text, end = self._buffer.rstrip(), self._tags.parameter_end
        if text.endswith(self._end_of_call):
            return len(text) - len(self._end_of_call)
        beginnings = self._beginnings if self._tags.edge in self._buffer else ()
        ends = end, self._tags.edge + end, self._end_of_call, *beginnings
        return len(self._buffer) - max(held(self._buffer, each) for each in ends)

    def _ended(self) -> bool:
        is_closed = self._buffer.lstrip().startswith(self._tags.closing)
        if not self._reads_closing(self._tags.closing):
            return False
        self._is_held = self._is_held and not is_closed  # where it is not, another call may follow
        self._after_markup = True
        self._state = self._content
        return True

    # ----------------------------------------------------------------------------------------------------------------

    def _refuse(self) -> bool:
        self._is_held = False
        return super()._refuse()

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _add_to_value(self, text: str) -> None:
        if self._is_text:
            self._emit("arguments", _json(text)[1:-1])
        else:
            self._value.append(text)


def types_of(schema: object, root: object = None) -> frozenset[str]:
    """Returns the types that a JSON schema allows, `string` among them where it names none; none: any.

    Args:
        root: the schema that references lead into; None: what they lead to may be any.
    """
    if not isinstance(schema, Mapping):
        return frozenset({"string"})
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    if "$ref" in schema:
        found = referred(schema["$ref"], root)
        return _as_json(types_of(found)) if isinstance(found, Mapping) else frozenset()
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = [types_of(one, root) for one in schema[key]]
            types: frozenset[str] = frozenset().union(*each) if all(each) else frozenset()
            return types if all(map(types_of, schema[key])) else _as_json(types)
    values = listed(schema)
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return frozenset({"string"})
    return frozenset()


def _as_json(types: frozenset[str]) -> frozenset[str]:
    return frozenset(_AS_JSON if name == "string" else name for name in types)


def value_of(text: str, types: frozenset[str]) -> str:
    """Makes JSON of a value that was written as it is: the JSON that it is, where one of these types allows that."""
    written = _PYTHONS.get(text.strip(), text.strip())
    try:
        value = json.loads(written, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return _json(text)
    if isinstance(value, str):
        fits = "string" not in types
    elif isinstance(value, bool):
        fits = not types or "boolean" in types
    else:
        fits = not types or any(isinstance(value, _TYPES.get(name, ())) for name in types)
    return written if fits else _json(text)


def with_objects(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Makes objects of calls' arguments that are text, a call that was cut off say: the templates take them apart."""

    def taken_apart(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            return call
        found = begun_object(arguments) if isinstance(arguments, str) else {}
        return {**call, "function": {**function, "arguments": found}}

    return [
        {**message, "tool_calls": [taken_apart(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
