#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# repro/run.sh OBJECTIVE: prove it, hold it against verl's and TRL's real losses, draw its maps, report. Needs only Python >= 3.11.
# Exit status: 0 all holds, 1 something differs, 2 could not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -ne 1 || $1 == -* ]]; then
    echo "usage: repro/run.sh OBJECTIVE, for example: repro/run.sh up_dapo (all: .venv/bin/upref list)" >&2
    exit 2
fi
repro/venv.sh verl trl
exec .venv/bin/python repro/reference.py "$1"
