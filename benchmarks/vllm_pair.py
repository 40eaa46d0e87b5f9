"""The shipped pair, exported and served by vLLM through `launch`, beside our own engine on the same GPU.

    python benchmarks/vllm_pair.py --output benchmarks/results/vllm-pair-h200.json

Needs an NVIDIA GPU, and vLLM 0.24 or later in the same Python. It builds the pair in BF16, generates greedily from our
engine with and without drafting, exports the engine, starts `trtllm-dflash launch --runtime vllm` on what was exported,
and sends vLLM the same token ids. It ends with 0 if every text is the same or first differs at a near-tie, and if
vLLM's acceptance length is within 2% of ours. Acceptance length is counted alike on both sides: tokens after the first
of each reply, over verify steps.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.export import export
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.foreign.compare import NEAR_TIE, Difference, Reply, Token, find_difference, shipped_prompts
from trtllm_dflash.sweep.runtime_metrics import read_metrics

TINY = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
MAX_SEQ_LEN, SLOTS = 2048, 8
TOLERANCE = 0.02  # of vLLM's acceptance length from ours
START = 420.0  # seconds for vLLM to compile and capture


def main() -> int:
    """Runs it all; the exit code is the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=32, help="of the shipped ones")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--gpu", help="as for launch; default: the one present")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    prompts = shipped_prompts(arguments.prompts)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ours = generate(folder, prompts, arguments.max_tokens)
        export(folder / "engine", folder / "pair")
        theirs = serve(folder, ours["token_ids"], arguments)
    report = compare(prompts, ours, theirs)
    text = json.dumps({"command": " ".join(["python", *sys.argv]), **report}, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    return 0 if report["safe"] and report["acceptance_within_tolerance"] else 1


def generate(folder: Path, prompts: tuple[str, ...], max_tokens: int) -> dict[str, Any]:
    """Our replies, one at a time, drafted and plain."""
    values = {"name": "tiny", "target": str(TINY / "target"), "drafter": str(TINY / "drafter"), "precision": "bf16"}
    build(BuildSettings.model_validate({**values, "max_seq_len": MAX_SEQ_LEN, "max_batch": SLOTS}), folder / "engine")
    params = SamplingParams(max_tokens=max_tokens)
    with LLM.load(folder / "engine", "cuda") as llm:
        assert llm.codec is not None
        ids = [llm.codec.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
        drafted = [llm.generate([tokens], params)[0] for tokens in ids]
        plain = [llm.generate([tokens], params, False)[0] for tokens in ids]
    return {
        "token_ids": ids,
        "replies": [reply(c.text or "", c.finish_reason, len(c.token_ids)) for c in drafted],
        "plain": [c.text for c in plain],
        "tokens": sum(len(c.token_ids) - 1 for c in drafted),
        "steps": sum(c.steps for c in drafted),
    }


def serve(folder: Path, token_ids: list[list[int]], arguments: argparse.Namespace) -> dict[str, Any]:
    """vLLM's replies to the same token ids, one at a time, and what it counted."""
    url = f"http://127.0.0.1:{arguments.port}"
    words = ["--runtime", "vllm", "--target", str(folder / "pair" / "target")]
    words += ["--drafter", str(folder / "pair" / "drafter"), "--port", str(arguments.port)]
    words += ["--max-seq-len", str(MAX_SEQ_LEN), "--max-batch", str(SLOTS)]
    words += ["--gpu", arguments.gpu] if arguments.gpu else []
    with launched(words, url) as server:
        complete(url, token_ids[0], arguments.max_tokens)  # the first request compiles what is left
        before = read_metrics(f"{url}/metrics")
        replies = [complete(url, ids, arguments.max_tokens) for ids in token_ids]
        time.sleep(2)
        drafts = read_metrics(f"{url}/metrics").since(before)
    assert drafts is not None, "vLLM counted no drafts"
    return {
        "replies": replies,
        "tokens": sum(reply.completion_tokens - 1 for reply in replies),
        "steps": drafts.steps,
        "accepted": drafts.accepted,
        "drafted": drafts.drafted,
        "exit_code": server.returncode,
    }


@contextmanager
def launched(words: list[str], url: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`launch` with these words, once its server answers; it has ended behind the block."""
    server = subprocess.Popen([sys.executable, "-m", "trtllm_dflash", "launch", *words])
    try:
        wait_until_ready(url, server)
        yield server
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Returns once the server answers."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"vLLM ended while it started: exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"vLLM is not ready after {START:g} s")


def complete(url: str, token_ids: list[int], max_tokens: int, **more: Any) -> Reply:
    """A greedy reply with log-probabilities; `more` fields of the request."""
    body = {"model": "target", "prompt": token_ids, "max_tokens": max_tokens, "temperature": 0.0, "logprobs": 5, **more}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = json.load(answer)
    (choice,) = said["choices"]
    told = choice["logprobs"]
    tokens = tuple(
        Token(text, logprob, top)
        for text, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
    )
    return reply(choice["text"], choice["finish_reason"], said["usage"]["completion_tokens"], tokens)


def reply(text: str, reason: str, count: int, tokens: tuple[Token, ...] = ()) -> Reply:
    """A reply whose times nobody asks for."""
    return Reply(text, reason, tokens, count, 0.0, 0.0, None)


def compare(prompts: tuple[str, ...], ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """The verdict and what it rests on."""
    pairs = zip(ours["replies"], theirs["replies"], strict=True)
    differences = [find_difference(*pair, NEAR_TIE) for pair in pairs]
    lengths = {"ours": ours["tokens"] / ours["steps"], "vllm": theirs["tokens"] / theirs["steps"]}
    apart = abs(lengths["vllm"] / lengths["ours"] - 1)
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm")},
        "prompts": len(prompts),
        "safe": all(d is None or d.near_tie for d in differences),
        "equal": sum(d is None for d in differences),
        "near_ties": [shown(p, d) for p, d in zip(prompts, differences, strict=True) if d is not None and d.near_tie],
        "other_differences": [
            shown(p, d) for p, d in zip(prompts, differences, strict=True) if d is not None and not d.near_tie
        ],
        "near_tie": NEAR_TIE,
        "ours_drafted_equals_plain": sum(a.text == b for a, b in zip(ours["replies"], ours["plain"], strict=True)),
        "acceptance_length": {side: round(length, 4) for side, length in lengths.items()},
        "acceptance_apart": round(apart, 4),
        "acceptance_within_tolerance": apart <= TOLERANCE,
        "steps": {"ours": ours["steps"], "vllm": theirs["steps"]},
        "vllm_drafts": {"verified": theirs["drafted"], "accepted": theirs["accepted"]},
        "vllm_exit_code": theirs["exit_code"],  # 143: our SIGTERM
    }


def shown(prompt: str, difference: Difference) -> dict[str, Any]:
    """A difference as JSON."""
    margins = {side: round(margin, 4) for side, margin in difference.margins.items()}
    return {"prompt": prompt, "token": difference.token, "ours": difference.a, "vllm": difference.b, "margins": margins}


if __name__ == "__main__":
    sys.exit(main())
