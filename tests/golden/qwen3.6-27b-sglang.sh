#!/usr/bin/env bash
# qwen3.6-27b on SGLang, --method dflash, 2 x h100. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.
# The catalog: 4 of the drafter's 5 layers attend to a sliding window of 2048, causally inside the block; 1 is full.

options=(
  # the target
  --model-path Qwen/Qwen3.6-27B
  # what clients call it
  --served-model-name qwen3.6-27b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: each of 2 GPUs has a part of every layer, the drafter's too
  --tp-size 2
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: h100, 80 GB: 28.6 GB of weights, 1.9 GB of caches a sequence; 14 fit in 27.4 GB
  --max-running-requests 12
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 12
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
  --speculative-draft-model-path z-lab/Qwen3.6-27B-DFlash
  # the block: the bonus token and 15 drafts
  --speculative-num-draft-tokens 16
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa3
)
python -m sglang.launch_server "${options[@]}"
