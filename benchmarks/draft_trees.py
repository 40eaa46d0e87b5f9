"""Measures trees of drafts on the shipped pair, on a CPU: tokens a step by the size of the tree, and what they cost.

Every held-out prompt is decoded plainly, with chains of the whole block, and with trees of each size: greedily, and
sampled with a seed of its own. All texts must be equal. Then some prompts are decoded alone with chains and trees by
turns, for the process's seconds: rows that cost nothing on a GPU at batch 1 are not free on a CPU. And all slots decode
together with 8 rows each, and with as many that go to the likeliest drafts.

    python benchmarks/draft_trees.py --output benchmarks/results/draft-trees-cpu.json
"""

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

import trtllm_dflash
from trtllm_dflash import LLM, Completion, SamplingParams
from trtllm_dflash.ops.draft_tree import TREE_SIZES
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.draft_length import DraftLength, FixedDraftLength
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.torch_session import TorchSession

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
MAX_TOKENS = 320


def main() -> None:
    """Measures, writes the record, and exits with 1 where a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64, help="of each kind, greedily")
    parser.add_argument("--sampled", type=int, default=64, help="of each kind, at temperature 0.8")
    parser.add_argument("--fp8", type=int, default=8, help="of each kind, greedily, with caches in FP8")
    parser.add_argument("--shared", type=int, default=12, help="of each kind, with 8 rows a slot, and shared ones")
    parser.add_argument("--turns", type=int, default=4, help="of each kind, timed by turns")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(TREE_SIZES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    limits: dict[str, Any] = {"precision": "fp32", "device": "cpu", "max_batch": arguments.batch, "max_seq_len": 768}
    kept = arguments.output is not None and arguments.output.exists()  # then this run adds its parts
    record: dict[str, Any] = json.loads(arguments.output.read_text()) if kept else {"commands": []}
    record["commands"].append(shlex.join(["python", *sys.argv]))
    record["device"] = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread"
    record["torch"] = torch.__version__
    with LLM.from_pretrained(PAIR / "target", PAIR / "drafter", **limits) as llm:
        parts = {
            "greedy": (arguments.prompts, 0.0, {}),
            "sampled": (arguments.sampled, 0.8, {}),
            "greedy, caches in FP8": (arguments.fp8, 0.0, {"kv": "fp8"}),
        }
        for name, (count, temperature, changes) in parts.items():
            if count:
                record[name] = compared(llm, count, temperature, changes, arguments.nodes)
                save(record, arguments.output)
        if arguments.shared:
            record["8 rows a slot"] = shared(llm, arguments.shared)
            save(record, arguments.output)
        if arguments.turns:
            record["by turns"] = timed(llm, arguments.turns, arguments.nodes)
            save(record, arguments.output)
    sys.exit(any(part.get("different") for part in record.values() if isinstance(part, dict)))


def save(record: dict[str, Any], output: Path | None) -> None:
    """Writes what was measured so far."""
    if output is not None:
        output.write_text(json.dumps(record, indent=1) + "\n")


def with_tree(llm: LLM, nodes: int, changes: dict[str, Any]) -> LLM:
    """Makes a session of the same weights that drafts trees of so many nodes, or chains for 0."""
    config, session = llm.config.model_copy(update={"draft_tree": nodes, **changes}), llm.session
    assert isinstance(session, TorchSession)
    return LLM(TorchSession(config, dict(session.weights), session.device), llm.codec)


def chats(llm: LLM, count: int) -> tuple[list[str], list[list[int]]]:
    """The kinds and prompts of the first `count` of each kind."""
    kinds = read_prompts(count)
    texts = [(kind, text) for kind, prompts in kinds.items() for text in prompts]
    return [kind for kind, _ in texts], [llm.encode([{"role": "user", "content": text}]) for _, text in texts]


def compared(llm: LLM, count: int, temperature: float, changes: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """Decodes the prompts in every way: tokens a step, of all and by kind, and how many texts differ."""
    kinds, prompts = chats(llm, count)
    params = [SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=i) for i in range(len(prompts))]
    plain = [reply.token_ids for reply in with_tree(llm, 0, changes).generate(prompts, params, draft=False)]
    found: dict[str, Any] = {"prompts": len(prompts), "tokens": sum(map(len, plain)), "different": 0}
    for nodes in (0, *sizes):
        replies = with_tree(llm, nodes, changes).generate(prompts, params)
        name = f"tree of {nodes}" if nodes else "chain"
        found["different"] += sum(reply.token_ids != ids for reply, ids in zip(replies, plain, strict=True))
        rates = {"all": tokens_a_step(replies)}
        for kind in dict.fromkeys(kinds):
            rates[kind] = tokens_a_step([reply for reply, its in zip(replies, kinds, strict=True) if its == kind])
        if nodes:
            rates["over the chain's"] = round(rates["all"] / found["chain"]["all"], 4)
        found[name] = rates
        print(f"temperature {temperature} {changes}: {name} {rates}; {found['different']} texts differ", flush=True)
    return found


def tokens_a_step(replies: list[Completion]) -> float:
    """The tokens of these replies' decoding steps over their number."""
    return round(sum(len(reply.token_ids) - 1 for reply in replies) / sum(reply.steps for reply in replies), 4)


