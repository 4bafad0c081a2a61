# SPDX-License-Identifier: Apache-2.0
"""A page for each objective, from the registry: nothing on it is written by hand."""

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from docs.site import tex
from docs.site.prose import papers
from repro.mini.experiment import curves, plan, records
from upref import markdown
from upref.cli.show import _source, bib_entry
from upref.derivation import derive
from upref.errors import InputError
from upref.registry import LEVELS, Objective, get, names
from upref.weights import plots
from upref.weights.curve import make_curve
from upref_frameworks import names as frameworks
from upref_frameworks.audits.recipe import covered_objectives
from upref_frameworks.ledger import read

ROOT = Path(__file__).parents[2]
SIGNS = {1: "A > 0", -1: "A < 0", 0: "A = 0"}
RATIOS = np.exp(np.linspace(-5, 5, 81)) * 1.0001  # on none of the bounds
MUS = (0.02, 0.5)
INFINITE = 1e9
ABOUT = tomllib.loads(
    (Path(__file__).parent / "about.toml").read_text(encoding="utf-8")
)


def pages(source: Path) -> dict[str, str]:
    """Write the pictures of all objectives beside their pages, and return the pages:
    docname -> Markdown.
    """
    (source / "objectives").mkdir(parents=True)
    return {
        f"objectives/{name}": page(get(name), source / "objectives") for name in names()
    }


def page(o: Objective, folder: Path) -> str:
    """Write the pictures of an objective into the folder, and return its page."""
    title, about = ABOUT[o.name]
    parts = [
        f"# {title}\n\n{_thumb(o, folder)}{about} Its name in upref is `{o.name}`.\n\n{_paper(o)}",
        tex.block(tex.equation(o.equation)),
        _facts(o),
        _commands(o),
        "## The gradient, three times",
        _gradients(o),
        "## Pictures",
        _pictures(o, folder),
    ]
    if runs := _runs(o, folder):
        parts += ["## Training curves", runs]
    if o.hyperparameters:
        parts += ["## Hyperparameters", _hyperparameters(o)]
    parts += ["## Where frameworks differ", _frameworks(o)]
    parts += ["## Relatives", _relatives(o)]
    if o.paper:
        parts += ["## Reference", f"```bibtex\n{bib_entry(o.paper)}\n```"]
    return "\n\n".join(parts) + "\n"


# ---- the list --------------------------------------------------------------------
ROW = re.compile(r"^\| `(\w+)` \|.*\| ([^|]*) \| ([^|]*) \|$")
COLUMNS = ["name", "J", "level", "aggregation", "paper", "trainers"]
HEAD = markdown.table(COLUMNS, []) + "\n"
SHOWN = markdown.table(["objective", "J", "weight", "paper", "trainers"], []) + "\n"


def listed(text: str) -> str:
    """Return the page of all objectives with names, formulas and weights for its
    tables, those in most trainers first.

    Args:
        text: of docs/objectives.md, whose tables have COLUMNS.
    """
    out: list[str] = []
    rows: list[tuple[int, str]] = []  # of one table: minus the trainers, and the row
    for line in [*text.replace(HEAD, SHOWN).splitlines(), ""]:
        row = ROW.match(line)
        if row:
            name, paper, trainers = row.groups()
            rows.append((-int(trainers or 0), _entry(name, paper, trainers)))
            continue
        out += [entry for _, entry in sorted(rows, key=lambda row: row[0])]
        rows.clear()
        out.append(line)
    return "\n".join(out)


def _entry(name: str, paper: str, trainers: str) -> str:
    """Return the row of an objective: its title, formula, weight, paper and trainers."""
    o = get(name)
    title = ABOUT[name][0]
    formula = tex.equation(o.equation).replace("|", r"\vert ")
    math = rf"$\begin{{array}}{{l}} {formula} \end{{array}}$"
    key, _, mark = paper.partition(" ")
    thumb = _thumb(o, Path(), "objectives/")
    link = f"[{title}](objectives/{name}.md) `{name}`"
    row = [link, math, thumb.strip(), f"`{key}` {mark}".strip(), trainers]
    return f"| {' | '.join(row)} |"


