"""Grammars of calls: what they let through is read as calls whose arguments keep to the function's schema."""

import random

import pytest
from tokenizers import Tokenizer

from tests.conftest import TINY
from tests.test_reply_parsers import calls_of, parsed, text_of, written
from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.grammar import Grammars
from trtllm_dflash.text.reply.call_grammar import Callee, call_grammar

FORMATS = ["qwen3", "qwen3-coder", "llama3"]
SCHEMAS = {
    "book": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where to."},
            "class": {"enum": ["first", "second"]},
            "seats": {"type": "integer", "minimum": 1, "maximum": 9},
            "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "maxItems": 2},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "class", "seats", "stops"],
        "additionalProperties": False,
        "$defs": {"stop": {"type": "object", "properties": {"at": {"enum": [1, 2]}}, "required": ["at"]}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
CALLEES = [Callee(name, schema, strict=True) for name, schema in SCHEMAS.items()]
BOOKED = {"city": "Rome\n<b>", "class": "first", "seats": 3, "stops": [{"at": 1}, {"at": 2}]}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, tokenizer.get_vocab_size(), [2])


def allows(grammars, tokenizer, source, text):
    """Whether a grammar allows a text and no more."""
    grammar = grammars.compile("grammar", source)
    for token in [*tokenizer.encode(text, add_special_tokens=False).ids, 2]:
        if not grammar.plan([]).masks[token // 8] >> token % 8 & 1:
            return False
        if token != 2:
            grammar.accept(token)
    return True


@pytest.mark.parametrize("chat_format", FORMATS)
def test_calls_as_templates_write_them_are_allowed_and_others_are_not(chat_format, grammars, tokenizer):
    def ok(text, **how):
        return allows(grammars, tokenizer, call_grammar(chat_format, CALLEES, **how), text)

    booked, now = written(chat_format, "book", BOOKED), written(chat_format, "now", {})
    separator = "; " if chat_format == "llama3" else "\n"
    must = {"must": True}
    assert ok(booked, **must) and ok(now, **must) and ok(booked + separator + now, **must)
    assert not ok(booked + separator + now, must=True, parallel=False)
    assert not ok("Hello.", **must) and not ok("", **must)
    for change in ({"class": "third"}, {"seats": 10}, {"stops": [{"at": 3}]}, {"more": 1}):
        assert not ok(written(chat_format, "book", {**BOOKED, **change}), **must)
        assert not ok(written(chat_format, "book", {**BOOKED, **change}), must=False)
    assert not ok(written(chat_format, "now", {"x": 1}), **must)
    assert not ok(written(chat_format, "never", {}), **must)
    may = {"must": False}
    assert ok("Hello.\n", **may) and ok(booked, **may) and ok(booked + separator + now, **may)
    if chat_format != "llama3":
        assert ok(f"I book.\n{booked}\n{now}\nDone.", **may)
        assert ok(f"Hm.\n</think>\n\n{now}", must=True, thinking=True)


@pytest.mark.parametrize("chat_format", FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_allowed_is_read_as_calls_that_keep_to_their_schemas(chat_format, seed, grammars, tokenizer):
    grammar = grammars.compile("grammar", call_grammar(chat_format, CALLEES, must=True))
    draw, tokens, planned = random.Random(seed), [], []
    end = tokenizer.encode("\n</parameter>\n" if chat_format == "qwen3-coder" else '"', add_special_tokens=False).ids
    while True:
        mask = int.from_bytes(grammar.plan([]).masks, "little")
        allowed = [token for token in range(tokenizer.get_vocab_size()) if mask >> token & 1]
        if 2 in allowed and (len(tokens) > 50 or allowed == [2]):
            break
        if not planned and len(allowed) > 100 and draw.random() < 0.3:
            planned = list(end)  # a text ends: random tokens would write on in it
        planned = planned if planned[:1] and planned[0] in allowed else []
        token = planned.pop(0) if planned else draw.choice([token for token in allowed if token != 2])
        grammar.accept(token)
        tokens.append(token)
    parts = parsed(chat_format, list(tokenizer.decode(tokens)), SCHEMAS)
    calls = calls_of(parts)
    assert text_of(parts) == ""
    assert calls
    for name, arguments in calls:
        assert keeps(name, arguments)


def keeps(name, given):
    """Whether arguments keep to the schema of that function."""
    if name == "now":
        return given == {}
    stops = given["stops"]
    return (
        given.keys() - {"note"} == {"city", "class", "seats", "stops"}
        and isinstance(given["city"], str)
        and given["class"] in ("first", "second")
        and 1 <= given["seats"] <= 9
        and len(stops) <= 2
        and all(stop["at"] in (1, 2) for stop in stops)
        and isinstance(given.get("note"), str | None)
    )


@pytest.mark.parametrize(
    ("chat_format", "schema", "says"),
    [
        ("harmony", {}, "calls of gpt-oss cannot be held to a form yet"),
        (
            "qwen3-coder",
            {"properties": {"a": {"type": "string", "pattern": "b"}}},
            "'f': #/properties/a cannot be",
        ),
        ("qwen3-coder", {"properties": {"a": {"type": ["string", "array"]}}}, "'f': #/properties/a cannot be"),
        ("qwen3-coder", {"properties": []}, "'f': #/properties is no JSON schema's"),
        ("qwen3-coder", {"required": ["a"]}, "'f': #/required cannot be held"),
        ("qwen3-coder", {"required": 5}, "'f': #/required is no JSON schema's"),
        ("qwen3-coder", {"properties": {"a>b": {}}}, "cannot write a parameter named 'a>b'"),
        ("qwen3-coder", {"anyOf": []}, "'f': #/anyOf cannot be held to in this format"),
    ],
)
def test_what_cannot_be_held_is_refused(chat_format, schema, says):
    with pytest.raises(RequestError, match=says):
        call_grammar(chat_format, [Callee("f", schema, strict=True)], must=False)


def test_what_is_not_strict_is_held_as_far_as_can_be(grammars, tokenizer):
    schema = {"properties": {"a": {"type": "string", "pattern": "b"}, "n": {"not": {"const": 1}, "type": "integer"}}}
    for chat_format in FORMATS:
        source = call_grammar(chat_format, [Callee("f", schema, strict=False)], must=True)
        assert allows(grammars, tokenizer, source, written(chat_format, "f", {"a": "b", "n": 2}))
