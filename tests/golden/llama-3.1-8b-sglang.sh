#!/usr/bin/env bash
# llama-3.1-8b on SGLang, --method dflash, 1 x b200. Fields as in SGLang 0.5.23.
# No --trust-remote-code: the configurations name families that are built in, so no checkpoint's code is run.
# The catalog: The target is gated: accept its terms on huggingface.co and set HF_TOKEN.

options=(
  # the target
  --model-path meta-llama/Llama-3.1-8B-Instruct
  # what clients call it
  --served-model-name llama-3.1-8b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens
  --port 8000
  # --tp: GPUs that share every layer: 1
  --tp-size 1
  # prompt and reply together: planned for 16384 tokens
  --context-length 16384
  # sequences at a time: b200, 192 GB: 18.2 GB of weights, 2.5 GB of caches a sequence; 49 fit in 121.8 GB
  --max-running-requests 48
  # graphs up to that many, so that no step of replies runs without one
  --cuda-graph-max-bs-decode 48
  # of a GPU's memory for weights and caches; the rest is for activations and graphs
  --mem-fraction-static 0.75
  # the target's kernels: TensorRT-LLM's, for data-center Blackwell
  --attention-backend trtllm_mha
  # acceptance at /metrics (sglang:spec_accept_length)
  --enable-metrics
  # how the target writes calls of tools
  --tool-call-parser llama3
  # DFlash: one pass drafts a block
  --speculative-algorithm DFLASH
  # the drafter
  --speculative-draft-model-path z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat
  # the block: the bonus token and 9 drafts
  --speculative-num-draft-tokens 10
  # the drafter's kernels, which compute attention that is not causal
  --speculative-draft-attention-backend fa4
)
python -m sglang.launch_server "${options[@]}"
