#!/usr/bin/env bash
# gemma-4-31b on TensorRT-LLM, --method dflash, 2 x h100. Fields as in TensorRT-LLM 1.4.0rc1.
# TensorRT-LLM's tests do not draft for gemma4: watch its acceptance.
# The catalog: 4 of the drafter's 5 layers attend to a sliding window of 2048, causally inside the block; 1 is full.

cat > gemma-4-31b-dflash.yaml <<'END'
# --tp: GPUs that share every layer: 2
tensor_parallel_size: 2
# sequences at a time: h100, 80 GB: 32.2 GB of weights, 1.3 GB of caches a sequence; 29 fit in 36.8 GB
max_batch_size: 24
# prompt and reply together. Always set: the drafter's context arena is dense in it
max_seq_len: 16384
# tokens of a step: at least 24 x 16 rows, and a whole prompt
max_num_tokens: 16384
kv_cache_config:
  # the model's own
  dtype: auto
  # of what the weights leave; the drafter's arena has the rest
  free_gpu_memory_fraction: 0.84
  # a reused prefix would leave the drafter without its context
  enable_block_reuse: false
cuda_graph_config:
  # batches between two captured sizes take the larger one's graph
  enable_padding: true
  # a graph for every batch there can be
  max_batch_size: 24
# drafts and how many were accepted, at /metrics
enable_iter_perf_stats: true
speculative_config:
  # DFlash: one pass drafts a block
  decoding_type: DFlash
  # the drafter; its config.json says the mask token and the taps
  speculative_model: z-lab/gemma-4-31B-it-DFlash
  # drafts a step; with the bonus token a block of 16, of the 16 that it learned
  max_draft_len: 15
  # the drafter's kernels: FlashAttention 4, for SM90
  attention_backend: FA4
END

options=(
  # the file above; in older releases the flag is --extra_llm_api_options
  --config gemma-4-31b-dflash.yaml
  # what clients call it
  --served_model_name gemma-4-31b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens; its statistics are at /metrics there, once each
  --port 8000
)
trtllm-serve google/gemma-4-31B-it "${options[@]}"
