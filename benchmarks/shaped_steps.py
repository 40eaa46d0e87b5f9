"""Times steps with log-probabilities and with grammars beside the same steps without, through the scheduler.

Random weights of a real shape, and imposed acceptance: the text means nothing. A grammar's slot goes along a JSON text,
as if its drafts were those tokens: they are checked, and masks made and sent, as for any reply. Arms take turns.

    python benchmarks/shaped_steps.py --output benchmarks/results/shaped-steps-h200.json
"""

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llguidance
import torch
from shape_engine import made_up_tokenizer

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.machine import machine, versions
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.cost.shapes import asked_precision, shape_config
from trtllm_dflash.errors import DeadlineError
from trtllm_dflash.runtime.request import Sequence as Request
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.session.device import pick_device
from trtllm_dflash.sweep.local_engine import random_llm
from trtllm_dflash.text.grammar import Grammar, Grammars, Plan

ACCEPTED = 5.0  # tokens that a step of the whole block commits
PROMPT = 256
WARM = 8  # steps before those that are timed
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["user", "admin", "guest"]},
        "age": {"type": "integer"},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "active": {"type": "boolean"},
    },
    "required": ["name", "kind", "age", "score", "tags", "active"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON}


@dataclass(frozen=True)
class Arm:
    """Requests of one kind, beside such as ask for nothing."""

    name: str
    batch: int
    asking: int = 0  # of the batch
    logprobs: int | None = None
    grammar: bool = False
    waits: bool = False  # for drafts, as where grammars forbid many


ARMS = (
    [
        Arm("nothing", 8),
        Arm("grammar on one", 8, 1, grammar=True),
        Arm("grammar on all", 8, 8, grammar=True),
        Arm("grammar on one, waiting", 8, 1, grammar=True, waits=True),
        Arm("grammar on all, waiting", 8, 8, grammar=True, waits=True),
    ],
    [
        Arm("nothing", 32),
        Arm("log-probabilities", 32, 32, logprobs=0),
        Arm("log-probabilities of 20", 32, 32, logprobs=20),
        Arm("log-probabilities on one", 32, 1, logprobs=0),
    ],
)


class Followed(Grammar):
    """A grammar that goes along a text, whatever was chosen."""

    def __init__(self, inner: Grammar, tokens: list[int], waits: bool) -> None:
        self._inner = inner
        self._left = tokens  # the next one last
        self.width, self.strays = inner.width, float(waits)

    def accept(self, token: int) -> None:
        self._inner.accept(self._left.pop())

    def plan(self, drafts: list[int], behind: Sequence[int] = (), complete: bool = True) -> Plan | None:
        text = self._next(len(behind) + len(drafts))
        return self._inner.plan(text[len(behind) :], text[: len(behind)], complete)

    def _next(self, count: int) -> list[int]:
        return self._left[: -1 - count : -1]


