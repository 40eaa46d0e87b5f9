"""Parts of a function's schema as documents of their own, with what their references lead to."""

from collections.abc import Mapping
from itertools import count
from typing import Any

SHARED = ("$defs", "definitions")
_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords whose values are no schemas
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", *SHARED})  # whose names are no keywords


def referred(target: Any, root: Any) -> Any:
    """Finds what a reference leads to inside a schema; None where it leads nowhere."""
    if not isinstance(target, str) or (target != "#" and not target.startswith("#/")):
        return None
    for part in target.split("/")[1:]:
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def listed(schema: Mapping[str, Any]) -> Any:
    """Finds the values that a schema lists, or its one value; None where it does neither."""
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def standing_alone(part: Any, root: Mapping[str, Any]) -> Any:
    """Completes a part of a schema by those that the whole shares, and by the whole where a reference leads there.

    The whole is one of the shared schemas then, under a name that none of them has.
    """
    if not isinstance(part, Mapping):
        return part
    shared = {key: root[key] for key in SHARED if key in root}
    names = shared.get("$defs", {})
    if not isinstance(names, Mapping):
        return part  # no reference can lead there
    whole = next(name for at in count() if (name := f"whole_{at}" if at else "whole") not in names)
    before = {**part, **shared}
    moved = _moved(before, f"#/$defs/{whole}")
    if moved == before:
        return before
    rest = {"type": "object", **{key: value for key, value in root.items() if key not in SHARED}}
    return {**moved, "$defs": {**moved.get("$defs", {}), whole: _moved(rest, f"#/$defs/{whole}")}}


def _moved(schema: Any, whole: str, named: bool = False) -> Any:
    """Makes references lead to places in the whole, which stands elsewhere now, but those to shared schemas."""
    if isinstance(schema, list):
        return [_moved(one, whole) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {}
    for key, value in schema.items():
        if not named and key == "$ref" and _leads_into_whole(value):
            moved[key] = whole + value[1:]
        elif not named and key in _VALUES:
            moved[key] = value
        else:
            moved[key] = _moved(value, whole, not named and key in _NAMED)
    return moved


def _leads_into_whole(target: Any) -> bool:
    if not isinstance(target, str):
        return False
    return target == "#" or (target.startswith("#/") and not target.startswith(tuple(f"#/{key}/" for key in SHARED)))
