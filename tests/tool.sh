#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tests/tool.sh COMMAND ARGUMENTS: run a tool of the developer's environment, from anywhere in the checkout. That is the
# environment that is active, else .venv, else what is on the PATH; one without the tools of `pip install -e '.[test,dev]'` is not it.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
for bin in "${VIRTUAL_ENV-}/bin" "$PWD/.venv/bin"; do
    if [[ -x $bin/lint-imports && -x $bin/python ]]; then
        PATH=$bin:$PATH
        break
    fi
done
exec "$@"
