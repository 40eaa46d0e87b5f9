"""The OpenAI gateway: over the real server, and over a fake one for what a real one does not do on demand."""

import asyncio
import gzip
import http.client
import json
import re
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
import uvicorn

import trtllm_dflash
from tests.serving.fake_triton import Refuse, fake_triton, response
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash.engine.directory import digest
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.serving.client import TritonClient
from trtllm_dflash.serving.gateway import GatewaySettings, create_app
from trtllm_dflash.text.tokenizer import TextCodec

pytestmark = pytest.mark.slow

STORY = [{"role": "user", "content": "Tell a short story about a fox and a bridge in winter."}]
SUM = [{"role": "user", "content": "Tom has 53 books. Adam brings 5 bundles of 11 books. How many books are there?"}]


@contextmanager
def gateway(engine, triton_url, **settings):
    """A running gateway; its URL."""
    app = create_app(GatewaySettings(engine=engine, triton_url=triton_url, **settings))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started, "the gateway listens")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def client(url, key="none", kind=openai.OpenAI):
    return kind(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def nowhere():
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


class Reply:
    """A plain HTTP request's reply."""

    def __init__(self, url, path, body=None, **headers):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
        headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): headers[name] for name in headers}
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        self.status, self.headers, self.text = response.status, response.headers, response.read().decode()
        connection.close()

    def json(self):
        return json.loads(self.text)


