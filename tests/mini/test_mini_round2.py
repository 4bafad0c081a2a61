# SPDX-License-Identifier: Apache-2.0
"""The second round: its rule says what it says it does, and nothing ran before it was
registered.
"""

import hashlib
import json
import re
import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path

import mini_fake_train as fake
import numpy as np
import pytest
from scipy import stats

from repro.mini import provenance, standing, tasks
from repro.mini.round2 import (
    doses,
    explore,
    page,
    rates,
    reach,
    report,
    rule,
    sound,
    tables,
)
from repro.mini.study import curves, plan, registration, results, suite
from repro.mini.study.plan import Claim, Contrast, Experiment
from tests.support.daily import daily
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
HERE = plan.FOLDERS[2].parent  # what is registered
MORE = Contrast(("up_dapo", "dapo"), "avg", more_than=0.0, effect=0.02)
SAME = Contrast(("up_dapo", "dapo"), "kl_base", ratio=True, within=1.25)


def runs(tmp_path, monkeypatch, e, shift, keep=lambda arm, seed: True):
    monkeypatch.setattr(fake, "SHIFT", shift)
    for arm, seed, s in e.runs():
        if keep(arm, seed):
            fake.write(s, tmp_path / s.key)
    return {
        s.key: results.record(tmp_path / s.key)
        for arm, seed, s in e.runs()
        if keep(arm, seed)
    }


def small(*claims, seeds=6) -> Experiment:
    arms = {a: {"objective": a} for a in ("dapo", "up_dapo", "is_pg")}
    settings = {"steps": 40, "eval_every": 20}
    return Experiment(
        "small",
        "Is it so?",
        [],
        list(range(seeds)),
        arms,
        claims,
        1,
        settings=settings,
        round=2,
    )


def claim(*contrasts, id="it", **more):
    return Claim(id, "Fig. 0", "It is so.", contrasts=contrasts, **more)


# ---- the rule ------------------------------------------------------------------------
def test_p_values_are_scipys():
    d = np.random.default_rng(0).normal(0.3, 1, 9)
    found = rule.test(MORE, d)
    assert found.p_for == pytest.approx(
        min(1, 2 * stats.ttest_1samp(d, 0, alternative="greater").pvalue)
    )
    assert found.p_against == pytest.approx(
        min(1, 2 * stats.ttest_1samp(d, 0, alternative="less").pvalue)
    )
    assert (found.low, found.high) == pytest.approx(
        stats.ttest_1samp(d, 0).confidence_interval(0.95)
    )


def test_comparable_is_an_equivalence_test():
    w, rng = np.log(1.25), np.random.default_rng(0)
    near, wide, far = (
        rng.normal(m, s, 9) for m, s in ((0.02, 0.05), (0.02, 0.8), (0.6, 0.05))
    )
    lower = lambda d: stats.ttest_1samp(d, -w, alternative="greater").pvalue
    upper = lambda d: stats.ttest_1samp(d, w, alternative="less").pvalue
    assert (
        rule.test(SAME, near).p_for == pytest.approx(2 * max(lower(near), upper(near)))
        and lower(near) < 0.01
    )
    assert rule.test(SAME, wide).p_for > 0.05 and rule.test(SAME, wide).p_against > 0.05
    assert rule.test(SAME, far).p_for == 1 and rule.test(SAME, far).p_against < 1e-4


@pytest.mark.parametrize("c", [MORE, SAME], ids=["more", "same"])
def test_power_is_how_often_it_would_be_found(c):
    sd, n, level = (0.02, 12, 0.01) if c is MORE else (0.15, 12, 0.01)
    true, rng = c.effect or 0.0, np.random.default_rng(1)
    hits = np.mean(
        [rule.test(c, rng.normal(true, sd, n)).p_for < level for _ in range(1500)]
    )
    assert rule.power(c, sd, n, level) == pytest.approx(hits, abs=0.04)
    enough = rule.seeds_for(c, sd, level)
    assert (
        rule.power(c, sd, enough, level) >= 0.8 > rule.power(c, sd, enough - 1, level)
    )


