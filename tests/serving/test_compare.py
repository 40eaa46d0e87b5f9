"""`compare`: over two live servers, one plain and one drafting, and one that is sabotaged; and over servers that say
on demand what a real one says rarely."""

import json
import shutil
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from tests.conftest import TINY, refusal, run
from tests.http_servers import listening
from tests.serving.conftest import ANYWHERE
from tests.serving.fake_triton import fake_triton
from tests.serving.test_gateway import gateway
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.commands.compare import UNSAFE
from trtllm_dflash.engine.directory import digest
from trtllm_dflash.foreign.compare import NEAR_TIE, Reply, Token, find_difference, shipped_prompts
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.sweep.openai_errors import NO_HTTP

pytestmark = pytest.mark.slow

# -- over live servers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafting(server):
    with gateway(server.engine, server.grpc_url, model_name="drafting") as url:
        yield url


@pytest.fixture(scope="module")
def plain(server, tmp_path_factory):
    """A second server, on the same engine, that drafts nothing."""
    from trtllm_dflash.serving.repository import DeploySettings, deploy
    from trtllm_dflash.serving.server import Server

    folder = tmp_path_factory.mktemp("plain")
    deploy(server.engine, folder / "repository", DeploySettings(device="cpu", draft=False))
    with (
        Server(folder / "repository", ANYWHERE, log=folder / "triton.log", patience=60) as running,
        gateway(server.engine, running.endpoints.grpc, model_name="plain") as url,
    ):
        yield url


@pytest.fixture(scope="module")
def sabotaged(server, tmp_path_factory):
    """The drafting server behind a gateway whose chat template cuts prompts short: a swap that somebody got wrong."""
    engine = tmp_path_factory.mktemp("sabotaged") / "engine"
    shutil.copytree(server.engine, engine)
    template = engine / "chat_template.jinja"
    content = "{{ message['content'] }}"
    assert content in template.read_text()
    template.write_text(template.read_text().replace(content, "{{ message['content'][:-60] }}"))
    config = json.loads((engine / "config.json").read_text())
    config["files"][template.name] = digest(template)
    (engine / "config.json").write_text(json.dumps(config))
    with gateway(engine, server.grpc_url, model_name="sabotaged") as url:
        yield url


def compared(a, b, *arguments, number=4, tokens=48):
    words = ("--number", number, "--max-tokens", tokens, *arguments, "--json")
    result = run("compare", "--a", a, "--b", b, *words)
    assert result.exit_code in (0, UNSAFE), result.output
    return result.exit_code, json.loads(result.stdout)


def test_from_plain_decoding_to_drafting_is_a_safe_swap(plain, drafting):
    code, report = compared(plain, drafting)
    assert code == 0 and report["safe"]
    assert report["equal"] == report["prompts"] == 4 and report["differences"] == []
    a, b = report["a"], report["b"]
    assert (a["model"], b["model"]) == ("plain", "drafting")
    assert a["acceptance_length"] is None and b["acceptance_length"] > 2
    assert 0 < b["acceptance_rate"] < 1
    assert a["tokens"] == b["tokens"] > 4 * 20
    for side in (a, b):
        assert side["logprobs"] is True
        assert 0 < side["time_to_first_text_s"]["median"] <= side["reply_s"]["median"]
        assert side["tokens_per_second"] > 0


def test_one_server_is_compared_with_itself_by_its_requests(drafting):
    code, report = compared(drafting, drafting, "--body-a", '{"draft": false}', number=4, tokens=24)
    assert code == 0
    assert report["a"]["acceptance_length"] is None and report["b"]["acceptance_length"] > 1


def test_a_sabotaged_server_is_an_unsafe_swap(plain, sabotaged):
    code, report = compared(plain, sabotaged, number=4, tokens=24)
    assert code == UNSAFE and not report["safe"]
    assert report["differences"] and not any(difference["near_tie"] for difference in report["differences"])
    difference = report["differences"][0]
    assert difference["a"] != difference["b"] and set(difference["margins"]) == {"a", "b"}


def test_the_verdict_is_the_last_line_for_people(plain, drafting, sabotaged):
    result = run("compare", "--a", plain, "--b", drafting, "--number", 2, "--max-tokens", 8)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "safe: 2 of 2 texts equal, 0 near-ties"
    assert "acceptance length    -" in result.stdout
    result = run("compare", "--a", plain, "--b", sabotaged, "--number", 4, "--max-tokens", 24)
    assert result.exit_code == UNSAFE
    assert result.stdout.splitlines()[-1].startswith("unsafe: ")
    assert "differs (A by " in result.stdout


