# SPDX-License-Identifier: Apache-2.0
"""What is made of any objective: UP, the paper's plug-in (fan2026up, Sec. 4.2), two parts of DeepSeek-V3.2's loss, a
selection of tokens by entropy, and corrections for the sampler.

A sampler correction is for three policies: μ, the inference engine's, which sampled (lp_sampler); π_old, before the
update, as the trainer computes it (lp_old); π_θ (lp). It multiplies each token's term by a constant made of
ρ_t = π_old(o_t)/μ(o_t); S = Π_t ρ_t is the ratio of a response, s = S^(1/|o|) its geometric mean.

    decoupled(X)   ρ_t                                        X is PPO: π_old is the proximal policy, μ the behavior's
    tis(X)         min(ρ_t, C)                                truncated importance sampling
    tis_seq(X)     min(S, C)                                  of responses
    mis(X)         ρ_t if ρ_t <= C, else 0                    masked importance sampling
    mis_seq(X)     S if S <= C, else 0
    icepop(X)      ρ_t if C_min <= ρ_t <= C, else 0           masked on both sides
    seq_mask(X)    1 if C_min <= s <= C, else 0               a response is kept or dropped
    kpop(X)        ρ_t if both binary KLs of π_old and μ are at most φ, else 0

`token_weights` and `gradient` are X's times the factor; `weight` and the derivation are X's own. The Cap is X's where
the factor is not 0. The two kinds commute:
up(tis(X)) is tis(up(X)), because UP drops π_θ/π_old where A > 0, and the factor is π_old/μ. The frameworks' defaults:
docs/sampler-corrections.md.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from upref.definition import Objective, transform
from upref.errors import InputError, describe_kind
from upref.ops import binary_kl, exp, mean_t, minimum, sg, sum_t, when, where


@transform
def up(base: Objective) -> Objective:
    """Apply UP to an objective: A log π_θ where A > 0, the base's own term where A <= 0.

    up(dapo), up(grpo) and up(gspo) are Eqs. 14 to 16 of fan2026up.

    Args:
        base: the objective that keeps its term for A <= 0.

    Returns:
        The Objective; it has the base's hyperparameters and aggregation.
    """
    return _asymmetric(base, "up", lambda lp: lp)


@transform
def up_anchored(base: Objective) -> Objective:
    """Apply UP with the self-anchored ratio π_θ/sg(π_θ) of Eqs. 12 and A4 to an
    objective.

    The gradient equals that of `up(base)`; the value and the Hessian differ.

    Args:
        base: the objective that keeps its term for A <= 0.

    Returns:
        The Objective; it has the base's hyperparameters and aggregation.
    """
    return _asymmetric(base, "up_anchored", lambda lp: exp(lp - sg(lp)))


def _asymmetric(
    base: Objective, prefix: str, positive: Callable[[Any], Any]
) -> Objective:
    """Return the objective of where(A > 0, A positive(lp), the base's term). lp is reduced
    as the base reduces it.

    Args:
        base: an objective.
        prefix: of its name, as in PREFIX(BASE).
        positive: of lp, what A multiplies where A > 0; its derivative is 1.

    Raises:
        InputError: the base is no Objective.
    """
    if not isinstance(base, Objective):
        raise InputError(
            f"up(...) takes an Objective, e.g. upref.get('dapo'), not {describe_kind(base)}."
        )
    # one term per response: the positive branch averages too
    mean = base.level == "custom" and base.agg == "seq-mean"

    # J_t; a docstring would replace the equation where the objective is derived
    def fn(lp, lp_old, A, *args, **hp):
        negative = base.fn(lp, lp_old, A, *args, **hp)
        if mean:
            mask = args[0] if args else hp["mask"]
            lp = mean_t(lp, mask)
            A = A[..., 0]
        return where(A > 0, A * positive(lp), negative)

    def weight(r, A, *args, **hp):
        """Return dJ/dlp in closed form."""
        negative = base.closed_form(r, A, *args, **hp)
        if mean:
            mask = args[0] if args else hp["mask"]
            return where(A > 0, A / mask.sum(-1)[..., None], negative)
        return where(A > 0, A, negative)

    fn.__signature__ = inspect.signature(base.fn)  # type: ignore[attr-defined]
    weight.__signature__ = inspect.signature(base.closed_form)  # type: ignore[attr-defined]
    return replace(
        base,
        equation=f"J_t = A log π_θ where A > 0;  J_t of {base.name} where A <= 0",
        name=f"{prefix}({base.name})",
        fn=fn,
        closed_form=weight,
        paper="fan2026up",
        eq="Sec. 4.2",
        on_policy_exception=base.on_policy_exception if base.sampler else "",
        is_up=True,
        note=f"The plug-in on {base.name}. {base.note}".strip(),
    )


# ---- parts of DeepSeek-V3.2's loss, and a selection by entropy ------------------------
@transform
def opsm(base: Objective) -> Objective:
    """Apply off-policy sequence masking to an objective: what pushes a bad response away ends once it has drifted.

    A response with A < 0 whose mean log(π_old/π_θ) exceeds δ adds nothing (deepseek2025v32, Eq. 9). The others keep the
    base's term, and the counts by which the sum is divided stay. Of GSPO's ratio s of a response, the mean is -log s;
    where its clip ends at 1-ε_low, a δ above -log(1-ε_low) changes no gradient.

    Args:
        base: an objective with one ratio per token, or with the geometric mean of a response's ratios.

    Returns:
        The Objective, with the base's hyperparameters and opsm_delta.

    Raises:
        InputError: the base is no Objective, or has the product of a response's ratios.
    """
    if not isinstance(base, Objective):
        raise InputError(
            f"opsm(...) takes an Objective, e.g. upref.get('dapo'), not {describe_kind(base)}."
        )
    if base.level == "sequence_product":
        raise InputError(
            f"opsm(...) takes an objective of the ratio of a token or their geometric mean, and {base.name} has the "
            "product of a response's ratios."
        )
    if base.level == "sequence_mean":
        return _of_responses(base)

    def fn(lp, lp_old, A, mask, *more, opsm_delta=0.5, **hp):
        terms = base.fn(lp, lp_old, A, *_before(base.fn, mask, more), **hp)
        is_kept = _not_drifted(lp - lp_old, A, mask, opsm_delta)
        return when(is_kept if terms.ndim == 2 else is_kept[:, 0], terms)

    def weight(log_r, A, mask, *more, opsm_delta, **hp):
        """Return dJ/dlp in closed form."""
        r = log_r if base.reads_log_r else exp(log_r)
        w = base.closed_form(r, A, *_before(base.closed_form, mask, more), **hp)
        return when(_not_drifted(log_r, A, mask, opsm_delta), w)

    fn.__signature__ = _with_delta(base.fn, ("lp", "lp_old", "A", "mask"), 0.5)  # type: ignore[attr-defined]
    weight.__signature__ = _with_delta(base.closed_form, ("log_r", "A", "mask"))  # type: ignore[attr-defined]
    return replace(
        _masked(base, fn, weight),
        level="custom",
        not_symbolic="whether a token counts depends on all tokens of its response",
    )


def _of_responses(base: Objective) -> Objective:
    """Apply off-policy sequence masking to an objective whose ratio is a response's:
    lp, lp_old and A are [B].
    """

    def fn(lp, lp_old, A, *more, opsm_delta=0.5, **hp):
        is_kept = (A >= 0) | (lp_old - lp <= opsm_delta)
        return when(is_kept, base.fn(lp, lp_old, A, *more, **hp))

    def weight(log_r, A, *more, opsm_delta, **hp):
        """Return dJ/dlp in closed form."""
        r = log_r if base.reads_log_r else exp(log_r)
        is_kept = (A >= 0) | (-log_r <= opsm_delta)
        return when(is_kept, base.closed_form(r, A, *more, **hp))

    fn.__signature__ = _with_delta(base.fn, ("lp", "lp_old", "A"), 0.5)  # type: ignore[attr-defined]
    weight.__signature__ = _with_delta(base.closed_form, ("log_r", "A"))  # type: ignore[attr-defined]
    return _masked(base, fn, weight)


def _masked(
    base: Objective, fn: Callable[..., Any], weight: Callable[..., Any]
) -> Objective:
    """Return the base with these functions, and the facts of off-policy sequence masking."""
    return replace(
        base,
        name=f"opsm({base.name})",
        fn=fn,
        closed_form=weight,
        equation=f"M_t J_t, J_t of {base.name}: {base.equation};  M_t = 0 where A_t < 0 and "
        "1/|o| Σ_t log(π_old(o_t)/π_θ(o_t)) > δ",
        paper="deepseek2025v32",
        eq="9",
        defaults=base.defaults | {"opsm_delta": OPSM_DELTA},
        keeps=_keeps_by_drift,
        note=f"DeepSeek's π_old is the engine that sampled. {base.note}".strip(),
    )


OPSM_DELTA = (
    '0.5: TRL 1.16.0, off_policy_mask_threshold: "It expects a positive value (e.g., 0.5)"; slime\'s --opsm-delta has '
    "0.0001; the paper prints no value"
)


def _not_drifted(log_r, A, mask, delta):
    """Return M of deepseek2025v32, Eq. 9, [B, T]: False on the tokens with A < 0 of a
    response whose mean -log r exceeds delta.
    """
    return (A >= 0) | (-mean_t(log_r, mask) <= delta)[..., None]


def _keeps_by_drift(log_r, A, mask, entropy, *, opsm_delta):
    """Return the tokens that off-policy sequence masking keeps, [B, T]."""
    return _not_drifted(log_r, A, mask, opsm_delta)


def _before(
    function: Callable[..., Any], mask: Any, more: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return what an objective's function is handed after A: the mask, where it has a
    parameter of that name, and more.
    """
    return (mask, *more) if "mask" in inspect.signature(function).parameters else more


def _with_delta(
    function: Callable[..., Any],
    first: tuple[str, ...],
    delta: Any = inspect.Parameter.empty,
) -> inspect.Signature:
    """Return the function's signature with these names first, one of which may be the
    mask, and with opsm_delta last.
    """
    ratios = len([name for name in first if name != "mask"])
    other_parameters = list(inspect.signature(function).parameters.values())[ratios:]
    leading = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in first
    ]
    added = inspect.Parameter(
        "opsm_delta", inspect.Parameter.KEYWORD_ONLY, default=delta
    )
    return inspect.Signature(
        [*leading, *(p for p in other_parameters if p.name != "mask"), added]
    )


