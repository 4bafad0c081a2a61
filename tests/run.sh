#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint, types, tests, and three real steps of verl and vLLM; with arguments, which go to pytest, all but the last.
# Needs nothing but Python >= 3.11: it makes .venv on the first run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repro/venv.sh verl trl
.venv/bin/python -m ruff check
.venv/bin/python -m mypy upref
.venv/bin/python -m pytest -n 2 -q -m "not smoke" "$@"
[[ $# -eq 0 ]] || exit 0
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
if [[ ! -e .venv/stamp-smoke && $free -lt 8 ]]; then
    echo "tests/run.sh: left out the three steps of verl and vLLM: they need 8 GB of disk for packages, and $free are free."
    exit 0
fi
repro/venv.sh smoke
timeout 900 .venv/bin/python -m pytest -q -m smoke -k three_real_steps
