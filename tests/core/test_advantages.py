# SPDX-License-Identifier: Apache-2.0
"""Advantages in exact arithmetic: rewards, means and variances are Fractions, square
roots are sympy's.
"""

from fractions import Fraction
from math import sqrt

import pytest
import sympy
import torch
from hypothesis import given, settings, strategies as st

from upref import advantages
from upref.advantages import (
    distillation,
    gdpo,
    group_mean,
    group_mean_whiten,
    group_norm,
    leave_one_out,
    maxrl,
    reward,
    signed,
    whiten,
    whiten_tokens,
)
from upref.rollouts import InputError

# act within a prompt; the others do not
GROUPED = ["group_norm", "group_mean", "leave_one_out"]


def tensors(rewards, group, dtype=torch.float64):
    return torch.tensor([float(r) for r in rewards], dtype=dtype), torch.tensor(group)


def exact_mean(xs):
    return sum(xs) / Fraction(len(xs))


def exact_std(xs, ddof):
    m = exact_mean(xs)
    var = sum((x - m) ** 2 for x in xs) / Fraction(max(len(xs) - ddof, 1))
    return sympy.sqrt(sympy.Rational(var.numerator, var.denominator))


def exact_norm(xs, ddof, eps):
    """Return (R - mean) / (std + eps) of one group, evaluated to 30 digits from exact
    rationals.
    """
    m, std = exact_mean(xs), exact_std(xs, ddof)
    if std == 0:
        return [0.0] * len(xs)
    return [
        float(
            (
                sympy.Rational(*(x - m).as_integer_ratio())
                / (std + sympy.Rational(eps))
            ).evalf(30)
        )
        for x in xs
    ]


def by_group(rewards, group, formula):
    """Apply formula(list of the group's rewards) -> list, and put the results back in
    place: the obvious loop.
    """
    out = [None] * len(rewards)
    for g in set(group):
        rows = [i for i, h in enumerate(group) if h == g]
        for i, a in zip(rows, formula([rewards[i] for i in rows]), strict=True):
            out[i] = float(a)
    return out


def close(got, want, atol=1e-13):
    torch.testing.assert_close(
        got, torch.as_tensor(want, dtype=got.dtype), rtol=1e-12, atol=atol
    )


# Uneven, interleaved groups with ids that are neither sorted nor dense; singletons and
# constant groups come up often.
quarters = st.integers(-8, 8).map(lambda k: Fraction(k, 4))
batches = st.lists(
    st.tuples(quarters, st.sampled_from([7, -3, 0, 10**12])), min_size=1, max_size=12
).map(lambda rows: tuple(map(list, zip(*rows, strict=True))))


@settings(deadline=None)
@given(batches, st.sampled_from([0, 1]), st.sampled_from([1e-6, 1e-4, 0.0]))
def test_group_norm_is_its_equation_in_exact_rationals(batch, ddof, eps):
    got = group_norm(*tensors(*batch), ddof=ddof, eps=eps)
    close(got, by_group(*batch, lambda xs: exact_norm(xs, ddof, eps)))


@settings(deadline=None)
@given(batches)
def test_group_mean_and_leave_one_out_in_exact_rationals(batch):
    close(
        group_mean(*tensors(*batch)),
        by_group(*batch, lambda xs: [x - exact_mean(xs) for x in xs]),
    )

    def others(xs):  # the definition, not the G/(G-1) identity that the code uses
        return [
            x - exact_mean(xs[:i] + xs[i + 1 :]) if len(xs) > 1 else 0
            for i, x in enumerate(xs)
        ]

    close(leave_one_out(*tensors(*batch)), by_group(*batch, others))


