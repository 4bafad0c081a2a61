# SPDX-License-Identifier: Apache-2.0
"""Every link of the built site leads somewhere in it, anchors included; nothing is
fetched from elsewhere.

python -m docs.site.links [FOLDER]      one line for each that does not; exit status 1 if there is one
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

FETCHED = {
    "img": "src",
    "script": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
    "use": "href",
}


NOT_FETCHED = {"canonical", "search", "next", "prev"}  # by `rel` of a link


class Page(HTMLParser):
    """The ids, links and fetched files of a page.

    Attributes:
        ids: what an anchor can name.
        links: goals of <a>.
        fetched: files that a browser loads for the page.
    """

    def __init__(self, file: Path):
        """Read the page in a file."""
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        """Note the ids, the link and the fetched file of a tag."""
        values = {name: value for name, value in attrs if value is not None}
        for name in ("id", "name"):
            if name in values:
                self.ids.add(values[name])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        file = values.get(FETCHED.get(tag, ""))
        if file and values.get("rel") not in NOT_FETCHED:
            self.fetched.append(file)


def dead(html: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and for each thing that a page
    would fetch from a network; each with up to three pages that have it.

    Args:
        html: the folder of the built site.
    """
    pages = {}
    for file in sorted(html.rglob("*.html")):
        if "_static" not in file.parts:
            pages[file.resolve()] = Page(file.resolve())
    pages_with: dict[str, list[str]] = {}  # what is wrong -> the pages that have it
    for file, page in pages.items():
        for link in dict.fromkeys([*page.links, *page.fetched]):
            why = _wrong(link, file, pages)
            if why:
                place = str(file.relative_to(html.resolve()))
                pages_with.setdefault(f"{link} {why}", []).append(place)
    lines = []
    for what, where in pages_with.items():
        more = " ..." if len(where) > 3 else ""
        lines.append(f"{what}: {', '.join(where[:3])}{more}")
    return lines


def _wrong(link: str, file: Path, pages: dict[Path, Page]) -> str:
    """Return what is wrong with a link or a fetched file of a page; "" if nothing is,
    as of a link to another site.

    Args:
        link: its address.
        file: of the page that has it.
        pages: all pages, by file.
    """
    parts = urlsplit(link)
    if parts.scheme == "data":
        return ""
    if parts.scheme and link not in pages[file].fetched:
        return ""
    if parts.scheme or parts.netloc:
        return "is fetched from a network"
    return _dead_end(file, parts, pages)


def _dead_end(file: Path, parts: SplitResult, pages: dict[Path, Page]) -> str:
    """Return why a link within the site leads nowhere; "" if it does lead to something.

    Args:
        file: of the page that has it.
        parts: of its address, by urlsplit.
        pages: all pages, by file.
    """
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "leads nowhere"
    anchor = unquote(parts.fragment)
    if not anchor or target not in pages:
        return ""
    if target.parent.name == "explorer":  # the anchor is what the explorer shows
        return ""
    if anchor.startswith(":~:"):  # it names a text
        return ""
    return "" if anchor in pages[target].ids else "has no such heading"


if __name__ == "__main__":
    lines = dead(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site/html"))
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))
