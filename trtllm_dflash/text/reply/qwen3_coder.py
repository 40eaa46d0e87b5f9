"""Qwen3-Coder's calls: `<function=f>` with a `<parameter=p>` for each argument, between `<tool_call>` tags.

<tool_call>
<function=write>
<parameter=path>
notes.txt
</parameter>
</function>
</tool_call>
"""

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
