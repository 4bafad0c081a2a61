# SPDX-License-Identifier: Apache-2.0
"""The derivations, a page each, from derivations/README.md: the paper's equation, the
claim, the steps.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EQUATIONS = tomllib.loads(
    (Path(__file__).parent / "equations.toml").read_text(encoding="utf-8")
)
READING = """
## Reading order

First how a policy learns at all, then what an older policy's samples cost, then the clip, then UP, then what the
paper does not say.

"""
LETTERS = """
## Letters

The same in every derivation: `lp` = log π_θ(o_t) and `lp_old` = log π_old(o_t), the logarithms of p = π_θ(o_t) and
mu = π_old(o_t); r = p/mu; s is the ratio of a response; A the advantage; `sg` stops the gradient. A letter of a single
derivation is explained where it stands.
"""


def pages(text: str) -> dict[str, str]:
    """docname -> markdown, with the first page, from the text of derivations/README.md."""
    head, *sections = re.split(r"^## ", text, flags=re.M)
    out, rows, more = {}, [], ""
    for section in sections:
        name = re.search(r"^\[(\w+)\.py\]", section, re.M)
        if not name:  # of all scripts together
            more += f"\n## {section.rstrip()}\n"
            continue
        title, _, body = section.partition("\n")
        first, _, rest = body.lstrip().partition("\n")
        source = first.replace("(", "(../") if "(../" not in first else first
        out[f"derivations/{name[1]}"] = (
            f"# {title}\n\n{_equations(name[1])}\n{rest.strip()}\n\nThe script: {source}\n"
        )
        rows.append(f"{len(rows) + 1}. [{title.rstrip('.')}](derivations/{name[1]}.md)")
    missing = {*EQUATIONS} - {page.partition("/")[2] for page in out}
    assert not missing, f"equations of no derivation: {missing}"
    return {
        "derivations": head.rstrip()
        + "\n"
        + READING
        + "\n".join(rows)
        + "\n"
        + LETTERS
        + more,
        **out,
    }


def _equations(name: str) -> str:
    """Displayed, with the paper's numbers."""
    shown = (
        f"$$\n{tex} \\qquad \\text{{({number})}}\n$$\n"
        for number, tex in EQUATIONS.get(name, {}).items()
    )
    text = "\n".join(shown)
    return f"The paper has:\n\n{text}" if text else ""
