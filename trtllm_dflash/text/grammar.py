"""Grammars that replies are held to, by llguidance: masks of the tokens that may come next, and tokens that must.

A mask is W 32-bit words, W = ceil(V / 32), with a bit for each token.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import addressof, c_uint32, memset
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from trtllm_dflash.errors import ReplyError, RequestError
from trtllm_dflash.text.form_size import FIELD, check_size, source_of
from trtllm_dflash.text.lookahead import Lookahead
from trtllm_dflash.text.reply.grammar_terms import text
from trtllm_dflash.text.reply.held_schema import held, inner_schemas
from trtllm_dflash.text.reply.json_space import OBJECT_SPACE, SCHEMA_SPACE, as_object
from trtllm_dflash.text.reply.schema_parts import SHARED

#: In the library's error of a token that is not allowed; its others are of grammars that grew too complex.
_NOT_ALLOWED = "doesn't satisfy the grammar"

#: Steps that `Grammar.strays` looks back on.
_STRAY_STEPS = 8

#: Schemas inside a schema that are looked at for the place of an error.
_MOST_PLACES = 64

#: Compiled grammars that are kept: requests repeat them, and so does each choice of a request.
_MOST_KEPT = 8


@dataclass(frozen=True)
class Plan:
    """Drafts of a step that a grammar allows, whose rows' masks are made when they are written.

    Attributes:
        drafts: tokens, at most as many as were drafted.
        is_completed: whether others stand in for some that were drafted.
        width: 32-bit words of a mask.
    """

    drafts: list[int]
    is_completed: bool
    width: int
    end_ids: frozenset[int] = field(compare=False)
    ahead: Lookahead = field(compare=False)
    behind: Sequence[int] = field(compare=False)  # tokens of the reply that the drafts stand behind
    left_open: Callable[[str], None] = field(compare=False)  # told why rows may choose what the grammar forbids

    @property
    def masks(self) -> bytes:
        """Makes the masks of the bonus token's row and each draft's: [1 + drafts, W] 32-bit words."""
        words = (c_uint32 * (self.width * (1 + len(self.drafts))))()
        self.write(addressof(words), 1 + len(self.drafts))
        return bytes(words)

    def write(self, address: int, rows: int) -> None:
        """Writes the masks of so many rows: [rows, W] 32-bit words. Those behind the drafts allow all tokens.

        Where the grammar grows too complex behind a draft, rows from there on may choose anything but an end: if they
        are reached, the reply fails.

        Raises:
            RequestError: it grew so before any draft.
        """
        size, known = 4 * self.width, min(rows, 1 + len(self.drafts))
        if known > 1 and self.drafts[known - 2] in self.end_ids:
            known -= 1
        allow_all(address + known * size, rows - known, self.width)
        problems: dict[int, str] = {}
        # Row by row, by this thread: a pool takes longer to wake than a few slots' masks to be made.
        for row in reversed(range(known)) if self.ahead.rolls_back else range(known):
            matcher = self.ahead.behind([*self.behind, *self.drafts[:row]])
            if not matcher.is_error():
                self.ahead.write_mask(address + row * size, size)
            if matcher.is_error():
                problems[row] = _problem(matcher)
                self._forbid_ends(address + row * size)
        if 0 in problems:
            raise _too_complex(problems[0])
        if problems:
            self.left_open(problems[max(problems)])

    def _forbid_ends(self, address: int) -> None:
        """Writes the mask of a row that may choose all but an end."""
        allow_all(address, 1, self.width)
        words = (c_uint32 * self.width).from_address(address)
        for token in self.end_ids:
            words[token // 32] &= ~(1 << token % 32)


def allow_all(address: int, rows: int, width: int) -> None:
    """Writes masks of rows that may choose any token: [rows, width] 32-bit words."""
    memset(address, 0xFF, 4 * rows * width)


class Grammar:
    """The state of one reply: where it stands in its grammar.

    Attributes:
        width: 32-bit words of a mask.
        strays: share of the reply's last steps, about, in which it came to a draft that the grammar forbids.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, end_ids: frozenset[int], words: int) -> None:
        self._matcher = matcher
        self._ahead = Lookahead(matcher)
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._allowed = math.inf  # drafts of the last step before the first one that is forbidden
        self._opened: str | None = None  # why rows were left open to what it forbids
        self.width = words
        self.strays = 0.2  # the first drafts of a reply that a form changes may well stray

    def accept(self, token: int) -> None:
        """Goes on behind a token of the reply.

        Raises:
            ReplyError: it is not allowed there.
            RequestError: the grammar grew too complex to follow, or to choose this token by it.
        """
        if token in self._end_ids:
            return
        if self._matcher.consume_token(token):
            self._ahead.accept(token)
            return
        problem = _problem(self._matcher)
        if _NOT_ALLOWED in problem and self._opened is None:
            raise ReplyError(f"a token left the reply's grammar: {_one_line(problem)}")
        raise _too_complex(self._opened or problem)

    def plan(self, drafts: list[int], behind: Sequence[int] = (), complete: bool = True) -> Plan | None:
        """Checks drafts that stand behind tokens that the reply goes on with; None where those end it.

        The reply stays where it is.

        Args:
            behind: what the last step gives the reply, if that has not taken it yet.
            complete: whether what the grammar forces is to stand in for drafts that it forbids.

        Raises:
            RequestError: the grammar grew too complex to follow.
        """
        if self._matcher.is_error():
            raise _too_complex(_problem(self._matcher))
        if not self._end_ids.isdisjoint(behind):
            return None
        # Not the reply's own: an error is for good, and drafts may be wrong.
        ahead = self._ahead.behind(behind) if drafts or behind else self._matcher
        if ahead.is_error():
            raise _too_complex(_problem(ahead))
        taken = _until_end(drafts[: ahead.validate_tokens(drafts)], self._end_ids) if drafts else []
        is_cut = len(taken) < len(drafts) and self._end_ids.isdisjoint(taken)
        if behind:
            self.strays += ((len(behind) > self._allowed) - self.strays) / _STRAY_STEPS
        self._allowed = len(taken) if is_cut else math.inf
        completed = self._completed(behind, taken, drafts) if is_cut and complete else taken
        return Plan(
            completed, completed != taken, self.width, self._end_ids, self._ahead, tuple(behind), self._leave_open
        )

    def _leave_open(self, problem: str) -> None:
        self._opened = problem

    def _completed(self, behind: Sequence[int], taken: list[int], drafts: list[int]) -> list[int]:
        """Completes the drafts that are allowed by what must or may well stand behind them, and by further drafts."""
        while (done := len(taken)) < len(drafts):
            ahead = self._ahead.behind([*behind, *taken])
            if ahead.is_stopped():
                return taken + sorted(self._end_ids)[:1]
            # Bytes may be forced where tokens are not, for longer tokens begin with them too: a likely guess.
            forced = ahead.compute_ff_tokens() or self._tokenizer.tokenize_bytes(ahead.compute_ff_bytes())
            forced = forced or sorted(self._end_ids)[:1]  # where nothing is forced, perhaps the end is next
            following = (forced + drafts[done + len(forced) :])[: len(drafts) - done]
            taken = taken + _until_end(following[: ahead.validate_tokens(following)], self._end_ids)
            if len(taken) == done or ahead.is_error() or not self._end_ids.isdisjoint(taken):
                break
        return taken


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
        described = json.loads(tokenizer.to_str())
        self._specials = _hide_specials(described, vocabulary)
        written = json.dumps(described)
        self._tokenizer = LLTokenizer(written, n_vocab=vocabulary, eos_token=sorted(self._end_ids))
        self._kept: dict[tuple[str, str], LLMatcher] = {}  # at its beginning each, the last used behind
        self._guard = Lock()  # of those: requests may come from several threads

    def compile(self, kind: str, value: Any) -> Grammar:
        """Compiles a grammar; kind and value are those of `Structured`.

        Raises:
            RequestError: it is too long, or wrong; names the place.
        """
        source = source_of(kind, value)
        check_size(kind, source)
        with self._guard:
            matcher = self._kept.pop((kind, source), None)
        matcher = matcher or self._compiled(kind, value, source)
        own = matcher.deep_copy()
        with self._guard:
            self._kept[kind, source] = matcher
            if len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return Grammar(own, self._tokenizer, self._end_ids, self._words)

    def _compiled(self, kind: str, value: Any, source: str) -> LLMatcher:
        try:
            matcher = self._matcher(kind, value)
        except RecursionError:
            raise RequestError(f"{kind}: it is nested too deeply", FIELD) from None
        except ValueError as error:  # of the JSON, which the library reads by itself
            raise RequestError(f"{kind}: {_one_line(str(error))}", FIELD) from None
        problem = matcher.get_error()
        if problem:
            place = ""
            if kind == "json_schema":
                place, problem = self._place(value, value, problem, "#", iter(range(_MOST_PLACES)))
            elif kind == "grammar":
                place, problem = self._place_in_rule(source, problem)
            raise RequestError(f"{place or kind}: {_one_line(problem)}", FIELD)
        return matcher

    def _matcher(self, kind: str, value: Any) -> LLMatcher:
        if kind == "grammar":
            value = _TERM.sub(self._by_id, value)
        return LLMatcher(self._tokenizer, _SOURCES[kind](value), log_level=0)

    def _by_id(self, term: re.Match[str]) -> str:
        """Writes a special token of a grammar by its number; texts, expressions and remarks stay as they are."""
        return f"<[{self._specials[term[0]]}]>" if term[0] in self._specials else term[0]

    def _place_in_rule(self, source: str, error: str) -> tuple[str, str]:
        """Finds what is wrong with a JSON schema in a grammar: its rule and the place in it, and what it is."""
        found = _OF_JSON.search(error)
        if found is None:
            return "", error
        rule, _, schema = source.splitlines()[int(found[1]) - 1].partition(": %json ")
        if not schema:
            return "", error
        try:
            root = json.loads(schema)
        except ValueError:  # not on one line, or not alone on it
            return rule, found[2]
        place, problem = self._place(root, root, found[2], "#", iter(range(_MOST_PLACES)))
        return f"{rule}: {place}", problem

    def _place(self, root: Any, schema: Any, error: str, pointer: str, tries: Iterator[int]) -> tuple[str, str]:
        """Finds the innermost schema that is wrong by itself: where it is, and what is wrong with it.

        Args:
            tries: one for each schema that may still be looked at; others wait for their requests to be taken.
        """
        shared = {name: root[name] for name in SHARED if isinstance(root, Mapping) and name in root}
        inners = sorted(islice(inner_schemas(schema), _MOST_PLACES), key=_refers)  # what these refer to comes first
        for (place, inner), _ in zip(inners, tries, strict=False):
            if isinstance(inner, bool):
                continue  # never wrong, and nothing that the library takes alone
            if not isinstance(inner, dict):
                return f"{pointer}/{place}", "a schema is an object, true or false"
            problem: str = self._matcher("json_schema", {**shared, **inner}).get_error()
            if problem:
                return self._place(root, inner, problem, f"{pointer}/{place}", tries)
        return pointer, error


