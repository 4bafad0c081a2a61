#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make or refresh .venv in this checkout. Run it, do not source it; it is quiet and immediate when nothing changed.
#
#   repro/venv.sh                upref (editable) with its test and dev tools
#   repro/venv.sh mini verl      the same, with any of mini (the miniature's models), verl and trl (their losses on a CPU),
#                                lm (a pretrained language model), docs (what builds the site), smoke (verl's trainer and vLLM, CPU builds)
#   repro/venv.sh gpu            another one, .venv-gpu: upref, verl's trainer and vLLM for CUDA, which need another torch
#   repro/venv.sh gpu flash      the same with flash-attn, which all paper scales and gpu8 need
#   repro/venv.sh gpu megatron   the same with Megatron too, which paper_gspo needs
#   repro/venv.sh which gpu      print the Python that .venv-gpu has or would have, and install nothing
#
# Every version is in repro/requirements, with the hashes of its files, and pip refuses another file. Needs Python 3.11, 3.12 or 3.13 with venv (PYTHON=... chooses one) and a package
# index for pip. Writes only inside the checkout, and never into an environment that it did not make. Exit status 2: it could not; 130 or 143: it was interrupted.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
lists=repro/requirements
venv=.venv pythons=(python3.11 python3.12 python3.13 python3) size="it downloads the test tools${*:+, and what $* needs}"
which=
[[ ${1-} != which ]] || { which=yes && shift; }
if [[ ${1-} == gpu ]]; then # flash-attn and Megatron's parts are prebuilt for Python 3.12 only
    venv=.venv-gpu pythons=(python3.12 python3.11 python3) size="11 GB"
fi
py=$venv/bin/python

say() { echo "venv.sh: $*" >&2; }
die() { say "$*" && exit 2; }
stop() {
    kill $pip ${!-} 2>/dev/null || true # the interrupt may come before `pip=$!`
    say "$1; the same command continues." && exit "$2"
}
pip=
trap 'stop interrupted 130' INT
trap 'stop terminated 143' TERM

for part in "$@"; do
    case $part in
        mini | lm | verl | trl | docs | smoke) [[ $1 != gpu ]] || die "gpu is an environment of its own: ask for it alone, or with flash or megatron." ;;
        gpu) [[ $1 == gpu ]] || die "gpu is an environment of its own: ask for it alone, or first of gpu, flash, megatron." ;;
        flash | megatron) [[ $1 == gpu ]] || die "$part is for .venv-gpu: repro/venv.sh gpu $part." ;;
        *) die "knows mini, lm, verl, trl, docs, smoke, gpu, flash and megatron, not '$part'." ;;
    esac
done

# What a part was installed from. The place of the checkout is in it, because the scripts of an environment name it.
stamp() { { pwd && cat pyproject.toml $lists/torch{,-cpu}.txt "$lists/$1.txt"; } | cksum; }
fresh() { [[ -x $py && -f $venv/stamp-$1 && $(<"$venv/stamp-$1") == "$(stamp "$1")" ]]; }
chosen() { [[ -z ${PYTHON-} || $(version "$PYTHON") == "$(version "$py")" ]]; }
version() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || true; }
all_fresh() { for part in base "$@"; do fresh "$part" || return 1; done; }

# Whether an environment is here that this script did not make: it is left alone. A link leads to somebody's folder.
is_foreign() {
    [[ -L $venv ]] && return
    [[ -n $(ls -A $venv 2>/dev/null) && ! -f $venv/made && ! -f $venv/begun ]]
}

# The Python of the environment, or the one that it will be made with, in `python`; `make` where it is to be made.
choose() {
    python=$py make=
    is_foreign && die "$venv is here and was not made by this script, which leaves it alone: run the same command in another clone of this checkout, or remove or rename your $venv."
    if [[ -f $venv/made ]] && chosen && "$py" -c 'import pip' 2>/dev/null; then return; fi
    make=yes
    [[ -z ${PYTHON-} ]] || pythons=("$PYTHON")
    for python in "${pythons[@]}"; do
        case $(version "$python") in 3.11.* | 3.12.* | 3.13.*) break ;; *) python= ;; esac
    done
    if [[ -z $python ]]; then
        found=$(version "${PYTHON:-python3}")
        die "needs Python 3.11, 3.12 or 3.13, and ${PYTHON:-python3} is ${found:-not there}. For a newer Python, 'pip install .' installs the library alone; this command's pinned packages are not tested there."
    fi
}

if [[ -n $which ]]; then
    choose && echo "$python" && exit 0
fi
all_fresh "$@" && chosen && exit 0
[[ -w . ]] || die "cannot write in $PWD."
exec 9>>$venv.lock
if [[ -n $(command -v flock) ]] && ! flock -n 9; then
    say "another process is making $venv, waiting for it."
    flock 9 & # in the background, so that it can be interrupted
    wait $!
fi

