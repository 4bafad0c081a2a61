# SPDX-License-Identifier: Apache-2.0
"""Verdicts follow from evidence: what is missing, fails or contradicts itself turns a
claim red.
"""

import functools
import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from docs import make, record
from paper.__main__ import main
from paper.claims import (
    RED,
    VERDICTS,
    Claim,
    Outcome,
    as_computed,
    evidence,
    judge,
    last,
    page,
    raw,
    read,
    saved,
    words,
)
from repro.mini.experiment import plan, standing
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
CLAIMS = read()
TEX = evidence.paper()
FAKE = Claim("fake", "Sec. 3.1", "w", "s")


@functools.cache
def experiments():
    """Return the names of what the records of both experiments answer."""
    found = set()
    for experiment in map(plan.load, ("stale", "controls")):
        found |= set(standing.of_plan(experiment))
    return found


@functools.cache
def kept():
    """How every registered claim stands, by PLAN/CLAIM."""
    return standing.everything()


def bounds_alone(key):
    """Of EXPERIMENT/CLAIM; no effect of an interval is of bounds alone."""
    return key in kept() and kept()[key]["bounds_alone"]


# ---- the records ---------------------------------------------------------------------
def test_every_pointer_leads_to_something():
    """Cheap, so that a renamed test or derivation is seen without running any."""
    derivations = {p.stem for p in (ROOT / "derivations").glob("*.py")}
    exact = record.rows(ROOT / "repro/exact/results/results.json")
    registered = "".join(
        p.read_text(encoding="utf-8")
        for p in (ROOT / "repro/mini").rglob("experiments/*.toml")
    )
    for c in CLAIMS:
        assert c.pointers, c.id
        for kind, pointer in c.pointers:
            name, _, more = pointer.partition("/")
            match kind:
                case "derivations":
                    leads = pointer in derivations
                case "tests":
                    leads = evidence.has_test(ROOT, pointer)
                case "exact":
                    found = [finding["claim"] for finding in exact[name]["findings"]]
                    leads = sum(claim.startswith(more) for claim in found) == 1
                case "mini":
                    leads = pointer in experiments() or f'id = "{more}"' in registered
                case _:  # a search of the paper: the pattern is one
                    leads = re.compile(pointer)
            assert leads, (c.id, pointer)


def test_every_registered_claim_is_evidence_or_says_why_not():
    """Of all experiments: what is left out of every record would bend the verdicts."""
    registered = {
        f"{name}/{claim['id']}"
        for name in plan.paths()
        for claim in plan.load(name).claims
    }
    registered |= experiments()
    used, exceptions = {x for c in CLAIMS for x in c.mini}, raw()["exceptions"]
    excused = {
        x
        for x in registered
        if x in exceptions or f"{x.partition('/')[0]}/*" in exceptions
    }
    assert registered - used - excused == set()
    assert not used & excused and all(exceptions.values())
    for key in exceptions:
        assert key in registered or (
            key.endswith("/*") and any(x.startswith(key[:-1]) for x in registered)
        ), key


def test_the_page_says_how_little_the_search_for_rates_was():
    """Find on the page the count that the report of the second round has."""
    report = (ROOT / "repro/mini/round2/results/report.md").read_text(encoding="utf-8")
    count = re.search(r"lowest rate was the best of (\d+ of \d+)", report)
    page_text = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    assert count and f"the best for {count[1]} methods" in page_text


def test_a_detail_that_is_looked_for_has_no_other_evidence():
    for c in CLAIMS:
        if c.absent:
            assert {kind for kind, _ in c.pointers} == {"absent"} and not c.ours, c.id


def test_our_questions_are_no_statements_of_the_paper():
    ours = [c for c in CLAIMS if c.ours]
    assert (
        ours
        and not any(c.quote for c in ours)
        and all(c.quote for c in CLAIMS if not c.ours)
    )


def test_two_readers_agree_on_every_verdict_against_a_statement():
    against = [
        j.claim
        for j in as_computed()
        if j.verdict in (words.FALSE, words.CONTRADICTED, words.EXCLUDED)
    ]
    assert (
        len(against) > 5
        and [c.id for c in against if not c.second.startswith("agrees")] == []
    )


