"""`build`: checkpoints in, an engine directory out."""

import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import safetensors
import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from safetensors.torch import save_file

import trtllm_dflash
from trtllm_dflash.build.caches import CachePrecision, check_caches, choose_caches
from trtllm_dflash.build.precision import DrafterPrecision, PrecisionChoice, TargetPrecision, choose_precision
from trtllm_dflash.build.tensorrt_compiler import compile_target
from trtllm_dflash.build.tensorrt_ranks import compile_ranks
from trtllm_dflash.build.weights import cache_scales, read_rank_weights
from trtllm_dflash.catalog import PairFacts, chat_arguments_of
from trtllm_dflash.checkpoint.folder import read_json
from trtllm_dflash.checkpoint.hub import resolve
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.checkpoint.shortlist import take_shortlist
from trtllm_dflash.checkpoint.slicing import check_tp
from trtllm_dflash.cost.gpus import GPUS
from trtllm_dflash.cost.memory import check_fits
from trtllm_dflash.engine.config import Backend, EngineConfig, Progress
from trtllm_dflash.engine.directory import (
    CONFIG_FILE,
    DRAFTER_CONFIG_FILE,
    PLUGIN_FILE,
    TARGET_CONFIG_FILE,
    check_file,
    digest,
    is_engine,
    read_config,
    weights_file,
    written_aside,
)
from trtllm_dflash.errors import CheckpointError, EngineError, SettingsError
from trtllm_dflash.kernels import HEAD_SIZES
from trtllm_dflash.models import build_target
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import HEAD, PREFIX, Drafter, DrafterConfig
from trtllm_dflash.models.weights import WeightPrecision
from trtllm_dflash.ops.fp8 import FP8_BLOCK, FP8_MULTIPLE
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt
from trtllm_dflash.ops.tensorrt_plugin import has_plugin_layers
from trtllm_dflash.text.tokenizer import TOKENIZER_FILES

#: What a shortlist is counted in where no text is given, for checkpoints that lie beside it: the shipped pair's.
_SHIPPED_TEXT = Path(trtllm_dflash.__file__).parent / "pairs" / "tiny" / "prompts.jsonl"


