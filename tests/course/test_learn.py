# SPDX-License-Identifier: Apache-2.0
"""`upref learn`: holes are no solutions, solutions are right, and plausible mistakes
are named.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from attempts import ATTEMPTS

from docs.site.prose import papers
from repro import fork
from upref.cli import main
from upref_course import grader as learn
from upref_course.verdict import judge_function

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
EVERY = {e.number: e for e in learn.exercises()}
SOLUTION = {
    n: (HERE / "solutions" / e.file).read_text(encoding="utf-8")
    for n, e in EVERY.items()
}
RIGHT = [
    (n, i)
    for n, tries in ATTEMPTS.items()
    for i, (*_, words) in enumerate(tries)
    if not words
]
WRONG = [
    (n, i)
    for n, tries in ATTEMPTS.items()
    for i, (*_, words) in enumerate(tries)
    if words
]
lessons = pytest.mark.parametrize("n", EVERY)
PROVED = (3, 4, 6, 7)  # the exercises whose answer is a loss


@pytest.fixture
def asked(tmp_path, monkeypatch, capsys):
    """Return a function that runs `upref learn N` in an empty folder where the file has
    this text, and returns (exit status, what it prints).
    """
    monkeypatch.chdir(tmp_path)

    def ask(n, text="", *options):
        """Write a solution's file if a text is given, run `upref learn`, and return the
        exit status and what it printed, in one line.
        """
        if text:
            Path(EVERY[n].file).write_text(text, encoding="utf-8")
        status = main(["learn", str(n), *options])
        out, err = capsys.readouterr()
        return status, " ".join((out + err).split())

    return ask


def attempt(n, i):
    old, new, words = ATTEMPTS[n][i]
    assert SOLUTION[n].count(old) >= 1, old
    return SOLUTION[n].replace(old, new), words


@lessons
def test_the_hole_is_no_solution(asked, n):
    assert asked(n)[0] == 0, "the first time it writes the file"
    status, said = asked(n)
    assert status == 1 and "the hole is still open" in said


@lessons
def test_the_solution_is_right(asked, n):
    status, said = asked(n, SOLUTION[n])
    assert status == 0 and "right" in said, said
    assert ("right, and proved for every value" in said) == (n in PROVED), said


@pytest.mark.parametrize("n, i", RIGHT)
def test_another_way_to_be_right(asked, n, i):
    status, said = asked(n, attempt(n, i)[0])
    assert status == 0, said


@pytest.mark.parametrize("n, i", WRONG)
def test_a_wrong_attempt_is_told_what_is_wrong(asked, n, i):
    text, words = attempt(n, i)
    status, said = asked(n, text)
    assert status == 1 and words in said, said


LATE = [
    (3, "lp - lp_old", "(lp - lp_old).clamp(max=3)"),
    (4, "1 + eps_high", "1.2799"),
    (6, "1 - eps_low", "0.79999"),
    (7, "1 - eps_low", "1 - 0.00031"),
    (
        4,
        "return -torch.minimum(r * A",
        "A = A.clamp(max=5000)\n    return -torch.minimum(r * A",
    ),
]


@pytest.mark.parametrize("n, old, new", LATE)
def test_one_sign_at_every_stage(asked, n, old, new):
    """What only `upref check` finds is shown as what the exercise's own batches find:
    as the loss's gradient by lp.
    """
    said = asked(n, SOLUTION[n].replace(old, new))[1]
    assert (
        said.count("gradient by lp [") == 2
        and "lp_old = torch.tensor([" in said
        and "dJ" not in said
    ), said


def test_the_lesson_is_a_file_that_is_there(asked):
    asked(4)
    assert Path(asked(4)[1].split("the lesson is ")[1].rstrip(".")).is_file()


@lessons
def test_three_wrong_attempts_at_least(n):
    assert sum(n == m for m, _ in WRONG) >= 3


@lessons
def test_every_known_mistake_is_recognised_as_itself(n):
    """No fault is right, and none is hidden by another."""
    for fault in EVERY[n].faults:
        answer = judge_function(EVERY[n], fault.change)
        assert not answer and answer.mistake == fault.words, (
            fault.words,
            answer.mistake,
        )
        assert (
            answer.hint == fault.hint
            and answer.batch
            and answer.expected != answer.found
        )


def test_no_mistake_is_guessed_that_is_wrong_elsewhere():
    """Up to the batch that is shown this loss does what one without the lower bound does."""
    lone = replace(
        EVERY[4], faults=[f for f in EVERY[4].faults if f.id == "no-lower-clip"]
    )
    before = next(f for f in EVERY[4].faults if f.id == "advantage-after-minimum")
    answer = judge_function(lone, before.change)
    assert not answer and "A < 0" in answer.shows and not answer.fault_ids, answer


@lessons
def test_the_batches_grow(n):
    sizes = [
        sum(getattr(x, "numel", lambda: 1)() for x in b.inputs.values())
        for b in EVERY[n].batches
    ]
    assert sizes == sorted(sizes)


def test_a_file_is_never_overwritten(asked):
    mine = "def loss(logits, action, reward):\n    return ...\n"
    asked(1, mine)
    asked(1)
    assert Path("lesson01.py").read_text() == mine


@pytest.mark.parametrize(
    "text, words",
    [
        ("def loss(logits, action, reward:\n", "SyntaxError"),
        ("def los(logits, action, reward):\n    return 0\n", "did you mean los?"),
        ("def loss(logits):\n    return 0\n", "raised TypeError"),
        (
            "def loss(logits, action, reward):\n    return reward[7]\n",
            "on the batch logits = torch.tensor([0.0, 0.0]);",
        ),
        (
            "def loss(logits, action, reward):\n    raise SystemExit\n",
            "ends the program",
        ),
        ("loss = 3\n", "not a function"),
    ],
)
def test_bad_input_is_one_sentence(asked, text, words):
    status, said = asked(1, text)
    assert status == 2 and words in said and said.startswith("upref: "), said


@pytest.mark.parametrize(
    "n, old, new, words",
    [
        (1, "    return -", "    loss = -", "without .backward()"),
        (2, "(rewards[here] - rewards[here].mean())", "rewards", "another shape"),
        (4, "torch.minimum(", "min(", "one truth value"),
        (4, "torch.minimum(", "torch.where(0.8 < r < 1.28, ", "one truth value"),
        (3, "torch.exp(lp - lp_old)", "math.exp(lp - lp_old)", "of one element"),
        (3, "* A", "* A.item()", "of one element"),
        (3, "lp - lp_old", "lp.numpy() - lp_old", "numpy has no gradient"),
    ],
)
def test_a_common_slip_is_told_before_the_words_of_torch(asked, n, old, new, words):
    text = SOLUTION[n].replace(old, new)
    assert text != SOLUTION[n]
    if new == "    loss = -":
        text += "    loss.backward()\n    return loss\n"
    status, said = asked(n, "import math\n" + text)
    assert status == 2 and words in said, said
    assert said.index(words) < said.index("raised ")


def test_a_loop_without_end_is_stopped(tmp_path):
    import os
    import subprocess

    (tmp_path / "lesson01.py").write_text(
        "def loss(logits, action, reward):\n    while True: pass\n"
    )
    command = [*fork.executable(), "-m", "upref", "learn", "1", "--timeout", "8"]
    env = os.environ | fork.environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "your function timed out after" in done.stderr


def test_no_such_lesson(asked, capsys):
    assert main(["learn", "99"]) == 2
    assert "lessons 1 to" in capsys.readouterr().err


def test_the_list(asked, capsys):
    asked(1)
    main(["learn", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [r["lesson"] for r in rows] == list(EVERY) and [r["here"] for r in rows][
        :2
    ] == [True, False]
    main(["learn"])
    said = capsys.readouterr().out
    assert all(page.title in said for page in learn.course_pages())


def test_the_list_says_which_answers_are_right(asked, capsys):
    """A wrong answer, a right one, and a right one that was changed since."""

    def listed():
        main(["learn", "--json"])
        return [r["state"] for r in json.loads(capsys.readouterr().out)][:3]

    asked(1)
    assert listed() == ["begun", "", ""]
    asked(1, SOLUTION[1])
    asked(2, SOLUTION[2])
    assert listed() == ["right", "right", ""]
    Path(EVERY[1].file).write_text(attempt(*WRONG[0])[0], encoding="utf-8")
    assert listed() == ["begun", "right", ""]
    asked(2, attempt(*next(w for w in WRONG if w[0] == 2))[0])
    assert listed() == ["begun", "begun", ""]
    main(["learn"])
    assert "0 of 12 exercises are right" in capsys.readouterr().out


def test_the_list_is_not_stopped_by_a_broken_record(asked, capsys):
    asked(1)
    Path(learn.RIGHT).write_text("no record", encoding="utf-8")
    assert main(["learn"]) == 0
    assert "lesson01.py" in capsys.readouterr().out


def test_lesson_0_is_read_and_not_written(asked):
    status, said = asked(0)
    assert status == 2 and "lesson 0, the loop, has no exercise" in said
    assert "00-the-loop.md" in said


def test_an_answer_for_a_program(asked):
    said = json.loads(asked(1, attempt(1, 1)[0], "--json")[1])
    assert (
        said["ok"] is False
        and "the sign" in said["mistake"]
        and "torch.tensor" in said["batch"]
    )


def test_the_runs_of_the_last_exercise_are_as_described():
    """The file is what the runs log now; the answers' names are what was done to them."""
    from docs.course import runs
    from upref_course.lessons.reading_a_run import KEY, SIGNS

    text = runs.FILE.read_text(encoding="utf-8")
    assert runs.written(text) == text, "run `python -m docs.course.runs`"
    assert set(KEY.values()) == set(SIGNS) == set(runs.WRONG)
    last = {wrong: runs.run(name)[-1] for name, wrong in KEY.items()}
    first = {wrong: runs.run(name)[0] for name, wrong in KEY.items()}
    assert last["sign"]["reward"] < first["sign"]["reward"]
    assert last["nothing"]["pass@8"] > first["nothing"]["pass@8"]
    assert last["no baseline"]["pass@8"] < first["no baseline"]["pass@8"]
    assert last["no baseline"]["reward"] > first["no baseline"]["reward"], (
        "it answers better and knows less"
    )
    assert (
        all(x["last"] == 1 and x["clipped"] == 0 for x in runs.run("D"))
        and last["nothing"]["last"] > 1
    )
    assert all(x["signal"] == x["norm"] == 0 for x in runs.run("E"))
    assert all(
        (x["first"] != 1) == (wrong == "temperature") for wrong, x in first.items()
    )