SPAN = np.linspace(-1.6, 1.6, 65)  # of log r in a small picture
TALLEST = 2.5  # |weight| that fits into a small picture


@functools.cache
def _small(o: Objective) -> str:
    """Return a small SVG of the weight against log r, A = 1 above and A = -1 below; ""
    where no token has a weight by itself.
    """
    try:
        curve = make_curve(o)
    except InputError:
        return ""
    lines = []
    ratios = np.exp(SPAN) * 1.0001  # on none of the bounds
    for A, color in ((1, plots.DOWN), (-1, plots.UP)):
        weight = np.clip(curve(ratios, A, 0.1), -TALLEST, TALLEST)  # at mu = 0.1
        # r = 1 and weight 0 are in the middle of 120 x 56 points
        x, y = 60 + 35 * SPAN, 28 - 10 * weight
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        )
    axes = '<path d="M2 28H118M60 2V54" stroke="#999999" stroke-width=".6"/>'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="120" height="56" viewBox="0 0 120 56">'
        f"{axes}{''.join(lines)}</svg>\n"
    )


def _thumb(o: Objective, folder: Path, before: str = "") -> str:
    """Return the Markdown that shows the small picture; "" if there is none.

    Args:
        o: the objective.
        folder: where the picture is written, too; Path() if it is there already.
        before: the path to the picture from the page.
    """
    picture = _small(o)
    if not picture:
        return ""
    if folder.name:
        (folder / f"{o.name}-small.svg").write_text(picture, encoding="utf-8")
    return f"![The weight of {o.name} against the ratio]({before}{o.name}-small.svg){{.small-weight}} "


# ---- its parts -----------------------------------------------------------------------
def _paper(o: Objective) -> str:
    """Return the paper of an objective, and where in it the objective is."""
    if not o.paper:
        return "Unpublished."
    paper = papers().get(o.paper)
    title = paper.title if paper else o.paper
    if paper and paper.url:
        title = f"[{title}]({paper.url})"
    place = f"Eq. {o.eq}" if re.match(r"A?\d", o.eq) else o.eq
    return f"{title}, {place}."


def _facts(o: Objective) -> str:
    """Return a table of what the registry records of an objective."""
    facts = {
        "level": f"{o.level}: {LEVELS[o.level]}",
        "aggregation": f"`{o.agg}`",
        "advantage": f"`{o.adv}`",
        "KL": f"− β · `{o.kl}`, a term of its own" if o.kl else "",
        "note": o.note,
        "no derivation": o.not_symbolic,
        "no micro-batches": o.batch_coupled,
        "at r = 1": o.on_policy_exception,
    }
    rows = [(name, fact) for name, fact in facts.items() if fact]
    return _table(["what", "of this objective"], rows)


def _commands(o: Objective) -> str:
    """Return the commands that one can paste, and a link to recipes if a framework has
    it.
    """
    lines = [f"upref check my.py:loss --as {o.name}    # is your loss this one?"]
    if not o.not_symbolic:
        lines.append(f"upref derive {o.name}    # a proof of its gradient")
    if _small(o):
        lines.append(
            f"upref weights {o.name} my.py:loss -o weights.svg    # both, drawn"
        )
    text = "```bash\n" + "\n".join(lines) + "\n```"
    if any(o.name in covered_objectives(name, {}) for name in frameworks()):
        text += f"\n\n[What to set](../recipes.md#{o.name}) to train it in verl, TRL and others."
    return text


