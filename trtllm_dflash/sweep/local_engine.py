"""The engine that a sweep in this process runs on: an engine directory, or random weights of a model's shape."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_dflash.bench.imposed import imposed
from trtllm_dflash.bench.random_session import check_kernels, check_room, own_device, random_session
from trtllm_dflash.cost.acceptance import ImposedAcceptance
from trtllm_dflash.cost.shapes import asked_precision, find_shape, shape_config
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.directory import read_config
from trtllm_dflash.errors import SettingsError
from trtllm_dflash.llm import LLM
from trtllm_dflash.runtime.service import Service
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.session.device import pick_device
from trtllm_dflash.session.kernels import Kernels
from trtllm_dflash.session.ranks import World
from trtllm_dflash.session.threads import limit_threads
from trtllm_dflash.session.trees import tree_beside, with_trees
from trtllm_dflash.sweep.dataset import Dataset, random_dataset, read_dataset
from trtllm_dflash.sweep.settings import SweepSettings
from trtllm_dflash.text.tokenizer import TextCodec

_PROMPT_TOKENS, _OUTPUT_TOKENS = 1024, 256
_RANDOM_SAMPLES = 512
_CHUNK = 512  # prompt tokens in a prefill step, as `build` has it


@dataclass(frozen=True)
class LocalEngine:
    """An engine that serves in this process."""

    llm: LLM
    service: Service
    dataset: Dataset
    acceptance: ImposedAcceptance | None

    @property
    def gpus(self) -> int | None:
        """Number of GPUs; None on a CPU."""
        return self.llm.config.tp if self.llm.session.device.type == "cuda" else None

    def about(self, random_weights: bool) -> dict[str, object]:
        """Describes the engine for `Results`."""
        config = self.llm.config
        fields = {"name", "backend", "precision", "tp", "max_batch", "max_seq_len", "block_size"}
        matrices = {
            f"{role}_matrices": model.linear_precision.value if model and model.linear_precision else config.precision
            for role, model in (("target", config.target), ("drafter", config.drafter))
        }
        session = self.llm.session
        computes = {"session": type(session).__name__, "computes": session.choice.labels}
        return {
            **config.model_dump(mode="json", include=fields),
            **matrices,
            **computes,
            "random_weights": random_weights,
        }


def with_shape_defaults(settings: SweepSettings) -> SweepSettings:
    """Fills in the lengths that `--shape` needs, where they were not given."""
    if settings.shape is None:
        return settings
    values = {"prompt_tokens": settings.prompt_tokens or _PROMPT_TOKENS}
    return settings.model_copy(update={**values, "output_tokens": settings.output_tokens or _OUTPUT_TOKENS})


@contextmanager
def open_local_engine(settings: SweepSettings) -> Iterator[LocalEngine | None]:
    """Opens the engine of these settings until the context is left; None on a rank that followed the first one.

    Raises:
        SettingsError: a setting contradicts the engine.
        EngineError: the engine, the device or its memory is not what is needed.
    """
    device = pick_device(settings.device or "auto")
    config = _random_engine(settings, device) if settings.engine is None else read_config(settings.engine)
    _check_lengths(settings, config)
    acceptance, kernels = _acceptance(settings, config), settings.kernels or "auto"
    draft_length = "auto" if settings.draft_length is None else settings.draft_length
    tree = tree_beside(settings.draft_tree or "auto", draft_length, config.block_size)
    config = with_trees(config, tree, device, kernels)
    if settings.engine is not None:
        limit_threads(config)
        llm = LLM.load(
            settings.engine,
            settings.device or "auto",
            kernels,
            prepare=False,
            draft_tree=config.draft_tree or "off",
            accept=imposed(acceptance, config.draft_tree) if acceptance else None,
        )
    else:
        llm = random_llm(config, device, acceptance, kernels)
    try:
        if llm.session.communicator.rank != 0:
            llm.session.follow()
            yield None
            return
        queue = 4 * settings.largest_concurrency if not settings.open_loop else 1 << 16
        service = llm.service(ServiceSettings(draft_length=draft_length, max_queue=queue))
        try:
            yield LocalEngine(llm, service, _dataset(settings, llm.config), acceptance)
        finally:
            service.close()
    finally:
        llm.close()


def ranks_of(settings: SweepSettings) -> int:
    """Number of processes, one a rank, that the engine needs."""
    return settings.tp or 1 if settings.engine is None else read_config(settings.engine).tp


def _random_engine(settings: SweepSettings, device: torch.device) -> EngineConfig:
    """Makes the engine configuration of a shape, with a slot for each client."""
    assert settings.shape is not None and settings.prompt_tokens is not None and settings.output_tokens is not None
    spare = find_shape(settings.shape).block_size
    length = settings.prompt_tokens + settings.output_tokens + spare
    return shape_config(
        settings.shape,
        layers=settings.layers,
        draft_vocab=settings.draft_vocab,
        drafter_precision=settings.drafter_precision,
        **asked_precision(settings.precision, device),
        tp=settings.tp or 1,
        max_batch=settings.largest_concurrency,
        max_seq_len=length,
        chunk=min(_CHUNK, length),
    )


def random_llm(
    config: EngineConfig,
    device: torch.device,
    acceptance: ImposedAcceptance | None,
    kernels: Kernels = "auto",
    codec: TextCodec | None = None,
    folder: Path | None = None,
) -> LLM:
    """Opens an engine of random weights; on every rank.

    Args:
        acceptance: to impose; None imposes none.
        codec: its tokenizer, if any.
        folder: where step times are kept, if anywhere.
    """
    world = World(config.tp)
    with world.together():
        device = own_device(device, world)
        check_kernels(config, device, kernels)
        check_room(config, device)
    accept = imposed(acceptance, config.draft_tree) if acceptance else None
    return LLM(random_session(config, device, world, accept, kernels), codec, folder)


def _acceptance(settings: SweepSettings, config: EngineConfig) -> ImposedAcceptance | None:
    """Makes the acceptance to impose on an engine; None where the settings impose none.

    Raises:
        SettingsError: its step is compiled, or no such block commits so many tokens.
    """
    if settings.simulate_acceptance is None:
        return None
    if config.backend == "tensorrt":
        raise SettingsError("--simulate-acceptance: a TensorRT plan accepts what it verifies; use the torch backend")
    return ImposedAcceptance(settings.simulate_acceptance, config.block_size)


def _check_lengths(settings: SweepSettings, config: EngineConfig) -> None:
    prompt, output = settings.prompt_tokens, settings.output_tokens
    if (prompt or 1) + (output or 1) > config.max_seq_len:
        asked = [f"--{name}-tokens {n}" for name, n in (("prompt", prompt), ("output", output)) if n is not None]
        raise SettingsError(f"{' and '.join(asked)}: the engine's --max-seq-len {config.max_seq_len} holds no more")


def _dataset(settings: SweepSettings, config: EngineConfig) -> Dataset:
    if settings.prompt_tokens is not None:
        vocabulary = config.target.vocab_size
        return random_dataset(_RANDOM_SAMPLES, settings.prompt_tokens, vocabulary, settings.seed)
    return read_dataset(settings.dataset).shuffled(settings.seed)
