# SPDX-License-Identifier: Apache-2.0
"""The ledger is what the installed frameworks do, no more and no less: strict expected
failures.
"""

import json
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from docs.framework_pages import SPLIT, audits as audits_of_pages, first, of_row, sign
from upref import InputError
from upref.cli import main
from upref_frameworks import audits
from upref_frameworks.audits.ledger import check_ledger
from upref_frameworks.audits.recipe import no_kl
from upref_frameworks.ledger import read, read_tables, sort_by_severity, summary

ROOT = Path(__file__).parents[2]
ENTRIES = read()
# test_frameworks.py has those with a folder of their own
HERE = [e for e in ENTRIES if e.framework in ("verl", "trl")]
BOTH = [
    pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("verl", "trl")
]


@lru_cache
def audit(name):
    pytest.importorskip(name, reason=f"`repro/venv.sh {name}` installs it")
    return audits.audit(name)


@pytest.mark.parametrize("name", BOTH)
def test_the_audit_is_the_ledger(name):
    table = audit(name)
    assert table.explained, str(table)
    assert not table.against_ledger, "\n".join(table.against_ledger)
    assert table, str(table)


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.key, marks=getattr(pytest.mark, e.framework)) for e in HERE],
)
def test_each_entry_is_still_so(entry):
    """Fails the day the deviation disappears or another token or weight shows it."""
    table = audit(entry.framework)
    assert table.version == entry.version
    for e in entry.evidence:
        row = next(
            r
            for r in table.rows
            if (r.label, r.promise, r.micro_batches)
            == (e.loss, e.held_against, e.micro_batches)
        )
        if row.kind == "loss":
            assert row.command == f"upref check {entry.framework}:{e.command}"
        spot = dict(row.reasons)[entry.reason]
        assert str(spot) == str(e) if spot.difference else not e.where


@pytest.mark.parametrize("name", BOTH)
def test_a_deviation_that_comes_changes_or_goes_is_said(name):
    """The audit agrees with the ledger; evidence that is missing, changed or gone is
    told with the entry's key.
    """
    table, mine = audit(name), [e for e in ENTRIES if e.framework == name]

    def said(entries, rows=table.rows):
        return check_ledger(rows, entries, table.version, complete=True)

    assert said(mine) == []
    (new,) = said([replace(mine[0], evidence=mine[0].evidence[1:]), *mine[1:]])
    assert "not recorded" in new and mine[0].evidence[0].loss in new
    other = replace(mine[0].evidence[0], found="0.123")
    (changed,) = said(
        [replace(mine[0], evidence=[other, *mine[0].evidence[1:]]), *mine[1:]]
    )
    assert mine[0].key in changed and "has changed" in changed
    gone = said(mine, [r for r in table.rows if r.label != mine[0].evidence[0].loss])
    assert any(f"{mine[0].key} is gone" in line for line in gone)
    assert not replace(table, against_ledger=gone), (
        "the audit's truth value must see it"
    )


def test_every_entry_has_its_paper_and_its_own_name():
    """Each entry cites a paper of papers.bib, has a key of its framework, and links
    only to known sites; no reason is there twice.
    """
    papers = (ROOT / "upref" / "papers.bib").read_text(encoding="utf-8")
    for e in ENTRIES:
        assert f"{{{e.bib}," in papers and e.paper and e.code, e.key
        sites = (
            "https://github.com/",
            "https://unsloth.ai/docs/",
            "https://inspector.pypi.io/project/unsloth",
        )
        assert not e.link or e.link.startswith(sites), e.key
        assert e.key.startswith(f"{e.framework}-".replace("_", "-"))
        assert not e.thread or e.thread.startswith("https://github.com/"), e.key
    assert (
        len({e.key for e in ENTRIES})
        == len(ENTRIES)
        == len({(e.framework, e.reason) for e in ENTRIES})
    )


def test_a_broken_ledger_is_one_sentence():
    for text in (
        "x = [",
        "[[deviation]]\nkey = 'a'",
        (ROOT / "upref_frameworks/verl/ledger.toml")
        .read_text()
        .replace('"bug"', '"?"'),
    ):
        with pytest.raises(InputError, match="ledger"):
            read("verl", text)


@pytest.mark.parametrize("name", ["verl", "trl"])
def test_command(name, capsys):
    keys = {e.key for e in ENTRIES if e.framework == name}
    assert main(["audit", name, "--ledger", "--json"]) == 0
    assert {e["key"] for e in json.loads(capsys.readouterr().out)} == keys
    assert main(["audit", name, "--ledger"]) == 0
    out = capsys.readouterr().out
    assert all(key in out for key in keys) and f"upref check {name}:" in out


