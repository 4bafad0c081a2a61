# SPDX-License-Identifier: Apache-2.0
"""One edit of an objective's own formula that makes it a wrong loss: what is searched
where the catalogue of known faults is silent.

An edit replaces one node: an operator, a constant, a stop-gradient, a policy, a mask, a
number format. Each candidate is the formula after one edit, compiled and differentiated.
`explain` compares it with the loss as it compares known faults, and names it where the
gradients are equal, also on batches that no search has seen.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from upref.aggregation import aggregate
from upref.definition import group_ids
from upref.errors import InputError
from upref.proof.solver import find_z3
from upref.rollouts import Rollouts
from upref.user_code import read
from upref.verify.factors import declared_aggregation
from upref.verify.faults.losses import LossFault, fault
from upref.verify.measure import LossCase
from upref.verify.proof import compare_few_losses
from upref.verify.synthesis.formula import INPUTS, Formula, formula_of, in_letters
from upref.verify.synthesis.rules import rules, wrapped

EDIT_ID = "edited-formula"
PROOF_SECONDS = 2.0  # that the proof of an edit may take
SHORT = 100  # characters of a part of a formula that is shown around an edit


@dataclass(frozen=True)
class Edit:
    """One node of a formula, and what takes its place.

    Attributes:
        formula: the formula.
        words: what the edit does.
        statement: the statement with the node.
        parent, field, index: where the node is; index is None where the field is one
            node.
        old: the node.
        node: what takes its place.
    """

    formula: Formula
    words: str
    statement: ast.Assign | ast.AugAssign | ast.Return
    parent: ast.AST
    field: str
    index: int | None
    old: ast.expr
    node: ast.expr

    def _put(self, node: ast.AST) -> None:
        """Put a node there."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the edit in the formula, in place, until the block ends."""
        self._put(self.node)
        try:
            yield
        finally:
            self._put(self.old)

    def compiled(self) -> Callable[..., Tensor]:
        """Compile the formula with the edit, and return it, as of `Formula.compiled`."""
        with self.made():
            return self.formula.compiled()

    def text(self) -> str:
        """Return the edit for a reader: what it does, what the formula then has, and
        what the objective has.
        """
        whole = self.statement.value
        assert whole is not None
        shown: ast.AST = whole
        # the place that is shown: the statement, or what is around the node
        if len(in_letters(whole)) > SHORT and isinstance(self.parent, ast.expr):
            shown = self.parent
        if shown is self.old or len(in_letters(shown)) > SHORT:
            before, after = in_letters(self.old), in_letters(self.node)
        else:
            before = in_letters(shown)
            with self.made():
                after = in_letters(shown)
        name = self.formula.objective.name
        return f"{self.words}: {after}, where {name} has {before}"

    def with_other_number(self, factor: float) -> "Edit | None":
        """Return the edit with another new number, or None where it is no number.

        Args:
            factor: on the number.
        """
        match self.node:
            case ast.Constant(value=float() as number):
                return replace(self, node=ast.Constant(number * factor))
        return None

    def fault(self, J: Callable[..., Tensor], case: LossCase, agg: str) -> LossFault:
        """Make the fault of this edit, without its words.

        Args:
            J: the formula with the edit.
            case: the loss and its objective.
            agg: the aggregation of the formula.
        """
        weigh = partial(weights_of, J, case, agg)
        return fault("", "term", id=EDIT_ID, weigh=weigh, whole=True)


def edits(formula: Formula, numbers: list[float]) -> Iterator[Edit]:
    """Yield the edits of a formula, the plainest first: rule by rule, and for each rule J
    first, then the functions that it calls.

    Args:
        formula: the formula.
        numbers: at which the loss was seen to change, tried for each constant.

    Yields:
        Each edit.
    """
    for rule, of_summands in rules(formula.hp, numbers):
        for tree in reversed(formula.functions.values()):
            for statement, parent, field, index, node in _nodes(tree):
                if of_summands and not _is_summand(statement, parent):
                    continue
                if rule is wrapped and _compares_two_formulas(parent):
                    continue
                for words, new in rule(node):
                    yield Edit(
                        formula, words, statement, parent, field, index, node, new
                    )


def _compares_two_formulas(parent: ast.AST) -> bool:
    """Return whether a node is compared with another formula, which has its unit: a
    function around one of them may make the comparison constant, whatever the fault.
    """
    if not isinstance(parent, ast.Compare):
        return False
    sides = (parent.left, *parent.comparators)
    return not any(isinstance(side, ast.Constant) for side in sides)


def _is_summand(statement: ast.stmt, parent: ast.AST) -> bool:
    """Return whether a node is all of its statement, or a part of a sum."""
    return parent is statement or (
        isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub)
    )


Place = tuple[
    ast.Assign | ast.AugAssign | ast.Return, ast.AST, str, int | None, ast.expr
]