@settings(deadline=None)
@given(batches, st.sampled_from([0, 1]))
def test_whitening_is_over_all_responses_in_exact_rationals(batch, ddof):
    """Both whitening estimators against rationals; of one the group means are
    subtracted first.
    """
    rewards, _ = batch
    close(
        whiten(*tensors(*batch), ddof=ddof, eps=1e-8), exact_norm(rewards, ddof, 1e-8)
    )

    def centered(xs):
        return [x - exact_mean(xs) for x in xs]

    # group means first, kept exact by going through 1/27720 = 1/lcm(1..12)
    exact = [
        Fraction(round(a * 4 * 27720), 4 * 27720) for a in by_group(*batch, centered)
    ]
    close(
        group_mean_whiten(*tensors(*batch), ddof=ddof, eps=1e-8),
        exact_norm(exact, ddof, 1e-8),
    )


def test_a_worked_example():
    """Prompt 5: rewards 1, 0, 0, 1, mean 1/2, std √(1/3) or 1/2. Prompt 2: 3, 0, mean
    3/2, std √4.5 or 3/2.
    """
    r, g = tensors([1, 3, 0, 0, 8, 0, 1], [5, 2, 5, 5, 9, 2, 5])
    close(group_mean(r, g), [0.5, 1.5, -0.5, -0.5, 0, -1.5, 0.5])
    close(leave_one_out(r, g), [2 / 3, 3, -2 / 3, -2 / 3, 0, -3, 2 / 3])
    close(group_norm(r, g, eps=0.0)[[0, 1]], [0.5 * sqrt(3), 1.5 / sqrt(4.5)])
    close(group_norm(r, g, ddof=0, eps=0.0)[[0, 1]], [1, 1])
    # 0.5/(0.5+0.5), 1.5/(1.5+0.5)
    close(group_norm(r, g, ddof=0, eps=0.5)[[0, 1]], [0.5, 0.75])


def test_defaults_are_the_documented_ones():
    r, g = tensors([1, 0, 0, 5, 2], [0, 0, 0, 1, 1])
    assert torch.equal(group_norm(r, g), group_norm(r, g, ddof=1, eps=1e-6))
    assert torch.equal(whiten(r, g), whiten(r, g, ddof=0, eps=1e-8))
    assert torch.equal(
        group_mean_whiten(r, g), group_mean_whiten(r, g, ddof=0, eps=1e-8)
    )
    noise = r * 1e-6  # where eps can be seen
    assert not torch.allclose(group_norm(noise, g), group_norm(noise, g, eps=1e-7))


@settings(deadline=None)
@given(batches)
def test_leave_one_out_is_g_over_g_minus_1_times_group_mean(batch):
    r, g = tensors(*batch)
    size = torch.tensor([batch[1].count(h) for h in batch[1]], dtype=r.dtype)
    several = size > 1
    close(leave_one_out(r, g)[several], (group_mean(r, g) * size / (size - 1))[several])


@pytest.mark.parametrize("G", [2, 3, 8])
def test_ddof_changes_the_advantage_by_sqrt_of_g_minus_1_over_g(G):
    r, g = tensors(range(G), [4] * G)
    close(
        group_norm(r, g, ddof=1, eps=0.0),
        group_norm(r, g, ddof=0, eps=0.0) * sqrt((G - 1) / G),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.7, 1e6 + 0.1])
@pytest.mark.parametrize("G", [1, 3, 7, 10])
def test_equal_rewards_give_exactly_zero(value, G, dtype):
    r = torch.tensor([value] * G + [0.0, 1.0], dtype=dtype)
    g = torch.tensor([3] * G + [1, 1])
    for name in [*GROUPED, "group_mean_whiten"]:
        A = advantages.get(name)(r, g)
        assert torch.equal(A[:G], torch.zeros(G, dtype=dtype)), name
        assert A[G] < 0 < A[G + 1], name
    assert torch.equal(whiten(r[:G]), torch.zeros(G, dtype=dtype))
    assert torch.equal(group_norm(r, g, eps=0.0)[:G], torch.zeros(G, dtype=dtype))


def test_the_mean_of_equal_floats_really_is_an_ulp_off():
    """Without this the test above would prove nothing: 0.1 added ten times is not 1."""
    total = 0.0
    for _ in range(10):
        total += 0.1
    assert 0.1 - total / 10 != 0


