# SPDX-License-Identifier: Apache-2.0
"""The proof for every number of rows and columns: one call on a batch whose size is open.

Every token has the same variables, its mask included, and a sum over an axis is a value of
its own: `the sum of this formula over the row`. So one formula stands for the numbers of all
tokens of all batches, and two losses of one formula are equal on each. docs/howto/prove.md
has the argument. It needs that the code is the same for every size: it reads no size, takes
no token apart, and calls operators of which each is applied to all tokens alike.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.definition import Objective
from upref.errors import Gone, InputError
from upref.proof.domain import PROBABILITY, RATIO
from upref.proof.operators import Operation, dimensions_of, shape_of
from upref.proof.solver import Question, ask
from upref.proof.trace import NoProof, Trace, tracing
from upref.proof.values import (
    TOTALS,
    Atom,
    Branch,
    Choice,
    Compare,
    Function,
    Logarithm,
    Polynomial,
    TooHard,
    Values,
    Variable,
)
from upref.rollouts import Rollouts
from upref.user_code import Loss

ROWS, COLUMNS = 13, 17  # of the call, by which an axis is known: no common constants
AXES = {ROWS: "b", COLUMNS: "t", ROWS * COLUMNS: "bt"}
OF_ROW, OF_ROWS = TOTALS
MOST_CHOICES = 6  # in a formula that is summed
SECONDS = 20.0  # of CPU time for the solver
SIZES_RUN = ((5, 7), (3, 11), (9, 2))  # of the batches on which formulas are compared
AGREES = 1e-8

_POINTWISE = (
    "add sub rsub mul div divide true_divide neg abs sgn sign square pow sqrt "
    "rsqrt exp expm1 exp2 log log1p log2 log10 sigmoid sigmoid_backward "
    "log_sigmoid_forward log_sigmoid_backward tanh tanh_backward softplus "
    "softplus_backward relu threshold_backward erf logaddexp xlogy gt lt ge le eq "
    "ne minimum maximum fmin fmax clamp clamp_min clamp_max clip hardtanh where "
    "masked_fill logical_and logical_or logical_xor logical_not bitwise_and "
    "bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__ isnan isinf "
    "isfinite signbit copysign heaviside addcmul addcdiv lerp nan_to_num "
    "reciprocal _to_copy copy fill zero zeros_like ones_like full_like "
    "new_zeros new_ones new_full clone contiguous lift_fresh lift_fresh_copy "
    "_unsafe_view _reshape_copy"
)
POINTWISE = frozenset(_POINTWISE.split())
_VIEWS = (
    "view _unsafe_view _reshape_copy reshape expand unsqueeze squeeze permute "
    "transpose t detach alias slice select"
)
VIEWS = frozenset(_VIEWS.split())
# of counts that are equal, these have one answer on both sides
CONTINUOUS = (
    "minimum",
    "maximum",
    "fmin",
    "fmax",
    "clamp",
    "clamp_min",
    "clamp_max",
    "abs",
)
SHORT = (torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16)
OF_TRUTHS = {  # arguments that are true where they are not 0, or that divide
    "reciprocal": ("self",),
    "rsqrt": ("self",),
    "_to_copy": ("self",),
    "copy": ("src",),
    "logical_not": ("self",),
    "logical_and": ("self", "other"),
    "logical_or": ("self", "other"),
    "logical_xor": ("self", "other"),
    "any": ("self",),
    "all": ("self",),
    "where": ("condition",),
    "sgn": ("self",),
    "sign": ("self",),
    "heaviside": ("self",),
    "copysign": ("other",),
    "signbit": ("self",),
}
ORDERED = ("view", "_unsafe_view", "_reshape_copy")
REDUCTIONS = ("sum", "mean", "any", "all")
MADE = ("zeros", "ones", "full", "scalar_tensor")
_NO_SIZES = (
    "dim ndim requires_grad is_leaf dtype device layout is_floating_point "
    "is_complex is_cuda is_mps is_sparse is_quantized requires_grad_ detach "
    "element_size itemsize get_device is_cpu is_inference is_grad_enabled grad_fn "
    "output_nr is_meta"
)
NO_SIZES = frozenset(_NO_SIZES.split())


@dataclass
class Lifted:
    """The state of a call on a batch of open size, beside that of its Trace.

    Attributes:
        values: all formulas.
        per_response: an advantage is one of the row.
        masked: the id of the mask, a condition.
    """

    values: Values
    per_response: bool
    masked: int
    depends: dict[int, frozenset[str]] = field(default_factory=dict)
    reductions = REDUCTIONS
    harmless = NO_SIZES
    sizes = AXES

    # ---- operators -------------------------------------------------------------------
    def refuse(self, trace: Trace, func: Any, args: Any, kwargs: Any) -> None:
        """Stop at an operator that may not treat all tokens alike."""
        name = shape_of(func).name
        tensors = list(_tensors((*args, *kwargs.values())))
        for x in tensors:
            self._axes(trace, x)
            if len(set(trace.ids(x).reshape(-1).tolist())) > 1:
                trace.stop("reads a tensor whose entries are not alike")
        if name in REDUCTIONS or name in POINTWISE:
            self._refuse_tests_of_counts(
                trace, name, Operation(trace, func, args, kwargs)
            )
        elif name in VIEWS:
            self._refuse_moving_view(trace, name, args)
        elif not (name in MADE and not tensors):
            trace.stop(f"calls {name}, which may not treat all tokens alike")

    def accept(self, trace: Trace, name: str, given: list[Tensor], answer: Any) -> None:
        """Stop at a result of which not all entries are of one formula, and at one that
        has the tokens in another order, or compares counts.
        """
        v = self.values
        known = {int(trace.ids(x).reshape(-1)[0]) for x in given}
        compared = frozenset[int]().union(*map(v.support, known))
        for x in _tensors((answer,)):
            if not x.numel() and name == "log_sigmoid_forward":
                continue  # a buffer that it does not use
            if name in ORDERED:
                self._refuse_other_order(trace, given[0], x)
            self._axes(trace, x)
            ids = set(trace.ids(x).reshape(-1).tolist())
            if len(ids) > 1:
                trace.stop("makes a tensor whose entries are not alike")
            new = v.support(ids.pop()) - compared
            if name not in CONTINUOUS and any(map(self._is_of_counts, new)):
                trace.stop("compares a count")

    def _is_of_counts(self, comparison: int) -> bool:
        """Tell whether a comparison is of counts alone: they may well be equal."""
        node = self.values.nodes[comparison]
        return isinstance(node, Compare) and self._is_step(node.polynomial)

    def _is_step(self, value: int) -> bool:
        """Tell whether a value is constant but for jumps: a count, or made of counts."""
        v = self.values
        return all(
            self._is_step_atom(v.atoms[atom])
            for monomial, _ in v.terms(value)
            for atom, _ in monomial
        )

    def _is_above(self, value: int) -> bool:
        """Tell whether a value is above 0, at each point and each count."""
        v = self.values

        def is_above(atom: int) -> bool:
            """Tell whether an atom is a count, or a choice between values above 0."""
            kind = v.atoms[atom]
            if isinstance(kind, Choice):
                return self._is_above(kind.yes) and self._is_above(kind.no)
            return v.is_count(atom)

        terms = v.terms(value)
        return bool(terms) and all(
            c > 0 and all(is_above(atom) for atom, _ in monomial)
            for monomial, c in terms
        )

    def _is_step_atom(self, kind: Atom) -> bool:
        """Tell whether an atom is a choice or a function of values that are constant
        but for jumps.
        """
        if isinstance(kind, Choice):
            return self._is_step(kind.yes) and self._is_step(kind.no)
        return isinstance(kind, Function) and self._is_step(kind.argument)

    def _axes(self, trace: Trace, x: Tensor) -> list[str]:
        """Return the axis of each dimension of a tensor: b for rows, t for columns, bt
        for both in one, "" for a size of 1. Stop at any other shape, and at a dtype
        that holds no large count.
        """
        if x.dtype in SHORT:
            trace.stop("computes in a type that holds no large count")
        axes = ["" if n == 1 else AXES.get(n, "?") for n in x.shape]
        named = "".join(axes)
        if "?" in axes or len(set(named)) < len(named):
            trace.stop("makes a tensor of another shape than the batch's")
        return axes

    def _refuse_tests_of_counts(self, trace: Trace, name: str, o: Operation) -> None:
        """Stop at an operator that treats 0 apart, as a division and `==` do, where a
        value made of counts may be 0: on batches of some sizes it is.
        """
        if self._tests_a_count(trace, name, o):
            trace.stop("compares a count")

    def _tests_a_count(self, trace: Trace, name: str, o: Operation) -> bool:
        """Tell whether an operator treats 0 apart in a value made of counts that may be 0."""
        v = self.values

        def first(argument: str) -> int:
            """Return the id of an argument; all its entries have one."""
            return int(trace.ids(o[argument]).reshape(-1)[0])

        if name in ("eq", "ne"):
            x, y = first("self"), first("other")
            if not self._may_vanish(v.subtract(x, y)):
                return False
            are_conditions = v.condition(x) == x and v.condition(y) == y
            return not are_conditions
        if name == "addcdiv":
            return self._may_vanish(first("tensor2"))
        if name in ("div", "divide", "true_divide", "xlogy"):
            return self._may_vanish(first("other"))
        if name == "pow":
            return v.varies(first("exponent")) or self._may_vanish(first("self"))
        if name in OF_TRUTHS:
            given = [n for n in OF_TRUTHS[name] if n in o.arguments]
            if not any(self._may_vanish(first(n)) for n in given):
                return False
            # a copy tests whether numbers are 0 only where it makes bools of them
            if name == "_to_copy":
                return o["dtype"] is torch.bool
            if name == "copy":
                return o["self"].dtype is torch.bool
            return True
        return False

    def _may_vanish(self, value: int) -> bool:
        """Tell whether a value is made of counts, and not known to be above 0."""
        v = self.values
        if not v.varies(value) or v.condition(value) == value:
            return False
        return self._is_step(value) and not self._is_above(value)

    def _refuse_moving_view(self, trace: Trace, name: str, args: Any) -> None:
        """Stop at a view that moves tokens, or leaves some out."""
        if name == "squeeze":
            self._refuse_squeeze(trace, args)
        elif name in ("slice", "select"):
            self._refuse_cut(trace, name, args)

    def _refuse_squeeze(self, trace: Trace, args: Any) -> None:
        """Stop at a squeeze of any dimension that is not named and of size 1.

        Args:
            trace: of the call.
            args: the tensor and, where they are named, one dimension or a list of them.
        """
        if len(args) > 1:
            x, dims = args[:2]
            dims = dims if isinstance(dims, list) else [dims]
            if all(x.shape[d] == 1 for d in dims):
                return
        trace.stop("squeezes a dimension that may have any size")

    def _refuse_cut(self, trace: Trace, name: str, args: Any) -> None:
        """Stop at a slice of some tokens, or a selection of one, along an axis on which
        their values depend.

        Args:
            trace: of the call.
            name: "slice" or "select".
            args: the tensor, the dimension, and of a slice start, end and step.
        """
        x = args[0]
        dim = args[1] if len(args) > 1 else 0
        takes_all = False
        if name == "slice":
            start, end, step = (*args[2:5], None, None, None)[:3]
            is_to_the_end = end is None or end >= 2**62
            takes_all = not start and is_to_the_end and step in (None, 1)
        axis = self._axes(trace, x)[dim]
        value = int(trace.ids(x).reshape(-1)[0])
        depends = self.dependence(value) & set(axis)
        if depends and not takes_all:
            trace.stop("takes tokens by their position")

    def _refuse_other_order(self, trace: Trace, before: Tensor, after: Tensor) -> None:
        """Stop at a view that merges or divides dimensions in another order than rows,
        then columns.
        """
        old = [a for a in self._axes(trace, before) if a]
        new = [a for a in self._axes(trace, after) if a]
        if old != new and {"".join(old), "".join(new)} != {"bt"}:
            trace.stop("puts the tokens of a batch in another order")

    def reduce(self, o: Operation) -> Tensor:
        """Return the ids of a sum, a mean, any or all over axes: the rule of these
        operators.
        """
        x = o["self"]
        dims = dimensions_of(o.get("dim"), x.ndim)
        axes_of_x = self._axes(o.trace, x)
        axes = "".join(axes_of_x[d] for d in dims)
        value = int(o.trace.ids(x).reshape(-1)[0])
        out = self._reduced(o.name, value, axes)
        if o.get("keepdim", False):
            shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
        else:
            shape = [n for d, n in enumerate(x.shape) if d not in dims]
        return torch.full(shape, out, dtype=torch.int64)

    def _reduced(self, name: str, value: int, axes: str) -> int:
        """Return the sum, the mean, any or all of a value over axes. Any holds where the
        number of tokens at which the value is true is above 0; all holds where the number
        of those at which it is false is not.

        Args:
            name: one of REDUCTIONS.
            value: an id.
            axes: as of `total`.
        """
        v = self.values
        if name == "any":
            true = self.total(v.real(v.condition(value)), axes)
            return v.greater(true, v.zero)
        if name == "all":
            false = self.total(v.real(v.negation(v.condition(value))), axes)
            return v.negation(v.greater(false, v.zero))
        total = self.total(v.real(value), axes)
        if name == "sum":
            return total
        return v.divide(total, self.total(v.one, axes))

    def divided_by_size(self, trace: Trace, x: Tensor, size: int) -> Tensor:
        """Return the ids of a tensor over a size, as torch divides the gradient of a mean.

        Args:
            trace: of the call.
            x: a tensor.
            size: one of AXES.
        """
        count = self.total(self.values.one, AXES[size])
        value = self.values.divide(int(trace.ids(x).reshape(-1)[0]), count)
        return torch.full(x.shape, value, dtype=torch.int64)

    # ---- sums ------------------------------------------------------------------------
    def total(self, value: int, axes: str) -> int:
        """Return the sum of a value over axes: first over the columns, then the rows.

        Args:
            value: an id.
            axes: "b" for the rows, "t" for the columns, or both; "": the value itself.
        """
        if "t" in axes:
            value = self._over(value, "t")
        return self._over(value, "b") if "b" in axes else value

    def _over(self, value: int, axis: str) -> int:
        """Return the sum of a value over one axis, term by term. Factors that do not
        vary along the axis are taken out of the sum.

        Args:
            value: an id.
            axis: "b" or "t".
        """
        v = self.values
        out = v.zero
        name = OF_ROW if axis == "t" else OF_ROWS
        for monomial, c in v.terms(self._unfolded(value)):
            inner = []
            outer = []
            for atom, exponent in monomial:
                if axis in self._of_atom(atom):
                    inner.append((atom, exponent))
                else:
                    outer.append((atom, exponent))
            total = self._swapped(name, v.polynomial_of(tuple(inner), 1))
            factor = v.polynomial_of(tuple(outer), c)
            out = v.add(out, v.multiply(factor, total))
        return out

    def _swapped(self, name: str, body: int) -> int:
        """Return the sum of one monomial over a row or over the rows. Of a sum over
        both, the sum over columns is the inner one, in whichever order they were taken.
        """
        v = self.values
        summed = self._summed_over_rows(body) if name == OF_ROW else None
        if summed is not None:
            return v.total(OF_ROWS, self._over(summed, "t"))
        return v.total(name, body)

    def _summed_over_rows(self, body: int) -> int | None:
        """Return the formula of which a value is the sum over the rows; None where the
        value is anything else.
        """
        v = self.values
        terms = v.terms(body)
        if len(terms) != 1:
            return None
        monomial, _ = terms[0]
        if len(monomial) != 1:
            return None
        atom, exponent = monomial[0]
        kind = v.atoms[atom]
        if exponent == 1 and isinstance(kind, Function) and kind.name == OF_ROWS:
            return kind.argument
        return None

    def _unfolded(self, value: int) -> int:
        """Return a value with its choices as products of conditions, so that sums of it
        have one form.

        Raises:
            TooHard: it has more than MOST_CHOICES conditions.
        """
        v = self.values
        support = v.support(value)
        if len(support) > MOST_CHOICES:
            raise TooHard(f"a sum of values with more than {MOST_CHOICES} conditions")
        if not support:
            return value
        comparison = min(support)
        holds = v.choose(v.literal(comparison), v.one, v.zero)
        yes = self._unfolded(v.assume(value, comparison, True))
        no = self._unfolded(v.assume(value, comparison, False))
        return v.add(no, v.multiply(holds, v.subtract(yes, no)))

    # ---- on which axes a value depends -------------------------------------------------
    def dependence(self, value: int) -> frozenset[str]:
        """Return the axes along which a value may vary: b, t."""
        known = self.depends.get(value)
        if known is None:
            node = self.values.nodes[value]
            parts: list[frozenset[str]] = []
            match node:
                case Polynomial():
                    atoms = {atom for m, _ in node.terms for atom, _ in m}
                    parts = [self._of_atom(atom) for atom in atoms]
                case Compare():
                    parts = [self.dependence(node.polynomial)]
                case Branch():
                    inner = (node.comparison, node.yes, node.no)
                    parts = [self.dependence(part) for part in inner]
            known = self.depends[value] = frozenset[str]().union(*parts)
        return known

    def _of_atom(self, atom: int) -> frozenset[str]:
        """Return the axes along which an atom may vary."""
        kind = self.values.atoms[atom]
        match kind:
            case Variable():
                if kind.name == "scale":
                    return frozenset()
                is_of_row = kind.name == "A" and self.per_response
                return frozenset("b" if is_of_row else "bt")
            case Logarithm():
                return self._of_atom(kind.of)
            case Choice():
                parts = (kind.condition, kind.yes, kind.no)
                return frozenset[str]().union(*map(self.dependence, parts))
            case Function(name=name):
                inner = self.dependence(kind.argument)
                return inner - {OF_ROW: {"t"}, OF_ROWS: {"b"}}.get(name, set())


def _tensors(items: Any) -> Iterator[Tensor]:
    """Yield the tensors of lists and tuples, however deep."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)


