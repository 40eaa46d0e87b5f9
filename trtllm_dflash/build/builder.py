"""`build`: checkpoints in, an engine directory out."""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from trtllm_dflash.build.planning import as_planned, open_checkpoints, plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.tensorrt_ranks import compile_ranks
from trtllm_dflash.build.weights import read_engine_tensors
from trtllm_dflash.checkpoint.folder import source_files
from trtllm_dflash.checkpoint.pair import Pair
from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.directory import (
    CONFIG_FILE,
    DRAFTER_CONFIG_FILE,
    PLUGIN_FILE,
    TARGET_CONFIG_FILE,
    check_apart,
    check_file,
    check_replaced,
    digest,
    read_config,
    stands,
    weights_file,
    written_aside,
)
from trtllm_dflash.errors import EngineError
from trtllm_dflash.text.tiktoken_file import convert, needs_conversion
from trtllm_dflash.text.tokenizer import MAKE_TOKENIZER, TOKENIZER_FILES, has_tokenizer


def build(
    settings: BuildSettings,
    output: Path,
    force: bool = False,
    refresh: bool = False,
    progress: Progress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> bool:
    """Write the engine directory `output`; return False where the same engine stands there already.

    An engine that differs is replaced with `refresh`; with `force` any engine is built anew. `say` is called with each
    choice that was left to us, and where there is no tokenizer.

    Raises:
        DFlashError: the checkpoints, the settings or the output cannot be used; nothing is left half-written.
    """
    pair = open_checkpoints(settings)
    plan = plan_engine(pair, settings)
    for remark in plan.remarks:
        say(remark)
    target = pair.target_folder.path
    if not has_tokenizer(target):
        say(f"no tokenizer.json in {target}: the engine takes token ids alone; for texts {MAKE_TOKENIZER}")
    config = plan.config.model_copy(update={"sources": _source_digests(pair, plan.draft_text)})
    check_replaced(output, has_force=not refresh)
    if stands(output) and not force:
        if _is_same_engine(output, config):
            return False
        if not refresh:
            raise EngineError(
                f"{output}: exists and is not this engine; use another --output, or --force to replace it"
            )
    check_apart(output, _sources(pair))
    pair = as_planned(
        pair, config, plan.draft_text, lambda done, total: progress("counting tokens, kB", done // 1000, total // 1000)
    )
    try:
        _write(pair, config, settings, output, force or refresh, progress)
    except EngineError:
        if not force and output.exists() and _is_same_engine(output, config):  # another process was sooner
            return False
        raise
    return True


def _write(
    pair: Pair, config: EngineConfig, settings: BuildSettings, output: Path, replaces: bool, progress: Progress
) -> None:
    """Writes the engine aside, and gives it its name."""
    with written_aside(output, replaces=replaces) as folder:
        _copy_files(pair, settings, folder)
        if config.backend == "tensorrt":
            plans = compile_ranks(pair, config, folder, output.parent, settings.workers, progress)
            config = config.model_copy(update={"plans": plans})
        else:
            for rank in range(config.tp):
                _write_rank(pair, config, rank, folder / weights_file(rank), progress)
        files = {file.name: digest(file) for file in sorted(folder.iterdir()) if file.suffix != ".log"}
        config = config.model_copy(update={"files": files})
        (folder / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _copy_files(pair: Pair, settings: BuildSettings, folder: Path) -> None:
    """Copies files of the checkpoints that an engine keeps as they are, and the plugin that its plans run."""
    for name in TOKENIZER_FILES:
        if (pair.target_folder.path / name).is_file():
            shutil.copyfile(pair.target_folder.path / name, folder / name)
    if needs_conversion(pair.target_folder.path):
        convert(pair.target_folder.path, folder)
    shutil.copyfile(pair.target_folder.path / CONFIG_FILE, folder / TARGET_CONFIG_FILE)
    if pair.drafter is not None:
        shutil.copyfile(pair.drafter.folder.path / CONFIG_FILE, folder / DRAFTER_CONFIG_FILE)
    if settings.plugin is not None:
        shutil.copyfile(settings.plugin, folder / PLUGIN_FILE)


def _write_rank(pair: Pair, config: EngineConfig, rank: int, file: Path, progress: Progress) -> None:
    what = f"rank {rank}" if config.tp > 1 else "weights"
    tensors = read_engine_tensors(pair, config, rank, lambda done, total: progress(what, done, total))
    save_file(tensors, file)
    file.chmod(file.parent.stat().st_mode & 0o666)  # save_file leaves it to its owner alone


def _is_same_engine(output: Path, config: EngineConfig) -> bool:
    outcome = {"files", "plans"}
    try:
        there = read_config(output)
        if there.model_dump(exclude=outcome) != config.model_dump(exclude=outcome):
            return False
        for name in there.files:
            check_file(output, there, name)
    except EngineError:
        return False
    return True


def _sources(pair: Pair) -> dict[str, Path]:
    folders = {"target": pair.target_folder.path}
    return folders if pair.drafter is None else {**folders, "drafter": pair.drafter.folder.path}


def _source_digests(pair: Pair, draft_text: Path | None) -> dict[str, str]:
    digests = {
        f"{role}/{file.name}": digest(file) for role, folder in _sources(pair).items() for file in source_files(folder)
    }
    return digests if draft_text is None else {**digests, "draft_text": digest(draft_text)}
