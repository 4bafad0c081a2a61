# SPDX-License-Identifier: Apache-2.0
"""`upref.identify`: every objective with random hyperparameters, compositions, verl's
losses, and what is none.
"""

import json
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import upref
from tests.support import zoo
from tests.support.cases.bodies import loss, seq, tok
from tests.support.cases.denominators import tis, tpo
from tests.support.daily import daily
from upref.cli import main
from upref.identification import identify as module
from upref.identification.identification import Identification
from upref.verify.match import ClosedFormWeights, Point
from upref.weights.batches import interval_words

# their bounds are of the order of 1e-3
NARROW = ("gspo", "up_gspo", "up_gspo_anchored")
RANGES = {
    "c": (1.5, 20), "cap": (1.3, 8), "trunc": (1.3, 8), "delta": (0.02, 0.4), "beta": (0.01, 0.2), "lam": (0.05, 0.9),
    "tau": (0.005, 0.5), "tau_pos": (0.3, 4), "tau_neg": (0.3, 4),
    "c1_pos": (0.5, 5), "c2_pos": (0.5, 5), "c1_neg": (0.5, 5), "c2_neg": (0.5, 5),
}  # fmt: skip


def draw(name: str) -> dict:
    """Return random hyperparameters of an objective, always the same for a name; c and
    beta stay absent half of the time.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    hp = {}
    for key, default in upref.get(name).hyperparameters.items():
        low, high = (1e-4, 1e-2) if name in NARROW else RANGES.get(key, (0.05, 0.6))
        absent = key in ("c", "beta") and rng.random() < 0.5
        hp[key] = default if absent else float(rng.uniform(low, high))
    return hp


def named(identity, name: str):
    """The match of that name among those of the loss's aggregation."""
    return next(m for m in identity.matches if m.name == name and m.own)


# A curve does not pin these: they couple tokens, or their weight is not the advantage
# times a function of the ratio.
UNNAMED = ("ce_gppo", "clip_cov", "cppo", "fipo", "kl_cov", "tpo")


@pytest.mark.parametrize(
    "name", daily((n for n in upref.names() if n not in UNNAMED), 4)
)
def test_hyperparameters_and_aggregation_are_recovered(name):
    """Draw hyperparameters of an objective, and find them in the answer for its loss."""
    o, hp = upref.get(name), draw(name)
    identity = upref.identify(partial(o.loss, **hp))
    assert identity.kind in ("objective", "up") and identity.distance < 1e-9
    assert (
        identity.agg == {"seq-mean": "seq-mean-token-mean"}.get(o.agg, o.agg)
        or o.level == "sequence_product"
    )
    found = named(identity, name).hp
    for key, value in hp.items():
        assert found[key] == (
            value if value is None else pytest.approx(value, abs=1e-6)
        ), key


@pytest.mark.parametrize("base", ["sapo", "cispo", "gmpo", "dppo_tv_verl", "ppo_clip"])
def test_up_of_an_objective(base):
    """Find UP of an objective with its drawn hyperparameters, and as the name where it
    is the only one.
    """
    o, hp = upref.get(f"up({base})"), draw(base)
    identity = upref.identify(partial(o.loss, **hp))
    found = next(m for m in identity.matches if m.name == o.name)
    assert found.own and found.distance < 1e-9
    assert found.hp == pytest.approx({k: hp[k] for k in found.hp}, abs=1e-6)
    assert "tau_pos" not in found.hp  # without effect where A <= 0
    only = not any(not m.name.startswith("up(") for m in identity.matches if m.own)
    assert (
        identity.kind == ("up" if only else "objective")
        and (identity.name == o.name) == only
    )


@pytest.mark.parametrize(
    ("name", "hp", "simplest", "also"),
    [
        ("up_dapo_anchored", {}, "up_dapo", "up_dapo_anchored"),
        ("reinforce_pp", {}, "grpo", "reinforce_pp"),
        ("rloo", {}, "reinforce", "rloo"),
        ("up_gspo", {}, "up_gspo", "up(gspo)"),
    ],
)
def test_equal_gradients_are_one_class(name, hp, simplest, also):
    identity = upref.identify(partial(upref.get(name).loss, **hp))
    assert identity.name == simplest and any(
        s.split("(eps")[0] == also for s in identity.also
    )