def test_precisions_part_at_near_ties_whose_margins_log_probabilities_tell():
    """Greedy replies of the pair in FP32 and in BF16: none differs but where two tokens are nearly as likely."""
    prompts = [[{"role": "user", "content": text}] for text in read_prompts(8)["story"]]
    both = []
    for precision in ("fp32", "bf16"):
        folders = str(TINY / "target"), str(TINY / "drafter")
        with LLM.from_pretrained(*folders, precision=precision, device="cpu", max_batch=8, max_seq_len=256) as llm:
            replies = llm.generate(prompts, SamplingParams(max_tokens=40, logprobs=5))
            both.append([reply_of(llm, reply) for reply in replies])
    differences = [find_difference(*pair, NEAR_TIE) for pair in zip(*both, strict=True)]
    found = [difference for difference in differences if difference is not None]
    assert found and all(difference.near_tie for difference in found)
    assert all(set(difference.margins) == {"a", "b"} for difference in found)


def reply_of(llm, completion):
    """A reply as `compare` reads it from a server."""

    def text(token):
        return llm.codec.decode([token])

    rows = zip(completion.token_ids, completion.logprobs, strict=True)
    tokens = tuple(
        Token(text(token), its.logprob, {text(other): value for other, value in its.top_logprobs})
        for token, its in rows
    )
    return Reply(completion.text, completion.finish_reason, tokens, len(tokens), 0.0, 0.0, None)


# -- over servers that say what they are told to -----------------------------------------------------------------------