# ---- one call --------------------------------------------------------------------------
@dataclass(frozen=True)
class Open:
    """A batch of open size: its variables, and its counts."""

    lifted: Lifted
    ids: dict[str, int]

    @classmethod
    def make(cls, per_response: bool, reads: frozenset[str]) -> "Open":
        """Make the variables of every token.

        Args:
            per_response: an advantage is one of the row.
            reads: as of a Domain.
        """
        v = Values()
        masked = v.greater(v.variable("m"), v.zero)
        of_r, of_mu = v.variable("r", *RATIO), v.variable("mu", *PROBABILITY)
        log_mu = v.log(of_mu)
        lp = v.add(v.log(of_r), log_mu)
        ids = {"logp": lp, "logp_old": log_mu, "adv": v.variable("A"), "mask": masked}
        if "logp_ref" in reads:
            ids["logp_ref"] = v.add(lp, v.log(v.variable("k", *RATIO)))
        if "logp_sampler" in reads:
            ids["logp_sampler"] = v.subtract(log_mu, v.log(v.variable("rho", *RATIO)))
        if "entropy" in reads:
            ids["entropy"] = v.variable("H", 0.0)
        v.positive_totals |= {v.real(masked), v.one}  # each row has a token
        return cls(Lifted(v, per_response, masked), ids)

    def batch(self, trace: Trace) -> Rollouts:
        """Return a batch whose tensors have these variables, and its counts too."""
        v = self.lifted.values
        fields = {}
        for name, value in self.ids.items():
            dtype = torch.bool if name == "mask" else torch.float64
            fields[name] = self._filled(trace, (ROWS, COLUMNS), value, dtype)
        tokens = self.lifted.total(v.real(self.lifted.masked), "bt")
        rows = self.lifted.total(v.one, "b")
        counts = [self._filled(trace, (), value) for value in (tokens, rows, tokens)]
        totals = Totals(counts[0], counts[1], 1, counts[2])
        return Rollouts.unchecked(**fields, totals=totals)

    def _filled(
        self,
        trace: Trace,
        shape: tuple[int, ...],
        value: int,
        dtype: Any = torch.float64,
    ) -> Tensor:
        """Return a tensor, [*shape], all of whose numbers have one formula."""
        x = torch.zeros(shape, dtype=dtype)
        trace.introduce(x, torch.full(shape, value, dtype=torch.int64))
        return x