def test_a_singleton_is_zero_or_whitened():
    r, g = tensors([5, 1, 0], [1, 2, 2])
    for name in GROUPED:
        assert advantages.get(name)(r, g)[0] == 0, name
    # mean 2, squares 9 + 1 + 4 over 3
    close(whiten(r, g, eps=0.0)[0], 3 / sqrt(14 / 3))


@settings(deadline=None)
@given(batches, st.randoms(use_true_random=False))
def test_permuting_the_responses_permutes_the_advantages(batch, random):
    r, g = tensors(*batch)
    order = list(range(len(r)))
    random.shuffle(order)
    for name in [*GROUPED, "whiten", "group_mean_whiten", "reward"]:
        f = advantages.get(name)
        close(f(r[order], g[order]), f(r, g)[order])


@settings(deadline=None)
@given(batches)
def test_only_which_ids_are_equal_matters(batch):
    r, g = tensors(*batch)
    renamed = torch.unique(g, return_inverse=True)[1].to(torch.int32) * -5 + 3
    for name in GROUPED:
        assert torch.equal(
            advantages.get(name)(r, renamed), advantages.get(name)(r, g)
        ), name


@settings(deadline=None)
@given(batches, st.sampled_from([0.5, 3.0, 8.0]), st.sampled_from([-3.0, 0.25, 40.0]))
def test_shift_does_nothing_and_scale_passes_or_cancels(batch, scale, shift):
    r, g = tensors(*batch)
    for name in [*GROUPED, "whiten", "group_mean_whiten"]:
        close(advantages.get(name)(r + shift, g), advantages.get(name)(r, g))
    for f in (group_mean, leave_one_out):
        close(f(scale * r, g), scale * f(r, g))
    for f in (group_norm, whiten, group_mean_whiten):
        close(f(scale * r, g, eps=0.0), f(r, g, eps=0.0))


@settings(deadline=None)
@given(batches)
def test_groups_do_not_see_each_other(batch):
    r, g = tensors(*batch)
    for name in GROUPED:
        f = advantages.get(name)
        for h in g.unique():
            assert torch.equal(f(r, g)[g == h], f(r[g == h], g[g == h])), name


def test_whitened_batch_has_mean_0_and_variance_1_over_responses():
    r, g = tensors([1, 0, 0, 4, 2, 2, 1], [0, 0, 0, 1, 1, 1, 1])
    for f in (whiten, group_mean_whiten):
        A = f(r, g, eps=0.0)
        close(A.mean(), 0.0)
        close(A.var(correction=0), 1.0)


def test_signed_reads_both_conventions_and_nothing_else():
    want = torch.tensor([1.0, -1.0, 1.0])
    assert torch.equal(signed(torch.tensor([1.0, 0.0, 1.0])), want)
    assert torch.equal(signed(torch.tensor([1.0, -1.0, 1.0])), want)
    assert torch.equal(signed(torch.tensor([1.0, 1.0])), torch.ones(2))
    assert torch.equal(signed(torch.tensor([0.0, 0.0])), -torch.ones(2))


@pytest.mark.parametrize(
    ("rewards", "at"),
    [
        ([1, 0.5], "[1] is 0.5,"),
        ([2, 1], "[0] is 2,"),
        ([1, 0.9999999], "is 0.99999"),
        ([1, -1, 0], "[2] is 0,"),
    ],
)
def test_signed_names_the_reward_it_cannot_read(rewards, at):
    with pytest.raises(InputError) as e:
        signed(torch.tensor([float(r) for r in rewards]))
    assert at in str(e.value)


