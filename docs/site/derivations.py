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
    """Return docname -> Markdown of each derivation, and of the first page,
    `derivations`.

    Args:
        text: of derivations/README.md.

    Raises:
        AssertionError: equations.toml has equations of no derivation.
    """
    head, *sections = re.split(r"^## ", text, flags=re.M)
    chapters = {}
    reading_order = ""
    about_all = ""  # sections on all scripts together
    for section in sections:
        script = re.search(r"^\[(\w+)\.py\]", section, re.M)
        if not script:
            about_all += f"\n## {section.rstrip()}\n"
            continue
        name = script[1]
        title, _, body = section.partition("\n")
        chapters[f"derivations/{name}"] = _chapter(name, title, body)
        link = f"[{title.rstrip('.')}](derivations/{name}.md)"
        reading_order += f"{len(chapters)}. {link}\n"
    missing = {*EQUATIONS} - {page.partition("/")[2] for page in chapters}
    assert not missing, f"equations of no derivation: {missing}"
    first_page = f"{head.rstrip()}\n{READING}{reading_order}{LETTERS}{about_all}"
    return {"derivations": first_page, **chapters}


def _chapter(name: str, title: str, body: str) -> str:
    """Return the page of a derivation.

    Args:
        name: of its script.
        title: the heading of its section.
        body: the rest of the section; its first line links to the script.
    """
    link, _, text = body.lstrip().partition("\n")
    if "(../" not in link:
        link = link.replace("(", "(../")
    heading = title.rstrip(".")
    return f"# {heading}\n\n{_equations(name)}\n{text.strip()}\n\nThe script: {link}\n"


def _equations(name: str) -> str:
    """Return the paper's equations of a derivation, displayed with their numbers; "" if
    it has none.
    """
    shown = (
        f"$$\n{tex} \\qquad \\text{{({number})}}\n$$\n"
        for number, tex in EQUATIONS.get(name, {}).items()
    )
    text = "\n".join(shown)
    return f"The paper has:\n\n{text}" if text else ""
