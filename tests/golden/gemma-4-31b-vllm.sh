#!/usr/bin/env bash
# gemma-4-31b on vLLM, --method dflash, 2 x h100. Fields as in vLLM 0.26.0.
# The catalog: 4 of the drafter's 5 layers attend to a sliding window of 2048, causally inside the block; 1 is full.

options=(
  # what clients call it
  --served-model-name gemma-4-31b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens; its metrics are at /metrics there
  --port 8000
  # --tp: each of 2 GPUs has a part of every layer, the drafter's too
  --tensor-parallel-size 2
  # the checkpoint's own: BF16, or what it is quantized to
  --dtype auto
  # prompt and reply together: planned for 16384 tokens
  --max-model-len 16384
  # sequences at a time: h100, 80 GB: 32.2 GB of weights, 1.1 GB of caches a sequence; 31 fit in 35.8 GB
  --max-num-seqs 24
  # tokens of a step: 16048 are left beside the drafts of 24 sequences
  --max-num-batched-tokens 16384
  # of a GPU's memory for weights, caches and activations
  --gpu-memory-utilization 0.9
  # the target's kernels: Triton, since FlashAttention has no heads of 512 on h100
  --attention-backend TRITON_ATTN
  # clients' tools, which vLLM refuses else
  --enable-auto-tool-choice
  # how the target writes calls of tools
  --tool-call-parser gemma4
  # how it thinks: apart from what it says
  --reasoning-parser gemma4
  # DFlash: 15 drafts and the bonus token are a block of 16; its attention is not causal, which FlashAttention computes
  --speculative-config '{"method":"dflash","model":"z-lab/gemma-4-31B-it-DFlash","num_speculative_tokens":15,"attention_backend":"FLASH_ATTN"}'
)
vllm serve google/gemma-4-31B-it "${options[@]}"
