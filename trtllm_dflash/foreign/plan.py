"""The plan of a launch: a pair, a method, a GPU and the limits that follow; refuses what no runtime could run."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from trtllm_dflash.catalog import CatalogEntry, find_entry
from trtllm_dflash.checkpoint.ranks import unshared_heads
from trtllm_dflash.cost.gpus import GB, GPU, GPUS, find_gpu, gigabytes, present_gpu
from trtllm_dflash.errors import CheckpointError, SettingsError
from trtllm_dflash.foreign.shapes import (
    DrafterFacts,
    ModelShape,
    find_folder,
    names_folder,
    published_drafter,
    published_target,
    read_drafter,
    read_shape,
)

RuntimeName = Literal["tensorrt-llm", "vllm", "sglang"]
Method = Literal["dflash", "eagle3", "none"]

#: EAGLE-3 drafters by the catalog's names: the one in TensorRT-LLM's documentation, and those that vLLM 0.26 names in
#: vllm/config/speculative.py.
EAGLE3 = {
    "gpt-oss-120b": "nvidia/gpt-oss-120b-Eagle3",
    "qwen3-8b": "AngelSlim/Qwen3-8B_eagle3",
    "llama-3.1-8b": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
}
EAGLE3_DRAFT_LENGTH = 3  # its chain; a DFlash block costs one pass whatever its length

#: Families whose published checkpoints have a tokenizer of their own code.
REMOTE_TOKENIZERS = ("kimi_k25",)

#: Tokens of prompt and reply for which limits are planned where none are given.
SEQUENCE = 16384

#: Sequences at a time: drafting pays at small batches, and graphs are captured up to here. The same with every method,
#: so that runs differ in the method alone.
BATCHES = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)

#: Where no shape is known, so that nothing can be planned.
UNPLANNED_BATCH = 16

#: Bytes left to activations and captured graphs: an allowance, not a measurement.
SCRATCH = 4 * GB


class LaunchSettings(BaseModel):
    """Settings of `launch`; each field is a flag."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    runtime: RuntimeName
    model: str | None = None  # a pair of the catalog
    target: str | None = None  # a folder, or a Hugging Face name
    drafter: str | None = None  # likewise
    method: Method = "dflash"
    gpu: str | None = None  # None: the one present
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    nodes: PositiveInt = 1
    node_rank: NonNegativeInt = 0
    head: str | None = None  # address of the first node
    draft_length: PositiveInt | None = None  # default: the whole block; EAGLE-3: 3
    max_batch: PositiveInt | None = None  # default: what fits
    max_seq_len: PositiveInt | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000


@dataclass(frozen=True)
class Room:
    """The memory of a GPU, and how many sequences of full length fit in it at once.

    Attributes:
        weights: bytes of target and drafter on a GPU.
        per_sequence: bytes of both caches.
        available: bytes that the runtime may give to caches.
        largest: the largest batch that fits; may be 0.
    """

    weights: int
    per_sequence: int
    available: int
    largest: int


