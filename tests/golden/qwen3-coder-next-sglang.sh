#!/usr/bin/env bash
# qwen3-coder-next on SGLang, --method dflash, 4 x h100. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.

options=(
  # the target
  --model-path Qwen/Qwen3-Coder-Next
  # what clients call it
  --served-model-name qwen3-coder-next
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: each of 4 GPUs has a part of every layer, the drafter's too
  --tp-size 4
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: h100, 80 GB: 40.1 GB of weights, 0.6 GB of caches a sequence; 27 fit in 15.9 GB
  --max-running-requests 24
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 24
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
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/Qwen3-Coder-Next-DFlash
  # the block: the bonus token and 15 drafts
  --speculative-num-draft-tokens 16
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa3
)
python -m sglang.launch_server "${options[@]}"
