"""A published pair's shape, with random weights in its exact layout, served by vLLM through `launch`: does it draft?

    python benchmarks/vllm_shape.py --shape gpt-oss-20b --folder /dev/shm/random --output record.json -- --enforce-eager

Needs an NVIDIA GPU, and vLLM 0.24 or later in the same Python. What follows -- goes to vLLM as it is. The pair is
written where it does not stand yet, with a made-up tokenizer; requests are of token ids. The server's start is what a
download's would be, its texts are of no use, and acceptance is chance's. It ends with 0 if every reply has all its
tokens and vLLM counted drafts in its steps.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from build_random import size_of, write_pair
from vllm_pair import complete, launched

from trtllm_dflash.cost.shapes import SHAPES
from trtllm_dflash.models import read_target_config
from trtllm_dflash.sweep.runtime_metrics import SETTLE_SECONDS, read_metrics

MAX_SEQ_LEN, SLOTS = 2048, 8
REQUESTS, PROMPT_TOKENS, TOKENS = 3, 128, 64


def main() -> int:
    """Writes the pair, serves it and records what vLLM counted; the exit code is the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are written, and kept")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("words", nargs="*", metavar="-- WORDS", help="for vLLM's command")
    arguments = parser.parse_args()
    pair = write_pair(arguments.folder, arguments.shape, device="cuda")
    torch.cuda.empty_cache()
    print(f"{pair}: {size_of(pair) / 1e9:.1f} GB", flush=True)
    words = ["--runtime", "vllm", "--target", str(pair / "target"), "--drafter", str(pair / "drafter")]
    words += ["--port", str(arguments.port), "--max-seq-len", str(MAX_SEQ_LEN), "--max-batch", str(SLOTS)]
    served = serve(
        words, arguments.words, read_target_config(SHAPES[arguments.shape].target).vocab_size, arguments.port
    )
    drafts = bool(served["drafted"]) and served["tokens"] == [TOKENS] * REQUESTS
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "transformers", "triton", "vllm")},
        "shape": arguments.shape,
        "checkpoint_bytes": size_of(pair),
        **served,
        "drafts": drafts,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    return 0 if drafts else 1


def serve(words: list[str], own: list[str], vocabulary: int, port: int) -> dict[str, Any]:
    """vLLM's start by `launch`, a few replies, and what it counted meanwhile.

    Args:
        words: for `launch`.
        own: for vLLM's command.
        vocabulary: tokens that prompts are drawn from.
    """
    url = f"http://127.0.0.1:{port}"
    after = ["--", *own] if own else []
    dry = [sys.executable, "-m", "trtllm_dflash", "launch", *words, "--dry-run", *after]
    script = subprocess.run(dry, capture_output=True, text=True, check=True).stdout
    begin = time.perf_counter()
    with launched([*words, *after], url) as server:
        ready = time.perf_counter() - begin
        print(f"ready after {ready:.0f} s", flush=True)
        draw = random.Random(0)
        prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
        before = read_metrics(f"{url}/metrics")
        begin = time.perf_counter()
        replies = [complete(url, prompt, TOKENS, ignore_eos=True) for prompt in prompts]
        seconds = time.perf_counter() - begin
        time.sleep(SETTLE_SECONDS)
        drafts = read_metrics(f"{url}/metrics").since(before)
    assert drafts is not None, "vLLM counted no drafts"
    return {
        "launch": shlex.join(["trtllm-dflash", "launch", *words, *after]),
        "script": [line.strip() for line in script.splitlines() if line.strip() and not line.strip().startswith("#")],
        "ready_seconds": round(ready, 1),
        "requests": REQUESTS,
        "prompt_tokens": PROMPT_TOKENS,
        "tokens": [reply.completion_tokens for reply in replies],
        "request_seconds": round(seconds, 1),  # with what the first of them compiles
        "steps": drafts.steps,
        "drafted": drafts.drafted,
        "accepted": drafts.accepted,
        "exit_code": server.returncode,  # 143: our SIGTERM
    }


if __name__ == "__main__":
    sys.exit(main())
