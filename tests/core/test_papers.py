# SPDX-License-Identifier: Apache-2.0
"""papers.bib holds every paper the objectives name, and every hyperparameter says where
its default comes from.
"""

import re
from pathlib import Path

import pytest

import upref

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    f
    for p in ("upref", "upref_frameworks", "upref_course", "paper")
    for f in (ROOT / p).rglob("*.py")
)
KEY = re.compile(r"\b[a-z]{2,}(?:19|20)\d\d[a-z]{2,}\+*")
ENTRY = re.compile(r"^@\w+\{([^,\s]+),\n(.*?)^\}", re.M | re.S)
FIELD = re.compile(r"^  (\w+) = \{(.+?)\},?\n(?=  \w+ = |\Z)", re.M | re.S)
NAMES = upref.names()


def read_bib():
    """Return the fields of each entry of papers.bib by its key. It fails if the pattern
    misses an entry, or a key is there twice.
    """
    text = (ROOT / "upref/papers.bib").read_text("utf-8")
    entries = ENTRY.findall(text)
    assert len(entries) == text.count("\n@"), "an entry that the regex does not read"
    assert len(dict(entries)) == len(entries), "a key twice"
    return {key: dict(FIELD.findall(body)) for key, body in entries}


BIB = read_bib()


@pytest.mark.parametrize("key", BIB)
def test_every_entry_is_complete(key):
    entry = BIB[key]
    assert {"title", "author", "year", "url"} <= set(entry)
    assert re.fullmatch(r"\d{4}", entry["year"]) and entry["year"] in key
    assert entry["url"].startswith("http")
    assert ("eprint" in entry) == (entry.get("archivePrefix") == "arXiv")
    assert re.fullmatch(r"\d{4}\.\d{4,5}", entry.get("eprint", "0000.00000"))
    for text in entry.values():
        assert text.count("{") == text.count("}")
    for author in re.split(r"\s+and\s+", entry["author"]):
        assert author.startswith("{") or ", " in author, author


def test_no_preprint_appears_twice():
    ids = [entry["eprint"] for entry in BIB.values() if "eprint" in entry]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", NAMES)
def test_the_paper_of_an_objective_has_an_entry(name):
    """An objective of one's own may be in no paper."""
    paper = upref.get(name).paper
    assert not paper or paper in BIB


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_an_objective_cites_have_entries(name):
    o = upref.get(name)
    cited = " ".join(
        [
            o.eq,
            o.note,
            o.not_symbolic,
            o.on_policy_exception,
            o.batch_coupled,
            o.__doc__ or "",
            *o.defaults.values(),
        ]
    )
    assert set(KEY.findall(cited)) <= set(BIB)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_keys_in_the_sources_have_entries(path):
    assert set(KEY.findall(path.read_text("utf-8"))) <= set(BIB)


@pytest.mark.parametrize("name", NAMES)
def test_every_hyperparameter_says_where_its_default_comes_from(name):
    """The text states the value, and a word beside it. An objective that is in no paper
    may leave it out.
    """
    o = upref.get(name)
    assert set(o.defaults) <= set(o.hyperparameters)
    if o.paper:
        assert set(o.defaults) == set(o.hyperparameters)
    for key, source in o.defaults.items():
        value = o.hyperparameters[key]
        assert re.search(r"[^\W\d_]{2}", source.replace("None", "")), (
            f"{key}: {source!r} names no source"
        )
        assert stated(value) & set(re.findall(r"None|\d[\d.e-]*", source)), (
            f"{key}: {value} is not in {source!r}"
        )


def stated(value):
    """Return the ways a sentence may print a default."""
    return (
        {"None"}
        if value is None
        else {f"{value:g}", f"{value:.1f}", f"{value:.0e}".replace("e-0", "e-")}
    )


# What the papers prescribe, by hand: level, aggregation, advantage, KL.
FACTS = {
    "aspo": ("token", "token-mean", "group_norm", ""),
    "bandpo_kl": ("token", "seq-mean-token-mean", "group_norm", "k3"),
    "cispo": ("token", "group-token-mean", "group_norm", ""),
    "cfpo": ("token", "seq-mean-token-mean", "group_norm", "k3"),
    "cppo": ("custom", "seq-mean-token-sum", "group_norm", ""),
    "dapo": ("token", "group-token-mean", "group_norm", ""),
    "dppo_tv": ("token", "seq-mean-token-sum", "group_mean", ""),
    "dr_grpo": ("token", "seq-mean-token-sum", "group_mean", "k3"),
    "gmpo": ("custom", "seq-mean", "group_norm", ""),
    "gppo": ("token", "group-token-mean", "group_norm", ""),
    "grpo": ("token", "seq-mean-token-mean", "group_norm", "k3"),
    "gspo": ("sequence_mean", "seq-mean", "group_norm", ""),
    "luspo": ("sequence_mean", "seq-mean-token-sum", "group_norm", ""),
    "m2po": ("custom", "group-token-mean", "group_norm", ""),
    "tpo": ("sequence_product", "seq-mean", "group_norm", ""),
    "reinforce": ("token", "seq-mean-token-sum", "reward", ""),
    "reinforce_pp": ("token", "seq-mean-token-mean", "whiten", ""),
    "reinforce_pp_baseline": (
        "token",
        "seq-mean-token-mean",
        "group_mean_whiten",
        "k2",
    ),
    "ripo": ("token", "group-token-mean", "group_norm", ""),
    "rloo": ("token", "seq-mean-token-sum", "leave_one_out", ""),
    "sapo": ("token", "seq-mean-token-mean", "group_norm", ""),
    "topr": ("sequence_product", "seq-mean", "signed", ""),
    "up_dapo": ("token", "group-token-mean", "group_norm", ""),
    "up_grpo": ("token", "seq-mean-token-mean", "group_norm", "k3"),
    "up_gspo": ("sequence_mean", "seq-mean", "group_norm", ""),
    "vespo": ("sequence_product", "seq-mean", "group_mean", ""),
    "w_reinforce": ("token", "seq-mean-token-sum", "signed", ""),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_the_papers(name):
    o = upref.get(name)
    assert (o.level, o.agg, o.adv, o.kl) == FACTS[name]