def said(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


# -- over the real server --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(server):
    with gateway(server.engine, server.grpc_url, model_name="tiny") as url:
        yield url


@pytest.fixture(scope="module")
def api(url):
    return client(url)


def test_a_chat_says_what_generate_says_and_counts_it(api, tiny):
    (expected,) = tiny.generate([STORY], SamplingParams(max_tokens=100))
    reply = api.chat.completions.create(model="tiny", messages=STORY, max_completion_tokens=100, temperature=0)
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].finish_reason == expected.finish_reason
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, len(expected.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    drafts = usage.completion_tokens_details
    assert drafts.accepted_prediction_tokens == expected.accepted_tokens > 0
    assert drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens == expected.drafted_tokens


def test_a_streamed_chat_joined_is_the_whole_reply(api, tiny):
    (expected,) = tiny.generate([SUM], SamplingParams(max_tokens=200))
    arguments = dict(model="tiny", messages=SUM, temperature=0, max_tokens=200)
    chunks = list(api.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert said(chunks) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, expected.finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_each_prompt_of_a_list_has_a_choice_of_its_own(api, tiny):
    prompts = ["Once upon a time", "There was", "def add(a, b):"]
    expected = tiny.generate(prompts, SamplingParams(max_tokens=12))
    reply = api.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=12)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [choice.text for choice in reply.choices] == [one.text for one in expected]
    assert [choice.finish_reason for choice in reply.choices] == [one.finish_reason for one in expected]
    assert reply.usage.prompt_tokens == sum(one.prompt_tokens for one in expected)
    assert reply.usage.completion_tokens == sum(len(one.token_ids) for one in expected)
    texts = ["", "", ""]
    for chunk in api.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=12, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [one.text for one in expected]


def test_each_of_n_choices_has_a_seed_of_its_own(api, tiny):
    sampled = dict(max_tokens=12, temperature=0.9)
    expected = [tiny.generate([STORY], SamplingParams(**sampled, seed=seed))[0] for seed in (2**64 - 1, 0, 1)]
    arguments = dict(model="tiny", messages=STORY, n=3, seed=2**64 - 1, **sampled)
    reply = api.chat.completions.create(**arguments)
    assert [choice.message.content for choice in reply.choices] == [one.text for one in expected]
    assert reply.usage.prompt_tokens == expected[0].prompt_tokens  # once
    assert reply.usage.completion_tokens == sum(len(one.token_ids) for one in expected)
    texts = ["", "", ""]
    usage = {"include_usage": True}
    *chunks, last = api.chat.completions.create(**arguments, stream=True, stream_options=usage)
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [one.text for one in expected]
    assert sorted(chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason) == [0, 1, 2]
    assert (last.usage.prompt_tokens, last.usage.total_tokens) == (reply.usage.prompt_tokens, reply.usage.total_tokens)


@pytest.mark.parametrize("prompt", ["Once upon a time", [1, 1647, 202, 75], ["There was"], [[5, 6, 7]]])
def test_a_plain_completion_goes_on_with_text_or_tokens(api, tiny, prompt):
    one = prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt[0]
    (expected,) = tiny.generate([one], SamplingParams(max_tokens=16))
    reply = api.completions.create(model="tiny", prompt=prompt, temperature=0)  # 16 tokens are OpenAI's default
    assert reply.choices[0].text == expected.text
    chunks = api.completions.create(model="tiny", prompt=prompt, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text


def test_stop_strings_end_the_reply_before_them(api, tiny):
    (whole,) = tiny.generate([STORY], SamplingParams(max_tokens=100))
    stop = whole.text[40:46]
    reply = api.chat.completions.create(model="tiny", messages=STORY, temperature=0, max_tokens=100, stop=[stop, "\0"])
    assert reply.choices[0].message.content == whole.text[: whole.text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_what_only_the_server_refuses_bears_openais_name(api):
    with pytest.raises(openai.BadRequestError, match=r"bad_words: .* tokens") as refusal:
        api.completions.create(model="tiny", prompt="a", stream=True, extra_body={"bad_words": ["one two " * 20]})
    assert refusal.value.param == "bad_words"
    assert refusal.value.body["message"].startswith("bad_words: ")


def test_a_seed_makes_a_sampled_reply_again_and_none_makes_another(api, tiny):
    arguments = dict(model="tiny", messages=STORY, max_tokens=60, temperature=0.9, top_p=0.95)

    def text(**more):
        return api.chat.completions.create(**arguments, **more).choices[0].message.content

    (expected,) = tiny.generate([STORY], SamplingParams(max_tokens=60, temperature=0.9, top_p=0.95, seed=2**53 + 1))
    assert text(seed=2**53 + 1) == expected.text
    assert len({text() for _ in range(3)}) > 1


def test_a_top_p_of_0_leaves_the_likeliest_token(api, tiny):
    reply = api.chat.completions.create(model="tiny", messages=STORY, max_tokens=60, temperature=1.5, top_p=0)
    (greedy,) = tiny.generate([STORY], SamplingParams(max_tokens=60))
    assert reply.choices[0].message.content == greedy.text


def test_extensions_reach_the_engine(api, tiny):
    arguments = dict(model="tiny", messages=SUM, temperature=0)
    (greedy,) = tiny.generate([SUM], SamplingParams(max_tokens=50))
    plain = api.chat.completions.create(**arguments, max_tokens=50, extra_body={"draft": False, "priority": 1})
    assert plain.choices[0].message.content == greedy.text
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    on = api.chat.completions.create(**arguments, max_tokens=300, extra_body={"ignore_eos": True})
    assert (on.usage.completion_tokens, on.choices[0].finish_reason) == (300, "length")
    one = api.chat.completions.create(**arguments | {"temperature": 5}, max_tokens=50, extra_body={"top_k": 1})
    assert one.choices[0].message.content == greedy.text


def test_content_parts_and_developer_messages_are_text(api, tiny):
    messages = [{"role": "system", "content": "Be brief.\nVery."}, *SUM]
    (expected,) = tiny.generate([messages], SamplingParams(max_tokens=30))
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Very."}]
    sent = [{"role": "developer", "content": parts}, *SUM]
    reply = api.chat.completions.create(model="tiny", messages=sent, temperature=0, max_tokens=30)
    assert reply.choices[0].message.content == expected.text


def test_sixteen_clients_at_once_each_get_their_own_reply(url, tiny):
    prompts = [[{"role": "user", "content": f"There are {n} apples and {n + 3} pears. How many?"}] for n in range(16)]
    expected = tiny.generate(prompts, SamplingParams(max_tokens=16))

    async def ask(api, messages):
        stream = await api.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=16, stream=True
        )
        return said([chunk async for chunk in stream])

    async def ask_all():
        async with client(url, kind=openai.AsyncOpenAI) as api:
            return await asyncio.gather(*(ask(api, messages) for messages in prompts))

    assert asyncio.run(ask_all()) == [completion.text for completion in expected]


def test_a_client_that_leaves_frees_its_slot(server, url):
    cancelled = 'dflash_requests_total{outcome="cancelled"}'
    before = server.settled_metrics()
    body = {"model": "tiny", "messages": STORY, "max_tokens": 2000, "stream": True}
    with client(url).chat.completions.create(**body, extra_body={"ignore_eos": True, "draft": False}) as stream:
        next(stream)
        server.wait_for_gauge("dflash_slots_in_use", 1)
    server.wait_for_increase(before, {cancelled: 1})
    server.wait_for_gauge("dflash_slots_in_use", 0)


def test_prompts_that_begin_alike_count_cached_tokens(api):
    arguments = dict(model="tiny", prompt=[7, 5, 3] * 60, max_tokens=2, n=2)
    usages = [api.completions.create(**arguments).usage for _ in range(2)]
    assert [usage.prompt_tokens for usage in usages] == [180, 180]
    assert 100 < usages[1].prompt_tokens_details.cached_tokens < 180
    *_, last = api.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == usages[1].prompt_tokens_details.cached_tokens


def test_the_models_and_the_health(url, api):
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").max_model_len == 2048
    assert Reply(url, "/health").json() == {"status": "ok"}
    assert Reply(url, "/version").json() == {"version": trtllm_dflash.__version__}


def test_the_metrics_are_handed_on_to_those_who_have_the_key(server, tiny_engine):
    with gateway(server.engine, server.grpc_url, metrics_url=server.metrics_url, api_key="right") as url:
        assert Reply(url, "/metrics").status == 401
        page = Reply(url, "/metrics", Authorization="Bearer right")
        assert (page.status, page.headers["Content-Type"].split(";")[0]) == (200, "text/plain")
        assert "dflash_slots_total" in page.text and "nv_inference_request_success" in page.text
    with gateway(tiny_engine, nowhere(), metrics_url=f"http://{nowhere()}/metrics") as url:
        assert Reply(url, "/metrics").status == 503
    with gateway(tiny_engine, nowhere()) as url:
        assert Reply(url, "/metrics").status == 404


def test_raw_responses_bear_the_request_id(api):
    arguments = dict(model="tiny", messages=SUM, max_tokens=4)
    raw = api.chat.completions.with_raw_response.create(**arguments, extra_headers={"X-Request-Id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1" and raw.parse().choices[0].message.content
    raw = api.chat.completions.with_raw_response.create(**arguments, extra_headers={"X-Request-Id": "no spaces"})
    assert re.fullmatch("[0-9a-f]{32}", raw.headers["x-request-id"])


# -- refusals: none of them reaches a server -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tiny_engine):
    """A gateway whose Triton is not there."""
    with gateway(tiny_engine, nowhere(), api_key="sesame", max_body_bytes=100_000) as url:
        yield url


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 129),
        ("n", 0),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tools.0.function.name", [{"type": "function", "function": {"name": "f<|im_end|>"}}]),
        ("tools.0.type", [{"type": "web_search"}]),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "low"),
        ("unheard_of", 1),
        ("lora_request", {"lora_name": "a"}),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("max_tokens", 2**31),
        ("seed", -(2**63) - 1),
        ("top_k", -2),
        ("tools.0.function", [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]),
        ("tool_choice: Input should be 'none'", "always"),
        ("tool_choice.function: ", {"type": "function"}),
        ("tool_choice.function.name: ", {"type": "function", "function": {"name": 5}}),
        ("stop", ""),
        ("stop", [""]),
        ("stream_options", {"include_usage": True}),
        ("stream", 1),
        ("priority", -1),
        ("chat_template_kwargs.chat_template", "{{ 1 }}"),
        ("chat_template_kwargs.messages", []),
        ("messages", []),
        ("messages", "hello"),
        ("messages.0.tool_calls.0.id", [{"role": "assistant", "content": "", "tool_calls": [{}]}]),
        ("messages.0", [{"role": "tool", "content": "42"}]),
        ("messages.0", [{"role": "user", "content": "42", "tool_call_id": "c"}]),
        ("messages.0", [{"role": "assistant"}]),
        (
            "messages.0.content",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}],
        ),
        ("messages.0.content", [{"role": "user", "content": 5}]),
        ("messages.0", [{"role": "user", "content": "42", "refusal": "no"}]),
        (
            "messages.0.tool_calls.0.function.name",
            [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "", "arguments": "{}"}}]}],
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(alone, field, value):
    field, _, message = field.partition(": ")
    name, _, rest = field.partition(".")
    value = {rest: value} if name == "chat_template_kwargs" else value
    body = {"messages": SUM, name: value}
    with pytest.raises(openai.BadRequestError) as refusal:
        client(alone, "sesame").post("/chat/completions", body={"model": "tiny", **body}, cast_to=object)
    assert refusal.value.body["param"].startswith(field)
    assert refusal.value.body["message"].startswith(f"{field}: {message}" if message else field)
    assert refusal.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 65),
        ("suffix", "."),
        ("messages", SUM),
        ("prompt", ["a", True]),
        ("prompt", ["a"] * 129),
        ("prompt", [True]),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [-1]),
        ("prompt", [2**70]),
        ("prompt", None),
    ],
)
def test_plain_completions_refuse_by_name_too(alone, field, value):
    with pytest.raises(openai.BadRequestError) as refusal:
        body = {"model": "tiny", "prompt": ["a", "b"], field: value}
        client(alone, "sesame").post("/completions", body=body, cast_to=object)
    assert refusal.value.param == field


