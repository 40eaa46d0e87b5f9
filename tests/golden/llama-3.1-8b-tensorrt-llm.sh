#!/usr/bin/env bash
# llama-3.1-8b on TensorRT-LLM, --method dflash, 1 x b200. Fields as in TensorRT-LLM 1.4.0rc1.
# The catalog: The target is gated: accept its terms on huggingface.co and set HF_TOKEN.

cat > llama-3.1-8b-dflash.yaml <<'END'
# --tp: GPUs that share every layer: 1
tensor_parallel_size: 1
# sequences at a time: b200, 192 GB: 18.2 GB of weights, 2.5 GB of caches a sequence; 59 fit in 147.7 GB
max_batch_size: 48
# prompt and reply together. Always set: the drafter's context arena is dense in it
max_seq_len: 16384
# tokens of a step: at least 48 x 10 rows, and a whole prompt
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
  speculative_model: z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat
  # drafts a step; with the bonus token a block of 10, of the 10 that it learned
  max_draft_len: 9
  # the drafter's kernels: TensorRT-LLM's own, which need FlashInfer and SM100 or SM103
  attention_backend: TRTLLM
END

options=(
  # the file above; in older releases the flag is --extra_llm_api_options
  --config llama-3.1-8b-dflash.yaml
  # what clients call it
  --served_model_name llama-3.1-8b
  # who reaches it: this machine alone
  --host 127.0.0.1
  # where it listens; its statistics are at /metrics there, once each
  --port 8000
)
trtllm-serve meta-llama/Llama-3.1-8B-Instruct "${options[@]}"
