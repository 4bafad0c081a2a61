# SPDX-License-Identifier: Apache-2.0
"""`upref step`: a trainer's unmodified step over settings and families, each compared
with the float64 reference.
"""

import importlib
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from upref.errors import InputError, NotInstalled, importing
from upref.step.check import StepReport
from upref.step.compare.case import perturb
from upref.step.inputs.families import tiny
from upref.user_code.guard import one_line
from upref_frameworks.steps.host import Refused, TrainerFailedError, report
from upref_frameworks.steps.settings import TRAINERS, Setting


@dataclass(frozen=True)
class StepOutcome:
    """How one setting ended: one line of the table."""

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
        """Return whether the gradients agree."""
        return self.error is not None and not self.cause

    @property
    def differs(self) -> bool:
        """Return whether the gradients differ."""
        return self.error is not None and bool(self.cause)

    @property
    def refused(self) -> bool:
        """Return whether the trainer did not run; a failure of upref is another case."""
        return self.error is None and not self.broken

    @property
    def end(self) -> str:
        """Return how the setting ended, in one word.

        Returns:
            `agrees`, `DIFFERS`, `BROKEN` (upref itself failed), `fails` (the trainer
            raised an error) or `refused`.
        """
        if self.error is not None:
            return "DIFFERS" if self.cause else "agrees"
        if self.broken:
            return "BROKEN"
        return "fails" if self.failed else "refused"

    def __str__(self) -> str:
        """Return the line of the table, with the cause and what was not exercised below
        it.
        """
        error = "-" if self.error is None else f"{self.error:.1e}"
        lines = [f"{self.end:7}  {error:>7}  {self.family:16} {self.setting}"]
        lines += [f"         {self.cause}"] if self.cause else []
        lines += (
            [f"         not exercised: {self.not_exercised}"]
            if self.not_exercised
            else []
        )
        return "\n".join(lines)