def test_no_error_of_the_paper_is_counted_twice():
    """Every counterexample of a verdict "false as written" has tests of its own."""
    false = [j.claim for j in as_computed() if j.verdict == "false as written"]
    tests = [t for c in false for t in c.tests]
    assert len(tests) == len(set(tests)) and len({c.quote for c in false}) == len(false)


@pytest.mark.skipif(TEX is None, reason="the paper's LaTeX is not here")
@pytest.mark.parametrize("c", CLAIMS, ids=lambda c: c.id)
def test_the_paper_says_so_there(c):
    assert not [o.text for o in evidence.in_the_paper(c, TEX) if "failed" in o.finds]


@pytest.mark.skipif(TEX is None, reason="the paper's LaTeX is not here")
def test_the_page_names_the_text_that_was_read():
    file = next(
        p
        for p in (Path(os.environ.get("UPREF_PAPER", "")), *evidence.PLACES)
        if p.is_file()
    )
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert f"(SHA-256 {digest[:12]}...)" in (ROOT / "docs/claims.md").read_text(
        encoding="utf-8"
    )


def test_there_are_sixty_at_least_and_every_section_has_some():
    """Every section of the paper has a claim, and each computed verdict is one of
    VERDICTS.
    """
    assert len(CLAIMS) >= 60
    assert {c.section for c in CLAIMS} >= {
        "2",
        "3.1",
        "3.2",
        "3.3",
        "4.1",
        "4.2",
        "5.1",
        "5.2",
        "5.3",
        "5.4",
        "5.5",
        "A",
        "B",
        "C",
    }
    assert {j.verdict for j in as_computed()} <= set(VERDICTS)


def test_the_last_verdicts_are_those_of_these_records():
    """computed.json is not edited: each verdict is what `judge` makes of the outcomes
    kept beside it.
    """
    for j in as_computed():
        assert j, f"{j.claim.id}: {j.why} (python -m paper claims --run --save)"
        again = judge(j.claim, list(j.outcomes), j.verdict)
        assert (again.verdict, again.why) == (j.verdict, j.why), j.claim.id
    assert sorted(last()) == sorted(c.id for c in CLAIMS)


@pytest.mark.slow
def test_the_experiments_still_say_so():
    """Those claims that rest on committed results alone, judged again; derivations and
    tests run as tests anyway.
    """
    alone = [c for c in CLAIMS if {kind for kind, _ in c.pointers} <= {"mini", "exact"}]
    before = {j.claim.id: j.verdict for j in as_computed()}
    now = {j.claim.id: j.verdict for j in evidence.run(alone, before)}
    assert len(now) > 20 and now == {i: before[i] for i in now}, (
        "python -m paper claims --run --save"
    )


def test_a_verdict_says_what_it_rests_on():
    """Find, for each verdict as computed, an outcome that bears it."""
    for j in as_computed():
        if j.verdict == "contradicted":
            assert any("contradicted" in o.finds for o in j.outcomes), j.claim.id
        if j.verdict == "not seen here":
            assert any("not seen" in o.finds for o in j.outcomes), j.claim.id
        if j.verdict in ("undecided", "excluded"):
            assert any("seed" in o.text for o in j.outcomes), j.claim.id
        if j.verdict == "false as written":
            assert any(
                "found" in o.text for o in j.outcomes if "counterexample" in o.finds
            ), j.claim.id
        assert not any("by the paper" in o.text for o in j.outcomes), j.claim.id


# ---- one word from what is found -----------------------------------------------------
@pytest.mark.parametrize(
    ("finds", "condition", "verdict"),
    [
        (["proof"], "", "proved"),
        (["identity"], "", "holds numerically"),
        (["identity", "proof"], "", "proved"),
        (["counterexample"], "", "false as written"),
        (["reproduced", "undecided"], "", "reproduced"),
        (["identity", "undecided"], "", "undecided"),
        (["contradicted", "undecided"], "", "contradicted"),
        (["reproduced", "excluded", "undecided"], "x < 1", "holds under a condition"),
        # one experiment shows it, another excludes its size
        (["reproduced", "excluded"], "", RED),
        (["identity", "excluded"], "", "excluded"),
        (["excluded"], "x < 1", RED),
        (["excluded", "undecided"], "", "undecided"),
        (["excluded", "not testable"], "", "excluded"),
        (["not testable"], "", "not testable"),
        (["unspecified"], "", "unspecified"),
        (["proof", "counterexample"], "x < 1", "holds under a condition"),
        (["proof", "counterexample"], "", RED),
        (["reproduced", "contradicted"], "", RED),
        (["proof"], "x < 1", RED),  # nothing shows that the condition is needed
        (["counterexample"], "x < 1", RED),  # nothing shows that it is enough
        (["unspecified", "proof"], "", RED),
        (["proof", "failed"], "", RED),
        ([], "", RED),
    ],
)
def test_judge(finds, condition, verdict):
    outcomes = [Outcome("tests", f, (f,), f) for f in finds]
    assert judge(replace(FAKE, condition=condition), outcomes).verdict == verdict


