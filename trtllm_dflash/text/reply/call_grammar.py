"""Grammars of replies that call functions, in Lark's form as llguidance reads it: what a parser here reads as calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.reply.formats import ChatFormat
from trtllm_dflash.text.reply.qwen3_coder import types_of
from trtllm_dflash.text.reply.thinking import CLOSING

#: Keywords of a schema that hold a value to nothing.
_REMARKS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_SCALARS = frozenset({"string", "null", "boolean", "integer", "number"})


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


def call_grammar(
    chat_format: ChatFormat, functions: Sequence[Callee], must: bool, parallel: bool = True, thinking: bool = False
) -> str:
    """Writes the grammar of a reply that may call these functions.

    Args:
        must: the reply is calls and nothing else; else calls may stand wherever the format has them.
        parallel: it may have several calls.
        thinking: the reply begins inside its thinking.

    Raises:
        RequestError: the format has no grammar here, or cannot hold a function's arguments to its schema.
    """
    if chat_format == "harmony":
        raise RequestError("calls of gpt-oss cannot be held to a form yet", "tools")
    rules = [_start(chat_format, must, parallel, thinking)]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        write = _xml_call if chat_format == "qwen3-coder" else _json_call
        rules += write(chat_format, f"call_{number}", function, opened=not must)
    return "\n".join(["%llguidance {}", *rules, r"TEXT: /(.|\n)*/", ""])


def _start(chat_format: ChatFormat, must: bool, parallel: bool, thinking: bool) -> str:
    several = "*" if parallel else "?"
    if chat_format == "llama3":  # calls stand at the beginning, or nowhere
        calls = f'call ("; " call){several}' if parallel else "call"
        return f"start: {calls}" if must else f"start: {calls} | OTHER\nOTHER: /[ \\n]*[^{{ \\n](.|\\n)*/"
    if not must:
        # A lazy terminal ends where it first can: each opening tag begins a call.
        return f"start: (opened call){several} rest\nopened[lazy]: TEXT {_text('<tool_call>')}\nrest: TEXT"
    calls = f'call ("\\n" call){several}' if parallel else "call"
    if not thinking:
        return f"start: {calls}"
    return f'start: thought "\\n\\n" {calls}\nthought[lazy]: TEXT {_text(CLOSING)}'


def _json_call(chat_format: ChatFormat, rule: str, function: Callee, opened: bool) -> list[str]:
    key = "parameters" if chat_format == "llama3" else "arguments"
    before, after = ("", "") if chat_format == "llama3" else ("<tool_call>\n", "\n</tool_call>")
    before = before.removeprefix("<tool_call>") if opened else before
    head = f'{before}{{"name": {json.dumps(function.name)}, "{key}": '
    arguments = _json_rule({"type": "object", **function.schema}, function.strict)
    return [f"{rule}: {_text(head)} {rule}_arguments {_text('}' + after)}", f"{rule}_arguments: {arguments}"]


def _xml_call(chat_format: ChatFormat, rule: str, function: Callee, opened: bool) -> list[str]:
    schema = function.schema
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for keyword, given, kind in (("properties", properties, Mapping), ("required", required, list)):
        if not isinstance(given, kind):
            raise RequestError(f"{function.name!r}: #/{keyword} is no JSON schema's", "tools")
    unwritable = next((name for name in properties if ">" in name or "\n" in name), None)
    if unwritable is not None:
        raise RequestError(f"{function.name!r}: this format cannot write a parameter named {unwritable!r}", "tools")
    unheld = sorted(schema.keys() - {"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
    unheld = [name for name in unheld if name not in _REMARKS and not name.startswith("$schema")]
    if any(name not in properties for name in required if isinstance(name, str)):
        unheld.append("required")
    if function.strict and unheld:
        raise _unheld(function, f"#/{unheld[0]}")
    parameters, rules = [], []
    for number, (name, inner) in enumerate(properties.items()):
        parameter = f"{rule}_{number}"
        parameters.append(parameter + ("" if name in required else "?"))
        rules += _parameter(parameter, name, inner, function)
    head = f"{'' if opened else '<tool_call>'}\n<function={function.name}>\n"
    body = " ".join([_text(head), *parameters, _text("</function>\n</tool_call>")])
    return [f"{rule}: {body}", *rules]


def _parameter(rule: str, name: str, schema: object, function: Callee) -> list[str]:
    head, end = _text(f"<parameter={name}>\n"), "\n</parameter>\n"
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return [f"{rule}: {head} ({' | '.join(_text(choice + end) for choice in choices)})"]
    if "string" in types_of(schema):
        if function.strict and not _is_any_scalar(schema):
            raise _unheld(function, f"#/properties/{name}")
        return [f"{rule}: {head} {rule}_text", f"{rule}_text[lazy]: TEXT {_text(end)}"]
    shared = {key: function.schema[key] for key in ("$defs", "definitions") if key in function.schema}
    value = {**shared, **schema} if isinstance(schema, Mapping) else schema
    return [f"{rule}: {head} {rule}_value {_text(end)}", f"{rule}_value: {_json_rule(value, function.strict)}"]


def _is_any_scalar(schema: object) -> bool:
    """Whether any text is a value of that schema: it names types alone, of which each text is one."""
    if not isinstance(schema, Mapping):
        return schema is True
    held = schema.keys() - _REMARKS
    for key in ("anyOf", "oneOf"):
        if held == {key}:
            return all(_is_any_scalar(one) for one in schema[key])
    return held <= {"type"} and types_of(schema) <= _SCALARS


def _json_rule(schema: Any, strict: bool) -> str:
    if not isinstance(schema, Mapping):
        return "%json " + json.dumps(schema)
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": not strict}
    return "%json " + json.dumps({**schema, "x-guidance": spaces})


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unheld(function: Callee, place: str) -> RequestError:
    return RequestError(f"strict of {function.name!r}: {place} cannot be held to in this format", "tools")
