# SPDX-License-Identifier: Apache-2.0
"""`upref step`: a trainer's unmodified step over settings and families, each held against the float64 reference."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from upref.errors import InputError
from upref.step.case import BOUNDS, built, disturb, meant
from upref.step.check import check_recorded
from upref.step.families import tiny
from upref.step.record import Recorded
from upref.step.reference import TorchModel
from upref.step.rows import AXES, Row
from upref.step.settings import TRAINERS, Setting
from upref.verify.report import Report


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
        raise InputError(f"no setting of {trainer} holds {only!r} in its name or family.")
    return out


def run(trainer: str, only: str = "", say: Callable[[Outcome], Any] = lambda o: None) -> list[Outcome]:
    """Run all settings of a trainer, or those whose name or family holds `only`.

    Raises:
        InputError: no such trainer or setting, or the trainer is not installed.
    """
    out = []
    for setting in chosen(trainer, only):
        start = time.perf_counter()
        try:
            report = ONE[trainer](setting)
            cause = "" if report else report.failures[0].cause
            error = getattr(report, "error", None)
            one = Outcome(setting.name, setting.family, error, cause, time.perf_counter() - start)
        except InputError as e:
            one = Outcome(setting.name, setting.family, None, str(e), time.perf_counter() - start)
        say(one)
        out.append(one)
    return out


def trl(s: Setting, cls: Any = None, **more: Any) -> Report:
    """One setting of TRL's GRPOTrainer."""
    from upref.step import trl as t

    fields = dict(s.fields)
    if lora := fields.pop("peft_config", None):
        from peft import LoraConfig, get_peft_model

        model: Any = get_peft_model(t.tiny_model(s.family, **s.model), LoraConfig(task_type="CAUSAL_LM", **lora))
    else:
        model = t.tiny_model(s.family, **s.model)
    rows = t.batch(**s.rows)
    seen, _ = t.trained(model, fields, rows, s.step + 1, cls, **more)
    its = t.expected_rows(seen, rows, fields)[s.step]
    goal = {"scale": 1.0} | s.goal
    at: dict[str, Any] = t.FIELDS | fields
    if at["loss_type"] in ("dapo", "cispo", "vespo"):  # TRL divides by the mean number of tokens of a step
        mine = sum(map(sum, (r.trains for r in its)))
        every = at["steps_per_generation"] // at["gradient_accumulation_steps"]
        masked = at.get("mask_truncated_completions")
        every_token = sum(sum(r.trains) for r in rows if not masked or r.response[-1] == t.END)
        goal["scale"] *= mine / (every_token / every)
    if goal.get("entropy_coef"):  # TRL's entropy bonus is a mean over tokens whatever the policy term's normalizer is
        goal["entropy_coef"] /= goal["scale"]
    bound = BOUNDS[torch.bfloat16] if s.half else None

    def at_step(n: int, rows: list[Row]) -> Report:
        one = Recorded(seen.model, [seen.steps[n]])
        return check_recorded(one, [rows], s.objective, temperature=at["temperature"], without=AXES, bound=bound,
                              **goal, **s.hp)  # fmt: skip

    report = at_step(s.step, its)
    if report or not s.step:
        return report
    # TRL's forward pass makes the old log-probabilities too: where it is wrong, the first step, with r = 1, is clearer
    goal["scale"] = s.goal.get("scale", 1.0)
    first = [replace(r, old=None) for r in t.expected_rows(seen, rows, fields)[0]]
    if "dapo" == at["loss_type"]:
        goal["scale"] *= sum(map(sum, (r.trains for r in first))) / (every_token / every)
    if goal.get("entropy_coef"):
        goal["entropy_coef"] = s.goal["entropy_coef"] / goal["scale"]
    again = at_step(0, first)
    return report if again else replace(report, findings=again.findings)


def verl(s: Setting) -> Report:
    """One setting of verl's TrainingWorker."""
    from upref.step import verl as v

    fields = dict(s.fields)
    T = fields.pop("temperature", 0.7)
    model = disturb(tiny(s.family, **s.model))
    goal = meant(s.objective, dict(s.hp), T, **{k: x for k, x in s.goal.items() if k != "scale"})
    rows = built(TorchModel(model), goal, None, ["temperature"] * (T == 1), coarse=s.half).rows
    seen = v.trained(model, rows, T, **fields)
    bound = BOUNDS[torch.bfloat16] if s.half else None
    return check_recorded(seen, rows, s.objective, temperature=T, without=AXES, bound=bound, **s.goal, **s.hp)


ONE: dict[str, Callable[[Setting], Report]] = {"trl": trl, "verl": verl}


def records(outcomes: list[Outcome]) -> str:
    """As JSON, without the times."""
    return json.dumps([{k: v for k, v in asdict(o).items() if k != "seconds"} for o in outcomes], indent=1,
                      ensure_ascii=False) + "\n"  # fmt: skip


def counted(outcomes: list[Outcome]) -> str:
    n, refused = sum(o.agrees for o in outcomes), sum(o.error is None for o in outcomes)
    seconds = sum(o.seconds for o in outcomes)
    return f"{n} of {len(outcomes)} settings agree, {refused} could not be run ({seconds:.0f} s)"


def command(args: Any) -> int:
    """`upref step TRAINER`: exit status 1 where a setting differs."""
    if args.list:
        print(*(f"{s.family:16} {s.name}" for s in chosen(args.trainer, args.only)), sep="\n")
        return 0
    outcomes = run(args.trainer, args.only, lambda o: None if args.json else print(o, flush=True))
    print(records(outcomes) if args.json else counted(outcomes))
    return int(not all(o.agrees or o.error is None for o in outcomes))
