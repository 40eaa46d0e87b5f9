"""`config.json` of an engine directory."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from trtllm_dflash.models.decoder import DecoderConfig
from trtllm_dflash.models.drafter import DrafterConfig
from trtllm_dflash.models.weights import Precision
from trtllm_dflash.ops.transcoded import Transcoded

if TYPE_CHECKING:  # seconds of a process that computes nothing
    import torch

#: Called with what is being done, how much of it is done, and of how much.
Progress = Callable[[str, int, int], None]

SCHEMA_VERSION: Literal[1] = 1

Backend = Literal["torch", "tensorrt"]


class PlanSummary(BaseModel):
    """Facts of a rank's TensorRT plan that are known without loading it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: PositiveInt  # of the network that was compiled
    weights: PositiveInt  # tensors
    bytes: PositiveInt
    seconds: float  # to compile
    transcoded: Transcoded | None = None  # what became of MXFP4 blocks that were made NVFP4; None: none were


class EngineConfig(BaseModel):
    """An engine's models, limits and precisions, and the checkpoints that it was made from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str
    backend: Backend = "torch"
    precision: Precision
    tp: PositiveInt
    max_batch: PositiveInt  # slots
    max_seq_len: PositiveInt  # prompt and reply together, tokens
    chunk: PositiveInt  # prompt tokens in one prefill step
    block_size: PositiveInt  # bonus token and drafts: 1 + K
    target: DecoderConfig
    drafter: DrafterConfig | None
    draft_tree: NonNegativeInt = 0  # nodes of the trees that a session may draft; 0: chains alone
    plan_tree: NonNegativeInt = 0  # nodes of the trees that TensorRT plans are made for; 0: for chains alone
    kv: Literal["fp8"] | None = None  # of all caches; None: `precision`
    page_size: PositiveInt | None = None  # tokens in a page of the caches; None: what the session's kernels like
    kv_memory: PositiveInt | None = None  # bytes of caches on each GPU; None: all slots at their full length
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    chat_arguments: dict[str, Any] = {}  # given to the chat template
    sampling: bool = True  # False: TensorRT plans that are greedy only
    gpu: str | None = None  # what a TensorRT plan was compiled for, such as "sm120"
    optimization_level: int | None = None  # TensorRT's
    workspace: PositiveInt | None = None  # MiB of scratch that TensorRT may give a kernel
    plugin: str | None = None  # sha256 of the plugin library whose attention the plans run; None: TensorRT's own
    plans: tuple[PlanSummary, ...] = ()  # TensorRT's, by rank
    versions: dict[str, str] = {}  # of the libraries that built it
    sources: dict[str, str] = {}  # checkpoint file, or the draft_text that tokens were counted in -> sha256
    files: dict[str, str] = {}  # engine file -> sha256

    @property
    def transcoded(self) -> Transcoded | None:
        """Counts of all ranks' MXFP4 blocks that were made NVFP4; None: none were."""
        each = [plan.transcoded for plan in self.plans if plan.transcoded is not None]
        return sum(each, Transcoded()) if each else None

    @property
    def has_sink_keys(self) -> bool:
        """Whether the target's sinks are keys in its caches; see `ops.tensorrt_attention`."""
        return self.target.attention_sinks and self.backend == "tensorrt" and self.plugin is None

    @property
    def head_sizes(self) -> list[int]:
        """Sizes of heads that its models' caches have."""
        models = [self.target] if self.drafter is None else [self.target, self.drafter]
        return sorted({size for model in models for size in model.head_sizes})

    @property
    def rotated(self) -> list[tuple[int, int]]:
        """Numbers of a head that RoPE rotates, and the head's size, of each of its models' rotary embeddings."""
        models = [self.target] if self.drafter is None else [self.target, self.drafter]
        return [(rope.rotary_size or size, size) for model in models for rope, size in model.ropes.values()]

    @property
    def dtype(self) -> "torch.dtype":
        """The type of weights, activations and, unless `kv` gives another, caches."""
        from trtllm_dflash.engine.dtypes import DTYPES

        return DTYPES[self.precision]

    @property
    def cache_dtype(self) -> "torch.dtype":
        """The type of the caches."""
        from trtllm_dflash.ops.fp8 import FP8

        return FP8 if self.kv == "fp8" else self.dtype

    @property
    def may_share_rows(self) -> bool:
        """Whether slots of captured steps may share rows by their drafts' chances: on one rank, each row's apart.

        A state is of one row after the other, and so are drafts of DFlash 2 and DSpark.
        """
        drafts_apart = self.drafter is not None and not self.drafter.is_second
        return drafts_apart and self.target.delta is None and self.tp == 1

    @property
    def slot_rows(self) -> int:
        """The most rows of a decoding slot in one step: the bonus token and drafts."""
        return max(self.block_size, self.draft_tree + 1, self.plan_tree + 1)

    @property
    def cache_length(self) -> int:
        """Rows of a slot's K/V caches (S).

        The last committed row is max_seq_len - 1. A step that starts there writes up to a block of rows, or a tree's,
        and the drafter a block more after those that were accepted, which are no more than a block.
        """
        return self.max_seq_len + max(2 * self.block_size, self.slot_rows)
