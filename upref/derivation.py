# SPDX-License-Identifier: Apache-2.0
"""The gradient of an objective, derived by sympy from the function that trains;
`import upref` does not import it.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import mpmath
import numpy as np
import sympy
import torch
from sympy import Expr, Symbol, log, oo

from upref import kl
from upref.aggregation import Totals, row_weights
from upref.errors import InputError
from upref.ops import sum_t, where
from upref.registry import REDUCE, Objective, get
from upref.rollouts import Rollouts
from upref.symbolic import SymbolArray, breakpoints, forget_sg, in_regime

# an objective that couples the tokens of a response is derived on one of this length
FREE_TOKENS = 3


class RegimeRow(NamedTuple):
    """One regime: the sign of A, where r is, J there, its derivative by lp, and the
    weight written by hand.
    """

    sign: int
    where: str
    J: Expr
    gradient: Expr
    weight: Expr


@dataclass(frozen=True)
class Derivation:
    """str() prints it. ok: in every regime the derivative minus the hand-written weight
    simplifies to 0.
    """

    name: str
    steps: list[str]
    ok: bool
    rows: tuple["RegimeRow", ...] = ()  # empty where sympy cannot read it

    def __str__(self) -> str:
        return "\n".join(self.steps)


def derive(objective: str | Objective, mu: float = 0.25, **hp: Any) -> Derivation:
    """Derive dJ/dlp in every regime (sign of A, r between breakpoints) and compare it
    with the weight written by hand.

    Args:
        objective: a registered name, or an Objective. For one that sympy cannot read,
            the text gives the reason, and autograd is compared with the weight on a
            small batch.
        mu: π_old(o_t), which orders breakpoints that depend on it. The others are
            ordered at the defaults (c at 3).
        **hp: hyperparameters to insert as numbers; the others stay symbols.

    Returns:
        A Derivation; `ok` is False if a regime does not match.

    Raises:
        InputError: mu is no probability above 0.
    """
    if isinstance(mu, bool) or not isinstance(mu, int | float) or not 0 < mu <= 1:
        raise InputError(f"mu is a probability in (0, 1], got {repr(mu)[:60]}.")
    reference = objective if isinstance(objective, Objective) else get(objective)
    resolved = reference.surrogate_hyperparameters(hp)
    steps = _describe_objective(reference)
    if reference.not_symbolic:
        steps.append(
            f"not read by sympy: {reference.not_symbolic}; by autograd on a small batch:"
        )
        numeric_steps, ok = _compare_by_autograd(reference, hp)
        return Derivation(reference.name, steps + numeric_steps, ok)
    letters, values = _letters_and_values(resolved, hp.keys(), mu)
    ok = True
    notes = dict[Expr, bool]()
    all_rows = list[RegimeRow]()
    for A, sign, words in (
        (Symbol("A", positive=True), 1, "A > 0"),
        (Symbol("A", negative=True), -1, "A < 0"),
        (sympy.S.Zero, 0, "A = 0"),
    ):
        regimes = _regimes(reference, A, letters, values | {A: sign}, notes)
        rows = [RegimeRow(sign, *regime) for regime in regimes]
        lines, is_equal = _compare_rows(rows)
        steps += [words, *lines]
        ok = ok and is_equal
        all_rows += rows
    steps += [f"*  {edge} = 0, for mu = {mu} and the defaults" for edge in notes]
    steps.append(f"equal to the weight written by hand: {'yes' if ok else 'NO'}")
    return Derivation(reference.name, steps, ok, tuple(all_rows))


def _letters_and_values(
    resolved: dict[str, Any], inserted: Collection[str], mu: float
) -> tuple[dict[str, Any], dict[Symbol, Expr]]:
    """Return what stands for each hyperparameter in the formulas, and the numbers at
    which breakpoints are ordered.

    Args:
        resolved: the hyperparameters with their numbers.
        inserted: the names of those that are inserted as numbers.
        mu: π_old(o_t).

    Returns:
        Name -> a symbol, or the number that is inserted. Symbol -> its number.
    """
    letters = dict[str, Any]()
    values = dict[Symbol, Expr]()
    for name, number in resolved.items():
        if name in inserted:
            letters[name] = number if number is None else _exact(number)
        else:
            letters[name] = Symbol(name, positive=True)
            values[letters[name]] = _exact(3 if number is None else number)
    values[Symbol("mu", positive=True)] = _exact(mu)
    return letters, values


def _describe_objective(objective: Objective) -> list[str]:
    """Return the first lines of a derivation: the objective, its equation in words, and
    the factors of the chain rule.
    """
    doc = (inspect.getdoc(objective.fn) or str(objective.__doc__)).split("\n\n")[0]
    lines = [
        f"{objective.name}   ({objective.source})",
        f"  {doc}",
        _describe_chain_rule(objective),
    ]
    if objective.hyperparameters.get("c", 0) is None:
        lines.append(
            "  c is a dual clip. The formula has none: c is None, no bound, unless you set it"
        )
    if objective.sampler:
        lines.append(
            f"  times the constant {inspect.getdoc(objective.sampler)}: what follows is without it"
        )
    return lines


def _compare_rows(rows: list[RegimeRow]) -> tuple[list[str], bool]:
    """Return a line for each regime of one sign of A, in columns, and whether every
    derivative equals the weight written by hand.
    """
    place_width = max(len(row.where) for row in rows)
    J_width = max(len(str(row.J)) for row in rows)
    lines = []
    ok = True
    for row in rows:
        line = f"  {row.where:{place_width}}   J = {row.J!s:{J_width}}   dJ/dlp = {row.gradient}"
        if not _are_equal(row.gradient, row.weight):
            ok = False
            line += f"   MISMATCH: by hand {row.weight}"
        lines.append(line)
    return lines, ok


def _are_equal(x: Expr, y: Expr) -> bool:
    """Tell whether the difference of two expressions simplifies to 0."""
    return sympy.simplify((x - y).rewrite(sympy.exp)) == 0


def _exact(x: Any) -> Expr:
    """Return a number as an exact rational."""
    return sympy.nsimplify(x, rational=True)


def _describe_chain_rule(objective: Objective) -> str:
    """Return a line with the factors that the chain rule adds to the derivative: that
    of the level (mean_t or sum_t) and the row weight of the aggregation.
    """
    # a mask of which `row_weights` reads the number of tokens of a response alone
    row = SimpleNamespace(
        sum=lambda _: SimpleNamespace(clamp=lambda min: Symbol("|o_i|"))
    )
    totals = Totals(*map(Symbol, ("N", "B", "P", "N_g")))
    rows: Any = row_weights(objective.agg, row, totals)  # type: ignore[arg-type]
    T, t, k = sympy.symbols("T t k", integer=True, positive=True)
    lp = sympy.IndexedBase("lp")
    total = sympy.Sum(lp[t], (t, 1, T))
    level = f"level {objective.level}"
    of_response = {
        "sequence_mean": ("mean_t lp", total / T),
        "sequence_product": ("sum_t lp", total),
    }
    if objective.level in of_response:
        name, reduced = of_response[objective.level]
        inner = reduced.diff(lp[k]).doit().subs(T >= k, True)
        level += f", lp = {name}, d({name})/dlp_t = {inner}, T = |o_i|"
    symbol_words = {
        "N": "N tokens in all",
        "B": "B responses",
        "P": "P prompts",
        "N_g": "N_g tokens of prompt g",
    }
    named = [symbol.name for symbol in sorted(rows.free_symbols, key=str)]
    legend = ", ".join(symbol_words[name] for name in named if name in symbol_words)
    return f"  {level}; aggregation {objective.agg}: row weight {rows} ({legend})"


class _Regime(NamedTuple):
    """A regime: an interval of r for each token, J there, its derivative by one token's
    lp, and the weight of that token.
    """

    intervals: tuple["RatioInterval", ...]
    J: Expr
    gradient: Expr
    weight: Expr


def _regimes(
    objective: Objective,
    A: Expr,
    letters: dict[str, Any],
    values: dict[Symbol, Expr],
    notes: dict[Expr, bool],
) -> Iterator[tuple[str, Expr, Expr, Expr]]:
    """Yield the regimes: where each is, J, dJ/dlp and the weight. Neighbors with equal
    expressions are one regime.

    Args:
        objective: the objective.
        A: a symbol with a sign, or 0.
        letters: hyperparameter -> a symbol, or the number that is inserted.
        values: a number for each symbol, A included, by which regimes are ordered.
        notes: gets each breakpoint that has no closed form, as the expression that is 0
            there.

    Yields:
        Where it is, in words, and three expressions. Of an objective that couples
        tokens, they are of the first token, or of one whose gradient is not the weight.
    """
    tags = [""]
    if objective.level == "custom":
        tags = [f"_{i + 1}" for i in range(FREE_TOKENS)]
    lp = [Symbol(f"lp{tag}", real=True) for tag in tags]
    lp_old = [Symbol(f"lp_old{tag}", real=True) for tag in tags]
    r = [Symbol(f"{objective.ratio_symbol}{tag}", positive=True) for tag in tags]
    mu = Symbol("mu", positive=True)
    # log-probability -> what it is in terms of r and mu
    lp_in_r = [log(mu) + log(ratio) for ratio in r]
    in_r = dict(zip(lp, lp_in_r, strict=True)) | dict.fromkeys(lp_old, log(mu))
    J = symbolic_J(objective, A, lp, lp_old, letters)
    J_in_r = symbolic_J(objective, A, lp_in_r, [log(mu)] * len(tags), letters)
    weights = _weights(objective, A, r, mu, letters)
    edges: set[Expr] = set()
    for expr in (J_in_r, *weights):
        edges.update(breakpoints(expr, r[0]))
    top = 1 / mu if objective.reads_mu else oo
    intervals = _intervals_between(edges, r[0], values, top, notes)
    regimes = []
    # tokens of a response are alike: their order makes no other regime
    for of_tokens in itertools.combinations_with_replacement(intervals, len(tags)):
        points = [interval.point for interval in of_tokens]
        point = values | dict(zip(r, points, strict=True))
        log_probs = {token_lp: expr.subs(point) for token_lp, expr in in_r.items()}
        J_here = in_regime(J, point | log_probs)
        # the gradient and the weight of each token
        pairs = []
        for token_lp, weight in zip(lp, weights, strict=True):
            gradient = sympy.simplify(forget_sg(J_here.diff(token_lp)).subs(in_r))
            pairs.append((gradient, in_regime(weight, point)))
        wrong = [pair for pair in pairs if not _are_equal(*pair)]
        shown = wrong[0] if wrong else pairs[0]
        regimes.append(_Regime(of_tokens, J_here, *shown))
    for first, last in _neighbors_alike(regimes):
        places = [
            _describe_interval(low_end.low, ratio.name, high_end.high)
            for low_end, ratio, high_end in zip(
                first.intervals, r, last.intervals, strict=True
            )
        ]
        yield ", ".join(places), first.J, first.gradient, first.weight


def _neighbors_alike(regimes: list[_Regime]) -> Iterator[tuple[_Regime, _Regime]]:
    """Yield the first and the last of neighboring regimes that have the same J, gradient
    and weight. Of several tokens, each regime stays by itself: it is first and last.
    """

    def expressions(regime: _Regime) -> tuple[Any, ...]:
        """Return what is the same in neighbors that are joined."""
        if len(regime.intervals) > 1:
            return regime
        return (regime.J, regime.gradient, regime.weight)

    for _, run in itertools.groupby(regimes, key=expressions):
        neighbors = list(run)
        yield neighbors[0], neighbors[-1]


def symbolic_J(
    objective: Objective, A: Expr, lp: list[Any], lp_old: list[Any], hp: dict[Any, Any]
) -> Expr:
    """Return the unreduced J from the function itself, of scalars, or of one response at
    level custom.

    Args:
        objective: the objective.
        A: the advantage.
        lp, lp_old: symbols, one for each token.
        hp: hyperparameters, symbols or numbers.

    Returns:
        J as a sympy expression.
    """
    if objective.level != "custom":
        return sympy.sympify(objective.fn(lp[0], lp_old[0], A, **hp))
    response = (SymbolArray([row]) for row in (lp, lp_old, [A] * len(lp)))
    return sum(objective.fn(*response, np.ones((1, len(lp)), dtype=bool), **hp).flat)


def _weights(
    objective: Objective, A: Expr, r: list[Any], mu: Expr, hp: dict[Any, Any]
) -> list[Expr]:
    """Return the closed form of the weight of each token, as sympy expressions."""
    ratios = [log(ratio) for ratio in r] if objective.reads_log_r else r
    available = {"mu": mu, "log_mu": log(mu), "mask": np.ones((1, len(r)), dtype=bool)}
    if objective.level == "custom":
        arguments = (SymbolArray([ratios]), SymbolArray([[A] * len(r)]))
    else:
        arguments = (ratios[0], A)
    weights = objective.closed_form(
        *arguments, **{name: available[name] for name in objective.reads}, **hp
    )
    return [sympy.sympify(weight) for weight in np.ravel(weights)]


class RatioInterval(NamedTuple):
    """An open interval of the ratio: its ends in words, and a point inside."""

    low: str
    high: str
    point: Expr


def _intervals_between(
    edges: set[Expr],
    r: Symbol,
    values: dict[Any, Any],
    top: Expr,
    notes: dict[Any, Any],
) -> list[RatioInterval]:
    """Return the open intervals of r between the edges, each with a point inside.

    Args:
        edges: expressions; one with r in it has no closed form, and is solved for r.
        r: the ratio.
        values: a number for each other symbol.
        top: the largest r, 1/mu or infinity.
        notes: gets the edges that were solved.
    """
    upper_end = top.subs(values)
    words = {sympy.S.Zero: "0", upper_end: str(top)}  # of each end of an interval
    for edge in sorted(edges, key=sympy.default_sort_key):
        if r in edge.free_symbols:
            for root in _roots(edge.subs(values), r, upper_end):
                words[root] = f"{float(root):.4g}*"
                notes[edge] = True
        elif 0 < edge.subs(values) < upper_end:
            words.setdefault(edge.subs(values), sympy.sstr(edge, order="none"))
    intervals = []
    for low, high in itertools.pairwise(sorted(words, key=float)):
        point = _exact(float(_point_between(low, high)))
        intervals.append(RatioInterval(words[low], words[high], point))
    return intervals


def _point_between(low: Expr, high: Expr) -> Expr:
    """Return a point of the open interval: its middle. Without an upper end, it is
    2 low, or 1 where low is 0.
    """
    if high == oo:
        return 2 * low if low else sympy.S.One
    return (low + high) / 2


def _roots(f: Expr, r: Symbol, upper_end: Expr) -> list[Expr]:
    """Return where f changes sign, by bisection: for bounds without a closed form.
    Ratios are looked at from e^-12 to the upper end, 1e5 at most.
    """
    last_log = math.log(min(float(upper_end), 1e5)) - 1e-9  # below the upper end
    grid = np.exp(np.linspace(-12, last_log, 500))
    signs = np.sign(np.vectorize(sympy.lambdify(r, f, "math"))(grid))
    sign_changes = np.flatnonzero(np.diff(signs))
    return [
        sympy.nsolve(f, r, (grid[i], grid[i + 1]), solver="bisect")
        for i in sign_changes
    ]


def _describe_interval(low: str, r: str, high: str) -> str:
    """Return an interval of r in words."""
    if (low, high) == ("0", "oo"):
        return f"every {r}"
    if high == "oo":
        return f"{r} > {low}"
    if low == "0":
        return f"{r} < {high}"
    return f"{low} < {r} < {high}"


def _compare_by_autograd(
    objective: Objective, hp: dict[Any, Any]
) -> tuple[list[str], bool]:
    """Compare dJ/dlp by torch.autograd with weight x aggregation, and return lines and
    whether they are equal. The batch has two responses, A = 1 and A = -1, of seven
    ratios each.
    """
    ratios = [0.3, 0.75, 0.95, 1.05, 1.25, 1.9, 4.0]
    r = torch.tensor(ratios, dtype=torch.float64).expand(2, -1)
    lp_old = torch.full_like(r, 0.1).log()
    lp = (lp_old + r.log()).requires_grad_()
    A = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    # with one ratio each, the shares of a group would not move
    mask = (r < 4) | (A > 0) | ("group" not in objective.reads)
    batch = Rollouts(lp, lp_old, A, mask, entropy=r / 2)
    (gradient,) = torch.autograd.grad(objective(batch, **hp), lp)
    ok = (gradient - objective.gradient(batch, **hp)).abs().max().item() < 1e-12
    lines = [f"  {'r':>6} " + " ".join(f"{x:8.2f}" for x in r[0].tolist())]
    for sign, row in zip((1, -1), gradient.tolist(), strict=True):
        # `or 0` turns -0.0 into 0
        numbers = " ".join(f"{number or 0:8.4f}" for number in row)
        lines.append(f"  A = {sign:+} {numbers}")
    answer = "yes" if ok else "NO"
    lines.append(f"equal to weight x aggregation within 1e-12: {answer}")
    return lines, ok


def sympy_gradient(
    objective: str | Objective, batch: Rollouts, **hp: Any
) -> np.ndarray:
    """Compute dJ/dlp of a small batch, the whole pipeline in sympy: level, mask,
    aggregation, KL. Computed at 30 digits.

    Responses with equal masks share one symbolic derivative.

    Args:
        objective: a name or an Objective.
        batch: a small batch.
        **hp: hyperparameters.

    Returns:
        float64 [B, T].

    Raises:
        InputError: sympy cannot read the objective.
    """
    o = objective if isinstance(objective, Objective) else get(objective)
    if o.not_symbolic:
        raise InputError(f"sympy cannot read {o.name}: {o.not_symbolic}.")
    hp = o.resolve(hp)
    mask = batch.mask.numpy()
    totals = batch.totals or Totals.of(batch.mask, batch.group)
    weights = row_weights(o.agg, batch.mask, totals)
    factors = o.factors(batch, **hp)  # of a sampler correction, or None
    ref = batch.logp if batch.logp_ref is None else batch.logp_ref
    adv = batch.adv.expand(batch.mask.shape)
    tokens = [
        where(batch.mask, tensor.detach(), 0).numpy()
        for tensor in (batch.logp, batch.logp_old, adv, ref)
    ]
    rows = torch.as_tensor(weights, dtype=torch.float64).expand(len(mask)).numpy()
    gradient = np.zeros(mask.shape)
    for shared_mask, parts in _parts_of_one_mask(mask, bool(o.batch_coupled)):
        derivative = _derivative(o, shared_mask, hp)
        for part in parts:
            with mpmath.workdps(30):
                given = [*(array[part].ravel() for array in tokens), rows[part]]
                numbers = map(mpmath.mpf, np.concatenate(given).tolist())
                found = [float(number) for number in derivative(*numbers)]
                gradient[part] = np.reshape(found, shared_mask.shape)
    if factors is None:
        return gradient
    return gradient * o.per_term(factors, batch.mask).numpy()


def _parts_of_one_mask(
    mask: np.ndarray, is_coupled: bool
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yield each mask with the parts of the batch that have it: each response by itself,
    or the whole batch at once where its responses are coupled.

    Args:
        mask: of the batch, [B, T].
        is_coupled: the objective reads other responses of the batch.

    Yields:
        The mask of a part, [rows of a part, T], and the indices of the rows of each part.
    """
    if is_coupled:
        yield mask, [np.arange(len(mask))]
        return
    for shared in np.unique(mask, axis=0):
        rows_with_it = np.flatnonzero((mask == shared).all(1))
        yield shared[None], list(rows_with_it[:, None])


