"""Runs random schedules of requests that ask for all sorts of things, and holds every reply to plain decoding alone.

Requests come at any step, with prompts that begin alike, sampling, penalties, bans, stops, forms, log-probabilities and
priorities; some are cancelled. The engine has pages for two sequences, so that they preempt each other; how much is
drafted, how much of prompts is read and how many steps are launched ahead is drawn, too. Nothing may differ: on a CPU a
row's bits are its own. All is in one process and drawn from the seed, so that a difference comes again.

    python benchmarks/schedules.py --model tiny --draft-tree 15 --seed 1 --minutes 5
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import trtllm_dflash
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.builder import build
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.engine.ladder import draft_lengths
from trtllm_dflash.errors import CancelledError, RequestError
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.runtime.draft_length import DraftLength
from trtllm_dflash.runtime.prefill_budget import PrefillBudget
from trtllm_dflash.runtime.request import Completion, Sequence
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.structured import Structured

PAIRS = Path(trtllm_dflash.__file__).parent / "pairs"
TEXTS = [text for kind in read_prompts(4).values() for text in kind]
SLOTS, LENGTH, PAGE_ROWS = 6, 400, 64
#: GB of K/V for about twelve pages, where a sequence has seven at most; the hybrid's states take some besides.
KV_MEMORY = {"tiny": 0.016, "tiny-hybrid": 0.012}
MOST_STEPS = 4000  # of a schedule, after which somebody waits for ever
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 20}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = (
    Structured(kind="regex", value="[a-z ]{5,40}[.]"),
    Structured(kind="choice", value=["yes it is", "no", "yes"]),
    Structured(kind="json_schema", value=SCHEMA),
)


class AnyLength(DraftLength):
    """Another draft length in each step."""

    def __init__(self, block: int, chance: random.Random) -> None:
        self._lengths, self._chance = tuple(draft_lengths(block)), chance

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._lengths

    def choose(self, slots: int) -> int:
        return self._chance.choice(self._lengths)


class AnyBudget(PrefillBudget):
    """Another number of prompt tokens in each step."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def choose(self, running: int, drafts: int, waiting: int, most: int) -> int:
        return min(most, self._chance.choice([1, 5, 16, 64, 300]))


class Draw:
    """Draws prompts and what is asked of their replies."""

    def __init__(self, llm: LLM, chance: random.Random) -> None:
        self._llm, self._chance = llm, chance
        self._beginning = [self._token() for _ in range(2 * PAGE_ROWS + 2)]

    def _token(self) -> int:
        return self._chance.randrange(3, self._llm.config.target.vocab_size)

    def prompt(self) -> list[int]:
        chance = self._chance
        if chance.random() < 0.7:
            ids = list(self._llm.encode([{"role": "user", "content": chance.choice(TEXTS)}]))
        else:
            ids = [self._token() for _ in range(chance.choice([1, 2, 7, 30, 90]))]
        if chance.random() < 0.5:
            shared = chance.choice([10, PAGE_ROWS - 1, PAGE_ROWS, PAGE_ROWS + 1, 2 * PAGE_ROWS + 2])
            ids = self._beginning[:shared] + ids
        return ids[: LENGTH - 40]

    def params(self) -> SamplingParams:
        chance, token = self._chance, self._token
        most = chance.choice([1, 2, 5, 20, 60, 120])
        asked: dict[str, Any] = {"max_tokens": most, "seed": chance.randrange(1000)}
        if chance.random() < 0.5:
            asked |= {"temperature": chance.choice([0.3, 0.8, 1.5]), "top_k": chance.choice([0, 0, 1, 20])}
            asked |= {"top_p": chance.choice([1.0, 0.9, 0.5]), "min_p": chance.choice([0, 0, 0.1])}
        if chance.random() < 0.15:
            asked |= {"presence_penalty": chance.choice([-1.0, 0.7]), "repetition_penalty": chance.choice([1.0, 1.2])}
        form = chance.choice(FORMS) if chance.random() < 0.12 else None
        rare: dict[str, Any] = {
            "logit_bias": {token(): chance.choice([-5.0, 4.0])},
            "min_tokens": min(most, chance.choice([1, 10])),
            "stop_token_ids": (token(), token()),
            "bad_token_sequences": ((token(),), (token(), token())),
            "stop": (chance.choice([" the", "\n", "ing", "): ", "a"]),),
            "logprobs": chance.choice([0, 3]),
            "prompt_logprobs": chance.choice([0, 2]),
            "ignore_eos": form is None,
        }
        asked |= {name: value for name, value in rare.items() if chance.random() < 0.1}
        return SamplingParams(**asked, structured=form)


