"""`train`: the phases, from prompts to a drafter that is exported, measured and reported on.

    split -> regenerate -> train -> export -> evaluate -> report

Each is made once, goes on where it was interrupted, and says first what it will cost.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trtllm_dflash.build.settings import DEFAULT_MAX_SEQ_LEN
from trtllm_dflash.checkpoint.drafter import DrafterCheckpoint
from trtllm_dflash.checkpoint.drafter_config import read_drafter_config
from trtllm_dflash.checkpoint.folder import source_files
from trtllm_dflash.checkpoint.hub import resolve
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.checkpoint.validation import reading_config
from trtllm_dflash.cost.gpus import GB, gigabytes
from trtllm_dflash.engine.config import Progress
from trtllm_dflash.engine.directory import digest
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.llm import LLM
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.ops.draft_tree import TREE_SIZES, draft_tree, listed_nodes
from trtllm_dflash.runtime.request import SamplingParams
from trtllm_dflash.session.device import pick_device
from trtllm_dflash.session.threads import limited_threads
from trtllm_dflash.signals import holding_signals
from trtllm_dflash.text.tokenizer import TextCodec
from trtllm_dflash.train.documents import Document
from trtllm_dflash.train.evaluation import Acceptance, simulate
from trtllm_dflash.train.export import SPECULATORS, ZLAB, write_both
from trtllm_dflash.train.features import FrozenTarget
from trtllm_dflash.train.network import TrainedDrafter
from trtllm_dflash.train.prompts import as_lines, read_lines, split
from trtllm_dflash.train.ranks import Ranks, check_ranks, joined
from trtllm_dflash.train.regenerate import Rate, read_documents, regenerate, sampling_of
from trtllm_dflash.train.report import CARD, PLOT, REPORT, can_plot, make_report, model_card, plot
from trtllm_dflash.train.settings import TrainSettings
from trtllm_dflash.train.shape import check_shape, config_of, new_config
from trtllm_dflash.train.state import Manifest, State
from trtllm_dflash.train.trainer import BEST, CHECKPOINT, LOG, Trainer, computing, read_log

PHASES = ("split", "regenerate", "train", "export", "evaluate", "report")

#: The parts of the data, and their files in the state directory.
TRAINING, HELD_OUT = "training", "held_out"

#: Settings that decide what a phase makes.
_OF_SPLIT = ("domain_key", "held_out", "evaluate_on", "general_share", "thinking")
_OF_REPLIES = ("temperature", "max_tokens")
_OF_TRAINING = (
    *(
        "layers",
        "head",
        "block",
        "taps",
        "mask_token",
        "objective",
        "weighting",
        "optimizer",
        "pack",
        "packs",
        "anchors",
    ),
    *("rate", "epochs", "steps", "hours", "evaluate_every", "seed"),
)

#: Bytes a parameter: FP32 and two moments, written beside the last ones; BF16 of the best, and of two exports.
_CHECKPOINT_BYTES = 2 * 12 + 2 * 2 + 2 * 2
_TOKEN_BYTES = 6  # of a token id in a file of replies, about


def train(
    settings: TrainSettings,
    output: Path,
    until: str = PHASES[-1],
    progress: Progress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any] | None:
    """Runs the phases up to `until` in the state directory `output`; returns the report, where it comes so far.

    Args:
        say: told what each phase will cost, and what it has made; a line each.

    Raises:
        DFlashError: the target, the prompts, a setting or the directory cannot be used.
    """
    device = pick_device(settings.device)
    check_ranks(settings.ranks, settings.packs, device)
    if settings.attention == "flex" and device.type == "cpu":  # before the replies, which take hours
        raise SettingsError("--attention flex: torch trains with it on a GPU alone; leave it out")
    opened = _opened(settings)
    target = _digest_of(opened[0].target_folder.path)
    with State.opened(output, target) as state:
        training = Training(settings, target, *opened, state, progress, say)
        for name in PHASES[: PHASES.index(until) + 1]:
            getattr(training, name)()
        return json.loads((output / REPORT).read_text()) if until == PHASES[-1] else None


def follow(connect: Callable[[], Ranks], settings: TrainSettings, output: Path, steps: int) -> None:
    """Trains as one of the ranks that rank 0 starts; see `ranks.joined`."""
    state = State(output, Manifest(target=""))  # rank 0 has opened it, and alone writes
    training = Training(settings, "", *_opened(settings), state, lambda *_: None, lambda _: None)
    with training.idle_engine() as llm:
        training.trainer(llm).run(steps, training.progress, connect())


def _opened(settings: TrainSettings) -> tuple[Pair, dict[str, Any], DrafterConfig, int]:
    """Opens the target, and the drafter to begin with; chooses a shape and a length."""
    pair = open_pair(
        resolve(settings.target, with_tokenizer=True), None if settings.start is None else resolve(settings.start)
    )
    raw = _raw_config(settings, pair)
    with reading_config(pair.target_folder.path):
        config = read_drafter_config(raw)
    return pair, raw, config, _max_seq_len(settings, pair)


@dataclass
class Training:
    """The phases of one training."""

    settings: TrainSettings
    target: str  # its digest
    pair: Pair
    raw_config: dict[str, Any]  # the drafter's, in z-lab's format
    config: DrafterConfig
    max_seq_len: int  # of a prompt and its reply
    state: State
    progress: Progress
    say: Callable[[str], None]

    # -- prompts and replies ---------------------------------------------------------------------------------------

    def split(self) -> None:
        """Splits the prompts into those to train on and those held out."""
        files = {"data": self.settings.data, "general": self.settings.general}
        digests = {name: None if file is None else _file_digest(name, file)[:12] for name, file in files.items()}
        if not self.state.begin("split", {**digests, **_chosen(self.settings, _OF_SPLIT)}, at_once=True):
            return
        parts = split(self.settings)
        for name, records in ((TRAINING, parts.training), (HELD_OUT, parts.held_out)):
            self.state.write(_prompts(name), as_lines(records))
        self.say(f"split: {len(parts.training):,} prompts to train on, {len(parts.held_out):,} held out")
        self.state.finish(
            "split",
            *map(_prompts, (TRAINING, HELD_OUT)),
            training=len(parts.training),
            held_out=len(parts.held_out),
            data=_file_digest("data", self.settings.data),
            target=self.target,
        )

    def regenerate(self) -> None:
        """Has the target reply to all prompts."""
        chosen = {**_chosen(self.settings, _OF_REPLIES), "max_seq_len": self.max_seq_len}
        if not self.state.begin("regenerate", chosen):
            return
        began, skipped = time.perf_counter(), dict[str, int]()
        folder = self.pair.target_folder.path
        with limited_threads(folder), self.engine(self.settings.start, self.settings.max_batch) as llm:
            for name in (HELD_OUT, TRAINING):
                skipped[name] = self._regenerate(llm, name)
        tokens = {}
        for name in (TRAINING, HELD_OUT):
            documents = read_documents(self.state.folder / _replies(name))
            if not documents:
                long = f"; {skipped[name]} are too long for --max-seq-len {self.max_seq_len}" if skipped[name] else ""
                which = f"no {name.replace('_', ' ')} prompt has a reply of two tokens or more"
                raise SettingsError(f"--data {self.settings.data}: {which}{long}")
            tokens[name] = sum(document.reply for document in documents)
        self.say(f"regenerate: replies of {tokens[TRAINING]:,} tokens to train on, {tokens[HELD_OUT]:,} held out")
        if any(skipped.values()):
            self.say(f"regenerate: {sum(skipped.values())} prompts are too long for --max-seq-len and left out")
        self.state.finish(
            "regenerate",
            *map(_replies, (TRAINING, HELD_OUT)),
            tokens=tokens,
            too_long=skipped,
            seconds=round(time.perf_counter() - began, 2),
        )

    def _regenerate(self, llm: LLM, name: str) -> int:
        """Has the target reply to the prompts of a part; returns the number of those that are too long."""
        return regenerate(
            llm,
            read_lines(self.state.folder / _prompts(name)),
            self.state.folder / _replies(name),
            self._sampling(0.0 if name == HELD_OUT else self.settings.temperature),
            keep=name == TRAINING,
            progress=lambda done, total: self.progress(f"replies, {name.replace('_', ' ')}", done, total),
            on_rate=lambda rate, left: self._announce_replies(name, rate, left),
        )

    def _announce_replies(self, name: str, rate: Rate, left: int) -> None:
        each, speed = rate.tokens / rate.replies, rate.tokens / rate.seconds
        tokens = int(left * each)
        self.state.check_space("replies", tokens * _TOKEN_BYTES)
        self.say(
            f"regenerate: {left:,} more {name.replace('_', ' ')} prompts, about {each:.0f} tokens each at {speed:,.0f} "
            f"tokens/s: {_duration(tokens / speed)}, {_size(tokens * _TOKEN_BYTES)}"
        )

    def _sampling(self, temperature: float | None) -> SamplingParams:
        return sampling_of(self.pair.target_folder.path, temperature, self.settings.max_tokens)

    # -- training --------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains the drafter."""
        start = None if self.pair.drafter is None else _digest_of(self.pair.drafter.folder.path)[:12]
        if not self.state.begin("train", {"from": start, **_chosen(self.settings, _OF_TRAINING)}):
            return
        began = time.perf_counter()
        earlier = self.state.facts("train").get("seconds", 0.0)
        try:
            with self.idle_engine() as llm:
                trainer = self.trainer(llm)
                steps = self._plan(trainer)
                others = joined(
                    self.settings.ranks, llm.session.device, follow, (self.settings, self.state.folder, steps)
                )
                with others as ranks:
                    hours = self.settings.hours
                    trainer.run(steps, self.progress, ranks, None if hours is None else hours * 3600 - earlier)
        finally:
            self.state.note("train", seconds=round(earlier + time.perf_counter() - began, 2))
        place = trainer.place
        self.say(
            f"train: {place.step:,} steps, the best after {place.best_step:,}: {place.best:.2f} tokens a decoding step"
        )
        self.state.finish(
            "train",
            BEST,
            LOG,
            best_step=place.best_step,
            tau=round(place.best, 4),
            tokens=sum(len(document.token_ids) for document in trainer.documents),
        )

    def trainer(self, llm: LLM) -> Trainer:
        """Makes the trainer of a drafter over the features of an engine of the target."""
        target = FrozenTarget(llm, self.config.tap_layers)
        drafter = self._drafter(target)
        if self.pair.drafter is not None:
            drafter.load(_tensors_of(self.pair.drafter, drafter))
        training, held_out = (read_documents(self.state.folder / _replies(name)) for name in (TRAINING, HELD_OUT))
        return Trainer(drafter, target, training, held_out, self.settings, self.state)

    def _drafter(self, target: FrozenTarget) -> TrainedDrafter:
        scale = self.pair.target_config.embedding_scale  # of the table that it shares
        config = self.config.model_copy(update={"embedding_scale": scale})
        return TrainedDrafter(config, target.embedding, self.max_seq_len, self.settings.seed)

    def _plan(self, trainer: Trainer) -> int:
        """Decides on the number of steps, once, by a measured one; says what they will cost."""
        facts = self.state.facts("train")
        if "steps" not in facts:
            seconds = trainer.measure()
            steps = self.settings.steps or trainer.steps_of_all_epochs
            if self.settings.hours is not None:  # `run` ends in time, whatever is beside the steps
                steps = max(1, min(steps, int(self.settings.hours * 3600 / seconds)))
            self.state.note("train", steps=steps, seconds_a_step=round(seconds, 5))
        parameters = sum(parameter.numel() for parameter in trainer.drafter.parameters())
        self.state.check_space("checkpoints", parameters * _CHECKPOINT_BYTES - self.state.size(CHECKPOINT, BEST))
        settings, steps, each = self.settings, int(facts["steps"]), float(facts["seconds_a_step"])
        self.say(
            f"train: {parameters / 1e6:,.1f} M parameters, {steps:,} steps of {settings.packs} x {settings.pack:,} "
            f"tokens and {settings.anchors} blocks, {each:.2f} s each: {_duration(steps * each)}, "
            f"{_size(parameters * _CHECKPOINT_BYTES)}"
        )
        return steps

    # -- what comes of it ------------------------------------------------------------------------------------------

    def export(self) -> None:
        """Writes the best drafter in both formats."""
        if not self.state.begin("export", {}):
            return
        architectures = self.pair.target_folder.config.get("architectures", [])
        tensors = self._best()
        files = write_both(
            self.state.folder, self.raw_config, self.config, tensors, self.settings.target, architectures
        )
        self.say(f"export: {self.state.folder / ZLAB} in z-lab's format, {SPECULATORS} in speculators'")
        self.state.finish("export", *files)

    def _best(self) -> dict[str, torch.Tensor]:
        with holding_signals():
            return load_file(self.state.folder / BEST)

    def evaluate(self) -> None:
        """Measures the exported drafter: simulated, and in real decoding of the held-out prompts."""
        if not self.state.begin("evaluate", {}):
            return
        held_out = read_documents(self.state.folder / _replies(HELD_OUT))
        tokens = sum(document.reply for document in held_out)
        self.say(f"evaluate: {len(held_out):,} held-out replies of {tokens:,} tokens, simulated and decoded")
        simulated, trees = self._simulate(held_out)
        decoded = self._decode(held_out)
        self.say(
            f"evaluate: {simulated.overall.length:.2f} tokens a decoding step simulated, {decoded['tau']:.2f} real"
        )
        self.state.finish("evaluate", simulated=simulated.as_json(), trees=trees, decoded=decoded)

    def _simulate(self, held_out: list[Document]) -> tuple[Acceptance, dict[int, float]]:
        """Simulates the exported drafter; returns its acceptance, and that of trees by their size."""
        block = self.config.block_size
        grows = self.config.selector is None
        sizes = [nodes for nodes in TREE_SIZES if grows and listed_nodes(nodes, block) >= nodes]
        with self.idle_engine() as llm:
            target = FrozenTarget(llm, self.config.tap_layers)
            drafter = self._drafter(target)
            drafter.load(self._best())
            with computing(target.device):
                chain = simulate(drafter, target, held_out, lambda *done: self.progress("simulating", *done))
                trees = [simulate(drafter, target, held_out, tree=draft_tree(nodes, block)) for nodes in sizes]
        return chain, {nodes: round(tree.overall.length, 4) for nodes, tree in zip(sizes, trees, strict=True)}

    def _decode(self, held_out: list[Document]) -> dict[str, Any]:
        """Decodes the held-out prompts with the exported drafter."""
        folder, drafter = self.pair.target_folder.path, str(self.state.folder / ZLAB)
        with limited_threads(folder), self.engine(drafter, self.settings.max_batch) as llm:
            prompts = [list(document.token_ids[: document.prompt]) for document in held_out]
            self.progress("decoding", 0, 1)
            replies = llm.generate(list(prompts), self._sampling(0.0))
            self.progress("decoding", 1, 1)
        added = sum(reply.step_tokens for reply in replies)
        steps = sum(reply.steps for reply in replies)
        return {"tau": round(added / max(1, steps), 4), "steps": steps}

    def report(self) -> None:
        """Writes the report, its picture, and the model cards."""
        if not self.state.begin("report", {}):
            return
        phases = {name: self.state.facts(name) for name in PHASES[:-1]}
        report = make_report(self.settings, self.config, phases, read_log(self.state.folder / LOG))
        cards = [f"{folder}/{CARD}" for folder in (ZLAB, SPECULATORS)]
        for card in cards:
            self.state.write(card, model_card(report))
        self.state.write(REPORT, json.dumps(report, indent=2) + "\n")
        if can_plot():
            with self.state.aside(PLOT) as partial:
                plot(report, partial)
        else:
            self.say(f"report: no picture without matplotlib: {pip_install('plots')}")
        self.state.finish("report", REPORT)  # the cards are for others to write in

    def engine(self, drafter: str | None, slots: int, kernels: Any = "auto", prepare: bool = True) -> LLM:
        """Loads an engine of the target, with a drafter or alone."""
        return LLM.from_pretrained(
            self.settings.target,
            drafter,
            device=self.settings.device,
            max_batch=slots,
            max_seq_len=self.max_seq_len,
            kernels=kernels,
            prepare=prepare,
            draft_tree="off",
        )

    def idle_engine(self) -> LLM:
        """Loads an engine of the target that takes no step: features are computed from its weights."""
        # On a GPU an engine with gated delta nets refuses torch's kernels: its nets are ours alone.
        return self.engine(None, 1, "torch" if self.pair.target_config.delta is None else "auto", prepare=False)


