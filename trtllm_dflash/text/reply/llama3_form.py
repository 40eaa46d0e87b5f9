"""Forms of replies that may call functions in Llama's format instead: calls are JSON, and so may a form be."""

import json
from collections.abc import Iterable

from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.form_size import check_size
from trtllm_dflash.text.reply.byte_matcher import byte_matcher


def opening(function: str) -> tuple[str, ...]:
    """Writes what a call begins with that is held to its grammar, up to its arguments.

    In pieces, as the library has those of JSON: where texts begin alike, it takes the longest piece of either.
    """
    return ("{", '"name"', ": ", json.dumps(function), ", ", '"parameters"', ": ")


def check_apart(kind: str, form: str, functions: Iterable[str]) -> None:
    """Refuses a form of which a text may begin as a call of these functions does.

    Args:
        kind: that of `Structured`.
        form: as `grammar_terms.form_of` writes it.

    Raises:
        RequestError: it may, or is too long.
    """
    check_size("grammar", form)
    matcher = byte_matcher(f"%llguidance {{}}\nstart: form\nform: {form}\n")
    # A text or an expression is one piece, which calls have none of in common.
    beginnings = ["".join(opening(each)) + "{" for each in functions] if kind.startswith("json") else ["{"]
    for begun in beginnings:
        if matcher.validate_tokens(list(begun.encode())) == len(begun):
            reason = f"beside tools of this format a reply that is no call must not begin with {begun}"
            raise RequestError(f"{reason}, as this form lets it", "structured")
