"""What today's agents send to the OpenAI API, made into requests to an engine and read as they read it."""

import asyncio
import json
import shutil
from typing import get_args

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from tests.serving.test_tools import ASKED, ASKS, TEMPLATE, TOOLS, UNTHINKING
from tests.test_call_grammar import Vocabulary
from tests.test_reply_parsers import written
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import DeadlineError, QueueFullError
from trtllm_dflash.runtime.intake import Intake
from trtllm_dflash.runtime.request import TokenLogprobs
from trtllm_dflash.serving.client import Piece
from trtllm_dflash.serving.openai.errors import ApiError, as_api_error
from trtllm_dflash.serving.openai.preparation import Preparation
from trtllm_dflash.serving.openai.replies import Added
from trtllm_dflash.text.reply.parts import Part
from trtllm_dflash.text.tokenizer import TextCodec

FLAT = [{"type": "function", **one["function"]} for one in TOOLS]


class Prepared:
    """The preparation of requests for an engine whose chat template asks for calls in a format."""

    def __init__(self, engine, folder, chat_format):
        shutil.copytree(engine, folder)
        template = TEMPLATE.format(ask=ASKS[chat_format], unthinking=UNTHINKING.get(chat_format, ""))
        (folder / "chat_template.jinja").write_text(template)
        config = read_config(engine)
        self.codec = TextCodec.load(folder, {})
        self.preparation = Preparation(config, self.codec, Intake(config, self.codec), "tiny", 60.0)

    def chat(self, **more):
        return self.preparation.chat(json.dumps({"model": "tiny", "messages": ASKED} | more).encode(), "r")

    def response(self, **more):
        return self.preparation.response(json.dumps({"model": "tiny", "input": "Go."} | more).encode(), "r")

    def prompt(self, job):
        return self.codec.decode(job.choices[0].request.token_ids)


@pytest.fixture(scope="module")
def prepared(tiny_engine, tmp_path_factory):
    made = {}

    def of(chat_format):
        if chat_format not in made:
            folder = tmp_path_factory.mktemp("prepared") / "engine"
            made[chat_format] = Prepared(tiny_engine, folder, chat_format)
        return made[chat_format]

    return of


@pytest.fixture(scope="module")
def words():
    return Vocabulary()


def form_of(job):
    return job.choices[0].request.params.structured


def refused(ask, **more):
    with pytest.raises(ApiError) as refusal:
        ask(**more)
    assert refusal.value.status == 400
    return refusal.value


# -- tools -----------------------------------------------------------------------------------------------------------


def allowed(path, mode, *names):
    """A `tool_choice` that allows these."""
    if path == "response":
        return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("path", ["chat", "response"])
def test_allowed_tools_alone_may_be_called_and_all_are_in_the_prompt(prepared, words, path):
    ask, tools = getattr(prepared("qwen3"), path), TOOLS if path == "chat" else FLAT
    all_of_them = prepared("qwen3").prompt(ask(tools=tools))
    add, double = (written("qwen3", name, {"x": 1}) for name in ("add", "double"))
    for mode in ("auto", "required"):
        job = ask(tools=tools, tool_choice=allowed(path, mode, "add", "tell"))
        source = form_of(job).value
        assert prepared("qwen3").prompt(job) == all_of_them
        assert words.allows(source, add) and not words.allows(source, double)
        assert words.allows(source, "I add.\n" + add) == words.allows(source, "No.") == (mode == "auto")
        assert (job.functions, job.form_field) == (("add", "tell"), "tools")
    # All of them are no fewer: the reply is as free as without a choice.
    assert form_of(ask(tools=tools, tool_choice=allowed(path, "auto", "add", "tell", "double"))) is None
    error = refused(ask, tools=tools, tool_choice=allowed(path, "auto", "add", "never"))
    assert (error.param, str(error)) == ("tool_choice", "tool_choice: there is no tool 'never' to choose")


