# SPDX-License-Identifier: Apache-2.0
"""What an objective is: one pure function, its hand-written weight, and the facts of
its paper.

One file, because the three are read together: what is registered, what it computes,
what its gradient is.
"""

import difflib
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from upref import catalog, description, kl as kl_estimators
from upref.aggregation import (
    AGGREGATIONS,
    BY_LENGTH,
    KEPT_MEAN,
    Totals,
    aggregate,
    row_weights,
)
from upref.description import ERRORS, LEVELS, RATIO_SYMBOLS, citation
from upref.errors import InputError, describe_kind
from upref.ops import exp, log, mean_t, sum_t, where
from upref.rollouts import Rollouts, per_response

NO_DUAL_CLIP = description.NO_DUAL_CLIP  # for the files of objectives
# what an objective may read beside the five tensors, in words
NEEDS = {
    "entropy": "the policy's entropy per token",
    "group": "the prompt of each response",
}
# what the function and the closed form of an objective get by position, beside the
# arguments that each has
GIVEN_TO_FUNCTION = ("mask", "entropy", "group")
GIVEN_TO_WEIGHT = ("mu", "log_mu", *GIVEN_TO_FUNCTION)
REDUCE = {"sequence_mean": mean_t, "sequence_product": sum_t}

# One range per hyperparameter name, whatever the objective.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "eps": (lambda v: v >= 0, "a number >= 0"),
    "eps_low": (lambda v: v >= 0, "a number >= 0"),  # above 1 the lower clip is inert
    "eps_high": (lambda v: v >= 0, "a number >= 0"),
    "eps_f_low": (lambda v: v >= 0, "a number >= 0"),
    "c": (
        lambda v: v is None or v > 1,
        "None or greater than 1 (a dual clip at c <= 1 would clip on-policy tokens)",
    ),
    "beta": (lambda v: v >= 0, "a number >= 0"),
    "lam": (lambda v: v >= 0, "a number >= 0"),
    "is_min": (lambda v: v >= 0, "a number >= 0"),
    "entropy_quantile": (lambda v: 0 <= v < 1, "a number from 0 to below 1"),
    "seed": (lambda v: v >= 0 and int(v) == v, "a whole number >= 0"),
}
_POSITIVE = (lambda v: v > 0, "a number > 0")


def is_clip_width(name: str) -> bool:
    """Tell whether a hyperparameter is a width of the clip: such names begin with eps,
    as the letter of the papers. A width of 0 puts the bound at r = 1. The eps of
    cfpo and drpo is a divisor: 0 makes it infinite.

    Args:
        name: of the hyperparameter.
    """
    return name.startswith("eps")


def _no_weight(*_: Any, **__: Any) -> None:
    """Raise InputError, in place of a closed form that is not attached yet."""
    raise InputError(
        "this objective has no closed-form weight yet: attach one with @NAME.with_weight."
    )


