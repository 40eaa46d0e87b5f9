"""Generates the held-out prompts in every way there is, and compares the token ids: all must be equal.

Each prompt, greedily and sampled with each of a few seeds, is decoded plainly alone (the text that all others are held
against) and then plainly and drafted in batches of each size. There is no tolerance. Texts that differ are listed with
the first token that does.

    python benchmarks/exactness.py --output benchmarks/results/exactness-cpu.json
    python benchmarks/exactness.py --device cuda --precision bf16 --output benchmarks/results/exactness-h200.json
"""

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
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
    """One way to compute the same texts."""

    batch: int
    draft: bool

    def __str__(self) -> str:
        return f"{'drafted' if self.draft else 'plain'}, batch {self.batch}"


def main() -> None:
    """Compares, writes the record, and exits with 1 where a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernels", choices=("auto", "torch"), default="auto")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--prompts", type=int, default=256, help="of all kinds together")
    parser.add_argument("--seeds", type=int, default=4, help="sampled texts of each prompt, beside the greedy one")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    asked = [[{"role": "user", "content": text}] for text in prompts(arguments.prompts)]
    ways = [Way(batch, draft) for batch in arguments.batch for draft in (False, True)]
    parts = {}
    for precision in arguments.precision:
        with tempfile.TemporaryDirectory() as folder:
            engine = built(Path(folder) / "engine", precision, max(arguments.batch))
            with LLM.load(engine, arguments.device, arguments.kernels) as llm:
                parts[precision] = compared(llm, asked, ways, settings(arguments.seeds, arguments.max_tokens))
        print(precision, json.dumps(parts[precision]["different"]), flush=True)
    different = sum(sum(part["different"].values()) for part in parts.values())
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else cpu,
        "torch": torch.__version__,
        "prompts": len(asked),
        "texts_each": 1 + arguments.seeds,
        "different": different,
        "precisions": parts,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
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


def compared(llm: LLM, asked: list[Any], ways: list[Way], params: list[SamplingParams]) -> dict[str, Any]:
    """Counts, for each way, texts that are not those of plain decoding alone; lists the first few of them."""
    every = [(prompt, its) for its in params for prompt in asked]
    begin = time.monotonic()
    expected = texts(llm, every, Way(1, draft=False))
    different, examples = {}, []
    for way in ways:
        if way == Way(1, draft=False):
            continue
        wrong = [i for i, ids in enumerate(texts(llm, every, way)) if ids != expected[i]]
        different[str(way)] = len(wrong)
        examples += [f"{way}: {every[i][1].seed}: {every[i][0][0]['content']}" for i in wrong[:3]]
    return {
        "kernels": str(llm.session.choice),
        "texts": len(every),
        "tokens": sum(map(len, expected)),
        "different": different,
        "examples": examples,
        "seconds": round(time.monotonic() - begin),
    }


def texts(llm: LLM, every: list[tuple[Any, SamplingParams]], way: Way) -> list[list[int]]:
    """Generates every text, so many at a time: token ids."""
    ids: list[list[int]] = []
    for begin in range(0, len(every), way.batch):
        some, params = zip(*every[begin : begin + way.batch], strict=True)
        ids += [reply.token_ids for reply in llm.generate(some, params, way.draft)]
    return ids


if __name__ == "__main__":
    main()
