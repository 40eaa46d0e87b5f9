"""Tools through the OpenAI API, by the official client: a stand-in engine speaks each format's lines."""

import json
import shutil
from contextlib import nullcontext

import openai
import pytest

from tests.serving.fake_triton import Refuse, fake_triton, response
from tests.serving.test_gateway import client, gateway
from tests.test_reply_parsers import written
from trtllm_dflash.engine.directory import digest
from trtllm_dflash.text.tokenizer import TextCodec

pytestmark = pytest.mark.slow

# As short as a template can be that asks for calls in the format: only the line about calls tells them apart.
TEMPLATE = """{{%- if tools %}}{{% for tool in tools %}}tool {{{{ tool | tojson }}}}
{{% endfor %}}{ask}
{{% endif %}}{{%- for message in messages %}}{{{{ message.role }}}}: {{{{ message.content }}}}
{{%- if message.reasoning_content is defined %}} (thought {{{{ message.reasoning_content }}}}){{% endif %}}
{{%- for call in message.tool_calls or [] %}} calls {{{{ call.function.name }}}} {{{{ call.function.arguments.x }}}}
{{%- endfor %}};
{{%- for result in message.tool_responses or [] %}}

tool: {{{{ result.response }}}};
{{%- endfor %}}

{{% endfor %}}{{% if enable_thinking is defined and enable_thinking %}}<think>
{{% else %}}{unthinking}{{% endif %}}"""
ASKS = {
    "qwen3": "<tool_call>",
    "qwen3-coder": "<tool_call><function=",
    "llama3": "Environment: ipython",
    "gemma4": "<|tool_call>call:",
    "minimax-m2": "<minimax:tool_call>",
    "kimi-k2": "<|tool_calls_section_begin|>",
}

UNTHINKING = {"gemma4": "<|channel>thought\n<channel|>"}  # how a prompt ends where the reply is not to think


@pytest.fixture(scope="module")
def engine_of(tiny_engine, tmp_path_factory):
    """The shipped pair's engine, with a chat template that asks for calls in a format, or always ends in one way."""

    def make(chat_format, end="", before="", call=""):
        engine = shutil.copytree(tiny_engine, tmp_path_factory.mktemp("engines") / chat_format)
        template = engine / "chat_template.jinja"
        written = TEMPLATE.format(ask=ASKS[chat_format], unthinking=UNTHINKING.get(chat_format, ""))
        written = written.partition("{% if enable_thinking")[0] + end if end else written
        template.write_text(before + (written.replace("{{ call.function.arguments.x }}", call) if call else written))
        config = json.loads((engine / "config.json").read_text())
        config["files"][template.name] = digest(template)
        (engine / "config.json").write_text(json.dumps(config))
        return engine

    return make


def pieces(text, codec):
    """A reply's responses, five characters each: the text, and its tokens."""
    cut = [text[at : at + 5] for at in range(0, len(text), 5)] or [""]
    return [(piece, codec.encode_words(piece)) for piece in cut]


class Script:
    """A stand-in engine: its prompts as text, and a reply to each in turn."""

    def __init__(self, engine, *replies):
        self._codec = TextCodec.load(engine, {})
        self._replies = iter(replies)
        self.prompts = []

    def __call__(self, inputs):
        self.prompts.append(self._codec.decode(inputs["input_ids"]))
        *begun, end = pieces(next(self._replies), self._codec)
        for text, ids in begun:
            yield response(text, len(ids), ids=ids)
        text, ids = end
        yield response(text, len(ids), "stop", ids=ids)


def tool(name, *parameters):
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in parameters}}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}


TOOLS = [tool("double", "x"), tool("add", "x", "y"), tool("tell", "x")]
ASKED = [{"role": "user", "content": "Double 4, add 5, tell me."}]