def gradient(loss: Loss, batch: Rollouts, scale: Tensor) -> list[Tensor]:
    """Return dJ/dlp of a loss on a batch of any size, [B, T], and dJ/dH.

    Args:
        loss: it takes tensors, not a whole batch.
        batch: with its counts.
        scale: the factor by which the loss is multiplied.

    Returns:
        [dJ/dlp], and dJ/dH behind it if the batch has entropies; [B, T] each.

    Raises:
        NoProof: the loss takes more than tensors of tokens.
    """
    mask = batch.mask
    assert batch.totals is not None
    inputs: dict[str, Any] = {
        "logp": batch.logp.clone(),
        "logp_old": batch.logp_old.clone(),
        "adv": _shaped(batch.adv, loss.adv_shape),
        "mask": mask.to(batch.logp.dtype) if loss.float_mask else mask.clone(),
        "totals": batch.totals,
        "ranks": 1,
        "parts": 1,
    }
    given = {
        "logp_ref": batch.logp_ref,
        "logp_sampler": batch.logp_sampler,
        "entropy": batch.entropy,
    }
    for role, x in given.items():
        if x is not None:
            inputs[role] = x.clone()
    unknown = {"group", *given} & loss.reads - inputs.keys()
    if loss.takes_batch or loss.framework or unknown:
        raise NoProof("it takes more than tensors of tokens")

    def value() -> Tensor:
        """Return the loss."""
        return loss.run(inputs, {}, batch, None, (inputs["logp"],)).value

    return _differentiated(value, inputs, batch, scale)


