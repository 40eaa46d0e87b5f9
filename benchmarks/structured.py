"""Holds the shipped pair's replies to JSON schemas: all must be valid, drafted as plain, greedy and sampled.

Each schema is asked for in a few ways, greedily and at temperature 1. Acceptance is compared with that of the same
prompts' free replies, and of held-out prompts for JSON with and without a grammar for any object.

    pip install jsonschema
    python benchmarks/structured.py --output benchmarks/results/structured-cpu.json
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import llguidance
import torch
from jsonschema import Draft202012Validator

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams, Structured
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.llm import Completion
from trtllm_dflash.pairs.prompts import read_prompts

PAIR = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny"
SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "structured_schemas.json").read_text())
WORDINGS = (
    "Give me a JSON object for a {}.",
    "I need a JSON object for a {}.",
    "Make a JSON record for a {}.",
    "Turn this {} into JSON: it is the first one.",
    "Write a {} as JSON, please.",
)
HELD_OUT = 16  # prompts for JSON


def main() -> None:
    """Generates, writes the record, and exits with 1 where a reply is not valid or a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        pair = {"name": "tiny", "target": str(PAIR / "target"), "drafter": str(PAIR / "drafter")}
        settings = {**pair, "precision": "fp32", "max_seq_len": 768, "max_batch": arguments.batch}
        build(BuildSettings.model_validate(settings), Path(folder) / "tiny")
        with LLM.load(Path(folder) / "tiny", "cpu") as llm:
            record = measure(llm, arguments.max_tokens)
    record = {
        "command": shlex.join(["python", "benchmarks/structured.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": {**versions(), "llguidance": llguidance.__version__},
        **record,
    }
    text = json.dumps(record, indent=1) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text)
    print(text, end="")
    sys.exit(0 if all(kind["valid"] == kind["equal"] == kind["replies"] for kind in record["replies"].values()) else 1)


def measure(llm: LLM, max_tokens: int) -> dict[str, Any]:
    """Generates all replies, and counts them."""
    asked = [
        (schema, [{"role": "user", "content": w.format(name)}]) for name, schema in SCHEMAS.items() for w in WORDINGS
    ]
    prompts = [prompt for _, prompt in asked]
    kinds = {}
    for name, sampling in (("greedy", {}), ("temperature 1", {"temperature": 1.0})):
        common: list[dict[str, Any]] = [{"max_tokens": max_tokens, "seed": i, **sampling} for i in range(len(asked))]
        forms = [Structured(kind="json_schema", value=schema) for schema, _ in asked]
        held = [SamplingParams(**each, structured=form) for each, form in zip(common, forms, strict=True)]
        begun = time.perf_counter()
        drafted = llm.generate(prompts, held)
        seconds = time.perf_counter() - begun
        plain = llm.generate(prompts, held, draft=False)
        free = llm.generate(prompts, [SamplingParams(**{**each, "max_tokens": 80}) for each in common])
        valid = [is_valid(schema, reply) for (schema, _), reply in zip(asked, drafted, strict=True)]
        kinds[name] = {
            "replies": len(asked),
            "valid": sum(valid),
            "equal": sum(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True)),
            "tokens": sum(len(reply.token_ids) for reply in drafted),
            "acceptance_length": acceptance(drafted),
            "acceptance_length_of_free_replies": acceptance(free),
            "seconds": round(seconds, 1),
            "not_valid": [reply.text for reply, fine in zip(drafted, valid, strict=True) if not fine],
        }
    own = [[{"role": "user", "content": text}] for text in read_prompts(HELD_OUT)["json"]]
    free = llm.generate(own, SamplingParams(max_tokens=max_tokens))
    held_own = llm.generate(own, SamplingParams(max_tokens=max_tokens, structured=Structured(kind="json_object")))
    return {
        "schemas": len(SCHEMAS),
        "replies": kinds,
        "held_out_prompts_for_json": {
            "prompts": len(own),
            "texts_equal": sum(a.text == b.text for a, b in zip(free, held_own, strict=True)),
            "acceptance_length": acceptance(held_own),
            "acceptance_length_of_free_replies": acceptance(free),
        },
    }


def is_valid(schema: Any, reply: Completion) -> bool:
    """Whether a reply is JSON and fits its schema, by another library than the one that holds it to it."""
    try:
        value = json.loads(reply.text or "")
    except ValueError:
        return False
    return bool(Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(value))


def acceptance(replies: list[Completion]) -> float:
    """Averages the tokens of a decoding step over all replies."""
    steps = sum(reply.steps for reply in replies)
    return round(sum(len(reply.token_ids) - 1 for reply in replies) / steps, 3)


if __name__ == "__main__":
    main()
