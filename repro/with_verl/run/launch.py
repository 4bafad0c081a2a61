# SPDX-License-Identifier: Apache-2.0
"""Train an objective in verl at one of the scales.

    python -m repro.with_verl.run.launch up_dapo paper [key=value ...] [--dry-run]
    [--steps N] [--seeds 1,2,3]

Scales: gpu1, gpu8, paper (the experiment that the objective is of), or one of them by
name: paper_dapo, paper_gspo, paper_math, paper_geo3k; gpu1_24gb for a small card; cpu is
this very path with the toy model of smoke. Without a scale it is the largest that this
machine or its Ray cluster carries. Prints and saves every override with its source;
--dry-run stops after they were checked, which needs no GPU. --shakedown trains two steps
of the very scale, with its validation and its checkpoint, in a folder of their own, and
prints a page: truncation, answers, sampler mismatch, memory and seconds against the
estimate, parity, what to change.

The folder, runs/OBJECTIVE-SCALE-WHAT_YOU_SET-HASH, is that of what was asked: the same
command goes on there, another seed or setting has another (seed=N sets the three seeds
of a run; name=NAME names the folder). It must be on storage that all machines share.
Exit status: 0 all steps were trained, 1 it died (the last line says what to do), 75 it
died after it saved a checkpoint (the same command makes progress), 2 it could not
start, 143 or 130 it was asked to end.
"""

import argparse
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from repro import Parser, parse_seeds
from repro.with_verl.config.compose import Run, compose, extra
from repro.with_verl.config.scales import HANDED_OVER
from repro.with_verl.machine import costs, preflight, processes
from repro.with_verl.machine.estimate import GB, Estimate, gpu_of, gpus
from repro.with_verl.machine.here import Machine, look, version_of
from repro.with_verl.machine.ladder import largest
from repro.with_verl.place import RUNS
from repro.with_verl.refuse import refuse
from upref import InputError, Objective, get, names
from upref.files import write_atomically

os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")


def main(argv: list[str] | None = None, machine: Machine | None = None) -> int:
    """Start what the command line asks for.

    Args:
        argv: the words after the command; None: those of this process.
        machine: what the run finds here; None: it looks.

    Returns:
        The exit status that the head of this file lists.
    """
    words = sys.argv[1:] if argv is None else argv
    args, overrides = _parser().parse_known_args(words)
    try:
        return _start(args, overrides, machine)
    except (InputError, OSError) as e:
        print(f"launch: {e}", file=sys.stderr)
        return 2


