# SPDX-License-Identifier: Apache-2.0
"""What a report may cost to read: its length is bounded, whatever a loss does, says or
is called.
"""

import json
import re
from dataclasses import asdict, replace

import pytest
import torch

import upref
from tests.support.daily import daily
from upref.identification.identification import Identification, Match
from upref.result import name_first
from upref.step.identify import StepIdentification
from upref.verify.advantages.oracles import ORACLES as OF_RESPONSES
from upref.verify.check import every
from upref.verify.faults import known
from upref.verify.finding import Cause, Example, Number
from upref.verify.render import LONGEST, describe_example
from upref.verify.report import (
    COLUMNS,
    COVERED,
    LINES_OF_SCREEN,
    MOST_CHARACTERS,
    MOST_FINDINGS,
    Report,
    fail,
    first_few,
    note,
    read_finding,
    short,
)
from upref_course.verdict import ExerciseVerdict
from upref_frameworks.audits.report import Draft
from upref_frameworks.ledger import Ledger

# characters of a report, and of all that there is to say
MOST, VERBOSE = 12_000, 20_000


def everything_wrong(
    log_prob,
    old_log_prob,
    advantages,
    mask,
    group,
    entropy,
    ref_log_prob,
    eps_low=0.2,
    **kwargs,
):
    """Return a loss that is wrong in weights, value, aggregation, padding, order, scale
    and sign; write into an argument and print.
    """
    print("x" * 10_000)
    old_log_prob += 1e-3
    rows = torch.arange(len(mask), dtype=log_prob.dtype)[:, None]
    return (
        log_prob.cumsum(1) * (advantages**2 + rows + 0.1) * (entropy + group[:, None])
    ).mean() + log_prob.sum()


def long_words(log_prob, old_log_prob, advantages, mask):
    if len(mask) > 20 or (advantages == 0).all():
        raise RuntimeError("words " * 50_000)
    return -(advantages * (log_prob - old_log_prob).exp() * mask).sum() / mask.sum()


def huge_numbers(log_prob, old_log_prob, advantages, mask):
    return (1e200 * (log_prob - old_log_prob) ** 3 * advantages).sum()


def wrong_here_and_there(log_prob, old_log_prob, advantages, mask):
    x = log_prob - old_log_prob
    return -((37 * x).sin() * advantages * mask).sum() / mask.sum()


LOSSES = [everything_wrong, huge_numbers, wrong_here_and_there]


@pytest.mark.parametrize("loss", daily(LOSSES, 4))
@pytest.mark.parametrize("name", ["dapo", "gspo", "up_grpo"])
def test_a_report_is_short(loss, name):
    report = upref.check(loss, name)
    assert (
        not report
        and len(report.text()) <= MOST
        and len(report.text(verbose=True)) <= VERBOSE
    )
    assert len(report.json()) < 4 * VERBOSE and json.loads(report.json())["ok"] is False


def test_the_words_of_an_exception_are_shortened():
    """What a loss raises on a batch is no verdict, but one sentence."""
    with pytest.raises(upref.InputError, match="raised RuntimeError: words") as raised:
        upref.check(long_words, "dapo")
    assert len(str(raised.value)) < 1000


def test_the_size_of_a_batch_too_large_to_print_is_in_words():
    one = describe_example(Example(rollouts=True, size=(1, 640)))
    several = describe_example(Example(rollouts=True, size=(128, 640)))
    assert "the smallest found has 1 response of 640 tokens, too many to print" in one
    assert "has 128 responses of up to 640 tokens, too many to print" in several


def clipped_on_both_sides(log_prob, old_log_prob, advantages, mask):
    r = (log_prob - old_log_prob).exp()
    return -(r.clamp(0.8, 1.28) * advantages)[mask].sum() / mask.sum()


