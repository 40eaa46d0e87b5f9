"""Forms that a client can hold a reply to: OpenAI's `response_format` and `text.format`, and vLLM's own."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

from trtllm_dflash.runtime.structured import MOST_TEXTS, Structured
from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.json_fields import JsonFields
from trtllm_dflash.serving.openai.messages import asked_of


class JsonSchema(BaseModel):
    """A JSON schema with a name. Every reply is held to it, `strict` or not."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[JsonFields, Field(alias="schema")]
    strict: bool | None = None


def _check_schema(kind: str, schema: object, place: str) -> None:
    """Refuses a schema of another type than json_schema, and that without one."""
    if (kind == "json_schema") != (schema is not None):
        what = "missing, for the type json_schema" if schema is None else "for the type json_schema, and for no other"
        raise ApiError(400, f"{place}: {what}", place)


class ResponseFormat(BaseModel):
    """OpenAI's `response_format` of chats."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _check_schema(self.type, self.json_schema, "response_format.json_schema")
        return self

    @property
    def structured(self) -> Structured | None:
        """The form of the reply; None of a text."""
        if self.type == "text":
            return None
        return Structured(kind=self.type, value=self.json_schema and self.json_schema.json_schema)


class TextFormat(BaseModel):
    """OpenAI's `text.format` of responses: `response_format`, with the schema's fields beside its type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[JsonFields | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _check_schema(self.type, self.json_schema, "text.format.schema")
        return self

    @property
    def structured(self) -> Structured | None:
        """The form of the reply; None of a text."""
        return None if self.type == "text" else Structured(kind=self.type, value=self.json_schema)

    def body(self) -> dict[str, Any]:
        """Makes what a response repeats of it."""
        return self.model_dump(by_alias=True) if self.type == "json_schema" else {"type": self.type}


#: Of `structured_outputs`, what is not done here, with the values that ask for nothing of it. Null always does.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (False, True),
    "structural_tag": (),
    "whitespace_pattern": (),
}


def _parsed(schema: object) -> object:
    """Reads a schema that may be written as a text of JSON."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        return schema


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: one of them at most.

    Attributes:
        choice: texts, of which the reply is one.
        grammar: in Lark's form.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    json_schema: Annotated[JsonFields | None, BeforeValidator(_parsed), Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_TEXTS)] | None = (
        None
    )
    grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: object) -> object:
        return asked_of(values, _UNSUPPORTED, frozenset(), "structured_outputs.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [type(self).model_fields[name].alias or name for name in self._given()]
        if len(given) > 1:
            raise ApiError(400, f"structured_outputs: give one of {', '.join(given)}", "structured_outputs")
        return self

    @property
    def structured(self) -> Structured | None:
        """The form of the reply, if any."""
        for kind, value in self._given().items():
            return Structured.model_validate({"kind": kind, "value": None if kind == "json_object" else value})
        return None

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None and value is not False}
