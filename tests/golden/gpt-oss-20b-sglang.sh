#!/usr/bin/env bash
# gpt-oss-20b on SGLang, --method dflash, 1 x h100. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.
# The catalog: Harmony chat format: it decides acceptance; raw prompts without it draft badly.
# The catalog: chat_template_kwargs: reasoning_effort low, medium or high.
# The catalog: The drafter is Qwen3-shaped with attention biases.

options=(
  # the target
  --model-path openai/gpt-oss-20b
  # what clients call it
  --served-model-name gpt-oss-20b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: GPUs that share every layer: 1
  --tp-size 1
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: h100, 80 GB: 15.3 GB of weights, 0.7 GB of caches a sequence; 60 fit in 40.7 GB
  --max-running-requests 48
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 48
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: FlashAttention 3, for Hopper
  --attention-backend fa3
  # acceptance at /metrics (sglang:spec_accept_length)
  --enable-metrics
  # how the target writes calls of tools
  --tool-call-parser gpt-oss
  # how it thinks: apart from what it says
  --reasoning-parser gpt-oss
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/gpt-oss-20b-DFlash
  # the block: the bonus token and 7 drafts
  --speculative-num-draft-tokens 8
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa3
)
python -m sglang.launch_server "${options[@]}"
