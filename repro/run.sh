#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# repro/run.sh OBJECTIVE [SCALE] [OVERRIDES...]      Needs only Python 3.11 to 3.13 (smoke, cpu, gpu1: 3.11 or
#                                                    3.12; gpu8, paper: 3.12); makes .venv in the checkout on first use.
#
#   mini         train the objective and its baseline, tiny, on this CPU, and report
#   lm           train SmolLM2-135M-Instruct, a pretrained language model that pip brings, on two-digit addition, on this CPU
#   reference    prove it, hold it against verl's and TRL's real losses, draw its maps
#   trl          train Qwen2.5-0.5B-Instruct on GSM8K in TRL beside DAPO, on one GPU of 12 GB (--tiny: on this CPU)
#   smoke, cpu   verl's own trainer with vLLM rollouts on the CPU, a tiny model; cpu takes the path of the GPU scales
#   gpu1, gpu8, paper   verl on GPUs: one GPU for a day, one machine for a weekend, the paper's settings
#                (repro/with_verl/PAPER.md), in .venv-gpu, which it makes, or with the Python that has verl and vLLM
#                already, as in verl's image: UPREF_PYTHON=python repro/run.sh ...   (--shakedown: two steps
#                and a page about them; --dry-run --gpu H100: hours, dollars and memory, without a GPU)
#
# Without a SCALE: the largest that this machine's GPUs or its Ray cluster's carry, and why; mini where there is none.
# GPUs and driver are looked at before anything is installed; what they cannot carry is refused in one sentence.
# OVERRIDES are name=value of the scale, for example: repro/run.sh up_dapo mini steps=50
# mini, lm and trl compare with another objective by --against: repro/run.sh my_objective mini --against dapo
# Exit status: 0 all well, 1 something differs or failed, 2 could not run, 75 died after a checkpoint, 130 or 143
# interrupted (in these three cases the same command continues the run).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -eq 0 || $1 == -* ]]; then
    echo "usage: repro/run.sh OBJECTIVE [mini|lm|reference|smoke|cpu|trl|gpu1|gpu8|paper] [name=value...], for example: repro/run.sh up_dapo (all: .venv/bin/upref list)" >&2
    exit 2
fi
objective=$1 scale=
shift
if [[ $# -gt 0 && $1 != *=* && $1 != -* ]]; then
    scale=$1
    shift
fi
if [[ -z $scale && -z ${RAY_ADDRESS-} ]] && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    scale=mini
    echo "mini: no NVIDIA GPU is visible here (other scales without one: lm, reference, smoke, cpu, trl --tiny; with one: trl, gpu1, gpu8, paper)."
fi
if [[ -n ${UPREF_PYTHON-} ]]; then
    absent='(p for p in ("torch", "verl", "omegaconf") if not importlib.util.find_spec(p))'
    lacks=$("$UPREF_PYTHON" -c "import importlib.util; print(*$absent)" 2>/dev/null) || lacks="an interpreter"
    [[ -z $lacks ]] || { echo "run.sh: UPREF_PYTHON=$UPREF_PYTHON lacks $lacks: name the Python that has verl and vLLM, or leave it out." >&2 && exit 2; }
fi
parts=
if [[ -z ${UPREF_PYTHON-} && $scale != @(mini|lm|reference|smoke|cpu) ]]; then # GPUs and driver, before an install of 11 GB
    gpu=gpu && [[ $scale != trl ]] || gpu=
    python=$(repro/venv.sh which $gpu) || exit $?
    chosen=$("$python" -B -m repro.with_verl.machine.ladder "$objective" "$scale" "$@") || exit $?
    read -r scale parts <<<"$chosen"
    [[ $scale != - ]] || scale=
fi
case $scale in
    mini)
        repro/venv.sh mini
        exec .venv/bin/python -m repro.mini.compare "$objective" "$@"
        ;;
    lm) # memory and disk, before an install of 2 GB
        python=$(repro/venv.sh which) || exit $?
        "$python" -B -m repro.lm.room || exit $?
        repro/venv.sh lm
        exec .venv/bin/python -m repro.lm "$objective" "$@"
        ;;
    reference)
        [[ $# -eq 0 ]] || { echo "run.sh: the reference has no settings to change, got '$*'." >&2 && exit 2; }
        repro/venv.sh verl trl
        exec .venv/bin/python -m repro.reference "$objective"
        ;;
    trl)
        repro/venv.sh verl trl
        exec .venv/bin/python -m repro.with_trl.train "$objective" "$@"
        ;;
    smoke)
        repro/venv.sh smoke
        exec .venv/bin/python -m repro.with_verl.cpu.smoke "$objective" "$@"
        ;;
    cpu)
        [[ -n ${UPREF_PYTHON-} ]] || repro/venv.sh smoke
        exec "${UPREF_PYTHON-.venv/bin/python}" -m repro.with_verl.run.launch "$objective" cpu "$@"
        ;;
esac
python=${UPREF_PYTHON-}
if [[ -z $python ]]; then
    if [[ $parts == dry && -f .venv-gpu/stamp-gpu ]]; then
        python=.venv-gpu/bin/python
    elif [[ $parts == dry ]]; then # it reads verl's configuration, and needs no GPU
        repro/venv.sh verl
        python=.venv/bin/python
    else
        # shellcheck disable=SC2086 # one word a part
        repro/venv.sh $parts
        python=.venv-gpu/bin/python
    fi
fi
exec "$python" -m repro.with_verl.run.launch "$objective" ${scale:+"$scale"} "$@"
