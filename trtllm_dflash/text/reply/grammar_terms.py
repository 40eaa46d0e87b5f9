"""Terms of grammars in Lark's form as llguidance reads it: texts, JSON, and markers that may be special tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.reply.held_schema import held
from trtllm_dflash.text.reply.json_space import SCHEMA_SPACE

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
    return json.dumps(content, ensure_ascii=False)


def json_value(schema: Any, strict: bool) -> str:
    """Writes JSON on one line that keeps to a schema; where that is not strict, as far as it can be held."""
    if not isinstance(schema, Mapping):
        return "%json " + json.dumps(schema)
    return "%json " + json.dumps({**held(schema, strict), "x-guidance": {**SCHEMA_SPACE, "lenient": not strict}})


def unheld(function: Callee, place: str) -> RequestError:
    """Makes the refusal of a strict function of whose schema a place cannot be held to."""
    return RequestError(f"strict of {function.name!r}: {place} cannot be held to in this format", "tools")