def _shaped(adv: Tensor, shape: str) -> Tensor:
    """Return a copy of the advantages [B, T] in the shape that a loss takes: "B" is
    [B], "B1" is [B, 1], any other [B, T].
    """
    if shape == "B":
        return adv[:, 0].clone()
    return adv[:, :1].clone() if shape == "B1" else adv.clone()


def gradient_of_objective(
    objective: Objective, hp: dict[str, Any], batch: Rollouts, scale: Tensor
) -> list[Tensor]:
    """Return dJ/dlp of an objective on a batch of any size, as `gradient` does.

    Args:
        objective: the reference.
        hp: its hyperparameters.
        batch: with its counts.
        scale: the factor by which the loss is multiplied.
    """
    inputs = {"logp": batch.logp.clone()}
    if batch.entropy is not None:
        inputs["entropy"] = batch.entropy.clone()

    def value() -> Tensor:
        """Return the loss of the objective."""
        return -objective.J(
            inputs["logp"],
            batch.logp_old,
            batch.adv[:, :1] if objective.one_adv else batch.adv,
            batch.mask,
            None,
            batch.logp_ref,
            inputs.get("entropy"),
            batch.totals,
            lp_sampler=batch.logp_sampler,
            **hp,
        )

    return _differentiated(value, inputs, batch, scale)