def _raw_config(settings: TrainSettings, pair: Pair) -> dict[str, Any]:
    """Makes the drafter's configuration in z-lab's format."""
    if pair.drafter is not None:
        check_shape(settings, pair.drafter.config)
        return config_of(pair.drafter)
    return new_config(settings, pair.target_folder, pair.target_config, TextCodec.load(pair.target_folder.path, {}))


def _max_seq_len(settings: TrainSettings, pair: Pair) -> int:
    """Chooses the most tokens of a prompt and its reply."""
    most = pair.target_config.max_positions
    length = settings.max_seq_len or min(DEFAULT_MAX_SEQ_LEN, most, settings.pack)
    if length > most:
        raise SettingsError(f"--max-seq-len {length}: the target takes at most {most} positions")
    if length > settings.pack:
        raise SettingsError(f"--pack {settings.pack}: is shorter than --max-seq-len {length}")
    return length


def _chosen(settings: TrainSettings, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names}


def _prompts(part: str) -> str:
    return f"prompts/{part}.jsonl"


def _replies(part: str) -> str:
    return f"replies/{part}.jsonl"


def _tensors_of(checkpoint: DrafterCheckpoint, drafter: TrainedDrafter) -> dict[str, Any]:
    return {key: checkpoint.folder.read(checkpoint.keys[key]) for key in drafter.shapes()}


def _digest_of(folder: Path) -> str:
    """Computes one digest of a checkpoint's files."""
    lines = (f"{file.name} {digest(file)}\n" for file in source_files(folder))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _file_digest(flag: str, file: Path) -> str:
    try:
        return digest(file)
    except OSError as error:
        raise SettingsError(f"--{flag} {file}: cannot be read ({error.strerror})") from None


def _size(count: int) -> str:
    """Formats a number of bytes: `12.3 GB`, `4 MB`."""
    return gigabytes(count) if count >= GB else f"{count / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    """Formats a time: `40 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
