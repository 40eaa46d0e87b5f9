"""Parsers of replies: calls as each format's chat template writes them, in pieces cut anywhere."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dflash.text.reply.formats import format_of_template, reply_parser
from trtllm_dflash.text.reply.llama3 import one_call_each
from trtllm_dflash.text.reply.parts import Part, StoppedParts

TEXT_FORMATS = ["qwen3", "qwen3-coder", "llama3"]
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
        },
    },
    "now": {"type": "object", "properties": {}},
}


def parsed(chat_format, pieces, schemas=SCHEMAS, thinking=False):
    """The parts, those of one kind in a row joined."""
    parser = reply_parser(chat_format, schemas, thinking)
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
    if chat_format == "llama3":
        return json.dumps({"name": name, "parameters": arguments})
    if chat_format == "qwen3":
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


# Characters and pieces of markup that could be mistaken for one another.
MARKUP = [
    *("<tool_call>", "</tool_call>", "<tool", "<function=", "<function=write>", "</function>", "<parameter=text>"),
    *("</parameter>", "</param", "<think>", "</think>", "<", ">", "\n", "\n\n", " ", '"', "\\", "{", "}", "[", "]"),
    *('{"name": "write"', '{"name": "write", "arguments": {', '"parameters": {', ",", ":", ";", "a", "é", "🦊", "1"),
]
soup = st.lists(st.sampled_from(MARKUP), max_size=14).map("".join)
cuts = st.lists(st.integers(0, 400), max_size=8)
values = {
    "text": soup.filter(lambda text: "</parameter>" not in text and not text.startswith("\n")),
    "count": st.integers(),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "sure": st.booleans(),
    "items": st.lists(st.integers() | soup.filter(lambda text: "</parameter>" not in text), max_size=3),
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
    calls = [written(chat_format, name, each) for name, each in zip(names, asked, strict=True)]
    text = ("; " if chat_format == "llama3" else "\n").join([before, *calls] if before else calls)
    parts = parsed(chat_format, cut(text, places))
    assert calls_of(parts) == list(zip(names, asked, strict=True))
    assert text_of(parts) == before


@pytest.mark.parametrize("chat_format", TEXT_FORMATS)
@given(text=soup, places=cuts)
def test_without_tools_all_is_content(chat_format, text, places):
    text = "x" + text
    assert text_of(parsed(chat_format, cut(text, places), None)) == text


@pytest.mark.parametrize(
    ("chat_format", "text"),
    [
        ("qwen3", "a\n<tool_call>\nnot JSON\n</tool_call>\n"),
        ("qwen3", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "write"'),
        ("qwen3", "write `<tool_call"),
        ("qwen3-coder", "<tool_call>\nno function\n</tool_call>"),
        ("qwen3-coder", "<function=unknown>\n</function>"),
        ("qwen3-coder", "the tag <function="),
        ("llama3", '{"name": "Bob", "age": 5}'),
        ("llama3", 'Here: {"name": "write", "parameters": {}}'),
        ("llama3", '{"answer": 42}'),
        ("llama3", "  { "),
    ],
)
def test_what_is_no_call_is_content_as_it_stands(chat_format, text):
    assert parsed(chat_format, list(text)) == [Part("content", text)]


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
        ("unheard_of", "5", "5"),
        ("items", "[" * 100_000, "[" * 100_000),
    ],
)
def test_a_value_has_the_type_that_the_schema_gives_it(parameter, value, expected):
    text = f"<tool_call>\n<function=write>\n<parameter={parameter}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert calls_of(parsed("qwen3-coder", [text])) == [("write", {parameter: expected})]


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


def test_a_call_follows_thinking():
    text = "<think>\nA call.\n</think>\n\n" + written("qwen3", "now", {})
    assert parsed("qwen3", list(text)) == [Part("thinking", "A call."), Part("call", "now"), Part("arguments", "{}")]


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


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>\\n<function=' + tool_call.name + '>' }}", "qwen3-coder"),
        ('{{ \'<tool_call>\\n{"name": "\' }}', "qwen3"),
        ("{{ '<|start_header_id|>ipython<|end_header_id|>' }}", "llama3"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)
def test_a_template_shows_its_format(template, expected):
    assert format_of_template(template) == expected
