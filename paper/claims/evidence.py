# SPDX-License-Identifier: Apache-2.0
"""Runs the evidence of claims, in a checkout: derivations, tests, experiments, the paper's
LaTeX.

All of it lies outside the library and is reached by path, each piece in a process of its
own. One file: kinds of evidence are compared here.

A pointer names a piece of evidence (Claim.pointers). In all functions `root` is the top of
the checkout, and what is found is (kind, pointer) -> Outcome.
"""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from docs import record
from paper.claims import (
    COMPUTED,
    KINDS,
    Claim,
    Judged,
    Outcome,
    judge,
    last,
    read,
    saved,
    words,
)
from upref.errors import InputError
from upref.markdown import codes

ROOT = Path(__file__).parents[2]
PLACES = (ROOT.parent / "shared" / "up_paper.tex", ROOT / "shared" / "up_paper.tex")
NO_PAPER = "the paper's LaTeX is not here (UPREF_PAPER=FILE names it)"
# what a test may record
FINDS_OF_TESTS = (
    "identity",
    "counterexample",
    "excluded",
    "undecided",
    "not testable",
)


def compute(
    claims: list[Claim], save: bool = False, root: Path = ROOT
) -> tuple[list[Judged], dict]:
    """Judge the claims by evidence that is run now.

    Args:
        claims: which.
        save: write the entries to computed.json, and drop those of claims that are
            gone.
        root: the top of the checkout.

    Returns:
        The judged claims, and their entries of computed.json.

    Raises:
        InputError: it is no checkout, or the tests cannot run.
    """
    known = last()
    before = {c.id: known.get(c.id, {}).get("verdict", "") for c in claims}
    judged = run(claims, before, root)
    made = saved(judged)
    day = datetime.now(UTC).date().isoformat()
    if save:
        gone = known.keys() - {c.id for c in read()}
        record.write(COMPUTED, record.without(record.read(COMPUTED), gone))
        record.add(COMPUTED, "python -m paper claims --run --save", made)
    now = {"date": day, "commit": record.commit()}
    return judged, {name: entry | now for name, entry in made.items()}


def run(
    claims: list[Claim],
    before: dict[str, str],
    root: Path = ROOT,
) -> list[Judged]:
    """Return the claims judged by evidence that is run now, two pieces at a time.

    Args:
        claims: which.
        before: id -> verdict of the last run, which stays where evidence cannot run
            here.
        root: the top of the checkout.

    Raises:
        InputError: it is no checkout, or the tests cannot run.
    """
    if not (root / "derivations").is_dir() or not (root / "tests").is_dir():
        raise InputError(
            f"{root} is no checkout of the repository: run `python -m paper claims --run` in one."
        )
    asked: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for c in claims:
        for kind, pointer in c.pointers:
            asked[kind].add(pointer)
    jobs: list[Future] = []
    found: dict[tuple[str, str], Outcome] = {}
    with ThreadPoolExecutor(2) as pool, _ended(jobs):
        # one by one: where an interrupt comes between, `_ended` has those before it
        jobs.append(pool.submit(derivations, sorted(asked["derivations"]), root))
        jobs.append(pool.submit(tests, sorted(asked["tests"]), root))
        jobs.append(pool.submit(mini, sorted(asked["mini"]), root))
        jobs.append(pool.submit(exact, sorted(asked["exact"]), root))
        for job in jobs:
            found |= job.result()
    tex = paper()
    judged = []
    for c in claims:
        evidence = [*outcomes(c, found), *in_the_paper(c, tex)]
        judged.append(judge(c, evidence, before.get(c.id, "")))
    return judged


def outcomes(c: Claim, found: dict) -> list[Outcome]:
    """Return what the evidence of a claim found, without the search of the paper."""
    return [found[key] for key in c.pointers if key[0] != "absent"]


_running: set[subprocess.Popen] = set()  # processes of `process` that have not ended