def test_ranks_are_spearmans_with_an_exact_test():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=7), rng.normal(size=7)
    rho, p = rule.ranks(x, y)
    assert rho == pytest.approx(stats.spearmanr(x, y).statistic)
    exact = stats.permutation_test(
        (x,), lambda z: stats.spearmanr(z, y).statistic, permutation_type="pairings"
    )
    assert p == pytest.approx(exact.pvalue, abs=1e-9)


def test_every_word_of_the_rule(tmp_path, monkeypatch):
    both = (claim(MORE, id="paper"), claim(MORE, id="ours", source="ours"))

    def word(shift, e=None):
        e = e or small(*both)
        return [
            v.word
            for v in rule.judge(e, runs(tmp_path / str(shift), monkeypatch, e, shift))
        ]

    assert word({"up_dapo": {"avg": 0.05}}) == ["reproduced", "holds"]
    assert word({"up_dapo": {"avg": -0.05}}) == ["refuted", "refuted"]
    assert word({}) == ["undecided", "undecided"]
    two = small(claim(MORE, replace(MORE, arms=("up_dapo", "is_pg"))))
    assert word({"up_dapo": {"avg": 0.051}, "is_pg": {"avg": 0.051}}, two) == [
        "in part"
    ]
    e = small(claim(MORE))
    found = rule.judge(
        e, runs(tmp_path / "half", monkeypatch, e, {}, keep=lambda arm, seed: seed < 3)
    )[0]
    assert (found.word, found.why, found.n) == (
        "not finished",
        "3 of 6 seeds so far",
        3,
    )
    assert rule.judge(e, {})[0].word == "not finished"


def test_the_gate(tmp_path, monkeypatch):
    e = small(claim(MORE, gate="dapo"))
    records = runs(tmp_path, monkeypatch, e, {"up_dapo": {"avg": 0.05}})
    for rises, word in ((True, "reproduced"), (False, "not testable here")):
        for r in records.values():
            r["steps"]["reward"] = sorted(r["steps"]["reward"], reverse=not rises)
        assert (
            rule.judge(e, records)[0].word == report.judge(e, records)[0].word == word
        )
    few = {key: r for key, r in records.items() if key != e.run("dapo", 5).key}
    assert rule.judge(e, few)[0].word == "not testable here", (
        "as registered: the mean over the seeds that finished"
    )
    found = report.judge(e, few)[0]
    assert (found.word, found.why) == ("not finished", "5 of 6 seeds so far"), (
        "five seeds close nothing"
    )
    other = small(claim(replace(MORE, arms=("up_dapo",)), gate="dapo"))
    assert [f(other, few)[0].word for f in (rule.judge, report.judge)] == [
        "not testable here",
        "not finished",
    ]


def test_refuted_is_corrected_like_reproduced(tmp_path, monkeypatch):
    """Holm over a family of many claims: what is refuted alone, barely, is undecided
    among them.
    """
    values, nothing = (
        [-2.0, -1.6, -0.9, -0.7, -0.4, 0.1],
        [-1.0, 1.0, -2.0, 2.0, -3.0, 3.0],
    )
    assert 0.005 < rule.test(MORE, values).p_against < 0.05
    monkeypatch.setattr(
        rule,
        "measure",
        lambda c, *_: rule.test(c, values if c.at == "last" else nothing),
    )
    alone, among = (
        small(claim(MORE)),
        [claim(replace(MORE, at="area"), id=str(i)) for i in range(12)],
    )
    assert rule.judge(alone, {})[0].word == "refuted"
    assert rule.judge(small(claim(MORE), *among), {})[0].word == "undecided"
    ours = [replace(c, source="ours") for c in among]
    assert rule.judge(small(claim(MORE), *ours), {})[0].word == "refuted", (
        "two families"
    )


def test_what_can_be_0_is_not_a_ratio():
    with pytest.raises(InputError, match="compared by differences"):
        rule.measure(
            Contrast(("up_dapo", "dapo"), "reward", ratio=True, more_than=1.0), {}, []
        )
    for name in plan.names(round=2):
        assert all(
            not c.ratio or c.metric in plan.POSITIVE
            for x in plan.load(name).claims
            for c in x.contrasts
        )


# ---- the registration ----------------------------------------------------------------
def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_nothing_registered_has_changed():
    assert registration.load(HERE)["sha256"] == registration.digests(HERE)


