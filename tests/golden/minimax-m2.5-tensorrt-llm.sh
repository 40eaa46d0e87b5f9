#!/usr/bin/env bash
# minimax-m2.5 on TensorRT-LLM, --method dflash, 4 x h200. Fields as in TensorRT-LLM 1.4.0rc1.
# TensorRT-LLM's tests do not draft for minimax_m2: watch its acceptance.
# The catalog: The drafter's config.json is behind a gate: its layers and widths are deduced from its size, its block and taps from z-lab's other drafters. A build goes by the file.

cat > minimax-m2.5-dflash.yaml <<'END'
# --tp: GPUs that share every layer: 4
tensor_parallel_size: 4
# experts are split like everything else, not handed out: the latency recipe
moe_expert_parallel_size: 1
# sequences at a time: h200, 141 GB: 57.8 GB of weights, 1.1 GB of caches a sequence; 60 fit in 67.9 GB
max_batch_size: 48
# prompt and reply together. Always set: the drafter's context arena is dense in it
max_seq_len: 16384
# tokens of a step: at least 48 x 16 rows, and a whole prompt
max_num_tokens: 16384
kv_cache_config:
  # the model's own
  dtype: auto
  # of what the weights leave; the drafter's arena has the rest
  free_gpu_memory_fraction: 0.85
  # a reused prefix would leave the drafter without its context
  enable_block_reuse: false
cuda_graph_config:
  # batches between two captured sizes take the larger one's graph
  enable_padding: true
  # a graph for every batch there can be
  max_batch_size: 48
# drafts and how many were accepted, at /metrics
enable_iter_perf_stats: true
speculative_config:
  # DFlash: one pass drafts a block
  decoding_type: DFlash
  # the drafter; its config.json says the mask token and the taps
  speculative_model: z-lab/MiniMax-M2.5-DFlash
  # drafts a step; with the bonus token a block of 16, of the 16 that it learned
  max_draft_len: 15
  # the drafter's kernels: FlashAttention 4, for SM90
  attention_backend: FA4
END

options=(
  # the file above; in older releases the flag is --extra_llm_api_options
  --config minimax-m2.5-dflash.yaml
  # what clients call it
  --served_model_name minimax-m2.5
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens; its statistics are at /metrics there, once each
  --port 8000
)
trtllm-serve MiniMaxAI/MiniMax-M2.5 "${options[@]}"
