"""Grammars of replies that call functions, in Lark's form as llguidance reads it: what a parser here reads as calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.reply import gemma4, kimi_k2, minimax_m2, qwen3, qwen3_coder
from trtllm_dflash.text.reply.formats import ChatFormat
from trtllm_dflash.text.reply.gemma4_grammar import gemma4_call
from trtllm_dflash.text.reply.grammar_terms import REMARKS, TERMINALS, Callee, Marks, json_value, text, unheld
from trtllm_dflash.text.reply.harmony_form import harmony_head, harmony_start
from trtllm_dflash.text.reply.held_schema import LONGEST, held, patterns_of
from trtllm_dflash.text.reply.llama3_form import opening
from trtllm_dflash.text.reply.parts import LONGEST_MEMBER
from trtllm_dflash.text.reply.schema_parts import SHARED, listed, standing_alone
from trtllm_dflash.text.reply.thinking import CLOSING, OPENING
from trtllm_dflash.text.reply.xml_call import Tags, types_of

_SCALARS = frozenset({"string", "null", "boolean", "integer", "number"})


def call_grammar(
    chat_format: ChatFormat,
    functions: Sequence[Callee],
    must: bool,
    parallel: bool = True,
    thinking: bool = False,
    special: Mapping[str, int] | None = None,
    form: str | None = None,
) -> str:
    """Writes the grammar of a reply that may call these functions.

    Args:
        must: the reply is calls and nothing else; else calls may stand wherever the format has them.
        parallel: it may have several calls.
        thinking: the reply begins inside its thinking; Gemma's may begin with it.
        special: the tokens of those of the format's markers that are special ones of the tokenizer.
        form: of a reply that is no calls, as `grammar_terms.form_of` writes it; None: it has none. With `must` alone.

    Raises:
        RequestError: the format cannot hold a function's arguments to its schema, or the schemas are too long.
    """
    _check_patterns(functions)
    marks = Marks(special or {})
    if chat_format == "harmony":  # of which a reply has one call, and its own place for a form
        rules = harmony_start(must, form)
    else:
        rules = _start(chat_format, marks, must, parallel, thinking)
    if form is not None and chat_format != "harmony":
        rules = [rule.replace("start:", "calls:", 1) if rule.startswith("start:") else rule for rule in rules]
        rules += ["start: calls | form", f"form: {form}"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    if chat_format == "qwen3-coder":
        rules.append("named: " + " | ".join(f"call_{number}_named" for number in range(len(functions))))
    written = 0
    for number, function in enumerate(functions):
        kept = function if function.strict else replace(function, schema=held(function.schema, strict=False))
        own = _call(chat_format, marks, f"call_{number}", kept)
        written += sum(map(len, own))
        if written > LONGEST:
            raise _too_long(function)
        rules += own
    return "\n".join(["%llguidance {}", *rules, TERMINALS, ""])


def _too_long(function: Callee) -> RequestError:
    reason = "its schema is too long, with what its references lead to, and those before it"
    return RequestError(f"{function.name!r}: {reason}; at most {LONGEST} characters are taken", "tools")


def _check_patterns(functions: Sequence[Callee]) -> None:
    """Refuses patterns that no grammar has room for, before `held` compiles each of them."""
    written = sum(len(json.dumps({"pattern": each})) for function in functions for each in patterns_of(function.schema))
    if written > LONGEST:
        raise RequestError(f"their patterns have {written} characters; at most {LONGEST} are taken", "tools")


def _start(chat_format: ChatFormat, marks: Marks, must: bool, parallel: bool, thinking: bool) -> list[str]:
    if chat_format == "llama3":  # calls stand at the beginning, or nowhere
        calls = 'call ("; " call)*' if parallel else "call"
        reply = [f"reply: {calls}"] if must else [f"reply: {calls} | OTHER", r"OTHER: /[ \n]*[^{ \n](.|\n)*/"]
        if not thinking:
            return ["start: reply", *reply]
        return [f"start: thought {text(chr(10) * 2)} reply", marks.text_up_to("thought", CLOSING), *reply]
    if chat_format == "gemma4":
        return _start_of_gemma4(marks, must, parallel, thinking)
    if chat_format == "minimax-m2":
        tags, blank = minimax_m2.TAGS, r"/\n{0,3}/"
        section = [f"section: {text(chr(10))} call{'+' if parallel else ''} {marks.one(tags.closing)}"]
        return section + _start_with(marks, tags.opening, "section", blank, "", must, parallel, thinking)
    if chat_format == "kimi-k2":
        section = [f"section: call{'+' if parallel else ''} {marks.one(kimi_k2.SECTION_END)}"]
        return section + _start_with(marks, kimi_k2.SECTION, "section", "", "", must, parallel, thinking)
    if chat_format == "qwen3-coder" and not must and not thinking:
        return _among_text(marks, qwen3.OPENING, "call", parallel, (), qwen3_coder.TAGS.function)
    return _start_with(marks, qwen3.OPENING, "call", text("\n\n"), text("\n"), must, parallel, thinking)


def _start_with(
    marks: Marks, opening: str, calls: str, blank: str, between: str, must: bool, parallel: bool, thinking: bool
) -> list[str]:
    """Writes the start of a format whose calls begin with a marker.

    Args:
        calls: the rule of what the marker opens; where calls must be and there may be several, `between` parts them.
        blank: between thinking and calls.
    """
    if not must:
        return _among_text(marks, opening, calls, parallel, (OPENING, CLOSING))
    first = f"{marks.one(opening)} {calls}"
    if between and parallel:
        first += f" ({between} {first})*"
    if not thinking:
        return [f"start: {first}"]
    return [f"start: thought {blank} {first}", marks.text_up_to("thought", CLOSING)]


def _start_of_gemma4(marks: Marks, must: bool, parallel: bool, thinking: bool) -> list[str]:
    """Writes the start of Gemma's replies: thinking, if any, is in them as a whole."""
    if not must:
        return _among_text(marks, gemma4.CALL, "call", parallel, (gemma4.CHANNEL, gemma4.CHANNEL_END))
    first = f"{marks.one(gemma4.CALL)} call"
    calls = f"({first})+" if parallel else first
    if not thinking:
        return [f"start: {calls}"]
    channel = marks.one(gemma4.CHANNEL)
    return [f"start: ({channel} thought)? {calls}", marks.text_up_to("thought", gemma4.CHANNEL_END)]


