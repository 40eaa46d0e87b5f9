"""The choice of what computes an engine's steps: our CUDA kernels wherever they can, or torch's, with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_dflash import kernels
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.flat_rows import why_not_flat
from trtllm_dflash.errors import EngineError
from trtllm_dflash.models.decoder import Decoder
from trtllm_dflash.models.kimi_k25 import KimiK25
from trtllm_dflash.models.moe import describe_experts
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.ops.cuda_experts import takes_experts
from trtllm_dflash.ops.cuda_slots import CudaSlots
from trtllm_dflash.session.kernels import Kernels

TORCH = "torch"


@dataclass(frozen=True)
class Choice:
    """The backend, attention, experts and precision that compute an engine's steps, and the reason."""

    backend: str
    device: str
    precision: str
    attention: str
    products: str  # of few rows and a weight
    experts: str  # "none" where the model has none
    why: str
    library: Path | None = None  # that our kernels come from
    exact: str = "no"  # where a row's bits depend on nothing else in the batch: what else they depend on

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the metric that names the choice."""
        names = ("backend", "precision", "attention", "products", "experts", "exact")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        said = {**self.labels, "exact": "no" if self.exact == "no" else "yes"}
        parts = [f"{name} {value}" for name, value in said.items() if name != "backend"]
        place = f"; library {self.library}" if self.library is not None else ""
        return f"{self.backend} on {self.device}: {', '.join(parts)} ({self.why}{place})"


def torch_choice(config: EngineConfig, device: str, why: str, inexact: str | None = None) -> Choice:
    """Makes the choice of torch for everything.

    Args:
        inexact: why a row's bits depend on what else is in the batch on this CPU; None: they do not.
    """
    experts = TORCH if config.target.moe is not None else "none"
    exact = "no"
    if device == "cpu" and inexact is None:
        processor, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
        exact = f"torch {torch.__version__}, {processor}, threads {threads}, tp {config.tp}"
    why = why if inexact is None else f"{why}; not exact: {inexact}"
    return Choice("torch", device, precision_of(config), TORCH, TORCH, experts, why, exact=exact)


def slots_attention(target: Decoder, ops: CudaSlots, ours: str) -> str:
    """Names what computes the attention of a target's layers on [slots, rows]."""
    layers = target.config.attention_layers
    if isinstance(target, KimiK25):
        taken = {ops.attends_latent(target.latent_layer(ops.tp, i)) for i in layers}
    else:
        taken = {ops.attends(target.attention_layer(ops.tp, i)) for i in layers}
    return _by_whom(taken, ours)


def _by_whom(taken: set[bool], ours: str) -> str:
    """Names what computes layers that our kernels take, or do not."""
    return " and ".join([ours] * (True in taken) + [TORCH] * (False in taken))


def experts_of(config: EngineConfig, weights: Mapping[str, torch.Tensor], communicator: Communicator, ours: str) -> str:
    """Names what computes a target's experts on a GPU; "none" where it has none."""
    target = config.target
    if target.moe is None:
        return "none"
    prefixes = {name.partition("mlp.experts.")[0] for name in weights if "mlp.experts.down_proj." in name}
    layers = [describe_experts(prefix, target.moe, communicator.size, communicator.rank) for prefix in prefixes]
    # They are alike but for what they hold: scales that our kernels do not take, say.
    taken = {takes_experts(layer, weights, target.hidden_size, config.dtype) for layer in layers}
    return _by_whom(taken, ours)


def precision_of(config: EngineConfig) -> str:
    """Names the engine's type, and its caches' where that is another."""
    return config.precision if config.kv is None else f"{config.precision} with {config.kv} caches"


