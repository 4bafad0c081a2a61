# SPDX-License-Identifier: Apache-2.0
"""Rewards: right answers are right in any spelling, and no response stops a run."""

import argparse
import importlib.util
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import upref
from repro.with_verl.reward import score as rewards
from repro.with_verl.reward.score import (
    NONE,
    Grader,
    compute_score,
    last_boxed,
    math_dapo,
    tidy,
)

HAS_VERL = importlib.util.find_spec("verl") is not None
# verl scores that
PROTOCOLS = (
    rewards.PROTOCOLS if HAS_VERL else [p for p in rewards.PROTOCOLS if p != "dapo"]
)


def score(text, truth, protocol):
    return compute_score("test", text, truth, {"protocol": protocol})


@pytest.mark.parametrize(
    ("answer", "truth"),
    [(r"\frac{1}{2}", "0.5"), ("x=3", "3"), ("1,000", "1000"), (r"2\sqrt{3}", r"\sqrt{12}"), (r"90^\circ", "90"),
     (r"\dfrac{3}{4}", r"\frac{3}{4}"), ("(1, 2)", "(1,2)"), (r"\text{(B)}", "B")],
)  # fmt: skip
def test_right_in_another_spelling(answer, truth):
    assert score(rf"so \boxed{{{answer}}}.", truth, "boxed")["acc"] == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("3", "4"), (r"\frac{1}{3}", "0.5"), ("(2,1)", "(1,2)"), ("", "1")],
)
def test_wrong(answer, truth):
    assert score(rf"so \boxed{{{answer}}}.", truth, "boxed") == {
        "score": 0.0, "acc": 0.0, "pred": tidy(answer) if answer else NONE,
    }  # fmt: skip


@pytest.mark.skipif(
    not HAS_VERL, reason="`repro/venv.sh verl` installs it, on Python 3.11 and 3.12"
)
def test_the_protocols():
    """What counts as an answer and what it is worth, by each protocol."""
    assert score("Answer: 5\nno, wait\nAnswer: $34$", "34", "dapo") == {
        "score": 1.0,
        "acc": 1.0,
        "pred": "34",
    }
    # a line break before the number
    assert score("Answer:\n34", "34", "dapo")["acc"] == 1.0
    assert score("\\boxed{34}", "34", "dapo")["acc"] == 1.0  # its fallback
    assert score("I do not know", "34", "dapo") == {
        "score": -1.0,
        "acc": 0.0,
        "pred": NONE,
    }
    # the last 300 characters
    assert score("Answer: 34" + " " * 300, "34", "dapo")["acc"] == 0.0
    assert (
        score("Answer: 30+4", "34", "dapo")["acc"]
        == 0.0
        == score("Answer: 34%", "34", "dapo")["acc"]
    )
    # one vote
    assert (
        score("Answer: 042", "042", "dapo")["pred"]
        == score("Answer: 42", "042", "dapo")["pred"]
        == "42"
    )
    assert score("Answer: 34", "34", "boxed") == {
        "score": 0.0,
        "acc": 0.0,
        "pred": NONE,
    }
    assert score("\\boxed{1} or \\boxed{2}", "2", "boxed")["score"] == 1.0
    assert score("<think>hm</think> \\boxed{3}", "3", "geo3k")[
        "score"
    ] == pytest.approx(1.0)
    assert score("\\boxed{3}", "3", "geo3k")["score"] == pytest.approx(0.9)
    assert score("So: <think>hm</think> \\boxed{3}", "3", "geo3k")[
        "score"
    ] == pytest.approx(0.9)  # verl: from the start
    assert score("<think>hm</think> \\boxed{4}", "3", "geo3k")[
        "score"
    ] == pytest.approx(0.1)
    with pytest.raises(upref.InputError, match="one of dapo, boxed, geo3k"):
        score("x", "1", "boxd")


def test_nested_and_unclosed_boxes():
    assert last_boxed(r"\boxed{\frac{1}{2}} and \boxed{x") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{a{b}c}") == "a{b}c"
    assert last_boxed("no box") is None


PIECES = st.sampled_from(
    ["\\boxed{", "}", "{", "Answer: ", "\n", "$", "\\frac", "\\sqrt{", "^", "_", "(", ")", ",", "1", "0", "x", "/", "!",
     "\\left(", "\\infty", "\\begin{matrix}", "%", "=", "<think>", "</think>", "\x00", "\ud800", "无", "9" * 30]
)  # fmt: skip


@given(
    st.lists(PIECES, max_size=25).map("".join) | st.text(max_size=80),
    st.sampled_from(PROTOCOLS),
)
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_reading_junk_never_raises(monkeypatch, text, protocol):
    """All but math-verify's part, which the next test feeds."""
    monkeypatch.setattr(rewards._GRADER, "ask", lambda *_: False)
    r = score(text, "17", protocol)
    assert (
        r["acc"] in (0.0, 1.0)
        and -1 <= r["score"] <= 1
        and r["pred"]
        and isinstance(r["pred"], str)
    )
    assert rewards.equal("17", "17") and not rewards.equal("", "17")


@given(st.lists(PIECES, max_size=12).map("".join))
@settings(max_examples=40, deadline=None)
def test_comparing_junk_never_raises(text):
    r = score("\\boxed{" + text + "}", "17", "boxed")
    assert r["score"] in (0.0, 1.0)


@given(st.integers(-(10**9), 10**9))
@settings(max_examples=50, deadline=None)
def test_a_whole_number_is_itself_with_commas_too(n):
    for spelling in (str(n), f"{n:,}", f"${n}$", f" {n} ."):
        assert score(rf"\boxed{{{spelling}}}", str(n), "boxed")["score"] == 1.0
        assert score(rf"\boxed{{{spelling}}}", str(n), "boxed")["pred"] == str(n)


