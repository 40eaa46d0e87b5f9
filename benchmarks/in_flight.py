"""Throughput of a real Triton server on the shipped pair by number of clients, plain and drafted, in one run.

python benchmarks/in_flight.py --output benchmarks/results/in-flight-cpu.json
"""

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trtllm_dflash
from trtllm_dflash import SamplingParams
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.serving.client import TokenRequest, TritonClient
from trtllm_dflash.serving.endpoints import Endpoints
from trtllm_dflash.serving.repository import DeploySettings
from trtllm_dflash.serving.serve import serving
from trtllm_dflash.text.tokenizer import TextCodec

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
CLIENTS = (1, 2, 4, 8)
PARAMS = SamplingParams(max_tokens=96, ignore_eos=True)


async def throughput(url: str, prompts: list[list[int]], clients: int, draft: bool) -> float:
    """Tokens a second of so many clients, which share the prompts."""
    triton = TritonClient(url)
    waiting = list(prompts)

    async def client() -> int:
        tokens = 0
        while waiting:
            request = TokenRequest(waiting.pop(), PARAMS, draft)
            async for piece in triton.stream(request):
                tokens += len(piece.token_ids)
        return tokens

    try:
        begin = time.perf_counter()
        tokens = await asyncio.gather(*(client() for _ in range(clients)))
        return sum(tokens) / (time.perf_counter() - begin)
    finally:
        await triton.close()


def main() -> None:
    """Measures, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-length", default="auto", help="auto, or a number")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    settings = DeploySettings.model_validate({"device": "cpu", "draft_length": arguments.draft_length})
    pair = {"name": "tiny", "target": str(PAIR / "target"), "drafter": str(PAIR / "drafter")}
    limits = {"precision": "fp32", "max_batch": 8, "max_seq_len": 2048}
    rates: dict[str, dict[int, float]] = {"plain": {}, "drafted": {}}
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        build(BuildSettings.model_validate({**pair, **limits}), engine)
        codec = TextCodec.load(engine, {})
        assert codec is not None
        texts = [text for kind in read_prompts(4).values() for text in kind]
        prompts = [codec.encode_chat([{"role": "user", "content": text}]) for text in texts]
        with serving(engine, settings, Endpoints(http_port=0, grpc_port=0, metrics_port=0)) as running:
            url = running.endpoints.grpc
            asyncio.run(throughput(url, prompts, 8, draft=True))  # to warm up
            for clients in CLIENTS:
                for arm in rates:
                    rates[arm][clients] = asyncio.run(throughput(url, prompts, clients, arm == "drafted"))
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "versions": versions(),
        "draft_length": arguments.draft_length,
        "tokens_per_second": {arm: {str(n): round(rate, 1) for n, rate in by.items()} for arm, by in rates.items()},
        "over_one_client": {arm: {str(n): round(by[n] / by[1], 2) for n in by} for arm, by in rates.items()},
    }
    text = json.dumps(result, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
