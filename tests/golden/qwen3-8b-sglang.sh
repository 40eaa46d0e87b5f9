#!/usr/bin/env bash
# qwen3-8b on SGLang, --method dflash, 1 x h200. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.
# The catalog: No thinking: the drafter was trained without it; with thinking on, acceptance falls from 60% to 25%.

options=(
  # the target
  --model-path Qwen/Qwen3-8B
  # what clients call it
  --served-model-name qwen3-8b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: GPUs that share every layer: 1
  --tp-size 1
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: h200, 141 GB: 18.5 GB of weights, 2.8 GB of caches a sequence; 30 fit in 83.3 GB
  --max-running-requests 24
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 24
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: FlashAttention 3, for Hopper
  --attention-backend fa3
  # acceptance at /metrics (sglang:spec_accept_length)
  --enable-metrics
  # the drafter was trained without thinking; with it acceptance more than halves
  --default-chat-template-kwargs '{"enable_thinking":false}'
  # how the target writes calls of tools
  --tool-call-parser qwen25
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16
  # the block: the bonus token and 15 drafts
  --speculative-num-draft-tokens 16
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa3
)
python -m sglang.launch_server "${options[@]}"
