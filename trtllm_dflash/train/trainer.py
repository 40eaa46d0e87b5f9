"""The training loop: steps over random blocks, evaluations, and checkpoints from which it goes on to the bit.

What a step draws, its documents and its anchors, is a function of the seed and its number. A checkpoint holds the rest:
parameters in FP32, the optimizer's moments, the place in the epoch, and the best evaluation so far.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from trtllm_dflash.errors import SettingsError
from trtllm_dflash.signals import holding_signals
from trtllm_dflash.train.anchors import anchored, pick_anchors
from trtllm_dflash.train.documents import Document, Pack, Packs, generator, moved
from trtllm_dflash.train.evaluation import Acceptance, simulate
from trtllm_dflash.train.features import FrozenTarget
from trtllm_dflash.train.interruption import held_signals
from trtllm_dflash.train.loss import Loss, Teacher, block_loss
from trtllm_dflash.train.mask import MASKED, Flexible
from trtllm_dflash.train.network import TrainedDrafter
from trtllm_dflash.train.optimizer import Optimizer, learning_rate
from trtllm_dflash.train.ranks import Ranks
from trtllm_dflash.train.settings import TrainSettings
from trtllm_dflash.train.state import State

Tensor = torch.Tensor

#: Files of the state directory.
CHECKPOINT, BEST, LOG = "checkpoints/last.safetensors", "checkpoints/best.safetensors", "log.jsonl"

#: The type of exported tensors. Evaluations are of a drafter rounded to it.
EXPORTED = torch.bfloat16

_LOGGED = 1000  # steps in the log, about
_EVALUATIONS = 20  # by default


@dataclass(frozen=True)
class Place:
    """The place that a training has come to."""

    step: int = 0  # steps that were made
    epoch: int = 0
    pack: int = 0  # the next, of its epoch
    best: float = 0.0  # acceptance length
    best_step: int = 0
    worse: int = 0  # evaluations since then


@dataclass
class Trainer:
    """A training, on one device of each rank.

    Attributes:
        drafter, target: the drafter, and the target that it learns from.
        documents: to train on.
        held_out: with greedy replies, to measure on.
        settings: of the training.
        state: where checkpoints and the log go.
    """

    drafter: TrainedDrafter
    target: FrozenTarget
    documents: list[Document]
    held_out: list[Document]
    settings: TrainSettings
    state: State
    place: Place = field(default_factory=Place)
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        self.packs = Packs(self.documents, self.settings.pack, self.settings.seed)
        auto = "flex" if self.target.device.type == "cuda" else "masked"
        flex = (auto if self.settings.attention == "auto" else self.settings.attention) == "flex"
        self._attention = Flexible(self.settings.pack, self.settings.anchors) if flex else MASKED

    @property
    def steps_of_all_epochs(self) -> int:
        """Steps that the epochs of the settings are."""
        return max(1, self.settings.epochs * len(self.packs.epoch(0)) // self.settings.packs)

    def measure(self) -> float:
        """Measures the seconds of a step, in steps that change nothing."""
        for _ in range(2):  # the first one also compiles, and allocates
            began = time.perf_counter()
            self.loss(self.packs.pack(0, 0), 0).value.backward()
            self.drafter.zero_grad(set_to_none=True)
            if self.target.device.type == "cuda":
                torch.cuda.synchronize()
        return (time.perf_counter() - began) * self.settings.packs / self.settings.ranks

    def run(
        self, steps: int, progress: Callable[[str, int, int], None], ranks: Ranks, seconds: float | None = None
    ) -> None:
        """Trains to the end, or until the best evaluation is long past; goes on from the last checkpoint.

        Args:
            steps: of the whole training, which the learning rate depends on.
            ranks: which this process is one of.
            seconds: after which it ends, with the step under way and an evaluation.

        Raises:
            SettingsError: the checkpoint is damaged.
            KeyboardInterrupt: Ctrl-C; a checkpoint of the last whole step is there.
        """
        self.steps, self.ranks = steps, ranks
        self._optimizer = Optimizer(self.drafter, self.settings.peak_rate, steps, self.settings.optimizer)
        self._resume()
        every = self.settings.evaluate_every or max(1, self.steps // _EVALUATIONS)
        file = self.state.folder / LOG if self._writes else Path(os.devnull)
        began = time.perf_counter()
        with held_signals() as interruption, file.open("a", encoding="utf-8") as log:
            if self.place.step == 0:
                self._evaluate(log.write, progress)
            while self.place.step < self.steps and self.place.worse < self.settings.patience:
                self._step(log.write)
                is_late = ranks.any(seconds is not None and time.perf_counter() - began > seconds)
                measured = is_late or self.place.step in (self.steps, self.place.step // every * every)
                if measured:
                    self._evaluate(log.write, progress)
                ends = ranks.any(interruption.has_come)  # asked once: what comes later ends the next step
                if measured or self.place.step % self.settings.save_every == 0 or ends:
                    log.flush()
                    self._save()
                progress("training", self.place.step, self.steps)
                if ends and interruption.has_come:
                    interruption.pass_on()
                if ends or is_late:
                    return  # also a rank that was not told itself

    # -- a step ----------------------------------------------------------------------------------------------------

    def _step(self, write: Callable[[str], Any]) -> None:
        began = time.perf_counter()
        place, number, packs = self.place, self.place.step, self.settings.packs
        places = []
        for _ in range(packs):
            if place.pack >= len(self.packs.epoch(place.epoch)):
                place = replace(place, epoch=place.epoch + 1, pack=0)
            places.append((place.epoch, place.pack))
            place = replace(place, pack=place.pack + 1)
        mean = torch.zeros(2, device=self.target.device)  # of the loss and of accepted drafts, over packs
        for part in self.ranks.mine(range(packs)):
            loss = self.loss(self.packs.pack(*places[part]), number * packs + part)
            (loss.value / packs).backward()
            mean += torch.stack([loss.value.detach(), loss.accepted]) / packs
        gradients = [parameter.grad for parameter in self.drafter.parameters() if parameter.grad is not None]
        self.ranks.add_up([*gradients, mean])
        self._optimizer.step(number)
        self.place = replace(place, step=number + 1)
        if number % max(1, self.steps // _LOGGED) == 0:
            value, accepted = mean.tolist()
            row = {
                "step": number + 1,
                "loss": round(value, 5),
                "accepted": round(accepted, 4),
                "rate": learning_rate(number, self.steps, self.settings.peak_rate),
                "seconds": round(time.perf_counter() - began, 4),
            }
            write(json.dumps(row) + "\n")

    def loss(self, pack: Pack, number: int) -> Loss:
        """Computes the loss of the number-th pack, counted from 0 over the whole training; the pack is on the host."""
        chosen = pick_anchors(pack, self.settings.anchors, generator(self.settings.seed, number, 1))
        pack = pack.to(self.target.device)
        features = self.target.features(pack, self._attention)
        objective, hidden = self.settings.objective, features.hidden[0]
        likeliest = self.target.likeliest(hidden) if objective == "greedy" else None
        anchors = anchored(pack, moved(chosen, self.target.device), self.drafter.config.block_size, likeliest)
        with computing(self.target.device):
            rows = self.drafter(pack, features.taps, chosen, self._attention)
            teacher = self._teacher(hidden, anchors.rows) if objective == "kd" else None
            return block_loss(rows, self.drafter.head(self.target.head), anchors, self.settings.weighting, teacher)

    def _teacher(self, hidden: Tensor, chosen: Tensor) -> Teacher:
        """Makes the target's logits at labels: those of the token at anchor + k stand at anchor + k - 1."""
        at = chosen[:, None] + torch.arange(self.drafter.config.block_size - 1, device=chosen.device)
        rows = at.clamp(max=len(hidden) - 1)
        return lambda part: self.target.logits(hidden[rows[part]])

    # -- evaluations and checkpoints -------------------------------------------------------------------------------

    def _evaluate(self, write: Callable[[str], Any], progress: Callable[[str, int, int], None]) -> None:
        """Measures the drafter as it would be exported; keeps it where it is the best so far."""
        kept = {key: parameter.detach().clone() for key, parameter in self.drafter.tensors().items()}
        rounded = {key: values.to(EXPORTED) for key, values in kept.items()}
        self.drafter.load(rounded)
        with computing(self.target.device):
            told = partial(progress, "evaluating")
            counted = simulate(self.drafter, self.target, self.ranks.mine(self.held_out), told)
        acceptance = Acceptance.sum(self.ranks.gather(counted))
        self.drafter.load(kept)
        write(json.dumps({"step": self.place.step, "acceptance": acceptance.as_json()}) + "\n")
        tau = acceptance.overall.length
        if tau > self.place.best:
            self.place = replace(self.place, best=tau, best_step=self.place.step, worse=0)
            self._write(BEST, rounded, {"step": self.place.step})
        else:
            self.place = replace(self.place, worse=self.place.worse + 1)

    def _save(self) -> None:
        tensors = {f"drafter/{key}": p.detach() for key, p in self.drafter.tensors().items()}
        self._write(CHECKPOINT, {**tensors, **self._optimizer.tensors()}, asdict(self.place))

    @property
    def _writes(self) -> bool:
        """Whether it is this rank that writes files."""
        return self.ranks.rank == 0

    def _write(self, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if not self._writes:
            return
        metadata = {"format": "pt", "place": json.dumps(facts)}
        with self.state.aside(name) as partial:
            try:
                save_file({key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, partial, metadata)
            except SafetensorError as error:
                raise SettingsError(f"{self.state.folder / name}: cannot be written ({error})") from None

    def _resume(self) -> None:
        file = self.state.folder / CHECKPOINT
        if file.is_file():
            try:
                with holding_signals(), safe_open(file, framework="pt") as opened:
                    self.place = Place(**json.loads(opened.metadata()["place"]))
                    tensors = load_file(file)
            except (SafetensorError, KeyError, TypeError, ValueError) as error:
                raise SettingsError(f"{file}: is damaged ({error}); remove it to train from the start") from None
            self.drafter.load({key: tensors[f"drafter/{key}"] for key in self.drafter.tensors()})
            self._optimizer.load(tensors, self.place.step)
        if self._writes:
            _cut_log(self.state.folder / LOG, self.place.step)


def computing(device: torch.device) -> AbstractContextManager[Any]:
    """Computes in BF16 over FP32 weights on a GPU, in FP32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def read_log(file: Path) -> list[dict[str, Any]]:
    """Reads the log: a step's loss, or an evaluation, a line."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def _cut_log(file: Path, step: int) -> None:
    """Drops what a process that was killed logged after its last checkpoint."""
    if not file.is_file():
        return
    content = file.read_text(encoding="utf-8")
    lines = content[: content.rfind("\n") + 1].splitlines()
    kept = [line for line in lines if json.loads(line)["step"] <= step] if step else []
    file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