def test_what_changes_nothing_is_accepted(tiny_engine):
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "n": 1, "presence_penalty": 0.0, "logit_bias": {}}
    harmless |= {"tools": [], "response_format": {"type": "text"}, "logprobs": False, "seed": None, "stop": None}
    with fake_triton(lambda _: iter([response("ok", 1, "stop")])) as (_, triton), gateway(tiny_engine, triton) as url:
        reply = Reply(url, "/v1/chat/completions", json.dumps({"model": "tiny", "messages": SUM, **harmless}))
    assert reply.json()["choices"][0]["message"]["content"] == "ok"


def test_chat_template_kwargs_are_the_templates_variables(tiny_engine, tmp_path):
    engine = shutil.copytree(tiny_engine, tmp_path / "engine")
    template = engine / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}{% if thinking %} thinking{% endif %}")
    config = json.loads((engine / "config.json").read_text())
    config["files"][template.name] = digest(template)
    config["chat_arguments"] = {"thinking": True}
    (engine / "config.json").write_text(json.dumps(config))
    prompts = []

    def note(inputs):
        prompts.append(inputs["input_ids"])
        yield response("ok", 1, "stop")

    with fake_triton(note) as (_, triton), gateway(engine, triton) as url:
        for kwargs in ({}, {"thinking": False}):
            message = {"role": "user", "content": "a fox"}
            body = {"model": "tiny", "messages": [message], "chat_template_kwargs": kwargs}
            assert Reply(url, "/v1/chat/completions", json.dumps(body)).status == 200
    codec = TextCodec.load(engine, {})
    assert [codec.decode(prompt) for prompt in prompts] == ["a fox thinking", "a fox"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 50_000, b'{"model": "tiny", "prompt": "\\ud800"}', b"NaN"]
)
def test_a_body_that_is_no_request_is_refused(alone, body):
    reply = Reply(alone, "/v1/completions", body, Authorization="Bearer sesame")
    assert reply.status == 400
    assert reply.json()["error"]["message"].startswith("the body: ")
    assert "Traceback" not in reply.text


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("path", "field", "given"),
    [
        ("chat/completions", "tools.0.function.parameters", [{"type": "function", "function": {"name": "f"}}]),
        ("responses", "tools.0.parameters", [{"type": "function", "name": "f"}]),
        ("chat/completions", "response_format.json_schema.schema", {"type": "json_schema", "json_schema": {}}),
        ("completions", "structured_outputs.json", {}),
        ("responses", "chat_template_kwargs", None),
    ],
)
def test_numbers_that_are_no_json_are_refused_by_name(alone, path, field, given, number):
    body = {"model": "tiny", "messages": SUM, "prompt": "a", "input": "a"}
    name, *steps = field.split(".")
    body = {key: value for key, value in body.items() if key in ("model", *REQUIRED[path])} | {name: given}
    at = body
    for step in (name, *steps[:-1]) if steps else ():
        at = at[int(step) if step.isdecimal() else step]
    at[steps[-1] if steps else name] = {"type": "object", "anyOf": [{"minimum": "NUMBER"}]}
    sent = json.dumps(body).replace('"NUMBER"', number)
    reply = Reply(alone, f"/v1/{path}", sent, Authorization="Bearer sesame")
    assert (reply.status, reply.json()["error"]["param"]) == (400, field)


