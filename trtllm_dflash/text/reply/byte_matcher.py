"""Matchers of grammars that read bytes: for what is asked of a grammar itself, and not of an engine's tokens."""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


def byte_matcher(grammar: str) -> "LLMatcher":
    """Makes a matcher of a grammar, in a form that llguidance reads; a token is a byte."""
    from llguidance import LLMatcher  # what few requests need

    return LLMatcher(_bytes(), grammar, log_level=0)


@lru_cache
def _bytes() -> "LLTokenizer":
    """Makes the tokenizer once: that takes ten times as long as a small grammar's matcher."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
