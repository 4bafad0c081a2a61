# SPDX-License-Identifier: Apache-2.0
"""An objective's name has one meaning in a process, and no other thread reaches into a
check.
"""

import functools
import importlib
import os
import runpy
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import upref
from repro import fork
from tests.support.daily import daily
from upref import catalog, definition, description, registry
from upref.cli import main, show
from upref.description import describe
from upref.errors import InputError

HEAD = "import upref\n@upref.objective(paper='none', eq='none', level='token', agg='token-mean', adv='reward')\n"
FACTS = dict(paper="none", eq="none", level="token", agg="token-mean", adv="reward")


def lines(name, weight="A * r", qualified="{}_weight"):
    body = f"def {name}(lp, lp_old, A):\n    '''J = r A'''\n    return upref.ops.exp(lp - lp_old) * A\n"
    return f"{HEAD}{body}@{name}.with_weight\ndef {qualified.format(name)}(r, A):\n    return {weight}\n"


@pytest.fixture
def registered(monkeypatch):
    upref.names()
    monkeypatch.setattr(definition, "OBJECTIVES", dict(definition.OBJECTIVES))
    return definition.OBJECTIVES


def test_a_name_of_a_reference_is_refused(registered, tmp_path):
    right, weight = upref.get("dapo"), upref.get("dapo").closed_form
    (tmp_path / "mine.py").write_text(lines("dapo"))
    with pytest.raises(
        InputError,
        match=r"dapo is an objective of .*objectives/dapo\.py: give yours another name\.$",
    ):
        runpy.run_path(str(tmp_path / "mine.py"))
    assert upref.get("dapo") is right
    assert right.closed_form is weight


