#!/usr/bin/env bash
# qwen3.5-4b on vLLM, --method dflash, 1 x l40s. Fields as in vLLM 0.26.0.

options=(
  # what clients call it
  --served-model-name qwen3.5-4b
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
  # sequences at a time: l40s, 48 GB: 9.7 GB of weights, 1.5 GB of caches a sequence; 19 fit in 29.5 GB
  --max-num-seqs 16
  # tokens of a step: 16160 are left beside the drafts of 16 sequences
  --max-num-batched-tokens 16384
  # of a GPU's memory for weights, caches and activations
  --gpu-memory-utilization 0.9
  # the target's kernels: FlashAttention, the one that block drafting is run with
  --attention-backend FLASH_ATTN
  # clients' tools, which vLLM refuses else
  --enable-auto-tool-choice
  # how the target writes calls of tools
  --tool-call-parser qwen3_coder
  # how it thinks: apart from what it says
  --reasoning-parser qwen3
  # DFlash: 15 drafts and the bonus token are a block of 16; its attention is not causal, which FlashAttention computes
  --speculative-config '{"method":"dflash","model":"z-lab/Qwen3.5-4B-DFlash","num_speculative_tokens":15,"attention_backend":"FLASH_ATTN"}'
)
vllm serve Qwen/Qwen3.5-4B "${options[@]}"