#: In a grammar: a text, a remark or an expression, in which nothing is a special token; and what may be one. A text or
#: an expression that is not closed, which the library refuses, is one too: it would be read again from each mark in it.
_TERM = re.compile(r'"(?:[^"\\]|\\.)*"?|(?://|#)[^\n]*|/(?:[^/\\]|\\.)+/?|<[^\s"<>]+>')

#: The library's error of a JSON schema in a grammar: the line, and what is wrong.
_OF_JSON = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*)")

_SOURCES = {
    "json_object": lambda _: LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=OBJECT_SPACE),
    "json_schema": lambda schema: LLMatcher.grammar_from_json_schema(
        json.dumps(held(as_object(schema))), overrides=SCHEMA_SPACE
    ),
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda texts: LLMatcher.grammar_from_lark("start: " + " | ".join(map(text, texts))),
    "grammar": LLMatcher.grammar_from_lark,
}


def _hide_specials(tokenizer: dict[str, Any], vocabulary: int) -> dict[str, int]:
    """Gives the special tokens of a tokenizer's JSON names that no text has: texts that are forced stay texts then.

    Those that the model has no numbers for go. Returns the numbers of the others, by their own names.
    """
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < vocabulary]
    specials = {token["content"]: token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    hidden = {name: f"\ue000{number}\ue000" for name, number in specials.items()}
    for token in tokenizer["added_tokens"]:
        token["content"] = hidden.get(token["content"], token["content"])
    known = tokenizer["model"].get("vocab")
    if isinstance(known, dict):
        tokenizer["model"]["vocab"] = {hidden.get(name, name): number for name, number in known.items()}
    elif isinstance(known, list):  # with the probability of each
        tokenizer["model"]["vocab"] = [[hidden.get(name, name), chance] for name, chance in known]
    return specials


def _refers(place: tuple[str, Any]) -> bool:
    return isinstance(place[1], dict) and "$ref" in place[1]


def _until_end(tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """Takes tokens up to and with the first that ends a reply."""
    ends = (place for place, token in enumerate(tokens) if token in end_ids)
    return tokens[: next(ends, len(tokens)) + 1]


def _problem(matcher: LLMatcher) -> str:
    """Returns a matcher's error without its state and the whole grammar, which follow it."""
    error: str = matcher.get_error()
    return error.partition("<state>")[0]


def _too_complex(problem: str) -> RequestError:
    why = "no text would end it" if problem.startswith("NoExtension") else _one_line(problem)
    return RequestError(f"cannot be followed: {why}", FIELD)


def _one_line(error: str) -> str:
    """Shortens an error of several lines, which shows the place by a mark beneath it."""
    lines = [line.strip() for line in error.splitlines() if line.strip(" ^|")]
    last = [line for line in lines if line.startswith("error:")]
    return " ".join(last or lines)[:200]
