# SPDX-License-Identifier: Apache-2.0
"""Where each data set comes from, and how its rows become verl's: one small function a
source.

A revision is the full commit hash of the repository on the Hugging Face hub, as other
public projects pin it, or on GitHub, read off its history with the file's hash. The
hub's files were not downloaded when this was written.
"""

import ast
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from repro.with_verl.data.schema import row
from repro.with_verl.reward.score import last_boxed
from upref import InputError

Row = dict[str, Any]
T = TypeVar("T")
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
    """One output file. `count`: rows it must have; `repository`, `files`, `revision`:
    what is fetched.

    `blob`, git's hash of the file, where the repository is on GitHub, not on the hub.
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
        if self.blob:
            return f"https://raw.githubusercontent.com/{self.repository}/{revision}/{self.files[0]}"
        return f"https://huggingface.co/datasets/{self.repository}/resolve/{revision}/{self.files[0]}"


def _unique(rows: Iterable[T], key: Callable[[T], Any]) -> list[T]:
    """First of each, in order."""
    seen: dict[Any, T] = {}
    for r in rows:
        seen.setdefault(key(r), r)
    return list(seen.values())


def _field(r: Row, i: int, *names: str) -> Any:
    for name in names:
        if r.get(name) not in (None, ""):
            return r[name]
    raise InputError(
        f"row {i} has none of {', '.join(names)}, but {', '.join(r)}: is this the right file?"
    )


def _boxed(s: Source, i: int, problem: str, answer: str) -> Row:
    """Make a row whose prompt asks for a boxed answer."""
    return row(
        s.name.removesuffix("_x32"),
        i,
        problem.strip() + BOXED,
        answer.strip(),
        "boxed",
        s.split,
    )


def dapo(s: Source, rows: Iterable[Row]) -> list[Row]:
    """verl's format already, every problem 100 times (AIME24: 32 times); kept once, the
    prompt untouched.
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
    """The boxed prompt, every problem 32 times, because verl has one number of answers
    for all validation files.
    """
    out: list[Row] = []
    for r in dapo(s, rows):
        problem = DAPO_AFTER.sub("", DAPO_BEFORE.sub("", r["prompt"][0]["content"]))
        out += [
            _boxed(s, len(out) + k, problem, r["reward_model"]["ground_truth"])
            for k in range(32)
        ]
    return out


def question_answer(s: Source, rows: Iterable[Row]) -> list[Row]:
    """problem or question, answer."""
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
    """question, answer: a solution whose last line is #### and the number."""
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
    """question, final_answer [one text or several]; text only, each question once."""
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
    """problem or question; gt_answer, answer or a boxed solution; levels 3 to 5 where
    one is given.
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
    """problem with <image> in it, answer, images [{bytes, path}]; an image that cannot
    be read is an error.
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


TRAIN, TEST = "train", "test"
AIME = (
    "BytedTsinghua-SIA/AIME-2024",
    ("data/aime-2024.parquet",),
    "aa49075e24ad594b79fdf0bdcefa735c2181be67",
)
GSM = "openai/gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee"
GEO = ("hiyouga/geometry3k", "fd21e533e1e50d0662a2bf7b223e60511bd5f8b7")
SOURCES = {
    s.name: s
    for s in (
        Source(
            "dapo_math_17k",
            "BytedTsinghua-SIA/DAPO-Math-17k",
            ("data/dapo-math-17k.parquet",),
            "65877096c24ffa7abc4e4fa5edb95cf3413a5674",
            17917,
            dapo,
            TRAIN,
            "1,791,700 rows, each problem 100 times",
            copies=100,
        ),
        Source("aime24", *AIME, 30, dapo, TEST, "two exams of 15 problems"),
        Source(
            "aime24_x32",
            *AIME,
            960,
            aime24_x32,
            TEST,
            "30 problems, each 32 times: Table 1 has k/960",
        ),
        Source(
            "math_3to5",
            "sail-sg/understand-r1-zero",
            ("datasets/train/math_lvl3to5_8k/train/data-00000-of-00001.arrow",),
            "dfca49dd460ee7cc8e4a5a162c876a7fd6993b87",
            8523,
            math_3to5,
            TRAIN,
            "the problems of the protocol of Liu et al.",
            "4845e21e2437b0fc2413f9bf9e6c4745b0265104",
        ),
        Source(
            "amc23",
            "math-ai/amc23",
            ("test-00000-of-00001.parquet",),
            "80815d37005feb82cd7f8fbc6901d5d3eff43057",
            40,
            question_answer,
            TEST,
            "Table 1 has k/40",
        ),
        Source(
            "math500",
            "HuggingFaceH4/MATH-500",
            ("test.jsonl",),
            "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            500,
            question_answer,
            TEST,
            "Table 1 has k/500",
        ),
        Source(
            "minerva",
            "math-ai/minervamath",
            ("test.jsonl",),
            "ee46ddc498933b1977577953250ca5c66be64f96",
            272,
            question_answer,
            TEST,
            "Table 1 has k/272",
        ),
        Source(
            "olympiadbench",
            "math-ai/olympiadbench",
            ("test.parquet",),
            "4faaf1e6ec17d11a4218a9bf4c049ecaf954dd84",
            674,
            olympiad,
            TEST,
            "Table 1 has k/672: the paper does not say which two of these it left out",
        ),
        Source(
            "gsm8k_train",
            GSM[0],
            ("main/train-00000-of-00001.parquet",),
            GSM[1],
            7473,
            gsm8k,
            TRAIN,
            "repro/with_trl's training set",
        ),
        Source(
            "gsm8k_test",
            GSM[0],
            ("main/test-00000-of-00001.parquet",),
            GSM[1],
            1319,
            gsm8k,
            TEST,
            "its test set",
        ),
        Source(
            "geometry3k_train",
            GEO[0],
            ("data/train-00000-of-00001.parquet",),
            GEO[1],
            2101,
            geometry3k,
            TRAIN,
            "the training set",
        ),
        Source(
            "geometry3k_test",
            GEO[0],
            ("data/test-00000-of-00001.parquet",),
            GEO[1],
            601,
            geometry3k,
            TEST,
            "the test set",
        ),
    )
}
