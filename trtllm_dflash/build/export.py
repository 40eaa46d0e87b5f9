"""`export`: an engine's pair as the Hugging Face folders that it could have been built from.

Fused tensors are taken apart and ranks' slices put together; the configurations are the checkpoints' own, which the
engine keeps. The drafter is in z-lab's format, which TensorRT-LLM, vLLM and SGLang load (vllm/model_executor/models/
qwen3_dflash.py, sglang/srt/models/dflash.py); with a vocabulary of its own it is in speculators', which vLLM loads.
What is written is read again as `build` reads it, and compared with the engine tensor by tensor.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trtllm_dflash.checkpoint.drafter_config import read_drafter_config
from trtllm_dflash.checkpoint.folder import INDEX_FILE, SINGLE_FILE, read_json, read_settings
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.checkpoint.speculators import speculators_config
from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.directory import (
    CONFIG_FILE,
    DRAFTER_CONFIG_FILE,
    TARGET_CONFIG_FILE,
    check_apart,
    check_file,
    check_outside,
    check_shared_files,
    read_config,
    stands,
    weights_file,
    written_aside,
)
from trtllm_dflash.errors import EngineError
from trtllm_dflash.models import build_target, pair_weights
from trtllm_dflash.models.drafter import DRAFT_TO_TARGET, Drafter, DrafterConfig
from trtllm_dflash.models.weights import Part, Split, Weight, WeightPrecision
from trtllm_dflash.signals import holding_signals
from trtllm_dflash.text.tokenizer import TOKENIZER_FILES

#: The folders of an export.
TARGET, DRAFTER = "target", "drafter"

_SHARD = 5_000_000_000  # bytes of a file; a larger checkpoint has several, and an index

#: In a drafter's configuration, code that is not in the folder: nobody needs it, and nobody should run it.
_CODE = "auto_map"


def export(engine: Path, output: Path, force: bool = False, progress: Progress = lambda *_: None) -> bool:
    """Writes the target, and the drafter where there is one, which it returns.

    Raises:
        EngineError: it is no engine of the torch backend, was built before configurations were kept, or holds weights
            that these folders cannot; or `output` exists, lies in it or around it, or cannot be written.
    """
    config = read_config(engine)
    _check(engine, config)
    check_apart(output, {"engine": engine})
    check_outside(output, engine)
    if stands(output) and not (force and _is_export(output)):
        what = (
            "exists; --force replaces it" if _is_export(output) else "exists and is not an export; remove it yourself"
        )
        raise EngineError(f"{output}: {what}, or use another --output")
    with ExitStack() as stack:
        ranks = [stack.enter_context(safe_open(_rank(engine, config, i), framework="pt")) for i in range(config.tp)]
        with written_aside(output, "export", replaces=force) as folder:
            _write_target(engine, config, ranks, folder / TARGET, progress)
            if config.drafter is not None:
                _write_drafter(engine, config, ranks, folder / DRAFTER, progress)
            _compare(engine, config, ranks, folder, progress)
    return config.drafter is not None


def _check(engine: Path, config: EngineConfig) -> None:
    if config.backend != "torch":
        raise EngineError(f"{engine}: its weights are inside TensorRT plans; export an engine of --backend torch")
    if TARGET_CONFIG_FILE not in config.files:
        raise EngineError(f"{engine}: was built before engines kept {TARGET_CONFIG_FILE}; build it again: --force")
    if config.kv is not None:
        raise EngineError(f"{engine}: its caches are FP8, which is not written back; build it with --kv engine")
    if config.drafter is not None and (config.drafter.from_anchor or not _is_whole(config.drafter)):
        raise EngineError(f"{engine}: a DSpark drafter is not written back; use its checkpoint itself")
    check_shared_files(engine, config)
    if config.drafter is not None and config.drafter.windows != _own_windows(engine, config):
        raise EngineError(f"{engine}: its drafter has windows of --draft-window, not written back; build it without")
    for weight in pair_weights(config.target, config.drafter):
        if weight.precision is not WeightPrecision.ENGINE:
            raise EngineError(
                f"{engine}: {weight.name} is stored as {weight.precision.name}, which is not written back; "
                "use the checkpoint itself, or export an engine that was built without"
            )


def _own_windows(engine: Path, config: EngineConfig) -> tuple[int | None, ...] | None:
    """Reads the windows that the drafter's checkpoint has."""
    return read_drafter_config(read_settings(engine / DRAFTER_CONFIG_FILE), config.target.layers).windows


