# SPDX-License-Identifier: Apache-2.0
"""What each verb of upref's own does: parsed arguments in, exit status out. See
upref/cli/__init__.py.

One file, for each is a dozen lines.
"""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from upref import catalog
from upref.cli.output import answer, table
from upref.cli.verb import hyperparameters
from upref.errors import InputError
from upref.files import require_file
from upref.result import encode

WAITED = 10  # seconds of --timeout for a CPU second of a proof
RATIOS = (0.2, 0.5, 0.8, 0.9, 1.0, 1.1, 1.28, 2.0, 5.0, 50.0)


def refuse_unknown_names(args: argparse.Namespace) -> None:
    """Refuse a name with a typo, a file that is not there, and options that do not go
    together, before anything heavy is imported.

    Args:
        args: the parsed words of a verb of upref's own.

    Raises:
        InputError: what is wrong, and the nearest names.
    """
    if args.command == "check":
        catalog.require_estimators(args.as_kl, args.as_advantage, args.agg)
        catalog.require_distillation(args.as_distillation)
        catalog.require_value_loss(args.as_value)
        _refuse_options_of_kinds(args)
        _refuse_options_of_check(args)
    if args.command == "prove":
        catalog.require_estimators(args.as_kl, args.as_advantage, args.agg)
        _refuse_options_of_kinds(args)
    if args.command == "replay":
        for file in map(Path, args.files):
            if not file.is_dir():
                require_file(file)
    if args.command == "badge":
        require_file(
            Path(args.results),
            f"write one with `pytest ... --upref-results {args.results}`",
        )
    for loss in _losses_named(args):
        catalog.require_loss(loss)
    catalog.require(*_objectives_named(args))
    hyperparameters(getattr(args, "hp", []))


def _losses_named(args: argparse.Namespace) -> list[str]:
    """Return the words of the command line that are losses."""
    if args.command == "check":
        return list(args.losses)
    if args.command in ("cap", "weights"):
        return list(args.names)
    if args.command in ("identify", "prove"):
        return [args.loss]
    if args.command == "maximizes" and not (args.as_advantage or args.as_kl):
        return [args.loss]
    if args.command == "diff":
        # a word without a colon may be an adapter: `diff` looks it up
        return [word for word in (args.a, args.b) if ":" in word]
    return []


def _objectives_named(args: argparse.Namespace) -> list[str]:
    """Return the words of the command line that are names of objectives."""
    if args.command == "derive" and args.name == "all":
        return []  # all is the word for every objective
    if args.command == "prove" and args.name and ":" in args.name:
        return []  # what the loss is compared with is a function too
    names = []
    if args.command in ("check", "show", "derive", "replay", "prove"):
        names.append(args.name)
    if args.command == "replay":
        names += args.against
    return [name for name in names if name]


def _refuse_options_of_kinds(args: argparse.Namespace) -> None:
    """Raise InputError for an option that this kind of function has not."""
    kinds_with_agg = ("name", "as_distillation", "as_value")
    if args.agg and not any(getattr(args, kind, "") for kind in kinds_with_agg):
        raise InputError(
            "--agg is the aggregation of an objective: give it with --as NAME."
        )
    if args.as_kl and args.hp:
        raise InputError("a KL estimator has no hyperparameter: leave --hp out.")
    if args.as_advantage and getattr(args, "columns", None) is not None:
        raise InputError(
            "--columns is for losses and KL estimators: of advantages, --rows gives the "
            "largest batch."
        )


def _refuse_options_of_check(args: argparse.Namespace) -> None:
    """Raise InputError for options of `upref check` that do not go together."""
    if args.json and len(args.losses) > 1:
        raise InputError("--json prints one report: give one LOSS.")
    if args.watch and any(not _is_function_of_file(loss) for loss in args.losses):
        raise InputError(
            "--watch looks at files: write each LOSS as path/to/file.py:function."
        )


def _is_function_of_file(loss: str) -> bool:
    """Tell whether a word is FILE.py:function."""
    return loss.rpartition(":")[0].endswith(".py")