def program(*lines: str) -> list[str]:
    """Return the command of a Python that prints "ready", and then runs these lines."""
    return [
        sys.executable,
        "-S",
        "-c",
        "\n".join(["import os, sys, time", "print('ready', flush=True)", *lines]),
    ]


HANGS = program("for line in sys.stdin:", "    time.sleep(60)")
DIES = program("sys.stdin.readline()", "os.abort()")
LIES = program("sys.stdin.readline()", "print('what?', flush=True)")


@pytest.mark.parametrize(
    "command", [HANGS, DIES, LIES], ids=["hangs", "dies", "talks nonsense"]
)
def test_a_grader_that_fails_means_wrong_and_a_new_one(command):
    grader = Grader(command)
    assert grader.ask("1", "1.0", seconds=0.3) is False
    assert grader.process is None  # gone, and the next question starts another
    grader.command = program("for line in sys.stdin:", "    print('true', flush=True)")
    assert grader.ask("1", "1.0", seconds=30) is True
    grader.close()


def test_without_math_verify_nothing_is_scored_wrong():
    with pytest.raises(upref.InputError, match="pip install math-verify"):
        Grader([sys.executable, "-c", "import no_such_module"]).ask("1", "2", seconds=1)


def test_a_grader_that_starts_late_is_not_called_missing():
    late = Grader([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    with pytest.raises(upref.InputError, match=r"not imported within 0\.5 seconds"):
        late.ask("1", "2", seconds=1)


def test_math_verify_is_asked_for_before_a_model_is_loaded(monkeypatch, tmp_path):
    from repro.with_trl import train

    broken = Grader([sys.executable, "-c", "import no_such_module"])
    monkeypatch.setattr("repro.with_verl.reward.score._GRADER", broken)
    monkeypatch.setattr(train, "gpu", lambda: True)
    monkeypatch.setattr(train, "local", lambda model: tmp_path)
    for name in ("gsm8k_train", "gsm8k_test"):
        (tmp_path / f"{name}.parquet").touch()
    args = argparse.Namespace(model="any", data=tmp_path)
    with pytest.raises(upref.InputError, match="pip install math-verify"):
        train.check(args)


def test_a_time_limit_from_a_thread():
    """verl scores in threads, where an alarm cannot be set; 9!!!!!!!!! takes sympy for
    ever.
    """
    out = {}

    def ask():
        return out.update(right=rewards.equal("9!!!!!!!!!", "2", seconds=1.0))

    rewards.equal("1/2", "0.50", seconds=60)  # started and warm
    began = time.monotonic()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    assert out == {"right": False} and time.monotonic() - began < 25
    assert rewards.equal("0.50", r"\frac12", seconds=60)  # and works again


def test_threads_do_not_get_each_others_answers():
    results = {}
    pairs = [(f"{i}.0", str(i if i % 2 else i + 1)) for i in range(12)]

    def ask(i):
        results[i] = rewards.equal(*pairs[i], seconds=60)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == {i: bool(i % 2) for i in range(12)}


# ---- against verl, and against a person ----------------------------------------------

FORMS = (
    "{a}", "Answer: {a}", "Answer:{a}", "answer : {a}", "Answer:\n{a}", "Answer: ${a}$", "Answer: {a}.",
    "**Answer:** {a}",
    "Answer: \\boxed{{{a}}}", "\\boxed{{{a}}}", "so $\\boxed{{{a}}}$.", "Answer: 1\nAnswer: {a}", "Answer: x = {a}",
    "Answer: {a} units", "Answer: {a}\n" + "so it is. " * 40,
)  # fmt: skip
GIVEN = (
    "34", "034", "-7", "1,000", "1{,}000", "12\\%", "2+3", "5\\text{ m}", "\\frac12", "$\\sqrt2$", "(1,2)",
    "90^\\circ", "",
)  # fmt: skip
TRUTHS = ("34", "-7", "1000", "12", "5", "\\frac{1}{2}", "90")


def test_150_answers_are_scored_as_verl_scores_them():
    theirs = pytest.importorskip("verl.utils.reward_score.math_dapo").compute_score
    cases = [
        (form.format(a=a), truth) for form in FORMS for a in GIVEN for truth in TRUTHS
    ]
    right = 0
    for text, truth in cases:
        want = theirs(text, truth)
        got = score(text, truth, "dapo")
        assert (got["score"], got["acc"]) == (want["score"], float(want["acc"])), (
            text,
            truth,
        )
        right += want["acc"]
    assert len(cases) >= 150 and 50 < right < len(cases) / 2


def test_without_verl_dapos_protocol_says_so(monkeypatch):
    monkeypatch.setattr(rewards.importlib.util, "find_spec", lambda _: None)
    math_dapo.cache_clear()
    with pytest.raises(
        upref.InputError, match=r"verl's own function: `repro/venv.sh verl`"
    ):
        score("Answer: 1", "1", "dapo")
    math_dapo.cache_clear()


BOXED = [
    line.split("\t")
    for line in (Path(__file__).parent / "boxed.tsv").read_text().splitlines()[1:]
]


def test_150_boxed_answers_are_judged_as_a_person_would():
    """Or as the file's last column says, with the reason."""
    assert len(BOXED) >= 150 and sum(bool(other) for *_, other in BOXED) <= 5
    wrong = []
    for answer, truth, person, other in BOXED:
        want = other.partition(":")[0] or person
        got = rewards.equal(answer, truth, seconds=60)
        if got != (want == "1"):
            wrong.append((answer, truth, want))
        assert not other or (other[0] != person and len(other) > 5)
    assert not wrong
