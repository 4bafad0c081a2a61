# SPDX-License-Identifier: Apache-2.0
"""What `upref recipe` prints was run: typed back into the config, the framework's own
loss does what it says.
"""

import contextlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import upref
from docs import record
from upref import InputError
from upref.advantages import ADVANTAGES
from upref.aggregation import row_weights
from upref.cli import main
from upref.rollouts import autograd_gradient
from upref.weights.batches import batch, typical_batch
from upref_frameworks import audits as A, ledger, names
from upref_frameworks.audits.case import Comparison
from upref_frameworks.audits.compare import difference, gradient_with_faults
from upref_frameworks.audits.faulty import make_explanation
from upref_frameworks.audits.recipe import (
    SAME_LOSS,
    covered_objectives,
    recipe as once,
    typed_fields,
)
from upref_frameworks.ledger import read_tables

recipe = cache(once)  # one reads the ledger for each
entries = cache(ledger.read)
JSON = Path(__file__).parents[2] / "docs/frameworks"
EVERY = [(o, n) for n in names() for o in covered_objectives(n, {})]


def comparison(objective: str, name: str) -> Comparison:
    """Return the audit's comparison of which the recipe speaks."""
    said = recipe(objective, name).command.removeprefix(f"upref check {name}:")
    return next(
        c
        for c in A.framework(name).comparisons
        if f"{c.label} --as {c.promise.replace(', ', ' --hp ')}" == said
    )


def measured_elsewhere(objective: str, name: str) -> dict:
    """Return the fields that the recipe leaves otherwise than the comparison has them,
    because the loss draws at random.
    """
    return (
        read_tables(name)["recipe"].get("at", {}).get(objective, {}).get("fields", {})
    )


def test_each_recipe_is_of_an_explained_comparison():
    """At least eight objectives, in all frameworks that reach them."""
    assert len({o for o, _ in EVERY}) >= 8
    assert {n for _, n in EVERY} == {*names()}
    for o, n in EVERY:
        r, c = recipe(o, n), comparison(o, n)
        rows = record.rows(JSON / f"{n}.json")["rows"]
        in_one_batch = [x for x in rows if x["micro_batches"] == 1]
        wanted = (c.label, c.promise)
        row = next(x for x in in_one_batch if (x["label"], x["promise"]) == wanted)
        measured = {k: c.config[k] for k in r.fields} | measured_elsewhere(o, n)
        assert row["ok"] and measured == r.fields
        assert len(r.differs) >= len(row["reasons"])
        assert all(line.strip() for line in r.settings)
        assert set(r.beside) == {"dynamic sampling", "overlong shaping"}


def audited(name: str) -> list[dict]:
    return record.rows(JSON / f"{name}.json")["rows"]


def kind_of(objective: str) -> str:
    return upref.get(objective).adv


PLUGGED = [
    (o, n)
    for n in ("verl", "trl")
    for o in upref.names()
    if o not in covered_objectives(n, {})
]


def plugged() -> list[tuple[str, str]]:
    """Return the objectives that upref's plug-in gives, in verl and in TRL."""
    found = []
    for o, n in PLUGGED:
        with contextlib.suppress(InputError):
            recipe(o, n)
            found.append((o, n))
    return found


def test_the_advantages_are_the_objectives_own():
    """One setting a kind; where none is known the recipe says so, and never gives the
    setting of another kind.
    """
    for o, n in [*EVERY, *plugged()]:
        said, known = recipe(o, n).advantages, read_tables(n)["recipe"]["advantages"]
        assert said.startswith(f"{kind_of(o)}, "), (o, n)
        if kind_of(o) not in known:
            assert f"set them yourself, this recipe knows no setting of {n}" in said, (
                o,
                n,
            )
            continue
        mine = known[kind_of(o)]
        assert f": {mine['set']}" in said and ("not measured" in said) == (
            "audited" not in mine
        ), (o, n)
    dr = {n: recipe("dr_grpo", n).advantages for o, n in EVERY if o == "dr_grpo"}
    assert len(dr) == 11 and not any(
        "group_norm" in said or "(the default)" in said for said in dr.values()
    ), dr


def test_measured_advantages_are_a_row_of_the_audit():
    """Find each kind of advantages that a recipe calls audited in the audit of its
    framework.
    """
    for n in names():
        rows = {
            (r["label"], r["promise"].split(", ")[0])
            for r in audited(n)
            if r["kind"] == "advantages"
        }
        for kind, how in read_tables(n)["recipe"]["advantages"].items():
            row = "reward" if kind == "signed" else kind  # A = R where R is 1 or -1
            assert (
                kind in ADVANTAGES and how.keys() <= {"set", "audited"} and how["set"]
            ), (n, kind)
            assert (
                "audited" not in how or (f"advantages:{how['audited']}", row) in rows
            ), (n, kind)