@pytest.mark.parametrize("path", ["chat", "response"])
@pytest.mark.parametrize(
    ("place", "choice"),
    [
        ("mode", {"mode": "always"}),
        ("tools", {"tools": []}),
        ("tools.0.type", {"tools": [{"type": "mcp", "server_label": "a"}]}),
        ("more", {"more": 1}),
    ],
)
def test_a_choice_of_allowed_tools_that_is_none_is_refused_by_its_place(prepared, path, place, choice):
    whole = allowed(path, "auto", "add")
    at = whole if path == "response" else whole["allowed_tools"]
    at.update(choice)
    error = refused(getattr(prepared("qwen3"), path), tools=TOOLS if path == "chat" else FLAT, tool_choice=whole)
    assert error.param == f"tool_choice.{'' if path == 'response' else 'allowed_tools.'}{place}"


#: As Codex offers the tools of an MCP server and of its own.
SUMS = {"type": "namespace", "name": "mcp__sums", "description": "Sums.", "tools": FLAT[:2]}
AGENTS = {"type": "namespace", "name": "agents__", "description": "Agents.", "tools": [{**FLAT[2], "strict": False}]}
SEARCH = {"type": "web_search", "external_web_access": False}


def test_functions_of_a_namespace_are_called_by_both_names(prepared, words):
    qwen = prepared("qwen3")
    asked = {"tools": [FLAT[0], SUMS, AGENTS, SEARCH], "stream": True}
    job = qwen.response(**asked)
    for name in ("double", "mcp__sums__double", "mcp__sums__add", "agents__tell"):
        assert f'"name": "{name}"' in qwen.prompt(job)
    assert "web_search" not in qwen.prompt(job)
    calls = "\n".join(written("qwen3", name, {"x": 1}) for name in ("mcp__sums__double", "agents__tell", "double"))
    for stream in (True, False):
        reply = spoken(qwen.response(**asked | {"stream": stream}), calls, "")
        events = read_strictly(reply) if stream else []
        response = events[-1].response if stream else Response.model_validate_json(json.dumps(reply), strict=True)
        called = [(item.namespace, item.name, item.arguments) for item in response.output]
        assert called == [(space, name, '{"x": 1}') for space, name in CALLED]
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [(item.namespace, item.name) for item in added] == (CALLED if stream else [])
        assert [tool.type for tool in response.tools] == ["function", "namespace", "namespace"]
    # What goes back is written as it was called.
    items = [item.model_dump(exclude_none=True) for item in response.output]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "2"} for item in items]
    past = qwen.prompt(qwen.response(**asked | {"input": [*ASKED, *items, *results]}))
    assert "calls mcp__sums__double 1 calls agents__tell 1 calls double 1" in past
    named = {"type": "function", "name": "add", "namespace": "mcp__sums"}
    must = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in (named, must):
        source = form_of(qwen.response(**asked, tool_choice=choice)).value
        assert words.allows(source, written("qwen3", "mcp__sums__add", {"x": 1, "y": 2}))
        assert not words.allows(source, written("qwen3", "double", {"x": 1}))


CALLED = [("mcp__sums", "double"), ("agents__", "tell"), (None, "double")]


@pytest.mark.parametrize(
    ("param", "says", "tools"),
    [
        ("tools.1.type", "only functions are taken, not 'mcp'", [FLAT[0], {"type": "mcp", "server_label": "a"}]),
        *[
            ("tools.0.type", f"only functions are taken, not {kind!r}", [{"type": kind}])
            for kind in ("file_search", "code_interpreter", "computer", "local_shell", "shell", "apply_patch", "custom")
        ],
        ("tools.0.tools.0.type", "only functions", [{**SUMS, "tools": [{"type": "custom", "name": "a"}]}]),
        ("tools.0.tools.0.name", "", [{**SUMS, "tools": [{"type": "function", "name": "a b"}]}]),
        ("tools.0.name", "", [{**SUMS, "name": "a b"}]),
        ("tools", "'mcp__sums__add', is another's, too", [SUMS, {"type": "function", "name": "mcp__sums__add"}]),
        ("tools", "'mcp__sums__double', is another's, too", [SUMS, {**SUMS, "name": "mcp__sums__"}]),
        ("tools", "two functions have the name 'double'", [FLAT[0], {**FLAT[0], "description": "other"}]),
        ("tools", "has more than 128 characters", [{**SUMS, "name": "a" * 124}]),
        ("tools", "129 functions", [FLAT[0], {**SUMS, "tools": [{**FLAT[0], "name": f"f{i}"} for i in range(128)]}]),
        ("tools.async", "not supported", [{**FLAT[0], "async": True}]),
    ],
)
def test_tools_that_nobody_here_would_run_are_refused_by_their_place(prepared, param, says, tools):
    error = refused(prepared("qwen3").response, tools=tools)
    assert error.param == param and says in str(error)