class SevenOnAverage(DraftLength):
    """Drafts whole blocks, of which seven drafts a slot are verified, whosever they are."""

    shares = True

    @property
    def lengths(self) -> tuple[int, ...]:
        return (15,)

    def choose(self, slots: int) -> int:
        return 15

    def share(self, slots: int) -> int:
        return 7


def shared(llm: LLM, count: int) -> dict[str, Any]:
    """Decodes prompts in all slots, with seven drafts for each and seven on average: tokens and rows a step."""
    kinds, prompts = chats(llm, count)
    turns = [prompt for i in range(count) for prompt in prompts[i::count]]  # kinds by turns
    found: dict[str, Any] = {"prompts": len(kinds), "slots": llm.config.max_batch}
    texts = []
    for name, rule in {"each its own": FixedDraftLength(7), "shared": SevenOnAverage()}.items():
        scheduler = Scheduler(llm.session, draft_length=rule)
        sequences = [llm.intake.sequence(ids, SamplingParams(max_tokens=MAX_TOKENS), True) for ids in turns]
        for sequence in sequences:
            scheduler.submit(sequence)
        while scheduler.busy:
            scheduler.step()
        replies = [sequence.completion() for sequence in sequences]
        steps = sum(reply.steps for reply in replies)
        rows = 1 + sum(reply.drafted_tokens for reply in replies) / steps
        texts.append([reply.token_ids for reply in replies])
        found[name] = {"tokens a step": tokens_a_step(replies), "rows a slot": round(rows, 3)}
    found["different"] = sum(one != other for one, other in zip(*texts, strict=True))
    found["shared over own"] = round(found["shared"]["tokens a step"] / found["each its own"]["tokens a step"], 4)
    print(found, flush=True)
    return found


def timed(llm: LLM, count: int, sizes: list[int]) -> dict[str, Any]:
    """Decodes prompts alone, each with chains and trees by turns: the process's milliseconds a step and a token."""
    _, prompts = chats(llm, count)
    ways = {nodes: with_tree(llm, nodes, {}) for nodes in (0, *sizes)}
    totals = {nodes: [0.0, 0, 0] for nodes in ways}  # seconds, steps, tokens
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for turn, prompt in enumerate([prompts[0], *prompts]):  # the first to warm up
        for nodes, way in ways.items():
            begin = time.process_time()
            (reply,) = way.generate([prompt], params)
            if turn:
                for i, value in enumerate((time.process_time() - begin, reply.steps, len(reply.token_ids))):
                    totals[nodes][i] += value
    found = {
        f"tree of {nodes}" if nodes else "chain": {
            "ms a step": round(1e3 * seconds / steps, 2),
            "ms a token": round(1e3 * seconds / tokens, 3),
        }
        for nodes, (seconds, steps, tokens) in totals.items()
    }
    print(found, flush=True)
    return {"prompts": len(prompts), **found}


if __name__ == "__main__":
    main()
