"""Times steps of a tree of drafts beside those of a chain of as many rows, in one process and by turns, on a GPU.

    python benchmarks/tree_steps.py --output tree-steps.json

Random weights of a published shape, the same for both. They accept nothing: tokens/s are what an acceptance would give
that is imposed on the chain, and on the tree as `bench step` does (`cost.acceptance.TREE_GAINS`).
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.bench.random_session import fill_caches
from trtllm_dflash.bench.step import Arm, StepBench, StepBenchSettings, open_bench
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.session.calls import Prepare
from trtllm_dflash.session.cuda_session import CudaSession
from trtllm_dflash.step import Drafting


def main() -> None:
    """Prints a line for each batch, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--acceptance", type=float, default=6.49, help="tokens a step to impose on the chain")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    settings = StepBenchSettings(shape=asked.shape, batch=asked.batch, draft_tree=asked.nodes, rounds=asked.rounds)
    found: list[dict[str, Any]] = []
    with open_bench(settings) as trees:
        assert trees is not None and isinstance(trees.session, CudaSession)
        plan, own = trees.plan, trees.session
        config = plan.config.model_copy(update={"draft_tree": 0})
        session = CudaSession(config, own.weights, own.device)
        fill_caches(session)
        chains = StepBench(session, replace(plan, config=config), trees.report.rates, random_weights=True)
        rows = config.block_size
        imposed = ImposedAcceptance(asked.acceptance, rows)
        gained = imposed.of_tree(asked.nodes)
        assert gained is not None, f"no trees of blocks of {rows} were measured"
        tokens = {"plain": 1.0, "chain": imposed.tokens, "tree": gained}
        ways = {
            "plain": (chains, Arm("plain", Drafting.OFF, 1)),
            "chain": (chains, Arm("drafted", Drafting.BLOCK, rows)),
            "tree": (trees, Arm("tree", Drafting.BLOCK, asked.nodes + 1, asked.nodes)),
        }
        for bench in (trees, chains):
            bench.session.prepare(Prepare((rows - 1,), sampled=False))
        for batch in plan.batch:
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(1 + plan.rounds):
                for name, (bench, arm) in list(ways.items())[:: -1 if turn % 2 else 1]:
                    seconds[name].append(bench.timed(arm, batch))
            times = {name: statistics.median(each[1:]) for name, each in seconds.items()}
            rates = {name: batch * tokens[name] / times[name] for name in ways}
            found.append(
                {"batch": batch, "seconds": times, "seconds_by_round": seconds, "imposed_tokens_per_second": rates}
            )
            over = times["tree"] / times["chain"] - 1
            shown = ", ".join(f"{name} {1e3 * times[name]:.3f} ms {rates[name]:,.0f} tokens/s" for name in ways)
            print(f"batch {batch}: {shown}; the tree takes {over:+.1%}", flush=True)
        record = {"machine": machine(own.device), "versions": versions(), "shape": asked.shape, "nodes": asked.nodes}
        record |= {"computes": own.choice.labels, "imposed_tokens_per_step": tokens}
        session.close()
    if asked.output:
        asked.output.write_text(json.dumps({**record, "steps": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