def test_reward_is_the_identity_on_a_copy():
    r, g = tensors([1, 0.25], [0, 0])
    A = reward(r, g)
    assert torch.equal(A, r)
    A += 1
    assert r.tolist() == [1, 0.25]


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_share_one_form_keep_the_dtype_pass_no_gradient(name, dtype):
    r = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=dtype, requires_grad=True)
    A = advantages.get(name)(r, torch.tensor([1, 2, 2, 1]))
    assert A.dtype == dtype and A.shape == (4,) and not A.requires_grad
    assert A[0] > 0 >= A[3]


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
@pytest.mark.parametrize(
    ("rewards", "group", "says"),
    [
        (torch.tensor([1, 0]), torch.tensor([0, 0]), "int64: convert"),
        (torch.tensor([1.0, 0.0]).half(), torch.tensor([0, 0]), "float16: convert"),
        (torch.tensor([[1.0, 0.0]]), torch.tensor([[0, 0]]), "got float32[1, 2]"),
        (torch.tensor([]), torch.tensor([], dtype=torch.int64), "not empty"),
        ([1.0, 0.0], torch.tensor([0, 0]), "got list"),
        (
            torch.tensor([1.0, float("nan"), float("inf")]),
            torch.tensor([0, 0, 0]),
            "rewards[1] is nan",
        ),
        (
            torch.tensor([1.0, 0.0, float("-inf")]),
            torch.tensor([0, 0, 0]),
            "rewards[2] is -inf",
        ),
        (torch.tensor([1.0, -1e30]), torch.tensor([0, 0]), "drop that row"),
        (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), "integer tensor"),
        (torch.tensor([1.0, 0.0]), torch.tensor([True, False]), "integer tensor"),
        (torch.tensor([1.0, 0.0]), [0, 0], "got list"),
        (torch.tensor([1.0, 0.0]), torch.tensor([0]), "one prompt id per response"),
        (
            torch.tensor([1.0, 0.0]),
            torch.zeros(2, dtype=torch.int64, device="meta"),
            "got meta int64[2]",
        ),
    ],
)
def test_bad_input_is_one_sentence(name, rewards, group, says):
    with pytest.raises(InputError) as e:
        advantages.get(name)(rewards, group)
    assert says in str(e.value)


@pytest.mark.parametrize("f", [group_norm, whiten, group_mean_whiten])
@pytest.mark.parametrize(
    ("hp", "says"),
    [
        ({"ddof": 2}, "ddof"),
        ({"ddof": True}, "ddof"),
        ({"eps": -1.0}, "eps"),
        ({"eps": float("nan")}, "eps"),
    ],
)
def test_bad_hyperparameters_are_refused(f, hp, says):
    with pytest.raises(InputError, match=says):
        f(*tensors([1, 0], [0, 0]), **hp)


def test_a_missing_group_is_refused_where_it_is_needed():
    for name in [*GROUPED, "group_mean_whiten"]:
        with pytest.raises(InputError, match="prompt id"):
            advantages.get(name)(torch.tensor([1.0, 0.0]), None)


def test_get_suggests_the_nearest_name():
    with pytest.raises(InputError, match="did you mean 'group_norm'"):
        advantages.get("groupnorm")
    with pytest.raises(InputError, match="leave_one_out"):
        advantages.get("zzz")


# ---- token-weighted whitening --------------------------------------------------------
ragged = torch.tensor(
    [[True, True, True, True], [True, False, False, False], [True, True, False, False]]
)