def _differentiated(
    value: Callable[[], Tensor], inputs: dict[str, Any], batch: Rollouts, scale: Tensor
) -> list[Tensor]:
    """Return minus the gradient of a value, times the factor, by log-probabilities and,
    where the batch has them, by entropies: [B, T] each, 0 where it has none.
    """
    leaves = [inputs["logp"].requires_grad_()]
    if batch.entropy is not None and "entropy" in inputs:
        leaves.append(inputs["entropy"].requires_grad_())
    found = torch.autograd.grad(value() * scale, leaves, allow_unused=True)
    zero = torch.zeros_like(batch.logp)
    out = [zero if x is None else -x for x in found]
    if batch.entropy is not None and len(out) == 1:
        out.append(zero)
    return [x.detach() for x in out]


# ---- the comparison --------------------------------------------------------------------
Gradient = Callable[[Rollouts, Tensor], list[Tensor]]


def why_not(
    function: Gradient,
    reference: Gradient,
    per_response: bool,
    reads: frozenset[str],
) -> str:
    """Say why two functions are not proved equal on batches of every size; "" if they are.

    Args:
        function, reference: of a batch to gradients.
        per_response: an advantage is one of the row.
        reads: as of a Domain.
    """
    batch = Open.make(per_response, reads)
    try:
        found, expected = (_formulas(batch, f) for f in (function, reference))
        for formulas, of in ((found, function), (expected, reference)):
            _must_agree(batch, formulas, of, per_response)
        return _differ(batch, found, expected)
    except (NoProof, TooHard, InputError, Gone) as error:
        return str(error)
    except RecursionError:
        return "its formulas are too deep"


