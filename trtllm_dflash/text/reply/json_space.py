"""JSON that a reply is held to, as llguidance takes it: its space, and schemas that are no objects."""

from collections.abc import Mapping
from typing import Any

#: Of objects without a schema, where there is any: a space, or a line's end and what indents the next one. Where JSON's
#: whole space is allowed, small models fill replies with it.
OBJECT_SPACE = {"whitespace_pattern": r" |\n {0,32}|\n\t{1,16}"}

#: What is held to a schema is one line, as `json.dumps` writes it: then all but the values is forced.
SCHEMA_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def as_object(schema: Any) -> Mapping[str, Any]:
    """Makes an object of a schema that may be true, for any value, or false, for none."""
    return schema if isinstance(schema, Mapping) else {} if schema else {"enum": []}