def test_an_experiment_with_searched_rates_decides_alone():
    """Find that an outcome that decides overrules other experiments, but no proof and
    no failed one.
    """
    own = [Outcome("mini", f"stale/{k}", ("excluded",), decides=True) for k in "ab"]
    beside = [
        Outcome("mini", "dose_low/a", ("reproduced",)),
        Outcome("mini", "dose_high/a", ("contradicted",)),
        Outcome("tests", "not registered", ("undecided",)),
    ]
    words = Outcome("tests", "as printed", ("identity",))
    assert judge(FAKE, [*beside, words, *own]).verdict == "excluded"
    assert judge(FAKE, [*beside, words]).verdict == RED  # for, against, no condition
    proof = Outcome("derivations", "x", ("counterexample",))
    shown = Outcome("mini", "stale/c", ("reproduced",), decides=True)
    assert judge(FAKE, [proof, shown]).verdict == RED
    failed = Outcome("mini", "dose_low/a", ("failed",))
    assert judge(FAKE, [failed, shown]).verdict == RED


def test_what_cannot_run_leaves_the_last_verdict_standing():
    outcomes = [Outcome("absent", "x", ("not run",), "no paper")]
    assert judge(FAKE, outcomes, "unspecified").verdict == "unspecified"
    assert not judge(FAKE, outcomes) and not judge(
        FAKE, [*outcomes, Outcome("tests", "t", ("failed",))], "proved"
    )


# ---- evidence that is wrong ----------------------------------------------------------
@pytest.fixture
def checkout(tmp_path):
    """Make a folder with two derivations and a file of tests, right and wrong ones;
    return it.
    """
    (tmp_path / "derivations").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "derivations/right.py").write_text('"""It is so.\n\nClaim."""')
    (tmp_path / "derivations/wrong.py").write_text("assert 1 == 2, 'it is not so'")
    (tmp_path / "tests/test_fake.py").write_text(
        "import pytest\n"
        "def test_right(record_property): record_property('counterexample', 'the reading requires 1, found 2')\n"
        "def test_silent(): pass\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_wrong(x): assert x == 1, 'two is not one'\n"
        "def test_away(): pytest.skip('no verl')\n"
    )
    return tmp_path


def test_what_a_library_prints_does_not_hide_the_experiments(checkout):
    engine = checkout / "repro/mini/experiment"
    engine.mkdir(parents=True)
    for package in (engine, *engine.parents[:2]):  # else this checkout's comes first
        (package / "__init__.py").touch()
    (engine / "__main__.py").write_text("print('[ERROR] of a library'); print('{}')")
    found = evidence.mini(["up-positive/entropy"], checkout)
    assert [o.text for o in found.values()] == ["no experiment registers it"]


def test_a_claim_is_as_red_as_its_evidence(checkout):
    """Claims that point to derivations and tests of a checkout made for this: some
    hold, some fail, some do not exist.
    """
    pointers = {
        "proved": {"derivations": ("right",)},
        "false as written": {"tests": ("tests/test_fake.py::test_right",)},
        "holds numerically": {"tests": ("tests/test_fake.py::test_silent",)},
        "it is not so": {"derivations": ("right", "wrong")},
        "no such derivation": {"derivations": ("gone",)},
        "two is not one": {
            "tests": (
                "tests/test_fake.py::test_silent",
                "tests/test_fake.py::test_wrong",
            )
        },
        "there is no such test": {"tests": ("tests/test_fake.py::test_gone",)},
        "no verl": {"tests": ("tests/test_fake.py::test_away",)},
        "no evidence": {},
    }
    claims = [
        replace(FAKE, id=name, quote="REINFORCE", **p) for name, p in pointers.items()
    ]
    found = {j.claim.id: j for j in evidence.run(claims, {}, root=checkout)}
    for name, j in found.items():
        assert (
            j.verdict == name
            if name in VERDICTS
            else (j.verdict == RED and name in j.why)
        ), (name, j.verdict, j.why)