# compared and hashed by identity: two functions are never provably equal
@dataclass(frozen=True, eq=False)
class Objective:
    """An objective J of the literature, to maximize. `get(name)` returns one; `names()`
    lists all.

    A call with Rollouts returns the scalar J, and `loss` its negative. `surrogate` is
    the unreduced function, `weight` its derivative dJ/dlp in closed form, written by
    hand from the paper.

    Raises:
        InputError: on an unknown hyperparameter or a value out of range, in every
            method but `unreduced`, `factors` and `sampler_weights`, which do not check.
    """

    name: str
    fn: Callable[..., Any] = field(repr=False)
    equation: str = field(repr=False)
    paper: str  # key in papers.bib
    eq: str  # where the objective stands in that paper
    level: str  # a key of LEVELS
    agg: str  # a name of upref.aggregation.AGGREGATIONS
    adv: str  # a name of upref.advantages.ADVANTAGES
    # a name of upref.kl.NAMES; the term's coefficient is beta, 0 unless given
    kl: str = ""
    # where each default value comes from
    defaults: dict[str, str] = field(default_factory=dict, repr=False)
    # what a reader must know beside the equation
    note: str = field(default="", repr=False)
    # why sympy cannot read it, where it cannot
    not_symbolic: str = field(default="", repr=False)
    # why the weight at r = 1 is not A, where it is not
    on_policy_exception: str = field(default="", repr=False)
    # why the weights are not proportional to A
    scale_exception: str = field(default="", repr=False)
    # where its equation was read, where that was not the paper
    known_from: str = field(default="", repr=False)
    # (log ρ, mask, *, hp), or (log ρ, mask, lp_sampler, *, hp): factors, [B, T]
    sampler: Callable[..., Any] | None = field(default=None, repr=False)
    # (log r, A, mask, entropy, *, hp): the tokens that a filter of its terms keeps
    keeps: Callable[..., Any] | None = field(default=None, repr=False)
    # why splitting the batch changes it, where it does
    batch_coupled: str = field(default="", repr=False)
    # it is UP's: A log π_θ, or the anchored form of that, where A > 0
    is_up: bool = field(default=False, repr=False)
    closed_form: Callable[..., Any] = field(default=_no_weight, repr=False)

    # read off the two signatures once
    # by the closed form: of mu, log_mu, mask, entropy, group
    reads: tuple[str, ...] = field(init=False, repr=False)
    _own: dict[str, Any] = field(init=False, repr=False)
    _of_sampler: dict[str, Any] = field(init=False, repr=False)
    _sampler_reads: int = field(init=False, repr=False)
    _extra_names: tuple[str, ...] = field(init=False, repr=False)
    reads_log_r: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the facts, read the hyperparameters off the signatures of the functions,
        and write the docstring of the objective.

        Raises:
            InputError: a fact is not one of its names, or a hyperparameter has no
                default or can be passed by position.
        """
        allowed_names = {
            "level": [*LEVELS],
            "agg": [*AGGREGATIONS],
            "kl": ["", *kl_estimators.NAMES],
        }
        for fact, names in allowed_names.items():
            value = getattr(self, fact)
            if not isinstance(value, str) or value not in names:
                raise InputError(
                    f"{fact} must be one of {', '.join(filter(None, names))}, got {repr(value)[:60]}."
                )
        if not isinstance(self.paper, str) or not isinstance(self.eq, str):
            raise InputError(
                "paper is a key of papers.bib, and eq the place there, got "
                f"{repr(self.paper)[:60]} and {repr(self.eq)[:60]}."
            )
        set_field = partial(object.__setattr__, self)  # the dataclass is frozen
        of_fn = _parameters(self.fn, 3, "fn")
        of_sampler = _parameters(self.sampler, 2, "sampler") if self.sampler else []
        set_field("_of_sampler", _keyword_only(of_sampler))
        set_field("_sampler_reads", len(of_sampler) - len(self._of_sampler))
        of_kl = {"beta": 0.0} if self.kl else {}
        set_field("_own", _keyword_only(of_fn) | of_kl | self._of_sampler)
        for hyperparameter, default in self._own.items():
            if default is inspect.Parameter.empty:
                raise InputError(
                    f"{self.name}: the hyperparameter {hyperparameter!r} has no default: write `*, {hyperparameter}=VALUE`."
                )
        _refuse_positional_hyperparameters(self.name, of_fn[3:], GIVEN_TO_FUNCTION)
        extra_names = [p.name for p in of_fn[3:] if p.kind is p.POSITIONAL_OR_KEYWORD]
        set_field("_extra_names", tuple(extra_names))
        self._read_weight()
        title, url = papers().get(self.paper, ("", ""))
        where_from = f"{title} ({self.source})".strip() + (f", {url}" if url else "")
        shapes = f"Level {self.level}: {LEVELS[self.level]}."
        set_field(
            "__doc__",
            f"{self.name}: {self.equation}\n\n{where_from}.\n\n{shapes} {ERRORS}",
        )

    def _read_weight(self) -> None:
        """Note what the closed form reads beside r and A."""
        parameters = _parameters(self.closed_form, 0, "closed_form")
        set_field = partial(object.__setattr__, self)
        set_field(
            "reads",
            tuple(p.name for p in parameters[2:] if p.kind is p.POSITIONAL_OR_KEYWORD),
        )
        set_field("reads_log_r", parameters[0].name == "log_r")

    @property
    def source(self) -> str:
        """The key of its paper and the place there; an objective of your own may have
        neither.
        """
        return citation(self.paper, self.eq)

    # ---- hyperparameters -------------------------------------------------------------
    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Name -> default value."""
        return dict(self._own)

    def resolve(self, hp: dict[str, Any]) -> dict[str, Any]:
        """Return the defaults overlaid with hp, once names and ranges are checked.

        Args:
            hp: some hyperparameters, by name.

        Returns:
            All of them.

        Raises:
            InputError: a name is unknown, or a value is out of its range.
        """
        defaults = self._own
        if not isinstance(hp, dict):
            raise InputError(
                f"hyperparameters are a dictionary, name -> value, not {describe_kind(hp)}."
            )
        for key, value in hp.items():
            if key not in defaults:
                known_names = ", ".join(defaults) or "none"
                near = difflib.get_close_matches(str(key), defaults, n=1, cutoff=0.7)
                meant = f" Did you mean {near[0]}?" if near else ""
                raise InputError(
                    f"{self.name} has no hyperparameter {key!r}; it takes: {known_names}.{meant}"
                )
            is_in_range, range_words = _RANGES.get(key, _POSITIVE)
            # c = None: no dual clip
            is_value = _is_number(value) or (value is None and key == "c")
            if not is_value or not is_in_range(value):
                raise InputError(
                    f"{self.name}: {key} must be {range_words}, got {repr(value)[:60]}."
                )
        return defaults | hp

    def aggregated(self, agg: str) -> "Objective":
        """Return the objective with the same terms under another aggregation.

        Of an objective of level custom that has one term per token, seq-mean is
        seq-mean-token-sum.

        Args:
            agg: a name of upref.aggregation.AGGREGATIONS that needs no length.

        Returns:
            The objective, with that aggregation in place of its own.

        Raises:
            InputError: an unknown name, seq-mean for an objective of level token, or
                seq-mean-token-sum-norm, whose length an objective does not have.
        """
        if agg == BY_LENGTH:
            raise InputError(
                f"{agg} divides by a fixed length L, which an objective does not have: compare with "
                "seq-mean-token-sum, and multiply the loss by L in a wrapper (or give it L = 1, if L is an argument)."
            )
        if agg not in AGGREGATIONS:
            raise catalog.unknown_aggregation(agg, AGGREGATIONS)
        if agg == KEPT_MEAN and not self.rejects:
            raise InputError(
                f"{self.name} rejects no token, so that {agg} is token-mean: give token-mean."
            )
        if agg == "seq-mean" != self.agg and self.level == "token":
            raise InputError(
                f"seq-mean averages one term per response, and {self.name} has one per token: "
                "give seq-mean-token-mean."
            )
        return replace(self, agg=agg)

    # ---- values ----------------------------------------------------------------------
    def __call__(self, b: Rollouts, **hp: Any) -> Float[Tensor, ""]:
        """Return J of the batch, the aggregation and the KL term included; gradients
        flow into b.logp alone.

        Raises:
            InputError: b is no Rollouts, or its tokens have several advantages where
                the objective needs one per response.
        """
        if not isinstance(b, Rollouts):
            raise InputError(
                f"{self.name} is computed from upref.Rollouts, not from {describe_kind(b)}."
            )
        if self.one_adv and not b.one_adv_per_response:
            raise InputError(
                f"{self.name} needs one advantage per response, and the tokens of one differ: pass adv as [B, 1]."
            )
        batch = (
            b.logp,
            b.logp_old,
            b.adv,
            b.mask,
            b.group,
            b.logp_ref,
            b.entropy,
            b.totals,
        )
        return self.J(*batch, lp_sampler=b.logp_sampler, **hp)

    def loss(self, b: Rollouts, **hp: Any) -> Float[Tensor, ""]:
        """Return -J, to be minimized.

        Args:
            b: the batch.
            **hp: hyperparameters; the others have their defaults.

        Returns:
            A scalar with gradients to b.logp.
        """
        return -self(b, **hp)

    def J(
        self,
        lp: Float[Tensor, "B T"],
        lp_old: Float[Tensor, "B T"],
        A: Float[Tensor, "B T"] | Float[Tensor, "B 1"],
        mask: Bool[Tensor, "B T"],
        group: Int[Tensor, " B"] | None = None,
        lp_ref: Float[Tensor, "B T"] | None = None,
        entropy: Float[Tensor, "B T"] | None = None,
        totals: Totals | None = None,
        is_weights: Float[Tensor, "B T"] | None = None,
        lp_sampler: Float[Tensor, "B T"] | None = None,
        **hp: Any,
    ) -> Float[Tensor, ""]:
        """Return J of plain tensors, unvalidated: for a training step under
        torch.compile, without host synchronisation.

        is_weights multiply each token's term as constants (a sampler correction that
        somebody else has computed); an objective with one term per response takes their
        mean over the response. lp_sampler is read by `tis(...)` and its like, which
        compute such weights themselves.

        Args:
            lp, lp_old, lp_ref, entropy, is_weights, lp_sampler: [B, T].
            A: [B, T] or [B, 1].
            mask: [B, T].
            group: prompt ids, [B].
            totals: the counts of the mini-batch, where this is a part.
            **hp: hyperparameters.

        Returns:
            The scalar J, to be maximized.

        Raises:
            InputError: lp_ref is missing, or the kept tokens of the whole mini-batch.
        """
        hp = self.resolve(hp)
        beta = hp.pop("beta", 0.0)
        terms = self.unreduced(lp, lp_old, A, mask, entropy, lp_sampler, group, **hp)
        if is_weights is not None:
            terms = weighed(terms, is_weights.detach(), mask)
        if self.agg == KEPT_MEAN:
            if totals is not None and int(totals.tokens) != int(mask.sum()):
                raise InputError(
                    f"{KEPT_MEAN} of a micro-batch needs the kept tokens of the whole mini-batch: compute the mini-batch "
                    "at once."
                )
            kept = self._kept(lp, lp_old, A, mask, entropy, lp_sampler, **hp)
            totals = _counts_of_kept(kept)
        J = aggregate(terms, mask, self.agg, group, totals)
        if beta:
            if lp_ref is None:
                raise InputError(
                    f"{self.name} with beta={beta} needs logp_ref, the reference model's log-probabilities."
                )
            masked = (where(mask, x, 0) for x in (lp, lp_ref.detach(), lp_old.detach()))
            k = kl_estimators.per_token(self.kl, *masked)
            J = J - beta * aggregate(k, mask, self.agg, group, totals)
        return J

    def unreduced(
        self,
        lp: Any,
        lp_old: Any,
        A: Any,
        mask: Any,
        entropy: Any = None,
        lp_sampler: Any = None,
        group: Any = None,
        **hp: Any,
    ) -> Any:
        """Return J before aggregation: [B, T], or [B] where the objective has one term
        per response.

        Args:
            lp, lp_old, entropy, lp_sampler: [B, T].
            A: [B, T] or [B, 1].
            mask: [B, T].
            group: prompt ids, [B].
            **hp: hyperparameters.

        Returns:
            Terms, whose masked slots are not 0.
        """
        hp_of_surrogate = {k: v for k, v in hp.items() if k not in self._of_sampler}
        terms = self.fn(
            *self._at_level(lp, lp_old, A, mask),
            **self._extras(mask, entropy, group),
            **hp_of_surrogate,
        )
        if terms.ndim == 1 and self.agg != "seq-mean":
            terms = terms[:, None].expand_as(mask)
        factors = self.sampler_weights(lp_old, lp_sampler, mask, **hp)
        return terms if factors is None else weighed(terms, factors, mask)

    @property
    def rejects(self) -> bool:
        """Whether a filter or its sampler correction gives some tokens the weight 0."""
        if self.keeps is not None:
            return True
        if self.sampler is None:
            return False
        # ρ far on both sides of 1, and π_old = μ ρ below 1
        log_rho = torch.linspace(-14, 14, 57)[:, None]
        mask = torch.ones_like(log_rho, dtype=torch.bool)
        arguments = (log_rho, mask, torch.full_like(log_rho, -15.0))
        factors = self.sampler(*arguments[: self._sampler_reads], **self._of_sampler)
        return bool((factors == 0).any())

    def kept(self, b: Rollouts, **hp: Any) -> Bool[Tensor, "B T"]:
        """Return the tokens that no filter and no sampler correction rejects: those by
        whose number kept-mean divides.

        Args:
            b: the batch.
            **hp: hyperparameters.

        Returns:
            [B, T], within the mask.

        Raises:
            InputError: b is no Rollouts, or lacks the entropy.
        """
        if not isinstance(b, Rollouts):
            raise InputError(
                f"the kept tokens of {self.name} are computed from upref.Rollouts, not from {describe_kind(b)}."
            )
        policies = (b.logp, b.logp_old, b.adv, b.mask, b.entropy, b.logp_sampler)
        return self._kept(*policies, **hp)

    def _kept(
        self,
        lp: Any,
        lp_old: Any,
        A: Any,
        mask: Any,
        entropy: Any = None,
        lp_sampler: Any = None,
        **hp: Any,
    ) -> Any:
        """Return `kept` of plain tensors, [B, T]; raise InputError where an entropy is
        needed and missing.
        """
        kept = mask
        resolved = self.resolve(hp)
        factors = self.sampler_weights(lp_old, lp_sampler, mask, **hp)
        if factors is not None:
            kept = kept & (factors != 0)
        if self.keeps is not None:
            if "entropy" in self._extra_names and entropy is None:
                raise InputError(
                    f"{self.name} needs the policy's entropy per token: Rollouts(..., entropy=...)."
                )
            log_r = torch.where(mask, (lp - lp_old).detach(), 0)
            own = _keyword_only(_parameters(self.keeps, 4, "keeps"))
            values = {k: v for k, v in resolved.items() if k in own}
            kept = kept & self.keeps(log_r, A, mask, entropy, **values)
        return kept

    def factors(self, b: Rollouts, **hp: Any) -> Float[Tensor, "B T"] | None:
        """Return `sampler_weights` of a batch.

        Args:
            b: the batch.
            **hp: hyperparameters.

        Returns:
            [B, T], or None.

        Raises:
            InputError: b is no Rollouts, or lacks logp_sampler.
        """
        if not isinstance(b, Rollouts):
            raise InputError(
                f"the factors of {self.name} are computed from upref.Rollouts, not from {describe_kind(b)}."
            )
        return self.sampler_weights(b.logp_old, b.logp_sampler, b.mask, **hp)

    def sampler_weights(
        self, lp_old: Any, lp_sampler: Any, mask: Any, **hp: Any
    ) -> Float[Tensor, "B T"] | None:
        """Return the factor of each token by its sampler correction, a constant; None
        where the objective has none.

        Args:
            lp_old: log π_old, [B, T].
            lp_sampler: log μ, [B, T].
            mask: [B, T].
            **hp: hyperparameters.

        Returns:
            [B, T], or None.

        Raises:
            InputError: lp_sampler is None, and the objective reads it.
        """
        if self.sampler is None:
            return None
        if lp_sampler is None:
            raise InputError(
                f"{self.name} needs logp_sampler, the log-probabilities of the engine that sampled: "
                "Rollouts(..., logp_sampler=...)."
            )
        log_rho = where(mask, (lp_old - lp_sampler).detach(), 0)
        available = (log_rho, mask, where(mask, lp_sampler.detach(), 0))
        arguments = available[: self._sampler_reads]  # the first few of them
        sampler_hp = {k: hp.get(k, v) for k, v in self._of_sampler.items()}
        return where(mask, self.sampler(*arguments, **sampler_hp), 0).to(log_rho.dtype)

    def _at_level(self, lp: Any, lp_old: Any, A: Any, mask: Any) -> Any:
        """Return lp, lp_old and A at the level of the pure function.
        Gradients flow neither into lp_old and A nor into masked slots.
        """
        # 0 * NaN on the way back from a masked slot must not reach the policy
        lp = torch.where(mask, lp, lp.detach()) if lp.requires_grad else lp
        lp_old = lp_old.detach()
        A = A.detach()
        if reduce := REDUCE.get(self.level):
            return reduce(lp, mask), reduce(lp_old, mask), per_response(A, mask)
        return (
            lp,
            lp_old,
            per_response(A, mask)[:, None] if self.agg == "seq-mean" else A,
        )

    def _extras(self, mask: Any, entropy: Any, group: Any) -> dict[str, Any]:
        """Return the arguments of the function beside log-probabilities and A, by name;
        raise InputError where an entropy is needed and missing.
        """
        names = self._extra_names
        if "entropy" in names and entropy is None:
            raise InputError(
                f"{self.name} needs the policy's entropy per token: Rollouts(..., entropy=...)."
            )
        available = {
            "mask": mask,
            "entropy": entropy,
            "group": group_ids(mask, group) if "group" in names else None,
        }
        return {k: v for k, v in available.items() if k in names}

    def surrogate(self, lp: Any, lp_old: Any, A: Any, **hp: Any) -> Any:
        """Call the pure function itself, at the objective's level, on tensors, arrays or
        symbols.

        Args:
            lp, lp_old: log-probabilities of a token, or of a response.
            A: the advantage.
            **hp: hyperparameters.

        Returns:
            J of it, before aggregation.
        """
        return self.fn(lp, lp_old, A, **self.surrogate_hyperparameters(hp))

    def surrogate_hyperparameters(self, hp: dict[str, Any]) -> dict[str, Any]:
        """Return the resolved hyperparameters without those of the KL term and of the
        sampler's correction.

        Args:
            hp: resolved hyperparameters.
        """
        return {
            k: v
            for k, v in self.resolve(hp).items()
            if k != "beta" and k not in self._of_sampler
        }

    # ---- gradients -------------------------------------------------------------------
    def weight(
        self,
        r: Any,
        A: Any,
        mu: Any = None,
        mask: Any = None,
        entropy: Any = None,
        group: Any = None,
        **hp: Any,
    ) -> Any:
        """Return dJ/dlp in closed form, at the objective's level, without the KL term and
        without the factor of a sampler correction: r is the token ratio, or s or S of the
        whole response.

        mu = π_old(o_t), or of the response, is read by objectives whose bounds depend
        on it; "custom" ones read the whole [B, T] arrays and the mask. Works on
        tensors, arrays and symbols.

        Args:
            r: ratios.
            A: advantages; r, A and mu broadcast.
            mu: π_old.
            mask: [B, T], for objectives of level custom.
            entropy: per token, where the objective reads it.
            group: prompt ids, [B].
            **hp: hyperparameters.

        Returns:
            The weights, of the kind and the broadcast shape of r.

        Raises:
            InputError: the closed form cannot be computed there.
        """
        try:
            log_mu = None if mu is None else log(mu)
            available = {
                "mu": mu,
                "log_mu": log_mu,
                "mask": mask,
                "entropy": entropy,
                "group": group,
            }
            return self._evaluate_closed_form(
                log(r) if self.reads_log_r else r, A, available, hp
            )
        except InputError:
            raise
        except (
            ArithmeticError,
            AttributeError,
            IndexError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as e:
            given = f"r = {repr(r)[:60]}, A = {repr(A)[:60]}"
            raise InputError(
                f"{self.name} has no weight at {given}: {type(e).__name__}: {e}"
            ) from e

    @property
    def ratio_symbol(self) -> str:
        """The letter of the ratio on which it acts: r, or s or S of a response."""
        return RATIO_SYMBOLS[self.level]

    @property
    def one_adv(self) -> bool:
        """Whether the tokens of a response must share one advantage."""
        return self.agg == "seq-mean" or self.level in REDUCE

    @property
    def has_response_advantage(self) -> bool:
        """Whether its paper gives all tokens of a response one advantage, made of the
        rewards. Whitened advantages, as of PPO and REINFORCE++, may differ by token.
        """
        return self.adv != "whiten"

    @property
    def needs(self) -> list[str]:
        """In words, what it reads beside log-probabilities, advantages and mask."""
        return [words for k, words in NEEDS.items() if k in self.reads]

    @property
    def reads_mu(self) -> bool:
        """Whether its weight depends on π_old(o_t) itself, beside the ratio."""
        return bool({"mu", "log_mu"} & set(self.reads))

    def _evaluate_closed_form(
        self, r_or_log_r: Any, A: Any, available: dict[str, Any], hp: Any
    ) -> Any:
        """Evaluate the closed form at these ratios, or at their logarithms where it
        reads those (`reads_log_r`).

        Raises:
            InputError: it reads what is not available.
        """
        # a caller passes mu, of which log_mu is computed
        missing = [k.removeprefix("log_") for k in self.reads if available[k] is None]
        if missing:
            arguments = " and ".join(f"{k}=" for k in missing)
            raise InputError(
                f"the weight of {self.name} depends on {' and '.join(missing)}: pass {arguments}."
            )
        return self.closed_form(
            r_or_log_r,
            A,
            **{k: available[k] for k in self.reads},
            **self.surrogate_hyperparameters(hp),
        )

    def token_weights(self, b: Rollouts, **hp: Any) -> Float[Tensor, "B T"]:
        """Return ∂/∂lp_t of the unreduced J from the closed form, before aggregation and
        without KL; 0 on masked slots.

        Args:
            b: the batch.
            **hp: hyperparameters.

        Returns:
            [B, T].
        """
        lp, lp_old, A = self._at_level(b.logp.detach(), b.logp_old, b.adv, b.mask)
        log_r = lp - lp_old
        mu = exp(lp_old) if "mu" in self.reads else None
        available = {
            "mu": mu,
            "log_mu": lp_old,
            "mask": b.mask,
            "entropy": b.entropy,
            "group": group_ids(b.mask, b.group),
        }
        weights = self._evaluate_closed_form(
            log_r if self.reads_log_r else exp(log_r), A, available, hp
        )
        if self.level in REDUCE:
            n = b.mask.sum(-1)
            # the response's term stands on each of its tokens
            weights = weights if self.agg == "seq-mean" else weights * n
            # d(mean_t lp)/dlp_t = 1/n, and d(sum_t lp)/dlp_t = 1
            weights = weights / n if self.level == "sequence_mean" else weights
            weights = weights[:, None]
        if (factors := self.factors(b, **hp)) is not None:
            weights = weighed(weights, self.per_term(factors, b.mask), b.mask)
        return where(b.mask, weights, 0)

    def per_term(
        self, factors: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Tensor:
        """Return what multiplies the tokens' weights: the factors, or their mean where a
        response has one term.

        Args:
            factors: [B, T].
            mask: [B, T].

        Returns:
            [B, T], or [B, 1] for one term per response.
        """
        return mean_t(factors, mask)[:, None] if self.agg == "seq-mean" else factors

    def gradient(self, b: Rollouts, **hp: Any) -> Float[Tensor, "B T"]:
        """Return dJ/dlp = weight x aggregation, the closed form of what autograd computes
        through J (without KL).

        Args:
            b: the batch.
            **hp: hyperparameters.

        Returns:
            [B, T].
        """
        counts = b.counts
        if self.agg == KEPT_MEAN:
            counts = _counts_of_kept(self.kept(b, **hp))
        rows = row_weights(self.agg, b.mask, counts)
        w = self.token_weights(b, **hp)
        return w * (
            rows[:, None].to(w.dtype)
            if isinstance(rows, Tensor) and rows.ndim
            else rows
        )

    # ---- for the one who writes an objective -----------------------------------------
    def with_weight(self, closed_form: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: attach the closed form and put the objective into the registry.

        A file that is read again, or a cell of a notebook that runs again, replaces its
        own objective.

        Args:
            closed_form: dJ/dlp as a function of r, A and what the objective reads.

        Returns:
            The closed form itself.

        Raises:
            InputError: another objective has this name, or another file has written
                this objective's weight.
        """
        taken = (
            self.closed_form is not _no_weight
            and _source(self.closed_form)[:2] != _source(closed_form)[:2]
        )
        known = OBJECTIVES.get(self.name, self)
        if known is not self:  # a file that is read again makes its functions anew
            taken = known.fn is self.fn or _source(known.fn) != _source(self.fn)
        if taken:
            raise InputError(
                f"{self.name} is an objective of {_source(known.fn)[0]}: give yours another name."
            )
        of_weight = _parameters(closed_form, 0, "closed_form")
        _refuse_positional_hyperparameters(
            getattr(closed_form, "__name__", "closed_form"),
            of_weight[2:],
            GIVEN_TO_WEIGHT,
        )
        object.__setattr__(self, "closed_form", closed_form)
        self._read_weight()
        OBJECTIVES[self.name] = self
        return closed_form


OBJECTIVES: dict[str, Objective] = {}
TRANSFORMS: dict[str, Callable[[Objective], Objective]] = {}  # NAME of NAME(BASE)


def transform(
    make: Callable[[Objective], Objective],
) -> Callable[[Objective], Objective]:
    """Decorator of a function from an objective to another: `get("NAME(BASE)")` calls
    it.

    Args:
        make: the function; its name is the NAME.

    Returns:
        The function itself.
    """
    TRANSFORMS[make.__name__] = make
    return make


def objective(
    *, level: str, agg: str, adv: str, paper: str = "", eq: str = "", **facts: Any
) -> Callable[[Callable[..., Any]], Objective]:
    """Register the pure function `(lp, lp_old, A, *, hyperparameters)` as an objective;
    then use `@NAME.with_weight`.

    Args:
        level: what one ratio covers, a key of LEVELS.
        agg: name of the aggregation.
        adv: name of the advantage estimator.
        paper: key of papers.bib; "" where it is in no paper.
        eq: equation or section of the paper.
        **facts: further fields of Objective.

    Returns:
        A decorator that returns the Objective.
    """

    def wrap(fn: Callable[..., Any]) -> Objective:
        """Make the Objective of this function."""
        return Objective(
            fn.__name__,
            fn,
            inspect.getdoc(fn) or "",
            paper,
            eq,
            level,
            agg,
            adv,
            **facts,
        )

    return wrap


def _source(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the file of a function, the file of its wrapper, and its name.

    A notebook, which has no file, is `__main__`. functools.wraps gives a function the
    name of the one that it wraps.
    """
    return _file(inspect.unwrap(fn)), _file(fn), getattr(fn, "__qualname__", "")


def _file(fn: Callable[..., Any]) -> str:
    """Return the path of a function's file; its module's name where it has none."""
    names = getattr(fn, "__globals__", {})
    file = names.get("__file__")
    return os.path.realpath(file) if file else str(names.get("__name__", ""))


@cache
def papers() -> dict[str, tuple[str, str]]:
    """Return title and link of each key in papers.bib.

    Returns:
        (title, link) by key.
    """
    text = resources.files("upref").joinpath("papers.bib").read_text(encoding="utf-8")
    entries = re.findall(
        r"^@\w+\{([^,\s]+),.*?^  title = \{(.*?)\},\n.*?^  url = \{(.*?)\}",
        text,
        re.M | re.S,
    )
    return {
        key: (" ".join(re.sub(r"[{}]", "", title).split()), url)
        for key, title, url in entries
    }


def _is_number(x: Any) -> bool:
    """Tell whether x is a number that a float can hold. Infinity is one: no bound."""
    try:
        return (
            isinstance(x, (int, float, np.number))
            and not isinstance(x, bool)
            and float(x) == float(x)
        )
    except (OverflowError, TypeError):  # 10**400, a complex number
        return False


def _parameters(
    fn: Callable[..., Any], fewest: int, name: str
) -> list[inspect.Parameter]:
    """Return the parameters of a function of an objective, or raise InputError where
    it has fewer.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    if len(parameters) < max(fewest, 1):
        raise InputError(
            f"{name} must be a function (lp, lp_old, A, *, hyperparameters), got {repr(fn)[:60]}."
        )
    return parameters


def _refuse_positional_hyperparameters(
    name: str, parameters: list[inspect.Parameter], given: tuple[str, ...]
) -> None:
    """Raise InputError for an argument by position that upref has no value for.

    Args:
        name: of the function.
        parameters: those behind the arguments that every such function has.
        given: the names of those that it gets by position where it has them.
    """
    for parameter in parameters:
        is_by_position = parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        if is_by_position and parameter.name not in given:
            has_default = parameter.default is not parameter.empty
            default = f"={parameter.default!r:.40}" if has_default else ""
            raise InputError(
                f"{name}: the hyperparameter {parameter.name!r} can be passed by position, and must be "
                f"keyword-only: write `*, {parameter.name}{default}`."
            )


def _keyword_only(parameters: list[inspect.Parameter]) -> dict[str, Any]:
    """Return the defaults of the arguments that can be passed by name alone;
    Parameter.empty for one without a default.
    """
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def group_ids(
    mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"] | None
) -> Int[Tensor, " B"]:
    """Return the prompt of each response, 0 for all where there are no ids.

    Args:
        mask: [B, T].
        group: prompt ids, or None.

    Returns:
        [B].
    """
    return mask.new_zeros(len(mask), dtype=torch.int64) if group is None else group


def _counts_of_kept(kept: Tensor) -> Totals:
    """Return the counts by which kept-mean divides: at least one token."""
    counts = Totals.of(kept)
    tokens = torch.as_tensor(counts.tokens).clamp(min=1)
    return counts._replace(tokens=tokens)


def weighed(
    terms: Tensor, w: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Tensor:
    """Return terms [B, T] times their weights, or terms [B] times the mean of theirs;
    what weighs 0 adds 0, infinite or not.

    Args:
        terms: [B, T] or [B].
        w: weight of each token, [B, T].
        mask: [B, T].

    Returns:
        The shape of the terms.
    """
    w = w if terms.ndim == 2 else mean_t(w, mask)
    return where(w == 0, 0, terms * w)
