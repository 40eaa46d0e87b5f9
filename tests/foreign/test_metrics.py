"""Acceptance in one form, from text in the form in which each server reports it."""

import json

import pytest

from trtllm_dflash.sweep.runtime_metrics import Drafts, drafts_of_reply, parse_metrics

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="qwen3-8b"} 120.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="qwen3-8b"} 1800.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="qwen3-8b"} 606.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="qwen3-8b",position="0"} 110.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="qwen3-8b",position="1"} 90.0
vllm:num_requests_running{engine="0",model_name="qwen3-8b"} 1.0
"""

SGLANG = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="qwen3-8b",tp_rank="0"} 5.37
sglang:spec_accept_rate{engine_type="unified",model_name="qwen3-8b",tp_rank="0"} 0.29
"""

OURS = """\
dflash_drafted_tokens_total{position="1"} 40
dflash_drafted_tokens_total{position="2"} 38
dflash_accepted_tokens_total{position="1"} 30
dflash_accepted_tokens_total{position="2"} 12
dflash_accepted_nodes_total{model="m",rank="1",version="1"} 36
dflash_accepted_nodes_total{model="m",rank="3",version="1"} 6
dflash_acceptance_length 2.05
"""

TENSORRT_LLM = [
    {"iter": 7, "iterLatencyMS": 6.1, "specDecodingStats": {"numDraftTokens": 0, "numAcceptedTokens": 0}},
    {
        "iter": 8,
        "specDecodingStats": {
            "numDraftTokens": 18,
            "numAcceptedTokens": 9,
            "numRequestsWithDraftTokens": 2,
            "acceptanceLength": 5.5,
        },
    },
    {
        "iter": 9,
        "specDecodingStats": {"numDraftTokens": 9, "numAcceptedTokens": 3, "numRequestsWithDraftTokens": 1},
    },
]


def test_vllms_counters_give_length_rate_and_positions():
    reading = parse_metrics(VLLM)
    assert reading.server == "vllm"
    assert reading.drafts == Drafts(120, 1800, 606, {1: 110, 2: 90})  # vLLM counts positions from 0
    assert reading.drafts.length == pytest.approx(1 + 606 / 120)
    assert reading.drafts.rate == pytest.approx(606 / 1800)


def test_several_engines_of_a_server_are_added():
    both = VLLM + VLLM.replace('engine="0"', 'engine="1"')
    assert parse_metrics(both).drafts == Drafts(240, 3600, 1212, {1: 220, 2: 180})


def test_what_a_server_did_before_is_not_counted():
    before = parse_metrics(VLLM)
    after = parse_metrics(VLLM.replace(" 120.0", " 130.0").replace(" 606.0", " 656.0").replace(" 1800.0", " 1950.0"))
    assert after.since(before) == Drafts(10, 150, 50, {1: 0, 2: 0})
    assert after.since(before).length == 6


def test_a_server_that_began_anew_meanwhile_has_not_counted():
    before = parse_metrics(VLLM)
    assert parse_metrics(VLLM.replace(" 120.0", " 13.0")).since(before) is None


def test_sglangs_metrics_hold_a_mean_and_no_counts():
    reading = parse_metrics(SGLANG)
    assert (reading.server, reading.drafts, reading.mean_length) == ("sglang", None, 5.37)
    assert reading.since(reading) is None
    ranks = [SGLANG, SGLANG.replace('"0"', '"1"').replace("5.37", "4.37"), SGLANG.replace("5.37", "0.0")]
    assert parse_metrics("".join(ranks)).mean_length == pytest.approx(4.87)  # not their sum, nor of one that is idle


def test_our_counters_give_steps_from_the_first_position():
    reading = parse_metrics(OURS)
    assert reading.server == "trtllm-dflash"
    assert reading.drafts == Drafts(40, 78, 42, {1: 30, 2: 12}, {1: 40, 2: 38}, {1: 36, 3: 6})
    assert reading.drafts.ranks() == [36, 0, 6]
    assert reading.since(reading).ranks() == []
    assert parse_metrics(VLLM).drafts.ranks() == []


@pytest.mark.parametrize("wrap", [lambda entry: entry, json.dumps])
def test_tensorrt_llms_iterations_are_added_and_told_once(wrap):
    reading = parse_metrics(json.dumps([wrap(entry) for entry in TENSORRT_LLM]))
    assert reading.server == "tensorrt-llm"
    assert reading.drafts == Drafts(3, 27, 12)
    assert reading.drafts.length == 5
    assert reading.since(reading) == reading.drafts


def test_servers_that_do_not_draft_say_nothing_of_it():
    assert parse_metrics("vllm:num_requests_running 1.0\n").drafts is None
    assert parse_metrics("http_requests_total 3\n").server is None
    assert parse_metrics("[]").drafts is None
    assert Drafts().length is None and Drafts().rate is None


def test_a_reply_of_sglangs_says_how_many_steps_accepted_how_much():
    meta = {
        "completion_tokens": 13,
        "spec_accept_length": 3.25,
        "spec_num_correct_drafts": 9,
        "spec_num_proposed_drafts": 60,
        "spec_verify_ct": 4,
        "spec_correct_drafts_histogram": [1, 0, 1, 1, 1],
    }
    expected = Drafts(4, 60, 9, {1: 3, 2: 3, 3: 2, 4: 1})
    assert drafts_of_reply({"meta_info": meta}) == expected
    assert drafts_of_reply({"sglext": {"spec_tokens_details": meta}}) == expected
    assert drafts_of_reply({"sglext": {"spec_tokens_details": [meta]}}) == expected


def test_a_reply_of_our_gateways_says_it_in_openais_terms():
    details = {"accepted_prediction_tokens": 30, "rejected_prediction_tokens": 60}
    usage = {"prompt_tokens": 5, "completion_tokens": 41, "completion_tokens_details": details}
    assert drafts_of_reply({"usage": usage}) == Drafts(10, 90, 30)
    plain = {"completion_tokens": 41, "completion_tokens_details": {key: 0 for key in details}}
    assert drafts_of_reply({"usage": plain}) is None
    assert drafts_of_reply({"usage": {"completion_tokens": 41}}) is None
