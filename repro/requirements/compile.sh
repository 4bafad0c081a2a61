#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Resolve the .in lists of this folder into the .txt files that repro/venv.sh installs.
#
#   repro/requirements/compile.sh             keep the pins that still fit
#   repro/requirements/compile.sh --upgrade   the newest versions that the .in lists allow
#   repro/requirements/compile.sh --check     write nothing; status 1 if a file is not what its list resolves to
#
# Every file that pip installs from has the sha256 of each file of a package; constraints.txt, which nothing is installed
# from, has none. Needs uv (in .venv, or on the PATH) and a package index (UV_DEFAULT_INDEX, if it is not the usual one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PATH=$PWD/.venv/bin:$PATH
into=repro/requirements
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/repro" && cp pyproject.toml "$work" && cp -r repro/requirements "$work/repro"
cd "$work/repro/requirements"

# resolve NAME ARGUMENTS: write NAME.txt, for every Python from 3.11.0 on
resolve() {
    uv pip compile --quiet --no-header --annotation-style line --python-version 3.11.0 "${hashes[@]}" -o "$1.txt" "${@:2}"
    { [[ ! -f $1.in ]] || sed -n '/^#/!q;p' "$1.in" && echo "# Compiled by repro/requirements/compile.sh." &&
        awk '/\\$/ { sub(/ *\\$/, ""); sub(/^ +/, " "); printf "%s", $0; next } { sub(/^ +--/, " --"); print }' "$1.txt"; } >"$1.new" # one line a package
    mv "$1.new" "$1.txt"
}
upgrade=() && [[ ${1-} != --upgrade ]] || upgrade=(--upgrade)
base=(base.in ../../pyproject.toml --extra test --extra dev)
cpu=(--universal --excludes cpu-excludes.txt)
hashes=()
resolve constraints "${base[@]}" verl.in trl.in docs.in lm.in "${cpu[@]}" "${upgrade[@]}"
hashes=(--generate-hashes)
resolve torch torch.in --universal -c constraints.txt "${upgrade[@]}"
torch=$(sed -nE 's/^(torch==[^ ]+).*/\1/p' constraints.txt)
grep -q "^$torch+cpu " torch-cpu.txt || {
    echo "compile.sh: torch-cpu.txt is not of $torch: write the hashes that download.pytorch.org/whl/cpu/torch has." >&2
    exit 1
}
part=("${cpu[@]}" -c constraints.txt --no-emit-package torch --offline) # torch comes first; all was just looked up
resolve base "${base[@]}" "${part[@]}"
for name in mini verl trl docs lm; do resolve $name $name.in "${part[@]}"; done
resolve release release.in --universal "${upgrade[@]}"
resolve smoke smoke.in --excludes smoke-excludes.txt --universal "${upgrade[@]}"
resolve gpu gpu.in ../../pyproject.toml --python-platform x86_64-unknown-linux-gnu "${upgrade[@]}"

cd - >/dev/null
if [[ ${1-} == --check ]]; then
    diff -r $into "$work/$into"
else
    cp "$work/$into"/*.txt $into
fi
