"""Writes what the drafter is trained on, for `trtllm-dflash train`: the corpus as token ids, a JSON line a reply.

One reply in eight stands behind earlier exchanges of the same conversation, so that every position of the window is
trained. The corpus's replies are the target's own greedy text at 96 to 99% of their tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from corpus import training_exchanges
from tokenizers import Tokenizer

WINDOW = 4096
LONG = 8  # one reply in so many has a history


def records(tokenizer_file: Path, seed: int, exchanges: int, kind: str | None = None) -> Iterator[dict[str, Any]]:
    tokenizer, random = Tokenizer.from_file(str(tokenizer_file)), Random(seed)
    history: list[int] = []
    for exchange in training_exchanges(seed, exchanges, kind):
        ask = tokenizer.encode(f"<|im_start|>user\n{exchange.prompt}<|im_end|>\n<|im_start|>assistant\n").ids
        reply = tokenizer.encode(f"{exchange.reply}<|im_end|>").ids
        if random.randrange(LONG):
            yield {"domain": exchange.kind, "prompt_ids": ask, "reply_ids": reply}
            continue
        if len(history) + len(ask) + len(reply) > WINDOW:
            history = []
        yield {"domain": exchange.kind, "prompt_ids": history + ask, "reply_ids": reply}
        history = history + ask + reply + tokenizer.encode("\n").ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the target")
    parser.add_argument("--write", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--exchanges", type=int, default=200_000)
    parser.add_argument("--kind", help="of this kind of text alone")
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    with args.write.open("w", encoding="utf-8") as file:
        for record in records(args.tokenizer, args.seed, args.exchanges, args.kind):
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