def _among_text(
    marks: Marks, opening: str, calls: str, parallel: bool, others: tuple[str, ...], function: str = ""
) -> list[str]:
    """Writes the start of a reply that may have calls among other text, in which the markers `others` may stand.

    Args:
        function: what a call begins with whose opening is left out.
    """
    special = [marks.one(marker) for marker in others if marker in marks.special]
    before = f"(TEXT ({' | '.join(special)}))* " if special else ""
    several = "*" if parallel else "?"
    rules = [marks.text_up_to("opened", opening), "rest: TEXT"]
    each = f"{before}opened {calls}"
    if function:
        each += " | bare named"
        rules.append(marks.text_up_to("bare", function))
    return [f"start: ({each}){several} {before}rest", *rules]


def _call(chat_format: ChatFormat, marks: Marks, rule: str, function: Callee) -> list[str]:
    """Writes the rule of a call, behind the marker that opens it."""
    if chat_format == "llama3":
        return _json_call(rule, function, " ".join(map(text, opening(function.name))), text("}"))
    if chat_format == "harmony":
        return _json_call(rule, function, harmony_head(function.name), "")
    if chat_format == "qwen3":
        head = f'\n{{"name": {json.dumps(function.name)}, "arguments": '
        return _json_call(rule, function, text(head), text("}\n" + qwen3.CLOSING))
    if chat_format == "qwen3-coder":
        return _xml_call(qwen3_coder.TAGS, rule, function, before="\n", after="\n" + qwen3.CLOSING)
    if chat_format == "minimax-m2":
        return _xml_call(minimax_m2.TAGS, rule, function, before="", after="\n")
    if chat_format == "kimi-k2":
        head = f"{marks.one(kimi_k2.CALL)} {text(f'functions.{function.name}:')} /[0-9]{{1,3}}/"
        return _json_call(rule, function, f"{head} {marks.one(kimi_k2.CALL_ARGUMENTS)}", marks.one(kimi_k2.CALL_END))
    return gemma4_call(marks, rule, function)


def _json_call(rule: str, function: Callee, head: str, tail: str) -> list[str]:
    arguments = json_value({**function.schema, "type": "object"}, function.strict)
    return [f"{rule}: {head} {rule}_arguments {tail}", f"{rule}_arguments: {arguments}"]


