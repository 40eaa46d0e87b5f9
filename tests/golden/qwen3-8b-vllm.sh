#!/usr/bin/env bash
# qwen3-8b on vLLM, --method dflash, 1 x h200. Fields as in vLLM 0.26.0.
# The catalog: No thinking: the drafter was trained without it; with thinking on, acceptance falls from 60% to 25%.

options=(
  # what clients call it
  --served-model-name qwen3-8b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens; its metrics are at /metrics there
  --port 8000
  # --tp: GPUs that share every layer: 1
  --tensor-parallel-size 1
  # the checkpoint's own: BF16, or what it is quantized to
  --dtype auto
  # prompt and reply together: planned for 16384 tokens
  --max-model-len 16384
  # sequences at a time: h200, 141 GB: 18.5 GB of weights, 2.8 GB of caches a sequence; 37 fit in 104.4 GB
  --max-num-seqs 32
  # tokens of a step: 15936 are left beside the drafts of 32 sequences
  --max-num-batched-tokens 16384
  # of a GPU's memory for weights, caches and activations
  --gpu-memory-utilization 0.9
  # the target's kernels: FlashAttention, the one that block drafting is run with
  --attention-backend FLASH_ATTN
  # the drafter was trained without thinking; with it acceptance more than halves
  --default-chat-template-kwargs '{"enable_thinking":false}'
  # clients' tools, which vLLM refuses else
  --enable-auto-tool-choice
  # how the target writes calls of tools
  --tool-call-parser hermes
  # DFlash: 15 drafts and the bonus token are a block of 16; its attention is not causal, which FlashAttention computes
  --speculative-config '{"method":"dflash","model":"z-lab/Qwen3-8B-DFlash-b16","num_speculative_tokens":15,"attention_backend":"FLASH_ATTN"}'
)
vllm serve Qwen/Qwen3-8B "${options[@]}"
