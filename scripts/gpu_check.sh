#!/usr/bin/env bash
# What no machine without a GPU can show, in under ten minutes: the smoke test and a short real fine-tune on the
# accelerators of this machine, under ZeRO-3 with and without offload.
# usage: scripts/gpu_check.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "$1" && pwd)/bin
slots=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
[ "$slots" -ge 1 ] || { echo "error: nvidia-smi shows no GPU here" >&2; exit 4; }
hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
echo "localhost slots=$slots" >"$hosts"
"$bin/llmtrain" smoke --hosts "$hosts"
scripts/get_smollm2.sh "$1" .cache/smollm2
for config in zero3-offload zero3 zero2 zero1; do
    echo "== $config"
    "$bin/llmtrain" launch examples/smollm2/llmtrain.yaml --hosts "$hosts" --config "$config" \
        --set batch.global=$((8 * slots)) --set batch.micro=4 --set training.max_steps=20 --json |
        "$bin/python" -c 'import json, sys; r = json.load(sys.stdin); assert r["ok"] and r["final_loss"] < 2.5, r; print(r["reason"], r["final_loss"])'
done
