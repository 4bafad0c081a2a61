# SPDX-License-Identifier: Apache-2.0
"""`python -m repro.mini.compare up_dapo`: train it and its baseline from the same base
policy, and report.

An objective's other half is the one without UP, or with it: up_dapo and dapo, sapo and
up(sapo); --against NAME takes NAME instead. The settings are those of
experiments/up_dapo_vs_dapo.toml; name=value changes one (`steps=50`). Finished runs are
used again. Writes repro/out/mini/compare/NAME/report.md with its figures. Exit status:
0 done, 1 a run failed, 2 could not start, 130 interrupted (the same command goes on).
"""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.markdown import Markdown

import upref
from figures.make import save
from repro import Parser
from repro.mini.experiment import curves, plan, records, suite
from repro.mini.experiment.plan import Cell, Plan
from repro.mini.experiment.questions import (
    SHARES,
    Numbers,
    RunRecord,
    Term,
    number,
)
from repro.mini.experiment.search import Choice
from repro.mini.train.settings import Settings
from upref import markdown
from upref.errors import InputError
from upref.files import own_folder, write_atomically
from upref.weights.curve import obstacle
from upref.weights.plots import Panel, cap_panels

PATTERN = "up_dapo_vs_dapo"  # the experiment whose settings are taken over
CAUTION = """No verdict follows from this page. The pre-registered experiments, `python -m repro.mini.experiment`, have
more seeds, and verdicts: repro/mini/results/verdicts.md, repro/mini/round2/results/report.md."""
PANELS: list[dict[str, Any]] = [
    {"metric": "avg", "label": "Avg@32"},
    {"metric": "best", "label": "Best@32"},
    {"metric": "reward", "label": "training reward"},
    {"metric": "entropy", "label": "entropy, nats"},
    {"metric": "kl_base", "label": "KL(policy || base), nats"},
    {
        "metric": "grad_norm_max",
        "label": "largest gradient norm of a minibatch",
        "log": True,
    },
]
FRACTIONS = ("valid", "alive", "overflow")  # shown in points of 100, too
ROWS = [
    ("avg", "last"),
    ("maj", "last"),
    ("best", "last"),
    ("reward", "last"),
    ("entropy", "mean"),
    ("kl_base", "last"),
    ("grad_norm", "mean"),
    ("grad_norm_max", "max"),
    ("clip_pos_high", "mean"),
    ("alive", "mean"),
]
LEGEND = """`avg`, `maj`, `best`: Avg@32, Maj@32 and Best@32 on held-out problems, at top-p 0.7,
after the last step. All others are of the training steps: `last` is the mean of the last fifth,
`mean` and `max` are over all of them. `reward`: the share of right answers. `entropy`, `kl_base`:
the entropy and the KL to the base policy of a token, in nats. `grad_norm`: the norm before
clipping, averaged over the minibatches of a step; `grad_norm_max`: the largest of them.
`clip_pos_high`: the share of the tokens with A > 0 that have no gradient and a ratio of at least 1.
`alive`: the share of the tokens with A ≠ 0 that have a gradient.
"""


def partner(name: str) -> str:
    """Return the other half of an objective: of up(X) it is X; of up_X it is X, and of X
    it is up_X, or up(NAME) where the registry lacks that.
    """
    if name.startswith("up(") and name.endswith(")"):
        return name[3:-1]
    other = name.removeprefix("up_") if name.startswith("up_") else f"up_{name}"
    return other if other in upref.names() else f"up({name})"


def pair(name: str, against: str) -> tuple[str, str]:
    """Return the names of the two arms: the baseline, and what is compared with it.

    Args:
        name: the objective. Against its other half, the one with UP comes second.
        against: the baseline instead of the other half; "": none.

    Raises:
        InputError: there is no such objective, or both are the same.
    """
    known = upref.get(name).name
    if against:
        baseline = upref.get(against).name
        if baseline == known:
            raise InputError(
                f"--against {against} is the objective itself: name another one (`upref list`)."
            )
        return baseline, known
    other = partner(name)
    with_up = known.startswith("up") and partner(known) == other != f"up({known})"
    return (other, known) if with_up else (known, other)


def experiment(
    name: str, seeds: int, overrides: dict[str, Any], against: str = ""
) -> Plan:
    """Return a plan with the pattern's settings and these two arms, without claims.

    Args:
        name: the objective, which the plan and its only group are named after.
        seeds: how many, from 0 on.
        overrides: settings that differ from the pattern's.
        against: as for `pair`.
    """
    base, up = pair(name, against)
    pattern = plan.load(PATTERN)
    return replace(
        pattern,
        name=name,
        arms={arm: {"objective": arm} for arm in (base, up)},
        groups=[{"name": name, "arms": [base, up], "bases": [""]}],
        claims=(),
        families=(),
        main={"seeds": list(range(seeds))},
        settings=pattern.settings | overrides,
    )


