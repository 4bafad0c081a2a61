# SPDX-License-Identifier: Apache-2.0
"""The verbs `upref audit`, `upref recipe` and `upref step`."""

import argparse

from upref import catalog
from upref.cli.verb import Verb, add_hyperparameters, hyperparameters
from upref.errors import InputError
from upref.result import Result
from upref_frameworks import ledger, names

TRAINERS = ("trl", "verl", "openrlhf")  # whose steps upref runs


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `upref audit`."""
    parser.add_argument("framework", choices=[*names(), "torch"])
    parser.add_argument(
        "--version",
        metavar="V",
        help="another version than the pinned one, or `newest`",
    )
    parser.add_argument(
        "--source", metavar="CHECKOUT", help="audit this working copy of the framework"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--ledger",
        action="store_true",
        help="print the recorded deviations; runs nothing",
    )
    what.add_argument(
        "--report",
        metavar="ID",
        help="print an entry of the ledger as a bug report for upstream",
    )
    what.add_argument(
        "--proofs",
        action="store_true",
        help="run the ledger's scripts, which need the framework alone",
    )
    what.add_argument(
        "--logprobs",
        action="store_true",
        help="check its log-probability functions instead",
    )
    what.add_argument(
        "--draft",
        action="store_true",
        help="print a draft of the missing ledger entries",
    )


def _refuse_audit(args: argparse.Namespace) -> None:
    """Raise InputError if --report names an entry that the ledger does not have."""
    if args.report:
        ledger.entry(args.framework, args.report)


def _audit(args: argparse.Namespace) -> int:
    """Print what `upref audit` is asked for; return its exit status."""
    from upref.cli.output import answer

    if args.ledger:
        return answer(args, ledger.Ledger(ledger.read(args.framework)))
    return answer(args, _audited(args))


def _audited(args: argparse.Namespace) -> Result:
    """Return the result that the options of `upref audit` ask for; --ledger, which runs
    nothing, is not among them.
    """
    from upref_frameworks import audits
    from upref_frameworks.audits import report
    from upref_frameworks.audits.kernels import kernels

    name = args.framework
    if args.report:
        return report.Draft(report.report(name, args.report))
    which = {
        "version": args.version or "",
        "source": args.source or "",
        "loud": args.debug,
    }
    if args.proofs:
        return report.proofs(audits.framework(name), **which)
    if args.logprobs:
        return kernels(name, **which)
    audited = audits.audit(name, **which)
    return report.Draft(report.draft(audited)) if args.draft else audited


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `upref recipe`."""
    parser.add_argument("name", metavar="NAME", help="the objective (`upref list`)")
    parser.add_argument(
        "--in", dest="framework", required=True, choices=names(), help="the framework"
    )
    add_hyperparameters(parser)


def _refuse_recipe(args: argparse.Namespace) -> None:
    """Raise InputError if there is no objective of this name."""
    catalog.require(args.name)


def _recipe(args: argparse.Namespace) -> int:
    """Print the recipe, as text or JSON; return exit status 0."""
    from upref_frameworks.audits.recipe import recipe

    found = recipe(args.name, args.framework, **hyperparameters(args.hp))
    print(found.json() if args.json else found)
    return 0


def _step_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `upref step`."""
    parser.add_argument(
        "trainer",
        metavar="TRAINER",
        help=f"{', '.join(TRAINERS)}, or a step of your own: FILE.py:step",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only settings whose name or model family contains TEXT",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the settings; run nothing"
    )
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="records of --json: fail where a setting now ends otherwise",
    )
    step_group = parser.add_argument_group("a step of your own")
    step_group.add_argument(
        "--as",
        dest="name",
        default="",
        metavar="NAME",
        help="the objective (`upref list`)",
    )
    step_group.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="of the sampler (default 0.7)",
    )
    step_group.add_argument(
        "--model",
        default="Model",
        metavar="NAME",
        help="the model, or what makes it (default Model)",
    )
    step_group.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="AXIS",
        help="lengths, temperature, ratio or holes",
    )
    step_group.add_argument(
        "-v", "--verbose", action="store_true", help="print what the verdict rests on"
    )
    add_hyperparameters(parser)
    parser.epilog = """Exit status: 0 if a setting agrees and none differs, 1 if one differs, 2 if none could run or upref
        itself failed on one. With --against: 0 if each setting ends as in the records, 1 if one does not. On several
        ranks: torchrun --nproc-per-node 2 -m upref step FILE.py:step --as NAME"""


def _refuse_step(args: argparse.Namespace) -> None:
    """Raise InputError for options of `upref step` that do not go together, or an
    objective that is not registered.
    """
    is_own_step = ":" in args.trainer
    if not is_own_step and args.trainer not in TRAINERS:
        raise InputError(
            f"there is no step of {args.trainer!r}: {', '.join(TRAINERS)}, or FILE.py:step."
        )
    if is_own_step and not args.name:
        raise InputError(
            "the objective that the step is meant to have is missing: --as NAME (`upref list`)."
        )
    if is_own_step and (args.only or args.list or args.against):
        raise InputError(
            "--only, --list and --against are of the steps of trainers: leave them out."
        )
    if not is_own_step and (args.name or args.hp or args.without):
        raise InputError(
            f"--as, --hp and --without are of a step of your own: {args.trainer} has settings."
        )
    if is_own_step:
        catalog.require(args.name)


def _step(args: argparse.Namespace) -> int:
    """Check the steps of a trainer or a user's own step; return the exit status."""
    if ":" in args.trainer:
        from upref_frameworks.steps.own import command as check_own

        return check_own(args)
    from upref_frameworks.steps.table import command

    return command(args)


AUDIT = Verb(
    "compare a framework's losses, advantages and KL terms with the papers",
    _audit_arguments,
    _audit,
    refuse=_refuse_audit,
)
RECIPE = Verb(
    "print the settings that give an objective in a framework",
    _recipe_arguments,
    _recipe,
    refuse=_refuse_recipe,
)
STEP = Verb(
    "compare the gradient of a whole step with its objective's: a trainer's over settings and models, or your own",
    _step_arguments,
    _step,
    refuse=_refuse_step,
)