def _formulas(batch: Open, of: Gradient) -> list[int]:
    """Return the formula of each gradient of a function; raise NoProof where one
    formula does not stand for all tokens.
    """
    trace = Trace(batch.lifted.values, {}, lifted=batch.lifted)
    trace.sizes.tokens = ROWS * COLUMNS
    scale = torch.ones((), dtype=torch.float64)
    trace.introduce(scale, torch.tensor(batch.lifted.values.variable("scale", 0.0)))
    rollouts = batch.batch(trace)
    outputs: list[Tensor] = []
    with suppress(InputError, Gone), tracing(trace):
        outputs = of(rollouts, scale)
    if trace.stopped:
        raise NoProof(trace.stopped)
    if not outputs or trace.path or trace.sizes.bounds:
        raise NoProof("it branches")
    batch.lifted.accept(trace, "clone", outputs, outputs)
    return [int(trace.ids(x).reshape(-1)[0]) for x in outputs]


def _differ(batch: Open, found: list[int], expected: list[int]) -> str:
    """Say where two lists of formulas may differ; "" where they cannot."""
    v = batch.lifted.values
    questions = [_question(batch, ())]
    for x, y in zip(found, expected, strict=True):
        if v.special(x) or v.special(y):
            return "a gradient is infinite or not a number"
        questions += [_question(batch, c, (a, b)) for c, a, b in v.cases(x, y)]
    questions += [_question(batch, (v.negation(c),)) for c in v.obligations]
    model, *answers = ask(v, questions, SECONDS)
    if model.outcome != "point":
        return "the solver found no model of the assumptions"
    if any(answer.outcome != "impossible" for answer in answers):
        return "its formula for every size differs, or is undecided"
    return ""