def _nodes(tree: ast.FunctionDef) -> Iterator[Place]:
    """Yield each expression of a function with its statement and its place."""
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Assign | ast.AugAssign | ast.Return):
            continue
        stack: list[ast.AST] = [statement]
        while stack:
            parent = stack.pop()
            for field, value in ast.iter_fields(parent):
                if field in ("targets", "target", "slice", "keywords"):
                    continue
                if field == "func":
                    # x of x.expand_as(mask); the name of a function is no expression
                    if isinstance(value, ast.Attribute):
                        stack.append(value)
                    continue
                children = value if isinstance(value, list) else [value]
                for number, child in enumerate(children):
                    if not isinstance(child, ast.expr):
                        continue
                    stack.append(child)
                    index = number if isinstance(value, list) else None
                    yield statement, parent, field, index, child


def weights_of(
    J: Callable[..., Tensor], case: LossCase, agg: str, batch: Rollouts
) -> Tensor:
    """Differentiate a formula, and divide by the factors of the loss's own aggregation, as
    the weights of the loss are measured.

    Args:
        J: of INPUTS.
        case: the loss and its objective.
        agg: the aggregation of the formula.
        batch: the batch.

    Returns:
        The weights, [B, T].

    Raises:
        InputError: the formula cannot be computed.
    """
    mask = batch.mask
    lp = batch.logp.detach().clone().requires_grad_()
    old = batch.logp_old
    ref = old if batch.logp_ref is None else batch.logp_ref
    sampler = old if batch.logp_sampler is None else batch.logp_sampler
    entropy = torch.ones_like(old) if batch.entropy is None else batch.entropy
    adv = batch.adv.expand_as(mask)
    group = group_ids(mask, batch.group)
    given = (lp, old, adv, mask, ref, sampler, entropy, group)
    # an edit may put them into a function that does not take them
    J.__globals__.update(zip(INPUTS, given, strict=True))
    try:
        # an edit may leave a number alone, which has no gradient
        with np.errstate(all="ignore"):
            terms = torch.as_tensor(J(*given))
    except Exception as e:  # an edit may make anything
        raise InputError(f"the edited formula cannot be computed: {e}") from e
    factors = case.factors(batch, agg)
    # the factor stands inside: a term may move other tokens, and be rounded
    if terms.ndim == 1:
        # a product of ratios has no mean over its tokens
        is_product = case.objective.level == "sequence_product"
        lengths = 1 if is_product else mask.sum(-1)
        total = (factors[:, 0] * lengths * terms).sum()
    else:
        total = (factors * torch.where(mask, terms.expand_as(mask), 0)).sum()
    if not total.requires_grad:
        return torch.zeros_like(old)
    (gradient,) = torch.autograd.grad(total, lp)
    return torch.where(mask, gradient / case.factors(batch), 0)


def edited(case: LossCase, bounds: list[float]) -> Iterator[tuple[Edit, LossFault]]:
    """Yield each edit of the objective's formula, and its fault.

    Args:
        case: the loss and its objective.
        bounds: ratios at which the loss was seen to change.

    Yields:
        Each edit that compiles, with each aggregation that the formula may have.
    """
    formula = formula_of(case.objective, case.hp)
    if formula is None:
        return
    aggregations = dict.fromkeys((declared_aggregation(case.objective), case.agg))
    for edit in edits(formula, bounds):
        try:
            J = edit.compiled()
        except (SyntaxError, ValueError, TypeError):
            continue
        for agg in aggregations:
            yield edit, edit.fault(J, case, agg)


def comparison_for_every_value(case: LossCase, edit: Edit) -> str:
    """Compare a loss with an edited formula for every value, as a check compares it with
    its objective.

    Args:
        case: the loss and its objective.
        edit: the edit.

    Returns:
        "proved", "differs", or "" where nothing is proved.
    """
    objective = case.objective
    is_function = not (case.loss.calls_backward or case.loss.framework or case.single)
    if not find_z3() or not is_function or case.agg != declared_aggregation(objective):
        return ""
    J = edit.compiled()

    def edited_loss(
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        mask: Tensor,
        ref_log_prob: Tensor,
        rollout_log_probs: Tensor,
        entropy: Tensor,
    ) -> Tensor:
        """Return the loss of the objective with the edit, without groups."""
        policies = (ref_log_prob, rollout_log_probs)
        given = (log_prob, old_log_prob, advantages, mask, *policies, entropy, None)
        # an edit may put them into a function that does not take them
        J.__globals__.update(zip(INPUTS, given, strict=True))
        terms = J(*given)
        # one term per response counts for each of its tokens
        if terms.ndim == 1 and objective.agg != "seq-mean":
            terms = terms[:, None].expand_as(mask)
        return -aggregate(terms, mask, objective.agg, None)

    try:
        other = read(edited_loss, objective, {})
        found = compare_few_losses(case.loss, other, objective, PROOF_SECONDS)
    except InputError:  # it runs on no formulas
        return ""
    return found.status if found.status in ("proved", "differs") else ""
