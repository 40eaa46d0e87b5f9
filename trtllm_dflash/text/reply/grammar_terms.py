"""Terms of grammars in Lark's form as llguidance reads it: texts, JSON, and markers that may be special tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.reply.held_schema import held
from trtllm_dflash.text.reply.json_space import OBJECT_SPACE, SCHEMA_SPACE, as_object

#: Keywords of a schema that hold a value to nothing.
REMARKS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})

#: Terminals that rules here refer to. No text has a special token in it.
TERMINALS = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True)
class Callee:
    """A function that a reply may call.

    Attributes:
        schema: of its arguments.
        strict: they are held to all of it; else to what of it can be held.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True)
class Marks:
    """A format's markers, as a grammar has them.

    Attributes:
        special: the token of each that is a special one of the tokenizer; others are text.
    """

    special: Mapping[str, int] = field(default_factory=dict)

    def one(self, marker: str) -> str:
        """Writes a marker."""
        return f"<[{self.special[marker]}]>" if marker in self.special else text(marker)

    def text_up_to(self, rule: str, marker: str) -> str:
        """Writes a rule: any text up to the first such marker, and that."""
        # A lazy terminal ends where it first can. A text ends at a special token by itself.
        lazy = "" if marker in self.special else "[lazy]"
        return f"{rule}{lazy}: TEXT {self.one(marker)}"


def text(content: str) -> str:
    """Writes a text."""
    return json.dumps(content, ensure_ascii=False).replace("\x7f", "\\u007f")  # which the library takes no other way


def json_value(schema: Any, strict: bool) -> str:
    """Writes JSON on one line that keeps to a schema; one that is not strict is what `held` left of it already."""
    if not isinstance(schema, Mapping):
        return "%json " + json.dumps(schema)
    kept = held(schema) if strict else schema
    return "%json " + json.dumps({**kept, "x-guidance": {**SCHEMA_SPACE, "lenient": not strict}})


def form_of(kind: str, value: Any) -> str:
    """Writes a form; kind and value are those of `Structured`.

    Raises:
        RequestError: such a form cannot stand inside another grammar.
    """
    if kind == "grammar":
        reason = "grammar: not where a reply has calls or marks its thinking; use json_schema, regex or choice"
        raise RequestError(reason, "structured")
    if kind == "regex":
        return f"/{_escaped(value)}/"
    if kind == "choice":
        return " | ".join(text(one) for one in value)
    if kind == "json_object":
        return "%json " + json.dumps({"type": "object", "x-guidance": OBJECT_SPACE})
    return "%json " + json.dumps({**held(as_object(value)), "x-guidance": SCHEMA_SPACE})


def _escaped(expression: str) -> str:
    """Writes a regular expression so that it can stand between slashes, on one line."""
    written, after_backslash = [], False
    for character in expression:
        written.append("\\/" if character == "/" and not after_backslash else character)
        after_backslash = character == "\\" and not after_backslash
    return "".join(written).replace("\n", "\\n")


def unheld(function: Callee, place: str) -> RequestError:
    """Makes the refusal of a strict function of whose schema a place cannot be held to."""
    return RequestError(f"strict of {function.name!r}: {place} cannot be held to in this format", "tools")