REQUIRED = {"chat/completions": ["messages"], "completions": ["prompt"], "responses": ["input"]}


def test_texts_and_conversations_are_tokenized_and_back(alone, tiny):
    def post(path, **body):
        return Reply(alone, path, json.dumps(body), Authorization="Bearer sesame").json()

    ids = tiny.encode("A fox. 🦊")
    listed = {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": None}
    assert post("/tokenize", prompt="A fox. 🦊") == listed
    names = [tiny.codec.backend.id_to_token(token) for token in ids]
    assert post("/tokenize", prompt="A fox. 🦊", return_token_strs=True) == {**listed, "token_strs": names}
    words = post("/tokenize", model="tiny", prompt="A fox.", add_special_tokens=False)["tokens"]
    assert words == tiny.codec.encode_words("A fox.")
    chat = post("/tokenize", messages=SUM)["tokens"]
    assert chat == tiny.encode(SUM)
    assert post("/detokenize", tokens=chat)["prompt"] == tiny.codec.chat_text(SUM)
    nothing = {"count": 0, "max_model_len": 2048, "tokens": [], "token_strs": None}
    assert post("/tokenize", prompt="") == nothing
    assert post("/tokenize", prompt="", return_token_strs=True) == {**nothing, "token_strs": []}
    assert post("/detokenize", tokens=[]) == {"prompt": ""}
    for path, param, body in (
        ("/tokenize", "prompt", {}),
        ("/tokenize", "prompt", {"prompt": "a", "messages": SUM}),
        ("/tokenize", "model", {"prompt": "a", "model": "b"}),
        ("/detokenize", "tokens", {"tokens": [9999]}),
        ("/detokenize", "tokens", {"tokens": [5] * 2049}),
        ("/detokenize", "tokens.0", {"tokens": ["a"]}),
    ):
        assert post(path, **body)["error"]["param"] == param
    for path in ("/tokenize", "/detokenize", "/v1/responses"):
        assert Reply(alone, path, "{}").status == 401
        assert Reply(alone, path, b" " * 100_001, Authorization="Bearer sesame").status == 413
    assert Reply(alone, "/version").status == 401


def test_what_no_engine_would_fit_is_tokenized(alone, tiny):
    """As vLLM does: to count is to ask how much too long it is."""
    text = "A fox. " * 10_000
    long = [{"role": "user", "content": text}]
    for body, ids in (
        ({"prompt": text}, tiny.codec.encode(text)),
        ({"prompt": text, "add_special_tokens": False, "return_token_strs": True}, tiny.codec.encode_words(text)),
        ({"messages": long}, tiny.codec.encode_chat(long)),
    ):
        reply = Reply(alone, "/tokenize", json.dumps(body), Authorization="Bearer sesame")
        found = reply.json()
        assert (reply.status, reply.headers["Content-Type"]) == (200, "application/json")
        assert found["tokens"] == ids and found["count"] == len(ids) > 10 * found["max_model_len"]
        assert len(found["token_strs"] or ids) == len(ids)


def test_a_prompt_that_is_too_long_is_refused(alone, tiny_engine):
    with pytest.raises(openai.BadRequestError, match="has 2048 tokens; the limit is 2047") as refusal:
        client(alone, "sesame").completions.create(model="tiny", prompt=[5] * 2048)
    assert refusal.value.code == "context_length_exceeded"
    too_long = pytest.raises(openai.BadRequestError, match="the limit is 10")
    with gateway(tiny_engine, nowhere(), max_prompt_tokens=10) as url, too_long:
        client(url).chat.completions.create(model="tiny", messages=STORY)
    with pytest.raises(SettingsError, match="max_prompt_tokens 2048: this engine takes 2047"):
        create_app(GatewaySettings(engine=tiny_engine, max_prompt_tokens=2048))


def test_a_body_that_is_too_long_is_refused_before_it_is_read(alone):
    headers = {"Authorization": "Bearer sesame"}
    refused = Reply(alone, "/v1/completions", b" " * 100_001, **headers)
    assert refused.status == 413
    assert refused.json()["error"]["message"] == "the body is longer than 100,000 bytes; that limit is fixed"
    host, port = alone.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as raw:
        # Chunked, without a length, and never ended.
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n")
        raw.sendall(b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            raw.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_who_sends_a_body_that_is_too_long_to_its_end_is_told_so(alone):
    """What is left unread resets the connection, and the client then hears of that alone."""
    host, port = alone.removeprefix("http://").split(":")
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\nContent-Type: application/json\r\n"
    )
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as raw:
            raw.sendall(f"{head}Content-Length: {8 << 20}\r\n\r\n".encode())
            for _ in range(128):
                raw.sendall(b" " * (64 << 10))
            said = b"".join(iter(lambda: raw.recv(1000), b""))
        assert said.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in said


def test_a_web_page_cannot_post_here(alone):
    reply = Reply(alone, "/v1/completions", b"{}", Authorization="Bearer sesame", Content_Type="text/plain")
    assert reply.status == 415


def test_a_body_that_is_compressed_is_refused_as_such(alone):
    body, sesame = b'{"model": "tiny", "prompt": "a"}', {"Authorization": "Bearer sesame"}
    reply = Reply(alone, "/v1/completions", gzip.compress(body), Content_Encoding="gzip", **sesame)
    assert (reply.status, reply.json()["error"]["param"]) == (415, "Content-Encoding")
    assert Reply(alone, "/v1/completions", body, Content_Encoding="identity", **sesame).status == 503  # Triton's away


@pytest.mark.parametrize("key", ["x", "wrong", "sesame2", "sesam\xe9"])
def test_without_the_key_nothing_is_served(alone, key):
    for path in ("/v1/models", "/v1/nothing"):
        reply = Reply(alone, path, Authorization=f"Bearer {key}")
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer" and reply.headers["x-request-id"]
    assert Reply(alone, "/v1/models").status == 401
    with pytest.raises(openai.AuthenticationError) as refusal:
        client(alone, "wrong").models.list()
    assert refusal.value.code == "invalid_api_key"
    assert client(alone, "sesame").models.list().data[0].id == "tiny"


def test_an_unknown_model_or_path_is_not_found(alone):
    api = client(alone, "sesame")
    with pytest.raises(openai.NotFoundError) as refusal:
        api.completions.create(model="../../etc/passwd", prompt="a")
    assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="'tiny' does"):
        api.models.retrieve("a/b")
    for path in ("/docs", "/openapi.json", "/v1/embeddings"):
        reply = Reply(alone, path, Authorization="Bearer sesame")
        assert (reply.status, reply.json()["error"]["code"]) == (404, "unknown_url")
    assert Reply(alone, "/v1/completions", Authorization="Bearer sesame").status == 405


