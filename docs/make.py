# SPDX-License-Identifier: Apache-2.0
"""Writes what is generated in README.md, docs/, docs/course/ and docs/howto/:
`python -m docs.make [PAGE...]`. `python -m docs.make --print NAME` prints a part.

A test holds that it is fresh. A part of ON_SITE is a long table of records: the site has
it, and the page here says how to print it.

What is written anew; all else in a page is left alone:

    ```text after ```python         what the Python prints; the blocks of a page are one program
    what follows `$ ` in ```console what the command prints
    <!-- NAME --> ... <!-- end -->  what the function of that name returns; NAME is
                                    MODULE.FUNCTION, or MODULE.FUNCTION:ARGUMENT

A ```python block that begins with `# FILE.py` is that file. It stands in the folder where the page's commands run; a
file under upref/ or upref_frameworks/ stands in a copy of that package there.
"""

import contextlib
import importlib
import io
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from docs import record
from repro import fork
from upref import markdown
from upref.files import write_atomically

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT / "docs", ROOT / "docs/course", ROOT / "docs/howto")
PAGES = [
    Path("README.md"),
    *sorted(p.relative_to(ROOT) for folder in FOLDERS for p in folder.glob("*.md")),
]
PACKAGES = ("upref", "upref_frameworks")  # to which the pages add files
WORDS_A_MINUTE = 230
BLOCK = re.compile(r"```(python|console)\n(.*?)```\n(?:(\s*)```text\n.*?```\n)?", re.S)
FILE = re.compile(r"# (\S+\.py)\n")
MARKED = re.compile(r"<!-- ([\w.:]+) -->\n.*?<!-- end -->\n", re.S)
SHELL = f'python() {{ {shlex.join(fork.executable())} "$@"; }}; upref() {{ python -m upref "$@"; }}; '


# ---- pages ---------------------------------------------------------------------------
def written(text: str) -> str:
    """Return the page with all that is generated written anew.

    Raises:
        AssertionError: a command prints a traceback, or a file is there twice.
    """
    text = MARKED.sub(_marked, text)
    with tempfile.TemporaryDirectory() as folder:
        program: dict = {"__name__": "page"}
        return BLOCK.sub(lambda m: _block(m, program, Path(folder)), text)


def _marked(m: re.Match) -> str:
    """Return a generated part, written anew; of ON_SITE, where to find it."""
    name = m[1]
    text = _elsewhere(name) if name in ON_SITE else part(name).rstrip()
    return f"<!-- {name} -->\n{text}\n<!-- end -->\n"


def _elsewhere(name: str) -> str:
    """Return sentences on where a part of ON_SITE is, and how to print it."""
    source = ON_SITE[name]
    made_of = f", made of [these records]({source})" if source else ""
    command = f"`python -m docs.make --print {name}`"
    where = f"The table is on [the site](architecture.md#records){made_of}."
    return f"{where} In a checkout {command} prints it."


def for_site(text: str) -> str:
    """Return the page as the site has it: with the parts of ON_SITE."""

    def filled(m: re.Match) -> str:
        """Return a part of ON_SITE itself; another one as the page has it."""
        return f"{part(m[1])}\n" if m[1] in ON_SITE else m[0]

    return MARKED.sub(filled, text)


def _block(m: re.Match, program: dict, folder: Path) -> str:
    """Return a block of code with what it prints, written anew. A block of Python
    without printed text behind it gets none.

    Args:
        m: the match of BLOCK.
        program: the names that the blocks before it have defined; it adds its own.
        folder: where it runs.
    """
    kind, code, gap = m.groups()
    if kind == "console":
        commands = re.findall(r"^\$ (.*)\n", code, re.M)
        outputs = [f"$ {command}\n{run(command, folder)}" for command in commands]
        return f"```console\n{''.join(outputs)}```\n"
    if file := FILE.match(code):
        put(file[1], code, folder)
        return m[0]
    out = io.StringIO()
    # a block may write a file
    with contextlib.redirect_stdout(out), contextlib.chdir(folder):
        exec(compile(code, "page", "exec"), program)
    block = f"```python\n{code}```\n"
    if gap is None:
        return block
    return f"{block}{gap}```text\n{out.getvalue()}```\n"


