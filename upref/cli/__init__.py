# SPDX-License-Identifier: Apache-2.0
"""The command `upref`. Exit status: 0 equal (or done), 1 different, 2 could not run,
with one sentence on stderr.

What it takes is here, what it does in upref/cli/commands.py: help and usage errors
import nothing heavy. Other packages add verbs (upref.plugins).
"""

import argparse
import contextlib
import difflib
import gc
import io
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from upref import interrupt, plugins
from upref.cli.verb import Verb, add_hyperparameters, add_time_limit
from upref.errors import Gone, InputError
from upref.version import __version__

LOSS = (
    "package.module:function, path/to/file.py:function, or a framework's own loss as shipped: verl:loss_mode, "
    "trl:loss_type"
)

FIRST_SCREEN = """\
upref compares the loss that trains a language model with a reference: PPO, GRPO, DAPO, ...

    upref check my.py:loss --as dapo    is this loss DAPO? If not: where it differs, and why
    upref prove my.py:loss --as dapo    is it DAPO for every value?
    upref identify my.py:loss           which objective is it?
    upref list                          the objectives, by name
    upref learn                         a course with exercises

my.py:loss is the function `loss` in the file my.py.
`upref -h` lists all commands, and `upref check -h` the options of one.
"""

CHECKOUT = ("claims",)  # verbs of `python -m paper`


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; `upref -h` lists them.

    Args:
        argv: the words; None: those of the command line. User code then runs in a child
            process with a time limit, and Ctrl-C or SIGTERM ends everything with one
            sentence, status 130 or 143.

    Returns:
        The exit status: 0 equal or done, 1 different, 2 it could not run, with one
        sentence on stderr. Without words it is 2, and the first screen is printed
        there.
    """
    words = sys.argv[1:] if argv is None else argv
    if not words:
        print(FIRST_SCREEN, end="", file=sys.stderr)
        return 2
    parser = _parser()
    if advice := _advice_for_unknown_verb(words, parser.verbs):
        print(f"upref: {advice}", file=sys.stderr)
        return 2
    return execute(parser, argv)


def execute(parser: argparse.ArgumentParser, argv: list[str] | None) -> int:
    """Run the verb that these words name, as `main` does; for the commands of other
    packages too.

    Args:
        parser: of `command_line`.
        argv: the words; None: those of the command line, and user code runs in a child
            process where the system can fork.

    Returns:
        The exit status: 0 yes, 1 no, 2 a sentence on stderr.

    Raises:
        SystemExit: from argparse, for --help, --version and wrong words.
    """
    args = parser.parse_args(argv)
    args.prog = parser.prog
    in_process = argv is not None or not hasattr(os, "fork")
    if in_process and getattr(args, "watch", False):
        return _print_sentence(args, 2, NO_WATCH)
    if in_process:
        return _run(args)
    with interrupt.handled_within(f"{args.prog} {args.command}"):
        if not args.chosen_verb.user_code:
            return _run(args)
        if args.command == "check":
            return _check_apart(args)
        return _run_apart(args)


NO_WATCH = "--watch is for the command line, where each check has a process of its own."


def _run(args: argparse.Namespace) -> int:
    """Run the verb in this process, on each loss in turn; return the worst exit status."""
    if (refused := _refused(args))[0]:
        return _print_sentence(args, *refused)
    return max(_run_one(part) for part in _by_loss(args))


def _run_one(args: argparse.Namespace) -> int:
    """Run the verb on one loss in this process."""
    print(getattr(args, "above", ""), end="")
    run = partial(args.chosen_verb.run, args)
    return _print_sentence(args, *_status_and_sentence(args, run))


def _refused(args: argparse.Namespace) -> tuple[int, str]:
    """Return exit status 2 and a sentence where the words are wrong, else 0 and "",
    before anything heavy is imported.
    """

    def refuse() -> int:
        """Raise InputError where the words are wrong; else return 0."""
        args.chosen_verb.refuse(args)
        return 0

    return _status_and_sentence(args, refuse)


def _by_loss(args: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the parsed words for each loss of a check; of another verb, the words."""
    if args.command != "check":
        return [args]
    parts = []
    above = ""  # an empty line stands between two reports
    for loss in args.losses:
        parts.append(argparse.Namespace(**vars(args), loss=loss, above=above))
        above = "\n"
    return parts