@contextmanager
def _ended(jobs: list[Future]) -> Iterator[None]:
    """Where the `with` block is left by an exception, Ctrl-C and SIGTERM included,
    start nothing more and kill what was started.
    """
    try:
        yield
    except BaseException:
        # a job starts one process after the other: kill until no job is left
        while not all([job.cancel() or job.done() for job in jobs]):
            for child in tuple(_running):
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            time.sleep(0.05)
        raise


def process(root: Path, *argv: str) -> subprocess.CompletedProcess:
    """Run Python on a module or file of the checkout, on one thread, and return what it
    printed and its exit status.

    It has a session of its own, so that `_ended` can kill all that it starts.
    """
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    child = subprocess.Popen(
        [sys.executable, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=env,
        start_new_session=True,
    )
    _running.add(child)
    try:
        out, err = child.communicate()
    finally:
        _running.discard(child)
    return subprocess.CompletedProcess(argv, child.returncode, out, err)


def failed(kind: str, pointer: str, why: str) -> Outcome:
    """Return the outcome of evidence that failed, with the end of the reason why."""
    return Outcome(kind, pointer, ("failed",), " ".join(why.split())[-300:])


# ---- derivations and tests -----------------------------------------------------------
def derivations(names: list[str], root: Path) -> dict[tuple[str, str], Outcome]:
    """Run these derivations one after the other."""
    return {("derivations", n): derivation(n, root) for n in names}


def derivation(name: str, root: Path) -> Outcome:
    """Run a derivation; it is a proof if its exit status is 0. Its text is the title in
    the file's docstring.
    """
    file = root / "derivations" / f"{name}.py"
    if not file.exists():
        return failed("derivations", name, "there is no such derivation")
    done = process(root, str(file))
    if done.returncode:
        return failed("derivations", name, done.stderr or "it failed")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    title = docstring.partition("\n")[0]
    return Outcome("derivations", name, ("proof",), title)


def tests(nodes: list[str], root: Path) -> dict[tuple[str, str], Outcome]:
    """Run one pytest for all. A test says what it found by record_property; one that
    says nothing found an identity.

    Args:
        nodes: FILE::NAME of each.
        root: the top of the checkout.

    Raises:
        InputError: pytest did not run.
    """
    found: dict[tuple[str, str], Outcome] = {}
    there = []
    for node in nodes:
        if has_test(root, node):
            there.append(node)
        else:
            found["tests", node] = failed("tests", node, "there is no such test")
    if not there:
        return found
    cases = _report_of_pytest(there, root)
    for node in there:
        found["tests", node] = test_outcome(node, cases.get(node, []))
    return found


def _report_of_pytest(
    nodes: list[str], root: Path
) -> dict[str, list[ElementTree.Element]]:
    """Run one pytest for these tests; return FILE::NAME -> the entries of pytest's
    report, one for each parameter.

    Raises:
        InputError: pytest did not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider"]
        options += [f"--rootdir={root}", f"--junitxml={report}"]
        done = process(root, "-m", "pytest", *options, *nodes)
        if not report.exists():
            last_line = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise InputError(f"pytest did not run: {last_line}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    by_node: dict[str, list[ElementTree.Element]] = {}
    for case in cases:
        file = case.get("classname", "").replace(".", "/")
        name = case.get("name", "").partition("[")[0]  # without parameters
        by_node.setdefault(f"{file}.py::{name}", []).append(case)
    return by_node


def has_test(root: Path, node: str) -> bool:
    """Return whether a file has a test of that name, outside of a class."""
    file, _, name = node.partition("::")
    if not (root / file).is_file():
        return False
    tree = ast.parse((root / file).read_text(encoding="utf-8"))
    return any(isinstance(x, ast.FunctionDef) and x.name == name for x in tree.body)


def test_outcome(node: str, cases: list[ElementTree.Element]) -> Outcome:
    """Return what a test found: "failed" or "not run" if one of its cases was, else
    what the properties say that they recorded.

    Args:
        node: FILE::NAME.
        cases: its parameters' entries in pytest's report.
    """
    if not cases:
        return failed("tests", node, "it did not run")
    for case in cases:
        for tag in ("failure", "error"):
            if (bad := case.find(tag)) is not None:
                return failed("tests", node, bad.get("message") or "it fails")
        if (skipped := case.find("skipped")) is not None:
            why = f"{node}: {skipped.get('message')}"
            return Outcome("tests", node, ("not run",), why)
    finds: dict[str, None] = {}  # each once, in the order of the tests
    texts: dict[str, None] = {}
    for case in cases:
        for said in case.iter("property"):
            name = said.get("name", "")
            if name in FINDS_OF_TESTS:
                finds[name] = None
            texts[said.get("value", "")] = None
    return Outcome("tests", node, tuple(finds) or ("identity",), "; ".join(texts))


# ---- experiments ---------------------------------------------------------------------
def mini(names: list[str], root: Path) -> dict[tuple[str, str], Outcome]:
    """Return what the records of the tiny transformers show of each registered
    claim.
    """
    if not names:
        return {}
    done = process(root, "-m", "repro.mini.experiment", "--standing")
    if done.returncode:
        return {("mini", n): failed("mini", n, done.stderr) for n in names}
    standing = json.loads(done.stdout.splitlines()[-1])
    return {("mini", n): mini_outcome(n, standing.get(n)) for n in names}


def mini_outcome(name: str, s: dict | None) -> Outcome:
    """Return what the registered rule finds, in the common vocabulary; failed where
    nobody registered the claim.

    Args:
        name: EXPERIMENT/CLAIM.
        s: how it stands (repro/mini/experiment/standing.py), or None.
    """
    if s is None:
        return failed("mini", name, "no experiment registers it")
    finds, text = mini_words(s)
    return Outcome("mini", name, (finds,), text, decides=s.get("decides", False))


def mini_words(s: dict) -> tuple[str, str]:
    """Return one of FINDS and the sentence that the page shows.

    A claim of which only a part holds is undecided.
    """
    text = s["shown"].replace("<br>", "; ")
    # the reason says how many contrasts of the claim hold
    if "contrasts hold" in s["why"] and s["word"] != "reproduced":
        text = f"{s['why']}; {text}"
    with_seeds = f"{text} ({s['seeds']} seeds)"
    verdict = s["verdict"]
    if verdict == words.REPRODUCED:
        return "reproduced", with_seeds
    if verdict == words.CONTRADICTED:
        return ("not seen" if s["bounds_alone"] else "contradicted"), with_seeds
    if verdict == words.EXCLUDED:
        return "excluded", f"{s['limit']}: {with_seeds}"
    if verdict == words.NOT_TESTABLE:
        return "not testable", f"{s['why']}: {text}" if text else s["why"]
    so_far = f"{s['seeds']} of {s['of']} seeds: {_seeds_needed(s)}"
    return "undecided", f"{text} ({so_far})" if text else so_far


def _seeds_needed(s: dict) -> str:
    """Return how many seeds would decide an undecided claim, as words."""
    needed = s["needed"]
    if not needed:
        return "more than 200 seeds, or the effect seen is on the other side"
    if needed <= s["seeds"]:
        return "the power was there, and it is too close to call"
    return f"it would take {needed} seeds"


def exact(names: list[str], root: Path) -> dict[tuple[str, str], Outcome]:
    """Return the findings of the exact experiments, which ran once: their programs are
    in the history, their results are committed.

    Args:
        names: EXPERIMENT/first words of a finding, which must fit one alone.
        root: the top of the checkout.
    """
    if not names:
        return {}
    file = root / "repro" / "exact" / "results" / "results.json"
    results = record.rows(file)
    found = {}
    for name in names:
        experiment, _, first_words = name.partition("/")
        findings = results.get(experiment, {}).get("findings", [])
        mine = [f for f in findings if f["claim"].startswith(first_words)]
        if len(mine) == 1:
            found["exact", name] = exact_outcome(name, mine[0])
        else:
            found["exact", name] = failed("exact", name, f"{len(mine)} findings")
    return found


def exact_outcome(name: str, finding: dict) -> Outcome:
    """Return what an exact experiment found; one that holds in part is evidence for and
    against, with its reason as the condition.
    """
    finds = {
        "holds": ("reproduced",),
        "does not hold": ("contradicted",),
        "holds in part": ("reproduced", "contradicted"),
    }
    verdict, text = finding["verdict"], finding["because"]
    condition = text if verdict == "holds in part" else ""
    return Outcome("exact", name, finds[verdict], text, condition)


# ---- the paper itself ----------------------------------------------------------------
def paper() -> tuple[str, str] | None:
    """Return the paper's LaTeX as it prints, with single spaces and without comments,
    and its comments; None where it is not here.

    Raises:
        InputError: UPREF_PAPER names a file that cannot be read.
    """
    named = os.environ.get("UPREF_PAPER")
    file = Path(named) if named else next((p for p in PLACES if p.exists()), None)
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"UPREF_PAPER={file} cannot be read: {error}.") from error
    comment = r"(?<!\\)%.*"
    printed = " ".join(re.sub(comment, "", text).split())
    return printed, "\n".join(re.findall(comment, text))


def in_the_paper(c: Claim, tex: tuple[str, str] | None) -> Iterable[Outcome]:
    """Yield what the paper's text shows of a claim: failed if its quote is not in its
    section; and, of what is said to be absent, unspecified if no pattern is in print,
    failed if one is, not run without the paper.
    """
    if tex is None:
        if c.absent:
            yield Outcome("absent", c.id, ("not run",), NO_PAPER)
        return
    printed, comments = tex
    if c.quote and c.section not in sections_of(c.quote, printed):
        yield failed("words", c.id, f"{c.quote!r} is not in {c.place}")
    if c.absent:
        yield _absent(c, printed, comments)


def _absent(c: Claim, printed: str, comments: str) -> Outcome:
    """Return what a search of the paper for what a claim says is absent found.

    Args:
        c: the claim, with patterns.
        printed: the paper's LaTeX as it prints.
        comments: its comments.
    """

    def there(text: str) -> list[str]:
        """Return the patterns that the text has, in any case of letters."""
        return [pattern for pattern in c.absent if re.search(pattern, text, re.I)]

    if in_print := there(printed):
        listed = ", ".join(map(repr, in_print))
        return failed("absent", c.id, f"the paper has {listed}")
    also = "nor have the LaTeX's comments"
    if there(comments):
        also = "a commented-out line of the LaTeX matches"
    text = f"the printed text has none of {codes(c.absent)}; {also}"
    return Outcome("absent", c.id, ("unspecified",), text)


def sections_of(words: str, tex: str) -> list[str]:
    """Return every section in which the words are, as "3.1" or "A"; [] for none."""
    found = []
    at = tex.find(words)
    while at >= 0:
        found.append(_section_at(at, tex))
        at = tex.find(words, at + 1)
    return found


def _section_at(at: int, tex: str) -> str:
    """Return the number of the section of the character at this index: "3", "3.1", or
    "A" in the appendix.
    """
    number, sub, in_appendix = 0, 0, False
    for head in re.finditer(r"\\(section|subsection|beginappendix)\b", tex):
        if head.start() > at:
            break
        if head[1] == "beginappendix":
            number, sub, in_appendix = 0, 0, True
        elif head[1] == "section":
            number, sub = number + 1, 0
        else:
            sub += 1
    name = chr(ord("A") + number - 1) if in_appendix else str(number)
    return f"{name}.{sub}" if sub else name