def settings_of(e: Plan, arm: str, seed: int) -> Settings:
    """Return the settings of one run."""
    return e.run("main", Cell(arm, e.name), "", Choice(), seed).settings


def write(e: Plan, known: dict[str, RunRecord], out: Path, folder: Path) -> str:
    """Write report.md and its figures into the folder, which is made; return the text.

    Args:
        e: the plan.
        known: the records of all its runs, by name.
        out: folder of the runs.
        folder: of the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base, up = e.arms
    found = [curves.series(e, known, panel) for panel in PANELS]
    save_both(
        curves.draw(PANELS, found, f"{base} and {up} from the same base policy"),
        folder / "curves",
    )
    tokens_seen = cap_map(e, out, folder)
    n = len(e.main["seeds"])
    seeds = f"{n} seed{'s' if n > 1 else ''}"
    text = [
        f"# {base} and {up}, trained from the same base policy ({seeds})\n",
        table(e, known),
        LEGEND,
        tokens_seen,
    ]
    text += [chance(n), CAUTION, ""]
    text += [f"The proof and the gradients: `bash repro/run.sh {e.name} reference`.\n"]
    write_atomically(folder / "report.md", "\n".join(text))
    return "\n".join(text)


def chance(seeds: int) -> str:
    """Return a sentence on what so many seeds can tell of an effect."""
    if seeds == 1:
        return "One seed cannot tell an effect from chance: two seeds of one method can differ more than two methods do."
    agree = f"where nothing differs, the signs of {seeds} seeds all agree with probability {2 ** (1 - seeds):.2g}"
    cannot = (
        "cannot tell an effect from chance"
        if seeds < 6  # 2 ** -5 = 0.03 is below 0.05
        else "are not tested on this page"
    )
    return f"These {seeds} seeds {cannot}: {agree}."


def print_report(text: str) -> None:
    """Print the report on a terminal, wrapped: a soft wrap would cut what is longer
    than a line.
    """
    suite.say(Markdown(text), soft_wrap=False)


def table(e: Plan, known: dict[str, RunRecord]) -> str:
    """Return a table with a row for each of ROWS: the mean of each arm over the seeds,
    and the second arm minus the first, seed by seed.
    """
    base, up = e.arms
    runs, seeds = e.runs(known), e.main["seeds"]
    rows = []
    for metric, at in ROWS:
        x: dict[str, list[float]] = {}  # arm -> the number of each seed
        for arm in e.arms:
            term = Term(arm, e.name, metric, at)
            x[arm] = [number(runs[arm, e.name, "", seed], term) for seed in seeds]
        scale = 100 if metric in FRACTIONS else 1  # `number` gives SHARES in points
        is_share = metric in (*SHARES, *FRACTIONS)
        form = ".1f" if is_share else ".3g"
        means = [f"{scale * float(np.mean(x[arm])):{form}}" for arm in e.arms]
        pairs = zip(x[base], x[up], strict=True)
        differences = ", ".join(f"{scale * (b - a):+{form}}" for a, b in pairs)
        unit = " (%)" if is_share else ""
        rows.append([f"{metric}{unit}, {at}", *means, differences])
    columns = ["", base, up, "difference, seed by seed"]
    return markdown.table(columns, rows) + "\n"


def cap_map(e: Plan, out: Path, folder: Path) -> str:
    """Draw the Cap maps of both arms with the tokens that the first seed's runs kept,
    as cap.svg and cap.png; return a section in Markdown: what they show, or why there
    is no map of an arm.

    Args:
        e: the plan.
        out: folder of the runs.
        folder: where the figure goes.
    """
    lines = ["## Where the tokens were\n"]
    panels = []
    seen = []  # the tokens of each panel
    for sign, adv in (("A > 0", 1.0), ("A < 0", -1.0)):
        for arm in e.arms:
            s = settings_of(e, arm, e.main["seeds"][0])
            path = out / s.key / "seen.npz"
            title = f"{arm}, {sign}"
            if why := _no_map(arm, path):
                lines.append(f"* {title}: no map of tokens, {why}.")
                continue
            tokens = _tokens(arm, s.hp, path, adv)
            n = len(tokens.alive)
            without = int((~tokens.alive).sum())
            note = f"{n} tokens, {without} without a gradient"
            panels.append(Panel(title, arm, adv, s.hp, note))
            seen.append(tokens)
            share = 100 * (without / n) if n else 0.0
            lines.append(
                f"* {title}: {share:.2f} % of {n} tokens have no gradient of their own."
            )
    if panels:
        fig = cap_panels(panels)
        for ax, tokens in zip(fig.axes, seen, strict=False):
            _draw_tokens(ax, tokens)
        save_both(fig, folder / "cap")
        lines.append(
            "\nFigure cap.svg: orange, tokens that have a gradient of their own; red, tokens that have none."
        )
    return "\n".join(lines) + "\n"


def _no_map(arm: str, path: Path) -> str:
    """Return why there is no map of an arm's tokens; "" where there is one.

    Args:
        arm: an objective.
        path: of the tokens that its run kept.
    """
    o = upref.get(arm)
    if why := obstacle(o):  # its tokens have no weights of their own
        return why
    if o.level != "token":
        return "it acts on whole responses"
    return "" if path.exists() else "no token was kept"


class Tokens(NamedTuple):
    """The tokens of one panel, [n] each."""

    pi_old: Numbers  # π_old(o_t)
    pi: Numbers  # π_θ(o_t)
    alive: NDArray[np.bool_]  # whether it has a gradient of its own


def _tokens(arm: str, hp: dict[str, Any], path: Path, adv: float) -> Tokens:
    """Return the tokens that a run kept whose advantage has the sign of `adv`."""
    kept = np.load(path)
    here = np.sign(kept["adv"]) == adv
    A, pi_old, pi = (kept[name][here] for name in ("adv", "pi_old", "pi"))
    weight = upref.get(arm).weight(pi / pi_old, A, mu=pi_old, **hp)
    # an objective may have one weight for all tokens
    return Tokens(pi_old, pi, np.broadcast_to(weight != 0, len(A)))


def _draw_tokens(ax: Axes, tokens: Tokens) -> None:
    """Draw the tokens as dots, red and larger where they have no gradient."""
    x, y, alive = tokens
    small: dict[str, Any] = {"lw": 0, "rasterized": True}
    ax.scatter(x[alive], y[alive], s=3, color="#E69F00", alpha=0.8, **small)
    ax.scatter(x[~alive], y[~alive], s=7, color="#CC0000", **small)


def save_both(fig: Figure, path: Path) -> None:
    """Save a figure as .svg and as .png, whatever suffix the path has."""
    save(fig, path.with_suffix(".svg"))
    picture = io.BytesIO()
    fig.savefig(picture, dpi=130)
    write_atomically(path.with_suffix(".png"), picture.getvalue())


def parse_override(text: str) -> tuple[str, Any]:
    """Return name and value of NAME=VALUE; a value that is no JSON is text.

    Raises:
        InputError: there is no `=`.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r} is not name=value, for example steps=50.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def parse_overrides(texts: list[str], seeds: str) -> dict[str, Any]:
    """Return name -> value of several NAME=VALUE.

    Args:
        texts: what the user typed.
        seeds: by which option seeds are chosen, in words, for the message.

    Raises:
        InputError: one has no `=`, or sets the seed or the objective.
    """
    overrides = dict(map(parse_override, texts))
    for name in overrides.keys() & {"seed", "objective"}:
        raise InputError(
            f"{name} is not a setting to change here: the objective comes first, {seeds}."
        )
    return overrides


