#!/usr/bin/env bash
# qwen3.5-122b-a10b on SGLang, --method dflash, 8 x b300. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.

options=(
  # the target
  --model-path Qwen/Qwen3.5-122B-A10B
  # what clients call it
  --served-model-name qwen3.5-122b-a10b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: each of 8 GPUs has a part of every layer, the drafter's too
  --tp-size 8
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: b300, 288 GB: 30.7 GB of weights, 0.5 GB of caches a sequence; 335 fit in 181.3 GB; beyond 64 drafting pays less
  --max-running-requests 64
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 64
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: TensorRT-LLM's, for data-center Blackwell
  --attention-backend trtllm_mha
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
  --speculative-draft-model-path z-lab/Qwen3.5-122B-A10B-DFlash
  # the block: the bonus token and 15 drafts
  --speculative-num-draft-tokens 16
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa4
)
python -m sglang.launch_server "${options[@]}"
