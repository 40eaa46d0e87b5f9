"""The corpus: seeded chat exchanges of four kinds, and the split into training and held-out prompts.

python corpus.py --write ../../trtllm_dflash/pairs/tiny/prompts.jsonl    the 64 held-out prompts of each kind
python corpus.py --show 3                                              a look at it
"""

from __future__ import annotations

import argparse
import hashlib
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

from arithmetic import arithmetic
from json_records import json_record
from python_functions import python_function
from stories import story

KINDS = {"arithmetic": arithmetic, "python": python_function, "json": json_record, "story": story}
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a careful assistant who answers exactly.",
    "Answer the user's request.",
]
HELD_OUT_SHARE = 32


@dataclass(frozen=True)
class Exchange:
    kind: str
    prompt: str
    reply: str


def is_held_out(prompt: str) -> bool:
    """One prompt in 32, chosen by its content: a prompt is on the same side whichever seed makes it."""
    digest = hashlib.sha256(" ".join(prompt.lower().split()).encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def exchange(kind: str, rng: Random, held_out: bool = False) -> Exchange:
    while True:
        prompt, reply = KINDS[kind](rng)
        if is_held_out(prompt) == held_out:
            return Exchange(kind, prompt, reply)


def training_exchanges(seed: int, count: int, kind: str | None = None) -> list[Exchange]:
    """Distinct training exchanges, of one kind or of all: arithmetic, the hardest, twice as often as the others."""
    rng = Random(seed)
    found: dict[str, Exchange] = {}
    while len(found) < count:
        made = exchange(kind or rng.choice(["arithmetic", *KINDS]), rng)
        found.setdefault(made.prompt, made)
    return list(found.values())


class ExchangesInParts:
    """Distinct training exchanges that processes make meanwhile, a part each, of a seed each."""

    def __init__(self, seed: int, count: int, kind: str | None, parts: int) -> None:
        self.pool = ProcessPoolExecutor(parts, get_context("fork"))
        seeds = [seed + 1000 * part for part in range(parts)]
        self.parts = [self.pool.submit(training_exchanges, own, count // parts, kind) for own in seeds]

    def joined(self) -> list[Exchange]:
        """Waits for them; what two parts have made counts once."""
        found = {e.prompt: e for part in self.parts for e in part.result()}
        self.pool.shutdown()
        return list(found.values())


def held_out_exchanges(seed: int, count: int) -> list[Exchange]:
    """`count` distinct exchanges of each kind whose prompts no training set can contain."""
    rng = Random(seed)
    found: dict[str, Exchange] = {}
    for kind in KINDS:
        while sum(e.kind == kind for e in found.values()) < count:
            made = exchange(kind, rng, held_out=True)
            found.setdefault(made.prompt, made)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the held-out prompts here")
    parser.add_argument("--show", type=int, default=0, help="print this many exchanges of each kind")
    parser.add_argument("--seed", type=int, default=2024)
    args = parser.parse_args()
    for e in held_out_exchanges(args.seed + 1, args.show):
        print(f"=== {e.kind}\n{e.prompt}\n---\n{e.reply}\n")
    if args.write:
        held = held_out_exchanges(args.seed, 64)
        rows = [
            json.dumps({"kind": e.kind, "prompt": e.prompt, "reference": e.reply}, ensure_ascii=False) for e in held
        ]
        args.write.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
