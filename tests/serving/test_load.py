"""Many clients at once against the real server: every text is its own, and no slot is lost."""

import asyncio
import random

import pytest

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.pairs.prompts import read_prompts
from trtllm_dflash.serving.client import TokenRequest, TritonClient

pytestmark = pytest.mark.slow

CLIENTS = 64
TEXTS = [text for kind in read_prompts(4).values() for text in kind]


@pytest.fixture(scope="module")
def alone(server):
    """The engine that is served, in this process."""
    with LLM.load(server.engine, "cpu") as llm:
        yield llm


def kinds_of_requests(llm):
    """Requests of all kinds, and which are abandoned after how many pieces."""
    choices = random.Random(64)
    for i in range(CLIENTS):
        sampled = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": i} if i % 3 == 0 else {}
        stop = {"stop": (" and", "zebra")} if i % 4 == 1 else {}
        params = SamplingParams(max_tokens=choices.choice([1, 5, 20, 48]), **sampled, **stop)
        text = TEXTS[i % len(TEXTS)]
        prompt = [{"role": "user", "content": text * choices.choice([1, 1, 4])}]
        leaves_after = choices.choice([1, 2]) if i % 5 == 4 and params.max_tokens > 20 else None
        yield TokenRequest(llm.encode(prompt), params, draft=i % 7 != 6), leaves_after


@pytest.mark.exhaustive(beside="tests/serving/test_gateway.py::test_sixteen_clients_at_once_each_get_their_own_reply")
def test_64_clients_at_once_each_get_their_own_text(server, alone):
    asked = list(kinds_of_requests(alone))
    server.wait_for_gauge("dflash_slots_in_use", 0)

    async def client(triton, request, leaves_after):
        text, pieces = "", 0
        stream = triton.stream(request)
        async for piece in stream:
            text += piece.text
            pieces += 1
            if pieces == leaves_after:
                await stream.aclose()
                return None
        return text

    async def all_of_them():
        triton = TritonClient(server.grpc_url)
        try:
            return await asyncio.gather(*(client(triton, *one) for one in asked))
        finally:
            await triton.close()

    texts = asyncio.run(all_of_them())
    assert 0 < sum(text is None for text in texts) < CLIENTS // 2
    pairs = [(its, text) for (its, _), text in zip(asked, texts, strict=True) if text is not None]
    for draft in (True, False):
        heard = [(its, text) for its, text in pairs if its.draft is draft]
        replies = alone.generate([its.token_ids for its, _ in heard], [its.params for its, _ in heard], draft)
        assert [text for _, text in heard] == [reply.text for reply in replies]
    server.wait_for_gauge("dflash_slots_in_use", 0)
    server.wait_for_gauge("dflash_requests_waiting", 0)


def test_eight_clients_share_their_steps(server, alone):
    """In-flight batching is real: eight replies take hardly more steps than one."""
    tokens = 60
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [TokenRequest(alone.encode(text), params, draft=False) for text in TEXTS[:8]]

    async def reply(triton, request):
        return [piece async for piece in triton.stream(request)]

    async def together():
        triton = TritonClient(server.grpc_url)
        try:
            return await asyncio.gather(*(reply(triton, request) for request in requests))
        finally:
            await triton.close()

    before = server.settled_metrics()
    asyncio.run(together())
    server.wait_for_increase(before, {"dflash_committed_tokens_total": 8 * tokens})
    after = server.settled_metrics()  # for they are published one after another
    steps = 'dflash_steps_total{kind="decode"}'
    assert tokens - 1 <= after[steps] - before[steps] < 2 * tokens
