"""Grammars that replies are held to, by llguidance: masks of the tokens that may come next, and tokens that must.

A mask is W 32-bit words, W = ceil(V / 32), with a bit for each token.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from trtllm_dflash.errors import EngineError, RequestError

#: The field of a request that a grammar comes from.
FIELD = "structured"

#: Characters of a schema, expression or grammar.
LONGEST = 1 << 16

#: In the library's error of a token that is not allowed; its others are of grammars that grew too complex.
_NOT_ALLOWED = "doesn't satisfy the grammar"

#: Space in JSON objects without a schema, where there is any: a space, or a line's end and what indents the next one.
#: Where JSON's whole space is allowed, small models fill replies with it.
_OBJECT_SPACE = {"whitespace_pattern": r" |\n {0,32}|\n\t{1,16}"}

#: What is held to a schema is one line, as `json.dumps` writes it: then all but the values is forced.
_SCHEMA_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

#: Schemas inside a schema that are looked at for the place of an error.
_MOST_PLACES = 64

#: Places of schemas inside a schema: by name, in a list, or alone.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")


@dataclass(frozen=True)
class Plan:
    """Drafts of a step that a grammar allows, and the masks of their rows.

    Attributes:
        drafts: tokens, at most as many as were drafted. One that the grammar forces stands in for the draft there.
        masks: of the bonus token's row and each draft's, [1 + drafts, W] 32-bit words.
    """

    drafts: list[int]
    masks: bytes


class Grammar:
    """The state of one reply: where it stands in its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, end_ids: frozenset[int], words: int) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._size = 4 * words

    def accept(self, token: int) -> None:
        """Goes on behind a token of the reply.

        Raises:
            EngineError: it is not allowed there.
            RequestError: the grammar grew too complex to follow.
        """
        if token in self._end_ids or self._matcher.consume_token(token):
            return
        problem = _problem(self._matcher)
        if _NOT_ALLOWED in problem:
            raise EngineError(f"a token left the reply's grammar: {_one_line(problem)}")
        raise _too_complex(problem)

    def plan(self, drafts: list[int]) -> Plan:
        """Checks the drafts that follow the reply so far, and makes the masks of their rows.

        Raises:
            RequestError: the grammar grew too complex to follow, before any draft: behind one, that ends the drafts.
        """
        taken: list[int] = []
        masks = [self._compute_mask(self._matcher)]
        if self._matcher.is_error():
            raise _too_complex(_problem(self._matcher))
        ahead = self._matcher.deep_copy() if drafts else self._matcher  # an error is for good, and drafts may be wrong
        forced: list[int] = []
        while len(taken) < len(drafts):
            mask = masks[-1]
            forced = forced or ahead.compute_ff_tokens() or _only(mask)
            token = forced.pop(0) if forced else drafts[len(taken)]
            if not _allows(mask, token):
                # Bytes may be forced where tokens are not, for longer tokens begin with them too: a likely guess.
                forced = self._tokenizer.tokenize_bytes(ahead.compute_ff_bytes())
                if not forced or not _allows(mask, forced[0]):
                    break
                token = forced.pop(0)
            if token in self._end_ids:
                taken.append(token)
                masks.append(b"\xff" * self._size)  # nobody reads what is chosen behind the end
                break
            ahead.consume_token(token)
            mask = self._compute_mask(ahead)
            if ahead.is_error():
                break
            taken.append(token)
            masks.append(mask)
        return Plan(taken, b"".join(masks))

    def _compute_mask(self, matcher: LLMatcher) -> bytes:
        mask: bytes = matcher.compute_bitmask()[: self._size]
        return mask


