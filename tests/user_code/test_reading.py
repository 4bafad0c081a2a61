# SPDX-License-Identifier: Apache-2.0
"""The one boundary: whatever a loss calls its arguments, in whatever order, all doors
read it alike or refuse alike.
"""

import functools
import itertools
import json
import re
import sys
import traceback
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import upref
import upref.weights.curve
from tests.support.daily import daily
from upref import catalog
from upref.aggregation import aggregate
from upref.cli import main
from upref.errors import InputError
from upref.registry import get
from upref.user_code import names, read

CALLED = {
    "logp": [
        "log_prob",
        "logprobs",
        "new_log_probs",
        "per_token_logps",
        "policy_logps",
        "lp",
        "new",
        "curr_logp",
        "logp_new",
        "trainer_logprobs",
        "trainer_log_probs",
    ],
    "logp_old": [
        "old_log_prob",
        "behav_logprobs",
        "behaviour_logps",
        "rollout_log_probs",
        "sampling_logp",
        "logp_old",
        "oldLogProb",
        "inference_logprobs",
        "old_",
    ],
    "adv": ["advantages", "adv", "advs", "A", "token_advantages"],
    "mask": ["mask", "response_mask", "loss_mask", "completion_masks"],
}
BODY = """
def loss({signature}, eps_low=0.2, eps_high=0.28):
    r = torch.where({mask}, {logp} - {logp_old}, 0).exp()
    J = torch.min(r * {adv}, r.clamp(1 - eps_low, 1 + eps_high) * {adv})
    return -(J * {mask}).sum() / {mask}.sum()
"""
QUICK = (
    "extremes",
    "masked-values",
    "padding",
    "permutation",
    "dead-hyperparameter",
    "value",
    "scaling",
    "zero-advantage",
)
R = np.array([0.5, 0.79, 1.0, 1.27, 1.3, 2.0])


def make(called: dict[str, str], order, body: str = BODY):
    scope = {"torch": torch}
    exec(body.format(signature=", ".join(called[r] for r in order), **called), scope)
    return scope["loss"]


USUAL = make({r: c[0] for r, c in CALLED.items()}, CALLED)


def answers(loss) -> list:
    """Return what check, identify, capacity and the weights say of the loss."""
    out: list = [
        bool(upref.check(loss, "dapo", skip=QUICK)),
        str(upref.identify(loss).matches[0]),
    ]
    out += [upref.capacity(loss, 0.01, 0.01, A).tolist() for A in (1.0, -1.0)]
    return [
        *out,
        [upref.weights.curve.make_curve(loss)(R, A).tolist() for A in (1.0, -1.0)],
    ]


@functools.cache
def usual() -> list:
    return answers(USUAL)


def refusals(loss) -> set[str]:
    """Return the sentences with which check, identify, capacity, cap_map and the
    weights refuse the loss.

    Raises:
        Failed: one of them does not.
    """
    doors = (
        lambda: upref.check(loss, "dapo"), lambda: upref.identify(loss), lambda: upref.capacity(loss, 0.01, 0.01),
        lambda: upref.cap_map(loss), lambda: upref.weights.curve.make_curve(loss),
    )  # fmt: skip
    said = set()
    for door in doors:
        with pytest.raises(InputError) as e:
            door()
        said.add(str(e.value))
    return said


@pytest.mark.slow
@settings(deadline=None, max_examples=2, derandomize=True)
@given(
    order=st.permutations(list(CALLED)),
    called=st.fixed_dictionaries({r: st.sampled_from(c) for r, c in CALLED.items()}),
)
def test_whatever_order_and_names_every_door_gives_one_answer(order, called):
    assert answers(make(called, order)) == usual()


@pytest.mark.parametrize("order", list(itertools.permutations(CALLED)))
def test_every_order_is_read_by_name(order):
    called = {r: c[0] for r, c in CALLED.items()}
    assert np.allclose(upref.weights.curve.make_curve(make(called, order))(2.0, 1.0), 0)
    assert np.allclose(
        upref.weights.curve.make_curve(make(called, order))(0.5, 1.0), 0.5
    )


@pytest.mark.parametrize(
    ("called", "says"),
    [
        ({"logp": "x", "logp_old": "y", "adv": "adv", "mask": "mask"}, "cannot tell"),
        (
            {"logp": "logp1", "logp_old": "logp2", "adv": "adv", "mask": "mask"},
            "cannot tell which of logp",
        ),
        (
            {
                "logp": "model",
                "logp_old": "batch",
                "adv": "inputs",
                "mask": "tokenizer",
            },
            "no value for the argument",
        ),
        (
            {
                "logp": "neg_log_prob",
                "logp_old": "old_neg_log_prob",
                "adv": "adv",
                "mask": "mask",
            },
            "neg_log_prob",
        ),
        (
            {"logp": "lp", "logp_old": "old_lp", "adv": "adv", "mask": "padding_mask"},
            "the argument 'padding_mask'",
        ),
        (
            {"logp": "lp", "logp_old": "old_lp", "adv": "adv", "mask": "lengths"},
            "no value for the argument 'lengths'",
        ),
        (
            {"logp": "lp", "logp_old": "old_lp", "adv": "adv_fn", "mask": "mask"},
            "no value for the argument 'adv_fn'",
        ),
        ({"logp": "x", "logp_old": "lp", "adv": "adv", "mask": "mask"}, "cannot tell"),
        (
            {"logp": "probs", "logp_old": "old_probs", "adv": "adv", "mask": "mask"},
            "probs",
        ),
    ],
)
def test_what_is_ambiguous_is_refused_with_a_wrapper(called, says):
    for order in itertools.permutations(CALLED):
        said = refusals(make(called, order))
        assert (
            len(said) == 1
            and says in said.copy().pop()
            and "def wrapped(" in said.pop()
        )


