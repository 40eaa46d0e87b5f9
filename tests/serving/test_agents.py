"""What today's agents send to the OpenAI API, made into requests to an engine and read as they read it."""

import json
import shutil

import pytest

from tests.serving.test_tools import ASKED, ASKS, TEMPLATE, TOOLS, UNTHINKING
from tests.test_call_grammar import Vocabulary
from tests.test_reply_parsers import written
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.runtime.intake import Intake
from trtllm_dflash.serving.openai.errors import ApiError
from trtllm_dflash.serving.openai.preparation import Preparation
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
