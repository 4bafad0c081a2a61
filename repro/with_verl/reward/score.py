# SPDX-License-Identifier: Apache-2.0
"""Is the answer right? The reward of the paper's three protocols, in the signature that
verl calls.

    dapo   verl's own math_dapo, +1 or -1                   (DAPO-Math-17k, AIME24: scores compare with everybody's)
    boxed  the last \\boxed{...} by math-verify, 1 or 0      (MATH levels 3-5 and its five benchmarks)
    geo3k  the same, 0.9, and 0.1 for the form that verl's geo3k wants,
    <think>...</think> ... \\boxed{...}

The protocol stands in extra_info["protocol"], where data/prepare.py puts it. Every
score comes with acc (0 or 1) and pred (the answer as read), which verl's mean@n, best@n
and maj@n take.

verl calls from a thread, where math-verify's own time limit, an alarm signal, cannot be
set. So another process, grader.py, compares, and is killed at the limit: an answer that
hangs or crashes it is wrong, and the run goes on.
"""

import atexit
import functools
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import IO

from repro.with_verl.place import pythonpath
from upref import InputError

SECONDS = 5.0  # for one answer
START_SECONDS = 600.0  # a busy machine imports for minutes
LONGEST = 1000  # characters: no answer of these data sets is near
TAIL = 20_000  # characters of a response that are searched
NONE = "[NONE]"  # what was answered by a response without an answer
PROTOCOLS = ("dapo", "boxed", "geo3k")
# of the whole response, as in verl's geo3k
THOUGHT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info=None, **_
) -> dict:
    """Score one response; a response cannot make it raise an error.

    Args:
        data_source: name of the data set, for messages.
        solution_str: the response.
        ground_truth: the right answer.
        extra_info: has the `protocol`; without it the protocol is boxed.

    Returns:
        score, as the protocol has it; acc, 1.0 or 0.0; and pred, the answer as read,
        NONE where there is none.

    Raises:
        InputError: there is no such protocol, which is an error of the data; or verl or
            math-verify cannot be imported.
    """
    protocol = (extra_info or {}).get("protocol", "boxed")
    if protocol not in PROTOCOLS:
        raise InputError(
            f"extra_info.protocol of {data_source} is {protocol!r}: it is one of {', '.join(PROTOCOLS)}."
        )
    text = str(solution_str)
    if protocol == "dapo":
        theirs = math_dapo().compute_score(text, str(ground_truth))
        none = theirs["pred"] in ("[INVALID]", None)
        return {
            "score": theirs["score"],
            "acc": float(theirs["acc"]),
            "pred": NONE if none else tidy(theirs["pred"]),
        }
    pred = last_boxed(text[-TAIL:])
    acc = float(pred is not None and equal(pred, str(ground_truth)))
    score = {
        "boxed": acc,
        "geo3k": 0.9 * acc + (0.1 if THOUGHT.fullmatch(text) else 0),
    }[protocol]
    return {"score": score, "acc": acc, "pred": NONE if pred is None else tidy(pred)}


