# SPDX-License-Identifier: Apache-2.0
"""Other readers have judged every hard verdict, and the entries that two seeds draw."""

import random
import tomllib
from dataclasses import replace
from pathlib import Path

from docs import diff, record
from docs.drafts import BLAMING
from paper.claims import as_computed
from tests.conformance.known_bugs import bugs
from tests.conformance.test_adapters import HERE
from upref.conformance.results import read_expected_failures
from upref_frameworks.ledger import read

FILE = Path(__file__).parents[2] / "docs/second_reader.toml"
HARD = ("false as written", "contradicted", "not seen here", "excluded")
SOURCES = ("differences", "expected_failures", "refusals", "bugs", "claims")


def judged():
    """The record: judgments of verdicts, of drawn ones, of readings and of sources."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def came_after(date):
    """Return the keys of the entries that were read because they were new, after a day."""
    later = [r for r in judged()["reading"] if "seed" not in r and r["date"] > date]
    return {key for one in later for key in one["entries"]}


def softened():
    """Return the keys of the entries that blamed at the draws, and do not any more."""
    entries = judged()["halves"]["entries"]
    return {key for key, (word, _) in entries.items() if word == "softened"}


def draw(entries, seed, later=()):
    """Return the keys of 30 entries that blamed at the draw, without those that were not
    there then.
    """
    keys = [
        e.key
        for e in entries
        if (e.status in BLAMING or e.key in softened()) and e.key not in later
    ]
    return random.Random(seed).sample(keys, 30)


def test_every_hard_verdict_is_judged():
    record = judged()
    hard = {j.claim.id for j in as_computed() if j.verdict in HARD}
    assert hard == record["verdicts"].keys()
    parts = [record["verdicts"], record["drawn"]["verdicts"]]
    parts += [one["entries"] for one in record["reading"]]
    parts.append(record["halves"]["entries"])
    assert {word for part in parts for word, _ in part.values()} <= judged()[
        "judgments"
    ].keys()


def test_what_was_drawn_of_the_verdicts_has_no_word_that_was_judged_wrong():
    """Find today's words for the three verdicts that a reader had called softened or
    strengthened.
    """
    drawn = judged()["drawn"]
    verdicts = {j.claim.id: j.verdict for j in as_computed()}
    assert len(drawn["verdicts"]) == 25 and drawn["verdicts"].keys() <= verdicts.keys()
    today = {
        "up-is-reinforce": "holds under a condition",
        "only-the-objective-differs": "not testable",
        "w-reinforce-keeps-its-entropy": "undecided",
    }
    changed = {
        key
        for key, (word, _) in drawn["verdicts"].items()
        if word in ("softened", "strengthened")
    }
    assert changed == today.keys()
    assert {key: verdicts[key] for key in today} == today


def test_the_entries_are_those_that_the_seed_draws():
    """An entry that is gone or of another status changes the draw: then 30 are to be
    read again. One that is new is read by itself.
    """
    drawn = [one for one in judged()["reading"] if "seed" in one]
    assert [one["seed"] for one in drawn] == [48, 49]
    for one in drawn:
        later = came_after(one["date"])
        assert [*one["entries"]] == draw(read(), one["seed"], later=later)
        assert len(one["entries"]) == 30


def test_a_new_entry_changes_no_draw():
    """It is listed with its judgment, and no old entry is to be read again."""
    entries = read()
    [first] = [e for e in entries if e.key == "verl-dppo-tv-defaults"]
    new = replace(first, key="verl-new")
    more = [new, *entries]
    later = came_after("2026-11-25")
    old = draw(entries, 48, later=later)
    assert draw(more, 48, later={*later, new.key}) == old
    assert draw(more, 48, later=later) != old


def test_a_new_entry_is_read_by_two():
    blaming = {e.key: e for e in read() if e.status in BLAMING}
    new = came_after("2026-11-26")
    assert new and new <= blaming.keys()
    assert all(blaming[key].twice for key in new)
    drawn = [one["date"] for one in judged()["reading"] if "seed" in one]
    assert all(new == came_after(date) for date in drawn)


def test_what_was_false_is_gone():
    entries = {e.key: e for e in read()}
    assert "Triton one refuses" in entries["liger-luspo-token-ratio"].code
    for key in ("trinity-micro-batch-means", "trinity-micro-batch-tokens"):
        assert "sums it across micro-batches" in entries[key].code


def test_what_was_softened_blames_nobody():
    """Each entry that the reader of the ledgers changed is still there."""
    status = {e.key: e.status for e in read()}
    assert judged()["halves"]["entries"].keys() <= status.keys()
    assert softened()
    assert {status[key] for key in softened()} == {"documented choice"}


def test_each_difference_between_steps_is_read_by_two():
    """What a second reader judged is still there: differences, expected failures,
    refusals, planted bugs and claims.
    """
    sources = judged()["sources"]
    rows = record.rows(diff.FILE)
    differing = {
        one["case"]
        for pair in rows["pairs"]
        for one in pair["compared"]
        if one["quantity"]
    }
    assert sources["differences"].keys() == differing
    expected = {
        f"skyrl: {case}" for case in read_expected_failures(HERE / "skyrl_xfails.toml")
    }
    assert sources["expected_failures"].keys() <= expected
    said = tuple(why for _, why in rows["left_out"])
    for sentence in sources["refusals"]:
        assert any(why.endswith(sentence) for why in said), sentence
    planted = {f"{bug.framework}: {bug.source}" for bug in bugs()}
    assert sources["bugs"].keys() <= planted
    assert sources["claims"].keys() <= {j.claim.id for j in as_computed()}
    words = [w for kind in SOURCES for w, _ in sources[kind].values()]
    assert set(words) <= judged()["judgments"].keys()


def test_what_the_second_reader_found_false_of_bugs_is_gone():
    what = {f"{bug.framework}: {bug.source}": bug.what for bug in bugs()}
    assert "puts them back in order" in what["verl: verl-project/verl#2185"]
    assert "documented choice" in what["openrlhf: meta-pytorch/torchforge#571"]
    assert "#857 was merged" in what["openrlhf: OpenRLHF/OpenRLHF#853"]
