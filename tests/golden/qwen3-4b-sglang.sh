#!/usr/bin/env bash
# qwen3-4b on SGLang, --method dflash, 1 x rtx-5090. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.
# The catalog: No thinking: the drafter was trained without it; with thinking on, acceptance falls from 60% to 25%.

options=(
  # the target
  --model-path Qwen/Qwen3-4B
  # what clients call it
  --served-model-name qwen3-4b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: GPUs that share every layer: 1
  --tp-size 1
  # prompt and reply together: planned for 8192 tokens
  --context-length 8192
  # sequences at a time: rtx-5090, 32 GB: 9.1 GB of weights, 1.4 GB of caches a sequence; 7 fit in 10.9 GB
  --max-running-requests 6
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 6
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: FlashInfer, which there is for rtx-5090
  --attention-backend flashinfer
  # acceptance at /metrics (sglang:spec_accept_length)
  --enable-metrics
  # the drafter was trained without thinking; with it acceptance more than halves
  --default-chat-template-kwargs '{"enable_thinking":false}'
  # how the target writes calls of tools
  --tool-call-parser qwen25
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/Qwen3-4B-DFlash-b16
  # the block: the bonus token and 15 drafts
  --speculative-num-draft-tokens 16
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend flashinfer
)
python -m sglang.launch_server "${options[@]}"