@functools.cache
def math_dapo() -> ModuleType:
    """Return verl's module math_dapo, loaded from its file once: `import verl` takes
    seconds. Raise InputError where verl is not installed.
    """
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        raise InputError(
            "DAPO's protocol is scored by verl's own function: `repro/venv.sh verl` installs verl."
        )
    path = Path(verl.origin).parent / "utils" / "reward_score" / "math_dapo.py"
    spec = importlib.util.spec_from_file_location("verl_math_dapo", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} whose braces close within LONGEST
    characters, None where there is none.
    """
    at = text.rfind("\\boxed{")
    while at >= 0:
        depth, start = 0, at + len("\\boxed")
        for i in range(start, min(len(text), start + LONGEST)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start + 1 : i].strip()
        at = text.rfind("\\boxed{", 0, at)
    return None


def tidy(answer: str) -> str:
    """Return an answer in one spelling, so that majority voting counts equal ones
    together: no dollars, blanks or final stop, 1000 for 1,000 and 42 for 042, at most
    LONGEST characters; NONE where nothing is left.
    """
    for sign, plain in (("$", ""), ("\\!", ""), ("\\dfrac", "\\frac")):
        answer = answer.replace(sign, plain)
    answer = re.sub(r"\s+", "", answer).rstrip(".")
    answer = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", answer)[:LONGEST] or NONE
    if re.fullmatch(r"-?0\d*", answer) and len(answer) < 100:
        return str(int(answer))
    return answer


def equal(pred: str, truth: str, seconds: float = SECONDS) -> bool:
    """Tell whether two answers are equal, as text in one spelling or by math-verify
    within `seconds`. A blank or very long prediction is wrong.
    """
    if len(pred) > LONGEST or not pred.strip():
        return False
    return tidy(pred) == tidy(truth) or _GRADER.ask(truth, pred, seconds)


class Grader:
    """One process that compares answers, one question at a time; killed when it is
    late, and made again.
    """

    def __init__(
        self, command: list[str] | None = None, start_seconds: float = START_SECONDS
    ):
        """Start no process yet. Whatever is started later ends with this process."""
        self.start_seconds = start_seconds
        self.command = command or [
            sys.executable,
            "-m",
            "repro.with_verl.reward.grader",
        ]
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        atexit.register(self.close)

    def ask(self, truth: str, pred: str, seconds: float) -> bool:
        """Tell whether two answers are equal; False if that takes longer than `seconds`
        or the process dies. It is then started again for the next question.
        """
        with self.lock:
            try:
                if (
                    self.process is None
                    or self.process.poll() is not None
                    or self.pid != os.getpid()
                ):
                    self._start()
                return self._ask(
                    json.dumps([truth, pred]).encode() + b"\n",
                    time.monotonic() + seconds,
                )
            except InputError:
                raise
            except (OSError, ValueError):  # it died, or answered with something else
                self.close()
                return False

    def _ask(self, question: bytes, deadline: float) -> bool:
        """Write a question to the process and return its answer. False, and an end of
        the process, if it does not answer before the deadline.
        """
        self._pipes()[0].write(question)
        line = self._line(deadline)
        if line is None:
            self.close()
            return False
        return bool(json.loads(line))

    def _line(self, deadline: float) -> bytes | None:
        """Return what the process wrote up to the end of a line, which may come in
        pieces; None if it is late or dead.
        """
        line, out = b"", self._pipes()[1]
        while not line.endswith(b"\n"):
            ready, _, _ = select.select(
                [out], [], [], max(0.0, deadline - time.monotonic())
            )
            piece = os.read(out.fileno(), 100) if ready else b""
            if not piece:
                return None
            line += piece
        return line

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Return the standard input and output of the process, which must be running."""
        assert self.process and self.process.stdin and self.process.stdout
        return self.process.stdin, self.process.stdout

    def _start(self) -> None:
        """Start the process, and wait until it has imported math-verify."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": pythonpath()},
        )
        self.pid = os.getpid()
        # it imports sympy, which is not the answer's time
        deadline = time.monotonic() + self.start_seconds
        if self._line(deadline) != b"ready\n":
            is_late = time.monotonic() >= deadline
            self.close()
            raise InputError(
                f"math-verify was not imported within {self.start_seconds:g} seconds: run the same command again on "
                "a machine that is less busy."
                if is_late
                else "math-verify cannot be imported: pip install math-verify==0.9.0."
            )

    def start(self) -> None:
        """Start the process before the first answer needs it.

        Raises:
            InputError: math-verify cannot be imported.
        """
        with self.lock:
            if self.process is None or self.pid != os.getpid():
                self._start()

    def close(self) -> None:
        """Kill the process if there is one and this process started it; a fork leaves
        it alone.
        """
        process, self.process = self.process, None
        if process is not None and self.pid == os.getpid():
            process.kill()
            process.communicate()


_GRADER = Grader()


def start_grader() -> None:
    """Start the process that compares answers, before a model is loaded.

    Raises:
        InputError: math-verify cannot be imported.
    """
    _GRADER.start()