# ---- verdicts ------------------------------------------------------------------------
def check(args: argparse.Namespace) -> int:
    """Check a function as what an option --as-... says; without one, as a loss. Print
    the report. The status is 1 where it differs.
    """
    hp = hyperparameters(args.hp)
    skip = tuple(args.skip)
    if args.as_distillation:
        from upref.verify.formulas.distillation import check_distillation

        agg = args.agg or "token-mean"
        report = check_distillation(
            args.loss, args.as_distillation, agg=agg, skip=skip, **hp
        )
        return answer(args, report)
    if args.as_value:
        from upref.verify.formulas.value import check_value

        agg = args.agg or "token-mean"
        report = check_value(args.loss, args.as_value, agg=agg, skip=skip, **hp)
        return answer(args, report)
    if args.as_advantage:
        from upref.verify.advantages import check_advantages

        return answer(
            args, check_advantages(args.loss, args.as_advantage, skip=skip, **hp)
        )
    if args.as_kl:
        from upref.verify.kl import check_kl

        return answer(args, check_kl(args.loss, args.as_kl, skip=skip))
    if args.as_logprobs:
        from upref.user_code.logprobs import CUTS
        from upref.verify.logprobs import check_logprobs

        settings = {"softcap", "logit_scale", "ranks", *CUTS.values()}
        if unknown := sorted(hp.keys() - settings):
            raise InputError(
                f"a log-prob function has no setting {unknown[0]!r}: give softcap, logit_scale, ranks, top_k or top_p."
            )
        return answer(args, check_logprobs(args.loss, skip=skip, **hp))
    from upref.registry import get
    from upref.user_code import from_signature
    from upref.verify.check import check as verdict

    o = get(args.name)
    reads = o.aggregated(args.agg) if args.agg else o
    loss = from_signature(args.loss, reads, hp, alone=True)
    return answer(args, verdict(loss, o, agg=args.agg, skip=skip, **hp))


def prove(args: argparse.Namespace) -> int:
    """Prove a KL term, an advantage estimator, or a loss, and print the verdict. The
    status is 0 where it is proved, 1 where it differs, 2 where there is no proof.
    """
    from upref.verify import proof

    hp = hyperparameters(args.hp)
    rows = 2 if args.rows is None else args.rows
    columns = 3 if args.columns is None else args.columns
    size = {"rows": rows, "columns": columns}
    # the child that runs this is ended at --timeout, however busy the machine is
    limit = {"seconds": args.timeout / WAITED}
    if args.as_kl:
        verdict = proof.prove_kl(args.loss, args.as_kl, **size, **limit)
    elif args.as_advantage:
        from upref.verify.advantages.proof import prove_advantages

        most = {} if args.rows is None else {"responses": args.rows}
        verdict = prove_advantages(args.loss, args.as_advantage, **most, **limit, **hp)
    else:
        from upref.registry import get
        from upref.user_code import from_signature, no_objective

        target: Any
        if ":" in args.name:  # a function
            o = no_objective()
            target = args.name
        else:
            o = get(args.name)
            target = o
        reads = o.aggregated(args.agg) if args.agg else o
        loss = from_signature(args.loss, reads, hp, alone=True)
        verdict = proof.prove(loss, target, agg=args.agg, **size, **limit, **hp)
    status = answer(args, verdict)
    return 2 if verdict.status == "no proof" else status


def identify(args: argparse.Namespace) -> int:
    """Print which objective a loss is. The status is 1 where it is none, and 0 where it
    is one with a known pitfall.
    """
    from upref.identification.identify import identify as which
    from upref.user_code import from_signature, no_objective

    return answer(
        args, which(from_signature(args.loss, no_objective(), {}, alone=True))
    )


def diff(args: argparse.Namespace) -> int:
    """Print where the steps of two trainers differ, where adapters, or --steps or
    --case, are given; else where two losses do. The status is 1 where they differ.
    """
    from upref.identification.diff import diff as difference_of
    from upref.user_code.frameworks import adapters

    known = adapters()
    if args.steps or args.case or {args.a, args.b} & known.keys():
        from upref.conformance.diff import chosen_cases, diff_steps

        a = _adapter(args.a)
        b = _adapter(args.b)
        return answer(args, diff_steps(a, b, chosen_cases(args.case), args.seed))
    try:
        difference = difference_of(args.a, args.b)
    except InputError as error:
        if not (_is_adapter(args.a) or _is_adapter(args.b)):
            raise
        raise InputError(
            f"{error} To compare whole training steps: `upref diff --steps {args.a} {args.b}`."
        ) from error
    return answer(args, difference)


def _is_adapter(word: str) -> bool:
    """Tell whether a word names an adapter in a file, by running the file."""
    from upref.conformance.adapter import load_adapter

    if ".py:" not in word:
        return False
    try:
        load_adapter(word)
    except Exception:  # what its file or its constructor raises
        return False
    return True


def _adapter(word: str) -> Any:
    """Return the adapter of a framework that is known by its name, or of a file."""
    from upref.conformance.adapter import load_adapter
    from upref.errors import importing
    from upref.user_code.frameworks import adapters

    known = adapters()
    if word not in known:
        return load_adapter(word)
    with importing(word):
        return load_adapter(known[word])


