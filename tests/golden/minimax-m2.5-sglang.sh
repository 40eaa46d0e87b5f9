#!/usr/bin/env bash
# minimax-m2.5 on SGLang, --method dflash, 4 x h200. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.
# The catalog: The drafter's config.json is behind a gate: its layers and widths are deduced from its size, its block and taps from z-lab's other drafters. A build goes by the file.

options=(
  # the target
  --model-path MiniMaxAI/MiniMax-M2.5
  # what clients call it
  --served-model-name minimax-m2.5
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: each of 4 GPUs has a part of every layer, the drafter's too
  --tp-size 4
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: h200, 141 GB: 57.8 GB of weights, 1.1 GB of caches a sequence; 41 fit in 43.9 GB
  --max-running-requests 32
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 32
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: FlashAttention 3, for Hopper
  --attention-backend fa3
  # acceptance at /metrics (sglang:spec_accept_length)
  --enable-metrics
  # how the target writes calls of tools
  --tool-call-parser minimax-m2
  # how it thinks: apart from what it says
  --reasoning-parser minimax
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/MiniMax-M2.5-DFlash
  # the block: the bonus token and 15 drafts
  --speculative-num-draft-tokens 16
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa3
)
python -m sglang.launch_server "${options[@]}"
