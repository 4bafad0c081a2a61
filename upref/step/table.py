# SPDX-License-Identifier: Apache-2.0
"""`upref step`: a trainer's unmodified step over settings and families, each compared with the float64 reference."""

import importlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from upref.errors import InputError
from upref.step.case import perturb
from upref.step.check import StepReport
from upref.step.families import tiny
from upref.step.host import report
from upref.step.settings import TRAINERS, Setting


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    setting: str
    family: str
    error: float | None  # of the gradient; None where the trainer refused
    cause: str = ""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.error is not None and not self.cause

    def __str__(self) -> str:
        error = "-" if self.error is None else f"{self.error:.1e}"
        word = "agrees " if self.agrees else "refused" if self.error is None else "DIFFERS"
        cause = f"\n         {self.cause}" if self.cause else ""
        return f"{word}  {error:>7}  {self.family:16} {self.setting}{cause}"


def chosen(trainer: str, only: str = "") -> list[Setting]:
    """The settings of a trainer whose family or name holds `only`; InputError where there is none."""
    if trainer not in TRAINERS:
        raise InputError(f"there is no step of {trainer!r}: {', '.join(TRAINERS)}.")
    out = [s for s in TRAINERS[trainer]() if only in f"{s.family} {s.name}"]
    if not out:
        raise InputError(f"no setting of {trainer} has {only!r} in its name or family.")
    return out


def run(trainer: str, only: str = "", say: Callable[[Outcome], Any] = lambda o: None) -> list[Outcome]:
    """Run all settings of a trainer, or those whose name or family holds `only`.

    Raises:
        InputError: no such trainer or setting, or the trainer is not installed.
    """
    out = []
    for setting in chosen(trainer, only):
        start, error = time.perf_counter(), None
        try:
            found = one(trainer, setting)
            error, cause = found.error, "" if found else found.failures[0].cause
        except InputError as e:
            cause = str(e)
        out.append(Outcome(setting.name, setting.family, error, cause, time.perf_counter() - start))
        say(out[-1])
    return out


def one(trainer: str, s: Setting) -> StepReport:
    """One setting of TRL's GRPOTrainer, of verl's TrainingWorker, or of OpenRLHF's ActorPPOTrainer."""
    model: Any = perturb(tiny(s.family, **s.model))
    its: Any = importlib.import_module(f"upref.step.{trainer}")
    if trainer != "trl":
        return report(its.trained, model, s.objective, s.hp, s.goal, half=s.half, **s.fields)
    fields = dict(s.fields)
    if lora := fields.pop("peft_config", None):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    judged: StepReport = its.report(model, fields, its.batch(**s.rows), s.objective, s.hp, s.goal, step=s.step,
                                    bound=torch.bfloat16 if s.half else None)  # fmt: skip
    return judged


def command(args: Any) -> int:
    """`upref step TRAINER`: exit status 1 where a setting differs."""
    if args.list:
        print(*(f"{s.family:16} {s.name}" for s in chosen(args.trainer, args.only)), sep="\n")
        return 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are tiny: more threads wait for each other
    try:
        outcomes = run(args.trainer, args.only, lambda o: None if args.json else print(o, flush=True))
    finally:
        torch.set_num_threads(threads)
    if args.json:
        records = [{k: v for k, v in asdict(o).items() if k != "seconds"} for o in outcomes]
        print(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    else:
        agree, refused = sum(o.agrees for o in outcomes), sum(o.error is None for o in outcomes)
        seconds = sum(o.seconds for o in outcomes)
        print(f"{agree} of {len(outcomes)} settings agree, {refused} could not be run ({seconds:.0f} s)")
    return int(not all(o.agrees or o.error is None for o in outcomes))
