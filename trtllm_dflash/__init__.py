"""DFlash speculative decoding: two checkpoints in, the same text out several times sooner.

Example:
    from trtllm_dflash import LLM, SamplingParams

    with LLM.load("engines/tiny") as llm:
        chat = [{"role": "user", "content": "Tell a short story about a fox and a bridge in winter."}]
        (completion,) = llm.generate([chat], SamplingParams(max_tokens=128))
        print(completion.text, completion.acceptance_length)
"""

from importlib import import_module

TYPE_CHECKING = False  # type checkers know it by its name; Ctrl-C is one line only once `typing`, say, is imported

__version__ = "0.1.0"

#: Where each public name is: loaded on first use, since `trtllm-dflash --help` should not wait for torch.
_HOMES = {
    "LLM": "trtllm_dflash.llm",
    "Completion": "trtllm_dflash.llm",
    "SamplingParams": "trtllm_dflash.llm",
    "Structured": "trtllm_dflash.runtime.structured",
    "TextChunk": "trtllm_dflash.llm",
    "AutoModel": "trtllm_dflash.model_card",
    "AutoModelForCausalLM": "trtllm_dflash.model_card",
    "AutoTokenizer": "transformers",  # with the two before it, all that a model card imports
}

__all__ = [
    "LLM",
    "Completion",
    "SamplingParams",
    "Structured",
    "TextChunk",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "__version__",
]

if TYPE_CHECKING:
    from transformers import AutoTokenizer

    from trtllm_dflash.llm import LLM, Completion, TextChunk
    from trtllm_dflash.model_card import AutoModel, AutoModelForCausalLM
    from trtllm_dflash.runtime.request import SamplingParams
    from trtllm_dflash.runtime.structured import Structured


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trtllm_dflash' has no attribute {name!r}")
