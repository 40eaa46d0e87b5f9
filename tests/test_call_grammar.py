"""Grammars of calls: what they let through is read as calls whose arguments keep to the function's schema."""

import cProfile
import json
import random

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.conftest import TINY
from tests.test_reply_parsers import calls_of, parsed, text_of, together, written
from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.grammar import Grammars
from trtllm_dflash.text.reply import byte_matcher, held_schema
from trtllm_dflash.text.reply.call_grammar import call_grammar
from trtllm_dflash.text.reply.formats import markers_of
from trtllm_dflash.text.reply.grammar_terms import Callee, form_of
from trtllm_dflash.text.reply.llama3_form import check_apart
from trtllm_dflash.text.reply.schema_parts import standing_alone

FORMATS = ["qwen3", "qwen3-coder", "llama3", "gemma4", "minimax-m2", "kimi-k2"]
#: Those whose markers are special tokens of some tokenizers; each with such a tokenizer too.
MARKED = ["gemma4", "minimax-m2", "kimi-k2"]
ALL = [(name, False) for name in FORMATS] + [(name, True) for name in MARKED]
STOP = {
    "type": "object",
    "properties": {"at": {"enum": [1, 2]}},
    "required": ["at"],
    "additionalProperties": False,  # a name that ends the argument's tag would end the argument
}
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
        "$defs": {"stop": STOP},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
#: As a call of Llama's begins that has no arguments.
NAMED = {"type": "object", "properties": {"name": {"enum": ["book"]}}, "additionalProperties": False}
CALLEES = [Callee(name, schema, strict=True) for name, schema in SCHEMAS.items()]
BOOKED = {"city": "Rome\n<b>", "class": "first", "seats": 3, "stops": [{"at": 1}, {"at": 2}]}


