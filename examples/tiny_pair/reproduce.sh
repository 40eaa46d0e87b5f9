#!/usr/bin/env bash
# Makes the tiny pair from nothing on one GPU: tokenizer, held-out prompts, target, drafter, measurement.
# Needs torch, transformers, tokenizers, safetensors and numpy. Usage: reproduce.sh [folder for the pair]
set -euo pipefail
cd "$(dirname "$0")"
pair=${1:-../../trtllm_dflash/pairs/tiny}
mkdir -p "$pair"

python3 tokenizer.py --out "$pair/target"
python3 corpus.py --write "$pair/prompts.jsonl"
python3 train_target.py --out "$pair/target"
python3 train_drafter.py --target "$pair/target" --out "$pair/drafter"
python3 measure.py --target "$pair/target" --drafter "$pair/drafter" --prompts "$pair/prompts.jsonl" --device cuda --each 16
