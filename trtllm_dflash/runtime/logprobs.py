"""Log-probabilities of sequences: what a step's call asks for, and what its outcome tells."""

from collections.abc import Iterable

from trtllm_dflash.runtime.request import Sequence, TokenLogprobs
from trtllm_dflash.runtime.slots import Stay
from trtllm_dflash.session.report import Report


def next_ids(stay: Stay, count: int) -> list[int]:
    """Lists the tokens whose log-probabilities the next `count` rows of a prompt give; none unless they are wanted."""
    sequence, first = stay.sequence, stay.launched
    return sequence.prompt_ids[first + 1 : first + 1 + count] if sequence.awaits_prompt_logprobs else []


def note_logprobs(report: Report, sequences: Iterable[Sequence]) -> None:
    """Notes what a step, of these sequences in their order, tells of their prompts and of the tokens it gave them."""
    for place, sequence in enumerate(sequences):
        params = sequence.params
        if report.prompts is not None and params.prompt_logprobs is not None:
            rows = [TokenLogprobs(*row) for row in report.of_prompt(place, params.prompt_logprobs)]
            first = report.starts[place]  # a prompt that was put back is read again from its beginning
            sequence.prompt_logprobs[first : first + len(rows)] = rows
        new = len(sequence.token_ids) - len(sequence.logprobs)
        if report.choices is not None and params.logprobs is not None and new:
            sequence.logprobs += [TokenLogprobs(*row) for row in report.of_choices(place, new, params.logprobs)]
