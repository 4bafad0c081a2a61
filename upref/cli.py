# SPDX-License-Identifier: Apache-2.0
"""The command `upref`. Exit status: 0 equal (or done), 1 different, 2 could not run, with one sentence on stderr."""

import argparse
import inspect
import io
import json
import math
import sys
import textwrap
import traceback
from dataclasses import asdict, fields
from importlib import resources
from pathlib import Path
from typing import Any

from upref.errors import InputError
from upref.registry import ERRORS, LEVELS, Objective, get, names


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; `upref -h` lists them."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without unicode still shows the rest
    try:
        return args.run(args)
    except InputError as error:
        return _fail(args, str(error))
    except ModuleNotFoundError as error:
        return _fail(args, f"{error}: install it, or run `upref doctor` to see what is there.")
    except BrokenPipeError:  # `upref list | head`
        sys.stdout = None
        return 0
    except OSError as error:
        return _fail(args, f"cannot write {error.filename or 'the output'}: {error.strerror}.")


def _fail(args, sentence: str) -> int:
    if args.debug:
        traceback.print_exc()
    print(f"upref: {sentence}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (`{self.prog} -h` shows what it takes).\n")


def _parser() -> argparse.ArgumentParser:
    p = _Parser("upref", description="Reference and verification of policy-gradient objectives.")
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")
    sub = p.add_subparsers(required=True, metavar="COMMAND")

    def command(name, run, text):
        c = sub.add_parser(name, help=text, description=text)
        c.set_defaults(run=run)
        c.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return c

    c = command("list", _list, "the registered objectives, one line each")
    c.add_argument("--json", action="store_true")
    c.add_argument("--markdown", action="store_true", help="the table of README.md")
    c = command("show", _show, "an objective: equation, weight, Cap, defaults and where they come from, source")
    c.add_argument("name", metavar="NAME")
    c.add_argument("--json", action="store_true")
    c = command("cap", _cap, "Probability Capacity: a table, or with -o a map")
    _curves(c)
    c.add_argument("--adv", type=float, default=1.0, metavar="+1|-1", help="sign of the advantage")
    c = command("weights", _weights, "gradient weight dJ/dlp: a table, or with -o a figure")
    _curves(c)
    c = command("derive", _derive, "sympy derives the gradient from the function that trains")
    c.add_argument("name", metavar="NAME|all")
    c.add_argument("--json", action="store_true")
    c = command("check", _check, "whether a loss (an advantage, a KL estimator) is what it is meant to be")
    c.add_argument("loss", metavar="LOSS", help=LOSS)
    what = c.add_mutually_exclusive_group(required=True)
    what.add_argument("--as", dest="name", metavar="NAME", help="the objective (`upref list`)")
    what.add_argument("--as-advantage", metavar="NAME", help="an advantage estimator: group_norm, leave_one_out, ...")
    what.add_argument("--as-kl", metavar="NAME", help="a KL estimator: k1, k2 or k3")
    c.add_argument("--hp", action="append", default=[], metavar="K=V", help="hyperparameter, e.g. eps_high=0.28")
    c.add_argument("--skip", action="append", default=[], metavar="ORACLE", help="an oracle not to run")
    c.add_argument("--json", action="store_true")
    c = command("identify", _identify, "which objective a loss is, with its hyperparameters, by its gradients")
    c.add_argument("loss", metavar="LOSS", help=LOSS)
    c.add_argument("--json", action="store_true")
    c = command("audit", _audit, "the installed framework's losses against the papers")
    c.add_argument("framework", choices=["verl", "trl"])
    c.add_argument("--ledger", action="store_true", help="print the recorded deviations, with evidence; runs nothing")
    c.add_argument("--json", action="store_true")
    c = command("doctor", _doctor, "versions, optional parts, and a self-test of every gradient")
    c.add_argument("--json", action="store_true")
    return p


def _curves(c: argparse.ArgumentParser):
    c.add_argument("names", nargs="+", metavar="NAME|LOSS", help="an objective, or a loss as in `check`")
    c.add_argument("-o", metavar="FILE", dest="file", help="write a figure (.svg, .pdf, .png)")
    c.add_argument("--hp", action="append", default=[], metavar="K=V", help="hyperparameter, e.g. eps_high=0.28")
    c.add_argument("--json", action="store_true")


def _hp(pairs: list[str]) -> dict[str, Any]:
    hp: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            hp[key] = None if value == "None" else float(value)
        except ValueError:
            raise InputError(f"--hp {pair!r} is not NAME=NUMBER.") from None
    return hp