@transform
def top_entropy(base: Objective) -> Objective:
    """Train the tokens of high entropy alone: A and ratios of the others add nothing.

    A token is kept where its entropy is at least the quantile q of the entropies of all trained tokens of the batch
    (arXiv 2506.01939; TRL's top_entropy_quantile is 1 - q). The base's aggregation stays: token-mean counts all trained
    tokens, and kept-mean, `get("top_entropy(dapo)").aggregated("kept-mean")`, those that are kept.

    Args:
        base: an objective with one ratio per token.

    Returns:
        The Objective, with the base's hyperparameters and entropy_quantile.

    Raises:
        InputError: the base is no Objective, or has one ratio per response.
    """
    if not isinstance(base, Objective) or base.level not in ("token", "custom"):
        named = base.name if isinstance(base, Objective) else describe_kind(base)
        raise InputError(
            f"top_entropy(...) takes an Objective with one ratio per token, e.g. upref.get('dapo'), not {named}."
        )

    def fn(lp, lp_old, A, *, entropy_quantile=0.8, mask, entropy, **more):
        terms = base.fn(lp, lp_old, A, **_given(base.fn, mask, entropy, more))
        return when(_of_high_entropy(mask, entropy, entropy_quantile), terms)

    def weight(r, A, *, entropy_quantile, mask, entropy, **more):
        """Return dJ/dlp in closed form."""
        w = base.closed_form(r, A, **_given(base.closed_form, mask, entropy, more))
        return when(_of_high_entropy(mask, entropy, entropy_quantile), w)

    fn.__signature__ = _with_entropy(base.fn, ("lp", "lp_old", "A"), 0.8)  # type: ignore[attr-defined]
    first = ("log_r" if base.reads_log_r else "r", "A")
    weight.__signature__ = _with_entropy(base.closed_form, first)  # type: ignore[attr-defined]
    return replace(
        base,
        name=f"top_entropy({base.name})",
        fn=fn,
        closed_form=weight,
        level="custom",
        equation=f"M_t J_t, J_t of {base.name}: {base.equation};  M_t = 0 where H_t is below the quantile q of the batch's "
        "trained tokens",
        defaults=base.defaults
        | {"entropy_quantile": "0.8: arXiv 2506.01939 trains the top 20 %"},
        keeps=_keeps_by_entropy,
        not_symbolic="which tokens count depends on the whole batch",
        batch_coupled="which tokens count depends on the whole batch",
        is_up=False,
        note=f"Needs entropy. {base.note}".strip(),
    )