def test_it_is_refused_in_a_fresh_process(tmp_path):
    (tmp_path / "mine.py").write_text(lines("dapo"))
    done = subprocess.run(
        [*fork.executable(), "-c", "import mine"],
        cwd=tmp_path,
        env=os.environ | fork.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "InputError: dapo is an objective of" in done.stderr


def test_the_weight_of_a_reference_cannot_be_replaced(registered):
    right, weight = upref.get("dapo"), upref.get("dapo").closed_form
    again = upref.objective(**FACTS)(right.fn)
    for one in (right, right.aggregated("seq-mean-token-mean"), again):
        for other in (lambda r, A: A * r, weight):
            if (one, other) != (right, weight):
                with pytest.raises(InputError, match="dapo is an objective of"):
                    one.with_weight(other)
    assert upref.get("dapo") is right
    assert right.closed_form is weight


def test_a_function_that_wraps_a_references_is_refused(registered):
    """functools.wraps gives it the reference's name."""
    right, weight = upref.get("dapo"), upref.get("dapo").closed_form

    @functools.wraps(right.fn)
    def unclipped(lp, lp_old, A):
        return upref.ops.exp(lp - lp_old) * A

    @functools.wraps(weight)
    def unclipped_weight(r, A):
        return r * A

    for one in (upref.objective(**FACTS)(unclipped), right):
        with pytest.raises(InputError, match="dapo is an objective of"):
            one.with_weight(unclipped_weight)
    assert upref.get("dapo") is right
    assert right.closed_form is weight


def test_another_file_cannot_replace_an_objective(registered, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(lines("mine"))
    runpy.run_path(str(tmp_path / "one.py"))
    with pytest.raises(InputError, match=r"mine is an objective of .*one\.py"):
        runpy.run_path(str(tmp_path / "two.py"))


def test_two_functions_of_a_file_cannot_share_a_name(registered, tmp_path):
    body = "".join(f"    {x}\n" for x in lines("mine").splitlines()[1:])
    (tmp_path / "one.py").write_text(
        f"import upref\ndef first():\n{body}def second():\n{body}first()\nsecond()\n"
    )
    with pytest.raises(InputError, match="mine is an objective of"):
        runpy.run_path(str(tmp_path / "one.py"))


def test_a_file_that_is_read_again_replaces_its_own(registered, tmp_path, monkeypatch):
    """Reload a module and run it as a script, each time with another formula of one
    name.
    """
    file = tmp_path / "reread.py"
    file.write_text(lines("mine"))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("reread")
    try:
        file.write_text(lines("mine", "2 * A * r  # another length"))
        importlib.reload(module)
        assert upref.get("mine").weight(3.0, 1.0) == 6
        file.write_text(lines("mine", "3 * A * r"))
        # the file as a script, beside the import of it
        runpy.run_path(str(file), run_name="__main__")
        assert upref.get("mine").weight(3.0, 1.0) == 9
    finally:
        del sys.modules["reread"]


def test_a_cell_that_runs_again_replaces_its_own(registered):
    """All cells of a notebook share one namespace, which has no file."""
    cells = {"__name__": "__main__"}
    first, _, second = lines("mine").partition("@mine.with_weight")

    def run(text, at):
        return exec(compile(text, f"<ipython-input-{at}>", "exec"), cells)

    run(first, 1)
    run("@mine.with_weight" + second, 2)
    run(
        "@mine.with_weight"
        + second.replace("mine_weight", "weight").replace("A * r", "4 * A * r"),
        3,
    )
    assert upref.get("mine").weight(3.0, 1.0) == 12
    run(first, 4)
    run("@mine.with_weight" + second, 5)
    assert upref.get("mine").weight(3.0, 1.0) == 3


def test_a_weight_that_cannot_be_one_leaves_the_name_free(registered):
    def mine(lp, lp_old, A):
        return lp * A

    mine = upref.objective(**FACTS)(mine)
    with pytest.raises(InputError, match="closed_form must be a function"):
        mine.with_weight(3)
    assert "mine" not in registered
    assert mine.with_weight(weight := lambda r, A: A) is weight
    assert upref.get("mine") is mine


@pytest.mark.parametrize(
    "name", daily(["cispo", "cispo_verl", "vespo", "dppo_tv_verl"], 4)
)
def test_a_check_beside_another_thread(name):
    """The other thread takes the stop-gradients of the same functions, as a trainer
    does beside a check.
    """
    lp = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    adv, mask = (
        torch.tensor([[1.0], [-1.0]]).expand(2, 2),
        torch.ones(2, 2, dtype=torch.bool),
    )
    b = upref.Rollouts(lp, lp - 0.1, adv, mask)
    raised, done = [], threading.Event()
    o = upref.get(name)

    def beside():
        """Call the objective until the check is done, and keep what it raises."""
        while not done.is_set():
            try:
                o(b)
            except Exception as e:
                raised.append(e)

    other = threading.Thread(target=beside)
    other.start()
    try:
        report = upref.check(o, name)
    finally:
        done.set()
        other.join()
    assert report, report.text()
    assert not raised


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dapo", ("", "dapo")),
        ("up(dapo)", ("up", "dapo")),
        ("up_dapo", ("", "up_dapo")),
        ("tis(up(dapo))", ("tis", "up(dapo)")),
        ("upper(dapo)", ("", "upper(dapo)")),
    ],
)
def test_the_parts_of_a_name(name, parts):
    """The outermost transform, and what it is applied to."""
    assert registry.parts(name) == parts


def test_the_catalog_is_the_registry():
    """It reads the files that the registry imports."""
    fields = {
        name: {"level": o.level, "agg": o.agg, "paper": o.paper}
        for name in upref.names()
        for o in [upref.get(name)]
    }
    assert catalog.facts() == fields and list(catalog.facts()) == upref.names()


@pytest.mark.parametrize("name", upref.names())
def test_a_description_is_that_of_the_registered_objective(name):
    """`upref show` reads the file, and `upref.get` runs it."""
    assert describe(name) == show.make_description(upref.get(name))


def test_an_objective_without_a_file_is_described_too():
    assert describe("up(dapo)") is None and describe("nothing") is None
    described = show.find_description("up(dapo)")
    assert described.equation == upref.get("up(dapo)").equation
    assert "def " in described.weight


