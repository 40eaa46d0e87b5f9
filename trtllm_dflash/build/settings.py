"""Settings of `build`: the checkpoints, the precision, and the numbers of slots, ranks and tokens."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from trtllm_dflash.build.caches import CachePrecision
from trtllm_dflash.build.precision import DrafterPrecision, TargetPrecision
from trtllm_dflash.catalog import PairFacts, ServingLimits
from trtllm_dflash.engine.config import Backend
from trtllm_dflash.ops.draft_tree import TREE_SIZES

_BEYOND = 2**31  # numbers of rows and slots are 32-bit integers in kernels and plans

#: Numbers of slots, tokens and the like.
Count = Annotated[int, Field(gt=0, lt=_BEYOND)]
#: Tokens of a sequence: one of a prompt and one of its reply at least.
Length = Annotated[int, Field(ge=2, lt=_BEYOND)]
#: GB of memory: a byte at least, and no more than 64-bit integers count.
Gigabytes = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False, strict=False)]

#: Prompt and reply together, in tokens, where nothing else is said and the model takes as many.
DEFAULT_MAX_SEQ_LEN = 4096
#: Sequences at a time, likewise.
DEFAULT_MAX_BATCH = 8


def _tree_size(nodes: int) -> int:
    if nodes not in TREE_SIZES:
        raise PydanticCustomError("draft_tree", f"choose {', '.join(map(str, TREE_SIZES[:-1]))} or {TREE_SIZES[-1]}")
    return nodes


class BuildSettings(BaseModel):
    """The settings of a build. Each field but `facts` is a flag, or a key of `--set` and of a build configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1)]
    target: str  # a folder, or a Hugging Face name
    drafter: str | None = None  # likewise; None builds plain decoding alone
    backend: Backend | None = None  # default: tensorrt where it is here and compiles for the GPU, else torch
    precision: TargetPrecision | None = None  # default: a quantized checkpoint's, and bf16 (fp32 without a GPU)
    tp: Count = 1
    ep: bool = False  # ranks hold whole experts instead of a slice of each
    max_batch: Count | None = None  # default: the pair's on a GPU that is known, as many as fit; else 8
    max_seq_len: Length | None = None  # likewise; else 4096, or the model's own where it takes less
    chunk: Count = 512
    block_size: Count | None = None  # default: the drafter's
    draft_vocab: Annotated[int, Field(ge=2, lt=_BEYOND)] | None = None  # tokens that are drafted; default: all
    draft_window: Count | None = None  # tokens that the drafter sees; default: as its checkpoint says
    draft_text: str | None = None  # a file to count them in; default: the shipped pair's prompts, for it alone
    drafter_precision: DrafterPrecision | None = None  # of its matrices; default: its checkpoint's
    kv: CachePrecision = "auto"  # of caches; auto: as the target's checkpoint says, else the engine's type
    kv_memory: Gigabytes | None = None  # GB of caches a GPU; default: full slots
    page_size: Count | None = None  # tokens in a page of the caches; None: what the engine's kernels like
    chat_arguments: dict[str, Any] | None = None  # default: the catalog's for this target
    facts: Annotated[PairFacts | None, Field(exclude=True)] = None  # what the catalog says of these checkpoints
    limits: Annotated[ServingLimits | None, Field(exclude=True)] = None  # of a known pair, where nothing is asked for
    gpu: str | None = None  # a GPU's name, or a compute capability such as sm120; None: the GPU present
    # TensorRT's alone:
    sampling: bool = True  # False leaves sampling out of the plan
    optimization_level: Annotated[int, Field(ge=0, le=5)] = 3
    workspace: Count | None = None  # MiB of scratch that a kernel may take; None: all there is
    workers: Count = 1  # ranks compiled at a time
    draft_tree: Annotated[int, AfterValidator(_tree_size)] | None = None  # nodes of its trees of drafts; None: chains
    plugin: str | None = None  # libdflash_plugin.so: attention is that plugin; None: TensorRT's own layers


#: The settings that are TensorRT's alone, and their defaults, which another backend's must keep.
DEFAULTS_OF_TENSORRT: dict[str, Any] = {
    name: BuildSettings.model_fields[name].default
    for name in ("sampling", "optimization_level", "workspace", "workers", "draft_tree", "plugin")
}


def flag_of_tensorrt(settings: BuildSettings) -> str | None:
    """The first flag that gives one of these settings another value than its default; None: there is none."""
    for name, default in DEFAULTS_OF_TENSORRT.items():
        if getattr(settings, name) != default:
            return "--greedy" if name == "sampling" else f"--{name.replace('_', '-')}"
    return None