def find_kernels(
    config: EngineConfig, asked: Kernels, capability: tuple[int, int]
) -> tuple[kernels.Library | None, str]:
    """Finds the library whose kernels compute an engine on a GPU, or None for torch's; with the reason.

    Args:
        capability: the GPU's.

    Raises:
        EngineError: our kernels compute such an engine, and are missing, stale or not for this GPU; says the remedy.
            Or nothing computes it on a GPU.
    """
    lacking_exact = why_not_exact(config, capability) if asked == "exact" else None
    if lacking_exact is not None:
        raise EngineError(f"--kernels exact: {lacking_exact}; leave it out")
    reason = why_not_flat(config, capability)
    if config.target.delta is not None:
        library = _state_kernels(config, asked, capability)
        if reason is not None:
            return None, f"gated delta nets by {library}; flat rows: {reason}"
        return library, f"gated delta nets, and heads of {_sizes(config)} on {kernels.gpu_name(capability)}"
    if asked == "torch":
        return None, "as --kernels torch says"
    if reason is not None and asked == "exact":
        raise EngineError(f"--kernels exact: {reason}; leave it out")
    if reason is not None:
        return None, reason
    return _load_for(capability), f"heads of {_sizes(config)} on {kernels.gpu_name(capability)}"


def _sizes(config: EngineConfig) -> str:
    return ", ".join(map(str, config.head_sizes))


def find_parts(config: EngineConfig, asked: Kernels, capability: tuple[int, int]) -> kernels.Library | None:
    """Finds the library whose kernels compute parts of an engine that `find_kernels` leaves to torch; None: no part.

    Raises:
        EngineError: as `find_kernels`, of kernels that are missing, stale or not for this GPU.
    """
    if config.target.delta is not None:
        return kernels.load_for(capability)
    if asked == "torch" or config.dtype not in kernels.HALVES or capability < kernels.OLDEST_GPU:
        return None
    return _load_for(capability)


def _load_for(capability: tuple[int, int]) -> kernels.Library:
    """Loads the library for a GPU. Errors as in `kernels.load_for`, with the other way out."""
    try:
        return kernels.load_for(capability)
    except EngineError as error:
        raise EngineError(f"{error}; or, slower, compute with torch's: --kernels torch") from None


def why_not_exact(config: EngineConfig, capability: tuple[int, int]) -> str | None:
    """Reason why a row of an engine would not have the same bits whatever else is in the batch; None: it has."""
    least, windows = kernels.EXACT_TAIL, [window for window in config.target.windows or () if window]
    *few, most = kernels.ALL_REDUCE_RANKS
    ranks = f"{', '.join(map(str, few))} and {most}"
    is_too_deep = config.draft_tree > 0 and config.block_size > kernels.EXACT_TAIL
    refusals = {
        f"not on {kernels.gpu_name(capability)}, on Hopper alone": capability != (9, 0),
        f"not in {config.precision}, in BF16 and FP16 alone": config.precision not in ("bf16", "fp16"),
        f"not on {config.tp} ranks, on {ranks} alone": config.tp not in (1, *kernels.ALL_REDUCE_RANKS),
        "not with gated delta nets": config.target.delta is not None,
        "not with norms over whole projections": config.target.family == "minimax_m2",
        f"not with --draft-tree of blocks of {config.block_size}, of {kernels.EXACT_TAIL} at most": is_too_deep,
        f"not with windows of fewer than {kernels.EXACT_TAIL} keys": min(windows, default=least) < least,
        "not with heads of more than 128": max(config.head_sizes) > 128,
    }
    return next((reason for reason, is_met in refusals.items() if is_met), None)


def _state_kernels(config: EngineConfig, asked: Kernels, capability: tuple[int, int]) -> kernels.Library:
    """Finds the library that computes an engine's gated delta nets on a GPU, which torch's operations do not.

    Raises:
        EngineError: there is none, it is not wanted, or it does not compute such nets.
    """
    delta = config.target.delta
    assert delta is not None
    why = kernels.why_no_delta_net(delta.key_size, delta.value_size, delta.kernel, config.block_size)
    if why is not None:
        raise EngineError(f"{config.name}: our CUDA kernels have {why}: --device cpu")
    if asked == "torch":
        raise EngineError(f"--kernels torch: on a GPU the gated delta nets of {config.name} are our kernels' alone")
    if capability < kernels.OLDEST_GPU:
        oldest, own = kernels.gpu_name(kernels.OLDEST_GPU), kernels.gpu_name(capability)
        raise EngineError(f"{config.name}: gated delta nets are for {oldest} and later, not for {own}: --device cpu")
    return kernels.load_for(capability)
