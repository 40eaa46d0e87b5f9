#!/usr/bin/env bash
# gpt-oss-120b on vLLM, --method dflash, 8 x b300. Fields as in vLLM 0.26.0.
# The catalog: Harmony chat format: it decides acceptance; raw prompts without it draft badly.
# The catalog: chat_template_kwargs: reasoning_effort low, medium or high.
# The catalog: The drafter is Qwen3-shaped with attention biases.

options=(
  # what clients call it
  --served-model-name gpt-oss-120b
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
  # sequences at a time: b300, 288 GB: 8.4 GB of weights, 0.2 GB of caches a sequence; 1337 fit in 246.8 GB; beyond 64 drafting pays less
  --max-num-seqs 64
  # tokens of a step: 15872 are left beside the drafts of 64 sequences
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
  # DFlash: 9 drafts and the bonus token are a block of 10; its attention is not causal, which FlashAttention computes
  --speculative-config '{"method":"dflash","model":"z-lab/gpt-oss-120b-DFlash","num_speculative_tokens":9,"attention_backend":"FLASH_ATTN"}'
)
vllm serve openai/gpt-oss-120b "${options[@]}"