def test_by_position_where_no_name_says_anything():
    loss = make(dict(zip(CALLED, "wxyz", strict=True)), CALLED)
    assert read(loss).read_as.count("by position") == 4
    assert answers(loss) == usual()


def test_the_one_left_is_the_role_left():
    loss = make(
        {
            "logp": "lp",
            "logp_old": "old_lp",
            "adv": "weights_of_reward",
            "mask": "mask",
        },
        CALLED,
    )
    assert "weights_of_reward -> advantages, by position" in read(loss).read_as
    assert upref.check(loss, "dapo", skip=QUICK)


@pytest.mark.parametrize("shape", ["[B]", "[B, 1]"])
def test_one_advantage_a_response_in_bounded_memory(shape):
    """Find the capacity of DAPO for a loss on a grid of 200 × 200 points."""
    body = (
        BODY.replace(
            "    r =",
            "    {adv} = {adv}[:, None] if {adv}.ndim == 1 else {adv}\n    r =",
        )
        if shape == "[B]"
        else BODY
    )
    loss = make({r: c[0] for r, c in CALLED.items()}, CALLED, body)
    grid = np.linspace(0.001, 0.999, 200)
    cap = upref.capacity(loss, *np.meshgrid(grid, grid))
    assert np.allclose(cap, upref.capacity("dapo", *np.meshgrid(grid, grid)), atol=1e-6)


def test_shapes_and_masks_are_found_out():
    def responses(logps, old_logps, A, mask):  # A [B], mask a float
        one = 1.0 - (1.0 - mask)
        s = (((logps - old_logps) * one).sum(1) / one.sum(1)).exp()
        return -torch.min(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A).mean()

    loss = read(responses)
    assert (loss.adv_shape, loss.float_mask) == ("B", True)
    assert upref.check(responses, "gspo")
    assert np.allclose(
        upref.weights.curve.make_curve(responses)(R, 1.0),
        get("gspo").weight(R, np.ones(6)),
    )