def test_without_triton_a_request_is_refused_at_once(alone):
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="no Triton server serves an engine at 127") as refusal:
            client(alone, "sesame").completions.create(model="tiny", prompt="a", stream=stream)
        assert (refusal.value.status_code, refusal.value.code) == (503, "unavailable")
    assert Reply(alone, "/health").status == 503


def test_an_engine_without_a_tokenizer_has_no_gateway(tiny_engine, tmp_path):
    config = json.loads((tiny_engine / "config.json").read_text())
    config["files"] = {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="no tokenizer"):
        create_app(GatewaySettings(engine=tmp_path))


# -- over a fake server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "text", "status", "kind", "shown"),
    [
        ("INVALID_ARG", "stop_words: too many", 400, openai.BadRequestError, "stop: too many"),
        ("UNAVAILABLE", "the queue is full", 429, openai.RateLimitError, "the queue is full"),
        ("UNAVAILABLE", "deadline: it passed", 504, openai.InternalServerError, "deadline: it passed"),
        ("CANCELLED", "the request was cancelled", 503, openai.InternalServerError, "the server cancelled"),
        (
            "INTERNAL",
            "Traceback (most recent call last)",
            500,
            openai.InternalServerError,
            "the server failed; its log",
        ),
    ],
)
def test_the_servers_errors_are_openais(tiny_engine, stream, code, text, status, kind, shown):
    def refuse(_):
        raise Refuse(code, text)
        yield

    def break_off(_):
        yield response("so far", 3)
        raise Refuse(code, text)

    with fake_triton(refuse) as (fake, triton), gateway(tiny_engine, triton) as url:
        api = client(url)
        with pytest.raises(kind, match=re.escape(shown)) as refusal:
            api.chat.completions.create(model="tiny", messages=SUM, stream=stream)
        assert refusal.value.status_code == status
        assert "Traceback" not in str(refusal.value.body)
        if code == "INVALID_ARG":
            assert refusal.value.param == "stop"
        fake.script = break_off
        if stream:  # the status has been sent: the error is an event, and the stream ends with it
            chunks = []
            with pytest.raises(openai.APIError, match=re.escape(shown)):
                chunks.extend(api.chat.completions.create(model="tiny", messages=SUM, stream=True))
            lines = Reply(url, "/v1/chat/completions", json.dumps({"model": "tiny", "messages": SUM, "stream": True}))
            *_, error, done, _ = lines.text.split("\n\n")
            assert list(json.loads(error.removeprefix("data: "))) == ["error"]
            assert done == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "param", "asked"),
    [
        ("chat/completions", "n", {"messages": SUM, "n": 4}),
        ("completions", "n", {"prompt": ["a", "b"], "n": 2}),
        ("completions", "prompt", {"prompt": ["a", "b", "c", "d"]}),
        ("completions", "best_of", {"prompt": "a", "best_of": 4, "stream": False}),
    ],
)
def test_choices_that_never_fit_are_the_requests_fault(tiny_engine, stream, path, param, asked):
    """To try again would not help, as it does where the queue is full."""

    def refuse(_):
        raise Refuse("UNAVAILABLE", "the queue is full")
        yield

    body = json.dumps({"model": "tiny", "stream": stream, **asked})
    with fake_triton(refuse) as (fake, triton), gateway(tiny_engine, triton) as url:
        for room, status in ((None, 429), ((2, 2), 429), ((2, 1), 400), ((1, 0), 400)):
            fake.room = room
            reply = Reply(url, f"/v1/{path}", body)
            assert reply.status == status
            error = reply.json()["error"]
            if status == 400:
                assert (error["param"], error["type"]) == (param, "invalid_request_error")
                assert error["message"] == (
                    f"{param}: 4 replies at a time; the server takes {sum(room)}, of which {room[0]} have a slot "
                    f"(build --max-batch) and {room[1]} wait (--max-queue)"
                )
            else:
                assert error["code"] == "queue_full" and reply.headers["Retry-After"] == "1"


