"""Generates the held-out prompts in every way there is, and compares the token ids: all must be equal.

Each prompt, greedily and sampled with each of a few seeds, is decoded plainly alone (the text that all others are held
against) and then in batches of each size: plainly, drafted in chains, and drafted in trees. There is no tolerance.

    python benchmarks/exactness.py --processes 2 --output benchmarks/results/exactness-cpu.json
    python benchmarks/exactness.py --device cuda --kernels exact --tree 0 --precision bf16 \
        --output benchmarks/results/exactness-h200.json
"""

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.pairs.prompts import read_prompts

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
MAX_SEQ_LEN = 768


@dataclass(frozen=True)
class Way:
    """One way to compute the same texts; drafted in "chains" or "trees", or not."""

    batch: int
    drafted: str | None = None

    def __str__(self) -> str:
        return f"{f'drafted in {self.drafted}' if self.drafted else 'plain'}, batch {self.batch}"


ALONE = Way(1)


def main() -> None:
    """Compares, writes the record, and exits with 1 where a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernels", choices=("auto", "exact", "torch"), default="auto")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--prompts", type=int, default=256, help="of all kinds together")
    parser.add_argument("--seeds", type=int, default=4, help="sampled texts of each prompt, beside the greedy one")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tree", type=int, default=15, help="nodes of drafted trees; 0: none are drafted")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="of the prompts, every Nth from the Ith on")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--processes", type=int, default=1, help="on one thread each, that share the prompts")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    part, parts_of = map(int, arguments.part.split("/"))
    every = [[{"role": "user", "content": text}] for text in prompts(arguments.prompts)]
    asked = every[part - 1 :: parts_of]
    shares = [asked[i :: arguments.processes] for i in range(arguments.processes)]
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "prompts": len(asked),
        "texts_each": 1 + arguments.seeds,
    }
    parts = {}
    for precision in arguments.precision:
        with tempfile.TemporaryDirectory() as folder:
            engine = built(Path(folder) / "engine", precision, max(arguments.batch))
            with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
                parts[precision] = merged(list(pool.map(partial(compared, engine, arguments), shares)))
        print(precision, json.dumps(parts[precision]["different"]), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(record | {"precisions": parts}, indent=1) + "\n")
    different = sum(sum(part["different"].values()) for part in parts.values())
    print(f"{different} texts differ")
    sys.exit(bool(different))


def prompts(count: int) -> list[str]:
    """Takes the shipped prompts, of all kinds by turns."""
    kinds = read_prompts(-(-count // 4)).values()
    return [text for turn in zip(*kinds, strict=True) for text in turn][:count]


def settings(seeds: int, max_tokens: int) -> list[SamplingParams]:
    """Makes the parameters of a prompt's texts: greedy, and sampled with each seed."""
    greedy = SamplingParams(max_tokens=max_tokens)
    return [greedy] + [greedy.model_copy(update={"temperature": 1.0, "seed": seed}) for seed in range(seeds)]


def built(engine: Path, precision: str, slots: int) -> Path:
    """Builds the shipped pair."""
    pair = {"name": "tiny", "target": str(PAIR / "target"), "drafter": str(PAIR / "drafter")}
    limits = {"precision": precision, "max_batch": slots, "max_seq_len": MAX_SEQ_LEN}
    build(BuildSettings.model_validate({**pair, **limits}), engine)
    return engine


def compared(engine: Path, arguments: argparse.Namespace, asked: list[Any]) -> dict[str, Any]:
    """Counts, for each way, texts that are not those of plain decoding alone; lists the first few of them."""
    torch.set_num_threads(1)
    every = [(prompt, params) for params in settings(arguments.seeds, arguments.max_tokens) for prompt in asked]
    begin = time.monotonic()
    different: dict[str, int] = {}
    examples: list[str] = []
    expected: list[list[int]] = []
    for tree in (0, arguments.tree) if arguments.tree else (0,):
        with LLM.load(engine, arguments.device, arguments.kernels, draft_tree=tree or "off") as llm:
            choice = str(llm.session.choice)
            expected = expected or texts(llm, every, ALONE)
            for way in ways(arguments.batch, tree):
                wrong = [i for i, ids in enumerate(texts(llm, every, way)) if ids != expected[i]]
                different[str(way)] = len(wrong)
                print(f"{way}: {len(wrong)} of {len(every)} differ, {time.monotonic() - begin:.0f} s", flush=True)
                examples += [f"{way}: {every[i][1].seed}: {every[i][0][0]['content']}" for i in wrong[:3]]
    return {
        "kernels": choice,
        "texts": len(every),
        "tokens": sum(len(ids) for ids in expected),
        "different": different,
        "examples": examples,
        "seconds": round(time.monotonic() - begin),
    }


def ways(batches: list[int], tree: int) -> list[Way]:
    """Lists the ways of an engine that drafts trees, or chains: with chains, the plain ones too but `ALONE`."""
    drafted = [Way(batch, "trees" if tree else "chains") for batch in batches]
    return drafted if tree else [Way(batch) for batch in batches if Way(batch) != ALONE] + drafted


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds up what processes that ran at once counted."""
    different: Counter[str] = Counter()
    for part in parts:
        different.update(part["different"])
    return {
        "kernels": parts[0]["kernels"],
        "texts": sum(part["texts"] for part in parts),
        "tokens": sum(part["tokens"] for part in parts),
        "different": dict(different),
        "examples": [example for part in parts for example in part["examples"]],
        "seconds": max(part["seconds"] for part in parts),
    }


def texts(llm: LLM, every: list[tuple[Any, SamplingParams]], way: Way) -> list[list[int]]:
    """Generates every text, so many at a time: token ids."""
    ids: list[list[int]] = []
    for begin in range(0, len(every), way.batch):
        some, params = zip(*every[begin : begin + way.batch], strict=True)
        ids += [reply.token_ids for reply in llm.generate(some, params, way.drafted is not None)]
    return ids


if __name__ == "__main__":
    main()
