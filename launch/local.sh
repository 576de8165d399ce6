#!/usr/bin/env bash
# Train on this machine: the command starts its own ranks, one process each.
#   launch/local.sh experiment=quickstart train.steps=20
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
engine="$root/.venv/bin/moe-engine"
[[ -x "$engine" ]] || engine=moe-engine # not made by `make`: the one on PATH
exec "$engine" train "$@"
