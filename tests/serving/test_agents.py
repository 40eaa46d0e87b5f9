"""What today's agents send to the OpenAI API, made into requests to an engine and read as they read it."""

import asyncio
import json
import shutil
from typing import get_args

import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.serving.test_tools import ASKED, ASKS, TEMPLATE, TOOLS, UNTHINKING
from tests.test_call_grammar import Vocabulary
from tests.test_reply_parsers import written
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import DeadlineError, QueueFullError
from trtllm_dflash.runtime.intake import Intake
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


# -- replies ---------------------------------------------------------------------------------------------------------


def spoken(job, *texts, reason="stop"):
    """What an engine's texts make of a job: its events, and the whole reply."""

    async def pieces(self, request):
        for at, text in enumerate(texts, start=1):
            yield Piece(text, 1, [], 0, 0, [], reason if at == len(texts) else "")

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