def _of_high_entropy(mask, entropy, quantile):
    """Return True on the trained tokens whose entropy is at least this quantile of
    theirs, [B, T].
    """
    entropy = entropy.detach()
    if entropy.element_size() < 4:
        entropy = entropy.float()  # torch has no quantile of 16 bits
    return mask & (entropy >= entropy[mask].quantile(quantile))


def _keeps_by_entropy(log_r, A, mask, entropy, *, entropy_quantile):
    """Return the tokens that the quantile of the entropy keeps, [B, T]."""
    return _of_high_entropy(mask, entropy, entropy_quantile)


def _given(
    function: Callable[..., Any], mask: Any, entropy: Any, more: dict[str, Any]
) -> dict[str, Any]:
    """Return what an objective's function is passed beside ratios and A, by name."""
    own = inspect.signature(function).parameters
    inputs = {"mask": mask, "entropy": entropy}
    return more | {name: x for name, x in inputs.items() if name in own}


def _with_entropy(
    function: Callable[..., Any],
    first: tuple[str, ...],
    quantile: Any = inspect.Parameter.empty,
) -> inspect.Signature:
    """Return the function's signature with these names first, then mask and entropy,
    and with entropy_quantile last.
    """
    leading = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in (*first, "mask", "entropy")
    ]
    others = list(inspect.signature(function).parameters.values())[len(first) :]
    added = inspect.Parameter(
        "entropy_quantile", inspect.Parameter.KEYWORD_ONLY, default=quantile
    )
    rest = [p for p in others if p.name not in ("mask", "entropy")]
    return inspect.Signature([*leading, *rest, added])