class Vocabulary:
    """A tokenizer, with or without special tokens for a format's markers, and grammars over its tokens."""

    def __init__(self, chat_format=None, special=False):
        self.tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
        self.special = {}
        if special:
            markers = markers_of(chat_format)
            self.tokenizer.add_special_tokens(
                [AddedToken(marker, special=True, normalized=False) for marker in markers]
            )
            self.special = {marker: self.tokenizer.token_to_id(marker) for marker in markers}
        self.size = self.tokenizer.get_vocab_size()
        self.grammars = Grammars(self.tokenizer, self.size, [2])

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def allows(self, source, text):
        """Whether a grammar allows a text and no more."""
        grammar = self.grammars.compile("grammar", source)
        for token in [*self.ids(text), 2]:
            if not grammar.plan([]).masks[token // 8] >> token % 8 & 1:
                return False
            if token != 2:
                grammar.accept(token)
        return True


@pytest.fixture(scope="module")
def vocabulary():
    made = {}

    def of(chat_format, special=False):
        key = (chat_format, special) if special else None
        if key not in made:
            made[key] = Vocabulary(chat_format, special)
        return made[key]

    return of


@pytest.mark.parametrize(("chat_format", "special"), ALL)
def test_calls_as_templates_write_them_are_allowed_and_others_are_not(chat_format, special, vocabulary):
    words = vocabulary(chat_format, special)

    def ok(text, **how):
        return words.allows(call_grammar(chat_format, CALLEES, **how, special=words.special), text)

    booked, now = written(chat_format, "book", BOOKED), written(chat_format, "now", {})
    both = together(chat_format, [("book", BOOKED), ("now", {})])
    must = {"must": True}
    assert ok(booked, **must) and ok(now, **must) and ok(both, **must)
    assert not ok(both, must=True, parallel=False)
    assert not ok("Hello.", **must) and not ok("", **must)
    for change in ({"class": "third"}, {"seats": 10}, {"stops": [{"at": 3}]}, {"more": 1}):
        assert not ok(written(chat_format, "book", {**BOOKED, **change}), **must)
        assert not ok(written(chat_format, "book", {**BOOKED, **change}), must=False)
    assert not ok(written(chat_format, "now", {"x": 1}), **must)
    assert not ok(written(chat_format, "never", {}), **must)
    may = {"must": False}
    assert ok("Hello.\n", **may) and ok(booked, **may) and ok(both, **may)
    if chat_format == "gemma4":
        thought = f"<|channel>thought\nHm.\n<channel|>{now}"
        assert ok(thought, must=True, thinking=True) and not ok(thought, **must) and ok(now, must=True, thinking=True)
        assert ok(f"<|channel>thought\nHm.\n<channel|>I book.\n{booked}{now}", **may)
    elif chat_format != "llama3":
        between = "\n" if chat_format.startswith("qwen") else ""
        assert ok(f"I book.\n{booked}\n{now}\nDone.", **may)
        assert ok(f"Hm.</think>I book.\n{booked}{between}{now}", must=False, thinking=True)
    if chat_format != "gemma4":
        blank = "" if chat_format == "kimi-k2" else "\n\n"
        assert ok(f"Hm.\n</think>{blank}{now}", must=True, thinking=True)
        assert not ok(now, must=True, thinking=True)


@pytest.mark.parametrize(("chat_format", "special"), ALL)
def test_a_reply_that_calls_nothing_may_have_a_form(chat_format, special, vocabulary):
    words = vocabulary(chat_format, special)
    for kind, value, said in (
        ("json_schema", {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a": 5}'),
        ("json_schema", NAMED, '{"name": "book"}'),
        ("json_schema", {"type": "array", "items": {"type": "integer"}}, "[1, 2]"),
        ("json_object", None, '{"a":{}}'),
        ("choice", ["yes", "no"], "no"),
        ("regex", "a/b+", "a/bb"),
    ):
        if (chat_format, kind) == ("llama3", "json_object"):
            with pytest.raises(RequestError, match=r'begin with .*"book", "parameters": {, as'):
                check_apart(kind, form_of(kind, value), SCHEMAS)
            continue
        how = {"must": True, "special": words.special, "form": form_of(kind, value)}
        source = call_grammar(chat_format, CALLEES, **how)
        parts = parsed(chat_format, list(said), SCHEMAS, beside_form=list(SCHEMAS))
        assert (text_of(parts), calls_of(parts)) == (said, [])
        assert words.allows(source, said) and words.allows(source, written(chat_format, "book", BOOKED))
        assert not words.allows(source, "Hello.") and not words.allows(source, said + "!")
        assert not words.allows(source, written(chat_format, "book", {**BOOKED, "seats": 10}))


@pytest.mark.principal("qwen3-coder-1", "gemma4-1", "kimi-k2-1000", "llama3-7")
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("chat_format", FORMATS)
def test_a_form_may_have_markup_in_its_texts(chat_format, size, vocabulary):
    """A model that is asked how it calls functions writes that: with tools beside the form, and without."""
    schema = {"properties": {"a": {"type": "string"}}, "required": ["a"]}
    now = written(chat_format, "now", {})
    said = json.dumps({"a": f"{together(chat_format, [('now', {})])} {now[-30:]} <|channel>thought<channel|> </think>"})
    source = call_grammar(chat_format, CALLEES, must=True, form=form_of("json_schema", schema))
    assert vocabulary(chat_format).allows(source, said)
    pieces = [said[at : at + size] for at in range(0, len(said), size)]
    for functions in (SCHEMAS, None):
        parts = parsed(chat_format, pieces, functions, beside_form=list(functions or ()), held=True)
        assert (text_of(parts), calls_of(parts)) == (said, [])


@pytest.mark.parametrize(("chat_format", "special"), ALL)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_allowed_is_read_as_calls_that_keep_to_their_schemas(chat_format, special, seed, vocabulary):
    words = vocabulary(chat_format, special)
    grammar = words.grammars.compile("grammar", call_grammar(chat_format, CALLEES, must=True, special=words.special))
    draw, tokens, planned = random.Random(seed), [], []
    endings = {"qwen3-coder": "\n</parameter>\n", "minimax-m2": "</parameter>\n", "gemma4": '<|"|>'}
    end = words.ids(endings.get(chat_format, '"'))
    while True:
        mask = int.from_bytes(grammar.plan([]).masks, "little")
        allowed = [token for token in range(words.size) if mask >> token & 1]
        if 2 in allowed and (len(tokens) > 50 or allowed == [2]):
            break
        if not planned and len(allowed) > 100 and draw.random() < 0.3:
            planned = list(end)  # a text ends: random tokens would write on in it
        planned = planned if planned[:1] and planned[0] in allowed else []
        token = planned.pop(0) if planned else draw.choice([token for token in allowed if token != 2])
        grammar.accept(token)
        tokens.append(token)
    parts = parsed(chat_format, list(words.tokenizer.decode(tokens, skip_special_tokens=False)), SCHEMAS)
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


DEEP = "'f': its schema is nested too deeply"


def nested(key, times=600):
    schema = {}
    for _ in range(times):
        schema = {key: schema}
    return schema


@pytest.mark.parametrize(
    ("chat_format", "schema", "says"),
    [
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
        ("qwen3-coder", {"type": "object", "additionalProperties": True}, "'f': #/additionalProperties cannot be"),
        ("qwen3-coder", {"properties": {f"p{i}": {"$ref": "#"} for i in range(3000)}}, "'f': its schema is too long"),
        ("qwen3-coder", {"properties": {"a": {"enum": ["\n</parameter>\n"]}}}, "cannot write the value '.n</param"),
        ("minimax-m2", {"properties": {"a": {"enum": ["b", "</parameter>\n"]}}}, "cannot write the value '</param"),
        ("minimax-m2", {"properties": {"a": {"type": "string", "minLength": 2}}}, "'f': #/properties/a cannot be"),
        ("gemma4", {"properties": {"a": {"type": "string", "pattern": "b"}}}, "'f': #/properties/a/pattern cannot be"),
        ("gemma4", {"properties": {"a": {"items": {"not": {}}}}}, "'f': #/properties/a/items/not cannot be"),
        ("gemma4", {"properties": {"a": {"$ref": "#/$defs/b"}}}, "'f': #/properties/a/.ref is none that is"),
        ("gemma4", {"properties": {"a b": {}}}, "cannot write a parameter named 'a b'"),
        ("gemma4", {"properties": {"a": {"const": '<|"|>'}}}, "cannot write the value '<.\"."),
        ("gemma4", {"required": ["a"]}, "'f': #/required cannot be held"),
        ("gemma4", {"properties": []}, "'f': #/properties is no JSON schema's"),
        ("gemma4", {"additionalProperties": {"type": "integer"}}, "'f': #/additionalProperties cannot be held"),
        ("gemma4", {"properties": {str(i): {} for i in range(501)}}, "'f': #/properties has 501; at most 500"),
        ("gemma4", {"required": [{}]}, "'f': #/required is no JSON schema's"),
        ("gemma4", {"properties": {"a": {"type": "array", "maxItems": "3"}}}, "'f': #/properties/a/maxItems is no"),
        ("gemma4", {"properties": {"a": {"items": [{}, {}]}}}, "'f': #/properties/a/items cannot be held"),
        ("gemma4", {"properties": {"a": {"items": {}, "minItems": -1}}}, "'f': #/properties/a/minItems is no"),
        ("gemma4", {"properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}, "oneOf cannot be held"),
        ("gemma4", {"properties": {"a": {"type": [{}]}}}, "'f': #/properties/a/type is no JSON schema's"),
        ("gemma4", {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(600)}}, DEEP),
        ("gemma4", {"properties": {"a": nested("items")}}, DEEP),
        ("gemma4", {"properties": {"a": {"const": nested("items")}}}, DEEP),
    ],
)
def test_what_cannot_be_held_is_refused(chat_format, schema, says):
    with pytest.raises(RequestError, match=says):
        call_grammar(chat_format, [Callee("f", schema, strict=True)], must=False)


@pytest.mark.parametrize("chat_format", ["qwen3-coder", "minimax-m2"])
def test_one_of_several_texts_or_null_is_held_to_them(chat_format):
    def written(*choices):
        schema = {"properties": {"u": {"type": ["string", "null"], "enum": list(choices)}}}
        return call_grammar(chat_format, [Callee("f", schema, True)], must=True)

    assert all(f'"{choice}' in written("x", None) for choice in ("x", "null"))
    with pytest.raises(RequestError, match="#/properties/u cannot be held to"):
        written("None", None)  # which the format writes as it does null


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "string", "const": "x"}, ["x"]),
        ({"anyOf": [{"type": "string", "enum": ["x", "true"]}, {"type": "null"}], "default": None}, ["true", None]),
        ({"oneOf": [{"const": "x"}, {"anyOf": [{"const": "y"}]}]}, ["x", "y"]),
    ],
)
@pytest.mark.parametrize("chat_format", ["qwen3-coder", "minimax-m2"])
def test_texts_are_held_to_one_of_several_however_that_is_said(chat_format, schema, values, vocabulary):
    """As Pydantic writes `Literal["x"]` and `Literal["x"] | None`, and Zod a union of literals."""
    schema = {"type": "object", "properties": {"u": schema}, "required": ["u"], "additionalProperties": False}
    for strict in (True, False):
        source = call_grammar(chat_format, [Callee("f", schema, strict)], must=True)
        for value in values:
            call = written(chat_format, "f", {"u": value})
            assert vocabulary(chat_format).allows(source, call)
            assert calls_of(parsed(chat_format, [call], {"f": schema})) == [("f", {"u": value})]
        assert not vocabulary(chat_format).allows(source, written(chat_format, "f", {"u": "z"}))


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("chat_format", ["qwen3-coder", "minimax-m2"])
def test_texts_and_thinking_that_are_held_may_have_tags_in_them(chat_format, size, vocabulary):
    """Of other parameters and of other calls: a model that edits such files writes them."""
    schema = {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required": ["a", "n"]}
    call = written(chat_format, "f", {"a": "x", "n": 1})
    tags = [call.replace("</parameter>\n", ""), call.replace("</parameter>\n", "</parameter>"), 2 * f"\n{call[-30:]}"]
    source = call_grammar(chat_format, [Callee("f", schema, strict=True)], must=True, thinking=True)
    for tag in tags:
        asked = [("f", {"a": f"a{tag}b", "n": 5}), ("f", {"a": f"{tag}c", "n": 6})]
        text = f"I write {call}.\n</think>\n\n{together(chat_format, asked)}"
        assert vocabulary(chat_format).allows(source, text)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert calls_of(parsed(chat_format, pieces, {"f": schema}, thinking=True, held=True, must=True)) == asked


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_leaves_its_opening_out_is_held(size, vocabulary):
    """As Qwen3-Coder's do at times; where a reply begins inside thinking, a tag of a function may be thought about."""
    words = vocabulary("qwen3-coder")
    first, second = (written("qwen3-coder", "book", {**BOOKED, "seats": seats}) for seats in (3, 10))
    city = f"Rome{second.replace('</parameter>', '')}"
    bare = first.removeprefix("<tool_call>\n").replace("Rome\n<b>", city)
    source = call_grammar("qwen3-coder", CALLEES, must=False)
    said = f"I book.\n{bare}\nDone."
    assert words.allows(source, said) and words.allows(source, f"{first}\n{bare}")
    assert not words.allows(source, second.removeprefix("<tool_call>\n"))
    assert not words.allows(call_grammar("qwen3-coder", CALLEES, must=True), bare)
    assert words.allows(
        call_grammar("qwen3-coder", CALLEES, must=False, thinking=True), f"Is it <function=?</think>{first}"
    )
    parts = parsed("qwen3-coder", [said[at : at + size] for at in range(0, len(said), size)], SCHEMAS, held=True)
    assert (text_of(parts), calls_of(parts)) == ("I book.Done.", [("book", {**BOOKED, "city": city})])


def test_what_is_not_strict_is_held_as_far_as_can_be(vocabulary):
    schema = {"properties": {"a": {"type": "string", "pattern": "b"}, "n": {"not": {"const": 1}, "type": "integer"}}}
    schema["properties"]["c"] = {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^(?!x)a"}]}
    schema["properties"]["i"] = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    schema["properties"]["z"] = {"type": "number", "minimum": -3.4e38, "exclusiveMaximum": 3.4e38}
    for chat_format in FORMATS:
        source = call_grammar(chat_format, [Callee("f", schema, strict=False)], must=True)
        assert vocabulary(chat_format).allows(source, written(chat_format, "f", {"a": "b", "n": 2}))


@pytest.mark.parametrize(
    ("of_a", "more", "value"),
    [
        ({"type": "string"}, {"required": None, "additionalProperties": None}, "b"),
        ({"type": "any", "enum": None}, {}, 2),
        ({"$ref": "http://x/y", "default": None}, {}, 2),
        ({"anyOf": [{"type": ["str", "null"]}], "description": None}, {}, 2),
        ({"type": "array", "items": [{"type": "integer"}, {"type": "boolean"}]}, {}, [1, True]),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, {}, [1]),
    ],
)
def test_what_is_no_schemas_is_left_out_of_one_that_is_not_strict(of_a, more, value, vocabulary):
    """Agents offer it, and `tool_choice` of `required` is no reason to refuse it. Nor is it for tuples."""
    schema = {"type": "object", "properties": {"a": of_a}, **more}
    for chat_format in FORMATS:
        source = call_grammar(chat_format, [Callee("f", schema, strict=False)], must=True)
        assert vocabulary(chat_format).allows(source, written(chat_format, "f", {"a": value})), chat_format


REFERRING = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "kids": {"type": "array", "items": {"$ref": "#"}},
        "like": {"$ref": "#/properties/id"},
        "whole": {"$ref": "#/$defs/whole"},
        "old": {"$ref": "#/definitions/old"},
    },
    "required": ["id"],
    "additionalProperties": False,
    "$defs": {"whole": {"enum": [7, 8]}},
    "definitions": {"old": {"type": "array", "items": {"$ref": "#/properties/kids"}, "maxItems": 1}},
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("chat_format", FORMATS)
def test_references_lead_into_the_functions_schema_from_anywhere_in_it(chat_format, strict, vocabulary):
    source = call_grammar(chat_format, [Callee("f", REFERRING, strict)], must=True)

    def ok(**more):
        # In the order of names, which Gemma's calls have.
        arguments = dict(sorted({"id": 1, **more}.items())) if chat_format == "gemma4" else {"id": 1, **more}
        return vocabulary(chat_format).allows(source, written(chat_format, "f", arguments))

    assert ok(kids=[{"id": 2, "kids": []}, {"id": 3}]) and not ok(kids=[[]]) and not ok(kids=[{"kids": []}])
    assert ok(like=5, whole=8) and not ok(like=[]) and not ok(whole=9)
    assert ok(old=[[{"id": 4, "whole": 7}]]) and not ok(old=[[{"id": 4, "whole": 6}]])


