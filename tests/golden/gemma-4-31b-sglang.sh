#!/usr/bin/env bash
# gemma-4-31b on SGLang, --method dflash, 2 x h100. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.
# The catalog: 4 of the drafter's 5 layers attend to a sliding window of 2048, causally inside the block; 1 is full.

options=(
  # the target
  --model-path google/gemma-4-31B-it
  # what clients call it
  --served-model-name gemma-4-31b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: each of 2 GPUs has a part of every layer, the drafter's too
  --tp-size 2
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: h100, 80 GB: 32.2 GB of weights, 1.1 GB of caches a sequence; 20 fit in 23.8 GB
  --max-running-requests 16
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 16
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: Triton, which has heads of 512 on h100
  --attention-backend triton
  # acceptance at /metrics (sglang:spec_accept_length)
  --enable-metrics
  # how the target writes calls of tools
  --tool-call-parser gemma4
  # how it thinks: apart from what it says
  --reasoning-parser gemma4
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/gemma-4-31B-it-DFlash
  # the block: the bonus token and 15 drafts
  --speculative-num-draft-tokens 16
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa3
)
python -m sglang.launch_server "${options[@]}"