def test_what_agents_say_of_functions_besides_changes_nothing(prepared):
    more = {"defer_loading": True, "output_schema": {"type": "object"}, "async": False, "allowed_callers": ["direct"]}
    include = ["reasoning.encrypted_content", "web_search_call.action.sources"]
    job = prepared("qwen3").response(tools=[{**FLAT[0], **more}, {"type": "image_generation"}], include=include)
    assert prepared("qwen3").prompt(job) == prepared("qwen3").prompt(prepared("qwen3").response(tools=FLAT[:1]))
    assert refused(prepared("qwen3").response, tools=[SEARCH], tool_choice="required").param == "tool_choice"


# -- fields ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_each_effort_of_openais_thinks_or_not(prepared, effort):
    qwen = prepared("qwen3")
    for job in (qwen.chat(reasoning_effort=effort), qwen.response(reasoning={"effort": effort})):
        assert qwen.prompt(job).endswith("<think>\n") == (effort != "none")


#: What agents send that a reply is the same with.
HARMLESS: dict[str, object] = {"service_tier": "auto", "metadata": {"a": "b"}, "prompt_cache_key": "a", "user": "u"}
HARMLESS |= {"safety_identifier": "a", "prompt_cache_retention": "24h", "parallel_tool_calls": True, "seed": 5}


@pytest.mark.parametrize(
    ("path", "harmless"),
    [
        ("chat", {"store": True, "verbosity": "medium", "max_completion_tokens": 5, "stop": ["a", "b"], "n": 2}),
        ("chat", {"store": False, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True}),
        ("response", {"store": False, "text": {"verbosity": "medium"}, "max_output_tokens": 5, "stop": ["a"]}),
        ("response", {"stream": True, "stream_options": {"include_obfuscation": False}, "include": []}),
    ],
)
def test_what_agents_say_besides_is_taken(prepared, path, harmless):
    ask = getattr(prepared("qwen3"), path)
    assert prepared("qwen3").prompt(ask(**HARMLESS, **harmless)) == prepared("qwen3").prompt(ask())


@pytest.mark.parametrize(
    ("path", "says", "more"),
    [
        ("chat", 'verbosity: not supported; leave it out, or at "medium"', {"verbosity": "low"}),
        ("chat", "reasoning_effort: Input should be 'none', 'minimal',", {"reasoning_effort": "lots"}),
        ("chat", "stream_options: only with stream: true", {"stream_options": {"include_usage": True}}),
        ("chat", "web_search_options: not supported; leave it out", {"web_search_options": {}}),
        ("response", "store: responses are not stored here; leave it out, or false", {"store": True}),
        ("response", 'text.verbosity: not supported; leave it out, or at "medium"', {"text": {"verbosity": "high"}}),
        ("response", "reasoning.effort: Input should be 'none', 'minimal',", {"reasoning": {"effort": "lots"}}),
        ("response", 'truncation: not supported; leave it out, or at "disabled"', {"truncation": "auto"}),
        ("response", "include: 'file_search_call.results' is not", {"include": ["file_search_call.results"]}),
        ("response", "tool_choice.type: only functions are taken, not 'mcp'", {"tool_choice": {"type": "mcp"}}),
        ("response", "input.0: only items of type message, reason", {"input": [{"type": "custom_tool_call"}]}),
        ("response", "input.0: items are not stored here", {"input": [{"type": "item_reference", "id": "a"}]}),
    ],
)
def test_what_is_not_done_is_refused_in_a_line_that_says_what_is(prepared, path, says, more):
    error = str(refused(getattr(prepared("qwen3"), path), **more))
    assert error.startswith(says) and "\n" not in error


