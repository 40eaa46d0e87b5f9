"""Grammars of Gemma 4's calls, whose arguments are no JSON: a JSON schema's rules, in that notation."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.reply.byte_matcher import byte_matcher
from trtllm_dflash.text.reply.gemma4 import CALL_END, QUOTE
from trtllm_dflash.text.reply.grammar_terms import REMARKS, Callee, Marks, json_value, text, unheld
from trtllm_dflash.text.reply.held_schema import TYPES
from trtllm_dflash.text.reply.parts import LONGEST_MEMBER
from trtllm_dflash.text.reply.schema_parts import SHARED, referred, standing_alone

_NAME = re.compile(r'[^\s:,{}\[\]<>"]+')  # of a member, which stands without marks
_CHOICES = ("anyOf", "oneOf")
_SCALARS = ("number", "integer", "boolean", "null")
#: Keywords by the type that they hold, besides those of every schema.
_HELD: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset(),
}
_OF_ALL = REMARKS | {"type", "enum", "const", "$ref", *_CHOICES, *SHARED}
_DEEPEST = 64  # schemas inside one another, or referred to from one another
_MOST_PROPERTIES = 500  # of one object; with more, a grammar is too long anyway


def gemma4_call(marks: Marks, rule: str, function: Callee) -> list[str]:
    """Writes the rules of a call, behind the marker that opens it.

    Raises:
        RequestError: the arguments cannot be held to the function's schema, or a name cannot be written.
    """
    arguments = _Arguments(marks, rule, function)
    head = text(f"call:{function.name}")
    body = arguments.value({**function.schema, "type": "object"}, "#")
    return [f"{rule}: {head} {body} {marks.one(CALL_END)}", *arguments.rules]


class _Arguments:
    """Rules of one function's arguments.

    Attributes:
        rules: those that the expressions refer to.
    """

    def __init__(self, marks: Marks, rule: str, function: Callee) -> None:
        self._marks = marks
        self._rule = rule
        self._function = function
        self._references: dict[str, str] = {}
        self._any = ""
        self._depth = 0  # of the schema or value that is being written
        self.rules: list[str] = []

    def value(self, schema: Any, place: str) -> str:
        """Writes an expression: a value that keeps to a schema, which stands at that place in the function's."""
        with self._inside():
            return self._value(schema, place)

    def _value(self, schema: Any, place: str) -> str:
        if schema is True or schema == {}:
            return self._any_value()
        if not isinstance(schema, Mapping):
            raise self._wrong(f"{place} is no JSON schema's")
        if "$ref" in schema:
            return self._reference(schema["$ref"], place)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else self._list(schema["enum"], f"{place}/enum")
            return "(" + " | ".join(self._exactly(value) for value in values) + ")"
        for key in _CHOICES:
            if key in schema:
                self._check(schema, frozenset(), place)
                inner = self._list(schema[key], f"{place}/{key}")
                each = [self.value(one, f"{place}/{key}/{at}") for at, one in enumerate(inner)]
                if key == "oneOf" and self._function.strict and not self._are_apart(inner):
                    raise unheld(self._function, f"{place}/{key}")
                return "(" + " | ".join(each) + ")"
        named = schema.get("type")
        if named is None:
            named = next((kind for kind, keys in _HELD.items() if keys & schema.keys()), None)
        if named is None:
            self._check(schema, frozenset(), place)
            return self._any_value()
        named = named if isinstance(named, list) else [named]
        wrong = [kind for kind in named if kind not in TYPES]
        if wrong or not named:
            said = f": {wrong[0][:40]!r}" if wrong and isinstance(wrong[0], str) else ""
            raise self._wrong(f"{place}/type is no JSON schema's{said}")
        kinds = [kind for kind in TYPES if kind in named]  # each once
        return self._one_of([self._of_type(kind, schema, place) for kind in kinds])

    def _are_apart(self, schemas: Sequence[Any]) -> bool:
        """Whether no value keeps to two of these schemas, as far as llguidance tells: any of them is one of them."""
        root = {"type": "object", **self._function.schema}
        found = [referred(one["$ref"], root) if isinstance(one, Mapping) and "$ref" in one else one for one in schemas]
        choice = {"oneOf": found}
        if '"$ref"' in json.dumps(choice):
            choice = standing_alone(choice, root)
        value = json_value(choice, strict=True)
        return not byte_matcher(f"%llguidance {{}}\nstart: value\nvalue: {value}\n").get_error()

    def _of_type(self, kind: str, schema: Mapping[str, Any], place: str) -> str:
        if kind == "object":
            return self._object(schema, place)
        if kind == "array":
            return self._array(schema, place)
        if kind == "string":
            self._check(schema, _HELD["string"], place)
            return self._text()
        # JSON's own notation.
        return self._new_rule(json_value({**schema, "type": kind}, self._function.strict))

    def _object(self, schema: Mapping[str, Any], place: str) -> str:
        self._check(schema, _HELD["object"], place)
        properties, required = schema.get("properties", {}), self._list(schema.get("required", []), f"{place}/required")
        if not isinstance(properties, Mapping):
            raise self._wrong(f"{place}/properties is no JSON schema's")
        if not all(isinstance(name, str) for name in required):
            raise self._wrong(f"{place}/required is no JSON schema's")
        needed = frozenset(required)
        if len(properties) > _MOST_PROPERTIES:
            raise self._wrong(f"{place}/properties has {len(properties)}; at most {_MOST_PROPERTIES} are taken")
        if self._function.strict and not needed <= properties.keys():
            raise unheld(self._function, f"{place}/required")
        more = schema.get("additionalProperties", True)
        if self._function.strict and not properties and more not in (True, False, {}):
            raise unheld(self._function, f"{place}/additionalProperties")
        if not properties and more is not False:
            self._any_value()
            return f"{self._any}_object"
        # Sorted, as the template sorts what it declares and what was called.
        members = []
        for name in sorted(properties, key=str.lower):
            if not _NAME.fullmatch(name):
                raise self._wrong(f"this format cannot write a parameter named {name!r}")
            member = self._new_rule(f"{text(name + ':')} {self.value(properties[name], f'{place}/properties/{name}')}")
            members.append((member, name in needed))
        return f'"{{" {self._members(members)} "}}"'

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Writes members in their order, with a comma between those that are there.

        Args:
            members: each one's rule, and whether it must be there.
        """
        behind = [""]  # what may follow each member, the last one first: rules, which all starts share
        for member, needed in reversed(members[1:]):
            rest = f'"," {member}' if needed else f'("," {member})?'
            behind.append(self._new_rule(f"{rest} {behind[-1]}".rstrip()))
        starts = []  # one for each member that may be the first
        for member, needed in members:
            starts.append(f"{member} {behind.pop()}".rstrip())
            if needed:
                return self._one_of(starts)
        return f"({' | '.join(starts)})?" if starts else ""

    def _array(self, schema: Mapping[str, Any], place: str) -> str:
        self._check(schema, _HELD["array"], place)
        for keyword in schema.keys() & {"minItems", "maxItems"}:
            if type(schema[keyword]) is not int or schema[keyword] < 0:
                raise self._wrong(f"{place}/{keyword} is no JSON schema's")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        each = schema.get("items", True)
        if each is False or isinstance(each, list):  # of a tuple, whose items differ
            if self._function.strict:
                raise unheld(self._function, f"{place}/items")
            each = True
        item = self._new_rule(self.value(each, f"{place}/items"))
        upper = "" if most is None else most - 1
        # The library takes no repetition of at most none.
        items = item if upper == 0 and least < 2 else f'{item} ("," {item}){{{max(least - 1, 0)},{upper}}}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _exactly(self, value: Any) -> str:
        """Writes one value."""
        with self._inside():
            return self._exact(value)

    def _exact(self, value: Any) -> str:
        if isinstance(value, str):
            if QUOTE in value:
                raise self._wrong(f"this format cannot write the value {value!r}")
            return f"({self._marks.one(QUOTE)} {text(value)} {self._marks.one(QUOTE)})" if value else self._empty_text()
        if isinstance(value, Mapping):
            members = [f"{text(name + ':')} {self._exactly(value[name])}" for name in sorted(value, key=str.lower)]
            return '("{" ' + ' "," '.join(members) + ' "}")'
        if isinstance(value, list):
            return '("[" ' + ' "," '.join(self._exactly(one) for one in value) + ' "]")'
        return text(json.dumps(value))

    def _empty_text(self) -> str:
        return f"({self._marks.one(QUOTE)} {self._marks.one(QUOTE)})"

    def _text(self) -> str:
        if not self._any:
            self._any_value()
        return f"{self._any}_text"

    def _any_value(self) -> str:
        """Writes any value; its rules, once."""
        if not self._any:
            self._any = f"{self._rule}_any"
            name, quote = self._any, self._marks.one(QUOTE)
            scalar = json_value({"type": list(_SCALARS)}, strict=True)
            self.rules += [
                f"{name}: {name}_text | {name}_scalar | {name}_object | {name}_array",
                f"{name}_text: {quote} {name}_inner",
                self._marks.text_up_to(f"{name}_inner", QUOTE),
                f"{name}_scalar: {scalar}",
                f'{name}_object: "{{" ({name}_member ("," {name}_member)*)? "}}"',
                f'{name}_member: /[a-zA-Z0-9_.-]{{1,{LONGEST_MEMBER}}}/ ":" {name}',
                f'{name}_array: "[" ({name} ("," {name})*)? "]"',
            ]
        return self._any

    def _reference(self, target: Any, place: str) -> str:
        """Writes what a reference inside the function's schema stands for; its rule, once."""
        found = referred(target, {"type": "object", **self._function.schema})
        if found is None:
            raise self._wrong(f"{place}/$ref is none that is in the schema")
        if target not in self._references:
            self._references[target] = f"{self._rule}_ref_{len(self._references)}"
            self.rules.append(f"{self._references[target]}: {self.value(found, target)}")
        return self._references[target]

    def _one_of(self, expressions: Sequence[str]) -> str:
        return expressions[0] if len(expressions) == 1 else "(" + " | ".join(expressions) + ")"

    def _new_rule(self, expression: str) -> str:
        rule = f"{self._rule}_{len(self.rules)}"
        self.rules.append(f"{rule}: {expression}")
        return rule

    def _list(self, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong(f"{place} is no JSON schema's")
        return value

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Counts a schema or value inside others; refuses the one that is too deep, before the stack ends."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._wrong("its schema is nested too deeply")
        yield
        self._depth -= 1

    def _wrong(self, what: str) -> RequestError:
        return RequestError(f"{self._function.name!r}: {what}", "tools")

    def _check(self, schema: Mapping[str, Any], held: frozenset[str], place: str) -> None:
        """Refuses a strict function with a keyword that is not held, but for other types' own."""
        several = isinstance(schema.get("type"), list)
        others = frozenset().union(*_HELD.values()) if several else frozenset()
        loose = sorted(key for key in schema.keys() - _OF_ALL - held - others if not key.startswith("$schema"))
        if self._function.strict and loose:
            raise unheld(self._function, f"{place}/{loose[0]}")