def _is_whole(drafter: DrafterConfig) -> bool:
    """Whether an engine has all of its drafter's tensors: of DSpark's, the confidence head stays behind."""
    return drafter.selector is None or drafter.selector.kind == "dflash2"


def _rank(engine: Path, config: EngineConfig, rank: int) -> Path:
    return check_file(engine, config, weights_file(rank))


def _is_export(output: Path) -> bool:
    folders = {entry.name for entry in output.iterdir()} if output.is_dir() else set()
    return folders == {TARGET} or folders == {TARGET, DRAFTER}


def _target_weights(config: EngineConfig) -> list[Weight]:
    return build_target(config.target).weights()


def _drafter_weights(config: EngineConfig) -> list[Weight]:
    return Drafter(config.drafter).weights() if config.drafter is not None else []


# -- folders ---------------------------------------------------------------------------------------------------------


def _write_target(engine: Path, config: EngineConfig, ranks: list[Any], folder: Path, progress: Progress) -> None:
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (engine / name).is_file():
            shutil.copyfile(engine / name, folder / name)
    _write_json(folder / CONFIG_FILE, _in_type(read_json(engine / TARGET_CONFIG_FILE), config))
    weights = _target_weights(config)
    _save(_whole(weights, ranks, "writing target", progress), folder)


def _write_drafter(engine: Path, config: EngineConfig, ranks: list[Any], folder: Path, progress: Progress) -> None:
    drafter = config.drafter
    assert drafter is not None
    folder.mkdir()
    raw = _in_type(read_json(engine / DRAFTER_CONFIG_FILE), config)
    raw.pop(_CODE, None)
    own_vocabulary = drafter.draft_vocab_size is not None
    if own_vocabulary and "speculators_model_type" not in raw:
        architectures = read_json(engine / TARGET_CONFIG_FILE).get("architectures", [])
        raw = speculators_config(raw, drafter, f"../{TARGET}", architectures)
    _write_json(folder / CONFIG_FILE, raw)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from _whole(_drafter_weights(config), ranks, "writing drafter", progress)
        if own_vocabulary:
            held = _read(ranks[0], DRAFT_TO_TARGET)
            assert held is not None
            ids = held.long()
            drafted = torch.zeros(drafter.vocab_size, dtype=torch.bool)
            drafted[ids] = True
            yield "d2t", ids - torch.arange(len(ids))
            yield "t2d", drafted

    _save(tensors(), folder)