choose
for part in "$@"; do
    [[ $part != @(flash|megatron) || $(version "$python") == 3.12.* ]] ||
        die "$part is prebuilt for Python 3.12 only, and $venv has or gets $(version "$python"): PYTHON=python3.12 repro/venv.sh $*."
done
if [[ -n $make ]]; then
    say "making $venv with $python (once; $size)."
    { mkdir -p $venv && touch $venv/begun; } || die "cannot write in $venv." # an interrupted one is known by it
    find $venv -mindepth 1 -maxdepth 1 ! -name begun -exec rm -rf {} + || die "cannot remove what is in $venv; please do."
    said=$("$python" -m venv $venv 2>&1) ||
        die "'$python -m venv' failed: $(tail -n 1 <<<"$said") (on Debian and Ubuntu it needs the package python3-venv)."
    mv $venv/begun $venv/made
fi

# Remove packages of which a file is missing, because pip was killed: it takes what it has a record of for whole, and
# would install a new version over what is left of the old one. It sets aside what it replaces, with a ~.
forget() {
    "$py" -I - "$venv"/lib/python3*/site-packages <<'END'
import csv, pathlib, shutil, sys
site = pathlib.Path(sys.argv[1])
for left in site.glob("~*"):
    shutil.rmtree(left) if left.is_dir() else left.unlink()
again = True
while again:  # two packages may have a file in common
    again = False
    for info in site.glob("*.dist-info"):
        files = [info / "RECORD"]
        if files[0].exists():
            with open(files[0], encoding="utf-8", newline="") as record:
                files += [site / name for name, *_ in csv.reader(record) if not name.endswith(".pyc")]
        if not all(file.exists() for file in files):
            for file in files:
                file.unlink(missing_ok=True)
            shutil.rmtree(info)
            again = True
END
}

# pip's arguments. In the background, because a trap waits for what is in the foreground. Leaves what it said in `said`.
installed() {
    exec 8< <(exec "$py" -m pip --disable-pip-version-check --no-input --no-cache-dir install --quiet "$@" 2>&1)
    pip=$!
    IFS= read -r -d '' said <&8 || true
    wait $pip
}

# install WHAT PIP-ARGUMENTS...
install() {
    local why
    installed "${@:2}" && return
    echo "$said" 2>/dev/null >$venv/pip.log || true
    case $said in
        *"No space left"* | *"Disk quota"*) why="the disk is full" ;;
        *NewConnectionError* | *NameResolutionError* | *ConnectTimeout* | *ReadTimeout* | *ProtocolError*) why="the package index did not answer" ;;
        *"DO NOT MATCH THE HASHES"*) why="a file is not the one whose hash is in $lists" ;;
        *) why=$(grep 'ERROR: ' <<<"$said" | grep -v "dependency conflicts" | tail -n 1) || why=$(tail -n 1 <<<"$said") ;;
    esac
    die "could not install $1: $why. Run the same command again to continue (all that pip said: $venv/pip.log)."
}

torch() {
    if [[ $(uname -s) == Linux ]] && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
        # Alone, so that no other package is looked for there, and impatient, because PyPI's build will do as well.
        installed --no-deps --retries 0 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu \
            --require-hashes -r $lists/torch-cpu.txt && return
        say "the CPU build of torch could not be downloaded, so the CUDA build is installed: the same results, 3 GB more."
    fi
    install torch --no-deps --require-hashes -r $lists/torch.txt
}

forget
for part in base "$@"; do
    fresh "$part" && continue
    if [[ $part == @(verl|smoke|gpu) && $(version "$py") == 3.13.* ]]; then
        [[ $part == verl ]] || die "$part needs Python 3.11 or 3.12, because verl 0.9.1 does; $venv has $(version "$py")."
        say "verl 0.9.1 needs Python 3.11 or 3.12 and $venv has $(version "$py"): the rest is installed, and the tests of verl are skipped."
    fi
    rm -f "$venv/stamp-$part"
    if [[ $part == base ]]; then
        builder=() # .venv-gpu: as pyproject.toml has it
        if [[ $venv == .venv ]]; then
            builder=(--no-build-isolation) # base has it
            torch
            install setuptools --no-deps --require-hashes -r <(grep ^setuptools== $lists/base.txt) # builds what is no wheel
            install "what base needs" --no-deps --use-pep517 --no-build-isolation --require-hashes -r $lists/base.txt
        fi
        install upref --no-deps "${builder[@]}" -e .
        # A relative path: Python reads this file in the locale's encoding, and the checkout may have any name.
        for path in "$venv"/lib/python3*/site-packages/_*upref_rl.pth; do echo ../../../.. >"$path"; done
    elif [[ $part == @(flash|megatron) ]]; then
        install "what $part needs" --no-deps -r "$lists/$part.txt"
    else
        install "what $part needs" --no-deps --require-hashes -r "$lists/$part.txt"
    fi
    stamp "$part" >"$venv/stamp-$part" || die "cannot write in $venv: the disk is full. Run the same command again to continue."
done
