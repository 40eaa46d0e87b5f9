#!/usr/bin/env bash
# gpt-oss-120b on SGLang, --method dflash, 8 x b300. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.
# The catalog: Harmony chat format: it decides acceptance; raw prompts without it draft badly.
# The catalog: chat_template_kwargs: reasoning_effort low, medium or high.
# The catalog: The drafter is Qwen3-shaped with attention biases.

options=(
  # the target
  --model-path openai/gpt-oss-120b
  # what clients call it
  --served-model-name gpt-oss-120b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: each of 8 GPUs has a part of every layer, the drafter's too
  --tp-size 8
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: b300, 288 GB: 8.4 GB of weights, 0.1 GB of caches a sequence; 1857 fit in 203.6 GB; beyond 64 drafting pays less
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
  --tool-call-parser gpt-oss
  # how it thinks: apart from what it says
  --reasoning-parser gpt-oss
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/gpt-oss-120b-DFlash
  # the block: the bonus token and 9 drafts
  --speculative-num-draft-tokens 10
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa4
)
python -m sglang.launch_server "${options[@]}"