def test_a_reference_that_is_a_value_or_a_name_stays_as_it_is():
    part = {"properties": {"$ref": {"$ref": "#"}, "enum": {"$ref": "#/properties/a"}}, "default": {"$ref": "#"}}
    alone = standing_alone(part, {"properties": {"a": True}})
    assert alone["properties"]["$ref"] == {"$ref": "#/$defs/whole"}
    assert alone["properties"]["enum"] == {"$ref": "#/$defs/whole/properties/a"}
    assert alone["default"] == {"$ref": "#"}
    assert alone["$defs"] == {"whole": {"type": "object", "properties": {"a": True}}}
    assert standing_alone(part, {"$defs": 5}) == part


@pytest.mark.parametrize("chat_format", ["qwen3-coder", "minimax-m2"])
def test_a_function_of_any_parameters_may_be_called_with_any(chat_format, vocabulary):
    def ok(schema, arguments):
        source = call_grammar(chat_format, [Callee("f", schema, strict=False)], must=True)
        return vocabulary(chat_format).allows(source, written(chat_format, "f", arguments))

    for schema in ({"type": "object", "additionalProperties": True}, {"anyOf": [{"required": ["a"]}]}):
        assert ok(schema, {}) and ok(schema, {"a": "Rome\n<b>", "b c": "2"})
    numbers = {"properties": {}, "additionalProperties": {"type": "integer"}}
    assert ok(numbers, {"a": 1, "b": -2}) and not ok(numbers, {"a": "x"})
    for schema in ({}, {"type": "object", "properties": {}}, {"additionalProperties": False}):
        assert ok(schema, {}) and not ok(schema, {"a": "x"})


