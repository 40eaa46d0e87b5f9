"""Masks and drafts ahead of a reply are those of a fresh copy of its matcher, which is hardly ever made."""

import json
import random

import pytest

from tests.conftest import TINY
from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.grammar import Grammar, Grammars
from trtllm_dflash.text.tokenizer import TextCodec

RECORD = {
    "type": "object",
    "properties": {"number": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}, "the text": {"type": "string"}},
    "required": ["number", "kind"],
    "additionalProperties": False,
}
CODEC = TextCodec.load(TINY / "target", {})
assert CODEC is not None
SIZE = CODEC.backend.get_vocab_size()
BYTES = 4 * -(-SIZE // 32)  # of a mask
ENDS = (CODEC.end_id, 3)
ONE, TWO = CODEC.encode_words("the dog")[:2]
FORMS = [
    ("json_object", None),
    ("json_schema", {"type": "array", "items": RECORD}),
    ("json_schema", {"anyOf": [RECORD, {"type": "string", "maxLength": 9}, {"type": "array", "items": {"$ref": "#"}}]}),
    ("regex", r"(the|a) (cat|dog)s?( and (the|a) (cat|dog)s?)*\."),
    ("choice", ["yes, it is", "yes, it was", "no"]),
    ("grammar", 'start: ("a" X "cat " | "b" X "dog ")*\nX: / [a-z]+ /'),
    ("grammar", '%ignore / +/\nstart: "let" NAME "=" (NAME | /[0-9]+/) ";" start | "end"\nNAME: /[a-z]+/'),
    ("grammar", 'start: t "end"\nt[lazy]: /(.|\\n)*foo/'),
    ("grammar", 'start: (t ";")*\nt[suffix="foo"]: /[a-z ]*/'),
    ("grammar", f'start: (<|im_start|> /[a-z ]*/)+ | (<[{ONE}]> <[{TWO}]> | <[{ONE}]> "q" | <[200-500]> "z")+'),
    ("grammar", "start: (j | /[a-z ]+;/)+\nj: %json " + json.dumps(RECORD)),
    ("grammar", f'start: (<[{ONE}]> <[{TWO}]>)+ (T <[{ONE}]> "x")+\nT: /[a-z ]+/'),
    # These are not rolled back:
    ("grammar", 'start: (t "end")*\nt[stop="foo"]: /[a-z ]*/'),
    ("grammar", 'start: (t ";")*\nt[max_tokens=3]: /[a-z ]*/'),
]


@pytest.fixture(scope="module")
def grammars():
    return Grammars(CODEC.backend, SIZE, ENDS)


class Counted:
    """A reply's matcher, and how many copies were made of it."""

    copies = 0

    def __init__(self, matcher):
        self._matcher = matcher

    def deep_copy(self):
        self.copies += 1
        return self._matcher.deep_copy()

    def __getattr__(self, name):
        return getattr(self._matcher, name)


def counted(grammars, kind, value):
    """A form's grammar, and its matcher."""
    made = grammars.compile(kind, value)
    matcher = Counted(made._matcher)
    return Grammar(matcher, grammars._tokenizer, frozenset(ENDS), made.width), matcher


def fresh(matcher, tokens):
    copy = matcher._matcher.deep_copy()
    if tokens:
        copy.consume_tokens(tokens)
    return copy


def until_end(tokens):
    ends = [place for place, token in enumerate(tokens) if token in ENDS]
    return tokens[: ends[0] + 1] if ends else tokens


def expected_drafts(grammars, matcher, behind, drafts, complete):
    """Drafts as copies allow and complete them, each of which makes one look."""
    taken = until_end(drafts[: fresh(matcher, behind).validate_tokens(drafts)] if drafts else [])
    while complete and len(taken) < len(drafts) and not set(ENDS) & set(taken):
        copy, done = fresh(matcher, [*behind, *taken]), len(taken)
        if copy.is_stopped():
            return [*taken, min(ENDS)]
        forced = copy.compute_ff_tokens() or grammars._tokenizer.tokenize_bytes(copy.compute_ff_bytes()) or [min(ENDS)]
        following = (forced + drafts[done + len(forced) :])[: len(drafts) - done]
        taken = taken + until_end(following[: fresh(matcher, [*behind, *taken]).validate_tokens(following)])
        if len(taken) == done:
            break
    return taken


def expected_masks(matcher, behind, drafts):
    """Masks by copies, each of which makes one; None where that has an error."""
    for row in range(1 + len(drafts)):
        if row and drafts[row - 1] in ENDS:
            yield b"\xff" * BYTES
            continue
        copy = fresh(matcher, [*behind, *drafts[:row]])
        mask = None if copy.is_error() else copy.compute_bitmask()[:BYTES]
        yield None if copy.is_error() else mask


def written(plan):
    masks = plan.masks
    return [masks[at : at + BYTES] for at in range(0, len(masks), BYTES)]


def chosen(chance, mask):
    """A token that a mask allows, seldom an end."""
    allowed = [token for token in range(SIZE) if mask[token // 8] >> token % 8 & 1]
    return chance.choice([token for token in allowed if token not in ENDS and chance.random() < 0.9] or allowed)


def choice(chance, drafts, masks):
    """What a target chooses: drafts that their masks allow, most of them, and a token behind."""
    tokens = []
    for draft, mask in zip([*drafts, -1], masks, strict=True):
        is_right = draft >= 0 and mask[draft // 8] >> draft % 8 & 1 and chance.random() < 0.8
        tokens.append(draft if is_right else chosen(chance, mask))
        if not is_right or draft in ENDS:
            break
    return tokens


def drafted(chance, matcher, behind):
    """Tokens that the grammar allows behind others, of which some may be wrong."""
    copy, drafts = fresh(matcher, behind), []
    while len(drafts) < chance.randrange(9) and not copy.is_stopped():
        mask = copy.compute_bitmask()
        drafts.append(chosen(chance, mask))
        copy.consume_token(drafts[-1])
    if drafts and chance.random() < 0.5:
        drafts[chance.randrange(len(drafts))] = chance.choice([chance.randrange(SIZE), ENDS[0]])
    return drafts + [chance.randrange(SIZE) for _ in range(chance.randrange(3))]


def check(grammars, grammar, matcher, behind, drafts, complete, is_written):
    """Compares a plan with what copies say; returns its masks where it was written."""
    plan = grammar.plan(drafts, behind, complete)
    assert plan.drafts == expected_drafts(grammars, matcher, behind, drafts, complete)
    if not is_written:
        return plan, None
    expected = list(expected_masks(matcher, behind, plan.drafts))
    if expected[0] is None:
        with pytest.raises(RequestError):
            _ = plan.masks
        return plan, None
    masks = written(plan)
    for mask, right in zip(masks, expected, strict=True):
        if right is None:
            assert all(not mask[end // 8] >> end % 8 & 1 for end in ENDS)
        else:
            assert mask == right
    return plan, masks


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_drafts_and_masks_are_those_of_fresh_copies(grammars, form):
    """Whatever was drafted, looked at before, accepted and taken: also replies that go on otherwise than was told."""
    for seed in range(6):
        chance = random.Random(100 * form + seed)
        grammar, matcher = counted(grammars, *FORMS[form])
        behind = []
        for _ in range(20):
            for _ in range(chance.choice([0, 0, 1])):  # what the reply may not go on with
                other = [token for token in drafted(chance, matcher, []) if token not in ENDS]
                if not fresh(matcher, other).is_error():
                    drafts = drafted(chance, matcher, other)
                    check(grammars, grammar, matcher, other, drafts, True, chance.random() < 0.5)
            drafts = drafted(chance, matcher, behind)
            plan, masks = check(grammars, grammar, matcher, behind, drafts, chance.random() < 0.5, True)
            for token in behind:
                grammar.accept(token)
            if masks is None:
                break
            behind = choice(chance, plan.drafts, masks)
            if fresh(matcher, [token for token in behind if token not in ENDS]).is_error():
                break
            if behind[-1] in ENDS:
                assert grammar.plan([], behind) is None
                break
            if chance.random() < 0.5:
                for token in behind:
                    grammar.accept(token)
                behind = []


def test_a_mask_is_not_given_again_behind_other_tokens_of_the_same_kind(grammars):
    """Also where a mask was made between that is of bytes that are forced, which the library does not keep."""
    grammar, matcher = counted(grammars, "grammar", 'start: "z" (" c" A "t" | " d" A "n")+\nA: /[ai]/')
    (first,), (one,), (other,) = (CODEC.encode_words(text) for text in ("z", " c", " d"))
    grammar.accept(first)
    for behind in ([one], [other], [], [one], [], [other]):
        check(grammars, grammar, matcher, behind, [], False, True)


@pytest.mark.parametrize("complete", [False, True])
def test_a_long_reply_is_copied_no_oftener_than_a_short_one(grammars, complete):
    grammar, matcher = counted(grammars, "grammar", 'start: j ";" start\nj: %json ' + json.dumps(RECORD))
    chance, behind = random.Random(5), []
    for _ in range(400):
        plan = grammar.plan(drafted(chance, matcher, behind), behind, complete)
        masks = written(plan)
        for token in behind:
            grammar.accept(token)
        behind = choice(chance, plan.drafts, masks)
    assert matcher.copies < 10  # one at first, and where a mask would have to be gone back over
