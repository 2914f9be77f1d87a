#!/usr/bin/env bash
# Fine-tune a real 135M-parameter chat model with DeepSpeed ZeRO-3 and CPU offload, two ranks on this machine.
# usage: scripts/demo.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "$1" && pwd)/bin
export OMP_NUM_THREADS=1
question="What does llmtrain launch --dry-run do?"

scripts/get_smollm2.sh "$1" .cache/smollm2

echo "== before: $question"
"$bin/python" -m llmtrain.train.answer .cache/smollm2 "$question"

echo
echo "== fine-tuning (on the very first run DeepSpeed compiles its processor kernels: a minute or two)"
result=$(mktemp)
trap 'rm -f "$result"' EXIT
"$bin/llmtrain" launch examples/smollm2/llmtrain.yaml --hosts hostfiles/localhost --config zero3-offload --json >"$result"
read -r model metrics < <("$bin/python" - "$result" <<'P'
import json, sys
run = json.load(open(sys.argv[1]))
print(run["output"], run["run_dir"] + "/metrics.jsonl")
P
)

echo
echo "== the loss"
"$bin/python" - "$metrics" <<'P'
import json, sys
rows = [row for row in map(json.loads, open(sys.argv[1])) if "loss" in row]
for row in rows:
    print(f"step {row['step']:3}  loss {row['loss']:.3f}  {'#' * round(row['loss'] * 12)}")
P

echo
echo "== after: $question"
"$bin/python" -m llmtrain.train.answer "$model" "$question"
echo
echo "The tuned model is a normal Hugging Face directory: $model"