def maximizes(args: argparse.Namespace) -> int:
    """Print which function of the policy a loss, advantages or a KL term maximize. The
    status is 1 where the answer is that it is wrong.
    """
    from upref.maximization.maximizes import maximizes as answer_of
    from upref.user_code import from_signature, no_objective

    hp = hyperparameters(args.hp)
    fn = args.loss
    kind = "loss"
    if args.as_advantage:
        kind = "advantage"
    elif args.as_kl:
        kind = f"kl-{args.as_kl}"
    elif ":" in fn:
        fn = from_signature(fn, no_objective(), hp, alone=True)
        hp = {}
    result = answer_of(
        fn,
        kind=kind,
        advantages=args.advantages,
        group_size=args.group_size,
        **hp,
    )
    return answer(args, result)


def listing(args: argparse.Namespace) -> int:
    """Print the objectives: as JSON, as a Markdown table, or as a table with the number
    of trainers. The status is 0.
    """
    if args.json:
        from upref.cli.show import every

        print(json.dumps(every(), indent=1, ensure_ascii=False))
    elif args.markdown:
        from upref.cli.show import markdown_table

        print(markdown_table())
    else:
        facts_by_name = catalog.facts()
        trainers = catalog.trainers()
        shown = list(facts_by_name) if args.every else catalog.first_tier()
        rows = []
        for name in shown:
            number_of_trainers = len(trainers.get(name, []))
            last = str(number_of_trainers or "")  # an empty cell in place of 0
            rows.append([name, *facts_by_name[name].values(), last])
        table(["name", "level", "aggregation", "paper", "trainers"], rows)
        print(
            "trainers: frameworks whose audit compares a loss with the objective; "
            "`upref show NAME` explains the other columns"
        )
        if number_left_out := len(facts_by_name) - len(shown):
            print(f"{number_left_out} more are in papers only: upref list --all")
    return 0


def show(args: argparse.Namespace) -> int:
    """Print what is known of an objective, as a page or as JSON. The status is 0."""
    from upref.cli.show import facts, find_description, page

    o = find_description(args.name)
    print(json.dumps(facts(o), indent=1, ensure_ascii=False) if args.json else page(o))
    return 0


# ---- curves --------------------------------------------------------------------------
def _resolve_losses(given: list[str]) -> list[Any]:
    """Return what to draw: the names as they are, but a loss in place of each name
    whose framework needs a process of its own. This process becomes that framework's.

    Raises:
        InputError: two frameworks need a process each.
    """
    from upref.user_code import no_objective
    from upref.user_code.frameworks import provider
    from upref.weights import plots  # noqa: F401  (before the imports are restricted)

    plugin_of: dict[str, Any] = {}
    frameworks = set()  # those that need a process
    for name in dict.fromkeys(given):
        framework = name.partition(":")[0]
        plugin = provider(framework)
        if plugin and plugin.needs_process(framework):
            plugin_of[name] = plugin
            frameworks.add(framework)
    if len(frameworks) > 1:
        raise InputError(
            f"{' and '.join(sorted(frameworks))} need a process each: draw one framework at a time."
        )
    losses: list[Any] = []
    for name in given:
        if name in plugin_of:
            losses.append(plugin_of[name].find(name, no_objective(), {}))
        else:
            losses.append(name)
    return losses


def cap(args: argparse.Namespace) -> int:
    """Print the Probability Capacity of losses, or with -o draw it. The status is 0."""
    if args.adv == 0 or not math.isfinite(args.adv):
        raise InputError("--adv is a sign: give +1 or -1.")
    losses = _resolve_losses(args.names)
    hp = hyperparameters(args.hp)
    from upref.cli.show import PI_OLD
    from upref.weights.capacity import capacity, words_for_fading
    from upref.weights.curve import make_curves, words_for_one_token

    curves = make_curves(losses, hp)
    if args.file:
        from upref.weights.plots import cap_map, save

        return save(lambda: cap_map(*curves, adv=args.adv, log=args.log), args.file)
    rows = [[c.name, *capacity(c, PI_OLD, PI_OLD, args.adv).tolist()] for c in curves]
    title = f"Cap at π_θ = π_old, A = {args.adv:+g}"
    remarks = {"measured": words_for_one_token(curves)}
    if args.adv > 0:
        remarks["fades"] = words_for_fading(curves)
    return _print_numbers(args, "π_old", PI_OLD, rows, title, remarks)