class BuildSettings(BaseModel):
    """What `build` is asked for. Each field but `facts` is a flag, or a key of `--set` and of a build configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1)]
    target: str  # a folder, or a Hugging Face name
    drafter: str | None = None  # likewise; None builds plain decoding alone
    backend: Backend = "torch"
    precision: TargetPrecision | None = None  # default: a quantized checkpoint's, and bf16 (fp32 without a GPU)
    tp: PositiveInt = 1
    ep: bool = False  # ranks hold whole experts instead of a slice of each
    max_batch: PositiveInt = 8
    max_seq_len: PositiveInt | None = None  # default: 4096, or less where the model takes less
    chunk: PositiveInt = 512
    block_size: PositiveInt | None = None  # default: the drafter's
    draft_vocab: Annotated[int, Field(ge=2)] | None = None  # tokens that are drafted; default: all
    draft_text: str | None = None  # a file to count them in; default: the shipped pair's prompts, for it alone
    drafter_precision: DrafterPrecision | None = None  # of its matrices; default: its checkpoint's
    kv: CachePrecision = "auto"  # of caches; auto: as the target's checkpoint says, else the engine's type
    chat_arguments: dict[str, Any] | None = None  # default: the catalog's for this target
    facts: Annotated[PairFacts | None, Field(exclude=True)] = None  # what the catalog says of these checkpoints
    # TensorRT's alone:
    gpu: str | None = None  # a GPU's name, or a compute capability such as sm120; None: the GPU present
    sampling: bool = True  # False leaves sampling out of the plan
    optimization_level: Annotated[int, Field(ge=0, le=5)] = 3
    workspace: PositiveInt | None = None  # MiB of scratch that a kernel may take; None: all there is
    workers: PositiveInt = 1  # ranks compiled at a time
    plugin: str | None = None  # libdflash_plugin.so: attention is that plugin; None: TensorRT's own layers


def open_checkpoints(settings: BuildSettings) -> Pair:
    """Finds (or downloads) the two checkpoints and checks that they belong together."""
    drafter = resolve(settings.drafter) if settings.drafter is not None else None
    return open_pair(resolve(settings.target), drafter)


def plan_engine(pair: Pair, settings: BuildSettings, choice: PrecisionChoice | None = None) -> EngineConfig:
    """The engine that these settings make of a pair; digests are not in it yet.

    Args:
        choice: of the parts' precisions; None: `build_precision`'s.

    Raises:
        SettingsError: a setting contradicts the checkpoints.
    """
    target = divide_experts(pair.target_config, settings)
    drafter = pair.drafter.config if pair.drafter is not None else None
    _check_facts(settings, target, drafter)
    choice = choice or build_precision(pair.target_config, drafter, settings)
    target = target.model_copy(update=choice.target)
    drafter = _lighter(drafter, settings, pair, choice)
    check_tp(settings.tp, target, drafter)
    check_sides(target, drafter, settings.tp)
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
    if settings.chunk > max_seq_len and "chunk" in settings.model_fields_set:
        raise SettingsError(f"--chunk {settings.chunk}: longer than --max-seq-len {max_seq_len}")
    tensorrt = settings.backend == "tensorrt"
    _check_tensorrt_settings(settings)
    chat_arguments = settings.chat_arguments
    if chat_arguments is None:
        chat_arguments = chat_arguments_of(settings.target)
    config = EngineConfig(
        name=settings.name,
        backend=settings.backend,
        precision=choice.engine,
        tp=settings.tp,
        max_batch=settings.max_batch,
        max_seq_len=max_seq_len,
        chunk=min(settings.chunk, max_seq_len),
        block_size=block_size,
        target=target,
        drafter=drafter,
        kv=choose_caches(pair, settings.kv, settings.backend, choice.engine).kv,
        stop_token_ids=_stop_token_ids(pair),
        chat_arguments=chat_arguments,
        sampling=settings.sampling,
        gpu=settings.gpu.lower() if settings.gpu else None,
        optimization_level=settings.optimization_level if tensorrt else None,
        workspace=settings.workspace,
        plugin=_plugin_digest(settings, [target, drafter] if drafter is not None else [target]),
        versions=_versions(settings.backend),
    )
    if config.gpu in GPUS:
        check_fits(config, config.gpu)
    if tensorrt:
        compile_target(load_tensorrt(), config.gpu)
    return config


def build(
    settings: BuildSettings,
    output: Path,
    force: bool = False,
    refresh: bool = False,
    progress: Progress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> bool:
    """Writes the engine directory `output`; returns False where the same engine stands there already.

    An engine that differs is replaced with `refresh`; with `force` any engine is built anew. `say` is told which
    precision was chosen, where that was left to us.

    Raises:
        DFlashError: the checkpoints, the settings or the output cannot be used; nothing is left half-written.
    """
    pair = open_checkpoints(settings)
    config = plan_engine(pair, settings)
    drafter = pair.drafter.config if pair.drafter is not None else None
    caches = choose_caches(pair, settings.kv, settings.backend, config.precision)
    for said in (build_precision(pair.target_config, drafter, settings).said, caches.said):
        if said is not None:
            say(said)
    text = _draft_text(settings, pair)
    config = config.model_copy(update={"sources": _source_digests(pair, text)})
    if output.exists() and not force:
        if _is_same_engine(output, config):
            return False
        if not refresh:
            raise EngineError(
                f"{output}: exists and is not this engine; use another --output, or --force to replace it"
            )
    if output.exists() and not is_engine(output):
        raise EngineError(f"{output}: is not an engine directory, so --force does not replace it; remove it yourself")
    pair = as_planned(
        pair, config, text, lambda done, total: progress("counting tokens, kB", done // 1000, total // 1000)
    )
    with written_aside(output) as folder:
        for name in TOKENIZER_FILES:
            if (pair.target_folder.path / name).is_file():
                shutil.copyfile(pair.target_folder.path / name, folder / name)
        shutil.copyfile(pair.target_folder.path / CONFIG_FILE, folder / TARGET_CONFIG_FILE)
        if pair.drafter is not None:
            shutil.copyfile(pair.drafter.folder.path / CONFIG_FILE, folder / DRAFTER_CONFIG_FILE)
        if settings.plugin is not None:
            shutil.copyfile(settings.plugin, folder / PLUGIN_FILE)
        if config.backend == "tensorrt":
            plans = compile_ranks(pair, config, folder, output.parent, settings.workers, progress)
            config = config.model_copy(update={"plans": plans})
        else:
            for rank in range(config.tp):
                _write_rank(pair, config, rank, folder / weights_file(rank), progress)
        files = {file.name: digest(file) for file in sorted(folder.iterdir())}
        config = config.model_copy(update={"files": files})
        (folder / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n")
    return True


def divide_experts(target: DecoderConfig, settings: BuildSettings) -> DecoderConfig:
    """The target with its experts divided among the ranks as asked."""
    if not settings.ep:
        return target
    if target.moe is None:
        raise SettingsError("--ep: the target has no experts to divide; leave it out")
    if settings.tp == 1:
        raise SettingsError("--ep: there is one rank only; say with --tp among how many the experts are divided")
    return target.model_copy(update={"moe": target.moe.model_copy(update={"expert_parallel": True})})


def build_precision(
    target: DecoderConfig, drafter: DrafterConfig | None, settings: BuildSettings, gpu: str | None = None
) -> PrecisionChoice:
    """What `choose_precision` makes of these settings, for the GPU that they or the caller name."""
    check_caches(settings.kv, settings.backend)
    asked = settings.precision, settings.drafter_precision
    return choose_precision(target, drafter, settings.backend, *asked, gpu or settings.gpu)


def _lighter(
    drafter: DrafterConfig | None, settings: BuildSettings, pair: Pair, choice: PrecisionChoice
) -> DrafterConfig | None:
    """The drafter that these settings make of the checkpoint's."""
    asked = [name for name in ("draft_vocab", "drafter_precision") if getattr(settings, name) is not None]
    if drafter is None:
        if asked:
            knob = asked[0].replace("_", "-")
            raise SettingsError(
                f"--{knob} {getattr(settings, asked[0])}: there is no drafter to make lighter; give --drafter"
            )
        return None
    changes = dict(choice.drafter)
    if settings.draft_vocab is not None:
        _check_draft_vocab(settings.draft_vocab, settings, drafter)
        changes["draft_vocab_size"] = settings.draft_vocab
        if drafter.linear_precision is not None and changes.get("linear_precision", True):
            # The head is the target's, and not in its checkpoint's format.
            kept = changes.get("plain_linears", drafter.plain_linears)
            changes["plain_linears"] = (*kept, HEAD.removesuffix(".weight"))
    _draft_text(settings, pair)
    return drafter.model_copy(update=changes)