def ppo(log_prob, old_log_prob, advantages, mask, low=0.2, high=0.2, c=None):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    J = torch.min(r * A, r.clamp(1 - low, 1 + high) * A)
    return J if c is None else torch.where(A < 0, torch.max(J, c * A), J)


def mean(log_prob, old_log_prob, advantages, mask, **k):
    return -ppo(log_prob, old_log_prob, advantages, mask, **k).sum() / mask.sum()


def fixed_length(log_prob, old_log_prob, advantages, mask):
    return -ppo(log_prob, old_log_prob, advantages, mask).sum(1).mean() / 1024


def ascends(*args):
    return -mean(*args)


def quarter(*args):
    return mean(*args, low=0.1, high=0.3) / 4


def single(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss computed in float32, at other hyperparameters."""
    return mean(
        log_prob.float(),
        old_log_prob.float(),
        advantages.float(),
        mask,
        low=0.13,
        high=0.31,
        c=4.5,
    )


# a weight that nobody has published
def sharp(log_prob, old_log_prob, advantages, mask):
    x = torch.where(mask, log_prob - old_log_prob, 0)
    return -(torch.where(mask, advantages, 0) * torch.atan(5 * x)).sum() / mask.sum()


def noisy(log_prob, old_log_prob, advantages, mask):
    return mean(log_prob, old_log_prob, advantages * torch.rand_like(advantages), mask)


def test_the_rank_of_a_way_decides_and_not_its_place(monkeypatch):
    """The table of explanations may be written in any order."""
    ranks = [way.rank for way in module.WAYS]
    assert len(set(ranks)) == len(ranks)
    monkeypatch.setattr(module, "WAYS", module.WAYS[::-1])
    identity = upref.identify(mean)
    assert identity.kind == "objective" and identity.name == "ppo_clip"


def test_the_mean_alone_tells_grpo_from_dapo():
    identity = upref.identify(mean)
    assert identity.name == "ppo_clip" and identity.hp["c"] is None
    assert any(s.startswith("dapo(") for s in identity.also)
    assert any(s.startswith("grpo(") for s in identity.elsewhere)


def test_a_fixed_length_is_recovered():
    """Dr. GRPO's fixed length is named; check, which has no length, agrees with the
    loss times that length.
    """
    identity = upref.identify(fixed_length)
    assert (
        identity
        and identity.name == "dr_grpo"
        and identity.agg == "seq-mean-token-sum-norm, L = 1024"
    )
    assert identity.kind == "objective", identity.why
    # check has no length: the command alone would not agree
    assert "next: multiply the loss by 1024 in a wrapper" in identity.text()
    assert upref.check(
        lambda log_prob, old_log_prob, advantages, mask: (
            1024 * fixed_length(log_prob, old_log_prob, advantages, mask)
        ),
        identity.name,
        **identity.hp,
    )


def test_a_loss_in_float32():
    identity = upref.identify(single)
    assert identity.name == "dapo" and identity.kind == "objective"
    assert identity.hp == pytest.approx(
        {"eps_low": 0.13, "eps_high": 0.31, "c": 4.5}, abs=1e-5
    )


@pytest.mark.parametrize(("times", "sign"), [(2, ""), (-2, "the sign is flipped")])
def test_a_factor_is_named_beside_a_known_fault(times, sign):
    """The clip acts on both sides, and the whole loss has a factor: the answer names
    both.
    """
    twice = loss(lambda d, A, m: times * tok(d.exp().clamp(0.8, 1.28) * A, m))
    why = upref.identify(twice).why
    assert "the minimum is missing" in why
    assert "every weight is 2 times what it should be" in why
    assert sign in why


@pytest.mark.parametrize(
    ("loss", "says"), [(ascends, "sign is flipped"), (quarter, "0.25 times")]
)
def test_a_slip_around_the_right_weights(loss, says):
    identity = upref.identify(loss)
    assert (
        identity
        and identity.kind == "pitfall"
        and says in identity.why
        and identity.distance < 1e-9
    )


@pytest.mark.parametrize(
    ("low", "name", "hp"),
    [
        (None, "cispo", {"eps_high": 5}),
        (0.8, "cispo_verl", {"eps_low": 0.2, "eps_high": 5}),
    ],
)
def test_a_weight_that_is_not_detached_is_still_a_weight(low, name, hp):
    def loss(log_prob, old_log_prob, advantages, mask):
        """Return CISPO's form of a loss whose weight has a gradient."""
        r, A, lp = (
            torch.where(mask, x, 0)
            for x in (log_prob - old_log_prob, advantages, log_prob)
        )
        return -(r.exp().clamp(low, 6) * A * lp).sum() / mask.sum()

    identity = upref.identify(loss)
    assert (
        identity.name == name
        and identity.hp == pytest.approx(hp)
        and "not detached" in identity.why
    )


@pytest.mark.parametrize("loss", [sharp, noisy])
def test_none_of_these(loss, capsys):
    identity = upref.identify(loss)
    assert not identity and identity.kind == "none" and identity.distance > 1e-3
    assert "none of these" in str(identity) and identity.name in upref.names()


PITFALLS = {
    "no_minimum": "clipped on both sides, whatever the sign of A",
    "maximum_of_objectives": "of losses: the minimum where the maximum belongs",
    "plain_sum": "plain sum",
    "normalised_twice": "divided by all tokens",
    "divided_again_by_accumulation": "0.25 times",
    "clamps_the_product": "product r A",
}


@pytest.mark.parametrize(
    "case", [c for c in zoo.WRONG if c.function.__name__ in PITFALLS], ids=str
)
def test_known_pitfalls(case):
    identity = upref.identify(case.function)
    assert (
        identity.kind == "pitfall" and PITFALLS[case.function.__name__] in identity.why
    )
    assert "elsewhere" not in identity.why, identity
    assert (
        identity.name == case.objective or case.function.__name__ == "normalised_twice"
    )


WRONG_GRADIENT = (
    "dual_clip_wrong_way",
    "survivors_in_the_denominator",
    "groups_by_stride",
)


@pytest.mark.parametrize(
    "case", [c for c in zoo.WRONG if c.function.__name__ in WRONG_GRADIENT], ids=str
)
def test_a_wrong_loss_is_not_called_an_objective(case):
    assert upref.identify(case.function).kind == "none"


@pytest.mark.parametrize(
    ("mode", "name", "agg", "hp"),
    [
        ("vanilla", "ppo_clip", "token-mean", {"eps": 0.2, "c": 3.0}),
        ("gspo", "gspo", "token-mean", {"eps_low": 0.2, "eps_high": 0.2}),
        ("sapo", "sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
        ("cispo", "cispo_verl", "token-mean", {"eps_low": 0.2, "eps_high": 0.2}),
        ("geo_mean", "gmpo", "seq-mean-token-mean", {"eps": 0.2}),
        ("gpg", "reinforce_off_policy", "token-mean", {}),
        ("dppo_tv", "dppo_tv_verl", "token-mean", {"delta": 0.2, "trunc": 3.0}),
        ("dppo_kl", "dppo_kl_verl", "token-mean", {"delta": 0.2, "trunc": 3.0}),
        ("clip_cov", None, None, None),
    ],
)
def test_losses_of_verl_are_identified(mode, name, agg, hp):
    pytest.importorskip("verl")
    identity = upref.identify(f"verl:{mode}")
    if name is None:
        assert not identity and identity.matches
        return
    assert identity and (identity.name, identity.agg) == (name, agg)
    assert identity.hp == pytest.approx(hp, abs=1e-6)
    assert ("micro-batch" in identity.why) == (mode == "geo_mean")


@pytest.mark.parametrize("trunc", [0.5, 3.0])
@pytest.mark.parametrize("fault", [None, "aggregated by", "weight found"])
def test_a_fault_is_named_whether_or_not_the_cap_scales_the_weight_on_policy(
    trunc, fault
):
    objective = upref.get("dppo_tv_verl")

    def loss(log_prob, old_log_prob, advantages, mask):
        """Return the objective's loss with the fault in it."""
        if fault == "weight found":
            advantages = advantages.clamp(-20, 20)
        J = objective.unreduced(
            log_prob, old_log_prob, advantages, mask, None, delta=0.2, trunc=trunc
        )
        J = torch.where(mask, J, 0)
        return -J.mean() if fault == "aggregated by" else -J.sum() / mask.sum()

    identity = upref.identify(loss)
    assert identity.name == "dppo_tv_verl"
    assert identity.hp == pytest.approx({"delta": 0.2, "trunc": trunc})
    assert identity.kind == ("pitfall" if fault else "objective")
    assert all(word in identity.why for word in (fault or "").split())


# ---- the command ---------------------------------------------------------------------
BODY = """import torch
def right(log_prob, old_log_prob, advantages, mask):
    return -(((log_prob - old_log_prob).exp().clamp(max=5).detach() * advantages * log_prob)[mask]).mean()
def unknown(log_prob, old_log_prob, advantages, mask):
    return -((log_prob - old_log_prob).sin() * advantages)[mask].mean()
def raises(log_prob, old_log_prob, advantages, mask): raise RuntimeError("no")
def nan(log_prob, old_log_prob, advantages, mask): return log_prob.sum() * float("nan")
def vector(log_prob, old_log_prob, advantages, mask): return log_prob.flatten()[:3]
def detached(log_prob, old_log_prob, advantages, mask): return log_prob.detach().sum()
def dead(log_prob, old_log_prob, advantages, mask): return 0 * log_prob[mask].sum()
def mutates(log_prob, old_log_prob, advantages, mask):
    advantages *= 2
    return -((log_prob - old_log_prob).exp() * advantages)[mask].mean()
def needs(log_prob, old_log_prob, advantages, mask, config): return log_prob.sum()
"""


@pytest.mark.parametrize(("name", "code"), [("right", 0), ("unknown", 1)])
def test_exit_status(tmp_path, capsys, name, code):
    file = tmp_path / "losses.py"
    file.write_text(BODY)
    assert main(["identify", f"{file}:{name}", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["identified"] == (code == 0) == bool(found["name"])
    if code == 0:
        assert found["name"] == "cispo" and found["hp"]["eps_high"] == pytest.approx(
            4, abs=1e-6
        )
        assert main(["identify", f"{file}:{name}"]) == 0
        assert "is cispo(eps_high=4)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "raised RuntimeError: no"),
        ("nan", "is nan"),
        ("vector", "shape [3]"),
        ("detached", "no gradient"),
        ("dead", "no gradient"),
        ("needs", "'config'"),
        ("absent", "has no 'absent'"),
    ],
)
def test_bad_losses_are_one_sentence_and_status_2(tmp_path, capsys, name, says):
    file = tmp_path / "losses.py"
    file.write_text(BODY)
    assert main(["identify", f"{file}:{name}"]) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and not out
    assert (
        main(["identify", "--debug", "no/such.py:f"]) == 2
        and "Traceback" in capsys.readouterr().err
    )


def test_a_narrow_regime_has_two_ends():
    assert interval_words(1.07641, 1.07649) == "1.0764 < r <= 1.0765"
    assert (
        interval_words(None, 0.8) == "r <= 0.8"
        and interval_words(1.28, None) == "r > 1.28"
    )


def clipped(log_prob, old_log_prob, advantages, mask, guard=lambda x: x):
    r = guard(log_prob - old_log_prob).exp()
    x = torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages)
    return -(torch.where(mask, x, 0).sum(1) / mask.sum(1)).mean()


def test_a_guard_far_from_1_is_not_taken_for_the_clip():
    def loss(log_prob, old_log_prob, advantages, mask):
        return clipped(
            log_prob, old_log_prob, advantages, mask, lambda x: x.clamp(-5, 5)
        )

    identity = upref.identify(loss)
    assert (identity.name, identity.hp["eps"]) == (
        "grpo",
        pytest.approx(0.2),
    ) and "|log r| > 5: log r is clamped" in identity.why


def test_no_slip_is_named_that_changes_nothing():
    """Padding is averaged into the advantages: of that identify knows no slip."""

    def loss(log_prob, old_log_prob, advantages, mask):
        return clipped(log_prob, old_log_prob, advantages.mean(1, keepdim=True), mask)

    identity = upref.identify(loss)
    assert not identity and not identity.why, identity


def ce_gppo(d, A, m):
    """Return CE-GPPO's loss away from its defaults: beyond the bounds 0.85 and 1.3 a
    token has 0.6 and 0.9 of the bound.
    """
    r = d.exp()
    above, below = (
        torch.where(r > 1.3, 0.9 * 1.3, r),
        torch.where(r < 0.85, 0.6 * 0.85, r),
    )
    w = torch.where(A > 0, above, below).detach()
    return tok(w * A * (d - d.detach()).exp(), m)


def kl_cov(log_prob, old_log_prob, advantages, mask):
    b = upref.Rollouts.unchecked(
        logp=log_prob, logp_old=old_log_prob, adv=advantages, mask=mask
    )
    return upref.get("kl_cov").loss(b)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (
            loss(tis(lambda w, A: w.clamp(max=3))),
            "is tis(dapo)(eps_low=0.2, eps_high=0.28, is_max=3)",
        ),
        (
            loss(tis(lambda w, A: w * (w <= 2.5))),
            "is mis(dapo)(eps_low=0.2, eps_high=0.28, is_max=2.5)",
        ),
        (
            loss(tis(lambda w, A: w.clamp(0.5, 3))),
            "is dapo(eps_low=0.2, eps_high=0.28) where the sampler's policy is",
        ),
        (loss(lambda lp, old, A, m, group: tpo(lp, old, A, m, group)), "is tpo(eta=1)"),
        (
            loss(ce_gppo),
            "is ce_gppo(eps_low=0.15, eps_high=0.3, share_low=0.6, share_high=0.9)",
        ),
        pytest.param(kl_cov, "is kl_cov(coef=1)", marks=pytest.mark.nightly),
    ],
)
def test_corrections_and_coupled_objectives_are_named(fn, said):
    identity = upref.identify(fn)
    assert identity and said in str(identity).splitlines()[0], str(identity)
    assert identity.on_sampler == ("where" in said)