@pytest.mark.parametrize("chat_format", ["gemma4", "qwen3-coder"])
def test_names_that_are_the_models_own_are_as_long_as_are_read(chat_format, vocabulary):
    schema = {"type": "object", "additionalProperties": True}
    source = call_grammar(chat_format, [Callee("f", schema, strict=False)], must=True)
    longest, longer = ({"k" * count: "x"} for count in (256, 257))
    assert vocabulary(chat_format).allows(source, call := written(chat_format, "f", longest))
    assert calls_of(parsed(chat_format, [call], {"f": schema})) == [("f", longest)]
    assert not vocabulary(chat_format).allows(source, written(chat_format, "f", longer))


def test_gemmas_grammar_grows_with_the_properties_and_no_faster(vocabulary):
    words = vocabulary("gemma4", special=True)

    def source(count):
        schema = {"properties": {f"p{i:03}": {"type": "string"} for i in range(count)}, "required": ["p007"]}
        return call_grammar("gemma4", [Callee("f", schema, strict=False)], must=True, special=words.special)

    assert len(source(400)) < 4.5 * len(source(100))
    for names in (["p000", "p007", "p399"], ["p007"], ["p001", "p002", "p007", "p200"]):
        assert words.allows(source(400), written("gemma4", "f", dict.fromkeys(names, "x")))
    for names in (["p000", "p399"], ["p008"], []):
        assert not words.allows(source(400), written("gemma4", "f", dict.fromkeys(names, "x")))
    swapped = written("gemma4", "f", {"p007": "x", "p008": "x"}).replace("p007", "p009")
    assert words.allows(source(400), swapped.replace("p009", "p007")) and not words.allows(source(400), swapped)


