#!/bin/sh
# A reply over HTTP as it is written: one JSON object a step, with its text and the draft statistics so far.
# Usage: curl_generate_stream.sh [--url HOST:PORT]    (Triton's HTTP endpoint)
set -eu

url=127.0.0.1:8000
if [ "${1:-}" = --url ]; then url=$2; fi

curl --silent --show-error --fail-with-body --no-buffer "http://$url/v2/models/ensemble/generate_stream" \
    --header 'Content-Type: application/json' --data '{
      "text_input": "<|im_start|>user\nEva is 5 times as old as Isaac, who is 6. Ivan is 8 years older than Eva. How old are the three together?<|im_end|>\n<|im_start|>assistant\n",
      "max_tokens": 128,
      "stream": true
    }'