def _gradients(o: Objective) -> str:
    """Return the code of an objective, of its weight, and sympy's derivative."""
    code = "**{}**\n\n```python\n{}\n```\n\n"
    function = code.format("The function that trains", _source(o.fn).rstrip())
    weight = code.format(
        "Its weight dJ/dlp, written by hand from the paper",
        _source(o.closed_form).rstrip(),
    )
    return function + weight + _derived(o)


def _derived(o: Objective) -> str:
    """Return the derivative in each regime, or the proof by autograd where sympy has
    none.
    """
    derivation = derive(o)
    assert derivation.ok, f"{o.name}: {derivation}"
    if not derivation.rows:
        steps = "\n".join(derivation.steps[3:])
        return f"**By autograd**, on a small batch:\n\n```text\n{steps}\n```"
    rows = []
    for regime in derivation.rows:
        J, gradient = (
            f"${tex.expression(e)}$".replace("|", r"\vert ")
            for e in (regime.J, regime.gradient)
        )
        rows.append(
            (f"${SIGNS[regime.sign]}$", f"${tex.where(regime.where)}$", J, gradient)
        )
    head = "**sympy's derivative of the function**, regime by regime. Its difference from the weight simplifies to 0."
    if "c" in o.hyperparameters and o.hyperparameters["c"] is None:
        head += " The dual clip c is off by default: read c as ∞."
    return f"{head}\n\n" + _table(["advantage", "ratio", "J", "dJ/dlp"], rows)


RATIOS_IN_WORDS = (0.5, 0.9, 1.1, 2.0)  # at which the text has the weight


def _pictures(o: Objective, folder: Path) -> str:
    """Draw the Cap map and the weight into the folder; return them with their text."""
    try:
        curve = make_curve(o)
    except InputError as error:
        return f"None: {error}"
    panels = [plots.Panel(o.name, o, A, subtitle=SIGNS[A]) for A in (1, -1)]
    plots.cap_panels(panels, n=200).savefig(folder / f"{o.name}-cap.svg")
    plots.weights(o).savefig(folder / f"{o.name}-weight.svg")
    from upref.weights.capacity import capacity

    x = (np.arange(100) + 0.5) / 100
    mu, p = np.meshgrid(x, x)
    shares = []
    weights = []
    for A in (1, -1):
        share = np.mean(capacity(o, p, mu, A) > 0)
        shares.append(f"for {SIGNS[A]} {100 * share:.0f} %")
        weights.append(
            ", ".join(
                f"{float(curve(r, A, 0.1)):.3g} at r = {r:g}" for r in RATIOS_IN_WORDS
            )
        )
    return (
        f"![Cap map of {o.name} over π_old and π_θ, described below.]({o.name}-cap.svg)\n\n"
        f"Cap is above 0 in this part of the square: {', '.join(shares)}. In hatched regions there is no gradient.\n\n"
        f"![Gradient weight of {o.name} against the ratio, described below.]({o.name}-weight.svg)\n\n"
        f"The weight where A = 1: {weights[0]}; where A = −1: {weights[1]}."
    )


PANELS = [
    {"metric": "reward", "label": "reward in training"},
    {"metric": "avg", "label": "test problems, Avg@32"},
    {"metric": "best", "label": "test problems, Best@32"},
]


Arms = dict[str, list[dict]]  # objective -> its recorded runs


@functools.cache
def _recorded() -> dict[tuple, Arms]:
    """Return the runs of objectives at their defaults, by all settings but objective
    and seed.
    """
    recorded: dict[tuple, Arms] = {}
    folders = plan.ROUNDS.values()
    runs = [run for folder in folders for run in records.load(folder).values()]
    for run in runs:
        settings = run["settings"]
        if run["status"] != "done" or settings["hp"]:
            continue
        others = tuple(
            (name, str(value))
            for name, value in settings.items()
            if name not in ("objective", "seed")
        )
        arms = recorded.setdefault(others, {})
        arms.setdefault(settings["objective"], []).append(run)
    return recorded


