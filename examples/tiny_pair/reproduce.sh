#!/usr/bin/env bash
# Makes the tiny pair from nothing on one GPU: tokenizer, held-out prompts, target, drafter, measurement.
# Needs trtllm-dflash itself. Usage: reproduce.sh [folder for the pair] [folder for the drafter's training]
set -euo pipefail
cd "$(dirname "$0")"
pair=${1:-../../trtllm_dflash/pairs/tiny}
training=${2:-drafter-training}
mkdir -p "$pair/drafter" "$training"

python3 tokenizer.py --out "$pair/target"
python3 corpus.py --write "$pair/prompts.jsonl"
python3 train_target.py --out "$pair/target"
python3 drafter_records.py --tokenizer "$pair/target/tokenizer.json" --exchanges 120000 --write "$training/records.jsonl"
trtllm-dflash train --target "$pair/target" --data "$training/records.jsonl" --held-out 0.001 --max-tokens 320 \
    --layers 2 --taps 1,3,5 --pack 16384 --anchors 2048 --rate 2e-3 --steps 6000 --evaluate-every 2000 \
    --objective greedy --weighting exponential --output "$training/state"
cp "$training"/state/drafter/{config.json,model.safetensors} "$pair/drafter"
python3 measure.py --target "$pair/target" --drafter "$pair/drafter" --prompts "$pair/prompts.jsonl" --device cuda --each 16
