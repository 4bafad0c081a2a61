# SPDX-License-Identifier: Apache-2.0
"""The formulas of the explorer: the gradient weight that sympy derives from the
function that trains, as JavaScript.

    w = dJ/dlp at lp = log mu + log r, lp_old = log mu   (r, A, mu, h) => ...,  h the hyperparameters, infinite for None

A fourth reader beside torch, numpy and mpmath, not a copy: nothing here knows what an
objective computes.
"""

import math
from functools import cache
from typing import Any

import sympy
from sympy import Expr, Symbol, log
from sympy.printing.jscode import JavascriptCodePrinter
from sympy.printing.str import StrPrinter

from upref.derivation import symbolic_J
from upref.registry import Objective, get, names
from upref.symbolic import breakpoints, forget_sg
from upref.weights.curve import obstacle

R, MU, A = (
    Symbol("r", positive=True),
    Symbol("mu", positive=True),
    Symbol("A", real=True),
)

# letter, what it does, the least and the largest value of its slider (what may be typed
# is the registry's to say)
LETTERS: dict[str, tuple[str, str, float, float]] = {
    "eps": (
        "ε",
        "half the window of r (gmpo: of log r); a push ends at its top if A > 0, else at its bottom",
        0,
        1,
    ),
    "eps_low": (
        "ε_low",
        "A < 0: below r = 1 − ε_low a clip leaves no gradient, a cap holds the weight",
        0,
        1,
    ),
    "eps_high": (
        "ε_high",
        "A > 0: above r = 1 + ε_high a clip leaves no gradient, a cap holds the weight",
        0,
        1,
    ),
    "c": ("c", "dual clip: for A < 0 no gradient above r = c either", 1.05, 10),
    "delta": (
        "δ",
        "radius of the trust region, a divergence between π_old and π_θ in this one token",
        0.001,
        0.5,
    ),
    "lam": (
        "λ",
        "the weight of a token with A > 0, where a token with A < 0 has 1",
        0,
        2,
    ),
    "tau_pos": (
        "τ_+",
        "steepness of the soft gate for A > 0: larger is narrower",
        0.05,
        10,
    ),
    "tau_neg": ("τ_−", "steepness of the soft gate for A ≤ 0", 0.05, 10),
    "c1_pos": (
        "c_1+",
        "A > 0: a larger power lowers the weight of responses that became less likely",
        0.05,
        10,
    ),
    "c2_pos": (
        "c_2+",
        "A > 0: a larger decay lowers the weight of responses that became more likely",
        0.05,
        10,
    ),
    "c1_neg": ("c_1−", "A ≤ 0: the same power", 0.05, 10),
    "c2_neg": ("c_2−", "A ≤ 0: the same decay", 0.05, 10),
    "trunc": ("C", "the largest weight that the ratio may give", 0.1, 10),
    "cap": ("C", "the largest weight that the ratio may give", 0.1, 10),
}


@cache
def formulas() -> dict[str, dict[str, Any]]:
    """Make the records of all objectives that the page can draw, once in a process.

    Returns:
        Name -> record: of every registered objective that sympy reads, and of UP of
        each that is not UP itself.
    """
    drawn = [name for name in names() if not obstacle_of(get(name))]
    for name in [*drawn]:
        if not get(name).is_up:
            drawn.append(f"up({name})")
    return {name: record(get(name)) for name in drawn}


def obstacles() -> dict[str, str]:
    """Return the objectives that the page cannot draw.

    Returns:
        Name -> why.
    """
    whys = {name: obstacle_of(get(name)) for name in names()}
    return {name: why for name, why in whys.items() if why}


def obstacle_of(objective: Objective) -> str:
    """Return why the page cannot draw an objective; "" where it can.

    Args:
        objective: the objective.
    """
    return objective.not_symbolic or obstacle(objective)


def record(objective: Objective) -> dict[str, Any]:
    """Make the record of an objective, as the page reads it.

    Args:
        objective: one without an obstacle.

    Returns:
        `w` and the functions in `edges` are JavaScript; all else is JSON.
    """
    w = weight(objective)
    edges = []
    for edge in breakpoints(w, R):
        # bounds that hyperparameters or mu move; none that depends on r itself
        if edge.free_symbols and not edge.has(R):
            edges.append([_label(edge), f"(mu, h) => {javascript(edge)}"])
    hp = {}
    for name, value in _surrogate_hyperparameters(objective).items():
        hp[name] = _hyperparameter(name, value, objective.defaults.get(name, ""))
    return {
        "w": f"(r, A, mu, h) => {javascript(w)}",
        "edges": edges,
        "readsMu": objective.reads_mu,
        "level": objective.level,
        "equation": objective.equation,
        "source": objective.source,
        "note": objective.note,
        "hp": hp,
    }


def weight(objective: Objective) -> Expr:
    """Derive the gradient weight of a token that is alone in its response.

    Args:
        objective: one without an obstacle.

    Returns:
        dJ/dlp for A of either sign, in r, A, mu and the hyperparameters.
    """
    lp, lp_old = Symbol("lp", real=True), Symbol("lp_old", real=True)
    hp = {k: Symbol(k, positive=True) for k in _surrogate_hyperparameters(objective)}
    J = symbolic_J(objective, A, [lp], [lp_old], hp)
    derivative = forget_sg(J.diff(lp))
    of_ratio = derivative.subs({lp: log(MU) + log(R), lp_old: log(MU)})
    return _without_overflow(of_ratio)


