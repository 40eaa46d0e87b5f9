#!/usr/bin/env bash
# gpt-oss-20b on vLLM, --method dflash, 1 x h100. Fields as in vLLM 0.26.0.
# The catalog: Harmony chat format: it decides acceptance; raw prompts without it draft badly.
# The catalog: chat_template_kwargs: reasoning_effort low, medium or high.
# The catalog: The drafter is Qwen3-shaped with attention biases.

options=(
  # what clients call it
  --served-model-name gpt-oss-20b
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
  # sequences at a time: h100, 80 GB: 15.3 GB of weights, 1.1 GB of caches a sequence; 49 fit in 52.7 GB
  --max-num-seqs 48
  # tokens of a step: 16096 are left beside the drafts of 48 sequences
  --max-num-batched-tokens 16384
  # of a GPU's memory for weights, caches and activations
  --gpu-memory-utilization 0.9
  # the target's kernels: FlashAttention, with attention sinks
  --attention-backend FLASH_ATTN
  # layers with a window keep all rows: vLLM refuses a drafter that is divided among their groups and the others'
  --disable-hybrid-kv-cache-manager
  # clients' tools, which vLLM refuses else
  --enable-auto-tool-choice
  # how the target writes calls of tools
  --tool-call-parser openai
  # how it thinks: apart from what it says
  --reasoning-parser openai_gptoss
  # DFlash: 7 drafts and the bonus token are a block of 8; its attention is not causal, which FlashAttention computes
  --speculative-config '{"method":"dflash","model":"z-lab/gpt-oss-20b-DFlash","num_speculative_tokens":7,"attention_backend":"FLASH_ATTN"}'
)
vllm serve openai/gpt-oss-20b "${options[@]}"
