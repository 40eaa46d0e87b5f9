"""Planning an engine of a pair: every choice, made once, and refusals before anything is written."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors
import torch

import trtllm_dflash
from trtllm_dflash.build.caches import check_caches, choose_caches, page_limits
from trtllm_dflash.build.defaults import choose_backend, choose_limits, memory_of, remark_on_defaults
from trtllm_dflash.build.precision import PrecisionChoice, check_sides, choose_precision
from trtllm_dflash.build.settings import (
    DEFAULT_MAX_BATCH,
    DEFAULT_MAX_SEQ_LEN,
    BuildSettings,
    flag_of_tensorrt,
)
from trtllm_dflash.build.tensorrt_compiler import compile_target
from trtllm_dflash.build.transcoding import check_transcoding
from trtllm_dflash.catalog import chat_arguments_of
from trtllm_dflash.checkpoint.folder import read_json
from trtllm_dflash.checkpoint.hub import resolve
from trtllm_dflash.checkpoint.pair import Pair, open_pair
from trtllm_dflash.checkpoint.ranks import check_tp
from trtllm_dflash.checkpoint.shortlist import take_shortlist
from trtllm_dflash.cost.gpus import GPUS
from trtllm_dflash.cost.memory import check_fits, plan_pages
from trtllm_dflash.engine.config import Backend, EngineConfig
from trtllm_dflash.engine.directory import digest
from trtllm_dflash.errors import CheckpointError, SettingsError
from trtllm_dflash.kernels import HEAD_SIZES, why_no_delta_net
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import HEAD, Drafter, DrafterConfig
from trtllm_dflash.ops.draft_tree import draft_tree
from trtllm_dflash.ops.formats import FP8_MULTIPLE
from trtllm_dflash.ops.tensorrt_delta_net import NET_CHUNK
from trtllm_dflash.ops.tensorrt_drafting import MOST_DRAFTS
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt
from trtllm_dflash.ops.tensorrt_plugin import has_plugin_layers
from trtllm_dflash.pairs.prompts import PROMPTS
from trtllm_dflash.session.trees import why_no_trees
from trtllm_dflash.text.chat_template import check_templates
from trtllm_dflash.text.tokenizer import check_tokenizer


@dataclass(frozen=True)
class EnginePlan:
    """The engine of a pair, as settings choose it.

    Attributes:
        config: its configuration; digests are not in it yet.
        draft_text: the file that a shortlist is counted in; None where there is nothing to count.
        remarks: choices that were left to us, a line each.
    """

    config: EngineConfig
    draft_text: Path | None
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class PlannedModels:
    """A target and its drafter as an engine has them: divided among ranks, each in its precision."""

    target: DecoderConfig
    drafter: DrafterConfig | None
    max_seq_len: int
    chunk: int
    block_size: int


def open_checkpoints(settings: BuildSettings) -> Pair:
    """Find (or download) the two checkpoints, check that they belong together, and that the tokenizer can be read.

    Raises:
        CheckpointError: a checkpoint or its tokenizer is damaged, or not what its config.json says.
        PairError: the drafter is for another target.
    """
    drafter = resolve(settings.drafter) if settings.drafter is not None else None
    pair = open_pair(resolve(settings.target, with_tokenizer=True), drafter)
    folder = pair.target_folder.path
    check_tokenizer(folder, pair.target_config.vocab_size)
    said = folder / "tokenizer_config.json"
    if said.is_file():  # or only who loads the engine's tokenizer would hear of it
        check_templates(read_json(said).get("chat_template"), said)
    return pair


def plan_engine(pair: Pair, settings: BuildSettings, choice: PrecisionChoice | None = None) -> EnginePlan:
    """Decide on the engine that these settings make of a pair.

    Args:
        choice: of the parts' precisions; None: `build_precision`'s.

    Raises:
        SettingsError: a setting contradicts the checkpoints.
        EngineError: the engine does not fit the GPU that is named.
    """
    target, drafter = pair.target_config, pair.drafter_config
    _check_facts(settings, target, drafter)
    check_transcoding(pair, settings)
    room = memory_of(settings.gpu)
    backend = None if settings.backend is not None else choose_backend(settings, target)
    if backend is not None:
        settings = settings.model_copy(update={"backend": backend.backend, "gpu": backend.gpu})
    assert settings.backend is not None
    choice = choice or build_precision(target, drafter, settings)
    models = plan_models(target, drafter, settings, choice)
    draft_text = _draft_text(settings, pair)
    _check_tensorrt_settings(settings, models)
    caches = choose_caches(pair, settings.kv, settings.backend, choice.engine)
    chat_arguments = settings.chat_arguments
    if chat_arguments is None:
        chat_arguments = chat_arguments_of(settings.target)
    config = EngineConfig(
        name=settings.name,
        backend=settings.backend,
        precision=choice.engine,
        tp=settings.tp,
        max_batch=settings.max_batch or DEFAULT_MAX_BATCH,
        max_seq_len=models.max_seq_len,
        chunk=models.chunk,
        block_size=models.block_size,
        plan_tree=settings.draft_tree or 0,
        target=models.target,
        drafter=models.drafter,
        kv=caches.kv,
        **page_limits(settings.page_size, settings.kv_memory, settings.backend, models.max_seq_len),
        stop_token_ids=_stop_token_ids(pair),
        chat_arguments=chat_arguments,
        sampling=settings.sampling,
        gpu=settings.gpu.lower() if settings.gpu and settings.backend == "tensorrt" else None,
        optimization_level=settings.optimization_level if settings.backend == "tensorrt" else None,
        workspace=settings.workspace,
        plugin=_plugin_digest(settings, models),
        versions=_versions(settings.backend),
    )
    _check_trees(config)
    limits = choose_limits(config, settings, room)
    config = config.model_copy(update=limits.changes)
    if config.kv_memory is not None:
        plan_pages(config)
    if settings.gpu is not None and settings.gpu.lower() in GPUS:
        check_fits(config, settings.gpu)
    if settings.backend == "tensorrt":
        compile_target(load_tensorrt(), config.gpu)
    defaults = remark_on_defaults(config, settings, room, choice.said is not None, limits.remark is not None)
    said = (choice.said, caches.said, None if backend is None else backend.remark, limits.remark, defaults)
    return EnginePlan(config, draft_text, tuple(remark for remark in said if remark is not None))


def plan_models(
    target: DecoderConfig, drafter: DrafterConfig | None, settings: BuildSettings, choice: PrecisionChoice
) -> PlannedModels:
    """Change two models' configurations, and set their limits, as these settings have it.

    Args:
        target, drafter: as their checkpoints have them.
        choice: of their precisions.

    Raises:
        SettingsError: a setting does not fit the models; names it, and what would do.
    """
    target = _divide_experts(target, settings).model_copy(update=choice.target)
    drafter = _lighter(drafter, settings, choice)
    check_tp(settings.tp, target, drafter)
    check_sides(target, drafter, settings.tp)
    max_seq_len = settings.max_seq_len or min(DEFAULT_MAX_SEQ_LEN, target.max_positions)
    if max_seq_len > target.max_positions:
        raise SettingsError(
            f"--max-seq-len {max_seq_len}: the target takes at most {target.max_positions} positions "
            "(max_position_embeddings in its config.json)"
        )
    if settings.chunk > max_seq_len and "chunk" in settings.model_fields_set:
        raise SettingsError(f"--chunk {settings.chunk}: longer than --max-seq-len {max_seq_len}")
    chunk = min(_chunk(settings, target), max_seq_len)
    return PlannedModels(target, drafter, max_seq_len, chunk, _block_size(settings.block_size, drafter))


def build_precision(
    target: DecoderConfig, drafter: DrafterConfig | None, settings: BuildSettings, gpu: str | None = None
) -> PrecisionChoice:
    """Choose the parts' precisions by these settings, for the GPU that they or the caller name.

    Raises:
        SettingsError: as `choose_precision`, or no such caches can be kept.
    """
    check_caches(settings.kv, settings.backend or "torch")
    backend = settings.backend or "torch"
    asked = settings.precision, settings.drafter_precision
    return choose_precision(target, drafter, backend, *asked, gpu or settings.gpu, settings.tp)


def as_planned(
    pair: Pair,
    config: EngineConfig,
    text: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pair:
    """Give the pair the precision and the drafter of `config`; its shortlist is counted here."""
    pair = replace(pair, target_config=config.target)
    drafter = config.drafter
    checkpoint = pair.drafter
    if checkpoint is None or drafter is None:
        return pair
    if drafter.draft_vocab_size is not None and checkpoint.config.draft_vocab_size is None:
        checkpoint = take_shortlist(pair, drafter.draft_vocab_size, text, config.stop_token_ids, progress)
    return replace(pair, drafter=replace(checkpoint, config=drafter))


# -- models ----------------------------------------------------------------------------------------------------------


def _divide_experts(target: DecoderConfig, settings: BuildSettings) -> DecoderConfig:
    """Divide the target's experts among the ranks."""
    if not settings.ep:
        return target
    if target.moe is None:
        raise SettingsError("--ep: the target has no experts to divide; leave it out")
    if settings.tp == 1:
        raise SettingsError("--ep: there is one rank only; say with --tp among how many the experts are divided")
    return target.model_copy(update={"moe": target.moe.model_copy(update={"expert_parallel": True})})


