#!/usr/bin/env bash
# kimi-k2.5 on SGLang, --method dflash, 8 x b300. Fields as in SGLang 0.5.23.
# The tokenizer of moonshotai/Kimi-K2.5 is Python code in its checkpoint, which SGLang runs with --trust-remote-code alone: read it, then add the flag.

options=(
  # the target
  --model-path moonshotai/Kimi-K2.5
  # what clients call it
  --served-model-name kimi-k2.5
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: each of 8 GPUs has a part of every layer, the drafter's too
  --tp-size 8
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: b300, 288 GB: 75.2 GB of weights, 1.2 GB of caches a sequence; 113 fit in 136.8 GB; beyond 64 drafting pays less
  --max-running-requests 64
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 64
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: TensorRT-LLM's for latent attention (MLA), for data-center Blackwell
  --attention-backend trtllm_mla
  # acceptance at /metrics (sglang:spec_accept_length)
  --enable-metrics
  # how the target writes calls of tools
  --tool-call-parser kimi_k2
  # how it thinks: apart from what it says
  --reasoning-parser kimi_k2
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/Kimi-K2.5-DFlash
  # the block: the bonus token and 7 drafts
  --speculative-num-draft-tokens 8
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa4
)
python -m sglang.launch_server "${options[@]}"
