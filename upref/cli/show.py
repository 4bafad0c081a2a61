# SPDX-License-Identifier: Apache-2.0
"""What `upref list` and `upref show` say of an objective."""

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from importlib import resources
from typing import TYPE_CHECKING, Any

from upref import catalog, markdown
from upref.description import ERRORS, LEVELS, Description, capacity_text, describe
from upref.errors import InputError

if TYPE_CHECKING:
    from upref.registry import Objective

NO_SOURCE = "(its defaults= names no source of this value)"
PI_OLD = (0.001, 0.01, 0.1, 0.5, 0.9)


def markdown_table() -> str:
    """Return the two tables of objectives of docs/objectives.md in Markdown: those that
    trainers have, and those in papers only. A test compares the page with them.
    """
    tier = catalog.first_tier()
    paper_only = [n for n in catalog.facts() if n not in tier]
    heading = "**Paper only**: no audit of a trainer has a loss of these."
    return f"{_markdown_rows(tier)}\n\n{heading}\n\n{_markdown_rows(paper_only)}"


def _markdown_rows(shown: list[str]) -> str:
    """Return the Markdown table of these objectives, a row for each."""
    rows = []
    for o in map(find_description, shown):
        J = " ".join(o.equation.splitlines()).replace("|", "\\|")
        paper = o.paper + (" †" if o.known_from else "")
        trainers = len(catalog.trainers().get(o.name, [])) or ""
        rows.append([f"`{o.name}`", f"`{J}`", o.level, o.agg, paper, trainers])
    columns = ["name", "J", "level", "aggregation", "paper", "trainers"]
    return markdown.table(columns, rows)


def find_description(name: str) -> Description:
    """Describe an objective in words; torch is imported only where its file has to be run
    for that.

    Args:
        name: such as `dapo` or `up(dapo)`.

    Returns:
        Its description.

    Raises:
        InputError: no objective has this name.
    """
    known = describe(name)
    if known is not None:
        return known
    from upref.registry import get

    return make_description(get(name))


def make_description(o: "Objective") -> Description:
    """Make the description of an objective that is loaded.

    Args:
        o: the objective.

    Returns:
        The same as `find_description` has by its name.
    """
    texts = {"function": _source(o.fn), "weight": _source(o.closed_form)}
    names = [f.name for f in fields(Description) if f.name not in texts]
    known: dict[str, Any] = {name: getattr(o, name) for name in names}
    return Description(**(known | texts))


def facts(o: Description) -> dict[str, Any]:
    """Collect what is known of an objective, as data.

    Args:
        o: the objective.

    Returns:
        The keys of `upref show --json`.
    """
    keys_shown = (
        "name",
        "paper",
        "eq",
        "level",
        "agg",
        "adv",
        "kl",
        "note",
        "known_from",
        "not_symbolic",
        "batch_coupled",
    )
    facts = {
        f.name: getattr(o, f.name)
        for f in fields(o)
        if f.name in (*keys_shown, "on_policy_exception", "scale_exception")
    }
    more = {
        "trainers": catalog.trainers().get(o.name, []),
        "paper_only": o.name not in catalog.first_tier(),
    }
    return (
        facts
        | {
            "equation": o.equation,
            "hyperparameters": o.hyperparameters,
            "defaults": o.defaults,
        }
        | more
    )


def every() -> list[dict[str, Any]]:
    """Return the facts of all objectives, as `facts` has them."""
    return [facts(find_description(name)) for name in catalog.facts()]


def page(o: Description) -> str:
    """Write everything that is known of an objective.

    Args:
        o: the objective.

    Returns:
        The text of `upref show`.
    """
    parts = [f"{o.name}   {o.source}"]

    def add(head: str, text: str) -> None:
        """Add a part: a heading, and its text indented below."""
        parts.append(f"{head}\n" + textwrap.indent(text.strip(), "    "))

    add("objective, to be maximized", o.equation)
    add("facts", "\n".join(f"{k:12} {v}" for k, v in _facts_of_page(o)))
    if o.hyperparameters:
        lines = (
            f"{k} = {v}\n    {o.defaults.get(k, NO_SOURCE)}"
            for k, v in o.hyperparameters.items()
        )
        add("defaults", "\n".join(lines))
    add("weight dJ/dlp, by hand", o.weight)
    capacity = capacity_text(o.name) or capacity_lines(o.name)
    heading = "Probability Capacity at π_θ = π_old"
    is_table = "\n" in capacity  # one line says why there is no table
    if is_table and o.level != "token":
        heading += ", of a response of one token"
    add(heading, capacity)
    add("source", o.function)
    if o.paper:
        add("reference", bib_entry(o.paper))
    add("units and errors", ERRORS)
    return "\n\n".join(parts)


def _facts_of_page(o: Description) -> Iterator[tuple[str, Any]]:
    """Yield (word, value) for each fact of the page; a fact that is empty is left out."""
    yield "level", f"{o.level}: {LEVELS[o.level]}"
    yield "aggregation", o.agg
    yield "advantage", o.adv
    if o.kl:
        yield "KL", f"- beta * {o.kl}, a term of its own"
    words_of_keys = {
        "not_symbolic": "no derivation",
        "batch_coupled": "no micro-batches",
        "on_policy_exception": "weight at r = 1",
        "scale_exception": "not linear in A",
    }
    for key in ("note", "known_from", *words_of_keys):
        if value := getattr(o, key):
            yield words_of_keys.get(key, key.replace("_", " ")), value


def _source(fn: Any) -> str:
    """Return the source of a function without its decorator and without indentation; of
    what is no `def`, such as a lambda, the whole source.
    """
    lines = inspect.getsource(fn).splitlines()
    depth = 0  # parentheses of the decorator that are open
    for i, line in enumerate(lines):  # the decorator's facts are shown above
        depth += line.count("(") - line.count(")")
        if line.lstrip().startswith("def "):
            return textwrap.dedent("\n".join(lines[i:]))
        if not line.lstrip().startswith("@") and depth == 0 and i == 0:
            break
    return textwrap.dedent("\n".join(lines))


def bib_entry(key: str) -> str:
    """Return the BibTeX entry of that key in papers.bib.

    Args:
        key: such as fan2026up.

    Returns:
        The entry, or a line that says that there is none.
    """
    text = resources.files("upref").joinpath("papers.bib").read_text(encoding="utf-8")
    for entry in text.split("\n@"):
        if entry.partition("{")[2].partition(",")[0] == key:
            return "@" + entry.strip().removeprefix("@")
    return f"{key}: no entry in papers.bib"


def capacity_lines(name: str) -> str:
    """Compute the table of Probability Capacity, for responses of one token.

    Args:
        name: of an objective.

    Returns:
        Lines; or why the objective has no capacity.
    """
    from upref.weights.capacity import capacity

    try:
        caps = {adv: capacity(name, PI_OLD, PI_OLD, adv) for adv in (1, -1)}
    except InputError as error:
        return str(error)
    lines = ["π_old " + "".join(f"{p:>9g}" for p in PI_OLD)]
    for adv, cap in caps.items():
        sign = ">" if adv > 0 else "<"
        lines.append(f"A {sign} 0 " + "".join(f"{value:9.4g}" for value in cap))
    return "\n".join(lines)
