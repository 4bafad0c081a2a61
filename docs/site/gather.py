# SPDX-License-Identifier: Apache-2.0
"""Collects the site's sources: the pages of the repository, with their links adapted to the
site.

A page is README.md, any docs/**/*.md, CHANGELOG.md, CONTRIBUTING.md, and every other .md
that one of them links to. Any other file that is linked to becomes a page that shows it.
Nothing of a page is run here, but the long tables of records are printed into it
(docs/make.py, ON_SITE).

The docname of a page is its path in the site without ".md", as in Sphinx. `texts` is
docname -> Markdown. The place of a file is its path in the site.
"""

import fnmatch
import hashlib
import os
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from importlib import metadata
from pathlib import Path

from docs import framework_pages as frameworks, make
from docs.site import api, derivations, objectives, prose
from upref_course.grader import course_pages

ROOT = Path(__file__).parents[2]
NAMED = {
    "README.md": "start",
    "derivations/README.md": "derivations",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "docs/site/explorer.md": "explorer",
}
COURSE = "course/README"  # the head of its section
LESSONS = {page.page for page in course_pages()}
PICTURES = (".svg", ".png", ".jpg")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".bib": "bibtex",
    ".json": "json",
    ".yaml": "yaml",
}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCED = re.compile(r"^(`{3,}|:{3,}|~{3,}).*?^\1[ \t]*$", re.M | re.S)
FIELD = "<!-- picture-field -->"  # where the site has it
FRAME = '<iframe class="picture" src="../picture/index.html" title="Your picture" sandbox="allow-scripts"></iframe>'
# what the site has in place of `<!-- explorer: STATE -->`
EXPLORER = '<iframe class="explorer" loading="lazy" src="../explorer/index.html#{}" title="The Cap explorer"></iframe>'
MATHJAX = "d4295dc33744836935c1399feece5159577b34c5c8ffb9f1c6324cd82e03a882"


@dataclass
class Section:
    """A tab of the site: its first page, and the pages of which no earlier section has
    the name.
    """

    # the docname of its first page, which is generated where no page of that name is
    # there
    head: str
    title: str
    text: str  # on its card, and on its first page if that is generated
    # patterns of docnames, in the order of the sidebar
    pages: list[str] = field(default_factory=list)
    # pages that the sidebar shows behind one generated page, the last of the section
    folded: "Section | None" = None


def docname(path: str) -> str:
    """Return the docname of a page, from its path in the repository."""
    return NAMED.get(path) or path.removesuffix(".md").removeprefix("docs/")


def read_sections() -> list[Section]:
    """Return the sections of sections.toml, in order, with the pages of the course in
    theirs.
    """
    text = Path(__file__).with_name("sections.toml").read_text(encoding="utf-8")
    found = []
    for table in tomllib.loads(text)["section"]:
        if behind := table.pop("folded", None):
            table["folded"] = Section(**behind)
        if table["head"] == COURSE:
            table["pages"] = [docname(page.page) for page in course_pages()]
        found.append(Section(**table))
    return found


SECTIONS = read_sections()


