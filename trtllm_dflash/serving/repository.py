"""`deploy`: the model repository that Triton loads, made of the templates in `triton_repo/`."""

import os
import re
import shlex
from pathlib import Path
from string import Template
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from trtllm_dflash.engine.directory import (
    check_outside,
    check_present,
    check_shared_files,
    not_replaced,
    read_config,
    stands,
    written_aside,
)
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.runtime.draft_length import check_draft_length
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.serving.triton import is_named
from trtllm_dflash.session.kernels import Kernels
from trtllm_dflash.session.trees import DraftTreeChoice, check_trees

#: Begins every configuration that `deploy` writes; it is how a repository is known to be ours.
MARK = "# Written by `trtllm-dflash deploy`"

#: Requests beyond those that the engine takes: the unary model hands them on too, so that they are refused at once.
_SPARE_REQUESTS = 64


def is_found(place: Path) -> bool:
    """Whether Triton, which names its Python models' places to a shell without quotes, finds them there."""
    return shlex.quote(str(place)) == str(place)


class DeploySettings(ServiceSettings):
    """Settings of a model repository: its models' defaults, and how they share the engine.

    Attributes:
        decoupled: `ensemble` and `tensorrt_llm` stream. Triton then refuses them to unary gRPC calls, for which there
            is `tensorrt_llm_bls`. False: all answer once.
        device: cpu, cuda or auto.
        kernels: auto, exact, or torch for no CUDA kernels of ours; see `LLM.load`.
        draft_tree: nodes of the trees to draft, off, or auto; see `LLM.load`.
        exclude_input_in_output: a reply that comes as a whole does not begin with its prompt; a request may say
            otherwise. False as in TensorRT-LLM, whose clients take the prompt off.
        deadline_seconds: most that a request may take, from its arrival to its last token; a request may ask for less.
    """

    model_config = ConfigDict(strict=True)

    decoupled: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Kernels = "auto"
    draft_tree: DraftTreeChoice = "auto"
    exclude_input_in_output: bool = False
    deadline_seconds: Annotated[float, Field(gt=0, le=2**31 // 1000)] = 600.0


def deploy(
    engine: Path,
    output: Path,
    settings: DeploySettings | None = None,
    force: bool = False,
    knob: str = "--output",
) -> None:
    """Writes a model repository for an engine. Where the same one stands already, nothing happens.

    Args:
        force: a repository of ours that differs is replaced.
        knob: that says where `output` is, for errors.

    Raises:
        EngineError: `engine` is no engine directory, or `output` is something else, lies in it or cannot be written.
        SettingsError: the engine cannot draft so many tokens, or no such tree.
    """
    files = render(engine, settings or DeploySettings())
    check_outside(output, engine, knob)
    if stands(output):
        if not is_repository(output):
            raise not_replaced(output, "not a model repository of ours")
        if all(_holds(output / name, text) for name, text in files.items()):
            return
        if not force:
            raise EngineError(f"{output}: exists and differs; use another --output, or --force to replace it")
    with written_aside(output, "model repository", replaces=force, knob=knob) as folder:
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        for model in {name.split("/")[0] for name in files}:
            (folder / model / "1").mkdir(exist_ok=True)  # Triton wants a version of every model, an ensemble too


def render(engine: Path, settings: DeploySettings) -> dict[str, str]:
    """Renders the repository's files, as text by path, for an engine.

    Raises:
        EngineError: it is no engine directory, or one without some of its files, or whose tokenizer, say, has changed.
        SettingsError: it cannot draft so many tokens, or no such tree; or Triton's models cannot open a folder.
    """
    config = read_config(engine)
    check_present(engine, config)
    check_shared_files(engine, config)  # weights are read where they are loaded
    for flag, place in (("--engine", str(engine)), ("--harvest", settings.harvest)):
        if place and not is_named(Path(place)):
            raise SettingsError(f"{flag} {place}: Triton's Python models open ASCII paths alone; link to it from one")
    if settings.harvest and os.path.lexists(settings.harvest) and not os.path.isdir(settings.harvest):
        raise SettingsError(f"--harvest {settings.harvest}: is no folder")
    check_draft_length(settings.draft_length, config.block_size)
    # Where `auto` finds a GPU, loading refuses trees.
    check_trees(config, settings.draft_tree, on_gpu=settings.device == "cuda")
    values = {
        "engine": _escaped(os.path.abspath(engine)),
        "max_batch_size": str(config.max_batch),
        "requests": str(config.max_batch + settings.max_queue + _SPARE_REQUESTS),
        **{name: str(value).lower() for name, value in settings.model_dump().items()},
        "harvest": _escaped(os.path.abspath(settings.harvest)) if settings.harvest else "",
    }
    folder = _templates()
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".pbtxt":
            files[file.relative_to(folder).as_posix()] = Template(file.read_text(encoding="utf-8")).substitute(values)
        elif file.suffix == ".py":
            files[file.relative_to(folder).as_posix()] = file.read_text(encoding="utf-8")
    return files


def _templates() -> Path:
    """Finds the templates: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).parent.parent
    for parent in (package, package.parent):
        if (parent / "triton_repo").is_dir():
            return parent / "triton_repo"
    raise SettingsError(f"no triton_repo folder in {package} or beside it; install trtllm-dflash again")


def _escaped(path: str) -> str:
    """Escapes a path for a string in Protobuf's text format."""
    plain = set(range(0x20, 0x7F)) - set(b'"\\')
    return "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in os.fsencode(path))


def is_repository(path: Path) -> bool:
    """Whether `deploy` wrote a directory, for whichever engine and with whichever settings."""
    file = path / "tensorrt_llm" / "config.pbtxt"
    return file.is_file() and file.read_bytes().startswith(MARK.encode())


def streaming_and_deadline(repository: Path) -> tuple[bool, float]:
    """Reads whether a repository's models stream, and how long a request may take; the defaults of one not ours.

    Raises:
        SettingsError: somebody has written something else there.
    """
    file = repository / "tensorrt_llm" / "config.pbtxt"
    text = file.read_text("utf-8", "replace") if is_repository(repository) else ""
    written = dict(re.findall(r'key: "(decoupled|deadline_seconds)" value { string_value: "(.*?)"', text))
    try:
        values = {name: value == "true" if name == "decoupled" else float(value) for name, value in written.items()}
        read = DeploySettings.model_validate(values)
    except ValueError:
        reason = f"deadline_seconds is {written['deadline_seconds']}; deploy again"
        raise SettingsError(f"--repository {repository}: its {reason}") from None
    return read.decoupled, read.deadline_seconds


def _holds(file: Path, text: str) -> bool:
    return file.is_file() and file.read_bytes() == text.encode()