def told(completion: Completion) -> dict[str, Any]:
    """What of a reply must be as if it had been alone."""
    every = {"reply": completion.logprobs, "prompt": completion.prompt_logprobs}
    return {
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        # A sum that is not a row's own: its last digits may be others.
        **{name: [one and round(one.logprob, 4) for one in found or []] for name, found in every.items()},
    }


def run_schedule(llm: LLM, draw: Draw, chance: random.Random, counts: Counter[str]) -> list[tuple[Sequence, list[int]]]:
    """Runs one schedule to its end; returns the sequences that were not refused, with their prompts."""
    length, budget = AnyLength(llm.config.block_size, chance), AnyBudget(chance)
    scheduler = Scheduler(llm.session, chance.random() < 0.9, length, budget, ahead=chance.choice([None, 0, 1]))
    asked: list[tuple[Sequence, list[int]]] = []
    left = chance.randrange(4, 26)
    for _ in range(MOST_STEPS):
        while left and chance.random() < 0.35:
            left -= 1
            ids, params = draw.prompt(), draw.params()
            sequence = llm.intake.sequence(ids, params, chance.random() < 0.85, chance.choice([1, 50, 100, 100]))
            asked.append((sequence, ids))
            scheduler.submit(sequence)
        if asked and chance.random() < 0.02:
            scheduler.cancel(chance.choice(asked)[0], CancelledError("the request was cancelled"))
        scheduler.step()
        if not left and not scheduler.busy:
            counts["preempted"] += scheduler.statistics.preemptions
            return asked
    raise SystemExit(f"error: a schedule has not ended in {MOST_STEPS} steps")


def main() -> None:
    """Prints what differs and a line of counts; ends with an error if anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=KV_MEMORY, default="tiny")
    parser.add_argument("--draft-tree", choices=("off", "15", "31", "63"), default="off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=2)
    settings = parser.parse_args()
    chance, counts = random.Random(settings.seed), Counter[str]()
    pair, limits = PAIRS / settings.model, {"max_batch": SLOTS, "max_seq_len": LENGTH}
    folders = {"name": settings.model, "target": str(pair / "target"), "drafter": str(pair / "drafter")}
    with tempfile.TemporaryDirectory() as folder:
        pages = {"kv_memory": KV_MEMORY[settings.model], "page_size": PAGE_ROWS}
        for name, more in (("paged", pages), ("alone", {})):
            build(BuildSettings.model_validate({**folders, **limits, **more}), Path(folder) / name)
        llm = LLM.load(Path(folder) / "paged", device="cpu", draft_tree=settings.draft_tree)
        alone = LLM.load(Path(folder) / "alone", device="cpu", draft_tree="off")
        draw, end = Draw(alone, chance), time.monotonic() + 60 * settings.minutes
        while time.monotonic() < end:
            for sequence, ids in run_schedule(llm, draw, chance, counts):
                if isinstance(sequence.error, CancelledError):
                    counts["cancelled"] += 1
                    continue
                try:
                    [expected] = alone.generate([ids], sequence.params, draft=False)
                except RequestError as error:
                    is_right = str(sequence.error) == str(error)
                else:
                    is_right = sequence.error is None and told(sequence.completion()) == told(expected)
                counts["alike" if is_right else "different"] += 1
                if not is_right:
                    words = f"{len(ids)} tokens, {sequence.params!r}: {sequence.error}"
                    print(f"different: a prompt of {words}", flush=True)
    print(f"{settings.model}, trees {settings.draft_tree}, seed {settings.seed}: {dict(counts)}")
    sys.exit(counts["different"] > 0)


if __name__ == "__main__":
    main()