def test_the_registration_precedes_every_run():
    commit = registration.load(HERE)["commit"]
    try:
        git("cat-file", "-e", commit)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no history here")
    held = git("ls-tree", "-r", "--name-only", commit, "repro/mini/round2").split()
    assert "repro/mini/round2/results/runs.jsonl" not in held
    for name, digest in registration.digests(HERE).items():
        show = ["git", "show", f"{commit}:repro/mini/round2/{name}"]
        content = subprocess.run(show, cwd=ROOT, capture_output=True, check=True).stdout
        assert hashlib.sha256(content).hexdigest() == digest, name
    records = results.load(results.folder_of(2))
    ran = {r["provenance"]["commit"]["id"] for r in records.values() if r["provenance"]}
    for at in ran:
        git("merge-base", "--is-ancestor", commit, at)
    assert not any(
        r["provenance"]["commit"]["dirty"] for r in records.values() if r["provenance"]
    )
    wanted = plan.queue(plan.names(round=2))
    assert set(records) <= set(wanted)
    assert all(r["settings"]["seed"] != 901 for r in records.values()), (
        "the pilot's seed is not used again"
    )


def test_seeds_are_those_of_the_power_calculation():
    text = (HERE / "power.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ][1:]
    assert {row[0] for row in rows} == {
        n for n in plan.names(round=2) if any(c.contrasts for c in plan.load(n).claims)
    }
    for row in rows:
        assert int(row[5]) == len(plan.load(row[0]).seeds)
        assert row[0] == "dose_high" or float(row[6]) >= 0.8, row
    pilot = [
        json.loads(line)["settings"]
        for line in (HERE / "pilot.jsonl").read_text().splitlines()
    ]
    assert {(s["objective"], s["seed"]) for s in pilot} == {("dapo", 901)}


# ---- the report ----------------------------------------------------------------------
def of_the_real(tmp_path, monkeypatch, seeds: int) -> dict:
    """Records of the registered doses by the fake trainer, the first seeds only."""
    monkeypatch.setattr(fake, "SHIFT", {"up_dapo": {"avg": 0.05}})
    found = {}
    for name in ("dose_low", "universality"):
        e = plan.load(name)
        for arm, seed, s in e.runs():
            if e.seeds.index(seed) < seeds and (name == "dose_low" or "cispo" in arm):
                # short, under the registered name
                s = replace(s, steps=40, eval_every=20)
                fake.write(s, tmp_path / "runs" / e.run(arm, seed).key)
                found[e.run(arm, seed).key] = results.record(
                    tmp_path / "runs" / e.run(arm, seed).key
                )
    return found


@pytest.mark.parametrize("seeds", [0, 3, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_report_is_honest_about_what_is_there(seeds, tmp_path, monkeypatch):
    records = of_the_real(tmp_path, monkeypatch, seeds)
    report.write(records, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert registration.load(HERE)["commit"] in text
    assert (
        f"**{len(records)} of {len(plan.queue(plan.names(round=2)))} runs are finished**"
        in text
    )
    assert "**reproduced**" not in text and "**undecided**" not in text, (
        "no verdict before the last seed"
    )
    assert "Not begun: " in text and "family_tuned" in text
    if seeds:
        assert (
            f"| {seeds} of 17 seeds: " in text and f"{seeds} of 17 seeds so far" in text
        )
        assert "| cispo |" in text and (tmp_path / "doses.svg").exists()
    assert screens(text) <= 3


def screens(text: str) -> float:
    """Of the page before the tables: 45 lines of 120 letters are one."""
    page, tables, _ = text.partition("## By dose")
    assert tables
    return sum(max(1, len(textwrap.wrap(line, 120))) for line in page.splitlines()) / 45


@pytest.fixture
def undrawn(monkeypatch):
    """No figure is drawn: that takes the most of the time."""
    for module in (doses, reach, explore, rates):
        monkeypatch.setattr(module, "figure", lambda _: None)
    monkeypatch.setattr(report, "figures", lambda *_: [])


def test_the_committed_report_is_what_the_records_give(tmp_path, monkeypatch):
    """The page; that its figures are drawn is enough."""
    monkeypatch.setattr(report, "save", lambda fig, path: None)
    folder = results.folder_of(2)
    report.write(results.load(folder), tmp_path)
    assert (tmp_path / "report.md").read_text() == (folder / "report.md").read_text()
    assert all(
        (folder / name).exists()
        for name in re.findall(r"\]\((\w+\.svg)\)", (folder / "report.md").read_text())
    )


def numbers(seed: int) -> dict[str, list[float]]:
    g = np.random.default_rng(seed)
    return {k: list(0.3 + 0.02 * g.random(20)) for k in plan.STEP_METRICS} | {
        "reward": list(np.linspace(0.1, 0.2, 20))
    }


def whole(kind: str) -> dict:
    """A record of every run, by numbers at random; some are odd in the way of `kind`."""
    found = {}
    for name in plan.names(round=2):
        for i, (_, seed, s) in enumerate(plan.load(name).runs()):
            g = np.random.default_rng([seed, i])
            at = lambda steps, g=g: (
                {"step": steps}
                | {m: list(g.random(len(steps))) for m in plan.EVAL_METRICS}
            )
            sets = ("test", *tasks.get(s.task).levels)
            evals = {f"{x}/t_1": at([100]) for x in sets} | {
                "test/top_p_0.7": at([0, 50, 100])
            }
            r = {
                "name": s.key,
                "status": "done",
                "settings": vars(s),
                "provenance": {},
                "evals": evals,
            }
            r |= {"steps": {"step": list(range(0, 100, 5))} | numbers(seed + i)}
            r["provenance"] = {
                "commit": {"id": "0", "dirty": False},
                "machine": {},
                "versions": {},
                "seconds": {"all": 1},
            }
            if s.eval_every:
                r["solved"] = {
                    f"{x}/t_1": np.packbits(g.random(256) < 0.5).tobytes().hex()
                    for x in sets
                }
            if kind == "stopped" and i % 5 == 0:
                r |= {
                    "status": "stopped at step 0: loss nan",
                    "steps": {},
                    "evals": {},
                    "provenance": {},
                }
            if kind == "zero":
                r["steps"] |= dict.fromkeys(plan.STEP_METRICS, [0.0] * 20)
            if kind == "nan":
                r["steps"] |= {
                    k: [float("nan")] * 19 + [0.3] for k in plan.STEP_METRICS
                }
            found[s.key] = r
    return found


@pytest.mark.parametrize("kind", daily(["nan", "zero", "plain", "stopped"], 4))
def test_the_report_of_all_runs_however_odd(kind, tmp_path, monkeypatch, undrawn):
    """When the last run is in there is a verdict on everything, and no number that is
    none; what is odd is named.
    """
    chosen = {arm: 3e-4 for arm in plan.load("family_tuned").arms}
    read = plan.read
    monkeypatch.setattr(
        plan,
        "read",
        lambda path: replace(e, rates=chosen) if (e := read(path)).rates_from else e,
    )
    records = whole(kind)
    report.write(records, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert (
        not re.search(r"\b(nan|inf)\b", text.replace("loss nan", ""))
        and screens(text) <= 3
    )
    assert "Not begun" not in text and ("Pass@1 on held-out sets" in text)
    verdicts = [
        v
        for name in plan.names(round=2)
        for v in report.judge(plan.load(name), records)
    ]
    judged = {v.word for v in verdicts}
    assert all(
        v.n == v.of
        for v in verdicts
        if v.word not in ("not finished", "not testable here")
    )
    assert "272 of 272 runs finished, by the code of 0 (" in text
    if kind == "plain":
        assert (
            "claims. At the spread seen" in text
            and "in 32 tries it is expected to solve" in text
        )
        assert (
            "not finished" not in judged
            and "Ranks of the clipped share" in text
            and "Chosen: " in text
        )
    if kind in ("stopped", "zero"):
        assert "not finished" in judged and "left out, it has no number" in text
    if kind == "nan":
        assert judged  # the one number that is there is taken


def test_the_suite_of_round_2(tmp_path, monkeypatch, capsys):
    """Records are kept as each run ends, and the time that is left is foretold from
    them.
    """
    e = replace(
        plan.load("moe"),
        seeds=[1000],
        settings=plan.load("moe").settings | {"steps": 3},
    )
    monkeypatch.setattr(plan, "load", lambda name: e)
    monkeypatch.setattr(plan, "names", lambda *_, **__: ["moe"])
    monkeypatch.setattr(suite, "TRAIN", "mini_fake_train")
    monkeypatch.setattr(report, "write", lambda records, folder: None)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'mini'}")
    monkeypatch.setattr(suite, "said", lambda work, who: work())
    asked = [
        "--round",
        "2",
        "--jobs",
        "1",
        "--out",
        str(tmp_path / "out"),
        "--results",
        str(tmp_path),
    ]
    assert suite.main(asked) == 0
    assert "They take a few minutes of one core." in capsys.readouterr().out
    assert len(results.load(tmp_path)) == 2
    long = [s for *_, s in plan.load("moe").runs()]
    # the fake says a second a run
    assert results.forecast(long, results.load(tmp_path)) == pytest.approx(2.0)


def test_the_rate_with_the_best_end_is_chosen(tmp_path, monkeypatch):
    e = plan.load("family_rates")
    wanted = {s.key: (arm, s) for arm, _, s in e.runs()}
    line = lambda arm: {"up_grpo_6e-4": 0.9, "grpo_1e-4": 0.8}.get(arm, 0.5)
    records = {
        key: {"name": key, "status": "done", "steps": {"reward": [0.1, line(arm)]}}
        for key, (arm, _) in wanted.items()
    }
    assert (
        rates.choose(records)["up_grpo"] == 6e-4
        and rates.choose(records)["grpo"] == 1e-4
    )
    assert set(rates.choose(records)) == set(plan.load("family_tuned").arms)
    records.popitem()
    assert rates.choose(records) == {}


def test_undecided_after_all_seeds_says_how_many_it_takes():
    now = standing.second(results.load(results.folder_of(2)), results.load())
    judged = {
        f"{name}/{v.claim.id}": v
        for name in doses.NAMES
        for v in report.judge(plan.load(name), results.load(results.folder_of(2)))
    }
    open_ = {name: v for name, v in judged.items() if v.word == "undecided"}
    assert open_ and all(
        now[name]["needed"] in (v.seeds_needed, None) for name, v in open_.items()
    )
    assert any(v.seeds_needed and v.seeds_needed > v.of for v in open_.values())


def test_an_effect_outside_the_interval_is_excluded():
    less, wide = (
        (-0.02, 0.02, -0.01, 0.01, 0.0, 0.004),
        np.random.default_rng(0).normal(0.01, 0.05, 6),
    )
    assert rule.test(MORE, less).high < MORE.effect < rule.test(MORE, wide).high

    def said(values, power):
        found = (rule.test(MORE, values),)
        v = rule.Verdict(
            claim(MORE), "undecided", "", found, power=power, seeds_needed=31
        )
        return tables.limit(v) if tables.verdict(v) == "excluded" else tables.lacks(v)

    assert {said(less, power)[:15] for power in (0.9, 0.5)} == {"excluded above "}
    assert [said(wide, 0.9), said(wide, 0.5)] == [
        "too close to call",
        "31 seeds for 0.8",
    ]


def test_the_interval_that_is_printed_is_the_one_that_decides():
    """Of every claim of the second round: it leaves out the bound exactly where the
    registered rule says so.
    """
    records, seen = results.load(results.folder_of(2)), set()
    for name in plan.names(round=2):
        for v in tables.decisive(report.judge(plan.load(name), records)):
            if v.word not in ("reproduced", "holds", "refuted", "undecided"):
                continue
            shown = all(
                all(
                    f.low > b if side > 0 else f.high < b
                    for side, b in rule.bounds(f.contrast)
                )
                for f in v.found
            )
            beyond = any(
                any(
                    f.high < b if side > 0 else f.low > b
                    for side, b in rule.bounds(f.contrast)
                )
                for f in v.found
            )
            seen.add(v.word)
            assert (shown, beyond) == (
                v.word in ("reproduced", "holds"),
                v.word == "refuted",
            ), (name, v.claim.id)
    assert len(seen) == 4


def test_the_weakest_contrast_is_the_one_that_refutes():
    seen = [(0.1, 0.11), (-0.01, 0.001), (-0.1, -0.11), (-0.001, -0.02)]
    found = tuple(
        rule.test(replace(MORE, arms=(f"arm{i}", "dapo")), d)
        for i, d in enumerate(seen)
    )
    assert all(f.p_for == 1 for f in found[1:])
    assert "weakest: -10.5 " in tables.effects(
        rule.Verdict(claim(MORE), "refuted", "", found)
    )


def test_problems_that_the_base_solves_rarely():
    bits = lambda *which: np.packbits(np.isin(np.arange(16), which)).tobytes().hex()
    r = {"solved": {f"{name}/t_1": bits(1, 2, 9) for name in explore.SETS}}
    tries = {name: [1000, 10, 2, 11, *[500] * 12] for name in explore.SETS}
    which = explore.rare(tries)
    assert (
        explore.solved(r, which) == 1
        and explore.solved({"solved": {k: bits(1) for k in r["solved"]}}, which) == 0.5
    )
    assert explore.expected(tries, which) == pytest.approx(
        1 - (0.99**32 + 0.998**32) / 2
    )
    committed = explore.base()
    assert {name: len(times) for name, times in committed.items()} == dict.fromkeys(
        explore.SETS, explore.PROBLEMS
    )
    assert min(t for times in committed.values() for t in times) > 0, (
        "the page says that none is never solved"
    )


def test_the_least_dose_is_that_of_the_registered_verdicts():
    of = lambda **words: {
        f"dose_{dose}": [
            rule.Verdict(claim(MORE, id=id), word, "") for id in page.BREAKS.values()
        ]
        for dose, word in words.items()
    }
    said = page.least_dose(of(low="refuted", middle="reproduced", high="reproduced"))
    assert said.count("from **middle** on (low: contradicted)") == 3
    assert "at **middle**, perhaps below (low: not finished" in page.least_dose(
        of(low="not finished", middle="holds")
    )
    said = page.least_dose(of(low="holds", middle="holds", high="not testable here"))
    assert said.count("at **low** and **middle** (high: not testable)") == 3
    none = page.least_dose(of(low="refuted", high="undecided"))
    assert none.count("at none (low: contradicted, high: undecided)") == 3
    assert (
        page.least_dose(of(low="not finished")).count(
            "at none so far (low: not finished)"
        )
        == 3
    )


def test_a_run_without_a_number_is_not_sound(tmp_path, monkeypatch):
    e = small(claim(SAME))
    records = runs(tmp_path, monkeypatch, e, {})
    odd = [e.run(arm, 0).key for arm in ("dapo", "up_dapo", "is_pg")]
    records[odd[0]]["steps"]["kl_base"] = [0.0] * 8
    records[odd[1]]["steps"] = {}
    records[odd[2]]["steps"]["kl_base"] = [0.0] * 8  # no claim asks for it
    assert sound.unsound(e, records) == set(odd[:2])
    assert [(v.word, v.n) for v in report.judge(e, records)] == [("not finished", 5)]


def test_a_run_is_of_a_changed_tree_when_code_is_changed(tmp_path, monkeypatch):
    code, record = (
        tmp_path / "repro/mini/provenance.py",
        tmp_path / "repro/mini/round2/results/runs.jsonl",
    )
    for path in (code, record):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("as committed\n")
    for words in (
        "init -q",
        "add .",
        "-c user.name=a -c user.email=a@b commit -qm one",
    ):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "__file__", str(code))
    record.write_text("one more\n")
    assert provenance.commit()["dirty"] is False
    code.write_text("changed\n")
    assert provenance.commit()["dirty"] is True


def test_no_two_arms_look_alike():
    for name in plan.names(round=2):
        if name == "family_rates":  # it has a figure of its own
            continue
        arms = list(plan.load(name).arms)
        colour, dashes = curves.looks(arms)
        assert len({(colour[a], dashes[a]) for a in arms}) == len(arms), name
    assert colour["up_grpo"] == curves.COLOURS["up_grpo"] and list(dashes.values()) == [
        "-",
        "-",
    ]
    colour, dashes = curves.looks(
        ["cispo", "up_cispo", "rloo", "rloo_clipped", "dapo", "up_dapo"]
    )
    assert (
        colour["cispo"]
        == colour["up_cispo"]
        != colour["rloo"]
        == colour["rloo_clipped"]
    )
    assert (
        dashes["up_cispo"] == dashes["rloo_clipped"] == "--"
        and dashes["up_dapo"] == dashes["cispo"] == "-"
    )