# ---- the pages -----------------------------------------------------------------------
PARTS = [
    "The equation, case by case",
    "A picture",
    "An experiment",
    "What frameworks do",
    "Exercise",
]


@lessons
def test_every_lesson_has_the_one_skeleton(n):
    page = (ROOT / EVERY[n].page).read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)", page, re.M)
    assert [h for h in heads if h in PARTS] == PARTS and len(page.splitlines()) <= 155
    assert (
        page.startswith(f"# {n}. ")
        and "**Question.** " in page
        and f"`upref learn {n}`" in page
    )
    (picture,) = re.findall(
        r"^!\[(.*)\]\(pictures/(\d\d)-\S+\.svg\)\n\n\*\S", page, re.M
    )
    assert len(picture[0]) > 60 and int(picture[1]) == n, (
        "alt text, and a caption below"
    )
    assert "```text" in page.partition("## An experiment")[2]


def test_every_page_is_a_lesson():
    """But for lesson 0, which has no exercise."""
    zero, *pages = sorted(p.name for p in (ROOT / "docs/course").glob("[0-9]*.md"))
    assert zero == "00-the-loop.md" and pages == [
        Path(e.page).name for e in EVERY.values()
    ]


@pytest.mark.parametrize("page", learn.course_pages(), ids=lambda page: page.title)
def test_papers_are_links_with_authors_and_year(page):
    """A key of papers.bib means nothing to a student."""
    text = (ROOT / page.page).read_text(encoding="utf-8")
    assert not re.findall(r"`[a-z]+(?:19|20)\d\d[a-z+]*`", text)
    known = {paper.link for paper in papers().values()}
    cited = re.findall(r"\[[A-ZÇ][^\]]* (?:19|20)\d\d\]\([^)]*\)", text)
    assert set(cited) <= known, cited


def test_every_page_stands_in_the_list_and_says_what_one_can_do_now():
    """Lesson 0, the twelve lessons, and the pages between them."""
    pages = [ROOT / page.page for page in learn.course_pages()]
    folder = (ROOT / "docs/course").glob("*.md")
    assert sorted(pages) == sorted(p for p in folder if p.name != "README.md")
    contents = (ROOT / "docs/course/README.md").read_text(encoding="utf-8")
    for page in pages:
        assert f"]({page.name})" in contents
        assert "**You can now** " in page.read_text(encoding="utf-8")