def test_the_summary_counts_and_names_the_worst():
    mine = [e for e in ENTRIES if e.framework == "trinity"]
    said = summary("trinity", mine)
    assert (
        f"{sum(e.status == 'bug' for e in mine)} bugs" in said
        and sort_by_severity(mine)[0].key in said
    )
    assert (
        summary("x", []) == "x: 0 bugs, 0 surprising defaults and 0 documented choices."
    )


ROWS = [e for e in ENTRIES if e.ask]
APART = {"unsloth-cispo-cap": "its trainer sets 5.0 where epsilon_high is left alone"}


def test_a_row_of_several_frameworks_is_true_of_each():
    """Each has an entry of the same reason and status; one that is left out has a row
    or a reason of its own.
    """
    for e in ROWS:
        same = of_row(e, ENTRIES)
        assert {x.framework for x in same} == {e.framework, *e.also.split()} and len(
            same
        ) == 1 + len(e.also.split())
        assert {(x.status, x.severity) for x in same} == {(e.status, e.severity)}, e.key
    said = {x.key for e in ROWS for x in of_row(e, ENTRIES)}
    for e in ROWS:
        rest = [
            x.key
            for x in ENTRIES
            if x.reason == e.reason and x.key not in said | APART.keys()
        ]
        assert not rest, f"{e.key}: a row that speaks of {rest}, or why none does"
    assert APART.keys() <= {e.key for e in ENTRIES} - said


def test_a_row_links_all_threads_and_repairs_of_its_frameworks():
    """Or says that no thread is known; three threads and two frameworks are named here."""
    lines = first().splitlines()[2:]
    for e in ROWS:
        [line] = [
            x for x in lines if e.ask in x and e.get in x and f"[{e.framework}](" in x
        ]
        for x in of_row(e, ENTRIES):
            assert (
                x.thread in line and x.fixed in line and f"[{x.framework}](" in line
            ), x.key
            assert any(y.thread for y in of_row(e, ENTRIES)) != (
                "no thread known" in line
            ), e.key
    text = "\n".join(lines)
    assert all(
        thread in text
        for thread in ("trl/issues/3834", "verl/pull/2775", "Trinity-RFT/pull/336")
    )
    assert not any(
        "CISPO, epsilon_high left alone" in line and "unsloth" in line for line in lines
    )
    assert all(
        "right" in line
        for line in lines
        if "k1 as a loss" in line and "tunix" not in line
    )


def test_what_a_framework_says_itself_is_linked():
    """Not to the front page of its repository."""
    for e in ENTRIES:
        assert (
            not e.link
            or len(e.link.removeprefix("https://github.com/").strip("/").split("/")) > 2
        ), e.key


# pages of which the version that was audited is in no package, so that no line of it
# was looked up
NO_LINE = {
    "axolotl-gspo-clip-default",
    "trl-gspo-clip-default",
    "trl-rloo-clip",
    "trl-rloo-ratio",
}


def test_a_quoted_file_is_linked_at_its_line_of_a_fixed_version():
    """A link to the main branch shows another text one day."""
    without_line = set()
    for e in ENTRIES:
        if "/blob/" not in e.link and "inspector" not in e.link:
            continue  # no file
        assert "/blob/main/" not in e.link, e.key
        if not re.search(r"#(L|line\.)\d+", e.link):
            without_line.add(e.key)
    assert without_line == NO_LINE


def test_ok_in_the_matrix_needs_no_setting():
    """The mark of a cell is "ok" only if a loss agrees as it is shipped, KL term
    included; it tells where micro-batches differ.
    """
    for audit in audits_of_pages():
        name = audit["framework"]
        how = read_tables(name).get("recipe")
        if how is None:
            continue
        rows = [r for r in audit["rows"] if r["kind"] == "loss"]
        for o in {r["objective"] for r in rows}:
            mark = sign(audit, o)
            split = [r for r in rows if r["promise"] == o and r["micro_batches"] > 1]
            assert bool(split) == mark.endswith(SPLIT), (name, o)
            if mark.startswith("ok"):
                of_objective = [r for r in rows if r["objective"] == o]
                shipped = [r for r in of_objective if r["setting"] == "default"]
                assert not all(no_kl(how, r["mode"]) for r in shipped), (name, o)
    signs = {a["framework"]: sign(a, "gspo") for a in audits_of_pages()}
    assert signs["trinity"] == f"set{SPLIT}"
