"""The form that a reply is held to: a JSON schema, a regular expression, one of some texts, or a grammar."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

StructuredKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

#: What `value` must be, by kind.
_VALUES: dict[str, tuple[type, ...]] = {
    "json_object": (type(None),),
    "json_schema": (dict, bool),
    "regex": (str,),
    "choice": (list, tuple),
    "grammar": (str,),
}

#: Texts that a reply may be held to one of: a step looks at all that are left.
MOST_TEXTS = 1000

_WORDS = {
    "json_object": "takes no value",
    "json_schema": "is a JSON schema: an object, true or false",
    "regex": "is a text",
    "choice": f"is a list of 1 to {MOST_TEXTS:,} texts, none of them empty",
    "grammar": "is a text, in Lark's form",
}


class Structured(BaseModel):
    """The form of a reply's text.

    Attributes:
        kind: what `value` is.
        value: the schema, the expression, the texts, or a grammar in Lark's form; None of a JSON object.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: StructuredKind
    value: Any = None

    def __hash__(self) -> int:  # a schema has no hash
        return hash(self.kind)

    @model_validator(mode="after")
    def _check_value(self) -> "Structured":
        fits = isinstance(self.value, _VALUES[self.kind])
        if fits and self.kind == "choice":
            fits = 0 < len(self.value) <= MOST_TEXTS and all(isinstance(text, str) and text for text in self.value)
        if not fits:
            raise ValueError(f"value of {self.kind} {_WORDS[self.kind]}")
        return self
