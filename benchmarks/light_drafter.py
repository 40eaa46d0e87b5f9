"""What a lighter drafter costs in acceptance: FP8 matrices and shortlists of several lengths, on the shipped pair.

Shortlists are counted in other prompts than those that are generated. Every text must be the target's own, in FP32.
Acceptance does not depend on where it is measured; speed does, and is not measured here.

    python benchmarks/light_drafter.py --output benchmarks/results/light-drafter.md
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.directory import load_weights
from trtllm_dflash.models.drafter import DRAFT_TO_TARGET, HEAD, PREFIX, Drafter
from trtllm_dflash.models.weights import WeightPrecision
from trtllm_dflash.ops.fp8 import dequantize_rows, quantize_rows
from trtllm_dflash.ops.torch_ops import TorchOps
from trtllm_dflash.pairs.prompts import PROMPTS
from trtllm_dflash.runtime.request import Completion

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"

HEADING = """\
# A lighter drafter

Acceptance length (tokens a decoding step, block 16) of the shipped pair: {prompts} prompts, greedy, at most {most}
tokens each, on a CPU in FP32, torch {torch}. Every text is plain decoding's, token for token. Speeds on a CPU say
nothing of a GPU and are not given. Shortlists are counted in {counted} other prompts of each kind and their replies.

    python {command}

- matrices: BF16: as they are. FP8: weights rounded, as a CPU computes with them. FP8 by FP8: what goes into them
  rounded too, as a GPU from compute capability 8.9 on does.
- head: the tokens that are drafted. Of the replies: the share of their tokens that is among those.
- MB: 10^6 bytes that a step reads for drafting in an engine of BF16, FP8's scales included.

A shortlist's price is this pair's own: hardly a token of its small vocabulary is rare. Nor does it say anything of
drafters that are larger than this one.
"""


class RoundedOps(TorchOps):
    """Rounds what a GPU would: what goes into the drafter's matrices, to FP8 row by row."""

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name.startswith(PREFIX):
            x = dequantize_rows(*quantize_rows(x.flatten(0, 1))).view(x.shape)
        return super().linear(name, x)


@dataclass(frozen=True)
class Arm:
    """A drafter."""

    fp8: bool
    draft_vocab: int | None
    rounded: bool = False  # what goes into the matrices too

    @property
    def matrices(self) -> str:
        """How the matrices are multiplied, in words."""
        return ("FP8 by FP8" if self.rounded else "FP8") if self.fp8 else "BF16"


def main() -> None:
    """Measures, and writes the table."""
    arguments = parse_arguments()
    kinds = read_kinds()
    asked = {kind: [row["prompt"] for row in rows[: arguments.prompts]] for kind, rows in kinds.items()}
    texts = [[{"role": "user", "content": text}] for kind in asked.values() for text in kind]
    params = SamplingParams(max_tokens=arguments.max_tokens)
    lines, plain = [], None
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "counted.jsonl"
        rows = [row for rows in kinds.values() for row in rows[-arguments.counted :]]
        counted.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for i, arm in enumerate(arms(arguments.draft_vocab)):
            with opened(arm, Path(folder) / str(i), counted) as (llm, listed):
                if plain is None:
                    plain = llm.generate(texts, params, draft=False)
                drafted = llm.generate(texts, params)
                if [c.token_ids for c in drafted] != [c.token_ids for c in plain]:
                    raise SystemExit(f"{arm}: a text differs from plain decoding's")
                line = table_line(arm, llm.config, asked, drafted, listed)
            lines.append(line)
            print(line, flush=True)
    report = "\n".join([*heading(kinds, asked, arguments), *lines]) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(report, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12, help="of each kind that are generated: the first")
    parser.add_argument("--counted", type=int, default=32, help="of each kind that are counted: the last")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--draft-vocab", type=int, nargs="*", default=[256, 512, 1024, 1536])
    parser.add_argument("--output", type=Path, help="a Markdown file")
    return parser.parse_args()


