"""Grammars of Harmony's replies, in Lark's form as llguidance reads it: final channels and calls have a form."""

from typing import Any

from trtllm_dflash.text.reply.grammar_terms import TERMINALS, form_of, text

#: Thinking comes first, in as many messages as the model likes; what the reader sees is the form alone.
_RULES = (
    'thought: <|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant"',
    'final: <|channel|> "final" typed? <|message|> form',
    'typed: " "? <|constrain|> "json"',
)
#: Of a reply that is free up to its calls: a word about them, too.
_WORD = 'word: <|channel|> "commentary" <|message|> TEXT <|end|> <|start|> "assistant"'


def harmony_form(kind: str, value: Any) -> str:
    """Writes the grammar of a reply whose final channel is held to a form; kind and value are those of `Structured`.

    Raises:
        RequestError: such a form cannot stand inside another grammar.
    """
    return "\n".join(
        ["%llguidance {}", "start: thought* final", *_RULES, f"form: {form_of(kind, value)}", TERMINALS, ""]
    )


def harmony_start(must: bool, form: str | None) -> list[str]:
    """Writes the rules of a reply that may end with a call.

    Args:
        must: it thinks, and then calls, or has the form; else it says what it likes, and calls or not.
        form: of its final channel, as `form_of` writes it; None: it has none.
    """
    if form is not None:
        return ["start: thought* (call | final)", *_RULES, f"form: {form}"]
    if must:
        return ["start: thought* call", *(rule for rule in _RULES if not rule.startswith("final"))]
    return ["start: (thought | word)* (call | final)", *_RULES, _WORD, "form: TEXT"]


def harmony_head(function: str) -> str:
    """Writes what a call begins with, up to its arguments: who it is to stands before its channel, or behind."""
    to = f" to=functions.{function}"
    before, behind = f'{text(to)} <|channel|> "commentary"', f"<|channel|> {text('commentary' + to)}"
    return f"({before} | {behind}) typed? <|message|>"