def _check_draft_vocab(size: int, settings: BuildSettings, drafter: DrafterConfig) -> None:
    if drafter.draft_vocab_size is not None:
        raise SettingsError(
            f"--draft-vocab {size}: the drafter brings a vocabulary of its own, of {drafter.draft_vocab_size} tokens"
        )
    if size > drafter.vocab_size:
        raise SettingsError(f"--draft-vocab {size}: the vocabulary has {drafter.vocab_size} tokens")
    unit = settings.tp * (FP8_MULTIPLE if settings.drafter_precision == "fp8" else 1)
    if size % unit:
        fitting = max(unit, size // unit * unit)
        why = f"--tp {settings.tp}" + (" and --drafter-precision fp8" if unit > settings.tp else "")
        raise SettingsError(f"--draft-vocab {size}: with {why} it must be a multiple of {unit}, such as {fitting}")


def check_sides(target: DecoderConfig, drafter: DrafterConfig | None, tp: int) -> None:
    """What products in few bits need of a rank's matrices, and blocks of what is joined and divided."""
    weights = build_target(target).weights() + (Drafter(drafter).weights() if drafter is not None else [])
    for weight in weights:
        shape = weight.shape(tp, 0)[-2:]  # of each, of a stack
        kind = weight.precision
        if kind in (WeightPrecision.FP8, WeightPrecision.NVFP4) and any(side % FP8_MULTIPLE for side in shape):
            sides = " by ".join(map(str, shape))
            raise SettingsError(
                f"{'--drafter-' if weight.name.startswith(PREFIX) else '--'}precision {kind.value}: {weight.name} of a "
                f"rank is {sides} with --tp {tp}, and {kind.name} needs multiples of {FP8_MULTIPLE}"
            )
        held = [part.held(tp, 0) for part in weight.parts]
        joined = weight.parts_of_each > 1 or held[0] != weight.parts[0].shape
        if kind is WeightPrecision.FP8_BLOCKS and joined and any(side % FP8_BLOCK for s in held for side in s):
            uncut = weight.stack is not None and not any(side % FP8_BLOCK for side in weight.parts[0].shape)
            hints = ["fewer ranks"] * (tp > 1) + ["--ep"] * (tp > 1 and uncut)
            hints += ["--precision bf16, which dequantizes it"] * (not weight.name.startswith(PREFIX))
            raise SettingsError(
                f"--tp {tp}: {weight.name} of a rank is no whole number of the checkpoint's FP8 blocks of {FP8_BLOCK}"
                + (f"; use {' or '.join(hints)}" if hints else "")
            )


def _draft_text(settings: BuildSettings, pair: Pair) -> Path | None:
    """The file that a shortlist is counted in; None where there is nothing to count."""
    given = settings.draft_text
    if settings.draft_vocab is None:
        if given is not None:
            raise SettingsError(f"--draft-text {given}: is counted for --draft-vocab, which is not given")
        return None
    if settings.draft_vocab == pair.target_config.vocab_size:  # a head of its own, with nothing left out
        if given is not None:
            raise SettingsError(
                f"--draft-text {given}: --draft-vocab {settings.draft_vocab} takes every token; leave it out"
            )
        return None
    shipped = pair.target_folder.path.resolve().parent == _SHIPPED_TEXT.parent
    if given is None and not shipped:
        raise SettingsError(
            f"--draft-vocab {settings.draft_vocab}: say with --draft-text FILE in which text its tokens are counted"
        )
    text = _SHIPPED_TEXT if given is None else Path(given)
    if not text.is_file():
        raise SettingsError(f"--draft-text {text}: is not a file")
    return text


def as_planned(
    pair: Pair,
    config: EngineConfig,
    text: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pair:
    """The pair as `config` has it: in its precision, and with its drafter, whose shortlist is counted here."""
    pair = replace(pair, target_config=config.target)
    drafter = config.drafter
    checkpoint = pair.drafter
    if checkpoint is None or drafter is None:
        return pair
    if drafter.draft_vocab_size is not None and checkpoint.config.draft_vocab_size is None:
        checkpoint = take_shortlist(pair, drafter.draft_vocab_size, text, config.stop_token_ids, progress)
    return replace(pair, drafter=replace(checkpoint, config=drafter))


def _write_rank(pair: Pair, config: EngineConfig, rank: int, file: Path, progress: Progress) -> None:
    what = f"rank {rank}" if config.tp > 1 else "weights"
    tensors = read_rank_weights(pair, config.tp, rank, config.dtype, lambda done, total: progress(what, done, total))
    if config.kv == "fp8":
        tensors |= cache_scales(pair)
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


def _source_digests(pair: Pair, draft_text: Path | None) -> dict[str, str]:
    folders = {"target": pair.target_folder.path}
    if pair.drafter is not None:
        folders["drafter"] = pair.drafter.folder.path
    digests = {
        f"{role}/{file.name}": digest(file)
        for role, folder in folders.items()
        for file in sorted(folder.iterdir())
        if file.suffix in (".safetensors", ".json", ".jinja", ".txt")
    }
    return digests if draft_text is None else {**digests, "draft_text": digest(draft_text)}


def _stop_token_ids(pair: Pair) -> tuple[int, ...]:
    """End tokens: generation_config.json's, else config.json's."""
    file = pair.target_folder.path / "generation_config.json"
    ids = pair.target_folder.config.get("eos_token_id")
    if file.is_file():
        stated = read_json(file).get("eos_token_id")
        ids = ids if stated is None else stated
    found = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int and 0 <= token < pair.target_config.vocab_size for token in found):
        raise CheckpointError(f"{pair.target_folder.path}: eos_token_id {ids!r} is not a token id, or a list of them")
    return tuple(found)


def _check_facts(settings: BuildSettings, target: DecoderConfig, drafter: DrafterConfig | None) -> None:
    """Compares what the catalog says with what the checkpoints are: a stale entry would cost acceptance in silence."""
    if settings.facts is None or drafter is None:
        return
    found = {
        "block_size": drafter.block_size,
        "target_layers": target.layers,
        "tap_layers": drafter.tap_layers,
        "mask_token_id": drafter.mask_token_id,
        "drafter_layers": drafter.layers,
    }
    for name, value in found.items():
        stated = getattr(settings.facts, name)
        if stated is not None and stated != value:
            raise SettingsError(
                f"{settings.name}: its build configuration says {name} {stated}, but the checkpoints have {value}"
            )


def _check_tensorrt_settings(settings: BuildSettings) -> None:
    if settings.backend == "tensorrt":
        if settings.precision == "fp32":
            raise SettingsError("--precision fp32: TensorRT has no fused attention in FP32; use bf16 or fp16")
        return
    for name in ("gpu", "sampling", "optimization_level", "workspace", "workers", "plugin"):
        if getattr(settings, name) != BuildSettings.model_fields[name].default:
            raise SettingsError(f"--{name.replace('_', '-')} is a setting of --backend tensorrt, not of torch")


def _plugin_digest(settings: BuildSettings, models: Sequence[DecoderConfig]) -> str | None:
    """SHA-256 of the plugin's library, once it computes these models' attention in this TensorRT."""
    if settings.plugin is None:
        return None
    if not has_plugin_layers(load_tensorrt()):
        raise SettingsError(
            "--plugin needs the datacenter edition of TensorRT (pip install tensorrt, on the GPU to build for): "
            "TensorRT-RTX has no plugin layers"
        )
    for model in models:
        if model.head_size not in HEAD_SIZES:
            known = " and ".join(map(str, HEAD_SIZES))
            raise SettingsError(f"--plugin: it has head sizes {known}, not {model.head_size}; leave it out")
    if not Path(settings.plugin).is_file():
        raise SettingsError(f"--plugin {settings.plugin}: is not a file; `make plugin` builds libdflash_plugin.so")
    return digest(Path(settings.plugin))


def _versions(backend: Backend) -> dict[str, str]:
    tensorrt = {}
    if backend == "tensorrt":
        module = load_tensorrt()
        tensorrt = {module.__name__: module.__version__}
    return {
        **tensorrt,
        "trtllm-dflash": trtllm_dflash.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
    }
