"""`generate` from the command line and from Python, on the shipped pair."""

import json
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.checkpoints import make_drafter, make_target
from tests.conftest import TINY, build_tiny, refusal, run, succeeds
from tests.processes import start
from tests.waiting import PATIENCE
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.errors import DFlashError, EngineError, RequestError
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.scheduler import Scheduler

PROMPTS = [prompts[0] for prompts in read_prompts(1).values()]
PROMPT = PROMPTS[0]
KEYS = [
    "text",
    "token_ids",
    "prompt_tokens",
    "steps",
    "accepted_per_step",
    "acceptance_length",
    "seconds",
    "finish_reason",
]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Of two slots, for each command makes its caches anew."""
    engine = build_tiny(tmp_path_factory.mktemp("two") / "engine", max_batch=2)
    return ["generate", "--engine", engine, "--device", "cpu", "--max-tokens", 32]


@pytest.fixture(scope="module")
def reply(command):
    """The plain truth about one prompt, greedy, 32 tokens."""
    return json.loads(succeeds(*command, "--prompt", PROMPT, "--no-draft", "--ignore-eos", "--json"))


def rows(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


# -- what is printed -------------------------------------------------------------------------------------------------


def test_one_prompt_streams_the_text_that_json_has(command):
    streamed = run(*command, "--prompt", PROMPT)
    (row,) = rows(succeeds(*command, "--prompt", PROMPT, "--json"))
    assert streamed.stdout == row["text"] != ""
    assert streamed.stderr.startswith(f"\n[{len(row['token_ids'])} tokens, ")
    assert f"{row['acceptance_length']:.2f} tokens a step" in streamed.stderr


def test_a_prompt_may_come_from_standard_input(command):
    assert succeeds(*command, "--prompt", "-", stdin=PROMPT) == succeeds(*command, "--prompt", PROMPT)
    (row,) = rows(succeeds(*command, "--prompt", "-", "--json", stdin="\ufeffhi"))  # marked, as by Windows
    assert row["prompt_tokens"] == rows(succeeds(*command, "--prompt", "hi", "--json"))[0]["prompt_tokens"]


def test_a_file_of_json_lines_gives_one_object_a_line_in_order(command, tmp_path):
    # U+2028 ends a line for str.splitlines, but stands as it is in JSON; so does a byte order mark, from Windows.
    prompts = [*PROMPTS, "A line\u2028separator and a next line\x85.", "A\nline feed."]
    lines = [json.dumps({"prompt": prompt, "kind": "ignored"}, ensure_ascii=False) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\ufeff" + "\n\n".join(lines) + "\r\n", encoding="utf-8")
    output = rows(succeeds(*command, "--prompts", tmp_path / "prompts.jsonl", "--json", "--max-tokens", 12))
    alone = [rows(succeeds(*command, "--prompt", prompt, "--json", "--max-tokens", 12)) for prompt in prompts]
    assert [row["token_ids"] for row in output] == [row["token_ids"] for (row,) in alone]
    assert [row["prompt_tokens"] for row in output] == [row["prompt_tokens"] for (row,) in alone]
    for row in output:
        assert list(row) == KEYS
        assert len(row["accepted_per_step"]) == row["steps"]
        # All but the first token, which the prefill gives, came out of steps.
        assert row["acceptance_length"] == pytest.approx((len(row["token_ids"]) - 1) / row["steps"], abs=1e-4)
        assert row["seconds"] > 0


def test_a_file_of_text_lines_prints_each_prompt_and_its_reply(command, tmp_path):
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    output = succeeds(*command, "--prompts", tmp_path / "prompts.txt")
    texts = [row["text"] for row in rows(succeeds(*command, "--prompts", tmp_path / "prompts.txt", "--json"))]
    assert output == "".join(f">>> {prompt}\n{text}\n\n" for prompt, text in zip(PROMPTS, texts, strict=True))


def test_without_drafting_the_tokens_are_the_same_one_a_step(command, reply):
    (drafted,) = rows(succeeds(*command, "--prompt", PROMPT, "--ignore-eos", "--json"))
    assert drafted["token_ids"] == reply["token_ids"]
    assert drafted["text"] == reply["text"]
    assert reply["acceptance_length"] == 1.0
    assert reply["accepted_per_step"] == [0] * 31


def test_chat_goes_through_the_template_and_raw_does_not(command, tiny):
    def prompt_tokens(*flags):
        return rows(succeeds(*command, "--prompt", PROMPT, "--max-tokens", 1, "--json", *flags))[0]["prompt_tokens"]

    user = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert prompt_tokens("--raw") == len(tiny.codec.encode(PROMPT))
    assert prompt_tokens() == len(tiny.codec.encode(user))
    assert prompt_tokens("--system", "Be brief.") == len(tiny.codec.encode(system + user))


# -- where a reply ends ----------------------------------------------------------------------------------------------


def test_max_tokens_is_exact(command):
    for count in (1, 2, 17, 18):
        (row,) = rows(succeeds(*command, "--prompt", PROMPT, "--ignore-eos", "--json", "--max-tokens", count))
        assert (len(row["token_ids"]), row["finish_reason"]) == (count, "length")
        # Drafts that max_tokens cuts off are not counted as accepted.
        assert sum(row["accepted_per_step"]) <= count - 1 <= sum(row["accepted_per_step"]) + row["steps"]
        assert row["acceptance_length"] is None if count == 1 else row["acceptance_length"] >= 1


def test_a_stop_string_ends_the_text_before_itself(command, reply):
    stop = reply["text"][40:46]
    (row,) = rows(succeeds(*command, "--prompt", PROMPT, "--ignore-eos", "--stop", "never", "--stop", stop, "--json"))
    assert row["text"] == reply["text"].partition(stop)[0]
    assert row["finish_reason"] == "stop"
    assert row["token_ids"] == reply["token_ids"][: len(row["token_ids"])]
    assert len(row["token_ids"]) < 32
    assert succeeds(*command, "--prompt", PROMPT, "--ignore-eos", "--stop", stop) == row["text"]


@pytest.mark.slow
def test_a_stop_string_may_begin_in_one_step_and_end_in_another(tiny):
    """Seven characters from here and there in a reply: over several tokens, in a drafted block, over its end."""
    prompt = [{"role": "user", "content": PROMPT}]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (whole,) = tiny.generate([prompt], params)
    stops = [whole.text[i : i + 7] for i in range(0, len(whole.text) - 7, 9)]
    for draft in (True, False):
        each = [params.model_copy(update={"stop": (stop,)}) for stop in stops]
        for stop, completion in zip(stops, tiny.generate([prompt] * len(stops), each, draft), strict=True):
            assert completion.text == whole.text.partition(stop)[0]
            assert completion.finish_reason == "stop"
            assert whole.token_ids[: len(completion.token_ids)] == completion.token_ids


def test_a_stop_token_id_ends_the_reply_and_is_its_last_token(command, reply):
    token = reply["token_ids"][20]
    (row,) = rows(succeeds(*command, "--prompt", PROMPT, "--ignore-eos", "--stop-token-id", token, "--json"))
    assert row["token_ids"] == reply["token_ids"][: reply["token_ids"].index(token) + 1]
    assert row["finish_reason"] == "stop"


def test_the_model_s_end_token_ends_a_reply_unless_ignored(tiny):
    (end,) = tiny.config.stop_token_ids
    prompt = [{"role": "user", "content": PROMPT}]
    (ended,) = tiny.generate([prompt], SamplingParams(max_tokens=400))
    assert (ended.token_ids[-1], ended.finish_reason) == (end, "stop")
    assert end not in ended.token_ids[:-1]
    count = len(ended.token_ids) + 5
    (ignored,) = tiny.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))
    assert ignored.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert (len(ignored.token_ids), ignored.finish_reason) == (count, "length")


@pytest.fixture(scope="module")
def short_engine(tmp_path_factory):
    """An engine with a context of 48 tokens."""
    return build_tiny(tmp_path_factory.mktemp("short") / "engine", max_seq_len=48)


def test_a_reply_ends_where_the_context_does(short_engine, tiny):
    text = tiny.codec.decode(tiny.codec.encode(PROMPT)[:44])
    length = len(tiny.codec.encode(text))
    flags = ["--engine", short_engine, "--prompt", text, "--raw", "--ignore-eos", "--device", "cpu", "--json"]
    (row,) = rows(succeeds("generate", *flags, "--max-tokens", 100))
    assert length + len(row["token_ids"]) == row["prompt_tokens"] + len(row["token_ids"]) == 48
    assert row["finish_reason"] == "length"
    # The end of the context must not show in what comes before it.
    (free,) = tiny.generate([text], SamplingParams(max_tokens=len(row["token_ids"]), ignore_eos=True))
    assert row["token_ids"] == free.token_ids


def test_the_most_tokens_that_can_be_asked_for_are_no_harm_to_those_beside_it(short_engine):
    most = 2**31 - 1
    asked = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=most, min_tokens=most)]
    with LLM.load(short_engine, device="cpu") as llm:
        both = llm.generate([[9, 10, 11], [5, 6, 7]], asked)
        assert both[0].token_ids == llm.generate([[9, 10, 11]], asked[:1])[0].token_ids
    assert len(both[1].token_ids) == 48 - 3


def test_sampling_depends_on_the_seed_alone(command):
    def sampled(*flags):
        flags = ("--temperature", 3, "--top-p", 0.99, "--top-k", 200, "--ignore-eos", *flags)
        return rows(succeeds(*command, "--prompt", PROMPT, "--json", *flags))[0]["token_ids"]

    first = sampled("--seed", 7)
    assert sampled("--seed", 7) == first
    assert sampled("--seed", 7, "--no-draft") == first
    assert sampled("--seed", 8) != first


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "give one of --prompt TEXT and --prompts FILE"),
        (["--prompt", "a", "--prompts", "b"], "give one of --prompt TEXT and --prompts FILE"),
        (["--prompts", "/nowhere/a.txt"], "--prompts /nowhere/a.txt: cannot be read: No such file or directory"),
        (["--prompt", "", "--raw"], "error: --prompt: the prompt is empty"),
        (["--prompt", "word " * 2100], "the limit is 2047 (build --max-seq-len)"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0: "),
        (["--prompt", "a", "--temperature", "nan"], "--temperature nan: "),
        (["--prompt", "a", "--temperature", "inf"], "--temperature inf: "),
        (["--prompt", "a", "--top-p", "0"], "--top-p 0.0: "),
        (["--prompt", "a", "--top-p", "1.01"], "--top-p 1.01: "),
        (["--prompt", "a", "--top-k", "-1"], "--top-k -1: "),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens 0: "),
        (["--prompt", "a", "--seed", "-1"], "--seed -1: "),
        (["--prompt", "a", "--stop", ""], "--stop "),
        (["--prompt", "a", "--stop-token-id", "2048"], "--stop-token-id: 2048 is not a token id; they are 0 to 2047"),
        (["--prompt", "a", "--stop-token-id", "-1"], "--stop-token-id -1: "),
        (["--prompt", "a", "--device", "tpu"], "--device tpu: choose cpu, cuda or auto"),
        *((["--prompt", "a", how, "1"], f"{how}: without --temperature") for how in ("--top-k", "--top-p")),
        (["--prompt", "a", "--raw", "--system", "b"], "--system"),
        (["--prompt", "a", "--no-draft", "--draft-tree", "31"], "--draft-tree and --no-draft"),
        (["--prompt", os.fsdecode(b"\xff")], "--prompt: is not UTF-8"),
        (["--prompt", "a", "--system", os.fsdecode(b"\xff")], "--system: is not UTF-8"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(flags, says, command):
    assert says in refusal(*command, *flags)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b"\x89PNG\xff\x00", "is not UTF-8, from byte 0 on"),
        (b'{"prompt": "a"}\n\n{"prompt": "b"\n', "line 3 is not a JSON object"),
        (b'{"prompt": 7}\n', "line 1 is not a JSON object"),
        (b'{"text": "a"}\n', "line 1 is not a JSON object"),
        (b'{"prompt": "\\ud800"}\n', "not valid UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, "line 1 is not a JSON object"),
        (b'{"prompt": "a", "id": ' + b"1" * 5000 + b"}", "line 1 is not a JSON object"),
    ],
    ids=lambda content: content[:30],
)
def test_a_file_that_holds_no_prompts_is_named_with_the_line(content, says, command, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    line = refusal(*command, "--prompts", file)
    assert line.startswith(f"error: --prompts {file}: ")
    assert says in line


def test_of_several_prompts_the_wrong_one_is_named(command, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": ""}\n{"prompt": "b"}\n')
    line = refusal(*command, "--prompts", file, "--raw")
    assert line == f"error: --prompts {file}: prompt 2 of 3: the prompt is empty"


def test_an_empty_prompt_is_what_the_template_or_the_tokenizer_begins_with(command, tmp_path):
    (row,) = rows(succeeds(*command, "--prompt", "", "--json"))
    assert row["prompt_tokens"] > 0
    pair = {role: shutil.copytree(TINY / role, tmp_path / role) for role in ("target", "drafter")}
    tokenizer = Tokenizer.from_file(str(pair["target"] / "tokenizer.json"))
    begin = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    tokenizer.save(str(pair["target"] / "tokenizer.json"))
    engine = tmp_path / "engine"
    flags = ("--max-batch", 2, "--max-seq-len", 64, "--precision", "fp32", "--output", engine)
    succeeds("build", "--target", pair["target"], "--drafter", pair["drafter"], *flags)
    asked = (
        "generate",
        "--engine",
        engine,
        "--device",
        "cpu",
        "--prompt",
        "",
        "--raw",
        "--max-tokens",
        8,
        "--ignore-eos",
    )
    drafted, plain = (rows(succeeds(*asked, "--max-tokens", 8, "--json", *more))[0] for more in ((), ("--no-draft",)))
    assert (drafted["prompt_tokens"], len(drafted["token_ids"])) == (1, 8)
    assert drafted["token_ids"] == plain["token_ids"]


def test_standard_input_that_is_no_text_is_refused(command):
    line = refusal(*command, "--prompt", "-", stdin=b"\x89PNG\xff\x00")
    assert line == "error: --prompt -: is not UTF-8, from byte 0 on"
    assert refusal(*command, "--prompt", "-", stdin="word " * 2100).startswith("error: --prompt -: the prompt has ")
    for nothing in "", " \n":
        assert refusal(*command, "--prompt", "-", stdin=nothing) == "error: --prompt -: standard input holds no prompt"


@pytest.mark.slow
def test_closed_standard_streams_are_no_traceback(command):
    words = shlex.join([sys.executable, "-m", "trtllm_dflash", *map(str, command), "--max-tokens", "2", "--prompt"])
    closed = subprocess.run(f"{words} - <&-", shell=True, capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (1, "error: --prompt -: standard input is closed\n")
    silent = subprocess.run(f"{words} hello >&-", shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert silent.returncode == 0, silent.stderr
    table = f"{sys.executable} -m trtllm_dflash models >&-"
    untold = subprocess.run(table, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (untold.returncode, untold.stderr) == (0, "")


def test_a_reply_is_printed_where_the_terminal_lacks_its_characters(command, tmp_path):
    (tmp_path / "prompts.txt").write_text("caf\u00e9 \U0001f600", encoding="utf-8")
    words = [sys.executable, "-m", "trtllm_dflash", *map(str, command), "--max-tokens", "2", "--prompts"]
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([*words, tmp_path / "prompts.txt"], capture_output=True, check=False, env=latin)
    assert done.returncode == 0, done.stderr
    assert b">>> caf\xe9 \\U0001f600" in done.stdout


def test_a_wrong_prompt_among_right_ones_stops_all_before_anything_is_printed(command, tmp_path):
    (tmp_path / "prompts.txt").write_text("short\n" + "word " * 2100)
    assert "the limit is 2047" in refusal(*command, "--prompts", tmp_path / "prompts.txt", "--json")


def test_a_very_long_prompt_is_refused_in_one_line_too(command, caplog, monkeypatch):
    """Longer than the tokenizer's own limit, about which its library would log a line of its own."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    refusal(*command, "--prompt", "word " * 5000)
    assert [record for record in caplog.records if record.name.startswith("transformers")] == []


