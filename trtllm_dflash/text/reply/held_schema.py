"""JSON schemas as llguidance takes them: without what holds a value to nothing, which it would refuse."""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from trtllm_dflash.text.reply.byte_matcher import byte_matcher

#: Characters of a schema, expression or grammar.
LONGEST = 1 << 16

#: Formats that llguidance holds texts to; of others, JSON Schema makes remarks.
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})

#: Places of schemas inside a schema: by name, in a list, or alone.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")

#: JSON's types.
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_FAR = 10**18  # a bound that llguidance takes no more in all places: those of a language's own numbers are beyond it

_ANY_NAME: tuple[object, ...] = ({}, {"type": "string"}, True)


def held(schema: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
    """Leaves out of a schema formats that are unknown, and what any value has; where not strict, also patterns and
    bounds that llguidance cannot hold a value to, and what agents' libraries write that is no JSON schema's or of
    another document.
    """
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if not strict and _says_nothing(key, value):
            continue
        if key in _NAMED and isinstance(value, Mapping):
            kept[key] = {name: _held(inner, strict) for name, inner in value.items()}
        elif key in _LISTED and isinstance(value, list):
            kept[key] = [_held(inner, strict) for inner in value]
        elif key in _ALONE:
            kept[key] = _held(value, strict)
        else:
            kept[key] = value
    if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
        del kept["format"]
    if kept.get("propertyNames") in _ANY_NAME:
        del kept["propertyNames"]
    if kept.get("uniqueItems") is False:
        del kept["uniqueItems"]
    if not strict and isinstance(kept.get("pattern"), str) and not _is_held(kept["pattern"]):
        del kept["pattern"]
    return kept


def inner_schemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Lists the schemas inside a schema, with the places where they are."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from ((f"{key}/{name}", inner) for name, inner in value.items())
        elif key in _LISTED and isinstance(value, list):
            yield from ((f"{key}/{number}", inner) for number, inner in enumerate(value))
        elif key in _ALONE:
            yield key, value


def patterns_of(schema: Any) -> Iterator[str]:
    """Lists the patterns of a schema and of those inside it."""
    ahead = [schema]
    while ahead:
        each = ahead.pop()
        if isinstance(each, Mapping) and isinstance(each.get("pattern"), str):
            yield each["pattern"]
        ahead += [inner for _, inner in inner_schemas(each)]


def _says_nothing(key: str, value: object) -> bool:
    """Whether a keyword is without a value, names a type that there is not, refers to what is not here, or is a bound
    that hardly any number is beyond."""
    if key == "type":
        types = value if isinstance(value, list) else [value]
        return not all(isinstance(name, str) and name in TYPES for name in types)
    if key == "$ref":
        return not isinstance(value, str) or not value.startswith("#")
    if key in _BOUNDS and isinstance(value, int | float):
        return abs(value) >= _FAR
    return value is None and key not in ("const", "default")


def _held(schema: Any, strict: bool) -> Any:
    return held(schema, strict) if isinstance(schema, Mapping) else schema


@lru_cache
def _is_held(pattern: str) -> bool:
    """Whether llguidance holds a text to a pattern."""
    from llguidance import LLMatcher  # what few requests need

    text = json.dumps({"type": "string", "pattern": pattern})
    return not byte_matcher(LLMatcher.grammar_from_json_schema(text)).get_error()
