#!/usr/bin/env bash
# Install what the demo and the tests need: Debian packages, and a virtual environment with pinned versions.
# usage: scripts/setup.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

missing=()
while read -r package; do
    dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done <scripts/debian-packages.txt
if [ "${#missing[@]}" -gt 0 ]; then
    echo "installing Debian packages: ${missing[*]}"
    sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo)
    "${sudo[@]}" apt-get update -qq
    # No service is to be started: the tests run an sshd of their own, inside their own network.
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

python=${LLMTRAIN_PYTHON:-python3}
"$python" - <<'P' || { echo "error: Python 3.10 or later is needed (LLMTRAIN_PYTHON names another one)" >&2; exit 2; }
import sys
sys.exit(sys.version_info < (3, 10))
P
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)
"${pip[@]}" pip setuptools wheel
# torch first: DeepSpeed's own installation imports it.
"${pip[@]}" torch
"${pip[@]}" --no-build-isolation deepspeed
"${pip[@]}" --editable '.[train,dev]'
touch "$venv/.ready"
