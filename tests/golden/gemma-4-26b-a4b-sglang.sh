#!/usr/bin/env bash
# gemma-4-26b-a4b on SGLang, --method dflash, 1 x b300. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.

options=(
  # the target
  --model-path google/gemma-4-26B-A4B-it
  # what clients call it
  --served-model-name gemma-4-26b-a4b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: GPUs that share every layer: 1
  --tp-size 1
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: b300, 288 GB: 51.3 GB of weights, 0.6 GB of caches a sequence; 248 fit in 160.7 GB; beyond 64 drafting pays less
  --max-running-requests 64
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 64
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: TensorRT-LLM's, for data-center Blackwell
  --attention-backend trtllm_mha
  # acceptance at /metrics (sglang:spec_accept_length)
  --enable-metrics
  # how the target writes calls of tools
  --tool-call-parser gemma4
  # how it thinks: apart from what it says
  --reasoning-parser gemma4
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/gemma-4-26B-A4B-it-DFlash
  # the block: the bonus token and 15 drafts
  --speculative-num-draft-tokens 16
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa4
)
python -m sglang.launch_server "${options[@]}"
