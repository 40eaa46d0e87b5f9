"""Replies of engines, whatever their ranks. Each of them runs this as a program, and rank 0 prints.

It imports no other file of the tests: every rank would import what that needs.
"""

import json
import sys
from typing import Any

from trtllm_dflash import LLM, SamplingParams

TOKENS = 24
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 4}


def replies(llm: LLM, prompts: list[list[int]]) -> list[list[list[list[int]]]]:
    """Token ids and accepted drafts of the replies to prompts, greedy and then sampled."""
    return [
        [[reply.token_ids, reply.accepted_per_step] for reply in llm.generate(prompts, params)]
        for params in (SamplingParams(max_tokens=TOKENS), SamplingParams(max_tokens=TOKENS, **SAMPLED))
    ]


if __name__ == "__main__":
    prompts, *engines = sys.argv[1:]  # each engine, and what it is to draft
    for engine, draft_tree in zip(engines[::2], engines[1::2], strict=True):
        with LLM.load(engine, "cpu", draft_tree=draft_tree) as llm:
            if llm.session.communicator.rank:
                llm.session.follow()
            else:
                print(json.dumps(replies(llm, json.loads(prompts))))
