#!/usr/bin/env bash
# qwen3-coder-next on vLLM, --method dflash, 4 x h100. Fields as in vLLM 0.26.0.

options=(
  # what clients call it
  --served-model-name qwen3-coder-next
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens; its metrics are at /metrics there
  --port 8000
  # --tp: each of 4 GPUs has a part of every layer, the drafter's too
  --tensor-parallel-size 4
  # the checkpoint's own: BF16, or what it is quantized to
  --dtype auto
  # prompt and reply together: planned for 16384 tokens
  --max-model-len 16384
  # sequences at a time: h100, 80 GB: 40.1 GB of weights, 0.6 GB of caches a sequence; 47 fit in 27.9 GB
  --max-num-seqs 32
  # tokens of a step: 15936 are left beside the drafts of 32 sequences
  --max-num-batched-tokens 16384
  # of a GPU's memory for weights, caches and activations
  --gpu-memory-utilization 0.9
  # the target's kernels: FlashAttention, the one that block drafting is run with
  --attention-backend FLASH_ATTN
  # clients' tools, which vLLM refuses else
  --enable-auto-tool-choice
  # how the target writes calls of tools
  --tool-call-parser qwen3_coder
  # DFlash: 15 drafts and the bonus token are a block of 16; its attention is not causal, which FlashAttention computes
  --speculative-config '{"method":"dflash","model":"z-lab/Qwen3-Coder-Next-DFlash","num_speculative_tokens":15,"attention_backend":"FLASH_ATTN"}'
)
vllm serve Qwen/Qwen3-Coder-Next "${options[@]}"
