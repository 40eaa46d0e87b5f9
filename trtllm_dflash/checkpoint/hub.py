"""Finding a checkpoint: a local folder, a folder inside this package, or a Hugging Face repository."""

import json
import os
from contextlib import suppress
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from trtllm_dflash.checkpoint.folder import INDEX_FILE, SINGLE_FILE, SOURCE_SUFFIXES, TEXT_SUFFIXES
from trtllm_dflash.errors import CheckpointError, one_line

#: Prefix of a folder inside the installed package: `package:pairs/tiny/target`.
PACKAGE = "package:"

_TEXT_FILES = [f"*{suffix}" for suffix in TEXT_SUFFIXES]
# mask_embedding.pt is never loaded: a drafter that has one must be seen, to be refused.
_FILES = [*(f"*{suffix}" for suffix in SOURCE_SUFFIXES), "mask_embedding.pt"]


def resolve(name_or_path: str, *, with_tokenizer: bool = False) -> Path:
    """Finds the local folder of a checkpoint; a repository's comes from the Hugging Face cache, else by download.

    The cache may hold only a part of a repository (its tokenizer, or an interrupted download): the rest is downloaded.

    Args:
        with_tokenizer: what lacks a tokenizer is a part, too, unless nothing can be downloaded.

    Raises:
        CheckpointError: there is no such folder or repository, it is gated, or the network is out of reach.
    """
    if name_or_path.startswith(PACKAGE):
        return _package_folder(name_or_path)
    path = Path(name_or_path).expanduser()
    try:
        if path.is_dir():
            return path
        if path.exists():
            raise CheckpointError(f"{name_or_path} is a file; pass the checkpoint's folder")
    except OSError as error:  # a folder above it is closed to us, or the name is too long
        raise CheckpointError(f"{name_or_path} cannot be read ({error.strerror})") from None
    if looks_like_a_path(name_or_path):
        raise CheckpointError(f"{name_or_path} does not exist; pass a checkpoint folder or a Hugging Face repository")
    try:
        cached = _snapshot(name_or_path, local_files_only=True)
    except errors.HFValidationError:
        raise CheckpointError(f"{name_or_path!r} is neither a folder nor a Hugging Face repository name") from None
    except errors.LocalEntryNotFoundError:
        return _download(name_or_path)
    if not _is_complete(cached):
        return _download(name_or_path)
    if with_tokenizer:
        from trtllm_dflash.text.tokenizer import has_tokenizer  # whoever wants one has it imported

        if not has_tokenizer(cached):
            with suppress(Exception):  # out of reach, perhaps: it does without
                _snapshot(name_or_path, local_files_only=False, revision=cached.name, patterns=_TEXT_FILES)
    return cached


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot has its configuration and all its weights; a damaged index is for the reader to explain."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / INDEX_FILE
    if not index.is_file():
        return (folder / SINGLE_FILE).is_file()
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return True
    return all((folder / str(shard)).is_file() for shard in shards)


def _download(repository: str) -> Path:
    page = f"https://huggingface.co/{repository}"
    try:
        return _snapshot(repository, local_files_only=False)
    except errors.GatedRepoError:
        message = f"{repository} is gated: accept its terms at {page}, then set HF_TOKEN to your access token"
    except errors.RepositoryNotFoundError:
        message = (
            f"{repository} is neither a folder nor a repository that can be seen at {page}; "
            "check the name, or set HF_TOKEN if it is private"
        )
    except errors.LocalEntryNotFoundError:
        message = (
            f"{repository} is no folder here and not in the Hugging Face cache, and huggingface.co is out of reach; "
            f"run `hf download {repository}` where there is a network, or pass a local folder"
        )
    except Exception as error:  # whatever the client's HTTP library raises
        reason = one_line(error) or type(error).__name__
        message = f"{repository} cannot be downloaded ({reason}); run again to resume, or pass a local folder"
    raise CheckpointError(message)


def _snapshot(
    repository: str, local_files_only: bool, revision: str | None = None, patterns: list[str] = _FILES
) -> Path:
    # Some repositories hold the weights in other formats too, in folders: gpt-oss's `original` and `metal`.
    found = huggingface_hub.snapshot_download(
        repository,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns=["*/*"],
        local_files_only=local_files_only,
    )
    return Path(found)


def _package_folder(name: str) -> Path:
    folder = Path(__file__).parents[1] / name[len(PACKAGE) :]
    if not folder.is_dir():
        raise CheckpointError(f"{name} is not in this installation of trtllm-dflash; install it again")
    return folder


def looks_like_a_path(name: str) -> bool:
    """Whether a checkpoint's name cannot be a repository's at Hugging Face."""
    return name.startswith((".", "~", "/")) or name.endswith("/") or name.count("/") > 1 or os.path.isabs(name)
