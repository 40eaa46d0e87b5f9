#!/usr/bin/env bash
# kimi-k2.5 on vLLM, --method dflash, 8 x b300. Fields as in vLLM 0.26.0.
# The tokenizer of moonshotai/Kimi-K2.5 is Python code in its checkpoint, which vLLM runs with --trust-remote-code alone: read it, then add the flag.

options=(
  # what clients call it
  --served-model-name kimi-k2.5
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
  # sequences at a time: b300, 288 GB: 75.2 GB of weights, 1.2 GB of caches a sequence; 149 fit in 180.0 GB; beyond 64 drafting pays less
  --max-num-seqs 64
  # tokens of a step: 16000 are left beside the drafts of 64 sequences
  --max-num-batched-tokens 16384
  # of a GPU's memory for weights, caches and activations
  --gpu-memory-utilization 0.9
  # the target's kernels: FlashInfer's, for latent attention (MLA) on b300
  --attention-backend FLASHINFER_MLA
  # clients' tools, which vLLM refuses else
  --enable-auto-tool-choice
  # how the target writes calls of tools
  --tool-call-parser kimi_k2
  # how it thinks: apart from what it says
  --reasoning-parser kimi_k2
  # DFlash: 7 drafts and the bonus token are a block of 8; its attention is not causal, which FlashAttention computes
  --speculative-config '{"method":"dflash","model":"z-lab/Kimi-K2.5-DFlash","num_speculative_tokens":7,"attention_backend":"FLASH_ATTN"}'
)
vllm serve moonshotai/Kimi-K2.5 "${options[@]}"