def test_every_entry_that_concerns_the_recipe_is_mentioned():
    """Of the loss in one batch and in micro-batches, and of the advantages; what was
    not measured is said to be so.
    """
    for o, n in EVERY:
        r, c = recipe(o, n), comparison(o, n)
        said, kind = "\n".join(r.differs), kind_of(o)
        estimator = read_tables(n)["recipe"]["advantages"].get(kind, {}).get("audited")
        of_loss = (c.label, c.promise)
        of_advantages = (f"advantages:{estimator}", kind)
        for e in entries(n):
            for x in e.evidence:
                if (x.loss, x.held_against) == of_loss:
                    alone = of_micro_batches_alone(e, c)
                    prefix = "in micro-batches: " if alone else ""
                    assert prefix + e.reason in said, (o, n, e.key)
                if (x.loss, x.held_against.split(", ")[0]) == of_advantages:
                    assert f"in the advantages: {e.reason}" in said, (o, n, e.key)
        of_label = [x for x in A.framework(n).comparisons if x.label == c.label]
        if not any(x.setting == "paper" for x in of_label):
            assert "in micro-batches: not measured" in r.differs, (o, n)
        if upref.get(o).batch_coupled:
            assert "in micro-batches: each acts by itself" in said, (o, n)
    assert "in micro-batches: torch.mean of each" in str(recipe("gmpo", "verl"))
    assert "in micro-batches: the means over" in str(recipe("gspo", "trinity"))


def of_micro_batches_alone(e, c: Comparison) -> bool:
    """Return whether the entry is of micro-batches alone."""
    return not any(
        (x.loss, x.held_against, x.micro_batches) == (c.label, c.promise, 1)
        for x in e.evidence
    )


def test_a_plug_in_says_what_was_measured_of_it():
    """It gets no prompt ids: by the same measure as the frameworks' own losses."""
    rows = plugged()
    assert len(rows) > 50
    for o, n in rows:
        differs, objective = "\n".join(recipe(o, n).differs), upref.get(o)
        assert ("one denominator for the batch" in differs) == (
            objective.agg == "group-token-mean"
        ), (o, n)
        assert (
            not objective.batch_coupled
            or "in micro-batches: each acts by itself" in differs
        ), (o, n)
    for o in ("up_dapo", "gppo", "m2po"):
        b, objective = typical_batch(), upref.get(o)
        paper, seen = (
            autograd_gradient(objective, b),
            autograd_gradient(objective, replace(b, group=None)),
        )
        change = 100 * ((seen - paper).norm() / paper.norm()).item()
        assert (
            f"one denominator for the batch, not one per prompt (weakens, {change:.2g} % of"
            in str(recipe(o, "verl"))
        )
    assert "20 %" in str(recipe("up_dapo", "verl")) and "nothing differs" not in str(
        recipe("up_dapo", "trl")
    )
    assert "plain sum" in str(recipe("w_reinforce", "verl")) and "plain sum" in str(
        recipe("wapo", "trl")
    )
    assert "mean of its weights (not measured)" in str(recipe("up_gspo", "verl"))


@pytest.mark.parametrize(
    ("name", "framework", "why"),
    [
        ("tis(dapo)", "verl", "the sampler's log-probabilities"),
        ("up(icepop(grpo))", "verl", "the sampler's log-probabilities"),
        ("tpo", "verl", "the prompt of each response"),
        ("tpo", "trl", "the prompt of each response"),
        ("aspo_code", "verl", "entropy per token"),
        ("up(sapo)", "verl", "register"),
        ("kl_cov", "skyrl", "its own kl_cov: not compared"),
        ("rloo", "liger", "compares the losses of liger with"),
        ("rloo", "liger", "openrlhf, skyrl, swift, trinity, trl, tunix, verl"),
        ("m2po", "areal", "its own m2po: actor.m2_threshold leaves out"),
    ],
)
def test_what_cannot_run_is_refused_with_one_sentence(name, framework, why, capsys):
    assert main(["recipe", name, "--in", framework]) == 2
    said = capsys.readouterr()
    assert why in said.err and len(said.err.strip().splitlines()) == 1 and not said.out


def test_what_the_plug_in_refuses_has_no_recipe():
    """The plug-ins' own rule: what they raise on before the first batch."""
    transformed = ["tis(dapo)", "mis_seq(gspo)", "up(tis(dapo))", "decoupled(grpo)"]
    for n in ("verl", "trl"):
        plug_in = pytest.importorskip(f"upref_frameworks.{n}.training")
        config = {"verl": {}, "trl": {}}[n]
        for o in [o for o, where in PLUGGED if where == n] + transformed:
            with contextlib.suppress(InputError):
                plug_in.hyperparameters(upref.get(o), config)
                assert recipe(o, n).mode == f"upref/{o}"
                continue
            with pytest.raises(InputError, match="cannot run in"):
                recipe(o, n)


