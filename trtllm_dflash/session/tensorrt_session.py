"""The TensorRT session: one rank's plan, its caches bound in place, each decode shape captured into a CUDA graph."""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trtllm_dflash.cost.states import checkpoint_count
from trtllm_dflash.engine.config import EngineConfig
from trtllm_dflash.engine.directory import PLUGIN_FILE, check_file
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.communicator import Communicator, Solo, TorchDistributed
from trtllm_dflash.ops.tensorrt_attention import PRESENT, write_sink_key
from trtllm_dflash.ops.tensorrt_delta_net import STATE_LENGTH
from trtllm_dflash.ops.tensorrt_draft_tree import IS_TREE, PATH
from trtllm_dflash.ops.tensorrt_ops import load_tensorrt
from trtllm_dflash.ops.tensorrt_plugin import load_plugin
from trtllm_dflash.ops.tensorrt_tree_rows import PARENTS
from trtllm_dflash.session.calls import CopyStates, Place
from trtllm_dflash.session.choice import Choice, precision_of
from trtllm_dflash.session.limits import StepLimits
from trtllm_dflash.session.plan_io import DECODE, IO, PREFILL, check_engine
from trtllm_dflash.session.plan_paths import PathOutcome, PlanPaths
from trtllm_dflash.session.session import Session
from trtllm_dflash.session.states import PlanStates
from trtllm_dflash.step import Drafting, StepInputs, StepOutputs

Tensor = torch.Tensor
Shapes = dict[str, tuple[int, ...]]


