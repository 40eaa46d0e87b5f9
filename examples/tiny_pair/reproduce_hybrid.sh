#!/usr/bin/env bash
# Makes a hybrid pair on one GPU: target, drafter, measurement; tokenizer and held-out prompts are the tiny pair's.
# Needs trtllm-dflash itself, with its kernels. Usage: reproduce_hybrid.sh [folder for the pair] [folder for the drafter's training]
set -euo pipefail
cd "$(dirname "$0")"
tiny=../../trtllm_dflash/pairs/tiny
pair=${1:-hybrid-pair}
training=${2:-hybrid-drafter-training}
mkdir -p "$pair/target" "$pair/drafter" "$training"

cp "$tiny"/target/{tokenizer.json,tokenizer_config.json,chat_template.jinja} "$pair/target"
python3 train_target.py --out "$pair/target" --shape qwen3_5 --tokens 32768 --rate 2e-3 --parts 8 --steps 700
python3 train_target.py --out "$pair/target" --shape qwen3_5 --begin "$pair/target" --seed 5 --tokens 16384 --lengths 1024 \
    --rate 2e-3 --parts 8 --exchanges 200000 --steps 8600
python3 drafter_records.py --tokenizer "$pair/target/tokenizer.json" --exchanges 40000 --write "$training/records.jsonl"
trtllm-dflash train --target "$pair/target" --data "$training/records.jsonl" --held-out 0.002 --max-tokens 320 \
    --max-seq-len 2048 --layers 3 --taps 1,3,5 --pack 16384 --anchors 2048 --rate 2e-3 --steps 2500 --evaluate-every 500 \
    --objective greedy --weighting exponential --output "$training/state"
cp "$training"/state/drafter/{config.json,model.safetensors} "$pair/drafter"
python3 measure.py --target "$pair/target" --drafter "$pair/drafter" --prompts "$tiny/prompts.jsonl" --device cuda --each 16