def main() -> None:
    """Measures, prints a table, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="of the target; all of them unless given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="timed in a round")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    length = PROMPT + 16 * (WARM + arguments.steps + 8)
    config = shape_config(
        arguments.shape,
        layers=arguments.layers,
        **asked_precision(None, device),
        tp=1,
        max_batch=max(arm.batch for arms in ARMS for arm in arms),
        max_seq_len=length,
        chunk=512,
    )
    llm = random_llm(config, device, ImposedAcceptance(ACCEPTED, config.block_size))
    tokenizer = made_up_tokenizer(config.target.vocab_size)
    grammars = Grammars(tokenizer, config.target.vocab_size, [config.target.vocab_size - 1])
    rows = []
    for arms in ARMS:
        for draft in (False, True):
            some = [arm for arm in arms if draft or not arm.waits]
            rows += measured(llm, some, draft, grammars, tokenizer, arguments.rounds, arguments.steps)
            for row in rows[-len(some) :]:
                print(
                    "{batch:3} {drafts:2} {name:26} {milliseconds:8.3f} ms {over_nothing:+7.1%}".format(**row),
                    flush=True,
                )
    record: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/shaped_steps.py", *sys.argv[1:]]),
        "machine": machine(device),
        "versions": {**versions(), "llguidance": llguidance.__version__},
        "shape": arguments.shape,
        "layers": config.target.layers,
        "computes": llm.session.choice.labels,
        "random_weights": True,
        "imposed_tokens_per_step": ACCEPTED,
        "prompt_tokens": PROMPT,
        "rows": rows,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


def measured(
    llm: LLM, arms: list[Arm], draft: bool, grammars: Grammars, tokenizer: Any, rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Times each arm in every round; the first of them is what the others are compared with."""
    scheduler = Scheduler(llm.session, draft=draft)
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            made = sequences_of(llm, arm, draft, grammars, tokenizer)
            seconds[arm.name].append(time_steps(scheduler, made, steps, llm.session.device))
    least = statistics.median(seconds[arms[0].name])
    return [
        {
            "batch": arm.batch,
            "drafts": llm.config.block_size - 1 if draft else 0,
            "name": arm.name,
            "milliseconds": 1e3 * statistics.median(seconds[arm.name]),
            "over_nothing": statistics.median(seconds[arm.name]) / least - 1,
            "milliseconds_by_round": [1e3 * each for each in seconds[arm.name]],
        }
        for arm in arms
    ]


def sequences_of(llm: LLM, arm: Arm, draft: bool, grammars: Grammars, tokenizer: Any) -> list[Request]:
    """Makes the requests of an arm."""
    chance, made = random.Random(1), []
    for i in range(arm.batch):
        asks = i < arm.asking
        tokens = llm.config.max_seq_len - PROMPT
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, seed=i, logprobs=arm.logprobs if asks and not arm.grammar else None
        )
        prompt = [chance.randrange(llm.config.target.vocab_size) for _ in range(PROMPT)]
        sequence = llm.intake.sequence(prompt, params, draft=draft)
        if asks and arm.grammar:
            text = text_of(tokenizer, tokens + 64, i)
            grammar = Followed(grammars.compile("json_schema", SCHEMA), text, arm.waits)
            sequence = replace(sequence, grammar=grammar)
        made.append(sequence)
    return made


def text_of(tokenizer: Any, count: int, seed: int) -> list[int]:
    """Makes so many tokens of a JSON text that fits the schema, the last one first."""
    chance = random.Random(seed)
    text, people = "", []
    while len(text) < count:
        word: Callable[[], str] = lambda: "".join(chance.choices("abcdefghij klmnop", k=chance.randint(3, 12)))  # noqa: E731
        people.append(
            {
                "name": word(),
                "kind": chance.choice(["user", "admin", "guest"]),
                "age": chance.randint(0, 99),
                "score": round(10 * chance.random(), 3),
                "tags": [word() for _ in range(chance.randint(0, 4))],
                "active": chance.random() < 0.5,
            }
        )
        text = json.dumps(people)
    ids: list[int] = tokenizer.encode(text).ids
    return ids[count - 1 :: -1]


def time_steps(scheduler: Scheduler, sequences: list[Request], steps: int, device: torch.device) -> float:
    """Times a step, in seconds, once all sequences decode; then ends them."""
    for sequence in sequences:
        scheduler.submit(sequence)
    while not all(sequence.token_ids for sequence in sequences):
        scheduler.step()
    for _ in range(WARM):
        scheduler.step()
    begin = time.perf_counter()
    for _ in range(steps):
        scheduler.step()
    seconds = (time.perf_counter() - begin) / steps
    assert not any(sequence.done for sequence in sequences), "a sequence ended before the last step"
    for sequence in sequences:
        scheduler.cancel(sequence, DeadlineError("it was timed"))
    while scheduler.busy:
        scheduler.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds


if __name__ == "__main__":
    main()
