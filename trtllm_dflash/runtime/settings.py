"""Settings by which a service shares its engine among requests: flags, or keys of a deployed model's configuration."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from trtllm_dflash.runtime.draft_length import DraftLengthChoice
from trtllm_dflash.runtime.prefill_budget import PrefillTokensChoice


class ServiceSettings(BaseModel):
    """Settings by which a service shares the engine among its requests.

    Attributes:
        prefill_tokens: of prompts, that ride in a step beside running replies; "auto": as many as `itl_slack` allows.
        itl_slack: by how much prompts may lengthen the time between a running reply's tokens, as a share of it.
        prefill_share: of the steps that are chunks of prompts, while replies are running, where an engine does not mix
            them; 1: prompts first.
        max_queue: requests that may wait for a slot.
        draft: False never drafts.
        draft_length: tokens to draft a step; "auto": the best number at each load.
        harvest: folder that sampled replies are written to, as token ids; "": none are. See `runtime.harvest`.
        harvest_share: of the replies.
        harvest_mb: most that is written, in MB.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill_tokens: PrefillTokensChoice = "auto"
    itl_slack: Annotated[float, Field(ge=0)] = 1.0
    prefill_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    max_queue: NonNegativeInt = 256
    draft: bool = True
    draft_length: DraftLengthChoice = "auto"
    harvest: str = ""
    harvest_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    harvest_mb: PositiveInt = 1000