def test_what_has_to_be_run_is_not_described(tmp_path, monkeypatch):
    """Nor guessed: a default that is computed, a sampler's factors."""
    text = (description.FOLDER / "dapo.py").read_text(encoding="utf-8")
    monkeypatch.setattr(description, "FOLDER", tmp_path)
    changes = ("eps_low=0.2", "eps_low=float(2)"), ('eq="8"', 'eq="8", sampler=exp')
    for before, after in changes:
        assert before in text
        (tmp_path / "dapo.py").write_text(text.replace(before, after), encoding="utf-8")
        description.written.cache_clear()
        description.syntax_tree.cache_clear()
        assert description.describe("dapo") is None
        assert description.fact(description.written()["dapo"], "agg")
    description.written.cache_clear()
    description.syntax_tree.cache_clear()


def test_the_capacities_are_those_of_the_objectives():
    from docs import capacities

    kept = description.CAPACITIES.read_text(encoding="utf-8")
    assert kept == capacities.capacities(), "run: python -m docs.capacities"
    assert "0.0028" in description.capacity_text("dapo")  # README's example


@pytest.mark.parametrize(
    "name",
    ["m2po", "tpo", "kl_cov", "clip_cov", "aspo_code", "dapo", "gspo", "topr"],
)
def test_only_a_table_of_responses_has_a_heading_of_one_token(name):
    """Where one sentence says why there is no Cap, the heading is of no response."""
    page = show.page(describe(name))
    _, _, part = page.partition("Probability Capacity at π_θ = π_old")
    heading, _, text = part.partition("\n")
    is_of_responses = name in ("gspo", "topr")
    assert heading == (", of a response of one token" if is_of_responses else "")
    assert ("π_old     0.001" in text) == (name in ("dapo", "gspo", "topr"))


def test_the_tables_of_estimators_are_read_as_they_are():
    """By their text, and by running their modules."""
    tables = (("kl", "ESTIMATORS"), ("advantages", "ADVANTAGES"), ("aggregation", "AGGREGATIONS"))  # fmt: skip
    for module, table in tables:
        found = getattr(importlib.import_module(f"upref.{module}"), table)
        assert description.names_of(module, table) == list(found)


def test_a_capacity_of_another_file_is_not_shown(monkeypatch):
    assert description.capacity_text("dapo")
    monkeypatch.setattr(description, "digest", lambda file: "another")
    assert description.capacity_text("dapo") == ""


def test_an_objective_of_this_process_is_listed_and_known(monkeypatch, capsys):
    """One function lists and looks up: what is registered beside the files is in the
    first tier, whatever its paper.
    """
    mine = replace(upref.get("ripo"), name="mine", paper="")
    monkeypatch.setitem(definition.OBJECTIVES, "mine", mine)
    assert catalog.facts()["mine"] == {"level": "token", "agg": mine.agg, "paper": ""}
    assert "mine" in catalog.first_tier()
    catalog.require("mine")
    assert main(["list"]) == 0 and "mine" in capsys.readouterr().out.split()


def test_the_first_tier_is_what_a_newcomer_meets(capsys):
    """UP, its baselines and what trainers have; nothing is in neither tier."""
    first = catalog.first_tier()
    assert {
        "up_dapo",
        "dapo",
        "aspo",
        "w_reinforce",
        "cispo_verl",
        "ipo",
        "fipo",
        "topr",
        "luspo",
    } <= {*first}
    assert {*upref.names()} - {*first} >= {
        "bandpo_kl",
        "cfpo",
        "m2po",
        "ripo",
        "tpo",
        "wapo",
    }
    shown = [
        len(out.splitlines())
        for out in (_said(capsys, "list"), _said(capsys, "list", "--all"))
    ]
    # the last line counts the others
    assert shown[1] - shown[0] == len(upref.names()) - len(first) - 1