def _runs(o: Objective, folder: Path) -> str:
    """Draw the runs of an objective into the folder, with DAPO's of the same setting.

    The setting is the one in which most seeds of the objective are recorded.

    Returns:
        The figure with its text; "" if there is no run.
    """
    settings_with_it = [arms for arms in _recorded().values() if o.name in arms]
    if not settings_with_it:
        return ""

    def rank(arms: Arms) -> tuple[int, bool, int]:
        """Return how many runs there are, whether DAPO has some, and their steps."""
        runs = arms[o.name]
        return len(runs), "dapo" in arms, runs[0]["settings"]["steps"]

    arms = max(settings_with_it, key=rank)
    drawn = {o.name: arms[o.name]}
    if "dapo" in arms:
        drawn["dapo"] = arms["dapo"]
    panels = []
    for panel in PANELS:
        curves_of = {
            name: [curves.curve(run, panel) for run in runs]
            for name, runs in drawn.items()
        }
        panels.append(curves_of)
    curves.draw(PANELS, panels, "", o.name).savefig(folder / f"{o.name}-runs.svg")
    seeds = []
    for name, runs in drawn.items():
        numbers = _ranges(run["settings"]["seed"] for run in runs)
        seeds.append(f"{name}: seeds {numbers}")
    return (
        f"![Reward, Avg@32 and Best@32 of {o.name} in recorded runs, described below.]({o.name}-runs.svg)\n\n"
        "Recorded runs of the [miniature](../repro/mini/README.md): "
        f"{_settings_text(arms[o.name][0]['settings'])} ({'; '.join(seeds)}). Bold: {o.name}'s mean over its seeds. "
        "Thin: one seed. The learning rate is the same for every objective and may suit some of them better than "
        "others, so the figure does not rank them."
    )


def _settings_text(s: dict) -> str:
    """Return the settings of a recorded run in words."""
    parts = [
        f"task `{s['task']}`",
        f"base `{s['base']}`",
        f"{s['steps']} steps",
        f"learning rate {s['lr']:g}",
        f"{s['minibatches']} mini-batches a step",
    ]
    if s["epochs"] > 1:
        parts.append(f"{s['epochs']} epochs")
    if s["beta"]:
        parts.append(f"KL coefficient {s['beta']:g}")
    parts += [f"{k} `{s[k]}`" for k in ("advantages", "aggregation") if s[k]]
    return ", ".join(parts)


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: 0 to 4, 1000 to 1012."""
    out: list[list[int]] = []
    for n in sorted({*numbers}):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(f"{a} to {b}" if b > a else str(a) for a, b in out)


def _hyperparameters(o: Objective) -> str:
    """Return the table of the hyperparameters, with default and source."""
    rows = [
        (f"`{k}`", f"`{v}`", o.defaults.get(k, ""))
        for k, v in o.hyperparameters.items()
    ]
    return _table(["name", "default", "where its value comes from"], rows)


def _frameworks(o: Objective) -> str:
    """Return a table of the entries of the ledgers about losses that are compared with
    an objective.
    """
    rows = []
    for e in read():
        status = f"[{e.status}]({e.link})" if e.link else e.status
        for evidence in e.evidence:
            if evidence.held_against.split(",")[0] == o.name:
                loss = f"{e.framework} {e.version} `{evidence.loss}`"
                rows.append((loss, e.reason, str(evidence), status))
    if not rows:
        return "No difference is on record. [What is compared with what](../frameworks.md)."
    head = ["framework, loss", "what differs", "weight expected -> found", "status"]
    return f"{_table(head, rows)}\n\nFrom [the ledgers](../frameworks.md), which the audits test."


# ---- relatives -----------------------------------------------------------------------
def _limits(o: Objective) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield settings at which an objective may become another: in words, and as
    hyperparameters.
    """
    own = {k: v for k, v in o.hyperparameters.items() if k != "beta"}
    yield "", {}
    for k in own:
        if k == "lam":
            yield "lam = 1", {k: 1.0}
        elif k.startswith("tau_"):
            continue
        elif k != "c":
            yield f"{k} → ∞", {k: INFINITE}
    if {"tau_pos", "tau_neg"} <= {*own}:
        yield "tau_pos, tau_neg → 0", {"tau_pos": 1e-6, "tau_neg": 1e-6}
    if {"eps_low", "eps_high"} <= {*own}:
        yield "eps_low, eps_high → ∞", {"eps_low": INFINITE, "eps_high": INFINITE}
        yield "eps_high = eps_low = 0.2", {"eps_low": 0.2, "eps_high": 0.2}
    if "eps_low" in own and own["eps_low"] != 0.2:
        yield "eps_low = 0.2", {"eps_low": 0.2}
    if "eps_low" in own and own["eps_low"] != 0.2 and "eps_high" in own:
        yield "eps_low = 0.2, eps_high = 0.28", {"eps_low": 0.2, "eps_high": 0.28}


