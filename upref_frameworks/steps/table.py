# SPDX-License-Identifier: Apache-2.0
"""`upref step`: a trainer's unmodified step over settings and families, each compared
with the float64 reference.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from upref.errors import InputError, NotInstalled, importing
from upref.step.case import perturb
from upref.step.check import StepReport
from upref.step.families import tiny
from upref.user_code.guard import one_line
from upref_frameworks.steps.host import Refused, TrainerFailedError, report
from upref_frameworks.steps.settings import TRAINERS, Setting


@dataclass(frozen=True)
class StepOutcome:
    """One line of the table."""

    setting: str
    family: str
    error: float | None  # of the gradient; None where there is none to compare
    cause: str = ""
    not_exercised: str = ""  # numbers of the objective that the rows do not reach
    broken: bool = False  # upref itself failed, not the trainer
    failed: bool = False  # the trainer raised an error
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.error is not None and not self.cause

    @property
    def differs(self) -> bool:
        return self.error is not None and bool(self.cause)

    @property
    def refused(self) -> bool:
        return self.error is None and not self.broken

    @property
    def end(self) -> str:
        """How the setting ended, in one word."""
        if self.error is not None:
            return "DIFFERS" if self.cause else "agrees"
        if self.broken:
            return "BROKEN"
        return "fails" if self.failed else "refused"

    def __str__(self) -> str:
        error = "-" if self.error is None else f"{self.error:.1e}"
        lines = [f"{self.end:7}  {error:>7}  {self.family:16} {self.setting}"]
        lines += [f"         {self.cause}"] if self.cause else []
        lines += (
            [f"         not exercised: {self.not_exercised}"]
            if self.not_exercised
            else []
        )
        return "\n".join(lines)


def chosen(trainer: str, only: str = "") -> list[Setting]:
    """The settings of a trainer whose family or name holds `only`; InputError where
    there is none.
    """
    if trainer not in TRAINERS:
        raise InputError(f"there is no step of {trainer!r}: {', '.join(TRAINERS)}.")
    out = [s for s in TRAINERS[trainer]() if only in f"{s.family} {s.name}"]
    if not out:
        raise InputError(f"no setting of {trainer} has {only!r} in its name or family.")
    return out


def run(
    trainer: str,
    only: str = "",
    say: Callable[[StepOutcome], Any] = lambda objective: None,
) -> list[StepOutcome]:
    """Run all settings of a trainer, or those whose name or family holds `only`.

    Raises:
        InputError: no such trainer or setting.
    """
    out = []
    for setting in chosen(trainer, only):
        start = time.perf_counter()
        outcome = _tried(trainer, setting)
        out.append(replace(outcome, seconds=time.perf_counter() - start))
        say(out[-1])
    return out


def _tried(trainer: str, setting: Setting) -> StepOutcome:
    this = StepOutcome(setting.name, setting.family, None)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of adapters' first weights
            found = one(trainer, setting)
    except (NotInstalled, Refused) as e:
        return replace(this, cause=str(e), failed=isinstance(e, TrainerFailedError))
    except Exception as e:
        return replace(
            this,
            cause=f"upref itself fails: {type(e).__name__}: {one_line(e)}",
            broken=True,
        )
    cause = "" if found else found.failures[0].cause
    return replace(
        this, error=found.error, cause=cause, not_exercised=found.numbers_not_reached()
    )


def one(trainer: str, s: Setting) -> StepReport:
    """One setting of TRL's GRPOTrainer, of verl's TrainingWorker, or of OpenRLHF's
    ActorPPOTrainer.
    """
    model: Any = perturb(tiny(s.family, **s.model))
    module: Any = importlib.import_module(f"upref_frameworks.{trainer}.step")
    if trainer != "trl":
        return report(
            module.trained, model, s.objective, s.hp, s.goal, half=s.half, **s.fields
        )
    fields = dict(s.fields)
    if lora := fields.pop("peft_config", None):
        with importing("peft"):
            from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    judged: StepReport = module.report(
        model,
        fields,
        module.batch(**s.rows),
        s.objective,
        s.hp,
        s.goal,
        step=s.step,
        bound=torch.bfloat16 if s.half else None,
    )
    return judged


def command(args: Any) -> int:
    """`upref step TRAINER`: exit status 1 where a setting differs, 2 where none could
    run or upref itself failed.

    With `--against` it is 1 where a setting ends otherwise than in the records, and 0
    where none does; 2 stays.
    """
    if args.list:
        print(
            *(f"{s.family:16} {s.name}" for s in chosen(args.trainer, args.only)),
            sep="\n",
        )
        return 0
    before = read_ends(Path(args.against)) if args.against else {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are tiny: more threads wait for each other
    try:
        outcomes = run(
            args.trainer,
            args.only,
            lambda outcome: None if args.json else print(outcome, flush=True),
        )
    finally:
        torch.set_num_threads(threads)
    if args.json:
        records = [
            {k: v for k, v in asdict(outcome).items() if k != "seconds"}
            for outcome in outcomes
        ]
        print(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    else:
        print(_summary(outcomes))
    if args.against:
        changes = changed_ends(before, outcomes)
        print(*changes, sep="\n", file=sys.stderr)
        if any(outcome.broken for outcome in outcomes):
            return 2
        return 1 if changes else 0
    if any(outcome.differs for outcome in outcomes):
        return 1
    if any(outcome.agrees for outcome in outcomes) and not any(
        outcome.broken for outcome in outcomes
    ):
        return 0
    return 2


def read_ends(path: Path) -> dict[tuple[str, str], str]:
    """Read how each setting ended: `agrees`, `differs` or `does not run`, from what
    `upref step --json` printed.

    Raises:
        InputError: the file is missing, or it holds no such records.
    """
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        return {
            (record["setting"], record["family"]): _end(
                record["error"], record["cause"]
            )
            for record in records
        }
    except FileNotFoundError:
        raise InputError(
            f"there is no file {path}: --against takes what `upref step TRAINER --json` printed."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{path} does not hold the records that `upref step TRAINER --json` prints."
        ) from None


def changed_ends(
    before: dict[tuple[str, str], str], outcomes: list[StepOutcome]
) -> list[str]:
    """Return a line for each setting that ends otherwise than in the records, or that
    they do not have.
    """
    lines = []
    for outcome in outcomes:
        was = before.get((outcome.setting, outcome.family), "not recorded")
        now = _end(outcome.error, outcome.cause)
        if was != now:
            lines.append(
                f"changed: {outcome.family}, {outcome.setting}: {was}, now {now} {outcome.cause}".rstrip()
            )
    return lines


def _end(error: float | None, cause: str) -> str:
    if error is None:
        return "does not run"
    return "differs" if cause else "agrees"


def _summary(outcomes: list[StepOutcome]) -> str:
    def count(which: str) -> int:
        """Return in how many outcomes this is true."""
        return sum(getattr(outcome, which) for outcome in outcomes)

    words = [
        f"{count('agrees')} of {len(outcomes)} settings agree",
        f"{count('differs')} differ",
    ]
    words.append(f"{count('refused')} could not be run")
    if failed := count("failed"):
        words[-1] += f" ({failed} because the trainer raised an error)"
    if broken := count("broken"):
        words.append(f"{broken} could not be judged, because upref itself failed")
    return f"{', '.join(words)} ({sum(outcome.seconds for outcome in outcomes):.0f} s)"
