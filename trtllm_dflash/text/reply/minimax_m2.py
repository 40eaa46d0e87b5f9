"""MiniMax-M2's calls: `<invoke name="f">` with a `<parameter name="p">` for each argument, all between two tags.

    <minimax:tool_call>
    <invoke name="write">
    <parameter name="path">notes.txt</parameter>
    </invoke>
    </minimax:tool_call>

The chat template of MiniMaxAI/MiniMax-M2 (and M2.1, M2.5, M2.7) writes them so, a text's newlines included. It thinks
between `<think>`, which the prompt ends with, and `</think>`; a call may end the thinking too.
"""

from trtllm_dflash.text.reply.xml_call import Tags

TAGS = Tags(
    opening="<minimax:tool_call>",
    closing="</minimax:tool_call>",
    function='<invoke name="',
    function_end="</invoke>",
    parameter='<parameter name="',
    parameter_end="</parameter>",
    name_end='">',
    edge="",
)