def _parser() -> Parser:
    """Return the parser of the options; what it does not know is an override."""
    parser = Parser(
        prog="launch",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("objective")
    parser.add_argument("scale", nargs="?")
    parser.add_argument(
        "--dry-run", action="store_true", help="check, price, do not start"
    )
    parser.add_argument(
        "--shakedown", action="store_true", help="two steps, and a page about them"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="train so many steps")
    parser.add_argument(
        "--seeds",
        metavar="1,2,3",
        help="one run after another, each with a seed and a folder of its own",
    )
    parser.add_argument(
        "--gpu",
        default="",
        metavar="H100",
        help="the GPU that a dry run prices (H100, or A100, H200, 4090 ...)",
    )
    parser.add_argument(
        "--data", type=Path, help="where data.prepare wrote (runs/data)"
    )
    return parser


def _start(
    args: argparse.Namespace, overrides: list[str], machine: Machine | None
) -> int:
    """Start the runs of all seeds in turn; return the last status that is not 0."""
    overrides = _checked(args, overrides)
    seeds = seeds_of(args.seeds, overrides)
    if not args.scale:
        args.scale, why = largest(args.objective, machine or look())
        print(f"{args.scale}: {why}")
    if args.data and args.data.exists() and not args.data.is_dir():
        raise InputError(
            "--data takes the folder where data.prepare wrote, and "
            f"{args.data} is a file."
        )
    if args.scale in HANDED_OVER:
        raise InputError(
            f"{args.scale} is no scale of verl on GPUs: `bash repro/run.sh {args.objective} {args.scale}` starts it."
        )
    if args.gpu and args.gpu not in gpus():
        raise InputError(
            f"--gpu takes a name of machine/gpus.toml, {', '.join(gpus())}, "
            f"got {args.gpu!r}."
        )
    status = 0
    for number, seed in enumerate(seeds):
        # what all of them cost is said once, before the first
        priced = 1 if number else len(seeds)
        status = _run(args, [*overrides, *seed], machine, priced) or status
        if status >= 128:  # asked to end: the other seeds too
            break
    return status


def _checked(args: argparse.Namespace, overrides: list[str]) -> list[str]:
    """Return the overrides, with the steps that --steps or --shakedown ask for.

    Args:
        args: the options. An override in the place of the scale is moved to the others.
        overrides: what the parser did not know.

    Raises:
        InputError: one is no override, the objective is unknown, or there is no step.
    """
    if args.scale and "=" in args.scale:  # the scale was left out
        overrides, args.scale = [args.scale, *overrides], None
    for line in overrides:
        if line.startswith("--") or "=" not in line:
            raise InputError(
                f"{line!r} is no override: write key=value, --dry-run, --steps, "
                "--seeds or --data."
            )
    get(args.objective)
    if args.shakedown and args.steps is None:
        args.steps = 2
    if args.steps is None:
        return overrides
    if args.steps < 1:
        raise InputError(f"--steps must be at least 1, got {args.steps}.")
    return [*overrides, f"trainer.total_training_steps={args.steps}"]


def _run(
    args: argparse.Namespace, lines: list[str], machine: Machine | None, priced: int
) -> int:
    """Start one run and return its exit status.

    Args:
        args: the options.
        lines: its overrides, the seed among them.
        machine: what the run finds here; None: it looks.
        priced: how many runs of this cost its estimate speaks of.
    """
    again = [args.objective, args.scale, *lines]
    if args.data:
        again += ["--data", str(args.data)]
    if args.shakedown:
        again.append("--shakedown")
    if args.scale == "cpu":
        return train_on_cpu(args.objective, lines, args.dry_run, again, args.shakedown)
    flash = flash_there(machine, args.dry_run)
    run = compose(args.objective, args.scale, lines, args.data, flash)
    return train(run, args.dry_run, again, machine, args.gpu, args.shakedown, priced)


def seeds_of(text: str | None, overrides: list[str]) -> list[list[str]]:
    """Return, for each run of a sweep, the overrides that set its seed; one run without
    any if there is no --seeds. Raise InputError if the seeds are no different whole
    numbers, or the overrides set a seed or a name.
    """
    if text is None:
        return [[]]
    seeds = parse_seeds(text)
    if clash := [
        o for o in overrides if o.startswith(("seed=", "data.seed=", "name="))
    ]:
        raise InputError(
            f"--seeds gives each run its seed and folder: leave {clash[0]} out."
        )
    return [[f"seed={s}"] for s in seeds]


def train(
    run: Run,
    dry_run: bool,
    again: list[str],
    machine: Machine | None = None,
    gpu: str = "",
    shakedown: bool = False,
    seeds: int = 1,
) -> int:
    """Check a run, start it, and return its exit status.

    Args:
        run: the run; overrides, sources and notes are added to it.
        dry_run: check and price alone.
        again: the words of the command that goes on.
        machine: what the run finds here; None: it looks.
        gpu: the GPU that a dry run prices.
        shakedown: whether answers are kept and a page about the run is printed.
        seeds: how many runs of the same cost the estimate speaks of.

    Returns:
        The exit status that the head of this file lists.

    Raises:
        InputError: the run cannot start.
    """
    try:
        # hydra does not say which package is missing
        importlib.import_module("verl.trainer.config")
        from repro.with_verl.config.validate import validate
    except ImportError as e:
        raise InputError(
            f"verl's configuration cannot be read ({e}): repro/venv.sh verl installs what it needs."
        ) from e

    if shakedown:
        keep_answers(run)
    cfg = validate(run)
    if dry_run:
        return dry_train(run, cfg, machine or look(run.directory), gpu, seeds)
    from repro.with_verl.run import folder, start

    m = machine or look(Path(cfg.trainer.default_local_dir).absolute())
    asked = preflight.Start(run, cfg, m)
    refuse(preflight.gpus(asked))
    folder.check(run.directory, run.overrides)
    if cfg.trainer.nnodes > 1 and machine is None:
        loss = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
        m.nodes = processes.check_cluster(run, loss)
    preflight.check(asked)
    preflight.use_local_files(asked)
    preflight.choose_sampler(asked)
    estimate = costs.save_hourly(run, cfg, asked.estimate)
    run.notes += costs.notes(run, cfg, estimate, m.gpu_bytes)
    run.notes.append(hyperparameters_in_force(cfg))
    show(run)
    tell(estimate, seeds)
    processes.check_imports(run, cfg)
    if machine is None and not check_step(cfg):
        return 1
    facts = {"estimate": estimate.facts(), "gpu": m.gpu_name}
    again_line = start.command_line(again)
    patience = start.Patience.of(estimate)
    status = start.start(run, estimate.steps, again_line, patience, **facts)
    return told(run, status, shakedown)


def dry_train(run: Run, cfg: Any, m: Machine, gpu: str, seeds: int) -> int:
    """Print what a run would be given and cost, and what is missing here; status 0.

    Args:
        run: the run.
        cfg: its configuration.
        m: this machine.
        gpu: the GPU to price; "": this machine's, or the one that the scale is for.
        seeds: how many runs of the same cost are asked for.
    """
    row = gpu_of(gpu or m.gpu_name or ("4090" if run.scale.gpu_gb < 40 else "H100"))
    memory = (row.memory if gpu else run.scale.gpu_gb) * GB
    estimate = costs.save_hourly(run, cfg, costs.price(cfg, row, memory))
    epochs = costs.epochs_in_print(run.scale)
    run.notes += [epochs] if epochs else []
    run.notes += costs.notes(run, cfg, estimate, memory)
    run.notes.append(hyperparameters_in_force(cfg))
    preflight.choose_sampler(preflight.Start(run, cfg, m))
    show(run)
    tell(estimate, seeds)
    if estimate.problem:
        print(f"there, it would not start: {estimate.problem}")
    return dry(run, preflight.missing(preflight.Start(run, cfg, m)))


def flash_there(machine: Machine | None, dry_run: bool) -> bool:
    """Return whether a run attends by flash-attn: it is installed; or this is a dry run
    where nothing could train.
    """
    have = (
        machine.versions
        if machine
        else {name: version_of(name) for name in ("flash-attn", "vllm")}
    )
    return bool(have.get("flash-attn")) or (dry_run and not have.get("vllm"))


def check_step(cfg: Any) -> bool:
    """Compare one optimizer step of a two-layer twin of this run, on this CPU, with the
    objective's gradient, and print the outcome. Return False if they differ; True if
    they agree or the twin cannot be run.
    """
    from omegaconf import OmegaConf

    from upref_frameworks.verl.step import settings_of_twin, stop_unless_twin_agrees

    its = OmegaConf.to_container(cfg.actor_rollout_ref, resolve=True)
    o, given = _objective_of(cfg)
    hp = {k: v for k, v in o.resolve(given).items() if k != "beta"}
    try:
        print(
            f"step_check: {stop_unless_twin_agrees(settings_of_twin(o.name, hp, its['actor'], its['model']))}"
        )
    except InputError as e:
        print(f"step_check: not run: {e}")
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return False
    return True


def _objective_of(cfg: Any) -> tuple[Objective, dict[str, Any]]:
    """Return the objective that a run trains, and those of its hyperparameters that are
    set.
    """
    loss = cfg.actor_rollout_ref.actor.policy_loss
    name = loss.loss_mode.removeprefix("upref/")
    o = get(name) if name in names() else extra(name)
    return o, {
        k: v for k, v in (loss.get("upref") or {}).items() if k in o.hyperparameters
    }


def hyperparameters_in_force(cfg: Any) -> str:
    """Return the numbers that define the loss, and which of them are defaults: verl
    prints those alone that are set. verl has its own coefficient of the KL term.
    """
    o, given = _objective_of(cfg)
    values = [
        f"{k}={v:g}" if k in given else f"{k}={v:g} (default)"
        for k, v in o.resolve(given).items()
        if k != "beta"
    ]
    return f"hyperparameters of upref/{o.name}: {', '.join(values) or 'none'}"


def tell(e: Estimate, seeds: int) -> None:
    """Print what the run costs, and what all seeds cost."""
    print(f"estimate: {e}")
    if seeds > 1:
        print(
            f"{seeds} seeds: {seeds * e.gpu_hours:,.0f} GPU-hours, {seeds * e.dollars:,.0f} dollars."
        )


def keep_answers(run: Run) -> None:
    """Have verl write the sampled answers to the folder of the run, for the page of a
    shakedown.
    """
    run.overrides.append(f"trainer.rollout_data_dir={run.directory / 'answers'}")
    run.sources["trainer.rollout_data_dir"] = "ours: the shakedown shows answers"


def told(run: Run, status: int, shakedown: bool) -> int:
    """Write and print the page of a shakedown, if this is one and a step was logged;
    return the status as it is.
    """
    from repro.with_verl import health
    from repro.with_verl.run import records

    rows = records.training(records.merged(run.directory)) if shakedown else []
    if rows:
        saved = json.loads(
            (run.directory / "overrides.json").read_text(encoding="utf-8")
        )
        text = (
            f"# Shakedown of {run.name}\n\n{health.page(run.directory, rows, saved)}\n"
        )
        write_atomically(run.directory / "shakedown.md", text)
        print(f"{text}\nwritten: {run.directory / 'shakedown.md'}")
    return status


def train_on_cpu(
    objective: str,
    overrides: list[str],
    dry_run: bool,
    again: list[str],
    shakedown: bool,
) -> int:
    """Run the scale `cpu`, the path of a GPU run with a toy model, and return the exit
    status; in a dry run print and save the overrides alone.
    """
    # it starts runs by this folder's parts
    scale = importlib.import_module("repro.with_verl.cpu.scale")
    run, total = scale.compose(objective, overrides, os.environ.get("RAY_ADDRESS", ""))
    show(run)
    if dry_run:
        return dry(run, [])
    from repro.with_verl.run import start

    scale.prepare(run)
    if shakedown:
        keep_answers(run)
    patience = start.Patience(
        scale.FIRST, scale.STALL, idle=not os.environ.get("RAY_ADDRESS")
    )
    return told(
        run, start.start(run, total, start.command_line(again), patience), shakedown
    )


def show(run: Run) -> None:
    """Print what verl is given and why, then the notes."""
    print(f"{run.objective}, {run.scale.name}: {run.scale.about}")
    for line in run.overrides:
        print(f"  {line}    # {run.source(line)}")
    for note in run.notes:
        print(f"note: {note}")


def dry(run: Run, missing: list[str]) -> int:
    """Save a run's overrides under runs/dry-run, print what is missing here and what
    was checked, and return exit status 0.
    """
    from repro.with_verl.run.saved import save

    print(f"saved: {save(run, RUNS / 'dry-run' / run.name)}")
    for sentence in missing:
        print(f"here, it would not start: {sentence}")
    print(
        "checked: every key and type by verl's configuration, verl's own checks of the actor, rollout and algorithm "
        "sections, what its workers assert of sizes, vLLM's argument names; nothing was started (--dry-run)."
    )
    return 0


if __name__ == "__main__":
    # `show` prints it
    logging.getLogger("upref_frameworks.verl.training").disabled = True
    sys.exit(main())
