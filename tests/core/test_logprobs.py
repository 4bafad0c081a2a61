# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, entropy and KL against tiny softmaxes written out with math.exp."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.autograd import gradcheck

from upref.logprobs import categorical_kl, entropy, shifted_log_probs, token_log_probs
from upref.rollouts import InputError

NEG = -float("inf")
# p_v = w_v / Σ w, zeros included
weights = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)


def logits_of(w, dtype=torch.float64):
    return torch.tensor([[[math.log(x) if x else NEG for x in w]]], dtype=dtype)


def distribution(logits, temperature):
    z = [math.exp(v / temperature) for v in logits]
    return [v / sum(z) for v in z]


@pytest.mark.parametrize("temperature", [0.25, 0.6, 1, 2.0])
def test_log_probs_entropy_and_kl_are_those_of_the_softmax(temperature):
    torch.manual_seed(0)
    a, b = torch.randn(2, 2, 3, 5, dtype=torch.float64)
    tokens = torch.randint(0, 5, (2, 3))
    lp = token_log_probs(a, tokens, temperature=temperature)
    H, D = (
        entropy(a, temperature=temperature),
        categorical_kl(a, b, temperature=temperature),
    )
    assert lp.shape == H.shape == D.shape == (2, 3)
    for i in range(2):
        for t in range(3):
            p, q = (distribution(x[i, t].tolist(), temperature) for x in (a, b))
            assert math.isclose(lp[i, t], math.log(p[tokens[i, t]]), rel_tol=1e-12)
            assert math.isclose(
                H[i, t], -sum(x * math.log(x) for x in p), rel_tol=1e-12
            )
            assert math.isclose(
                D[i, t],
                sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)),
                rel_tol=1e-11,
            )


@settings(deadline=None)
@given(weights, weights)
def test_zero_probabilities_are_exact(w, v):
    """Rational distributions, so that entropy and KL are sums over their supports."""
    p = [x / sum(w) for x in w]
    q = [x / sum(v) for x in v]
    support = [(x, y) for x, y in zip(p, q, strict=True) if x]
    H = -sum(x * math.log(x) for x, _ in support)
    D = math.inf
    if all(y > 0 for _, y in support):
        D = sum(x * math.log(x / y) for x, y in support)
    kl = categorical_kl(logits_of(w), logits_of(v)).item()
    assert math.isclose(entropy(logits_of(w)).item(), H, abs_tol=1e-14)
    assert math.isclose(kl, D, abs_tol=1e-14)
    for token, x in enumerate(p):
        got = token_log_probs(logits_of(w), torch.tensor([[token]])).item()
        if x == 0:
            assert got == NEG
        else:
            assert math.isclose(got, math.log(x), abs_tol=1e-14)


def test_known_values():
    """Compare with values known in closed form: uniform, half and certain
    distributions.
    """
    uniform = torch.zeros(1, 1, 8, dtype=torch.float64)
    assert math.isclose(entropy(uniform).item(), math.log(8))
    half = logits_of([1, 1, 0, 0])
    # Σ ½ log(½ / ¼)
    assert math.isclose(categorical_kl(half, uniform[..., :4]).item(), math.log(2))
    assert categorical_kl(uniform[..., :4], half).item() == math.inf
    assert categorical_kl(half, half).item() == 0
    one = logits_of([0, 5, 0, 0])
    assert (
        entropy(one).item() == 0
        and token_log_probs(one, torch.tensor([[1]])).item() == 0
    )


# ---- alignment -----------------------------------------------------------------------
def test_aligned_row_t_gives_the_log_prob_of_token_t():
    """Logits unique to (b, t, v): any other row or column would give another number."""
    logits = torch.arange(2 * 3 * 5, dtype=torch.float64).reshape(2, 3, 5).sin()
    tokens = torch.tensor([[4, 0, 2], [1, 3, 3]])
    got = token_log_probs(logits, tokens)
    for i in range(2):
        for t in range(3):
            p = distribution(logits[i, t].tolist(), 1)
            assert math.isclose(got[i, t], math.log(p[tokens[i, t]]), rel_tol=1e-12)


def test_shift_row_t_predicts_token_t_plus_1():
    """A model that is sure of the right next token, and sure of nothing else: row t
    puts all its mass on x_{t+1}.
    """
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    logits = torch.full((2, 5, 10), NEG)
    for i in range(2):
        for t in range(4):
            logits[i, t, ids[i, t + 1]] = 0.0
    logits[:, 4, 7] = 0.0  # the last row predicts a token that is not there
    assert torch.equal(shifted_log_probs(logits, ids), torch.zeros(2, 4))
    assert not torch.equal(token_log_probs(logits, ids), torch.zeros(2, 5))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 4))
