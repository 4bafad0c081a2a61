# SPDX-License-Identifier: Apache-2.0
"""What evaluate.py asks: the miniature's held-out problems, or those of a JSONL file,
and the verifier of each.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from repro.mini import tasks
from repro.with_verl.reward import score as rewards
from upref.errors import InputError


@dataclass
class Exam:
    """What is asked, in tokens, and who judges: of responses [P][k] the verdicts, bool
    [P, k], and the votes [P, k].
    """

    prompts: list[list[int]]
    length: int  # tokens of a response, at most
    judge: Callable
    name: str
    task: tasks.Task | None = None  # of the miniature; `problems` are its rows
    problems: torch.Tensor | None = None


def make(args, words) -> Exam:
    """Raises InputError on what is no number of problems and no file of them."""
    return (
        mini_exam(args, words)
        if args.problems.lstrip("-").isdigit()
        else text_exam(args, words)
    )


def mini_exam(args, words) -> Exam:
    vocabulary = tuple(words.convert_ids_to_tokens(range(len(words))))
    name = args.task or next(
        (t for t in tasks.TASKS if tasks.get(t).words == vocabulary), None
    )
    if name is None:
        raise InputError(
            f"{args.folder} has none of the miniature's vocabularies: give --problems FILE.jsonl."
        )
    if int(args.problems) < 1:
        raise InputError(
            f"--problems must be at least 1, or a file, got {args.problems}."
        )
    task = tasks.get(name)
    problems = task.problems(args.set or "test", int(args.problems), seed=0)

    def judge(responses):
        tokens = torch.full((len(problems) * args.k, task.response_length), tasks.PAD)
        for row, said in zip(
            tokens, (r for of_one in responses for r in of_one), strict=True
        ):
            row[: len(said)] = torch.tensor(said)
        verdict = task.verify(problems.repeat_interleave(args.k, 0), tokens)
        return verdict.reward.bool().view(-1, args.k), verdict.answer.view(-1, args.k)

    title = f"{name} {args.set or 'test'}"
    return Exam(
        task.prompts(problems).tolist(),
        task.response_length,
        judge,
        title,
        task,
        problems,
    )


def text_exam(args, words) -> Exam:
    if args.task or args.set:
        raise InputError(
            "--task and --set choose problems of the miniature: leave them out with a JSONL file."
        )
    try:
        rows = [
            json.loads(line)
            for line in Path(args.problems).read_text(encoding="utf-8").splitlines()
            if line
        ]
        asked, truths = [r["prompt"] for r in rows], [str(r["answer"]) for r in rows]
        as_ids = lambda p: words.apply_chat_template(
            p, add_generation_prompt=True, tokenize=False
        )
        prompts = [
            words(p)["input_ids"]
            if isinstance(p, str)
            else words(as_ids(p), add_special_tokens=False)["input_ids"]
            for p in asked
        ]
    except FileNotFoundError as e:
        raise InputError(
            f"--problems {args.problems} is neither a number nor a file."
        ) from e
    except Exception as e:  # a chat template can raise anything
        raise InputError(
            f"{args.problems} is not lines of prompt and answer that this tokenizer reads: {str(e)[:200]!r}."
        ) from e
    if wrong := {str(r.get("protocol", "boxed")) for r in rows} - set(
        rewards.PROTOCOLS
    ):
        raise InputError(
            f"{args.problems}: there is no protocol named {min(wrong)}: {', '.join(rewards.PROTOCOLS)}."
        )
    if not all(prompts) or not prompts:
        raise InputError(
            f"{args.problems} has no problems, or one with an empty prompt."
        )

    def judge(responses):
        seen: dict[str, bool]
        correct, votes = (
            np.zeros((len(rows), args.k), bool),
            np.full((len(rows), args.k), None, object),
        )
        for p, said in enumerate(responses):
            # equal votes share a verdict, also where the grader was late once
            seen = {}
            for i, text in enumerate(
                words.batch_decode(said, skip_special_tokens=True)
            ):
                score = rewards.compute_score(args.problems, text, truths[p], rows[p])
                correct[p, i] = seen.setdefault(score["pred"], bool(score["acc"]))
                votes[p, i] = None if score["pred"] == rewards.NONE else score["pred"]
        return correct, votes

    return Exam(prompts, args.max_tokens, judge, Path(args.problems).name)
