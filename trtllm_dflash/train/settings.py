"""Settings of `train`: the target, its prompts, the drafter's shape, and the recipe."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from trtllm_dflash.models.decoder import Layers
from trtllm_dflash.models.drafter import LARGEST_BLOCK
from trtllm_dflash.runtime.request import MaxTokens, Temperature

Share = Annotated[float, Field(gt=0, lt=1)]

#: Of a drafter that is trained from nothing.
DEFAULT_LAYERS, DEFAULT_BLOCK = 5, 16

#: Peak learning rates: from nothing (the paper's), and from a drafter that is there.
RATE, RATE_FROM = 6e-4, 1e-4


class TrainSettings(BaseModel):
    """The settings of a training. Each field is a flag; `start` is `--from`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str  # a folder, or a Hugging Face name
    data: Path  # prompts, or token ids of prompts and replies: JSON lines
    start: Annotated[str | None, Field(alias="from")] = None  # a drafter to begin with; None: from nothing
    # The drafter's shape, which one that is there has already.
    layers: Layers | None = None  # default: 5
    head: Literal["dflash", "dflash2"] | None = None  # default: dflash
    block: Annotated[int, Field(ge=2, le=LARGEST_BLOCK)] | None = None  # rows: the anchor and its drafts; default: 16
    taps: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None  # default: even, z-lab's rule
    mask_token: NonNegativeInt | None = None  # default: a row of the embedding that no text uses
    # Prompts and replies.
    domain_key: str = "domain"  # the field of a record that names its domain
    held_out: Share = 1 / 32  # of the prompts
    evaluate_on: PositiveInt = 256  # held-out prompts
    general: Path | None = None  # other prompts, against forgetting
    general_share: Share = 0.15  # of what is trained on
    thinking: Annotated[float, Field(ge=0, le=1)] | None = None  # of the prompts; None: as the target's template does
    temperature: Temperature | None = None  # None: the target's own generation_config.json
    max_seq_len: Annotated[int, Field(ge=16)] | None = None  # prompt and reply; default: 4096, or what the target takes
    max_tokens: MaxTokens = 2048  # of a reply
    max_batch: Annotated[int, Field(gt=0, lt=2**31)] = 32  # replies at a time
    # The recipe.
    objective: Literal["ce", "kd", "greedy"] = "ce"  # see `train.loss` and `train.anchors`
    weighting: Literal["dpace", "exponential"] = "dpace"
    optimizer: Literal["adamw", "muon"] = "adamw"
    pack: Annotated[int, Field(ge=16)] = 8192  # tokens that go through the drafter together
    packs: Annotated[int, Field(gt=0, le=65_536)] = 1  # of a step
    anchors: PositiveInt = 512  # blocks of a pack
    rate: Annotated[float, Field(gt=0, le=1)] | None = None  # default: 6e-4, and 1e-4 with --from
    epochs: PositiveInt = 6
    steps: PositiveInt | None = None  # instead of epochs
    hours: Annotated[float, Field(gt=0, le=1e6)] | None = None  # of training, at most
    evaluate_every: PositiveInt | None = None  # steps; default: a twentieth of all
    save_every: PositiveInt = 500  # steps
    patience: PositiveInt = 5  # evaluations without a better one, after which training ends
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    attention: Literal["auto", "masked", "flex"] = "auto"  # see `train.mask`; auto: flex on a GPU
    device: str = "auto"
    ranks: PositiveInt = 1  # processes, a GPU each; they divide the packs of a step

    @property
    def peak_rate(self) -> float:
        """The learning rate after the warm-up."""
        return self.rate or (RATE if self.start is None else RATE_FROM)