def _lighter(drafter: DrafterConfig | None, settings: BuildSettings, choice: PrecisionChoice) -> DrafterConfig | None:
    """Apply these settings' precision, window and vocabulary to the checkpoint's drafter."""
    knobs = ("draft_vocab", "draft_window", "drafter_precision")
    asked = [name for name in knobs if getattr(settings, name) is not None]
    if drafter is None:
        if asked:
            knob = asked[0].replace("_", "-")
            raise SettingsError(
                f"--{knob} {getattr(settings, asked[0])}: there is no drafter to make lighter; give --drafter"
            )
        return None
    changes = dict(choice.drafter)
    if settings.draft_window is not None:
        changes["windows"] = _draft_windows(settings.draft_window, drafter)
    if settings.draft_vocab is not None:
        _check_draft_vocab(settings.draft_vocab, settings, drafter)
        changes["draft_vocab_size"] = settings.draft_vocab
        if drafter.linear_precision is not None and changes.get("linear_precision", True):
            # The head is the target's, and not in its checkpoint's format.
            kept = changes.get("plain_linears", drafter.plain_linears)
            changes["plain_linears"] = (*kept, HEAD.removesuffix(".weight"))
    return drafter.model_copy(update=changes)


def _draft_windows(size: int, drafter: DrafterConfig) -> tuple[int, ...]:
    """Narrow every layer's window to `size`; a layer that has a smaller one keeps it."""
    if size < drafter.block_size:
        raise SettingsError(f"--draft-window {size}: give at least the drafter's block of {drafter.block_size}")
    return tuple(min(size, window or size) for window in drafter.windows or (None,) * drafter.layers)


