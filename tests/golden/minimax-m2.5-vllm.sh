#!/usr/bin/env bash
# minimax-m2.5 on vLLM, --method dflash, 4 x h200. Fields as in vLLM 0.26.0.
# The catalog: The drafter's config.json is behind a gate: its layers and widths are deduced from its size, its block and taps from z-lab's other drafters. A build goes by the file.

options=(
  # what clients call it
  --served-model-name minimax-m2.5
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
  # sequences at a time: h200, 141 GB: 57.8 GB of weights, 1.1 GB of caches a sequence; 61 fit in 65.1 GB
  --max-num-seqs 48
  # tokens of a step: 15712 are left beside the drafts of 48 sequences
  --max-num-batched-tokens 16384
  # of a GPU's memory for weights, caches and activations
  --gpu-memory-utilization 0.9
  # the target's kernels: FlashAttention, the one that block drafting is run with
  --attention-backend FLASH_ATTN
  # clients' tools, which vLLM refuses else
  --enable-auto-tool-choice
  # how the target writes calls of tools
  --tool-call-parser minimax_m2
  # how it thinks: apart from what it says
  --reasoning-parser minimax_m2
  # DFlash: 15 drafts and the bonus token are a block of 16; its attention is not causal, which FlashAttention computes
  --speculative-config '{"method":"dflash","model":"z-lab/MiniMax-M2.5-DFlash","num_speculative_tokens":15,"attention_backend":"FLASH_ATTN"}'
)
vllm serve MiniMaxAI/MiniMax-M2.5 "${options[@]}"
