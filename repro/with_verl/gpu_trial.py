# SPDX-License-Identifier: Apache-2.0
"""verl's own trainer with vLLM on one GPU, small enough for minutes: the toy of the
smoke scale, random weights of the sizes of Qwen2.5-0.5B, or SmolLM2-135M-Instruct.

    python -m repro.with_verl.gpu_trial OUT [--size toy|half|smollm2] [--objective up_dapo]
    [--steps 24] [--fault] [--limit SECONDS] [--cpu] [--dry-run] [verl overrides]

toy learns in 24 steps. half shows memory, sleep mode and the transfer of real weights;
random weights are no evidence for an objective. smollm2 is a pretrained model, which
learns two-digit addition. Every micro-batch is compared with the reference inside the
loss, every optimizer step is judged as a whole and recorded, and `upref replay` judges
the recorded steps at the end. --fault samples at temperature 0.7 and has vLLM report
log-probabilities of before it, which replay must name.

OUT/gpu.json gets one row, in the form that `python -m benchmarks.gpu.keep` reads. --cpu
rehearses toy and smollm2 with vLLM's CPU build (the part smoke of repro/venv.sh), and
writes OUT/cpu.json. Exit status: 0 all of it held, 1 something did not, 2 it could not
run.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from argparse import RawDescriptionHelpFormatter
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import upref
from repro import Parser
from repro.with_verl import addition
from repro.with_verl.config.compose import watched
from repro.with_verl.cpu import smoke, toy
from repro.with_verl.health import STEPS
from repro.with_verl.machine import here
from repro.with_verl.place import EXTERNAL_MODULES, modules_of_user, pythonpath
from repro.with_verl.run import advice, records, watch
from upref.files import MARK, own_folder, write_atomically
from upref_frameworks.verl.record import FOLDER, HOW_OFTEN

ROLLOUT = "actor_rollout_ref.rollout"
# seconds: without a sign of life before the first step, without a step, to shut down
FIRST, STALL, END = 100, 60, 20
REPLAY = 120  # seconds that replay may take; a CPU may be busy
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
EVERYWHERE: dict[str, object] = _TABLES["everywhere"]
ONE_GPU: dict[str, object] = _TABLES["one_gpu"]
FAULT: dict[str, object] = _TABLES["fault"]
SHOWN: dict[str, str] = _TABLES["shown"]
MILESTONES: dict[str, str] = _TABLES["milestones"]
HALF: dict[str, Any] = _TABLES["shape"]
# FlashAttention 3 has kernels for heads of 64, 96, 128, 192 and 256
TOY: dict[str, Any] = toy.SIZES | {"head_dim": 64}
OF_SIZE: dict[str, dict[str, object]] = {
    "toy": {},
    "half": _TABLES["half"],
    "smollm2": addition.SETTINGS,
}
SHAPES = {"toy": TOY, "half": HALF, "smollm2": addition.SIZES}
NAMED = "raw_temperature"  # the cause that replay must give to a step of it
DAY = 24 * 3600  # seconds
MADE = ("model", "data.parquet")  # what `make` makes, and a later run uses again
BAND = ("clip/pos_high", "clip/pos_low", "clip/neg_high", "clip/neg_low", "above_high")
PACKAGES = ("verl", "vllm", "ray", "TransferQueue", "torch", "triton", "transformers")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, **_: Any
) -> dict[str, Any]:
    """Return verl's reward for `half`: the share of words whose number modulo 4 is the
    prompt's digit, 0 without a number. Random weights score about a quarter, with some
    spread. `acc` is 1 above a quarter.
    """
    numbers = [int(w[1:]) for w in solution_str.split() if w[1:].isdigit()]
    right = sum(n % toy.DIGITS == int(ground_truth) for n in numbers)
    score = right / max(len(numbers), 1)
    return {"score": score, "acc": float(score > 1 / toy.DIGITS), "pred": ""}


def settings(
    objective: upref.Objective,
    steps: int,
    out: Path,
    size: str,
    fault: bool,
    cpu: bool = False,
) -> dict[str, object]:
    """Return what verl is given, by key.

    Args:
        objective: that is trained.
        steps: of verl's trainer.
        out: the folder of the run.
        size: toy, half or smollm2.
        fault: whether vLLM reports log-probabilities of before the temperature.
        cpu: whether it is rehearsed on a CPU.
    """
    if cpu:
        found = smoke.settings(objective, steps, out)
    else:
        found = smoke.toy_settings(objective, steps, out) | ONE_GPU
    found |= EVERYWHERE | OF_SIZE[size]
    return found | (FAULT if fault else {})


def environment(log: Path, eager: bool) -> dict[str, str]:
    """Return the environment variables of every process of verl.

    Args:
        log: where verl's file logger writes.
        eager: nothing is compiled; it would take half a minute.
    """
    ours = "upref_frameworks.verl.training"
    found = {
        "PYTHONPATH": pythonpath(),
        EXTERNAL_MODULES: ",".join([*modules_of_user([ours]), ours]),
        "VERL_USE_EXTERNAL_PLUGINS": "none",  # upref once is enough
        "VERL_FILE_LOGGER_PATH": str(log),
        # vLLM's sampler imports flashinfer otherwise
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        # it counts the memory of a machine whose memory grows as it is used
        "RAY_memory_monitor_refresh_ms": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    return found | ({"TORCHDYNAMO_DISABLE": "1"} if eager else {})


def make(out: Path, size: str) -> None:
    """Make the prompts, the tokenizer and the weights of a size in the folder of the
    run. toy.SIZES is changed to that size.
    """
    if size == "smollm2":
        addition.make_data(out / MADE[1])
        addition.make_model(out / MADE[0])
        return
    words = list(toy.VOCAB)
    if size == "half":
        words += [f"w{i}" for i in range(len(words), HALF["vocab_size"])]
    toy.SIZES.update(SHAPES[size])
    toy.make_data(out / MADE[1])
    toy.make_model(out / MADE[0], words=words)


def tell(row: dict[str, Any]) -> None:
    """Print the step and those of its metrics that SHOWN lists."""
    d = row["data"]
    shown = (f"{name} {d[k]:.3g}" for k, name in SHOWN.items() if k in d)
    print(f"  step {row['step']:3}  {'  '.join(shown)}", flush=True)


def milestones(output: str, began: str) -> dict[str, int]:
    """Return how many seconds after its start a run reached each milestone.

    Args:
        output: of verl's trainer.
        began: the time of day at which it was started, HH:MM:SS.

    Returns:
        What had happened -> seconds after the beginning, for the first time of each.
    """
    found: dict[str, int] = {}
    for line in output.splitlines():
        stamp = re.search(r"\b\d\d:\d\d:\d\d\b", line)
        if not stamp:
            continue
        for words, meaning in MILESTONES.items():
            if words in line:
                after = (_seconds(stamp[0]) - _seconds(began)) % DAY
                found.setdefault(meaning, after)
    return found


def _seconds(time_of_day: str) -> int:
    """Return the seconds from midnight to a time of day, HH:MM:SS."""
    hours, minutes, seconds = map(int, time_of_day.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def outside(rows: list[dict[str, Any]]) -> int:
    """Count the steps in which a token's ratio left the objective's bounds, or was
    above DAPO's upper one.
    """
    keys = [f"actor/upref/{k}" for k in BAND]
    return sum(any(r["data"].get(k, 0) > 0 for k in keys) for r in rows)


def causes(replay: dict[str, Any]) -> list[str]:
    """Return the cause that replay gives the sampler's column of each recorded step; ""
    where it names none.
    """
    steps = replay.get("report", {}).get("steps", [])
    return [step.get("sampler", {}).get("cause", "") for step in steps]


def replayed(folder: Path, objective: str, limit: float = REPLAY) -> dict[str, Any]:
    """Return what `upref replay` says of the recorded steps.

    Args:
        folder: of the recorded steps.
        objective: the name of what trained.
        limit: seconds that it may take.

    Returns:
        `status` (of its process), `seconds` and `text`, and `report`, its JSON, where it
        has one.
    """
    start = time.monotonic()
    command = [sys.executable, "-m", "upref", "replay", str(folder), "--as", objective]
    as_text, as_json = (
        subprocess.Popen(
            [*command, *form],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for form in ((), ("--json",))
    )
    try:
        text = "".join(as_text.communicate(timeout=limit))
        report, _ = as_json.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        text, report = f"replay took longer than {limit:.0f} s.\n", ""
        for process in (as_text, as_json):
            process.kill()
            process.communicate()
    found: dict[str, Any] = {
        "status": as_text.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "text": text,
    }
    try:
        return found | {"report": json.loads(report)}
    except ValueError:
        return found


def judge(
    rows: list[dict[str, Any]],
    asked: int,
    outcome: watch.Outcome,
    replay: dict[str, Any],
    size: str,
    fault: bool,
) -> smoke.Verdict:
    """Judge a trial as a run of the smoke scale is judged, and by what replay says.

    Args:
        rows: the logged steps.
        asked: how many there should be.
        outcome: how verl's trainer ended.
        replay: of `replayed`.
        size: toy, half or smollm2.
        fault: whether replay must name the planted fault.
    """
    report, wrong = smoke.judge(rows, asked, outcome)
    if size == "half":  # random weights do not learn in a few steps
        wrong = [w for w in wrong if not w.startswith("the score did not rise")]
    left = outside(rows)
    report.append(f"tokens left the band in {left} of {len(rows)} steps")
    if not left and not fault:
        wrong.append("no token left the band: the bounds of the objective did not act")
    counts = Counter(causes(replay))
    said = ", ".join(f"{cause} in {n}" for cause, n in counts.most_common())
    report.append(
        f"replay of {counts.total()} optimizer steps ends with status {replay['status']}: {said or 'nothing'}"
    )
    named = counts[NAMED]
    if not counts:
        wrong.append("no recorded step could be replayed")
    elif fault and not named:
        wrong.append(f"replay does not name the fault, {NAMED}")
    elif not fault and (named or replay["status"] == 1):
        wrong.append("replay finds a failure that was not planted")
    return smoke.Verdict(report, wrong)


def main(
    objective: upref.Objective,
    out: Path,
    steps: int,
    size: str,
    fault: bool,
    extra: list[str],
    limit: float = math.inf,
    cpu: bool = False,
) -> int:
    """Train, replay the recorded steps, judge, print the report, and write gpu.json or
    cpu.json. Return exit status 0 if nothing is wrong, 1 if something is, 2 if no step
    was logged.

    Args:
        objective: that is trained.
        out: the folder of the run; what is there, but for a model and its data, is
            removed.
        steps: of verl's trainer.
        size: toy, half or smollm2.
        fault: whether vLLM reports log-probabilities of before the temperature.
        extra: overrides of verl, the last word.
        limit: seconds after which verl is ended; what it logged is judged.
        cpu: whether it is rehearsed on a CPU.
    """
    clear(out)
    if not (out / MADE[0]).exists():
        make(out, size)
    log = records.new_part(out)
    output = out / "trainer.log"
    lines = smoke.as_overrides(settings(objective, steps, out, size, fault, cpu))
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *lines, *extra]
    write_atomically(out / "command.txt", "\n".join(command) + "\n")
    # named here, so that every step is kept, not only those that fail
    os.environ |= {FOLDER: str(out / STEPS), HOW_OFTEN: "1"}
    eager = f"{ROLLOUT}.enforce_eager=False" not in extra
    watch.END = END
    env = smoke.environment(log) if cpu else environment(log, eager)
    first = smoke.FIRST if cpu else FIRST
    began = time.strftime("%H:%M:%S")
    outcome = watch.run(
        command, log, output, env=env | watched(out), asked=steps, stall=STALL, first=first, tell=tell,
        idle=False, limit=limit,
    )  # fmt: skip
    rows = watch.steps(log)
    replay = replayed(out / STEPS, objective.name, REPLAY * (10 if cpu else 1))
    verdict = judge(rows, steps, outcome, replay, size, fault)
    said = output.read_text(encoding="utf-8", errors="replace")
    name = f"{size}: {objective.name}" + (", a fault" if fault else "")
    gpus = [] if cpu else here.of_gpus("name,driver_version")
    row = {
        "run": name + "".join(f", {x}" for x in extra),
        "asked": steps,
        "steps": [{"step": r["step"]} | r["data"] for r in rows],
        "seconds": round(outcome.seconds, 1),
        "report": verdict.report,
        "wrong": verdict.wrong,
        "start": milestones(said, began),
        "replay": replay,
        "gpu": "\n".join(gpus) or "none",
        "versions": {x: here.version_of(x) or "" for x in PACKAGES},
    }
    keep(out / ("cpu.json" if cpu else "gpu.json"), f"verl-{size}", row)
    print(replay["text"])
    verdict.show(name)
    if verdict.wrong and outcome.status != 0:
        print(said[-5000:])
        print(f"verl: {advice.cure(output, out)}")
    return verdict.status(rows)


def clear(out: Path) -> None:
    """Remove all but a model and its data from the folder of the run, which is made.
    Raise InputError if another command made it.
    """
    own_folder(out)
    for path in out.iterdir():
        # MARK: own_folder's file, which says that this command made the folder
        if path.name in (*MADE, MARK):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def keep(file: Path, name: str, row: dict[str, Any]) -> None:
    """Write a row in the form that `python -m benchmarks.gpu.keep` reads.

    Args:
        file: gpu.json or cpu.json.
        name: of the part that the row is of, "verl-toy".
        row: of the trial.
    """
    status = 1 if row["wrong"] else 0
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": row["gpu"].partition(",")[0],
        "parts": {name: {"status": status, "seconds": row["seconds"]}},
        "rows": {name: [row]},
    }
    write_atomically(file, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = Parser(
        "gpu_trial",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=tuple(OF_SIZE), default="toy")
    parser.add_argument("--objective", default="up_dapo")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--fault", action="store_true")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--cpu", action="store_true", help="rehearse it on a CPU")
    parser.add_argument("--dry-run", action="store_true")
    args, rest = parser.parse_known_args()
    try:
        chosen = upref.get(args.objective)
        smoke.require_overrides(rest)
        if args.cpu and args.size == "half":
            raise upref.InputError(
                "--cpu rehearses toy and smollm2: half shows a GPU's memory."
            )
        if args.dry_run:
            given = settings(
                chosen, args.steps, args.out, args.size, args.fault, args.cpu
            )
            words = smoke.as_overrides(given) + rest
            smoke.let_verl_read(chosen, words, SHAPES[args.size])
            print(f"verl accepts these {len(words)} overrides; nothing was started")
            sys.exit(0)
        how = (args.steps, args.size, args.fault, rest, args.limit, args.cpu)
        sys.exit(main(chosen, args.out.resolve(), *how))
    except (upref.InputError, OSError) as error:
        print(f"gpu_trial: {error}", file=sys.stderr)
        sys.exit(2)