def test_shift_reads_rows_to_S_minus_2_and_tokens_from_1(S, left_pad):
    logits = torch.arange(2 * S * 7, dtype=torch.float64).reshape(2, S, 7).cos()
    ids = (torch.arange(2 * S).reshape(2, S) * 3) % 7
    got = shifted_log_probs(logits, ids, temperature=0.7)
    assert got.shape == (2, S - 1)
    for t in range(S - 1):
        assert torch.equal(
            got[:, t], token_log_probs(logits[:, t], ids[:, t + 1], temperature=0.7)
        )
    padded = torch.cat(
        [torch.full((2, left_pad, 7), math.nan, dtype=torch.float64), logits], 1
    )
    padded_ids = torch.cat([torch.zeros(2, left_pad, dtype=ids.dtype), ids], 1)
    assert torch.equal(
        shifted_log_probs(padded, padded_ids, temperature=0.7)[:, left_pad:], got
    )


def test_packed_rows_without_a_batch_dimension_are_read_alike():
    logits, tokens = (
        torch.randn(6, 5, dtype=torch.float64),
        torch.tensor([0, 4, 2, 2, 1, 3]),
    )
    assert torch.equal(
        token_log_probs(logits, tokens), token_log_probs(logits[None], tokens[None])[0]
    )


# ---- temperature, precision, padding -------------------------------------------------
def test_temperature_divides_the_logits_not_the_log_probs():
    logits, tokens = (
        torch.tensor([[[2.0, 0.0]]], dtype=torch.float64),
        torch.tensor([[0]]),
    )
    got = token_log_probs(logits, tokens, temperature=2.0)
    assert math.isclose(got.item(), -math.log(1 + math.exp(-1)))
    assert not torch.isclose(got, token_log_probs(logits, tokens) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_logits_are_widened_before_anything_else(dtype):
    """Results of 16-bit logits are within float32's rounding of float64's, which 16-bit
    arithmetic is not.
    """
    torch.manual_seed(1)
    a, b = (torch.randn(2, 2, 3, 50) * 4).to(dtype)
    tokens = torch.randint(0, 50, (2, 3))
    readings = [(f, (a, tokens)) for f in (token_log_probs, shifted_log_probs)]
    for f, x in [*readings, (entropy, (a,)), (categorical_kl, (a, b))]:
        got = f(*x, temperature=0.7)
        want = f(
            *(y.double() if y.is_floating_point() else y for y in x), temperature=0.7
        )
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    # what must not happen
    half_way = (a / 0.7).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert (
        half_way.double() - token_log_probs(a.double(), tokens, temperature=0.7)
    ).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_logits_keep_their_dtype(dtype):
    logits = torch.randn(1, 2, 3, dtype=dtype)
    assert (
        token_log_probs(logits, torch.tensor([[0, 1]], dtype=torch.int32)).dtype
        == dtype
    )
    assert entropy(logits).dtype == categorical_kl(logits, logits).dtype == dtype


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[[1000.0, 0.0, -1000.0]]], requires_grad=True)
    for value, want in [
        (token_log_probs(logits, torch.tensor([[2]])), -2000.0),
        (entropy(logits), 0.0),
        (categorical_kl(logits, logits.flip(-1)), 2000.0),
    ]:
        assert value.item() == want
        (grad,) = torch.autograd.grad(value.sum(), logits)
        assert grad.isfinite().all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, NEG])
def test_a_poisoned_row_stays_in_its_slot(poison):
    """Find NaN in the slot of a poisoned row of logits, and all other slots as before."""
    logits = torch.randn(2, 3, 4, dtype=torch.float64)
    dirty = logits.clone()
    dirty[1, 2] = poison
    keep = torch.ones(2, 3, dtype=torch.bool)
    keep[1, 2] = False
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    for f in (
        lambda x: token_log_probs(x, tokens),
        entropy,
        lambda x: categorical_kl(x, logits),
    ):
        assert torch.equal(f(dirty)[keep], f(logits)[keep])
        assert f(dirty)[1, 2].isnan()


@pytest.mark.parametrize("V", [1000, 151_936, 262_144])
@pytest.mark.parametrize("kind", ["flat", "mixed", "peaked", "peaked first"])
def test_float32_is_within_5e_6_of_float64_at_any_vocabulary(V, kind):
    torch.manual_seed(V)
    z = torch.randn(4, V) * {"flat": 0.1, "mixed": 3.0}.get(kind, 1.0)
    at = (
        torch.zeros(4, dtype=torch.int64)
        if kind == "peaked first"
        else torch.randint(V, (4,))
    )
    if kind.startswith("peaked"):
        z.scatter_(1, at[:, None], z.logsumexp(1, keepdim=True) + 2.2)  # p = 0.9
    for tokens in (at, torch.randint(V, (4,))):
        lp, want = token_log_probs(z, tokens), token_log_probs(z.double(), tokens)
        assert (lp - want).abs().max() < 5e-6
    assert (entropy(z) - entropy(z.double())).abs().max() < 5e-6
    assert categorical_kl(z, z.roll(1, 0)).isfinite().all()


