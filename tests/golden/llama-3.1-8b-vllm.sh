#!/usr/bin/env bash
# llama-3.1-8b on vLLM, --method dflash, 1 x b200. Fields as in vLLM 0.26.0.
# The catalog: The target is gated: accept its terms on huggingface.co and set HF_TOKEN.

options=(
  # what clients call it
  --served-model-name llama-3.1-8b
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
  # sequences at a time: b200, 192 GB: 18.2 GB of weights, 2.5 GB of caches a sequence; 60 fit in 150.6 GB
  --max-num-seqs 48
  # tokens of a step: 16000 are left beside the drafts of 48 sequences
  --max-num-batched-tokens 16384
  # of a GPU's memory for weights, caches and activations
  --gpu-memory-utilization 0.9
  # the target's kernels: FlashAttention, the one that block drafting is run with
  --attention-backend FLASH_ATTN
  # clients' tools, which vLLM refuses else
  --enable-auto-tool-choice
  # how the target writes calls of tools
  --tool-call-parser llama3_json
  # DFlash: 9 drafts and the bonus token are a block of 10; its attention is not causal, which FlashAttention computes
  --speculative-config '{"method":"dflash","model":"z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat","num_speculative_tokens":9,"attention_backend":"FLASH_ATTN"}'
)
vllm serve meta-llama/Llama-3.1-8B-Instruct "${options[@]}"