class Sigmoid(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """σ(x) = 1 / (1 + e^-x), under a name: the page computes it without overflow."""

    nargs = 1


def _without_overflow(expr: Expr) -> Expr:
    """Replace e^v / (1 + e^v)² by σ(v) σ(-v), which is finite where numerator and
    denominator overflow.
    """

    def replace_in(product: Any) -> Any:
        """Return a product with the replacement, or unchanged."""
        for power in product.args:
            if not (power.is_Pow and power.exp == -2 and power.base.is_Add):
                continue
            for factor in product.args:
                if isinstance(factor, sympy.exp) and power.base == 1 + factor:
                    v = factor.args[0]
                    rest = product / (power * factor)
                    return rest * Sigmoid(v) * Sigmoid(-v)
        return product

    return expr.replace(lambda e: e.is_Mul, replace_in)


def _surrogate_hyperparameters(objective: Objective) -> dict[str, Any]:
    """Return the hyperparameters of the surrogate with their defaults, without beta:
    the KL term is no part of a token's weight.
    """
    own = {k: v for k, v in objective.hyperparameters.items() if k != "beta"}
    assert all(v is not None or k == "c" for k, v in own.items()), (
        "None is printed as infinity: only c means that"
    )
    return own


def _hyperparameter(name: str, default: float | None, source: str) -> dict[str, Any]:
    """Return what the page's slider of a hyperparameter needs: its letter, words,
    default, the source of the default, range and step.
    """
    letter, says, low, high = LETTERS.get(
        name, (name, "a hyperparameter of this objective", 0, 1)
    )
    # the bounds of a sequence's ratio are small: the slider must be fine
    if default and default < 0.01:
        high = round(10 * default, 9)
    elif default and default > high / 2:
        high = 10 * math.ceil(default / 4)
    # a power of 10, so that the slider has 90 to 900 steps
    step = float(f"{10.0 ** math.floor(math.log10((high - low) / 90)):.0e}")
    if name == "c":
        step = 0.05  # 179 steps from 1.05 to 10
    return {
        "default": default,
        "letter": letter,
        "says": says,
        "from": source,
        "low": low,
        "high": high,
        "step": step,
    }


# ---- printers ------------------------------------------------------------------------
class _Printer(JavascriptCodePrinter):  # type: ignore[misc]
    """A printer of JavaScript with the two words of `upref.symbolic` and an exp that
    saturates. Hyperparameters are fields of h. sympy calls `_print_CLASS` for an
    expression of that class.
    """

    def _print_Where(self, e: Any) -> Any:
        """Print "condition ? x : y"."""
        condition, x, y = map(self._print, e.args)
        return f"({condition} ? {x} : {y})"

    def _print_exp(self, e: Any) -> Any:
        """Print a call of the page's own exp."""
        return f"exp({self._print(e.args[0])})"

    def _print_Sigmoid(self, e: Any) -> Any:
        """Print a call of the page's own sigmoid."""
        return f"sigmoid({self._print(e.args[0])})"

    def _print_Symbol(self, s: Any) -> Any:
        """Print an argument by its name, and a hyperparameter as a field of h."""
        return s.name if s in (R, MU, A) else f"h.{s.name}"


def javascript(expr: Expr) -> str:
    """Print an expression as JavaScript.

    Args:
        expr: in r, A, mu and hyperparameters.

    Returns:
        An expression in r, A, mu and fields of h.
    """
    return _Printer().doprint(expr)


class _Letters(StrPrinter):  # type: ignore[misc]
    """A printer of formulas in the letters of the paper."""

    def _print_Symbol(self, s: Any) -> Any:
        """Print mu as π_old, and a hyperparameter by its letter if it has one."""
        if s == MU:
            return "π_old"
        return LETTERS[s.name][0] if s.name in LETTERS else s.name

    def _print_exp(self, e: Any) -> Any:
        """Print e^x, with a minus sign in place of a hyphen."""
        return f"e^{self._print(e.args[0])}".replace("-", "−")

    def _print_Mul(self, e: Any) -> Any:
        """Print a product of roots as one root: √(δ (1 − π_old)/π_old)."""
        roots = [x for x in e.args if x.is_Pow and abs(x.exp) == sympy.S.Half]
        if len(roots) < 2 or len(roots) < len(e.args):
            return super()._print_Mul(e)
        return f"√({self._print(sympy.Mul(*(x**2 for x in roots)))})"

    def _print_Add(self, e: Any, order: Any = None) -> Any:
        """Print a number first, and terms with a minus last: 1 + ε, not ε + 1."""
        first, *rest = sorted(
            e.args, key=lambda x: (not x.is_number, x.could_extract_minus_sign())
        )
        says = self._print(first)
        for x in rest:
            says += (
                f" − {self._print(-x)}"
                if x.could_extract_minus_sign()
                else f" + {self._print(x)}"
            )
        return says


def _label(edge: Expr) -> str:
    """Return the formula of an edge in the letters of the paper."""
    return _Letters().doprint(sympy.expand(edge)).replace("*", " ")
