#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   tests/run.sh               lint, layers, types, tests, and three real steps of verl and vLLM
#   tests/run.sh quick         what to run at every save: lint, layers, types, the laws and the core's tests, no verl, no TRL
#   tests/run.sh ARGUMENTS     all but verl's steps; the arguments go to pytest
#
# Needs nothing but Python >= 3.11: it makes .venv on the first run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=.venv/bin

judge() {
    "$bin"/python -m ruff check
    "$bin"/lint-imports --no-logo --no-cache >.venv/layers.log || { cat .venv/layers.log && return 1; }
    "$bin"/python -m mypy "$@"
}

if [[ "$*" == quick ]]; then
    repro/venv.sh
    judge upref
    # Left out: the experiments, pictures and compilers, and what holds many whole losses against each other.
    exec "$bin"/python -m pytest -n 2 -q -m "not (slow or verl or trl or smoke)" --ignore tests/mini \
        --ignore tests/with_verl --ignore-glob '*test_zoo*' --ignore-glob '*test_identify*' --ignore-glob '*test_audit*' \
        --ignore tests/exact --ignore tests/explorer --ignore-glob '*test_trl*' --ignore-glob '*test_figures*' --ignore-glob '*test_compile*'
fi
repro/venv.sh verl trl
judge upref repro
[[ $# -eq 0 ]] || exec "$bin"/python -m pytest -n 2 -q -m "not smoke" "$@"
"$bin"/python -m pytest -n 2 -q -m "not (smoke or site)"
# The documentation toolchain comes after the tests: where it cannot be installed, their result still stands.
if repro/venv.sh docs; then
    "$bin"/python -m pytest -q -m site
else
    echo "tests/run.sh: left out the tests of the documentation site: its toolchain could not be installed (see above)."
fi
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
if [[ ! -e .venv/stamp-smoke && $free -lt 8 ]]; then
    echo "tests/run.sh: left out the three steps of verl and vLLM: they need 8 GB of disk for packages, and $free are free."
    exit 0
fi
repro/venv.sh smoke
timeout 900 "$bin"/python -m pytest -q -m smoke -k three_real_steps
