"""Follows JSONSchemaBench's schemas and texts with our grammars, and has the shipped pair reply to some of them.

The schemas are its authors' (arXiv 2501.10868), not ours: maskbench/data of a clone of guidance-ai/jsonschemabench.
Every schema is compiled, or refused in one line; each text that belongs to one is followed token by token, a mask made
before each, as a row of a step has it: a valid one must be taken to its end, an invalid one not.

    pip install jsonschema
    python benchmarks/schema_bench.py --data maskbench/data --output benchmarks/results/schema-bench-cpu.json
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance
from structured import PAIR, acceptance, is_valid

from trtllm_dflash import LLM, SamplingParams, Structured
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.errors import RequestError
from trtllm_dflash.text.grammar import Grammar, Grammars

LONGEST = 4096  # tokens of a text that is followed
REFUSALS = 12  # kinds of refusals that the record has, and an example of each


@dataclass
class Tally:
    """Of one source of schemas, or of all."""

    schemas: int = 0
    refused: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    compiled_ms: list[float] = field(default_factory=list)
    mask_ms: list[float] = field(default_factory=list)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.schemas + other.schemas,
            self.refused + other.refused,
            self.counts + other.counts,
            self.compiled_ms + other.compiled_ms,
            self.mask_ms + other.mask_ms,
        )

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"schemas": self.schemas, "refused": self.refused, **self.counts}
        for name, values in (("compiled_ms", self.compiled_ms), ("mask_ms", self.mask_ms)):
            if len(values) > 1:
                hundredths = statistics.quantiles(values, n=1000, method="inclusive")
                named = {"p50": hundredths[499], "p99": hundredths[989], "p99.9": hundredths[998], "max": max(values)}
                found[name] = {key: round(value, 3) for key, value in named.items()}
        return found


def main() -> None:
    """Follows all, writes the record, and exits with 1 where a reply is not valid or a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take each so-manieth schema")
    parser.add_argument("--replies", type=int, default=100, help="schemas that the shipped pair replies to")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    files = sorted(arguments.data.glob("*.json"))[:: arguments.every]
    if not files:
        parser.error(f"--data {arguments.data}: there is no *.json")
    with LLM.from_pretrained(PAIR / "target", PAIR / "drafter", device="cpu", max_batch=8, max_seq_len=512) as llm:
        replies = reply(files, llm, arguments.replies, arguments.max_tokens)
        record = {
            "command": shlex.join(["python", "benchmarks/schema_bench.py", *sys.argv[1:]]),
            "machine": machine(),
            "versions": {**versions(), "llguidance": llguidance.__version__},
            "grammars": follow(files, llm),
            "replies": replies,
        }
    kinds = list(replies.values())
    text = json.dumps(record, indent=1) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text)
    print(text, end="")
    sys.exit(0 if all(kind["valid"] == kind["ended"] and kind["equal"] == kind["replies"] for kind in kinds) else 1)


def follow(files: list[Path], llm: LLM) -> dict[str, Any]:
    """Compiles all schemas and follows their texts, by the shipped pair's tokens."""
    codec, ends = llm.codec, list(llm.config.stop_token_ids)
    assert codec is not None
    grammars = Grammars(codec.backend, llm.config.target.vocab_size, ends)
    tallies: dict[str, Tally] = {}
    refusals: dict[str, list[str]] = {}
    for file in files:
        content = json.loads(file.read_text())
        tally = tallies.setdefault(source_of(file), Tally())
        tally.schemas += 1
        begun = time.perf_counter()
        try:
            grammar = grammars.compile("json_schema", content["schema"])
        except RequestError as error:
            tally.refused += 1
            reason = str(error).rpartition(": ")[2][:40]
            refusals.setdefault(reason, []).append(f"{file.name}: {error}")
            continue
        tally.compiled_ms.append(1000 * (time.perf_counter() - begun))
        for test in content["tests"]:
            ids = codec.encode(json.dumps(test["data"], ensure_ascii=False)) + ends[:1]
            if len(ids) > LONGEST:
                tally.counts["texts too long"] += 1
                continue
            kind = "valid" if test["valid"] else "invalid"
            tally.counts[f"{kind} texts"] += 1
            try:
                tally.counts[f"{kind} texts taken"] += takes(grammar, ids, tally)
            except RequestError:  # such a reply is ended with that error
                tally.counts[f"{kind} texts that grow too complex"] += 1
    most = sorted(refusals.values(), key=len, reverse=True)[:REFUSALS]
    return {
        "all": sum(tallies.values(), Tally()).as_json(),
        "refusals": [{"schemas": len(same), "example": same[0]} for same in most],
        "sources": {name: tally.as_json() for name, tally in sorted(tallies.items())},
    }


def source_of(file: Path) -> str:
    """Names the collection that a schema is from."""
    return file.name.partition("---" if "---" in file.name else "_")[0]


def takes(grammar: Grammar, ids: list[int], tally: Tally) -> bool:
    """Whether a grammar takes a text to its end; notes how long a row's mask takes."""
    plan = grammar.plan(ids, complete=False)
    assert plan is not None
    begun = time.perf_counter()
    _ = plan.masks
    tally.mask_ms.append(1000 * (time.perf_counter() - begun) / (1 + len(plan.drafts)))
    return len(plan.drafts) == len(ids)


def reply(files: list[Path], llm: LLM, number: int, max_tokens: int) -> dict[str, Any]:
    """Generates replies that schemas hold, drafted and plain, greedy and sampled.

    The small pair was never shown such schemas: many a reply is cut before its end, and only what ended can be valid.
    """
    schemas = []
    for file in files[:: max(1, len(files) // (2 * number))]:
        schema = json.loads(file.read_text())["schema"]
        prompt = [{"role": "user", "content": "Give me a JSON object."}]
        try:
            llm.intake.sequence(prompt, SamplingParams(structured=Structured(kind="json_schema", value=schema)))
        except RequestError:
            continue
        schemas.append(schema)
    schemas = schemas[:number]
    kinds = {}
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        forms = [Structured(kind="json_schema", value=schema) for schema in schemas]
        params = [
            SamplingParams(max_tokens=max_tokens, seed=i, temperature=temperature, structured=form)
            for i, form in enumerate(forms)
        ]
        prompts = [[{"role": "user", "content": "Give me a JSON object."}] for _ in params]
        drafted, plain = (llm.generate(prompts, params, draft=draft) for draft in (True, False))
        pairs = list(zip(schemas, drafted, plain, strict=True))
        ended = [(schema, a) for schema, a, _ in pairs if a.finish_reason == "stop"]
        kinds[name] = {
            "replies": len(pairs),
            "equal": sum(a.token_ids == b.token_ids for _, a, b in pairs),
            "ended": len(ended),
            "valid": sum(is_valid(schema, a) for schema, a in ended),
            "acceptance_length": acceptance(drafted),
            "not_valid": [[schema, a.text] for schema, a in ended if not is_valid(schema, a)],
        }
    return kinds


if __name__ == "__main__":
    main()
