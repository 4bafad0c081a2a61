#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# repro/run.sh OBJECTIVE [SCALE] [OVERRIDES...]      Needs only Python >= 3.11; makes .venv in the checkout on first use.
#
#   mini         (what runs without a SCALE) train the objective and its baseline, tiny, on this CPU, and report
#   reference    prove it, hold it against verl's real losses, draw its maps
#   other scales are repro/with_verl/launch.py's: training with verl
#
# OVERRIDES are name=value of the scale, for example: repro/run.sh up_dapo mini steps=50
# Exit status: 0 all well, 1 something differs or failed, 2 could not run, 130 interrupted (the same command goes on).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -eq 0 || $1 == -* ]]; then
    echo "usage: repro/run.sh OBJECTIVE [mini|reference] [name=value...], for example: repro/run.sh up_dapo (all: .venv/bin/upref list)" >&2
    exit 2
fi
objective=$1 scale=mini
shift
if [[ $# -gt 0 && $1 != *=* && $1 != -* ]]; then
    scale=$1
    shift
fi
launch=repro/with_verl/launch.py
case $scale in
    mini)
        repro/venv.sh verl
        exec .venv/bin/python -m repro.mini.compare "$objective" "$@"
        ;;
    reference)
        [[ $# -eq 0 ]] || { echo "run.sh: the reference has no settings to change, got '$*'." >&2 && exit 2; }
        repro/venv.sh verl
        exec .venv/bin/python repro/reference.py "$objective"
        ;;
esac
[[ -f $launch ]] || { echo "run.sh: there is no scale '$scale': choose mini or reference." >&2 && exit 2; }
repro/venv.sh verl
exec .venv/bin/python $launch "$objective" "$scale" "$@"
