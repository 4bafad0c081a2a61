# SPDX-License-Identifier: Apache-2.0
"""What an experiment hands back, and how it becomes markdown, JSON and one SVG."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures.make import save
from paper.claims import words
from upref.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOLDS, FAILS, PART = "holds", "does not hold", "holds in part"


@dataclass(frozen=True)
class Finding:
    """A claim, where it is made ("" : nobody's, our own), what was found, and the
    numbers that say so.
    """

    claim: str
    source: str
    verdict: str
    because: str


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[Any]]

    def markdown(self) -> str:
        line = lambda cells: (
            "| " + " | ".join(shown(c).replace("|", "\\|") for c in cells) + " |"
        )
        rule = "|---" * len(self.columns) + "|"
        return "\n".join(
            [f"*{self.title}*", "", line(self.columns), rule, *map(line, self.rows)]
        )


@dataclass(frozen=True)
class Result:
    name: str
    title: str
    setting: str  # the task, the policy and what "exact" means there
    tables: list[Table]
    figure: "Figure"
    findings: list[Finding] = field(default_factory=list)


def shown(x) -> str:
    """Three significant digits; a dash for what did not happen."""
    if x is None:
        return "–"
    if isinstance(x, float):
        return f"{x:.3g}" if 1e-3 <= abs(x) < 1e4 or x == 0 else f"{x:.2e}"
    return str(x)


def write(results: list[Result], folder: Path) -> None:
    """report.md, results.json, and NAME.svg of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for r in results:
        save(r.figure, folder / f"{r.name}.svg")
    write_atomically(folder / "report.md", markdown(results))
    facts = {
        r.name: {k: v for k, v in asdict_without_figure(r).items()} for r in results
    }
    write_atomically(
        folder / "results.json", json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    )


def asdict_without_figure(r: Result) -> dict[str, Any]:
    tables = [asdict(t) for t in r.tables]
    return {
        "title": r.title,
        "setting": r.setting,
        "tables": tables,
        "findings": [asdict(f) for f in r.findings],
    }


def markdown(results: list[Result]) -> str:
    line = lambda f, r: (
        f"| {f.claim} | {f.source or 'ours'} | **{words.of_rule(f.verdict)}** | {f.because} | [{r.name}](#{r.name}) |"
    )
    head = [
        "# Exact results",
        "",
        "Written by `python -m repro.exact`. Nothing here is sampled: there are no seeds and no error bars.",
        "",
        "| claim | whose | in these tasks | because | where |",
        "|---|---|---|---|---|",
        *[line(f, r) for r in results for f in r.findings],
    ]
    if not any(r.findings for r in results):
        head = head[:3]
    parts = []
    for r in results:
        parts += [
            "",
            f"## {r.name}",
            "",
            f"**{r.title}** {r.setting}",
            "",
            f"![{r.title}]({r.name}.svg)",
        ]
        for t in r.tables:
            parts += ["", t.markdown()]
    return "\n".join(head + parts) + "\n"
