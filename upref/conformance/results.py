# SPDX-License-Identifier: Apache-2.0
"""Files of the suite: the list of known failures, the results, and the badge."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upref.conformance.cases import CASES
from upref.conformance.runner import Outcome, Status
from upref.errors import InputError
from upref.files import write_atomically
from upref.version import __version__

TABLE = "expected_failures"


def read_expected_failures(path: Path) -> dict[str, str]:
    """Read the list of known failures: a TOML file with a table `expected_failures`,
    case id = reason.

    Args:
        path: the file.

    Returns:
        The reason of each case id.

    Raises:
        InputError: the file is missing or no TOML, an id is unknown, or a reason is
            empty.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"there is no file {path}: --upref-xfails takes the list of known failures."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no TOML file: {error}.") from error
    reasons = document.get(TABLE)
    if not isinstance(reasons, dict) or set(document) != {TABLE}:
        raise InputError(
            f'{path} must hold one table [{TABLE}] with lines such as "family/gpt2" = "the reason".'
        )
    for case, reason in reasons.items():
        if case not in CASES:
            raise InputError(f"{path} lists {case!r}, and there is no such case.")
        if not isinstance(reason, str) or not reason.strip():
            raise InputError(f"{path} gives no reason for {case!r}.")
    return reasons


def write_results(
    path: Path, adapter: str, suite: str, level: int, outcomes: Sequence[Outcome]
) -> None:
    """Write what each case gave, as JSON.

    Args:
        path: the file; it is written whole or not at all.
        adapter: the adapter's name.
        suite: the dated suite.
        level: the highest level that was run.
        outcomes: one for each case.
    """
    results = {
        "suite": suite,
        "level": level,
        "adapter": adapter,
        "upref": __version__,
        "cases": {outcome.case.id: _as_record(outcome) for outcome in outcomes},
    }
    write_atomically(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def _as_record(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as the results file holds it: status, reason, settings, and,
    where a step was compared, `error` and `not_reached` of its report.
    """
    record: dict[str, Any] = {
        "status": str(outcome.status),
        "reason": outcome.reason,
        "settings": outcome.settings,
    }
    if outcome.report is not None:
        record["error"] = outcome.report.error
        record["not_reached"] = outcome.report.not_reached
    return record


@dataclass(frozen=True)
class Badge:
    """What a badge says: the suite, the level, and how many of the cases that the
    framework has pass.
    """

    suite: str
    level: int
    passed: int
    tried: int

    def __str__(self) -> str:
        return f"upref {self.suite}, level {self.level}, {self.passed} of {self.tried}"


def read_badge(path: Path) -> Badge:
    """Read a results file. Skipped cases do not count.

    Args:
        path: a file that `--upref-results` wrote.

    Returns:
        The counts.

    Raises:
        InputError: the file is missing, or it is no results file.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        statuses = [record["status"] for record in results["cases"].values()]
        suite = str(results["suite"])
        level = int(results["level"])
    except FileNotFoundError:
        raise InputError(
            f"there is no file {path}: write one with `pytest ... --upref-results {path}`."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is no results file of upref.conformance.") from None
    if unknown := set(statuses) - set(map(str, Status)):
        raise InputError(
            f"{path} has a case with the status {sorted(unknown)[0]!r}, which upref does not write."
        )
    statuses_tried = [status for status in statuses if status != Status.SKIPPED]
    return Badge(suite, level, statuses_tried.count(Status.PASSED), len(statuses_tried))


LETTER = 6.6  # pixels of a letter, at 11 px
PADDING = 6  # pixels beside a text


def draw_badge(badge: Badge) -> str:
    """Return the badge as SVG: the suite on gray, the level and the counts on green, or
    on orange where some fail.
    """
    left_text = f"upref {badge.suite}"
    right_text = f"level {badge.level}, {badge.passed} of {badge.tried}"
    widths: Mapping[str, float] = {
        text: LETTER * len(text) + 2 * PADDING for text in (left_text, right_text)
    }
    color = "#2a7f3f" if badge.passed == badge.tried else "#b35900"
    total = widths[left_text] + widths[right_text]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="20" role="img" aria-label="{badge}">'
        f"<title>{badge}</title>"
        f'<rect width="{total:.0f}" height="20" rx="3" fill="#555"/>'
        f'<rect x="{widths[left_text]:.0f}" width="{widths[right_text]:.0f}" height="20" rx="3" fill="{color}"/>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{widths[left_text] / 2:.0f}" y="14">{left_text}</text>'
        f'<text x="{widths[left_text] + widths[right_text] / 2:.0f}" y="14">{right_text}</text></g></svg>\n'
    )
