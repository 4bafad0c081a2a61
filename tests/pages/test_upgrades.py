# SPDX-License-Identifier: Apache-2.0
"""What docs.upgrades says of two audits."""

from docs.upgrades import changes

ROW = {
    "promise": "dapo",
    "micro_batches": 1,
    "tol": 1e-7,
    "verdict": "differs, explained",
}
SPOT = {"difference": 1.0}


def audit(version, defaults, **rows):
    """Return an audit of as many rows as there are names: a cause for each, "" for
    none.
    """
    return {
        "version": version,
        "defaults": defaults,
        "rows": [
            ROW
            | {
                "label": label,
                "ok": True,
                "difference": float(bool(cause)),
                "reasons": [(cause, SPOT)] if cause else [],
            }
            for label, cause in rows.items()
        ],
    }


def test_two_equal_audits_differ_in_nothing():
    one = audit("1", {"dapo": {"beta": 0.0}}, dapo="", grpo="the clip")
    assert changes(one, one | {"version": "2"}) == []


def test_losses_defaults_and_differences_are_told():
    then = audit("1", {"a": {"beta": 0.0}, "b": {"beta": 0.0, "c": 3}}, a="", b="")
    now = audit("2", {"b": {"beta": 0.1, "e": None}, "d": {}}, a="the clip", b="", d="")
    assert changes(then, now) == [
        "the loss `a` is gone",
        "the loss `d` is new",
        "the default of `beta` is 0.1, was 0.0 (`b`)",
        "the setting `c` is gone (`b`)",
        "the setting `e` is new, its default is None (`b`)",
        "`a` against dapo: the clip; was: agrees",
        "`d` against dapo: agrees; was: not compared",
    ]


def test_micro_batches_without_a_row_are_as_one_batch():
    then = audit("1", {}, a="the clip")
    now = audit("2", {}, a="the clip")
    now["rows"].append(
        now["rows"][0] | {"micro_batches": 8, "reasons": [("sum", SPOT)]}
    )
    said = "`a` in 8 micro-batches against dapo: sum; was: the clip"
    assert changes(then, now) == [said]
    assert changes(now, then) == [
        "`a` in 8 micro-batches against dapo: the clip; was: sum"
    ]


def test_what_an_audit_cannot_explain_is_no_reason():
    then = audit("1", {}, a="the clip")
    now = audit("2", {}, a="the clip")
    now["rows"][0] |= {"ok": False, "verdict": "differs, UNEXPLAINED"}
    assert changes(then, now) == [
        "`a` against dapo: differs, UNEXPLAINED; was: the clip"
    ]


def test_two_differences_without_a_cause_are_not_known_to_be_one():
    then, now = audit("1", {}, a="the clip"), audit("2", {}, a="the clip")
    unexplained = {"ok": False, "verdict": "differs, UNEXPLAINED"}
    then["rows"][0] |= unexplained | {"difference": 0.1}
    now["rows"][0] |= unexplained | {"difference": 9.0}
    assert changes(then, now) == [
        "`a` against dapo: not known: differs, UNEXPLAINED in both, by 9, was 0.1"
    ]
    assert changes(now, now) == [
        "`a` against dapo: not known: differs, UNEXPLAINED in both, by 9, was 9"
    ]


def test_the_same_cause_with_other_numbers_is_a_change():
    then, now = audit("1", {}, a="the clip"), audit("2", {}, a="the clip")
    now["rows"][0]["difference"] *= 1 + 1e-9  # rounding
    assert changes(then, now) == []
    now["rows"][0]["reasons"] = [("the clip", {"difference": 2.5})]
    assert changes(then, now) == [
        "`a` against dapo: the clip: 2.5, 1 in all; was: 1, 1 in all"
    ]
