#!/usr/bin/env bash
# qwen3.5-27b on SGLang, --method dflash, 1 x h200. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.

options=(
  # the target
  --model-path Qwen/Qwen3.5-27B
  # what clients call it
  --served-model-name qwen3.5-27b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: GPUs that share every layer: 1
  --tp-size 1
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: h200, 141 GB: 58.0 GB of weights, 3.8 GB of caches a sequence; 11 fit in 43.7 GB
  --max-running-requests 8
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 8
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: FlashAttention 3, for Hopper
  --attention-backend fa3
  # linear attention keeps its state at every row, to go back to one
  --mamba-radix-cache-strategy extra_buffer
  # acceptance at /metrics (sglang:spec_accept_length)
  --enable-metrics
  # how the target writes calls of tools
  --tool-call-parser qwen3_coder
  # how it thinks: apart from what it says
  --reasoning-parser qwen3
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/Qwen3.5-27B-DFlash
  # the block: the bonus token and 15 drafts
  --speculative-num-draft-tokens 16
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa3
)
python -m sglang.launch_server "${options[@]}"
