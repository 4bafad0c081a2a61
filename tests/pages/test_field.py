# SPDX-License-Identifier: Apache-2.0
"""The table of the field says what its records say, and blames nobody for what was not
tested.
"""

from dataclasses import replace

from docs import field, framework_pages, record, steps
from upref.conformance import cases
from upref.conformance.results import read_expected_failures
from upref_frameworks.ledger import read

AUDITS = framework_pages.audits()


def test_each_cell_has_a_status_a_version_a_date_and_a_link():
    """Every cell of the table of audits has a known status; link, version and date are
    there unless nothing was found.
    """
    known = {
        "agrees",
        "bug",
        "surprising default",
        "documented choice",
        "differs",
        "read, not run",
        field.NONE,
    }
    assert len(AUDITS) == 20
    for a in AUDITS:
        for column in field.COLUMNS:
            c = field.cell(a, column)
            assert c.status in known, (a["framework"], column, c)
            assert all((c.link, c.version, c.date)) == (c.status != field.NONE), (
                a["framework"],
                column,
                c,
            )


def test_a_version_stands_once_where_the_row_has_one():
    """Under the framework's name; in a cell only where it is another."""
    rows = {
        row.split("]")[0].split("[")[1]: row for row in field.table().splitlines()[2:]
    }
    for a in AUDITS:
        said = f"*{a['version']}, {a['date']}*"
        cells = [field.cell(a, column) for column in field.COLUMNS]
        others = {(c.version, c.date) for c in cells if c.date} - {
            (a["version"], a["date"])
        }
        row = rows[a["framework"]]
        assert row.count(said) == 1, row
        assert all(f"*{version}, {date}*" in row for version, date in others), row


def test_each_entry_stands_in_one_column():
    """The numbers of a row count each entry of the ledger that is no guard, once."""
    for a in AUDITS:
        entries = [e for e in read(a["framework"]) if e.status != "numerical"]
        columns = [field.column_of(e) for e in entries]
        assert set(columns) <= set(field.COLUMNS)
        for column in set(columns):
            assert field.audited(a, column).status != field.NONE, (
                a["framework"],
                column,
            )


def test_what_the_records_say():
    def cell(name, column):
        return field.cell(next(a for a in AUDITS if a["framework"] == name), column)

    assert (
        cell("trinity", "micro-batches").status == "bug"
        and cell("verl", "ranks").status == "agrees"
    )
    assert cell("easyr1", "KL").link == "frameworks/easyr1.json#easyr1-kl-k1"
    assert cell("art", "ranks").status == cell("trl", "ranks").status == field.NONE
    assert "on by default" in cell("trl", "sampler correction").more
    assert "none by default" in cell("verl", "sampler correction").more
    rows = record.rows(steps.HERE / "verl.json")
    ran = [r for r in rows if r["error"] is not None]
    agree = sum(not r["cause"] for r in ran)
    left_out = len(rows) - len(ran)
    more = f": {agree} of {len(ran)} settings agree, {left_out} do not run"
    assert left_out and cell("verl", "step").more == more


def test_the_suite_counts_every_case_once():
    """But those that an adapter skips, and those of several ranks, of which no list of
    known failures is.
    """
    single = [case.id for case in cases()]
    groups = [
        case
        for case in single
        for of in field.GROUPS.values()
        if case.partition("/")[0] in of
    ]
    assert sorted(groups) == sorted(single) and not any(
        case.startswith("ranks/") for case in single
    )
    counted = [
        case for column in field.COLUMNS for case in field.tried("openrlhf", column)
    ]
    skipped = set(single) - set(counted)
    assert len(counted) == len(set(counted)) and "objective/sapo" in skipped
    failing = read_expected_failures(
        field.ROOT / field.SUITE.format("verl")
    ).keys() & set(field.tried("verl", "step"))
    many = len(field.tried("verl", "step"))
    assert failing and f": {many - len(failing)} of {many} cases," in field.suite(
        "verl", "step"
    )
    assert field.suite("art", "loss") == ""


def test_what_a_framework_documents_is_a_documented_choice():
    """Though the default of others is a surprise; and a bug comes before it, unless
    less than 2 % changes.
    """
    entry = next(e for e in read("trl") if e.status == "surprising default" and e.words)
    assert field.worst([entry])[0] == "documented choice"
    assert field.worst([replace(entry, words="")])[0] == "surprising default"
    bug = replace(entry, key="x-bug", status="bug", severity="rescales")
    assert field.worst([entry, bug])[0::2] == ("bug", "x-bug")
    assert (
        field.worst([entry, replace(bug, severity="cosmetic")])[0]
        == "documented choice"
    )
    assert field.worst([replace(entry, status="numerical")]) == ("agrees", "", "")
