"""Engines without a checkpoint: a shape's random weights with imposed acceptance, or steps that only take their time.

`write_engine` writes what a server needs to know of one: its configuration, a made-up tokenizer of its vocabulary and,
in `measured.json`, how its steps are computed. `open_engine` opens it, in this process or inside Triton.
"""

import json
import random
import string
import time
from collections.abc import Mapping
from itertools import islice, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trtllm_dflash import LLM
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.cost.shapes import asked_precision, shape_config
from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.directory import CONFIG_FILE, read_config
from trtllm_dflash.engine.paging import linear_paging
from trtllm_dflash.ops.communicator import Solo
from trtllm_dflash.session.calls import Copy, Decode, Prefill, Prepare, Step
from trtllm_dflash.session.choice import Choice, torch_choice
from trtllm_dflash.session.device import pick_device
from trtllm_dflash.session.kernels import Kernels
from trtllm_dflash.session.limits import StepLimits
from trtllm_dflash.session.outcome import Outcome
from trtllm_dflash.session.session import Session
from trtllm_dflash.step import StepInputs, StepOutputs
from trtllm_dflash.sweep.local_engine import random_llm
from trtllm_dflash.text.tokenizer import TextCodec

MEASURED_FILE = "measured.json"

_CHUNK = 512  # prompt tokens in a step, as `build` has it
_PIECES = 8  # of prompts in a step
_PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_engine(
    folder: Path, shape: str, acceptance: float, step_ms: float | None, device: str, slots: int, length: int
) -> None:
    """Writes an engine directory without weights.

    Args:
        shape: as in `sweep --shape`.
        acceptance: tokens a step that the whole block commits.
        step_ms: what a step takes that computes nothing; None computes it, with random weights.
        slots, length: `build --max-batch` and `--max-seq-len`.
    """
    precision = asked_precision(None, pick_device(device))
    limits: dict[str, Any] = {"max_batch": slots, "max_seq_len": length, "chunk": min(_CHUNK, length)}
    config = shape_config(shape, **precision, tp=1, **limits)
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(config.model_dump_json())
    (folder / MEASURED_FILE).write_text(json.dumps({"acceptance": acceptance, "step_ms": step_ms}))
    write_tokenizer(folder, config.target.vocab_size)


def write_tokenizer(folder: Path, vocabulary: int, special: Mapping[str, int] | None = None) -> None:
    """Writes a made-up tokenizer of so many tokens, with a plain chat template; `special` tokens by their ids."""
    made_up_tokenizer(vocabulary, special or {}).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _PLAIN_TEMPLATE, "fix_mistral_regex": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def made_up_tokenizer(vocabulary: int, special: Mapping[str, int] = MappingProxyType({})) -> Tokenizer:
    """Makes a byte-level tokenizer: every byte, and words of four letters. It encodes a letter as one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("Ġ" + "".join(word) for word in product(string.ascii_lowercase, repeat=4))
    tokens = islice([*letters, *islice(words, max(0, vocabulary - len(letters)))], vocabulary)
    names = dict(enumerate(tokens)) | {number: token for token, number in special.items()}
    tokenizer = Tokenizer(models.BPE({token: number for number, token in names.items()}, []))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def open_engine(folder: Path, device: str, kernels: Kernels = "auto") -> LLM:
    """Opens what `write_engine` wrote."""
    config = read_config(folder)
    measured = json.loads((folder / MEASURED_FILE).read_text())
    acceptance = ImposedAcceptance(measured["acceptance"], config.block_size)
    codec = TextCodec.load(folder, config.chat_arguments)
    if measured["step_ms"] is not None:
        return LLM(TimedSession(config, acceptance, measured["step_ms"] / 1e3), codec)
    return random_llm(config, pick_device(device), acceptance, kernels, codec, folder)


class TimedSession(Session):
    """Steps that take a fixed time on no device: only the host's work is left to measure.

    Args:
        seconds: of each step. The next one begins when it ends, as on a GPU.
    """

    def __init__(self, config: EngineConfig, acceptance: ImposedAcceptance, seconds: float) -> None:
        small = config.model_copy(update={"max_batch": 1, "max_seq_len": 1, "chunk": 1})
        super().__init__(small, torch.device("cpu"), Solo())  # as good as no caches
        self.config, self.paging = config, linear_paging(config)
        self._seconds = seconds
        self._chance = random.Random(0)
        self._survival = acceptance.survival
        self._free_at = 0.0

    @property
    def choice(self) -> Choice:
        return torch_choice(self.config, "no device", f"steps of {self._seconds * 1e3:g} ms that compute nothing")

    @property
    def ahead(self) -> int:
        return 1

    @property
    def limits(self) -> StepLimits:
        return StepLimits(_PIECES, self.config.chunk, mixes=True)

    def prepare(self, call: Prepare, progress: Progress = lambda what, done, total: None) -> None:
        pass

    def run(self, call: Step) -> Outcome:
        return self._ended([*(rows for _, rows in call.decode), *(1 for _ in call.pieces)])

    def prefill(self, call: Prefill) -> Outcome:
        return self._ended([1])

    def decode(self, call: Decode) -> Outcome:
        return self._ended(call.row_counts)

    def copy_rows(self, call: Copy) -> None:
        pass

    def _ended(self, row_counts: list[int]) -> Outcome:
        self._free_at = max(self._free_at, time.perf_counter()) + self._seconds
        return TimedOutcome([self._tokens(rows) for rows in row_counts], self._free_at)

    def _tokens(self, rows: int) -> tuple[int, ...]:
        count = 1
        while count < rows and self._chance.random() < self._survival:
            count += 1
        return tuple(self._chance.choices(range(self.config.target.vocab_size), k=count))

    def _run(self, inputs: StepInputs[torch.Tensor], *_: object) -> StepOutputs[torch.Tensor]:
        raise AssertionError("nothing is computed")

    def _free(self) -> None:
        pass


class TimedOutcome(Outcome):
    """Tokens that are there at a moment of `time.perf_counter`."""

    def __init__(self, tokens: list[tuple[int, ...]], at: float) -> None:
        most = max(map(len, tokens))
        super().__init__(torch.tensor([[len(ids) - 1, *ids, *[0] * (most - len(ids))] for ids in tokens]))
        self._at = at

    def _parse(self, host: torch.Tensor) -> torch.Tensor:
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return host