def test_a_loss_of_the_first_column_gets_one_advantage_each():
    """A loss that reads the first column is checked with one advantage for each
    response; one that reads another column is not.
    """

    def first(log_prob, old_log_prob, advantages, mask):
        """Return DAPO's loss with the first column's advantage for each token."""
        r, A = (
            torch.where(mask, log_prob - old_log_prob, 0).exp(),
            advantages[:, 0][:, None],
        )
        return -(torch.min(r * A, r.clamp(0.8, 1.28) * A) * mask).sum() / mask.sum()

    def second(log_prob, old_log_prob, advantages, mask):
        return first(log_prob, old_log_prob, advantages.roll(-1, 1), mask)

    assert (
        upref.check(first, "dapo", skip=QUICK) and "first column" in read(first).read_as
    )
    assert read(second).adv_shape == "BT" and not upref.check(
        second, "dapo", skip=QUICK
    )
    assert (
        read(
            lambda log_prob, old_log_prob, advantages, mask: -(log_prob * mask).mean()
        ).adv_shape
        == "BT"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "agg", daily(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"], 3)
)
def test_an_aggregation_in_place_of_the_objectives_own(agg):
    """With its own aggregation the loss agrees, and the next command that identify
    prints does too.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        r, A = (
            torch.where(mask, log_prob - old_log_prob, 0).exp(),
            torch.where(mask, advantages, 0),
        )
        return aggregate(-torch.min(r * A, r.clamp(0.8, 1.28) * A), mask, agg)

    assert bool(upref.check(loss, "dapo", skip=QUICK)) == (agg == "token-mean")
    report = upref.check(loss, "dapo", agg=agg, skip=QUICK)
    assert report and report.objective == f"dapo with {agg}"
    assert eval(
        str(upref.identify(loss)).splitlines()[-1].removeprefix("next: "),
        {"upref": upref, "loss": loss},
    )
    with pytest.raises(InputError, match="one term per response"):
        upref.check(loss, "dapo", agg="seq-mean")


def test_hyperparameters_by_what_they_mean():
    """A loss's `cliprange` takes the objective's bounds; two numbers for one argument,
    or none that fits, are refused.
    """

    def clipped(log_prob, old_log_prob, advantages, mask, cliprange, kl_coef=0.0):
        """Return GRPO's loss; kl_coef has no effect."""
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        J = torch.min(
            r * advantages, r.clamp(1 - cliprange, 1 + cliprange) * advantages
        )
        return -((J * mask).sum(1) / mask.sum(1)).mean()

    assert upref.check(clipped, "grpo") and upref.check(clipped, "grpo", eps=0.3)
    assert (
        upref.check(clipped, "dapo", cliprange=0.2, eps_high=0.2).hp["eps_high"] == 0.2
    )
    assert np.allclose(
        upref.weights.curve.make_curve(clipped, cliprange=0.5)(1.4, 1.0), 1.4
    )
    with pytest.raises(InputError, match="eps and cliprange are one argument"):
        upref.check(clipped, "grpo", eps=0.2, cliprange=0.3)
    with pytest.raises(InputError, match="'cliprange'"):
        upref.check(clipped, "cispo")


@pytest.mark.parametrize(
    ("name", "of", "meant"),
    [("vespo_k_pos", "vespo", "c1_pos"), ("lambda_neg", "vespo", "c2_neg"), ("k", "vespo", ""),
     ("lambda_pos", "w_reinforce", "lam"), ("temperature_neg", "sapo", "tau_neg"),
     ("log_ratio_clip", "ppo_clip", ""), ("cliprange_value", "ppo_clip", ""),
     ("clip_grad_norm", "ppo_clip", ""), ("adv_clip", "ppo_clip", "")],
)  # fmt: skip
def test_hyperparameters_by_their_words(name, of, meant):
    assert names.hyperparameter(name, {*get(of).hyperparameters}) == meant


def with_halves(
    log_prob, old_log_prob, advantages, mask, clip_ratio_low=0.2, clip_ratio_high=0.2
):
    """Return DAPO's loss, with the two bounds as arguments of other names."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    clipped = r.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return -torch.minimum(r * A, clipped * A).sum() / mask.sum()


def with_bounds(log_prob, old_log_prob, advantages, mask, clip_min=0.8, clip_max=1.2):
    return with_halves(
        log_prob, old_log_prob, advantages, mask, 1 - clip_min, clip_max - 1
    )


def test_one_eps_goes_to_both_halves_of_a_clip():
    loss = read(with_halves, get("ppo_clip"), {"eps": 0.1})
    assert "eps = 0.1 -> clip_ratio_low, clip_ratio_high" in loss.read_as
    assert loss.bound_args == {"eps": 0.1}
    assert not loss.unbound
    assert read(with_halves, get("ppo_clip")).own_defaults == {"eps": 0.2}
    curve = upref.weights.curve.make_curve(with_halves, eps=0.1)
    assert np.allclose(curve(np.array([0.95, 1.15]), 1.0), [0.95, 0])
    with pytest.raises(InputError, match="eps sets clip_ratio_low and clip_ratio_high"):
        read(with_halves, get("ppo_clip"), {"eps": 0.1, "clip_ratio_low": 0.2})


def test_bounds_of_the_ratio_are_no_halves_of_a_clip():
    loss = read(with_bounds, get("ppo_clip"), {"eps": 0.1})
    assert not loss.bound_args
    assert loss.unbound == {"eps": 0.1}
    assert not read(with_bounds, get("dapo")).accepts
    assert read(with_halves, get("dapo")).accepts == {"eps_low", "eps_high"}
    assert names.halves({"clip_low": 0.2, "clip_high": 0.2})
    assert not names.halves({"clip_low": 0.8, "clip_high": None})
    assert not names.halves({"clip_min": None, "clip_max": None})


def with_guard(log_prob, old_log_prob, advantages, mask, clip_eps=0.2, eps=1e-8):
    """Return PPO's loss, whose `eps` guards the division alone."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    J = torch.minimum(r * A, r.clamp(1 - clip_eps, 1 + clip_eps) * A)
    return -J.sum() / (mask.sum() + eps)


def test_an_eps_that_guards_a_division_is_no_clip():
    def with_one_eps(log_prob, old_log_prob, advantages, mask, eps=1e-8):
        return with_guard(log_prob, old_log_prob, advantages, mask, eps=eps)

    loss = read(with_guard, get("ppo_clip"), {"eps": 0.1})
    assert "eps = 0.1 -> clip_eps" in loss.read_as
    assert read(with_guard, get("ppo_clip")).own_defaults == {"eps": 0.2}
    assert not read(with_one_eps, get("ppo_clip")).accepts


class Configured:
    """A loss with a config, as an instance."""

    def __init__(self, eps):
        self.eps = eps

    def __call__(self, log_prob, old_log_prob, advantages, mask):
        return make({r: c[0] for r, c in CALLED.items()}, CALLED)(
            log_prob, old_log_prob, advantages, mask, self.eps, self.eps
        )

    loss = __call__


class Module(torch.nn.Module):
    def forward(self, log_prob, old_log_prob, advantages, mask):
        return Configured(0.2)(log_prob, old_log_prob, advantages, mask)


def test_instances_methods_partials_and_modules():
    from functools import partial

    for loss in (
        Configured(0.2),
        Configured(0.2).loss,
        partial(USUAL, eps_high=0.2),
        Module(),
    ):
        assert upref.check(loss, "ppo_clip", skip=QUICK), loss


@pytest.mark.parametrize("loss", [lambda batch: batch["x"], lambda data: data.sum()])
def test_what_needs_a_wrapper_gets_the_wrapper(loss):
    assert all(
        "def loss(log_prob, old_log_prob, advantages, mask):" in said
        for said in refusals(loss)
    )


@pytest.mark.parametrize("loss", [Configured, Module])
def test_a_class_is_to_be_constructed(loss):
    assert all(
        f"`loss = {loss.__name__}(...)` with its settings" in said
        for said in refusals(loss)
    )


def test_a_file_may_import_its_neighbours_and_not_exit(tmp_path, capsys, monkeypatch):
    """A loss's file imports the file beside it; a file that ends the program is refused
    with status 2.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_mine.py").write_text("EPS = 0.2\n")
    (tmp_path / "a_loss_of_mine.py").write_text(
        "from neighbour_of_mine import EPS\nimport torch\n"
        + BODY.format(signature="log_prob, old_log_prob, advantages, mask", **{r: c[0] for r, c in CALLED.items()})
        .replace("eps_low=0.2", "eps_low=EPS")
    )  # fmt: skip
    assert (
        main(["check", f"{tmp_path}/a_loss_of_mine.py:loss", "--as", "dapo", "--json"])
        == 0
    )
    # as it was given
    assert json.loads(capsys.readouterr().out)["loss"].endswith(
        "a_loss_of_mine.py:loss"
    )
    (tmp_path / "ends.py").write_text(
        "import sys\ndef loss(log_prob, old_log_prob, advantages, mask): return 0\nsys.exit(0)\n"
    )
    assert main(["check", f"{tmp_path}/ends.py:loss", "--as", "dapo"]) == 2
    assert "ends the program" in capsys.readouterr().err


@pytest.mark.parametrize("role", CALLED)
def test_the_rule_of_names(role):
    assert all(names.role(n) == role for n in CALLED[role])


def test_names_that_are_no_role():
    none = "model batch inputs tokenizer config labels temperature threshold rollout_n kl_coef clip_eps group_size"
    for n in (*none.split(), "entropy_coef", "advantage_weight"):
        assert names.role(n) == "", n


@pytest.mark.parametrize("name", ["invalid_mask", "masked_out", "is_pad", "done"])
def test_what_is_true_where_no_token_trains_is_no_mask(name):
    called = {"logp": "lp", "logp_old": "old_lp", "adv": "adv", "mask": name}
    with pytest.raises(InputError, match=f"{name}=\\.\\.\\."):
        read(make(called, CALLED))


def old_first(a, b, c, d):
    """Return PPO's loss, right in verl's order, with its arguments called by letters."""
    r = torch.where(d, b - a, 0).exp()
    return -(torch.where(d, torch.min(r * c, r.clamp(0.8, 1.2) * c), 0)).sum() / d.sum()


def new_first(a, b, c, d):
    return old_first(b, a, c, d)


def right_by_stars(*x):
    return old_first(*x)


def cispo_old_first(a, b, c, d):
    r = torch.where(d, b - a, 0).exp().clamp(max=5).detach()
    return -torch.where(d, r * c * b, 0).sum() / d.sum()


def clipped_alone_old_first(a, b, c, d):
    """Return a loss that is wrong in either order: the minimum is missing."""
    r = torch.where(d, b - a, 0).exp()
    return -torch.where(d, r.clamp(0.8, 1.2) * c, 0).sum() / d.sum()


@pytest.mark.nightly
def test_a_loss_that_fails_for_its_order_alone_is_ambiguous():
    """Letters do not tell which policy is which: no accusation rests on their order."""
    for loss, name in (
        (old_first, "ppo_clip"),
        (old_first, "dapo"),
        (right_by_stars, "ppo_clip"),
        (cispo_old_first, "cispo"),
    ):
        hp = {"eps_low": 0.2, "eps_high": 0.2} if name == "dapo" else {}
        with pytest.raises(InputError, match="cannot tell which argument is log_prob"):
            upref.check(loss, name, skip=QUICK, **hp)
        with pytest.raises(InputError, match="cannot tell which argument is log_prob"):
            upref.identify(loss)
    assert upref.check(new_first, "ppo_clip", skip=QUICK)
    assert upref.identify(new_first).name == "ppo_clip"
    # a size that neither order has is no matter of the order
    report = upref.check(new_first, "ppo_clip", skip=QUICK, eps=0.3)
    assert not report and "inverted" not in report.text()

    def names_say(log_prob, old_log_prob, advantages, mask):
        return old_first(log_prob, old_log_prob, advantages, mask)

    said = upref.check(names_say, "ppo_clip", skip=QUICK).text()
    assert "the ratio is inverted" in said


@pytest.mark.nightly
def test_a_fault_in_an_unknown_order_is_no_inverted_ratio():
    for judge in (lambda f: upref.check(f, "ppo_clip", skip=QUICK), upref.identify):
        try:
            said = judge(clipped_alone_old_first).text()
        except InputError as e:
            said = str(e)
        assert "inverted" not in said


def test_the_policy_that_sampled_is_told_by_its_word():
    """Find the old log-probabilities by mu or gen beside pi or train, in both orders,
    and not by either alone.
    """
    for new, old in (("pi_logps", "mu_logps"), ("train_lps", "gen_lps")):
        for order in (("logp", "logp_old"), ("logp_old", "logp")):
            called = {"logp": new, "logp_old": old, "adv": "adv", "mask": "mask"}
            loss = make(called, (*order, "adv", "mask"))
            assert f"{old} -> old_log_prob" in read(loss).read_as
    # each of them alone says nothing of the other
    for one, other in (("mu_logps", "gen_lps"), ("lp1", "mu_logps"), ("lp1", "lp0")):
        called = {"logp": one, "logp_old": other, "adv": "adv", "mask": "mask"}
        assert all(
            "cannot tell which of" in said for said in refusals(make(called, called))
        )


PASTED = {
    "def f(x, y, adv, mask):": "f(x=log_prob, y=old_log_prob, adv=advantages, mask=mask)",
    "def f(lp1, lp0, adv, m):": "f(lp1=log_prob, lp0=old_log_prob, adv=advantages, m=mask)",
    "def f(old_lp, cur_lp, A, m, clip):": "f(old_lp=old_log_prob, cur_lp=log_prob, A=advantages, m=mask, clip=clip)",
    "def f(x, /, y, adv, mask):": "f(log_prob, y=old_log_prob, adv=advantages, mask=mask)",
    "def f(lp, old_lp, adv, lengths):": "f(lp=log_prob, old_lp=old_log_prob, adv=advantages, lengths=...)",
}


@pytest.mark.parametrize("signature", PASTED)
def test_the_wrapper_of_an_error_can_be_pasted(signature):
    scope = {}
    exec(signature + "\n    return locals()", scope)
    with pytest.raises(InputError) as e:
        read(scope["f"])
    code = str(e.value).partition("check a wrapper: `")[2].partition("`")[0]
    assert code.endswith(PASTED[signature])
    exec(code, scope)
    values = dict(log_prob=1, old_log_prob=2, advantages=3, mask=4)
    more = {"clip": 5} if "clip" in signature else {}
    assert set(scope["loss"](**values, **more).values()) >= {1, 2, 3}


def test_a_count_of_tokens_is_not_bound_to_a_constant():
    """Find that the suggested wrapper passes the count of `totals`, and that no `--hp`
    is suggested.
    """

    def trl_loss(lp, old_lp, adv, mask, num_items_in_batch):
        return locals()

    with pytest.raises(InputError) as e:
        read(trl_loss)
    assert "--hp" not in str(e.value)
    scope = {"trl_loss": trl_loss}
    code = str(e.value).partition("file, `")[2].partition("`")[0]
    exec(code, scope)
    totals = SimpleNamespace(tokens=7)
    given = scope["loss"](1, 2, 3, 4, totals)
    assert list(given.values()) == [1, 2, 3, 4, 7]


@pytest.mark.parametrize("name", ["max_tokens", "tokens", "num_items_per_gpu", "n"])
def test_other_numbers_are_no_count_of_tokens(name):
    assert not names.counts_tokens(name)


def test_an_advantage_function_is_told_which_commands_take_it():
    def advantages(rewards, group_ids, eps=1e-6):
        raise AssertionError("it is not called")

    def reinforce(rewards, logits):
        raise AssertionError("it is not called")

    [said] = {refused(advantages)}
    assert "--as-advantage group_norm" in said and "`def " not in said
    assert "--as-advantage" not in refused(reinforce)


def test_the_wrapper_of_a_function_in_a_file_is_told_its_place(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def loss(lp, lp_old, A):\n    return lp.sum()\n")
    assert "below `from mine import loss`." in refused(f"{file}:loss")


def test_a_misspelled_hyperparameter_is_told_the_nearest():
    with pytest.raises(InputError, match=r"'eps_hihg'.*Did you mean eps_high\?"):
        get("dapo").resolve({"eps_hihg": 0.3})
    with pytest.raises(InputError) as e:
        get("dapo").resolve({"temperature": 0.3})
    assert "mean" not in str(e.value)


def test_a_setting_that_only_the_loss_gets_is_told():
    def loss(lp, old_lp, adv, mask, clip_high=0.28):
        r = (lp - old_lp).exp()
        return -(torch.minimum(r * adv, r.clamp(0.8, 1 + clip_high) * adv) * mask).sum()

    told = "clip_high = 0.3 -> only the loss, not dapo (set eps_high for both)"
    assert told in read(loss, get("dapo"), {"clip_high": 0.3}).read_as
    assert "only the loss" not in read(loss, get("dapo"), {"eps_high": 0.3}).read_as


def refused(loss):
    """Return the error with which a loss is refused."""
    with pytest.raises(InputError) as e:
        upref.check(loss, "dapo")
    return str(e.value)


CLIP = "r = (new - old).exp(); J = torch.minimum(r * A, r.clamp(0.8, high) * A)"
SELECTED = f"{CLIP}; return -J.mean()"
MASKED = f"{CLIP}; return -J[keep].sum() / keep.sum()"
H = "high=1.28"
PAD = "padding_mask=..."
# a right DAPO: its arguments, what they are, its body, what stands for the dots of its
# wrapper
RIGHT_LOSSES = {
    "by position": (f"new, p, adv, keep, {H}", "old, A = p, adv", MASKED, {}),
    "one policy": (f"lp1, lp0, A, m, {H}", "new, old, keep = lp1, lp0, m", MASKED, {}),
    "a setting": (
        "old_lp, cur_lp, A, m, clip",
        "new, old, keep, high = cur_lp, old_lp, m, 1 + clip",
        MASKED,
        {},
    ),
    "positional": (f"x, /, y, A, keep, {H}", "new, old = x, y", MASKED, {}),
    "a tuple": (f"*every, {H}", "new, old, A, keep = every", MASKED, {}),
    "keywords alone": (
        "**k",
        "new, old, A, keep, high = *k['all'], 1.28",
        MASKED,
        {"...": "all=(log_prob, old_log_prob, advantages, mask)"},
    ),
    "all in one": (
        "batch",
        "new, old, A, keep, high = *batch, 1.28",
        MASKED,
        {"...": "(log_prob, old_log_prob, advantages, mask)"},
    ),
    "lengths": (
        f"new, old, A, lengths, {H}",
        "keep = lengths",
        MASKED,
        {"lengths=...": "lengths=mask"},
    ),
    "padding": (
        f"new, old, A, padding_mask, {H}",
        "keep = ~padding_mask",
        MASKED,
        {PAD: "padding_mask=~mask"},
    ),
    "no mask": (f"new, old, A, {H}", "pass", SELECTED, {}),
    "no mask, and the entropy": (
        f"new, old, adv, entropy, {H}",
        "A = adv + 0 * entropy",
        SELECTED,
        {},
    ),
    "no mask, and a critic": (
        f"new, old, adv, vpred, {H}",
        "A = adv + 0 * vpred",
        SELECTED,
        {"vpred=...": "vpred=0"},
    ),
    "a critic": (
        f"new, old, adv, vpred, m, {H}",
        "A, keep = adv + 0 * vpred, m",
        MASKED,
        {"vpred=...": "vpred=0"},
    ),
    "a critic, its returns and padding": (
        f"new, old, A, vpred, returns, padding_mask, {H}",
        "keep = ~padding_mask",
        MASKED,
        {"vpred=...": "vpred=0", "returns=...": "returns=0", PAD: "padding_mask=~mask"},
    ),
}


def pasted(said, dots):
    """Return the wrapper that an error suggests, with code in place of each of its
    dots.
    """
    code = re.search(r"`(def \w+\(.*?\): return .*?)`", said)[1]
    for place, value in dots.items():
        assert place in code, code
        code = code.replace(place, value)
    assert "..." not in code
    return code


@pytest.mark.parametrize("kind", RIGHT_LOSSES)
def test_a_right_loss_agrees_in_the_wrapper_that_its_error_suggests(kind):
    arguments, named, body, dots = RIGHT_LOSSES[kind]
    scope = {"torch": torch}
    exec(f"def f({arguments}):\n    {named}\n    {body}", scope)
    hp = {"clip": 0.28} if "clip" in arguments else {}
    try:
        report = upref.check(scope["f"], "dapo", skip=QUICK)
    except InputError as e:
        exec(pasted(str(e), dots), scope)
        report = upref.check(scope["loss"], "dapo", skip=QUICK, **hp)
    else:
        pytest.fail(f"no wrapper is suggested: {report}")
    assert report, report.text()


def test_a_loss_without_a_mask_agrees_row_by_row_too():
    """The other wrapper that the error names, where responses count equally."""

    def f(new, old, adv):
        r = (new - old).exp()
        return -torch.minimum(r * adv, r.clamp(0.8, 1.2) * adv).mean()

    def loss(log_prob, old_log_prob, advantages, mask):
        rows = zip(log_prob, old_log_prob, advantages, mask, strict=True)
        return torch.stack([f(lp[m], old[m], A[m]) for lp, old, A, m in rows]).mean()

    assert upref.check(loss, "grpo", skip=QUICK)


def test_a_critics_number_is_never_the_mask():
    def loss(log_prob, old_log_prob, advantages, vpred):
        raise AssertionError("it is not called")

    assert all("cannot tell which argument is mask" in said for said in refusals(loss))
    [said] = {said for said in refusals(loss)}
    assert "vpred=mask" not in said and "vpred=..." in said


def test_by_position_only_and_through_wrappers():
    """Arguments are read by name through position-only signatures and functools.wraps."""
    import functools

    def only(mask, old_log_prob, /, advantages, log_prob):
        return USUAL(log_prob, old_log_prob, advantages, mask)

    def swapped(old_log_prob, log_prob, advantages, mask):
        return USUAL(log_prob, old_log_prob, advantages, mask)

    stars = functools.wraps(swapped)(lambda *a: swapped(*a))
    first = functools.wraps(swapped)(lambda x, *a, **k: swapped(x, *a, **k))
    named = functools.wraps(swapped)(lambda **k: swapped(**k))
    for loss in (only, swapped, stars, first, named):
        assert np.allclose(
            upref.weights.curve.make_curve(loss)(R, 1.0),
            upref.weights.curve.make_curve("dapo")(R, 1.0),
        )


class Answer(NamedTuple):
    kl: torch.Tensor
    loss: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "right"),
    [
        (lambda x: (x, 1.0, {"clip": 0.1}), True),
        (lambda x: (x, x.detach() * 3), True),
        (lambda x: {"kl": x * 2, "loss": x}, True),
        (lambda x: Answer(2 * x, x), True),
        (lambda x: x[None], True),
        (lambda x: (x, 0.3 * x), True),
        (lambda x: (x.detach(), x), False),
        (lambda x: {"policy_loss": x}, False),
        (lambda x: ({}, x), False),
    ],
)
def test_the_loss_in_an_answer_is_found_or_the_answer_refused(wrap, right):
    """Wrap a right loss in an answer of another form, and find its curve or a suggested
    wrapper.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        return wrap(USUAL(log_prob, old_log_prob, advantages, mask))

    if right:
        assert np.allclose(
            upref.weights.curve.make_curve(loss)(R, 1.0),
            upref.weights.curve.make_curve("dapo")(R, 1.0),
        )
    else:
        assert all(
            "def loss(log_prob, old_log_prob, advantages, mask): return" in said
            for said in refusals(loss)
        )


def test_the_first_element_is_the_loss_though_another_trains_too():
    def older_verl(old_log_prob, log_prob, advantages, response_mask, cliprange=0.2):
        """Return verl's older tuple: pg_loss, a share, ppo_kl, which has a gradient
        too, and 0.
        """
        ppo_kl = ((old_log_prob - log_prob) * response_mask).sum() / response_mask.sum()
        pg_loss = USUAL(
            log_prob, old_log_prob, advantages, response_mask, cliprange, cliprange
        )
        return pg_loss, 0.1, ppo_kl, 0.0

    report = upref.check(older_verl, "ppo_clip", skip=QUICK)
    assert (
        report
        and "result -> its first element; another one has a gradient too"
        in report.read_as
    )


def test_an_answer_that_is_no_loss_is_told_without_further_shapes():
    """[B] does not broadcast here: that error is of a shape which only upref tries."""

    def as_number(log_prob, old_log_prob, advantages, mask):
        return -(log_prob * advantages)[mask].mean().item()

    assert all(
        "returns a float" in said and "raised" not in said
        for said in refusals(as_number)
    )


LOSS = "import torch\n" + BODY.format(
    signature="log_prob, old_log_prob, advantages, mask, eps_low=EPS", **{r: c[0] for r, c in CALLED.items()}
).replace(", eps_low=0.2, eps_high=0.28", ", eps_high=0.28")  # fmt: skip


def test_files_and_packages_of_one_name(tmp_path):
    """Each file finds the neighbor in its own folder, also if it is named as a module
    of Python, or in a package.
    """
    for folder, eps in (("a", 0.1), ("b", 0.5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "the_bounds_of_it.py").write_text(f"EPS = {eps}\n")
        (tmp_path / folder / "random.py").write_text(
            "from the_bounds_of_it import EPS\n" + LOSS
        )
        (tmp_path / folder / "mine_too.py").write_text(
            "from the_bounds_of_it import EPS\n" + LOSS
        )
    for file in ("random", "mine_too"):
        for folder, eps in (("a", 0.1), ("b", 0.5), ("a", 0.1)):
            w = upref.weights.curve.make_curve(f"{tmp_path}/{folder}/{file}.py:loss")
            assert w(1 - eps + 0.01, -1.0) != 0 and w(1 - eps - 0.01, -1.0) == 0, (
                folder,
                file,
            )
    import random

    assert random.random and "a/random" not in str(random.__file__)
    package = tmp_path / "a_package_of_mine"
    (package / "inner").mkdir(parents=True)
    for at in (package, package / "inner"):
        (at / "__init__.py").write_text("")
    (package / "bounds.py").write_text("EPS = 0.3\n")
    (package / "inner" / "it.py").write_text("from ..bounds import EPS\n" + LOSS)
    assert (
        upref.weights.curve.make_curve(f"{package}/inner/it.py:loss")(0.69, -1.0) == 0
    )
    (tmp_path / "a" / "lonely.py").write_text(
        "from .the_bounds_of_it import EPS\n" + LOSS
    )
    with pytest.raises(
        InputError,
        match=r"does not import: ImportError: attempted relative import.*the leading dot",
    ):
        upref.weights.curve.make_curve(f"{tmp_path}/a/lonely.py:loss")


@pytest.mark.parametrize(
    "body",
    [
        "print('hello')",
        "import sys; sys.stdout.close()",
        "raise KeyboardInterrupt",
        "1/0",
    ],
)
def test_what_a_file_does_when_it_is_imported(tmp_path, capsys, body):
    (tmp_path / "it_does.py").write_text(body + "\nEPS = 0.2\n" + LOSS)
    status = main(["weights", f"{tmp_path}/it_does.py:loss", "--json"])
    out, err = capsys.readouterr()
    assert (
        status == (2 if "1/0" in body or "raise" in body else 0)
        and "Traceback" not in err
    )
    assert json.loads(out) if status == 0 else err.count("\n") == 1


@pytest.mark.parametrize(
    "name",
    [
        "x\0.py:f",
        "no/such.py:f",
        "upref:nothing",
        ".:f",
        ":",
        "::",
        " : ",
        "a b:c",
        ".py:f",
    ],
)
def test_a_name_that_is_none_is_one_sentence(name):
    with pytest.raises(InputError) as e:
        read(name)
    assert "\n" not in str(e.value)


def test_rewards_beside_groups_are_not_taken_for_advantages():
    """The function may normalize them itself, which would be done to advantages."""

    def loss(log_prob, old_log_prob, rewards, group, mask):
        """Read the names alone."""

    [said] = refusals(loss)
    assert "'rewards' may be the advantages, or rewards" in said
    assert "--as-advantage group_norm" in said

    def of_normalized(log_prob, old_log_prob, normalized_rewards, group, mask):
        r = (log_prob - old_log_prob).exp()
        return -torch.where(mask, r * normalized_rewards, 0).sum() / mask.sum()

    assert read(of_normalized, get("is_pg"), {}).read_as.startswith(
        "normalized_rewards"
    )


def test_an_optional_argument_gives_way_to_a_required_one():
    """As where a correction between the sampler's log-probabilities and the trainer's
    is an option.
    """

    def loss(log_prob, old_log_prob, advantages, mask, rollout_log_probs=None):
        """Return PPO's clipped loss; fail where the optional argument is given."""
        assert rollout_log_probs is None
        r = (log_prob - old_log_prob).exp()
        return (
            -(
                torch.where(
                    mask,
                    torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages),
                    0,
                )
            ).sum()
            / mask.sum()
        )

    report = upref.check(loss, "ppo_clip")
    assert (
        report
        and "rollout_log_probs is left at its default, None" in report.assumptions
    ), report.assumptions


# ---- one name, one reading, in every place -------------------------------------------
def test_a_loss_without_the_old_policy_is_read():
    def loss(log_prob, advantages, mask):
        return -torch.where(mask, log_prob * advantages, 0).sum() / mask.sum()

    assert upref.check(loss, "reinforce_off_policy", skip=QUICK)
    assert upref.identify(loss).name == "reinforce_off_policy"
    with pytest.raises(InputError, match="which argument is old_log_prob"):
        upref.check(loss, "dapo")


def test_a_hyperparameter_that_nobody_knows_is_an_error():
    def loss(log_prob, old_log_prob, advantages, mask, clip=0.2, **more):
        return up_dapo(log_prob, old_log_prob, advantages, mask)

    def up_dapo(lp, old, A, m):
        return upref.get("up_dapo").loss(upref.Rollouts(lp, old, A, m))

    with pytest.raises(
        InputError,
        match="'epsilon_hihg' is not a hyperparameter of up_dapo or a named argument",
    ):
        upref.check(loss, "up_dapo", epsilon_hihg=0.3)
    assert upref.check(loss, "up_dapo", clip=0.3, skip=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", daily(["up_dapo", "up(sapo)", "nothing:here", "dpao", "liger:dapo"], 2)
)
def test_the_command_and_the_library_accept_the_same_names(name, capsys):
    """All verbs and their twins, and the same sentence where a name means nothing."""
    twins = {
        ("check", name, "--as", "dapo", "--skip", "extremes"): lambda: upref.check(
            name, "dapo", skip=("extremes",)
        ),
        ("identify", name): lambda: upref.identify(name),
        ("cap", name): lambda: upref.capacity(name, 0.01, 0.01),
    }
    for command, twin in twins.items() if name != "liger:dapo" else ():
        status = main(list(command))
        try:
            twin()
            assert status in (0, 1), command
        except InputError:
            assert status == 2, command
    if name == "liger:dapo":
        with pytest.raises(
            InputError,
            match="liger is not imported here, its losses need a process of their own",
        ):
            upref.check(name, "dapo")
    capsys.readouterr()


@pytest.mark.parametrize(
    "low, high", [("eps_lo", "eps_hi"), ("clip_bottom", "clip_top"), ("eps_a", "eps_b")]
)
def test_one_of_two_bounds_is_not_the_whole_clip(low, high):
    """GRPO has one eps, which goes to both bounds of a loss, or to none."""
    text = f"def loss(log_prob, old_log_prob, advantages, mask, {low}=0.2, {high}=0.2): return log_prob.sum()"
    space: dict = {}
    exec(text, space)
    whole = read(space["loss"], upref.get("grpo"), {"eps": 0.1})
    assert whole.accepts == ({"eps"} if high != "eps_b" else set())
    assert whole.unbound == ({} if high != "eps_b" else {"eps": 0.1})
    assert read(space["loss"], upref.get("dapo"), {}).accepts == (
        {"eps_low", "eps_high"} if high != "eps_b" else set()
    )


RAISES = """
def setting(config):
    return config["clip"]

def loss(log_prob, old_log_prob, advantages, mask):
    return setting({}) * log_prob.sum()

class Trainer:
    def loss(self, log_prob, old_log_prob, advantages, mask):
        return log_prob.sum()
"""


def test_an_exception_keeps_its_place_and_its_cause(tmp_path):
    file = tmp_path / "raises.py"
    file.write_text(RAISES, encoding="utf-8")
    with pytest.raises(
        InputError,
        match=r"raised KeyError: 'clip' \(raises.py, line 3, in setting\) \(it was called with log_prob = float64",
    ) as caught:
        upref.check(f"{file}:loss", "dapo")
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    assert [f.name for f in traceback.extract_tb(cause.__traceback__)][-2:] == [
        "loss",
        "setting",
    ]


def test_a_method_says_what_to_do(tmp_path):
    file = tmp_path / "method.py"
    file.write_text(RAISES, encoding="utf-8")
    with pytest.raises(
        InputError, match="is a method: in its file make an object, write"
    ):
        upref.check(f"{file}:Trainer.loss", "dapo")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DAPO", "dapo"),
        ("UP-DAPO", "up_dapo"),
        ("Dr-GRPO", "dr_grpo"),
        ("ppo", "ppo_clip"),  # not gppo, which is spelled more like it
        ("PPO", "ppo_clip"),
    ],
)
def test_a_name_of_other_letters_or_fewer_words_has_one_suggestion(name, meant):
    with pytest.raises(InputError, match=rf"{name}'.* did you mean {meant}\?$"):
        upref.get(name)
    # a loss that is called by this word echoes it as it was typed
    with pytest.raises(InputError) as caught:
        catalog.require_loss(name)
    assert str(caught.value).startswith(f"{name!r} is not a loss: ")
    assert f"There is no objective named {name!r}: did you mean {meant}?" in str(
        caught.value
    )