# -- replies ---------------------------------------------------------------------------------------------------------


def spoken(job, *texts, reason="stop", ids_of=lambda text: [7]):
    """What an engine's texts, of these tokens, make of a job: its events, and the whole reply."""

    async def pieces(self, request):
        for at, text in enumerate(texts, start=1):
            scored = [] if request.params.logprobs is None else [TokenLogprobs(-0.5, ((7, -0.5), (8, -1.5)))]
            ids = ids_of(text)
            yield Piece(text, len(ids), ids, 0, 0, [], reason if at == len(texts) else "", logprobs=scored)

    triton = type("Triton", (), {"stream": pieces, "room": room, "finish": finish})()

    async def events():
        return b"".join([some async for some in job.events(triton)])

    return asyncio.run(events() if job.stream else job.whole(triton))


async def room(self):
    return None


async def finish(self, request):
    pass


def read_strictly(events):
    """Reads each event by the type that the official client has for its name; nothing is converted."""
    kinds = {kind: one for one in get_args(get_args(ResponseStreamEvent)[0]) for kind in types_of(one)}
    read = []
    for block in events.decode().split("\n\n"):
        if block:
            name, data = block.removeprefix("event: ").split("\ndata: ")
            assert json.loads(data)["type"] == name
            read.append(kinds[name].model_validate_json(data, strict=True))
    return read


def types_of(event):
    return get_args(event.model_fields["type"].annotation)


#: The events of an item, after it was added and before it is done.
INSIDE = {
    "reasoning": [
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
    ],
    "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
}
#: Requests that a response repeats much of.
REPEATED: list[dict] = [
    {},
    {"tool_choice": allowed("response", "required", "add"), "parallel_tool_calls": False},
    {"tool_choice": {"type": "function", "name": "add"}, "metadata": {"a": "b"}, "instructions": "Be brief."},
    {"reasoning": {"effort": "high", "summary": "auto"}, "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 50},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}}},
    {"text": {"format": {"type": "json_object"}}, "tools": []},
]


@pytest.mark.parametrize("asked", REPEATED)
def test_every_event_of_a_response_is_one_that_the_official_client_knows(prepared, asked):
    said = ["Hm.</think>\n\nI ad", "d.\n", written("qwen3", "add", {"x": 1, "y": 2}), ""]
    for reason, last in (("stop", "completed"), ("length", "incomplete")):
        ask = {"tools": FLAT, "stream": True, "reasoning": {"effort": "high"}, **asked}
        if "text" in asked:  # which a reply that begins with thinking has no room for
            ask["reasoning"], said[0] = {"effort": "none"}, "<think>Hm.</think>\n\nI ad"
        events = read_strictly(spoken(prepared("qwen3").response(**ask), *said, reason=reason))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:2] + kinds[-1:] == ["created", "in_progress", last]
        output = events[-1].response.output
        told = iter(kinds[2:-1])
        for index, item in enumerate(output):
            of_item = [event for event in events if getattr(event, "output_index", None) == index]
            inside = ["output_item.added", *INSIDE[item.type], "output_item.done"]
            assert list(dict.fromkeys(event.type.removeprefix("response.") for event in of_item)) == inside
            assert [next(told) for _ in of_item] == [event.type.removeprefix("response.") for event in of_item]
        assert not list(told)
        whole = spoken(prepared("qwen3").response(**{**ask, "stream": False}), *said, reason=reason)
        assert Response.model_validate_json(json.dumps(whole), strict=True).usage == events[-1].response.usage


