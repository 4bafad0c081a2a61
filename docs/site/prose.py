# SPDX-License-Identifier: Apache-2.0
"""Running text as the site shows it: letters with their indices set low, and papers by
their authors and year in place of keys of papers.bib.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

# what is left as it is: code, mathematics, targets of links, tags, headings, directives
KEPT = (
    r"`+[^`\n]+`+|\$\$.*?\$\$|\$[^$\n]+\$|\]\([^)\s]*\)|<[^>\n]+>|^#.*?$|^[:`]{3,}.*?$"
)
INDEXED = (
    r"(?<!\w)(?P<letter>[πεδτβoμ])_(?P<index>θ|old|low|high|ref|pos|neg|it|[ti])\b"
)
FIELD = re.compile(r"^  (\w+) = \{(.*?)\},?\n(?=  \w+ = |\})", re.M | re.S)
PATTERN = re.compile(rf"(?P<kept>{KEPT})|{INDEXED}", re.M | re.S)


@dataclass(frozen=True)
class Paper:
    """What the site shows of an entry of papers.bib."""

    authors: str
    year: str
    title: str
    url: str

    @property
    def link(self) -> str:
        """Its authors and year, with a link where there is an address."""
        shown = f"{self.authors} {self.year}"
        return f"[{shown}]({self.url})" if self.url else shown


@cache
def papers() -> dict[str, Paper]:
    """Return key -> paper, of papers.bib."""
    text = resources.files("upref").joinpath("papers.bib").read_text(encoding="utf-8")
    by_key = {}
    for entry in text.split("\n@")[1:]:
        key = entry.partition("{")[2].partition(",")[0]
        fields = dict(FIELD.findall(entry))
        plain = {
            name: " ".join(re.sub(r"[{}]", "", value).split())
            for name, value in fields.items()
        }
        by_key[key] = Paper(
            _short(plain.get("author", key)),
            plain.get("year", ""),
            plain.get("title", key),
            plain.get("url", ""),
        )
    return by_key


def _short(authors: str) -> str:
    """Return the family names of one or two authors, or of the first with "et al."."""
    names = [name.partition(",")[0].strip() for name in authors.split(" and ")]
    if len(names) > 2:
        return f"{names[0]} et al."
    return " and ".join(names)


def typeset(text: str) -> str:
    """Return the text with indices set low, π_θ, and with papers in place of their keys
    in code, `KEY`; code, mathematics and headings stay.
    """

    def turn(m: re.Match[str]) -> str:
        """Return a letter with its index, a paper's link, or what is kept."""
        if m["kept"] is None:
            return f"{m['letter']}<sub>{m['index']}</sub>"
        paper = papers().get(m["kept"].strip("`"))
        return paper.link if paper else m["kept"]

    return PATTERN.sub(turn, text)
