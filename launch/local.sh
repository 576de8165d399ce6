#!/usr/bin/env bash
# Train on this machine: the command starts its own ranks, one process each (one GPU each, where there are some).
#   launch/local.sh experiment=quickstart train.steps=20
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/env.sh
source "$root/launch/env.sh"
engine="$root/.venv/bin/moe-engine"
[[ -x "$engine" ]] || engine=moe-engine # not made by `make`: the one on PATH
exec "$engine" train "$@"
