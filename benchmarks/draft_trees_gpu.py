"""Measures trees of drafts on the shipped pair, on a GPU: tokens a second of one request at a time, chain and trees.

Each held-out prompt is decoded greedily with chains and with trees of each size by turns, and the next one the other
way round: in rounds of all prompts.

    python benchmarks/draft_trees_gpu.py --prompts 64 --rounds 3 --output draft-trees-gpu.json
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.pairs.prompts import read_prompts

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
MAX_TOKENS = 320


@dataclass
class Totals:
    """What replies took, and what they are, of one way of drafting."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @classmethod
    def of(cls, ways: dict[str, LLM], prompts: list[Any], params: SamplingParams) -> dict[str, "Totals"]:
        """Decodes every prompt in every way, one reply at a time, ways by turns."""
        totals = {name: cls() for name in ways}
        for turn, prompt in enumerate(prompts):
            for name, llm in list(ways.items())[:: -1 if turn % 2 else 1]:
                torch.cuda.synchronize()  # a step that was launched ahead of the other's end may still run
                begin = time.perf_counter()
                (reply,) = llm.generate([prompt], params)
                total = totals[name]
                total.seconds += time.perf_counter() - begin
                total.steps += reply.steps
                total.tokens += len(reply.token_ids)
        return totals


def main() -> None:
    """Measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="of each kind")
    parser.add_argument("--rounds", type=int, default=3)
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
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for prompt in prompts[:4]:  # to warm up
        for llm in ways.values():
            llm.generate([prompt], params)
    rounds = []
    for number in range(arguments.rounds):
        rounds.append(Totals.of(ways, prompts, params))
        rates = ", ".join(f"{name} {total.rate:,.0f}" for name, total in rounds[-1].items())
        print(f"round {number + 1}: tokens a second: {rates}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for name in ways:
        seconds, steps, tokens = (
            sum(getattr(each[name], x) for each in rounds) for x in ("seconds", "steps", "tokens")
        )
        ratios = [each[name].rate / each["chain"].rate for each in rounds]
        found[name] = {
            "tokens a second": round(tokens / seconds, 1),
            "tokens a step": round((tokens - len(prompts) * len(rounds)) / steps, 4),
            "ms a step": round(1e3 * seconds / steps, 4),
            "over the chain's tokens a second": round(statistics.median(ratios), 4),
            "of each round": [round(ratio, 4) for ratio in ratios],
        }
        print(name, found[name], flush=True)
    record = {"machine": machine(torch.device("cuda")), "versions": versions(), "precision": arguments.precision}
    if arguments.output:
        arguments.output.write_text(
            json.dumps({**record, "prompts": len(prompts), "rounds": len(rounds), "ways": found}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
