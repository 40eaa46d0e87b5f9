"""Measures trees of drafts on the shipped pair, on a GPU: tokens a second of one request at a time, chain and trees.

Each held-out prompt is decoded greedily with chains and with trees of each size by turns.

    python benchmarks/draft_trees_gpu.py --output draft-trees-gpu.json
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.pairs.prompts import read_prompts

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
MAX_TOKENS = 320


def main() -> None:
    """Measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="of each kind")
    parser.add_argument("--nodes", type=int, nargs="+", default=[15, 31])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--output", type=Path, help="write the times as JSON")
    arguments = parser.parse_args()
    limits: dict[str, Any] = {"precision": arguments.precision, "device": "cuda", "max_batch": 1, "max_seq_len": 768}
    ways = {
        f"tree of {nodes}" if nodes else "chain": LLM.from_pretrained(
            PAIR / "target", PAIR / "drafter", draft_tree=nodes or "off", **limits
        )
        for nodes in (0, *arguments.nodes)
    }
    kinds = read_prompts(arguments.prompts)
    prompts = [[{"role": "user", "content": text}] for texts in kinds.values() for text in texts]
    totals = {name: [0.0, 0, 0] for name in ways}  # seconds, steps, tokens
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for turn, prompt in enumerate([prompts[0], *prompts]):  # the first to warm up
        for name, llm in ways.items():
            begin = time.perf_counter()
            (reply,) = llm.generate([prompt], params)
            if turn:
                for i, value in enumerate((time.perf_counter() - begin, reply.steps, len(reply.token_ids))):
                    totals[name][i] += value
    found: dict[str, dict[str, float]] = {}
    for name, (seconds, steps, tokens) in totals.items():
        found[name] = {
            "tokens a second": round(tokens / seconds, 1),
            "tokens a step": round((tokens - len(prompts)) / steps, 4),
            "ms a step": round(1e3 * seconds / steps, 4),
        }
        found[name]["over the chain's tokens a second"] = round(
            found[name]["tokens a second"] / found["chain"]["tokens a second"], 4
        )
        print(name, found[name], flush=True)
    record = {"machine": machine(torch.device("cuda")), "versions": versions(), "precision": arguments.precision}
    if arguments.output:
        arguments.output.write_text(json.dumps({**record, "prompts": len(prompts), "ways": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