def test_a_schema_of_many_parameters_takes_work_in_proportion():
    def calls(count):
        names = [f"p{i}" for i in range(count)]
        schema = {"properties": {name: {"type": "string"} for name in names}, "required": names}
        profile = cProfile.Profile()
        profile.runcall(call_grammar, "qwen3-coder", [Callee("f", schema, strict=True)], must=True)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(400) < 5 * calls(100)  # 16 times as many, if each were looked at with all others


@pytest.mark.parametrize("chat_format", FORMATS)
def test_functions_that_are_too_long_together_are_refused_before_they_are_written(chat_format, monkeypatch):
    schema = {"properties": {f"p{i}": {"type": "array", "items": {"enum": ["x" * 50]}} for i in range(150)}}
    functions = [Callee(f"f{i}", schema, strict=True) for i in range(40)]
    assert len(call_grammar(chat_format, functions[:1], must=True)) < 65_536
    with pytest.raises(RequestError, match=r"its schema is too long, .* those before it; at most 65536") as refused:
        call_grammar(chat_format, functions, must=True)
    assert refused.value.field == "tools"


def test_what_reads_bytes_is_made_once(monkeypatch):
    """It took 1.5 ms for each pattern, 49 s of 20,000."""
    made = []
    own = llguidance.LLTokenizer
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda name: made.append(name) or own(name))
    byte_matcher._bytes.cache_clear()
    schema = {"properties": {f"p{i}": {"type": "string", "pattern": f"^made-once{i}$"} for i in range(9)}}
    for name in ("f", "g"):
        call_grammar("qwen3", [Callee(name, schema, strict=False)], must=True)
        check_apart("regex", form_of("regex", f"{name}[0-9]"), [name])
    assert made == ["byte"]