def _check_apart(args: argparse.Namespace) -> int:
    """Check each loss in a child process of its own, and return the worst exit status.
    With --watch, do so again at each save, until Ctrl-C or until nobody reads.
    """
    status, sentence = _refused(args)
    if status:
        return _print_sentence(args, status, sentence)
    while True:
        saved = _times_of_saves(args.losses) if args.watch else {}
        status = max(_run_apart(part) for part in _by_loss(args))
        if not args.watch or sys.stdout is None:
            return status
        try:
            print(
                f"\n{time.strftime('%X')}: waiting for a save; Ctrl-C ends", flush=True
            )
        except BrokenPipeError:
            sys.stdout = None  # nobody reads
            return status
        while _times_of_saves(args.losses) == saved:
            time.sleep(SECONDS_BETWEEN_LOOKS)


SECONDS_BETWEEN_LOOKS = 0.3


def _times_of_saves(losses: Iterable[str]) -> dict[Path, float]:
    """Return when each Python file in the folder of a loss's file was saved, in
    seconds; the losses' own files are among them.
    """
    folders = {Path(loss.rpartition(":")[0]).parent for loss in losses}
    times = {}
    for folder in folders:
        for file in folder.glob("*.py"):
            with contextlib.suppress(OSError):  # an editor is replacing it
                times[file] = file.stat().st_mtime
    return times


def _run_apart(args: argparse.Namespace) -> int:
    """Run the verb in a child process, print here what it prints there, and return its
    exit status; 2 where the words are wrong or the child sends no report.
    """
    from upref.cli.supervise import Printed, supervised

    def prepare() -> int:
        """Import what the child needs, before its time limit begins."""
        gc.disable()  # almost all that an import makes stays
        import_module("upref.user_code")  # with torch: the time limit is for user code
        if args.command == "check":
            import_module("upref.verify.check")  # once for all losses and all saves
        gc.freeze()  # the child does not look at it either
        gc.enable()
        return 0

    stdout = sys.stdout
    status, sentence = _refused(args)
    if status:
        return _print_sentence(args, status, sentence)
    status, sentence = _status_and_sentence(args, prepare)
    if status:
        return _print_sentence(args, status, sentence)

    def work() -> Printed:
        """Run the verb in the child, with what it prints kept in a page."""
        page = None if stdout is None else _Page(stdout)
        sys.stdout = page
        run_verb = partial(args.chosen_verb.run, args)
        status, sentence = _status_and_sentence(args, run_verb)
        out = "" if page is None else page.text()
        return Printed(status, out, sentence)

    try:
        printed = supervised(work, args.timeout, args.chosen_verb.user_code)
    except Gone as error:
        return _print_sentence(args, 2, str(error))

    def show() -> int:
        """Print what the child has printed, and return its exit status."""
        if printed.out:
            print(getattr(args, "above", "") + printed.out, end="")
        return printed.status

    status, sentence = _status_and_sentence(args, show, printed.status)
    return _print_sentence(args, status, printed.sentence or sentence)


class _Page(io.TextIOWrapper):
    """Keeps what is printed, for a stream that it stands for."""

    def __init__(self, stream: TextIO):
        """Take the encoding of the stream, and whether it is a terminal."""
        super().__init__(
            io.BytesIO(), encoding=stream.encoding, errors="replace", newline="\n"
        )
        self.terminal = stream.isatty()

    def isatty(self) -> bool:
        """Return whether the stream that this stands for is a terminal."""
        return self.terminal

    def text(self) -> str:
        """Return what was printed so far."""
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


