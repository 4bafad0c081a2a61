# SPDX-License-Identifier: Apache-2.0
"""upref.hidden against autograd through the [N, V] logits."""

import math
import random

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from upref import hidden as fused
from upref.errors import InputError
from upref.hidden import token_log_probs

NEG = -math.inf


def naive(
    h, W, tokens, *, temperature=1.0, bias=None, logit_scale=1.0, softcap=None, chunk=0
):
    """Return log-probabilities and entropies through the [N, V] logits."""
    y = h @ W.T * logit_scale if bias is None else (h @ W.T + bias) * logit_scale
    x = (y if softcap is None else softcap * (y / softcap).tanh()) / temperature
    lp = x.log_softmax(-1)
    p = lp.exp()
    return lp.gather(-1, tokens.long()[..., None])[..., 0], -(
        p * lp.masked_fill(p == 0, 0)
    ).sum(-1)


def drawn(seed):
    """Return random (hidden, weight, tokens, settings, upstream gradients), some of the
    gradients 0.
    """
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    shape, V, H = (
        r.choice([(5,), (1,), (2, 3), (2, 1, 4), (0,), (40,)]),
        r.choice([1, 2, 7, 33, 257]),
        r.choice([1, 3, 8]),
    )
    bias = randn(V) if r.random() < 0.4 else None
    if bias is not None and r.random() < 0.5:
        bias[r.sample(range(V), V // 2)] = NEG
    softcap = (
        r.choice([None, None, 0.7, 30.0])
        if bias is None or bias.isfinite().all()
        else None
    )
    settings = {
        "temperature": r.choice([1.0, 0.3, 2.5]), "bias": bias, "softcap": softcap,
        "logit_scale": r.choice([1.0, 0.2, 3.0]), "chunk": r.choice([1, 7, 64, 1000, 2**23]),
    }  # fmt: skip
    h, W = randn(*shape, H) * r.choice([0.1, 1, 5]), randn(V, H)
    tokens = torch.randint(V, shape, generator=g)
    up = [randn(*shape) * torch.randint(0, 2, shape, generator=g) for _ in range(2)]
    return h, W, tokens, settings, up


def run(f, h, W, tokens, settings, up):
    """Return both outputs of f and all gradients.

    up: upstream gradients of the two; None: that output is not used.
    """
    leaves = [
        x.detach().clone().requires_grad_()
        for x in (h, W, settings.get("bias"))
        if x is not None
    ]
    settings = settings | ({"bias": leaves[2]} if len(leaves) > 2 else {})
    out = f(leaves[0], leaves[1], tokens, **settings)
    total = sum(
        (x * g).nan_to_num(neginf=0).sum()
        for x, g in zip(out, up, strict=True)
        if g is not None
    )
    return [*out, *torch.autograd.grad(total, leaves)]


@pytest.mark.slow
def test_500_random_cases_agree_with_autograd_to_1e_12():
    """Outputs and gradients are those of the [N, V] logits; in two of three cases one
    output is not used.
    """
    for seed in range(500):
        h, W, tokens, settings, up = drawn(seed)
        if seed % 3:
            up[seed % 3 - 1] = None
        found, want = (
            run(token_log_probs, h, W, tokens, settings, up),
            run(naive, h, W, tokens, settings, up),
        )
        for x, y in zip(found, want, strict=True):
            size = max([1.0, *y.detach().nan_to_num(neginf=0).abs().flatten().tolist()])
            torch.testing.assert_close(
                x,
                y,
                rtol=1e-12,
                atol=1e-12 * size,
                msg=lambda m, seed=seed: f"seed {seed}: {m}",
            )


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_are_those_of_finite_differences(softcap):
    g = torch.Generator().manual_seed(1)
    h, W, bias = (
        torch.randn(s, generator=g, dtype=torch.float64).requires_grad_()
        for s in ((2, 3, 4), (7, 4), (7,))
    )
    tokens = torch.randint(7, (2, 3), generator=g)

    def log_prob_and_entropy(h, W, bias):
        return token_log_probs(
            h,
            W,
            tokens,
            bias=bias,
            temperature=0.7,
            logit_scale=0.5,
            softcap=softcap,
            chunk=20,
        )

    assert gradcheck(log_prob_and_entropy, (h, W, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at", [0, 70_000, 151_935])
def test_float32_results_stay_within_5e_6_at_152k_beside_a_peak(dtype, at):
    """A vocabulary of a real model, with one token of probability 0.9, at the start,
    inside or at the end of the tiles.
    """
    g = torch.Generator().manual_seed(2)
    V, H, N = 151_936, 8, 12
    h, W = torch.randn(N, H, generator=g), torch.randn(V, H, generator=g) / 3
    h[:, 0], W[:, 0], W[at, 0] = 1, 0, 0
    W[at, 0] = ((h @ W.T).logsumexp(1) + 2.2 - h @ W[at]).mean()  # p near 0.9
    h, W = h.to(dtype), W.to(dtype)
    tokens = torch.where(
        torch.arange(N) % 2 == 0, at, torch.randint(V, (N,), generator=g)
    )
    up = [torch.ones(N), torch.full((N,), 0.5)]
    up_64 = [u.double() for u in up]
    found = run(token_log_probs, h, W, tokens, {"temperature": 0.9}, up)
    want = run(naive, h.double(), W.double(), tokens, {"temperature": 0.9}, up_64)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert [x.dtype for x in found[2:]] == [dtype, dtype]
    for x, y in zip(found[:2], want[:2], strict=True):
        assert (x - y).abs().max() < 5e-6
    dW, want_dW = found[3], want[3]
    rounded_once = (want_dW.to(dtype) - want_dW).abs().max()
    allowed = 1.1 * rounded_once + 2e-6 * want_dW.abs().max()
    assert (dW - want_dW).abs().max() <= allowed


@pytest.mark.parametrize("peaks", [1, 3])
def test_products_of_896_terms_do_not_blur_the_entropy(peaks):
    """Compare float32 with float64 where one token or several have nearly all
    probability.
    """
    g = torch.Generator().manual_seed(6)
    N, V, H = 256, 2000, 896
    W = torch.randn(V, H, generator=g) * H**-0.5
    h, bias, tokens = 14 * W[:N], torch.full((V,), 4.3), torch.arange(N)
    bias[:N] = 0  # row t has p near 0.9 at token t
    for i in range(1, peaks):
        h = h + 14 * W[N * i : N * (i + 1)]
        bias[N * i : N * (i + 1)] = 0
    found, want = (
        token_log_probs(x, W.to(x.dtype), tokens, bias=bias.to(x.dtype))
        for x in (h, h.double())
    )
    for x, y in zip(found, want, strict=True):
        assert (x - y).abs().max() < 1e-6


def test_no_tensor_is_larger_than_the_inputs_or_the_chunk():
    """In a forward and a backward pass no operation makes a tensor larger than the
    weight or a chunk.
    """
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            """Run the operation, and note how many numbers each tensor of its result
            has.
            """
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                x.numel()
                for x in (out if isinstance(out, tuple) else (out,))
                if isinstance(x, torch.Tensor)
            )
            return out

    N, V, H = 64, 1000, 3
    leaves = [torch.randn(s, requires_grad=True) for s in ((N, H), (V, H))]
    with Sizes():
        lp, entropy = token_log_probs(
            *leaves, torch.zeros(N, dtype=torch.int64), chunk=4000
        )
        (lp.sum() + entropy.sum()).backward()
    assert 0 < max(sizes) <= max(4000, V * H)


def test_masked_tokens_may_hold_nan_and_get_no_gradient():
    """Where the gradient from above is 0, hidden states of NaN or infinity get a
    gradient of 0, and change no other.
    """
    _, W, *_ = drawn(2)
    h, tokens, up = (
        torch.randn(6, W.shape[1], dtype=torch.float64),
        torch.zeros(6, dtype=torch.int64),
        torch.ones(6),
    )
    up[4:] = 0
    dirty = h.clone()
    dirty[4], dirty[5] = math.nan, math.inf
    clean, found = (
        run(token_log_probs, x, W, tokens, {"temperature": 0.7}, [up, None])
        for x in (h, dirty)
    )
    assert found[0][4:].isnan().all() and torch.equal(found[0][:4], clean[0][:4])
    assert (
        all(torch.equal(x, y) for x, y in zip(found[2:], clean[2:], strict=True))
        and not found[2][4:].any()
    )
    nothing = run(token_log_probs, dirty, W, tokens, {}, [0 * up, 0 * up])
    assert not nothing[2].any() and not nothing[3].any()


def test_a_row_without_a_finite_logit_is_nan_and_offsets_cancel():
    """Give a bias of -inf, and then biases of ±6000 to all tokens."""
    h, W, tokens = (
        torch.ones(2, 1),
        torch.tensor([[1.0], [2.0], [3.0]]),
        torch.tensor([0, 2]),
    )
    assert token_log_probs(h, W, tokens, bias=torch.full((3,), NEG))[0].isnan().all()
    want = naive(h, W, tokens)
    for offset in (-6000.0, 6000.0):
        for chunk in (2, 6):
            found = token_log_probs(
                h, W, tokens, bias=torch.full((3,), offset), chunk=chunk
            )
            torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(frozen):
    h, W, tokens, _, up = drawn(7)
    leaves = [x.clone().requires_grad_(i != frozen) for i, x in enumerate((h, W))]
    (token_log_probs(*leaves, tokens)[0] * up[0]).sum().backward()
    want = run(naive, h, W, tokens, {}, [up[0], None])[2:]
    assert leaves[frozen].grad is None
    torch.testing.assert_close(leaves[1 - frozen].grad, want[1 - frozen])


def test_layout_autocast_and_a_second_backward_change_nothing():
    """Transposed inputs and 32-bit ids under autocast give the float32 results; a
    second backward pass gives the same gradient.
    """
    g = torch.Generator().manual_seed(3)
    h, W = torch.randn(3, 4, 5, generator=g), torch.randn(9, 5, generator=g)
    tokens, up = (
        torch.randint(9, (3, 4), generator=g),
        [torch.randn(3, 4, generator=g), torch.ones(1, 1).expand(3, 4)],
    )
    want = run(token_log_probs, h, W, tokens, {}, up)
    strided = [x.mT.contiguous().mT for x in (h, W)]
    with torch.autocast("cpu", torch.bfloat16):
        found = run(
            token_log_probs, *strided, tokens.T.contiguous().T.to(torch.int32), {}, up
        )
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    leaf = h.clone().requires_grad_()
    lp = token_log_probs(leaf, W, tokens)[0].sum()
    first, second = (
        torch.autograd.grad(lp, leaf, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_vmap_and_func_grad_agree_with_a_loop():
    """vmap over states and tokens agrees with a loop; over weights it is refused."""
    h, W, tokens = torch.randn(3, 4, 5), torch.randn(9, 5), torch.randint(9, (3, 4))
    want = [token_log_probs(x, W, t) for x, t in zip(h, tokens, strict=True)]
    found = torch.func.vmap(lambda x, t: token_log_probs(x, W, t))(h, tokens)
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*want, strict=True))))

    def log_probs_of(t):
        return token_log_probs(h[0], W, t)[0]

    shared = torch.func.vmap(log_probs_of, in_dims=1)(tokens.T)
    one_by_one = torch.stack([log_probs_of(t) for t in tokens])
    torch.testing.assert_close(shared, one_by_one)
    with pytest.raises(InputError, match="vmap"):
        torch.func.vmap(lambda w: token_log_probs(h, w, tokens)[0])(torch.stack([W, W]))
    grad = torch.func.grad(lambda w: token_log_probs(h, w, tokens)[0].sum())(W)
    _, _, _, want_grad = run(naive, h, W, tokens, {}, [torch.ones(3, 4), None])
    torch.testing.assert_close(grad, want_grad)


def gradient_penalty(log_probs, x):
    """Return a sum of log-probs, and the squared norm of its gradient."""
    total = log_probs(x).sum()
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    return total + (gradient**2).sum()


def test_a_second_gradient_is_refused():
    """It was silently that of the first sum alone."""
    h, W = torch.randn(3, 4, 5), torch.randn(9, 5)
    tokens, bias = torch.randint(9, (3, 4)), torch.zeros(9)
    # by which argument the gradient is taken, and of which result
    own = {
        "hidden": (h, lambda x: token_log_probs(x, W, tokens)[0]),
        "weight": (W, lambda x: token_log_probs(h, x, tokens)[0]),
        "bias": (bias, lambda x: token_log_probs(h, W, tokens, bias=x)[0]),
        "the entropy": (h, lambda x: token_log_probs(x, W, tokens)[1]),
        "a function of hidden": (h, lambda x: token_log_probs(x.tanh(), W, tokens)[0]),
    }
    for name, (x, log_probs) in own.items():
        with pytest.raises(InputError, match="no second gradient") as e:
            gradient_penalty(log_probs, x.clone().requires_grad_())
        assert "\n" not in str(e.value), name
    for inner in (torch.func.grad, torch.func.jacrev):
        first = inner(lambda w: token_log_probs(h, w, tokens)[0].sum())
        with pytest.raises(InputError, match="no second gradient"):
            torch.func.grad(lambda w, first=first: (first(w) ** 2).sum())(W)

    def gradient_by_hidden(w):
        return torch.func.grad(lambda x: token_log_probs(x, w, tokens)[0].sum())(h)

    with pytest.raises(InputError, match="no second gradient"):
        torch.func.grad(lambda w: (gradient_by_hidden(w) ** 2).sum())(W)
    # a parameter that nothing tracks
    torch.testing.assert_close(
        gradient_by_hidden(W.clone().requires_grad_()), gradient_by_hidden(W)
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_changes_no_gradient(reentrant):
    h, W, tokens = torch.randn(3, 4, 5), torch.randn(9, 5), torch.randint(9, (3, 4))
    found, want = h.clone().requires_grad_(), h.clone().requires_grad_()
    checkpoint(
        lambda x: token_log_probs(x, W, tokens)[0], found, use_reentrant=reentrant
    ).sum().backward()
    token_log_probs(want, W, tokens)[0].sum().backward()
    torch.testing.assert_close(found.grad, want.grad)


@pytest.mark.slow
def test_compiled_code_calls_it_between_two_graphs():
    """The gradient is the same inside of a compiled function."""
    h, W, tokens = (
        torch.randn(4, 5, requires_grad=True),
        torch.randn(9, 5),
        torch.randint(9, (4,)),
    )

    def sum_of_probabilities(h):
        return token_log_probs(2 * h, W, tokens)[0].exp().sum()

    want = torch.autograd.grad(sum_of_probabilities(h), h)[0]
    torch.testing.assert_close(
        torch.autograd.grad(
            torch.compile(sum_of_probabilities, backend="aot_eager")(h), h
        )[0],
        want,
    )


h, W, ids = torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "args, settings, says",
    [
        ((h[0], W, ids), {}, "hidden must be"),
        ((h.long(), W, ids), {}, "hidden must be"),
        ((h.to_sparse(), W, ids), {}, "hidden must be"),
        ((h, W[:, :2], ids), {}, "H = 3"),
        ((h, W.T, ids), {}, "H = 3"),
        ((h, None, ids), {}, "weight must be"),
        (
            (h, W.to(torch.float8_e4m3fn), ids),
            {},
            "weight must be .* of 16 bits or more, got float8_e4m3fn",
        ),
        ((h, W[:0], ids), {}, "V > 0"),
        ((h, W, ids), {"bias": torch.zeros(4)}, "one row per token"),
        ((h, W, ids), {"bias": torch.zeros(5, 1)}, "bias must be"),
        ((h, W, ids[:1]), {}, "tokens"),
        ((h, W, ids.float()), {}, "integer"),
        ((h, W, ids - 100), {}, "-100"),
        ((h, W, ids + 5), {}, "outside the vocabulary of 5"),
        ((h, W, ids.to("meta")), {}, "on one device"),
        ((h, W, ids), {"temperature": 0}, "temperature"),
        ((h, W, ids), {"softcap": 0}, "softcap"),
        ((h, W, ids), {"softcap": True}, "softcap"),
        ((h, W, ids), {"logit_scale": math.nan}, "logit_scale"),
        ((h, W, ids), {"chunk": 0}, "chunk"),
        ((h, W, ids), {"chunk": 2.0}, "chunk"),
    ],
)
def test_bad_input_is_one_sentence(args, settings, says):
    with pytest.raises(InputError, match=says):
        fused.token_log_probs(*args, **settings)


@pytest.mark.parametrize("settings", [{}, {"softcap": 5.0}, {"bias": True}])
def test_products_in_bfloat16_lose_nothing_that_float32_holds(settings, monkeypatch):
    """As a GPU takes them: the factors are bfloat16, and the sum is float32."""

    def product(a, b):
        assert a.dtype == b.dtype
        return a.float() @ b.float()

    g = torch.Generator().manual_seed(3)
    h, W = torch.randn(2, 30, 64, generator=g), torch.randn(997, 64, generator=g) / 8
    h, W = h.to(torch.bfloat16), W.to(torch.bfloat16)
    settings = {"temperature": 0.8, "logit_scale": 1.5, "chunk": 5000} | settings
    in_float64 = dict(settings)
    if "bias" in settings:
        settings["bias"] = torch.randn(997, generator=g)
        in_float64["bias"] = settings["bias"].double()
    tokens = torch.randint(997, (2, 30), generator=g)
    up = [torch.randn(2, 30, generator=g) for _ in range(2)]
    up_64 = [u.double() for u in up]
    want = run(naive, h.double(), W.double(), tokens, in_float64, up_64)
    monkeypatch.setattr(fused, "_multiplies_bfloat16", lambda hidden, weight: True)
    monkeypatch.setattr(fused, "_product", product)
    found = run(token_log_probs, h, W, tokens, settings, up)
    for x, y in zip(found[:2], want[:2], strict=True):
        assert x.dtype == torch.float32
        assert (x - y).abs().max() < 5e-6
    for x, y in zip(found[2:], want[2:], strict=True):
        once = (y.to(x.dtype) - y).abs().max()
        assert (x - y).abs().max() <= 1.1 * once + 3e-6 * y.abs().max()