@contextmanager
def saying(tokens, finish="stop", logprobs=True, metrics="", models=("model",)):
    """A server that streams these tokens, each (text, log-probability, alternatives); its URL, and requests."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            if self.path == "/metrics":
                self.send(200 if metrics else 404, metrics.encode())
            else:
                self.send(200, json.dumps({"data": [{"id": name} for name in models]}).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            if body.get("logprobs") and logprobs == "refused":
                self.send(400, json.dumps({"error": {"message": "logprobs: not offered"}}).encode())
                return
            events = []
            for text, logprob, others in tokens:
                entry = {"token": text, "logprob": logprob}
                entry["top_logprobs"] = [{"token": t, "logprob": p} for t, p in {text: logprob, **others}.items()]
                told = {"content": [entry]} if logprobs is True else None
                events.append({"choices": [{"delta": {"content": text}, "logprobs": told, "finish_reason": None}]})
            events.append({"choices": [{"delta": {}, "finish_reason": finish}]})
            events.append({"choices": [], "usage": {"completion_tokens": len(tokens)}})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
            self.send(200, "".join(lines).encode())

        def send(self, status, content):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with listening(Handler) as url:
        yield url, asked


THE: tuple[str, float, dict[str, float]] = ("The", -0.1, {})
FOX = (" fox", -0.70, {" dog": -0.80, " cat": -3.0})
DOG = (" dog", -0.69, {" fox": -0.75, " cat": -3.0})
CAT = (" cat", -0.2, {" fox": -1.9})


def told(a, b, *arguments, of_a=None, of_b=None):
    with saying(a, **(of_a or {})) as (left, _), saying(b, **(of_b or {})) as (right, _):
        return compared(left, right, *arguments, number=1)


def test_a_near_tie_on_both_servers_is_safe_and_shown():
    code, report = told([THE, FOX], [THE, DOG])
    assert code == 0 and report["safe"] and report["near_ties"] == 1 and report["equal"] == 0
    (difference,) = report["differences"]
    assert (difference["position"], difference["token"]) == (4, 1)
    assert difference["margins"] == {"a": 0.1, "b": 0.06}
    assert (difference["a"], difference["b"]) == ("fox", "dog")


def test_between_two_of_ours_that_are_exact_there_are_no_near_ties():
    def page(model, **labels):
        every = {"model": model, "backend": "torch", "precision": "bf16", "exact": "yes", **labels}
        return "dflash_kernels_info{" + ",".join(f'{name}="{value}"' for name, value in every.items()) + "} 1\n"

    for labels, allowed in (({}, None), ({"exact": "no"}, 0.25), ({"precision": "fp32"}, 0.25)):
        pages = {"metrics": page("a")}, {"metrics": page("b", **labels)}
        code, report = told([THE, FOX], [THE, DOG], of_a=pages[0], of_b=pages[1])
        assert (code, report["near_tie"]) == (UNSAFE if allowed is None else 0, allowed)
        assert report["near_ties"] == (allowed is not None)


def test_a_clear_choice_on_either_server_is_unsafe():
    code, report = told([THE, FOX], [THE, CAT])
    assert code == UNSAFE
    assert report["differences"][0]["margins"] == {"a": 2.3, "b": 1.7}
    assert told([THE, FOX], [THE, DOG], "--near-tie", "0.08")[0] == UNSAFE
    assert told([THE, FOX], [THE, CAT], "--near-tie", "2.5")[0] == 0


def test_a_server_that_finds_its_own_token_much_less_likely_is_no_near_tie():
    broken = (" dog", -6.0, {" fox": -0.01})
    code, report = told([THE, FOX], [THE, broken], of_a={"logprobs": False})
    assert code == UNSAFE and report["differences"][0]["margins"] == {"b": -5.99}


def test_a_token_that_a_server_does_not_list_is_no_near_tie():
    close = (" fox", -0.7, {" cow": -0.71})
    code, report = told([THE, close], [THE, DOG])
    assert code == UNSAFE and not report["differences"][0]["near_tie"]


def test_the_margin_of_one_server_decides_where_the_other_offers_none():
    for logprobs in (False, "refused"):
        code, report = told([THE, FOX], [THE, DOG], of_b={"logprobs": logprobs})
        assert code == 0 and report["differences"][0]["margins"] == {"a": 0.1}
        assert (report["a"]["logprobs"], report["b"]["logprobs"]) == (True, False)


def test_without_log_probabilities_any_difference_is_unsafe():
    assert told([THE, FOX], [THE, DOG], of_a={"logprobs": False}, of_b={"logprobs": "refused"})[0] == UNSAFE


def test_a_reply_that_ends_sooner_is_a_difference():
    code, report = told([THE], [THE, DOG])
    assert code == UNSAFE and report["differences"][0]["a"] == "[end: stop]"
    assert told([THE], [THE], of_b={"finish": "length"})[0] == UNSAFE


def test_special_tokens_that_the_text_leaves_out_do_not_shift_the_place():
    special = Token("<|channel|>", -0.1, {})
    fox, dog = (Token(text, p, {**others, text: p}) for text, p, others in (FOX, DOG))
    a, b = (Reply(token.text, "stop", (special, token), 2, 0.1, 0.2, None) for token in (fox, dog))
    difference = find_difference(a, b, 0.25)
    assert difference.token == 1 and difference.near_tie


def test_acceptance_comes_from_the_servers_metrics_where_replies_do_not_tell():
    page = "sglang:spec_accept_length 5.37\n"
    with saying([THE], metrics=page) as (url, asked), saying([THE]) as (other, _):
        code, report = compared(url, other, number=1)
    assert code == 0
    assert report["a"]["acceptance_length"] == 5.37 and report["b"]["acceptance_length"] is None
    assert all(body["return_spec_tokens_details"] for body in asked)


def test_one_servers_metrics_tell_nothing_of_either_side():
    with saying([THE], metrics="sglang:spec_accept_length 5.37\n") as (url, _):
        _, report = compared(url, url, number=1)
    assert report["a"]["acceptance_length"] is None and report["b"]["acceptance_length"] is None


def test_requests_are_greedy_and_carry_the_further_fields():
    with saying([THE]) as (url, asked), saying([THE]) as (other, others):
        compared(url, other, "--body-a", '{"chat_template_kwargs": {"enable_thinking": false}}', number=1, tokens=7)
    (body,) = asked
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0.0, 7, True)
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and "chat_template_kwargs" not in others[0]
    assert body["messages"] == others[0]["messages"] == [{"role": "user", "content": shipped_prompts(1)[0]}]


def test_prompts_of_ones_own_are_sent_raw_or_as_chats(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "One fox"}\n{"prompt": "Two foxes"}\n')
    with saying([THE]) as (url, asked), saying([THE]) as (other, _):
        code, report = compared(url, other, "--prompts", tmp_path / "prompts.jsonl", "--raw")
    assert code == 0 and report["prompts"] == 2
    assert [body["prompt"] for body in asked] == ["One fox", "Two foxes"]
    assert all(body["logprobs"] == 5 for body in asked)  # as plain completions ask for them


def test_what_cannot_be_compared_is_one_line():
    for wrong in ("ftp://x", "http://127.0.0.1:abc", "http://[::1", "http://x:99999"):
        assert f"--a {wrong}: write http://HOST:PORT" in refusal("compare", "--a", wrong, "--b", "http://y")
    line = refusal("compare", "--a", "http://me:secret@127.0.0.1:1", "--b", "http://y")
    assert "--a: give no user and password in an address" in line and "secret" not in line
    with saying([THE]) as (url, _):
        line = refusal("compare", "--a", url, "--b", "http://127.0.0.1:9", "--number", 1)
        assert "--b http://127.0.0.1:9: no OpenAI API answers there" in line
        with fake_triton(lambda _: iter(())) as (_, grpc):
            line = refusal("compare", "--a", url, "--b", f"http://{grpc}", "--number", 1)
        assert line.endswith(f"no OpenAI API answers there: {NO_HTTP}")
        assert "is not a JSON object" in refusal("compare", "--a", url, "--b", url, "--body-b", "[1]")
    with saying([THE], models=("x", "y")) as (url, _):
        assert "--model-a: say which; the server has: x, y" in refusal("compare", "--a", url, "--b", url)
    with saying([THE], finish=None) as (url, _):
        assert "the stream ended before the reply did" in refusal("compare", "--a", url, "--b", url, "--number", 1)