def test_no_engine_is_told_how_to_get_one(tmp_path):
    line = refusal("generate", "--engine", tmp_path / "nowhere", "--prompt", "a")
    assert str(tmp_path / "nowhere") in line
    assert "trtllm-dflash build" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_points_at_the_doctor(command):
    assert "trtllm-dflash doctor" in refusal(*command, "--prompt", "a", "--device", "cuda")


def test_a_usage_error_has_exit_code_2(command):
    assert run("generate", "--prompt", "a").exit_code == 2
    assert run(*command, "--prompt", "a", "--max-tokens", "many").exit_code == 2


def endless_reply(tiny_engine, ignored=()):
    """A command that prints a reply of 1,900 tokens."""
    words = [sys.executable, "-m", "trtllm_dflash", "generate", "--engine", str(tiny_engine), "--device", "cpu"]
    words += ["--prompt", PROMPT, "--ignore-eos", "--max-tokens", "1900"]
    return start([*words, "--no-draft"], ignored, bufsize=0, start_new_session=True)


@pytest.mark.slow
def test_ctrl_c_ends_a_reply_with_one_line_and_its_number(tiny_engine):
    process = endless_reply(tiny_engine)
    assert process.stdout.read(1) != ""
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (130, "\nerror: interrupted\n")  # behind what was said so far
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.slow
def test_a_script_s_background_job_does_not_hear_ctrl_c_and_ends_by_sigterm(tiny_engine):
    process = endless_reply(tiny_engine, ignored=[signal.SIGINT, signal.SIGHUP])
    assert process.stdout.read(1) != ""
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    assert process.stdout.read(1) != ""
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors.strip()) == (143, "error: terminated")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