def _check_draft_vocab(size: int, settings: BuildSettings, drafter: DrafterConfig) -> None:
    if drafter.selector is not None:
        raise SettingsError(
            f"--draft-vocab {size}: a DFlash 2 or DSpark drafter chooses among its whole vocabulary; leave it out"
        )
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


def _chunk(settings: BuildSettings, target: DecoderConfig) -> int:
    """Choose the prompt tokens of a step: as set, but fewer for a plan's gated delta nets unless the user says so."""
    if settings.backend == "tensorrt" and target.delta is not None and "chunk" not in settings.model_fields_set:
        return min(settings.chunk, NET_CHUNK)
    return settings.chunk


def _block_size(asked: int | None, drafter: DrafterConfig | None) -> int:
    """Choose the rows of a drafting step: as set, else the drafter's whole block; 1 where nothing is drafted."""
    if drafter is None:
        if asked not in (None, 1):
            raise SettingsError(f"--block-size {asked}: without a drafter nothing is drafted; give --drafter")
        return 1
    size = asked or drafter.step_rows
    if not 2 <= size <= drafter.step_rows:
        raise SettingsError(f"--block-size {size}: the drafter was trained for blocks of 2 to {drafter.step_rows}")
    return size


def _draft_text(settings: BuildSettings, pair: Pair) -> Path | None:
    """Find the text that a shortlist is counted in; None where there is nothing to count."""
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
    shipped = pair.target_folder.path.resolve().parent == PROMPTS.parent
    if given is None and not shipped:
        raise SettingsError(
            f"--draft-vocab {settings.draft_vocab}: say with --draft-text FILE in which text its tokens are counted"
        )
    text = PROMPTS if given is None else Path(given)
    if not text.is_file():
        raise SettingsError(f"--draft-text {text}: is not a file")
    return text


# -- checkpoints and settings ----------------------------------------------------------------------------------------