# ---- list and show -------------------------------------------------------------------------------------------------
def _list(args) -> int:
    objectives = [get(n) for n in names()]
    if args.json:
        print(json.dumps([_facts(o) for o in objectives], indent=1, ensure_ascii=False))
    elif args.markdown:
        print(markdown_table())
    else:
        _table(["name", "paper", "eq.", "level", "aggregation", "defaults"], [_line(o) for o in objectives])
    return 0


def _line(o: Objective) -> list[str]:
    hp = ", ".join(f"{k}={v}" for k, v in o.hyperparameters.items())
    return [o.name, o.paper, o.eq, o.level, o.agg, hp]


def markdown_table() -> str:
    """The table of objectives in README.md; a test holds the page against it."""
    rows = [
        f"| `{n}` | {p} | {lv} | {agg} | {_first(get(n))} |" for n, p, _, lv, agg, _ in (_line(get(n)) for n in names())
    ]
    return "\n".join(["| name | paper | level | aggregation | J |", "|---|---|---|---|---|", *rows])


def _first(o: Objective) -> str:
    return f"`{o.equation.splitlines()[0]}`".replace("|", "\\|")


def _facts(o: Objective) -> dict[str, Any]:
    plain = ("name", "paper", "eq", "level", "agg", "adv", "kl", "note", "unread", "coupled", "off_anchor")
    facts = {f.name: getattr(o, f.name) for f in fields(o) if f.name in plain}
    return facts | {"equation": o.equation, "hyperparameters": o.hyperparameters, "defaults": o.defaults}


def _show(args) -> int:
    o = get(args.name)
    if args.json:
        print(json.dumps(_facts(o), indent=1, ensure_ascii=False))
        return 0
    say = lambda head, text: print(f"\n{head}\n" + textwrap.indent(text.strip(), "    "))
    print(f"{o.name}   {o.paper}, {o.eq}")
    say("objective, to be maximised", o.equation)
    say("facts", "\n".join(f"{k:12} {v}" for k, v in _about(o)))
    if o.hyperparameters:
        say("defaults", "\n".join(f"{k} = {v}\n    {o.defaults[k]}" for k, v in o.hyperparameters.items()))
    say("weight dJ/dlp, by hand", _source(o.closed_form))
    say("Probability Capacity at π_θ = π_old", _capacity_lines(o))
    say("source", _source(o.fn))
    say("reference", bib_entry(o.paper))
    say("units and errors", ERRORS)
    return 0


def _about(o: Objective):
    yield "level", f"{o.level}: {LEVELS[o.level]}"
    yield "aggregation", o.agg
    yield "advantage", o.adv
    if o.kl:
        yield "KL", f"- beta * {o.kl}, a term of its own"
    for key in ("note", "unread", "coupled", "off_anchor"):
        if value := getattr(o, key):
            yield {"unread": "not in sympy", "coupled": "not split", "off_anchor": "r = 1"}.get(key, key), value


def _source(fn) -> str:
    lines, depth = inspect.getsource(fn).splitlines(), 0
    for i, line in enumerate(lines):  # the decorator's facts are shown above
        depth += line.count("(") - line.count(")")
        if line.lstrip().startswith("def "):
            return textwrap.dedent("\n".join(lines[i:]))
        if not line.lstrip().startswith("@") and depth == 0 and i == 0:
            break
    return textwrap.dedent("\n".join(lines))


def bib_entry(key: str) -> str:
    """The BibTeX entry of that key in papers.bib."""
    text = resources.files("upref").joinpath("papers.bib").read_text(encoding="utf-8")
    for entry in text.split("\n@"):
        if entry.partition("{")[2].partition(",")[0] == key:
            return "@" + entry.strip().removeprefix("@")
    return f"{key}: no entry in papers.bib"


# ---- curves --------------------------------------------------------------------------------------------------------
PI_OLD = (0.001, 0.01, 0.1, 0.5, 0.9)
LOSS = "package.module:function, path/to/file.py:function, verl:loss_mode or trl:loss_type"
RATIOS = (0.2, 0.5, 0.8, 0.9, 1.0, 1.1, 1.28, 2.0, 5.0, 50.0)


def _capacity_lines(o: Objective) -> str:
    from upref.capacity import capacity

    try:
        caps = {adv: capacity(o, PI_OLD, PI_OLD, adv) for adv in (1, -1)}
    except InputError as error:
        return str(error)
    head = "π_old " + "".join(f"{p:>9g}" for p in PI_OLD)
    return "\n".join([head, *(f"A {'>' if a > 0 else '<'} 0 " + "".join(f"{v:9.4g}" for v in caps[a]) for a in caps)])


