"""`build`: checkpoints in, an engine directory out."""

import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from safetensors.torch import save_file

import trtllm_dflash
from trtllm_dflash.checkpoint.hub import resolve
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.checkpoint.slicing import check_tp
from trtllm_dflash.engine.config import EngineConfig, Precision
from trtllm_dflash.engine.directory import CONFIG_FILE, digest, read_config, weights_file, written_aside
from trtllm_dflash.engine.weights import read_rank_weights
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.tokenizer import TOKENIZER_FILES

Progress = Callable[[str, int, int], None]  # what, how many done, of how many


class BuildSettings(BaseModel):
    """What `build` is asked for. Each field is a flag, and a key of `--set` and of a build configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    target: str  # a folder, or a Hugging Face name
    drafter: str | None = None  # likewise; None builds plain decoding alone
    backend: Literal["torch"] = "torch"
    precision: Precision | Literal["auto"] = "auto"
    tp: PositiveInt = 1
    max_batch: PositiveInt = 8
    max_seq_len: PositiveInt | None = None  # default: 4096, or less where the model takes less
    chunk: PositiveInt = 512
    block_size: PositiveInt | None = None  # default: the drafter's
    chat_arguments: dict[str, Any] = {}


def open_checkpoints(settings: BuildSettings) -> Pair:
    """Finds (or downloads) the two checkpoints and checks that they belong together."""
    drafter = resolve(settings.drafter) if settings.drafter is not None else None
    return open_pair(resolve(settings.target), drafter)


def plan_engine(pair: Pair, settings: BuildSettings) -> EngineConfig:
    """The engine that these settings make of a pair; digests are not in it yet.

    Raises:
        SettingsError: a setting contradicts the checkpoints.
    """
    target = pair.target_config
    drafter = pair.drafter.config if pair.drafter is not None else None
    check_tp(settings.tp, target, drafter)
    max_seq_len = settings.max_seq_len or min(4096, target.max_positions)
    if max_seq_len > target.max_positions:
        raise SettingsError(f"--max-seq-len {max_seq_len}: the target takes at most {target.max_positions} positions")
    block_size = settings.block_size or (drafter.block_size if drafter else 1)
    if drafter is None and block_size > 1:
        raise SettingsError(f"--block-size {block_size}: without a drafter nothing is drafted; give --drafter")
    if drafter is not None and not 2 <= block_size <= drafter.block_size:
        raise SettingsError(
            f"--block-size {block_size}: the drafter was trained for blocks of 2 to {drafter.block_size}"
        )
    precision = settings.precision
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "fp32"
    return EngineConfig(
        name=settings.name,
        precision=precision,
        tp=settings.tp,
        max_batch=settings.max_batch,
        max_seq_len=max_seq_len,
        chunk=min(settings.chunk, max_seq_len),
        block_size=block_size,
        target=target,
        drafter=drafter,
        stop_token_ids=_stop_token_ids(pair),
        chat_arguments=settings.chat_arguments,
        versions=_versions(),
    )


def build(settings: BuildSettings, output: Path, force: bool = False, progress: Progress = lambda *_: None) -> bool:
    """Writes the engine directory `output`; returns False where the same engine stands there already.

    Raises:
        DFlashError: the checkpoints, the settings or the output cannot be used; nothing is left half-written.
    """
    pair = open_checkpoints(settings)
    config = plan_engine(pair, settings)
    config = config.model_copy(update={"sources": _source_digests(pair)})
    if output.exists() and not force:
        if _is_same_engine(output, config):
            return False
        raise EngineError(f"{output}: exists and is not this engine; use another --output, or --force to replace it")
    with written_aside(output) as folder:
        for name in TOKENIZER_FILES:
            if (pair.target_folder.path / name).is_file():
                shutil.copyfile(pair.target_folder.path / name, folder / name)
        for rank in range(config.tp):
            _write_rank(pair, config, rank, folder / weights_file(rank), progress)
        files = {file.name: digest(file) for file in sorted(folder.iterdir())}
        config = config.model_copy(update={"files": files})
        (folder / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n")
    return True


def _write_rank(pair: Pair, config: EngineConfig, rank: int, file: Path, progress: Progress) -> None:
    what = f"rank {rank}" if config.tp > 1 else "weights"
    names: list[str] = []

    def count(name: str) -> None:
        names.append(name)
        progress(what, len(names), 0)

    tensors = read_rank_weights(pair, config.tp, rank, config.dtype, count)
    progress(what, len(names), len(names))
    save_file(tensors, file)


def _is_same_engine(output: Path, config: EngineConfig) -> bool:
    try:
        there = read_config(output)
    except EngineError:
        return False
    unhashed = {"files"}
    return there.model_dump(exclude=unhashed) == config.model_dump(exclude=unhashed)


def _source_digests(pair: Pair) -> dict[str, str]:
    folders = {"target": pair.target_folder.path}
    if pair.drafter is not None:
        folders["drafter"] = pair.drafter.folder.path
    return {
        f"{role}/{file.name}": digest(file)
        for role, folder in folders.items()
        for file in sorted(folder.iterdir())
        if file.suffix in (".safetensors", ".json", ".jinja", ".txt")
    }


def _stop_token_ids(pair: Pair) -> tuple[int, ...]:
    """End tokens: generation_config.json's, else config.json's."""
    file = pair.target_folder.path / "generation_config.json"
    ids = pair.target_folder.config.get("eos_token_id")
    if file.is_file():
        ids = json.loads(file.read_text()).get("eos_token_id", ids)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _versions() -> dict[str, str]:
    return {
        "trtllm-dflash": trtllm_dflash.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
    }
