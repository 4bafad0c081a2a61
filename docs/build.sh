#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the site into build/site/html: `bash docs/build.sh`. Needs what repro/run.sh needs, and no network after its first run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repro/venv.sh docs
exec .venv/bin/python -m docs.site "$@"
