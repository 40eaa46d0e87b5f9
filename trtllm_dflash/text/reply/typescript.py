"""Functions as Kimi-K2.5 was shown them: types in TypeScript, which its template takes as `tools_ts_str`.

The model's tokenizer makes that text in code of its own, which is never run here; without it the template falls back to
JSON, which the model has seen less of. A schema that has no such form is left to that.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_INDENT = "  "
_SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
_LOOSE = {**_SCALARS, "object": "{}", "array": "Array<any>"}  # of several types in a list
_LIMITS: Mapping[str, tuple[str, ...]] = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_DEFINITION = "#/$defs/"


def declared(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Writes functions in OpenAI's form as types; None where one has no such form."""
    try:
        functions = "\n".join(_function(tool["function"]) for tool in tools)
    except (KeyError, TypeError, AttributeError, RecursionError):
        return None
    return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"


def _function(function: Mapping[str, Any]) -> str:
    schema = _sorted(function.get("parameters") or {})
    lines = []
    for name, inner in schema.get("$defs", {}).items():
        lines += [*_comment({"description": inner.get("description")}, ""), f"interface {name} {_type(inner, '')}"]
    lines += _comment({"description": function.get("description")}, "")
    return "\n".join([*lines, f"type {function['name']} = (_: {_object(schema, '')}) => any;"])


def _sorted(value: Any) -> Any:
    """Sorts the fields of all objects inside a value, as the model's own code does first."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(one) for one in value] if isinstance(value, list) else value


def _type(schema: Any, indent: str) -> str:
    """Writes a type. Raises a KeyError where it has no form."""
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if "$ref" in schema:
        return _reference(schema["$ref"])
    if "anyOf" in schema:
        return " | ".join(_type(one, indent) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in schema["enum"])
    if not schema:
        return "any"
    kind = schema["type"]
    if isinstance(kind, list):
        return " | ".join(_LOOSE[one] for one in kind)
    write: Callable[[Any, str], str] | None = {"object": _object, "array": _array}.get(kind)
    return _SCALARS[kind] if write is None else write(schema, indent)


def _reference(target: str) -> str:
    if not target.startswith(_DEFINITION):
        raise KeyError(target)
    return target.removeprefix(_DEFINITION)


def _object(schema: Mapping[str, Any], indent: str) -> str:
    """Writes an object's members, those that must be there first."""
    inner = indent + _INDENT
    properties, required = schema.get("properties", {}), schema.get("required", [])
    members = []
    for name in sorted(properties, key=lambda name: (name not in required, name)):
        value = properties[name]
        comment = _comment(value, inner) + _default(value, inner)
        members.append("\n".join([*comment, f"{inner}{name}{'' if name in required else '?'}: {_type(value, inner)}"]))
    more = schema.get("additionalProperties")
    if more is not None:
        members.append(f"{inner}[k: string]: {'never' if more is False else _type(more, inner)}")
    return "{\n" + ",\n".join(members) + f"\n{indent}}}" if members else "{}"


def _array(schema: Mapping[str, Any], indent: str) -> str:
    items = schema.get("items") or {}
    comment = _comment(items, indent + _INDENT)
    if not comment:
        return f"Array<{_type(items, indent)}>"
    return "\n".join(["Array<", *comment, f"{indent}{_INDENT}{_type(items, indent + _INDENT)}", f"{indent}>"])


def _comment(schema: Any, indent: str) -> list[str]:
    """Lists the lines that describe a value: its description, and what limits it."""
    if not isinstance(schema, Mapping):
        return []
    described = schema.get("description") or ""
    lines = [f"{indent}// {line}" if line else "" for line in described.split("\n")] if described else []
    kind = schema.get("type")
    plain = isinstance(kind, str) and not schema.keys() & {"$ref", "anyOf", "enum"}
    limits = [f"{key}: {schema[key]}" for key in _LIMITS.get(str(kind), ()) if key in schema] if plain else []
    return [*lines, f"{indent}// {', '.join(limits)}"] if limits else lines


def _default(schema: Any, indent: str) -> list[str]:
    value = schema.get("default") if isinstance(schema, Mapping) else None
    if value is None:
        return []
    written = repr(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)
    return [f"{indent}// Default: {written}"]