def _question(
    batch: Open, conditions: tuple[int, ...], pair: tuple[int, ...] = ()
) -> Question:
    """Return a question under the assumption that no probability is above 1."""
    v = batch.lifted.values
    names = ("logp", "logp_old", "logp_ref", "logp_sampler")
    below = [v.greater(v.zero, batch.ids[n]) for n in names if n in batch.ids]
    return Question((*(c for c in below if c != v.one), *conditions), pair)


# ---- the formulas as numbers -----------------------------------------------------------
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "inverse": torch.reciprocal,
    "sqrt": torch.sqrt,
    "same": torch.clone,
    "erf": torch.erf,
}


def _must_agree(
    batch: Open, formulas: list[int], of: Gradient, per_response: bool
) -> None:
    """Raise NoProof unless formulas give the numbers of a function on real batches."""
    for seed, (rows, columns) in enumerate(SIZES_RUN):
        point = _point(rows, columns, seed, per_response)
        numbers = _Numbers(batch.lifted.values, point)
        fields = {name: numbers.of(value) for name, value in batch.ids.items()}
        fields = {name: x.expand(rows, columns).clone() for name, x in fields.items()}
        mask = fields.pop("mask") > 0
        rollouts = Rollouts.unchecked(mask=mask, totals=Totals.of(mask), **fields)
        found = of(rollouts, point["scale"])
        for x, value in zip(found, formulas, strict=True):
            y = numbers.of(value).expand(x.shape)
            gap = (x - y).abs().max().item()
            if not gap <= AGREES * max(1.0, y.abs().max().item()):
                raise NoProof("its numbers on larger batches differ from its formula's")