@pytest.mark.nightly
def test_a_share_that_no_batch_shows_is_not_named():
    """One token at least is penalized: of few tokens 0.2 % and 0.02 % are one."""

    def tenfold(log_prob, old_log_prob, advantages, mask):
        fields = dict(logp=log_prob, logp_old=old_log_prob, adv=advantages, mask=mask)
        b = upref.Rollouts.unchecked(**fields)
        return upref.get("kl_cov").loss(b, share=0.002)

    identity = upref.identify(tenfold)
    assert identity and "share" not in identity.matches[0].hp
    assert "share: these batches do not tell the value" in identity.not_checked


def test_a_bound_that_no_batch_tells_from_its_neighbor_is_not_named():
    """A largest covariance of 6 was named as the paper's 5."""

    def at_most_6(log_prob, old_log_prob, advantages, mask):
        fields = dict(logp=log_prob, logp_old=old_log_prob, adv=advantages, mask=mask)
        b = upref.Rollouts.unchecked(**fields)
        return upref.get("clip_cov").loss(b, high=6.0)

    identity = upref.identify(at_most_6)
    assert identity.matches[0].name == "clip_cov"
    assert "high" not in identity.matches[0].hp
    assert any("high" in said for said in identity.not_checked)


def test_a_weight_that_fades_does_not_jump():
    """SAPO's sigmoid rounds to 1 at r = 37.7, where its weight is 1e-14."""

    def body(d, A, m):
        tau = torch.where(A > 0, 1.0, 1.05)
        return seq(4 / tau * torch.sigmoid(tau * (d.exp() - 1)) * A, m)

    identity = upref.identify(loss(body))
    assert identity.matches[0].name == "sapo"
    assert not any(identity.bounds.values())