@pytest.mark.parametrize("ddof", [0, 1])
def test_token_whitening_weighs_a_response_by_its_tokens(ddof):
    """A = 1, 0, 4 on 4, 1, 2 tokens: mean 12/7, squares 4·25/49 + 144/49 + 2·256/49 =
    108/7.
    """
    adv = torch.tensor([[1.0], [0.0], [4.0]], dtype=torch.float64).expand(3, 4)
    std = sqrt(108 / 7 / (7 - ddof) + 1e-8)
    want = torch.where(
        ragged,
        torch.tensor([[-5 / 7], [-12 / 7], [16 / 7]], dtype=torch.float64) / std,
        0.0,
    )
    close(whiten_tokens(adv, ragged, ddof=ddof), want)
    by_response = whiten(adv[:, 0].contiguous(), ddof=ddof)
    assert not torch.allclose(
        whiten_tokens(adv, ragged, ddof=ddof)[:, 0], by_response, atol=0.05
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_masked_slots_count_for_nothing_and_return_zero(poison):
    """whiten_tokens reads the 7 tokens of `ragged`, whatever its 5 masked slots hold."""
    adv = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    got = whiten_tokens(torch.where(ragged, adv, poison), ragged)
    assert torch.equal(got, whiten_tokens(adv, ragged))
    assert torch.equal(got[~ragged], torch.zeros(5, dtype=torch.float64))
    assert got[ragged].unique().numel() == 7


def test_token_whitening_of_equal_advantages_is_zero():
    for eps in (1e-8, 0.0):
        assert torch.equal(
            whiten_tokens(torch.full((3, 4), 0.1), ragged, eps=eps), torch.zeros(3, 4)
        )
    one = torch.zeros(3, 4, dtype=torch.bool).index_put(
        (torch.tensor(1), torch.tensor(0)), torch.tensor(True)
    )
    assert torch.equal(whiten_tokens(torch.full((3, 4), 2.5), one), torch.zeros(3, 4))


def test_token_whitening_adds_eps_under_the_root():
    # variance 2 with ddof=1, 1 with ddof=0
    adv = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    close(whiten_tokens(adv, torch.ones(1, 2, dtype=torch.bool), eps=2.0)[0, 0], 0.5)
    close(
        whiten_tokens(adv, torch.ones(1, 2, dtype=torch.bool), ddof=0, eps=3.0)[0, 0],
        0.5,
    )
    assert not whiten_tokens(
        adv.requires_grad_(), torch.ones(1, 2, dtype=torch.bool)
    ).requires_grad


@pytest.mark.parametrize(
    ("adv", "mask", "says"),
    [
        (torch.ones(3, 1), ragged, "same shape"),
        (torch.ones(4), torch.ones(4, dtype=torch.bool), "same shape"),
        (torch.ones(3, 4), ragged.float(), "float32"),
        (torch.ones(3, 4), ragged & False, "nothing to whiten"),
        (
            torch.where(ragged.cumsum(1) == 2, float("nan"), 1.0),
            ragged,
            "nan at (0, 1)",
        ),
        (torch.ones(3, 4).half(), ragged, "float16"),
        (torch.ones(3, 4), None, "tensors"),
    ],
)
def test_token_whitening_refuses_bad_input(adv, mask, says):
    with pytest.raises(InputError) as e:
        whiten_tokens(adv, mask)
    assert says in str(e.value)


def test_frameworks_biased_and_clamped_form_is_reachable():
    """OpenRLHF: (A - mean) / √max(var, 1e-8), ddof=0. Away from var ~ eps this is
    ddof=0 here.
    """
    adv = torch.tensor(
        [[1.0, 2.0, 4.0, 0.0], [7.0, 0, 0, 0], [5.0, 3.0, 0, 0]], dtype=torch.float64
    )
    x = adv[ragged]
    want = torch.zeros_like(adv)
    want[ragged] = (x - x.mean()) / x.var(correction=0).clamp(min=1e-8).sqrt()
    torch.testing.assert_close(
        whiten_tokens(adv, ragged, ddof=0), want, rtol=1e-8, atol=0
    )


# ---- MaxRL, GDPO, distillation -------------------------------------------------------
@settings(deadline=None)
@given(batches)
def test_maxrl_is_its_equation_in_exact_rationals(batch):
    def over_the_mean(xs):
        m = exact_mean(xs)
        return [(x - m) / m if m > 0 else 0 for x in xs]

    close(maxrl(*tensors(*batch)), by_group(*batch, over_the_mean))


def test_maxrl_weighs_a_rare_success_by_one_over_the_pass_rate():
    r, g = tensors([1, 0, 0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    close(maxrl(r, g), [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0])


@settings(deadline=None)
@given(batches, st.sampled_from([0, 1]))
def test_gdpo_normalizes_each_reward_and_then_the_batch(batch, ddof):
    """Compare `gdpo` with two rewards, the second of weight 1/4, in exact rationals."""
    first, group = batch
    rewards = [first, [x * x - 1 for x in first]]
    each = [
        by_group(one, group, lambda xs: exact_norm(xs, ddof, 1e-6)) for one in rewards
    ]
    total = [Fraction(a) + Fraction(b) / 4 for a, b in zip(*each, strict=True)]
    R = torch.stack([tensors(one, group)[0] for one in rewards], 1)
    found = gdpo(R, torch.tensor(group), torch.tensor([1.0, 0.25]), ddof=ddof)
    spread = max(total) - min(total)  # one of rounding alone is divided by itself
    assert 0 < spread < 1e-9 or torch.allclose(
        found, torch.tensor(exact_norm(total, ddof, 1e-6)).double(), atol=1e-5
    )


def test_gdpo_keeps_apart_what_a_sum_of_rewards_makes_equal():
    """Rewards (0, 1) and (1, 0) have one sum. By hand: A_i1 = (-1, 3, -1, -1)/2, A_i2 =
    (1, -1, -1, 1) √3/2.
    """
    R = torch.tensor(
        [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64
    )
    g = torch.zeros(4, dtype=torch.int64)
    assert group_norm(R.sum(1), g)[0] == group_norm(R.sum(1), g)[1]
    total = [
        sqrt(3) / 2 - 1 / 2,
        3 / 2 - sqrt(3) / 2,
        -sqrt(3) / 2 - 1 / 2,
        sqrt(3) / 2 - 1 / 2,
    ]
    std = sqrt(sum(x**2 for x in total) / 3)
    close(gdpo(R, g, eps=0.0), [x / std for x in total])
    close(gdpo(R[:, :1], g), whiten(group_norm(R[:, 0], g), ddof=1, eps=1e-6))


@pytest.mark.parametrize(
    ("rewards", "weights", "words"),
    [
        (torch.ones(4), None, r"\[N, K\]"),
        (torch.ones(4, 2), torch.ones(3), "weights must be 2 finite numbers"),
        (torch.tensor([[1.0, float("nan")]] * 4), None, "not a reward"),
    ],
)
def test_gdpo_refuses(rewards, weights, words):
    with pytest.raises(InputError, match=words):
        gdpo(rewards, torch.zeros(4, dtype=torch.int64), weights)


def test_distillation_is_minus_the_divergence_per_token():
    """Enumerated over three tokens: the expected gradient of A log π is that of -KL(π ‖
    teacher).
    """
    z = torch.tensor([[0.3, -0.8, 0.1]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[0.1, 0.9, 0.4]], dtype=torch.float64).log_softmax(1)
    lp, every = z.log_softmax(1), torch.ones(1, 3, dtype=torch.bool)
    A = distillation(lp, teacher, every)
    expected = torch.autograd.grad(
        -(lp.exp() * (lp - teacher)).sum(), z, retain_graph=True
    )[0]
    torch.testing.assert_close(
        torch.autograd.grad((lp.detach().exp() * A * lp).sum(), z)[0], expected
    )


def test_distillation_is_added_to_an_advantage_and_masks():
    lp, teacher = (
        torch.tensor([[-1.0, -2.0, float("nan")]]),
        torch.tensor([[-3.0, -1.0, 0.0]]),
    )
    mask = torch.tensor([[True, True, False]])
    assert distillation(
        lp, teacher, mask, torch.tensor([[0.5]]), coef=0.25
    ).tolist() == [[0.0, 0.75, 0.0]]
    assert distillation(lp, teacher, mask).tolist() == [[-2.0, 1.0, 0.0]]
    with pytest.raises(InputError, match="nan at"):
        distillation(lp, teacher, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(InputError, match="one shape"):
        distillation(lp, teacher[:, :2], mask)
