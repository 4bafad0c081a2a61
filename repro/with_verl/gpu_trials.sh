#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_trials.sh OUT SECONDS [ARGUMENTS]: the three trials of gpu_trial.py side by side on one GPU, each ended after SECONDS.
#
# A trial starts for minutes and trains for one, so three of them take little longer than one. verl 0.9.1 names
# its sockets in /tmp by the number of the Ray job, which is 1 in each cluster: each trial has a /tmp of its own
# (unshare, as root; this checkout is at /keep there), so the packages and the interpreter must lie elsewhere.
# PYTHONPATH names the packages of pack.py, PYTHON the interpreter. TRIALS chooses others than toy, fault and half:
# TRIALS="smollm2 smollm2-dapo" trains SmolLM2 with UP-DAPO and with DAPO, from the same start.
# ARGUMENTS are given to each gpu_trial, behind its own: --cpu --steps 2 rehearses this script without a GPU.
# verl is ended 60 s before SECONDS, and what it has logged is judged. OUT gets NAME.tgz of each: gpu.json,
# the output, the logged and the recorded steps.
set -uo pipefail
[[ $# -ge 2 ]] || { echo "usage: gpu_trials.sh OUT SECONDS [ARGUMENTS]" >&2 && exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$1 limit=$2 python=${PYTHON-python3} kept=/run/upref-trials
shift 2
declare -A arguments=([toy]="--steps 24" [fault]="--fault --steps 8" [half]="--size half --steps 3"
    [smollm2]="--size smollm2 --steps 20" [smollm2-dapo]="--size smollm2 --steps 20 --objective dapo")
trials=${TRIALS-toy fault half}
for name in $trials; do
    [[ -n ${arguments[$name]-} ]] || { echo "gpu_trials.sh: TRIALS has '$name': choose from ${!arguments[*]}." >&2 && exit 2; }
done
[[ $limit -gt 60 ]] || { echo "gpu_trials.sh: SECONDS must be above 60: the last 60 are for the judgement." >&2 && exit 2; }
rm -rf "$kept" && mkdir -p /keep "$kept" "$out" || exit 2
# Ray asks for this machine's own name
getent hosts "$(hostname)" >/dev/null || echo "127.0.0.1 $(hostname)" >>/etc/hosts

trial() { # NAME ARGUMENTS, in namespaces of its own
    mount --make-rprivate / && mount --rbind "$PWD" /keep && mount -t tmpfs tmpfs /tmp && cd /keep || exit 2
    export TMPDIR=/tmp PYTHONPATH=/keep:${PYTHONPATH-} PYTHONUNBUFFERED=1
    name=$1 && shift
    timeout -s TERM -k 15 "$limit" "$python" -m repro.with_verl.gpu_trial "/tmp/$name" --limit "$((limit - 60))" "$@" \
        >"$kept/$name.out" 2>&1
    echo "$name: status $?, $SECONDS s" | tee -a "$kept/$name.out"
    cp "$kept/$name.out" "/tmp/$name/output"
    cd "/tmp/$name" && rm -rf model checkpoints hydra && tar czf "$kept/$name.tgz" .
}
export -f trial
export limit python kept
for name in $trials; do
    # a session of its own: Ray ends the process groups of its workers
    # shellcheck disable=SC2086 # one word an argument
    setsid unshare -m bash -c 'trial "$@"' trial "$name" ${arguments[$name]} "$@" &
done
wait
for name in $trials; do
    cp "$kept/$name.tgz" "$out/" || echo "$name left nothing"
    grep -E "^  step|: steps|WRONG|^verl:" "$kept/$name.out" | cut -c 1-250
done