def select_settings(trainer: str, only: str = "") -> list[Setting]:
    """Return the settings of a trainer whose family or name contains a text.

    Args:
        trainer: a key of TRAINERS.
        only: the text; "": all settings.

    Returns:
        At least one, in the order of the table.

    Raises:
        InputError: there is no such trainer or setting.
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
    say: Callable[[StepOutcome], Any] = lambda outcome: None,
) -> list[StepOutcome]:
    """Run all settings of a trainer, or those whose name or family contains a text.

    Args:
        trainer: a key of TRAINERS.
        only: the text; "": all settings.
        say: called with each outcome as soon as it is there.

    Returns:
        The outcomes, with their seconds.

    Raises:
        InputError: there is no such trainer or setting.
        NotInstalled: no setting can run, because a package that each needs is missing.
    """
    out = []
    settings = select_settings(trainer, only)
    for package in ("transformers", "trl") if trainer == "trl" else ("transformers",):
        with importing(package):
            importlib.import_module(package)
    for setting in settings:
        start = time.perf_counter()
        outcome = _outcome_of(trainer, setting)
        out.append(replace(outcome, seconds=time.perf_counter() - start))
        say(out[-1])
    return out


def _outcome_of(trainer: str, setting: Setting) -> StepOutcome:
    """Run one setting; return its report, or the error in its place, as a line of the
    table.
    """
    outcome = StepOutcome(setting.name, setting.family, None)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of adapters' first weights
            report = run_setting(trainer, setting)
    except (NotInstalled, Refused) as e:
        return replace(outcome, cause=str(e), failed=isinstance(e, TrainerFailedError))
    except Exception as e:
        return replace(
            outcome,
            cause=f"upref itself fails: {type(e).__name__}: {one_line(e)}",
            broken=True,
        )
    cause = "" if report else report.failures[0].cause
    return replace(
        outcome,
        error=report.error,
        cause=cause,
        not_exercised=report.numbers_not_reached(),
    )


def run_setting(trainer: str, setting: Setting) -> StepReport:
    """Run one setting of a trainer's unmodified step on a tiny model of its family.

    Args:
        trainer: a key of TRAINERS.
        setting: one of its settings.

    Returns:
        The comparison with the float64 reference.

    Raises:
        NotInstalled: the trainer, or peft where the setting has adapters, is missing.
        Refused: the trainer does not take this setting.
    """
    model: Any = perturb(tiny(setting.family, **setting.model))
    module: Any = importlib.import_module(f"upref_frameworks.{trainer}.step")
    if trainer != "trl":
        return report(
            module.record_training,
            model,
            setting.objective,
            setting.hp,
            setting.goal,
            half=setting.half,
            **setting.fields,
        )
    fields = dict(setting.fields)
    if lora := fields.pop("peft_config", None):
        with importing("peft"):
            from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    judged: StepReport = module.report(
        model,
        fields,
        module.batch(**setting.rows),
        setting.objective,
        setting.hp,
        setting.goal,
        step=setting.step,
        bound=torch.bfloat16 if setting.half else None,
    )
    return judged


def command(args: Namespace) -> int:
    """Run `upref step TRAINER`: print each outcome and a summary, or JSON; with --list
    print the settings alone.

    Args:
        args: its options.

    Returns:
        The exit status: 0 where a setting agrees and none differs, 1 where a setting
        differs, 2 where none could run or upref itself failed. With `--against` it is 1
        where a setting ends otherwise than in the records, and 0 where none does; 2
        stays.
    """
    if args.list:
        chosen = select_settings(args.trainer, args.only)
        print(*(f"{s.family:16} {s.name}" for s in chosen), sep="\n")
        return 0
    before = read_ends(Path(args.against)) if args.against else {}

    def show(outcome: StepOutcome) -> None:
        """Print an outcome as soon as it is there; nothing for --json."""
        if not args.json:
            print(outcome, flush=True)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are tiny: more threads wait for each other
    try:
        outcomes = run(args.trainer, args.only, show)
    finally:
        torch.set_num_threads(threads)
    if args.json:
        records = []
        for outcome in outcomes:
            record = asdict(outcome)
            del record["seconds"]  # which differ from run to run
            records.append(record)
        print(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    else:
        print(_summary(outcomes))
    upref_failed = any(outcome.broken for outcome in outcomes)
    if args.against:
        changes = changed_ends(before, outcomes)
        print(*changes, sep="\n", file=sys.stderr)
        if upref_failed:
            return 2
        return 1 if changes else 0
    if any(outcome.differs for outcome in outcomes):
        return 1
    some_agree = any(outcome.agrees for outcome in outcomes)
    return 0 if some_agree and not upref_failed else 2


def read_ends(path: Path) -> dict[tuple[str, str], str]:
    """Read how each setting ended from what `upref step --json` printed.

    Args:
        path: of the file.

    Returns:
        (setting, family) -> `agrees`, `differs` or `does not run`.

    Raises:
        InputError: the file is missing, or it holds no such records.
    """
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        return {
            (record["setting"], record["family"]): _ending(
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
    """Compare how the settings end with how they ended before.

    Args:
        before: as of `read_ends`.
        outcomes: of this run; settings that are only in the records are not compared.

    Returns:
        A line for each setting that ends otherwise, or that the records do not have.
    """
    lines = []
    for outcome in outcomes:
        was = before.get((outcome.setting, outcome.family), "not recorded")
        now = _ending(outcome.error, outcome.cause)
        if was != now:
            lines.append(
                f"changed: {outcome.family}, {outcome.setting}: {was}, now {now} {outcome.cause}".rstrip()
            )
    return lines


def _ending(error: float | None, cause: str) -> str:
    """Return how a setting ended: `does not run`, `differs` or `agrees`."""
    if error is None:
        return "does not run"
    return "differs" if cause else "agrees"


def _summary(outcomes: list[StepOutcome]) -> str:
    """Return how many settings agree, differ and could not be run, in one line."""

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