def _status_and_sentence(
    args: argparse.Namespace, work: Callable[[], int], unread: int = 0
) -> tuple[int, str]:
    """Do the work, and return its exit status and ""; where it raises, 2 and a
    sentence, with the traceback on stderr under --debug.

    Args:
        args: the parsed words.
        work: returns its exit status.
        unread: the status where stdout is a pipe that its reader has closed. Then
            `sys.stdout` becomes None, and there is no sentence.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal without unicode still shows the rest
        sys.stdout.reconfigure(errors="replace")
    try:
        status = work()
        if sys.stdout is not None:
            sys.stdout.flush()
        return status, ""
    # nothing but a finished report is a verdict
    except (Exception, SystemExit) as error:
        # `upref list | head`
        if isinstance(error, BrokenPipeError) and not isinstance(sys.stdout, _Page):
            sys.stdout = None
            return unread, ""
        if args.debug:
            traceback.print_exc()
        return 2, _sentence(error, args.chosen_verb.user_code)


def _sentence(error: BaseException, user_code: str) -> str:
    """Say in one sentence what is wrong.

    Args:
        error: what a verb raised.
        user_code: what the verb ran of a user, in words; "" for nothing.
    """
    if isinstance(error, InputError | Gone):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: install it, or run `upref doctor` for a list of what is installed."
    if isinstance(error, OSError):
        # Python would flush it once more, fail, and exit with status 120
        sys.stdout = None
        return f"cannot write {error.filename or 'the output'}: {error.strerror}."
    if isinstance(error, MemoryError):
        return (
            "not enough memory: close other programs, or raise the limit (`ulimit -v`)."
        )
    whose = "a bug in upref"
    if user_code:  # which runs in the same process
        whose += f", or {user_code} changed a function of Python, torch or upref"
    return f"no answer: {type(error).__name__}: {error} ({whose}; --debug shows where)."


def _print_sentence(args: argparse.Namespace, status: int, sentence: str) -> int:
    """Print the sentence on stderr, where there is one, and return the status."""
    if sentence:
        print(f"{args.prog}: {' '.join(sentence.split())}", file=sys.stderr)
    return status


class _Losses(argparse.Action):
    """Keeps the losses behind `upref check`. Beside a loss it refuses an objective, and
    says where this goes.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keep the losses. Refuse the objective's name among them, and say where it goes."""
        names = [word for word in values if _is_a_name(word)]
        if len(values) > 1 and names:
            if namespace.name:
                parser.error(f"one word too many: {names[-1]}")
            # the objective's name may stand on either side
            *losses, name = sorted(values, key=_is_a_name)
            command = f"upref check {' '.join(losses)} --as {name}"
            parser.error(f"the objective goes behind --as: `{command}`")
        namespace.losses = values


def _is_a_name(word: str) -> bool:
    """Tell whether a word is a name as an objective has it: no file, module or loss of a
    framework.
    """
    return not (":" in word or word.endswith(".py"))


class _Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated option, and names one that it does not know."""

    verbs: Collection[str] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words as argparse does. The parser of a verb refuses an unknown
        option before a missing one.
        """
        if args is not None and not self.verbs:
            self._refuse_unknown_option(args)
        return super().parse_known_args(args, namespace)

    def _refuse_unknown_option(self, words: Sequence[str]) -> None:
        """Exit with the first long option that is not known, and the nearest known one;
        where none is near, with --hp, if the verb has it. Words behind "--" do not
        count.
        """
        known = self._option_string_actions
        for word in itertools.takewhile(lambda word: word != "--", words):
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                near = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
                advice = f": did you mean {near[0]}?" if near else ""
                if not near and "--hp" in known:
                    name = option.lstrip("-").replace("-", "_")
                    advice = f". --hp {name}=VALUE sets a hyperparameter of that name"
                self.error(f"there is no option {option}{advice}")

    def error(self, message: str) -> NoReturn:
        """Print one sentence on stderr, with the choices of an option that lacks its
        argument, and exit with status 2.
        """
        option, _, lacks = message.removeprefix("argument ").partition(": ")
        action = self._option_string_actions.get(option)
        if lacks == "expected one argument" and action and action.choices:
            message += f": {', '.join(action.choices)}"
        self.exit(
            2,
            f"{self.prog}: {InputError(message)} (`{self.prog} -h` shows what it takes).\n",
        )


