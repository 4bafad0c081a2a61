# SPDX-License-Identifier: Apache-2.0
"""The rows of a LaTeX tabular: cells between &, a row up to \\\\ ; of \\textbf{53.1}
and its like the inside.
"""

import re
from collections.abc import Sequence

RULES = re.compile(
    r"\\(begin|end)\{\w+\*?\}(\[[^\]]*\])?(\{(?:[^{}]|\{[^{}]*\})*\})?|\\(top|mid|bottom|h)(rule|line)\b|\\c(mid|)(rule|line)(\([lr]*\))?\{[^}]*\}"
)
WITH_TWO = re.compile(
    r"\\(?:textcolor|cellcolor|rowcolor|color|multirow|href)(\[[^\]]*\])?\{[^{}]*\}(\{\*?\})?"
)
PLUS_MINUS = re.compile(r"\s*(\\pm\b.*|\\scriptsize.*)")
COMMAND = re.compile(r"\\[a-zA-Z]+\*?|[{}$~]")


def is_latex(lines: Sequence[str]) -> bool:
    return any("&" in line and r"\\" in line for line in lines)


def rows(lines: Sequence[str]) -> list[list[str]]:
    """Those with as many cells as the widest; titles over several columns are left out."""
    text = "\n".join(re.sub(r"(?<!\\)%.*", "", line) for line in lines)
    found = []
    for row in re.split(r"\\\\(?:\[[^\]]*\])?", text):
        cells = [
            cell(c)
            for c in re.split(r"(?<!\\)&", RULES.sub("", row).replace("\n", " "))
        ]
        if len(cells) > 1 and r"\multicolumn" not in row:
            found.append(cells)
    most = max(map(len, found), default=0)
    return [cells for cells in found if len(cells) == most]


def cell(text: str) -> str:
    """What is printed there, without what is after ±."""
    text = (
        PLUS_MINUS.sub("", WITH_TWO.sub("", text))
        .replace(r"\%", "")
        .replace(r"\&", "&")
        .replace(r"\_", "_")
    )
    return " ".join(COMMAND.sub(" ", text).split())