# -- from Python -----------------------------------------------------------------------------------------------------

SHORT = SamplingParams(max_tokens=20, ignore_eos=True)


def test_a_prompt_may_be_text_or_a_conversation_or_token_ids(tiny):
    conversation = [{"role": "user", "content": PROMPT}]
    text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    completions = tiny.generate([conversation, text, tiny.codec.encode(text)], SHORT)
    assert completions[0].token_ids == completions[1].token_ids == completions[2].token_ids
    assert completions[0].text == tiny.codec.decode(completions[0].token_ids)
    assert {completion.prompt_tokens for completion in completions} == {len(tiny.encode(conversation))}
    assert tiny.encode(list(np.arange(5, 9))) == [5, 6, 7, 8]  # NumPy's whole numbers too


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random pair with two slots and no tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    target = make_target(folder / "target", vocab=16)
    drafter = make_drafter(folder / "drafter", target)
    return LLM.from_pretrained(str(target), str(drafter), precision="fp32", device="cpu", max_batch=2, max_seq_len=96)


def test_more_prompts_than_slots_with_parameters_of_their_own_come_out_as_one_by_one(small):
    prompts = [[(3 * i + j) % 15 for j in range(1 + 4 * i)] for i in range(7)]
    each = [SamplingParams(max_tokens=3 + 5 * i, temperature=i % 3 / 2, seed=i) for i in range(7)]
    together = small.generate(prompts, each)
    alone = [small.generate([prompt], params)[0] for prompt, params in zip(prompts, each, strict=True)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.accepted_per_step for c in together] == [c.accepted_per_step for c in alone]
    assert [len(c.token_ids) for c in together] == [params.max_tokens for params in each]


