"""Grammars of whole Harmony replies whose final channel has a form, in Lark's form as llguidance reads it."""

import json
from typing import Any

from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.reply.held_schema import held
from trtllm_dflash.text.reply.json_space import OBJECT_SPACE, SCHEMA_SPACE, as_object

#: Thinking comes first, in as many messages as the model likes; what the reader sees is the form alone.
_REPLY = """%llguidance {}
start: thought* <|channel|> "final" typed? <|message|> form
thought: <|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant"
typed: " "? <|constrain|> "json"
TEXT: /(.|\\n)*/
"""


def harmony_form(kind: str, value: Any) -> str:
    """Writes the grammar of a reply whose final channel is held to a form; kind and value are those of `Structured`.

    Raises:
        RequestError: such a form cannot stand inside another grammar.
    """
    if kind == "grammar":
        reason = "grammar: not in chats of this format, which marks its thinking; use json_schema, regex or choice"
        raise RequestError(reason, "structured")
    if kind == "regex":
        form = f"/{_escaped(value)}/"
    elif kind == "choice":
        form = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    elif kind == "json_object":
        form = "%json " + json.dumps({"type": "object", "x-guidance": OBJECT_SPACE})
    else:
        form = "%json " + json.dumps({**held(as_object(value)), "x-guidance": SCHEMA_SPACE})
    return f"{_REPLY}form: {form}\n"


def _escaped(expression: str) -> str:
    """Writes a regular expression so that it can stand between slashes, on one line."""
    written, after_backslash = [], False
    for character in expression:
        written.append("\\/" if character == "/" and not after_backslash else character)
        after_backslash = character == "\\" and not after_backslash
    return "".join(written).replace("\n", "\\n")