def command_line(
    prog: str, about: str
) -> tuple[_Parser, Callable[..., argparse.ArgumentParser]]:
    """Return the parser of a command, and the function `(name, verb)` that adds a verb
    and returns the verb's parser.

    Args:
        prog: the command, as it is typed.
        about: one sentence for its help.
    """
    p = _Parser(prog, description=about)
    p.add_argument("--version", action="version", version=f"upref {__version__}")
    p.add_argument(
        "--debug", action="store_true", help="show the traceback of an error"
    )
    sub = p.add_subparsers(required=True, metavar="COMMAND")
    p.verbs = sub.choices

    def add(name: str, verb: Verb) -> argparse.ArgumentParser:
        """Add a verb, with the options that every verb has."""
        c = sub.add_parser(name, help=verb.help, description=verb.help)
        c.set_defaults(command=name, chosen_verb=verb, verbose=False)
        c.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        c.add_argument("--json", action="store_true", help="machine-readable output")
        verb.arguments(c)
        return c

    return p, add


def _run_own_verb(args: argparse.Namespace) -> int:
    """Run a verb of upref's own."""
    from upref.cli.commands import RUN

    return RUN[args.command](args)


def _refuse_for_own_verb(args: argparse.Namespace) -> None:
    """Refuse wrong arguments of a verb of upref's own, before anything heavy is imported."""
    from upref.cli.commands import refuse_unknown_names

    refuse_unknown_names(args)