class Grammars:
    """Compiles grammars for an engine's tokens.

    Args:
        tokenizer: the engine's.
        vocabulary: its tokens, those included that the tokenizer does not know.
        end_ids: tokens that may end a reply where its grammar does.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_ids: Iterable[int]) -> None:
        self._end_ids = frozenset(end_ids)
        self._words = -(-vocabulary // 32)
        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocabulary, eos_token=sorted(self._end_ids))

    def compile(self, kind: str, value: Any) -> Grammar:
        """Compiles a grammar; kind and value are those of `Structured`.

        Raises:
            RequestError: it is too long, or wrong; names the place.
        """
        try:
            source = value if isinstance(value, str) else json.dumps(value)
        except RecursionError:
            raise RequestError(f"{kind}: it is nested too deeply", FIELD) from None
        if len(source) > LONGEST:
            raise RequestError(f"has {len(source)} characters; at most {LONGEST} are taken", FIELD)
        try:
            matcher = self._matcher(kind, value)
        except ValueError as error:  # of the JSON, which the library reads by itself
            raise RequestError(f"{kind}: {_one_line(str(error))}", FIELD) from None
        problem = matcher.get_error()
        if problem:
            place = ""
            if kind == "json_schema":
                place, problem = self._place(value, value, problem, "#", iter(range(_MOST_PLACES)))
            raise RequestError(f"{place or kind}: {_one_line(problem)}", FIELD)
        return Grammar(matcher, self._tokenizer, self._end_ids, self._words)

    def _matcher(self, kind: str, value: Any) -> LLMatcher:
        return LLMatcher(self._tokenizer, _SOURCES[kind](value), log_level=0)

    def _place(self, root: Any, schema: Any, error: str, pointer: str, tries: Iterator[int]) -> tuple[str, str]:
        """Finds the innermost schema that is wrong by itself: where it is, and what is wrong with it.

        Args:
            tries: one for each schema that may still be looked at; others wait for their requests to be taken.
        """
        shared = {name: root[name] for name in ("$defs", "definitions") if isinstance(root, Mapping) and name in root}
        inners = sorted(islice(_inner_schemas(schema), _MOST_PLACES), key=_refers)  # what these refer to comes first
        for (place, inner), _ in zip(inners, tries, strict=False):
            if not isinstance(inner, (dict, bool)):
                return f"{pointer}/{place}", "a schema is an object, true or false"
            alone = {**shared, **inner} if isinstance(inner, dict) else inner
            problem: str = self._matcher("json_schema", alone).get_error()
            if problem:
                return self._place(root, inner, problem, f"{pointer}/{place}", tries)
        return pointer, error


_SOURCES = {
    "json_object": lambda _: LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_OBJECT_SPACE),
    "json_schema": lambda schema: LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_SCHEMA_SPACE),
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda texts: LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    ),
    "grammar": LLMatcher.grammar_from_lark,
}


def _inner_schemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Lists the schemas inside a schema, with the places where they are."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from ((f"{key}/{name}", inner) for name, inner in value.items())
        elif key in _LISTED and isinstance(value, list):
            yield from ((f"{key}/{number}", inner) for number, inner in enumerate(value))
        elif key in _ALONE:
            yield key, value


def _refers(place: tuple[str, Any]) -> bool:
    return isinstance(place[1], dict) and "$ref" in place[1]


def _allows(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


def _only(mask: bytes) -> list[int]:
    """Lists the one token that a mask allows; none where it allows several."""
    bits = int.from_bytes(mask, "little")
    return [bits.bit_length() - 1] if bits and not bits & (bits - 1) else []


def _problem(matcher: LLMatcher) -> str:
    """Returns a matcher's error without its state and the whole grammar, which follow it."""
    error: str = matcher.get_error()
    return error.partition("<state>")[0]


def _too_complex(problem: str) -> RequestError:
    return RequestError(f"cannot be followed: {_one_line(problem)}", FIELD)


def _one_line(error: str) -> str:
    """Shortens an error of several lines, which shows the place by a mark beneath it."""
    lines = [line.strip() for line in error.splitlines() if line.strip(" ^|")]
    last = [line for line in lines if line.startswith("error:")]
    return " ".join(last or lines)[:200]
