#!/usr/bin/env bash
# gpt-oss-20b on TensorRT-LLM, --method dflash, 1 x h100. Fields as in TensorRT-LLM 1.4.0rc1.
# The catalog: Harmony chat format: it decides acceptance; raw prompts without it draft badly.
# The catalog: chat_template_kwargs: reasoning_effort low, medium or high.
# The catalog: The drafter is Qwen3-shaped with attention biases.

cat > gpt-oss-20b-dflash.yaml <<'END'
# --tp: GPUs that share every layer: 1
tensor_parallel_size: 1
# experts are split like everything else, not handed out: the latency recipe
moe_expert_parallel_size: 1
# sequences at a time: h100, 80 GB: 15.3 GB of weights, 0.7 GB of caches a sequence; 76 fit in 51.6 GB; beyond 64 drafting pays less
max_batch_size: 64
# prompt and reply together. Always set: the drafter's context arena is dense in it
max_seq_len: 16384
# tokens of a step: at least 64 x 8 rows, and a whole prompt
max_num_tokens: 16384
kv_cache_config:
  # the model's own
  dtype: auto
  # of what the weights leave; the drafter's arena has the rest
  free_gpu_memory_fraction: 0.65
  # a reused prefix would leave the drafter without its context
  enable_block_reuse: false
cuda_graph_config:
  # batches between two captured sizes take the larger one's graph
  enable_padding: true
  # a graph for every batch there can be
  max_batch_size: 64
moe_config:
  # experts in MXFP4, activations in BF16: Triton's kernels, for Hopper
  backend: TRITON
# drafts and how many were accepted, at /metrics
enable_iter_perf_stats: true
speculative_config:
  # DFlash: one pass drafts a block
  decoding_type: DFlash
  # the drafter; its config.json says the mask token and the taps
  speculative_model: z-lab/gpt-oss-20b-DFlash
  # drafts a step; with the bonus token a block of 8, of the 8 that it learned
  max_draft_len: 7
  # the drafter's kernels: FlashAttention 4, for SM90
  attention_backend: FA4
END

options=(
  # the file above; in older releases the flag is --extra_llm_api_options
  --config gpt-oss-20b-dflash.yaml
  # what clients call it
  --served_model_name gpt-oss-20b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens; its statistics are at /metrics there, once each
  --port 8000
)
trtllm-serve openai/gpt-oss-20b "${options[@]}"
