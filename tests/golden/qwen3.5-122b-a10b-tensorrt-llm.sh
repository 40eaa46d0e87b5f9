#!/usr/bin/env bash
# qwen3.5-122b-a10b on TensorRT-LLM, --method dflash, 8 x b300. Fields as in TensorRT-LLM 1.4.0rc1.

cat > qwen3.5-122b-a10b-dflash.yaml <<'END'
# --tp: GPUs that share every layer: 8
tensor_parallel_size: 8
# experts are split like everything else, not handed out: the latency recipe
moe_expert_parallel_size: 1
# sequences at a time: b300, 288 GB: 30.7 GB of weights, 0.6 GB of caches a sequence; 386 fit in 221.1 GB; beyond 64 drafting pays less
max_batch_size: 64
# prompt and reply together. Always set: the drafter's context arena is dense in it
max_seq_len: 16384
# tokens of a step: at least 64 x 16 rows, and a whole prompt
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
  max_batch_size: 64
# drafts and how many were accepted, at /metrics
enable_iter_perf_stats: true
speculative_config:
  # DFlash: one pass drafts a block
  decoding_type: DFlash
  # the drafter; its config.json says the mask token and the taps
  speculative_model: z-lab/Qwen3.5-122B-A10B-DFlash
  # drafts a step; with the bonus token a block of 16, of the 16 that it learned
  max_draft_len: 15
  # the drafter's kernels: TensorRT-LLM's own, which need FlashInfer and SM100 or SM103
  attention_backend: TRTLLM
END

options=(
  # the file above; in older releases the flag is --extra_llm_api_options
  --config qwen3.5-122b-a10b-dflash.yaml
  # what clients call it
  --served_model_name qwen3.5-122b-a10b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens; its statistics are at /metrics there, once each
  --port 8000
)
trtllm-serve Qwen/Qwen3.5-122B-A10B "${options[@]}"