def test_verls_own_losses_of_the_entropy_mechanism_and_dro():
    """verl 0.9.1 has them: no plug-in, and clip_cov, which draws at random, says how it
    was measured.
    """
    modes = {o: recipe(o, "verl").mode for o in ("kl_cov", "clip_cov", "dro")}
    assert modes == {o: o for o in modes}
    lines = "\n".join(line for o in modes for line in recipe(o, "verl").settings)
    assert (
        "policy_loss.ppo_kl_coef=1\n" in lines and "policy_loss.dro_beta=0.1" in lines
    )
    assert "clip_cov_ratio=0.0002" in lines and "at random" in str(
        recipe("clip_cov", "verl")
    )
    assert "each acts by itself" in str(recipe("kl_cov", "verl"))


def test_advantages_alone_set_reinforce_pp_and_rloo_apart():
    """The recipe of another objective with advantages of their own: their gradients are
    equal, bit for bit.
    """
    for o, other in SAME_LOSS.items():
        b = batch(upref.get(o))
        assert (
            autograd_gradient(upref.get(o), b) == autograd_gradient(upref.get(other), b)
        ).all() and upref.get(o).adv != upref.get(other).adv
    here = {o: {n for x, n in EVERY if x == o} for o in SAME_LOSS}
    assert here["reinforce_pp"] >= {
        "openrlhf",
        "verl",
        "slime",
        "miles",
        "skyrl",
        "nemo_rl",
        "trinity",
        "easyr1",
    }
    assert here["reinforce_pp_baseline"] >= {
        "openrlhf",
        "verl",
        "slime",
        "miles",
        "swift",
        "nemo_rl",
    }
    assert here["rloo"] >= {"trl", "nemo_rl", "verl"}
    said = str(recipe("reinforce_pp", "slime"))
    assert (
        "--advantage-estimator reinforce_plus_plus\n" in said
        and "--normalize-advantages" in said
    )
    assert "the loss is that of grpo; only the advantages differ" in said
    assert "rloo_vectorized" in str(recipe("rloo", "verl")) and "loss_mode=gpg" in str(
        recipe("rloo", "verl")
    )


def test_rloo_with_a_clipped_loss_says_what_that_changes():
    """Where a framework has RLOO's advantages and no loss without a ratio: both sizes
    are measured here again.
    """
    with_clip = {n for o, n in EVERY if o == "rloo"} - {"trl", "nemo_rl", "verl"}
    assert with_clip == {
        "areal",
        "easyr1",
        "openrlhf",
        "skyrl",
        "swift",
        "trinity",
        "tunix",
    }
    t = typical_batch()
    paper = autograd_gradient(upref.get("rloo"), t)
    clipped = autograd_gradient(upref.get("dr_grpo"), t)
    change = 100 * ((clipped - paper).norm() / paper.norm()).item()
    for n in with_clip:
        said = str(recipe("rloo", n))
        assert f"PPO's clip, which rloo has not (weakens, {change:.2g} % of" in said, n
        assert (
            "rloo" in recipe("rloo", n).advantages
            or "leave1out" in recipe("rloo", n).advantages
        )
    assert (
        "aggregated by token-mean, where rloo has seq-mean-token-sum (rescales"
        in str(recipe("rloo", "areal"))
    )
    assert "aggregated by" not in str(recipe("rloo", "skyrl"))


def test_skyrl_has_the_papers_denominator():
    """prompt_mean, measured with the prompts' places: DAPO and CISPO as printed."""
    for o in ("dapo", "cispo"):
        r = recipe(o, "skyrl")
        assert "trainer.algorithm.loss_reduction=prompt_mean" in r.settings
        assert "one denominator for the batch" not in str(r)


def test_what_must_be_set_is_set():
    """SkyRL refuses the sum without max_seq_len, Liger without max_completion_length;
    Unsloth's beta is 0.001.
    """
    for o in ("dr_grpo", "dppo_tv", "dppo_kl", "is_pg"):
        r = recipe(o, "skyrl")
        assert (
            "trainer.algorithm.max_seq_len=1" in r.settings
            and "it must be set" in str(r)
        )
    assert "max_completion_length=1," in recipe("dr_grpo", "liger").settings
    # a KL term in the reward, of 0.05 and of 0.04
    for o, n in [("rloo", "trl"), ("ppo_clip", "tunix")]:
        assert "beta=0.0," in recipe(o, n).settings
    for o in covered_objectives("unsloth", {}):
        assert "beta=0.0," in recipe(o, "unsloth").settings
    assert "mask_truncated_completions" in str(recipe("dapo", "unsloth"))