def test_a_server_tells_how_many_requests_it_takes(server):
    async def ask(url):
        triton = TritonClient(url)
        try:
            return await triton.room()
        finally:
            await triton.close()

    assert asyncio.run(ask(server.grpc_url)) == (8, 256)
    assert asyncio.run(ask(nowhere())) is None


def test_a_server_that_breaks_off_without_a_reason_is_an_error(tiny_engine):
    broken = pytest.raises(openai.InternalServerError, match="the server failed; its log")
    with fake_triton(lambda _: iter([response("half", 1)])) as (_, triton), gateway(tiny_engine, triton) as url, broken:
        client(url).completions.create(model="tiny", prompt="a")


def test_a_reply_that_takes_too_long_is_ended(tiny_engine):
    def slow(inputs):
        assert inputs["deadline_ms"] == [200]
        yield response("a", 1)
        raise Refuse("UNAVAILABLE", "deadline: it passed before the reply was complete")

    with fake_triton(slow) as (_, triton), gateway(tiny_engine, triton, timeout=0.2) as url:
        with pytest.raises(openai.InternalServerError) as refusal:
            client(url).completions.create(model="tiny", prompt="a")
        assert (refusal.value.status_code, refusal.value.code) == (504, "deadline_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_what_waits_in_the_queue(tiny_engine, stream):
    arrived, go_on = threading.Event(), threading.Event()

    def wait(_):
        arrived.set()
        go_on.wait(PATIENCE)
        yield response("late", 1, "stop")

    with fake_triton(wait) as (fake, triton), gateway(tiny_engine, triton) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        body = json.dumps({"model": "tiny", "prompt": "a", "stream": stream})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert arrived.wait(PATIENCE)
        connection.close()
        try:
            assert fake.cancelled.wait(PATIENCE)
        finally:
            go_on.set()


def test_a_triton_that_comes_back_is_served_again(tiny_engine):
    url_of_triton = nowhere()
    with gateway(tiny_engine, url_of_triton) as url:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                client(url).completions.create(model="tiny", prompt="a")
            with fake_triton(lambda _: iter([response("ok", 1, "stop")]), url_of_triton):
                wait_until(lambda: Reply(url, "/health").status == 200, "the gateway is well")
                assert client(url).completions.create(model="tiny", prompt="a").choices[0].text == "ok"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_long_prompt_does_not_hold_up_streams(tiny_engine, monkeypatch, path):
    """While bodies of megabytes are parsed and tokenized, another reply's pieces come as they are asked for."""
    monkeypatch.setattr(TextCodec, "_check_length", lambda *_: None)  # else it is refused at once
    asked, read = threading.Semaphore(0), threading.Event()

    def answer(inputs):
        while not read.is_set():
            assert asked.acquire(timeout=PATIENCE)
            yield response("x", 1)
        yield response("", 1, "stop")

    body = json.dumps({"model": "tiny", "prompt": "word " * 400_000})
    with fake_triton(answer) as (_, triton), gateway(tiny_engine, triton) as url, ThreadPoolExecutor(1) as elsewhere:
        asked.release()
        stream = client(url).completions.create(model="tiny", prompt="a", stream=True)
        next(stream)
        long, pieces = elsewhere.submit(Reply, url, path, body), 0
        while not long.done():
            asked.release()
            next(stream)
            pieces += 1
        read.set()
        asked.release()
        assert ("the limit is 2047" if path == "/v1/completions" else '"count":4') in long.result().text
        print(pieces, "pieces")
    assert pieces > 20


def test_no_proxy_stands_between_the_gateway_and_triton(tiny_engine, monkeypatch):
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://{nowhere()}")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with fake_triton(lambda _: iter([response("ok", 1, "stop")])) as (_, triton), gateway(tiny_engine, triton) as url:
        assert Reply(url, "/health").status == 200
        reply = Reply(url, "/v1/completions", b'{"model": "tiny", "prompt": "a"}')
        assert reply.json()["choices"][0]["text"] == "ok"


def test_sixty_four_streams_share_one_channel(tiny_engine):
    together = threading.Barrier(64, timeout=PATIENCE)

    def meet(_):
        yield response("all ", 1)
        together.wait()  # each only goes on once all 64 are here
        yield response("here", 1, "stop")

    async def ask_all(url):
        async with client(url, kind=openai.AsyncOpenAI) as api:
            request = dict(model="tiny", prompt="a")
            replies = await asyncio.gather(*(api.completions.create(**request) for _ in range(64)))
        return {reply.choices[0].text for reply in replies}

    with fake_triton(meet) as (_, triton), gateway(tiny_engine, triton) as url:
        assert asyncio.run(ask_all(url)) == {"all here"}


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_events_are_lines_for_clients_of_any_kind(tiny_engine, path):
    """Some end a line where Unicode does, at characters that JSON has as they are."""
    asked = SUM if path == "chat/completions" else "a"
    body = json.dumps({"model": "tiny", "stream": True, REQUIRED[path][0]: asked})
    said = response("a\u2028b\u2029c\u0085d é", 1, "stop")
    with fake_triton(lambda _: iter([said])) as (_, triton), gateway(tiny_engine, triton) as url:
        text = Reply(url, f"/v1/{path}", body).text
    assert '"a\\u2028b\\u2029c\\u0085d é"' in text
    assert all(line.startswith(("data: ", "event: ")) for line in text.splitlines() if line)
