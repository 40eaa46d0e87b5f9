"""Chooses the nodes that trees of drafts are made of: those that the best trees of real steps have most often.

The pair drafts chains over training prompts, and each step's probabilities are logged. Of each step the best trees of
15, 31 and 63 nodes are found exactly, with a heap; the list holds the tuples of ranks that were in most of them. A
tuple is in no more trees than its parent, so any beginning of the list is closed. On held-out prompts, how much of the
chances of the heap's trees is found in the list is printed.

python choose_tree_nodes.py --target ../../trtllm_dflash/pairs/tiny/target \\
    --drafter ../../trtllm_dflash/pairs/tiny/drafter --prompts ../../trtllm_dflash/pairs/tiny/prompts.jsonl \\
    --output ../../trtllm_dflash/ops/draft_tree.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from heapq import heappop, heappush
from math import exp
from pathlib import Path
from typing import TypeAlias

import torch
from corpus import training_exchanges
from measure import Drafter, drafted
from torch import Tensor
from transformers import AutoTokenizer, Qwen3ForCausalLM

from trtllm_dflash.ops.draft_tree import RANKS, TREE_SIZES

Node: TypeAlias = "tuple[int, ...]"
LISTED = {15: 256, 31: 256, 63: 512}


class LoggedDrafter(Drafter):
    """A drafter that keeps the log-probabilities of each step's likely tokens."""

    def __init__(self, folder: Path, target: Qwen3ForCausalLM) -> None:
        super().__init__(folder, target)
        self.steps: list[Tensor] = []  # [depths, RANKS] each, descending

    def logits(self, context: Tensor, anchor: int, count: int) -> Tensor:
        logits = super().logits(context, anchor, count)
        self.steps.append(logits.log_softmax(-1).topk(RANKS).values)
        return logits


def best_tree(log_probs: list[list[float]], nodes: int) -> dict[Node, float]:
    """The most likely nodes and their log-probabilities: after a node come its next sibling and its first child."""
    heap: list[tuple[float, Node]] = []

    def push(path: Node, above: float) -> None:
        if path[-1] < RANKS and len(path) <= len(log_probs):
            heappush(heap, (-(above + log_probs[len(path) - 1][path[-1]]), path))

    found: dict[Node, float] = {}
    push((0,), 0.0)
    while len(found) < nodes:
        negative, path = heappop(heap)
        found[path] = -negative
        push((*path[:-1], path[-1] + 1), found.get(path[:-1], 0.0))
        push((*path, 0), found[path])
    return found


def logged_steps(
    target: Qwen3ForCausalLM, folder: Path, prompts: list[list[int]], end: int, limit: int
) -> list[list[list[float]]]:
    """The log-probabilities of every step of these prompts' replies."""
    drafter = LoggedDrafter(folder, target)
    for prompt in prompts:
        drafted(target, drafter, prompt, end, limit, drafter.c["block_size"] - 1)
    return [step.tolist() for step in drafter.steps]


def found_share(steps: list[list[list[float]]], listed: list[Node], nodes: int) -> float:
    """How much of the best trees' chances, summed, the best trees of the list have."""
    ours = best = 0.0
    for step in steps:
        chances = sorted((sum(step[i][rank] for i, rank in enumerate(path)) for path in listed), reverse=True)
        ours += sum(map(exp, chances[:nodes]))
        best += sum(map(exp, best_tree(step, nodes).values()))
    return ours / best


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="held-out ones, for the share that is printed")
    parser.add_argument("--count", type=int, default=60, help="training prompts")
    parser.add_argument("--checked", type=int, default=16, help="held-out prompts")
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--limit", type=int, default=200, help="most tokens of a reply")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = Qwen3ForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()

    def steps_of(texts: list[str]) -> list[list[list[float]]]:
        chats = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            for text in texts
        ]
        prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
        return logged_steps(target, args.drafter, prompts, tokenizer.eos_token_id, args.limit)

    steps = steps_of([exchange.prompt for exchange in training_exchanges(args.seed, args.count)])
    uses = Counter(path for step in steps for nodes in TREE_SIZES for path in best_tree(step, nodes))
    listed = sorted(uses, key=lambda path: (-uses[path], len(path), path))[: max(LISTED.values())]
    print(f"{len(steps)} steps, {len(uses)} nodes in their trees; the last of {len(listed)} is in {uses[listed[-1]]}")
    rows = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    checked = steps_of([row["prompt"] for row in rows[:: max(1, len(rows) // args.checked)]])
    for nodes, count in LISTED.items():
        print(f"{nodes} nodes of {count}: {found_share(checked, listed[:count], nodes):.4f} of the heap's chances")
    if args.output:
        places = {path: i for i, path in enumerate(listed)} | {(): -1}
        made = {"parents": [places[path[:-1]] for path in listed], "ranks": [path[-1] for path in listed]}
        args.output.write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
