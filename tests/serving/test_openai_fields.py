"""Fields of the OpenAI API as clients of today write and read them, without a server."""

import json

import pytest

from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.replies import Added, CompletionForm, Reply, Usage
from trtllm_dflash.serving.openai.requests import ChatRequest, CompletionRequest, TokenizeRequest, parse
from trtllm_dflash.serving.openai.responses import ResponsesRequest
from trtllm_dflash.text.reply.parts import Part

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}

#: What other servers' clients send that asks for nothing.
NEUTRAL: dict[str, object] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
}
NEUTRAL |= {"length_penalty": 1, "use_beam_search": False, "return_token_ids": False, "vllm_xargs": {}}
NEUTRAL |= {"return_tokens_as_token_ids": False, "request_id": "a", "cache_salt": "b", "best_of": 1, "echo": False}
IN_CHAT: dict[str, object] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "include_reasoning": True,
    "documents": [],
}
IN_CHAT |= {"add_special_tokens": False}


@pytest.mark.parametrize(
    ("kind", "body", "neutral"),
    [
        (ChatRequest, ASKED, NEUTRAL | IN_CHAT),
        (CompletionRequest, {"model": "tiny", "prompt": "a"}, NEUTRAL | {"add_special_tokens": True}),
        (TokenizeRequest, ASKED, {"add_generation_prompt": True, "continue_final_message": False}),
        (
            ChatRequest,
            ASKED,
            {"structured_outputs": {"regex": "a", "whitespace_pattern": None, "disable_fallback": True}},
        ),
        (ChatRequest, ASKED, {"stream": True, "stream_options": {"include_usage": None}}),
    ],
)
def test_what_asks_for_nothing_is_taken(kind, body, neutral):
    parse(kind, json.dumps(body | neutral).encode())


@pytest.mark.parametrize(
    "more",
    [
        {"skip_special_tokens": False},
        {"use_beam_search": True},
        {"length_penalty": 2.0},
        {"continue_final_message": True},
        {"best_of": 2},
        {"add_special_tokens": True},
        {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
    ],
)
def test_what_asks_for_something_else_is_refused_by_name(more):
    with pytest.raises(ApiError) as refusal:
        parse(ChatRequest, json.dumps(ASKED | more).encode())
    assert refusal.value.param.startswith(next(iter(more)))


def test_a_schema_may_be_a_text_of_json():
    asked = parse(ChatRequest, json.dumps(ASKED | {"structured_outputs": {"json": '{"type": "object"}'}}).encode())
    assert asked.structured.value == {"type": "object"}


def test_two_forms_are_refused_by_the_names_that_they_were_sent_by():
    with pytest.raises(ApiError, match=r"give one of json, regex$"):
        parse(ChatRequest, json.dumps(ASKED | {"structured_outputs": {"json": {}, "regex": "a"}}).encode())


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_goes_back_under_either_name(name):
    message = {"role": "assistant", "content": "y", name: "hm"}
    asked = parse(ChatRequest, json.dumps({"model": "tiny", "messages": [message]}).encode())
    assert asked.messages[0].for_template()["reasoning_content"] == "hm"
    assert set(message) - {name} == {"role", "content"}


@pytest.mark.parametrize("arguments", ['{"c": "\\ud83d"}', '{"c": "\\ud83d', "[]"])
def test_arguments_that_a_template_cannot_take_as_an_object_go_back_as_they_are(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    asked = parse(ChatRequest, json.dumps({"model": "tiny", "messages": [message]}).encode())
    assert asked.messages[0].for_template()["tool_calls"][0]["function"]["arguments"] == arguments


def test_marks_of_caches_are_taken_wherever_clients_put_them():
    mark = {"cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "parameters": {"type": "object"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", **mark}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "b", **mark}], **mark},
        {"role": "assistant", "content": None, "tool_calls": [call], **mark},
        {"role": "tool", "tool_call_id": "1", "content": "c", **mark},
    ]
    tools = [{"type": "function", "function": {**function, **mark}, **mark}]
    asked = parse(ChatRequest, json.dumps({"model": "tiny", "messages": messages, "tools": tools}).encode())
    assert [message.content for message in asked.messages] == ["b", None, "c"]
    assert asked.tools[0].function.for_template()["function"]["parameters"] == {"type": "object"}
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "created_by": "somebody"}
    body = {"model": "tiny", "input": [item], "tools": [{"type": "function", **function, **mark, "output_schema": {}}]}
    assert parse(ResponsesRequest, json.dumps(body).encode()).tools[0].name == "f"