@dataclass(frozen=True)
class Plan:
    """A pair, a method, a GPU and limits: the source of every runtime's configuration.

    Attributes:
        name: of the pair.
        target, drafter: what the runtime is given: a folder or a Hugging Face name.
        draft_length: drafts a step (K); 0 without drafting.
        block_size: of a DFlash drafter.
        shape: the target's, where it is known.
        max_batch, max_seq_len: limits, of sequences at a time and of tokens in each.
        room: what they follow from; None where no shape is known.
        entry: the catalog's.
    """

    settings: LaunchSettings
    name: str
    family: str
    target: str
    drafter: str | None
    method: Method
    gpu: GPU
    draft_length: int
    block_size: int | None
    shape: ModelShape | None
    drafter_shape: ModelShape | None
    max_batch: int
    max_seq_len: int
    room: Room | None
    entry: CatalogEntry | None

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted."""
        return self.method != "none"

    @property
    def ranks(self) -> int:
        """GPUs over all nodes."""
        return self.settings.tp * self.settings.pp

    @property
    def latent(self) -> bool:
        """Whether the target's attention is multi-head latent attention, for which runtimes have kernels of its own."""
        return self.shape is not None and self.shape.latent

    @property
    def large_heads(self) -> bool:
        """Whether some of the target's heads exceed 256 numbers, which most FlashAttention kernels do not take."""
        return self.shape is not None and self.shape.head_size > 256

    @property
    def sinks(self) -> bool:
        """Whether the target's attention has learned sinks, which not every kernel computes."""
        return self.family == "gpt_oss"

    @property
    def thinking_off(self) -> bool:
        """Whether the pair's drafter was trained on replies without thinking; the same for every method."""
        return self.entry is not None and self.entry.chat.get("enable_thinking") is False

    def headline(self, title: str, versions: str) -> str:
        """Says what is launched on a runtime of that title, by the fields of those versions of it."""
        gpus = f"{self.ranks} x {self.gpu.name}"
        return f"{self.name} on {title}, --method {self.method}, {gpus}. Fields as in {versions}."

    def tokenizer_notes(self, title: str, flag: str = "--trust-remote-code") -> list[str]:
        """Says so where the checkpoint's tokenizer is code, which a runtime of that title runs with a flag alone."""
        if self.family not in REMOTE_TOKENIZERS:
            return []
        return [
            f"The tokenizer of {self.target} is Python code in its checkpoint, which {title} runs with {flag} alone: "
            "read it, then add the flag."
        ]

    def thinking_notes(self, program: str) -> list[str]:
        """Says what requests must carry where thinking is off and a program has no flag for it."""
        if not self.thinking_off:
            return []
        return [
            'Send "chat_template_kwargs": {"enable_thinking": false} with each request: the drafter was trained '
            f"without thinking, and {program} has no flag for it."
        ]

    def catalog_notes(self) -> list[str]:
        """Lists the catalog's notes on the pair."""
        return [f"The catalog: {note}" for note in self.entry.notes] if self.entry is not None else []

    def host_reason(self) -> str:
        """Explains in one line who can reach the server."""
        if self.settings.host in ("127.0.0.1", "localhost"):
            return "who reaches it: this machine alone"
        return "who reaches it: as asked; anyone who reaches this address may use it"

    def tp_reason(self) -> str:
        """Explains in one line how the GPUs divide the models, where the drafter is sliced as the target is."""
        if self.settings.tp > 1 and self.drafts:
            return f"--tp: each of {self.settings.tp} GPUs has a part of every layer, the drafter's too"
        return f"--tp: GPUs that share every layer: {self.settings.tp}"

    def limits_reason(self) -> str:
        """Explains the limit on sequences in one line."""
        settings = self.settings
        if self.room is None:
            return "as asked" if settings.max_batch else "the pair's shape is not known here, so memory is not planned"
        gpu = self.gpu
        parts = f"{gigabytes(self.room.weights)} of weights, {gigabytes(self.room.per_sequence)} of caches a sequence"
        fits = f"{gpu.name}, {gpu.memory} GB: {parts}; {self.room.largest} fit in {gigabytes(self.room.available)}"
        if settings.max_batch is not None:
            return f"as asked; {fits}"
        if self.max_batch == BATCHES[0]:
            return f"{fits}; beyond {BATCHES[0]} drafting pays less"
        return fits


#: Bytes that caches may take on a GPU, from its memory, its weights' bytes and what each runtime sets aside.
Available = Callable[[GPU, int], int]


#: How a runtime that drafts blocks keeps the K/V rows of a target and its drafter, if not as their shapes say.
Kept = Callable[[ModelShape, ModelShape | None], tuple[ModelShape, ModelShape | None]]


def as_shaped(target: ModelShape, drafter: ModelShape | None) -> tuple[ModelShape, ModelShape | None]:
    """Keeps rows as the shapes say: those that windows show, and no others."""
    return target, drafter


def plan(settings: LaunchSettings, available: Available, kept: Kept = as_shaped) -> Plan:
    """Finds the pair, chooses its limits, and refuses what would not run.

    Raises:
        SettingsError: a setting that the runtime would refuse, or that would draft nothing; names the knob and why.
        CheckpointError: a folder is not a checkpoint's.
    """
    entry = find_entry(settings.model) if settings.model is not None else None
    target = _target_name(settings, entry)
    folder = _folder_of("--target", target)
    drafter = _drafter_name(settings, entry, target)
    gpu = gpu_for(settings)
    shape, facts = _shapes(settings, entry, target, folder, drafter)
    draft_length = _draft_length(settings, facts)
    _check_ranks(settings, shape, facts.shape)
    _check_nodes(settings)
    max_seq_len = _sequence(settings, shape, facts.shape)
    held = (shape, facts.shape) if shape is None or settings.method != "dflash" else kept(shape, facts.shape)
    room = _room(settings, gpu, *held, max_seq_len, available, draft_length)
    max_batch = settings.max_batch or (UNPLANNED_BATCH if room is None else _fitting(room))
    _check_room(settings, gpu, room, max_batch, max_seq_len)
    family = shape.family if shape is not None else entry.family if entry is not None else ""
    given = _as_given(target)
    return Plan(
        settings=settings,
        name=entry.name if entry is not None else Path(given).name,
        family=family,
        target=given,
        drafter=None if drafter is None else _as_given(drafter),
        method=settings.method,
        gpu=gpu,
        draft_length=draft_length,
        block_size=facts.block_size,
        shape=shape,
        drafter_shape=facts.shape,
        max_batch=max_batch,
        max_seq_len=max_seq_len,
        room=room,
        entry=entry,
    )