def test_experiments_speak_by_their_own_rule():
    """The word that a rule gave is the verdict. A contradiction by bounds alone is not
    seen, and without enough seeds nothing is decided.
    """
    base = {
        "shown": "×2",
        "seeds": 5,
        "of": 5,
        "why": "",
        "limit": "",
        "needed": None,
        "bounds_alone": False,
    }

    def word_of(verdict, **k):
        return evidence.mini_outcome(
            "x", base | {"word": verdict, "verdict": verdict} | k
        )

    assert word_of("reproduced").finds == ("reproduced",) and word_of(
        "contradicted"
    ).finds == ("contradicted",)
    assert word_of("contradicted", bounds_alone=True).finds == ("not seen",)
    assert word_of("excluded", limit="excluded above +1").text.startswith(
        "excluded above +1"
    )
    assert word_of("not testable", why="no gate").finds == ("not testable",)
    few = word_of("not finished", seeds=2, of=17, needed=16)
    assert (
        few.finds == ("undecided",)
        and "2 of 17 seeds: it would take 16 seeds" in few.text
    )
    enough = word_of("undecided", seeds=17, of=17, needed=12)
    assert (
        enough.finds == ("undecided",)
        and "17 of 17 seeds: the power was there" in enough.text
    )
    assert evidence.mini_outcome("gone", None).finds == ("failed",)
    part = evidence.exact_outcome(
        "x", {"verdict": "holds in part", "because": "at large doses"}
    )
    assert (
        part.finds == ("reproduced", "contradicted")
        and part.condition == "at large doses"
    )


def test_contradicted_needs_an_opposite_effect():
    """A difference of two methods on the other side of none; not a bound on one method,
    nor a size not reached.
    """
    alone = {
        "family/entropy_rises": True,
        "family/asymmetric_do_not_collapse": True,
        "dose_middle/no_upper_clip_explodes": True,
        "self_anchor/clip_kl": False,
        "family_tuned/above_dapo": False,
        "universality/aspo_avg": False,
        "stale/best_dapo_4": False,
    }
    assert {key: bounds_alone(key) for key in alone} == alone
    of_the_paper = {j.claim.id: j.verdict for j in as_computed() if not j.claim.ours}
    assert "contradicted" not in of_the_paper.values()
    soft = {
        "no-upper-clip-explodes",
        "no-upper-clip-is-insufficient",
        "up-grpo-entropy-rises",
        "aspo-keeps-its-entropy",
    }
    assert {
        i for i, verdict in of_the_paper.items() if verdict == "not seen here"
    } == soft
    (ours,) = (j.claim for j in as_computed() if j.claim.id == "surpasses-all")
    assert ours.ours and not ours.quote


def test_the_paper_is_searched_as_it_prints():
    """A quotation must be in the section that the claim names, and the words that it
    says are absent must be; comments of the LaTeX are told apart.
    """
    tex = r"\section{A} \section{B} \subsection{C} words here \beginappendix \section{D} words here"
    assert evidence.sections_of("words here", tex) == ["2.1", "A"]
    c = replace(FAKE, place="Sec. 2.1", quote="words here", absent=("dual",))
    assert [o.finds for o in evidence.in_the_paper(c, (tex, ""))] == [("unspecified",)]
    assert [o.finds for o in evidence.in_the_paper(c, (tex + "Dual", ""))] == [
        ("failed",)
    ]
    assert next(
        iter(evidence.in_the_paper(replace(c, place="App. B"), (tex, "")))
    ).finds == ("failed",)
    told = [
        o.text
        for comments in ("", "% dual clip")
        for o in evidence.in_the_paper(c, (tex, comments))
    ]
    assert "nor have" in told[0] and "commented-out" in told[1]