@pytest.mark.parametrize("error", [QueueFullError("full"), DeadlineError("late"), ValueError("a fault")])
def test_the_end_of_a_response_that_fails_is_one_that_the_official_client_knows(prepared, error):
    form = prepared("qwen3").response(stream=True).form
    events = form.opening(0) + form.added(0, Added([Part("content", "Hi")])) + form.failing(as_api_error(error, "r"))
    *_, last = read_strictly(events)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    (item,) = last.response.output  # what was said until then
    assert (item.status, item.content[0].text) == ("incomplete", "Hi")


def held_to(schema):
    """A `response_format`; of objects that have no more keys."""
    schema = {"type": "object", "required": list(schema), "properties": schema, "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


TEXT = {"type": "string"}
IN_FORM = [
    (held_to({"a": TEXT}), {"a": "b"}),
    (held_to({"name": TEXT}), {"name": "double"}),  # alone it would be a call without arguments
    (held_to({"name": TEXT, "parameters": TEXT}), {"name": "double", "parameters": "b"}),
    (held_to({"name": {"enum": ["triple"]}, "parameters": {}}), {"name": "triple", "parameters": {}}),
    (held_to({"parameters": {}, "name": TEXT}), {"parameters": {}, "name": "double"}),
]


@pytest.mark.parametrize(("form", "said"), IN_FORM)
@pytest.mark.parametrize("stream", [False, True])
def test_llamas_calls_and_forms_are_told_apart_by_how_they_begin(prepared, words, form, said, stream):
    llama, call = prepared("llama3"), written("llama3", "double", {"x": 4})
    calls = f"{call}; {call}"
    for text, count in ((json.dumps(said), 0), (calls, 2), (json.dumps(said)[:9], 0), (calls[:9], 0)):
        job = llama.chat(tools=TOOLS, response_format=form, stream=stream)
        allows = words.allows(form_of(job).value, text)
        assert allows == (text in (calls, json.dumps(said)))
        reply = spoken(job, *[text[at : at + 5] for at in range(0, len(text), 5)], "")
        content, found = read_chat(reply) if stream else read_message(reply["choices"][0]["message"])
        assert (content, found) == (("", ['{"x": 4}'] * 2) if count else (text, []))


@pytest.mark.parametrize("strict", [False, True])
def test_a_text_may_have_the_next_parameters_tag_in_it_where_calls_are_strict(prepared, strict):
    """Of others a model leaves the end of a value out at times, and the tag is taken for the next parameter's."""
    schema = {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]
    text = written("qwen3-coder", "f", {"a": "x\n<parameter=b>\ny"})
    _, (found,) = read_message(spoken(prepared("qwen3-coder").chat(tools=tools), text)["choices"][0]["message"])
    assert json.loads(found) == ({"a": "x\n<parameter=b>\ny"} if strict else {"a": "x", "b": "y"})


def read_message(message):
    return message["content"] or "", [call["function"]["arguments"] for call in message.get("tool_calls", [])]


def read_chat(events):
    """The content of a stream, and the arguments of its calls."""
    content, calls = "", []
    for block in events.decode().split("\n\n"):
        if block in ("", "data: [DONE]"):
            continue
        chunk = ChatCompletionChunk.model_validate_json(block.removeprefix("data: "), strict=True)
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                calls += [""] * (call.index + 1 - len(calls))
                calls[call.index] += call.function.arguments
    return content, calls


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        held_to({"name": TEXT, "parameters": {}}),
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"name": {"enum": ["tell"]}}}}},
    ],
)
def test_a_form_that_may_begin_as_llamas_calls_do_is_refused(prepared, form):
    error = refused(prepared("llama3").chat, tools=TOOLS, response_format=form)
    assert error.param == "response_format" and 'must not begin with {"name": "' in str(error)
    for own in ({"regex": "[{]a"}, {"choice": ["a", "{}"]}):
        error = refused(prepared("llama3").chat, tools=TOOLS, structured_outputs=own)
        assert error.param == "structured_outputs" and "must not begin with {" in str(error)
    flat = form if "json_schema" not in form else {"type": "json_schema", **form["json_schema"]}
    assert refused(prepared("llama3").response, tools=FLAT, text={"format": flat}).param == "text.format"
    # A call that must be has no form beside it.
    assert form_of(prepared("llama3").chat(tools=TOOLS, response_format=form, tool_choice="required"))


