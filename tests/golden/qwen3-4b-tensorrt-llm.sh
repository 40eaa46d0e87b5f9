#!/usr/bin/env bash
# qwen3-4b on TensorRT-LLM, --method dflash, 1 x rtx-5090. Fields as in TensorRT-LLM 1.4.0rc1.
# Send "chat_template_kwargs": {"enable_thinking": false} with each request: the drafter was trained without thinking, and trtllm-serve has no flag for it.
# The catalog: No thinking: the drafter was trained without it; with thinking on, acceptance falls from 60% to 25%.

cat > qwen3-4b-dflash.yaml <<'END'
# --tp: GPUs that share every layer: 1
tensor_parallel_size: 1
# sequences at a time: rtx-5090, 32 GB: 9.1 GB of weights, 1.4 GB of caches a sequence; 10 fit in 14.9 GB
max_batch_size: 8
# prompt and reply together. Always set: the drafter's context arena is dense in it
max_seq_len: 8192
# tokens of a step: at least 8 x 16 rows, and a whole prompt
max_num_tokens: 8192
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
  max_batch_size: 8
# drafts and how many were accepted, at /metrics
enable_iter_perf_stats: true
speculative_config:
  # DFlash: one pass drafts a block
  decoding_type: DFlash
  # the drafter; its config.json says the mask token and the taps
  speculative_model: z-lab/Qwen3-4B-DFlash-b16
  # drafts a step; with the bonus token a block of 16, of the 16 that it learned
  max_draft_len: 15
  # the drafter's kernels: those of the package flash-attn, which must be installed
  attention_backend: VANILLA
END

options=(
  # the file above; in older releases the flag is --extra_llm_api_options
  --config qwen3-4b-dflash.yaml
  # what clients call it
  --served_model_name qwen3-4b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens; its statistics are at /metrics there, once each
  --port 8000
)
trtllm-serve Qwen/Qwen3-4B "${options[@]}"