def read_kinds() -> dict[str, list[dict[str, Any]]]:
    """The shipped prompts with their references, by kind."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kinds.setdefault(row["kind"], []).append(row)
    return kinds


def arms(sizes: list[int]) -> Iterator[Arm]:
    """All drafters, the shipped one first."""
    for fp8, rounded in ((False, False), (True, False), (True, True)):
        for size in (None, *sorted(sizes, reverse=True)):
            yield Arm(fp8, size, rounded)
        if fp8:
            yield Arm(fp8, 2048, rounded)


@contextmanager
def opened(arm: Arm, folder: Path, counted: Path) -> Iterator[tuple[LLM, set[int] | None]]:
    """The engine of a drafter on the CPU in FP32, and the tokens that it drafts among."""
    values: dict[str, Any] = {"draft_vocab": arm.draft_vocab, "drafter_precision": "fp8" if arm.fp8 else None}
    if arm.draft_vocab not in (None, 2048):
        values["draft_text"] = str(counted)
    pair = {"name": "tiny", "target": str(PAIR / "target"), "drafter": str(PAIR / "drafter")}
    build(BuildSettings.model_validate({**pair, **values, "precision": "fp32", "max_seq_len": 2048}), folder)
    ops = RoundedOps if arm.rounded else TorchOps
    with patch("trtllm_dflash.session.torch_session.TorchOps", ops), LLM.load(folder, "cpu") as llm:
        table = load_weights(folder, llm.config, 0).get(DRAFT_TO_TARGET)
        yield llm, None if table is None else set(table.tolist())


def table_line(
    arm: Arm, config: EngineConfig, asked: dict[str, list[str]], drafted: list[Completion], listed: set[int] | None
) -> str:
    """A row of the table."""
    lengths, first = [], 0
    for texts in asked.values():
        lengths.append(acceptance(drafted[first : first + len(texts)]))
        first += len(texts)
    tokens = [token for completion in drafted for token in completion.token_ids]
    share = 1.0 if listed is None else sum(token in listed for token in tokens) / len(tokens)
    matrices, head = drafter_bytes(config)
    cells = [
        arm.matrices,
        "all, the target's" if arm.draft_vocab is None else f"{arm.draft_vocab:,}",
        f"{share:.1%}",
        *(f"{length:.2f}" for length in (*lengths, acceptance(drafted))),
        f"{matrices / 1e6:.2f}",
        f"{head / 1e6:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def acceptance(completions: list[Completion]) -> float:
    """Tokens a decoding step."""
    return sum(len(c.token_ids) - 1 for c in completions) / sum(c.steps for c in completions)


def drafter_bytes(config: EngineConfig) -> tuple[int, int]:
    """What a step reads for drafting in an engine of BF16: the drafter's own matrices, and its head."""
    assert config.drafter is not None
    sizes = {}
    for weight in Drafter(config.drafter).weights():
        shape = weight.shape(1, 0)
        if len(shape) == 2:
            is_fp8 = weight.precision is WeightPrecision.FP8
            sizes[weight.name] = shape[0] * shape[1] * (1 if is_fp8 else 2) + (4 * shape[0] if is_fp8 else 0)
    head = sizes.pop(HEAD, 2 * config.target.vocab_size * config.target.hidden_size)
    return sum(sizes.values()), head


def heading(kinds: dict[str, Any], asked: dict[str, list[str]], arguments: argparse.Namespace) -> list[str]:
    """All that stands before the table's rows."""
    columns = ["matrices", "head", "of the replies", *kinds, "all", "matrices MB", "head MB"]
    text = HEADING.format(
        torch=torch.__version__,
        prompts=sum(map(len, asked.values())),
        most=arguments.max_tokens,
        counted=arguments.counted,
        command=shlex.join(sys.argv),
    )
    return [text, f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]


if __name__ == "__main__":
    main()