@pytest.mark.parametrize("chat_format", FORMATS)
def test_more_patterns_than_a_grammar_has_room_for_are_refused_before_they_are_compiled(chat_format, monkeypatch):
    def offer(schema, pattern, count):
        properties = {f"p{i}": {"items": {"anyOf": [{"pattern": pattern}, True]}} for i in range(count)}
        call_grammar(chat_format, [Callee(name, {**schema, "properties": properties}, False) for name in "fg"], True)

    offer({"description": "x" * 20_000}, "^a$", 100)
    monkeypatch.setattr(held_schema, "_is_held", None)
    with pytest.raises(RequestError, match="their patterns have 69000 characters; at most 65536 are taken") as refused:
        offer({}, "x" * 100, 300)
    assert refused.value.field == "tools"


@pytest.mark.parametrize("repeated", [["object"] * 40, ["object", "object", "array"]])
def test_a_type_that_is_named_twice_is_written_once(repeated):
    schema = {"type": "integer"}
    for _ in range(20):
        schema = {"type": repeated, "properties": {"a": schema}}
    assert len(call_grammar("gemma4", [Callee("f", schema, strict=True)], must=True)) < 10_000


def test_gemmas_notation_is_held_to_each_kind_of_schema(vocabulary):
    words = vocabulary("gemma4", special=True)
    tree = {"type": "object", "properties": {"leaf": {"type": "number"}, "more": {"$ref": "#/$defs/tree"}}}
    kinds = {
        "any": {},
        "boolean": {"type": "boolean"},
        "choice": {"enum": ["x", 2, None, [1], {"k": "v"}]},
        "either": {"type": ["integer", "array"], "items": {"type": "string"}, "minItems": 2},
        "free": {"type": "object"},
        "list": {"type": "array", "maxItems": 0},
        "one": {"type": "array", "maxItems": 1},
        "tagged": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        "tree": {"$ref": "#/$defs/tree"},
    }
    tagged = {tag: {"type": "object", "properties": {"tag": {"const": tag}}, "required": ["tag"]} for tag in ("a", "b")}
    schema = {"properties": kinds, "$defs": {"tree": tree, **tagged}}
    source = call_grammar("gemma4", [Callee("f", schema, strict=True)], must=True, special=words.special)

    def ok(arguments):
        return words.allows(source, written("gemma4", "f", arguments))

    for arguments in (
        {},
        {"any": [{"a": "}"}, 1.5, False], "tree": {"more": {"leaf": -2, "more": {}}}},
        {"tagged": {"tag": "b"}},
        {"boolean": True, "choice": {"k": "v"}, "either": ["a", "b", "c"], "free": {"q": ["r"]}, "list": []},
        {"choice": "x", "either": 7},
        {"choice": [1]},
        {"one": []},
        {"one": [2]},
    ):
        assert ok(arguments), arguments
    for arguments in (
        {"boolean": 1},
        {"choice": "y"},
        {"either": ["a"]},
        {"either": "a"},
        {"list": [1]},
        {"one": [1, 2]},
        {"tree": {"leaf": "a"}},
        {"other": 1},
    ):
        assert not ok(arguments), arguments