def _cap(args) -> int:
    from upref.capacity import capacity
    from upref.curve import of_all

    if args.adv == 0 or not math.isfinite(args.adv):
        raise InputError("--adv is a sign: give +1 or -1.")
    hp = _hp(args.hp)
    if args.file:
        from upref.plots import cap_map

        return _save(cap_map(*args.names, adv=args.adv, **hp), args.file)
    rows = [[c.name, *capacity(c, PI_OLD, PI_OLD, args.adv).tolist()] for c in of_all(args.names, hp)]
    return _numbers(args, "π_old", PI_OLD, rows, f"Cap at π_θ = π_old, A = {args.adv:+g}")


def _weights(args) -> int:
    import numpy as np

    from upref.curve import of_all

    hp = _hp(args.hp)
    if args.file:
        from upref.plots import weights

        return _save(weights(*args.names, **hp), args.file)
    rows = [
        [f"{c.name}, A = {A:+d}", *c(np.array(RATIOS), float(A), 0.01).tolist()]
        for c in of_all(args.names, hp)
        for A in (1, -1)
    ]
    return _numbers(args, "r", RATIOS, rows, "weight dJ/dlp (π_old = 0.01 where the bound depends on it)")


def _numbers(args, axis: str, points, rows, title: str) -> int:
    if args.json:
        print(
            json.dumps(
                {"title": title, axis: points, **{row[0]: row[1:] for row in rows}}, indent=1, ensure_ascii=False
            )
        )
    else:
        print(title)
        _table([axis, *(f"{p:g}" for p in points)], [[row[0], *(f"{v:.4g}" for v in row[1:])] for row in rows])
    return 0


def _save(figure, file: str) -> int:
    known = figure.canvas.get_supported_filetypes()
    if Path(file).suffix.lstrip(".") not in known:
        raise InputError(f"cannot write a figure as {file!r}: end the name in one of .{', .'.join(sorted(known))}.")
    figure.savefig(file)
    print(file)
    return 0


# ---- proofs, audits, health ----------------------------------------------------------------------------------------
def _derive(args) -> int:
    from upref.derivation import derive

    derivations = []
    for name in names() if args.name == "all" else [args.name]:
        derivations.append(derive(name))
        if not args.json:
            print(derivations[-1], end="\n\n")
    if args.json:
        print(json.dumps([asdict(d) for d in derivations], indent=1, ensure_ascii=False))
    return 0 if all(d.ok for d in derivations) else 1


def _check(args) -> int:
    report = _report(args)
    if changed := next((f for f in report.failures if f.oracle == "mutation"), None):
        raise InputError(f"{report.loss} changes its inputs ({changed.regime}): copy them before writing.")
    return _answer(args, report)


def _answer(args, verdict) -> int:
    if args.json:
        print(verdict.json())
    else:
        _console().print(verdict)
    return 0 if verdict else 1


def _identify(args) -> int:
    from upref.check.identify import identify

    return _answer(args, identify(args.loss))


def _report(args):
    hp, skip = _hp(args.hp), tuple(args.skip)
    if args.as_advantage:
        from upref.check.advantages import check_advantages

        return check_advantages(args.loss, args.as_advantage, skip=skip, **hp)
    if args.as_kl:
        from upref.check.kl import check_kl

        if hp:
            raise InputError("a KL estimator has no hyperparameter: leave --hp out.")
        return check_kl(args.loss, args.as_kl, skip=skip)
    from upref.check.verdict import check

    return check(args.loss, args.name, skip=skip, **hp)


def _audit(args) -> int:
    from upref.check import audit, ledger

    if args.ledger:
        entries = [e for e in ledger.read() if e.framework == args.framework]
        said = [asdict(e) for e in entries] if args.json else "\n\n".join(map(str, entries))
        print(json.dumps(said, indent=1, ensure_ascii=False) if args.json else said)
        return 0
    return _answer(args, audit.audit(args.framework))


def _doctor(args) -> int:
    from upref.doctor import examine

    report = examine()
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _table(["", ""], [[k, str(v)] for k, v in report.items() if k != "ok"], heads=False)
    return 0 if report["ok"] else 1


def _console():
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def _table(head: list[str], rows: list[list[str]], heads: bool = True):
    from rich import box
    from rich.table import Table

    table = Table(*head, box=box.SIMPLE_HEAD, show_header=heads, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    _console().print(table)


if __name__ == "__main__":
    sys.exit(main())