def test_no_nearest_objective_is_printed_that_is_far():
    identity = upref.identify(loss(lambda d, A, m: tok((d.exp() ** 3 + 1) / 4 * A, m)))
    assert not identity and not identity.matches


def test_a_nearest_objective_has_the_bounds_that_are_found():
    """A loss that is clipped at 1.5 and 0.6 by a squared ratio, which no objective has."""
    odd = loss(
        lambda d, A, m: tok(
            torch.where(A > 0, (2 * d).exp() * (d < 0.4), (3 * d).exp() * (d > -0.5))
            * A,
            m,
        )
    )
    identity = upref.identify(odd)
    if not identity.matches:
        assert "nearest" not in str(identity) and "next:" not in str(identity)
    assert not identity and "the weight jumps at r = " in str(identity), str(identity)


@pytest.mark.nightly
def test_the_bounds_of_a_ratio_of_responses_are_not_those_of_a_token():
    """A bound on s = 1.05 is not one on r, and no objective has it."""

    def body(d, A, m):
        s = (d.sum(1, keepdim=True) / m.sum(1, keepdim=True)).exp().detach()
        gate = ((A < 0) | (s <= 1.05)) & ((A > 0) | (s >= 0.95))
        return tok(gate * A * 2 * torch.tanh((d.exp() - 1) / 2), m)

    identity = upref.identify(loss(body))
    text = str(identity)
    assert identity.kind == "none" and identity.reads_others
    assert "of the response: the weight of a token depends on its other tokens" in text
    assert "jumps at s = r = 1.05, in a response of one token" in text
    assert "jumps at r" not in text and "aggregation  token-mean" in text


