"""Qwen3-Coder's calls: `<function=f>` with a `<parameter=p>` for each argument, between `<tool_call>` tags.

<tool_call>
<function=write>
<parameter=path>
notes.txt
</parameter>
</function>
</tool_call>

Qwen3.5 and later think between `<think>`, which the prompt ends with, and `</think>`. At times they call a function and
leave that out: the beginning of a call by an offered name ends the thinking too.
"""

from collections.abc import Iterable

from trtllm_dflash.text.reply.qwen3 import CLOSING, OPENING
from trtllm_dflash.text.reply.xml_call import Tags

TAGS = Tags(
    opening=OPENING,
    closing=CLOSING,
    function="<function=",
    function_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    name_end=">",
    edge="\n",
)


def beginnings(functions: Iterable[str]) -> tuple[str, ...]:
    """Lists what calls of these functions begin with."""
    return tuple(f"{OPENING}\n{TAGS.function}{name}{TAGS.name_end}" for name in functions)
