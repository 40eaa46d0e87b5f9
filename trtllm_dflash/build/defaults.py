"""Choices of a build that were left to us: the backend, and how many sequences of which length it serves."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from trtllm_dflash.build.settings import DEFAULT_MAX_SEQ_LEN, BuildSettings, flag_of_tensorrt
from trtllm_dflash.build.tensorrt_compiler import compile_target
from trtllm_dflash.catalog import ServingLimits
from trtllm_dflash.cost.gpus import GPU, GPUS, capability, present_gpu
from trtllm_dflash.cost.memory import fits_in
from trtllm_dflash.engine.config import Backend, EngineConfig
from trtllm_dflash.engine.paging import PAGE_ROWS
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.extras import pip_install
from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt

_FEW = 8  # slots; where fewer fit, sequences are made shorter, to no less than DEFAULT_MAX_SEQ_LEN


@dataclass(frozen=True)
class BackendChoice:
    """A backend, the GPU that it builds for, and the reason in one line."""

    backend: Backend
    gpu: str | None
    why: str

    @property
    def remark(self) -> str:
        """The choice as `build` prints it."""
        return f"backend: {self.backend}, since {self.why}; --backend says otherwise"


def choose_backend(settings: BuildSettings, target: DecoderConfig) -> BackendChoice:
    """Chooses TensorRT where it is here and compiles for the GPU, named or present; else torch.

    Raises:
        SettingsError: the GPU is not known, or a setting is TensorRT's alone and the backend is torch.
    """
    gpu, why = _compiled_for(settings, target)
    if gpu is not None:
        return BackendChoice("tensorrt", gpu, why)
    flag = flag_of_tensorrt(settings)
    if flag is not None:
        raise SettingsError(f"{flag} is a setting of --backend tensorrt; here it is torch, since {why}")
    return BackendChoice("torch", settings.gpu, why)


def _compiled_for(settings: BuildSettings, target: DecoderConfig) -> tuple[str | None, str]:
    """Finds the GPU that TensorRT compiles for, and says with what; without one, why torch it is."""
    wanted = settings.gpu
    if wanted is not None:
        capability(wanted)  # refuses unknown names
    asked = _asked_of_torch(settings)
    if asked is not None:
        return None, f"{asked} is torch's"
    present = present_gpu()
    if wanted is None and present is None:
        return None, "there is no GPU here, and --gpu names none"
    if target.delta is not None:
        return None, "it has our GPU kernels for gated delta nets"
    name = wanted or f"sm{present.capability}" if present is not None else str(wanted)
    try:
        module = load_tensorrt()
        compile_target(module, name)
    except EngineError:
        return None, f"TensorRT is not installed here ({pip_install('tensorrt')})"
    except SettingsError as error:
        return None, f"TensorRT here does not compile for that GPU ({error})"
    compiler = f"{module.__name__} {module.__version__}"
    return name, f"{compiler} is here and compiles for sm{capability(name)}"


def _asked_of_torch(settings: BuildSettings) -> str | None:
    """Names a setting that the torch backend alone takes, where one is given."""
    given = {"--kv-memory": settings.kv_memory is not None, "--page-size": settings.page_size is not None}
    given |= {"--kv fp8": settings.kv == "fp8", "--precision fp32": settings.precision == "fp32"}
    return next((flag for flag, is_given in given.items() if is_given), None)


# -- limits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LimitChoice:
    """An engine with its slots and their length, and the reason in one line; None where nothing was chosen."""

    changes: dict[str, Any]
    remark: str | None


def memory_of(gpu: str | None) -> GPU | None:
    """Finds the GPU whose memory limits an engine: the one that is named, else the one here; None: it is not known."""
    if gpu is None:
        return present_gpu()
    return GPUS.get(gpu.lower())


def choose_limits(config: EngineConfig, settings: BuildSettings, gpu: GPU | None) -> LimitChoice:
    """Chooses the slots and the length that were not asked for: the pair's, or as much of them as fits the GPU.

    Where fewer than `_FEW` slots fit, sequences are halved, to no less than `DEFAULT_MAX_SEQ_LEN`.

    Args:
        config: the engine with what was asked for, or the defaults.
    """
    limits = settings.limits
    open_ = [name for name in ("max_batch", "max_seq_len") if getattr(settings, name) is None]
    if not open_:
        return LimitChoice({}, None)
    if gpu is None:
        return LimitChoice({}, None if limits is None else _remark_of_unknown(config, limits))
    wanted = {
        "max_batch": config.max_batch if limits is None else limits.max_batch,
        "max_seq_len": config.max_seq_len if limits is None else min(limits.max_seq_len, config.target.max_positions),
    }
    batch, length = (wanted[name] if name in open_ else getattr(config, name) for name in ("max_batch", "max_seq_len"))
    lengths = [length]
    while "max_seq_len" in open_ and lengths[-1] // 2 >= min(DEFAULT_MAX_SEQ_LEN, length):
        lengths.append(lengths[-1] // 2)
    chosen = (1 if "max_batch" in open_ else batch, lengths[-1])  # what fits nowhere is refused with advice
    for each in lengths:
        fitting = _fitting_slots(config, gpu, each, batch, fixed="max_batch" not in open_)
        if fitting:
            chosen = fitting, each
        if fitting >= min(_FEW, batch):
            break
    changes = {"max_batch": chosen[0], "max_seq_len": chosen[1], "chunk": min(config.chunk, chosen[1])}
    return LimitChoice(changes, _remark(chosen, (batch, length), gpu, limits is not None))


def _fitting_slots(config: EngineConfig, gpu: GPU, length: int, most: int, fixed: bool) -> int:
    """Counts the slots of that length, up to `most`, that fit a GPU; `fixed`: so many or none."""

    def fits(slots: int) -> bool:
        sized = {"max_batch": slots, "max_seq_len": length, "chunk": min(config.chunk, length)}
        return fits_in(gpu.usable_bytes, config.model_copy(update=sized), gpu)

    if fixed:
        return most if fits(most) else 0
    return bisect_left(range(1, most + 1), True, key=lambda slots: not fits(slots))


def _remark_of_unknown(config: EngineConfig, limits: ServingLimits) -> str:
    return (
        f"limits: {config.max_batch} slots of {config.max_seq_len:,} tokens, as no GPU's memory is known; with --gpu "
        f"NAME the pair's {limits.max_batch} of {limits.max_seq_len:,}, or as many as fit it"
    )


def _remark(chosen: tuple[int, int], wanted: tuple[int, int], gpu: GPU, is_pairs: bool) -> str | None:
    slots, length = chosen
    said = f"limits: {slots} slots of {length:,} tokens"
    if chosen == wanted:
        return f"{said}, the pair's, which fit a {gpu.name}" if is_pairs else None
    return f"{said}: as many as fit a {gpu.name} ({gpu.memory} GB), not {wanted[0]} of {wanted[1]:,}"


# -- the rest --------------------------------------------------------------------------------------------------------


def remark_on_defaults(
    config: EngineConfig, settings: BuildSettings, gpu: GPU | None, precision_said: bool, limits_said: bool
) -> str | None:
    """Writes the precision, slots, tokens and pages that nobody asked for, with their reasons, on one line.

    Args:
        gpu: as in `choose_limits`.
        precision_said, limits_said: whether another remark has them.
    """
    parts = []
    if settings.precision is None and not precision_said:
        held = config.target.linear_precision
        where = "as there is no GPU" if config.precision == "fp32" else "as for a GPU"
        parts.append(f"{config.precision}, {where}" if held is None else f"{held.value}, as the target's checkpoint is")
    open_ = [name for name in ("max_batch", "max_seq_len") if getattr(settings, name) is None]
    if open_ and not limits_said:
        most = " (the target's most)" if config.max_seq_len == config.target.max_positions else ""
        counts = {"max_batch": f"{config.max_batch} slots", "max_seq_len": f"{config.max_seq_len:,} tokens{most}"}
        why = "as no GPU's memory is known" if gpu is None else f"which fit a {gpu.name}"
        parts.append(f"{' of '.join(counts[name] for name in open_)}, {why}")
    if settings.page_size is None and config.backend == "torch":
        short = "" if config.kv_memory is not None else " with our kernels, else of a whole slot"
        parts.append(f"pages of {PAGE_ROWS} tokens{short}")
    return f"defaults: {'; '.join(parts)}" if parts else None
