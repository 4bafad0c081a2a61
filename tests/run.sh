#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   tests/run.sh save          at every save, half a minute: lint, layers, types, and the laws of every objective
#   tests/run.sh quick         before a commit, minutes: lint, layers, types, the laws and the core's tests, no verl, no TRL
#   tests/run.sh               before a change is proposed: lint, layers, types, tests, the site, three real steps of verl and vLLM
#   tests/run.sh ARGUMENTS     all but verl's steps; the arguments go to pytest
#
# Needs nothing but Python 3.11 to 3.13: it makes .venv on the first run. PYTHON=... chooses the interpreter.
# What cannot be installed, or not on this Python, is left out with a sentence. The status is that of the tests.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
bin=.venv/bin

judge() {
    "$bin"/python -m ruff check
    "$bin"/python -m ruff format --check --quiet || { echo "run $bin/ruff format" && return 1; }
    judge_imports_and_types "$@"
}
judge_imports_and_types() {
    local layers
    layers=$("$bin"/lint-imports --no-logo --no-cache) || { echo "$layers" && return 1; }
    "$bin"/python -m mypy "$@"
}
left_out() { echo "tests/run.sh: left out $*" >&2; }

if [[ "$*" == save ]]; then
    [[ -x $bin/pytest && -x $bin/ruff ]] || repro/venv.sh mini
    "$bin"/python -m ruff check # code may be saved before it is formatted
    judge_imports_and_types upref upref_frameworks upref_course paper
    exec "$bin"/python -m pytest -n 2 --dist worksteal -q tests/core/test_{objectives,rollouts,aggregate,kl,ops,by_hand}.py
fi
if [[ "$*" == quick ]]; then
    repro/venv.sh mini
    judge upref upref_frameworks upref_course paper
    # A whole loss takes `check` a second, so what judges many of them (tests/verify) is left to the whole command.
    exec "$bin"/python -m pytest -n 2 --dist worksteal -q -m "not (slow or verl or trl or smoke or nightly)" tests/core tests/user_code tests/grim \
        tests/claims tests/pages/test_architecture.py tests/pages/test_requirements.py --ignore-glob '*test_figures*' --ignore-glob '*test_compile*'
fi
repro/venv.sh mini
for part in verl trl; do
    repro/venv.sh $part || left_out "the tests of $part: it could not be installed (see above)."
done
if [[ $# -gt 0 ]]; then
    judge upref upref_frameworks upref_course paper repro
    exec "$bin"/python -m pytest -n 2 --dist worksteal -q -m "not (smoke or nightly)" "$@"
fi
built=
if repro/venv.sh docs; then
    built=yes
else
    left_out "the tests of the documentation site: its tools could not be installed (see above)."
fi
ready=
if [[ -e .venv/stamp-smoke ]] && repro/venv.sh smoke; then
    ready=yes
fi
take_real_steps() {
    timeout 900 "$bin"/python -m pytest -q -m smoke tests/with_verl/test_smoke.py \
        -k three_real_steps
}

# Beside the tests: the static checks, the site, and the real steps if an earlier run installed
# what they need. If not, they wait: an installation must not change the packages under the tests.
judge upref upref_frameworks upref_course paper repro >.venv/judge.log 2>&1 &
judging=$! building= stepping= status=0
if [[ $built ]]; then
    "$bin"/python -m pytest -q -m site tests/pages/test_site.py >.venv/site.log 2>&1 &
    building=$!
fi
if [[ $ready ]]; then
    take_real_steps >.venv/smoke.log 2>&1 &
    stepping=$!
fi
# three workers on two CPUs, because some tests sleep
"$bin"/python -m pytest -n 3 --dist worksteal -q -m "not (smoke or site or nightly)" || status=$?
wait $judging || status=$?
cat .venv/judge.log
if [[ $building ]]; then
    wait $building || status=$?
    cat .venv/site.log
fi
if [[ $stepping ]]; then
    wait $stepping || status=$?
    cat .venv/smoke.log
    exit $status
fi
[[ $status -eq 0 ]] || exit $status

# From here on the result of the tests stands, whatever cannot be installed.
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
if [[ ! -e .venv/stamp-smoke && $free -lt 8 ]]; then
    left_out "the three steps of verl and vLLM: they need 8 GB of disk for packages, and $free are free."
elif repro/venv.sh smoke; then
    take_real_steps
else
    left_out "the three steps of verl and vLLM: they could not be installed (see above)."
fi
