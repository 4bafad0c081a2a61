# SPDX-License-Identifier: Apache-2.0
"""The command `upref`. Exit status: 0 equal (or done), 1 different, 2 could not run, with one sentence on stderr.

What it takes is here, what it does in upref/cli/commands.py: help and usage errors import nothing heavy.
"""

import argparse
import io
import os
import sys
import traceback
from pathlib import Path

from upref import __version__, interrupt
from upref.errors import Gone, InputError

LOSS = (
    "package.module:function, path/to/file.py:function, or a framework's own loss as shipped: verl:loss_mode, "
    "trl:loss_type"
)

FOREIGN = ("check", "identify", "cap", "weights", "learn")  # verbs that run somebody's code


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; `upref -h` lists them. argv None: the command line's own; user code then runs in a child
    process with a time limit, and Ctrl-C or SIGTERM ends everything with one sentence, status 130 or 143."""
    args = _parser().parse_args(argv)
    args.apart = argv is None and hasattr(os, "fork")
    if not args.apart:
        return _run(args)
    with interrupt.handled_within(f"upref {args.command}"):
        if args.command not in FOREIGN or args.command == "identify" or getattr(args, "name", ""):
            return _run(args)  # the loss alone runs in a child: upref.cli.commands._loss
        from upref.cli.supervise import supervised

        what = "your function" if args.command == "learn" else "the loss"
        try:
            return supervised(lambda: _run(args), args.timeout, what)
        except Gone as error:
            return _fail(args, str(error))


def _run(args) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without unicode still shows the rest
    try:
        from upref.cli.commands import RUN

        status = RUN[args.command](args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (InputError, Gone) as error:
        return _fail(args, str(error))
    except ModuleNotFoundError as error:
        return _fail(args, f"{error}: install it, or run `upref doctor` for a list of what is installed.")
    except BrokenPipeError:  # `upref list | head`
        sys.stdout = None
        return 0
    except OSError as error:
        sys.stdout = None  # Python would flush it once more, fail, and exit with status 120
        return _fail(args, f"cannot write {error.filename or 'the output'}: {error.strerror}.")
    except (Exception, SystemExit) as error:  # nothing but a finished report is a verdict
        if isinstance(error, MemoryError):
            return _fail(args, "not enough memory: close other programs, or raise the limit (`ulimit -v`).")
        return _fail(args, f"no answer: {type(error).__name__}: {error} (a bug in upref; --debug shows where).")


def _fail(args, sentence: str) -> int:
    if args.debug:
        traceback.print_exc()
    print(f"upref: {' '.join(sentence.split())}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {InputError(message)} (`{self.prog} -h` shows what it takes).\n")


def _parser() -> argparse.ArgumentParser:
    p = _Parser("upref", description="Reference and verification of policy-gradient objectives.")
    p.add_argument("--version", action="version", version=f"upref {__version__}")
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")
    sub = p.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        c = sub.add_parser(name, help=text, description=text)
        c.set_defaults(command=name)
        c.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        c.add_argument("--json", action="store_true", help="machine-readable output")
        return c

    c = command("check", "check a loss (or an advantage, a KL estimator, log-probs) against a reference")
    c.add_argument("loss", metavar="LOSS", help=LOSS + "; verl:loss_mode@matched sets what the objective needs")
    what = c.add_mutually_exclusive_group(required=True)
    what.add_argument("--as", dest="name", metavar="NAME", help="the objective (`upref list`)")
    what.add_argument("--as-advantage", metavar="NAME", help="an advantage estimator: group_norm, leave_one_out, ...")
    what.add_argument("--as-logprobs", action="store_true", help="log-probs and entropy; --hp softcap=30, ranks=2")
    what.add_argument("--as-kl", metavar="NAME", help="a KL estimator: k1, k2 or k3")
    c.add_argument("--agg", default="", metavar="NAME", help="aggregation in place of the objective's, e.g. token-mean")
    add_hyperparameters(c)
    add_time_limit(c)
    c.add_argument("--skip", action="append", default=[], metavar="ORACLE", help="leave an oracle out")
    c.epilog = """The file of LOSS is imported and run with your rights: your files, network and credentials. Check a
        loss that you do not trust in a container without network and secrets."""
    c.add_argument("-v", "--verbose", action="store_true", help="also print what was assumed, and each oracle")
    c = command("identify", "name the objective of a loss, with its hyperparameters, from its gradients")
    c.add_argument("loss", metavar="LOSS", help=LOSS)
    add_time_limit(c)
    c.add_argument("-v", "--verbose", action="store_true", help="also print what was assumed")
    c = command("audit", "compare a framework's losses, advantages and KL terms with the papers")
    c.add_argument("framework", choices=[*_frameworks(), "torch"])
    c.add_argument("--version", metavar="V", help="another version than the pinned one, or `newest`")
    c.add_argument("--source", metavar="CHECKOUT", help="audit this working copy of the framework")
    what = c.add_mutually_exclusive_group()
    what.add_argument("--ledger", action="store_true", help="print the recorded deviations; runs nothing")
    what.add_argument("--report", metavar="ID", help="print an entry of the ledger as a bug report for upstream")
    what.add_argument("--proofs", action="store_true", help="run the ledger's scripts, which need the framework alone")
    what.add_argument("--logprobs", action="store_true", help="check its log-probability functions instead")
    what.add_argument("--draft", action="store_true", help="print a draft of the missing ledger entries")
    c.set_defaults(verbose=False)
    c = command("recipe", "print the settings that give an objective in a framework")
    c.add_argument("name", metavar="NAME", help="the objective (`upref list`)")
    c.add_argument("--in", dest="framework", required=True, choices=_frameworks(), help="the framework")
    add_hyperparameters(c)
    c.set_defaults(verbose=False)
    about = "test a results table for impossible values (GRIM test), and the leader's margin for chance"
    c = command("audit-table", about)
    c.add_argument("file", nargs="?", metavar="FILE", help="the table; without it, Table 1 of fan2026up")
    c.add_argument("--seed", type=int, default=0, help="seed of the random draws (default 0)")
    c.set_defaults(verbose=False)
    c.epilog = """FILE is CSV or markdown, in per cent: a header `method,AIME24,AMC23,Average`, then one row a method.
        An optional row named n gives the number of answers: 30x32 (problems x samples), or the candidates 674|675."""
    c = command("list", "list the registered objectives")
    c.add_argument("--markdown", action="store_true", help="the table of docs/objectives.md")
    c = command("show", "show an objective: equation, weight, Cap, source of each default, code")
    c.add_argument("name", metavar="NAME")
    c = command("cap", "Probability Capacity: a table, or with -o a map")
    _curves(c)
    c.add_argument("--adv", type=float, default=1.0, metavar="+1|-1", help="sign of the advantage")
    c.add_argument("--log", action="store_true", help="draw the map on logarithmic scales, for rare tokens")
    _curves(command("weights", "gradient weight dJ/dlp: a table, or with -o a figure"))
    c = command("explorer", "write an interactive HTML page: Cap maps, weights and a small policy")
    c.add_argument("file", metavar="FILE", help="the .html file to write; it needs no network")
    c = command("derive", "derive the gradient with sympy, from the function that trains")
    c.add_argument("name", metavar="NAME|all")
    c = command("learn", "list the exercises of the course, or write and grade one")
    c.add_argument("lesson", nargs="?", type=int, metavar="N", help="write lessonNN.py here; if it exists, grade it")
    add_time_limit(c, 60)
    c.set_defaults(verbose=False)
    c = command("claims", "list the statements of the paper fan2026up, with verdicts and evidence")
    c.add_argument("--section", metavar="3|4.1|B", help="only this section or appendix")
    c.add_argument("--verdict", metavar="WORD", help="only this verdict: proved, false, undecided, ...")
    c.add_argument("--run", action="store_true", help="compute the verdicts again from their evidence (in a checkout)")
    c.add_argument(
        "--save",
        action="store_true",
        help="with --run: store them for `upref claims` (--verdict red: new and changed records only)",
    )
    c.add_argument("-v", "--verbose", action="store_true", help="also print what each piece of evidence found")
    c.epilog = """Exit status: 1 if a claim is red, that is if its evidence is missing, fails or is inconsistent."""
    c = command("step", "compare the gradient of a trainer's whole step with its objective's, over settings and models")
    c.add_argument("trainer", choices=("trl", "verl", "openrlhf"))
    c.add_argument("--only", default="", metavar="TEXT", help="only settings whose name or model family contains TEXT")
    c.add_argument("--list", action="store_true", help="print the settings; run nothing")
    c.epilog = """Exit status: 0 if a setting agrees and none differs, 1 if one differs, 2 if none could run or upref
    itself failed on one."""
    command("doctor", "print versions and optional parts, and test every gradient")
    return p


def _curves(c: argparse.ArgumentParser):
    c.add_argument("names", nargs="+", metavar="NAME|LOSS", help="an objective, or a loss as in `check`")
    add_time_limit(c)
    c.add_argument("-o", metavar="FILE", dest="file", help="write a figure (.svg, .pdf, .png)")
    add_hyperparameters(c)


if __name__ == "__main__":
    sys.exit(main())