class TensorRTSession(Session):
    """A session that runs steps of a deserialized TensorRT engine.

    Args:
        engine: an ICudaEngine, from `load_engine`.
        communicator: the other ranks, over NCCL.

    Raises:
        EngineError: the plan is not this configuration's, or does not update its caches in place.
    """

    def __init__(
        self, config: EngineConfig, engine: Any, device: torch.device, communicator: Communicator | None = None
    ) -> None:
        self._paths: PlanPaths | None = None
        super().__init__(config, device, communicator or Solo())
        if self._paths is not None:
            self._outcome_of = PathOutcome
        for name, cache in self.caches.items():
            if config.has_sink_keys and name.startswith("model.") and name.endswith("key"):
                write_sink_key(cache)
        self.states = PlanStates(config, device)
        self.io = check_engine(engine, config)
        self._engine = engine
        largest = max(config.chunk, config.max_batch * config.slot_rows)
        self._buffers = {
            name: torch.zeros(largest, dtype=binding.dtype, device=device)
            for name, binding in (self.io.inputs | self.io.outputs).items()
            if name.removesuffix(PRESENT) not in self._updated
        }
        sizes = [engine.get_device_memory_size_for_profile_v2(profile) for profile in (PREFILL, DECODE)]
        self._scratch = torch.empty(max(*sizes, 1), dtype=torch.uint8, device=device)  # one: steps never overlap
        self._own_stream = None
        self._pool: Any = None
        if device.type == "cuda":
            self._own_stream = torch.cuda.Stream(device)
            self._own_stream.wait_stream(torch.cuda.current_stream(device))  # the zeros above
            self._pool = torch.cuda.graph_pool_handle()  # one for all: they never run at the same time
        self._communicator = nccl_capsule(self.communicator) if config.tp > 1 else None
        self._prefill: Any = None
        self._decode: dict[Any, tuple[Any, Any]] = {}  # first slot and shapes -> context, its graph

    @property
    def choice(self) -> Choice:
        built = self.config
        attention = "TensorRT" if built.plugin is None else "our plugin"
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        experts = "TensorRT" if built.target.moe is not None else "none"
        return Choice("tensorrt", device, precision_of(built), attention, "TensorRT", experts, "as the plan was built")

    @property
    def limits(self) -> StepLimits:
        # Rows of K/V caches alone do not go on: a state has to stand behind them.
        return replace(super().limits, checkpoints=checkpoint_count(self.config) if self.states.tensors else None)

    @torch.inference_mode()
    def _place(self, call: Place) -> None:
        with self._stream():
            self.states.place(call.slot, call.position, call.beside)

    @torch.inference_mode()
    def _copy_states(self, call: CopyStates) -> None:
        with self._stream():
            self.states.copy(call.source, call.target)

    @property
    def _updated(self) -> dict[str, Tensor]:
        """Tensors that the plan updates: [slots, ...] by name."""
        return self.caches | self.states.tensors

    def _make_caches(self, shapes: dict[str, tuple[int, int, int, int]]) -> dict[str, Tensor]:
        config = self.config
        if not config.draft_tree:  # the accepted rows of chains lie where they belong
            return super()._make_caches(shapes)
        first, most = self._cache_rows("model.", 0), config.block_size
        self._paths = PlanPaths(shapes, config.cache_dtype, self.device, first, most)
        return self._paths.caches

    def _free(self) -> None:
        self._paths = None
        self.states.tensors = self.states.made = {}
        self._decode.clear()
        self._prefill = self._engine = self._communicator = None
        self._buffers = {}
        self._scratch = torch.empty(0)

    def _run(self, inputs: StepInputs[Tensor], drafting: Drafting, first_slot: int) -> StepOutputs[Tensor]:
        given = bound_inputs(self.config, self.io, inputs, drafting)
        if STATE_LENGTH in self.io.inputs:
            given[STATE_LENGTH] = self.states.lengths[first_slot : first_slot + len(inputs.start)]
        shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
        drafted = shapes["block_offsets"][1] if "block_offsets" in shapes else 1
        for name, tensor in given.items():
            self._view(name, shapes[name]).copy_(tensor)
        self._enqueue(first_slot, shapes)
        self.states.advance(first_slot, inputs.start, inputs.row_count)
        slots = shapes["start"]
        nodes, width = self.config.plan_tree, drafted if drafting is Drafting.BLOCK else 1
        if inputs.tree:
            width = nodes + 1
        # Without a tree the chain comes first, and what follows it is not for the next step.
        made = ("next_tokens", "next_parents") if nodes else ("next_tokens",)
        rows = [self._view(name, (*slots, nodes + 1 if nodes else drafted))[:, :width] for name in made]
        return StepOutputs(  # copies: the next step writes over the buffers
            self._view("target_ids", shapes["logit_rows"]).clone(),
            self._view("accepted", slots).clone(),
            self._view("next_start", slots).clone(),
            rows[0].clone(),
            rows[1].clone() if nodes else None,
        )

    def _for_host(self, inputs: StepInputs[Tensor], out: StepOutputs[Tensor]) -> Tensor:
        if self._paths is None:
            return super()._for_host(inputs, out)
        path, parents = (self._view(name, tuple(inputs.logit_rows.shape)) for name in (PATH, PARENTS))
        return torch.cat([out.accepted[:, None], out.target_ids, path, parents], dim=1)

    def _cache_rows(self, name: str, tokens: int) -> int:
        return tokens + 1 if self.config.has_sink_keys and name.startswith("model.") else tokens

    def _stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._own_stream) if self._own_stream else nullcontext()

    def _enqueue(self, first_slot: int, shapes: Shapes) -> None:
        # A prompt's pieces change their length and slot with every call: no graph. One of one token in the first slot
        # has a decoding step's shapes, and its graph.
        if first_slot or shapes["logit_rows"] != shapes["token_ids"]:
            self._prefill = self._prefill or self._context(PREFILL)
            self._bind(self._prefill, first_slot, shapes)
            self._execute(self._prefill, first_slot, shapes)
            return
        key = (first_slot, *sorted(shapes.items()))
        if key in self._decode:
            context, graph = self._decode[key]
            self._execute(context, first_slot, shapes) if graph is None else graph.replay()
            return
        # A context of its own: a graph is lost once its context takes another shape or address.
        context = self._context(DECODE)
        self._bind(context, first_slot, shapes)
        self._execute(context, first_slot, shapes)
        self._decode[key] = (context, self._capture(context, first_slot, shapes))

    def _context(self, profile: int) -> Any:
        context = self._engine.create_execution_context(load_tensorrt().ExecutionContextAllocationStrategy.USER_MANAGED)
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        if self._communicator is not None:
            context.set_communicator(self._communicator)  # returns once all ranks are here
        if not context.set_optimization_profile_async(profile, self._handle()):
            raise EngineError(f"TensorRT cannot switch to optimization profile {profile}; build the engine again")
        return context

    def _bind(self, context: Any, first_slot: int, shapes: Shapes) -> None:
        slots = shapes["start"]
        for name, buffer in self._buffers.items():
            context.set_tensor_address(name, buffer.data_ptr())
        for name, cache in self._updated.items():
            # The cache's first row is the call's first slot.
            shapes = shapes | {name: (*slots, *cache.shape[1:])}
            context.set_tensor_address(name, cache[first_slot].data_ptr())
            made = self.states.made.get(name, cache)
            context.set_tensor_address(name + PRESENT, made[first_slot].data_ptr())
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise EngineError(f"the engine takes no {name} of shape {shape}; build it with larger limits")

    def _execute(self, context: Any, first_slot: int, shapes: Shapes) -> None:
        if not context.execute_async_v3(self._handle()):
            raise EngineError("TensorRT could not run the step; its own lines above say why")
        self.states.keep(first_slot, *shapes["start"])
        if self._paths is not None and shapes["logit_rows"][1] > 1:
            path = self._view(PATH, shapes["logit_rows"])[:, : self.config.block_size]
            self._paths.move(first_slot, self._view("start", shapes["start"]), path)

    def _capture(self, context: Any, first_slot: int, shapes: Shapes) -> Any:
        """Captures the step as a CUDA graph; None without CUDA. Capturing runs nothing."""
        if self._own_stream is None:
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._own_stream, capture_error_mode="thread_local"):
            self._execute(context, first_slot, shapes)
        return graph

    def _handle(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self._own_stream else 0

    def _view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel()
        return self._buffers[name][:size].view(shape)


def load_engine(path: Path, config: EngineConfig) -> Any:
    """Loads a plan as an ICudaEngine on the current GPU. If it runs our plugin, the library beside it is loaded first.

    Raises:
        EngineError: another TensorRT compiled it, this one does not take it, or the plugin's library changed.
    """
    trt = load_tensorrt()
    check_version(config, trt.__name__, trt.__version__)
    if config.plugin is not None:
        load_plugin(check_file(path.parent, config, PLUGIN_FILE))
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise EngineError(f"{path}: TensorRT {trt.__version__} cannot load this plan on this GPU; build it here again")
    return engine


def check_version(config: EngineConfig, name: str, version: str) -> None:
    """Checks the TensorRT version of a plan, which runs only in the one that compiled it.

    Raises:
        EngineError: names both.
    """
    built = {known: config.versions[known] for known in ("tensorrt", "tensorrt_rtx") if known in config.versions}
    if built != {name: version}:
        compiled = " ".join(f"{known} {its}" for known, its in built.items())
        raise EngineError(f"{config.name}: compiled by {compiled}, but {name} {version} is installed; build it again")


def bound_inputs(config: EngineConfig, io: IO, inputs: StepInputs[Tensor], drafting: Drafting) -> dict[str, Tensor]:
    """Makes a step's input tensors, by name, where `inputs` lie: the host waits for no copy.

    Not drafting is drafting the least: one graph, so one set of weights.

    Raises:
        EngineError: the engine was built greedy, and the step is to sample.
    """
    (slots, rows), device = inputs.logit_rows.shape, inputs.logit_rows.device
    given = {name: getattr(inputs, name) for name in ("token_ids", "start", "row_count", "logit_rows")}
    if "block_offsets" in io.inputs:
        block = inputs.block_offsets.shape[1] if drafting is Drafting.BLOCK else 2
        given["block_offsets"] = torch.arange(block, dtype=torch.int32, device=device)[None]
    if config.plan_tree:
        chain = torch.arange(-1, rows - 1, dtype=torch.int32, device=device).expand(slots, -1)
        given[PARENTS] = chain if inputs.parents is None else inputs.parents
        given[IS_TREE] = torch.full((1,), int(inputs.tree), dtype=torch.int32, device=device)
    sampling = inputs.sampling
    if "uniform" not in io.inputs:
        if sampling is not None and bool((sampling.temperature > 0).any()):
            raise EngineError("this engine was built greedy and cannot sample; build it again with --sampling")
        return given
    if sampling is not None:
        return given | {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "uniform")}
    nothing = torch.zeros(slots, device=device)  # a temperature of 0 is greedy
    return given | {
        "temperature": nothing,
        "top_k": nothing.int(),
        "top_p": nothing + 1,
        "uniform": torch.zeros(slots, rows, device=device),
    }


def nccl_capsule(communicator: Communicator) -> Any:
    """Wraps torch's NCCL communicator in the capsule that TensorRT takes.

    Raises:
        EngineError: the ranks are not joined over NCCL.
    """
    backend: Any = None
    if isinstance(communicator, TorchDistributed):
        communicator.all_reduce(torch.zeros(1, device="cuda"))  # torch makes NCCL's communicator at its first use
        backend = communicator.group._get_backend(torch.device("cuda"))
    if not hasattr(backend, "_comm_ptr"):
        raise EngineError("tensor parallelism in TensorRT needs NCCL through torch.distributed; use torch 2.7 or later")
    return capsule(backend._comm_ptr())


def capsule(address: int) -> Any:
    """Makes a PyCapsule of an address, without a name."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, None, None)