class Gathering:
    """The sources under `source`, as they come together."""

    def __init__(self, source: Path):
        self.source = source
        self.texts: dict[str, str] = {}  # docname -> markdown
        self.todo: list[str] = []

    def page(self, path: str) -> None:
        """Take over a page of the repository, with all that it links to; do nothing if
        it is here already.
        """
        name = docname(path)
        if name in self.texts:
            return
        self.texts[name] = ""  # pages may link to each other
        text = (ROOT / path).read_text(encoding="utf-8")
        text = re.sub(
            r"<!-- explorer: (\S+) -->",
            lambda marker: EXPLORER.format(escape(marker[1])),
            text.replace(FIELD, FRAME),
        )
        if path in LESSONS:  # docs/site/__main__.py writes the notebook
            text += f'\n<p><a href="{Path(path).stem}.ipynb" download>This lesson as a notebook</a></p>\n'
        text = make.for_site(text)
        self.texts[name] = self.turned(text, Path(path).parent, name)

    def turned(self, text: str, folder: Path, name: str) -> str:
        """Return a text whose links, those outside of fenced blocks, lead to where
        their goals are in the site.

        Args:
            text: Markdown.
            folder: of its file in the repository.
            name: its docname.
        """
        return outside_code(text, lambda part: self._links(part, folder, name))

    def _links(self, text: str, folder: Path, name: str) -> str:
        """Return a text without code, with its links turned; what they lead to is put
        there.

        Args:
            text: Markdown.
            folder: of its file in the repository.
            name: its docname.
        """

        def turn(link: re.Match) -> str:
            """Return the link as it is in the site; one to the web or within the page stays."""
            before, goal, behind = link.groups()
            target, _, heading = goal.partition("#")
            if not target or re.match(r"[a-z]+:", goal):
                return link[0]
            path = os.path.normpath(folder / target)
            if re.fullmatch(r"docs/frameworks/\w+\.json", path):
                # the page that says in words what the audit has
                name_of_page = path.removeprefix("docs/").removesuffix(".json")
                place = f"{name_of_page}.md"
            elif (ROOT / path).exists():
                place = self.put(path)
            else:
                return link[0]  # a page that is generated, or Sphinx will complain
            relative = os.path.relpath(place, Path(name).parent)
            anchor = f"#{heading}" if heading else ""
            return f"{before}{relative}{anchor}{behind}"

        return LINK.sub(turn, text)

    def put(self, path: str) -> str:
        """Put a file or folder of the repository into the site, if it is not there yet;
        return its place.

        A picture is copied; any other file or a folder becomes a page that shows it.
        """
        file = ROOT / path
        if path.endswith(".md"):
            self.page(path)
            return f"{docname(path)}.md"
        if file.suffix in PICTURES:
            (self.source / "files" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, self.source / "files" / path)
            return f"files/{path}"
        name = f"files/{path}"
        if name not in self.texts:
            self.texts[name] = ""  # it may link to itself
            shown = self.listing(path) if file.is_dir() else self.shown(path)
            self.texts[name] = f"---\norphan: true\n---\n\n# `{path}`\n\n{shown}\n"
        return f"{name}.md"

    def shown(self, path: str) -> str:
        """Return the text of a file as a block of code."""
        text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
        language = LANGUAGES.get(Path(path).suffix, "text")
        return f"``````{{code-block}} {language}\n:class: file\n\n{text}\n``````"

    def listing(self, path: str) -> str:
        """Return a list of links to the files of a folder that are text, and put each
        into the site.
        """
        suffixes = {*LANGUAGES, ".md", ".txt"}
        rows = []
        for file in sorted((ROOT / path).iterdir()):
            if file.is_file() and file.suffix in suffixes:
                place = self.put(str(file.relative_to(ROOT)))
                relative = os.path.relpath(place, Path("files", path).parent)
                rows.append(f"* [{file.name}]({relative})")
        return "\n".join(rows)

    def write(self) -> None:
        """Write the pages under `source`, typeset (prose.py) but for those that show
        files.
        """
        for name, text in self.texts.items():
            if not name.startswith("files/"):
                text = outside_code(text, prose.typeset)
            file = self.source / f"{name}.md"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return the text with a change of all but its blocks of code.

    A fence of colons, or of a directive that is no code, has text in it, and is changed
    too.
    """
    out, at = [], 0
    for fence in FENCED.finditer(text):
        out.append(change(text[at : fence.start()]))
        of_colons = fence[0].startswith(":")
        of_directive = re.match(r"`+\{(?!code|literal|eval-rst)", fence[0])
        if of_colons or of_directive:
            out.append(change(fence[0]))
        else:
            out.append(fence[0])
        at = fence.end()
    return "".join([*out, change(text[at:])])


def sections(texts: dict[str, str]) -> None:
    """Put every page into one section, in place: the first page of a section gets the
    list of the others, and `index` is made.

    Args:
        texts: of all pages; must have `start`.
    """
    heads_of_sections = {section.head for section in SECTIONS}
    left = [
        name
        for name in texts
        if not name.startswith("files/") and name not in heads_of_sections
    ]
    with_page = []
    for section in SECTIONS:
        below = take_pages(section, left)
        if section.folded:
            behind = take_pages(section.folded, left)
            if behind:
                head = section.folded.head
                below.append(head)
                texts[head] = generated_page(section.folded)
                texts[head] += toctree(behind, head, texts)
        generated = section.head not in texts
        if generated and not below:
            continue
        if generated:
            texts[section.head] = generated_page(section)
        if below:
            texts[section.head] += toctree(below, section.head, texts, not generated)
        with_page.append(section)
    texts["index"] = first_page(with_page, texts["start"])


def take_pages(section: Section, left: list[str]) -> list[str]:
    """Return the pages of a section, and remove them from those that are left, in
    place.
    """
    names = pages_of(section, left)
    left[:] = [name for name in left if name not in names]
    return names


def card(section: Section) -> str:
    """Return the card of a section on the first page of the site."""
    link = f":link: {section.head}\n:link-type: doc"
    return f"\n:::{{grid-item-card}} {section.title}\n{link}\n{section.text}\n:::\n"


def generated_page(section: Section) -> str:
    """Return the first page of a section that has no page of its own."""
    return f"# {section.title}\n\n{section.text}\n"


def toctree(
    names: list[str], head: str, texts: dict[str, str], hidden: bool = False
) -> str:
    """Return the list of the pages below a page, in Markdown.

    Args:
        names: their docnames, in order.
        head: the page that has the list.
        texts: of all pages.
        hidden: whether the sidebar alone shows it.
    """
    lines = "\n".join(entries(names, head, texts))
    option = ":hidden:\n" if hidden else ":maxdepth: 1\n"
    return f"\n```{{toctree}}\n{option}\n{lines}\n```\n"


def pages_of(section: Section, left: list[str]) -> list[str]:
    """Return the pages of a section, in the order of its patterns; those of one pattern
    are sorted.

    Args:
        section: the section.
        left: docnames of the pages that no earlier section has.
    """
    names: dict[str, None] = {}
    for pattern in section.pages:
        matches = fnmatch.filter(left, pattern)
        # the chapters of the derivations have an order of their own
        if section.head != "derivations":
            matches.sort()
        names |= dict.fromkeys(matches)
    return list(names)


def first_page(with_page: list[Section], start: str) -> str:
    """Return the first page of the site: index.md with a card for each section and an
    example, which is the first file of another page and what two commands print of it.

    Args:
        with_page: the sections that have a page, in the order of their tabs.
        start: the text of the page that has the example.
    """
    # "More" has no card: nine fill three rows, and its tab is on every page
    cards = [card(section) for section in with_page if section.title != "More"]
    tabs = [f"{section.title} <{section.head}>" for section in with_page]
    text = (Path(__file__).parent / "index.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n# my.py\n.*?```\n", start, re.S)
    proof, check = re.findall(r"```console\n.*?```\n", start, re.S)[:2]
    text = text.replace("CARDS\n", "".join(cards))
    text = text.replace("EXAMPLE\n", f"{code[0]}\n{proof}\n{check}")
    return text + "\n```{toctree}\n:hidden:\n\n" + "\n".join(tabs) + "\n```\n"


def entries(names: list[str], head: str, texts: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a list of pages; a framework has its name without the version,
    and of two pages of one title the one with the results says so.

    Args:
        names: docnames.
        head: the page that has the list.
        texts: of all pages; each has a heading.
    """
    titles = {name: re.search(r"^# (.*)", texts[name], re.M)[1] for name in names}
    pages_with = Counter(titles.values())
    for name, title in titles.items():
        page = os.path.relpath(name, Path(head).parent)
        path = Path(name)
        if path.parent.name == "frameworks":
            yield f"{path.name} <{page}>"
        elif pages_with[title] == 1:
            yield page
        elif path.name == "report":
            yield f"{title}: the results <{page}>"
        else:
            yield f"{title} <{page}>"