@pytest.mark.principal("False-qwen3", "True-qwen3", "True-kimi-k2", "False-llama3")
@pytest.mark.parametrize("chat_format", ASKS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_three_tools_to_its_end(engine_of, chat_format, stream):
    """Its own loop, whole and streamed: calls are run, their results sent back, until there are no more."""
    told = []
    run = {"double": lambda x: 2 * x, "add": lambda x, y: x + y, "tell": lambda x: told.append(x) or "told"}
    engine = engine_of(chat_format)
    script = Script(
        engine,
        ("" if chat_format == "llama3" else "I double.\n") + written(chat_format, "double", {"x": 4}),
        written(chat_format, "add", {"x": 8, "y": 5}),
        written(chat_format, "tell", {"x": 13}),
        "It is 13.",
    )
    messages = list(ASKED)
    with fake_triton(script) as (_, triton), gateway(engine, triton) as url:
        api = client(url)
        while True:
            if stream:
                with api.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as events:
                    events.until_done()
                    choice = events.get_final_completion().choices[0]
            else:
                choice = api.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0]
            message = choice.message
            if not message.tool_calls:
                break
            assert choice.finish_reason == "tool_calls"
            messages.append(message.to_dict(exclude_none=True))
            for call in message.tool_calls:
                result = run[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    assert (message.content, choice.finish_reason, told) == ("It is 13.", "stop", [13])
    assert (messages[1].get("content") or "") == ("" if chat_format == "llama3" else "I double.")
    assert len({call["id"] for message in messages for call in message.get("tool_calls", ())}) == 3
    # What the model read: the tools, its own calls with arguments that are an object, and their results.
    assert '"name": "add"' in script.prompts[0] and ASKS[chat_format] in script.prompts[0]
    for line in ("calls double 4;\ntool: 8;", "calls add 8;\ntool: 13;", "calls tell 13;\ntool: told;"):
        assert line in script.prompts[-1]


def test_several_calls_are_streamed_one_after_another(engine_of):
    engine = engine_of("qwen3")
    calls = "\n".join(written("qwen3", "double", {"x": x}) for x in (1, 2))
    script = Script(engine, f"<think>\nTwo.\n</think>\n\nBoth:\n{calls}", calls, calls)
    arguments = dict(model="tiny", messages=ASKED, tools=TOOLS)
    with fake_triton(script) as (_, triton), gateway(engine, triton) as url:
        api = client(url)
        deltas = [chunk.choices[0].delta for chunk in api.chat.completions.create(**arguments, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Two."
        assert "".join(delta.content or "" for delta in deltas) == "Both:"
        parts = [part for delta in deltas for part in delta.tool_calls or ()]
        for index, x in enumerate((1, 2)):
            first, *others = [part for part in parts if part.index == index]
            assert (first.id[:5], first.type, first.function.name) == ("call_", "function", "double")
            assert json.loads("".join(part.function.arguments for part in others)) == {"x": x}
            assert all(part.id is None and part.function.name is None for part in others)
            assert len(others) > 1  # they come as they are written
        assert api.chat.completions.create(**arguments).choices[0].message.content is None
        one = api.chat.completions.create(**arguments, parallel_tool_calls=False).choices[0]
        assert [call.function.arguments for call in one.message.tool_calls] == ['{"x": 1}']
        assert one.finish_reason == "tool_calls"


def test_without_tools_or_with_none_there_are_no_calls(engine_of):
    engine = engine_of("qwen3")
    text = written("qwen3", "double", {"x": 1})
    script = Script(engine, text, text)
    with fake_triton(script) as (_, triton), gateway(engine, triton) as url:
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            reply = client(url).chat.completions.create(model="tiny", messages=ASKED, **more)
            assert reply.choices[0].message.content == text
            assert reply.choices[0].message.tool_calls is None
    assert script.prompts[0] == script.prompts[1]


BOOK = {
    "type": "object",
    "properties": {
        "class": {"enum": ["first", "second"]},
        "seats": {"type": "integer", "minimum": 1, "maximum": 9},
        "stops": {"type": "array", "items": {"enum": ["Rome", "Bern"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["class", "seats", "stops"],
    "additionalProperties": False,
}
BOOKING = {"type": "function", "function": {"name": "book", "parameters": BOOK, "strict": True}}


@pytest.mark.principal("qwen3-coder", "llama3")
@pytest.mark.parametrize("chat_format", ASKS)
def test_calls_that_must_be_and_are_strict_keep_to_their_schema(server, engine_of, chat_format):
    """A real engine, which cannot call tools of itself."""
    arguments = dict(model="tiny", messages=ASKED, max_tokens=250, temperature=1, seed=3, parallel_tool_calls=False)
    named = {"type": "function", "function": {"name": "book"}}
    flat = {"type": "function", **BOOKING["function"]}
    with gateway(engine_of(chat_format), server.grpc_url) as url:
        api = client(url)
        for choice, tools in (("required", [BOOKING]), (named, [*TOOLS, BOOKING])):
            whole = api.chat.completions.create(**arguments, tools=tools, tool_choice=choice).choices[0]
            with api.chat.completions.stream(**arguments, tools=tools, tool_choice=choice) as events:
                events.until_done()
                streamed = events.get_final_completion().choices[0]
            assert len({reply.message.tool_calls[0].function.arguments for reply in (whole, streamed)}) == 1
            for reply in (whole, streamed):
                (call,) = reply.message.tool_calls
                found = json.loads(call.function.arguments)
                assert (call.function.name, reply.finish_reason) == ("book", "tool_calls")
                assert not reply.message.content
                assert found.keys() == BOOK["properties"].keys()
                assert found["class"] in ("first", "second") and 1 <= found["seats"] <= 9
                assert found["stops"] and set(found["stops"]) <= {"Rome", "Bern"}
        for choice in ("required", {"type": "function", "name": "book"}):
            asked = dict(input="Go.", tools=[flat], tool_choice=choice, temperature=0, max_output_tokens=120)
            response = api.responses.create(model="tiny", **asked)
            # As many calls as there is room for, where they may be; what is cut off of the last one is a message.
            cut = {"message"} if response.status == "incomplete" else set()
            assert {item.type for item in response.output} - cut == {"function_call"}
            assert (response.tool_choice if choice == "required" else response.tool_choice.model_dump()) == choice
        empty = {"type": "function", "function": {"name": "ping"}}
        asked = {"messages": ASKED, "tools": [*TOOLS, empty], "max_tokens": 120, "seed": 3}
        choice = api.chat.completions.create(model="tiny", **asked, tool_choice=empty).choices[0]
        assert choice.message.tool_calls[0].function.arguments == "{}"
        # The beginning of a call that is cut off is nothing that was said.
        asked |= {"max_tokens": 3, "tool_choice": "required"}
        cut = api.chat.completions.create(model="tiny", **asked).choices[0]
        assert (cut.message.content, cut.message.tool_calls, cut.finish_reason) == ("", None, "length")
        wrong = {"type": "object", "properties": {"x": {"type": "int"}}, "required": ["x"]}
        for strict in (True, False):  # which is held to what is a schema's in it
            broken = {"type": "function", "function": {"name": "broken", "parameters": wrong, "strict": strict}}
            refused = pytest.raises(openai.BadRequestError, match=r"'broken'.*: #") if strict else nullcontext()
            with refused:
                api.chat.completions.create(model="tiny", **{**asked, "tools": [*TOOLS, broken]})
        # Where it may, it says what it would say without tools: the form has room for that.
        free = api.chat.completions.create(model="tiny", messages=ASKED, temperature=0, max_tokens=20, tools=[BOOKING])
        assert free.choices[0].message.content


@pytest.mark.principal("qwen3")
@pytest.mark.parametrize("chat_format", ASKS)
def test_what_is_no_call_keeps_to_the_form_that_is_asked_for_beside_tools(server, engine_of, chat_format):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"name": "a", "schema": schema}
    wanted = {"response_format": {"type": "json_schema", "json_schema": form}, "tools": [BOOKING], "max_tokens": 250}
    kinds = []
    with gateway(engine_of(chat_format), server.grpc_url) as url:
        api = client(url)
        for seed in range(6):
            asked = dict(model="tiny", messages=ASKED, temperature=1, seed=seed, **wanted)
            said = api.chat.completions.create(**asked).choices[0].message
            kinds.append("calls" if said.tool_calls else "form")
            assert said.tool_calls or json.loads(said.content)["a"] in (1, 2)
        flat = {"type": "function", **BOOKING["function"]}
        asked = {"tools": [flat], "text": {"format": {"type": "json_schema", **form}}, "max_output_tokens": 250}
        response = api.responses.create(model="tiny", input="Go.", temperature=0, **asked)
    assert response.output[0].type == "function_call" or json.loads(response.output_text)["a"] in (1, 2)
    assert "form" in kinds


def test_what_cannot_be_kept_is_refused_by_name(engine_of, tiny_engine):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "b"}}}
    strict = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    named = {"type": "function", "function": {"name": "f"}}
    nowhere = "127.0.0.1:1"
    with (
        gateway(engine_of("qwen3-coder"), nowhere) as url,
        gateway(tiny_engine, nowhere) as unknown,
        gateway(engine_of("minimax-m2", "<think>\n"), nowhere) as thinking,
        gateway(engine_of("llama3"), nowhere) as llama,
    ):
        for at, param, more in (
            (url, "tools", {"tools": strict}),
            (url, "tool_choice", {"tool_choice": "required"}),
            (url, "tool_choice", {"tools": TOOLS, "tool_choice": named}),
            (
                url,
                "structured_outputs",
                {"tools": TOOLS, "extra_body": {"structured_outputs": {"grammar": "start: /a/"}}},
            ),
            (llama, "response_format", {"tools": TOOLS, "response_format": {"type": "json_object"}}),
            (unknown, "tools", {"tools": TOOLS}),
            (unknown, "reasoning_effort", {"reasoning_effort": "low"}),
            (thinking, "reasoning_effort", {"reasoning_effort": "low"}),
            (thinking, "reasoning_effort", {"reasoning_effort": "none"}),
        ):
            with pytest.raises(openai.BadRequestError) as refusal:
                client(at).chat.completions.create(model="tiny", messages=ASKED, **more)
            assert refusal.value.param == param and refusal.value.body["message"].startswith(f"{param}: ")


#: As some templates guard themselves: one system message, at the beginning.
GUARD = """{% for message in messages %}{% if message.role == "system" and not loop.first -%}
{{ raise_exception("System message must be at the beginning.") }}{% endif %}{% endfor %}"""


def test_instructions_at_the_beginning_are_one_message(engine_of):
    engine, guarded = engine_of("qwen3"), engine_of("qwen3-coder", before=GUARD)
    script = Script(engine, *["Yes."] * 5)
    system, developer, user = ({"role": role, "content": f"The {role}."} for role in ("system", "developer", "user"))
    later = [system, user, developer, user]
    with fake_triton(script) as (_, triton), gateway(engine, triton) as url, gateway(guarded, triton) as strict:
        for at in (strict, url):
            api = client(at)
            api.chat.completions.create(model="tiny", messages=[system, developer, user])
            api.responses.create(model="tiny", instructions="The system.", input=[developer, user, user])
        with pytest.raises(openai.BadRequestError, match="must be at the beginning"):
            client(strict).chat.completions.create(model="tiny", messages=later)
        client(url).chat.completions.create(model="tiny", messages=later)
    for prompt in script.prompts[:4]:
        assert prompt.startswith("system: The system.\n\nThe developer.;\nuser: The user.;")
    assert script.prompts[4].startswith("system: The system.;\nuser: The user.;\nsystem: The developer.;")


NAMES = ["get weather", "météo"]  # that nobody offered, and nobody can
BY_NAME = "{% for name, value in call.function.arguments | items %}{{ name }}={{ value }},{% endfor %}"


@pytest.mark.parametrize(
    ("chat_format", "reply", "past"),
    [
        ("qwen3", "".join(written("qwen3", name, {"x": 1}) for name in NAMES), [f"calls {name} 1" for name in NAMES]),
        ("qwen3-coder", written("qwen3-coder", "add", {"x": 1, "y": 2}).partition("2")[0], ["calls add x=1,"]),
        ("minimax-m2", written("minimax-m2", "tell", {"x": "Rome"}).partition("e</")[0], ["calls tell x=Rom,"]),
    ],
)
def test_what_a_model_called_goes_back_whatever_it_called(engine_of, chat_format, reply, past):
    """By a name of its own, or cut off amid the arguments, which the template takes apart."""
    engine = engine_of(chat_format, call="" if chat_format == "qwen3" else BY_NAME)
    script = Script(engine, reply, "Sorry.", reply, "Sorry.")
    with fake_triton(script) as (_, triton), gateway(engine, triton) as url:
        api = client(url)
        message = api.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "wrong"} for call in message.tool_calls]
        api.chat.completions.create(model="tiny", messages=[*ASKED, message, *results], tools=TOOLS)
        output = api.responses.create(model="tiny", input=ASKED, tools=FLAT).output
        calls = [item.call_id for item in output if item.type == "function_call"]
        told = [{"type": "function_call_output", "call_id": call, "output": "wrong"} for call in calls]
        api.responses.create(model="tiny", input=[*ASKED, *output, *told], tools=FLAT)
    assert len(calls) == len(results) == len(past)
    for line in past:
        assert line in script.prompts[1] and line in script.prompts[3]


def test_messages_of_the_official_clients_parsers_go_back_as_they_are(engine_of):
    engine = engine_of("qwen3")
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    call = written("qwen3", "double", {"x": 1})
    script = Script(engine, call, "Yes.", call, "Yes.")
    arguments = dict(model="tiny", tools=strict)
    with fake_triton(script) as (_, triton), gateway(engine, triton) as url:
        completions = client(url).chat.completions
        messages = [completions.parse(messages=ASKED, **arguments).choices[0].message]
        with completions.stream(messages=[*ASKED, {"role": "assistant", "content": "a"}], **arguments) as events:
            events.until_done()
            assert events.get_final_completion().choices[0].message.content == "Yes."
        with completions.stream(messages=ASKED, **arguments) as events:
            events.until_done()
            messages.append(events.get_final_completion().choices[0].message)
        said = {"role": "assistant", "content": '{"a": 1}', "parsed": {"a": 1}}
        results = [{"role": "tool", "tool_call_id": one.tool_calls[0].id, "content": "2"} for one in messages]
        assert all(one.tool_calls[0].function.parsed_arguments == {"x": 1} for one in messages)
        past = [*ASKED, messages[0], results[0], messages[1], results[1], said, *ASKED]
        assert completions.create(messages=past, **arguments).choices[0].message.content == "Yes."


def test_what_was_said_without_content_is_taken(engine_of):
    engine = engine_of("qwen3")
    script = Script(engine, "Yes.")
    call = {"id": "c", "type": "function", "function": {"name": "double", "arguments": '{"x": 1}'}}
    past = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": None},
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
        {"role": "assistant", "content": None, "refusal": "No."},
    ]
    with fake_triton(script) as (_, triton), gateway(engine, triton) as url:
        client(url).chat.completions.create(model="tiny", messages=[*ASKED, *past, *ASKED])
    assert "calls double 1;\ntool: ;\nassistant:  (thought Hm.);\nassistant: No.;" in script.prompts[0]


