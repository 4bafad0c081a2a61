# SPDX-License-Identifier: Apache-2.0
"""Where each data set comes from (sources.toml), and how its rows become verl's: one
small function a source.

A revision is the full commit hash of the repository on the Hugging Face hub, as other
public projects pin it, or on GitHub, read off its history with the file's hash. The
hub's files were not downloaded when this was written.
"""

import ast
import io
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from repro.with_verl.data.schema import row
from repro.with_verl.reward.score import last_boxed
from upref import InputError

Row = dict[str, Any]
T = TypeVar("T")
# how often AIME24 repeats a problem, for Avg@32
AIME_ANSWERS = 32
BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
# verl's own, word for word (examples/data_preprocess/geo3k.py at 1dda039b), whose
# reward gives a tenth for the form
GEO3K = (
    " You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)
# The DAPO data's own template, in which AIME24 comes too; it is taken off for the boxed
# protocol.
DAPO_BEFORE = re.compile(
    r"^Solve the following math problem step by step\..*?\n\n", re.DOTALL
)
DAPO_AFTER = re.compile(
    r"\n\nRemember to put your answer on its own line after \"Answer:\"\.?\s*$"
)


@dataclass(frozen=True)
class Source:
    """One output file, and what it is made from.

    Attributes:
        name: of the output file.
        repository: on the hub, or on GitHub where there is a blob.
        files: in the repository; the first is fetched.
        revision: the pinned commit.
        count: rows that the output must have.
        convert: (source, upstream rows) -> the output's rows.
        split: train or test.
        why: where the number of rows comes from.
        blob: git's hash of the file; "": the repository is on the hub.
    """

    name: str
    repository: str
    files: tuple[str, ...]
    revision: str
    count: int
    convert: Callable[["Source", Iterable[Row]], list[Row]]
    split: str
    why: str
    blob: str = ""
    copies: int = 1  # of each row in the file that is fetched

    def url(self, revision: str) -> str:
        """Return the address of the file at a commit."""
        if self.blob:
            return f"https://raw.githubusercontent.com/{self.repository}/{revision}/{self.files[0]}"
        return f"https://huggingface.co/datasets/{self.repository}/resolve/{revision}/{self.files[0]}"


def _unique(rows: Iterable[T], key: Callable[[T], Any]) -> list[T]:
    """Return the first row of each key, in their order."""
    seen: dict[Any, T] = {}
    for r in rows:
        seen.setdefault(key(r), r)
    return list(seen.values())


def _field(r: Row, i: int, *names: str) -> Any:
    """Return the first of these columns that a row has and that is not empty. Raise
    InputError with the number of the row, i, if there is none.
    """
    for name in names:
        if r.get(name) not in (None, ""):
            return r[name]
    raise InputError(
        f"row {i} has none of {', '.join(names)}, but {', '.join(r)}: is this the right file?"
    )


def _boxed(s: Source, i: int, problem: str, answer: str) -> Row:
    """Make a row whose prompt asks for a boxed answer. verl knows the data set by the
    source's name without `_x32`.
    """
    return row(
        s.name.removesuffix("_x32"),
        i,
        problem.strip() + BOXED,
        answer.strip(),
        "boxed",
        s.split,
    )


def dapo(s: Source, rows: Iterable[Row]) -> list[Row]:
    """Convert rows that are in verl's format already, each problem once: the upstream
    file repeats them. The prompts stay as they are.
    """
    problems = _unique(rows, lambda r: r["extra_info"]["index"])
    return [
        row(
            s.name,
            i,
            r["prompt"][0]["content"],
            str(r["reward_model"]["ground_truth"]),
            "dapo",
            s.split,
        )
        for i, r in enumerate(problems)
    ]


def aime24_x32(s: Source, rows: Iterable[Row]) -> list[Row]:
    """Convert AIME24: take DAPO's instructions off each problem, ask for a boxed
    answer, and repeat it AIME_ANSWERS times. verl samples the same number of answers
    for all validation files.
    """
    out: list[Row] = []
    for r in dapo(s, rows):
        problem = DAPO_AFTER.sub("", DAPO_BEFORE.sub("", r["prompt"][0]["content"]))
        out += [
            _boxed(s, len(out) + k, problem, r["reward_model"]["ground_truth"])
            for k in range(AIME_ANSWERS)
        ]
    return out


def question_answer(s: Source, rows: Iterable[Row]) -> list[Row]:
    """Convert rows of `problem` or `question`, and `answer` or `gt_answer`, to boxed
    prompts.
    """
    return [
        _boxed(
            s,
            i,
            _field(r, i, "problem", "question"),
            str(_field(r, i, "answer", "gt_answer")),
        )
        for i, r in enumerate(rows)
    ]


def gsm8k(s: Source, rows: Iterable[Row]) -> list[Row]:
    """Convert rows of `question` and `answer` to boxed prompts. The right answer is the
    number behind #### in the solution, without commas.
    """
    return [
        _boxed(
            s,
            i,
            r["question"],
            r["answer"].rpartition("####")[2].strip().replace(",", ""),
        )
        for i, r in enumerate(rows)
    ]


def olympiad(s: Source, rows: Iterable[Row]) -> list[Row]:
    """Convert rows of `question` and `final_answer` (a text or a list of texts, joined
    by commas) to boxed prompts. A question with an image is left out, and each question
    comes once.
    """
    out: list[tuple[str, str]] = []
    for i, r in enumerate(rows):
        answers = _field(r, i, "final_answer", "answer")
        if isinstance(answers, str) and answers.startswith("["):
            answers = ast.literal_eval(answers)
        answers = [answers] if isinstance(answers, str) else answers
        if not r.get("image_1"):
            out.append(
                (
                    _field(r, i, "question", "problem"),
                    ", ".join(a.strip().strip("$") for a in answers),
                )
            )
    out = _unique(out, lambda qa: " ".join(qa[0].split()))
    return [_boxed(s, i, q, a) for i, (q, a) in enumerate(out)]


def math_3to5(s: Source, rows: Iterable[Row]) -> list[Row]:
    """Convert rows of `problem` or `question` to boxed prompts; the right answer is
    `gt_answer`, `answer` or the box of `solution`. Rows of a level that is not 3 to 5
    are left out; those without a level stay.
    """
    out: list[Row] = []
    for i, r in enumerate(rows):
        level = re.search(r"\d", str(r.get("level", "")))
        if level and not 3 <= int(level.group()) <= 5:
            continue
        answer = (
            r.get("gt_answer")
            or r.get("answer")
            or last_boxed(str(r.get("solution", "")))
        )
        if not answer:
            raise InputError(
                f"row {i} has no answer, gt_answer or solution with a box: is this the right file?"
            )
        out.append(
            _boxed(s, len(out), str(_field(r, i, "problem", "question")), str(answer))
        )
    return out


def geometry3k(s: Source, rows: Iterable[Row]) -> list[Row]:
    """Convert rows of `problem`, `answer` and `images` ({bytes, path}) to prompts of
    verl's geo3k. Raise InputError if their number is not that of <image> in the
    problem, and Pillow's error for an image that cannot be read.
    """
    from PIL import Image

    out = []
    for i, r in enumerate(rows):
        images = _field(r, i, "images")
        problem = str(_field(r, i, "problem"))
        if problem.count("<image>") != len(images):
            raise InputError(
                f"row {i} has {len(images)} images and {problem.count('<image>')} <image>."
            )
        for image in images:
            Image.open(io.BytesIO(image["bytes"])).verify()
        done = row(
            "hiyouga/geometry3k",
            i,
            problem + GEO3K,
            str(_field(r, i, "answer")),
            "geo3k",
            s.split,
        )
        out.append(done | {"images": images})
    return out


CONVERT = (
    dapo,
    aime24_x32,
    question_answer,
    gsm8k,
    olympiad,
    math_3to5,
    geometry3k,
)


def _read() -> dict[str, Source]:
    """Return the sources of sources.toml, by name."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    by_name = {function.__name__: function for function in CONVERT}
    found = {}
    for name, table in tomllib.loads(text).items():
        files, convert = tuple(table.pop("files")), by_name[table.pop("convert")]
        found[name] = Source(name=name, files=files, convert=convert, **table)
    return found


SOURCES = _read()