def _in_type(raw: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """Sets the engine's type in a checkpoint's configuration."""
    kept = {key: value for key, value in raw.items() if key not in ("torch_dtype", "dtype", "quantization_config")}
    return {**kept, "torch_dtype" if "torch_dtype" in raw else "dtype": str(config.dtype).removeprefix("torch.")}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _save(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Saves tensors one by one, in files of at most 5 GB (or of one tensor)."""
    files: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total = size = 0

    def close() -> None:
        nonlocal shard, size
        file = folder / f"{len(files)}.partial"
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(folder.stat().st_mode & 0o666)  # save_file leaves it to its owner alone
        files.append(list(shard))
        shard, size = {}, 0

    for key, tensor in tensors:
        if shard and size + tensor.nbytes > _SHARD:
            close()
        shard[key] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    close()
    if len(files) == 1:
        (folder / "0.partial").rename(folder / SINGLE_FILE)
        return
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for i, name in enumerate(names):
        (folder / f"{i}.partial").rename(folder / name)
    index = {key: name for keys, name in zip(files, names, strict=True) for key in keys}
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": index})


# -- tensors ---------------------------------------------------------------------------------------------------------


def _whole(
    weights: list[Weight], ranks: list[Any], what: str, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every checkpoint tensor of these weights, once."""
    done: set[str] = set()
    for number, weight in enumerate(weights, start=1):
        if not {part.key for part in weight.parts} <= done:
            held = [_read(tensors, weight.name) for tensors in ranks]
            for index, part in enumerate(weight.parts):
                if part.key not in done:
                    yield part.key, _unsliced(weight, index, held)
                    done.add(part.key)
        progress(what, number, len(weights))


def _read(tensors: Any, name: str) -> torch.Tensor | None:
    if name not in tensors.keys():  # noqa: SIM118 - not a dict
        return None
    with holding_signals():
        held: torch.Tensor = tensors.get_tensor(name)
    return held


def _unsliced(weight: Weight, index: int, held: list[torch.Tensor | None]) -> torch.Tensor:
    """Joins the ranks' slices of one part of a fused tensor."""
    part, tp = weight.parts[index], len(held)
    assert held[0] is not None
    whole = torch.empty(part.shape, dtype=held[0].dtype)
    for rank, tensor in enumerate(held):
        if tensor is None or (rank and part.split in (Split.WHOLE, Split.FIRST_RANK)):
            continue
        rows = tensor.flatten(0, 1) if tensor.ndim > len(part.shape) else tensor  # of a stack of matrices
        above = sum(other.held(tp, rank)[0] for other in weight.parts[:index])
        place, mine = _place(whole, part, tp, rank), rows[above : above + part.held(tp, rank)[0]]
        if place.shape != mine.shape:
            raise EngineError(f"{weight.name} cannot be taken apart, so this family cannot be exported")
        place[...] = mine
    return whole


def _place(whole: torch.Tensor, part: Part, tp: int, rank: int) -> torch.Tensor:
    if part.split not in (Split.ROWS, Split.COLUMNS):
        return whole
    first, last = part.bounds(tp, rank)
    return whole[first:last] if part.split is Split.ROWS else whole[:, first:last]


# -- proof -----------------------------------------------------------------------------------------------------------


def _compare(engine: Path, config: EngineConfig, ranks: list[Any], folder: Path, progress: Progress) -> None:
    """Checks that `build` would read the engine's own tensors from the export, bit by bit.

    Raises:
        EngineError: it is not; names the tensor.
    """
    pair = open_pair(folder / TARGET, folder / DRAFTER if config.drafter is not None else None)
    if (pair.target_config, pair.drafter_config) != (config.target, config.drafter):
        raise EngineError(f"{engine}: cannot be exported: its configuration is not that of the checkpoints it keeps")
    for rank, tensors in enumerate(ranks):
        for name, tensor in _read_again(pair, config, rank, progress):
            held = _read(tensors, name)
            if held is None or not torch.equal(held, tensor):
                raise EngineError(f"{engine}: cannot be exported: {name} of rank {rank} would not be read as it is")


def _read_again(pair: Pair, config: EngineConfig, rank: int, progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
    checkpoint = pair.drafter
    reader = pair.target_reader(config.tp, rank)
    read = [(reader, weight) for weight in _target_weights(config)]
    if checkpoint is not None:
        reader = checkpoint.reader(config.tp, rank)
        read += [(reader, weight) for weight in _drafter_weights(config)]
    what = "checking" if config.tp == 1 else f"checking rank {rank}"
    for number, (reader, weight) in enumerate(read, start=1):
        tensor = reader.read(weight, config.dtype)
        if tensor is not None:
            yield weight.name, tensor
        progress(what, number, len(read))
    if checkpoint is not None and checkpoint.draft_to_target is not None:
        yield DRAFT_TO_TARGET, checkpoint.draft_to_target