def _parser() -> _Parser:
    """Return the parser of `upref`, with the verbs of installed packages."""
    p, add = command_line(
        "upref",
        "Compare a loss, a training step or a recorded run with readable references of "
        "policy-gradient objectives: PPO, GRPO, DAPO and others.",
    )

    def command(name: str, text: str, user_code: str = "") -> argparse.ArgumentParser:
        """Add a verb of upref's own without arguments, and return its parser."""
        return add(
            name,
            Verb(text, lambda c: None, _run_own_verb, user_code, _refuse_for_own_verb),
        )

    about = (
        "check a loss (or an advantage, a KL estimator, log-probs) against a reference"
    )
    c = command("check", about, "the loss")
    c.add_argument(
        "losses",
        nargs="+",
        action=_Losses,
        metavar="LOSS",
        help=LOSS
        + "; verl:loss_mode@matched sets what the objective needs; several are checked one after the other",
    )
    what = c.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--as", dest="name", metavar="NAME", help="the objective (`upref list`)"
    )
    what.add_argument(
        "--as-advantage",
        metavar="NAME",
        help="an advantage estimator: group_norm, leave_one_out, ...",
    )
    what.add_argument(
        "--as-logprobs",
        action="store_true",
        help="log-probs and entropy; --hp softcap=30, ranks=2, top_p=0.9, top_k=20",
    )
    what.add_argument("--as-kl", metavar="NAME", help="a KL estimator: k1, k2 or k3")
    what.add_argument(
        "--as-distillation",
        metavar="NAME",
        help="a divergence from a teacher's logits: reverse_kl, forward_kl, jsd, ...",
    )
    what.add_argument(
        "--as-value", metavar="NAME", help="a loss of a critic: mse or clipped"
    )
    c.add_argument(
        "--agg",
        default="",
        metavar="NAME",
        help="aggregation in place of the objective's, e.g. token-mean",
    )
    add_hyperparameters(c)
    add_time_limit(c)
    c.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="ORACLE",
        help="leave an oracle out",
    )
    c.add_argument(
        "--watch",
        action="store_true",
        help="check again at each save of a .py file beside that of LOSS, until Ctrl-C",
    )
    c.epilog = """The file of LOSS is imported and run with your rights: your files, network and credentials. Check a
        loss that you do not trust in a container without network and secrets."""
    c.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also print what was assumed, and each oracle",
    )
    c = command(
        "prove",
        "prove that a loss is an objective for every value, or find where it differs",
        "the loss",
    )
    c.add_argument("loss", metavar="LOSS", help=LOSS)
    what = c.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--as",
        dest="name",
        metavar="NAME",
        help="the objective (`upref list`), or another loss: path/to/file.py:function",
    )
    what.add_argument("--as-kl", metavar="NAME", help="a KL estimator: k1, k2 or k3")
    what.add_argument(
        "--as-advantage",
        metavar="NAME",
        help="an advantage estimator of one reward per response: group_norm, ...",
    )
    c.add_argument(
        "--agg",
        default="",
        metavar="NAME",
        help="aggregation in place of the objective's, e.g. token-mean",
    )
    c.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="rows of the largest batch (default 2; for advantages 4)",
    )
    c.add_argument(
        "--columns",
        type=int,
        metavar="N",
        help="columns of the largest batch (default 3)",
    )
    add_hyperparameters(c)
    add_time_limit(c, 600)
    c.add_argument(
        "-v", "--verbose", action="store_true", help="also print how it was read"
    )
    c.epilog = """Exit status: 0 proved, 1 it differs, at a batch that was run, 2 no proof. Needs z3:
        pip install 'upref-rl[prove]'. The file of LOSS is imported and run with your rights."""
    c = command(
        "identify",
        "name the objective of a loss, with its hyperparameters, from its gradients",
        "the loss",
    )
    c.add_argument("loss", metavar="LOSS", help=LOSS)
    add_time_limit(c)
    c.add_argument(
        "-v", "--verbose", action="store_true", help="also print what was assumed"
    )
    c = command(
        "diff",
        "show the first quantity in which two losses differ, and settings that close it",
        "the losses",
    )
    for name in ("a", "b"):
        c.add_argument(
            name,
            metavar=name.upper(),
            help="an objective, a loss as in `check`, or an adapter: trl, verl, openrlhf, FILE.py:CLASS",
        )
    c.add_argument(
        "--steps",
        action="store_true",
        help="A and B are adapters of the conformance suite: compare whole training steps",
    )
    c.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="ID",
        help="for two adapters: run the cases whose ids begin with ID",
    )
    c.add_argument(
        "--seed",
        type=int,
        default=0,
        help="for two adapters: the seed of the rows (default 0)",
    )
    add_time_limit(c, 600)
    c.add_argument(
        "-v", "--verbose", action="store_true", help="also print what was compared"
    )
    c.epilog = """Exit status: 0 nothing differs, 1 something does, or no case was compared. The files of A and B
        are imported and run with your rights."""
    c = command(
        "maximizes",
        "tell what a loss, an advantage estimator or a KL term maximizes on average",
        "the loss",
    )
    c.add_argument(
        "loss", metavar="NAME|LOSS", help="an objective, or a loss as in `check`"
    )
    what = c.add_mutually_exclusive_group()
    what.add_argument(
        "--as-advantage",
        action="store_true",
        help="LOSS is an advantage estimator: a name or a function",
    )
    what.add_argument(
        "--as-kl",
        choices=("loss", "reward", "advantage"),
        help="LOSS is a KL term, which is subtracted from J, from the response's reward or from its token's advantage",
    )
    c.add_argument(
        "--advantages",
        metavar="NAME",
        help="the estimator that the loss gets: a name, or FILE.py:FUNCTION",
    )
    c.add_argument(
        "--group-size",
        type=int,
        default=4,
        metavar="G",
        help="responses of a group, 2 to 8 (default 4)",
    )
    add_hyperparameters(c)
    add_time_limit(c)
    c.add_argument(
        "-v", "--verbose", action="store_true", help="also print each cosine"
    )
    c = command(
        "list",
        "list the objectives of the paper, its baselines and those that trainers have",
    )
    c.add_argument(
        "--all",
        action="store_true",
        dest="every",
        help="also those that are in papers only",
    )
    c.add_argument(
        "--markdown", action="store_true", help="the tables of docs/objectives.md"
    )
    c = command(
        "show", "show an objective: equation, weight, Cap, source of each default, code"
    )
    c.add_argument("name", metavar="NAME")
    c = command("cap", "Probability Capacity: a table, or with -o a map", "the loss")
    _add_curve_arguments(c)
    c.add_argument(
        "--adv", type=float, default=1.0, metavar="+1|-1", help="sign of the advantage"
    )
    c.add_argument(
        "--log",
        action="store_true",
        help="draw the map on logarithmic scales, for rare tokens",
    )
    _add_curve_arguments(
        command(
            "weights",
            "gradient weight dJ/dlp: a table, or with -o a figure",
            "the loss",
        )
    )
    c = command(
        "derive", "derive the gradient with sympy, from the function that trains"
    )
    c.add_argument("name", metavar="NAME|all")
    about = "check what a run recorded: the sampler's gap, advantages, the loss; and what other objectives would do"
    c = command("replay", about)
    c.add_argument(
        "files", nargs="+", metavar="FILE", help="recorded batches, or folders of them"
    )
    c.add_argument(
        "--as",
        dest="name",
        default="",
        metavar="NAME",
        help="the objective that ran (`upref list`)",
    )
    add_hyperparameters(c)
    c.add_argument(
        "--agg",
        default="",
        metavar="NAME",
        help="its aggregation in the run, e.g. seq-mean-token-mean",
    )
    c.add_argument(
        "--loss",
        default="",
        metavar="X",
        help="the loss that the run logged for this step",
    )
    c.add_argument(
        "--only",
        default="",
        metavar="CHECKS",
        help="which checks to run, with commas: sampler,advantages,loss,objectives",
    )
    c.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="NAME",
        help="an objective to compare with",
    )
    c.add_argument(
        "--tokenizer",
        default="",
        metavar="FOLDER",
        help="of a tokenizer of transformers, to print the text of each token",
    )
    c.add_argument(
        "-o",
        metavar="SHEET",
        dest="file",
        default="",
        help="also write a sheet: .svg or .html",
    )
    c.add_argument(
        "--zero",
        action="store_true",
        help="require the sampler's log-probabilities to equal the trainer's bit for bit, and count the tokens that differ",
    )
    c.add_argument("-v", "--verbose", action="store_true", help="print every step")
    c.epilog = """FILE is .npz or .safetensors of docs/dump.md, NeMo-RL's train_data_step*.jsonl, or the .pt of slime's
        and miles' --save-debug-train-data. Reports and sheets show token ids, and texts with --tokenizer: users' data.
        Exit status: 0 no failure (there may be notes), 1 a failure, 2 no failure, and a check could not run."""
    c = command(
        "logs", "compare the scalars that a run logged with each other, by arithmetic"
    )
    c.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="logs: .csv, .tsv, .jsonl, .json, or event files of TensorBoard or a folder of them",
    )
    c.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="SCALAR=COLUMN",
        help="which column is a scalar, where its name is your own",
    )
    c.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also print which column was read as which scalar",
    )
    c.epilog = """Exit status: 0 no contradiction, 1 numbers that cannot all be true, 2 the log cannot be read, or no law
        relates its columns."""
    c = command(
        "badge",
        "draw the badge of a run of the conformance suite, from its results file",
    )
    c.add_argument(
        "results",
        metavar="FILE",
        help="what `pytest --pyargs upref.conformance --upref-results FILE` wrote",
    )
    c.add_argument(
        "-o",
        metavar="FILE",
        dest="file",
        help="write an SVG to this file; without it, print the words",
    )
    command("doctor", "print versions and optional parts, and test every gradient")
    for name, verb in plugins.commands().items():
        add(name, verb)
    return p


def _advice_for_unknown_verb(words: Iterable[str], known: Collection[str]) -> str:
    """Return a sentence about the first word that is no option, where it is a verb of
    `python -m paper`, a verb of a package that this installation lacks, or is spelled
    like a known one; "" for any other.
    """
    word = next((w for w in words if not w.startswith("-")), "")
    if word in CHECKOUT:
        return f"{word} is a verb of `python -m paper`, in a checkout."
    if word in plugins.VERBS and word not in plugins.commands():
        return f"{word} is a verb of {plugins.VERBS[word]}, and {plugins.absent(plugins.VERBS[word])}."
    if word and word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        if near:
            return f"there is no command {word!r}: did you mean {near[0]}? `upref -h` lists all."
    return ""


def _add_curve_arguments(c: argparse.ArgumentParser) -> None:
    """Add the arguments that `cap` and `weights` share."""
    c.add_argument(
        "names",
        nargs="+",
        metavar="NAME|LOSS",
        help="an objective, or a loss as in `check`",
    )
    add_time_limit(c)
    c.add_argument(
        "-o", metavar="FILE", dest="file", help="write a figure (.svg, .pdf, .png)"
    )
    add_hyperparameters(c)


if __name__ == "__main__":
    sys.exit(main())