def test_sampler_corrections_that_are_on_by_default_are_named():
    for n, switch in {
        "trl": "vllm_importance_sampling_correction=False",
        "open_instruct": "use_rho_correction",
    }.items():
        assert all(
            switch in str(recipe(o, n))
            for o in covered_objectives(n, {})
            if (o, n) != ("rloo", "trl")
        )
    assert "vllm_importance_sampling_correction" in str(recipe("up_dapo", "trl"))
    assert "correction is on by default" not in str(recipe("tis(dapo)", "trl"))


def typed_back(lines: list[str]) -> dict:
    """Return the fields of the framework's config, from the lines as one types them."""
    return {
        key.rpartition(".")[2]: value
        for line in lines
        for key, value in typed_fields(line)
    }


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        pytest.param(n, o, marks=getattr(pytest.mark, n))
        for o, n in EVERY
        if n in ("verl", "trl")
    ],
)
def test_the_frameworks_own_loss_with_the_typed_settings(name, objective):
    """Equal to the objective with what the recipe says still differs, and to no other."""
    pytest.importorskip(name, reason=f"`repro/venv.sh {name}` installs it")
    f, c, b = A.framework(name), comparison(objective, name), typical_batch()
    typed = typed_back(recipe(objective, name).settings)
    for mode in ("loss_type", "loss_mode"):
        typed.pop(mode, None)
    typed |= {k: c.config[k] for k in measured_elsewhere(objective, name)}
    scale = {k: v for k, v in c.config.items() if k == "max_completion_length"}
    b = replace(b, totals=upref.Totals.of(b.mask))
    found = -autograd_gradient(
        lambda x: f.compute_loss(c.mode, typed | scale, x, None), b
    )
    promised = upref.get(c.objective)
    explanation = make_explanation(promised, c.hp, c.reasons)
    weights = row_weights(promised.agg, b.mask, upref.Totals.of(b.mask, b.group))
    each = torch.as_tensor(weights, dtype=torch.float64).expand(len(b.mask))[:, None]
    expected = gradient_with_faults(explanation.faulty, typical_batch())
    assert difference(found / each, expected / each).max() < 1e-6


def test_a_kl_term_that_is_on_beside_the_loss_is_switched_off():
    """Unless the recipe is one with a KL term."""
    said = {
        n: recipe("dapo", n).settings[-1]
        for n in ("openrlhf", "areal", "easyr1", "trinity")
    }
    off = [
        "--algo.kl.init_coef 0",
        "actor.kl_ctl=0.0",
        "algorithm.disable_kl=true",
        "algorithm.kl_loss_fn: none",
    ]
    assert [*said.values()] == off
    assert off[2] not in recipe("grpo", "easyr1", beta=0.04).settings


def test_the_command(capsys):
    assert main(["recipe", "dapo", "--in", "verl"]) == 0
    out = capsys.readouterr().out
    assert (
        "\nactor_rollout_ref.actor.clip_ratio_high=0.28\n" in out
        and "still differs: one denominator" in out
    )
    assert str(recipe("dapo", "verl")) + "\n" == out
    assert main(["recipe", "up_dapo", "--in", "trl"]) == 0
    assert 'objective="up_dapo"' in capsys.readouterr().out
    assert main(["recipe", "vespo", "--in", "areal"]) == 2
    assert "trl" in capsys.readouterr().err
    assert json.loads(recipe("gspo", "skyrl").json())["mode"] == "gspo"
    with pytest.raises(InputError, match="at these settings"):
        recipe("dapo", "areal", c=3.5)


def test_how_trl_counts_tokens_differs_from_the_paper_in_both_losses():
    for name in ("dapo", "cispo", "up_dapo"):
        found = recipe(name, "trl")
        assert any("over the generation batch" in line for line in found.differs)
        assert not any("over the generation batch" in line for line in found.notes)


def test_a_framework_that_gives_an_objective_by_the_plug_in_is_named():
    with pytest.raises(InputError, match="up_grpo: verl with upref's plug-in"):
        recipe("up_grpo", "openrlhf")
    with pytest.raises(InputError, match="recipe for ppo_clip at its defaults: "):
        recipe("ppo_clip", "verl", eps=0.137)


@pytest.mark.trl
def test_a_config_that_is_made_between_two_losses_of_trl_changes_nothing(tmp_path):
    """It clears what accelerate shares between trainers, and those here are kept."""
    pytest.importorskip("trl", reason="`repro/venv.sh trl` installs it")
    from trl import GRPOConfig

    b = typical_batch()
    b = replace(b, totals=upref.Totals.of(b.mask))
    trl = A.framework("trl")
    losses = [trl.compute_loss("cispo", {}, b, None)]
    GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    losses.append(trl.compute_loss("cispo", {}, b, None))
    assert torch.equal(*losses)