def gpu_for(settings: LaunchSettings) -> GPU:
    """Finds the GPU that `--gpu` names, else the one in this machine.

    Raises:
        SettingsError: it is not known, or there is none.
    """
    if settings.gpu is not None:
        return find_gpu(settings.gpu)
    present = present_gpu()
    if present is None:
        raise SettingsError(f"--gpu: there is no GPU here to plan for; name one: {', '.join(GPUS)}")
    return present


# -- the pair --------------------------------------------------------------------------------------------------------


def _target_name(settings: LaunchSettings, entry: CatalogEntry | None) -> str:
    target = settings.target or (entry.target if entry is not None else None)
    if target is None:
        raise SettingsError("say what to launch: --model NAME, or --target DIR with --drafter DIR")
    return target


def _drafter_name(settings: LaunchSettings, entry: CatalogEntry | None, target: str) -> str | None:
    if settings.method == "none":
        if settings.drafter is not None:
            raise SettingsError(f"--drafter {settings.drafter}: --method none drafts nothing; leave it out")
        return None
    if settings.drafter is not None:
        return settings.drafter
    if entry is None or target != entry.target:
        raise SettingsError(f"--target {target}: which drafter goes with it? give --drafter, or --method none")
    if settings.method == "dflash":
        if entry.kind != "dflash":
            raise SettingsError(f"--model {entry.name}: only DFlash drafters are launched, not {entry.kind}'s")
        return entry.drafter
    if entry.name not in EAGLE3:
        raise SettingsError(f"--method eagle3: no EAGLE-3 drafter is known for {entry.name}; give --drafter")
    return EAGLE3[entry.name]


def _shapes(
    settings: LaunchSettings, entry: CatalogEntry | None, target: str, folder: Path | None, drafter: str | None
) -> tuple[ModelShape | None, DrafterFacts]:
    """Reads shapes from folders on this machine, else from the tables, which have the catalog's checkpoints alone.

    Args:
        folder: the target's, if it is on this machine.
    """
    published = entry is not None and target == entry.target
    shape = published_target(entry.name) if published and entry is not None else None
    if folder is not None:
        found = read_shape(folder)
        shape = found if found.weight_bytes or shape is None else shape  # the cache may hold its tokenizer alone
    if drafter is None:
        return shape, DrafterFacts(None)
    folder = _folder_of("--drafter", drafter)
    if settings.method == "eagle3":
        return shape, DrafterFacts(None, shape=read_shape(folder) if folder is not None else None)
    if folder is not None:
        return shape, read_drafter(folder)
    if entry is None or drafter != entry.drafter:
        raise SettingsError(
            f"--drafter {drafter}: is not on this machine, so its block size is not known; give a folder"
        )
    return shape, DrafterFacts(entry.block_size, published_drafter(entry.name))


def _folder_of(flag: str, name: str) -> Path | None:
    """Finds a checkpoint as `find_folder` does; its error names the flag."""
    try:
        return find_folder(name)
    except CheckpointError as error:
        raise CheckpointError(f"{flag} {error}") from None


def _as_given(name: str) -> str:
    """Makes a folder's path absolute; leaves a Hugging Face name as it is."""
    return str(find_folder(name)) if names_folder(name) else name


# -- limits ----------------------------------------------------------------------------------------------------------


def _draft_length(settings: LaunchSettings, facts: DrafterFacts) -> int:
    asked = settings.draft_length
    if settings.method == "none":
        if asked is not None:
            raise SettingsError(f"--draft-length {asked}: --method none drafts nothing; leave it out")
        return 0
    if settings.method == "eagle3":
        return asked or EAGLE3_DRAFT_LENGTH
    assert facts.block_size is not None
    longest = facts.block_size - 1
    if asked is not None and asked > longest:
        raise SettingsError(
            f"--draft-length {asked}: the drafter was trained for blocks of {facts.block_size}, the bonus token and "
            f"{longest} drafts; TensorRT-LLM refuses more, and the others would draft what it never learned"
        )
    return asked or longest