def weights(args: argparse.Namespace) -> int:
    """Print the gradient weights of losses, or with -o draw them. The status is 0."""
    losses = _resolve_losses(args.names)
    hp = hyperparameters(args.hp)
    import numpy as np

    from upref.weights.curve import (
        common_ratio_symbol,
        make_curves,
        words_for_one_token,
    )

    curves = make_curves(losses, hp)
    if args.file:
        from upref.weights.plots import save, weights as draw

        return save(lambda: draw(*curves), args.file)
    rows = []
    for curve in curves:
        for A in (1, -1):
            numbers = curve(np.array(RATIOS), float(A), 0.01).tolist()
            rows.append([f"{curve.name}, A = {A:+d}", *numbers])
    ratio = common_ratio_symbol(curves)
    title = "weight dJ/dlp (π_old = 0.01 where the bound depends on it)"
    remarks = {"measured": words_for_one_token(curves, ratio)}
    return _print_numbers(args, ratio, RATIOS, rows, title, remarks)


def _print_numbers(
    args: argparse.Namespace,
    axis: str,
    points: Any,
    rows: Any,
    title: str,
    remarks: dict[str, str],
) -> int:
    """Print a table of curves, or with --json its numbers; return the exit status.

    Args:
        args: the command line.
        axis: the letter of the first row.
        points: the numbers of the first row.
        rows: the name and the numbers of each curve.
        title: what the numbers are.
        remarks: what the numbers do not show, a line each; an empty one is left out.
    """
    remarks = {key: words for key, words in remarks.items() if words}
    if args.json:
        data = {"title": title, axis: points}
        for name, *numbers in rows:
            data[name] = numbers
        print(json.dumps(data | remarks, indent=1, ensure_ascii=False))
        return 0
    print(title)
    for words in remarks.values():
        print(words)
    head = [axis, *(f"{point:g}" for point in points)]
    lines = []
    for name, *numbers in rows:
        lines.append([name, *(f"{number:.4g}" for number in numbers)])
    table(head, lines)
    return 0


# ---- proofs and health ---------------------------------------------------------------
def derive(args: argparse.Namespace) -> int:
    """Print derivations. The status is 1 where one of them is wrong."""
    from upref.derivation import derive as derivation
    from upref.registry import names

    chosen = names() if args.name == "all" else [args.name]
    derivations = []
    for name in chosen:
        derivations.append(derivation(name))
        if not args.json:
            print(derivations[-1], end="\n\n")
    if args.json:
        print(
            json.dumps([asdict(d) for d in derivations], indent=1, ensure_ascii=False)
        )
    return 0 if all(d.ok for d in derivations) else 1


def replay(args: argparse.Namespace) -> int:
    """Run `upref replay`, as `upref.replay.command.run` does."""
    from upref.replay.command import run

    return run(args, hyperparameters(args.hp))


def logs(args: argparse.Namespace) -> int:
    """Print what the logged numbers of runs say of each other. The status is 1 where
    they contradict each other in one of the runs.
    """
    from upref.logs.audit import audit
    from upref.logs.read import read

    names = {}
    for given in args.map:
        scalar, equals, column = given.partition("=")
        if not equals:
            raise InputError(
                f"--map {given!r} needs SCALAR=COLUMN, for example --map kl_loss=train/kl."
            )
        names[scalar] = column
    reports = []
    for file in args.files:
        for run in read(file):
            reports.append(audit(run, names))
    if args.json:
        data = [encode(report.data()) for report in reports]
        print(json.dumps(data, indent=1, ensure_ascii=False))
    else:
        print("\n".join(report.text(args.verbose) for report in reports))
    return int(not all(reports))


def doctor(args: argparse.Namespace) -> int:
    """Print what is installed. The status is 1 where something of it is wrong."""
    from upref.cli.doctor import examine

    report = examine()
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        table(
            ["", ""], [[k, str(v)] for k, v in report.items() if k != "ok"], heads=False
        )
    return 0 if report["ok"] else 1


def badge(args: argparse.Namespace) -> int:
    """Print the counts of a results file, and draw its badge where a file is named."""
    from upref.conformance.results import draw_badge, read_badge
    from upref.files import write_atomically

    counts = read_badge(Path(args.results))
    if args.file:
        write_atomically(Path(args.file), draw_badge(counts))
    print(json.dumps(asdict(counts)) if args.json else counts)
    return 0


RUN = {
    "check": check,
    "identify": identify,
    "diff": diff,
    "maximizes": maximizes,
    "prove": prove,
    "list": listing,
    "show": show,
    "cap": cap,
    "weights": weights,
    "derive": derive,
    "badge": badge,
    "replay": replay,
    "logs": logs,
    "doctor": doctor,
}