@suite.exit_status_of("run.sh")
def main(argv: list[str] | None = None) -> int:
    """Train an objective and its other half, report, and return the exit status, as
    described above.
    """
    parser = Parser(
        prog="repro/run.sh",
        description="Train an objective and its other half, and report.",
    )
    parser.add_argument(
        "--against",
        default="",
        metavar="NAME",
        help="compare with NAME instead of its other half",
    )
    parser.add_argument("objective")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="name=value",
        help="settings that differ, for example steps=50",
    )
    parser.add_argument(
        "--seeds", type=int, default=2, help="seeds a method (default 2)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=suite.cores(),
        help="runs at a time (default: one for each core)",
    )
    parser.add_argument(
        "--out", type=Path, default=suite.OUT, help="folder of the runs"
    )
    args = parser.parse_intermixed_args(argv)  # name=value behind an option too

    if args.seeds < 1 or args.jobs < 1:
        raise InputError("--seeds and --jobs must be at least 1.")
    overrides = parse_overrides(args.overrides, "seeds by --seeds")
    Settings.of(overrides)  # a wrong name, said with the nearest right one
    e = experiment(args.objective, args.seeds, overrides, args.against)
    name = args.objective + (f"_against_{args.against}" if args.against else "")
    folder = args.out / "compare" / name.replace("(", "_of_").replace(")", "")
    own_folder(folder)
    wanted = dict(e.todo({}))
    with suite.alone(args.out) as lock:
        failures = suite.run_all(wanted, args.out, args.jobs, lock)
    for sentence in failures:
        print(sentence, file=sys.stderr)
    if failures:
        return 1
    own_folder(folder, empty=True)
    text = write(
        e,
        {name: records.record(args.out / name) for name in wanted},
        args.out,
        folder,
    )
    print_report(text)
    suite.say(f"\nReport and figures: {folder}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