def test_a_transform_or_an_estimator_in_capitals_has_its_suggestion():
    with pytest.raises(InputError, match=r"transform named 'TIS': did you mean tis\?"):
        upref.get("TIS(dapo)")
    with pytest.raises(InputError, match="GROUP_NORM': did you mean 'group_norm'"):
        upref.check_advantages(lambda rewards, group: rewards, "GROUP_NORM")


def test_code_that_asks_for_a_gpu_is_told_where_its_inputs_are():
    def loss(log_prob, old_log_prob, advantages, mask):
        raise AssertionError("Torch not compiled with CUDA enabled")

    with pytest.raises(InputError, match="device of log_prob"):
        upref.check(loss, "dapo")


class Trainer:
    def compute_loss(self, log_prob, old_log_prob, advantages, mask):
        return dapo(log_prob, old_log_prob, advantages, mask)


def dapo(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.28) * A).sum() / mask.sum()


def of_verl(model_output, data, dp_group=None):
    rest = (data["old_log_probs"], data["advantages"], data["response_mask"])
    return dapo(model_output["log_probs"], *rest)


def of_slime(args, batch):
    keys = ("log_probs", "old_log_probs", "advantages", "response_mask")
    return dapo(*(batch[key] for key in keys))


@pytest.mark.parametrize("loss", [of_verl, of_slime])
def test_the_wrapper_for_dictionaries_is_right_as_it_is_pasted(loss):
    with pytest.raises(InputError) as error:
        upref.check(loss, "dapo")
    code = re.search("`(def loss.*?)`", str(error.value))[1].replace("=...", "=None")
    scope = {loss.__name__: loss}
    exec(code, scope)
    assert upref.check(scope["loss"], "dapo")


