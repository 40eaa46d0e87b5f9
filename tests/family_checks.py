"""Claims that hold for every family, on small random checkpoints: the same as transformers, drafted, and on ranks."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.near_ties import all_logits
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.build.planning import as_planned, open_checkpoints, plan_engine
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.build.weights import read_engine_tensors
from trtllm_dflash.ops.communicator import Communicator
from trtllm_dflash.session.torch_session import TorchSession

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=5)


def random_ids(*lengths: int, vocab: int = 128, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def assert_equals(path: Path, model: torch.nn.Module, prompts: int = 20, vocab: int = 128) -> LLM:
    """The logits of 200 rows within 1e-4 of transformers' model, and greedy text equal."""
    llm = LLM.from_pretrained(path, None, precision="fp32", device="cpu", max_batch=8, max_seq_len=256)
    (ids,) = random_ids(200, vocab=vocab)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert (all_logits(llm, ids) - expected).norm(dim=-1).div(expected.norm(dim=-1)).max() < 1e-4
    texts = random_ids(*(1 + 7 * i % 60 for i in range(prompts)), vocab=vocab, seed=1)
    completions = llm.generate(texts, SamplingParams(max_tokens=8, ignore_eos=True))
    assert_greedy(model, texts, [completion.token_ids for completion in completions])
    return llm


def assert_greedy(model: torch.nn.Module, prompts: list[list[int]], replies: list[list[int]]) -> None:
    """Each token is the argmax of transformers' model after those before it, which is what greedy text means."""
    whole = [torch.tensor(prompt + reply) for prompt, reply in zip(prompts, replies, strict=True)]
    with torch.inference_mode():  # causal: what a text is filled up with behind its end changes none of its rows
        logits = model(torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)).logits
    for prompt, reply, rows in zip(prompts, replies, logits, strict=True):
        assert reply == rows[len(prompt) - 1 :][: len(reply)].argmax(dim=-1).tolist()


def assert_drafting_changes_nothing(target: Path, drafter: Path, lengths=(3, 20, 40), **values: Any) -> None:
    """Drafted text equals plain text, greedy and sampled, in a batch; and drafts are accepted. A vocabulary of 16."""
    values = {"max_batch": 3, "max_seq_len": 160, **values}
    llm = LLM.from_pretrained(target, drafter, precision="fp32", device="cpu", **values)
    prompts = random_ids(*lengths, vocab=16)
    for params in (GREEDY, SAMPLED):
        drafted, plain = (llm.generate(prompts, params, draft=draft) for draft in (True, False))
        assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
        assert any(count for completion in drafted for count in completion.accepted_per_step)


class ThreadRank(Communicator):
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._shared = rank, size, barrier, shared

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._shared[self.rank] = x
        self._barrier.wait()
        gathered = [part.clone() for part in self._shared]
        self._barrier.wait()
        return gathered

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.all_gather(x)).sum(dim=0)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        # Of several lengths, while the others' is not known.
        return self.all_gather(x)[0]

    def close(self) -> None:
        pass


def on_ranks(target: Path, drafter: Path | None, tp: int, use: Callable[[LLM], Any], **values: Any) -> Any:
    """What `use` returns of an engine of `tp` ranks, on rank 0."""
    given: dict[str, Any] = {
        "name": "small",
        "target": str(target),
        "drafter": drafter and str(drafter),
        "precision": "fp32",
    }
    settings = BuildSettings.model_validate({**given, "tp": tp, "max_seq_len": 160, **values})
    pair = open_checkpoints(settings)
    config = plan_engine(pair, settings).config
    pair = as_planned(pair, config)
    barrier, shared = threading.Barrier(tp, timeout=60), [None] * tp
    sessions = [
        TorchSession(
            config,
            read_engine_tensors(pair, config, rank),
            torch.device("cpu"),
            ThreadRank(rank, tp, barrier, shared),
        )
        for rank in range(tp)
    ]
    followers = [threading.Thread(target=session.follow, daemon=True) for session in sessions[1:]]
    for follower in followers:
        follower.start()
    try:
        result = use(LLM(sessions[0], None))
        sessions[0].close()
    except BaseException:
        barrier.abort()
        raise
    for follower in followers:
        follower.join(60)
    return result


def assert_ranks_agree(target: Path, drafter: Path, *tps: int, **values: Any) -> None:
    """Ranks give the tokens, and the accepted drafts, of one."""
    prompts = random_ids(9, 27, vocab=16)

    def replies(llm: LLM) -> list[tuple[list[int], list[int]]]:
        return [(c.token_ids, c.accepted_per_step) for c in llm.generate(prompts, SamplingParams(max_tokens=16))]

    alone = on_ranks(target, drafter, 1, replies)
    for tp in tps:
        assert on_ranks(target, drafter, tp, replies, **values) == alone
