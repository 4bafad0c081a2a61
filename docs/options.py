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


def _code(text: str) -> str:
    return f"`{text}`"


def _noticed(option: Option) -> bool:
    """Return whether a build is red with each value: a case fails or cannot run. A
    reason stands where this is not so, or where the option cannot be measured here.
    """
    return not option.why


def tally() -> str:
    """One row for each framework: how many options there are, and how many of them are
    noticed.
    """
    rows = [
        "| trainer | options | change the gradient | a case notices each value | no case notices |",
        "|---|---|---|---|---|",
    ]
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
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def table(name: str) -> str:
    """The options of a framework: what notices each, what no case notices and why, and
    those that do not change the gradient.
    """
    measured = results(name)["options"]
    seen = [option for option in options(name) if _noticed(option)]
    unseen = [option for option in options(name) if not _noticed(option)]
    rows = [
        "| option | other value | case that notices | error of the gradient |",
        "|---|---|---|---|",
    ]
    for option in seen:
        rows += [_row(option, one) for one in measured[option.key]]
    return "\n".join(
        [
            *rows,
            "",
            f"No case notices {len(unseen)} options:",
            "",
            *_by_reason({_name(option): option.why for option in unseen}),
            "",
            "These do not change the gradient:",
            "",
            *_by_reason(
                {
                    f"{_short(section)}{option}": reason
                    for section, those in reasons(name).items()
                    for option, reason in those.items()
                }
            ),
        ]
    )


def _row(option: Option, one: Mapping[str, Any]) -> str:
    value = ", ".join(
        f"{key} = {given!r}"
        for key, given in ({option.name: one["to"]} | dict(option.beside)).items()
    )
    value = value.removeprefix(f"{option.name} = ").replace("|", "\\|")
    error = f"{one['error']:.1e}" if "error" in one else ""
    found = _code(one["case"] or "")
    if "said" in one:
        found += f" cannot run: {one['said'].replace('|', '&#124;')[:110]}"
    return f"| {_code(_name(option))} | {_code(value)} | {found} | {error} |"


def _name(option: Option) -> str:
    return f"{_short(option.section)}{option.name}"


def _short(section: str) -> str:
    """Return how a section's options begin on the page: without the name of a class
    that every option of the framework has.
    """
    shown = section.removeprefix("SkyRLTrainConfig").removeprefix(".")
    return "" if shown in ("", "GRPOConfig", "train_ppo_ray") else f"{shown}."


def _by_reason(given: Mapping[str, str]) -> list[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for option, reason in given.items():
        groups[reason].append(_code(option))
    return [f"* {', '.join(those)}: {reason}." for reason, those in groups.items()]
