"""Parsers of replies: calls as each format's chat template writes them, in pieces cut anywhere."""

import cProfile
import gc
import json
from itertools import pairwise
from types import FunctionType, ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dflash.text.reply.formats import format_of_template, reply_parser
from trtllm_dflash.text.reply.gemma4 import with_responses
from trtllm_dflash.text.reply.json_call import begun_object
from trtllm_dflash.text.reply.kimi_k2 import with_own_ids
from trtllm_dflash.text.reply.llama3 import one_call_each
from trtllm_dflash.text.reply.parts import Part, StoppedParts
from trtllm_dflash.text.reply.xml_call import with_objects

TEXT_FORMATS = ["qwen3", "qwen3-coder", "llama3", "gemma4", "minimax-m2", "kimi-k2"]
SCHEMAS = {
    "write": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "sure": {"type": "boolean"},
            "items": {"type": "array"},
            "options": {"type": "object"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {"enum": ["a", "1"]},
            "any": {},
            "level": {"$ref": "#/$defs/level"},
            "perhaps": {"anyOf": [{"$ref": "#/$defs/level"}, {"type": "null"}]},
            "like": {"$ref": "#/properties/count"},
            "several": {"anyOf": [{"type": "string"}, {"$ref": "#/properties/count"}]},
            "lost": {"$ref": "#/$defs/lost"},
        },
        "$defs": {"level": {"type": "string", "enum": ["1", "true", "high"]}},
    },
    "now": {"type": "object", "properties": {}},
}


