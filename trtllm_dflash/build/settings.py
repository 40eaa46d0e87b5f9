"""Settings of `build`: the checkpoints, the precision, and the numbers of slots, ranks and tokens."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from trtllm_dflash.build.caches import CachePrecision
from trtllm_dflash.build.precision import DrafterPrecision, TargetPrecision
from trtllm_dflash.catalog import PairFacts
from trtllm_dflash.engine.config import Backend

#: Prompt and reply together, in tokens, where nothing else is said and the model takes as many.
DEFAULT_MAX_SEQ_LEN = 4096


class BuildSettings(BaseModel):
    """The settings of a build. Each field but `facts` is a flag, or a key of `--set` and of a build configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1)]
    target: str  # a folder, or a Hugging Face name
    drafter: str | None = None  # likewise; None builds plain decoding alone
    backend: Backend = "torch"
    precision: TargetPrecision | None = None  # default: a quantized checkpoint's, and bf16 (fp32 without a GPU)
    tp: PositiveInt = 1
    ep: bool = False  # ranks hold whole experts instead of a slice of each
    max_batch: PositiveInt = 8
    max_seq_len: PositiveInt | None = None  # default: 4096, or the model's own where it takes less
    chunk: PositiveInt = 512
    block_size: PositiveInt | None = None  # default: the drafter's
    draft_vocab: Annotated[int, Field(ge=2)] | None = None  # tokens that are drafted; default: all
    draft_text: str | None = None  # a file to count them in; default: the shipped pair's prompts, for it alone
    drafter_precision: DrafterPrecision | None = None  # of its matrices; default: its checkpoint's
    kv: CachePrecision = "auto"  # of caches; auto: as the target's checkpoint says, else the engine's type
    kv_memory: Annotated[float, Field(gt=0, strict=False)] | None = None  # GB of caches a GPU; default: full slots
    page_size: PositiveInt | None = None  # tokens in a page of the caches; None: what the engine's kernels like
    chat_arguments: dict[str, Any] | None = None  # default: the catalog's for this target
    facts: Annotated[PairFacts | None, Field(exclude=True)] = None  # what the catalog says of these checkpoints
    # TensorRT's alone:
    gpu: str | None = None  # a GPU's name, or a compute capability such as sm120; None: the GPU present
    sampling: bool = True  # False leaves sampling out of the plan
    optimization_level: Annotated[int, Field(ge=0, le=5)] = 3
    workspace: PositiveInt | None = None  # MiB of scratch that a kernel may take; None: all there is
    workers: PositiveInt = 1  # ranks compiled at a time
    plugin: str | None = None  # libdflash_plugin.so: attention is that plugin; None: TensorRT's own layers


#: The settings that are TensorRT's alone, and their defaults, which another backend's must keep.
DEFAULTS_OF_TENSORRT: dict[str, Any] = {
    name: BuildSettings.model_fields[name].default
    for name in ("gpu", "sampling", "optimization_level", "workspace", "workers", "plugin")
}
