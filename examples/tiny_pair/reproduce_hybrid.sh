#!/usr/bin/env bash
# Makes the hybrid pair on one GPU: target, drafter, measurement; tokenizer and held-out prompts are the tiny pair's.
# Needs trtllm-dflash itself. Usage: reproduce_hybrid.sh [folder for the pair] [folder for the drafter's training]
set -euo pipefail
cd "$(dirname "$0")"
tiny=../../trtllm_dflash/pairs/tiny
pair=${1:-../../trtllm_dflash/pairs/tiny-hybrid}
training=${2:-hybrid-drafter-training}
mkdir -p "$pair/target" "$pair/drafter" "$training"

cp "$tiny"/target/{tokenizer.json,tokenizer_config.json,chat_template.jinja} "$pair/target"
python3 train_target.py --out "$pair/target" --shape qwen3_5 --tokens 32768 --rate 2e-3 --parts 8 --steps 20000 --seconds 140
python3 drafter_records.py --tokenizer "$pair/target/tokenizer.json" --exchanges 50000 --write "$training/records.jsonl"
trtllm-dflash train --target "$pair/target" --data "$training/records.jsonl" --held-out 0.001 --max-tokens 320 \
    --layers 3 --taps 1,3,5 --pack 16384 --anchors 2048 --rate 2e-3 --steps 2000 --evaluate-every 500 \
    --objective greedy --weighting exponential --output "$training/state"
cp "$training"/state/drafter/{config.json,model.safetensors} "$pair/drafter"
python3 measure.py --target "$pair/target" --drafter "$pair/drafter" --prompts "$tiny/prompts.jsonl" --device cuda --each 16
