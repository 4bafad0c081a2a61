# SPDX-License-Identifier: Apache-2.0
"""Train an objective in verl at one of the scales.

    python -m repro.with_verl.run.launch up_dapo paper [key=value ...] [--dry-run] [--data DIR]
    python -m repro.with_verl.run.launch up_dapo --largest      the largest scale this machine carries, and why

Scales: mini and smoke (no GPU), gpu1, paper (the experiment that the objective is of), or one of them by name:
paper_dapo, paper_gspo, paper_math, paper_geo3k. Prints and saves every override with its source; --dry-run stops after
the installed verl has accepted them, which needs no GPU. Exit status: verl's own, or 2: it could not start.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from repro.with_verl.config.compose import HANDED_OVER, Run, compose, load_scale, paper_scale
from repro.with_verl.machine import preflight
from repro.with_verl.machine.preflight import GB, Machine, look
from repro.with_verl.place import ROOT, pythonpath
from upref import InputError, get

os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")


def main(argv: list[str] | None = None, machine: Machine | None = None) -> int:
    p = argparse.ArgumentParser(prog="launch", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("objective")
    p.add_argument("scale", nargs="?")
    p.add_argument("--dry-run", action="store_true")
    p.add_argument("--largest", action="store_true")
    p.add_argument("--data", type=Path, help="where prepare.py wrote (runs/data)")
    args, overrides = p.parse_known_args(argv)
    try:
        if args.scale and "=" in args.scale:  # an override: the scale was left out
            overrides, args.scale = [args.scale, *overrides], None
        if wrong := [o for o in overrides if o.startswith("--") or "=" not in o]:
            raise InputError(f"{wrong[0]!r} is no override: write key=value, --dry-run, --largest or --data DIR.")
        get(args.objective)
        if args.largest or not args.scale:
            scale, why = largest(args.objective, machine or look())
            print(f"{scale}: {why}")
            if args.largest:
                return 0
            args.scale = scale
        if args.scale in HANDED_OVER:
            return hand_over(args.objective, args.scale, overrides, args.dry_run)
        return train(compose(args.objective, args.scale, overrides, args.data), args.dry_run, machine)
    except InputError as e:
        print(f"launch: {e}", file=sys.stderr)
        return 2


def largest(objective: str, m: Machine) -> tuple[str, str]:
    """The largest scale that the machine carries, and why."""
    if not m.gpus:
        return (
            "mini",
            "no GPU is visible here (the scale smoke runs verl and vLLM on the CPU, after an install of 3 GB)",
        )
    found = f"{m.nodes} x {m.gpus} x {m.gpu_name or 'GPU'} with {m.gpu_bytes / GB:.0f} GB"
    too_small = []
    for name in (paper_scale(objective)[0], "gpu1"):
        s = load_scale(name)
        nodes, gpus = s.values["trainer.nnodes"][0], s.values["trainer.n_gpus_per_node"][0]
        # what is sold as 80 GB reports 79.6 GiB or 81.6 GB
        if m.nodes >= nodes and m.gpus >= gpus and m.gpu_bytes >= 0.95 * s.gpu_gb * GB:
            return name, f"{found} carry {nodes} x {gpus} GPUs of {s.gpu_gb:.0f} GB ({s.about})"
        too_small.append(f"{name} needs {nodes} x {gpus} GPUs of {s.gpu_gb:.0f} GB")
    return "mini", f"{found} are too small: {'; '.join(too_small)}"


def train(run: Run, dry_run: bool, machine: Machine | None = None) -> int:
    try:
        from repro.with_verl.config.validate import validate
    except ImportError as e:
        raise InputError(
            f"verl's configuration cannot be read ({e}): repro/venv.sh verl installs what it needs."
        ) from e

    cfg = validate(run)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *run.overrides]
    report(run, command)
    if dry_run:
        print("verl accepts it; nothing was started (--dry-run).")
        return 0
    m = machine or look(run.directory)
    loss, estimator = cfg.actor_rollout_ref.actor.policy_loss.loss_mode, cfg.algorithm.adv_estimator
    if cfg.trainer.nnodes > 1 and m.gpus and machine is None:
        m.nodes = preflight.check_cluster(run, loss)
    print(f"estimate: {preflight.check(run, cfg, m)}")
    preflight.check_plugin(run, loss, estimator)
    print(f"starting verl; checkpoints and logs go to {run.directory}", flush=True)
    with open(run.directory / "verl.log", "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, env=os.environ | run.env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
    return process.wait()


def report(run: Run, command: list[str]) -> None:
    """Prints, and saves beside the run, what verl is given and why."""
    print(f"{run.objective}, {run.scale.name}: {run.scale.about}")
    rows = []
    for line in run.overrides:
        source = run.sources.get(line.partition("=")[0], "given on the command line")
        rows.append({"override": line, "source": source})
        print(f"  {line}    # {source}")
    for note in run.notes:
        print(f"note: {note}")
    run.directory.mkdir(parents=True, exist_ok=True)
    saved = {"objective": run.objective, "scale": run.scale.name, "command": command, "env": run.env, "overrides": rows}
    path = run.directory / "overrides.json"
    path.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"saved: {path}")


def hand_over(objective: str, scale: str, overrides: list[str], dry_run: bool) -> int:
    """To the programs of the two scales without a GPU."""
    module = "repro.mini.study.compare" if scale == "mini" else "repro.with_verl.cpu.smoke"
    if dry_run and scale == "mini":
        print(f"{scale}: {module} checks its own settings; nothing was started (--dry-run).")
        return 0
    if dry_run:
        overrides = [*overrides, "--dry-run"]  # smoke lets verl read its settings
    env = os.environ | {"PYTHONPATH": pythonpath()}
    return subprocess.run(
        [sys.executable, "-m", module, objective, *overrides], cwd=ROOT, env=env, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