def _xml_call(tags: Tags, rule: str, function: Callee, before: str, after: str) -> list[str]:
    schema = function.schema
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for keyword, given, kind in (("properties", properties, Mapping), ("required", required, list)):
        if not isinstance(given, kind):
            raise RequestError(f"{function.name!r}: #/{keyword} is no JSON schema's", "tools")
    unwritable = next((name for name in properties if tags.name_end in name or "\n" in name), None)
    if unwritable is not None:
        raise RequestError(f"{function.name!r}: this format cannot write a parameter named {unwritable!r}", "tools")
    loose = sorted(schema.keys() - {"type", "properties", "required", "additionalProperties", *SHARED})
    loose = [name for name in loose if name not in REMARKS and not name.startswith("$schema")]
    needed = {name for name in required if isinstance(name, str)}
    more = schema.get("additionalProperties")
    # Of parameters that have no names here; a schema that says nothing of them means that there are none.
    is_open = not properties and more is not False and bool(loose or needed or more is not None)
    if not needed <= properties.keys():
        loose.append("required")
    if is_open:
        loose.append("additionalProperties")
    if function.strict and loose:
        raise unheld(function, f"#/{loose[0]}")
    parameters, rules, written = [], [], 0
    for number, (name, inner) in enumerate(properties.items()):
        parameter = f"{rule}_{number}"
        parameters.append(parameter + ("" if name in needed else "?"))
        if function.strict and not _is_held(inner):
            raise unheld(function, f"#/properties/{name}")
        rules += _parameter(tags, parameter, text(name), inner, function)
        written += len(rules[-1])
        if written > LONGEST:  # parts of a schema may each refer to all of it
            raise _too_long(function)
    if is_open:
        parameters.append(f"{rule}_any*")
        rules += _parameter(tags, f"{rule}_any", rf'/[^<>"\n]{{1,{LONGEST_MEMBER}}}/', more, function)
    head = f"{function.name}{tags.name_end}\n"
    body = " ".join([text(head), *parameters, text(tags.function_end + after)])
    return [f"{rule}: {text(before + tags.function)} {rule}_named", f"{rule}_named: {body}", *rules]


def _parameter(tags: Tags, rule: str, name: str, schema: object, function: Callee) -> list[str]:
    """Writes the rule of a parameter; its name is an expression."""
    head = f"{text(tags.parameter)} {name} {text(tags.name_end + tags.edge)}"
    end = f"{tags.edge}{tags.parameter_end}\n"
    choices = _choices(schema)
    unwritable = next((choice for choice in choices if (choice + end).index(end) < len(choice)), None)
    if unwritable is not None:
        raise RequestError(f"{function.name!r}: this format cannot write the value {unwritable!r}", "tools")
    if choices:
        return [f"{rule}: {head} ({' | '.join(text(choice + end) for choice in choices)})"]
    if "string" in types_of(schema):
        return [f"{rule}: {head} {rule}_text", f"{rule}_text[lazy]: TEXT {text(end)}"]
    # Each is a document, in which # is no longer the function's schema.
    value = json_value(standing_alone(schema, function.schema), function.strict)
    return [f"{rule}: {head} {rule}_value {text(end)}", f"{rule}_value: {value}"]


def _choices(schema: object) -> list[str]:
    """Returns what is written of a value that is one of several texts, or null; nothing where it may be another."""
    choices = _values(schema)
    # Of such types alone all but null is a text, and read as one.
    if types_of(schema) == {"string", "null"} and not {"null", "None"} & set(filter(_is_text, choices)):
        choices = ["null" if choice is None else choice for choice in choices]
    return choices if all(map(_is_text, choices)) else []


def _values(schema: object) -> list[Any]:
    """Lists all values of a schema; nothing where it does not."""
    if not isinstance(schema, Mapping):
        return []
    values = listed(schema)
    if values is not None:
        return values if isinstance(values, list) else []
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = [_values(one) for one in schema[key]]
            return [value for values in each for value in values] if all(each) else []
    return [None] if schema.get("type") == "null" else []


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_held(schema: object) -> bool:
    """Whether a parameter can be held to all of that schema: one that may be a text is written as it is."""
    return bool(_choices(schema)) or "string" not in types_of(schema) or _is_any_scalar(schema)


def _is_any_scalar(schema: object) -> bool:
    """Whether any text is a value of that schema: it names types alone, of which each text is one."""
    if not isinstance(schema, Mapping):
        return schema is True
    held = schema.keys() - REMARKS
    for key in ("anyOf", "oneOf"):
        if held == {key}:
            return all(_is_any_scalar(one) for one in schema[key])
    return held <= {"type"} and types_of(schema) <= _SCALARS
