"""Grammars of whole Harmony replies whose final channel has a form, in Lark's form as llguidance reads it."""

from typing import Any

from trtllm_dflash.text.reply.grammar_terms import form_of

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
    return f"{_REPLY}form: {form_of(kind, value)}\n"
