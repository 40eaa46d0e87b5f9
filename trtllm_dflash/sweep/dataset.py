"""Prompts to measure with: the shipped ones, or files in the form of the public benchmarks."""

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_dflash.errors import SettingsError, why_unreadable
from trtllm_dflash.pairs.prompts import PROMPTS

#: Fields that hold a prompt, and whose files have them; the first that a row has counts.
TEXT_FIELDS = {
    "prompt": "the shipped prompts, HumanEval, sanitized MBPP",
    "question": "GSM8K",
    "problem": "MATH-500, AIME",
    "text": "MBPP",
    "question_content": "LiveCodeBench",
}
_CATEGORY_FIELDS = ("category", "kind", "subject", "difficulty")

Message = dict[str, str]


@dataclass(frozen=True)
class Sample:
    """One conversation to have with a server.

    Attributes:
        turns: what the user says, turn by turn; the replies in between are the server's.
        system: a system message before them; "" is none.
        category: of its dataset; "" where that has none.
        token_ids: a prompt of token ids instead of turns, for an engine in this process.
    """

    turns: tuple[str, ...]
    system: str = ""
    category: str = ""
    token_ids: tuple[int, ...] = ()

    def messages(self, replies: Iterable[str] = ()) -> list[Message]:
        """Makes the conversation up to the turn after these replies."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for turn, reply in zip(self.turns, replies, strict=False):
            said += [{"role": "user", "content": turn}, {"role": "assistant", "content": reply}]
        answered = sum(message["role"] == "assistant" for message in said)
        return [*said, {"role": "user", "content": self.turns[answered]}]


@dataclass(frozen=True)
class Dataset:
    """Samples in a fixed order.

    Attributes:
        name: of its file, without the folder.
        random_tokens: the prompts are token ids drawn at random, which no trained model has ever seen.
    """

    name: str
    samples: tuple[Sample, ...]
    random_tokens: bool = False

    @property
    def digest(self) -> str:
        """sha256 of the prompts; the same ones in the same order have the same digest, whatever their file."""
        rows = [[sample.system, *sample.turns, *sample.token_ids] for sample in self.samples]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def shuffled(self, seed: int) -> "Dataset":
        """Shuffles the samples by a seed, so that any few of them are of all categories."""
        samples = list(self.samples)
        random.Random(seed).shuffle(samples)
        return Dataset(self.name, tuple(samples), self.random_tokens)


def read_dataset(files: tuple[Path, ...] = ()) -> Dataset:
    """Reads the samples of JSON-lines files; without one, the shipped prompts.

    Each line is an object with `turns` (MT-Bench, Spec-Bench, SPEED-Bench), `messages` (OpenAI's chat), `conversations`
    (ShareGPT), or one of `TEXT_FIELDS`. A file of a single JSON array is taken too.

    Raises:
        SettingsError: a file cannot be read, or a line holds no prompt; names the line.
    """
    files = files or (PROMPTS,)
    samples = [sample for file in files for sample in _read_file(file)]
    return Dataset("+".join(file.stem for file in files), tuple(samples))


def random_dataset(count: int, tokens: int, vocabulary: int, seed: int) -> Dataset:
    """Draws prompts of random token ids, evenly; for engines with random weights, too."""
    chance = random.Random(seed)
    samples = (Sample((), token_ids=tuple(chance.choices(range(vocabulary), k=tokens))) for _ in range(count))
    return Dataset(f"random-{tokens}", tuple(samples), random_tokens=True)


def _read_file(file: Path) -> list[Sample]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--dataset {file}: {why_unreadable(error)}") from None
    if text.lstrip().startswith("["):
        rows = list(enumerate(_parse(f"--dataset {file}", text), start=1))
    else:
        # Not splitlines: it also splits at U+2028 and the like, which stand as they are inside JSON.
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        rows = [(number, _parse(f"--dataset {file}: line {number}", line)) for number, line in lines]
    samples = []
    for number, row in rows:
        sample = _sample(row) if isinstance(row, dict) else None
        if sample is None:
            known = ", ".join(["turns", "messages", "conversations", *TEXT_FIELDS])
            raise SettingsError(f"--dataset {file}: line {number} has no prompt; a line has one of: {known}")
        samples.append(sample)
    if not samples:
        raise SettingsError(f"--dataset {file}: holds no prompt")
    return samples


def _parse(place: str, text: str) -> Any:
    try:
        document = json.loads(text)
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise SettingsError(f"{place} is not text: it holds half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:  # the latter of what is nested without end
        raise SettingsError(f"{place} is not JSON: {error}") from None
    return document


def _sample(row: dict[str, Any]) -> Sample | None:
    # AIME's files come with capitals, too.
    row = {str(key).lower(): value for key, value in row.items()}
    category = next((str(row[name]) for name in _CATEGORY_FIELDS if isinstance(row.get(name), str)), "")
    if isinstance(row.get("turns"), list) and row["turns"]:
        turns = row["turns"]
        return Sample(tuple(turns), category=category) if all(isinstance(turn, str) for turn in turns) else None
    if isinstance(row.get("prompt"), list):  # OpenAI's form under another name
        row["messages"] = row["prompt"]
    if isinstance(row.get("messages"), list):
        return _from_messages(
            [(m.get("role"), m.get("content")) for m in row["messages"] if isinstance(m, dict)], category
        )
    if isinstance(row.get("conversations"), list):
        names = {"human": "user", "user": "user", "system": "system"}
        said = [(names.get(str(m.get("from"))), m.get("value")) for m in row["conversations"] if isinstance(m, dict)]
        return _from_messages(said, category)
    text = next((row[name] for name in TEXT_FIELDS if isinstance(row.get(name), str) and row[name].strip()), None)
    if text is None:
        return None
    if isinstance(row.get("starter_code"), str) and row["starter_code"].strip():  # LiveCodeBench
        text = f"{text}\n\nBegin with this code:\n\n{row['starter_code']}"
    return Sample((text,), category=category)


def _from_messages(said: list[tuple[Any, Any]], category: str) -> Sample | None:
    """Keeps the users' messages; the assistant's will be the server's own."""
    turns = tuple(text for role, text in said if role == "user" and isinstance(text, str) and text)
    system = "\n".join(text for role, text in said if role == "system" and isinstance(text, str))
    return Sample(turns, system, category) if turns else None