def test_an_instance_is_refused_by_the_name_of_its_method(tmp_path):
    with pytest.raises(InputError, match=r"check its method, \.compute_loss\."):
        upref.check(Trainer(), "dapo")
    assert upref.check(Trainer().compute_loss, "dapo")
    file = tmp_path / "own.py"
    file.write_text(
        "class T:\n    def my_loss(self, x):\n        return x\n\n\nit = T()\n",
        encoding="utf-8",
    )
    with pytest.raises(InputError, match=r"own.py:it\.my_loss"):
        upref.check(f"{file}:it", "dapo")


def test_the_inputs_of_a_critic_are_no_settings():
    def both(log_prob, old_log_prob, advantages, mask, values, returns):
        return dapo(log_prob, old_log_prob, advantages, mask)

    with pytest.raises(InputError, match="'values', which a critic has"):
        upref.check(both, "dapo")


def test_a_text_is_a_hyperparameter(tmp_path, capsys):
    file = tmp_path / "text.py"
    file.write_text(
        "import torch\n\n\ndef loss(log_prob, old_log_prob, advantages, mask, loss_agg_mode):\n"
        "    r = torch.where(mask, log_prob - old_log_prob, 0).exp()\n"
        "    A = torch.where(mask, advantages, 0)\n"
        "    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)\n"
        "    if loss_agg_mode == 'seq-mean':\n"
        "        return -(J.sum(1) / mask.sum(1)).mean()\n"
        "    return -J.sum() / mask.sum()\n",
        encoding="utf-8",
    )
    check = ["check", f"{file}:loss", "--as", "dapo", "--hp", "loss_agg_mode=seq-mean"]
    assert main(check) == 1
    assert main([*check, "--agg", "seq-mean-token-mean"]) == 0
    capsys.readouterr()
