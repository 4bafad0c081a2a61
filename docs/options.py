# SPDX-License-Identifier: Apache-2.0
"""What docs/options.md has generated: for each option of a trainer, the case of the
conformance suite that notices another value.

The lists are docs/steps/options/NAME.toml, sorted by hand, and the results beside them
are what `python -m tests.conformance.options NAME` measured.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tests.conformance.options import MEASURED, Option, options, reasons, results
from upref import markdown


def _code(text: str) -> str:
    """Return it as code in Markdown."""
    return f"`{text}`"


def _noticed(option: Option) -> bool:
    """Return whether a build is red with each value: a case fails or cannot run. A
    reason stands where this is not so, or where the option cannot be measured here.
    """
    return not option.why


def tally() -> str:
    """Return a table with a row for each framework: how many options there are, and how
    many of them a case notices.
    """
    columns = ["trainer", "options", "change the gradient"]
    columns += ["a case notices each value", "no case notices"]
    rows = []
    for name in MEASURED:
        changing = options(name)
        keeping = sum(map(len, reasons(name).values()))
        noticed = sum(_noticed(option) for option in changing)
        cells = (
            results(name)["adapter"],
            len(changing) + keeping,
            len(changing),
            noticed,
            len(changing) - noticed,
        )
        rows.append(cells)
    return markdown.table(columns, rows)


def table(name: str) -> str:
    """Return the options of a framework: what notices each, what no case notices and
    why, and those that do not change the gradient.
    """
    measured = results(name)["options"]
    rows = []
    unnoticed: list[Option] = []
    for option in options(name):
        if _noticed(option):
            rows += [_row(option, result) for result in measured[option.key]]
        else:
            unnoticed.append(option)
    keeping: dict[str, str] = {}  # option -> why it does not change the gradient
    for section, reason_of in reasons(name).items():
        for option_name, reason in reason_of.items():
            keeping[f"{_short(section)}{option_name}"] = reason
    columns = ["option", "other value", "case that notices", "error of the gradient"]
    lines = [
        markdown.table(columns, rows),
        "",
        f"No case notices {len(unnoticed)} options:",
        "",
        *_by_reason({_name(option): option.why for option in unnoticed}),
        "",
        "These do not change the gradient:",
        "",
        *_by_reason(keeping),
    ]
    return "\n".join(lines)


def _row(option: Option, result: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return the row of another value of an option: which case notices it."""
    values = {option.name: result["to"]} | dict(option.beside)
    value = ", ".join(f"{name} = {value!r}" for name, value in values.items())
    value = value.removeprefix(f"{option.name} = ").replace("|", "\\|")
    error = f"{result['error']:.1e}" if "error" in result else ""
    case = _code(result["case"] or "")
    if "said" in result:
        message = result["said"].replace("|", "&#124;")[:110]  # what fits into a cell
        case += f" cannot run: {message}"
    return _code(_name(option)), _code(value), case, error


def _name(option: Option) -> str:
    """Return the name of an option as the page has it."""
    return f"{_short(option.section)}{option.name}"


def _short(section: str) -> str:
    """Return how a section's options begin on the page: without the name of a class
    that every option of the framework has.
    """
    shown = section.removeprefix("SkyRLTrainConfig").removeprefix(".")
    if shown in ("", "GRPOConfig", "train_ppo_ray"):  # of SkyRL, TRL and OpenRLHF
        return ""
    return f"{shown}."


def _by_reason(reason_of: Mapping[str, str]) -> list[str]:
    """Return a line for each reason, with the options that have it."""
    options_of: dict[str, list[str]] = defaultdict(list)
    for option, reason in reason_of.items():
        options_of[reason].append(option)
    return [
        f"* {markdown.codes(group)}: {reason}." for reason, group in options_of.items()
    ]