@pytest.mark.parametrize(
    ("kind", "more", "what"),
    [
        (ChatRequest, {"response_format": {"type": "json_schema"}}, "response_format.json_schema: missing, for"),
        (
            ChatRequest,
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format.json_schema: for the type json_schema, and for no other",
        ),
        (
            ChatRequest,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools.0.function: parameters: a function's arguments are an object",
        ),
    ],
)
def test_what_is_wrong_is_said_in_plain_words(kind, more, what):
    with pytest.raises(ApiError) as refusal:
        parse(kind, json.dumps(ASKED | more).encode())
    assert str(refusal.value).startswith(what)


@pytest.mark.parametrize("item", ["a", {"type": 3}])
def test_an_item_of_no_known_type_is_refused_in_plain_words(item):
    with pytest.raises(ApiError, match="its type is none of those that are taken here") as refusal:
        parse(ResponsesRequest, json.dumps({"model": "tiny", "input": [item]}).encode())
    assert refusal.value.param.startswith("input.0")


def test_a_bias_of_digits_that_are_not_ascii_is_refused():
    with pytest.raises(ApiError, match="logit_bias"):
        parse(ChatRequest, json.dumps(ASKED | {"logit_bias": {"\u0663": 1}}).encode())


def test_a_refusal_s_part_is_text_as_what_is_sent_back_has_it():
    said = [{"type": "refusal", "refusal": "no"}]
    messages = [{"role": "assistant", "content": said}]
    assert parse(ChatRequest, json.dumps({"model": "tiny", "messages": messages}).encode()).messages[0].content == "no"
    body = {"model": "tiny", "input": [{"type": "message", "role": "assistant", "content": said}]}
    assert parse(ResponsesRequest, json.dumps(body).encode()).input[0].content == "no"


def test_thinking_is_told_under_both_names_whole_and_streamed():
    thought = "hm “\u2028”"
    reply = Reply()
    reply.add(Added([Part("thinking", thought), Part("content", "y")]))
    message = CompletionForm("m", True).whole([reply], Usage(1))["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == thought
    form = CompletionForm('"reasoning":""', True)
    for _ in range(2):
        (chunk,) = chunks(form.added(0, Added([Part("thinking", thought)])))
        assert chunk["choices"][0]["delta"] == {"reasoning": thought, "reasoning_content": thought}
        assert chunk["model"] == '"reasoning":""'


def test_each_chunk_tells_the_usage_so_far_where_that_is_asked_for():
    told = []
    form = CompletionForm("m", True, include_usage=True, tells_usage=True)
    for tokens in (2, 5):
        usage = Usage(7, completion_tokens=tokens)
        told += chunks(form.added(0, Added([Part("content", "a"), Part("call", "f")], usage=usage)))
    told += chunks(form.ending(0, "stop") + form.opening(1))
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in told]
    assert counts == [2, 2, 5, 5, 5, None]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in told] == ["a", None, "a", None, None, ""]
    (plain,) = chunks(CompletionForm("m", True, include_usage=True).added(0, Added([Part("content", "a")])))
    assert plain["usage"] is None


def chunks(events: bytes) -> list[dict]:
    """Reads the bodies of events."""
    return [json.loads(line[len("data: ") :]) for line in events.decode().split("\n\n") if line]
