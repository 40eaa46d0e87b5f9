"""A Hugging Face checkpoint folder: config.json, and tensors in one or several safetensors files."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from trtllm_dflash.errors import CheckpointError, one_line
from trtllm_dflash.models.weights import Content, Part
from trtllm_dflash.signals import holding_signals

if TYPE_CHECKING:  # safetensors imports it where tensors are read
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Of the files that say what a checkpoint is, and of its tokenizer.
TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
#: Of the files from which an engine, or a trained drafter, is made.
SOURCE_SUFFIXES = (".safetensors", *TEXT_SUFFIXES)
FLOATING_DTYPES = ("F32", "BF16", "F16")
#: What elements of each kind are stored as.
_DTYPES = {(Content.NUMBERS,): FLOATING_DTYPES, (Content.E2M1_PAIRS, Content.E8M0): ("U8",)}

#: Buffers that older exports saved along with the weights; computed here.
IGNORED = ("rotary_emb.inv_freq", "*.rotary_emb.inv_freq")

_LISTED = 4  # how many tensors of each kind of trouble an error names


def source_files(folder: Path) -> list[Path]:
    """Lists a checkpoint's files, those of its tokenizer among them, in order of their names."""
    return sorted(file for file in folder.iterdir() if file.suffix in SOURCE_SUFFIXES and file.is_file())


@dataclass(frozen=True)
class TensorInfo:
    """The header of one tensor in a safetensors file."""

    shape: tuple[int, ...]
    dtype: str  # in safetensors' letters: F32, BF16, F8_E4M3, ...
    file: Path


@dataclass(frozen=True)
class CheckpointFolder:
    """An opened folder. Only headers are in memory; `read` fetches a tensor, or a slice of one, from disk."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, path: Path) -> "CheckpointFolder":
        """Reads config.json and every safetensors header.

        Raises:
            CheckpointError: the folder, a file or a shard is missing, damaged, or not safetensors.
        """
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a folder; pass a checkpoint folder that has a config.json")
        if not (path / "config.json").is_file():
            if (path / "adapter_config.json").is_file():
                reason = "LoRA is not supported; merge it into its model, and pass that"
                raise CheckpointError(f"{path} is an adapter (adapter_config.json): {reason}")
            raise CheckpointError(f"{path}/config.json is missing; pass the folder that holds the checkpoint")
        return cls(path, read_settings(path / "config.json"), _read_headers(path))

    def setting(self, key: str) -> Any:
        """Reads a setting of config.json, which a model of more than text may nest in its `text_config`; None: none."""
        nested = self.config.get("text_config")
        return self.config.get(key, nested.get(key) if isinstance(nested, dict) else None)

    def check(
        self,
        parts: Iterable[Part],
        ignored: Iterable[str] = (),
        keys: Mapping[str, str] | None = None,
        quantized: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Compares the tensors with the parts that a model is made of: names, shapes, and floating-point types.

        `ignored`: patterns of tensor names that may be there besides. `keys`: see `slicing.RankReader`. `quantized`:
        shapes of tensors that are stored in few bits, and of their scales, whose types are known to be right.

        Raises:
            CheckpointError: one line that lists what is missing, unexpected, misshapen, or of another type.
        """
        names = keys or {}
        stored = quantized or {}
        wanted = {names.get(part.key, part.key): part for part in parts}
        expected = {name: part.shape for name, part in wanted.items()} | dict(stored)
        patterns = (*IGNORED, *ignored)
        present = {name: self.tensors[name] for name in expected if name in self.tensors}
        troubles = {
            "missing": [name for name in expected if name not in self.tensors],
            "unexpected": [
                name
                for name in self.tensors
                if name not in expected and not any(fnmatchcase(name, pattern) for pattern in patterns)
            ],
            "misshapen": [
                f"{name} {list(info.shape)} instead of {list(expected[name])}"
                for name, info in present.items()
                if info.shape != expected[name]
            ],
        }
        for content, dtypes in _DTYPES.items():
            troubles[f"dtype other than {', '.join(dtypes)}"] = [
                f"{name} {info.dtype}"
                for name, info in present.items()
                if name not in stored and wanted[name].content in content and info.dtype not in dtypes
            ]
        listed = [f"{trouble}: {_some(names)}" for trouble, names in troubles.items() if names]
        if listed:
            raise CheckpointError(f"{self.path}: tensors do not fit config.json; {'; '.join(listed)}")

    def read(
        self, key: str, dimension: int | None = None, first: int = 0, last: int | None = None, matrix: int | None = None
    ) -> "torch.Tensor":
        """Reads a tensor, or its indices first..last-1 along a dimension, 0 to 2, and no other bytes.

        Of a stack of matrices, the one with a number; dimensions are then its own.

        The result may share the file's memory: copy before writing to it.

        Raises:
            CheckpointError: no such tensor, or its file cannot be read any more.
        """
        if key not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {key} is missing")
        file = self.tensors[key].file
        try:
            now = file.stat()
            opened = _opened(file, now.st_size, now.st_mtime_ns)
            places: tuple[slice, ...] = () if matrix is None else (slice(matrix, matrix + 1),)
            if dimension is not None:
                places += (slice(None),) * dimension + (slice(first, last),)
            with holding_signals():
                part: torch.Tensor = opened.get_slice(key)[places] if places else opened.get_tensor(key)
            return part if matrix is None else part[0]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot read tensor {key} ({one_line(error)})") from None


