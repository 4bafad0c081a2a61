#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make or refresh .venv in this checkout. Run it, do not source it; it is quiet and immediate when nothing changed.
#
#   repro/venv.sh              upref (editable) with its test and dev tools
#   repro/venv.sh verl trl     the same, and what those frameworks' losses need on a CPU
#   repro/venv.sh docs         the same, and what docs/build.sh builds the site with
#   repro/venv.sh smoke        the same, and all of verl's trainer and vLLM, CPU builds
#   repro/venv.sh gpu          another one, .venv-gpu: upref, verl's trainer and vLLM for CUDA, which want another torch
#   repro/venv.sh gpu flash    the same with flash-attn, which all paper scales and gpu8 need; prebuilt for Python 3.12
#   repro/venv.sh gpu megatron the same with Megatron too, which paper_gspo needs; prebuilt for Python 3.12
#
# Needs Python 3.11 or 3.12 (3.12 for .venv-gpu where there is one) with venv, and a package index for pip. Writes only inside the checkout. Exit status 2: it could not.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
venv=.venv constraints=repro/constraints.txt size="one to three minutes, 1 to 2 GB" pythons="python3.11 python3.12 python3"
if [[ ${1-} == gpu ]]; then
    pythons="python3.12 python3.11 python3" # flash-attn and Megatron's parts are prebuilt for 3.12 only
    venv=.venv-gpu constraints=repro/with_verl/requirements-gpu.txt size="five to ten minutes, 11 GB"
fi
py=$venv/bin/python
log=$venv/pip.log
lock=$venv-lock      # names the process that is changing it
half=$venv-half-made # there while it is being changed: still there without that process, it was interrupted
declare -A list=(
    [verl]=repro/with_verl/requirements-cpu.txt
    [trl]=repro/requirements-trl.txt
    [docs]=repro/requirements-docs.txt
    [smoke]=repro/with_verl/requirements-smoke.txt
    [gpu]=repro/with_verl/requirements-gpu.txt
    [flash]=repro/with_verl/requirements-flash.txt
    [megatron]=repro/with_verl/requirements-megatron.txt
)

say() { echo "venv.sh: $*" >&2; }
die() { say "$*" && exit 2; }

for part in "$@"; do
    [[ -n $part && -n ${list[$part]-} ]] || die "knows verl, trl, docs, smoke, gpu, flash and megatron, not '$part'."
    case $part in
        gpu) [[ $1 == gpu ]] || die "gpu is an environment of its own: ask for it alone, or first of gpu, flash, megatron." ;;
        flash | megatron) [[ $1 == gpu ]] || die "$part is for .venv-gpu: repro/venv.sh gpu $part." ;;
        *) [[ $1 != gpu ]] || die "gpu is an environment of its own: ask for it alone, or with flash or megatron." ;;
    esac
done
parts=(base "$@")

# The checkout's place is stamped too, because an editable install points to it.
stamp() { { echo "$root" && cat repro/venv.sh repro/constraints.txt "${list[@]}" pyproject.toml; } | cksum; }
fresh() { [[ -x $py && -f $venv/stamp-$1 && $(<"$venv/stamp-$1") == "$(stamp)" ]]; }
all_fresh() { for part in "${parts[@]}"; do fresh "$part" || return 1; done; }

[[ ! -e $half ]] && all_fresh && exit 0

# One at a time.
[[ -w $root ]] || die "cannot write in $root."
until (set -o noclobber && echo $$ >$lock) 2>/dev/null; do
    owner=$(cat $lock 2>/dev/null) || continue
    [[ -n $owner ]] || { sleep 1 && owner=$(cat $lock 2>/dev/null) || continue; }
    if [[ -n $owner ]] && kill -0 "$owner" 2>/dev/null; then
        say "process $owner is making $venv, waiting for it (if it is not, remove $lock)."
        while kill -0 "$owner" 2>/dev/null && [[ -e $lock ]]; do sleep 1; done
    else
        rm -f $lock
    fi
done
trap 'rm -f $lock' EXIT
if [[ -e $half ]]; then
    say "$venv was left half-made, starting over." # pip may have been stopped between two files
    rm -rf $venv || die "cannot remove $venv; please do."
elif [[ -e $venv ]] && ! "$py" -c 'import pip' 2>/dev/null; then
    rm -rf $venv || die "cannot remove $venv; please do." # made by a Python that is gone
fi
touch $half
die() { rm -f $half && say "$*" && exit 2; } # an error of pip leaves it whole

if [[ ! -e $venv ]]; then
    python=
    for candidate in $pythons; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            python=$candidate && break
        fi
    done
    [[ -n $python ]] || die "needs Python 3.11 or 3.12 (verl 0.9.1 stops there), and finds neither on the PATH."
    say "making $venv with $python (once; $size)."
    "$python" -m venv $venv >/dev/null 2>&1 ||
        { rm -rf $venv && die "'$python -m venv' failed (on Debian and Ubuntu: install python3-venv)."; }
fi

: >$log
# install WHAT PIP-ARGUMENTS...
install() {
    "$py" -m pip --disable-pip-version-check --no-input --no-cache-dir install --quiet -c $constraints "${@:2}" >>$log 2>&1 ||
        die "pip could not install $1: $(grep 'ERROR: ' $log | tail -n 1 | sed 's/^ *//' || true) (all it said: $log)."
}

if [[ $venv == .venv-gpu ]] && ! fresh base; then
    install upref --no-deps -e .
    stamp >$venv/stamp-base
elif ! fresh base; then
    rm -f $venv/stamp-base
    if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
        # The CPU build, 2.13.0+cpu, sorts above PyPI's CUDA build (3 GB more). Alone, so that no other package is looked for
        # there, and impatient, because pip goes on without an index that does not answer.
        install torch --no-deps --retries 0 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu torch
        [[ $(uname -sm) != "Linux x86_64" ]] || compgen -G "$venv/lib/python3*/site-packages/torch-*+cpu.dist-info" >/dev/null ||
            say "download.pytorch.org did not answer, so torch is the CUDA build: the same results, a larger download."
    fi
    install upref -e '.[test,dev]'
    stamp >$venv/stamp-base
fi
for part in "$@"; do
    fresh "$part" && continue
    rm -f "$venv/stamp-$part"
    install "what $part needs" --no-deps -r "${list[$part]}"
    stamp >"$venv/stamp-$part"
done
rm -f $half