def put(name: str, code: str, folder: Path) -> None:
    """Write that file into the folder, for the page's next commands. A file of a
    package of PACKAGES is beside a copy of this package there.

    Raises:
        AssertionError: it is there already.
    """
    package = name.partition("/")[0]
    if package in PACKAGES and not (folder / package).exists():
        shutil.copytree(
            ROOT / package,
            folder / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    assert not (folder / name).exists(), f"{name} is there already"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(code, encoding="utf-8")


def run(command: str, folder: Path) -> str:
    """Return what a command prints in that folder, on stdout and stderr, without spaces
    at the ends of lines; files of the checkout are named from its top.

    Raises:
        AssertionError: it prints a traceback.
    """
    path = [str(ROOT)]
    if any((folder / package).exists() for package in PACKAGES):
        path.insert(0, str(folder))
    own = {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["bash", "-c", SHELL + command],
        cwd=folder,
        env=os.environ | fork.environment() | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stdout, done.stdout
    output = done.stdout.replace(f"{ROOT}/", "")
    return "".join(line.rstrip() + "\n" for line in output.rstrip().splitlines())


# ---- what is generated ---------------------------------------------------------------
def letters() -> str:
    """Return the table of the letters of upref/rollouts.py, with numbers of one
    example.
    """
    from math import log

    mu, p = 0.01, 0.0128
    r = p / mu
    logarithms = f"{log(mu):.3f}, {log(p):.3f}"
    rows = [
        ("`mu`", "π_old(o_t): its probability when it was sampled", f"{mu:g}"),
        ("`p`", "π_θ(o_t): its probability now", f"{p:g}"),
        ("`lp_old`, `lp`", "their logarithms, which a loss is given", logarithms),
        ("`r`", "the ratio p / mu = exp(lp − lp_old)", f"{r:g}"),
        (
            "`s`",
            "the ratio of a response: the geometric mean over its tokens",
            f"{math.sqrt(r):.3f}, of r = {r:g} and 1",
        ),
        (
            "`A`",
            "the advantage: above 0 if the response was better than the average of all responses to its prompt",
            "+1",
        ),
    ]
    columns = ["letter", "of a token o_t of a sampled response", "example"]
    return markdown.table(columns, rows)


def _verdicts() -> tuple[str, list[list[str]]]:
    """Return the committed page of verdicts, and the cells of its rows about the
    paper's claims that can be asked of a tiny model.
    """
    text = (ROOT / "repro/mini/results/verdicts.md").read_text(encoding="utf-8")
    rows = []
    for line in text.partition("## Controls")[0].splitlines():
        is_of_claim = line.startswith("| ") and "[`--only" in line
        if is_of_claim and "**not testable**" not in line:
            rows.append(line.strip("|").strip().split(" | "))
    return text, rows


def tally() -> str:
    """Return how many experiments and runs there are, and how many claims have each
    verdict.
    """
    text, rows = _verdicts()
    counts = {
        verdict: sum(row[2].startswith(f"**{verdict}**") for row in rows)
        for verdict in ("reproduced", "undecided", "contradicted")
    }
    assert sum(counts.values()) == len(rows)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    experiments = len(list((ROOT / "repro/mini/experiments").glob("*.toml")))
    runs = re.search(r"^\d+ runs", text, re.M)
    assert runs
    return f"{experiments} experiments, {runs[0]}; of {len(rows)} claims: {verdicts}."


def verdicts() -> str:
    """Return the table of the claims that can be asked of a tiny model."""
    _, rows = _verdicts()
    columns = ["", "claim", "verdict", "effect [interval that decides]", "seeds"]
    return markdown.table(columns, [[*row[:4], row[5]] for row in rows])


def environments() -> str:
    """Return the table of tested versions, from tests/matrix.py."""
    # by path: other packages install a `tests` too
    return runpy.run_path(str(ROOT / "tests" / "matrix.py"))["table"]()


def places() -> str:
    """Return the table of awkward places to run in, from tests/matrix.py."""
    return runpy.run_path(str(ROOT / "tests" / "matrix.py"))["awkward"]()


def trl_memory() -> str:
    """Return the table of what the TRL rung takes of a GPU, by arithmetic."""
    from repro.with_trl import memory, train
    from repro.with_verl.config.model import shape_of

    shape, longest = shape_of(train.MODEL), train.LONGEST
    columns = ["GPU", "micro-batch", "GB to train", "responses generated together"]
    columns += ["GB to generate", "of them keys and values"]
    rows = []
    for gib in (12, 16, 24):
        size = gib * 2**30
        micro_batch = train.micro_batch(size)
        responses = memory.together(shape, size, micro_batch, longest)
        cells = [
            f"{gib} GB",
            micro_batch,
            f"{memory.training(shape, micro_batch, longest) / 1e9:.1f}",
            responses,
            f"{memory.generating(shape, responses, longest) / 1e9:.1f}",
            f"{memory.cache(shape, responses, longest) / 1e9:.1f}",
        ]
        rows.append(cells)
    return markdown.table(columns, rows)


def benchmarks() -> str:
    """Return a section for each benchmark that prints lines: what it measures, and what
    it printed.
    """
    out = []
    for file in sorted((ROOT / "benchmarks").glob("*.json")):
        printed = record.read(file)[0]
        if not isinstance(printed.rows, list):
            continue  # a table by name, which another function shows
        named = re.search(r"-m benchmarks\.(\w+)", printed.command)
        source = ROOT / f"benchmarks/{named[1] if named else file.stem}.py"
        what = "The program that printed this is in the history."
        if source.exists():
            docstring = source.read_text(encoding="utf-8").split('"""')[1]
            what = docstring.partition("\n\n")[0]
        out += [
            f"## `{printed.command}`",
            "",
            what,
            f"Recorded on {printed.date}, commit {printed.commit}.",
            "",
            "```text",
            *printed.rows,
            "```",
            "",
        ]
    return "\n".join(out)


def lessons() -> str:
    """Return the table of the pages of the course: question, and minutes at
    WORDS_A_MINUTE.
    """
    from upref_course.grader import Reading, course_pages

    rows = []
    for lesson in course_pages():
        page = (ROOT / lesson.page).read_text(encoding="utf-8")
        minutes = math.ceil(len(reading(page)) / WORDS_A_MINUTE)
        mark = lesson.mark if isinstance(lesson, Reading) else lesson.number
        question = " ".join(
            page.partition("**Question.** ")[2].partition("\n\n")[0].split()
        )
        link = f"[{lesson.title}]({Path(lesson.page).name})"
        rows.append([mark, link, question, minutes])
    return markdown.table(["", "lesson", "the question", "minutes"], rows)


def reading(page: str) -> list[str]:
    """Return the words that a reader reads: without code, what it prints, and generated
    tables.
    """
    text = re.sub(r"<!-- [\w.:]+ -->.*?<!-- end -->", "", page, flags=re.S)
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M).split()


# The parts that the site has and this repository has not: the name -> the records that
# it is made of, from docs/; "" where it is read from the code.
ON_SITE = {
    "docs.make.benchmarks": "../benchmarks",
    "paper.claims.page.markdown": "../paper/claims/computed.json",
    "docs.gpu.kernels": "../benchmarks/gpu/results.json",
    "docs.gpu.sizes": "../benchmarks/gpu/results.json",
    "docs.faults.table": "",
    "docs.proved.losses": "proved.json",
    "docs.framework_pages.recipes": "",
    "docs.steps.table:trl": "steps/trl.json",
    "docs.steps.table:verl": "steps/verl.json",
    "docs.steps.table:openrlhf": "steps/openrlhf.json",
    "docs.steps.suite": "steps/suite",
    "docs.steps.plugins": "steps/plugins.json",
    "docs.bounds.table": "steps/bounds.json",
    "docs.options.table:trl": "steps/options/trl.json",
    "docs.options.table:verl": "steps/options/verl.json",
    "docs.options.table:openrlhf": "steps/options/openrlhf.json",
    "docs.options.table:skyrl": "steps/options/skyrl.json",
}


def part(name: str) -> str:
    """Return a part by its name: what the function returns that makes it.

    Args:
        name: MODULE.FUNCTION or MODULE.FUNCTION:ARGUMENT.
    """
    maker, _, argument = name.partition(":")
    module, _, function = maker.rpartition(".")
    arguments = [argument] if argument else []
    return getattr(importlib.import_module(module), function)(*arguments)


def names() -> set[str]:
    """Return the names of all parts that a page has."""
    return {
        name
        for page in PAGES
        for name in MARKED.findall((ROOT / page).read_text(encoding="utf-8"))
    }


def show(wanted: Sequence[str]) -> int:
    """Print the parts of these names; return 0, or 2 where one is unknown or none is
    named.
    """
    there = names()
    unknown = [name for name in wanted if name not in there]
    if unknown or not wanted:
        said = f"There is no part {unknown[0]}" if unknown else "Name a part"
        print(f"{said}: choose of {', '.join(ON_SITE)}.", file=sys.stderr)
        return 2
    try:
        for name in wanted:
            print(part(name), end="\n\n", flush=True)
    except BrokenPipeError:  # whoever reads it has seen enough
        sys.stdout = None  # type: ignore[assignment]
    return 0


def main(*pages: str) -> int:
    """Write the pages that are named, or all; print which of them changed. --print and
    --help do what the top of this file says.

    Returns:
        0; 2 where there is no such page or part.
    """
    if pages[:1] == ("--print",):
        return show(pages[1:])
    if pages in (("--help",), ("-h",)):
        print(__doc__)
        return 0
    missing = [page for page in pages if not (ROOT / page).is_file()]
    if missing:
        known = ", ".join(str(page) for page in PAGES)
        print(f"There is no page {missing[0]}: choose of {known}.", file=sys.stderr)
        return 2
    for page in [Path(p) for p in pages] or PAGES:
        old = (ROOT / page).read_text(encoding="utf-8")
        new = written(old)
        if new != old:
            write_atomically(ROOT / page, new)
            print(f"{page}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