@lru_cache(maxsize=2)
def _opened(file: Path, size: int, modified: int) -> Any:
    """Opens a file once while it is unchanged. The header of a shard of experts lists thousands of tensors."""
    return safe_open(file, framework="pt")


def read_settings(file: Path) -> dict[str, Any]:
    """Reads what a configuration file says, less its nulls: Hugging Face writes them for "the default".

    Raises:
        CheckpointError: as `read_json`.
    """
    return {key: value for key, value in read_json(file).items() if value is not None}


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        CheckpointError: it cannot be read, or is not that.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # the latter of what is nested thousands of times
        raise CheckpointError(f"{file} is not valid JSON ({one_line(error)}); download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object; download it again")
    return content


def _read_headers(path: Path) -> dict[str, TensorInfo]:
    if (path / SINGLE_FILE).is_file():
        return _read_header(path / SINGLE_FILE)
    if (path / INDEX_FILE).is_file():
        return _read_shards(path, read_json(path / INDEX_FILE).get("weight_map"))
    pickles = sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for f in path.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{path} holds pickle weights only ({pickles[0]}); save them again as safetensors "
            "(transformers: save_pretrained)"
        )
    raise CheckpointError(f"{path} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _read_shards(path: Path, weight_map: Any) -> dict[str, TensorInfo]:
    index = path / INDEX_FILE
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files; download it again")
    headers = {}
    for name in sorted(set(weight_map.values())):
        # Lexically: a shard in the Hugging Face cache is a link out of the folder, and rightly so.
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or PureWindowsPath(name).drive or "\\" in name:
            raise CheckpointError(f"{index} names a file outside its folder: {name}")
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing, but {INDEX_FILE} names it; download the checkpoint again")
        headers[name] = _read_header(path / name)
    for key, name in weight_map.items():
        if key not in headers[name]:
            raise CheckpointError(f"{path / name} does not hold {key}, but {INDEX_FILE} says so; download it again")
    return {key: headers[name][key] for key, name in weight_map.items()}


def _read_header(file: Path) -> dict[str, TensorInfo]:
    tensors = {}
    try:
        file.open("rb").close()  # safetensors says of every file that it cannot open that there is none
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from None
    try:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                info = opened.get_slice(key)
                tensors[key] = TensorInfo(tuple(info.get_shape()), str(info.get_dtype()), file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is truncated or damaged ({one_line(error)}); download it again") from None
    return tensors


def _some(names: list[str]) -> str:
    more = f", ... and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
