#!/usr/bin/env bash
# qwen3.5-122b-a10b on vLLM, --method dflash, 8 x b300. Fields as in vLLM 0.26.0.

options=(
  # what clients call it
  --served-model-name qwen3.5-122b-a10b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens; its metrics are at /metrics there
  --port 8000
  # --tp: each of 8 GPUs has a part of every layer, the drafter's too
  --tensor-parallel-size 8
  # the checkpoint's own: BF16, or what it is quantized to
  --dtype auto
  # prompt and reply together: planned for 16384 tokens
  --max-model-len 16384
  # sequences at a time: b300, 288 GB: 30.7 GB of weights, 0.5 GB of caches a sequence; 414 fit in 224.5 GB; beyond 64 drafting pays less
  --max-num-seqs 64
  # tokens of a step: 15488 are left beside the drafts of 64 sequences
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
  --speculative-config '{"method":"dflash","model":"z-lab/Qwen3.5-122B-A10B-DFlash","num_speculative_tokens":15,"attention_backend":"FLASH_ATTN"}'
)
vllm serve Qwen/Qwen3.5-122B-A10B "${options[@]}"