def _derivative(
    objective: Objective, mask: np.ndarray, hp: dict[Any, Any]
) -> Callable[..., list[Any]]:
    """Return a function of lp, lp_old, A, lp_ref and row weights: the derivatives of
    these responses' share of J by each lp.

    Args:
        objective: the objective.
        mask: of these responses, [B, T].
        hp: its hyperparameters, as numbers.
    """

    def symbols(name: str, *shape: int) -> np.ndarray:
        """Return an array of symbols of this shape."""
        count = math.prod(shape)
        names = [Symbol(f"{name}_{i}", real=True) for i in range(count)]
        return SymbolArray(names).reshape(shape)

    lp = symbols("lp", *mask.shape)
    lp_old = symbols("lp_old", *mask.shape)
    A = symbols("A", *mask.shape)
    ref = symbols("lp_ref", *mask.shape)
    rows = symbols("w", len(mask))
    is_by_row = objective.agg == "seq-mean"  # one term for each response
    first_A = A[range(len(mask)), mask.argmax(1)]  # of each response
    arguments: tuple[Any, ...]
    if objective.level in REDUCE:
        reduce = REDUCE[objective.level]
        arguments = (reduce(lp, mask), reduce(lp_old, mask), first_A)
    elif is_by_row:
        arguments = (lp, lp_old, np.repeat(first_A[:, None], mask.shape[1], 1))
    else:
        arguments = (lp, lp_old, A)
    if objective.level == "custom":
        arguments = (*arguments, mask)
    terms = objective.fn(*arguments, **objective.surrogate_hyperparameters(hp))
    if terms.ndim == 1:
        # the term of a response counts once, or once for each of its tokens
        shares = terms * (1 if is_by_row else mask.sum(-1))
    else:
        shares = sum_t(terms, mask)
    J = np.dot(rows, shares)
    if hp.get("beta"):
        penalties = sum_t(kl.per_token(objective.kl, lp, ref, lp_old), mask)
        J -= hp["beta"] * np.dot(rows, penalties)
    derivatives = [forget_sg(J.diff(x)) for x in lp.flat]
    inputs = [*lp.flat, *lp_old.flat, *A.flat, *ref.flat, *rows]
    return sympy.lambdify(inputs, derivatives, "mpmath")