class Sampled(NamedTuple):
    """The weight of an objective at one setting.

    Args:
        name: the objective.
        setting: in words; "" for the defaults.
        weights: sign of the advantage -> weights at MUS and RATIOS.
    """

    name: str
    setting: str
    weights: dict[int, np.ndarray]


@functools.cache
def _sampled() -> list[Sampled]:
    """Return the weights of all objectives that give a token a weight by itself, at
    their defaults and limits.
    """
    sampled = []
    for o in map(get, names()):
        for setting, hp in _limits(o):
            try:
                curve = make_curve(o, **hp)
                weights = {
                    A: np.array([curve(RATIOS, A, mu) for mu in MUS]) for A in (1, -1)
                }
            except InputError:
                break
            sampled.append(Sampled(o.name, setting, weights))
    return sampled


EVERYWHERE = "everywhere"
DEFAULTS = "at its defaults"


def _where_equal(one: Sampled, other: Sampled) -> str:
    """Return where two weights are equal; "" for nowhere, and for one sign in a limit."""
    signs = [
        A
        for A in (1, -1)
        if np.allclose(one.weights[A], other.weights[A], rtol=1e-5, atol=1e-9)
    ]
    if len(signs) == 2:
        return EVERYWHERE
    if signs and not one.setting and not other.setting:
        return f"{SIGNS[signs[0]]} only"
    return ""


def _relatives(o: Objective) -> str:
    """Return a table of the objectives whose weight is the same number at 162 points
    for each sign, computed now; equal everywhere first, then at the defaults, then by
    name.
    """
    own = [sampled for sampled in _sampled() if sampled.name == o.name]
    others = [sampled for sampled in _sampled() if sampled.name != o.name]
    rows = []
    for one, other in product(own, others):
        if one.setting and other.setting:  # a limit of both says little
            continue
        if where := _where_equal(one, other):
            relative = get(other.name)
            cells = (
                f"[{other.name}]({other.name}.md)",
                where,
                one.setting or DEFAULTS,
                other.setting or DEFAULTS,
                relative.level,
                f"`{relative.agg}`",
            )
            rows.append(cells)
    if not rows:
        return "No other has its weight, at the defaults or in a limit."
    rows.sort(key=lambda row: (row[1] != EVERYWHERE, row[2] != DEFAULTS, row[0]))
    head = [
        "the weight is that of",
        "where",
        f"{o.name}",
        "the other",
        "level",
        "aggregation",
    ]
    at = f"at {len(RATIOS)} ratios, for both signs and π_old = {' and '.join(map(str, MUS))}"
    text = f"Computed when this page was built, {at}; what still differs is level and aggregation."
    return f"{text}\n\n{_table(head, rows)}"


def _table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown; a `|` in a cell is escaped."""
    escaped = [
        [" ".join(str(x).split()).replace("|", r"\|") for x in row] for row in rows
    ]
    return markdown.table(head, escaped)