def parsed(chat_format, pieces, schemas=SCHEMAS, thinking=False, beside_form=(), **how):
    """The parts, those of one kind in a row joined."""
    parser = reply_parser(chat_format, schemas, thinking, beside_form, **how)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    joined: list[Part] = []
    for part in parts:
        if joined and part.kind == joined[-1].kind != "call":
            joined[-1] = Part(part.kind, joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


def calls_of(parts):
    names = [part.text for part in parts if part.kind == "call"]
    return list(zip(names, [json.loads(part.text) for part in parts if part.kind == "arguments"], strict=True))


def text_of(parts, kind="content"):
    return "".join(part.text for part in parts if part.kind == kind)


def written(chat_format, name, arguments):
    """A call as the format's own chat template writes one of the conversation's past."""
    return together(chat_format, [(name, arguments)])


def together(chat_format, calls):
    """Several calls of one message, likewise."""
    each = [_written(chat_format, name, arguments) for name, arguments in calls]
    if chat_format == "minimax-m2":
        return f"<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>" if each else ""
    if chat_format == "kimi-k2":
        numbered = "".join(call.replace(":0<", f":{number}<", 1) for number, call in enumerate(each))
        return f"<|tool_calls_section_begin|>{numbered}<|tool_calls_section_end|>" if each else ""
    return {"llama3": "; ", "gemma4": ""}.get(chat_format, "\n").join(each)


def gemmas(value):
    """A value in Gemma's notation, as its template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemmas(inner)}" for key, inner in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemmas, value)) + "]"
    return str(value) if value is None else json.dumps(value)  # Jinja writes None, as Python does


def _written(chat_format, name, arguments):
    if chat_format == "llama3":
        return json.dumps({"name": name, "parameters": arguments})
    if chat_format == "qwen3":
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
    if chat_format == "gemma4":
        return f"<|tool_call>call:{name}{gemmas(arguments)}<tool_call|>"
    if chat_format == "kimi-k2":
        head = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        return f"{head}{json.dumps(arguments, ensure_ascii=False)}<|tool_call_end|>"
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if chat_format == "minimax-m2":
        parameters = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
        return f'<invoke name="{name}">\n{parameters}</invoke>\n'
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


# Characters and pieces of markup that could be mistaken for one another.
MARKUP = [
    *("<tool_call>", "</tool_call>", "<tool", "<function=", "<function=write>", "</function>", "<parameter=text>"),
    *("</parameter>", "</param", "<think>", "</think>", "<", ">", "\n", "\n\n", " ", '"', "\\", "{", "}", "[", "]"),
    *(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<minimax:",
        '<invoke name="',
        '<invoke name="write">',
        "</invoke>",
    ),
    *(
        '<parameter name="text">',
        '<parameter name="',
        '">',
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    *("<|tool_call_begin|>", "functions.write:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call"),
    *("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", "thought", "call:write{", "text:", '<|"|>', "<|"),
    *('{"name": "write"', '{"name": "write", "arguments": {', '"parameters": {', ",", ":", ";", "a", "é", "🦊", "1"),
    *("\n" * 70, " " * 70, "k" * 260),  # more than is kept back
]
soup = st.lists(st.sampled_from(MARKUP), max_size=14).map("".join)
cuts = st.lists(st.integers(0, 400), max_size=8)
#: What texts cannot have in them in one format or another.
ENDINGS = ("</parameter>", '<|"|>')
texts = soup.filter(lambda text: not any(ending in text for ending in ENDINGS))
values = {
    "text": texts.filter(lambda text: not text.startswith("\n")),
    "count": st.integers(),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "sure": st.booleans(),
    "items": st.lists(st.integers() | texts, max_size=3),
    "options": st.dictionaries(st.sampled_from("abc"), st.none() | st.booleans(), max_size=2),
    "kind": st.sampled_from(["a", "1"]),
}
arguments = st.fixed_dictionaries({}, optional=values)


def cut(text, places):
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("chat_format", TEXT_FORMATS)
@given(text=soup, places=cuts)
def test_pieces_make_no_difference(chat_format, thinking, text, places):
    whole = parsed(chat_format, [text], thinking=thinking)
    assert parsed(chat_format, cut(text, places), thinking=thinking) == whole
    assert parsed(chat_format, list(text), thinking=thinking) == whole


@pytest.mark.parametrize("chat_format", TEXT_FORMATS)
@given(before=st.sampled_from(["", "Let me see.", "{ no call }"]), asked=st.lists(arguments, max_size=3), places=cuts)
def test_calls_come_out_as_they_were_written(chat_format, before, asked, places):
    before = "" if chat_format == "llama3" else before
    names = ["now" if not each else "write" for each in asked]
    calls = list(zip(names, asked, strict=True))
    text = before + "\n" * bool(before) + together(chat_format, calls)
    parts = parsed(chat_format, cut(text, places))
    assert calls_of(parts) == calls
    assert text_of(parts).rstrip("\n") == before  # where there is no call, the newline is of the text
    assert text_of(parts) == before or not calls


@pytest.mark.parametrize("chat_format", TEXT_FORMATS)
@given(asked=arguments, gone=st.tuples(st.integers(0, 300), st.integers(1, 12)), after=soup, places=cuts)
def test_pieces_of_a_broken_call_make_no_difference(chat_format, asked, gone, after, places):
    """A call from which some characters are missing, and text behind it."""
    call = together(chat_format, [("write", asked), ("now", {})])
    at = gone[0] % len(call)
    text = call[:at] + call[at + gone[1] :] + after
    whole = parsed(chat_format, [text])
    assert parsed(chat_format, cut(text, places)) == parsed(chat_format, list(text)) == whole


@pytest.mark.parametrize("chat_format", TEXT_FORMATS)
@given(text=soup, places=cuts)
def test_without_tools_all_is_content(chat_format, text, places):
    text = (
        "x" + text if chat_format != "gemma4" else "x" + text.replace("<|channel>", "")
    )  # its thinking stands anywhere
    assert text_of(parsed(chat_format, cut(text, places), None)) == text


@pytest.mark.parametrize(
    ("chat_format", "text"),
    [
        ("qwen3", "a\n<tool_call>\nnot JSON\n</tool_call>\n"),
        ("qwen3", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "write"'),
        ("qwen3", '<tool_call>\n{"arguments": {"a": 1}, "name": 5}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"arguments": {"a": 1}, "na'),
        ("qwen3", "write `<tool_call"),
        ("qwen3-coder", "<tool_call>\nno function\n</tool_call>"),
        ("qwen3-coder", "<function=unknown>\n</function>"),
        ("qwen3-coder", "the tag <function="),
        ("llama3", '{"name": "Bob", "age": 5}'),
        ("llama3", 'Here: {"name": "write", "parameters": {}}'),
        ("llama3", '{"answer": 42}'),
        ("llama3", "  { "),
        ("gemma4", "a\n<|tool_call>no call<tool_call|>"),
        ("gemma4", "<|tool_call>call:two words{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:write"),
        ("gemma4", "the marker <|tool_"),
        ("minimax-m2", '<minimax:tool_call>\n<invoke name="unknown">\n</invoke>\n</minimax:tool_call>'),
        ("minimax-m2", "<minimax:tool_call>\nno function"),
        ("minimax-m2", 'the tag <invoke name="'),
        ("kimi-k2", "<|tool_calls_section_begin|>no call<|tool_calls_section_end|>"),
        ("kimi-k2", "a\n<|tool_call_begin|>functions.write<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.wri"),
    ],
)
def test_what_is_no_call_is_content_as_it_stands(chat_format, text):
    assert parsed(chat_format, list(text)) == [Part("content", text)]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"arguments": {"a": [1, "}"]}, "name": "now"}', {"a": [1, "}"]}),
        ('{ "parameters" :{"a":{}}, "id": "1", "name": "now" }', {"a": {}}),
        ('{"id": 1, "name": "now", "arguments": {"a": 1}}', {"a": 1}),
        ('{"name": "now", "arguments": null}', {}),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_in_other_orders_are_calls(call, arguments, size):
    text = f"Now.\n<tool_call>\n{call}\n</tool_call>"
    parts = parsed("qwen3", [text[at : at + size] for at in range(0, len(text), size)])
    assert calls_of(parts) == [("now", arguments)] and text_of(parts).strip() == "Now."


def test_halves_of_a_character_are_no_names_and_stay_escapes_in_values():
    text = '<tool_call>\n{"name": "now\\ud83d", "arguments": {}}\n</tool_call>'
    assert parsed("qwen3", [text]) == [Part("content", text)]
    parts = parsed("gemma4", ['<|tool_call>call:now{a:"x\\ud83d"}<tool_call|>'])
    assert "".join(part.text for part in parts).encode() and calls_of(parts) == [("now", {"a": "x\ud83d"})]


def test_arguments_are_handed_on_as_they_are_written():
    parser = reply_parser("qwen3-coder", SCHEMAS)
    seen = [
        [(part.kind, part.text) for part in parser.push(piece)]
        for piece in ("<tool_call>\n<function=write", ">\n<parameter=text>\n", 'line "1"', "\nline 2", "\n</para")
    ]
    assert seen == [
        [],
        [("call", "write"), ("arguments", '{"text": '), ("arguments", '"')],
        [("arguments", 'line \\"1\\"')],
        [("arguments", "\\nline 2")],
        [],
    ]
    parser = reply_parser("qwen3", SCHEMAS)
    parser.push('<tool_call>\n{"name": "write", "arguments": ')
    assert parser.push('{"text": "a') == [Part("call", "write"), Part("arguments", '{"text": "a')]


def test_arguments_in_other_notations_are_handed_on_as_json():
    def pushed(parser, *pieces):
        return ["".join(part.text for part in parser.push(piece) if part.kind == "arguments") for piece in pieces]

    pieces = (
        '<|tool_call>call:write{text:<|"|>line ',
        '"1"\nline 2<|',
        '"|>,options:{b:tr',
        "ue,c:[1,",
        "-2.5]}}<tool_c",
    )
    assert pushed(reply_parser("gemma4", SCHEMAS), *pieces) == [
        '{"text": "line ',
        '\\"1\\"\\nline 2',
        '", "options": {"b": ',
        'true, "c": [1',
        ", -2.5]}}",
    ]
    pieces = (
        '<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">a',
        "\nb\n",
        "</parameter>\n</inv",
        "oke>",
    )
    assert pushed(reply_parser("minimax-m2", SCHEMAS), *pieces) == ['{"text": "a', "\\nb\\n", '"', "}"]


KIMIS = "<|tool_calls_section_begin|><|tool_call_begin|>now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("notation", "expected"),
    [
        ("", {}),
        ('"a":"b", "c" : 1', {"a": "b", "c": 1}),
        ('"a":"Rome, Italy","b":["}","\\"\\\\ \\u00e9\n"]', {"a": "Rome, Italy", "b": ["}", '"\\ é\n']}),
        ("a:,b:[,1]", {"a": None, "b": [None, 1]}),
        (" a : 1 , b : [ ] ", {"a": 1, "b": []}),
        ('<|"|>a b<|"|>:<|"|><|"|>', {"a b": ""}),
        ('a:<|"|>🦊 {x:[1]},"q"\\<|"|>', {"a": '🦊 {x:[1]},"q"\\'}),
        ('a:[[1,[2,{b:<|"|>c<|"|>}]],{}],d:{e:{f:{}}}', {"a": [[1, [2, {"b": "c"}]], {}], "d": {"e": {"f": {}}}}),
        ("a:True,b:None,c:false,d:null", {"a": True, "b": None, "c": False, "d": None}),
        ('a:Rome,b:01,c:"x",d:NaN', {"a": "Rome", "b": "01", "c": "x", "d": "NaN"}),
        ("a:-1.5e3,b:[1,],", {"a": -1500.0, "b": [1]}),
    ],
)
def test_gemmas_notation_becomes_json(notation, expected):
    text = f"<|tool_call>call:now{{{notation}}}<tool_call|>"
    assert calls_of(parsed("gemma4", list(text))) == [("now", expected)]


@pytest.mark.parametrize(
    ("notation", "expected"),
    [
        ("a:", {"a": None}),
        ("a", {}),
        ("a:]", {"a": None}),
        ("a b}", {}),
        ("{", {}),
        ("a:Rome, Italy}", {"a": "Rome"}),
        ('a:"Rome, b:2},', {"a": '"Rome', "b": 2}),
        ("a:[1,{b:2]}", {"a": [1, {"b": 2}]}),
        ('<|"|>a<|"|>}', {}),
        ("k" * 300 + ":1}", {}),
    ],
)
def test_gemmas_arguments_that_break_end_there_and_are_json_all_the_same(notation, expected):
    call = f"<|tool_call>call:now{{{notation}<tool_call|>"
    for text in (f"{call}Sorry.", f"{call}{written('gemma4', 'now', {})}Sorry."):
        parts = parsed("gemma4", list(text))
        assert calls_of(parts)[0] == ("now", expected)
        assert text_of(parts) == "Sorry."


def test_what_follows_a_broken_call_that_is_not_closed_is_content():
    broken = "<|tool_call>call:now{a b} Sorry."
    assert text_of(parsed("gemma4", list(broken))) == "a b} Sorry."
    parts = parsed("gemma4", list(broken + written("gemma4", "write", {"text": "a"})))
    assert text_of(parts) == "a b} Sorry."
    assert calls_of(parts) == [("now", {}), ("write", {"text": "a"})]


@pytest.mark.parametrize(
    ("chat_format", "text", "content"),
    [
        ("gemma4", "<|tool_call>call:now{}<tool_call|><tool_call|>\nDone.<tool_call|>", "Done."),
        ("gemma4", "<|tool_call>call:now{a:1}}<tool_call|>Done.", "Done."),
        ("gemma4", "<|tool_call>no<tool_call|> and <tool_call|>", "<|tool_call>no<tool_call|> and "),
        ("kimi-k2", f"{KIMIS}Done.<|tool_calls_section_end|> All.", "Done. All."),
        ("kimi-k2", f"{KIMIS}<|tool_call_end|><|tool_calls_section_end|>\n<|tool_calls_section_end|>Done.", "Done."),
        ("kimi-k2", "<|tool_calls_section_begin|>a<|tool_call_end|>b", "<|tool_calls_section_begin|>ab"),
    ],
)
def test_closings_that_close_nothing_are_left_out(chat_format, text, content):
    assert text_of(parsed(chat_format, list(text))) == content


@pytest.mark.parametrize(
    ("chat_format", "text", "shown"),
    [
        ("gemma4", "<|tool_call>call:now{a:12", '{"a": 12'),
        ("gemma4", "<|tool_call>call:now{a:[1,tr", '{"a": [1, "tr"'),
        ("gemma4", "<|tool_call>call:now{a:12<tool_c", '{"a": 12'),
        ("gemma4", '<|tool_call>call:now{a:<|"', '{"a": '),
        ("gemma4", '<|tool_call>call:now{"a":"Rome, It', '{"a": "Rome, It'),
        ("minimax-m2", '<minimax:tool_call><invoke name="write"><parameter name="count">12', '{"count": 12'),
        ("minimax-m2", '<minimax:tool_call><invoke name="write"><parameter name="count">12</par', '{"count": 12'),
        (
            "minimax-m2",
            '<minimax:tool_call><invoke name="write"><parameter name="count">12</parameter>',
            '{"count": 12',
        ),
        ("qwen3-coder", "<tool_call>\n<function=write>\n<parameter=count>\n", '{"count": '),
        ("qwen3-coder", "<function=write>\n<parameter=text>\na</parameter>\n</fun", '{"text": "a"'),
        ("qwen3-coder", "<function=write>\n<parameter=text>\na</parameter>b", '{"text": "a</parameter>b'),
    ],
)
def test_a_value_that_is_cut_off_is_shown_as_far_as_it_went(chat_format, text, shown):
    assert text_of(parsed(chat_format, list(text)), "arguments") == shown


@pytest.mark.parametrize(
    ("chat_format", "begun", "piece"),
    [
        ("gemma4", "<|tool_call>call:now{a:", "1234"),
        ("gemma4", "<|tool_call>call:now{", "abcd"),
        ("gemma4", "<|tool_call>", "    "),
        ("gemma4", "<|tool_call>call:now{a:1}", "    "),
        ("gemma4", "<|tool_call>call:now{a b", "}   "),
        ("gemma4", '<|tool_call>call:now{"a":"', "ab, "),
        ("minimax-m2", '<minimax:tool_call><invoke name="write"><parameter name="', "abcd"),
        ("minimax-m2", '<minimax:tool_call><invoke name="write">', "    "),
        ("kimi-k2", "<|tool_calls_section_begin|>", "    "),
        ("qwen3", "a", "\n\n\n\n"),
        ("qwen3", "", "    "),
        ("gemma4", "<|channel>thought\na", "\n\n\n\n"),
    ],
)
def test_a_reply_of_many_pieces_is_looked_at_piece_by_piece(chat_format, begun, piece):
    """A text that grew with each piece would be copied and looked at with each: time in the square of their number."""
    parser = reply_parser(chat_format, SCHEMAS)
    parser.push(begun)
    for _ in range(2_000):
        parser.push(piece)
    assert max(map(len, texts_in(parser))) < 1_000


def texts_in(parser):
    """Finds the texts that an object holds, however deep."""
    seen, left = {}, [vars(parser)]
    while left:
        one = left.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen[id(one)] = one
            left += gc.get_referents(one)
    return [one for one in seen.values() if isinstance(one, str)]


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        ("count", "7", 7),
        ("count", "seven", "seven"),
        ("sure", "True", True),
        ("sure", "1", "1"),
        ("ratio", "1", 1),
        ("ratio", "NaN", "NaN"),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("kind", "1", "1"),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", "words", "words"),
        ("level", "1", "1"),
        ("level", '"1"', "1"),
        ("perhaps", "true", "true"),
        ("perhaps", "null", None),
        ("like", "5", 5),
        ("several", "words", "words"),
        ("several", '"5"', "5"),  # as a call that is held to the schema has it
        ("several", "5", 5),
        ("several", "true", "true"),
        ("lost", "5", 5),
        ("unheard_of", "5", "5"),
        ("items", "[" * 100_000, "[" * 100_000),
    ],
)
def test_a_value_has_the_type_that_the_schema_gives_it(parameter, value, expected):
    text = f"<tool_call>\n<function=write>\n<parameter={parameter}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert calls_of(parsed("qwen3-coder", [text])) == [("write", {parameter: expected})]


@pytest.mark.parametrize(
    ("chat_format", "parameter", "value"),
    [
        ("qwen3-coder", "text", "<job>\n  <parameter>1</parameter>\n</job>"),
        ("qwen3-coder", "text", "the tag </parameter>"),
        ("qwen3-coder", "text", "</parameter> ends it"),
        ("qwen3-coder", "items", ["</parameter>", "a</parameter>\n"]),
        ("minimax-m2", "text", "`</parameter>` ends it"),
        ("minimax-m2", "options", {"</parameter>": "</parameter></parameter>"}),
    ],
)
@pytest.mark.parametrize("size", [1, 9, 1000])
def test_a_value_may_have_its_closing_tag_in_it(chat_format, parameter, value, size):
    """A file of XML, say, or a list that is held to its schema."""
    asked = [("write", {parameter: value, "count": 1}), ("now", {})]
    text = together(chat_format, asked)
    parts = parsed(chat_format, [text[at : at + size] for at in range(0, len(text), size)])
    assert calls_of(parts) == asked and not text_of(parts)


@pytest.mark.parametrize(("more", "expected"), [({"type": "integer"}, 5), ({"type": "string"}, "5"), (True, "5")])
def test_a_value_of_no_told_name_has_the_type_that_the_schema_gives_all_of_them(more, expected):
    schema = {"type": "object", "additionalProperties": more}
    call = written("qwen3-coder", "f", {"a": "5"})
    assert calls_of(parsed("qwen3-coder", [call], {"f": schema})) == [("f", {"a": expected})]


@pytest.mark.parametrize(
    ("begun", "text", "thinking", "content"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (True, "Hm.\n\nSo\n</think>\n\nYes.", "Hm.\n\nSo", "Yes."),
        (True, "cut off", "cut off", ""),
        (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (False, "A <think> later is text.", "", "A <think> later is text."),
        (False, "<thin ice", "", "<thin ice"),
    ],
)
def test_thinking_is_set_apart(begun, text, thinking, content):
    parts = parsed("qwen3", list(text), None, begun)
    assert (text_of(parts, "thinking"), text_of(parts)) == (thinking, content)


@pytest.mark.parametrize("chat_format", [name for name in TEXT_FORMATS if name != "llama3"])
def test_a_call_follows_thinking(chat_format):
    thinking = ("<|channel>thought", "<channel|>") if chat_format == "gemma4" else ("<think>", "</think>")
    text = f"{thinking[0]}\nA call.\n{thinking[1]}\n\n" + written(chat_format, "now", {})
    assert parsed(chat_format, list(text)) == [
        Part("thinking", "A call."),
        Part("call", "now"),
        Part("arguments", "{}"),
    ]


@pytest.mark.parametrize("chat_format", ["minimax-m2", "kimi-k2", "qwen3-coder"])
def test_a_call_ends_thinking_that_was_left_open(chat_format):
    text = "A call." + written(chat_format, "now", {})
    called = [Part("thinking", "A call."), Part("call", "now"), Part("arguments", "{}")]
    assert parsed(chat_format, list(text), thinking=True) == called
    assert parsed(chat_format, list(text), None, thinking=True) == [Part("thinking", text)]


def test_thinking_about_calls_of_qwen3_coders_is_thinking():
    thought = "I may write <tool_call>, and <tool_call>\n<function=other>."
    parts = parsed("qwen3-coder", list(f"{thought}\n</think>\n\nYes."), thinking=True)
    assert parts == [Part("thinking", thought), Part("content", "Yes.")]


@pytest.mark.parametrize(
    ("text", "thinking", "content"),
    [
        ("<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
        ("<|channel>thought\n<channel|>Yes.", "", "Yes."),
        ("<|channel>thoughts\n<channel|>", "thoughts", ""),
        ("<|channel>thought\ncut off", "cut off", ""),
        ("Yes.\n<|channel>thought\nNo.<channel|>\n\nNo.", "No.", "Yes.No."),
        ("Yes.", "", "Yes."),
    ],
)
def test_gemmas_channel_is_thinking_wherever_it_stands(text, thinking, content):
    for schemas in (SCHEMAS, None):
        parts = parsed("gemma4", list(text), schemas)
        assert (text_of(parts, "thinking"), text_of(parts)) == (thinking, content)


@pytest.mark.parametrize("chat_format", ["qwen3", "qwen3-coder", "gemma4", "minimax-m2", "kimi-k2"])
def test_newlines_behind_a_call_are_no_content(chat_format):
    call = written(chat_format, "now", {})
    for pieces in ([call + "\n\nDone."], [call, "\n\nDone."], [call, "\n", "\n", "Done."]):
        assert text_of(parsed(chat_format, pieces)) == "Done."


def test_kimis_calls_come_with_and_without_their_section():
    call = "<|tool_call_begin|>functions.now:0 <|tool_call_argument_begin|> {}<|tool_call_end|>"
    empty = "<|tool_call_begin|>now:7<|tool_call_argument_begin|><|tool_call_end|>"
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    for text in (begin + call + empty + end, call + empty, f"{begin}\n{call}\n{empty}\n{end}\n", begin + call + empty):
        assert parsed("kimi-k2", list(text)) == [Part("call", "now"), Part("arguments", "{}")] * 2
    assert parsed("kimi-k2", list(f"None.{begin}{end}")) == [Part("content", "None.")]


def test_a_call_that_is_cut_off_or_broken_ends_where_it_does():
    begun = '<tool_call>\n{"name": "write", "arguments": {"text": "on and'
    assert parsed("qwen3", list(begun))[-1] == Part("arguments", '{"text": "on and')
    broken = '<tool_call>\n{"name": "write", "arguments": {"text": "on"\n</tool_call>\nSorry.'
    assert parsed("qwen3", list(broken))[1:] == [Part("arguments", '{"text": "on"\n'), Part("content", "Sorry.")]


def test_a_stop_string_is_looked_for_in_content_alone():
    parts = [Part("thinking", "stop"), Part("content", "on and st"), Part("call", "stop"), Part("content", "op, stop.")]
    stopped = StoppedParts(("stop",))
    assert stopped.take(parts, last=False) == [
        Part("thinking", "stop"),
        *(Part("content", "on and "), Part("content", "st"), Part("call", "stop")),
        Part("content", "op, "),
    ]
    assert stopped.stopped
    assert stopped.take([Part("content", "more")], last=True) == []


def test_a_second_call_ends_a_reply_that_may_have_one():
    stopped = StoppedParts((), most_calls=1)
    call = [Part("call", "now"), Part("arguments", "{}")]
    assert stopped.take(call + call, last=False) == call
    assert stopped.stopped


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a"\\{[,', max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), st.data())
def test_an_object_that_is_cut_off_has_the_members_before_its_last(given_object, data):
    text = json.dumps(given_object)
    assert begun_object(text) == given_object
    end = data.draw(st.integers(0, len(text) - 1))
    found = begun_object(text[:end])
    assert list(found) == list(given_object)[: len(found)]
    last = list(found)[-1:]
    assert all(found[name] == given_object[name] for name in found.keys() - last)
    # Whole members are all there.
    behind = [len(json.dumps(dict(list(given_object.items())[:count]))) for count in range(1, len(given_object))]
    assert len(found) >= sum(end >= place for place in behind)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', "}", "nonsense", '{"a', "[" * 5000, '{"a":' * 5000])
def test_what_begins_no_object_is_an_empty_one(text):
    assert begun_object(text) == {}


def test_templates_that_take_arguments_apart_get_objects():
    calls = [{"id": "a", "function": {"name": "f", "arguments": given}} for given in ({"x": 1}, '{"x": "Ro', "5", None)]
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": calls}]
    before, called = with_objects(messages)
    assert before == messages[0]
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == [{"x": 1}, {"x": "Ro"}, {}, {}]
    assert calls[1]["function"]["arguments"] == '{"x": "Ro'


def test_llamas_template_gets_one_call_a_message():
    def said(role, content="", **more):
        return {"role": role, "content": content, **more}

    a, b, c = ({"id": name, "function": {"name": "now", "arguments": {}}} for name in "abc")
    results = {name: said("tool", name, tool_call_id=name) for name in "abc"}
    before, after = said("user", "Go."), said("assistant", tool_calls=[c])
    both = said("assistant", "Two.", tool_calls=[a, b])
    assert one_call_each([before, both, results["b"], results["a"], after, results["c"]]) == [
        before,
        *(said("assistant", "Two.", tool_calls=[a]), results["a"], said("assistant", tool_calls=[b]), results["b"]),
        *(after, results["c"]),
    ]


def test_kimis_template_gets_the_ids_that_the_model_writes():
    def said(role, **more):
        return {"role": role, "content": "", **more}

    calls = [{"id": f"call_{at}", "function": {"name": name}} for at, name in enumerate(("now", "now", "write"))]
    ids = ("functions.now:0", "functions.now:1", "functions.write:2")
    own = [{**call, "id": name} for call, name in zip(calls, ids, strict=True)]
    before = [said("user"), said("assistant", tool_calls=calls[:2]), said("tool", tool_call_id="call_1")]
    after = [
        said("assistant", tool_calls=calls[2:]),
        said("tool", tool_call_id="call_2"),
        said("tool", tool_call_id="?"),
    ]
    assert with_own_ids(before + after) == [
        *(said("user"), said("assistant", tool_calls=own[:2]), said("tool", tool_call_id="functions.now:1")),
        said("assistant", tool_calls=own[2:]),
        *(said("tool", tool_call_id="functions.write:2"), said("tool", tool_call_id="?")),
    ]


def test_gemmas_template_gets_results_in_the_message_that_called():
    calls = [{"id": name, "function": {"name": f"f{name}", "arguments": {}}} for name in "ab"]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": f"is {name}", "tool_call_id": name} for name in "ba"]
    stray = {"role": "tool", "content": "?", "tool_call_id": "c"}
    user = {"role": "user", "content": "Go."}
    responses = [{"name": "fb", "response": "is b"}, {"name": "fa", "response": "is a"}]
    assert with_responses([user, called, *results, stray, user]) == [
        *(user, {**called, "tool_responses": responses}, stray, user)
    ]


def test_gemmas_results_are_added_to_one_copy_of_the_message_that_called():
    """Each result copied all before it: 40,000 of one call kept everybody waiting for 1.6 s."""
    first = []  # a result, as an object that can be found again
    holders = []  # the lists of results that it was in

    def conversation():
        yield called
        for content in (first, "b", "c", "d"):
            yield {"role": "tool", "content": content, "tool_call_id": "a"}
            response = next(each for each in gc.get_referrers(first) if isinstance(each, dict) and "response" in each)
            holders.extend(each for each in gc.get_referrers(response) if isinstance(each, list))

    given_before = {"name": "g", "response": "earlier"}
    calls = [{"id": "a", "function": {"name": "f", "arguments": {}}}]
    called = {"role": "assistant", "content": "", "tool_calls": calls, "tool_responses": [given_before]}
    (joined,) = with_responses(conversation())
    assert [each["response"] for each in joined["tool_responses"]] == ["earlier", [], "b", "c", "d"]
    assert len(holders) == 4 and all(each is joined["tool_responses"] for each in holders)
    assert called["tool_responses"] == [given_before]


def test_an_id_that_a_client_gives_again_stands_for_the_last_call_before_the_result():
    def called(*names):
        calls = [{"id": f"call_{at}", "function": {"name": name, "arguments": {}}} for at, name in enumerate(names)]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def result(content, at=0):
        return {"role": "tool", "content": content, "tool_call_id": f"call_{at}"}

    messages = [called("now"), result("noon"), called("write", "now"), result("done"), result("one", 1)]
    responses = [message["tool_responses"] for message in with_responses(messages)]
    assert [[each["name"] for each in some] for some in responses] == [["now"], ["write", "now"]]
    own = [message["tool_call_id"] for message in with_own_ids(messages) if "tool_call_id" in message]
    assert own == ["functions.now:0", "functions.write:1", "functions.now:2"]
    divided = [message["content"] or message["tool_calls"][0]["id"] for message in one_call_each(messages)]
    assert divided == ["call_0", "noon", "call_0", "done", "call_1", "one"]


@pytest.mark.parametrize("rewrite", [with_responses, with_own_ids, one_call_each])
def test_calls_without_ids_have_no_results_but_stay(rewrite):
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("now", "write")]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "noon"}]
    written = rewrite(messages)
    kept = [call["function"]["name"] for message in written for call in message.get("tool_calls", ())]
    assert (kept, written[-1]) == (["now", "write"], messages[-1])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>\\n<function=' + tool_call.name + '>' }}", "qwen3-coder"),
        ('{{ \'<tool_call>\\n{"name": "\' }}', "qwen3"),
        ("{{ '<|start_header_id|>ipython<|end_header_id|>' }}", "llama3"),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}", "gemma4"),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}", "minimax-m2"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi-k2"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)
def test_a_template_shows_its_format(template, expected):
    assert format_of_template(template) == expected


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_value_whose_end_was_left_out_ends_where_something_else_begins(size):
    """As Qwen3.5 leaves it out in long conversations: another call, or a parameter that has no value yet."""
    head, end = "<tool_call>\n<function=write>\n<parameter=", "\n</function>\n</tool_call>"
    for body, asked in (
        ("count>\n1\n<parameter=text>\na\n</parameter>", [("write", {"count": 1, "text": "a"})]),
        ("text>\na\n<parameter=other>\n\n</parameter>", [("write", {"text": "a\n<parameter=other>\n"})]),
        ("text>\na\n<parameter=text>\n\n</parameter>", [("write", {"text": "a\n<parameter=text>\n"})]),
        (
            "count>\n1\n<parameter=text>\na\n<parameter=count>\n2\n</parameter>",
            [("write", {"count": 1, "text": "a\n<parameter=count>\n2"})],
        ),
        (f"text>\na{end}\n<tool_call>\n<function=now>", [("write", {"text": "a"}), ("now", {})]),
        ("text>\na\n</function>\n<function=now>", [("write", {"text": "a"}), ("now", {})]),
    ):
        text = head + body + end
        parts = parsed("qwen3-coder", [text[at : at + size] for at in range(0, len(text), size)])
        assert calls_of(parts) == asked and not text_of(parts)


@pytest.mark.parametrize("text", ["<think>", "<tool_call>\n<function=f0>\n<parameter=p0>\n"])
def test_plain_text_takes_no_more_work_where_there_are_many_functions_and_parameters(text):
    def calls(count):
        schemas = {f"f{i}": {"properties": {}} for i in range(count)}
        schemas["f0"] = {"properties": {f"p{i}": {"type": "string"} for i in range(count)}}
        profile = cProfile.Profile()
        profile.runcall(parsed, "qwen3-coder", [text, *[" it"] * 1000], schemas)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(200) < 2 * calls(2)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_value_whose_end_was_left_out_ends_with_its_reply(size):
    head, end = "<tool_call>\n<function=write>\n<parameter=", "\n</function>\n</tool_call>"
    for body, arguments in (
        ("text>\na" + end, {"text": "a"}),
        ("count>\n5" + end + "\n", {"count": 5}),
        (f"text>\na{end}\n</parameter>{end}", {"text": "a" + end}),
    ):
        text = head + body
        parts = parsed("qwen3-coder", [text[at : at + size] for at in range(0, len(text), size)])
        assert calls_of(parts) == [("write", arguments)]