def _check_ranks(settings: LaunchSettings, target: ModelShape | None, drafter: ModelShape | None) -> None:
    if settings.pp > 1 and settings.method != "none":
        raise SettingsError(
            f"--pp {settings.pp}: none of the runtimes drafts with pipeline parallelism, since the drafter reads "
            "layers of every stage; use --tp, or --method none"
        )
    for whose, shape in (("target", target), ("drafter", drafter)):
        if shape is None:
            continue
        heads = unshared_heads(settings.tp, shape.heads, (shape.kv_heads,), shape.key_heads)
        if heads is not None:
            raise SettingsError(f"--tp {settings.tp}: does not divide the {whose}'s {heads}")


def _check_nodes(settings: LaunchSettings) -> None:
    for flag, address in (("--host", settings.host), ("--head", settings.head)):
        if address is not None and not re.fullmatch(r"[\w.:-]+", address, re.ASCII):
            raise SettingsError(f"{flag} {address!r}: not an address, or a name of one")
    ranks = settings.tp * settings.pp
    if ranks % settings.nodes:
        raise SettingsError(f"--nodes {settings.nodes}: does not divide the {ranks} GPUs of --tp and --pp")
    if settings.nodes == 1 and ranks > 8:
        raise SettingsError(f"--tp {settings.tp}: {ranks} GPUs are more than a node has; say over how many: --nodes")
    if settings.node_rank >= settings.nodes:
        raise SettingsError(f"--node-rank {settings.node_rank}: nodes count from 0 to {settings.nodes - 1}")
    if settings.head is not None and (settings.nodes == 1 or settings.runtime == "tensorrt-llm"):
        why = "there is one node; see --nodes" if settings.nodes == 1 else "TensorRT-LLM's ranks are MPI's to find"
        raise SettingsError(f"--head {settings.head}: {why}")
    if settings.nodes > 1 and settings.runtime != "tensorrt-llm" and settings.head is None:
        raise SettingsError(f"--nodes {settings.nodes}: say where the first node is: --head ADDRESS")


def _sequence(settings: LaunchSettings, target: ModelShape | None, drafter: ModelShape | None) -> int:
    limits = {"target": target, "drafter": drafter if settings.method == "dflash" else None}
    known = {whose: shape.max_positions for whose, shape in limits.items() if shape is not None and shape.max_positions}
    for whose, limit in known.items():
        if settings.max_seq_len is not None and settings.max_seq_len > limit:
            raise SettingsError(f"--max-seq-len {settings.max_seq_len}: the {whose} takes at most {limit} positions")
    return settings.max_seq_len or min([SEQUENCE, *known.values()])


def _room(
    settings: LaunchSettings,
    gpu: GPU,
    target: ModelShape | None,
    drafter: ModelShape | None,
    tokens: int,
    available: Available,
    draft_length: int,
) -> Room | None:
    if target is None or (settings.method == "dflash" and drafter is None):
        return None
    shapes = [target] if drafter is None or settings.method == "none" else [target, drafter]
    weights = sum(shape.weight_bytes for shape in shapes) // (settings.tp * settings.pp)
    per_sequence = sum(shape.cache_bytes(tokens, settings.tp) for shape in shapes) // settings.pp
    # Runtimes keep a state for each row of a step, to go back to one of them.
    per_sequence += (2 + draft_length) * target.state_bytes // (settings.tp * settings.pp)
    free = max(0, available(gpu, weights))
    return Room(weights, per_sequence, free, free // per_sequence)


def _fitting(room: Room) -> int:
    return next((batch for batch in BATCHES if batch <= room.largest), 0)


def _check_room(settings: LaunchSettings, gpu: GPU, room: Room | None, batch: int, tokens: int) -> None:
    if room is None:
        return
    if room.largest == 0:
        raise SettingsError(
            f"--tp {settings.tp}: {gigabytes(room.weights)} of weights leave a {gpu.name} no room for one sequence of "
            f"{tokens} tokens; use more GPUs (--tp), a smaller --max-seq-len or another --gpu"
        )
    if batch > room.largest:
        raise SettingsError(
            f"--max-batch {batch}: {room.largest} sequences of {tokens} tokens fit on a {gpu.name}; "
            "use fewer, a smaller --max-seq-len or more GPUs (--tp)"
        )


def static_memory(fraction: float) -> Available:
    """Memory rule of runtimes that give weights and caches together a fraction of the GPU's memory."""

    def available(gpu: GPU, weights: int) -> int:
        return int(gpu.bytes * fraction) - weights - SCRATCH

    return available


def free_memory(fraction: float) -> Available:
    """Memory rule of runtimes that give caches a fraction of the memory that the weights leave free."""

    def available(gpu: GPU, weights: int) -> int:
        return int(left_by_weights(gpu, weights) * fraction)

    return available


def left_by_weights(gpu: GPU, weights: int) -> int:
    """Bytes of a GPU that the weights leave free for caches."""
    return gpu.usable_bytes - weights - SCRATCH
