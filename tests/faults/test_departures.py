"""Clients that leave where Triton does not tell, and one that would not be watched: no slot is theirs for long."""

import json
import os
import urllib.request

import pytest

from tests.faults.streams import LONG, post
from tests.serving.runs import WHOLE_BLOCK, serve
from tests.waiting import PATIENCE, wait_until
from trtllm_dflash.serving.request_key import RequestKeys

RUNNING = "dflash_requests_running "
EXPIRED = 'dflash_requests_total{outcome="expired"} '


@pytest.mark.slow
def test_clients_that_left_hold_their_slots_no_longer_than_the_servers_deadline(triton, served_engine):
    with serve("--engine", served_engine, *WHOLE_BLOCK, "--deadline-seconds", 2, "--json") as run:
        at = json.loads(run.line())
        body = {"text_input": "Count.", **LONG, "max_tokens": 1900}
        left = [post(at["http"] + "/v2/models/tensorrt_llm_bls/generate", body) for _ in range(32)]
        wait_until(lambda: metric(at, RUNNING) == 8 or metric(at, EXPIRED), "they have all slots")
        for connection in left:
            connection.close()
        wait_until(lambda: metric(at, EXPIRED) == 32, "they have lost them")
        short = post(at["http"] + "/v2/models/tensorrt_llm_bls/generate", {"text_input": "Hi.", "max_tokens": 1})
        assert short.getresponse().status == 200

        # Nor does a client get more than that by asking, or by the key that would hide its departure.
        longer = post(at["http"] + "/v2/models/ensemble/generate", {**body, "deadline_ms": 3_600_000})
        assert "deadline: it passed" in longer.getresponse().read().decode()
        ids = {"input_ids": [5], "input_lengths": 1, "request_output_len": 9, "request_key": 2**40 + 1}
        forged = post(at["http"] + "/v2/models/tensorrt_llm/generate", ids)
        assert "request_key: " in forged.getresponse().read().decode()


def metric(at: dict[str, str], name: str) -> float:
    with urllib.request.urlopen(at["metrics"], timeout=PATIENCE) as page:
        lines = page.read().decode().splitlines()
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


def test_a_key_is_known_to_all_models_of_one_triton_and_made_by_nobody_else(monkeypatch):
    made = [RequestKeys().make() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(0 < key < 2**63 and RequestKeys().knows(key) for key in made)
    assert not any(RequestKeys().knows(key + wrong) for key in made for wrong in (1, -1, 2**32))
    assert not any(RequestKeys().knows(key) for key in (0, -1, 1, 2**62, -made[0]))
    monkeypatch.setattr("os.getppid", os.getpid)
    assert not any(RequestKeys().knows(key) for key in made)