def test_one_fault_is_one_finding_with_numbers():
    """A clip on both sides is one failure, whose JSON has both places, and is read back
    as the same finding.
    """
    report = upref.check(clipped_on_both_sides, "dapo")
    (finding,) = json.loads(report.json())["findings"][:1]
    place, (other,) = finding["place"], finding["also"]
    assert [f.oracle for f in report.failures] == ["gradient"]
    assert place["sign"] == 1 and place["intervals"] == [
        {"low": None, "high": pytest.approx(0.8), "symbol": "r"}
    ]
    assert other["sign"] == -1 and other["intervals"] == [
        {"low": pytest.approx(1.28), "high": None, "symbol": "r"}
    ]
    r = place["numbers"]["r"]
    assert finding["expected"] == {
        "value": pytest.approx(r),
        "unit": "weight",
        "remark": "",
    }
    assert finding["found"]["value"] == 0 and finding["example"]["found"] == [[0]]
    assert read_finding(finding) == report.failures[0]


def gspo_clipped_on_both_sides(log_prob, old_log_prob, advantages, mask):
    log_s = torch.where(mask, log_prob - old_log_prob, 0).sum(1) / mask.sum(1)
    A = torch.where(mask, advantages, 0).sum(1) / mask.sum(1)
    return -(log_s.exp().clamp(1 - 3e-4, 1 + 4e-4) * A).mean()


def test_the_ratio_of_a_response_is_printed_as_s_with_a_legend():
    skipped = [o.name for o in every() if o.name != "gradient"]
    report = upref.check(gspo_clipped_on_both_sides, "gspo", skip=skipped)
    (finding,) = report.failures
    assert finding.regime.startswith(
        "A > 0, s < 0.9997; A < 0, s > 1.0004   (here A = "
    )
    assert "r" not in finding.place.numbers and ", s = " in finding.regime
    assert "\ns is the geometric mean of r over the tokens" in report.text()
    assert json.loads(report.json())["findings"][0]["also"][0]["intervals"] == [
        {"low": pytest.approx(1.0004), "high": None, "symbol": "s"}
    ]
    dapo = upref.check(clipped_on_both_sides, "dapo", skip=skipped)
    assert "geometric" not in dapo.text()


@pytest.mark.parametrize("name", ("gspo", "vespo"))
def test_a_cause_names_the_ratio_of_its_objective(name):
    """All but a clamp of each token's own ratio."""
    objective = upref.get(name)
    hp = objective.resolve({})
    words = [
        fault.cause.words
        for fault in known("losses", objective, hp, [1.28])
        if "log-ratio-clamped" not in fault.cause.ids
    ]
    symbol = objective.ratio_symbol
    assert any(f"beyond {symbol} = 1.28" in text for text in words)
    assert not [text for text in words if re.search(r"\br\b", text)]