def test_without_a_tokenizer_token_ids_go_in_and_come_out(small):
    (completion,) = small.generate([[1, 2, 3]], SHORT)
    assert completion.text is None
    assert len(completion.token_ids) == 20
    assert small.generate([]) == []
    for prompt, params in [("text", SHORT), ([1], SamplingParams(stop=("text",)))]:
        with pytest.raises(RequestError, match="tokenizer"):
            small.generate([prompt], params)


def test_streamed_chunks_join_to_the_reply(tiny):
    conversation = [{"role": "user", "content": PROMPT}]
    (whole,) = tiny.generate([conversation], SHORT)
    for params in (SHORT, SHORT.model_copy(update={"stop": (whole.text[20:24],)})):
        for draft in (True, False):
            chunks = list(tiny.stream(conversation, params, draft))
            completion = chunks[-1].completion
            assert [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert "".join(chunk.text for chunk in chunks) == completion.text
            assert [token for chunk in chunks for token in chunk.token_ids] == completion.token_ids
            assert len(chunks) == 1 + completion.steps  # the prefill's token comes first
            assert completion.token_ids == tiny.generate([conversation], params, draft)[0].token_ids


def test_a_stream_has_ended_with_its_completion(small, monkeypatch):
    """Where the next step is launched before one is read, too: a conversation goes on at once."""
    monkeypatch.setattr(type(small.session), "ahead", property(lambda session: 1))
    stream = small.stream([1, 2, 3], SHORT)
    last = next(chunk for chunk in stream if chunk.completion is not None)
    small.generate([[1, 2, 3, *last.completion.token_ids]], SHORT)
    assert list(stream) == []


def test_each_reply_comes_once_it_and_those_before_it_are_complete(small, monkeypatch):
    lengths = (3, 40, 2, 5)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    prompts = [[5 + i, 9] for i in range(len(lengths))]
    expected = [completion.token_ids for completion in small.generate(prompts, params)]
    steps, run = [], small.session.run
    monkeypatch.setattr(small.session, "run", lambda step: steps.append(step) or run(step))
    seen = []
    for completion in small.generate_each(prompts, params):
        seen.append((completion.token_ids, len(steps)))
    assert [token_ids for token_ids, _ in seen] == expected
    counts = [count for _, count in seen]
    assert counts[0] < counts[1] and counts[2] == counts[1], "the third was complete before the second"
    with pytest.raises(RequestError, match="not a token id"):
        small.generate_each([[5], [1 << 30]])
    left = small.generate_each(prompts, params)
    next(left)
    small.generate(prompts[:1], params[:1])
    with pytest.raises(RequestError, match="another request began"):
        next(left)


def test_a_stream_that_another_request_overtakes_says_so(small):
    """They share the engine's slots: going on would give a wrong text without a word."""
    overtaken = small.stream([1, 2, 3], SHORT)
    next(overtaken)
    other = list(small.stream([4, 5], SHORT))
    assert other[-1].completion.token_ids == small.generate([[4, 5]], SHORT)[0].token_ids
    with pytest.raises(RequestError, match="another"):
        next(overtaken)


def test_a_stream_left_early_does_not_disturb_the_next(small):
    (expected,) = small.generate([[1, 2, 3]], SHORT)
    for _ in small.stream([7, 7, 7, 7], SHORT):
        break
    assert small.generate([[1, 2, 3]], SHORT)[0].token_ids == expected.token_ids


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_spec_generate_returns_the_prompt_and_generate_s_tokens(dtype, small):
    prompt = [1, 2, 3]
    out = small.spec_generate(torch.tensor([prompt], dtype=dtype), max_new_tokens=20)
    (completion,) = small.generate([prompt], SHORT)
    assert (out.shape, out.dtype) == ((1, 23), dtype)
    assert out[0].tolist() == prompt + completion.token_ids
    sampled = small.spec_generate(torch.tensor([prompt]), max_new_tokens=20, temperature=0.9, seed=3)
    (completion,) = small.generate([prompt], SHORT.model_copy(update={"temperature": 0.9, "seed": 3}))
    assert sampled[0].tolist() == prompt + completion.token_ids


def test_spec_generate_s_stop_tokens_take_the_place_of_the_model_s_own(tiny):
    prompt = torch.tensor([tiny.encode([{"role": "user", "content": PROMPT}])])
    (completion,) = tiny.generate([prompt[0].tolist()], SamplingParams(max_tokens=400))
    length = prompt.shape[1] + len(completion.token_ids)
    assert tiny.spec_generate(prompt, 400).shape[1] == length
    assert tiny.spec_generate(prompt, len(completion.token_ids) + 3, stop_token_ids=[]).shape[1] == length + 3
    stop = completion.token_ids[4]
    assert tiny.spec_generate(prompt, 400, stop_token_ids=[stop])[0, -1] == stop


def test_from_pretrained_gives_what_the_built_engine_gives(tiny, tiny_at):
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    straight = tiny_at(16).generate(conversations, SHORT)
    built = tiny.generate(conversations, SHORT)
    assert [(c.token_ids, c.text, c.accepted_per_step) for c in straight] == [
        (c.token_ids, c.text, c.accepted_per_step) for c in built
    ]


def test_a_pair_without_its_drafter_decodes_plainly(tiny):
    alone = LLM.from_pretrained(str(TINY / "target"), None, precision="fp32", device="cpu", max_seq_len=256)
    (completion,) = alone.generate([PROMPT], SHORT)
    assert completion.acceptance_length == 1
    assert completion.token_ids == tiny.generate([PROMPT], SHORT)[0].token_ids


def test_a_reply_of_one_token_took_no_step(small):
    (completion,) = small.generate([[1]], SamplingParams(max_tokens=1))
    assert (completion.steps, completion.accepted_per_step) == (0, [])
    assert math.isnan(completion.acceptance_length)


def test_leaving_the_with_block_closes_the_engine(tiny_engine):
    with pytest.raises(ZeroDivisionError), LLM.load(tiny_engine, "cpu") as llm:
        llm.generate([[1]], SamplingParams(max_tokens=2))
        raise ZeroDivisionError
    llm.close()  # once more does no harm
    with pytest.raises(EngineError, match="closed"):
        llm.generate([[1]], SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "empty"),
        ([2048], "0 to 2047"),
        ([-1], "0 to 2047"),
        ([0] * 2048, "2048 tokens"),
        (None, "prompt"),
        ([1, "a"], "messages"),
        ([1, True], "messages"),
        ([{"role": "user"}], "messages"),
        ({"role": "user", "content": "a"}, "messages"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(prompt, says, tiny):
    with pytest.raises(RequestError, match=says):
        tiny.generate([prompt])
    with pytest.raises(RequestError, match=says):
        next(tiny.stream(prompt))


def test_arguments_that_do_not_fit_are_refused(tiny):
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling parameters"):
        tiny.generate([[1], [2]], [SHORT])
    with pytest.raises(RequestError, match=r"\[1, N\], not \[3\]"):
        tiny.spec_generate(torch.tensor([1, 2, 3]))
    with pytest.raises(RequestError, match="a list of prompts"):
        tiny.generate("one text would be taken for a prompt a letter")
    with pytest.raises(DFlashError, match="precision"):
        LLM.from_pretrained(str(TINY / "target"), None, precision="fp4")


def test_another_thread_is_refused_while_one_generates(tiny_engine, monkeypatch):
    """Their requests would take one another's slots, and each reply be of both prompts."""
    step, refused = Scheduler.step, []

    def meddled_with(scheduler):
        if not refused:
            with ThreadPoolExecutor(1) as threads:
                refused.append(threads.submit(llm.generate, [[1, 2]]).exception())
        return step(scheduler)

    params = SamplingParams(max_tokens=6)
    with LLM.load(tiny_engine, "cpu") as llm:
        (alone,) = llm.generate([[5, 6, 7]], params)
        monkeypatch.setattr(Scheduler, "step", meddled_with)
        (reply,) = llm.generate([[5, 6, 7]], params)
        assert isinstance(refused[0], RequestError) and "another thread" in str(refused[0])
        assert reply.token_ids == alone.token_ids
        refused.clear()
        assert [token for chunk in llm.stream([5, 6, 7], params) for token in chunk.token_ids] == alone.token_ids
        assert isinstance(refused[0], RequestError)


@pytest.mark.parametrize("wrong", [{"max_tokens": 3}, 5, ["a", "b"]])
def test_sampling_parameters_of_another_type_are_refused_by_name(tiny_engine, wrong):
    with LLM.load(tiny_engine, "cpu") as llm, pytest.raises(RequestError, match="SamplingParams"):
        llm.generate([[1], [2]], wrong)


def test_prompts_may_be_any_list_of_them(tiny_engine):
    with LLM.load(tiny_engine, "cpu") as llm:
        params = SamplingParams(max_tokens=2)
        assert len(llm.generate((ids for ids in ([1], [2])), params)) == 2
        for wrong in ({"role": "user", "content": "x"}, None, 5):
            with pytest.raises(RequestError, match="give a list of prompts, not"):
                llm.generate(wrong, params)
