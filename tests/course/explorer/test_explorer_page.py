# SPDX-License-Identifier: Apache-2.0
"""The page: one file that needs nothing; its words, its state, its line of Python, its
small policy.
"""

import json
import re
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

import upref
from repro.exact.flow import path
from repro.exact.task import bandit
from upref.cli import main
from upref.registry import get
from upref.weights import plots
from upref_course import explorer
from upref_course.explorer.formulas import LETTERS, formulas, javascript, weight

FIG1 = "o=dapo~c:3;up_dapo~c:3"


def test_one_file_that_loads_nothing(tmp_path, capsys):
    """The page has no address but SVG's name, and a policy under which a browser loads
    none.
    """
    file = tmp_path / "cap.html"
    assert main(["explorer", str(file)]) == 0 and str(file) in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    assert len(text) < 400_000
    # a name, not a place
    assert set(re.findall(r"https?://[^\s\"'`)]*", text)) <= {
        "http://www.w3.org/2000/svg"
    }
    assert not re.search(
        r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:)|@import|\bfetch\(|\bimport\(",
        text,
    )
    assert "/*style*/" not in text and "/*script*/" not in text
    policy = re.search(r'Content-Security-Policy" content="(.*)"', text)
    # a browser refuses every address
    assert policy and {x.strip() for x in policy[1].split(";")} == {
        "default-src 'none'", "script-src 'unsafe-inline'", "style-src 'unsafe-inline'", "img-src data:",
        "base-uri 'none'", "form-action 'none'",
    }  # fmt: skip


def test_a_name_that_is_no_page_is_refused(tmp_path, capsys):
    assert main(["explorer", str(tmp_path / "cap.svg")]) == 2
    assert "end the name in .html" in capsys.readouterr().err


def test_all_of_it_is_javascript(js):
    program = explorer.data() + explorer.script(explorer.PURE + explorer.DRAWN)
    assert js(f"typeof new Function({json.dumps(program)})") == "function"


def test_every_file_is_in_the_page():
    files = {f.stem for f in explorer.HERE.glob("*.js")}
    assert files == {*explorer.PURE, *explorer.DRAWN}
    assert all(
        f.read_text(encoding="utf-8").count("\n") <= 250
        for f in explorer.HERE.glob("*.js")
    )


def test_the_formula_is_read_from_the_function_that_trains(js):
    """Of an objective that nobody has seen, too; change the function, and the
    JavaScript has changed.
    """
    odd = replace(
        get("reinforce"),
        name="odd",
        fn=lambda lp, lp_old, A, *, eps_low=0.2: A * (lp - lp_old) ** 2 * eps_low,
    )
    assert javascript(weight(odd)) == "2*A*h.eps_low*Math.log(r)"
    narrow = replace(
        get("dapo"),
        fn=lambda lp, lp_old, A, *, eps_low=0.2, eps_high=0.28, c=None: get("dapo").fn(
            lp, lp_old, A, eps_low=eps_low / 2, eps_high=eps_high, c=c
        ),
    )

    def w(o):
        return f"(({javascript(weight(o))}))"

    at = "((r, A, mu, h) => {})(0.85, -1, 0.1, {{eps_low: 0.2, eps_high: 0.28, c: Infinity}})"
    assert js(at.format(w(get("dapo")))) == -0.85 and js(at.format(w(narrow))) == 0


def test_every_hyperparameter_has_a_letter_and_a_sentence():
    # one that is new has its own name
    assert set(LETTERS) <= {k for r in formulas().values() for k in r["hp"]}
    for record in formulas().values():
        for key, of in record["hp"].items():
            shown = 3 if of["default"] is None else of["default"]
            assert of["low"] <= shown <= of["high"] and len(of["says"]) > 20, key


def test_regions_and_bounds_are_named(js):
    """The page's verdict on a token in each region: cut by a bound, free, or without an
    update.
    """

    def say(name, p, mu, A, hp="{}", eta=0):
        return js(f"verdict({json.dumps(name)}, {hp}, {p}, {mu}, {A}, {eta})")

    cut = say("dapo", 0.5, 0.25, 1)
    assert (
        cut["tag"] == "Upper Clip"
        and "r = 2 is above 1 + ε_high = 1.28" in cut["text"]
        and cut["cap"] == 0
    )
    free = say("up_dapo", 0.5, 0.25, 1)
    assert (
        free["tag"] == "has a gradient, no bound"
        and "nothing ends that before π_θ = 1" in free["text"]
        and free["cap"] == 0.5
    )
    low = say("dapo", 0.1, 0.25, -1)
    assert (
        low["tag"] == "Lower Clip" and "r = 0.4 is below 1 − ε_low = 0.8" in low["text"]
    )
    dual = say("dapo", 0.9, 0.25, -1, '{"c": 3}')
    assert dual["tag"] == "Dual Clip" and "r = 3.6 is above c = 3" in dual["text"]
    alive = say("dapo", 0.25, 0.25, 1, eta=9)
    assert (
        alive["tag"] == "has a gradient"
        and "until r = 1 + ε_high = 1.28, that is π_θ = 0.32" in alive["text"]
    )
    assert (
        alive["overshoots"]
        and "Cap does not bound a step" in alive["text"]
        and alive["next"] > 0.32
    )
    assert (
        "s = 1.0004" in say("gspo", 0.5002, 0.5, 1)["text"]
        and say("dapo", 0.5, 0.5, 0)["tag"] == "no update"
    )
    assert (
        "1 + δ/π_old = 1.15" in say("dppo_tv", 0.5, 0.5, 1, '{"delta": 0.075}')["text"]
    )


def test_a_step_is_gradient_ascent_on_one_logit(js):
    p, w, eta, h = 0.3, -1.4, 0.7, 1e-6
    logit = np.log(p / (1 - p))
    # d log p / d logit
    slope = (np.log(1 / (1 + np.exp(-(logit + h)))) - np.log(p)) / h
    assert js(f"stepped({p}, {w}, {eta})") == pytest.approx(
        1 / (1 + np.exp(-(logit + eta * w * slope))), rel=1e-5
    )


# ---- the small policy ----------------------------------------------------------------
@pytest.mark.parametrize("k", [0, 7])
@pytest.mark.parametrize(
    "name", ["dapo", "up_dapo", "cispo", "up(sapo)", "dppo_tv", "gspo", "is_pg"]
)
def test_the_small_policy_moves_as_the_exact_miniature_does(js, name, k):
    """Each of 40 steps from one old policy; the shares of a token's own pushes and of
    the others' add up.
    """
    mu, A, lr, n = [0.05, 0.25, 0.4, 0.3], [1.5, 0.8, -0.7, -0.2], 0.5, 40
    states = islice(
        path(
            bandit(A),
            get(name),
            bandit(A).start([mu]),
            lr=lr,
            k=k,
            G=None,
            adv="reward",
        ),
        n + 1,
    )
    expected = [s.pi[0].tolist() for s in states]
    setting = json.dumps({"mu": mu, "A": A, "lr": lr, "k": k, "n": n})
    walk = "((path, n) => [...Array(n + 1).keys()].map(t => stateAt(path, t)))"
    found = js(f"{walk}(flowPath({json.dumps(name)}, {{}}, {setting}), {n})")
    np.testing.assert_allclose([s["p"] for s in found], expected, rtol=1e-9)
    # own and others' pushes add up, but for the second order of a step
    gained = np.log(np.array(found[-1]["p"]) / mu)
    finely = json.dumps({"mu": mu, "A": A, "lr": lr / 100, "k": 100 * k, "n": 100 * n})
    last = js(f"stateAt(flowPath({json.dumps(name)}, {{}}, {finely}), {100 * n})")
    np.testing.assert_allclose(
        np.add(last["own"], last["others"]), np.log(np.array(last["p"]) / mu), atol=5e-3
    )
    assert abs(gained).max() > 0.1 or name == "gspo"


def test_a_tokens_own_push_is_what_its_rows_alone_would_do(js):
    """One small update with all rows, against one in which only those of the token have
    an advantage.
    """
    mu, A, lr = [0.1, 0.3, 0.6], [1.5, 0.8, -0.7], 1e-5

    def step(A):
        return js(
            f"stateAt(flowPath('up_dapo', {{}}, {{mu: {mu}, A: {A}, lr: {lr}, k: 0, n: 1}}), 1)"
        )

    both = step(A)
    for a in range(3):
        alone = np.log(
            step([x if b == a else 0 for b, x in enumerate(A)])["p"][a] / mu[a]
        )
        assert both["own"][a] == pytest.approx(alone, rel=1e-3)
        assert both["others"][a] == pytest.approx(
            np.log(both["p"][a] / mu[a]) - alone, rel=1e-3
        )


def test_up_comes_to_rest_at_pi_old_times_A(js):
    """Find the rest of UP's flow, another one of `is_pg`, and none where no advantage
    is positive.
    """
    mu, A = [0.5, 0.3, 0.2], [1, 2, 4]
    rest = np.multiply(mu, A) / np.dot(mu, A)
    np.testing.assert_allclose(js(f"restOfUp({mu}, {A})"), rest)

    def end_of_flow(name):
        return js(
            f"stateAt(flowPath('{name}', {{}}, {{mu: {mu}, A: {A}, lr: 0.25, k: 0, n: 3000}}), 3000).p"
        )

    np.testing.assert_allclose(end_of_flow("up_dapo"), rest, atol=1e-6)
    assert (
        abs(np.array(end_of_flow("is_pg")) - rest).max() > 0.2
    )  # which rests in a corner
    assert js("restOfUp([0.5, 0.5], [-1, 0])") is None


def test_the_clipped_token_is_named_with_who_moves_it(js):
    def say(t):
        return js(
            f"flowWords(stateAt(flowPath('dapo', {{}}, FLOW), {t}), {t}, FLOW.A, TOKENS)"
        )

    assert say(0).startswith("Every token is at π_old")
    assert "“common, right” is at" in say(40) and "they still push it up" in say(40)
    assert say(1200).startswith(
        "Every token is clipped"
    ) and "it no longer moves" in say(1200)


def test_group_norm_is_that_of_the_library(js):
    """In a group so large that frequencies are probabilities."""
    import torch

    from upref import advantages

    mu, reward = [0.2, 0.5, 0.3], [1.0, 0.0, 0.5]
    group = (
        torch.tensor(reward)
        .repeat_interleave(torch.tensor([20000, 50000, 30000]))
        .double()
    )
    A = advantages.get("group_norm")(group, torch.zeros(len(group), dtype=torch.long))
    np.testing.assert_allclose(
        js(f"groupNorm({mu}, {reward})"), A[[0, 20000, 70000]], atol=1e-3
    )


# ---- the address and the line of Python ----------------------------------------------
STATES = [
    "",
    FIG1,
    FIG1 + "&A=-1.5&mu=0.001&p=1&eta=0&link=0",
    "o=gspo~eps_low:0.0001;gmpo;up(cispo)~eps_high:2.5&A=0",
    "o=up_dapo;dppo_tv&mu=0.0002&p=0.0003&log=1",
    "o=dapo~c:2&pi=0.5,0.3,0.2&adv=1,2,4&lr=0.25&k=16&n=300&t=12",
    "o=up(w_reinforce)~lam:0;bandpo_chi2~delta:0.2~c:4",
]


@pytest.mark.parametrize("text", STATES)
def test_the_address_holds_the_whole_state(js, text):
    once = js(f"fromHash({json.dumps('#' + text)})")
    assert once["refused"] == []
    assert js(f"fromHash(toHash({json.dumps(once['state'])}))") == once
    if text:
        assert (
            js(f"toHash({json.dumps(once['state'])})").split("&")[0]
            == text.split("&")[0]
        )


WRONG = """o=nobody;dapo o=m2po;dapo o=dapo~eps_high:-1 o=dapo~c:1 o=dapo~color:3 o=__proto__;dapo o=dapo~__proto__:1
o=dapo;dapo;dapo;dapo;dapo;dapo;dapo A=x A=NaN A= A=1e999 mu=0 p=2 eta=-1 pi=1 pi=0.5,0.5 n=1e9 k=-1 t=0.5
%E0%A4%A <script> log=yes link=2"""


@pytest.mark.parametrize("text", WRONG.split())
def test_what_an_address_cannot_say_is_named_and_left_out(js, text):
    read = js(f"fromHash({json.dumps('#' + text)})")
    assert read["refused"] and 1 <= len(read["state"]["o"]) <= 6
    again = js(f"fromHash(toHash({json.dumps(read['state'])}))")
    assert again["refused"] == [] and again["state"] == read["state"]


def test_the_page_begins_without_the_dual_clip(js):
    """The paper gives it no value; the one example that has it says so."""
    assert js("start().o") == [
        {"name": "dapo", "hp": {}},
        {"name": "up_dapo", "hp": {}},
    ]
    with_c = js("PRESETS.filter(x => x[1].includes('c:'))")
    assert len(with_c) == 1 and "c = 3" in with_c[0][2]


def test_examples_are_read_whole(js):
    for hash_ in js("[...PRESETS, ...SCENES].map(x => x[1])"):
        assert js(f"fromHash({json.dumps(hash_)})")["refused"] == [], hash_


@pytest.mark.parametrize("text", STATES)
def test_the_line_of_python_draws_the_same(js, text, tmp_path, monkeypatch):
    """Run the line that the page shows for its state: every cell of the map, and Cap at
    the point, are the page's.
    """
    monkeypatch.chdir(tmp_path)
    drawn = []
    monkeypatch.setattr(
        upref,
        "cap_map",
        lambda *a, **k: drawn.append(plots.cap_map(*a, **k)) or drawn[-1],
        raising=False,
    )
    state = js(f"fromHash({json.dumps(text)}).state")
    exec(js(f"pythonLine({json.dumps(state)})"), {})
    assert (tmp_path / "cap.svg").read_text().startswith("<?xml")
    axes = drawn[0].axes[: len(state["o"])]
    for ax, o in zip(axes, state["o"], strict=True):
        cells = ax.images[0].get_array().filled(-1)
        same = js(
            f"Array.from(capSquare({json.dumps(o['name'])}, {json.dumps(o['hp'])}, {state['A']}, 400))"
        )
        np.testing.assert_allclose(cells, np.reshape(same, cells.shape), atol=1e-6)
    point = (
        js(f"pythonPoint({json.dumps(state)})")
        .removeprefix("import upref; print")
        .strip()
    )
    caps = eval(f"[{point[1:-1]}]", {"upref": upref})
    for cap, o in zip(caps, state["o"], strict=True):
        args = f"{json.dumps(o['name'])}, {json.dumps(o['hp'])}, {state['p']}, {state['mu']}, {state['A']}"
        assert js(f"capacity({args})") == pytest.approx(float(cap), abs=1e-9)