def _said(capsys, *line):
    assert main([*line]) == 0
    return capsys.readouterr().out


def test_the_trainers_are_those_of_the_audits():
    from docs import framework_pages

    text = catalog.TRAINERS.read_text(encoding="utf-8")
    assert text == framework_pages.trainers(), "run: python -m docs.framework_pages"
    assert set(catalog.trainers()) <= {*upref.names()}


LIGHT = ("list", "list --json", "list --all --json", "list --markdown", "show dapo", "show bandpo_kl --json",
         "show dap", "check x.py:loss --as dapo", "check no:loss --as dap", "cap dap", "identify nope",
         "weights dap", "derive dap", "replay . --as dap", "replay . --against dap", "recipe dap --in verl",
         "check x.py:loss --as-kl k9", "check x.py:loss --as-advantage group_nor", "check x.py:loss --as dapo --agg mean",
         "replay nothing.npz", "badge nothing.json", "learn 99",
         "audit nobody", "audit verl --report nothing", "audit verl --ledger", "audit verl --ledger --json")  # fmt: skip
ANSWERED = (
    "list",
    "list --json",
    "list --all --json",
    "list --markdown",
    "show dapo",
    "show bandpo_kl --json",
    "audit verl --ledger",
    "audit verl --ledger --json",
)


def test_what_needs_no_torch_is_answered_without_it():
    """The commands of LIGHT run in a process that never imports torch: with an answer,
    or a refusal of one line.
    """
    script = f"""
import sys
from upref.cli import main
for line in {LIGHT!r}:
    try:
        status = main(line.split())
    except SystemExit as e:
        status = e.code
    assert status == (0 if line in {ANSWERED!r} else 2), line
    assert "torch" not in sys.modules, line
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(LIGHT) - len(ANSWERED), done.stderr


POSITIONAL = """
from upref.definition import objective
@objective(level="token", agg="token-mean", adv="group_norm")
def root_up(lp, lp_old, A, {of_function}):
    return A * (lp - lp_old)
@root_up.with_weight
def root_up_weight(r, A, {of_weight}):
    return A
"""


@pytest.mark.parametrize(
    ("of_function", "of_weight", "says"),
    [
        ("eps_low=0.2", "*, eps_low", r"root_up: .* write `\*, eps_low=0.2`"),
        ("*, eps_low=0.2", "eps_low", r"root_up_weight: .* write `\*, eps_low`"),
        ("*, eps_low", "*, eps_low", "'eps_low' has no default: write"),
    ],
)
def test_a_hyperparameter_that_is_not_keyword_only_is_refused(
    registered, of_function, of_weight, says
):
    with pytest.raises(InputError, match=says):
        exec(POSITIONAL.format(of_function=of_function, of_weight=of_weight), {})
    assert "root_up" not in upref.names()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nfrom upref.ops import tanh\n", "line 2: ImportError: cannot import name"),
        ("x = (\n", "line 1: SyntaxError: '(' was never closed"),
        ("\n\nx = y\n", "line 3: NameError: name 'y' is not defined. Every command"),
    ],
)
def test_a_file_that_does_not_import_is_named_with_its_line(
    registered, tmp_path, monkeypatch, text, said
):
    """A broken file of an objective is refused by its path; once it is gone, the
    registry loads.
    """
    from upref import objectives

    (tmp_path / "my_objective_that_breaks.py").write_text(text)
    folders = [*objectives.__path__, str(tmp_path)]
    monkeypatch.setattr(objectives, "__path__", folders)
    monkeypatch.setattr(registry, "_loaded", [])
    with pytest.raises(InputError) as refused:
        upref.names()
    sentence = str(refused.value)
    assert sentence.startswith(f"{tmp_path / 'my_objective_that_breaks.py'}, {said}")
    if "tanh" in text:
        assert "upref.ops has binary_kl, clip, " in sentence and "sigmoid" in sentence
    monkeypatch.setattr(objectives, "__path__", folders[:-1])
    assert "dapo" in upref.names()