@transform
def unbiased_kl(base: Objective) -> Objective:
    """Multiply the KL term of an objective by the ratio: the unbiased KL estimate of deepseek2025v32, TRL's default.

    Args:
        base: an objective with a KL term.

    Returns:
        The Objective with the estimator k3_ratio of upref.kl.

    Raises:
        InputError: the base is no Objective, or has no KL term.
    """
    if not isinstance(base, Objective) or not base.kl:
        named = base.name if isinstance(base, Objective) else describe_kind(base)
        raise InputError(
            f"unbiased_kl(...) takes an Objective with a KL term, e.g. upref.get('grpo'), not {named}."
        )
    return replace(
        base,
        name=f"unbiased_kl({base.name})",
        kl="k3_ratio",
        paper="deepseek2025v32",
        eq="the unbiased KL estimate",
        equation=f"{base.equation};  D_KL = r (π_ref/π_θ - log(π_ref/π_θ) - 1), with the gradient of r",
    )


# ---- sampler corrections -------------------------------------------------------------
def _correction(
    paper: str, eq: str, **defaults: str
) -> Callable[[Any], Callable[[Objective], Objective]]:
    """Return a decorator that makes of a factor the transform that multiplies by it.

    The factor is a function `(log_rho, mask, *, hyperparameters)` or
    `(log_rho, mask, lp_sampler, *, hyperparameters)`.

    Args:
        paper: key of papers.bib.
        eq: the place there.
        **defaults: where each default value comes from, by hyperparameter.
    """

    def wrap(factor: Callable[..., Any]) -> Callable[[Objective], Objective]:
        """Make the transform of this factor, and register it by the factor's name."""

        def make(base: Any) -> Objective:
            """Return the objective with this factor of its sampler; raise InputError
            where it has one.
            """
            if not isinstance(base, Objective):
                got = type(base).__name__
                raise InputError(
                    f"{factor.__name__}(...) takes an Objective, e.g. get('dapo'), not a {got}."
                )
            if base.sampler is not None:
                raise InputError(
                    f"{base.name} corrects for its sampler already: one correction is enough."
                )
            return replace(
                base,
                name=f"{factor.__name__}({base.name})",
                equation=f"w_t J_t, J_t of {base.name}: {base.equation};  {inspect.getdoc(factor)}",
                paper=paper,
                eq=eq,
                defaults=base.defaults | defaults,
                sampler=factor,
                on_policy_exception=base.on_policy_exception
                or "the weight is A times the sampler's correction",
                note=f"Needs logp_sampler. {base.note}".strip(),
            )

        make.__name__ = make.__qualname__ = factor.__name__
        make.__doc__ = f"{inspect.getdoc(factor)} ({paper}, {eq})"
        return transform(make)

    return wrap