def _point(rows: int, columns: int, seed: int, per_response: bool) -> dict[str, Tensor]:
    """Return numbers for the variables of each token of a batch, [B, T]; `scale` is one
    number. Each row has a token that trains.
    """
    chance = torch.Generator().manual_seed(seed)

    def normal(width: int = columns) -> Tensor:
        return torch.randn(rows, width, generator=chance, dtype=torch.float64)

    inside = normal()  # a token trains where it is above 0
    inside[torch.arange(rows), torch.arange(rows) % columns] = 1.0
    r = (0.4 * normal()).exp()
    return {
        "m": inside,
        "r": r,
        "mu": 0.3 / r.clamp(min=1) * (-normal().abs()).exp(),
        "k": (0.3 * normal()).exp(),
        "rho": (0.3 * normal()).exp(),
        "A": normal(1).expand(rows, columns) if per_response else normal(),
        "H": normal().abs(),
        "scale": torch.tensor(1.5, dtype=torch.float64),
    }


@dataclass
class _Numbers:
    """The numbers of formulas on a batch."""

    values: Values
    point: dict[str, Tensor]
    known: dict[int, Tensor] = field(default_factory=dict)

    def of(self, value: int) -> Tensor:
        """Return the numbers of a formula, or the truth of a condition as 1 and 0."""
        have = self.known.get(value)
        if have is None:
            have = self.known[value] = self._of(value)
        return have

    def _of(self, value: int) -> Tensor:
        """Compute what `of` keeps; raise NoProof for a value that is infinite or NaN."""
        node = self.values.nodes[value]
        match node:
            case Compare():
                return (self.of(node.polynomial) > 0).double()
            case Branch():
                holds = self.of(node.comparison) > 0
                return torch.where(holds, self.of(node.yes), self.of(node.no))
            case Polynomial():
                total = torch.zeros(1, 1, dtype=torch.float64)
                for monomial, c in node.terms:
                    product = torch.full((1, 1), float(c), dtype=torch.float64)
                    for atom, e in monomial:
                        product = product * self._of_atom(atom) ** float(e)
                    total = total + product
                return total
        raise NoProof("a value is infinite or not a number")

    def _of_atom(self, atom: int) -> Tensor:
        """Return the numbers of an atom."""
        kind = self.values.atoms[atom]
        match kind:
            case Variable():
                return self.point[kind.name]
            case Logarithm():
                return self._of_atom(kind.of).log()
            case Choice():
                holds = self.of(kind.condition) > 0
                return torch.where(holds, self.of(kind.yes), self.of(kind.no))
            case Function(name=name):
                argument = self.of(kind.argument)
                if name in TOTALS:
                    shape = self.point["r"].shape
                    return argument.expand(shape).sum(TOTALS[::-1].index(name), True)
                return FUNCTIONS[name](argument)


__all__ = ["gradient", "gradient_of_objective", "why_not"]