def test_a_report_fits_on_a_screen():
    """Failures of one cause are one paragraph; the first paragraph alone has its batch;
    what is left out is counted.
    """
    report = upref.check(everything_wrong, "dapo")
    lines = report.text().splitlines()
    assert sum(line.startswith("      b = ") for line in lines) <= 1
    assert sum(-(-max(len(line), 1) // COLUMNS) for line in lines) <= 50
    wide = fail(
        "gradient", "here", example=Example(code="\n".join(["xxx"] * LINES_OF_SCREEN))
    )
    many = [
        wide,
        *[fail("padding", f"there {i}", cause="a known one") for i in range(3)],
    ]
    text = str(replace(report, findings=many))
    assert "-v prints the smallest batch" in text and "xxx" not in text
    assert (
        text.startswith("NOT dapo: 2 failures") and text.count("so too    padding") == 2
    )


def test_notes_on_usual_habits_say_what_was_found():
    found = [
        note(
            "stop-gradient", "a gradient would flow into advantages", cause="harmless"
        ),
        note("extremes", "log r = 800", 0.0, 1.5, "it overflows"),
        note("extremes", "|log r| above 709 is refused", found="ValueError"),
    ]
    report = Report("my.py:loss", "dapo", {}, found, "", [], {}, {}, 0.0)
    assert str(report).splitlines()[1] == (
        "note  stop-gradient, extremes: a gradient would flow into advantages; "
        "weight 1.5 at log r = 800; |log r| above 709 is refused (usual; -v explains)"
    )


def test_what_was_covered_is_printed_whole():
    covered = f"{COVERED}{'batches; ' * MOST_CHARACTERS}the last"
    long = "x" * (MOST_CHARACTERS + 7)
    report = Report("loss", "dapo", {}, [], "", [long, covered], {}, {}, 0.0)
    lines = report.text(verbose=True).splitlines()
    assert covered in lines
    assert any(line.endswith("and 7 characters more") for line in lines)


def test_an_identity_is_short():
    assert len(upref.identify(wrong_here_and_there).text(verbose=True)) <= MOST


def test_estimators_have_short_reports():
    """A refusal has fewer than 1,000 characters, and a report at most VERBOSE, whatever
    an estimator raises or returns.
    """

    def estimator(rewards, group):
        raise ValueError("words " * 50_000)

    def ratio(log_prob, ref_log_prob):
        if log_prob.numel() > 30:
            raise ValueError("words " * 50_000)
        return log_prob - ref_log_prob

    for check in (
        lambda: upref.check_advantages(estimator, "group_norm"),
        lambda: upref.check_kl(ratio, "k1"),
        lambda: upref.check_advantages(
            lambda rewards, group: rewards * (1 + group), "group_norm"
        ),
    ):
        try:
            report = check()
        except upref.errors.InputError as e:
            assert len(str(e)) < 1000
        else:
            assert not report and len(report.text(verbose=True)) <= VERBOSE


def test_a_long_name_is_cut():
    def loss(log_prob, old_log_prob, advantages, mask):
        return -(log_prob * advantages * mask).sum()

    loss.__name__ = "f" * 10_000
    assert (
        len(str(upref.check(loss, "dapo"))) <= MOST
        and len(upref.identify(loss).text()) <= MOST
    )


def test_what_is_left_out_is_counted():
    """Long texts, many findings and large examples are cut, and the report says how
    much is missing.
    """
    assert (
        short("x" * (MOST_CHARACTERS + 7)).endswith("... and 7 characters more")
        and short("x" * MOST_CHARACTERS) == "x" * MOST_CHARACTERS
    )
    assert first_few(["x"] * (MOST_FINDINGS + 3), "note")[-1] == "... and 3 notes more"
    assert first_few(["x"] * (MOST_FINDINGS + 1), "note")[-1] == "... and 1 note more"
    report = upref.check(upref.get("dapo"), "dapo")
    many = [
        fail("gradient", f"here {i}", example=Example(code="b"))
        for i in range(MOST_FINDINGS + 5)
    ]
    many += [note("value", "there")] * 99
    text = str(upref.verify.report.replace(report, findings=many))
    assert (
        "... and 5 failures more" in text
        and f"... and {99 - MOST_FINDINGS} notes more" in text
    )
    assert fail(
        "gradient", "", example=Example(code="x" * (LONGEST + 1))
    ).batch.endswith("too many to print")


@pytest.mark.parametrize(
    "verdict",
    [
        Identification("f", "none", [], "", {}, "", [], [], False, 0.1),
        StepIdentification("step", 0.7, why="the gradient is 0"),
        ExerciseVerdict(1, "a title", "lesson01.py:loss", True, hint="a hint"),
        Ledger([]),
        Draft("# an issue"),
    ],
)
def test_every_verdict_prints_its_text_and_strict_json(verdict):
    assert str(verdict) == verdict.text()
    assert "\n".join(str(line) for line in verdict.lines()) == verdict.text()
    json.loads(verdict.json(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("kind", "label"),
    [("why", "likely"), ("pattern", "pattern"), ("unknown", "unknown")],
)
def test_what_is_no_cause_does_not_stand_under_likely(kind, label):
    finding = fail("gradient", "here", cause=Cause("the words", kind=kind))
    assert f"      {label:9} the words" in finding.text()
    assert finding.is_explained == (kind == "why")
    assert read_finding(json.loads(json.dumps(asdict(finding)))) == finding


def test_failures_that_nothing_explains_stay_apart():
    """A pattern is of the first failure alone, and one cause joins those that have it."""
    report = upref.check(upref.get("dapo"), "dapo")
    for kind, faults in (("why", 1), ("pattern", 2), ("unknown", 2)):
        cause = Cause("the words", kind=kind)
        both = [fail(oracle, "here", cause=cause) for oracle in ("gradient", "padding")]
        assert len(replace(report, findings=both).faults) == faults


def test_equal_numbers_are_no_difference_and_say_so():
    """The found number is measured again where a batch is made smaller; a loss with
    other answers each time may have the right one then.
    """
    text = fail("gradient", "", -1.0, -1.0).text()
    assert "found     weight -1, in another call: its answers differ" in text
    assert "another call" not in fail("gradient", "", -1.0, -1.5).text()


@pytest.mark.parametrize("digits", [7, 10, 15])
def test_two_numbers_have_digits_that_tell_them_apart_whatever_the_remark(digits):
    right = Number(1.0, "norm")
    found = Number(1 + 10.0**-digits, "norm", "a remark")
    text = fail("gradient", "", right, found).text()
    expected_line, found_line = text.splitlines()[1:]
    assert expected_line.split("norm ")[1] != found_line.split("norm ")[1].split(",")[0]


def test_a_long_list_ends_with_how_many_it_leaves_out():
    assert name_first([1, 2, 3], 2) == "1, 2 and 1 more"
    assert name_first([1, 2, 3], 3) == "1, 2, 3"


def test_a_value_that_reaches_no_argument_is_said_below_the_verdict():
    report = Report("my.py:loss", "ppo_clip", {}, [], "", [], {}, {}, 0.0)
    assert "no argument" not in report.text()
    one = replace(report, unbound={"eps": 0.1}).text().splitlines()
    assert one[1].startswith("eps=0.1 reaches no argument of the loss")
    two = replace(report, unbound={"eps": 0.1, "c": 3}).text().splitlines()
    assert two[1].startswith("eps=0.1, c=3 reach no argument of the loss")


def test_the_verdict_says_that_the_loss_has_no_such_argument():
    def loss(log_prob, old_log_prob, advantages, mask):
        return (torch.where(mask, log_prob, 0) * advantages).sum()

    report = upref.check(loss, "ppo_clip", skip=[o.name for o in every()], eps=0.1)
    assert report.unbound == {"eps": 0.1}


def test_other_objectives_are_the_same_given_the_same_advantages():
    def match(name, own):
        return Match(name, {}, "token-mean", own, True, distance=0.0, mean=0.0)

    matches = [match("ppo_clip", True), match("grpo", True), match("dr_grpo", False)]
    said = Identification("f", "match", matches, "", {}, "", [], [], False, 0.1).text()
    assert "the same     grpo, given the same advantages" in said
    assert "same weight  dr_grpo, given the same advantages" in said


def test_a_cut_batch_of_rewards_says_that_it_is_cut():
    def of_four_rows(rewards, group):
        return torch.cat([part - part.mean() for part in rewards.split(4)])

    names = [o.name for o in OF_RESPONSES if o.name != "uneven-groups"]
    report = upref.check_advantages(of_four_rows, "group_mean", skip=names)
    size = len(
        re.findall(r"group = torch.tensor\(\[(.*)\]\)", report.text())[0].split(",")
    )
    assert size < 12
    assert f"of the {size} below, which show it alone" in report.failures[0].about
