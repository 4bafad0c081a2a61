#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint, types, tests; arguments go to pytest. Needs nothing but Python >= 3.11: it makes .venv on the first run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repro/venv.sh verl trl
.venv/bin/python -m ruff check
.venv/bin/python -m mypy upref
exec .venv/bin/python -m pytest -n 2 -q "$@"