CORRECTIONS = (
    "decoupled",
    "tis",
    "tis_seq",
    "mis",
    "mis_seq",
    "icepop",
    "seq_mask",
    "kpop",
)
IS_MAX = "2.0: verl's rollout_is_threshold"


@_correction("hilton2021batch", "the decoupled objective; fu2025areal")
def decoupled(log_rho, mask):
    """w_t = ρ_t = π_old(o_t)/μ(o_t), π_old the proximal policy and μ the behavior policy"""
    return exp(log_rho)


@_correction("yao2025offpolicy", "the truncated ratio of the blog", is_max=IS_MAX)
def tis(log_rho, mask, *, is_max=2.0):
    """w_t = min(ρ_t, C)"""
    return minimum(exp(log_rho), is_max)


@_correction(
    "liu2025speed", "sequence-level truncated importance sampling", is_max=IS_MAX
)
def tis_seq(log_rho, mask, *, is_max=2.0):
    """w_t = min(Π_t ρ_t, C)"""
    return minimum(exp(sum_t(log_rho, mask)), is_max)[:, None].expand_as(mask)


@_correction("liu2025speed", "masked importance sampling, of tokens", is_max=IS_MAX)
def mis(log_rho, mask, *, is_max=2.0):
    """w_t = ρ_t if ρ_t <= C, else 0"""
    return when(exp(log_rho) <= is_max, exp(log_rho))


@_correction(
    "liu2025speed",
    "masked importance sampling",
    is_max="3.0: TRL's vllm_importance_sampling_clip_max",
)
def mis_seq(log_rho, mask, *, is_max=3.0):
    """w_t = S if S = Π_t ρ_t <= C, else 0"""
    S = exp(sum_t(log_rho, mask))
    return when(S <= is_max, S)[:, None].expand_as(mask)


@_correction(
    "ling2025every",
    "IcePop's M(k)",
    is_min="0.5: verl's decoupled_token_icepop",
    is_max="5.0: verl's decoupled_token_icepop",
)
def icepop(log_rho, mask, *, is_min=0.5, is_max=5.0):
    """w_t = ρ_t if C_min <= ρ_t <= C, else 0"""
    rho = exp(log_rho)
    return when((rho >= is_min) & (rho <= is_max), rho)


@_correction(
    "liu2025speed",
    "the geometric mask",
    is_min="0.999: verl's decoupled_geo_rs",
    is_max="1.001: the same",
)
def seq_mask(log_rho, mask, *, is_min=0.999, is_max=1.001):
    """w_t = 1 if C_min <= (Π_t ρ_t)^(1/|o|) <= C, else 0"""
    s = exp(mean_t(log_rho, mask))
    return where((s >= is_min) & (s <= is_max), 1, 0)[:, None].expand_as(mask)


@_correction(
    "guo2026kpop",
    "as coded in AReaL, rejection_sampling.metric=binary_kl",
    phi="2.0: AReaL's docs/en/algorithms/grpo_series.md and gsm8k_kpop.yaml, upper; "
    "prime-rl#3283 proposes 0.1, as the paper's",
)
def kpop(log_rho, mask, lp_sampler, *, phi=2.0):
    """w_t = ρ_t if KL(Bern(π_old) ‖ Bern(μ)) <= φ and KL(Bern(μ) ‖ Bern(π_old)) <= φ, else 0"""
    lp_old = lp_sampler + log_rho
    is_near = (binary_kl(lp_sampler, lp_old) <= phi) & (
        binary_kl(lp_old, lp_sampler) <= phi
    )
    return when(is_near, exp(log_rho))