def test_the_paper_is_read_without_its_comments(tmp_path, monkeypatch):
    file = tmp_path / "p.tex"
    file.write_text("50\\% of\n it % hidden\nis")
    monkeypatch.setenv("UPREF_PAPER", str(file))
    assert evidence.paper() == ("50\\% of it is", "% hidden")
    monkeypatch.setenv("UPREF_PAPER", str(tmp_path / "none"))
    with pytest.raises(InputError, match="cannot be read"):
        evidence.paper()


# ---- the command and the pages -------------------------------------------------------
def test_the_command(capsys):
    assert main(["claims"]) == 0
    listed = capsys.readouterr().out
    details = [c for c in CLAIMS if c.absent]
    stated = [c for c in CLAIMS if not c.ours and not c.absent]
    assert listed.startswith(f"Of {len(stated)} statements of the paper, ")
    assert f". Of {len(details)} details that were looked for in its text, " in listed
    assert all(f"[{c.id}]" in listed for c in CLAIMS)
    assert main(["claims", "--section", "5.2", "--verdict", "excl", "--json"]) == 0
    some = json.loads(capsys.readouterr().out)["claims"]
    assert some and {(c["section"], c["verdict"]) for c in some} == {
        ("5.2", "excluded")
    }
    assert (
        main(["claims", "--section", "3", "-v"]) == 0
        and "proof" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "argv", [["--section", "9"], ["--verdict", "maybe"], ["--save"]]
)
def test_bad_input_is_one_sentence(argv, capsys):
    assert main(["claims", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_right_comes_first():
    """In a section; and the sections in the paper's order; then our questions."""
    shown = [
        (j.claim.ours, j.claim.section[0], page.ORDER.index(j.verdict))
        for j in page.right_first(as_computed())
    ]
    assert shown == sorted(shown) and len(shown) == len(CLAIMS)


def test_a_rerun_says_what_it_needs(tmp_path):
    assert as_computed() and page.made(last()).startswith("Computed on 20")
    with pytest.raises(InputError, match="is no checkout"):
        evidence.run(CLAIMS, {}, root=tmp_path)


def test_a_red_claim_is_exit_status_1(monkeypatch, capsys):
    """A record that has changed since its verdict was computed has none."""
    monkeypatch.setattr(
        "paper.claims.read",
        lambda: [replace(CLAIMS[0], says="something else"), *CLAIMS[1:]],
    )
    assert main(["claims"]) == 1 and "1 is red" in capsys.readouterr().out


def test_the_words_are_explained_where_they_are_used():
    assert set(page.ORDER) == {*VERDICTS, RED}
    assert page.meanings() in (ROOT / "docs/claims.md").read_text(encoding="utf-8")


def test_what_is_saved_is_what_is_read():
    judged = as_computed()
    entries = json.loads(json.dumps(saved(judged)))
    assert (
        as_computed(CLAIMS, entries) == judged
        and page.made({"x": {"date": "d", "commit": "c"}})
        == "Computed on d at commit c."
    )


@pytest.mark.parametrize(
    "text",
    [
        "[[claim]]\nid = 3",
        "x = ",
        '[[claim]]\nid="a"\nplace="p. 3"\nquote="w"\nsays="s"',
    ],
)
def test_a_bad_record_is_one_sentence(text):
    with pytest.raises(InputError):
        read(text)


def test_the_pages_are_fresh():
    """Find the counts and the summary on their pages, and a heading for each section."""
    for name, text in (
        ("docs/claims.md", page.counts()),
        ("README.md", page.summary()),
    ):
        assert text.rstrip() in (ROOT / name).read_text(encoding="utf-8"), (
            f"run `python -m docs.make {name}`"
        )
    made = {"paper.claims.page.markdown", "paper.claims.page.summary"}
    assert made <= make.names()
    assert all(
        f"## {heading}\n" in page.markdown() for heading in page.HEADINGS.values()
    )


def test_an_interrupt_ends_what_was_started():
    """Find that an interrupt ends the started processes, and the jobs that wait, within
    a minute.
    """
    jobs = []
    start = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        ThreadPoolExecutor(2) as pool,
        evidence._ended(jobs),
    ):
        jobs += [
            pool.submit(evidence.process, ROOT, "-c", "import time; time.sleep(600)")
            for _ in range(5)
        ]
        while len(evidence._running) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert time.monotonic() - start < 60 and not evidence._running