def test_an_answer_says_what_its_bounds_were_measured_on():
    seen = Identification(
        "own.py:f", "none", [], "", {"A > 0": [1.05]}, "", [], [], False, 0.1,
        reads_others=True, aggregation="token-mean", far="sapo",
    )  # fmt: skip
    assert str(seen).splitlines()[1:] == [
        "  nearest      sapo, which is not near",
        "  aggregation  token-mean on policy",
        "  ratio        of the response: the weight of a token depends on its other tokens",
        "  A > 0        the weight jumps at s = r = 1.05, in a response of one token",
        "next: upref diff own.py:f sapo",
    ]


POINTS = [
    Point(A=A, r=r, mu=mu, high_entropy=False)
    for A in (-1.0, 0.5)
    for r in (0.5, 1.0, 1.9)
    for mu in (0.2, 0.9)
]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "m2po", "up(clip_cov)"])
def test_each_point_is_a_batch_of_its_own_where_the_form_reads_the_batch(name):
    objective = upref.get(name)
    hp = objective.surrogate_hyperparameters({})
    together = ClosedFormWeights(objective, POINTS)(hp)
    alone = [ClosedFormWeights(objective, [point])(hp)[0] for point in POINTS]
    assert np.array_equal(together, alone)


def test_so_it_is_where_the_form_branches_on_a_number():
    def branches(log_r, A, mask):
        return A if float((log_r * A).sum()) > 0 else 2 * A

    objective = replace(upref.get("m2po"), closed_form=branches)
    weights = ClosedFormWeights(objective, POINTS)({})
    due = [p.A if p.A * np.log(p.r) > 0 else 2 * p.A for p in POINTS]
    assert np.array_equal(weights, due)


def test_masked_slots_that_train_are_no_objective():
    """The weights are DAPO's, and those of masked slots should be 0."""

    def loss(log_prob, old_log_prob, advantages, mask):
        r = torch.exp(log_prob - old_log_prob)
        terms = torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages)
        return -terms.sum() / mask.sum()

    identity = upref.identify(loss)
    assert identity.kind == "pitfall" and identity.name == "dapo"
    assert identity.why == "a gradient flows into masked slots"
