#!/usr/bin/env bash
# qwen3-coder-30b-a3b on SGLang, --method dflash, 2 x rtx-pro-6000. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.

options=(
  # the target
  --model-path Qwen/Qwen3-Coder-30B-A3B-Instruct
  # what clients call it
  --served-model-name qwen3-coder-30b-a3b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: each of 2 GPUs has a part of every layer, the drafter's too
  --tp-size 2
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: rtx-pro-6000, 96 GB: 31.0 GB of weights, 0.9 GB of caches a sequence; 39 fit in 37.0 GB
  --max-running-requests 32
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 32
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: FlashInfer, which there is for rtx-pro-6000
  --attention-backend flashinfer
  # acceptance at /metrics (sglang:spec_accept_length)
  --enable-metrics
  # how the target writes calls of tools
  --tool-call-parser qwen3_coder
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/Qwen3-Coder-30B-A3B-DFlash
  # the block: the bonus token and 15 drafts
  --speculative-num-draft-tokens 16
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend flashinfer
)
python -m sglang.launch_server "${options[@]}"
