# SPDX-License-Identifier: Apache-2.0
"""`upref.check_kl`: is this function of two log-probabilities the KL estimator that it is meant to be?

Token by token against upref.kl, and over a vocabulary small enough to be enumerated: the expected value against the
divergence, and the expected gradient against the divergences' gradients, on policy and off it.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upref import kl
from upref.check.adapters import ROLE, load
from upref.check.conduct import CONSTANTS
from upref.check.oracles import fail, note
from upref.check.report import Finding, Report
from upref.errors import InputError
from upref.regimes import off

ORACLES = ("value", "gradient", "clamp", "expected-value", "expected-gradient", "stop-gradient", "determinism")
NEAR = torch.linspace(-2, 2, 41, dtype=torch.float64)  # d = log π_ref - log π_θ
FAR = torch.tensor([s * x for x in (2.5, 3, 4, 6, 9, 12, 15, 19, 21, 40) for s in (1, -1)], dtype=torch.float64)
Term = Callable[[Tensor, Tensor], Tensor]

NAMES = {
    "reverse": "KL(π_θ ‖ π_ref), the reverse divergence",
    "forward": "KL(π_ref ‖ π_θ), the forward divergence",
    "zero": "nothing: it is 0",
}
GONE = "no gradient: it is computed under no_grad, or detached"
FORMS: dict[str, Term] = {
    "k1 with its sign flipped: log π_ref - log π_θ": lambda lp, ref: ref - lp,
    "k3 the other way round: it has π_θ/π_ref where π_ref/π_θ belongs": lambda lp, ref: kl.k3(ref, lp),
    "k3 with the sign of its logarithm swapped: π_ref/π_θ - 1 + log(π_ref/π_θ)": lambda lp, ref: (
        (ref - lp).exp() - 1 + (ref - lp)
    ),
    "k3 with its sign flipped": lambda lp, ref: -kl.k3(lp, ref),
    "k3 without its logarithm: π_ref/π_θ - 1": lambda lp, ref: (ref - lp).exp() - 1,
    "|log π_θ - log π_ref|": lambda lp, ref: (lp - ref).abs(),
    "k2 without its 1/2": lambda lp, ref: (lp - ref) ** 2,
    "the value of k3 with the gradient of k2 (straight through)": lambda lp, ref: (
        kl.k2(lp, ref) + (kl.k3(lp, ref) - kl.k2(lp, ref)).detach()
    ),
    "the value of k1 with the gradient of k2 (straight through)": lambda lp, ref: (
        kl.k2(lp, ref) + (kl.k1(lp, ref) - kl.k2(lp, ref)).detach()
    ),
    "π_θ (log π_θ - log π_ref): weighted by a probability though it is sampled": lambda lp, ref: lp.exp() * (lp - ref),
    **{f"{name} itself": f for name, f in kl.ESTIMATORS.items()},
}


def check_kl(fn: Any, estimator: str, *, skip: tuple[str, ...] = ()) -> Report:
    """Whether `fn` is the per-token KL estimator of that name (k1, k2 or k3 of upref.kl), value and gradient.

    fn: `(log_prob, ref_log_prob) -> tensor` of the same shape [B, T] in nats, by these names, their usual variants or
    by position, or a name as for `check`. The contract says whose gradient it has in expectation when it is used as
    a loss on samples. Raises InputError where fn cannot be run.
    """
    start = time.perf_counter()
    if estimator not in kl.ESTIMATORS:
        raise InputError(f"no KL estimator is called {estimator!r}: choose one of {', '.join(kl.ESTIMATORS)}.")
    if unknown := sorted(set(skip) - set(ORACLES)):
        raise InputError(f"no oracle is called {unknown[0]!r}: choose from {', '.join(ORACLES)}.")
    name, term = _read(fn)
    found, ran, wrong = [], {}, False
    for oracle in ORACLES:
        if oracle in skip or (wrong and oracle == "clamp"):
            ran[oracle] = "skipped on request" if oracle in skip else "wrong near 0 already"
            continue
        got = _ORACLE[oracle](term, estimator)
        wrong |= oracle in ("value", "gradient") and bool(got)
        found += got
        ran[oracle] = next((s for s in ("failure", "note") if any(f.severity == s for f in got)), "ok")
    return Report(name, estimator, {}, found, _contract(term), ran, {"nats": 1e-9}, time.perf_counter() - start)


def _read(fn: Any) -> tuple[str, Term]:
    name = fn if isinstance(fn, str) else getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)
    fn = load(fn) if isinstance(fn, str) else fn
    if not callable(fn):
        raise InputError(f"a {type(fn).__name__} is not a KL estimator: pass a function or its name.")
    try:
        parameters = [p for p in inspect.signature(fn).parameters.values() if p.kind is not p.VAR_KEYWORD]
    except (TypeError, ValueError):
        parameters = []
    names = {"ref_logprob": "logp_ref", "ref": "logp_ref", "logr": "", "logprob": "logp"} | ROLE
    roles = {names.get(p.name): p.name for p in parameters if names.get(p.name) in ("logp", "logp_ref")}
    bound = getattr(fn, "keywords", {})
    if more := [p.name for p in parameters if p.default is p.empty and p.name not in bound][2:]:
        raise InputError(f"{name} needs {more[0]!r}, which upref cannot give: bind it with functools.partial.")

    def term(lp: Tensor, ref: Tensor) -> Tensor:
        try:
            k = fn(**{roles["logp"]: lp, roles["logp_ref"]: ref}) if len(roles) == 2 else fn(lp, ref)
        except Exception as e:
            raise InputError(f"{name} raised {type(e).__name__}: {' '.join(str(e).split())[:200]}") from e
        if not isinstance(k, Tensor) or k.shape != lp.shape:
            got = list(k.shape) if isinstance(k, Tensor) else type(k).__name__
            raise InputError(f"{name} answers with {got} for log-probabilities {list(lp.shape)}: return one per token.")
        return k

    term(torch.zeros(2, 3) - 1.0, torch.zeros(2, 3) - 2.0)
    return name, term


def _both(term: Term, d: Tensor) -> tuple[Tensor, Tensor]:
    """Value and d/dlp at each d, [1, N]."""
    lp = (-50.0 - d.clamp(min=0))[None].requires_grad_()
    k = term(lp, (lp.detach() + d).detach())
    if not k.requires_grad:
        return k.detach()[0], torch.zeros_like(d)
    g = torch.autograd.grad(k.sum(), lp, allow_unused=True)[0]
    return k.detach()[0], torch.zeros_like(d) if g is None else g[0]


def _far(x: Tensor, y: Tensor) -> Tensor:
    return off(x, y, floor=1e-2)


def _same(term: Term, other: Term, d: Tensor, which: tuple[int, ...] = (0, 1), tol: float = 1e-5) -> bool:
    return all(bool(_far(_both(term, d)[i], _both(other, d)[i]).max() < tol) for i in which)


def _pointwise(which: int, oracle: str, what: str):
    def run(term: Term, estimator: str) -> list[Finding]:
        found, want = _both(term, NEAR)[which], _both(kl.ESTIMATORS[estimator], NEAR)[which]
        if (far := _far(found, want)).max() < 1e-5:
            return []
        i = int(far.argmax())
        gone = which and not found.any()
        why = (
            GONE
            if gone
            else next((w for w, f in FORMS.items() if w != f"{estimator} itself" and _same(term, f, NEAR)), "")
        )
        batch = f"log_prob, ref_log_prob = torch.tensor([[-2.0]]), torch.tensor([[{NEAR[i].item() - 2:.6f}]])"
        regime = f"log π_ref - log π_θ = {NEAR[i].item():.3g}"
        return [fail(oracle, regime, f"{what} {want[i].item():.6g}", f"{found[i].item():.6g}", batch, why)]

    return run


def _clamp(term: Term, estimator: str) -> list[Finding]:
    value, g = _both(term, FAR)
    want_value, want = _both(kl.ESTIMATORS[estimator], FAR)
    bad = (_far(g, want) > 1e-5) | (_far(value, want_value) > 1e-5)
    for i in bad.nonzero()[:, 0].tolist():
        d = FAR[i].item()
        make, cause = (
            (fail, "a clamp that bites: the tokens furthest from the reference are not pulled back")
            if abs(d) < 20
            else (note, "a clamp at 20 or beyond")
        )
        regime = f"log π_ref - log π_θ = {d:g}"
        return [make("clamp", regime, f"gradient {want[i].item():.5g}", f"{g[i].item():.5g}", cause=cause)]
    return []


# ---- a vocabulary that can be enumerated -----------------------------------------------------------------------------
LOGITS = torch.tensor([0.3, -0.7, 1.1, 0.0, -1.6], dtype=torch.float64)
REF = torch.tensor([-0.4, 0.5, 0.2, 0.9, -1.0], dtype=torch.float64)
OLD = torch.tensor([0.8, -0.2, 0.1, -0.9, 0.4], dtype=torch.float64)


def expected(term: Term, off_policy: bool = False) -> tuple[float, Tensor]:
    """E[k] and E[∇_θ k] over the logits θ, samples from π_θ (held fixed) or from π_old."""
    theta = LOGITS.clone().requires_grad_()
    lp, ref = theta.log_softmax(0), REF.log_softmax(0)
    p = (OLD.log_softmax(0) if off_policy else lp.detach()).exp()
    total = (p * term(lp[None], ref[None])[0]).sum()
    g = torch.autograd.grad(total, theta, allow_unused=True)[0] if total.requires_grad else None
    return total.item(), torch.zeros_like(LOGITS) if g is None else g


def divergences() -> dict[str, tuple[float, Tensor]]:
    """Both divergences with their gradients over θ, and zero."""
    out = {"zero": (0.0, torch.zeros_like(LOGITS))}
    for name in ("reverse", "forward"):
        theta = LOGITS.clone().requires_grad_()
        lp, ref = theta.log_softmax(0), REF.log_softmax(0)
        p, q = (lp, ref) if name == "reverse" else (ref, lp)
        d = (p.exp() * (p - q)).sum()
        out[name] = d.item(), torch.autograd.grad(d, theta)[0]
    return out


def whose(term: Term, off_policy: bool = False) -> str:
    """A key of NAMES, `-reverse` for its negative, or "" where the expected gradient is that of none."""
    g = expected(term, off_policy)[1]
    for name, (_, want) in divergences().items():
        for sign in ("", "-"):
            if torch.allclose(g, -want if sign else want, rtol=1e-6, atol=1e-9):
                return sign + name
    return ""


def _words(key: str) -> str:
    said = NAMES.get(key.removeprefix("-"), "neither divergence")
    return f"minus {said}: it pushes away from the reference" if key.startswith("-") else said


def _contract(term: Term) -> list[str]:
    on, other = whose(term), whose(term, off_policy=True)
    return [
        f"as a loss on samples of π_θ its expected gradient is that of {_words(on)}",
        f"on samples of another policy it is that of {_words(other)}; correct them by importance weights",
    ]


def _expected_value(term: Term, estimator: str) -> list[Finding]:
    got, want = expected(term)[0], expected(kl.ESTIMATORS[estimator])[0]
    target = divergences()["reverse"][0]
    if abs(got - want) < 1e-6:
        return []
    said = f"KL(π_θ ‖ π_ref) = {target:.6g}" if estimator != "k2" else f"{want:.6g}, the mean of k2"
    return [fail("expected-value", "samples of π_θ, five tokens enumerated", said, f"{got:.6g}")]


def _expected_gradient(term: Term, estimator: str) -> list[Finding]:
    out = []
    for off_policy, where in ((False, "samples of π_θ"), (True, "samples of another policy")):
        got, want = expected(term, off_policy)[1], expected(kl.ESTIMATORS[estimator], off_policy)[1]
        if not torch.allclose(got, want, rtol=1e-6, atol=1e-9):
            one, other = whose(kl.ESTIMATORS[estimator], off_policy), whose(term, off_policy)
            numbers = lambda g: "[" + ", ".join(f"{x:.4f}" for x in g.tolist()) + "]"
            out.append(
                fail(
                    "expected-gradient",
                    f"{where}, five tokens enumerated",
                    f"{numbers(want)}: that of {_words(one)}",
                    f"{numbers(got)}: that of {_words(other)}",
                )
            )
    return out


def _stop_gradient(term: Term, estimator: str) -> list[Finding]:
    lp, ref = torch.full((1, 3), -1.0), torch.full((1, 3), -2.0).requires_grad_()
    k = term(lp, ref)
    g = torch.autograd.grad(k.sum(), ref, allow_unused=True)[0] if k.requires_grad else None
    return [note("stop-gradient", "a gradient would flow into ref_log_prob", cause=CONSTANTS)] if g is not None else []


def _determinism(term: Term, estimator: str) -> list[Finding]:
    if _same(term, term, NEAR, tol=1e-300):
        return []
    return [fail("determinism", "the same tokens twice", "the same numbers", "other numbers")]


_ORACLE: dict[str, Callable[[Term, str], list[Finding]]] = {
    "value": _pointwise(0, "value", "value"),
    "gradient": _pointwise(1, "gradient", "gradient by log_prob"),
    "clamp": _clamp,
    "expected-value": _expected_value,
    "expected-gradient": _expected_gradient,
    "stop-gradient": _stop_gradient,
    "determinism": _determinism,
}