# ---- gradients -----------------------------------------------------------------------
def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(2)
    a, b = (
        torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    tokens = torch.tensor([[0, 3]])
    for f in (
        lambda x: token_log_probs(x, tokens, temperature=0.7),
        lambda x: entropy(x, temperature=0.7),
    ):
        assert gradcheck(f, (a,))
    assert gradcheck(lambda x, y: categorical_kl(x, y, temperature=0.7), (a, b))


def test_forbidden_tokens_leave_a_smaller_vocabulary():
    """Logits of NEG beside three others: numbers and gradients are those of the three
    alone.
    """
    torch.manual_seed(3)
    small_p, small_q = (
        torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    tokens = torch.tensor([[0, 2], [1, 1]])

    def grow(x):
        """Return the logits with two forbidden tokens more, as a leaf."""
        forbidden = torch.full((2, 2, 2), NEG, dtype=x.dtype)
        return torch.cat([x, forbidden], -1).detach().requires_grad_()

    big_p, big_q = grow(small_p), grow(small_q)
    for f in (
        lambda p, q: token_log_probs(p, tokens),
        lambda p, q: entropy(p),
        lambda p, q: categorical_kl(p, q),
    ):
        small, big = (small_p, small_q), (big_p, big_q)
        out_small, out_big = f(*small), f(*big)
        torch.testing.assert_close(out_big, out_small, rtol=1e-13, atol=1e-13)
        grads_small = torch.autograd.grad(out_small.sum(), small, allow_unused=True)
        grads_big = torch.autograd.grad(out_big.sum(), big, allow_unused=True)
        for s, g in zip(grads_small, grads_big, strict=True):
            if s is not None:  # else the function does not read that distribution
                torch.testing.assert_close(g[..., :3], s, rtol=1e-12, atol=1e-14)
                assert torch.equal(g[..., 3:], torch.zeros(2, 2, 2, dtype=g.dtype))


def test_infinite_kl_still_has_the_gradient_q_minus_p():
    """dKL/dz_q = q - p holds also where q forbids a token of p."""
    p, q = logits_of([1, 1, 2, 0]), logits_of([1, 3, 0, 0]).requires_grad_()
    D = categorical_kl(p, q)
    assert D.item() == math.inf
    (grad,) = torch.autograd.grad(D.sum(), q)
    torch.testing.assert_close(
        grad[0, 0], torch.tensor([0.0, 0.5, -0.5, 0.0], dtype=torch.float64)
    )


# ---- bad input -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "temperature", [0, 0.0, -1.0, math.nan, math.inf, True, "1", None]
)
def test_bad_temperatures_are_refused(temperature):
    z, ids = torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64)
    for f, x in [
        (token_log_probs, (z, ids)),
        (shifted_log_probs, (z, ids)),
        (entropy, (z,)),
        (categorical_kl, (z, z)),
    ]:
        with pytest.raises(InputError, match="temperature"):
            f(*x, temperature=temperature)


@pytest.mark.parametrize("f", [token_log_probs, shifted_log_probs])
@pytest.mark.parametrize(
    ("logits", "tokens", "says"),
    [
        (
            torch.zeros(1, 3, 5),
            torch.tensor([[0, 5, 7]]),
            "[0, 1] is 5, outside the vocabulary of 5",
        ),
        (torch.zeros(2, 2, 5), torch.tensor([[0, 1], [4, -100]]), "[1, 1] is -100"),
        (torch.zeros(1, 3, 5), torch.tensor([[0, 1]]), "shape"),
        (torch.zeros(1, 3, 5), torch.tensor([[0.0, 1.0, 2.0]]), "float32"),
        (torch.zeros(1, 3, 5), [[0, 1, 2]], "got list"),
        (
            torch.zeros(1, 3, 5, dtype=torch.int64),
            torch.tensor([[0, 1, 2]]),
            "floating-point",
        ),
        ([[0.0]], torch.tensor([0]), "got list"),
        (torch.zeros(5), torch.tensor(0), "[..., T, V], got float32[5]"),
    ],
)
def test_bad_tokens_and_logits_are_refused(f, logits, tokens, says):
    with pytest.raises(InputError) as e:
        f(logits, tokens)
    assert says in str(e.value)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match=r"\[B, S, V\]"):
        shifted_log_probs(torch.zeros(3, 5), torch.tensor([0, 1, 2]))
    with pytest.raises(InputError, match="same vocabulary"):
        categorical_kl(torch.zeros(1, 2, 5), torch.zeros(1, 2, 6))
    with pytest.raises(InputError, match="got NoneType"):
        entropy(None)