def _stop_token_ids(pair: Pair) -> tuple[int, ...]:
    """Read the end tokens from generation_config.json, else from config.json."""
    folder, vocabulary = pair.target_folder.path, pair.target_config.vocab_size
    file, ids = folder / "config.json", pair.target_folder.setting("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file() and (stated := read_json(generation).get("eos_token_id")) is not None:
        file, ids = generation, stated
    found = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int and 0 <= token < vocabulary for token in found):
        raise CheckpointError(
            f"{file}: eos_token_id {ids!r} is not a token id, or a list of them; they are 0 to {vocabulary - 1}"
        )
    return tuple(found)


def _check_facts(settings: BuildSettings, target: DecoderConfig, drafter: DrafterConfig | None) -> None:
    """Compare the catalog's facts with the checkpoints: a stale entry would cost acceptance in silence."""
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
        if settings.facts.deduced and name != "target_layers":
            continue
        stated = getattr(settings.facts, name)
        if stated is not None and stated != value:
            raise SettingsError(
                f"{settings.name}: its build configuration says {name} {stated}, but the checkpoints have {value}"
            )


def _check_tensorrt_settings(settings: BuildSettings, models: PlannedModels) -> None:
    if settings.backend == "tensorrt":
        if models.drafter is not None and models.drafter.selector is not None and models.block_size > 1 + MOST_DRAFTS:
            raise SettingsError(
                f"--block-size {models.block_size}: TensorRT's layers choose at most {MOST_DRAFTS} drafts in a chain"
            )
        if settings.precision == "fp32":
            raise SettingsError("--precision fp32: TensorRT has no fused attention in FP32; use bf16 or fp16")
        return
    flag = flag_of_tensorrt(settings)
    if flag is not None:
        raise SettingsError(f"{flag} is a setting of --backend tensorrt, not of torch")


def _check_trees(config: EngineConfig) -> None:
    """Check that a plan can be made for its trees."""
    nodes, block = config.plan_tree, config.block_size
    if not nodes:
        return
    reason = why_no_trees(config, nodes)
    # Chains come out of the same list of nodes.
    longest = min(nodes, max(draft_tree(nodes, block).depths)) if reason is None else block
    if longest < block - 1:
        reason = f"its nodes make chains of {longest} drafts, blocks have {block - 1}; use --block-size {longest + 1}"
    shortest = min((window for window in config.target.windows or () if window is not None), default=block)
    if config.plugin is not None and shortest < block:
        reason = f"the plugin's trees need windows of at least a block; this target's is {shortest}; leave --plugin out"
    if reason is not None:
        raise SettingsError(f"--draft-tree {nodes}: {reason}")


def _plugin_digest(settings: BuildSettings, models: PlannedModels) -> str | None:
    """Check that the plugin computes these models' attention in this TensorRT; return its library's SHA-256."""
    if settings.plugin is None:
        return None
    if not has_plugin_layers(load_tensorrt()):
        raise SettingsError(
            "--plugin needs the datacenter edition of TensorRT (pip install tensorrt, on the GPU to build for): "
            "TensorRT-RTX has no plugin layers"
        )
    lacking = Drafter(models.drafter).without_plugin if models.drafter is not None else None
    delta, attending = models.target.delta, [models.target, models.drafter]
    if delta is None:
        lacking = _lacking_in_plugin(models.target) or lacking
    else:  # its attention is TensorRT's own
        sizes = delta.key_size, delta.value_size, delta.kernel, models.block_size
        lacking, attending = why_no_delta_net(*sizes) or lacking, [models.drafter]
    if lacking is not None:
        raise SettingsError(f"--plugin: it has no {lacking}; leave it out")
    for model in attending:
        if model is not None and model.head_size not in HEAD_SIZES:
            known = " and ".join(map(str, HEAD_SIZES))
            raise SettingsError(f"--plugin: it has head sizes {known}, not {model.head_size}; leave it out")
    if not Path(settings.plugin).is_file():
        raise SettingsError(f"--plugin {settings.plugin}: is not a file; `make plugin` builds libdflash_plugin.so")
    return digest(Path(settings.plugin))


def _lacking_in_plugin(target: DecoderConfig) -> str | None:
    """Name what the plugin's attention does not compute of a target; None: nothing but heads of some sizes."""
    if target.latent_attention is not None:
        return "latent attention"
    if target.full_attention is not None:
        return "keys as values"
    return "RoPE of a part of a head" if target.rope.rotary_size is not None else None


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