def settings(source: Path) -> None:
    """Copy conf.py, the style sheet, and MathJax from the wheel that
    repro/requirements/docs.txt pins.

    Raises:
        AssertionError: it is another MathJax.
    """
    here = Path(__file__).parent
    shutil.copy(here / "conf.py", source)
    shutil.copytree(here / "static", source / "_static")
    wheel = metadata.distribution("sphinx-mathjax-offline")
    file = Path(
        str(wheel.locate_file("sphinx-mathjax-offline/static/mathjax/tex-svg.js"))
    )
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert sha256.startswith(MATHJAX), f"{file} is another MathJax: {sha256}"
    (source / "_static/mathjax").mkdir()
    shutil.copy(file, source / "_static/mathjax")


WITHOUT_HEADINGS = "---\nhtml_theme.sidebar_secondary.remove: true\n---\n\n"


def gather(source: Path) -> None:
    """Write the sources of the whole site into a folder, which is made."""
    gathering = Gathering(source)
    gathering.page("README.md")
    pages = [str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md")]
    for page in sorted(pages):
        if not page.startswith("docs/site/"):
            gathering.page(page)
    for page in ("CHANGELOG.md", "CONTRIBUTING.md", "docs/site/explorer.md"):
        if (ROOT / page).exists():
            gathering.page(page)
    texts = gathering.texts
    texts |= frameworks.pages()
    # its table has the width of the list of its headings, of which there is one
    listed = objectives.listed(texts["objectives"])
    texts["objectives"] = WITHOUT_HEADINGS + listed
    texts |= objectives.pages(source)
    texts |= api.pages()
    texts |= derivations.pages(texts["derivations"])
    texts["start"] = re.sub(r"\A# upref\n", "# Start here\n", texts["start"])
    sections(texts)
    gathering.write()
    settings(source)