@pytest.mark.parametrize("n", [1, 100])
def test_a_form_that_is_too_large_is_refused_before_there_are_choices(prepared, n, monkeypatch):
    """Each would carry it to the engine, which refuses it."""
    monkeypatch.setattr("trtllm_dflash.serving.openai.preparation._with_seeds", None)
    for schema, says in (
        ({"enum": ["x" * 70_000]}, "characters; at most 65536 are taken"),
        ({"type": "integer", "multipleOf": 300_007}, "json_schema: a multipleOf of 300007 together"),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        error = refused(prepared("llama3").chat, response_format=form, n=n)
        assert error.param == "response_format" and says in str(error)


#: Of a chat's stream, what makes chunks of other forms.
STREAMED: list[dict] = [
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2, "stream_options": {"include_usage": True}},
    {"parallel_tool_calls": False, "reasoning_effort": "none"},
]


@pytest.mark.parametrize("asked", STREAMED)
def test_every_chunk_of_a_chat_is_one_that_the_official_client_knows(prepared, asked):
    two = "\n".join(written("qwen3", "add", {"x": 1, "y": 2}) for _ in range(2))
    said = ["<think>Hm.</think>\n\nI ad", "d.\n", two[:40], two[40:], ""]
    ask = prepared("qwen3").chat
    # What ends behind its one call is told by its tokens, and not by the texts that they came with.
    ids = {"ids_of": prepared("qwen3").codec.encode_words} if asked.get("parallel_tool_calls") is False else {}
    events = spoken(ask(tools=TOOLS, stream=True, **asked), *said, **ids).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    read = [ChatCompletionChunk.model_validate_json(one.removeprefix("data: "), strict=True) for one in events[:-2]]
    counted = asked.get("stream_options", {})
    last = [chunk for chunk in read if not chunk.choices]
    assert [chunk.usage.completion_tokens for chunk in last] == [5 * asked.get("n", 1)] * bool(counted)
    *most, _ = read
    assert all((chunk.usage is not None) == ("continuous_usage_stats" in counted) for chunk in most[1:])
    whole = spoken(ask(tools=TOOLS, **{name: asked[name] for name in asked if name != "stream_options"}), *said, **ids)
    completion = ChatCompletion.model_validate_json(json.dumps(whole), strict=True)
    for choice in completion.choices:
        chunks = [one for chunk in read for one in chunk.choices if one.index == choice.index]
        assert [one.delta.role for one in chunks if one.delta.role] == ["assistant"]
        assert "".join(one.delta.content or "" for one in chunks) == choice.message.content == "I add."
        calls = [call for one in chunks for call in one.delta.tool_calls or ()]
        names = [call.function.name for call in calls if call.function.name]
        assert names == [call.function.name for call in choice.message.tool_calls]
        assert len(names) == (1 if asked.get("parallel_tool_calls") is False else 2)
        assert [one.finish_reason for one in chunks if one.finish_reason] == [choice.finish_reason] == ["tool_calls"]
        scored = [token for one in chunks if one.logprobs for token in one.logprobs.content]
        # All tokens but the one that ends the reply, those of calls and of thinking among them.
        assert scored == (choice.logprobs.content if "logprobs" in asked else [])
        assert len(scored) == (5 if "logprobs" in asked else 0)


def test_a_past_whose_calls_the_template_leaves_out_is_refused(tiny):
    preparation = Preparation(tiny.config, tiny.codec, tiny.intake, "tiny", 60.0)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    past = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = json.dumps({"model": "tiny", "messages": past}).encode()
    with pytest.raises(ApiError, match="this engine's chat template writes no calls") as refusal:
        preparation.chat(body, "r")
    assert refusal.value.param == "messages.1.tool_calls"