def test_thinking_is_set_on_and_off(engine_of):
    engine = engine_of("qwen3")
    script = Script(engine, "Hm.\n</think>\n\nYes.", "Yes, st.", "Yes.")
    ways = [{"reasoning_effort": "low"}, {"reasoning_effort": "none", "stop": ["st"]}]
    ways.append({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}})
    past = [*ASKED, {"role": "assistant", "content": "No.", "reasoning_content": "So."}, *ASKED]
    with fake_triton(script) as (_, triton), gateway(engine, triton) as url:
        replies = [
            client(url).chat.completions.create(model="tiny", messages=past, **way).choices[0].message for way in ways
        ]
    assert [prompt.endswith("<think>\n") for prompt in script.prompts] == [True, False, False]
    assert "(thought So.)" in script.prompts[0]
    assert [reply.content for reply in replies] == ["Yes.", "Yes, ", "Yes."]
    assert replies[0].reasoning_content == "Hm."
    assert not hasattr(replies[1], "reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_gateway_ends_is_counted_as_complete(engine_of, server, stream):
    """On the real server: replies that are taken apart have their stop strings found here, others by the engine."""
    completed, cancelled = (f'dflash_requests_total{{outcome="{outcome}"}}' for outcome in ("completed", "cancelled"))
    engine = engine_of("qwen3")
    asked = dict(model="tiny", temperature=0, stream=stream, max_tokens=1900)
    asked["extra_body"] = {"ignore_eos": True, "draft": False, "chat_template_kwargs": {"enable_thinking": False}}
    with gateway(engine, server.grpc_url) as url:
        api = client(url)
        arguments = {**asked, "stream": False, "max_tokens": 60}
        text = api.chat.completions.create(messages=ASKED, **arguments).choices[0].message.content
        asked["stop"] = text[20:24]
        before = server.settled_metrics()
        chat = api.chat.completions.create(messages=ASKED, n=2, **asked)
        asked["extra_body"].pop("chat_template_kwargs")
        plain = api.completions.create(prompt=TextCodec.load(engine, {}).chat_text(ASKED), **asked)
        if stream:
            ends = [[chunk.choices[0].finish_reason for chunk in chunks] for chunks in (chat, plain)]
            assert [[end for end in of if end] for of in ends] == [["stop"] * 2, ["stop"]]
        else:
            assert {choice.message.content for choice in chat.choices} == {text[: text.index(asked["stop"])]}
            assert [choice.finish_reason for choice in (*chat.choices, *plain.choices)] == ["stop"] * 3
        server.wait_for_increase(before, {completed: 3, cancelled: 0})
        server.wait_for_gauge("dflash_slots_in_use", 0)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_behind_what_ends_a_reply_are_not_the_replys(engine_of, stream):
    """A step brings as many as were accepted: drafted replies counted more of them than plain ones, and told them."""
    engine = engine_of("qwen3")
    codec = TextCodec.load(engine, {})
    arguments = dict(model="tiny", messages=ASKED, stop=["st"], stream=stream)
    arguments |= {"stream_options": {"include_usage": True}} if stream else {}
    with fake_triton(Script(engine, "Yes, st. And more.")) as (_, triton), gateway(engine, triton) as url:
        reply = client(url).chat.completions.create(**arguments)
        usage = list(reply)[-1].usage if stream else reply.usage
    until, behind = (len(codec.encode_words(text)) for text in ("st", ". A"))
    assert len(codec.encode_words("st. A")) == until + behind > until
    assert usage.completion_tokens == len(codec.encode_words("Yes, ")) + until


def test_each_choice_is_ended_by_a_name_of_its_own(engine_of):
    """Two clients may call their requests alike."""
    engine = engine_of("qwen3")
    script = Script(engine, *["Yes, st. And more."] * 4)
    with fake_triton(script) as (fake, triton), gateway(engine, triton) as url:
        for _ in range(2):
            headers = {"X-Request-Id": "mine"}
            client(url).chat.completions.create(model="tiny", messages=ASKED, n=2, stop=["st"], extra_headers=headers)
    assert len(set(fake.completed)) == 4
    assert all(name.startswith("mine.") for name in fake.completed)


# -- /v1/responses ---------------------------------------------------------------------------------------------------

FLAT = [{"type": "function", **one["function"]} for one in TOOLS]


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_over_responses_calls_three_tools_to_its_end(engine_of, stream):
    """Nothing is stored: what a response has goes back as input, with the calls' results."""
    told = []
    run = {"double": lambda x: 2 * x, "add": lambda x, y: x + y, "tell": lambda x: told.append(x) or "told"}
    engine = engine_of("qwen3")
    script = Script(
        engine,
        "Double.\n</think>\n\nI double.\n" + written("qwen3", "double", {"x": 4}),
        "</think>" + written("qwen3", "add", {"x": 8, "y": 5}) + "\n" + written("qwen3", "double", {"x": 1}),
        "</think>" + written("qwen3", "tell", {"x": 13}),
        "</think>It is 13.",
    )
    items: list = list(ASKED)
    arguments = dict(model="tiny", instructions="Be brief.", tools=FLAT, store=False, reasoning={"effort": "high"})
    with fake_triton(script) as (_, triton), gateway(engine, triton) as url:
        api = client(url)
        for turn in range(4):
            if stream:
                with api.responses.stream(**arguments, input=items) as events:
                    kinds = [event.type for event in events]
                    response = events.get_final_response()
                assert kinds[:2] == ["response.created", "response.in_progress"]
                assert kinds[-1] == "response.completed"
            else:
                response = api.responses.create(**arguments, input=items)
            assert response.status == "completed"
            items += [item.to_dict() for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                result = run[call.name](**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})
            assert len(calls) == [1, 2, 1, 0][turn]
    assert (response.output_text, told) == ("It is 13.", [13])
    assert [item["type"] for item in items[1:5]] == ["reasoning", "message", "function_call", "function_call_output"]
    for line in (
        "system: Be brief.;\nuser: Double 4",
        "assistant: I double. (thought Double.) calls double 4;\ntool: 8;",
        "calls add 8 calls double 1;\ntool: 13;\ntool: 2;",
    ):
        assert line in script.prompts[-1]


def test_the_events_of_a_response_tell_it_whole(engine_of):
    engine = engine_of("qwen3")
    text = (
        "<think>\nHm 🦊.\n</think>\n\nBoth:\n"
        + written("qwen3", "double", {"x": 1})
        + written("qwen3", "tell", {"x": 2})
    )
    script = Script(engine, text, text)
    arguments = dict(model="tiny", input="Go.", tools=FLAT)
    with fake_triton(script) as (_, triton), gateway(engine, triton) as url:
        events = list(client(url).responses.create(**arguments, stream=True))
        whole = client(url).responses.create(**arguments)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = events[-1].response

    def told(item):
        keys = {"type", "role", "content", "summary", "name", "arguments", "status"}
        return {key: value for key, value in item.to_dict().items() if key in keys}

    assert [told(item) for item in done.output] == [told(item) for item in whole.output]
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [event.item for event in events if event.type == "response.output_item.done"] == done.output
    for index, item in enumerate(done.output):
        of_item = [event for event in events if getattr(event, "output_index", None) == index]
        kinds = [event.type.removeprefix("response.") for event in of_item]
        deltas = "".join(event.delta for event in of_item if event.type.endswith(".delta"))
        assert (kinds[0], kinds[-1]) == ("output_item.added", "output_item.done")
        if item.type == "function_call":
            assert deltas == item.arguments == of_item[-2].arguments
        else:
            assert (kinds[1], kinds[-2]) == ("content_part.added", "content_part.done")
            assert deltas == item.content[0].text == of_item[-3].text
    tokens = sum(len(ids) for _, ids in pieces(text, TextCodec.load(engine, {})))
    assert done.usage == whole.usage and whole.usage.output_tokens == tokens
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert json.loads(done.model_dump_json())["tools"][0]["name"] == "double"


@pytest.mark.parametrize(
    ("text", "streamed", "whole"),
    [
        ("<think>\nHm", ["reasoning-"], ["reasoning-"]),
        ("<think>\nHm.\n</think>\n\nBo", ["reasoning", "message-"], ["reasoning", "message-"]),
        (
            "Both:\n" + written("qwen3", "tell", {"x": 1}) + '\n<tool_call>\n{"name": "tell", "arguments": {"x"',
            ["message", "function_call", "function_call-"],
            ["message", "function_call", "function_call-"],
        ),
        # Whole, what is said before and behind calls is one item.
        (
            "Both:\n" + written("qwen3", "tell", {"x": 1}) + "\nTo",
            ["message", "function_call", "message-"],
            ["message-", "function_call"],
        ),
    ],
)
def test_the_item_that_is_cut_off_says_so_and_no_other(engine_of, text, streamed, whole):
    def told(items):
        return [item.type + {"completed": "", "incomplete": "-"}[item.status] for item in items]

    def cut(_):
        yield from (response(text[:5], 1), response(text[5:], 1), response("", 1, "length"))

    arguments = dict(model="tiny", input="Go.", tools=FLAT)
    with fake_triton(cut) as (_, triton), gateway(engine_of("qwen3"), triton) as url:
        assert told(client(url).responses.create(**arguments).output) == whole
        events = list(client(url).responses.create(**arguments, stream=True))
    assert told(events[-1].response.output) == streamed
    assert told([event.item for event in events if event.type == "response.output_item.done"]) == streamed


def test_a_response_that_is_cut_off_or_fails_says_so(tiny_engine):
    def long(_):
        yield response("Half", 2, "length")

    def fail(_):
        yield response("Half", 2)
        raise Refuse("INTERNAL", "Traceback")

    with fake_triton(long) as (fake, triton), gateway(tiny_engine, triton) as url:
        cut_off = client(url).responses.create(model="tiny", input="Go.", max_output_tokens=2)
        assert (cut_off.status, cut_off.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert cut_off.output_text == "Half"
        *_, last = client(url).responses.create(model="tiny", input="Go.", stream=True)
        assert last.type == "response.incomplete"
        fake.script = fail
        *_, last = client(url).responses.create(model="tiny", input="Go.", stream=True)
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert last.response.error.message.startswith("the server failed; its log says why")
        with pytest.raises(openai.InternalServerError):
            client(url).responses.create(model="tiny", input="Go.")


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("store", {"store": True}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "c"}),
        ("background", {"background": True}),
        ("tools.0.type", {"tools": [{"type": "file_search"}]}),
        ("tools", {"tools": FLAT}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("input.1", {"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}]}),
        ("reasoning.effort", {"reasoning": {"effort": "high"}}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("input", {"input": []}),
        ("input.0", {"input": [{"type": "web_search_call", "id": "w"}]}),
        ("input.0", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///"}]}]}),
        ("input.0.content", {"input": [{"role": "user", "content": [{"type": {}, "text": "a"}]}]}),
        ("input.0.content", {"input": [{"role": "user", "content": [{"type": [], "text": "a"}]}]}),
        ("input", {"input": "word " * 3000}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("unheard_of", {"unheard_of": 1}),
        ("lora_path", {"lora_path": "a"}),
        ("model", {"model": "other"}),
    ],
)
def test_what_responses_do_not_do_is_refused_by_name(unasked, param, more):
    with pytest.raises(openai.APIStatusError) as refusal:
        client(unasked).post("/responses", body={"model": "tiny", "input": "Go.", **more}, cast_to=object)
    assert refusal.value.status_code in (400, 404)
    assert refusal.value.body["param"].startswith(param)


@pytest.fixture(scope="module")
def unasked(tiny_engine):
    """A gateway whose Triton is not there."""
    with gateway(tiny_engine, "127.0.0.1:1") as url:
        yield url
