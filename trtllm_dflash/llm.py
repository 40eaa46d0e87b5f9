"""`LLM`: an engine in this process, from Python."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from pydantic import ValidationError

from trtllm_dflash.build.planning import as_planned, open_checkpoints, plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_engine_tensors
from trtllm_dflash.checkpoint.validation import first_problem
from trtllm_dflash.engine.config import EngineConfig, Progress
from trtllm_dflash.engine.directory import check_file, check_shared_files, load_weights, plan_file, read_config
from trtllm_dflash.errors import EngineError, RequestError, SettingsError
from trtllm_dflash.ops.communicator import Communicator, Solo
from trtllm_dflash.runtime import request
from trtllm_dflash.runtime.intake import Intake, Prompt
from trtllm_dflash.runtime.request import Completion, SamplingParams, TokenLogprobs
from trtllm_dflash.runtime.scheduler import Scheduler
from trtllm_dflash.runtime.service import Service
from trtllm_dflash.runtime.settings import ServiceSettings
from trtllm_dflash.session.calls import Prepare
from trtllm_dflash.session.choice import find_kernels
from trtllm_dflash.session.device import pick_device
from trtllm_dflash.session.kernels import Kernels, check_kernels
from trtllm_dflash.session.ranks import World
from trtllm_dflash.session.session import Session
from trtllm_dflash.session.tensorrt_session import TensorRTSession, load_engine
from trtllm_dflash.session.torch_backend import open_torch_session
from trtllm_dflash.session.torch_session import SlotAccept
from trtllm_dflash.session.trees import with_trees
from trtllm_dflash.text.tokenizer import TextCodec

__all__ = ["LLM", "Completion", "Prompt", "SamplingParams", "TextChunk", "TokenLogprobs"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextChunk:
    """The text and tokens that one step adds to a streamed reply. All chunks' texts, joined, are the reply's."""

    text: str
    token_ids: list[int]
    completion: Completion | None  # with the last chunk
    logprobs: list[TokenLogprobs]  # of each token, where they were asked for


class LLM:
    """A target and its drafter, ready to generate.

    Not for several threads at once: while one generates, others get a RequestError. Under tensor parallelism only rank
    0 generates; see `trtllm-dflash generate`.
    """

    def __init__(self, session: Session, codec: TextCodec | None, folder: Path | None = None) -> None:
        self.session = session
        self.folder = folder  # the engine directory, where there is one
        self.config = session.config
        self.codec = codec
        lacks = "" if session.limits.shapes else "TensorRT plans do not yet do this"
        self.intake = Intake(session.config, codec, lacks=lacks)
        self._turn: Scheduler | None = None  # whose requests have the session's slots; None: nobody's, or a service's
        self._slots_in_use = threading.Lock()
        self._service: Service | None = None  # the last one, which has the slots until it is closed

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: str = "auto",
        kernels: Kernels = "auto",
        prepare: bool = True,
        progress: Progress = lambda what, done, total: None,
        *,
        draft_tree: int | str = "auto",
        accept: SlotAccept | None = None,
    ) -> "LLM":
        """Loads an engine directory. With tp > 1, inside as many MPI processes.

        Args:
            path: the engine directory.
            device: "cpu", "cuda", or "auto": CUDA where there is one.
            kernels: on a GPU, "auto" computes with our CUDA kernels wherever they compute such an engine, and does not
                load it where they are missing; "exact" gives a row the same bits whatever else is in the batch; "torch"
                computes with torch's, slower.
            prepare: on a GPU, captures every step that `generate` and `stream` may need, of one slot to all, plain and
                with the drafter's whole block, greedy and sampled: seconds now, and none in a request. False leaves
                that to whoever schedules; a `Service` captures the steps of its own draft lengths.
            progress: told how many are captured.
            draft_tree: nodes of the trees to draft, 15, 31 or 63; "off" for chains, as "auto" is wherever trees are not
                known to be faster.
            accept: for measurements, of the torch backend: which drafts survive. See `TorchSession`.

        Raises:
            EngineError: the directory, the number of processes or the kernels are not what the engine needs.
            SettingsError: there is no such device, it cannot verify trees, there are no such `kernels`, or they are
                chosen for TensorRT plans.
        """
        check_kernels(kernels)
        folder = Path(path)
        config = read_config(folder)
        place = pick_device(device)
        config = with_trees(config, draft_tree, place, kernels)
        world = World(config.tp)
        if place.type == "cuda":
            gpus = torch.cuda.device_count()
            if gpus < config.tp:
                raise EngineError(
                    f"this engine has {config.tp} ranks, and this machine {gpus} GPUs: one a rank is needed"
                )
            place = torch.device("cuda", world.rank)
            torch.cuda.set_device(place)  # TensorRT and NCCL take the current one
        with world.together():
            check_shared_files(folder, config)
            # The other ranks follow, and meet no text.
            codec = TextCodec.load(folder, config.chat_arguments) if world.rank == 0 else None
            prepared = _prepare_rank(folder, config, world.rank, place, accept, kernels)
        return cls(_ready(prepared(world.connect(place)), prepare, progress), codec, folder)

    @classmethod
    def from_pretrained(
        cls,
        target: str | os.PathLike[str],
        drafter: str | os.PathLike[str] | None,
        precision: str | None = None,
        device: str = "auto",
        max_batch: int = 1,
        max_seq_len: int | None = None,
        block_size: int | None = None,
        chat_arguments: dict[str, Any] | None = None,
        kv: str = "auto",
        kernels: Kernels = "auto",
        prepare: bool = True,
        draft_tree: int | str = "auto",
    ) -> "LLM":
        """Loads a pair straight from its checkpoints, without an engine directory.

        Args:
            target: a folder, or a Hugging Face name.
            drafter: likewise; None decodes plainly.
            chat_arguments: given to the chat template; by default what the catalog knows of this target.
            kernels, prepare, draft_tree: as in `load`.
            precision, kv, max_batch, max_seq_len, block_size: as the flags of `trtllm-dflash build`.
        """
        check_kernels(kernels)
        values = {
            "name": str(target),
            "target": str(target),
            "drafter": None if drafter is None else str(drafter),
            "backend": "torch",
            "precision": precision,
            "kv": kv,
            "max_batch": max_batch,
            "max_seq_len": max_seq_len,
            "block_size": block_size,
            "chat_arguments": chat_arguments,
        }
        try:
            settings = BuildSettings.model_validate(values)
        except ValidationError as error:
            raise SettingsError(first_problem(error)) from None
        pair = open_checkpoints(settings)
        place = pick_device(device)
        config = with_trees(plan_engine(pair, settings).config, draft_tree, place, kernels)
        weights = read_engine_tensors(as_planned(pair, config), config, 0)
        session = open_torch_session(config, weights, place, Solo(), kernels=kernels)
        return cls(_ready(session, prepare), TextCodec.load(pair.target_folder.path, config.chat_arguments))

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends its service, if it has one, and frees the engine and the other ranks."""
        if self._service is not None:
            self._service.close()
        self.session.close()

    def service(
        self, settings: ServiceSettings | None = None, after_step: Callable[[], None] = lambda: None
    ) -> Service:
        """Starts a service of requests from any thread. Until it is closed nothing else may use this LLM.

        Args:
            after_step: called on the service's thread when a step's updates have been reported.

        Raises:
            SettingsError: the settings contradict the engine.
            RequestError: another service has it, or another thread generates.
        """
        with self._alone():
            self._turn = None
            self._service = Service(self.session, self.intake, settings, self.folder, after_step)
            return self._service

    # -- generating ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        draft: bool = True,
    ) -> list[Completion]:
        """Generates a reply to each prompt, as many at a time as the engine has slots.

        Args:
            prompts: raw texts, conversations (lists of {"role", "content"}) or lists of token ids.
            params: for all, or one each. Greedy, 256 tokens by default.
            draft: False decodes plainly on the same engine.

        Raises:
            RequestError: a prompt cannot be served; nothing was generated.
            DFlashError: a reply failed, and with it the call: replies that were complete are lost. `generate_each` has
                given those before it.
        """
        sequences = self._sequences(prompts, params, draft)
        with self._alone():
            scheduler = self._begin(sequences, draft)
            for sequence in sequences:
                while not sequence.done:  # what was launched ahead of its end nobody waits for
                    scheduler.step()
        return [sequence.completion() for sequence in sequences]

    def generate_each(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        draft: bool = True,
    ) -> Iterator[Completion]:
        """Generates as `generate` does, and gives each reply once it and those of the prompts before it are complete.

        A later request takes the engine's slots, as from a stream.

        Raises:
            RequestError: a prompt cannot be served; nothing was generated.
            DFlashError: the next reply failed, and with it those behind it.
        """
        sequences = self._sequences(prompts, params, draft)
        with self._alone():
            scheduler = self._begin(sequences, draft)
        return self._in_order(sequences, scheduler)

    def _in_order(self, sequences: list[request.Sequence], scheduler: Scheduler) -> Iterator[Completion]:
        for sequence in sequences:
            while not sequence.done:
                self._step(scheduler)
            yield sequence.completion()

    def _sequences(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        draft: bool,
    ) -> list[request.Sequence]:
        if isinstance(prompts, str):
            raise RequestError("give a list of prompts, not one text")
        if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
            raise RequestError(f"give a list of prompts, not {type(prompts).__name__}")
        prompts = list(prompts)
        if isinstance(params, Sequence):
            params = [_sampling(its_params) for its_params in params]
        else:
            params = [_sampling(params)] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(params)} sampling parameters")
        pairs = zip(prompts, params, strict=True)
        return [self.intake.sequence(prompt, its_params, draft) for prompt, its_params in pairs]

    def _begin(self, sequences: list[request.Sequence], draft: bool) -> Scheduler:
        """Begins requests, which take the slots from any before them."""
        scheduler = self._turn = Scheduler(self.session, draft)
        for sequence in sequences:
            scheduler.submit(sequence)
        return scheduler

    def _step(self, scheduler: Scheduler) -> None:
        """Goes on with requests, until later ones take the slots."""
        with self._alone():
            if self._turn is not scheduler:
                raise RequestError("another request began on this LLM before this one ended; generate them together")
            scheduler.step()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other threads off the engine's slots.

        Raises:
            RequestError: one is computing on them, or a service has them.
        """
        if not self._slots_in_use.acquire(blocking=False):
            raise RequestError("another thread generates on this LLM; `service()` answers several at a time")
        try:
            if self._service is not None and self._service.running:
                raise RequestError("a service has this LLM's slots until it is closed; submit requests to it")
            yield
        finally:
            self._slots_in_use.release()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, draft: bool = True) -> Iterator[TextChunk]:
        """Generates a reply, one chunk a step. Arguments and errors as in `generate`.

        A later request takes the engine's slots: going on with this stream then raises a RequestError.
        """
        sequence = self.intake.sequence(prompt, _sampling(params), draft)
        with self._alone():
            scheduler = self._begin([sequence], draft)
        while not sequence.done:  # what was launched ahead of its end nobody waits for
            self._step(scheduler)
            update = sequence.take_update()
            if update is not None:
                if update.error is not None:
                    raise update.error
                yield TextChunk(update.text, update.token_ids, update.completion, update.logprobs)

    def spec_generate(
        self,
        input_ids: torch.Tensor | Mapping[str, Any],
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        stop_token_ids: Sequence[int] | None = None,
        seed: int = 0,
    ) -> torch.Tensor:
        """Generates in transformers' manner: input_ids [1, N] -> [1, N + new], of the same type, on the same device.

        Args:
            input_ids: one prompt, or what `apply_chat_template(..., return_tensors="pt")` returns.
            stop_token_ids: tokens that end the reply; None: the model's own.

        Raises:
            RequestError: this engine cannot serve it.
        """
        ids = read_input_ids(input_ids)
        try:
            stops = () if stop_token_ids is None else tuple(stop_token_ids)
        except TypeError:
            raise RequestError(f"{stop_token_ids}: give a list of token ids", "stop_token_ids") from None
        try:
            params = SamplingParams(
                max_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                stop_token_ids=stops,
                ignore_eos=stop_token_ids is not None,
            )
        except ValidationError as error:
            raise RequestError(first_problem(error).replace("max_tokens", "max_new_tokens", 1)) from None
        (completion,) = self.generate([ids[0].tolist()], params)
        new = torch.tensor([completion.token_ids], dtype=ids.dtype, device=ids.device)
        return torch.cat([ids, new], dim=1)

    def encode(self, prompt: Prompt) -> list[int]:
        """Encodes a prompt as `generate` does.

        Raises:
            RequestError: this engine cannot serve it.
        """
        return self.intake.encode(prompt)


def read_input_ids(input_ids: torch.Tensor | Mapping[str, Any]) -> torch.Tensor:  # [1, N]
    """Takes the one prompt out of a tensor, or out of the BatchEncoding that transformers puts it in.

    Raises:
        RequestError: it is no tensor [1, N], is padded, or holds more than text.
    """
    if isinstance(input_ids, Mapping):
        unknown = sorted(set(input_ids) - {"input_ids", "attention_mask", "token_type_ids"})
        if unknown:
            raise RequestError("prompts are text alone", unknown[0])
        mask = input_ids.get("attention_mask")
        if mask is not None and not torch.as_tensor(mask).all():
            raise RequestError("has zeros; give the prompt without padding", "attention_mask")
        input_ids = input_ids.get("input_ids")  # type: ignore[assignment]
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.shape[0] != 1:
        shape = list(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise RequestError(f"input_ids must be a tensor [1, N], not {shape}")
    return input_ids


def _ready(session: Session, prepare: bool, progress: Progress = lambda what, done, total: None) -> Session:
    """Logs what computes a session's steps, and prepares them, on the first rank for all; returns the session."""
    if session.communicator.rank == 0:
        _log.info("%s: %s", session.config.name, session.choice)
        if session.limits.checkpoints is not None:
            said = "%s: a prompt goes on from an earlier one where one of %d kept states stands"
            _log.info(said, session.config.name, session.limits.checkpoints)
        if prepare:
            lengths, config = (session.config.block_size - 1,), session.config
            session.prepare(Prepare(lengths, config.sampling, session.limits.shapes), progress)
    return session


def _prepare_rank(
    folder: Path, config: EngineConfig, rank: int, device: torch.device, accept: SlotAccept | None, kernels: Kernels
) -> Callable[[Communicator], Session]:
    """Reads a rank's files; returns a function that makes its session once the ranks are joined."""
    if config.backend == "torch":
        if device.type == "cuda":
            find_kernels(config, kernels, torch.cuda.get_device_capability(device))  # before weights are read
        weights = load_weights(folder, config, rank)
        return lambda communicator: open_torch_session(config, weights, device, communicator, accept, kernels)
    if kernels != "auto":
        raise SettingsError(f"--kernels {kernels}: this engine is TensorRT plans, which run what they were built with")
    if device.type != "cuda":
        raise EngineError(
            f"{folder}: TensorRT plans run on an NVIDIA GPU, and there is none; use build --backend torch"
        )
    engine = load_engine(check_file(folder, config, plan_file(rank)), config)
    return lambda communicator: TensorRTSession(config, engine, device, communicator)


def _sampling(params: object) -> SamplingParams:
    """Checks sampling parameters; None: greedy ones.

    Raises:
        RequestError: they are something else.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params: give SamplingParams, for all prompts or one each, not {type(params).__name__}")
    return params
