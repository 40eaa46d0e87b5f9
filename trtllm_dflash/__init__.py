"""DFlash speculative decoding: two checkpoints in, the same text out several times sooner.

Example:
    from trtllm_dflash import LLM, SamplingParams

    with LLM.load("engines/tiny") as llm:
        chat = [{"role": "user", "content": "Tell a short story about a fox and a bridge in winter."}]
        (completion,) = llm.generate([chat], SamplingParams(max_tokens=128))
        print(completion.text, completion.acceptance_length)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["LLM", "Completion", "SamplingParams", "TextChunk", "__version__"]

if TYPE_CHECKING:
    from trtllm_dflash.llm import LLM, Completion, TextChunk
    from trtllm_dflash.runtime.request import SamplingParams


def __getattr__(name: str) -> Any:
    # Loaded on first use: `trtllm-dflash --help` should not wait for torch.
    if name in __all__:
        from trtllm_dflash import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'trtllm_dflash' has no attribute {name!r}")
